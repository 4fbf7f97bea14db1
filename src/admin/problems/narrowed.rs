//! Rules that lead to less than they name, because they have no `tls`: callers may rely on names that earlier versions opened.

use std::collections::BTreeMap;

use super::Problem;
use super::code::Code;
use isthmus_model::endpoint::TlsMode;
use isthmus_settings::export_tls::{AskedBy, ExportTls, TlsSource};
use isthmus_settings::peer::PeerExport;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::exports::is_among;
use isthmus_snapshot::port_endpoint::{PortEndpoint, on_own_network};
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The largest number of services that a problem names.
const NAMED_MAX: usize = 3;

/// Returns a problem for each rule without `tls` that would lead to more with `tls: own`. Visits all services.
pub(super) fn narrowed(snapshot: &Snapshot) -> Vec<Problem> {
    let mut shut: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let is_inferred =
        |service: &ServiceView| service.parts.iter().any(|part| part.origin.tls != TlsSource::Written);
    for service in snapshot.services().into_iter().filter(|service| is_inferred(service)) {
        let peers = snapshot.policy.peers.iter().filter_map(|peer| service.rule_for(peer));
        let peers: Vec<&PeerExport> = peers.filter(|rule| rule.tls.is_none()).collect();
        for port in &service.ports {
            note(snapshot, service, port, &peers, &mut shut);
        }
    }
    shut.into_iter().map(|(rule, services)| problem(rule, &services)).collect()
}

/// Notes the rules that would lead to more endpoints of a port with `tls: own`.
fn note<'s>(
    snapshot: &'s Snapshot,
    service: &'s ServiceView,
    port: &'s PortView,
    peers: &[&'s PeerExport],
    shut: &mut BTreeMap<&'s str, Vec<&'s str>>,
) {
    let rules = || port.rules.iter().filter(|rule| rule.tls.is_none());
    if rules().next().is_none() && peers.is_empty() {
        return;
    }
    let mut add = |rule: &'s str| {
        let services = shut.entry(rule).or_default();
        if services.last() != Some(&&*service.name) {
            services.push(&service.name);
        }
    };
    let here = service.endpoints_of(port, "", snapshot.networks()).into_iter().flatten();
    let here =
        here.filter(|found| on_own_network(found, &snapshot.policy.node) && is_lost(snapshot, port, found));
    for found in here {
        let cluster = &found.origin.cluster;
        let is_open = port.rules.iter().any(|rule| rule.tls() == ExportTls::Own && rule.has_cluster(cluster));
        rules().filter(|rule| !is_open && rule.has_cluster(cluster)).for_each(|rule| add(&rule.name));
        let of_peers = peers.iter().filter(|rule| is_among(&service.offer_for(rule).clusters, cluster));
        of_peers.for_each(|rule| add(&rule.rule));
    }
}

/// Returns true if a rule without `tls` does not lead to the endpoint by a kind of name by which one with `tls: own` does.
fn is_lost(snapshot: &Snapshot, port: &PortView, found: &PortEndpoint<'_>) -> bool {
    let mut listeners = snapshot.policy.listeners.iter();
    let by_sni = listeners.any(|listener| listener.protocol.takes_sni()) && found.tls != TlsMode::None;
    by_sni && found.needs_own(AskedBy::MeshName)
        || by_sni && port.protocol.is_tls() && found.needs_own(AskedBy::Hostname)
        || snapshot.policy.takes_hbone() && found.needs_own(AskedBy::Authority)
}

fn problem(rule: &str, services: &[&str]) -> Problem {
    let shown = services[..services.len().min(NAMED_MAX)].join(", ");
    let more = match services.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    let text = format!(
        "{rule} has no `tls`, so some endpoints or the plain host names of {shown}{more} are shut: they are of Kubernetes or istiod, and \
         have no mTLS of the mesh; write `tls: own` in {rule} to open them, or `tls: mesh` to keep them shut and end this problem"
    );
    Problem::new(Code::ExportNarrowed, rule, text)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use isthmus_model::endpoint::{DeclaredTls, Endpoint, EndpointTemplate};
    use isthmus_model::service::PortProtocol;
    use isthmus_settings::export::ExportRule;
    use isthmus_snapshot::testing::{Mesh, endpoint, inferred, port, rule, scoped, service, shard};

    fn text(is_inferred: bool, tls: Option<ExportTls>, names: &[&str]) -> Vec<String> {
        let outside = EndpointTemplate { tls: Some(DeclaredTls::Application), ..EndpointTemplate::default() };
        let outside = Endpoint { template: outside.into(), ..endpoint("10.0.0.1", 1) };
        let ports = vec![port(443, PortProtocol::Tls)];
        let services = names.iter().map(|name| service(name, ports.clone(), vec![outside.clone()]));
        let listing = shard("a", "n1", services.collect());
        let mut mesh = Mesh::new(Vec::new(), Vec::new());
        mesh.shards = vec![if is_inferred { inferred(listing) } else { scoped(listing) }];
        let rule = ExportRule { tls, ..(*rule("*")).clone() };
        Arc::make_mut(&mut mesh.policy).exports = vec![rule.into()];
        narrowed(&mesh.snapshot()).into_iter().map(|problem| problem.text).collect()
    }

    #[test]
    fn a_rule_without_tls_that_leads_to_less_than_it_names_is_a_problem_with_the_line_to_write() {
        let [found] = &text(true, None, &["a.mesh", "b.mesh", "c.mesh", "d.mesh"])[..] else {
            panic!("one problem")
        };
        assert!(found.contains("of a.mesh, b.mesh, c.mesh (and 1 more) are shut"), "{found}");
        assert!(found.contains("write `tls: own` in exports[*] to open them"), "{found}");
    }

    #[test]
    fn a_rule_that_says_its_tls_or_leads_to_written_modes_is_none() {
        for tls in [ExportTls::Mesh, ExportTls::Own] {
            assert_eq!(text(true, Some(tls), &["a.mesh"]), Vec::<String>::new());
        }
        assert_eq!(text(false, None, &["a.mesh"]), Vec::<String>::new());
    }
}
