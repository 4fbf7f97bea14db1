//! Planned drains: orders that move calls away from a part of the mesh, step by step
//! (`docs/drains.md, "What happens"`).

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::address::Host;
use super::name::HostName;
use super::place::{ClusterId, Network};

/// The number of parts of a weight: a drain leaves a whole number of them. Both a percent and a step are whole numbers of parts.
pub const PARTS: u16 = 3_200;
/// The parts that one step of a ramp takes: a 32nd of the weight.
pub const STEP: u16 = PARTS / 32;

/// The part of the mesh that a drain empties.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DrainTarget {
    /// All endpoints of a service.
    Service(HostName),
    /// All endpoints at an address; without a port at each of its ports.
    Endpoint(IpAddr, Option<u16>),
    /// The gateways at an address or host name; without a port at each of their ports.
    Gateway(Host, Option<u16>),
    /// All endpoints on a network.
    Network(Network),
    /// All endpoints of a cluster.
    Cluster(ClusterId),
    /// All endpoints of a peer.
    Peer(Arc<str>),
}

impl DrainTarget {
    /// The words for the kinds of targets, in the order that documents list them.
    pub const KINDS: [&str; 6] = ["service", "endpoint", "gateway", "network", "cluster", "peer"];

    /// Parses the name of a target of this kind, one of [`Self::KINDS`]. The error says what is expected.
    pub fn parse(kind: &str, name: &str) -> Result<Self, String> {
        let place = || match name.trim() {
            "" => Err(format!("the name of the {kind} is empty")),
            name => Ok(name),
        };
        match kind {
            "service" => HostName::parse(name).map(Self::Service).map_err(|error| error.to_string()),
            "endpoint" => match Host::parse_with_port(name) {
                Some((Host::Ip(ip), port)) => Ok(Self::Endpoint(ip, port)),
                _ => Err(format!("{name:?} is not an IP address with or without a port, such as 10.0.0.1:8443")),
            },
            "gateway" => Host::parse_with_port(name).map(|(host, port)| Self::Gateway(host, port)).ok_or_else(|| {
                format!("{name:?} is not an IP address or host name, with or without a port, such as 203.0.113.2:15443")
            }),
            "network" => place().map(|name| Self::Network(Network::new(name))),
            "cluster" => place().map(|name| Self::Cluster(ClusterId::new(name))),
            "peer" => place().map(|name| Self::Peer(name.into())),
            _ => Err(format!("{kind:?} is not a kind of target; expected one of {}", Self::KINDS.join(", "))),
        }
    }

    /// Returns the word for the kind of the target.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Service(_) => "service",
            Self::Endpoint(..) => "endpoint",
            Self::Gateway(..) => "gateway",
            Self::Network(_) => "network",
            Self::Cluster(_) => "cluster",
            Self::Peer(_) => "peer",
        }
    }

    /// Returns the name of the target, as [`Self::parse`] reads it.
    pub fn name(&self) -> String {
        let with_port = |host: &Host, port: &Option<u16>| match (host, port) {
            (Host::Ip(IpAddr::V6(ip)), Some(port)) => format!("[{ip}]:{port}"),
            (host, Some(port)) => format!("{host}:{port}"),
            (host, None) => host.to_string(),
        };
        match self {
            Self::Service(name) => name.to_string(),
            Self::Endpoint(ip, port) => with_port(&Host::Ip(*ip), port),
            Self::Gateway(host, port) => with_port(host, port),
            Self::Network(network) => network.to_string(),
            Self::Cluster(cluster) => cluster.to_string(),
            Self::Peer(peer) => peer.to_string(),
        }
    }
}

impl fmt::Display for DrainTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.name())
    }
}

/// An order to move calls away from a target. Times are in seconds since 1970-01-01 UTC, so that replicas agree on the part that
/// is left, also after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Drain {
    /// The part of the mesh that is emptied.
    pub target: DrainTarget,
    /// The time at which the drain begins.
    pub since: u64,
    /// The time over which the part that is left falls from all to `to_percent`, in equal steps.
    pub over: Duration,
    /// The part of its weight, in percent, that the target keeps at the end: 0 to 99.
    pub to_percent: u8,
    /// True if the target gets more than an earlier order has left, up to `to_percent`, if that is more.
    #[serde(default)]
    pub raises: bool,
    /// The time at which the drain ends and the target gets its whole weight again; `None`: when the order is withdrawn.
    pub until: Option<u64>,
    /// The time after `since` from which on existing connections are closed; `None`: they are left alone.
    pub close_after: Option<Duration>,
    /// The operator's reason; may be empty.
    pub reason: Arc<str>,
}

