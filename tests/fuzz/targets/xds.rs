//! A client of the xDS server. The first byte of the input chooses the variant of the protocol; then come the client's
//! requests, each a length in two bytes and a message. A session of the server answers the requests from a small snapshot,
//! which changes once.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use isthmus::ads::budget::Budget;
use isthmus::ads::kind::ResourceKind;
use isthmus::ads::node::NodeInfo;
use isthmus::ads::protocol::{DiscoveryRequest, Parts};
use isthmus::ads::protocol::{NAME_BYTES_MAX, Protocol};
use isthmus::ads::requests::decode;
use isthmus::document::services::read_registry;
use isthmus::model::place::{ClusterId, Network};
use isthmus::proto::envoy::service::discovery::v3 as discovery;
use isthmus::registry::shard::Shard;
use isthmus::settings::policy::Policy;
use isthmus::settings::scope::RegistryScope;
use isthmus::snapshot::Snapshot;
use isthmus::snapshot::build;
use isthmus::snapshot::delta::Delta;
use isthmus::snapshot::inputs::Inputs;
use isthmus::snapshot::routes::Resolved;
use isthmus::world::Publisher;
use isthmus::xds::hub::Hub;
use isthmus::xds::kind::Kind;
use isthmus::xds::session::{ClientResources, Session};

use super::policy;

/// The largest number of responses that the target takes after one request.
const RESPONSES_MAX: usize = 64;
const BUDGET: usize = 1 << 20;

pub(super) const EARLIER: &str = "services: [
  {hostname: a.example, namespace: n, ports: [{name: p, port: 80}], endpoints: [{address: 10.0.0.1}]},
  {hostname: b.example, namespace: n, ports: [{name: p, port: 80}], subsets: {v1: {version: v1}}, endpoints: [
    {address: 10.0.0.2, labels: {version: v1}, identity: \"spiffe://cluster.local/ns/n/sa/b\"}]}]";
pub(super) const LATER: &str = "services: [
  {hostname: b.example, namespace: n, ports: [{name: p, port: 80}], endpoints: [{address: 10.0.0.3}]},
  {hostname: c.example, namespace: n, ports: [{name: p, port: 80}], endpoints: [{address: 10.0.0.4}]}]";

fn decoded<R: DiscoveryRequest>(message: &[u8]) -> Option<Parts> {
    Some(decode::<R>(message).ok()?.take_apart())
}

pub(super) fn run(data: &[u8]) {
    thread_local!(static RUNTIME: OnceCell<tokio::runtime::Runtime> = const { OnceCell::new() });
    let Some((first, mut rest)) = data.split_first() else { return };
    let protocol = if first % 2 == 0 { Protocol::Delta } else { Protocol::StateOfTheWorld };
    let mut requests = Vec::new();
    while let [high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (message, behind) = more.split_at(length);
        requests.extend(match protocol {
            Protocol::Delta => decoded::<discovery::DeltaDiscoveryRequest>(message),
            Protocol::StateOfTheWorld => decoded::<discovery::DiscoveryRequest>(message),
        });
        rest = behind;
    }
    RUNTIME.with(|runtime| {
        let runtime =
            runtime.get_or_init(|| tokio::runtime::Builder::new_current_thread().build().expect("a runtime"));
        runtime.block_on(serve(protocol, requests));
    });
}

async fn serve(protocol: Protocol, requests: Vec<Parts>) {
    let policy = policy();
    let (mut publisher, reader) = Publisher::new(world(&policy, 1, EARLIER));
    let hub = Hub::new(reader);
    let changes_at = requests.len() / 2;
    let budget = Budget::new(BUDGET);
    let mut session = None;
    for (at, Parts { node, type_url, request }) in requests.into_iter().enumerate() {
        if at == changes_at {
            let seen = publisher.current();
            let delta = Delta { generation: 2, everything: true, ..Delta::default() };
            publisher.publish(world(&policy, 2, LATER), delta);
            hub.step(&seen, &publisher.current()).await;
        }
        let session = match &mut session {
            Some(session) => session,
            none => {
                let Ok(node) = NodeInfo::of(&node.unwrap_or_default()) else { return };
                assert!(node.id.len() <= 512 && node.user_agent.len() <= 512 && node.viewer.sees.len() <= 64);
                let account = budget.account(IpAddr::V4(Ipv4Addr::LOCALHOST), BUDGET);
                let resources = ClientResources::new(hub.clone(), node.viewer, protocol);
                none.insert(Session::new(resources, protocol, account))
            }
        };
        let Some(kind) = Kind::of_type_url(&type_url) else { continue };
        if session.request(kind, request).is_err() {
            return;
        }
        assert!(session.names_cost() <= BUDGET && budget.bytes() <= BUDGET);
        drain(session);
    }
}

/// Takes the pending responses from the session; the client acknowledges none of them.
fn drain(session: &mut Session) {
    for _ in 0..RESPONSES_MAX {
        let Some(response) = session.response() else {
            if session.is_unfinished() {
                continue;
            }
            return;
        };
        let mut names = BTreeSet::new();
        let gone = response.removed.iter().chain(&response.missing);
        for name in response.resources.iter().map(|resource| &resource.name).chain(gone) {
            assert!(names.insert(name.clone()), "{name} is in one response twice");
            assert!(name.len() <= NAME_BYTES_MAX, "{name}");
        }
        assert!(!response.nonce.is_empty() && Kind::of_type_url(&response.type_url).is_some());
    }
    panic!("the responses have no end");
}

pub(super) fn world(policy: &Arc<Policy>, generation: u64, services: &str) -> Snapshot {
    let listing = read_registry("x.yaml".as_ref(), services, &ClusterId::new("east"), &Network::new("east"));
    let scope = RegistryScope { networks: None, ..RegistryScope::default() };
    let shards = [Arc::new(Shard::of(listing.expect("good"), &scope))];
    let resolved = Resolved::default();
    let trust_roots = Default::default();
    let inputs = Inputs {
        trust_roots: &trust_roots,
        policy_generation: 1,
        policy,
        shards: &shards,
        resolved: &resolved,
        virtual_addresses: None,
        probes: None,
        drains: &Arc::default(),
        recent: None,
        remembered: None,
    };
    build::all(inputs, generation)
}
