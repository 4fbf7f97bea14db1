//! The problems of a running gateway; each has a code from a closed list. `status` begins with them, the metric
//! `isthmus_problems` counts them, and the log reports them as `problem` and `problem solved`.

mod endpoints;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::Sources;
use super::peers::{Linked, PeerState};
use endpoints::of_endpoints;
use isthmus_aggregator::status::{RegistryState, RegistryStatus, VirtualAddressStatus};
use isthmus_api as api;
use isthmus_api::text::lasting;
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::service::Withheld;
use isthmus_net::channel::cut;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::peer::is_place_of_peer;
use isthmus_snapshot::policy::RouteTarget;
use isthmus_snapshot::service_view::Conflict;
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::exposition::{Exposition, Kind};
use isthmus_telemetry::recorder::Recorder;

/// The interval at which the log reports new problems.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The largest difference between a peer's clock and this gateway's, in milliseconds, that is not a problem.
const CLOCK_SKEW_MAX_MS: u64 = 5 * 60 * 1000;
/// The time for which a loss remains a problem after its last occurrence.
const LOSS_REMEMBERED: Duration = Duration::from_secs(600);
/// The time that the report of a registry must have problems before they are a problem of the gateway. A connection to an API
/// server that is opened again takes about a second.
const IMPAIRED_AFTER: Duration = Duration::from_secs(5);
/// The number of consecutive failures from which on an endpoint is a problem. Fewer failures may come from a restart.
pub(super) const FAILURES_MIN: u32 = 3;
/// The largest number of a registry's own problems in one text; for further ones, the text has only their number.
const SHOWN_MAX: usize = 5;
/// The largest number of listed problems per code; further problems are only counted.
const LISTED_MAX: usize = 50;

macro_rules! codes {
    ($($variant:ident = $text:literal, $meaning:literal, $look_at:literal;)*) => {
        /// The kind of a problem of the gateway. The failure of a single connection is no problem of this kind.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Code {
            $(#[doc = $meaning] $variant,)*
        }

        impl Code {
            /// All codes, in the order in which the documentation lists them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the code as `status`, the metric's label and the log write it.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// Returns the meaning of the code.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => $meaning,)*
                }
            }

            /// Returns the command, key or document that the operator checks next.
            pub const fn look_at(self) -> &'static str {
                match self {
                    $(Self::$variant => $look_at,)*
                }
            }
        }
    };
}

