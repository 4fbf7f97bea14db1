//! A hash of a set of items, independent of their order. Two gateways compare it to check that they have the same items.

use twox_hash::XxHash3_128;

/// The number of items in a set, and the sum of their hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetHash {
    count: u64,
    sum: u128,
}

/// The hash of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemHash(u128);

impl ItemHash {
    /// Hashes the encoded item.
    pub fn of(bytes: &[u8]) -> Self {
        Self(XxHash3_128::oneshot(bytes))
    }
}

impl SetHash {
    /// Makes the hash from its parts; `None` if the sum is not 16 bytes long.
    pub fn from_parts(count: u64, sum: &[u8]) -> Option<Self> {
        Some(Self { count, sum: u128::from_be_bytes(sum.try_into().ok()?) })
    }

    /// Returns the number of items.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of the hashes, big-endian.
    pub fn sum(&self) -> [u8; 16] {
        self.sum.to_be_bytes()
    }

    /// Replaces, adds or removes an item.
    pub fn change(&mut self, before: Option<ItemHash>, after: Option<ItemHash>) {
        if let Some(ItemHash(hash)) = before {
            self.count = self.count.saturating_sub(1);
            self.sum = self.sum.wrapping_sub(hash);
        }
        if let Some(ItemHash(hash)) = after {
            self.count += 1;
            self.sum = self.sum.wrapping_add(hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_sets_have_equal_hashes_whatever_the_way_to_them() {
        let [a, b, c] = [b"a", b"b", b"c"].map(|bytes| ItemHash::of(bytes));
        let mut one = SetHash::default();
        one.change(None, Some(a));
        one.change(None, Some(b));
        let mut other = SetHash::default();
        other.change(None, Some(b));
        other.change(None, Some(c));
        assert_ne!(one, other);
        other.change(Some(c), Some(a));
        assert_eq!(one, other);
        assert_eq!(SetHash::from_parts(one.count(), &one.sum()), Some(one));
        one.change(Some(a), None);
        one.change(Some(b), None);
        assert_eq!(one, SetHash::default());
        assert_eq!(SetHash::from_parts(0, &[0; 15]), None);
    }
}
