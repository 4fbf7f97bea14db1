//! The values of the API that are made from the snapshot and the state of the program.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::clients::refused;
use super::limit_metrics::LIMITS_MAX;
use super::marks::{hidden_by, marked_by};
use super::problems::code::Code;
use super::problems::{Problem, listed, problems};
use super::{Sources, TakenOver, endpoints};
use isthmus_aggregator::status::{RegistryStatus, Status as AggregatorStatus};
use isthmus_api as api;
use isthmus_api::listener::{Exposed, Identities};
use isthmus_api::status::Status;
use isthmus_dataplane::upstreams::Upstreams;
use isthmus_decisions::admit::{Held, held};
use isthmus_dns::server::Server as DnsServer;
use isthmus_model::mesh_name::MeshName;
use isthmus_model::place::ClusterId;
use isthmus_net::admission::bandwidth::Usage;
use isthmus_net::memory::Judgement;
use isthmus_registry::change::Report;
use isthmus_registry::gateway_api::Place;
use isthmus_settings::backend::Backend;
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::listener::{Listener, ListenerProtocol, ProxyProtocol};
use isthmus_settings::peer::Peer;
use isthmus_settings::route::{Route, RouteTarget};
use isthmus_settings::scope::SourceRule;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::exported::Exported;
use isthmus_snapshot::exports::is_among;
use isthmus_snapshot::port_endpoint::{PortEndpoint, on_own_network};
use isthmus_snapshot::service_view::{PortView, ServiceView};
use isthmus_telemetry::clock::rfc3339;

/// Returns the status of the gateway.
pub fn status(sources: &Sources) -> Status {
    let snapshot = sources.reader.latest();
    let program = sources.program.load();
    let aggregator = sources.aggregator.status.borrow().clone();
    let gates = sources.gates(&snapshot.policy.node.cluster);
    let problems = problems(sources);
    let conflicts = problems.iter().filter(|problem| problem.code == Code::ServiceConflict);
    let node = &snapshot.policy.node;
    let limits = &program.limits;
    Status {
        conflicts: conflicts.map(|problem| problem.text.clone()).collect(),
        problems: listed(&problems).iter().map(Problem::view).collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: api::status::Node {
            name: node.name.to_string(),
            cluster: node.cluster.to_string(),
            network: node.network.to_string(),
            locality: node.locality.to_string(),
        },
        uptime_seconds: sources.started.elapsed().as_secs(),
        ready: gates.iter().all(|gate| gate.closed.is_none()),
        not_ready: gates
            .iter()
            .filter_map(|gate| gate.closed.as_ref().map(|why| format!("{}: {why}", gate.name)))
            .collect(),
        draining: program.draining,
        taken_over: program.taken_over.as_ref().map(taken_over),
        generation: snapshot.generation,
        config: api::status::Config {
            path: program.config.display().to_string(),
            since: rfc3339(program.config_since),
            generation: snapshot.policy_generation,
            file_is_running: program.rejected.is_empty(),
            rejected: program.rejected.clone(),
            warnings: program.warnings.clone(),
            needs_restart: program.restart.clone(),
        },
        listeners: listeners(sources),
        limits: api::status::Limits {
            descriptors: limits.descriptors,
            connections: limits.connections,
            pending_hellos: limits.pending_hellos,
            per_source: api::status::PerSource {
                connections: limits.per_source.connections,
                new_per_second: limits.per_source.new_per_second,
                pending_hellos: limits.per_source.pending_hellos,
            },
            per_service: api::status::PerService {
                connections: limits.per_service,
                bytes_per_second: limits.bytes_per_second,
            },
            bandwidth: sources.dataplane.bandwidths().usage(LIMITS_MAX).into_iter().map(bandwidth).collect(),
            health_checks: limits.health_checks,
            memory: memory(&sources.dataplane.memory()),
        },
        workers: program.workers,
        connections: sources.dataplane.connections_active(),
        services: snapshot.service_count(),
        routes: snapshot.policy.routes.len() + snapshot.gateway_api.len(),
        peers: snapshot.policy.peers.len(),
        identity: sources.identities.source(),
        registries: registries(&aggregator),
        held_back: held_back(sources, &aggregator),
        xds: api::status::Xds { clients: sources.clients.count(), refused: refused(&sources.clients) },
        dns: sources.names.as_ref().map(|server| dns(server, &aggregator)),
        unresolved: aggregator.unresolved.iter().map(|(name, _)| name.to_string()).collect(),
    }
}

