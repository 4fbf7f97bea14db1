//! Looks up the addresses of host names, at given name servers or at those of the system, and decides which addresses a name has
//! after the look-up. The results are not cached.
//!
//! A look-up asks for each address family, and each answer may fail. An answer says something about its own family only, so a
//! name loses its addresses only if every family was answered and none has an address:
//!
//! | found | failed | addresses |
//! |---|---|---|
//! | some | none | those found |
//! | some | one family | those found, and the last ones of the family that failed |
//! | none | one family or both | the last ones |
//! | none | none | the last ones for a while, then none |
//!
//! A name of SRV records has targets, which are settled in the same way; the addresses of each target are looked up with it.

use std::cmp::Reverse;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use hickory_resolver::{Hosts, TokioResolver};

use isthmus_model::address::{SrvTarget, canonical_ip};
use isthmus_model::name::HostName;

/// The deadline of one look-up, with its retries.
const LOOKUP: Duration = Duration::from_secs(10);

/// The deadline of looking up the SRV records of a name and the addresses of all of their targets.
const RECORDS: Duration = Duration::from_secs(30);
/// The largest number of targets of a name; those of the lowest priority come first.
const TARGETS_MAX: usize = 64;

/// Looks up host names.
pub struct Lookup(TokioResolver);

/// The answer for one address family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The addresses; empty if the name does not exist or has no address of this family.
    Addresses(Vec<IpAddr>),
    /// The look-up failed with this text.
    Failed(String),
}

/// The result of a look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// The answer to the question for A records.
    pub ipv4: Answer,
    /// The answer to the question for AAAA records.
    pub ipv6: Answer,
}

/// The records of a name of SRV records, each with the addresses of its target; or the failure of the look-up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Records(pub Result<Vec<(SrvRecord, Resolution)>, String>);

/// One SRV record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrvRecord {
    /// The host name of the target.
    pub host: HostName,
    /// The port.
    pub port: u16,
    /// The priority; the lowest is used first.
    pub priority: u16,
    /// The weight among the records of one priority.
    pub weight: u16,
}

/// The result of looking up a name of either kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookedUp {
    /// The name is one of a host.
    Host(Resolution),
    /// The name is one of SRV records.
    Service(Records),
}

impl From<Resolution> for LookedUp {
    fn from(resolution: Resolution) -> Self {
        Self::Host(resolution)
    }
}

/// The reason why a look-up does not confirm all addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// The cause in the last look-up.
    pub cause: Cause,
    /// The time of the first look-up that found no address in any family, if no later one has found an address.
    missing_since: Option<Instant>,
}

impl Doubt {
    /// Returns the doubt about a name that has not existed since this time.
    pub fn missing(since: Instant) -> Self {
        Self { cause: Cause::Missing, missing_since: Some(since) }
    }

    /// Returns the time since which the name has not existed.
    pub fn missing_since(&self) -> Option<Instant> {
        self.missing_since
    }
}

/// The answer of a look-up that does not confirm the addresses of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It failed with this text, at least for one family.
    Failed(String),
    /// The name does not exist, or has no address.
    Missing,
}

impl Lookup {
    /// Makes a value that asks these servers, or if there are none, the system's. Fails only if the system's servers cannot be
    /// read.
    pub fn at(servers: &[SocketAddr]) -> Result<Self, NetError> {
        let mut builder = if servers.is_empty() {
            TokioResolver::builder_tokio()?
        } else {
            let servers = servers.iter().map(|server| {
                let mut config = NameServerConfig::udp_and_tcp(server.ip());
                config.connections.iter_mut().for_each(|connection| connection.port = server.port());
                config
            });
            let config = ResolverConfig::from_name_servers(servers.collect());
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        };
        // The resolver's cache is off. The times of look-ups already follow the TTL within bounds of their own, and a cached answer
        // may be older than these bounds allow.
        builder.options_mut().cache_size = 0;
        builder.options_mut().ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        builder.build().map(Self)
    }

