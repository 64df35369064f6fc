//! Scores n-gram proposals against tokens a row commits anyway: what n-gram speculation would have got with one draft,
//! with two, and so on, at the cost of a lookup. Simulates the rounds exactly. Knows nothing of how the tokens came
//! about.

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

/// The open round of one number of drafts. Only rounds with a proposal stay open.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    /// Where in the row's tokens the proposal is read from; 0: no round is open.
    place: u32,
    accepted: u32,
}

/// A row's open rounds, one for each number of drafts.
#[derive(Clone, Debug, Default)]
pub struct Shadow {
    /// By drafts a round, less one.
    rounds: Vec<Open>,
    open: usize,
}

/// What a token ended.
pub enum Ended {
    /// For every number of drafts, a round without a proposal.
    Unmatched,
    /// What `rounds` was called with, if anything.
    Some,
}

impl Shadow {
    /// Takes the token that followed `tokens`, for rounds of 1 to `most` drafts each. A round that it ends goes to
    /// `ended` with its number of drafts, except where the answer says that all ended without a proposal.
    pub fn observe(
        &mut self,
        index: &mut NgramIndex,
        tokens: &[i32],
        token: i32,
        most: usize,
        mut ended: impl FnMut(usize, Round),
    ) -> Ended {
        if self.rounds.len() != most {
            self.rounds = vec![Open::default(); most];
            self.open = 0;
        }
        let mut place = None;
        if self.open == 0 {
            place = Some(index.place(tokens).unwrap_or(0));
            if place == Some(0) {
                return Ended::Unmatched;
            }
        }
        for (k, round) in (1..).zip(&mut self.rounds) {
            if round.place == 0 {
                let found = *place.get_or_insert_with(|| index.place(tokens).unwrap_or(0));
                if found == 0 {
                    ended(k, Round { proposed: 0, accepted: 0, committed: 1 });
                    continue;
                }
                *round = Open { place: found as u32, accepted: 0 };
                self.open += 1;
            }
            let accepted = round.accepted as usize;
            // The proposal goes on from its own start where it runs into the end: there stand the tokens accepted so far.
            if accepted < k && tokens[round.place as usize + accepted] == token {
                round.accepted += 1;
            } else {
                round.place = 0;
                self.open -= 1;
                ended(k, Round { proposed: k, accepted, committed: accepted + 1 });
            }
        }
        Ended::Some
    }

    /// Ends the open rounds of a row that ends: positions they never reached were not offered.
    pub fn close(&mut self, mut ended: impl FnMut(usize, Round)) {
        for (k, round) in (1..).zip(&mut self.rounds) {
            let accepted = round.accepted as usize;
            if round.place != 0 && accepted > 0 {
                ended(k, Round { proposed: accepted, accepted, committed: accepted });
            }
            round.place = 0;
        }
        self.open = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of `k` drafts by the definition: propose, compare, commit.
    fn rounds_of(prompt: &[i32], output: &[i32], k: usize) -> Vec<Round> {
        let mut index = NgramIndex::new(1, 2);
        let all: Vec<i32> = prompt.iter().chain(output).copied().collect();
        let (mut at, mut rounds) = (prompt.len(), Vec::new());
        while at < all.len() {
            let mut proposal = Vec::new();
            index.propose(&all[..at], k, &mut proposal);
            let accepted = proposal.iter().zip(&all[at..]).take_while(|(a, b)| a == b).count();
            let left = all.len() - at;
            if accepted == left {
                // The row ended inside what was accepted.
                rounds.push(Round { proposed: accepted, accepted, committed: accepted });
            } else {
                rounds.push(Round { proposed: proposal.len(), accepted, committed: accepted + 1 });
            }
            at += accepted + 1;
        }
        rounds
    }

    fn scored(prompt: &[i32], output: &[i32], most: usize) -> Vec<Vec<Round>> {
        let (mut index, mut shadow) = (NgramIndex::new(1, 2), Shadow::default());
        let mut tokens = prompt.to_vec();
        let mut rounds = vec![Vec::new(); most];
        for &token in output {
            let all = shadow.observe(&mut index, &tokens, token, most, |k, round| rounds[k - 1].push(round));
            if matches!(all, Ended::Unmatched) {
                for each in &mut rounds {
                    each.push(Round { proposed: 0, accepted: 0, committed: 1 });
                }
            }
            tokens.push(token);
        }
        shadow.close(|k, round| rounds[k - 1].push(round));
        rounds
    }

    #[test]
    fn rounds_are_those_of_speculation() {
        // [2, 3] comes true, 9 is the bonus; nothing is known after 9; then 9 follows 9.
        let rounds = scored(&[1, 2, 3, 1], &[2, 3, 9, 9, 9], 2);
        let wanted = [
            Round { proposed: 2, accepted: 2, committed: 3 },
            Round { proposed: 0, accepted: 0, committed: 1 },
            Round { proposed: 1, accepted: 1, committed: 1 },
        ];
        assert_eq!(rounds[1], wanted);
    }

    #[test]
    fn every_number_of_drafts_is_scored_as_if_alone() {
        let mut state = 7_u64;
        for case in 0..200 {
            let mut random = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let words = 2 + random(4);
            let prompt: Vec<i32> = (0..=random(12)).map(|_| random(words) as i32).collect();
            let output: Vec<i32> = (0..random(60)).map(|_| random(words) as i32).collect();
            let rounds = scored(&prompt, &output, 5);
            for k in 1..=5 {
                assert_eq!(rounds[k - 1], rounds_of(&prompt, &output, k), "case {case}, k {k}");
            }
        }
    }
}