fn memory(state: &Judgement) -> api::status::Memory {
    let Judgement { budget, used, level, .. } = *state;
    api::status::Memory { budget, used, level: level.text().to_owned() }
}

fn bandwidth(usage: Usage) -> api::status::Bandwidth {
    let ([bytes_up, bytes_down], [busy_up, busy_down]) = (usage.moved, usage.busy);
    let [sources_up, sources_down] = usage.busy_sources;
    let (of, limit) = (usage.owner.to_string(), usage.limit);
    api::status::Bandwidth { of, limit, bytes_up, bytes_down, sources_up, sources_down, busy_up, busy_down }
}

fn taken_over(is: &TakenOver) -> api::status::TakenOver {
    api::status::TakenOver {
        since: rfc3339(is.since),
        process: is.process,
        version: is.version.clone(),
        moved: is.moved,
        left: is.left,
        has_ended: is.has_ended,
    }
}

/// Returns the state of the DNS server with that of the virtual addresses.
fn dns(server: &DnsServer, aggregator: &AggregatorStatus) -> api::status::Dns {
    let of_services = aggregator.virtual_addresses.as_ref().map(|status| api::status::VirtualAddresses {
        ranges: texts(&status.ranges.list()),
        in_use: status.counts.in_use,
        reserved: status.counts.reserved,
        without: status.counts.without,
    });
    api::status::Dns {
        address: server.address().to_string(),
        zones: server.zones(),
        services: server.services(),
        virtual_addresses: of_services.unwrap_or_default(),
    }
}

/// Returns the registries that have never been read. Reconnected xDS clients keep resources that these registries may have. The
/// numbers of such clients, and of the names of such resources, are returned too.
fn held_back(sources: &Sources, aggregator: &AggregatorStatus) -> api::status::HeldBack {
    let held_back = sources.clients.held_back();
    api::status::HeldBack {
        registries: texts(&aggregator.unread),
        clients: held_back.clients,
        names: held_back.names,
    }
}

/// Returns one object per registry, in order of precedence.
pub fn registries(aggregator: &AggregatorStatus) -> Vec<api::registry::Registry> {
    let view = |registry: &RegistryStatus| {
        let flaws = registry.flaws.iter().flat_map(|lines| lines.iter());
        api::registry::Registry {
            name: registry.name.to_string(),
            cluster: registry.cluster.to_string(),
            network: registry.network.to_string(),
            state: registry.state.text().to_owned(),
            changes: registry.changes,
            flawed: registry.flaws.len(),
            problems: registry.problems.iter().chain(&registry.copy_problem).chain(flaws).cloned().collect(),
            services: registry.items.services,
            endpoints: registry.items.endpoints,
            gateways: registry.items.gateways,
            marks: registry.items.marks,
            denied_services: registry.items.denied_items,
            denied_endpoints: registry.items.denied_endpoints,
            denied_addresses: registry.items.denied_addresses,
            since: rfc3339(registry.since),
            read: registry.read.map(rfc3339),
            report: registry.report.as_deref().map(report),
        }
    };
    aggregator.registries.iter().map(view).collect()
}

