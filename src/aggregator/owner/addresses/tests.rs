//! Tests the virtual addresses of imported services through the owner, without sockets.

use std::net::IpAddr;
use std::path::Path;
use std::pin::Pin;

use ipnet::IpNet;
use tokio::time::Instant;

use super::super::{Message, Owner, Recalled, Sources};
use super::*;
use crate::copies::CopyEvent;
use crate::registry::{Changes, Registry};
use crate::spec::{RegistryKind, RegistrySpec};
use isthmus_document::services::read_registry;
use isthmus_model::import::Import;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::Service;
use isthmus_registry::change::{Change, Item, Key};
use isthmus_registry::listing::Listing;
use isthmus_settings::scope::RegistryScope;
use isthmus_snapshot::testing::policy_of;
use isthmus_snapshot::virtual_addresses::Ranges;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::control::Control;
use isthmus_telemetry::recorder::Recorder;
use isthmus_world::Reader;

/// A registry whose changes the test sends.
struct Silent(RegistrySpec);

impl Registry for Silent {
    fn spec(&self) -> &RegistrySpec {
        &self.0
    }

    fn run(self: Box<Self>, _: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(std::future::pending())
    }
}

fn service(name: &str, exported_at: u64) -> Arc<Service> {
    let text = format!(
        "services: [{{hostname: {name}, namespace: n, ports: [{{name: p, port: 80}}], addresses: [10.9.9.9]}}]"
    );
    let listing = read_registry("x".as_ref(), &text, &ClusterId::new("west"), &Network::new("west"));
    let listing = listing.expect("good");
    let service = listing.services.values().next().expect("one");
    let import = Import { peer: "west".into(), exported_name: service.key.hostname.clone(), exported_at };
    Arc::new(Service { import: Some(Arc::new(import)), ..(**service).clone() })
}

fn start(state: &Path, scope: &Scope) -> (Owner, Reader) {
    let spec = RegistrySpec {
        name: "west".into(),
        cluster: ClusterId::new("west"),
        network: Network::new("west"),
        scope: RegistryScope::default(),
        kind: RegistryKind::File { path: "west.yaml".into() },
    };
    // The range is small, so that the hashes of many names collide.
    let ranges = Ranges { ipv4: "240.250.0.0/26".parse().ok(), ipv6: None };
    let options =
        Options { state: Some(state.to_owned()), virtual_addresses: Some(ranges), ..Options::default() };
    let sources = Sources {
        policy: Arc::new(policy_of("c0", "east")),
        services: Listing::default(),
        registries: vec![spec],
        options,
    };
    let telemetry = Arc::new(Control::new(&Arc::new(Recorder::default())));
    let factory = Arc::new(|spec: &RegistrySpec| -> Box<dyn Registry> { Box::new(Silent(spec.clone())) });
    let (owner, _, _, reader) =
        Owner::new(sources, factory, &telemetry, scope, (CopyStore::default(), Recalled::default()));
    (owner, reader)
}

fn say(owner: &mut Owner, changes: Vec<Change>) {
    let (epoch, name) = (owner.registries[0].life.epoch, owner.registries[0].life.spec.name.clone());
    // The first listing waits for the copy on disk; there is none.
    let messages = [Message::Changes(epoch, changes), Message::Copy(CopyEvent::Read(name, Ok(None)))];
    owner.take(messages.into(), Instant::now());
}

fn put(service: &Arc<Service>) -> Change {
    Change::Put(Item::Service(service.clone()))
}

fn addresses(reader: &Reader, service: &Arc<Service>) -> Vec<IpAddr> {
    let snapshot = reader.latest();
    snapshot.service(service.key.hostname.as_str()).expect("there").addresses.clone()
}

#[tokio::test]
async fn an_imported_service_gets_a_virtual_address_that_a_restart_keeps() {
    let (temporary, scope) = (tempfile::tempdir().expect("a folder"), Scope::default());
    let services: Vec<_> = (0..40).map(|at| service(&format!("s{at}.west.global"), 100 - at)).collect();
    let (mut owner, reader) = start(temporary.path(), &scope);
    let listing: Vec<Change> =
        std::iter::once(Change::Begin).chain(services.iter().map(put)).chain([Change::Complete]).collect();
    say(&mut owner, listing);
    let range: IpNet = "240.250.0.0/26".parse().expect("a block");
    let of_all: Vec<_> = services.iter().map(|service| addresses(&reader, service)).collect();
    for of_one in &of_all {
        let [own] = of_one.as_slice() else { panic!("{of_one:?}") };
        assert!(range.contains(own), "{own}, and no address that the registry gives");
    }
    // The first service is removed, and a service that was exported before all others is added.
    say(&mut owner, vec![Change::Remove(Key::Service(services[0].key.clone()))]);
    let late = service("late.west.global", 1);
    say(&mut owner, vec![put(&late)]);
    let now: BTreeSet<Vec<IpAddr>> =
        services[1..].iter().chain([&late]).map(|service| addresses(&reader, service)).collect();
    assert_eq!(now.len(), 40, "no two services have one address");
    let status = owner.addresses.as_ref().expect("on").status();
    assert_eq!((status.counts.in_use, status.counts.reserved, status.problem), (40, 1, None));
    owner.copies.write_all();

    let (mut again, later) = start(temporary.path(), &scope);
    let mut services: Vec<_> = services[1..].iter().chain([&late]).cloned().collect();
    let before: Vec<_> = services.iter().map(|service| addresses(&reader, service)).collect();
    services.reverse();
    let listing = std::iter::once(Change::Begin).chain(services.iter().map(put)).chain([Change::Complete]);
    say(&mut again, listing.collect());
    services.reverse();
    let after: Vec<_> = services.iter().map(|service| addresses(&later, service)).collect();
    assert_eq!(before, after);
}

#[tokio::test]
async fn damaged_leases_are_reported_and_written_again() {
    let (temporary, scope) = (tempfile::tempdir().expect("a folder"), Scope::default());
    std::fs::write(leases::path(temporary.path()), "isthmus virtual addresses 1\nhalf").expect("written");
    let (mut owner, reader) = start(temporary.path(), &scope);
    let problem = owner.addresses.as_ref().expect("on").status().problem.expect("a problem");
    assert!(
        problem.contains("cannot read the virtual addresses") && problem.contains("damaged at line 2"),
        "{problem}"
    );
    let one = service("one.west.global", 7);
    say(&mut owner, vec![Change::Begin, put(&one), Change::Complete]);
    assert_eq!(addresses(&reader, &one).len(), 1);
    owner.copies.write_all();
    assert_eq!(leases::load(temporary.path()).expect("whole").len(), 1);
}
