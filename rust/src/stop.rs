//! When a row ends: EOS and stop tokens by id, stop strings by the bytes of its output tokens. One token at a time, so
//! a row ends at the same token whether its tokens come one by one or several a step.

use crate::error::{Result, ensure};

/// Bytes of every vocabulary entry. Ids past the table, and special tokens, have none.
#[derive(Clone, Debug)]
pub struct TokenBytes {
    values: Vec<u8>,
    offsets: Vec<i64>,
}

impl TokenBytes {
    /// A table from values and offsets (one more than entries).
    ///
    /// # Errors
    /// `Error::Argument` unless the offsets start at 0, never fall, and end at the number of bytes.
    pub fn new(values: Vec<u8>, offsets: Vec<i64>) -> Result<Self> {
        check_offsets("offsets", &offsets, values.len())?;
        Ok(Self { values, offsets })
    }

    /// Bytes of a token.
    #[must_use]
    pub fn get(&self, token: i32) -> &[u8] {
        let id = token as usize;
        match (self.offsets.get(id), self.offsets.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.values[start as usize..end as usize],
            _ => &[],
        }
    }
}

/// Checks a values-and-offsets pair by its offsets.
pub(crate) fn check_offsets(name: &str, offsets: &[i64], values: usize) -> Result<()> {
    ensure(offsets.first() == Some(&0), || format!("{name}: expected a first offset of 0, got {:?}", offsets.first()))?;
    ensure(offsets.last() == Some(&(values as i64)), || {
        format!("{name}: expected a last offset of {values}, got {:?}", offsets.last())
    })?;
    ensure(offsets.is_sorted(), || format!("{name}: expected offsets that never fall"))
}

/// What ended a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// The token itself; its bytes are not part of the text.
    Token(i32),
    /// A stop string that starts at this byte of the text; the text is cut there.
    Text(usize),
}

/// As `contains`, which is made for long slices.
#[inline]
pub(crate) fn is_any(token: i32, ids: &[i32]) -> bool {
    for &id in ids {
        if id == token {
            return true;
        }
    }
    false
}

/// One row's stop conditions and the output bytes they have seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopConditions {
    /// No condition holds before the row has this many output tokens.
    pub min_tokens: usize,
    /// EOS is an ordinary token.
    pub ignore_eos: bool,
    /// Further ids that end the row.
    pub tokens: Box<[i32]>,
    /// Byte strings that end the row.
    pub strings: Box<[Box<[u8]>]>,
    text: Vec<u8>,
}

impl StopConditions {
    /// Conditions of a row without output.
    #[must_use]
    pub fn new(min_tokens: usize, ignore_eos: bool, tokens: Box<[i32]>, strings: Box<[Box<[u8]>]>) -> Self {
        Self { min_tokens, ignore_eos, tokens, strings, text: Vec::new() }
    }

    /// Takes the row's next output tokens, after `num_output` earlier ones. How many there are up to the one that ends
    /// the row, and what ended it; `None` when none of them does.
    pub fn scan(
        &mut self,
        tokens: &[i32],
        num_output: usize,
        eos: &[i32],
        bytes: Option<&TokenBytes>,
    ) -> Option<(usize, StopMatch)> {
        let first = self.min_tokens.saturating_sub(num_output + 1);
        for (i, &token) in tokens.iter().enumerate() {
            let before = self.text.len();
            self.text.extend_from_slice(bytes.map_or(&[], |bytes| bytes.get(token)));
            if i < first {
                continue;
            }
            if self.is_stop_token(token, eos) {
                return Some((i + 1, StopMatch::Token(token)));
            }
            // Of several stop strings completed by one token, the one that starts first cuts the text.
            let cuts = self.strings.iter().filter_map(|stop| self.find_from(before, stop));
            if let Some(cut) = cuts.min() {
                return Some((i + 1, StopMatch::Text(cut)));
            }
        }
        None
    }

    /// Whether there is a condition, or an exception from EOS.
    #[must_use]
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// Whether there are stop strings, so that tokens must go through [`Self::scan`].
    #[must_use]
    pub fn has_strings(&self) -> bool {
        !self.strings.is_empty()
    }

