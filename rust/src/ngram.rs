//! N-gram (prompt lookup) proposals over one row's own tokens, from an index that is never rescanned. After "prompt
//! lookup decoding" (Saxena, 2023). Knows nothing of rows, steps or acceptance.
//!
//! The index is a cascade of tables, one a length. A table holds, for each n-gram, the last place it ended among the
//! places it was given. The shortest length is given every place; each longer one only the places that were displaced
//! from the table before it. So a token whose n-gram is new costs one insertion, however many lengths there are, and
//! still the most recent occurrence of an n-gram stands in its own table or in one of the shorter.

/// So many new places are indexed at once. Until then they are looked through one by one: they are in the cache, as the
/// tables of many rows are not, and where text repeats itself the match is mostly among them.
const BATCH: usize = 16;

/// One length. Open addressing; a slot is a tag in the high bits and the place (an end, so never 0) in the low bits.
/// Its size follows the n-grams that differ, not the places: that of repetitive text stays in the cache.
#[derive(Clone, Debug)]
struct Table {
    n: usize,
    slots: Vec<u32>,
    used: usize,
    /// Bits of a slot that hold the place; the tag has the others.
    place_mask: u32,
}

/// A row's index. It follows the row's token list, which only ever grows.
#[derive(Clone, Debug)]
pub struct NgramIndex {
    /// Shortest length first.
    tables: Vec<Table>,
    /// Every place up to this token count is indexed; those behind it are looked through.
    indexed: usize,
}

impl NgramIndex {
    /// An empty index of the lengths `shortest..=longest`.
    #[must_use]
    pub fn new(shortest: usize, longest: usize) -> Self {
        let table = |n| Table { n, slots: Vec::new(), used: 0, place_mask: 0 };
        Self { tables: (shortest..=longest).map(table).collect(), indexed: 0 }
    }

