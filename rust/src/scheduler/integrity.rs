//! The invariants, checked from scratch. Cheap enough for every test and for the end of every shard.

use std::collections::HashSet;

use super::Scheduler;
use crate::block_pool::{PageId, Tenant};
use crate::error::{Error, Result};
use crate::sequence::{Handle, Sequence, SequenceStatus};

impl Scheduler {
    /// Checks that free + owned + cached pages = all, that no page is owned twice unless shared, that computed tokens
    /// lie inside the block tables, and that every row stands in exactly one list.
    ///
    /// # Errors
    /// `Error::Integrity` that says what is wrong.
    pub fn check_integrity(&self) -> Result<()> {
        let tables = self.rows.iter().flat_map(|(_, sequence)| {
            let target: &[PageId] = &sequence.pages;
            [(Tenant::Target, target), (Tenant::Draft, &sequence.draft.pages)]
        });
        self.pool.check_integrity(tables)?;
        let waiting: HashSet<Handle> = self.queue.iter().collect();
        let running: HashSet<Handle> = self.running.iter().copied().collect();
        let finished: HashSet<Handle> = self.finished.iter().copied().collect();
        for (name, set, len) in [
            ("waiting", &waiting, self.queue.len()),
            ("running", &running, self.running.len()),
            ("finished", &finished, self.finished.len()),
        ] {
            if set.len() != len {
                return Err(Error::Integrity(format!("{len} {name} entries name {} rows", set.len())));
            }
        }
        for (handle, sequence) in self.rows.iter() {
            let list = match sequence.status {
                SequenceStatus::Waiting => &waiting,
                SequenceStatus::Finished => &finished,
                _ => &running,
            };
            let lists = [&waiting, &running, &finished].iter().filter(|set| set.contains(&handle)).count();
            if !list.contains(&handle) || lists != 1 {
                let status = sequence.status;
                return Err(Error::Integrity(format!("row {handle} is {status:?} but stands in {lists} lists")));
            }
            self.check_row_integrity(sequence)
                .map_err(|what| Error::Integrity(format!("row {handle} ({:?}): {what}", sequence.status)))?;
        }
        let is_prefilling = |handle: &&Handle| self.rows[**handle].status == SequenceStatus::Prefilling;
        let prefilling = self.running.iter().filter(is_prefilling).count();
        if prefilling != self.num_prefilling {
            let counted = self.num_prefilling;
            return Err(Error::Integrity(format!("{prefilling} rows are in prefill; {counted} are counted")));
        }
        if self.running.len() > self.max_num_seqs {
            let (running, most) = (self.running.len(), self.max_num_seqs);
            return Err(Error::Integrity(format!("{running} rows run; expected at most {most}")));
        }
        Ok(())
    }

    fn check_row_integrity(&self, sequence: &Sequence) -> std::result::Result<(), String> {
        let check = |ok: bool, what: String| if ok { Ok(()) } else { Err(what) };
        let (computed, committed) = (sequence.num_computed, sequence.num_committed());
        let room = sequence.pages.len() * self.config.block_size;
        check(computed <= room, format!("{computed} computed tokens in {room} slots"))?;
        let draft = &sequence.draft;
        let room = draft.pages.len() * self.config.draft_block_size;
        check(draft.computed <= room, format!("{} tokens seen by the draft in {room} slots", draft.computed))?;
        match sequence.status {
            SequenceStatus::Waiting | SequenceStatus::Finished => {
                let pages = sequence.pages.len() + draft.pages.len();
                check(pages == 0, format!("owns {pages} pages"))?;
                check(sequence.residency == 0, "still has a residency".into())
            }
            SequenceStatus::Prefilling => {
                check(computed < committed, format!("{computed} of {committed} tokens computed"))?;
                let pages = self.config.target_pages(committed);
                check(sequence.pages.len() >= pages, format!("{} of {pages} pages", sequence.pages.len()))
            }
            SequenceStatus::Decoding => {
                check(computed + 1 == committed, format!("{computed} of {committed} tokens computed"))?;
                check(draft.computed < committed, format!("draft saw {} of {committed} tokens", draft.computed))
            }
        }
    }
}
