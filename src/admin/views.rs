//! The JSON values of the API and the command line.

use std::sync::Arc;

use serde_json::{Value, json};

use super::clients::refused;
use super::problems::{Code, Problem, listed, problems};
use super::{Sources, endpoints};
use crate::aggregator::status::{RegistryStatus, Status as AggregatorStatus};
use crate::dataplane::upstreams::Upstreams;
use crate::model::mesh_name::MeshName;
use crate::model::place::ClusterId;
use crate::snapshot::Snapshot;
use crate::snapshot::change::Report;
use crate::snapshot::policy::{ExportRule, Listener, ListenerProtocol, MarkCondition, Route, RouteTarget};
use crate::snapshot::service_view::{AskedBy, Part, PortView, ServiceView};
use crate::telemetry::clock::rfc3339;

/// Returns the status of the program.
pub fn status(sources: &Sources) -> Value {
    let snapshot = sources.reader.latest();
    let program = sources.program.load();
    let aggregator = sources.aggregator.borrow().clone();
    let gates = sources.gates(&snapshot.policy.node.cluster);
    let problems = problems(sources);
    let conflicts = problems.iter().filter(|problem| problem.code == Code::ServiceConflict);
    let conflicts: Vec<&String> = conflicts.map(|problem| &problem.text).collect();
    json!({
        "problems": listed(&problems).iter().map(Problem::to_json).collect::<Vec<_>>(),
        "version": env!("CARGO_PKG_VERSION"),
        "node": {
            "name": &*snapshot.policy.node.name,
            "cluster": snapshot.policy.node.cluster.as_str(),
            "network": snapshot.policy.node.network.as_str(),
            "locality": snapshot.policy.node.locality.as_str(),
        },
        "uptime_seconds": sources.started.elapsed().as_secs(),
        "ready": gates.iter().all(|gate| gate.closed.is_none()),
        "not_ready": gates.iter().filter_map(|gate| gate.closed.as_ref().map(|why| format!("{}: {why}", gate.name)))
            .collect::<Vec<_>>(),
        "draining": program.draining,
        "generation": snapshot.generation,
        "config": {
            "path": program.config.display().to_string(),
            "since": rfc3339(program.config_since),
            "generation": snapshot.policy_generation,
            "file_is_running": program.rejected.is_empty(),
            "rejected": program.rejected,
            "warnings": program.warnings,
            "needs_restart": program.restart,
        },
        "listeners": listeners(sources),
        "limits": {
            "descriptors": program.limits.descriptors,
            "connections": program.limits.connections,
            "pending_hellos": program.limits.pending_hellos,
            "per_source": {
                "connections": program.limits.per_source.connections,
                "new_per_second": program.limits.per_source.new_per_second,
                "pending_hellos": program.limits.per_source.pending_hellos,
            },
            "per_service": {"connections": program.limits.per_service},
            "health_checks": program.limits.health_checks,
        },
        "workers": program.workers,
        "connections": sources.dataplane.connections_active(),
        "services": snapshot.service_count(),
        "routes": snapshot.policy.routes.len(),
        "identity": sources.identities.source(),
        "registries": registries(&aggregator),
        "held_back": held_back(sources, &aggregator),
        "xds": {"clients": sources.clients.count(), "refused": refused(&sources.clients)},
        "unresolved": aggregator.unresolved,
        "conflicts": conflicts,
    })
}

/// Returns the registries that were never read, and the numbers of names that reconnected xDS clients keep
/// for them.
fn held_back(sources: &Sources, aggregator: &AggregatorStatus) -> Value {
    let held_back = sources.clients.held_back();
    json!({
        "registries": aggregator.unread.iter().map(|name| &**name).collect::<Vec<_>>(),
        "clients": held_back.clients,
        "names": held_back.names,
    })
}

