//! Random numbers by seed (SplitMix64), so that a seed is a world.

/// A generator of random numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5f5f_1234_9876_abcd)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 up to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number of this range.
    pub(crate) fn within(&mut self, from: f64, to: f64) -> f64 {
        from + self.unit() * (to - from)
    }

    /// Returns the time to the next event of a Poisson process of this rate.
    pub(crate) fn gap(&mut self, rate: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate.max(1e-9)
    }

    /// Returns the life of a connection in seconds: a bounded Pareto distribution with a heavy tail, from 2 s to an hour.
    pub(crate) fn life(&mut self) -> f64 {
        let (from, to, shape) = (2.0_f64, 3_600.0_f64, 1.5_f64);
        let tail = 1.0 - (from / to).powf(shape);
        from / (1.0 - self.unit() * tail).powf(1.0 / shape)
    }
}

/// The mean of [`Random::life`] in seconds.
pub(crate) const LIFE: f64 = 5.86;
