//! Names that are similar to an unknown name. They are only hints of `explain`; no decision uses them.

use strsim::osa_distance;

use isthmus_model::mesh_name::{Dialect, MeshName, read};
use isthmus_settings::route::RouteName;
use isthmus_snapshot::Snapshot;

const NEAR_MAX: usize = 3;

/// Returns up to three names that a caller may have meant, most similar first.
pub fn near(snapshot: &Snapshot, name: &str) -> Vec<String> {
    let known = known_names(snapshot, name);
    let limit = (name.len() / 4).clamp(2, 6);
    let mut near: Vec<(usize, String)> = known
        .into_iter()
        .filter(|other| other != name)
        .filter_map(|other| distance(name, &other, limit).map(|distance| (distance, other)))
        .collect();
    near.sort();
    near.dedup();
    near.truncate(NEAR_MAX);
    near.into_iter().map(|(_, name)| name).collect()
}

/// Returns all names that a caller could ask for, in the same dialect as `name`.
fn known_names(snapshot: &Snapshot, name: &str) -> Vec<String> {
    let services = snapshot.services().into_iter();
    match read(name) {
        Dialect::Plain => {
            let routes = snapshot.policy.routes.iter();
            let routes = routes.filter(|route| matches!(route.key, RouteName::Name(_)));
            let routes = routes.map(|route| route.key.to_string());
            routes.chain(services.map(|service| service.name.to_string())).collect()
        }
        Dialect::Mesh(_) | Dialect::Malformed => services
            .flat_map(|service| service.ports.iter().map(move |port| (service, port)))
            .flat_map(|(service, port)| port.subsets().map(move |subset| (service, port, subset)))
            .map(|(service, port, subset)| {
                MeshName { port: port.port, subset, hostname: &service.name }.text()
            })
            .collect(),
    }
}

/// Returns the edit distance of two names if it is at most `limit`. If the lengths differ by more than `limit`, the names are
/// not compared.
fn distance(a: &str, b: &str, limit: usize) -> Option<usize> {
    (a.len().abs_diff(b.len()) <= limit).then(|| osa_distance(a, b)).filter(|distance| *distance <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_cut_off() {
        assert_eq!(distance("checkout.shops", "checkout.shop", 3), Some(1));
        assert_eq!(distance("chekcout.shop", "checkout.shop", 3), Some(1));
        assert_eq!(distance("abcdef", "uvwxyz", 3), None);
    }
}
