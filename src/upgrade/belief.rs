//! The beliefs of a process: what it has learnt about the world, which takes another process time to learn again. A new process gets
//! them over the upgrade socket, and a restarted one reads them from the state folder.
//!
//! Each belief has the time at which it was known, and is forgotten when it is older than its bound, or when nothing that it is about
//! exists within [`SUBJECT_WITHIN`]; those about endpoints wait for them until they are too old. Only what differs from what a new
//! process assumes is carried, and at most [`BELIEFS_MAX`] of all.
//!
//! | belief | owner | forgotten |
//! |---|---|---|
//! | what drains of documents have left | `aggregator::drains_left` | with the document; that of a registry is kept until the registry is read; a day after a process last knew it |
//! | numbers of endpoints that were lost, or do not stand yet | `aggregator::owner::demands` | 10 min after they were last seen |
//! | addresses of host names | `aggregator::owner::names` | a day after a process last used them |
//! | verdicts on gateways | `aggregator::liveness` | a day after the last probe; each outage an hour after it began |
//! | distances of networks | `aggregator::liveness` | a day after the last measurement; a peer's report after 15 min |
//! | holds on registries | `aggregator::lifecycle` | at the end of the hold |
//! | failures, silence and ejection of endpoints | `dataplane::upstreams` | 10 min after the last use, or at the end of the ejection |
//! | health checks of endpoints | `dataplane::checks` | 10 min after the last use |
//!
//! The fields of [`Beliefs`] and of the owners' states are named one by one, without `..`, where they are collected and applied. So a
//! field that nobody carries, or decides not to carry, does not compile.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use isthmus_model::drain::DrainTarget;
use isthmus_model::probe::{Answer, Fault};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// The largest number of beliefs that are carried, of all kinds together; further ones are dropped.
pub const BELIEFS_MAX: usize = 20_000;
/// The time from the start within which the subject of a belief must be known.
pub const SUBJECT_WITHIN: Duration = Duration::from_secs(600);
/// The age at which the addresses of a host name, the verdict on a gateway, the distance of a network, and what a drain has left are
/// forgotten.
pub const FORGET_AFTER: Duration = Duration::from_secs(24 * 3_600);

/// A time, in milliseconds since 1970 on the clock of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(u64);

impl From<SystemTime> for Moment {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

impl From<Moment> for SystemTime {
    fn from(moment: Moment) -> Self {
        // A damaged value must not overflow.
        Self::UNIX_EPOCH + Duration::from_millis(moment.0.min(1 << 52))
    }
}

/// The present on the two clocks: the one that processes share, and the steady one of this process.
#[derive(Clone, Copy, Debug)]
pub struct Present {
    /// The present on the steady clock.
    pub instant: Instant,
    /// The present on the clock of the host.
    pub moment: Moment,
}

impl Present {
    /// Returns the present.
    pub fn now() -> Self {
        Self { instant: Instant::now(), moment: SystemTime::now().into() }
    }

    /// Returns the time since a moment; zero if the clock was set back before it.
    pub fn age(self, moment: Moment) -> Duration {
        Duration::from_millis(self.moment.0.saturating_sub(moment.0))
    }

    /// Returns the time until a moment; zero if it is over.
    pub fn until(self, moment: Moment) -> Duration {
        Duration::from_millis(moment.0.saturating_sub(self.moment.0))
    }

    /// Returns a time on the steady clock as a moment.
    pub fn moment_of(self, at: Instant) -> Moment {
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let ahead = milliseconds(at.saturating_duration_since(self.instant));
        let ago = milliseconds(self.instant.saturating_duration_since(at));
        Moment(self.moment.0.saturating_add(ahead).saturating_sub(ago))
    }

    /// Returns a moment of the past on the steady clock. `None` if that clock began later.
    pub fn instant_of(self, moment: Moment) -> Option<Instant> {
        self.instant.checked_sub(self.age(moment))
    }
}

/// All beliefs of a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Beliefs {
    /// The addresses of host names.
    pub names: Vec<NameBelief>,
    /// The verdicts on gateways.
    pub gateways: Vec<GatewayBelief>,
    /// The distances of networks.
    pub distances: Vec<DistanceBelief>,
    /// The holds on registries.
    pub holds: Vec<HoldBelief>,
    /// The shares that planned drains of documents have left of their targets.
    pub drains: Vec<DrainBelief>,
    /// The numbers of endpoints that services had a short time ago.
    pub demands: Vec<DemandBelief>,
    /// The endpoints that fail.
    pub endpoints: Vec<EndpointBelief>,
    /// The endpoints whose health checks fail.
    pub checks: Vec<CheckBelief>,
}

