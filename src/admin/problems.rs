//! The problems of a running gateway; each has a code from a closed list. `status` begins with them, the metric
//! `isthmus_problems` counts them, and the log reports them as `problem` and `problem solved`.

pub mod code;
mod endpoints;
pub mod history;
mod narrowed;

use std::time::{Duration, Instant, SystemTime};

use super::Sources;
use super::left_out;
use super::networks::States;
use super::peers::{Linked, PeerState};
use super::scraped::Scraped;
use code::Code;
use endpoints::of_endpoints;
use history::LOSS_REMEMBERED;
use isthmus_aggregator::liveness::probed::State;
use isthmus_aggregator::status::{
    RegistryState, RegistryStatus, Status as AggregatorStatus, VirtualAddressStatus,
};
use isthmus_api as api;
use isthmus_api::text::{counted, lasting};
use isthmus_dataplane::carriers::pool::Carriers;
use isthmus_model::drain::PARTS;
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::probe::Fault;
use isthmus_model::service::Withheld;
use isthmus_model::time::rfc3339_seconds;
use isthmus_net::admission::refusals::{FullLimit, Spell};
use isthmus_net::channel::cut;
use isthmus_net::lookup::Cause;
use isthmus_net::memory::{Judgement, Level};
use isthmus_registry::change::Ignored;
use isthmus_settings::peer::is_place_of_peer;
use isthmus_settings::route::RouteTarget;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::drains::ActiveDrain;
use isthmus_snapshot::networks::GatewayEntry;
use isthmus_snapshot::service_view::Conflict;
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The interval at which the log reports new problems.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The largest difference between a peer's clock and this gateway's, in milliseconds, that is not a problem.
const CLOCK_SKEW_MAX_MS: u64 = 5 * 60 * 1000;
/// The largest number of a registry's own problems in one text; for further ones, the text has only their number.
const SHOWN_MAX: usize = 5;
/// The largest number of listed problems per code; further problems are only counted.
const LISTED_MAX: usize = 50;

/// A current problem of the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The kind of the problem.
    pub code: Code,
    /// The subject, such as a registry, a name or an endpoint; may be empty.
    pub about: String,
    /// The problem in words.
    pub text: String,
}

impl Problem {
    fn new(code: Code, about: impl Into<String>, text: impl Into<String>) -> Self {
        Self { code, about: about.into(), text: text.into() }
    }

    /// Returns a line that gives the number of further problems of this code, if there are `count` and `most` of them are listed.
    fn further(code: Code, count: usize, most: usize) -> Option<Self> {
        let further = count.saturating_sub(most);
        (further > 0).then(|| Self::new(code, "", format!("and {further} more")))
    }

    /// Returns the problem as the API shows it.
    pub fn view(&self) -> api::status::Problem {
        api::status::Problem {
            code: self.code.text().to_owned(),
            about: self.about.clone(),
            text: self.text.clone(),
            look_at: self.code.look_at().to_owned(),
        }
    }
}

/// Returns all problems, in the order of the codes.
pub fn problems(sources: &Sources) -> Vec<Problem> {
    let snapshot = sources.reader.latest();
    let of_services = sources.history.of_services(&snapshot);
    let mut all = cheap_problems(sources, &snapshot);
    all.extend(of_endpoints(sources.dataplane.upstreams(), usize::MAX));
    all.extend(of_services.narrowed.iter().cloned());
    all.extend(of_services.conflicts.iter().map(|Conflict { cluster, text, .. }| {
        let code = if is_place_of_peer(cluster.as_str()) { Code::PeerLeftOut } else { Code::ServiceConflict };
        Problem::new(code, "", text.as_str())
    }));
    all.sort_by(|one, other| (one.code, &one.about).cmp(&(other.code, &other.about)));
    all
}