codes! {
    ConfigRejected = "config_rejected",
        "The config file on disk has mistakes, or an address in it is in use. The gateway keeps running with the config that it read \
         before.",
        "mistakes: `isthmus validate FILE`; an address in use: the process that listens on it; then `isthmus reload`";
    NeedsRestart = "needs_restart",
        "The config file on disk has a change that takes effect only after a restart.",
        "the change in the file; restart the gateway, or undo the change";
    Draining = "draining",
        "The gateway is stopping. It is not ready, and exits when its connections have ended.",
        "`isthmus get connections`, `drain.timeout`";
    RegistryMissing = "registry_missing",
        "A registry has not been read since the start of the gateway and has no saved copy, so its services are unknown.",
        "`isthmus get registries`; path and permissions of the file, address and user of etcd, or address, credentials and RBAC \
         of the API server";
    RegistryStale = "registry_stale",
        "A registry cannot be read. Its last good state is in use (stale), is used only for ports without a ready \
         endpoint elsewhere (demoted), or has been removed (expired).",
        "`isthmus get registries`; for a file `isthmus validate FILE`, otherwise whether etcd, the API server or the peer can be \
         reached";
    RegistryHeld = "registry_held",
        "An update of a registry would leave many services without a ready endpoint. The update is held back, and \
         the state before it stays in use.",
        "the source of the registry; `aggregator.withdrawalHold`";
    RegistryFlawed = "registry_flawed",
        "Objects of a registry have mistakes. The last good state of these objects is in use.",
        "`isthmus get registries -o yaml`; the objects named there";
    RegistryImpaired = "registry_impaired",
        "A registry is read, but for at least five seconds not all of it has been right: the API server forbids a kind of \
         object, new credentials cannot be used, a gateway has no address, a gateway of a peer does not answer, the network \
         of the cluster is unknown, a ServiceExport has no Service, or the clock of the API server differs from that of this \
         host by more than 30 s.",
        "`report` of `isthmus get registries -o yaml`";
    EndpointClaimed = "endpoint_claimed",
        "EndpointSlices of a Kubernetes registry name pods with another UID, namespace or address for their endpoints. \
         These endpoints are not used: otherwise, anyone who may write EndpointSlices could direct a service to any address.",
        "`left_out` of `isthmus get registries -o yaml`; the EndpointSlices of the services that `isthmus explain` names";
    StateNotKept = "state_not_kept",
        "The last good copy of a registry, or the times at which services were first exported to peers, cannot be written to \
         `state.dir`, or those of the last run could not be read. After a restart, services of a registry that cannot be read are \
         unknown or out of date, and new peers may assign other virtual addresses.",
        "permissions of `state.dir`, and the free space on the disk; `isthmus get registries`";
    RegistryLeftOut = "registry_left_out",
        "A registry has services or endpoints that its `allow` does not permit. They are left out.",
        "`isthmus get registries`; `registries[].allow`";
    AddressNotAllowed = "address_not_allowed",
        "A registry has endpoints at addresses that its `allow.addresses` does not permit. Loopback and \
         link-local addresses need a block of their own there. These endpoints are left out.",
        "`isthmus get registries`; `registries[].allow.addresses`";
    ServiceConflict = "service_conflict",
        "Registries disagree about a service. The earlier registry applies.",
        "`conflicts` of `isthmus status -o json`";
    ExportAbsent = "export_absent",
        "An export rule or a route names a service that no registry has, so the rule or route makes nothing reachable. \
         Services that may belong to a registry that was not read yet are not reported.",
        "the name under `exports` or `routes`; `isthmus get services`";
    NameUnresolved = "name_unresolved",
        "The host name of an endpoint or of a gateway does not resolve.",
        "`isthmus get endpoints`, `isthmus get gateways`; `dns.servers`";
    VirtualAddressesFull = "virtual_addresses_full",
        "Imported services have no virtual address, because their range is full. Addresses of services that are gone stay reserved \
         for 24 h.",
        "`isthmus get services`; a larger range in `dnsServer.vips`, the same for all replicas";
    VirtualAddressesNotKept = "virtual_addresses_not_kept",
        "The virtual addresses in use cannot be written to `state.dir`, or those of the last run could not be read. A restart \
         without that file changes few addresses: only those of services whose preferred address was reserved for a service \
         that is gone.",
        "the file `virtual-addresses` in `state.dir`: its permissions, and the free space on the disk";
    CertificateMissing = "certificate_missing",
        "The gateway has no certificate yet and is not ready. HBONE callers are refused (`tls_failed`).",
        "`isthmus get certificates`; `identity`";
    CertificateExpiring = "certificate_expiring",
        "The gateway's own certificate has less than a third of its lifetime left and has not been renewed.",
        "`isthmus get certificates`; `identity` of `isthmus status -o json`";
    CertificateExpired = "certificate_expired",
        "The gateway's own certificate has expired or is not valid yet, so HBONE callers refuse it. The gateway is not ready.",
        "`isthmus get certificates`; `identity` of `isthmus status -o json`";
    CertificateSource = "certificate_source",
        "A certificate, or the roots of a trust domain, cannot be read or renewed, a new certificate is not valid yet, or roots that \
         a peer has announced cannot be stored. The last good certificate or roots stay in use. A certificate that is not valid \
         yet is used as soon as it is valid.",
        "`identity` of `isthmus status -o json`";
    RootsExpired = "roots_expired",
        "All root certificates of a trust domain have expired, so callers of that domain are refused.",
        "`isthmus get certificates`; the key `trust` of this gateway's config";
    EndpointEjected = "endpoint_ejected",
        "An endpoint failed several times in a row, so the gateway sends it no connections for a while (`ejection.time`).",
        "`isthmus get endpoints`; the endpoint itself";
    EndpointUnhealthy = "endpoint_unhealthy",
        "The health checks of an endpoint fail, so it gets no connections while another endpoint is healthy.",
        "`isthmus get endpoints`, `isthmus explain NAME --probe`; the endpoint itself; `health`";
    ChecksLate = "checks_late",
        "Health checks are delayed, because as many are running as the descriptor limit allows. The health of endpoints is \
         noticed later.",
        "endpoints that do not answer: `isthmus get endpoints`; `health.interval`, `health.timeout`; `ulimit -n`";
    EndpointWithdrawn = "endpoint_withdrawn",
        "An operator has drained or disabled an endpoint of this gateway. A restart makes the endpoint available again.",
        "`isthmus endpoint enable ADDRESS`";
    EndpointFailing = "endpoint_failing",
        "At least the last three connection attempts to an endpoint failed. The endpoint is not ejected and still \
         gets connections.",
        "`isthmus get endpoints`, `isthmus explain NAME --probe`; the endpoint itself";
    EndpointNotTls = "endpoint_not_tls",
        "An endpoint answers a ClientHello with bytes that are not TLS.",
        "the port of the endpoint: `isthmus get endpoints`";
    AccessLogLost = "access_log_lost",
        "Lines of the access log were lost in the last ten minutes because the queue was full or the file could \
         not be written.",
        "`telemetry.accessLog.path`, the disk, the program that reads the log; `isthmus_access_log_dropped_total`";
    SpansLost = "spans_lost",
        "Spans were lost in the last ten minutes because the collector could not be reached or did not keep up.",
        "`telemetry.tracing.otlp`; `isthmus_spans_dropped_total`";
    PeerNotEnrolled = "peer_not_enrolled",
        "The config names a peer without `identity` and `trust`, and the peer is not enrolled. The gateway exchanges no \
         services with this peer.",
        "`isthmus peer invite` on one side and `isthmus peer join` on the other; or `peers[].identity` and `peers[].trust`";
    PeerNotLive = "peer_not_live",
        "There is no live link with a peer. The services of the peer stay in use for a while (stale), then are used only where \
         no other registry has a ready endpoint (demoted), then have no endpoints (expired).",
        "`isthmus peers` on both sides; `peers[].dial` or `peers[].accept`; the network between the gateways";
    PeerUnreachable = "peer_unreachable",
        "Services that are exchanged with a peer cannot be called, because no gateway leads to them: the peer has sent none, none \
         of them answers, or `peers[].addresses` does not allow their addresses; or this gateway knows no gateway of its own mesh \
         that it could send to the peer.",
        "`isthmus peers -o yaml`, `isthmus get registries -o yaml` on both sides; `networks[].gateways`, `peers[].addresses`";
    PeerClock = "peer_clock",
        "The clock of a peer differs from this gateway's by more than five minutes, so certificates may seem expired or not valid yet.",
        "`isthmus peers`; the time synchronisation of both hosts";
    PeerLeftOut = "peer_left_out",
        "Services that match the rules of a peer are not exchanged, because one side refuses them, a limit is reached, or \
         another service has the same name.",
        "`isthmus peers -o yaml`; `peers[].export`, `peers[].import`, `peers[].limits`";
    XdsClientRefused = "xds_client_refused",
        "An xDS client was refused in the last ten minutes because no rule of `xds.clients` allows the network or \
         cluster that it claims, or because its TLS handshake failed, for example without a certificate of a trusted authority.",
        "the log of the gateway, `xds.refused` of `isthmus status -o json`; `xds.clients`, `trust`; `isthmus_xds_refused_total`";
}

