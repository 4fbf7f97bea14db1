//! The gateways of other networks to which one worker has passed calls on lately, by service, port and kind of name. They are computed
//! once per snapshot and service: a view of a large service takes as long as a handshake.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use hashbrown::HashMap;

use isthmus_decisions::view::onward::{FarGateways, onward};
use isthmus_settings::export_tls::AskedBy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::Candidates;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The number of services whose gateways are kept. Beyond this number, those of earlier snapshots are dropped, or else all.
const KEPT_MAX: usize = 4_096;

/// The service, its port, and the subset. The fourth part tells the kinds of names apart.
type Key = (Arc<str>, u16, Box<str>, u8);

/// The kept gateways.
#[derive(Default)]
pub(crate) struct KeptGateways(RefCell<HashMap<Key, Kept>>);

struct Kept {
    /// The snapshot for which the gateways were computed.
    generation: u64,
    candidates: Option<Arc<Candidates>>,
}

impl fmt::Debug for KeptGateways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptGateways({})", self.0.borrow().len())
    }
}

impl FarGateways for KeptGateways {
    fn of(
        &self,
        snapshot: &Snapshot,
        service: &Arc<ServiceView>,
        port: &PortView,
        subset: &str,
        asked: AskedBy,
    ) -> Option<Arc<Candidates>> {
        let kind = match asked {
            AskedBy::MeshName => 0,
            AskedBy::Hostname => 1,
            AskedBy::Authority => 2,
            AskedBy::Tcp => return None,
        };
        let key = (service.name.clone(), port.port, Box::from(subset), kind);
        let mut all = self.0.borrow_mut();
        let known = all.get(&key);
        if let Some(kept) = known.filter(|kept| kept.generation == snapshot.generation) {
            return kept.candidates.clone();
        }
        let computed = onward(snapshot, service, port, subset, asked);
        // The run-time state of a worker belongs to one list of candidates, so an equal list stays the same one.
        let before = known.and_then(|kept| kept.candidates.as_ref());
        let candidates = computed.map(|computed| match before {
            Some(before) if is_same(before, &computed) => before.clone(),
            _ => Arc::new(computed),
        });
        if all.len() >= KEPT_MAX {
            all.retain(|_, kept| kept.generation == snapshot.generation);
            if all.len() >= KEPT_MAX {
                all.clear();
            }
        }
        all.insert(key, Kept { generation: snapshot.generation, candidates: candidates.clone() });
        candidates
    }
}

fn is_same(one: &Candidates, other: &Candidates) -> bool {
    one.tuning == other.tuning && one.endpoints() == other.endpoints()
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::place::Network;
    use isthmus_model::service::PortProtocol;
    use isthmus_settings::network::{Egress, NetworkPolicy};
    use isthmus_snapshot::testing::{Mesh, endpoint, gateway, network, port, rule, service, shard};

    #[test]
    fn gateways_are_computed_once_per_snapshot_and_an_equal_list_stays_the_same() {
        let own = NetworkPolicy { egress: Egress::Gateway, ..network("n1", vec![gateway("192.0.2.1", 1)]) };
        let with = |generation: u64, far: &str| {
            let web = service("web.mesh", vec![port(443, PortProtocol::Tls)], vec![endpoint("10.2.0.1", 1)]);
            let networks = vec![own.clone(), network("n2", vec![gateway(far, 1)])];
            let mut mesh = Mesh::new(networks, vec![shard("b", "n2", vec![web])]);
            Arc::make_mut(&mut mesh.policy).exports = vec![rule("web.mesh")];
            let mut snapshot = mesh.snapshot();
            snapshot.generation = generation;
            snapshot
        };
        let kept = KeptGateways::default();
        let ask = |snapshot: &Snapshot| {
            let web = snapshot.service("web.mesh").expect("known");
            assert_eq!(snapshot.policy.node.network, Network::new("n1"));
            kept.of(snapshot, web, &web.ports[0], "", AskedBy::MeshName).expect("a gateway")
        };
        let first = with(1, "192.0.2.2");
        let before = ask(&first);
        assert_eq!(before.endpoints()[0].key.address.to_string(), "192.0.2.2:15443");
        assert!(Arc::ptr_eq(&before, &ask(&first)));
        let same = with(2, "192.0.2.2");
        assert!(Arc::ptr_eq(&before, &ask(&same)));
        let moved = with(3, "192.0.2.3");
        assert_eq!(ask(&moved).endpoints()[0].key.address.to_string(), "192.0.2.3:15443");
    }
}