    /// Looks up a name; returns the result, with the shorter TTL of the families that have addresses.
    pub async fn addresses(&self, name: &HostName) -> (Resolution, Option<Duration>) {
        // The library's look-up of both families returns one verdict, in which "no address" of one family hides the failure of
        // the other one.
        let ((ipv4, ttl), (ipv6, other_ttl)) =
            tokio::join!(self.family(name, RecordType::A), self.family(name, RecordType::AAAA));
        (Resolution { ipv4, ipv6 }, ttl.into_iter().chain(other_ttl).min())
    }

    /// Looks up a name of either kind; returns the result, with its TTL if it has one.
    pub async fn name(&self, name: &HostName) -> (LookedUp, Option<Duration>) {
        if !name.is_service() {
            let (resolution, ttl) = self.addresses(name).await;
            return (LookedUp::Host(resolution), ttl);
        }
        let (records, ttl) = match tokio::time::timeout(RECORDS, self.records(name)).await {
            Ok(found) => found,
            Err(_) => (Records(Err("the DNS queries for the targets timed out".to_owned())), None),
        };
        (LookedUp::Service(records), ttl)
    }

    /// Looks up the SRV records of a name, and the addresses of their targets; returns them with the shortest TTL.
    pub async fn records(&self, name: &HostName) -> (Records, Option<Duration>) {
        let lookup = self.0.lookup(format!("{name}."), RecordType::SRV);
        let found = match tokio::time::timeout(LOOKUP, lookup).await {
            Err(_) => return (Records(Err("the DNS query timed out".to_owned())), None),
            Ok(Err(error)) if error.is_no_records_found() => return (Records(Ok(Vec::new())), None),
            Ok(Err(error)) => return (Records(Err(error.to_string())), None),
            Ok(Ok(found)) => found,
        };
        let mut ttl = found.valid_until().saturating_duration_since(Instant::now());
        let records = found.answers().iter().filter_map(|record| match &record.data {
            RData::SRV(srv) => {
                // The target `.` says that there is no service (RFC 2782); it is no host name.
                let host = HostName::parse(srv.target.to_utf8().trim_end_matches('.')).ok()?;
                let (port, priority, weight) = (srv.port, srv.priority, srv.weight);
                (port > 0).then_some(SrvRecord { host, port, priority, weight })
            }
            _ => None,
        });
        let mut records: Vec<SrvRecord> = records.collect();
        records.sort_by_key(|record| (record.priority, Reverse(record.weight)));
        records.truncate(TARGETS_MAX);
        let mut all = Vec::with_capacity(records.len());
        for record in records {
            let (resolution, of_target) = self.addresses(&record.host).await;
            ttl = ttl.min(of_target.unwrap_or(ttl));
            all.push((record, resolution));
        }
        let ttl = (!all.is_empty()).then_some(ttl);
        (Records(Ok(all)), ttl)
    }

    /// Looks up both families of a name, with the search list unless the name has enough dots.
    async fn with_search_list(&self, name: Name) -> io::Result<Vec<IpAddr>> {
        match tokio::time::timeout(LOOKUP, self.0.lookup_ip(name)).await {
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the DNS query timed out")),
            Ok(Ok(found)) => Ok(found.iter().collect()),
            Ok(Err(error)) if error.is_no_records_found() => Ok(Vec::new()),
            Ok(Err(error)) => Err(io::Error::other(error)),
        }
    }

    async fn family(&self, name: &HostName, kind: RecordType) -> (Answer, Option<Duration>) {
        // A trailing dot disables the system's search list: names are fully qualified.
        let lookup = self.0.lookup(format!("{name}."), kind);
        match tokio::time::timeout(LOOKUP, lookup).await {
            Err(_) => (Answer::Failed("the DNS query timed out".to_owned()), None),
            Ok(Ok(found)) => {
                let answer = Answer::of(addresses_in(found.answers()).into_iter().map(canonical_ip));
                let ttl = found.valid_until().saturating_duration_since(Instant::now());
                let has_any = matches!(&answer, Answer::Addresses(addresses) if !addresses.is_empty());
                (answer, has_any.then_some(ttl))
            }
            // This includes NXDOMAIN.
            Ok(Err(error)) if error.is_no_records_found() => (Answer::Addresses(Vec::new()), None),
            Ok(Err(error)) => (Answer::Failed(error.to_string()), None),
        }
    }
}