/// Counters of losses: an increase is a problem. Each has the code of that problem, and the noun for its text.
const LOSSES: [(Code, &str, &str); 3] = [
    (Code::AccessLogLost, "isthmus_access_log_dropped_total", "lines of the access log"),
    (Code::SpansLost, "isthmus_spans_dropped_total", "spans"),
    (Code::XdsClientRefused, "isthmus_xds_refused_total", "xDS clients"),
];

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

/// The data that is kept between two evaluations of the problems.
#[derive(Default)]
pub struct History {
    state: Mutex<HistoryState>,
}

#[derive(Default)]
struct HistoryState {
    /// The registries whose reports have problems, each with the time at which they were first seen.
    impaired: BTreeMap<String, Instant>,
    losses: BTreeMap<Code, Loss>,
    /// The generation of a snapshot, and the conflicts between registries in that snapshot.
    conflicts: Option<(u64, Arc<[Conflict]>)>,
    /// The problems that the log has reported.
    logged: Vec<Problem>,
}

/// The last value of one of the counters in [`LOSSES`], and the time of its last increase.
struct Loss {
    count: u64,
    /// The time at which the counter last increased; `None` if it never did.
    last: Option<(Instant, SystemTime)>,
}

impl History {
    /// Returns a problem for each counter that increased within the last ten minutes.
    fn losses(&self, recorder: &Recorder) -> Vec<Problem> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut problems = Vec::new();
        for (code, counter, what) in LOSSES {
            let count = recorder.counted(counter);
            let loss = state.losses.entry(code).or_insert(Loss { count: 0, last: None });
            if count > loss.count {
                *loss = Loss { count, last: Some((Instant::now(), SystemTime::now())) };
            }
            if let Some((_, when)) = loss.last.filter(|(at, _)| at.elapsed() < LOSS_REMEMBERED) {
                let verb = if code == Code::XdsClientRefused { "refused" } else { "lost" };
                let text = format!("{count} {what} {verb} since the start, the last at {}", rfc3339(when));
                problems.push(Problem::new(code, "", text));
            }
        }
        problems
    }

    /// Removes the problems of registries' reports that have lasted for less than [`IMPAIRED_AFTER`].
    fn settled(&self, problems: &mut Vec<Problem>, now: Instant) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut state.impaired);
        problems.retain(|problem| {
            if problem.code != Code::RegistryImpaired {
                return true;
            }
            let since = before.get(&problem.about).copied().unwrap_or(now);
            state.impaired.insert(problem.about.clone(), since);
            now.saturating_duration_since(since) >= IMPAIRED_AFTER
        });
    }

    /// Returns the conflicts between registries, which are computed once per snapshot.
    fn conflicts(&self, snapshot: &Snapshot) -> Arc<[Conflict]> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = state.conflicts.as_ref().filter(|(of, _)| *of == snapshot.generation) {
            return known.clone();
        }
        let all = snapshot.services().into_iter().flat_map(|service| service.conflicts.clone());
        let found: Arc<[Conflict]> = all.collect();
        state.conflicts = Some((snapshot.generation, found.clone()));
        found
    }
}

