//! An offer and its receiver, without a network between them.

use std::sync::Arc;

use super::*;
use crate::budget::Budget;
use crate::taken::Taken;
use isthmus_model::import::Import;
use isthmus_model::name::NamePattern;
use isthmus_model::place::Network;
use isthmus_model::service::PortProtocol;
use isthmus_registry::change::Dirty;
use isthmus_registry::listing::Listing as Services;
use isthmus_settings::network::Gateway;
use isthmus_settings::peer::{NameTemplate, PeerExport, PeerLimits};
use isthmus_snapshot::build;
use isthmus_snapshot::testing::{Mesh, endpoint, gateway, network, port, scoped, service, shard};
use isthmus_snapshot::unread::{Unread, UnreadRegistry};
use isthmus_world::Publisher;

/// Returns a mesh of services whose first endpoint has the given weight, in the order of the weights.
fn mesh(weights: &[u32], peers: &[Arc<Peer>]) -> Mesh {
    let services = weights.iter().enumerate().map(|(number, weight)| {
        let ports = vec![port(80, PortProtocol::Http), port(443, PortProtocol::Tls)];
        let endpoints = vec![endpoint("10.1.0.1", *weight), endpoint("10.1.0.2", 1)];
        service(&format!("s{number}.shop.mesh"), ports, endpoints)
    });
    let imported = isthmus_model::service::Service {
        import: Some(Arc::new(Import {
            peer: "other".into(),
            exported_name: isthmus_snapshot::testing::host_name("far.other.global"),
            exported_at: 0,
        })),
        ..service("far.shop.mesh", vec![port(80, PortProtocol::Http)], Vec::new())
    };
    let all = services.chain([imported]).collect();
    let networks = vec![network("n1", vec![gateway("192.0.2.1", 1)])];
    let mut mesh = Mesh::new(networks, vec![shard("a", "n1", all)]);
    let policy = Arc::make_mut(&mut mesh.policy);
    policy.peers = peers.to_vec();
    mesh
}

fn peer(name: &str) -> Arc<Peer> {
    Arc::new(Peer {
        name: name.into(),
        who: None,
        unused_link: None,
        from: Vec::new(),
        exports: vec![PeerExport {
            rule: "peers[0].export[0]".into(),
            services: vec![NamePattern::parse("*.shop.mesh").expect("legal")],
            except: Vec::new(),
            rename: Some(NameTemplate::parse("{service}.{namespace}.east.global").expect("legal")),
            tls: None,
        }],
        imports: Vec::new(),
        limits: PeerLimits::default(),
        carry: Vec::new(),
    })
}

/// Receives, as the peer, all that is offered; returns the messages' sizes in bytes and the number of their services.
fn take_all(offer: &mut Offer, taken: &mut Taken, sequence: &mut u64) -> (Vec<usize>, usize) {
    let (mut sizes, mut services) = (Vec::new(), 0);
    while offer.has_more() {
        *sequence += 1;
        match offer.next(*sequence, 7, || None) {
            None => break,
            Some(Next::Delta(mut delta)) => {
                assert_eq!(delta.sequence, *sequence);
                sizes.push(delta.encoded_len());
                services += delta.services.len();
                let mut refused = Vec::new();
                taken.note(&mut delta, 1_000_000, &mut refused);
                assert!(refused.is_empty(), "{refused:?}");
                if let Some(after) = &delta.after {
                    assert!(!taken.differs(after), "the contents are those that the sender says");
                }
            }
            Some(Next::End(end)) => {
                assert!(!taken.end(end.contents.as_ref()));
                assert_eq!(
                    end.partial,
                    offer.held.unread.has_own(),
                    "it says whether something may be missing"
                );
            }
        }
    }
    (sizes, services)
}

/// Returns the CPU time that the thread has used.
fn thread_time() -> std::time::Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.try_into().expect("it is positive")
}

fn everything() -> Vec<NamePattern> {
    vec![NamePattern::Any]
}