/// Returns the problems that can be found without a search through all services or endpoints.
fn cheap_problems(sources: &Sources, snapshot: &Snapshot) -> Vec<Problem> {
    let mut all = of_program(sources);
    let aggregator = sources.aggregator.status.borrow().clone();
    all.extend(aggregator.registries.iter().flat_map(of_registry));
    sources.history.settled(&mut all, Instant::now());
    let states = sources.liveness.states();
    let taken_over = sources.program.load().taken_over.as_ref().map(|earlier| earlier.since);
    let age = taken_over.and_then(|since| since.elapsed().ok());
    let is_new = age.is_some_and(|age| age < LINKED_AGAIN_WITHIN);
    for linked in Linked::all(snapshot, &sources.links, &aggregator) {
        let parted = sources.links.has_parted(&linked.peer.name, LINKED_AGAIN_WITHIN);
        all.extend(of_peer(&linked, parted || is_new, snapshot, (&states, sources.dataplane.carriers())));
        let conflicts = snapshot.export_conflicts(&linked.peer.name);
        all.extend(
            conflicts.into_iter().map(|text| Problem::new(Code::PeerLeftOut, &*linked.peer.name, text)),
        );
    }
    let of_times = sources.links.times_problem();
    all.extend(of_times.map(|problem| Problem::new(Code::StateNotKept, "", problem)));
    all.extend(of_drains(snapshot));
    all.extend(of_gateways(snapshot, &states));
    all.extend(absent(snapshot));
    all.extend(of_names(&aggregator));
    all.extend(aggregator.virtual_addresses.iter().flat_map(of_virtual_addresses));
    all.extend(sources.identities.problems(SystemTime::now()));
    all.extend(of_maintenance_and_checks(sources));
    all.extend(of_limits(sources));
    all.extend(of_memory(&sources.dataplane.memory(), SystemTime::now()));
    all.extend(sources.history.losses(&sources.telemetry.recorder, Instant::now()));
    all.sort_by(|one, other| (one.code, &one.about).cmp(&(other.code, &other.about)));
    all
}

/// Returns the problems that make an explanation unreliable, one per line, each beginning with its code. The explanation is
/// unreliable if the config in use is not the file on disk. For an HBONE caller it is also unreliable if there is a problem
/// with certificates, because the decision on a name does not consider certificates.
pub(super) fn concerning(sources: &Sources, is_authority: bool) -> Vec<String> {
    let of_program = of_program(sources).into_iter().filter(|problem| problem.code != Code::NeedsRestart);
    let of_certificates = sources.identities.problems(SystemTime::now()).into_iter().filter(|_| is_authority);
    of_program
        .chain(of_certificates)
        .map(|problem| format!("{}: {}", problem.code.text(), problem.text))
        .collect()
}

/// Returns a problem for each limit that has refused connections within the last minute. A source or peer at its own limit is none: that
/// is what the limit is for.
fn of_limits(sources: &Sources) -> impl Iterator<Item = Problem> {
    let dataplane = &sources.dataplane;
    let limits = (dataplane.admission().limit(), dataplane.services().limit());
    dataplane.refusals().into_iter().map(move |(full, spell)| of_limit(&full, &spell, limits))
}

/// Returns the problem of a limit with these refusals. `limits` are the limit of all connections, and that of each service.
fn of_limit(full: &FullLimit, spell: &Spell, (all, of_service): (usize, Option<usize>)) -> Problem {
    let of_service = of_service.map_or_else(String::new, |limit| format!(" of {limit} connections"));
    let (about, limit) = match full {
        FullLimit::Connections => (
            "limits.connections".to_owned(),
            format!(
                "the limit of {all} connections (limits.connections, lowered to what the file descriptors allow)"
            ),
        ),
        FullLimit::Hellos => (
            "limits.pendingHellos".to_owned(),
            "the limit of incomplete hellos (limits.pendingHellos)".to_owned(),
        ),
        FullLimit::Unannounced => (
            "proxyProtocol".to_owned(),
            "the limit of connections whose PROXY header has not arrived, a fifth of limits.connections"
                .to_owned(),
        ),
        FullLimit::Links => {
            ("peers".to_owned(), "the limit of connections of peers that wait to be served".to_owned())
        }
        FullLimit::Descriptors => (
            "descriptors".to_owned(),
            "the limit of open files of the process or the host (ulimit -n)".to_owned(),
        ),
        FullLimit::Service(key) => {
            (key.to_string(), format!("the limit{of_service} to {key} (limits.perService.connections)"))
        }
        FullLimit::Endpoints(key) => {
            (key.to_string(), format!("the limit of connections to each endpoint of {key} (maxConnections)"))
        }
    };
    let (connections, last) = (counted(spell.count, "connection"), rfc3339(spell.last));
    let text = format!("the gateway has refused or closed {connections}, the last at {last}, at {limit}");
    Problem::new(Code::LimitReached, about, text)
}