/// Looks up the addresses of a name as this host's other programs do: in `/etc/hosts`, then at the system's name servers with its
/// search list. Returns IPv4 addresses first, and none if the name does not exist.
///
/// The C library's `getaddrinfo` is not called. In a static binary it loads the host's modules for names and with them the host's C
/// library; if that has another version, the process dies by a signal.
pub(super) async fn by_system(name: &HostName) -> io::Result<Vec<IpAddr>> {
    let name = Name::from_ascii(name.as_str()).map_err(io::Error::other)?;
    let mut hosts = Hosts::default();
    if let Ok(bytes) = std::fs::read("/etc/hosts") {
        // A comment may have bytes that are not UTF-8.
        hosts.read_hosts_conf(String::from_utf8_lossy(&bytes).as_bytes()).map_err(io::Error::other)?;
    }
    let listed = |kind| hosts.lookup_static_host(&Query::query(name.clone(), kind));
    let listed = [RecordType::A, RecordType::AAAA].into_iter().filter_map(listed);
    let listed: Vec<IpAddr> = listed.flat_map(|found| addresses_in(found.answers())).collect();
    if !listed.is_empty() {
        return Ok(listed);
    }
    let unread =
        |error| io::Error::other(format!("/etc/resolv.conf names no server to look up names at: {error}"));
    Lookup::at(&[]).map_err(unread)?.with_search_list(name).await
}

fn addresses_in(records: &[Record]) -> Vec<IpAddr> {
    records.iter().filter_map(|record| record.data.ip_addr()).collect()
}

impl Answer {
    /// Returns the answer with these addresses, but without those that no host has: `connect` takes 0.0.0.0 for this host. An answer that
    /// has no others has failed; name servers that block a name give it.
    fn of(addresses: impl Iterator<Item = IpAddr>) -> Self {
        let (of_none, of_hosts): (Vec<_>, Vec<_>) = addresses.partition(IpAddr::is_unspecified);
        match of_none.first() {
            Some(address) if of_hosts.is_empty() => {
                Self::Failed(format!("the only address in the answer is {address}, which no host has"))
            }
            _ => Self::Addresses(of_hosts),
        }
    }
}

/// Returns the addresses or targets that a name keeps which does not exist any more: `last`, until it has been missing for `hold`.
/// Also returns the doubt about them.
fn missing<T>(
    last: &Arc<[T]>,
    since: Option<Instant>,
    hold: Duration,
    now: Instant,
) -> (Arc<[T]>, Option<Doubt>) {
    let since = since.unwrap_or(now);
    let is_held = now.saturating_duration_since(since) < hold;
    let kept = if is_held { last.clone() } else { Arc::default() };
    (kept, Some(Doubt::missing(since)))
}

impl Resolution {
    /// Returns the addresses that a name has after this look-up, sorted, and the doubt about them, if there is one. `last` are its
    /// addresses before, which stay for `hold` if the name has none any more; `doubt` is the doubt about those.
    pub fn settle(
        self,
        last: &Arc<[IpAddr]>,
        doubt: Option<&Doubt>,
        hold: Duration,
        now: Instant,
    ) -> (Arc<[IpAddr]>, Option<Doubt>) {
        let (mut found, mut kept, mut failure) = (Vec::new(), Vec::<IpAddr>::new(), None);
        for (answer, is_ipv4) in [(self.ipv4, true), (self.ipv6, false)] {
            match answer {
                Answer::Addresses(addresses) => found.extend(addresses),
                Answer::Failed(error) => {
                    kept.extend(last.iter().filter(|ip| ip.is_ipv4() == is_ipv4));
                    failure.get_or_insert(error);
                }
            }
        }
        let missing_since = doubt.and_then(|doubt| doubt.missing_since);
        match (found.is_empty(), failure) {
            (true, None) => missing(last, missing_since, hold, now),
            (true, Some(error)) => (last.clone(), Some(Doubt { cause: Cause::Failed(error), missing_since })),
            (false, failure) => {
                let failure = failure.filter(|_| !kept.is_empty());
                found.extend(kept);
                found.sort_unstable();
                found.dedup();
                let doubt = failure.map(|error| Doubt { cause: Cause::Failed(error), missing_since: None });
                (found.into(), doubt)
            }
        }
    }
}