#[test]
fn f_10_one_endpoint_of_ten_thousand_services_is_a_small_message_to_each_peer() {
    // A measurement may set a larger number of peers in the environment.
    let count = std::env::var("ISTHMUS_TEST_PEERS").ok().and_then(|count| count.parse().ok()).unwrap_or(8);
    let peers: Vec<Arc<Peer>> = (0..count).map(|number| peer(&format!("p{number}"))).collect();
    let mut weights = vec![1; 10_000];
    let mut world = mesh(&weights, &peers);
    let (mut publisher, reader) = Publisher::new(world.snapshot());
    let times = Arc::new(ExportTimes::default());
    let mut links: Vec<(Offer, Taken, u64)> = peers
        .iter()
        .map(|peer| {
            (
                Offer::new(peer.clone(), reader.clone(), times.clone()),
                Taken::new(Budget::new(usize::MAX, &Arc::default())),
                0,
            )
        })
        .collect();
    for (offer, taken, sequence) in &mut links {
        offer.subscribe(everything());
        let (sizes, services) = take_all(offer, taken, sequence);
        assert_eq!(services, 10_000);
        assert!(sizes.len() > 2 && sizes.iter().all(|size| *size < 2 * MESSAGE_BYTES_MAX), "{sizes:?}");
    }
    weights[77] = 2;
    let next = mesh(&weights, &peers);
    world.shards = next.shards;
    let dirty = Dirty {
        services: [isthmus_snapshot::testing::host_name("s77.shop.mesh")].into(),
        ..Dirty::default()
    };
    let (snapshot, delta) = build::next(&publisher.current(), world.world(), &dirty);
    publisher.publish(snapshot, delta);
    let (started, mut bytes) = (thread_time(), 0);
    for (offer, taken, sequence) in &mut links {
        assert!(!offer.has_more());
        offer.follow();
        let (sizes, services) = take_all(offer, taken, sequence);
        assert_eq!((sizes.len(), services), (1, 1));
        assert!(sizes[0] <= 1_024, "{} bytes", sizes[0]);
        bytes = sizes[0];
    }
    let each = (thread_time() - started) / count;
    println!("{count} peers: {bytes} bytes and {each:?} of CPU for each, made and taken");
}

#[test]
fn f_9_what_a_peer_gives_is_not_offered_to_another() {
    let one = peer("one");
    let world = mesh(&[1], std::slice::from_ref(&one));
    let (_publisher, reader) = Publisher::new(world.snapshot());
    let mut offer = Offer::new(one, reader, Arc::default());
    offer.subscribe(everything());
    let (_, services) =
        take_all(&mut offer, &mut Taken::new(Budget::new(usize::MAX, &Arc::default())), &mut 0);
    assert_eq!(services, 1, "our own service alone; that of another peer is not ours to offer");
}

#[test]
fn a_peer_is_given_what_it_wants_and_what_is_gone_is_taken_back() {
    let one = peer("one");
    let mut world = mesh(&[1, 2, 3], std::slice::from_ref(&one));
    let (mut publisher, reader) = Publisher::new(world.snapshot());
    let mut offer = Offer::new(one, reader, Arc::default());
    assert!(!offer.has_more(), "nothing is told to a peer that wants nothing");
    offer.subscribe(vec![NamePattern::parse("s1.shop.east.global").expect("legal")]);
    let (mut taken, mut sequence) = (Taken::new(Budget::new(usize::MAX, &Arc::default())), 0);
    assert_eq!(take_all(&mut offer, &mut taken, &mut sequence).1, 1);
    // A larger subscription begins a new listing.
    offer.subscribe(everything());
    assert_eq!(take_all(&mut offer, &mut taken, &mut sequence).1, 3);
    world.shards = vec![scoped(shard("a", "n1", Vec::new()))];
    let names = (0..3).map(|number| isthmus_snapshot::testing::host_name(&format!("s{number}.shop.mesh")));
    let dirty =
        Dirty { services: names.collect(), networks: [Network::new("n1")].into(), ..Dirty::default() };
    let (snapshot, delta) = build::next(&publisher.current(), world.world(), &dirty);
    publisher.publish(snapshot, delta);
    offer.follow();
    take_all(&mut offer, &mut taken, &mut sequence);
    assert_eq!(offer.services_given(), 0);
}