/// Returns a registry's report on how it is read, in the form of the API.
fn report(report: &Report) -> api::registry::Report {
    let counts = |list: &[(&'static str, usize)]| {
        list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    };
    api::registry::Report {
        server: report.server.clone(),
        version: report.version.clone(),
        facts: report.facts.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
        objects: counts(&report.objects),
        left_out: counts(&report.left_out),
        problems: report.problems.clone(),
    }
}

/// Returns the backends of a route of the Gateway API, with the reasons why some refuse their connections.
fn of_backends(backends: &[Backend]) -> Vec<String> {
    let text = |backend: &Backend| match &backend.to {
        Ok(to) => format!("{to} (weight {})", backend.weight),
        Err(why) => format!("refused (weight {}): {why}", backend.weight),
    };
    backends.iter().map(text).collect()
}

/// Returns the listener of a place of Gateways, with its address if it has one of its own.
fn place_text(listener: &Listener, place: &Place) -> String {
    match place.address {
        Some(address) => format!("{} at {address}", listener.name),
        None => listener.name.to_string(),
    }
}

/// Returns the listener of Gateways on the port of a place.
fn gateway_listener<'a>(snapshot: &'a Snapshot, place: &Place) -> Option<&'a Arc<Listener>> {
    let is_its = |listener: &&Arc<Listener>| listener.is_of_gateways && listener.bind.port() == place.port;
    snapshot.policy.listeners.iter().find(is_its)
}

/// Returns one object per route of the Gateway API, in order of their objects.
fn gateway_routes(snapshot: &Snapshot) -> impl Iterator<Item = api::listener::Route> {
    let text = |place: &Place| Some(place_text(gateway_listener(snapshot, place)?, place));
    snapshot.gateway_api.routes().into_iter().map(move |route| {
        let places: BTreeSet<&Place> = route.claims.iter().map(|claim| &claim.place).collect();
        api::listener::Route {
            name: route.object.to_string(),
            listeners: places.into_iter().filter_map(text).collect(),
            leads_to: of_backends(&route.backends),
            ..api::listener::Route::default()
        }
    })
}

/// Returns one object per route: those of the config in the order of the file, then those of the Gateway API.
pub fn routes(snapshot: &Snapshot) -> Vec<api::listener::Route> {
    let view = |route: &Arc<Route>| {
        let entry = snapshot.routes().named(&route.name);
        let candidates = entry.and_then(|entry| entry.candidates.as_ref());
        let own = route.conditions.own_of.iter().map(ToString::to_string);
        api::listener::Route {
            name: route.name.to_string(),
            listeners: texts(&route.conditions.listeners).into_iter().chain(own).collect(),
            from: texts(&route.conditions.sources.from),
            except_from: texts(&route.conditions.sources.except),
            leads_to: leads_to(route),
            endpoints: candidates.map(|candidates| candidates.endpoints().len()),
        }
    };
    snapshot.policy.routes.iter().map(view).chain(gateway_routes(snapshot)).collect()
}

/// Returns the targets of a route in the form of the config file.
fn leads_to(route: &Route) -> Vec<String> {
    match &route.to {
        RouteTarget::Endpoints { endpoints, .. } => endpoints.iter().map(ToString::to_string).collect(),
        RouteTarget::Service { hostname, port, subset } => {
            let subset = if subset.is_empty() { String::new() } else { format!(" ({subset})") };
            vec![format!("{hostname}:{port}{subset}")]
        }
        RouteTarget::Backends(backends) => of_backends(backends),
    }
}

/// Returns one object per listener, in the order of the file, and one for the DNS server.
pub fn listeners(sources: &Sources) -> Vec<api::listener::Listener> {
    let program = sources.program.load();
    let snapshot = sources.reader.latest();
    let view = |listener: &Arc<Listener>| {
        let address = program.listening.iter().find(|(name, _)| *name == listener.name);
        api::listener::Listener {
            name: listener.name.to_string(),
            bind: listener.bind.to_string(),
            address: address.map(|(_, address)| address.to_string()),
            protocol: listener.protocol.text().to_owned(),
            alpn: listener.alpn.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect(),
            from: texts(&listener.sources.from),
            except_from: texts(&listener.sources.except),
            proxy_protocol: proxy_protocol(&listener.proxy_protocol),
        }
    };
    let dns = sources.names.iter().map(|server| api::listener::Listener {
        name: "dns".to_owned(),
        bind: server.bind().to_string(),
        address: Some(server.address().to_string()),
        protocol: "dns".to_owned(),
        ..api::listener::Listener::default()
    });
    snapshot.policy.listeners.iter().map(view).chain(dns).collect()
}