impl Records {
    /// Returns the targets that a name has after this look-up, and the doubt about them, as [`Resolution::settle`] does for
    /// addresses. A target without an address is left out.
    pub fn settle(
        self,
        last: &Arc<[SrvTarget]>,
        doubt: Option<&Doubt>,
        hold: Duration,
        now: Instant,
    ) -> (Arc<[SrvTarget]>, Option<Doubt>) {
        let missing_since = doubt.and_then(|doubt| doubt.missing_since);
        let records = match self.0 {
            Ok(records) => records,
            Err(error) => return (last.clone(), Some(Doubt { cause: Cause::Failed(error), missing_since })),
        };
        let (mut found, mut failure) = (Vec::new(), None);
        for (record, resolution) in records {
            let known = last.iter().find(|target| target.host == record.host);
            let known = known.map(|target| target.addresses.clone()).unwrap_or_default();
            let (addresses, doubt) = resolution.settle(&known, None, Duration::ZERO, now);
            if let Some(Doubt { cause: cause @ Cause::Failed(_), .. }) = doubt {
                failure.get_or_insert(cause);
            }
            if !addresses.is_empty() {
                let SrvRecord { host, port, priority, weight } = record;
                found.push(SrvTarget { host, port, priority, weight, addresses });
            }
        }
        match (found.is_empty(), failure) {
            (true, Some(cause)) => (last.clone(), Some(Doubt { cause, missing_since })),
            (true, None) => missing(last, missing_since, hold, now),
            (false, failure) => (found.into(), failure.map(|cause| Doubt { cause, missing_since: None })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD: Duration = Duration::from_secs(30);

    fn ips(text: &str) -> Vec<IpAddr> {
        text.split_whitespace().map(|ip| ip.parse().expect("an address")).collect()
    }

    fn answer(text: &str) -> Answer {
        if text == "failed" { Answer::Failed("no answer".to_owned()) } else { Answer::Addresses(ips(text)) }
    }

    fn asked(ipv4: &str, ipv6: &str) -> Resolution {
        Resolution { ipv4: answer(ipv4), ipv6: answer(ipv6) }
    }

    #[test]
    fn an_address_that_no_host_has_is_no_address() {
        let of = |texts: &[&str]| Answer::of(texts.iter().map(|text| text.parse().expect("an address")));
        assert_eq!(of(&["0.0.0.0", "10.0.0.1"]), Answer::Addresses(vec![[10, 0, 0, 1].into()]));
        assert_eq!(of(&[]), Answer::Addresses(Vec::new()));
        let Answer::Failed(text) = of(&["::"]) else { panic!("no other address") };
        assert_eq!(text, "the only address in the answer is ::, which no host has");
    }

    #[test]
    fn a_name_loses_addresses_only_by_answers_about_all_families() {
        let now = Instant::now();
        let both = "192.0.2.1 2001:db8::1";
        for (last, ipv4, ipv6, wanted, is_doubted) in [
            (both, "192.0.2.2", "2001:db8::2", "192.0.2.2 2001:db8::2", false),
            (both, "192.0.2.2", "", "192.0.2.2", false),
            (both, "192.0.2.2", "failed", "192.0.2.2 2001:db8::1", true),
            (both, "failed", "2001:db8::2", "192.0.2.1 2001:db8::2", true),
            (both, "failed", "", both, true),
            (both, "", "failed", both, true),
            (both, "failed", "failed", both, true),
            // A family that never had an address and cannot be asked for changes nothing.
            ("192.0.2.1", "192.0.2.2", "failed", "192.0.2.2", false),
            ("192.0.2.1", "failed", "", "192.0.2.1", true),
            ("", "failed", "", "", true),
            ("", "", "", "", true),
            ("", "192.0.2.2 192.0.2.1 192.0.2.1", "", "192.0.2.1 192.0.2.2", false),
        ] {
            let (addresses, doubt) = asked(ipv4, ipv6).settle(&ips(last).into(), None, HOLD, now);
            assert_eq!(addresses[..], ips(wanted), "{last}: {ipv4}, {ipv6}");
            assert_eq!(doubt.is_some(), is_doubted, "{last}: {ipv4}, {ipv6}");
        }
    }

    #[test]
    fn the_targets_of_a_name_are_settled_as_addresses_are() {
        let now = Instant::now();
        let record = |host: &str, priority| SrvRecord {
            host: HostName::parse(host).expect("legal"),
            port: 443,
            priority,
            weight: 1,
        };
        let settled =
            |records: Result<Vec<(SrvRecord, Resolution)>, String>, last: &Arc<[SrvTarget]>, hold| {
                let (targets, doubt) = Records(records).settle(last, None, hold, now);
                let shown = targets.iter().map(|target| format!("{} {:?}", target.host, target.addresses));
                (shown.collect::<Vec<_>>().join(", "), doubt.is_some(), targets)
            };
        let both = vec![
            (record("a.test", 1), asked("192.0.2.1", "")),
            (record("b.test", 2), asked("192.0.2.2", "")),
        ];
        let (shown, doubted, last) = settled(Ok(both), &Arc::default(), HOLD);
        assert_eq!((shown.as_str(), doubted), ("a.test [192.0.2.1], b.test [192.0.2.2]", false));
        // A target whose addresses cannot be asked for keeps them; one that has none is left out.
        let some = vec![(record("a.test", 1), asked("failed", "")), (record("b.test", 2), asked("", ""))];
        let (shown, doubted, _) = settled(Ok(some), &last, HOLD);
        assert_eq!((shown.as_str(), doubted), ("a.test [192.0.2.1]", true));
        for (records, hold, count) in [
            (Err("no answer".to_owned()), HOLD, 2),
            (Ok(Vec::new()), HOLD, 2),
            (Ok(Vec::new()), Duration::ZERO, 0),
        ] {
            let (_, doubted, targets) = settled(records, &last, hold);
            assert_eq!((targets.len(), doubted), (count, true));
        }
    }

    #[test]
    fn a_name_that_ceases_to_exist_keeps_its_addresses_for_a_while() {
        let begin = Instant::now();
        let (mut addresses, mut doubt): (Arc<[IpAddr]>, _) = (ips("192.0.2.1").into(), None);
        let mut after = |seconds, resolution: Resolution| {
            let now = begin + Duration::from_secs(seconds);
            (addresses, doubt) = resolution.settle(&addresses, doubt.as_ref(), HOLD, now);
            (addresses.len(), doubt.clone().map(|doubt| doubt.cause))
        };
        let missing = || asked("", "");
        assert_eq!(after(0, missing()), (1, Some(Cause::Missing)));
        // A failure in between neither begins the time again nor ends it.
        assert_eq!(after(20, asked("failed", "")), (1, Some(Cause::Failed("no answer".to_owned()))));
        assert_eq!(after(29, missing()), (1, Some(Cause::Missing)));
        // An address begins it again.
        assert_eq!(after(29, asked("192.0.2.1", "")), (1, None));
        assert_eq!(after(30, missing()), (1, Some(Cause::Missing)));
        assert_eq!(after(70, asked("failed", "failed")).0, 1, "only an answer removes addresses");
        assert_eq!(after(71, missing()), (0, Some(Cause::Missing)));
        assert_eq!(after(72, asked("failed", "")).0, 0);
        let (none, _) = missing().settle(&ips("192.0.2.1").into(), None, Duration::ZERO, begin);
        assert!(none.is_empty(), "without a hold");
    }
}