/// Returns one object per registry, in order of precedence.
pub fn registries(aggregator: &AggregatorStatus) -> Value {
    let view = |registry: &RegistryStatus| {
        json!({
            "name": &*registry.name,
            "cluster": registry.cluster.as_str(),
            "network": registry.network.as_str(),
            "state": registry.state.text(),
            "changes": registry.changes,
            "flawed": registry.flaws.len(),
            "problems": registry.problems.iter().chain(registry.flaws.iter().flat_map(|lines| lines.iter())).collect::<Vec<_>>(),
            "services": registry.items.services,
            "endpoints": registry.items.endpoints,
            "gateways": registry.items.gateways,
            "marks": registry.items.marks,
            "denied_services": registry.items.denied_items,
            "denied_endpoints": registry.items.denied_endpoints,
            "denied_addresses": registry.items.denied_addresses,
            "since": rfc3339(registry.since),
            "read": registry.read.map(rfc3339),
            "report": registry.report.as_deref().map(report),
        })
    };
    aggregator.registries.iter().map(view).collect()
}

/// Returns what a registry says of how it is read.
fn report(report: &Report) -> Value {
    let counts = |list: &[(&'static str, usize)]| -> Value {
        let pairs = list.iter().map(|(name, count)| ((*name).to_owned(), Value::from(*count)));
        Value::Object(pairs.collect())
    };
    let facts = report.facts.iter().map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str())));
    json!({
        "server": report.server,
        "version": report.version,
        "facts": Value::Object(facts.collect()),
        "objects": counts(&report.objects),
        "left_out": counts(&report.left_out),
        "problems": report.problems,
    })
}

/// Returns one object per route, in the order of the file.
pub fn routes(snapshot: &Snapshot) -> Value {
    let view = |route: &Arc<Route>| {
        let entry = snapshot.routes().named(&route.key.to_string());
        let candidates = entry.and_then(|entry| entry.candidates.as_ref());
        json!({
            "name": route.key.to_string(),
            "listeners": route.listeners.iter().map(|name| &**name).collect::<Vec<_>>(),
            "leads_to": leads_to(route),
            "endpoints": candidates.map(|candidates| candidates.endpoints().len()),
        })
    };
    snapshot.policy.routes.iter().map(view).collect()
}

/// Returns the targets of a route, as the file writes them.
fn leads_to(route: &Route) -> Vec<String> {
    match &route.to {
        RouteTarget::Endpoints { endpoints, .. } => {
            endpoints.iter().map(|endpoint| format!("{}:{}", endpoint.host, endpoint.port)).collect()
        }
        RouteTarget::Service { hostname, port, subset } => {
            let subset = if subset.is_empty() { String::new() } else { format!(" ({subset})") };
            vec![format!("{hostname}:{port}{subset}")]
        }
    }
}

