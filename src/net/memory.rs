//! The memory budget of the process: its size, the part in use, and the level that follows (`config/REFERENCE.md, "limits"`).
//! [`cgroup`] reads what the kernel knows. This file computes: once a second, a judgement follows from the last one and from new
//! measurements. The control runtime judges; its users act.
//!
//! ```text
//!        80 %             90 %
//!  calm ─────▶ tight ───────────▶ short
//!              new HBONE          the largest holder is ended,
//!              connections have   one with each judgement after the first
//!              windows of 256 KiB
//! ```
//!
//! The allocator (mimalloc) returns freed pages to the kernel by itself, within milliseconds. The first judgement that finds the
//! memory short ends no holder, so that the allocator and the kernel have a second for it.

pub mod cgroup;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use isthmus_model::limits::MemoryLimit;

/// The time between two judgements.
pub const JUDGE_EVERY: Duration = Duration::from_secs(1);
/// The used percentages of the budget above which memory is tight, and short.
const LEVELS: (u64, u64) = (80, 90);

/// The newest budget of this process in bytes; `u64::MAX` before the first judgement.
static BUDGET: AtomicU64 = AtomicU64::new(u64::MAX);

/// Returns one of `parts` equal shares of the memory budget of this process, in bytes.
pub fn share(parts: u64) -> u64 {
    BUDGET.load(Ordering::Relaxed) / parts
}

/// Sets the memory budget of this process, in bytes.
pub fn set_budget(bytes: u64) {
    BUDGET.store(bytes, Ordering::Relaxed);
}

/// The memory of the process and of its host at one time, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The memory that the process can have: the smallest limit of its cgroups, or the memory of the host.
    pub available: u64,
    /// The part of it that is in use: by the cgroup with that limit, or by the process.
    pub used: u64,
    /// The memory that the host has left for new use.
    pub left: u64,
}

impl Measured {
    /// The memory that a process is taken to have if the kernel does not report it.
    const UNKNOWN: u64 = 1 << 30;

    /// Returns the sizes by which the limit is judged if the kernel reports none: a size that is written holds.
    pub fn unknown(limit: MemoryLimit) -> Self {
        let available = match limit {
            MemoryLimit::Percent(_) => Self::UNKNOWN,
            MemoryLimit::Bytes(bytes) => bytes,
        };
        Self { available, used: 0, left: u64::MAX }
    }
}

/// How much of the budget is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// At most 80 %.
    #[default]
    Calm,
    /// More than 80 %.
    Tight,
    /// More than 90 %.
    Short,
}

impl Level {
    /// Returns the level as the API writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Tight => "tight",
            Self::Short => "short",
        }
    }
}

/// The state of the memory budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The budget in bytes.
    pub budget: u64,
    /// The memory that the process can have, in bytes.
    pub available: u64,
    /// The used bytes.
    pub used: u64,
    /// The bytes that may still be used.
    pub free: u64,
    /// How much of the budget is used.
    pub level: Level,
    /// The number of judgements in a row that found the memory short.
    short: u32,
    /// The number of holders that were ended since the start, and the time of the last one.
    pub ended: Option<(u64, SystemTime)>,
}

impl Default for Judgement {
    /// Returns the state before the first measurement.
    fn default() -> Self {
        let (budget, available, free) = (u64::MAX, u64::MAX, u64::MAX);
        Self { budget, available, used: 0, free, level: Level::Calm, short: 0, ended: None }
    }
}

impl Judgement {
    /// Returns the state after a new measurement.
    #[must_use]
    pub fn next(&self, limit: MemoryLimit, measured: Measured) -> Self {
        let Measured { available, used, left } = measured;
        let budget = limit.of(available);
        let level = match u128::from(used) * 100 {
            above if above > u128::from(budget) * u128::from(LEVELS.1) => Level::Short,
            above if above > u128::from(budget) * u128::from(LEVELS.0) => Level::Tight,
            _ => Level::Calm,
        };
        let short = if level == Level::Short { self.short.saturating_add(1) } else { 0 };
        let free = budget.saturating_sub(used).min(left);
        Self { budget, available, used, free, level, short, ended: self.ended }
    }

    /// Returns true if a holder must give way.
    pub fn ends_a_holder(&self) -> bool {
        self.short > 1
    }

    /// Counts a holder that was ended at the time `now`.
    pub fn count_ended(&mut self, now: SystemTime) {
        self.ended = Some((self.ended.map_or(0, |(count, _)| count) + 1, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn after(before: Judgement, used: u64) -> Judgement {
        before.next(MemoryLimit::default(), Measured { available: 1_000 * MIB, used, left: u64::MAX })
    }

    #[test]
    fn the_level_follows_from_the_used_part_of_the_budget() {
        let level = |used| after(Judgement::default(), used * MIB).level;
        assert_eq!([0, 480, 481, 540, 541, 2_000].map(level), {
            use Level::{Calm, Short, Tight};
            [Calm, Calm, Tight, Tight, Short, Short]
        });
    }

    #[test]
    fn a_holder_gives_way_in_each_second_after_the_first_while_memory_is_short() {
        let mut state = Judgement::default();
        let mut given = Vec::new();
        for used in [100, 550, 550, 550, 530, 550, 550] {
            state = after(state, used * MIB);
            given.push(state.ends_a_holder());
        }
        assert_eq!(given, [false, false, true, true, false, false, true]);
    }

    #[test]
    fn memory_that_the_kernel_does_not_report_is_a_gib_or_the_size_that_is_written() {
        let budget = |limit| Judgement::default().next(limit, Measured::unknown(limit)).budget;
        assert_eq!(budget(MemoryLimit::Bytes(9_000 * MIB)), 9_000 * MIB);
        assert_eq!(budget(MemoryLimit::Percent(60)) / MIB, 614);
    }

    #[test]
    fn what_is_free_is_limited_by_the_budget_and_by_what_the_host_has_left() {
        let measured = |used, left| Measured { available: 1_000 * MIB, used: used * MIB, left: left * MIB };
        let free = |limit, measured| Judgement::default().next(limit, measured).free / MIB;
        let percent = MemoryLimit::default();
        assert_eq!(free(percent, measured(200, 5_000)), 400);
        assert_eq!(free(percent, measured(200, 50)), 50);
        assert_eq!(free(percent, measured(700, 50)), 0);
        assert_eq!(free(MemoryLimit::Bytes(300 * MIB), measured(200, 5_000)), 100);
        assert_eq!(free(MemoryLimit::Bytes(9_000 * MIB), measured(200, 5_000)), 800, "at most what there is");
    }
}
