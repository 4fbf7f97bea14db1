//! The EndpointSlices of ServiceImports (KEP-1645): the endpoints of each exporting cluster that a cluster reaches by their addresses,
//! because they are on its own network. Endpoints on other networks are left out: the way to them is a gateway, and a slice cannot
//! say by which name a client asks the gateway for them. The slices of derived Services (`import_services`) are cut alike.

use std::collections::BTreeMap;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::kinds::imported_slice::{ImportedEndpoint, SliceContent, SliceOf};
use super::table::ObjectKey;
use isthmus_model::place::{ClusterId, Network};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;

/// The largest number of endpoints of a slice, as that of Kubernetes' own slices.
const PER_SLICE: usize = 100;
/// The largest number of endpoints of a service that one cluster has, per address family; further ones are left out.
pub(super) const ENDPOINTS_MAX: usize = 1_000;
/// The largest length of the value of a label.
const LABEL_BYTES_MAX: usize = 63;

/// The endpoints that a slice can have together: those of a cluster, of an address family, with the same ports.
type Groups<'a> = BTreeMap<(&'a ClusterId, bool), BTreeMap<Vec<(&'a str, u16)>, Vec<ImportedEndpoint>>>;

/// Returns the slices of an import: the endpoints of each cluster on the network.
pub(super) fn of_clusters(
    snapshot: &Snapshot,
    network: &Network,
    import: &ObjectKey,
    service: &ClusterSetService<'_>,
) -> Vec<(ObjectKey, Arc<SliceContent>)> {
    let mut groups = Groups::new();
    let endpoints = service.endpoints_on(snapshot, network);
    for ((cluster, address), endpoint) in endpoints.into_iter().filter(|((cluster, _), _)| is_label(cluster))
    {
        let zone = endpoint.zone.to_owned();
        let of_family = groups.entry((cluster, address.is_ipv6())).or_default();
        let room = ENDPOINTS_MAX.saturating_sub(of_family.values().map(Vec::len).sum());
        if room > 0 {
            let found = ImportedEndpoint { address, health: endpoint.health, zone };
            of_family.entry(endpoint.ports).or_default().push(found);
        }
    }
    let mut slices = Vec::new();
    for ((cluster, is_ipv6), by_ports) in groups {
        for (ports, endpoints) in by_ports {
            let content = SliceContent {
                import: import.name.to_string(),
                of: SliceOf::Cluster(cluster.as_str().to_owned()),
                is_ipv6,
                ports: ports.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect(),
                endpoints,
            };
            slices.extend(cut(&import.namespace, content));
        }
    }
    slices
}

/// Cuts a slice into those of at most [`PER_SLICE`] endpoints.
pub(super) fn cut(namespace: &Arc<str>, mut content: SliceContent) -> Vec<(ObjectKey, Arc<SliceContent>)> {
    let endpoints = std::mem::take(&mut content.endpoints);
    let some = endpoints.chunks(PER_SLICE).enumerate().map(|(number, some)| {
        let name = name(&content, number).into();
        let content = SliceContent { endpoints: some.to_vec(), ..content.clone() };
        (ObjectKey { namespace: namespace.clone(), name }, Arc::new(content))
    });
    some.collect()
}

/// Returns the name of a slice. The fields that cannot change, and the ports, are part of the name, so that a change of the
/// endpoints of one cluster changes no other slice, and all replicas use the same names.
fn name(content: &SliceContent, number: usize) -> String {
    let SliceContent { import, of, is_ipv6, ports, .. } = content;
    let text = match of {
        SliceOf::Cluster(cluster) => format!("{cluster}/{is_ipv6}/{ports:?}/{number}"),
        SliceOf::Derived(service) => format!("/{service}/{is_ipv6}/{ports:?}/{number}"),
    };
    format!("{import}-{:016x}", XxHash3_64::oneshot(text.as_bytes()))
}

/// Returns true if a label can have the name of a cluster as its value. That of a peer has a slash.
fn is_label(cluster: &ClusterId) -> bool {
    let name = cluster.as_str();
    let is_edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    name.len() <= LABEL_BYTES_MAX
        && is_edge(bytes.first())
        && is_edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_slice_depends_on_what_cannot_change_in_it() {
        let content = |cluster: &str, is_ipv6, port, endpoints| SliceContent {
            import: "web".to_owned(),
            of: SliceOf::Cluster(cluster.to_owned()),
            is_ipv6,
            ports: vec![("https".to_owned(), port)],
            endpoints,
        };
        let first = name(&content("east", false, 443, Vec::new()), 0);
        assert!(first.starts_with("web-") && first.len() == 20, "{first}");
        for (other, number) in [
            (content("west", false, 443, Vec::new()), 0),
            (content("east", true, 443, Vec::new()), 0),
            (content("east", false, 444, Vec::new()), 0),
            (content("east", false, 443, Vec::new()), 1),
        ] {
            assert_ne!(name(&other, number), first, "{other:?} {number}");
        }
    }

    #[test]
    fn only_the_name_of_a_cluster_that_is_a_label_is_used() {
        for (name, is) in
            [("east", true), ("East_1.a", true), ("peer/west", false), ("-a", false), ("", false)]
        {
            assert_eq!(is_label(&ClusterId::new(name)), is, "{name}");
        }
        assert!(!is_label(&ClusterId::new(&"x".repeat(64))));
    }
}