#[test]
fn a_peer_without_from_gets_no_ports_for_callers_by_sni() {
    let ports = |from: &[&str], hbone_port: Option<u16>| {
        let from = from.iter().map(|block| block.parse().expect("a block")).collect();
        let peer = Peer { from, ..(*peer("one")).clone() };
        let mut world = mesh(&[1], &[]);
        let policy = Arc::make_mut(&mut world.policy);
        policy.networks = vec![network("n1", vec![Gateway { hbone_port, ..gateway("192.0.2.1", 1) }])];
        let all = record::gateways(&world.snapshot(), &peer);
        all.into_values().map(|gateway| (gateway.sni_port, gateway.hbone_port)).collect::<Vec<_>>()
    };
    assert_eq!(ports(&["203.0.113.0/24"], Some(15_008)), [(15_443, 15_008)]);
    assert_eq!(ports(&[], Some(15_008)), [(0, 15_008)]);
    assert_eq!(ports(&[], None), [], "no port is left");
}

/// Returns a list of one registry that was not read.
fn unread(is_peer: bool) -> Arc<Unread> {
    let lost = UnreadRegistry { name: "lost".into(), services: Vec::new(), is_peer };
    Arc::new(Unread::default().with_registries(vec![lost]))
}

#[test]
fn nothing_is_removed_while_a_registry_of_this_mesh_was_not_read() {
    let one = peer("one");
    let mut world = mesh(&[1, 2], std::slice::from_ref(&one));
    let (mut publisher, reader) = Publisher::new(world.snapshot().with_unread(unread(false)));
    let mut offer = Offer::new(one, reader, Arc::default());
    offer.subscribe(everything());
    let (mut taken, mut sequence) = (Taken::new(Budget::new(usize::MAX, &Arc::default())), 0);
    assert_eq!(take_all(&mut offer, &mut taken, &mut sequence).1, 2, "it gets what is known");
    let mut publish = |world: &mut Mesh, shards: Vec<Services>, unread: Arc<Unread>| {
        world.shards = shards.into_iter().map(scoped).collect();
        let names =
            (0..2).map(|number| isthmus_snapshot::testing::host_name(&format!("s{number}.shop.mesh")));
        let dirty = Dirty { services: names.collect(), ..Dirty::default() };
        let (snapshot, delta) = build::next(&publisher.current(), world.world(), &dirty);
        publisher.publish(snapshot.with_unread(unread), delta);
    };
    // One service loses its endpoints, and the other is gone.
    let empty = service("s0.shop.mesh", vec![port(80, PortProtocol::Http)], Vec::new());
    let left = || vec![shard("a", "n1", vec![empty.clone()])];
    publish(&mut world, left(), unread(false));
    offer.follow();
    assert_eq!(take_all(&mut offer, &mut taken, &mut sequence), (Vec::new(), 0));
    assert_eq!((offer.services_given(), taken.services()), (2, 2), "the unread registry may have both");
    // A registry of another peer has no services that are offered.
    publish(&mut world, left(), unread(true));
    offer.follow();
    assert_eq!(take_all(&mut offer, &mut taken, &mut sequence).1, 1, "all is listed again");
    assert_eq!((offer.services_given(), taken.services()), (1, 1));
}

#[test]
fn a_peer_that_wants_nothing_is_told_the_roots_and_their_changes_and_no_more() {
    let peer = peer("west");
    let mesh = mesh(&[1, 2], std::slice::from_ref(&peer));
    let (_publisher, reader) = Publisher::new(mesh.snapshot());
    let mut offer = Offer::new(peer, reader, Arc::default());
    offer.subscribe(Vec::new());
    let mut taken = Taken::new(Budget::new(usize::MAX, &Arc::default()));
    for sequence in 1..=2 {
        assert!(offer.has_more());
        offer.follow();
        let roots = || {
            Some(proto::Roots {
                trust_domain: "east.example".to_owned(),
                certificates: Vec::new(),
                valid_for: 0,
            })
        };
        let Some(Next::Delta(mut delta)) = offer.next(sequence, 0, roots) else { panic!("the roots") };
        assert!(delta.roots.is_some() && delta.services.is_empty() && delta.gateways.is_empty(), "{delta:?}");
        let mut refused = Vec::new();
        taken.note(&mut delta, 10, &mut refused);
        assert!(delta.after.is_some_and(|after| !taken.differs(&after)), "the contents are nothing");
        assert!(!offer.has_more());
        offer.roots_changed();
    }
}
