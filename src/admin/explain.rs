//! `explain`: the decision on a name, made by the functions of the data path, with every step as text.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use super::imported::imported;
use super::limits::{Counters, Said, of_gateway, of_peer, of_service, of_source};
use super::marks::hidden_by;
use isthmus_api as api;
use isthmus_balance::{Ask, Idle, Load, choose, odds};
use isthmus_dataplane::endpoint_state::{EndpointState, Resolution, State};
use isthmus_dataplane::upstreams::{Looking, Upstreams};
use isthmus_decisions::admit::{admit, admit_source};
use isthmus_decisions::decision::{
    Admission, AdmissionRequest, Onward, Requested, RouteMatch, Trace, alert_of,
};
use isthmus_decisions::missing::missing_for;
use isthmus_decisions::near::near;
use isthmus_decisions::omitted;
use isthmus_decisions::omitted::Omitted;
use isthmus_decisions::view::onward::Computed;
use isthmus_model::alpn::Protocols;
use isthmus_model::authority::Authority;
use isthmus_model::endpoint::{Encapsulation, Health, ProxyVersion};
use isthmus_model::identity::Identity;
use isthmus_model::reason::Reason;
use isthmus_model::service::CallerKind;
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::Guard;
use isthmus_settings::listener::{Listener, ListenerProtocol, ProxyProtocol, RefusalMode};
use isthmus_settings::scope::SourceRule;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::{Candidates, EndpointKey};
use isthmus_telemetry::clock::rfc3339;
use isthmus_wire::connect::status_of;

/// The largest number of failing endpoints in the verdict.
const FAILING_SHOWN: usize = 5;

/// The parameters of an explanation.
#[derive(Clone, Debug, Default)]
pub struct ExplainRequest {
    /// The name as a client would send it; `None`: a hello without SNI.
    pub name: Option<String>,
    /// True if `name` is the authority of a CONNECT; false if it is a server name.
    pub authority: bool,
    /// True if the first bytes of the client are not TLS; it has no name then.
    pub is_not_tls: bool,
    /// The verified identity of an HBONE caller; `None` if the caller has none.
    pub identity: Option<Identity>,
    /// The listener; `None`: the first listener that accepts the kind of name asked for.
    pub listener: Option<String>,
    /// The caller's address; `None`: rules about sources are shown, not applied.
    pub source: Option<IpAddr>,
    /// The protocols that the caller offers by ALPN; `None`: the listener's ALPN check is shown, not applied.
    pub alpn: Option<Vec<String>>,
    /// The address of the gateway to which the caller connects, which tells Gateways on the same port apart; `None`: an address
    /// that no Gateway has requested.
    pub local: Option<IpAddr>,
}

/// The run-time state of a running gateway, as far as an explanation shows it.
#[derive(Clone, Copy)]
pub struct Running<'a> {
    /// The run-time state of endpoints.
    pub upstreams: &'a Upstreams,
    /// The current numbers of connections by source and by service.
    pub counters: Counters<'a>,
    /// The addresses that listeners are bound to, by name.
    pub listening: &'a [(Arc<str>, SocketAddr)],
}

/// The answer of `explain`: how a request is routed, and why.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The requested name; empty if the request had none.
    pub name: String,
    /// True if `name` is the authority of a CONNECT.
    pub is_authority: bool,
    /// The name of the listener.
    pub listener: String,
    /// The name in the form in which it is looked up; `None` if it was not looked up.
    pub canonical: Option<String>,
    /// The kind of rule that matched; `None` if no rule did.
    pub matched: Option<&'static str>,
    /// The key of the route, or the host name of the service; `None` if no rule matched.
    pub rule: Option<String>,
    /// The decision: [`Reason::Ok`] if the request is admitted, else the reason of the refusal.
    pub reason: Reason,
    /// True if the last connections to all candidates failed.
    pub is_failing: bool,
    /// True if this gateway refuses the name, and clients reach the service through the gateways of a peer.
    pub is_reached_elsewhere: bool,
    /// The steps of the decision, in order.
    pub steps: Vec<String>,
    /// The endpoints that can be chosen.
    pub candidates: Vec<CandidateView>,
    /// The numbers of endpoints that cannot be chosen, by reason.
    pub omitted: Vec<Omitted>,
    /// Warnings for the operator, which do not change the decision.
    pub warnings: Vec<String>,
    /// Known names that are similar to the unknown name.
    pub near: Vec<String>,
    /// Recent connections that failed.
    pub recent: Vec<api::explanation::RecentFailure>,
}