/// Returns a problem while memory is short, and for a while after a stream was ended for that reason.
fn of_memory(state: &Judgement, now: SystemTime) -> Option<Problem> {
    let Judgement { budget, available, used, level, ended, .. } = *state;
    let is_recent = |when: SystemTime| now.duration_since(when).unwrap_or_default() < LOSS_REMEMBERED;
    let ended = ended.filter(|(_, when)| is_recent(*when));
    if level != Level::Short && ended.is_none() {
        return None;
    }
    let [budget, available, used] = [budget, available, used].map(|bytes| bytes >> 20);
    let mut text = format!(
        "{used} MiB are used of a memory budget of {budget} MiB (limits.memory), with {available} MiB available to the gateway"
    );
    if let Some((count, when)) = ended {
        let when = rfc3339(when);
        text += &format!(
            "; {count} CONNECT streams that held most were ended since the start, the last at {when}"
        );
    }
    Some(Problem::new(Code::MemoryShort, "", text))
}

/// Returns a problem for each host name that has no address, or whose addresses are not confirmed.
fn of_names(aggregator: &AggregatorStatus) -> impl Iterator<Item = Problem> {
    let said = |cause: &Cause| match cause {
        Cause::Failed(error) => format!("the DNS lookup fails: {}", cut(error)),
        Cause::Missing => "the name does not exist, or has no address".to_owned(),
    };
    let unresolved = aggregator.unresolved.iter().map(move |(name, cause)| {
        let text = format!("{name} has no address: {}", said(cause));
        Problem::new(Code::NameUnresolved, name.as_str(), text)
    });
    let stale = aggregator.stale.iter().map(move |(name, cause)| {
        let until = match cause {
            Cause::Failed(_) => "stay in use",
            Cause::Missing => "stay in use for `dns.holdMissing`",
        };
        let text = format!("the last addresses of {name} {until}: {}", said(cause));
        Problem::new(Code::NameStale, name.as_str(), text)
    });
    unresolved.chain(stale)
}

/// Returns a problem for each service that an export rule or a route names but no registry has.
fn absent(snapshot: &Snapshot) -> Vec<Problem> {
    let is_absent = |name: &HostName| {
        snapshot.service(name.as_str()).is_none() && !snapshot.unread.may_have(name.as_str())
    };
    let exact = |pattern: &'_ NamePattern| match pattern {
        NamePattern::Exact(name) => Some(name.clone()),
        NamePattern::Suffix(_) | NamePattern::Any => None,
    };
    let policy = &snapshot.policy;
    let exports = policy.exports.iter().flat_map(|rule| {
        let names = rule.services.iter().filter_map(exact);
        names.map(|name| (name, rule.name.to_string()))
    });
    let routes = policy.routes.iter().filter_map(|route| match &route.to {
        RouteTarget::Service { hostname, .. } => {
            Some((hostname.clone(), format!("the route {:?}", &*route.name)))
        }
        RouteTarget::Endpoints { .. } | RouteTarget::Backends(_) => None,
    });
    let absent = exports.chain(routes).filter(|(name, _)| is_absent(name));
    let problem = |(name, by): (HostName, String)| {
        Problem::new(
            Code::ExportAbsent,
            name.as_str(),
            format!("{by} names the service {name}, which no registry has"),
        )
    };
    absent.map(problem).collect()
}

fn of_program(sources: &Sources) -> Vec<Problem> {
    let program = sources.program.load();
    let mut all = Vec::new();
    if let Some(first) = program.rejected.first() {
        let more = match program.rejected.len() {
            1 => String::new(),
            count => format!(" (and {} more)", count - 1),
        };
        let path = program.config.display().to_string();
        all.push(Problem::new(Code::ConfigRejected, path, format!("{first}{more}")));
    }
    for what in &program.restart {
        all.push(Problem::new(
            Code::NeedsRestart,
            what,
            format!("{what} has changed in the config file; the change takes effect after a restart"),
        ));
    }
    for text in &program.claimed_twice {
        all.push(Problem::new(Code::ClusterClaimedTwice, "", text));
    }
    if program.draining {
        let connections = sources.dataplane.connections_active();
        all.push(Problem::new(
            Code::Draining,
            "",
            format!("the gateway is stopping; {connections} connections are still open"),
        ));
    }
    all
}

