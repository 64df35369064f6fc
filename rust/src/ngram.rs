//! N-gram (prompt lookup) proposals over one row's own tokens, from an index that is never rescanned: each committed
//! token costs one insertion a length, each proposal one lookup a length. After "prompt lookup decoding"
//! (Saxena, 2023). Knows nothing of rows, steps or acceptance.

/// Where n-grams of one length last ended. Open addressing; a slot is `tag << 32 | end`, 0 when empty.
#[derive(Clone, Debug, Default)]
struct Table {
    slots: Vec<u64>,
    used: usize,
}

/// A row's index. It follows the row's token list, which only ever grows.
#[derive(Clone, Debug)]
pub struct NgramIndex {
    shortest: usize,
    tables: Vec<Table>,
    /// All n-grams that end at or before this token count are in the tables.
    indexed: usize,
}

impl NgramIndex {
    /// An empty index of the lengths `shortest..=longest`.
    #[must_use]
    pub fn new(shortest: usize, longest: usize) -> Self {
        Self { shortest, tables: vec![Table::default(); longest - shortest + 1], indexed: 0 }
    }

    /// Appends to `out` the `k` tokens that followed the most recent earlier occurrence of the last n tokens, the
    /// longest n with a match first. Where that occurrence runs into the end of `tokens`, the proposal goes on from
    /// its own start, which continues a repetition. Returns how many tokens were proposed: `k`, or 0 without a match.
    pub fn propose(&mut self, tokens: &[i32], k: usize, out: &mut Vec<i32>) -> usize {
        self.catch_up(tokens);
        if k == 0 {
            return 0;
        }
        let len = tokens.len();
        for (i, table) in self.tables.iter().enumerate().rev() {
            let n = self.shortest + i;
            if len <= n {
                continue;
            }
            if let Some(end) = table.find(tokens, &tokens[len - n..]) {
                let first = out.len();
                let direct = k.min(len - end);
                out.extend_from_slice(&tokens[end..end + direct]);
                for j in direct..k {
                    out.push(out[first + j - direct]);
                }
                return k;
            }
        }
        0
    }

    /// Indexes n-grams that end before the last token: the ones with a continuation.
    fn catch_up(&mut self, tokens: &[i32]) {
        let last = tokens.len().saturating_sub(1);
        for end in self.indexed + 1..=last {
            for (i, table) in self.tables.iter_mut().enumerate() {
                let n = self.shortest + i;
                if end >= n {
                    table.insert(tokens, end, n);
                }
            }
        }
        self.indexed = self.indexed.max(last);
    }
}

impl Table {
    fn home(&self, tag: u32) -> usize {
        (tag >> (32 - self.slots.len().trailing_zeros())) as usize
    }

    fn insert(&mut self, tokens: &[i32], end: usize, n: usize) {
        if 2 * (self.used + 1) > self.slots.len() {
            self.grow();
        }
        let gram = &tokens[end - n..end];
        let tag = tag(gram);
        let mask = self.slots.len() - 1;
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                self.used += 1;
                break;
            }
            let earlier = slot as u32 as usize;
            if (slot >> 32) as u32 == tag && tokens[earlier - n..earlier] == *gram {
                break;
            }
            at = (at + 1) & mask;
        }
        self.slots[at] = u64::from(tag) << 32 | end as u64;
    }

    fn find(&self, tokens: &[i32], gram: &[i32]) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let tag = tag(gram);
        let mask = self.slots.len() - 1;
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            let end = slot as u32 as usize;
            if (slot >> 32) as u32 == tag && tokens[end - gram.len()..end] == *gram {
                return Some(end);
            }
            at = (at + 1) & mask;
        }
    }

    fn grow(&mut self) {
        let size = (2 * self.slots.len()).max(64);
        let old = std::mem::replace(&mut self.slots, vec![0; size]);
        for slot in old.into_iter().filter(|&slot| slot != 0) {
            let mut at = self.home((slot >> 32) as u32);
            while self.slots[at] != 0 {
                at = (at + 1) & (size - 1);
            }
            self.slots[at] = slot;
        }
    }
}

fn tag(gram: &[i32]) -> u32 {
    let mut hash = 0x9e37_79b9_7f4a_7c15_u64;
    for &token in gram {
        hash = (hash ^ u64::from(token.cast_unsigned())).wrapping_mul(0xd6e8_feb8_6659_fd93);
        hash ^= hash >> 32;
    }
    (hash.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32) as u32
}

/// The proposal after `tokens`, with an index made for this one call.
#[must_use]
pub fn find_ngram(tokens: &[i32], k: usize, shortest: usize, longest: usize) -> Vec<i32> {
    let mut out = Vec::new();
    NgramIndex::new(shortest, longest).propose(tokens, k, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, by scanning.
    fn scan(tokens: &[i32], k: usize, shortest: usize, longest: usize) -> Vec<i32> {
        for n in (shortest..=longest).rev() {
            for end in (n..tokens.len()).rev() {
                if tokens.len() >= n && tokens[end - n..end] == tokens[tokens.len() - n..] {
                    let mut all = tokens.to_vec();
                    for j in 0..k {
                        all.push(all[end + j]);
                    }
                    return all[tokens.len()..].to_vec();
                }
            }
        }
        Vec::new()
    }

    #[test]
    fn longest_match_wins_then_the_most_recent() {
        assert_eq!(find_ngram(&[1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 2, 3), [9, 2]);
        assert_eq!(find_ngram(&[1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 2, 2), [8, 1]);
        assert_eq!(find_ngram(&[1, 2, 3], 4, 2, 4), [0; 0]);
        assert_eq!(find_ngram(&[], 4, 1, 4), [0; 0]);
    }

    #[test]
    fn a_repetition_is_continued() {
        assert_eq!(find_ngram(&[5, 5, 5], 4, 2, 4), [5, 5, 5, 5]);
        assert_eq!(find_ngram(&[7, 1, 2, 1, 2, 1], 5, 2, 4), [2, 1, 2, 1, 2]);
    }

    proptest! {
        #[test]
        fn the_index_equals_a_scan(
            tokens in prop::collection::vec(0..4i32, 0..200),
            k in 1..6usize, shortest in 1..3usize, more in 0..3usize, stride in 1..5usize,
        ) {
            let mut index = NgramIndex::new(shortest, shortest + more);
            for len in (0..=tokens.len()).step_by(stride) {
                let mut out = Vec::new();
                index.propose(&tokens[..len], k, &mut out);
                prop_assert_eq!(out, scan(&tokens[..len], k, shortest, shortest + more));
            }
        }
    }
}
