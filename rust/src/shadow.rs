//! Scores n-gram proposals against tokens a row commits anyway: what n-gram speculation would have got, at the cost of
//! a lookup. Simulates its rounds exactly. Knows nothing of how the tokens came about.

use crate::ngram::NgramIndex;

/// A round that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Tokens proposed.
    pub proposed: usize,
    /// Leading ones that came true.
    pub accepted: usize,
    /// Tokens the round would have committed.
    pub committed: usize,
}

/// A row's open round.
#[derive(Clone, Debug, Default)]
pub struct Shadow {
    proposal: Vec<i32>,
    accepted: usize,
    open: bool,
}

impl Shadow {
    /// Takes the token that followed `tokens`; proposes up to `k` when no round is open. Returns the round it ends.
    pub fn observe(&mut self, index: &mut NgramIndex, tokens: &[i32], token: i32, k: usize) -> Option<Round> {
        if !self.open {
            self.proposal.clear();
            index.propose(tokens, k, &mut self.proposal);
            self.accepted = 0;
            self.open = true;
        }
        if self.proposal.get(self.accepted) == Some(&token) {
            self.accepted += 1;
            return None;
        }
        self.open = false;
        Some(Round { proposed: self.proposal.len(), accepted: self.accepted, committed: self.accepted + 1 })
    }

    /// Ends the open round of a row that ends: positions it never reached were not offered.
    pub fn close(&mut self) -> Option<Round> {
        let open = std::mem::replace(&mut self.open, false);
        (open && self.accepted > 0).then_some(Round {
            proposed: self.accepted,
            accepted: self.accepted,
            committed: self.accepted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_those_of_speculation() {
        let mut index = NgramIndex::new(1, 2);
        let mut shadow = Shadow::default();
        let mut tokens = vec![1, 2, 3, 1];
        let mut rounds = Vec::new();
        for token in [2, 3, 9, 9, 9] {
            rounds.extend(shadow.observe(&mut index, &tokens, token, 2));
            tokens.push(token);
        }
        // [2, 3] comes true, 9 is the bonus; nothing is known after 9; then 9 follows 9.
        assert_eq!(
            rounds,
            [Round { proposed: 2, accepted: 2, committed: 3 }, Round { proposed: 0, accepted: 0, committed: 1 },]
        );
        assert_eq!(shadow.close(), Some(Round { proposed: 1, accepted: 1, committed: 1 }));
        assert_eq!(shadow.close(), None);
    }
}