/// The time after the first probe from which it is a problem that a gateway has never answered.
const NEVER_ANSWERED_FOR: Duration = Duration::from_secs(30);

/// Returns a problem for each address of a gateway that has ceased to answer, or never has.
fn of_gateways(snapshot: &Snapshot, states: &States) -> Vec<Problem> {
    let mut all = Vec::new();
    for (network, entry) in snapshot.networks().iter() {
        for address in entry.gateways.iter().flat_map(GatewayEntry::entrances) {
            let network = network.as_str();
            let text = match states.get(&address) {
                Some(State::Unreachable { since, is_out, fault }) => {
                    let is_last = entry.gateways.iter().all(|gateway| !gateway.answers());
                    let effect = match (is_out, is_last) {
                        (false, _) => {
                            "it stays in use, because no gateway of any other network answers: this host may be cut off"
                        }
                        (true, true) => "it stays in use, because no other gateway of the network answers",
                        (true, false) => "clients get the other gateways of the network",
                    };
                    let how = match fault {
                        Fault::Refused => "refuses connections",
                        Fault::Unconnected => "accepts no connection",
                        Fault::Mute => "accepts connections, and answers no hello as it did before",
                        Fault::Heartbeats => "accepts connections, but its link has lost the heartbeats",
                    };
                    let since = rfc3339(*since);
                    format!(
                        "the gateway {address} of network {network:?} has not answered since {since}: it {how}; {effect}"
                    )
                }
                Some(State::NeverAnswered { since: Some(since) })
                    if since.elapsed().is_ok_and(|elapsed| elapsed >= NEVER_ANSWERED_FOR) =>
                {
                    format!(
                        "the gateway {address} of network {network:?} has never answered this one; it stays in use, as it may \
                         answer its callers: if it does, set networks.{network}.probe: off"
                    )
                }
                _ => continue,
            };
            all.push(Problem::new(Code::GatewayUnreachable, address.to_string(), text));
        }
    }
    all
}

fn of_virtual_addresses(status: &VirtualAddressStatus) -> Vec<Problem> {
    let ranges: Vec<String> = status.ranges.list().iter().map(ToString::to_string).collect();
    let names: Vec<String> = status.without.iter().map(ToString::to_string).collect();
    let (count, ranges) = (status.counts.without, ranges.join(" and "));
    let full = (count > 0).then(|| {
        let text =
            format!("cannot assign {count} virtual addresses, because no address is free in {ranges}; the services without an \
                     address include {}", names.join(", "));
        Problem::new(Code::VirtualAddressesFull, "", text)
    });
    let kept =
        status.problem.iter().map(|text| Problem::new(Code::VirtualAddressesNotKept, "", text.as_str()));
    full.into_iter().chain(kept).collect()
}

/// The time for which a link that an upgrade of either side has ended is no problem.
const LINKED_AGAIN_WITHIN: Duration = Duration::from_secs(5);

/// Returns the problems of a peer. `is_handed_over` is true while an upgrade may be the reason why there is no link.
fn of_peer(
    linked: &Linked,
    is_handed_over: bool,
    snapshot: &Snapshot,
    (states, carriers): (&States, &Carriers),
) -> Vec<Problem> {
    let name = &*linked.peer.name;
    let state = match linked.state {
        PeerState::Live => None,
        PeerState::Down | PeerState::Stale if is_handed_over => None,
        PeerState::NotEnrolled => Some(Code::PeerNotEnrolled),
        _ => Some(Code::PeerNotLive),
    };
    let state = state.map(|code| {
        let why = linked.why_not_live(snapshot).unwrap_or_default();
        Problem::new(code, name, format!("the peer {name} is {}: {why}", linked.state.text()))
    });
    let unreachable = linked.unreachable(snapshot, states, carriers).into_iter();
    let unreachable = unreachable.map(|text| Problem::new(Code::PeerUnreachable, name, text));
    let skew = linked.clock_skew_ms().filter(|skew| skew.unsigned_abs() > CLOCK_SKEW_MAX_MS);
    let clock = skew.map(|skew| {
        let (seconds, way) =
            ((skew.unsigned_abs() + 500) / 1000, if skew > 0 { "ahead of" } else { "behind" });
        let text =
            format!("the clock of the peer {name} is {} {way} the clock of this gateway", lasting(seconds));
        Problem::new(Code::PeerClock, name, text)
    });
    let (count, refused) = linked.refused();
    let left_out = refused.first().map(|first| {
        let more = match count {
            1 => String::new(),
            count => format!(" (and {} more)", count - 1),
        };
        Problem::new(Code::PeerLeftOut, name, format!("{first}{more}"))
    });
    state.into_iter().chain(unreachable).chain(clock).chain(left_out).collect()
}