/// Returns all problems, in the order of the codes.
pub fn problems(sources: &Sources) -> Vec<Problem> {
    let snapshot = sources.reader.latest();
    let conflicts = sources.history.conflicts(&snapshot);
    let mut all = cheap_problems(sources, &snapshot);
    all.extend(of_endpoints(sources.dataplane.upstreams(), usize::MAX));
    all.extend(conflicts.iter().map(|Conflict { cluster, text }| {
        let code = if is_place_of_peer(cluster.as_str()) { Code::PeerLeftOut } else { Code::ServiceConflict };
        Problem::new(code, "", text.as_str())
    }));
    all.sort_by(|one, other| (one.code, &one.about).cmp(&(other.code, &other.about)));
    all
}

/// Returns the problems that can be found without a search through all services or endpoints.
fn cheap_problems(sources: &Sources, snapshot: &Snapshot) -> Vec<Problem> {
    let mut all = of_program(sources);
    let aggregator = sources.aggregator.borrow().clone();
    all.extend(aggregator.registries.iter().flat_map(of_registry));
    sources.history.settled(&mut all, Instant::now());
    for linked in Linked::all(snapshot, &sources.links, &aggregator) {
        all.extend(of_peer(&linked, snapshot));
        let conflicts = snapshot.export_conflicts(&linked.peer.name);
        all.extend(
            conflicts.into_iter().map(|text| Problem::new(Code::PeerLeftOut, &*linked.peer.name, text)),
        );
    }
    let of_times = sources.links.times_problem();
    all.extend(of_times.map(|problem| Problem::new(Code::StateNotKept, "", problem)));
    all.extend(absent(snapshot));
    let failed = aggregator.unresolved.iter().map(|name| (name.clone(), "the DNS lookup fails"));
    let empty = snapshot.resolved().iter().filter(|(_, addresses)| addresses.is_empty());
    let empty = empty.map(|(name, _)| (name.to_string(), "the name does not exist, or has no address"));
    for (name, why) in failed.chain(empty) {
        all.push(Problem::new(Code::NameUnresolved, &name, format!("{name} has no address: {why}")));
    }
    all.extend(aggregator.virtual_addresses.iter().flat_map(of_virtual_addresses));
    all.extend(sources.identities.problems(SystemTime::now()));
    all.extend(of_maintenance_and_checks(sources));
    all.extend(sources.history.losses(&sources.telemetry.recorder));
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
            Some((hostname.clone(), format!("the route {:?}", route.key.to_string())))
        }
        RouteTarget::Endpoints { .. } => None,
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
            format!(
                "{what} has changed in the config file; the change takes \
                                                                 effect after a restart"
            ),
        ));
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