/// A belief of any kind: an element of a message, and a line of the file in the state folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Belief {
    /// See [`Beliefs::names`].
    Name(NameBelief),
    /// See [`Beliefs::gateways`].
    Gateway(GatewayBelief),
    /// See [`Beliefs::distances`].
    Distance(DistanceBelief),
    /// See [`Beliefs::holds`].
    Hold(HoldBelief),
    /// See [`Beliefs::drains`].
    Drain(DrainBelief),
    /// See [`Beliefs::demands`].
    Demand(DemandBelief),
    /// See [`Beliefs::endpoints`].
    Endpoint(EndpointBelief),
    /// See [`Beliefs::checks`].
    Check(CheckBelief),
}

/// The addresses of a host name, or the targets of a name of SRV records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NameBelief {
    /// The host name.
    pub name: String,
    /// The addresses.
    pub addresses: Vec<IpAddr>,
    /// The targets of the SRV records.
    pub targets: Vec<TargetBelief>,
    /// The time at which the name was last in use.
    pub used: Moment,
    /// The time since which the name has not existed any more, if it keeps its last addresses.
    pub missing_since: Option<Moment>,
}

/// A target of SRV records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetBelief {
    /// The host name.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The priority.
    pub priority: u16,
    /// The weight.
    pub weight: u16,
    /// The addresses of the host.
    pub addresses: Vec<IpAddr>,
}

/// The verdict on the address and port of a gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GatewayBelief {
    /// The address and port.
    pub address: SocketAddr,
    /// The time of the last probe.
    pub probed: Moment,
    /// The time of the last connect; `None` if none has succeeded.
    pub took: Option<Duration>,
    /// The best answer to a hello so far.
    pub best: Answer,
    /// True if the gateway is taken out.
    pub is_out: bool,
    /// The number of good probes in a row, up to now.
    pub good: u32,
    /// The number of failed probes in a row, up to now.
    pub failed: u32,
    /// The time of the first probe that failed.
    pub failing_since: Option<Moment>,
    /// The fault of the last probe that failed.
    pub fault: Option<Fault>,
    /// The times at which the gateway was taken out.
    pub outages: Vec<Moment>,
    /// The smallest time of a connect in the last minute, and when it was measured.
    pub minimum: Option<(Moment, Duration)>,
    /// The time at which the gateway has said that it stops.
    pub stopping_since: Option<Moment>,
    /// The time at which the link with the gateway has lost its heartbeats.
    pub silent_since: Option<Moment>,
}

/// The distance between two networks, as steering uses it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DistanceBelief {
    /// The network that was measured.
    pub to: String,
    /// The network from which it was measured.
    pub from: String,
    /// The peer's newest report, and when it came; `None` if this gateway has measured.
    pub reported: Option<(Moment, Duration)>,
    /// The round-trip time in use.
    pub used: Option<Duration>,
    /// The time at which the distance was last in use.
    pub known: Moment,
    /// The time since which measurements have differed from the one in use.
    pub differs_since: Option<Moment>,
}

/// The hold on an update of a registry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HoldBelief {
    /// The name of the registry.
    pub registry: String,
    /// The end of the hold.
    pub until: Moment,
    /// True if the update leaves nothing.
    pub is_emptied: bool,
    /// The items in use, in the form of a copy on disk. They are handed over where there is no state folder.
    pub items: Option<String>,
}

/// The share that a planned drain of a document, in the config or in a registry, has left of its target: a document that amends the drain
/// begins from this share. The share that an operator's order begins from is decided when the order is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrainBelief {
    /// The name of the registry that has the document; `None`: the config has it.
    pub registry: Option<String>,
    /// The target.
    pub target: DrainTarget,
    /// The [parts](isthmus_model::drain::PARTS) that are left.
    pub left: u16,
    /// The time at which a process last knew it.
    pub known: Moment,
}

