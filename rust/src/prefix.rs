//! Names of page contents: a 128-bit hash chain over the tokens of full pages. A page's name covers every token
//! before it, so equal names mean equal context (up to a 2^-128 chance).

use std::hash::{BuildHasherDefault, Hasher};

/// Name of a full page and of all that stands before it. Never [`UNNAMED`].
pub type PageHash = u128;

/// No name: the page is not in the prefix cache.
pub const UNNAMED: PageHash = 0;

/// Parent of a row's first page.
pub const ROOT: PageHash = 0x2545_f491_4f6c_dd1d_9e37_79b9_7f4a_7c15;

const MULTIPLIER: u128 = 0xda94_2042_e4dd_58b5_d1b5_4a32_d192_ed03;

/// Name of the page that holds `tokens` after the page `parent`.
///
/// Every token is one bijection of the 128-bit state (xor, multiplication by an odd number, xor-shift), so two
/// states differ after equal tokens, and equal states differ after different tokens.
#[must_use]
pub fn chain(parent: PageHash, tokens: &[i32]) -> PageHash {
    let mut state = parent;
    for &token in tokens {
        state = (state ^ u128::from(token.cast_unsigned())).wrapping_mul(MULTIPLIER);
        state ^= state >> 61;
    }
    state = state.wrapping_mul(MULTIPLIER);
    state ^= state >> 67;
    if state == UNNAMED { 1 } else { state }
}

/// A name folded to the 64 bits that a hash table wants.
#[must_use]
pub fn key(name: PageHash) -> u64 {
    (name as u64) ^ ((name >> 64) as u64)
}

/// Hasher for keys that are hashes already.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, name: u128) {
        self.0 = key(name);
    }
}

/// Build type of [`KeyHasher`].
pub type BuildKeyHasher = BuildHasherDefault<KeyHasher>;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_name_depends_on_every_token_and_on_order() {
        let mut seen = HashSet::new();
        for a in 0..64 {
            for b in 0..64 {
                assert!(seen.insert(chain(ROOT, &[a, b])));
                assert!(seen.insert(chain(chain(ROOT, &[a]), &[b])), "page borders count");
            }
        }
    }

    #[test]
    fn names_spread_over_both_halves() {
        let names: Vec<u128> = (0..4096).map(|t| chain(ROOT, &[t, 7])).collect();
        for shift in [0, 52, 64, 116] {
            let buckets: HashSet<u128> = names.iter().map(|n| (n >> shift) & 0xfff).collect();
            assert!(buckets.len() > 2400, "4096 balls in 4096 bins fill about 2590, got {}", buckets.len());
        }
    }
}