fn proxy_protocol(rule: &ProxyProtocol) -> api::listener::ProxyProtocol {
    let (mode, from) = match rule {
        ProxyProtocol::Forbid => ("forbid", Vec::new()),
        ProxyProtocol::Require { from } => ("require", texts(from)),
    };
    api::listener::ProxyProtocol { mode: mode.to_owned(), from }
}

/// Returns one object per service.
pub fn services(snapshot: &Snapshot) -> Vec<api::service::Service> {
    snapshot.services().into_iter().map(|service| listed_service(service)).collect()
}

/// Returns a service in the form of the list of services.
pub fn listed_service(service: &ServiceView) -> api::service::Service {
    api::service::Service {
        hostname: service.name.to_string(),
        namespace: service.namespace.to_string(),
        addresses: texts(&service.addresses),
        ports: service.ports.iter().map(port).collect(),
        clusters: clusters(service),
        conflicts: texts(&service.conflicts),
    }
}

fn port(port: &PortView) -> api::service::Port {
    let here = port.candidates("", AskedBy::MeshName).map_or(0, |candidates| candidates.endpoints().len());
    api::service::Port {
        name: port.name.to_string(),
        port: port.port,
        protocol: port.protocol.text().to_owned(),
        exported_by: port.rules.iter().map(|rule| rule.name.to_string()).collect(),
        endpoints_here: here,
        target_port: None,
    }
}

fn clusters(service: &ServiceView) -> Vec<String> {
    let mut clusters: Vec<&ClusterId> = service.parts.iter().map(|part| &part.origin.cluster).collect();
    clusters.sort();
    clusters.dedup();
    clusters.into_iter().map(ToString::to_string).collect()
}

/// Returns one service with all its endpoints; `None` if it does not exist.
pub fn service(
    snapshot: &Snapshot,
    hostname: &str,
    upstreams: &Upstreams,
) -> Option<api::service::ServiceDetail> {
    let service = snapshot.service(hostname)?;
    let port_of = |view| api::service::Port { target_port: service.target_port(view), ..port(view) };
    Some(api::service::ServiceDetail {
        hostname: service.name.to_string(),
        namespace: service.namespace.to_string(),
        addresses: texts(&service.addresses),
        ports: service.ports.iter().map(port_of).collect(),
        subsets: service.subsets.keys().map(ToString::to_string).collect(),
        clusters: clusters(service),
        conflicts: texts(&service.conflicts),
        endpoints: endpoints::of_service(snapshot, service, upstreams),
    })
}