/// The endpoints that a service had on a network a short time ago.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DemandBelief {
    /// The host name of the service.
    pub service: String,
    /// The network.
    pub network: String,
    /// The numbers of endpoints that there were and are not any more, each with the time at which it was last seen.
    pub seen: Vec<NumberBelief>,
    /// The number of endpoints that had stood, if `rises` has larger ones.
    pub stands: u64,
    /// The larger numbers that did not stand yet, each with the time since which there were as many.
    pub rises: Vec<NumberBelief>,
    /// True if endpoints were terminating that are counted among these numbers, or among those that have replaced them.
    pub is_leaving: bool,
    /// The number that the owner said before a larger one for which the endpoints have not been there yet.
    pub said_before: Option<u64>,
}

/// A number of endpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumberBelief {
    /// The sum of the weights of the endpoints.
    pub weight: u64,
    /// The time.
    pub at: Moment,
}

/// An endpoint that has failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndpointBelief {
    /// The group of the endpoint: the key of the route, or `hostname:port`.
    pub group: String,
    /// The address by which the state is kept.
    pub address: SocketAddr,
    /// The time of the last dial or check.
    pub used: Moment,
    /// The place of the address that is tried first.
    pub first: usize,
    /// The failures of the address, for all services there.
    pub shared: FailuresBelief,
    /// The failures that may depend on the hellos to this service.
    pub own: FailuresBelief,
    /// The number of failures in a row that do not count for ejection.
    pub not_counted: u32,
    /// The number of hellos in a row without an answer.
    pub silences: u32,
    /// The time at which the endpoint was last left out for its silence.
    pub silent_at: Option<Moment>,
    /// The end of the ejection.
    pub ejected_until: Option<Moment>,
    /// The time at which the endpoint last answered a hello with bytes that are not TLS.
    pub not_tls: Option<Moment>,
}

/// Failures in a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FailuresBelief {
    /// Their number.
    pub count: u32,
    /// The time of the last one that counts for ejection.
    pub at: Option<Moment>,
    /// The last failure, even if the endpoint has taken connections since.
    pub last: Option<FailureBelief>,
}

/// The failure of a connection or of a health check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailureBelief {
    /// The reason, by its name.
    pub reason: String,
    /// The answer of the endpoint.
    pub detail: Option<String>,
    /// True if a health check has failed.
    pub by_check: bool,
    /// The time of the failure.
    pub time: Moment,
}

/// An endpoint whose health checks have failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckBelief {
    /// The address that is checked.
    pub address: SocketAddr,
    /// The time of the last check.
    pub checked: Moment,
    /// The number of failed checks in a row.
    pub failed: u32,
    /// True if the endpoint is unhealthy.
    pub unhealthy: bool,
    /// The last failure.
    pub last_failure: Option<FailureBelief>,
}

impl Beliefs {
    /// Returns the beliefs one by one, those first whose loss costs the most, and at most [`BELIEFS_MAX`].
    pub fn all(self) -> impl Iterator<Item = Belief> {
        let Self { names, gateways, distances, holds, drains, demands, endpoints, checks } = self;
        let names = names.into_iter().map(Belief::Name);
        let gateways = gateways.into_iter().map(Belief::Gateway);
        let distances = distances.into_iter().map(Belief::Distance);
        let first = holds.into_iter().map(Belief::Hold).chain(drains.into_iter().map(Belief::Drain));
        // Without a belief about an endpoint, calls fail; without one about a demand, an endpoint gets more calls than it serves well.
        let demands = demands.into_iter().map(Belief::Demand);
        let endpoints = endpoints.into_iter().map(Belief::Endpoint);
        let checks = checks.into_iter().map(Belief::Check);
        let of_endpoints = checks.chain(endpoints).chain(demands);
        first.chain(gateways).chain(distances).chain(names).chain(of_endpoints).take(BELIEFS_MAX)
    }