/// An endpoint that can be chosen.
#[derive(Clone, Debug)]
pub struct CandidateView {
    /// The address and port to which the gateway connects.
    pub address: SocketAddr,
    /// The cluster of the endpoint's registry.
    pub cluster: String,
    /// The locality of the endpoint.
    pub locality: String,
    /// The weight of the endpoint.
    pub weight: u32,
    /// The health that the endpoint's registry reports.
    pub health: Health,
    /// The probability of being chosen, from 0 to 1.
    pub odds: f64,
    /// The key of the endpoint's run-time state.
    key: EndpointKey,
    /// True if the endpoint is chosen only while no other can be used.
    is_backup: bool,
    /// The largest number of connections to the endpoint; `None`: there is no limit.
    connections_max: Option<NonZero<u32>>,
    /// The run-time state of the endpoint; `None` if the endpoint was never dialled, or if no gateway runs.
    pub state: Option<EndpointState>,
    /// The timeout of one attempt to connect.
    pub connect_timeout: Duration,
    /// The result of dialling the endpoint, if the operator asked for a probe.
    pub probe: Option<api::explanation::Probe>,
}

#[derive(Default)]
struct Steps {
    steps: Vec<String>,
    canonical: Option<String>,
}

impl Steps {
    /// Adds the step about a limit, if there is one, and returns the warnings.
    fn limit(&mut self, said: Said) -> Vec<String> {
        self.steps.extend(said.step);
        said.warnings
    }

    /// Adds a step with the numbers of endpoints that cannot be chosen, by reason.
    fn omitted(&mut self, omitted: &[Omitted]) {
        let parts = omitted.iter().map(|omitted| {
            let network = if omitted.network.is_unknown() { "no network" } else { omitted.network.as_str() };
            format!("{} {} ({network})", omitted.count, omitted.reason.text())
        });
        let parts: Vec<String> = parts.collect();
        if !parts.is_empty() {
            self.steps.push(format!("endpoints that cannot be used: {}", parts.join(", ")));
        }
    }
}

impl Trace for Steps {
    fn step(&mut self, text: impl FnOnce() -> String) {
        self.steps.push(text());
    }

    fn canonical(&mut self, name: &str) {
        self.canonical = Some(name.to_owned());
        self.steps.push(format!("the gateway looks up the name as {name:?}"));
    }
}

/// Explains a name; the error describes the mistake in the parameters. Without a running gateway, every endpoint is treated as
/// one that never failed.
pub fn explain(
    snapshot: &Snapshot,
    inquiry: &ExplainRequest,
    running: Option<Running<'_>>,
) -> Result<Explanation, String> {
    match running {
        Some(of) => explain_by(snapshot, inquiry, &Looking(of.upstreams), running),
        None => explain_by(snapshot, inquiry, &Idle, None),
    }
}