    /// Appends to `out` the `k` tokens that followed the most recent earlier occurrence of the last n tokens, the
    /// longest n with a match first. Where that occurrence runs into the end of `tokens`, the proposal goes on from
    /// its own start, which continues a repetition. Returns how many tokens were proposed: `k`, or 0 without a match.
    pub fn propose(&mut self, tokens: &[i32], k: usize, out: &mut Vec<i32>) -> usize {
        let Some(end) = self.place(tokens).filter(|_| k > 0) else {
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
        if tokens.len() > self.indexed + BATCH {
            self.catch_up(tokens);
        }
        self.find(tokens)
    }

    /// Reads the slot where the next look-up begins and returns it. The look-up cannot go on before it has that slot, and
    /// nor can that of the next row; reads for many rows, made beforehand, wait for memory side by side.
    #[inline]
    #[must_use]
    pub fn touch(&self, tokens: &[i32]) -> u32 {
        match self.tables.first() {
            Some(table) if !table.slots.is_empty() && table.n <= tokens.len() => {
                table.slots[table.home(Gram::EMPTY.lengthen(tokens, tokens.len(), table.n)).0]
            }
            _ => 0,
        }
    }

    /// Where the longest, then most recent, earlier occurrence of the last tokens ended.
    fn find(&self, tokens: &[i32]) -> Option<usize> {
        let longest = self.tables.last()?.n;
        let shortest = self.tables.first()?.n;
        let mut best: Option<(usize, usize)> = None;
        for end in (self.indexed + 1..tokens.len()).rev() {
            let matched = common_suffix(&tokens[..end], tokens, longest);
            if matched == longest {
                return Some(end);
            }
            if matched >= shortest && best.is_none_or(|(most, _)| matched > most) {
                best = Some((matched, end));
            }
        }
        let mut gram = Gram::EMPTY;
        for table in &self.tables {
            // A place that is in no shorter table was displaced from one, so this length was seen there at least.
            if table.n > tokens.len() || table.slots.is_empty() {
                break;
            }
            gram = gram.lengthen(tokens, tokens.len(), table.n);
            let Ok((_, end)) = table.search(tokens, tokens.len(), gram) else {
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
            let (mut place, mut gram) = (place, Gram::EMPTY);
            for table in &mut self.tables {
                if place < table.n {
                    break;
                }
                // A displaced place ends the same n-gram: only what stands before it may differ.
                gram = gram.lengthen(tokens, place, table.n);
                match table.insert(tokens, place, gram) {
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
    /// Where the search for an n-gram begins, and the tag it carries.
    #[inline]
    fn home(&self, gram: Gram) -> (usize, u32) {
        let hash = gram.hash as u32;
        (hash as usize & (self.slots.len() - 1), hash & !self.place_mask)
    }

    /// Stores `place`, which ends `gram`; returns the earlier place of the same n-gram that it displaces.
    #[inline]
    fn insert(&mut self, tokens: &[i32], place: usize, gram: Gram) -> Option<usize> {
        if place > self.place_mask as usize || 2 * self.used >= self.slots.len() {
            self.grow(tokens, place);
        }
        match self.search(tokens, place, gram) {
            Ok((at, earlier)) => {
                self.slots[at] = self.slots[at] & !self.place_mask | place as u32;
                Some(earlier)
            }
            Err((at, tag)) => {
                self.slots[at] = tag | place as u32;
                self.used += 1;
                None
            }
        }
    }

    /// The slot and place of the n-gram that ends at `end`, or the empty slot and the tag it would get.
    #[inline]
    fn search(&self, tokens: &[i32], end: usize, gram: Gram) -> Result<(usize, usize), (usize, u32)> {
        let mask = self.place_mask;
        let (mut at, tag) = self.home(gram);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return Err((at, tag));
            }
            let place = (slot & mask) as usize;
            if slot & !mask == tag && common_suffix(&tokens[..place], &tokens[..end], self.n) == self.n {
                return Ok((at, place));
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// Makes room for more entries, and for places up to `place`.
    #[cold]
    fn grow(&mut self, tokens: &[i32], place: usize) {
        let old_mask = self.place_mask;
        if place > old_mask as usize {
            self.place_mask = (2 * place as u32).next_power_of_two().max(1024) - 1;
        }
        let size = (4 * self.used).next_power_of_two().max(32);
        let old = std::mem::replace(&mut self.slots, vec![0; size]);
        for slot in old.into_iter().filter(|&slot| slot != 0) {
            let place = (slot & old_mask) as usize;
            if let Err((at, tag)) = self.search(tokens, place, Gram::EMPTY.lengthen(tokens, place, self.n)) {
                self.slots[at] = tag | place as u32;
            }
        }
    }
}

/// Hash of an n-gram, made from its last token to its first: that of a longer one goes on from it.
#[derive(Clone, Copy)]
struct Gram {
    n: usize,
    hash: u64,
}

impl Gram {
    const EMPTY: Self = Self { n: 0, hash: 0x9e37_79b9_7f4a_7c15 };

    /// That of the `n` tokens before `end`, the last of which it holds already.
    #[inline]
    fn lengthen(mut self, tokens: &[i32], end: usize, n: usize) -> Self {
        while self.n < n {
            self.n += 1;
            let token = tokens[end - self.n].cast_unsigned();
            self.hash = (self.hash ^ u64::from(token)).wrapping_mul(0xd6e8_feb8_6659_fd93);
            self.hash ^= self.hash >> 32;
        }
        self
    }
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

    #[test]
    fn a_long_row_equals_a_scan() {
        // Long enough for places to outgrow their bits twice, with few n-grams that differ and with many.
        for words in [2, 60] {
            let mut state = 1_u64;
            let tokens: Vec<i32> = (0..5000)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    ((state >> 33) % words) as i32
                })
                .collect();
            let mut index = NgramIndex::new(2, 12);
            for len in (0..=tokens.len()).step_by(37) {
                let mut out = Vec::new();
                index.propose(&tokens[..len], 3, &mut out);
                assert_eq!(out, scan(&tokens[..len], 3, 2, 12), "{words} words, {len} tokens");
            }
        }
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