impl Drain {
    /// Returns the parts of [`PARTS`] of the target that are left at a time in seconds since 1970; `None` if the drain has ended.
    /// `before` are the parts that an earlier order of the same source had left. Whatever the source, an order never raises the parts
    /// that are left, unless it says so (`raise`).
    pub fn left_after(&self, before: Option<u16>, now: u64) -> Option<u16> {
        let left = self.parts_left(now)?;
        let most =
            before.map_or(PARTS, |before| if self.raises { before.max(self.parts_at_end()) } else { before });
        Some(left.min(most))
    }

    /// Returns the parts of [`PARTS`] that the ramp has left at a time in seconds since 1970; `None` if the drain has ended. Before its
    /// end the ramp takes whole steps.
    pub fn parts_left(&self, now: u64) -> Option<u16> {
        if self.until.is_some_and(|until| until <= now) {
            return None;
        }
        let (elapsed, over) = match (now.checked_sub(self.since), self.over.as_secs()) {
            (None, _) => return Some(PARTS),
            (Some(elapsed), over) if elapsed >= over => return Some(self.parts_at_end()),
            (Some(elapsed), over) => (elapsed, over),
        };
        // Rounded down, so that no step comes early.
        let taken = u128::from(PARTS - self.parts_at_end()) * u128::from(elapsed) / u128::from(over);
        let taken = u16::try_from(taken).unwrap_or(PARTS) / STEP * STEP;
        Some(PARTS.saturating_sub(taken))
    }

    /// Returns the parts of [`PARTS`] that are left at the end of the ramp.
    pub fn parts_at_end(&self) -> u16 {
        PARTS / 100 * u16::from(self.to_percent.min(100))
    }

    /// Returns this order as it takes the place of another one for the same target, while the target has `left` parts at the time
    /// `now`: it begins so much earlier that its ramp goes on from there, or is at its end.
    #[must_use]
    pub fn going_on_from(self, left: u16, now: u64) -> Self {
        let over = u128::from(self.over.as_secs());
        let taken = u128::from(PARTS.saturating_sub(left).next_multiple_of(STEP));
        let to_take = u128::from(PARTS - self.parts_at_end());
        // The first moment at which as many parts are taken.
        let elapsed = (taken * over).div_ceil(to_take.max(1)).min(over);
        let since = now.saturating_sub(u64::try_from(elapsed).unwrap_or(u64::MAX));
        Self { since: since.min(self.since), ..self }
    }