fn explain_by(
    snapshot: &Snapshot,
    inquiry: &ExplainRequest,
    load: &impl Load,
    running: Option<Running<'_>>,
) -> Result<Explanation, String> {
    let listener = find_listener(snapshot, inquiry)?;
    let authority = match (inquiry.authority, &inquiry.name) {
        (false, _) => None,
        (true, Some(name)) => Some(Authority::parse(name).map_err(|fault| fault.to_string())),
        (true, None) => {
            return Err("the authority is missing; expected hostname:port or address:port".to_owned());
        }
    };
    let entries =
        inquiry.alpn.as_ref().map(|names| Protocols::entries_of(names.iter().map(String::as_bytes)));
    let protocol = snapshot.gateway_api.protocol(listener, inquiry.local);
    let request = AdmissionRequest {
        listener,
        requested: match &authority {
            Some(Ok(authority)) => Requested::Authority(authority),
            None if inquiry.is_not_tls || protocol == ListenerProtocol::Tcp => Requested::Nothing,
            Some(Err(_)) | None => Requested::ServerName(inquiry.name.as_deref().map(str::as_bytes)),
        },
        source: inquiry.source,
        alpn: entries.as_deref().map(Protocols::from_entries),
        identity: inquiry.identity.as_ref(),
        kind: CallerKind::default(),
        local: inquiry.local,
        draw: None,
        is_passed_on: false,
        far: Some(&Computed),
    };
    let mut steps = Steps::default();
    let bound = running.and_then(|running| running.listening.iter().find(|(name, _)| *name == listener.name));
    let bound = bound.map_or_else(|| listener.bind.to_string(), |(_, address)| address.to_string());
    steps.step(|| format!("listener {:?} on {bound}", &*listener.name));
    let mut explanation = Explanation {
        name: inquiry.name.clone().unwrap_or_default(),
        is_authority: inquiry.authority,
        listener: listener.name.to_string(),
        canonical: None,
        matched: None,
        rule: None,
        reason: Reason::Ok,
        is_failing: false,
        is_reached_elsewhere: false,
        steps: Vec::new(),
        candidates: Vec::new(),
        omitted: Vec::new(),
        warnings: Vec::new(),
        near: Vec::new(),
        recent: Vec::new(),
    };
    explanation.reason = match &authority {
        Some(Err(fault)) => {
            steps.step(|| format!("the authority is malformed: {fault}"));
            Reason::BadRequest
        }
        Some(Ok(_)) | None => {
            let counters = running.map(|running| running.counters);
            decide(snapshot, &request, load, counters, &mut steps, &mut explanation)
        }
    };
    if let Some(running) = running {
        explanation.look_at_endpoints(running.upstreams);
        if let Some(text) = explanation.withdrawn() {
            steps.step(|| text);
        }
    }
    if authority.is_some() && explanation.reason == Reason::IdentityRequired {
        steps.step(|| {
            "the caller's TLS handshake fails, because HBONE requires a client certificate".to_owned()
        });
    } else if authority.is_some() {
        let (status, told) = status_of(explanation.reason);
        steps.step(|| {
            format!(
                "the caller gets the HTTP status {} and the header isthmus-reason: {told}",
                status.as_u16()
            )
        });
    } else if matches!(request.requested, Requested::Nothing) {
        // The client may not speak TLS, so it gets no alert.
    } else if let Some(alert) = alert_of(explanation.reason, explanation.rule.as_deref()) {
        steps.step(|| match listener.refusal {
            RefusalMode::Alert => format!("the client gets the TLS alert {} ({})", alert.text(), alert as u8),
            RefusalMode::Close => {
                "the gateway closes the connection without a TLS alert (refusal: close)".to_owned()
            }
            RefusalMode::Reset => "the gateway resets the connection (refusal: reset)".to_owned(),
        });
    }
    let looked_for = steps.canonical.as_deref().unwrap_or(&explanation.name);
    let is_unknown =
        matches!(explanation.reason, Reason::SniUnknown | Reason::AuthorityUnknown | Reason::NotExported);
    match imported(snapshot, looked_for) {
        // The name is not a slip: the service is another mesh's.
        Some(imported) => {
            steps.step(|| imported.text);
            explanation.is_reached_elsewhere = imported.is_reachable;
        }
        None if is_unknown => explanation.near = near(snapshot, looked_for),
        None => {}
    }
    let missing = missing_for(snapshot, explanation.reason, request.requested);
    explanation.warnings.extend(missing);
    explanation.canonical = steps.canonical;
    explanation.steps = steps.steps;
    Ok(explanation)
}

fn find_listener<'a>(snapshot: &'a Snapshot, inquiry: &ExplainRequest) -> Result<&'a Listener, String> {
    let listeners = &snapshot.policy.listeners;
    let (takes, way) = match inquiry.authority {
        true => (ListenerProtocol::takes_hbone as fn(ListenerProtocol) -> bool, "HBONE"),
        false => (ListenerProtocol::takes_sni as fn(ListenerProtocol) -> bool, "SNI"),
    };
    let Some(name) = inquiry.listener.as_deref() else {
        let found = listeners.iter().find(|listener| takes(listener.protocol));
        return found.map(|listener| &**listener).ok_or_else(|| format!("no listener accepts {way}"));
    };
    let found = listeners.iter().find(|listener| &*listener.name == name).ok_or_else(|| {
        let names: Vec<&str> = listeners.iter().map(|listener| &*listener.name).collect();
        format!("there is no listener {name:?}; there are: {}", names.join(", "))
    })?;
    // A listener of protocol tcp has one answer, whatever the name.
    if !takes(found.protocol) && (inquiry.authority || found.protocol != ListenerProtocol::Tcp) {
        Err(format!("the listener {name:?} does not accept {way}"))
    } else {
        Ok(found)
    }
}

