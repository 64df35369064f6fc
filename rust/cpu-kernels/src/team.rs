//! Threads that share out the chunks of one loop after another. The caller always works too and never waits for a thread
//! that has not begun a chunk, so a busy neighbour costs the chunks it delays and nothing more (a barrier over all threads
//! would cost a scheduler's time slice a loop). Knows nothing of what a chunk does.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// How long an idle thread looks for the next loop before it sleeps: longer than the pauses between a step's loops,
/// shorter than those between steps.
const SPINS: u32 = 4_000;

type Chunk<'a> = &'a (dyn Fn(usize) + Sync);

struct Shared {
    /// Chunks of the current loop in the high half, the next unclaimed one in the low half.
    state: AtomicU64,
    /// Chunks of the current loop that are finished.
    done: AtomicU32,
    /// The current loop's `Chunk`, on its caller's stack. NOTE: read only after a chunk was claimed: the loop then cannot
    /// end, and no other begin, before that chunk is done.
    chunk: AtomicPtr<Chunk<'static>>,
    sleeping: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

/// `size - 1` threads and the caller.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// One loop at a time.
    leader: Mutex<()>,
}

impl Team {
    /// # Panics
    /// When the system gives no more threads.
    #[must_use]
    pub fn new(size: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            done: AtomicU32::new(0),
            chunk: AtomicPtr::new(std::ptr::null_mut()),
            sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let threads = (1..size.max(1))
            .map(|index| {
                let shared = Arc::clone(&shared);
                let thread = std::thread::Builder::new().name(format!("specbatch-{index}"));
                thread.spawn(move || shared.work()).expect("a thread")
            })
            .collect();
        Self { shared, threads, leader: Mutex::new(()) }
    }

    #[must_use]
    pub fn size(&self) -> usize {
        self.threads.len() + 1
    }

    /// Call `chunk` with 0..`count`, each once, on whichever thread is free; returns when all are done.
    ///
    /// # Panics
    /// When a chunk does.
    pub fn run(&self, count: usize, chunk: Chunk<'_>) {
        if count < 2 || self.threads.is_empty() {
            return (0..count).for_each(chunk);
        }
        let leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        let mut chunk = chunk;
        shared.done.store(0, Ordering::Relaxed);
        shared.chunk.store((&raw mut chunk).cast(), Ordering::Relaxed);
        shared.state.store((count as u64) << 32, Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            drop(shared.lock.lock());
            shared.wake.notify_all();
        }
        while let Some(index) = shared.claim() {
            shared.call(index);
        }
        let mut spins = 0;
        while shared.done.load(Ordering::Acquire) < count as u32 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        drop(leader);
        if panicked {
            resume_unwind(Box::new("a chunk of a parallel loop panicked"));
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock());
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn has_work(&self) -> bool {
        let state = self.state.load(Ordering::SeqCst);
        (state & 0xFFFF_FFFF) < state >> 32
    }

    fn claim(&self) -> Option<usize> {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            let next = state & 0xFFFF_FFFF;
            if next >= state >> 32 {
                return None;
            }
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(next as usize),
                Err(now) => state = now,
            }
        }
    }

    /// Only with a claimed index.
    fn call(&self, index: usize) {
        // SAFETY: the index is claimed and not yet done, so `run` has not returned and its `chunk` lives.
        let chunk = unsafe { *self.chunk.load(Ordering::Relaxed) };
        if catch_unwind(AssertUnwindSafe(|| chunk(index))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.done.fetch_add(1, Ordering::Release);
    }

    fn work(&self) {
        let mut idle = 0;
        loop {
            if let Some(index) = self.claim() {
                self.call(index);
                idle = 0;
            } else if idle < SPINS {
                idle += 1;
                std::hint::spin_loop();
            } else {
                idle = 0;
                let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
                self.sleeping.fetch_add(1, Ordering::SeqCst);
                while !self.has_work() && !self.stop.load(Ordering::SeqCst) {
                    guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleeping.fetch_sub(1, Ordering::SeqCst);
            }
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_once_over_many_loops() {
        for size in [1, 2, 5] {
            let team = Team::new(size);
            assert_eq!(team.size(), size);
            for count in (0..40).chain([1000]) {
                let hits: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
                team.run(count, &|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sleeping_threads_wake() {
        let team = Team::new(3);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let sum = AtomicU32::new(0);
            team.run(100, &|i| {
                sum.fetch_add(i as u32, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(2);
        let failed = catch_unwind(AssertUnwindSafe(|| team.run(8, &|i| assert!(i != 3, "three"))));
        assert!(failed.is_err());
        let sum = AtomicU32::new(0);
        team.run(8, &|i| {
            sum.fetch_add(i as u32, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }
}
