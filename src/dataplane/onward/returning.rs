//! The hellos that this process has passed on to other networks a moment ago. One that comes back has gone in a circle: the gateway of
//! the other network takes this one for a client on its own network. A call by SNI has no header that could name the gateways it has
//! passed, but each hello has a random of its own (RFC 8446 §4.1.2).

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The time within which a hello that goes in a circle is back.
const WITHIN: Duration = Duration::from_secs(2);
/// The number of times that one source may send the same hello within that time: some health checks always send the same one.
const REPEATS_MAX: u8 = 8;
/// The number of hellos that are kept. Beyond this number those that are older than [`WITHIN`] are dropped, or else all.
const KEPT_MAX: usize = 16_384;

type Random = [u8; 32];

/// The hellos that were passed on.
#[derive(Default)]
pub(crate) struct PassedOn(Mutex<HashMap<Random, Passed>>);

struct Passed {
    at: Instant,
    source: IpAddr,
    count: u8,
}

impl PassedOn {
    /// Notes a hello that is to be passed on; returns true if it has come back.
    pub(crate) fn returns(&self, random: &[u8], source: IpAddr, now: Instant) -> bool {
        let Ok(random) = Random::try_from(random) else { return false };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(&random).filter(|known| now.duration_since(known.at) < WITHIN) {
            known.count = known.count.saturating_add(1);
            return known.source != source || known.count > REPEATS_MAX;
        }
        if all.len() >= KEPT_MAX {
            all.retain(|_, known| now.duration_since(known.at) < WITHIN);
            if all.len() >= KEPT_MAX {
                all.clear();
            }
        }
        all.insert(random, Passed { at: now, source, count: 1 });
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_returns_if_another_source_sends_it_or_one_sends_it_often() {
        let (passed, now) = (PassedOn::default(), Instant::now());
        let (client, gateway): (IpAddr, IpAddr) = ([10, 1, 0, 9].into(), [10, 1, 0, 1].into());
        assert!(!passed.returns(&[1; 32], client, now));
        assert!(passed.returns(&[1; 32], gateway, now), "a gateway has sent it back");
        assert!(!passed.returns(&[1; 32], gateway, now + WITHIN), "too late for a circle");
        let repeated = (0..12).map(|_| passed.returns(&[2; 32], client, now));
        assert_eq!(repeated.filter(|is_back| *is_back).count(), 4, "8 are a health check's");
        for at in 0..u16::try_from(KEPT_MAX).expect("small") * 2 {
            let mut random = [3; 32];
            random[..2].copy_from_slice(&at.to_be_bytes());
            passed.returns(&random, client, now);
        }
        assert!(passed.0.lock().expect("no panic").len() <= KEPT_MAX);
    }
}
