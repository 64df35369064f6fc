//! Which keys each lane of a group of sixteen queries may see: causal or by a tree's mask, within a window. Knows the
//! task that the lanes come from, and nothing of how scores are made.

use std::arch::x86_64::*;

use crate::attention::Stored;
use crate::attention_avx512::{LANES, Line};
use crate::attention_task::Task;

/// What each lane of a group may see.
pub struct Sight {
    /// Last context index (causal), or the own tokens as bits (tree: low and high half).
    last: __m512i,
    own: [__m512i; 2],
    /// Positions above this only.
    above: __m512i,
    /// The least `last`, and the greatest `above`, of all lanes; and the greatest `last`.
    all_to: i32,
    all_above: i32,
    any_to: i32,
}

impl Sight {
    /// For lanes whose queries are those of `pairs`.
    #[target_feature(enable = "avx512f")]
    pub fn new<E: Stored>(task: &Task<'_, E>, pairs: &[usize; LANES]) -> Self {
        let (mut last, mut low, mut high, mut above) = ([0i32; LANES], [0i32; LANES], [0i32; LANES], [0i32; LANES]);
        for (lane, &pair) in pairs.iter().enumerate() {
            let token = task.token(pair);
            let index = task.index(token);
            last[lane] = index as i32;
            let mut position = index as i32;
            if let Some(ancestors) = task.rows.ancestors {
                (low[lane], high[lane]) = (ancestors[token] as i32, (ancestors[token] >> 32) as i32);
                position = task.position_of(token, index);
            }
            above[lane] = task.options.window.map_or(i32::MIN, |w| position.saturating_sub(w));
        }
        let load = |v: &[i32; LANES]| unsafe { _mm512_loadu_si512(v.as_ptr().cast()) };
        Sight {
            last: load(&last),
            own: [load(&low), load(&high)],
            above: load(&above),
            all_to: *last.iter().min().unwrap_or(&0),
            all_above: *above.iter().max().unwrap_or(&0),
            any_to: if task.rows.ancestors.is_some() { i32::MAX } else { *last.iter().max().unwrap_or(&0) },
        }
    }

    /// Whether no lane sees any of the block.
    pub fn nothing(&self, at: usize) -> bool {
        at as i64 > i64::from(self.any_to)
    }

    /// Whether some lane does not see some key of `at..at + n`.
    pub fn partly<E: Stored>(&self, at: usize, n: usize, seen: (usize, usize), task: &Task<'_, E>) -> bool {
        let to = if task.rows.ancestors.is_some() { task.context() as i64 - 1 } else { i64::from(self.all_to) };
        at < seen.0 || at + n > seen.1 || (at + n) as i64 - 1 > to || at as i64 <= i64::from(self.all_above)
    }

    /// Put scores of what a lane does not see to minus infinity.
    ///
    /// # Safety
    /// AVX-512; `scores` holds `n` lines.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn hide<E: Stored>(
        &self,
        at: usize,
        n: usize,
        seen: (usize, usize),
        task: &Task<'_, E>,
        scores: *mut Line,
    ) {
        let context = task.context();
        // Without window or tree all lanes see what the least of them sees.
        let plain = task.rows.ancestors.is_none() && self.all_above == i32::MIN && at >= seen.0;
        let from = if plain { (i64::from(self.all_to) + 1 - at as i64).clamp(0, n as i64) as usize } else { 0 };
        for j in from.min(seen.1.saturating_sub(at))..n {
            let key = at + j;
            let visible = if key < seen.0 || key >= seen.1 {
                0
            } else if task.rows.ancestors.is_none() {
                let key = _mm512_set1_epi32(key as i32);
                _mm512_cmple_epi32_mask(key, self.last) & _mm512_cmpgt_epi32_mask(key, self.above)
            } else {
                let own = match key.checked_sub(context) {
                    None => !0,
                    Some(own) if own < 64 => {
                        _mm512_test_epi32_mask(self.own[own / 32], _mm512_set1_epi32(1 << (own % 32)))
                    }
                    Some(_) => 0,
                };
                own & _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(task.position(key)), self.above)
            };
            // SAFETY: `scores` holds `n` lines.
            unsafe {
                let at = scores.add(j).cast::<f32>();
                _mm512_store_ps(at, _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), visible, _mm512_load_ps(at)));
            }
        }
    }
}