/// Decides in the order of the data path: source, ALPN, name, export, endpoints.
fn decide(
    snapshot: &Snapshot,
    request: &AdmissionRequest<'_>,
    load: &impl Load,
    counters: Option<Counters<'_>>,
    steps: &mut Steps,
    explanation: &mut Explanation,
) -> Reason {
    if let ProxyProtocol::Require { from } = &request.listener.proxy_protocol {
        let list = from.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        steps.step(|| {
            format!("the listener requires a PROXY header and accepts one only from {list}; the address in the header is the \
                     source")
        });
    }
    let sources = &request.listener.sources;
    if *sources != SourceRule::EVERYONE {
        let applied =
            if request.source.is_some() { "" } else { " (not checked: no source address was given)" };
        steps.step(|| format!("the listener accepts connections only from {sources}{applied}"));
    }
    if let Some(Err(reason)) = request.source.map(|source| admit_source(request.listener, source)) {
        return reason;
    }
    let limits = &snapshot.policy.limits;
    let of_source = steps.limit(of_source(limits, request.source, counters));
    // The candidates of a call that leaves the network are the gateways of others, and no endpoint is left out.
    let mut leaves = false;
    let matched = match admit(snapshot, request, steps) {
        Ok(Admission { onward: Some(onward), matched, .. }) if matches!(*onward, Onward::Carrier(_)) => {
            matched
        }
        Ok(admission) => {
            let ask = ask(&admission, request.source);
            explanation.candidates = candidates(&ask, load);
            let chosen = choose(&ask, load, &mut || 0, steps);
            if let Some(version) = admission.candidates.tuning.send_proxy {
                steps.step(|| sent_header(version, &admission.candidates));
            }
            explanation.reason = chosen.err().unwrap_or(Reason::Ok);
            leaves = admission.onward.is_some();
            admission.matched
        }
        Err(refusal) => {
            explanation.reason = refusal.reason;
            refusal.matched
        }
    };
    if matches!(
        explanation.reason,
        Reason::Ok | Reason::NoEndpoints | Reason::AllUnhealthy | Reason::LimitService
    ) {
        if !leaves {
            explanation.omitted = omitted::omitted(snapshot, request, &matched);
            steps.omitted(&explanation.omitted);
        }
        explanation.warnings =
            omitted::warnings(snapshot, &explanation.omitted, explanation.candidates.len());
        explanation.warnings.extend(steps.limit(of_service(limits, &matched, counters)));
        explanation.warnings.extend(steps.limit(of_peer(&snapshot.policy, &matched, counters)));
    }
    explanation.warnings.extend(of_source);
    explanation.warnings.extend(of_gateway(counters));
    if explanation.reason == Reason::NotExported {
        for text in not_applying(snapshot, &matched, explanation.canonical.as_deref()) {
            steps.step(|| text);
        }
    }
    explanation.matched = matched.kind.map(|kind| kind.text());
    explanation.rule = matched.rule.map(|rule| rule.to_string());
    explanation.reason
}

/// Returns a line for each rule that covers the service but does not apply, with the objects that hide the service, or the mark
/// that no registry sets.
fn not_applying(snapshot: &Snapshot, matched: &RouteMatch, canonical: Option<&str>) -> Vec<String> {
    let target = matched.service.as_ref();
    let Some(hostname) = target.map(|target| &*target.hostname).or(canonical) else { return Vec::new() };
    let Some(service) = snapshot.service(hostname) else { return Vec::new() };
    let wanted = target.and_then(|target| target.port);
    let ports = service.ports.iter().filter(|port| wanted.is_none_or(|wanted| wanted == port.port));
    let mut rules: Vec<Arc<ExportRule>> = ports
        .flat_map(|port| snapshot.exports.not_applying(&service.export_name, port.port, &port.rules))
        .collect();
    rules.sort_by(|one, other| one.name.cmp(&other.name));
    rules.dedup_by(|one, other| one.name == other.name);
    let hidden_by = hidden_by(service);
    let unnamed = |rule: &ExportRule| {
        service.guard().filter(|guard| !guard.is_named(&rule.services, &service.export_name))
    };
    let text = |rule: &Arc<ExportRule>| match (&rule.marked, unnamed(rule)) {
        _ if !hidden_by.is_empty() => format!(
            "export rule {} does not apply, because {} is hidden from the gateway by {}",
            rule.name,
            service.export_name,
            hidden_by.join(", ")
        ),
        (_, Some(Guard::Namespace(namespace))) => format!(
            "export rule {} does not reach the namespace {namespace}, because it is that of Kubernetes or of the mesh's control plane, and \
             no pattern of the rule names it",
            rule.name
        ),
        (_, Some(Guard::ClusterLocal(name))) => format!(
            "export rule {} does not reach {}, because the mesh keeps {name} to its own cluster, and no pattern of the rule names as much",
            rule.name, service.export_name
        ),
        (Some(mark), None) => format!(
            "export rule {}: requires {}, and no registry has it for {}",
            rule.name,
            mark.text(),
            service.export_name
        ),
        (None, None) => {
            format!("export rule {} names clusters that do not have {}", rule.name, service.export_name)
        }
    };
    rules.iter().map(text).collect()
}

