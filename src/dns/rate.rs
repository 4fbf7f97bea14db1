//! The limit on answers per source over UDP. With a forged source address, an attacker could send answers to a victim that did
//! not ask. Above a number of queries per second, one query of four gets an answer without records, which is no longer than the
//! query and makes a client ask over TCP. The other queries get no answer. A long answer counts as several queries.
//!
//! The queries of a second are counted in two tables of fixed size, by two hashes of the source. The lower of the two counts is
//! decisive, so that a source is rarely limited because of another source.

use std::hash::BuildHasher;
use std::net::IpAddr;

use hashbrown::DefaultHashBuilder;

use super::answer::Extent;
use isthmus_model::limits::SourcePrefix;

/// The number of queries per second that a source gets whole answers to.
pub const ANSWERS_PER_SECOND: u16 = 2_000;
/// Each time that an answer has this many bytes, it counts as one query more. So a source gets about half a megabyte per second.
const BYTES_PER_QUERY: usize = 256;
/// Above [`ANSWERS_PER_SECOND`], one of this many queries gets an answer. This answer has no records.
const SLIP: u16 = 4;
/// The number of counters in a table.
const PLACES: usize = 1 << 14;

/// The queries of this second by source.
pub struct Rates {
    second: u64,
    tables: [Box<[u16]>; 2],
    hashers: [DefaultHashBuilder; 2],
}

impl Default for Rates {
    fn default() -> Self {
        let table = || vec![0; PLACES].into_boxed_slice();
        Self { second: 0, tables: [table(), table()], hashers: Default::default() }
    }
}

impl Rates {
    /// Counts a query and returns the part of the answer that it gets; `None`: no answer. `second` is the current time in
    /// seconds.
    pub fn judge(&mut self, source: IpAddr, second: u64) -> Option<Extent> {
        match self.count(source, second, 1) {
            0..=ANSWERS_PER_SECOND => Some(Extent::Full),
            // A counter does not rise above this value, so the queries above it cannot be counted, and none gets an answer. No
            // honest client reaches it.
            u16::MAX => None,
            more if more.is_multiple_of(SLIP) => Some(Extent::Truncated),
            _ => None,
        }
    }

    /// Counts the bytes of an answer.
    pub fn charge(&mut self, source: IpAddr, second: u64, bytes: usize) {
        let more = u16::try_from(bytes / BYTES_PER_QUERY).unwrap_or(u16::MAX);
        if more > 0 {
            self.count(source, second, more);
        }
    }

    /// Counts queries of a source, and returns their number in this second.
    fn count(&mut self, source: IpAddr, second: u64, more: u16) -> u16 {
        // A loopback source is not forged: the kernel drops packets from outside that have one.
        if source.to_canonical().is_loopback() {
            return 0;
        }
        if self.second != second {
            self.second = second;
            self.tables.iter_mut().for_each(|table| table.fill(0));
        }
        let block = SourcePrefix::default().block(source);
        let mut lowest = u16::MAX;
        for (table, hasher) in self.tables.iter_mut().zip(&self.hashers) {
            let place = usize::try_from(hasher.hash_one(block) % PLACES as u64).unwrap_or(0);
            if let Some(count) = table.get_mut(place) {
                *count = count.saturating_add(more);
                lowest = lowest.min(*count);
            }
        }
        lowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_source_beyond_its_rate_is_sent_to_tcp() {
        let mut rates = Rates::default();
        let judged: Vec<_> = (0..ANSWERS_PER_SECOND + 400).map(|_| rates.judge(ip("192.0.2.1"), 7)).collect();
        let (within, beyond) = judged.split_at(usize::from(ANSWERS_PER_SECOND));
        assert!(within.iter().all(|extent| *extent == Some(Extent::Full)));
        assert_eq!(beyond.iter().filter(|extent| **extent == Some(Extent::Truncated)).count(), 100);
        assert_eq!(beyond.iter().filter(|extent| extent.is_none()).count(), 300);
        assert_eq!(rates.judge(ip("192.0.2.2"), 7), Some(Extent::Full), "another source");
        assert_eq!(rates.judge(ip("192.0.2.1"), 8), Some(Extent::Full), "another second");
        let mut last = None;
        (0..100_000).for_each(|_| last = Some(rates.judge(ip("192.0.2.1"), 8)));
        assert_eq!(last, Some(None));
    }

    #[test]
    fn a_source_gets_half_a_megabyte_of_answers_per_second() {
        let (mut rates, source) = (Rates::default(), ip("192.0.2.1"));
        for (bytes, most) in [(60, 2_000 * 60), (255, 2_000 * 255), (512, 1_000 * 512), (1_232, 500 * 1_232)]
        {
            let second = bytes as u64;
            let mut sent = 0;
            for _ in 0..10_000 {
                if rates.judge(source, second) == Some(Extent::Full) {
                    rates.charge(source, second, bytes);
                    sent += bytes;
                }
            }
            assert!(sent > most / 2 && sent <= most && most < 640_000, "{bytes}: {sent}");
            rates.charge(ip("127.0.0.1"), second, 1 << 20);
            assert_eq!(rates.judge(ip("127.0.0.1"), second), Some(Extent::Full));
        }
    }

    #[test]
    fn addresses_of_one_block_are_one_source_and_loopback_is_not_forged() {
        let mut rates = Rates::default();
        for at in 0..u32::from(ANSWERS_PER_SECOND) {
            rates.judge(ip(&format!("2001:db8::{at:x}")), 7);
        }
        assert_ne!(rates.judge(ip("2001:db8::ffff"), 7), Some(Extent::Full));
        assert!((0..10_000).all(|_| rates.judge(ip("::ffff:127.0.0.2"), 7) == Some(Extent::Full)));
    }
}