fn texts<T: ToString>(all: &[T]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

/// Returns every reachable name, with the listener, the callers that may use the name, and the rule that exports it.
pub fn exposed(snapshot: &Snapshot) -> Vec<Exposed> {
    let mut rows = Vec::new();
    for listener in &snapshot.policy.listeners {
        exposed_routes(snapshot, listener, &mut rows);
        if listener.protocol == ListenerProtocol::Tcp || listener.is_of_gateways {
            continue;
        }
        for service in snapshot.services() {
            for port in &service.ports {
                exposed_port(snapshot, listener, service, port, &mut rows);
            }
        }
        for peer in &snapshot.policy.peers {
            exposed_to_peer(snapshot, listener, peer, &mut rows);
        }
    }
    exposed_gateway_routes(snapshot, &mut rows);
    rows
}

/// Adds the names that routes of the Gateway API make reachable, each with the object that has it.
fn exposed_gateway_routes(snapshot: &Snapshot, rows: &mut Vec<Exposed>) {
    let mut seen = BTreeSet::new();
    for route in snapshot.gateway_api.routes() {
        for claim in &route.claims {
            let Some(listener) = gateway_listener(snapshot, &claim.place) else { continue };
            let name = claim.applied().map(ToString::to_string);
            let entry = match &name {
                None => snapshot.gateway_api.raw(claim.place.port, claim.place.address),
                Some(name) => match held(snapshot, listener, claim.place.address, name) {
                    Some(Held::Gateway(holder)) => holder.route.map(|(entry, _)| entry),
                    Some(Held::Config(_)) | None => None,
                },
            };
            let is_its = entry.is_some_and(|entry| entry.route.name == route.object);
            if !is_its || !seen.insert((claim.place, name.clone())) {
                continue;
            }
            rows.push(Exposed {
                name: name.unwrap_or_else(|| "any connection".to_owned()),
                listener: place_text(listener, &claim.place),
                by: route.object.to_string(),
                leads_to: of_backends(&route.backends),
                tls: Vec::new(),
                sources: sources_text(&[]),
                identities: Identities::not_checked(),
                marked_by: None,
                hidden_by: Vec::new(),
            });
        }
    }
}

fn exposed_routes(snapshot: &Snapshot, listener: &Listener, rows: &mut Vec<Exposed>) {
    for route in &snapshot.policy.routes {
        if !applies_on(route, listener) {
            continue;
        }
        rows.push(Exposed {
            name: route.name.to_string(),
            listener: listener.name.to_string(),
            by: "route".to_owned(),
            leads_to: leads_to(route),
            tls: Vec::new(),
            sources: sources_text(&[&listener.sources, &route.conditions.sources]),
            identities: Identities::not_checked(),
            marked_by: None,
            hidden_by: Vec::new(),
        });
    }
}

/// Returns true if clients of a listener can reach the route.
fn applies_on(route: &Route, listener: &Listener) -> bool {
    match &route.conditions.own_of {
        Some(name) => *name == listener.name,
        // HBONE callers can reach services, but not routes.
        None if !listener.protocol.takes_sni() => false,
        None => route.on_listener(&listener.name),
    }
}

fn exposed_port(
    snapshot: &Snapshot,
    listener: &Listener,
    service: &ServiceView,
    port: &PortView,
    rows: &mut Vec<Exposed>,
) {
    for rule in port.rules.iter().filter(|rule| rule.on_listener(&listener.name)) {
        let by_hostname = port.is_named_by(rule)
            && service.hostname_port(&listener.name).is_some_and(|only| only.port == port.port);
        let modes = |asked| {
            let here = service.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
            modes(snapshot, here.filter(|found| rule.has_cluster(&found.origin.cluster)), |found| {
                found.is_offered_by(rule, asked)
            })
        };
        for (names, asked) in names_of(listener, port, &service.name, by_hostname) {
            let Some(modes) = modes(asked) else { continue };
            let row = |name: String| exposed_row(listener, service, port, rule, &name, &modes);
            rows.extend(names.into_iter().map(row));
        }
    }
}

/// Returns the names by which callers on a listener ask for a port of the service `hostname`, by kind.
fn names_of(
    listener: &Listener,
    port: &PortView,
    hostname: &str,
    by_hostname: bool,
) -> Vec<(Vec<String>, AskedBy)> {
    let mut names = Vec::new();
    if listener.protocol.takes_sni() {
        names.push((mesh_names(port, hostname).collect(), AskedBy::MeshName));
        names.extend(by_hostname.then(|| (vec![hostname.to_owned()], AskedBy::Hostname)));
    }
    // The authority that HBONE callers send.
    if listener.protocol.takes_hbone() {
        names.push((vec![format!("{hostname}:{}", port.port)], AskedBy::Authority));
    }
    names
}

/// Returns the TLS modes of those of the endpoints on this gateway's network that are offered; `None` if there are endpoints, and none
/// of them is offered.
fn modes<'a>(
    snapshot: &Snapshot,
    endpoints: impl Iterator<Item = PortEndpoint<'a>>,
    is_offered: impl Fn(&PortEndpoint<'_>) -> bool,
) -> Option<Vec<String>> {
    let (mut modes, mut is_shut) = (BTreeSet::new(), false);
    for found in endpoints.filter(|found| on_own_network(found, &snapshot.policy.node)) {
        match is_offered(&found) {
            true => drop(modes.insert(found.tls)),
            false => is_shut = true,
        }
    }
    let all = modes.iter().map(|mode| mode.text().to_owned());
    (!modes.is_empty() || !is_shut).then(|| all.collect())
}

/// Returns the mesh names of a port of the service `hostname`: one for all of its endpoints, and one for each subset.
fn mesh_names(port: &PortView, hostname: &str) -> impl Iterator<Item = String> {
    port.subsets().map(move |subset| MeshName { port: port.port, subset, hostname }.text())
}

/// Adds the names under which a peer reaches services on a listener.
fn exposed_to_peer(snapshot: &Snapshot, listener: &Listener, peer: &Peer, rows: &mut Vec<Exposed>) {
    let by_sni = listener.protocol.takes_sni() && !peer.from.is_empty();
    let alias = peer.who.as_ref().map(|who| &who.alias).filter(|_| listener.protocol.takes_hbone());
    for Exported { name, service, rule } in snapshot.exports_to(&peer.name) {
        let only = service.tls_port(rule.tls()).map(|port| port.port);
        let offer = service.offer_for(rule);
        for port in &service.ports {
            let modes_by = |asked| {
                let here = service.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
                let here = here.filter(|found| is_among(&offer.clusters, &found.origin.cluster));
                modes(snapshot, here, |found| offer.has(found, asked))
            };
            let row = |name: String, tls: &[String], sources: String, identities: Identities| Exposed {
                name,
                listener: listener.name.to_string(),
                by: format!("{} (peer {})", rule.rule, peer.name),
                leads_to: vec![format!("{}:{}", service.name, port.port)],
                tls: tls.to_vec(),
                sources,
                identities,
                marked_by: None,
                hidden_by: Vec::new(),
            };
            let sources = || sources_text(&[&listener.sources, &these(&peer.from)]);
            if let Some(tls) = modes_by(AskedBy::MeshName).filter(|_| by_sni) {
                let names = mesh_names(port, name.as_str());
                rows.extend(names.map(|name| row(name, &tls, sources(), Identities::not_checked())));
            }
            let by_hostname = by_sni && only == Some(port.port);
            if let Some(tls) = modes_by(AskedBy::Hostname).filter(|_| by_hostname) {
                rows.push(row(name.to_string(), &tls, sources(), Identities::not_checked()));
            }
            if let (Some(alias), Some(tls)) = (alias, modes_by(AskedBy::Authority)) {
                let identities = Identities::Patterns(vec![format!("spiffe://{alias}/*")]);
                let name = format!("{name}:{}", port.port);
                rows.push(row(name, &tls, sources_text(&[&listener.sources]), identities));
            }
        }
    }
}

fn exposed_row(
    listener: &Listener,
    service: &ServiceView,
    port: &PortView,
    rule: &ExportRule,
    name: &str,
    tls: &[String],
) -> Exposed {
    let identities = match rule.to.identities.as_slice() {
        [] => Identities::not_checked(),
        list => Identities::Patterns(texts(list)),
    };
    Exposed {
        name: name.to_owned(),
        listener: listener.name.to_string(),
        by: rule.name.to_string(),
        leads_to: vec![format!("{}:{}", service.name, port.port)],
        tls: tls.to_vec(),
        sources: sources_text(&[&listener.sources, &these(&rule.to.cidrs)]),
        identities,
        marked_by: rule.marked.as_ref().map(|condition| marked_by(condition, service)),
        hidden_by: hidden_by(service),
    }
}

/// Returns the rule that admits these blocks alone; with none, all.
fn these(blocks: &[ipnet::IpNet]) -> SourceRule {
    SourceRule { from: blocks.to_vec(), except: Vec::new() }
}

fn sources_text(all: &[&SourceRule]) -> String {
    let rules = all.iter().filter(|rule| ***rule != SourceRule::EVERYONE);
    let texts: Vec<String> = rules.map(ToString::to_string).collect();
    if texts.is_empty() { "any".to_owned() } else { texts.join(" and ") }
}
