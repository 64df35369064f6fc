//! Scores rounds of fewer drafts within a round that a row really had: what came of four drafts tells what one, two and
//! three would have brought, but for the token after a round that accepted all of its drafts. Knows nothing of who
//! proposed them.

use crate::shadow::Round;

/// What a real round weighs.
pub const REAL: i64 = 1 << 16;

/// How many rounds of fewer drafts a row's real ones held, by which they are weighed.
#[derive(Clone, Debug, Default)]
pub struct FewerDrafts {
    /// By drafts a round, less one.
    rounds: Vec<u32>,
    real: u32,
}

/// What a real round says of one committed token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Token {
    /// It was proposed.
    Hit,
    /// Another one was proposed.
    Miss,
    /// Nothing was.
    Unknown,
}

impl FewerDrafts {
    /// Takes a real round of at most `k` drafts. Each round of fewer drafts in it goes to `found` with its number of drafts
    /// and its weight: all rounds of a row together weigh as much as its real ones, so that rows weigh the same, as they do
    /// in a step, though one that accepts much has more rounds.
    #[inline]
    pub fn observe(&mut self, round: Round, k: usize, mut found: impl FnMut(usize, Round, i64)) {
        if self.rounds.len() + 1 != k {
            self.rounds.clear();
            self.rounds.resize(k.saturating_sub(1), 0);
            self.real = 0;
        }
        self.real += 1;
        for (fewer, rounds) in (1..).zip(&mut self.rounds) {
            walk(round, fewer, |_| *rounds += 1);
            let weight = REAL * i64::from(self.real) / i64::from((*rounds).max(1));
            walk(round, fewer, |round| found(fewer, round, weight));
        }
    }
}

/// Rounds of `fewer` drafts over the tokens of a real round. Its last token was not proposed, so the last round ends with it;
/// only where the row ended inside what was accepted is one cut off, and then the next position counts as not offered.
#[inline]
fn walk(round: Round, fewer: usize, mut found: impl FnMut(Round)) {
    let mut accepted = 0;
    for at in 0..round.committed {
        let token = if at < round.accepted {
            Token::Hit
        } else if at < round.proposed {
            Token::Miss
        } else {
            Token::Unknown
        };
        if accepted < fewer && token == Token::Hit {
            accepted += 1;
            continue;
        }
        if accepted == fewer || token == Token::Miss {
            found(Round { proposed: fewer, accepted, committed: accepted + 1 });
        } else if accepted > 0 {
            // Nobody knows what the next draft would have been: it counts as not offered.
            found(Round { proposed: accepted, accepted, committed: accepted });
        }
        accepted = 0;
    }
    if accepted > 0 {
        found(Round { proposed: accepted, accepted, committed: accepted });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of `k` drafts over tokens of which `hits` says whether they would have been proposed.
    fn rounds_of(hits: &[bool], k: usize) -> Vec<Round> {
        let (mut at, mut rounds) = (0, Vec::new());
        while at < hits.len() {
            let accepted = hits[at..].iter().take(k).take_while(|&&hit| hit).count();
            if at + accepted == hits.len() {
                rounds.push(Round { proposed: accepted, accepted, committed: accepted });
            } else {
                rounds.push(Round { proposed: k, accepted, committed: accepted + 1 });
            }
            at += accepted + 1;
        }
        rounds
    }

    fn scored(rounds: &[Round], k: usize) -> Vec<Vec<Round>> {
        let (mut scorer, mut found) = (FewerDrafts::default(), vec![Vec::new(); k - 1]);
        for &round in rounds {
            scorer.observe(round, k, |fewer, round, _| found[fewer - 1].push(round));
        }
        found
    }

    /// Where no round accepts all its drafts, every token is known, and fewer drafts go exactly as they would have.
    #[test]
    fn without_full_rounds_nothing_is_guessed() {
        let mut state = 11_u64;
        for case in 0..300 {
            let mut random = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let k = 2 + random(5) as usize;
            let mut hits: Vec<bool> = (0..random(80)).map(|_| random(4) != 0).collect();
            for at in 0..hits.len() {
                let run = hits[..at].iter().rev().take_while(|&&hit| hit).count();
                hits[at] &= run + 1 < k; // never k hits in a row
            }
            let found = scored(&rounds_of(&hits, k), k);
            for fewer in 1..k {
                assert_eq!(found[fewer - 1], rounds_of(&hits, fewer), "case {case}, {fewer} of {k}");
            }
        }
    }

    #[test]
    fn what_follows_a_full_round_is_not_offered() {
        let full = Round { proposed: 3, accepted: 3, committed: 4 };
        let part = Round { proposed: 3, accepted: 1, committed: 2 };
        let found = scored(&[full, part], 3);
        // Of one draft: hit and hit, hit and unknown, hit and miss as the token that follows.
        let one = Round { proposed: 1, accepted: 1, committed: 2 };
        assert_eq!(found[0], [one; 3]);
        // Of two: two hits and one; then a hit and a miss.
        let wanted =
            [Round { proposed: 2, accepted: 2, committed: 3 }, Round { proposed: 2, accepted: 1, committed: 2 }];
        assert_eq!(found[1], wanted);
    }

    #[test]
    fn a_row_that_ends_inside_a_round_was_not_offered_what_it_never_reached() {
        let found = scored(&[Round { proposed: 4, accepted: 3, committed: 3 }], 4);
        let cut = |accepted| Round { proposed: accepted, accepted, committed: accepted };
        assert_eq!(found[0], [Round { proposed: 1, accepted: 1, committed: 2 }, cut(1)]);
        assert_eq!(found[1], [Round { proposed: 2, accepted: 2, committed: 3 }]);
        assert_eq!(found[2], [cut(3)]);
    }

    /// A row that accepts everything has more rounds of fewer drafts than one that accepts nothing, and weighs the same.
    #[test]
    fn rows_weigh_the_same_however_many_rounds_they_have() {
        for accepted in [0, 2, 5, 6] {
            let (mut scorer, mut weights) = (FewerDrafts::default(), [0; 5]);
            let round = Round { proposed: 6, accepted, committed: accepted + 1 };
            for _ in 0..200 {
                scorer.observe(round, 6, |fewer, _, weight| weights[fewer - 1] += weight);
            }
            assert!(weights.iter().all(|w| (190..=210).contains(&(w / REAL))), "{accepted} accepted: {weights:?}");
        }
    }
}
