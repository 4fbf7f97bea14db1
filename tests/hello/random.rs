//! Random numbers from a seed (SplitMix64): the same seed gives the same hello on every machine.

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`, which must not be zero.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).expect("fits");
        usize::try_from(self.number() % limit).expect("fits")
    }

    /// Returns true with a probability of `percent` %.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.number().to_le_bytes()[0]
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        std::iter::repeat_with(|| self.number().to_le_bytes()).flatten().take(count).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }

    /// Returns the ends of random pieces of a stream of this length; the last end is the length.
    pub(crate) fn cuts(&mut self, length: usize) -> Vec<usize> {
        let count = 1 + self.below(8);
        let mut ends: Vec<usize> = (0..count).map(|_| self.below(length + 1)).chain([length]).collect();
        ends.sort_unstable();
        ends.dedup();
        ends
    }
}