    /// Whether a token ends the row by itself, once there are `min_tokens`.
    #[inline]
    #[must_use]
    pub fn is_stop_token(&self, token: i32, eos: &[i32]) -> bool {
        (!self.ignore_eos && is_any(token, eos)) || is_any(token, &self.tokens)
    }

    /// Start of the first occurrence of `stop` that ends past the first `before` bytes.
    fn find_from(&self, before: usize, stop: &[u8]) -> Option<usize> {
        let start = (before + 1).saturating_sub(stop.len());
        self.text[start..].windows(stop.len()).position(|window| window == stop).map(|at| start + at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn letters() -> TokenBytes {
        // 0..26: one letter each; 26: "ab"; 27: nothing; 28: "xyz".
        let mut values: Vec<u8> = (b'a'..=b'z').collect();
        let mut offsets: Vec<i64> = (0..=26).collect();
        for entry in [&b"ab"[..], b"", b"xyz"] {
            values.extend_from_slice(entry);
            offsets.push(values.len() as i64);
        }
        TokenBytes::new(values, offsets).unwrap()
    }

    fn run(stop: &mut StopConditions, tokens: &[i32]) -> Option<(usize, StopMatch)> {
        let bytes = letters();
        // In pieces, as a speculative run gives them.
        let mut done = 0;
        for piece in tokens.chunks(3) {
            if let Some((count, found)) = stop.scan(piece, done, &[9], Some(&bytes)) {
                return Some((done + count, found));
            }
            done += piece.len();
        }
        None
    }

    fn strings(stops: &[&str]) -> StopConditions {
        StopConditions { strings: stops.iter().map(|s| s.as_bytes().into()).collect(), ..Default::default() }
    }

    #[test]
    fn stop_strings_span_tokens_and_the_earliest_start_wins() {
        assert_eq!(run(&mut strings(&["ba"]), &[0, 26, 26, 3]), Some((3, StopMatch::Text(2))));
        assert_eq!(run(&mut strings(&["yz", "xy"]), &[0, 28]), Some((2, StopMatch::Text(1))));
        assert_eq!(run(&mut strings(&["z", "wxyz"]), &[22, 28]), Some((2, StopMatch::Text(0))));
        assert_eq!(run(&mut strings(&["q"]), &[0, 27, 27]), None);
    }

    #[test]
    fn min_tokens_and_ignore_eos() {
        let mut stop = StopConditions { min_tokens: 2, ..Default::default() };
        assert_eq!(run(&mut stop, &[9, 9]), Some((2, StopMatch::Token(9))));
        let mut stop = StopConditions { ignore_eos: true, tokens: [4].into(), ..Default::default() };
        assert_eq!(run(&mut stop, &[9, 9, 4]), Some((3, StopMatch::Token(4))));
        // A match that ended too early does not count later; one that straddles the border does.
        let mut stop = StopConditions { min_tokens: 3, ..strings(&["ab"]) };
        assert_eq!(run(&mut stop, &[0, 1, 2, 3]), None);
        let mut stop = StopConditions { min_tokens: 2, ..strings(&["ab"]) };
        assert_eq!(run(&mut stop, &[0, 1]), Some((2, StopMatch::Text(0))));
    }

    proptest! {
        #[test]
        fn stop_strings_equal_a_search_of_the_whole_text(
            tokens in prop::collection::vec(prop_oneof![0..3i32, Just(26), Just(27), Just(28)], 1..40),
            stops in prop::collection::vec("[abcxyz]{1,4}", 1..4),
        ) {
            let bytes = letters();
            let refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut text = String::new();
            let mut expected = None;
            for (i, &token) in tokens.iter().enumerate() {
                text.push_str(std::str::from_utf8(bytes.get(token)).unwrap());
                if let Some(cut) = refs.iter().filter_map(|s| text.find(s)).min() {
                    expected = Some((i + 1, StopMatch::Text(cut)));
                    break;
                }
            }
            prop_assert_eq!(run(&mut strings(&refs), &tokens), expected);
        }
    }
}
