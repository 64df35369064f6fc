//! What a row's own drafts are worth: its recent acceptance against the least that pays. Rows of one shard differ, and
//! those that accept little make every step dearer for all. Knows nothing of pages or of who proposes.

/// Weight that a round keeps with each one after it.
const KEEP: f32 = 0.95;
const FIRST_REST: u64 = 8;
const LONGEST_REST: u64 = 128;

/// What is asked of a row's drafts, and what rows are like before they have shown otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// Chance of being accepted from which a draft pays; 0: nothing is asked.
    pub least: f32,
    /// That chance over all rows.
    pub usual: f32,
    /// Drafts of a row's own that weigh as much as what all rows are like: few where rows differ much.
    pub weight: f32,
}

/// A row's recent drafts.
#[derive(Clone, Debug, Default)]
pub struct DraftWorth {
    offered: f32,
    accepted: f32,
    rests: u8,
}

impl DraftWorth {
    /// Takes a round of `proposed` drafts of which `accepted` were. Returns for how many steps the row should go without; 0: it
    /// goes on. After a rest it is taken to be like all rows again.
    #[inline]
    pub fn observe(&mut self, proposed: usize, accepted: usize, asked: Asked) -> u64 {
        if proposed == 0 {
            return 0;
        }
        self.offered = self.offered * KEEP + (accepted + usize::from(accepted < proposed)) as f32;
        self.accepted = self.accepted * KEEP + accepted as f32;
        let chance = (self.accepted + asked.weight * asked.usual) / (self.offered + asked.weight);
        if chance >= asked.least {
            return 0;
        }
        (self.offered, self.accepted) = (0.0, 0.0);
        let rest = (FIRST_REST << self.rests.min(8)).min(LONGEST_REST);
        self.rests = self.rests.saturating_add(1);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(least: f32) -> Asked {
        Asked { least, usual: 0.75, weight: 4.0 }
    }

    /// The longest rest after rounds of (proposed, accepted).
    fn after(rounds: &[(usize, usize)], asked: Asked) -> u64 {
        let mut worth = DraftWorth::default();
        rounds.iter().map(|&(proposed, accepted)| worth.observe(proposed, accepted, asked)).max().unwrap_or(0)
    }

    #[test]
    fn a_row_that_accepts_little_rests_and_longer_each_time() {
        assert_eq!(after(&[(4, 0), (4, 0)], asked(0.5)), 0);
        assert_eq!(after(&[(4, 0), (4, 0), (4, 0)], asked(0.5)), 8);
        let mut worth = DraftWorth::default();
        let rests: Vec<u64> = (0..24).map(|_| worth.observe(4, 0, asked(0.5))).filter(|&rest| rest > 0).collect();
        assert_eq!(rests[..6], [8, 16, 32, 64, 128, 128]);
    }

    #[test]
    fn a_row_goes_on_as_long_as_its_drafts_pay() {
        let often = [(4, 2), (4, 3), (4, 1), (4, 4), (4, 3)].repeat(6);
        assert_eq!(after(&often, asked(0.6)), 0);
        assert!(after(&often, asked(0.85)) > 0);
        assert_eq!(after(&[(4, 4); 30], asked(0.7)), 0);
        assert_eq!(after(&[(4, 0); 30], asked(0.0)), 0); // nothing is asked of it
    }

    #[test]
    fn rows_that_are_alike_are_judged_by_all() {
        let alike = Asked { least: 0.5, usual: 0.75, weight: 200.0 };
        assert_eq!(after(&[(4, 0); 10], alike), 0);
    }

    #[test]
    fn rounds_without_a_draft_say_nothing() {
        assert_eq!(after(&[(0, 0); 50], asked(0.9)), 0);
    }
}