    /// Returns true if the beliefs differ from these, apart from the times at which they were known and from measured times, which
    /// change all the time.
    pub fn differ_from(&self, others: &Self) -> bool {
        let Self { names, gateways, distances, holds, drains, demands, endpoints, checks } = self;
        let is_same = same(names, &others.names, NameBelief::lasting)
            && same(gateways, &others.gateways, GatewayBelief::lasting)
            && same(distances, &others.distances, DistanceBelief::lasting)
            && same(holds, &others.holds, HoldBelief::lasting)
            && same(drains, &others.drains, DrainBelief::lasting)
            && same(demands, &others.demands, DemandBelief::lasting)
            && same(endpoints, &others.endpoints, EndpointBelief::lasting)
            && same(checks, &others.checks, CheckBelief::lasting);
        !is_same
    }
}

/// Returns true if both lists have the same parts, as `part` returns them, in the same order.
fn same<'a, B, P: PartialEq>(one: &'a [B], other: &'a [B], part: impl Fn(&'a B) -> P) -> bool {
    one.iter().map(&part).eq(other.iter().map(&part))
}

// The parts of beliefs whose change is worth a write to disk. The others change with each probe or connection.

impl NameBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self { name, addresses, targets, used: _, missing_since } = self;
        (name, addresses, targets, missing_since)
    }
}

impl GatewayBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self {
            address,
            probed: _,
            took,
            best,
            is_out,
            good: _,
            failed: _,
            failing_since,
            fault,
            outages,
            minimum: _,
            stopping_since,
            silent_since,
        } = self;
        let times = (failing_since, stopping_since, silent_since);
        (address, took.is_some(), best, is_out, fault, outages.len(), times)
    }
}

impl DistanceBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self { to, from, reported, used, known: _, differs_since: _ } = self;
        (to, from, reported.is_some(), used)
    }
}

impl HoldBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self { registry, until: _, is_emptied, items } = self;
        (registry, is_emptied, items)
    }
}

impl DrainBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self { registry, target, left, known: _ } = self;
        (registry, target, left)
    }
}

impl DemandBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        // Numbers that a rollout changes for minutes are written as the process ends.
        let Self { service, network, seen, stands: _, rises: _, is_leaving: _, said_before } = self;
        let numbers: Vec<u64> = seen.iter().map(|number| number.weight).collect();
        (service, network, numbers, said_before)
    }
}

impl EndpointBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self {
            group,
            address,
            used: _,
            first,
            shared,
            own,
            not_counted,
            silences,
            silent_at: _,
            ejected_until,
            not_tls,
        } = self;
        let failures = [shared, own].map(|FailuresBelief { count, at: _, last }| (count, last));
        let is_left_out = (ejected_until.is_some(), not_tls.is_some());
        (group, address, first, failures, not_counted, silences, is_left_out)
    }
}

impl CheckBelief {
    fn lasting(&self) -> impl PartialEq + '_ {
        let Self { address, checked: _, failed, unhealthy, last_failure } = self;
        (address, failed, unhealthy, last_failure)
    }
}