    /// Returns the time in seconds since 1970 at which the ramp is at its end.
    pub fn ramp_ends(&self) -> u64 {
        self.since.saturating_add(self.over.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(over: u64, to_percent: u8, until: Option<u64>) -> Drain {
        let target = DrainTarget::parse("network", "west").expect("a target");
        let over = Duration::from_secs(over);
        let (close_after, reason) = (None, "".into());
        Drain { target, since: 1_000, over, to_percent, raises: false, until, close_after, reason }
    }

    /// Returns a number of steps in parts.
    fn steps(count: u16) -> Option<u16> {
        Some(count * STEP)
    }

    #[test]
    fn the_ramp_is_even_and_ends_at_its_time() {
        let ramp = drain(64, 0, Some(2_000));
        let left = |now| ramp.parts_left(now);
        assert_eq!(
            (left(0), left(1_000), left(1_001), left(1_002)),
            (steps(32), steps(32), steps(32), steps(31))
        );
        assert_eq!((left(1_032), left(1_063), left(1_064)), (steps(16), steps(1), Some(0)));
        assert_eq!((left(1_999), left(2_000)), (Some(0), None), "it ends by itself");
        assert_eq!(drain(0, 0, None).parts_left(1_000), Some(0), "at once");
        assert_eq!(drain(0, 50, None).parts_left(u64::MAX), steps(16));
        assert_eq!(drain(100, 50, None).parts_left(1_050), steps(24));
        assert_eq!(drain(u64::MAX, 0, None).parts_left(u64::MAX), steps(1));
    }

    #[test]
    fn a_target_keeps_exactly_the_percent_that_was_asked_for() {
        for to_percent in 0..=99 {
            let ramp = drain(100, to_percent, None);
            let end = PARTS / 100 * u16::from(to_percent);
            assert_eq!(ramp.parts_left(1_100), Some(end));
            // There are no more steps than for a drain to nothing.
            let seen: std::collections::BTreeSet<_> =
                (1_000..=1_100).filter_map(|now| ramp.parts_left(now)).collect();
            assert!(seen.len() <= 33 && seen.iter().all(|left| *left == end || left % STEP == 0), "{seen:?}");
        }
    }

    #[test]
    fn an_order_goes_on_from_what_an_earlier_one_has_left() {
        let now = 100_000;
        for (over, to_percent) in
            [(0, 0), (1, 0), (12, 0), (64, 0), (600, 50), (3_600, 0), (3_600, 90), (7, 96), (3_600, 1)]
        {
            let order = Drain { since: now, ..drain(over, to_percent, None) };
            let end = order.parts_at_end();
            assert_eq!(order.parts_left(now + over), Some(end));
            for left in (0..=PARTS).step_by(20) {
                let next = order.clone().going_on_from(left, now);
                let begins = next.parts_left(now).expect("in force");
                assert!(
                    begins <= left.max(end),
                    "{over} s to {to_percent} %: {left} were left, {begins} are"
                );
                let whole = left / STEP * STEP;
                assert!(
                    begins == whole.max(end) || over < 32 || left < end,
                    "a second has several steps: {left} {begins}"
                );
                assert!(next.since <= now && next.ramp_ends() >= now);
            }
            assert_eq!(order.clone().going_on_from(PARTS, now), order, "nothing was taken yet");
        }
        let later = Drain { since: now + 500, ..drain(60, 0, None) };
        assert_eq!(later.going_on_from(0, now).parts_left(now), Some(0), "it does not wait for its own time");
    }

    #[test]
    fn what_is_left_rises_only_if_the_order_says_so_and_only_to_its_end() {
        let now = 100_000;
        let begins = |order: Drain, before| Drain { since: now, ..order }.left_after(before, now);
        let half = steps(16);
        assert_eq!(begins(drain(60, 0, None), None), Some(PARTS));
        for to in [0, 50, 99] {
            for over in [0, 60] {
                assert_eq!(begins(drain(over, to, None), Some(0)), Some(0), "{over} s to {to} %");
            }
        }
        assert_eq!(begins(drain(60, 0, None), half), half, "it waits for its ramp to come down");
        assert_eq!(begins(drain(0, 0, None), half), Some(0));
        let raise = |over, to| Drain { raises: true, ..drain(over, to, None) };
        assert_eq!(begins(raise(60, 50), Some(0)), half, "not to all of it first");
        assert_eq!(begins(raise(60, 0), half), half);
        assert_eq!(begins(drain(0, 0, Some(now)), Some(0)), None, "it has ended");
    }

    #[test]
    fn targets_are_read_as_they_are_written() {
        let all = [
            ("service", "Reviews.shop.svc.cluster.local", "reviews.shop.svc.cluster.local"),
            ("endpoint", "::ffff:10.0.0.1", "10.0.0.1"),
            ("endpoint", "[fd00::1]:8443", "[fd00::1]:8443"),
            ("endpoint", "fd00::1", "fd00::1"),
            ("gateway", "gw.west.example:15443", "gw.west.example:15443"),
            ("gateway", "203.0.113.2", "203.0.113.2"),
            ("network", "west", "west"),
            ("cluster", "c1", "c1"),
            ("peer", "globex", "globex"),
        ];
        for (kind, name, canonical) in all {
            let target = DrainTarget::parse(kind, name).expect(name);
            assert_eq!((target.kind(), &*target.name()), (kind, canonical));
            assert_eq!(DrainTarget::parse(kind, &target.name()), Ok(target));
        }
        for (kind, name) in [
            ("endpoint", "a.test:1"),
            ("endpoint", "10.0.0.1:0"),
            ("endpoint", "10.0.0.1:65536"),
            ("gateway", "a b"),
            ("network", " "),
            ("service", "*"),
            ("zone", "a"),
        ] {
            assert!(DrainTarget::parse(kind, name).is_err(), "{kind} {name}");
        }
    }
}