/// Returns one object per listener, in the order of the file.
pub fn listeners(sources: &Sources) -> Value {
    let program = sources.program.load();
    let snapshot = sources.reader.latest();
    let view = |listener: &Arc<Listener>| {
        let address = program.listening.iter().find(|(name, _)| *name == listener.name);
        json!({
            "name": &*listener.name,
            "bind": listener.bind.to_string(),
            "address": address.map(|(_, address)| address.to_string()),
            "protocol": listener.protocol.text(),
            "alpn": listener.alpn.iter().map(|name| String::from_utf8_lossy(name)).collect::<Vec<_>>(),
            "from": listener.from.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    };
    snapshot.policy.listeners.iter().map(view).collect()
}

/// Returns one object per service.
pub fn services(snapshot: &Snapshot) -> Value {
    let view = |service: &Arc<ServiceView>| {
        json!({
            "hostname": &*service.name,
            "namespace": &*service.namespace,
            "addresses": service.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "ports": service.ports.iter().map(port).collect::<Vec<_>>(),
            "clusters": clusters(service),
            "conflicts": service.conflicts,
        })
    };
    snapshot.services().into_iter().map(view).collect()
}

fn port(port: &PortView) -> Value {
    let here = port.candidates("", AskedBy::MeshName).map_or(0, |candidates| candidates.endpoints().len());
    json!({
        "name": &*port.name,
        "port": port.port,
        "protocol": port.protocol.text(),
        "exported_by": port.rules.iter().map(|rule| &*rule.name).collect::<Vec<_>>(),
        "endpoints_here": here,
    })
}

/// Returns a port with its target port.
fn port_of_service(service: &ServiceView, view: &PortView) -> Value {
    let mut value = port(view);
    value["target_port"] = service.target_port(view).into();
    value
}

fn clusters(service: &ServiceView) -> Vec<String> {
    let mut clusters: Vec<&ClusterId> = service.parts.iter().map(|part| &part.origin.cluster).collect();
    clusters.sort();
    clusters.dedup();
    clusters.into_iter().map(ToString::to_string).collect()
}

/// Returns one service with all its endpoints; `None` if it does not exist.
pub fn service(snapshot: &Snapshot, hostname: &str, upstreams: &Upstreams) -> Option<Value> {
    let service = snapshot.service(hostname)?;
    let endpoints = endpoints::of_service(snapshot, service, upstreams);
    Some(json!({
        "hostname": &*service.name,
        "namespace": &*service.namespace,
        "addresses": service.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "ports": service.ports.iter().map(|view| port_of_service(service, view)).collect::<Vec<_>>(),
        "subsets": service.subsets.keys().map(|name| &**name).collect::<Vec<_>>(),
        "clusters": clusters(service),
        "conflicts": service.conflicts,
        "endpoints": endpoints,
    }))
}

/// Returns every reachable name with its listener, the callers that may use it, and the rule that exports it.
pub fn exposed(snapshot: &Snapshot) -> Value {
    let mut rows = Vec::new();
    for listener in &snapshot.policy.listeners {
        // HBONE callers reach services only, not routes.
        if listener.protocol != ListenerProtocol::Hbone {
            exposed_routes(snapshot, listener, &mut rows);
        }
        for service in snapshot.services() {
            for port in &service.ports {
                exposed_port(listener, service, port, &mut rows);
            }
        }
    }
    rows.into()
}

fn exposed_routes(snapshot: &Snapshot, listener: &Listener, rows: &mut Vec<Value>) {
    for route in &snapshot.policy.routes {
        if !route.listeners.is_empty() && !route.listeners.contains(&listener.name) {
            continue;
        }
        rows.push(json!({
            "name": route.key.to_string(),
            "listener": &*listener.name,
            "by": "route",
            "leads_to": leads_to(route),
            "sources": sources_text(&[&listener.from]),
            "identities": "not checked",
        }));
    }
}

fn exposed_port(listener: &Listener, service: &ServiceView, port: &PortView, rows: &mut Vec<Value>) {
    for rule in port.rules.iter().filter(|rule| rule.on_listener(&listener.name)) {
        let by_hostname = service.hostname_port(&listener.name).is_some_and(|only| only.port == port.port);
        let mut names = Vec::new();
        if listener.protocol != ListenerProtocol::Hbone {
            names.push(MeshName { port: port.port, subset: "", hostname: &service.name }.text());
            names.extend(by_hostname.then(|| service.name.to_string()));
        }
        // The authority that HBONE callers send.
        if listener.protocol != ListenerProtocol::Sni {
            names.push(format!("{}:{}", service.name, port.port));
        }
        for name in names {
            rows.push(exposed_row(listener, service, port, rule, &name));
        }
    }
}

fn exposed_row(
    listener: &Listener,
    service: &ServiceView,
    port: &PortView,
    rule: &ExportRule,
    name: &str,
) -> Value {
    let identities = match rule.to.identities.as_slice() {
        [] => Value::from("not checked"),
        list => list.iter().map(ToString::to_string).collect(),
    };
    json!({
        "name": name,
        "listener": &*listener.name,
        "by": &*rule.name,
        "leads_to": [format!("{}:{}", service.name, port.port)],
        "sources": sources_text(&[&listener.from, &rule.to.cidrs]),
        "identities": identities,
        "marked_by": rule.marked.as_ref().map(|condition| marked_by(condition, service)),
    })
}

/// The objects that set the mark which a rule asks for, each with its cluster.
fn marked_by(condition: &MarkCondition, service: &ServiceView) -> Vec<String> {
    let of_part = |part: &Part| {
        let cluster = part.origin.cluster.clone();
        let marks: Vec<String> = part
            .marks
            .iter()
            .filter(|mark| condition.is_met_by(std::slice::from_ref(*mark)))
            .map(|mark| format!("{} ({cluster})", mark.key.object))
            .collect();
        marks
    };
    service.parts.iter().flat_map(of_part).collect()
}

fn sources_text(all: &[&Vec<ipnet::IpNet>]) -> Value {
    let lists = all.iter().filter(|blocks| !blocks.is_empty());
    let texts: Vec<String> =
        lists.map(|blocks| blocks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")).collect();
    if texts.is_empty() { "any".into() } else { texts.join(" and ").into() }
}