impl Extend<Belief> for Beliefs {
    fn extend<T: IntoIterator<Item = Belief>>(&mut self, all: T) {
        for belief in all {
            match belief {
                Belief::Name(name) => self.names.push(name),
                Belief::Gateway(gateway) => self.gateways.push(gateway),
                Belief::Distance(distance) => self.distances.push(distance),
                Belief::Hold(hold) => self.holds.push(hold),
                Belief::Drain(drain) => self.drains.push(drain),
                Belief::Demand(demand) => self.demands.push(demand),
                Belief::Endpoint(endpoint) => self.endpoints.push(endpoint),
                Belief::Check(check) => self.checks.push(check),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(seconds: u64) -> Moment {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).expect("in range").into()
    }

    /// Returns a belief of each kind, known at this time.
    fn beliefs(seconds: u64) -> Beliefs {
        let at = moment(seconds);
        let address = SocketAddr::from(([192, 0, 2, 1], 443));
        let failure = FailureBelief {
            reason: "endpoint_refused".to_owned(),
            detail: None,
            by_check: false,
            time: moment(1),
        };
        let target = TargetBelief {
            host: "t.test".to_owned(),
            port: 1,
            priority: 2,
            weight: 3,
            addresses: vec![address.ip()],
        };
        Beliefs {
            names: vec![NameBelief {
                name: "a.test".to_owned(),
                addresses: vec![address.ip()],
                targets: vec![target],
                used: at,
                missing_since: Some(moment(1)),
            }],
            gateways: vec![GatewayBelief {
                address,
                probed: at,
                took: Some(Duration::from_micros(seconds)),
                best: Answer::Bytes,
                is_out: true,
                good: 1,
                failed: 0,
                failing_since: Some(moment(1)),
                fault: Some(Fault::Mute),
                outages: vec![moment(1), at],
                minimum: Some((at, Duration::from_millis(1))),
                stopping_since: None,
                silent_since: None,
            }],
            distances: vec![DistanceBelief {
                to: "west".to_owned(),
                from: "east".to_owned(),
                reported: Some((at, Duration::from_millis(30))),
                used: Some(Duration::from_millis(30)),
                known: at,
                differs_since: None,
            }],
            holds: vec![HoldBelief { registry: "r".to_owned(), until: at, is_emptied: true, items: None }],
            drains: vec![DrainBelief {
                registry: Some("etcd".to_owned()),
                target: DrainTarget::parse("network", "west").expect("a target"),
                left: 1_600,
                known: at,
            }],
            demands: vec![DemandBelief {
                service: "a.test".to_owned(),
                network: "west".to_owned(),
                seen: vec![NumberBelief { weight: 30, at }],
                stands: 9,
                rises: vec![NumberBelief { weight: 12, at }],
                is_leaving: true,
                said_before: Some(10),
            }],
            endpoints: vec![EndpointBelief {
                group: "a.test:443".to_owned(),
                address,
                used: at,
                first: 1,
                shared: FailuresBelief { count: 2, at: Some(at), last: Some(failure) },
                own: FailuresBelief::default(),
                not_counted: 0,
                silences: 1,
                silent_at: None,
                ejected_until: Some(at),
                not_tls: None,
            }],
            checks: vec![CheckBelief {
                address,
                checked: at,
                failed: 3,
                unhealthy: true,
                last_failure: None,
            }],
        }
    }

    #[test]
    fn what_is_written_is_read_whatever_the_kind() {
        let (written, mut read) = (beliefs(7), Beliefs::default());
        let lines = written.clone().all().map(|belief| serde_json::to_string(&belief).expect("JSON"));
        read.extend(lines.map(|line| serde_json::from_str::<Belief>(&line).expect("a belief")));
        assert_eq!(read, written);
    }

    #[test]
    fn beliefs_differ_by_what_is_known_and_not_by_when() {
        let (before, mut after) = (beliefs(7), beliefs(8));
        assert!(!after.differ_from(&before));
        after.gateways[0].is_out = false;
        assert!(after.differ_from(&before));
    }

    #[test]
    fn of_too_many_beliefs_demands_are_dropped_first_and_then_endpoints() {
        let is_demand = |belief: &Belief| matches!(belief, Belief::Demand(_));
        let is_endpoint = |belief: &Belief| matches!(belief, Belief::Endpoint(_));
        let mut many = beliefs(7);
        many.demands = vec![many.demands[0].clone(); 2 * BELIEFS_MAX];
        let kept: Vec<Belief> = many.clone().all().collect();
        assert_eq!(kept.len(), BELIEFS_MAX);
        assert!(kept.iter().any(is_endpoint), "none is lost to demands");
        assert_eq!(kept.iter().position(is_demand), Some(7), "{:?}", &kept[..7]);
        many.endpoints = vec![many.endpoints[0].clone(); 2 * BELIEFS_MAX];
        let kept: Vec<Belief> = many.all().collect();
        assert_eq!(kept.len(), BELIEFS_MAX);
        assert_eq!((kept.iter().position(is_endpoint), kept.iter().any(is_demand)), (Some(6), false));
    }

    #[test]
    fn times_keep_their_age_on_the_clock_of_another_process() {
        let present = Present { instant: Instant::now(), moment: moment(1_000) };
        let ago =
            |seconds| present.instant.checked_sub(Duration::from_secs(seconds)).expect("after the start");
        assert_eq!(present.moment_of(ago(1)), moment(999));
        assert_eq!(present.moment_of(present.instant + Duration::from_secs(9)), moment(1_009));
        assert_eq!(present.instant_of(moment(999)), Some(ago(1)));
        let ages = [present.age(moment(900)), present.age(moment(2_000)), present.until(moment(1_009))];
        assert_eq!(ages.map(|age| age.as_secs()), [100, 0, 9], "a clock that was set back makes nothing old");
    }
}