fn of_peer(linked: &Linked, snapshot: &Snapshot) -> Vec<Problem> {
    let name = &*linked.peer.name;
    let state = match linked.state {
        PeerState::Live => None,
        PeerState::NotEnrolled => Some(Code::PeerNotEnrolled),
        _ => Some(Code::PeerNotLive),
    };
    let state = state.map(|code| {
        let why = linked.why_not_live().unwrap_or_default();
        Problem::new(code, name, format!("the peer {name} is {}: {why}", linked.state.text()))
    });
    let unreachable = linked.unreachable(snapshot).into_iter();
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
    if let Some(first) = registry.flaws.iter().flat_map(|lines| lines.iter()).next() {
        let text = format!("{name}: {} objects have mistakes, the first one: {first}", registry.flaws.len());
        all.push(Problem::new(Code::RegistryFlawed, name, text));
    }
    if let Some(report) = &registry.report {
        if !report.problems.is_empty() {
            let shown = report.problems.len().min(SHOWN_MAX);
            let more = match report.problems.len() - shown {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            let lines = report.problems[..shown].iter().map(cut).collect::<Vec<_>>().join("; ");
            all.push(Problem::new(Code::RegistryImpaired, name, format!("{name}: {lines}{more}")));
        }
        if let Some(count) = report.left_out_because(Withheld::Claimed.text()) {
            let text = format!(
                "{name}: {count} endpoints are not used, because their EndpointSlices do not match their pods"
            );
            all.push(Problem::new(Code::EndpointClaimed, name, text));
        }
    }
    let (services, endpoints) = (registry.items.denied_items, registry.items.denied_endpoints);
    if services + endpoints > 0 {
        let text = format!(
            "{name}: {services} services are left out by `allow.services`, {endpoints} endpoints by `allow.networks`"
        );
        all.push(Problem::new(Code::RegistryLeftOut, name, text));
    }
    if registry.items.denied_addresses > 0 {
        let text = format!(
            "{name}: {} endpoints are left out by `allow.addresses`",
            registry.items.denied_addresses
        );
        all.push(Problem::new(Code::AddressNotAllowed, name, text));
    }
    all
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

/// Adds the number of problems of each code, including zeros, to the metrics of a scrape.
pub fn expose(problems: &[Problem], exposition: &mut Exposition) {
    let family = exposition.family(METRIC, Kind::Gauge, METRIC_HELP);
    for code in Code::ALL {
        let count = problems.iter().filter(|problem| problem.code == *code).count();
        family.add([("code", code.text())], count);
    }
}

/// The metric with the number of current problems.
pub const METRIC: &str = "isthmus_problems";
/// The `# HELP` text of the metric.
pub const METRIC_HELP: &str = "Number of current problems, by problem code; 0 for a code without a problem.";

/// Logs each problem when it begins and when it ends.
pub async fn watch(sources: Sources) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    loop {
        every.tick().await;
        let snapshot = sources.reader.latest();
        let mut now = listed(&cheap_problems(&sources, &snapshot));
        now.extend(of_endpoints(sources.dataplane.upstreams(), LISTED_MAX));
        let mut state = sources.history.state.lock().unwrap_or_else(PoisonError::into_inner);
        log_changes(&state.logged, &now);
        state.logged = now;
    }
}

fn log_changes(before: &[Problem], now: &[Problem]) {
    let same = |one: &Problem, other: &Problem| one.code == other.code && one.about == other.about;
    for problem in now.iter().filter(|problem| !before.iter().any(|known| same(known, problem))) {
        let (code, look_at) = (problem.code.text(), problem.code.look_at());
        match problem.code {
            // This problem is an error, since without a valid certificate no caller can connect.
            Code::CertificateExpired => tracing::error!(code, look_at, "problem: {}", problem.text),
            // These states are not logged as problems, since an operator requested them.
            Code::Draining | Code::EndpointWithdrawn => {}
            _ => tracing::warn!(code, look_at, "problem: {}", problem.text),
        }
    }
    for problem in before.iter().filter(|problem| !now.iter().any(|known| same(known, problem))) {
        tracing::info!(code = problem.code.text(), about = problem.about, "problem solved");
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

    #[test]
    fn a_short_loss_of_a_registry_is_no_problem() {
        let (history, start) = (History::default(), Instant::now());
        let stale = || Problem::new(Code::RegistryStale, "south", "stale");
        let shown = |impaired: &[&str], seconds: u64| {
            let of = |name: &&str| Problem::new(Code::RegistryImpaired, *name, "the watch ended");
            let mut all: Vec<Problem> = impaired.iter().map(of).chain([stale()]).collect();
            history.settled(&mut all, start + Duration::from_secs(seconds));
            assert_eq!(all.pop(), Some(stale()));
            all.into_iter().map(|problem| problem.about).collect::<Vec<_>>()
        };
        assert_eq!(shown(&["west"], 0), [""; 0]);
        assert_eq!(shown(&["east", "west"], 4), [""; 0]);
        assert_eq!(shown(&["east", "west"], 5), ["west"]);
        assert_eq!(shown(&["east"], 8), [""; 0], "the time of east began later");
        assert_eq!(shown(&["east", "west"], 9), ["east"], "the time of west begins anew");
    }

    #[test]
    fn what_is_lost_is_a_problem_when_its_counter_goes_up() {
        let (history, recorder) = (History::default(), Recorder::default());
        assert_eq!(history.losses(&recorder), []);
        recorder.counter("isthmus_spans_dropped_total", &[]).increment(3);
        let [problem] = &history.losses(&recorder)[..] else { panic!("one") };
        assert_eq!(problem.code, Code::SpansLost);
        assert!(problem.text.starts_with("3 spans lost since the start"), "{}", problem.text);
    }
}
