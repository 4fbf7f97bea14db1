//! A client of the WDS server. The input has the client's requests, each a length in two bytes and a message. A session answers the
//! requests from the table of a small snapshot, which changes once; the client accepts all responses.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use isthmus::ads::budget::Budget;
use isthmus::ads::kind::ResourceKind;
use isthmus::ads::protocol::{DiscoveryRequest, Parts};
use isthmus::ads::protocol::{NAME_BYTES_MAX, Protocol, Request};
use isthmus::ads::requests::decode;
use isthmus::ads::ztunnel::Kind;
use isthmus::model::place::ClusterId;
use isthmus::proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use isthmus::tasks::scope::Scope;
use isthmus::wds::hub::Hub;
use isthmus::wds::node::Claims;
use isthmus::wds::session::{ClientResources, Session};
use isthmus::wds::table::{Builder, Table};
use isthmus::world::{Publisher, Since};

use tokio::sync::watch;

use super::policy;
use super::xds::{EARLIER, LATER, world};

/// The largest number of responses that the target takes after one request.
const RESPONSES_MAX: usize = 64;
const BUDGET: usize = 1 << 20;

/// The small snapshot, with its table before and after the change.
struct World {
    hub: Arc<Hub>,
    tables: [Arc<Table>; 2],
}

impl World {
    fn new() -> Self {
        let snapshots =
            [(1, EARLIER), (2, LATER)].map(|(generation, text)| Arc::new(world(&policy(), generation, text)));
        let claims = Claims::of(&Default::default(), &ClusterId::new("east"), &snapshots[0]).expect("legal");
        let mut builder = Builder::new(claims.info.viewer, true);
        let tables = snapshots.each_ref().map(|snapshot| {
            let mut work = builder.begin(snapshot, Since::Everything);
            for hostname in work.services.clone() {
                builder.render(&hostname, &mut work);
            }
            Arc::new(builder.finish(work))
        });
        let (_, reader) = Publisher::new(world(&policy(), 1, EARLIER));
        Self { hub: Hub::new(reader, Scope::default(), Vec::new()), tables }
    }
}

pub(super) fn run(data: &[u8]) {
    thread_local!(static WORLD: OnceCell<World> = const { OnceCell::new() });
    let mut requests = Vec::new();
    let mut rest = data;
    while let [high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (message, behind) = more.split_at(length);
        requests.extend(decode::<DeltaDiscoveryRequest>(message).map(DiscoveryRequest::take_apart));
        rest = behind;
    }
    WORLD.with(|world| serve(world.get_or_init(World::new), requests));
}

fn serve(World { hub, tables: all }: &World, requests: Vec<Parts>) {
    let changes_at = requests.len() / 2;
    let budget = Budget::new(BUDGET);
    let (tables, _) = watch::channel(None);
    let mut session = None;
    for (at, Parts { node, type_url, request }) in requests.into_iter().enumerate() {
        let session = match &mut session {
            Some(session) => session,
            none => {
                let claims =
                    Claims::of(&node.unwrap_or_default(), &ClusterId::new("east"), &hub.reader().latest());
                let Ok(claims) = claims else { return };
                assert!(claims.info.id.len() <= 512 && claims.node.len() <= 253);
                let account = budget.account(IpAddr::V4(Ipv4Addr::LOCALHOST), BUDGET);
                let cluster = claims.info.viewer.cluster.clone();
                let resources = ClientResources::new(hub.clone(), cluster, claims.key(), tables.subscribe());
                none.insert(Session::new(resources, Protocol::Delta, account))
            }
        };
        let Some(kind) = Kind::of_type_url(&type_url) else { continue };
        if session.request(kind, request).is_err() {
            return;
        }
        assert!(budget.bytes() <= BUDGET);
        let table = &all[usize::from(at >= changes_at)];
        tables.send_replace(Some(table.clone()));
        drain(session, table);
    }
}

/// Takes the pending responses from the session, and accepts them.
fn drain(session: &mut Session, table: &Arc<Table>) {
    for _ in 0..RESPONSES_MAX {
        let Some(response) = session.response() else { return };
        let kind = Kind::of_type_url(&response.type_url).expect("a type that is served");
        let mut names = BTreeSet::new();
        for name in response.resources.iter().map(|resource| &resource.name).chain(&response.removed) {
            assert!(names.insert(name.clone()), "{name} is in one response twice");
            assert!(name.len() <= NAME_BYTES_MAX, "{name}");
        }
        for resource in response.resources.iter().filter(|_| kind == Kind::Address) {
            assert!(table.addresses.get(&*resource.name).is_some_and(|known| Arc::ptr_eq(known, resource)));
        }
        session.request(kind, Request { nonce: response.nonce, ..Request::default() }).expect("an ACK");
    }
    panic!("the responses have no end");
}