/// Describes the PROXY header that the gateway sends to endpoints.
fn sent_header(version: ProxyVersion, candidates: &Candidates) -> String {
    let endpoints = candidates.endpoints();
    let tunnels = endpoints.iter().filter(|endpoint| endpoint.encapsulation == Encapsulation::Hbone).count();
    let except = match tunnels {
        0 => String::new(),
        tunnels => format!(
            ", unless it chooses an endpoint with tunnel: hbone ({tunnels} of the {} endpoints have it)",
            endpoints.len()
        ),
    };
    format!(
        "the gateway sends the endpoint a PROXY {} header before the client's first byte{except}",
        version.text()
    )
}

fn ask<'a>(admission: &'a Admission, source: Option<IpAddr>) -> Ask<'a> {
    Ask { candidates: &admission.candidates, clusters: admission.clusters.as_deref(), tried: &[], source }
}

fn candidates(ask: &Ask<'_>, load: &impl Load) -> Vec<CandidateView> {
    let in_scope = |cluster| ask.clusters.is_none_or(|clusters| clusters.contains(cluster));
    ask.candidates
        .endpoints()
        .iter()
        .zip(odds(ask, load))
        .filter(|(candidate, _)| in_scope(&candidate.cluster))
        .map(|(candidate, odds)| CandidateView {
            address: candidate.key.address,
            cluster: candidate.cluster.to_string(),
            locality: candidate.locality.to_string(),
            weight: candidate.weight.value(),
            is_backup: candidate.is_backup,
            connections_max: candidate.connections_max,
            health: candidate.health,
            odds,
            key: candidate.key.clone(),
            state: None,
            connect_timeout: ask.candidates.tuning.connect_timeout,
            probe: None,
        })
        .collect()
}

impl CandidateView {
    /// Returns the state of the endpoint in one word.
    fn word(&self) -> State {
        State::of(self.health, Resolution::Resolved, self.state.as_ref())
    }

    /// Returns true if the last connections to the endpoint failed, or are not answered.
    fn is_failing(&self) -> bool {
        let fails = |state: &EndpointState| {
            state.in_a_row > 0 || state.not_tls.is_some() || state.silent_for.is_some()
        };
        self.state.as_ref().is_some_and(fails)
    }

    /// Returns a text about the candidate's failures; `None` if it has none.
    fn failing(&self, which: &str) -> Option<String> {
        let state = self.state.as_ref()?;
        let last = state.last_failure.as_ref()?;
        Some(format!(
            "{which} {} fails: {} ({} in a row, last at {}); the verdict covers only what the config allows \
             (`isthmus explain --probe` also dials the endpoint)",
            self.address,
            last.text(),
            state.in_a_row,
            rfc3339(last.time)
        ))
    }
}

/// Returns the last failure of an endpoint in the form of the API.
pub(super) fn last_failure(state: &EndpointState) -> Option<api::endpoint::LastFailure> {
    state.last_failure.as_ref().map(|last| api::endpoint::LastFailure {
        reason: last.reason.text().to_owned(),
        detail: last.detail.as_deref().map(str::to_owned),
        time: rfc3339(last.time),
        in_a_row: state.in_a_row,
        by: if last.by_check { "check" } else { "connection" }.to_owned(),
    })
}

impl Explanation {
    /// Returns true if the connection would be admitted.
    pub fn admitted(&self) -> bool {
        self.reason == Reason::Ok
    }