fn of_registry(registry: &RegistryStatus) -> Vec<Problem> {
    let mut all = Vec::new();
    let code = match registry.state {
        // The problem of the peer already contains the cause, so its registry adds no second problem.
        RegistryState::Missing | RegistryState::Stale | RegistryState::Demoted | RegistryState::Expired
            if registry.is_peer =>
        {
            None
        }
        RegistryState::Live => None,
        RegistryState::Missing => Some(Code::RegistryMissing),
        RegistryState::Stale | RegistryState::Demoted | RegistryState::Expired => Some(Code::RegistryStale),
        RegistryState::Held => Some(Code::RegistryHeld),
    };
    let name = &*registry.name;
    if let Some(code) = code {
        let why = registry.problems.first().map_or("the registry was not read yet", String::as_str);
        let text = format!("{name} is {} since {}: {why}", registry.state.text(), rfc3339(registry.since));
        all.push(Problem::new(code, name, text));
    }
    all.extend(
        registry
            .copy_problem
            .iter()
            .map(|problem| Problem::new(Code::StateNotKept, name, format!("{name}: {problem}"))),
    );
    // The problem `policies_unknown` names this cause, so the other two problems leave it out.
    let unknown = registry.report.as_ref().and_then(|report| report.policies_unknown.as_ref());
    let flaws: Vec<_> = registry.flaws.iter().filter(|lines| lines.first() != unknown).collect();
    if let Some(first) = flaws.iter().flat_map(|lines| lines.iter()).next() {
        let text = format!("{name}: {} objects have mistakes, the first one: {first}", flaws.len());
        all.push(Problem::new(Code::RegistryFlawed, name, text));
    }
    if let Some(report) = &registry.report {
        let problems: Vec<_> = report.problems.iter().filter(|line| Some(*line) != unknown).collect();
        if !problems.is_empty() {
            let shown = problems.len().min(SHOWN_MAX);
            let more = match problems.len() - shown {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            let lines = problems[..shown].iter().map(cut).collect::<Vec<_>>().join("; ");
            all.push(Problem::new(Code::RegistryImpaired, name, format!("{name}: {lines}{more}")));
        }
        all.extend(report.policies_unknown.iter().map(|why| {
            let cluster = registry.cluster.as_str();
            let text = format!("{name}: ztunnels of cluster {cluster:?} are not served, because its policies are not known: {}", cut(why));
            Problem::new(Code::PoliciesUnknown, name, text)
        }));
        all.extend(
            report
                .waypoints_ignored
                .iter()
                .map(|why| Problem::new(Code::WaypointIgnored, name, format!("{name}: {}", cut(why)))),
        );
        all.extend(report.ignored.iter().map(|Ignored { kind, count, first }| {
            let objects = counted(*count, "object");
            let text =
                format!("{name}: {objects} of the kind {kind} without effect, the first one {}", cut(first));
            Problem::new(Code::ObjectsIgnored, name, text)
        }));
        if let Some(count) = report.left_out_because(Withheld::Claimed.text()) {
            let text = format!(
                "{name}: {count} endpoints are not used, because their EndpointSlices do not match their pods, or because entries have \
                 addresses of other namespaces' pods or Services"
            );
            all.push(Problem::new(Code::EndpointClaimed, name, text));
        }
    }
    let of_scope = [
        (Code::RegistryLeftOut, left_out::by_name_or_network(&registry.items)),
        (Code::AddressNotAllowed, left_out::by_address(&registry.items)),
    ];
    for (code, text) in of_scope {
        all.extend(text.map(|text| Problem::new(code, name, format!("{name}: {text}"))));
    }
    all
}

fn of_drains(snapshot: &Snapshot) -> Vec<Problem> {
    let of = |active: &ActiveDrain| {
        let (drain, source) = (&active.drain, active.source.text());
        let left = u32::from(active.left) * 100 / u32::from(PARTS);
        let until =
            drain.until.map(|until| format!(", until {}", rfc3339_seconds(until))).unwrap_or_default();
        let reason = if drain.reason.is_empty() { String::new() } else { format!(": {}", drain.reason) };
        let text = format!("{} is drained to {left} % of its weight ({source}{until}){reason}", drain.target);
        Problem::new(Code::DrainActive, drain.target.to_string(), text)
    };
    snapshot.effective_drains().map(of).collect()
}

fn of_maintenance_and_checks(sources: &Sources) -> Vec<Problem> {
    let mut all = Vec::new();
    for one in sources.dataplane.upstreams().withdrawals().list() {
        let text =
            format!("{} was {} by an operator at {}", one.which, one.withdrawal.text(), rfc3339(one.since));
        all.push(Problem::new(Code::EndpointWithdrawn, one.which.to_string(), text));
    }
    let checks = sources.dataplane.checks();
    if let Some(late) = checks.late {
        let (places, longest) = (checks.places, late.longest.as_secs());
        let text = format!(
            "{} health checks are delayed, the first one by {longest} s; {places} may run at the same time",
            late.count
        );
        all.push(Problem::new(Code::ChecksLate, "", text));
    }
    all
}

/// Returns at most `LISTED_MAX` problems of each code, with a line that gives the number of further ones. The problems must be
/// in the order of their codes.
pub fn listed(problems: &[Problem]) -> Vec<Problem> {
    let mut listed = Vec::new();
    for of_code in problems.chunk_by(|one, other| one.code == other.code) {
        listed.extend(of_code.iter().take(LISTED_MAX).cloned());
        listed.extend(
            of_code.first().and_then(|first| Problem::further(first.code, of_code.len(), LISTED_MAX)),
        );
    }
    listed
}

/// The number of problems of each code, including zeros.
pub(super) const METRICS: Scraped =
    Scraped { descriptions: &[COUNT], expose: |sources, exposition| expose(&problems(sources), exposition) };

/// The metric with the number of current problems.
const COUNT: (&str, &str) =
    ("isthmus_problems", "Number of current problems, by problem code; 0 for a code without a problem.");

fn expose(problems: &[Problem], exposition: &mut Exposition) {
    let family = exposition.family(COUNT.0, Kind::Gauge, COUNT.1);
    for code in Code::ALL {
        let count = problems.iter().filter(|problem| problem.code == *code).count();
        family.add([("code", code.text())], count);
    }
}

/// Logs each problem when it begins and when it ends.
pub async fn watch(sources: Sources) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    loop {
        every.tick().await;
        let snapshot = sources.reader.latest();
        let mut now = listed(&cheap_problems(&sources, &snapshot));
        now.extend(of_endpoints(sources.dataplane.upstreams(), LISTED_MAX));
        sources.history.log(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_that_many_things_have_is_cut_and_counted() {
        let problem = |index: usize| Problem::new(Code::NameUnresolved, index.to_string(), "text");
        let mut all: Vec<Problem> = (0..LISTED_MAX + 7).map(problem).collect();
        all.push(Problem::new(Code::SpansLost, "", "text"));
        let listed = listed(&all);
        assert_eq!(listed.len(), LISTED_MAX + 2);
        assert_eq!(listed[LISTED_MAX].text, "and 7 more");
        let mut exposition = Exposition::default();
        expose(&all, &mut exposition);
        let metric = exposition.text();
        assert!(
            metric.contains(&format!("isthmus_problems{{code=\"name_unresolved\"}} {}\n", LISTED_MAX + 7))
        );
        assert!(metric.contains("isthmus_problems{code=\"registry_stale\"} 0\n"), "{metric}");
    }

    #[test]
    fn a_copy_that_cannot_be_written_is_a_problem_of_a_live_registry_too() {
        let registry = RegistryStatus {
            copy_problem: Some("the copy cannot be written: no space".to_owned()),
            ..RegistryStatus::of("local", RegistryState::Live)
        };
        let problem =
            Problem::new(Code::StateNotKept, "local", "local: the copy cannot be written: no space");
        assert_eq!(of_registry(&registry), std::slice::from_ref(&problem));
        let registry = RegistryStatus { state: RegistryState::Missing, ..registry };
        let [missing, kept] = &of_registry(&registry)[..] else { panic!("two") };
        assert!(missing.text.ends_with(": the registry was not read yet"), "{}", missing.text);
        assert_eq!(*kept, problem);
    }
}
