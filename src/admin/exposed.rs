//! The names that can be reached.

use std::collections::BTreeSet;

use super::listeners::{gateway_listener, leads_to, of_backends, place_text};
use super::marks::{hidden_by, marked_by};
use super::routes::Routes;
use isthmus_api::listener::{Exposed, Identities};
use isthmus_api::requests;
use isthmus_api::text::texts;
use isthmus_decisions::admit::{Held, held};
use isthmus_model::mesh_name::MeshName;
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::peer::Peer;
use isthmus_settings::route::Route;
use isthmus_settings::scope::SourceRule;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::exported::Exported;
use isthmus_snapshot::exports::is_among;
use isthmus_snapshot::port_endpoint::{PortEndpoint, on_own_network};
use isthmus_snapshot::service_view::{PortView, ServiceView};

pub(crate) fn answers(routes: Routes) -> Routes {
    routes.value(&requests::EXPOSED, |sources| exposed(&sources.reader.latest()))
}

/// Returns every reachable name, with the listener, the callers that may use the name, and the rule that exports it.
fn exposed(snapshot: &Snapshot) -> Vec<Exposed> {
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
