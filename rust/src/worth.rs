//! What a row's own drafts are worth: its recent acceptance against the least that pays. Rows of one shard differ, and
//! those that accept little make every step dearer for all. Knows nothing of pages or of who proposes.

/// Weight that a round keeps with each one after it.
const KEEP: f32 = 0.95;

/// What is asked of a row's drafts, and what rows are like before they have shown otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// Chance of being accepted from which a draft pays; 0: nothing is asked.
    pub least: f32,
    /// That chance over all rows.
    pub usual: f32,
    /// Drafts that count for as much as what all rows are like: few where rows differ much.
    pub weight: f32,
}

const FIRST_REST: u64 = 8;
const LONGEST_REST: u64 = 128;

/// A row's recent drafts.
#[derive(Clone, Debug, Default)]
pub struct DraftWorth {
    offered: f32,
    accepted: f32,
    rests: u8,
    /// Drafts that pay, from the last round on; 0: no round yet, or no limit.
    limit: u8,
}

impl DraftWorth {
    /// Drafts worth asking for, of `k`.
    #[inline]
    #[must_use]
    pub fn clamp(&self, k: usize) -> usize {
        if self.limit == 0 { k } else { k.min(usize::from(self.limit)) }
    }

    /// Takes a round of `proposed` drafts of which `accepted` were. Returns for how many steps the row should go without; 0: it
    /// goes on.
    #[inline]
    pub fn observe(&mut self, proposed: usize, accepted: usize, asked: Asked) -> u64 {
        if proposed == 0 {
            return 0;
        }
        self.offered = self.offered * KEEP + (accepted + usize::from(accepted < proposed)) as f32;
        self.accepted = self.accepted * KEEP + accepted as f32;
        let chance = (self.accepted + asked.weight * asked.usual) / (self.offered + asked.weight);
        self.limit = 0;
        if chance >= 1.0 || asked.least <= 0.0 {
            return 0;
        }
        // The draft at position j is accepted with chance^j, if rounds are alike.
        let mut all = chance;
        while all >= asked.least && self.limit < u8::MAX {
            self.limit += 1;
            all *= chance;
        }
        if self.limit > 0 {
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

    fn after(rounds: &[(usize, usize)], least: f32) -> (usize, u64) {
        let (mut worth, mut longest) = (DraftWorth::default(), 0);
        for &(proposed, accepted) in rounds {
            longest = longest.max(worth.observe(proposed, accepted, asked(least)));
        }
        (worth.clamp(8), longest)
    }

    #[test]
    fn a_row_that_accepts_little_rests_and_longer_each_time() {
        assert_eq!(after(&[(4, 0), (4, 0)], 0.5).1, 0);
        assert_eq!(after(&[(4, 0), (4, 0), (4, 0)], 0.5), (8, 8));
        let mut worth = DraftWorth::default();
        let rests: Vec<u64> = (0..24).map(|_| worth.observe(4, 0, asked(0.5))).filter(|&rest| rest > 0).collect();
        assert_eq!(rests[..6], [8, 16, 32, 64, 128, 128]);
    }

    #[test]
    fn a_row_that_accepts_all_has_no_limit_below_k() {
        assert_eq!(after(&[(4, 4); 30], 0.5), (8, 0));
        assert_eq!(after(&[(4, 0); 30], 0.0), (8, 0)); // nothing is asked of it
    }

    #[test]
    fn in_between_it_asks_for_what_pays() {
        let often = [(4, 2), (4, 3), (4, 1), (4, 4), (4, 3)].repeat(6);
        let (cheap, rest) = after(&often, 0.2);
        let (dear, _) = after(&often, 0.6);
        assert_eq!(rest, 0);
        assert!(cheap > dear && dear >= 1, "{cheap}, {dear}");
    }

    #[test]
    fn rows_that_are_alike_are_judged_by_all() {
        let alike = Asked { least: 0.5, usual: 0.75, weight: 200.0 };
        let mut worth = DraftWorth::default();
        assert!((0..10).all(|_| worth.observe(4, 0, alike) == 0));
        assert_eq!(worth.clamp(8), 2);
    }

    #[test]
    fn rounds_without_a_draft_say_nothing() {
        assert_eq!(after(&[(0, 0); 50], 0.9), (8, 0));
    }
}
