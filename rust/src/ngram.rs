//! N-gram (prompt lookup) proposals over one row's own tokens, from an index that is never rescanned. After "prompt
//! lookup decoding" (Saxena, 2023). Knows nothing of rows, steps or acceptance.
//!
//! The index is a cascade of tables, one a length. A table holds, for each n-gram, the last place it ended among the
//! places it was given. The shortest length is given every place; each longer one only the places that were displaced
//! from the table before it. So a token whose n-gram is new costs one insertion, however many lengths there are, and
//! still the most recent occurrence of an n-gram stands in its own table or in one of the shorter.

/// One length. Open addressing; a slot is a tag in the high bits and the place (an end, so never 0) in the low bits.
/// A table of 2^b slots holds places below 2^b, which leaves 32 - b bits for the tag.
#[derive(Clone, Debug)]
struct Table {
    n: usize,
    slots: Vec<u32>,
    used: usize,
}

/// A row's index. It follows the row's token list, which only ever grows.
#[derive(Clone, Debug)]
pub struct NgramIndex {
    /// Shortest length first.
    tables: Vec<Table>,
    /// Every place up to this token count is indexed.
    indexed: usize,
}

impl NgramIndex {
    /// An empty index of the lengths `shortest..=longest`.
    #[must_use]
    pub fn new(shortest: usize, longest: usize) -> Self {
        let table = |n| Table { n, slots: Vec::new(), used: 0 };
        Self { tables: (shortest..=longest).map(table).collect(), indexed: 0 }
    }

    /// Appends to `out` the `k` tokens that followed the most recent earlier occurrence of the last n tokens, the
    /// longest n with a match first. Where that occurrence runs into the end of `tokens`, the proposal goes on from
    /// its own start, which continues a repetition. Returns how many tokens were proposed: `k`, or 0 without a match.
    pub fn propose(&mut self, tokens: &[i32], k: usize, out: &mut Vec<i32>) -> usize {
        self.catch_up(tokens);
        let Some(end) = self.find(tokens).filter(|_| k > 0) else {
            return 0;
        };
        let first = out.len();
        let direct = k.min(tokens.len() - end);
        out.extend_from_slice(&tokens[end..end + direct]);
        for j in 0..k - direct {
            out.push(out[first + j]);
        }
        k
    }

    /// Where the tokens that `propose` would propose begin: the end of the occurrence it goes on from.
    pub fn place(&mut self, tokens: &[i32]) -> Option<usize> {
        self.catch_up(tokens);
        self.find(tokens)
    }

    /// Where the longest, then most recent, earlier occurrence of the last tokens ended.
    fn find(&self, tokens: &[i32]) -> Option<usize> {
        let longest = self.tables.last()?.n;
        let mut best: Option<(usize, usize)> = None;
        for table in &self.tables {
            // A place that is in no shorter table was displaced from one, so this length was seen there at least.
            let Some(end) = tokens.len().checked_sub(table.n).and_then(|start| table.find(tokens, &tokens[start..]))
            else {
                break;
            };
            let matched = common_suffix(&tokens[..end], tokens, longest);
            best = best.max(Some((matched, end)));
            if matched == longest {
                break;
            }
        }
        best.map(|(_, end)| end)
    }

    /// Indexes places before the last token: the ones with a continuation.
    fn catch_up(&mut self, tokens: &[i32]) {
        let last = tokens.len().saturating_sub(1);
        for place in self.indexed + 1..=last {
            let mut place = place;
            for table in &mut self.tables {
                if place < table.n {
                    break;
                }
                match table.insert(tokens, place) {
                    Some(displaced) => place = displaced,
                    None => break,
                }
            }
        }
        self.indexed = self.indexed.max(last);
    }
}

/// Length of the longest common suffix, at most `most`.
fn common_suffix(a: &[i32], b: &[i32], most: usize) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(most).take_while(|(x, y)| x == y).count()
}

impl Table {
    /// Low bits of a slot: the place.
    fn place_mask(&self) -> u32 {
        self.slots.len() as u32 - 1
    }

    /// Where the search for `hash` begins, and the tag it carries.
    fn home(&self, hash: u32) -> (usize, u32) {
        let mask = self.place_mask();
        ((hash & mask) as usize, hash & !mask)
    }

    /// Stores `place`; returns the earlier place of the same n-gram that it displaces.
    fn insert(&mut self, tokens: &[i32], place: usize) -> Option<usize> {
        if self.slots.len() <= place || 2 * self.used >= self.slots.len() {
            self.grow(tokens, place);
        }
        let gram = &tokens[place - self.n..place];
        match self.search(tokens, gram) {
            Ok((at, earlier)) => {
                self.slots[at] = self.slots[at] & !self.place_mask() | place as u32;
                Some(earlier)
            }
            Err((at, tag)) => {
                self.slots[at] = tag | place as u32;
                self.used += 1;
                None
            }
        }
    }

    fn find(&self, tokens: &[i32], gram: &[i32]) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        self.search(tokens, gram).ok().map(|(_, place)| place)
    }

    /// The slot and place of an n-gram, or the empty slot and the tag it would get.
    fn search(&self, tokens: &[i32], gram: &[i32]) -> Result<(usize, usize), (usize, u32)> {
        let mask = self.place_mask();
        let (mut at, tag) = self.home(hash(gram));
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return Err((at, tag));
            }
            let place = (slot & mask) as usize;
            if slot & !mask == tag && tokens[place - self.n..place] == *gram {
                return Ok((at, place));
            }
            at = (at + 1) & mask as usize;
        }
    }

    /// Makes room for more entries, and for places up to `place`.
    fn grow(&mut self, tokens: &[i32], place: usize) {
        let old_mask = self.slots.len().wrapping_sub(1) as u32;
        let size = (4 * self.used).max(place + 1).max(64).next_power_of_two();
        let old = std::mem::replace(&mut self.slots, vec![0; size]);
        for slot in old.into_iter().filter(|&slot| slot != 0) {
            let place = (slot & old_mask) as usize;
            if let Err((at, tag)) = self.search(tokens, &tokens[place - self.n..place]) {
                self.slots[at] = tag | place as u32;
            }
        }
    }
}

fn hash(gram: &[i32]) -> u32 {
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