    /// Adds the run-time state of the candidates.
    fn look_at_endpoints(&mut self, upstreams: &Upstreams) {
        for candidate in &mut self.candidates {
            candidate.state = upstreams.state(&candidate.key);
        }
        let failing =
            |candidate: &&CandidateView| candidate.state.as_ref().is_some_and(|state| state.in_a_row > 0);
        let failed: Vec<&CandidateView> = self.candidates.iter().filter(failing).collect();
        let mut warnings = Vec::new();
        if failed.len() == self.candidates.len() {
            let which = if failed.len() == 1 { "the only endpoint" } else { "each endpoint fails;" };
            warnings.extend(failed.iter().filter_map(|candidate| candidate.failing(which)));
        }
        for candidate in &self.candidates {
            let Some(state) = &candidate.state else { continue };
            if let Some(time) = state.not_tls {
                warnings.push(format!(
                    "endpoint_not_tls: {} answered a ClientHello with bytes that are not TLS, last at {}",
                    candidate.address,
                    rfc3339(time)
                ));
            }
            if let Some(time) = state.silent_for {
                warnings.push(format!(
                    "endpoint_silent: {} has been sent a ClientHello, and has answered no byte for {} s",
                    candidate.address,
                    time.as_secs()
                ));
            }
        }
        self.is_failing =
            !self.candidates.is_empty() && self.candidates.iter().all(CandidateView::is_failing);
        self.warnings.extend(warnings);
    }

    /// Returns a step that names the candidates that an operator has withdrawn; `None` if there are none.
    fn withdrawn(&self) -> Option<String> {
        let withdrawn = |candidate: &CandidateView| {
            let withdrawal = candidate.state.as_ref()?.withdrawal?;
            Some(format!("{} is {}", candidate.address, withdrawal.text()))
        };
        let texts: Vec<String> = self.candidates.iter().filter_map(withdrawn).collect();
        (!texts.is_empty()).then(|| {
            format!(
                "an operator has taken out {} of {} endpoints: {}; `isthmus endpoint enable ADDRESS` makes an endpoint \
                 available again",
                texts.len(),
                self.candidates.len(),
                texts.join(", ")
            )
        })
    }

    /// Returns the server name that a ClientHello for this question has; `None` if the question is about a CONNECT, or about a hello
    /// without a name.
    pub(super) fn server_name(&self) -> Option<String> {
        (!self.is_authority && !self.name.is_empty()).then(|| self.name.clone())
    }

    /// Returns the states of the candidates if the last connections to all of them failed, although the name is admitted.
    fn failing(&self) -> Option<String> {
        let text = |candidate: &CandidateView| {
            let last = candidate.state.as_ref().and_then(|state| state.last_failure.as_ref());
            let last = last.filter(|_| candidate.state.as_ref().is_some_and(|state| state.in_a_row > 0));
            let word = last.map_or_else(|| candidate.word().text(), |last| last.reason.text());
            format!("{} {word}", candidate.address)
        };
        let shown: Vec<String> = self.candidates.iter().take(FAILING_SHOWN).map(text).collect();
        (self.admitted() && self.is_failing).then(|| shown.join(", "))
    }

    /// Returns the explanation in the form of the API.
    pub fn view(&self) -> api::explanation::Explanation {
        let candidate = |candidate: &CandidateView| api::explanation::Candidate {
            address: candidate.address.to_string(),
            cluster: candidate.cluster.clone(),
            locality: candidate.locality.clone(),
            weight: candidate.weight,
            backup: candidate.is_backup,
            max_connections: candidate.connections_max.map(NonZero::get),
            connections: candidate
                .connections_max
                .map(|_| candidate.state.as_ref().map_or(0, |state| state.in_flight)),
            health: candidate.word().text().to_owned(),
            odds: (candidate.odds * 1e6).round() / 1e6,
            state: candidate.word().text().to_owned(),
            last_failure: candidate.state.as_ref().and_then(last_failure),
            probe: candidate.probe.clone(),
        };
        let omitted = |omitted: &Omitted| api::explanation::Omitted {
            why: omitted.reason.text().to_owned(),
            network: omitted.network.to_string(),
            count: omitted.count,
        };
        let verdict = match (self.admitted(), self.is_reached_elsewhere) {
            (true, _) => api::explanation::ADMITTED,
            (false, true) => api::explanation::IMPORTED,
            (false, false) => api::explanation::REFUSED,
        };
        api::explanation::Explanation {
            name: self.name.clone(),
            listener: self.listener.clone(),
            canonical: self.canonical.clone(),
            matched: self.matched.map(str::to_owned),
            rule: self.rule.clone(),
            verdict: verdict.to_owned(),
            reason: self.reason.text().to_owned(),
            failing: self.failing(),
            steps: self.steps.clone(),
            candidates: self.candidates.iter().map(candidate).collect(),
            omitted: self.omitted.iter().map(omitted).collect(),
            warnings: self.warnings.clone(),
            near: self.near.clone(),
            recent: self.recent.clone(),
        }
    }
}
