//! Tests of the order in which the hub renders, and of the renderings that it keeps.

use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::FutureExt;
use prost::Message;
use tokio::time::sleep;

use super::*;
use crate::session::tests::{Stage, snapshot};
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::PortProtocol;
use isthmus_proto::envoy::config::cluster::v3::Cluster;
use isthmus_proto::envoy::service::discovery::v3 as discovery;
use isthmus_settings::network::NetworkPolicy;
use isthmus_snapshot::build;
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::testing::{Mesh, endpoint, gateway, network, port, service, shard};
use isthmus_world::Publisher;

const SERVICES: usize = 200;

/// Returns services with one endpoint each on this host; one service may have a second endpoint.
fn services<'a>(
    names: &'a [String],
    host: &'a [u8],
    other: Option<(usize, &'a [u8])>,
) -> Vec<(&'a str, &'a [u8])> {
    let of = |at| other.filter(|(other, _)| *other == at).map_or(host, |(_, host)| host);
    names.iter().enumerate().map(|(at, name)| (name.as_str(), of(at))).collect()
}

/// Returns the assignments that a mailbox has: those to be sent at once, and those of wide changes.
fn marked(mailbox: &Mailbox) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
    let News { marks: [_, assignments, ..], mut wide, .. } = mailbox.take();
    (assignments.names.into_iter().collect(), std::iter::from_fn(|| wide.pop()).collect())
}

/// Counts how often it wakes somebody.
#[derive(Default)]
struct Wakes(AtomicU64);

impl std::task::Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_service_that_changes_overtakes_all_that_may_have_changed() {
    let names: Vec<String> = (0..SERVICES).map(|number| format!("s{number}")).collect();
    let mut stage = Stage::new(&services(&names, &[1], None));
    let (hub, mailbox) = (stage.hub.clone(), Arc::<Mailbox>::default());
    let viewer = Arc::new(Viewer { network: Network::new("east"), ..Viewer::default() });
    let name = |number: usize| -> Arc<str> { format!("outbound|80||s{number}").into() };
    let subscribe = |number| hub.subscribe(&mailbox, Kind::Assignment, &name(number), &viewer);
    let subscriptions: Vec<Subscription<Rendering>> = (0..SERVICES).map(subscribe).collect();
    let first: Vec<_> = subscriptions.iter().map(Subscription::current).collect();
    let mut queue = Queue::new(stage.publisher.current());

    let everything = Delta { generation: 2, everything: true, ..Delta::default() };
    stage.publisher.publish(snapshot(&stage.policy, 2, &services(&names, &[2], None)), everything);
    assert!(hub.run_batch(&mut queue), "there is more than one batch");
    let (urgent, wide) = marked(&mailbox);
    assert!(urgent.is_empty() && !wide.is_empty() && wide.len() < SERVICES / 2, "{urgent:?} {wide:?}");

    for (generation, changed) in [(3, 150), (4, 151), (5, 152)] {
        let next = snapshot(&stage.policy, generation, &services(&names, &[2], Some((changed, &[3]))));
        let hostname = next.service(&names[changed]).expect("there").key.hostname.clone();
        let delta = Delta { generation, services: [hostname].into(), ..Delta::default() };
        stage.publisher.publish(next, delta);
        assert!(hub.run_batch(&mut queue), "the others wait");
        assert_eq!(
            marked(&mailbox),
            (vec![name(changed)], vec![]),
            "its sessions run before the next is rendered"
        );
    }

    // The hub reads the change of one service together with a change after which any service may differ.
    let next = |generation, changed, last| {
        snapshot(&stage.policy, generation, &services(&names, &[2], Some((changed, last))))
    };
    let everything = Delta { generation: 6, everything: true, ..Delta::default() };
    let (policy, alone) = (next(6, 153, &[3]), next(7, 154, &[3]));
    let hostname = alone.service(&names[154]).expect("there").key.hostname.clone();
    stage.publisher.publish(policy, everything);
    let delta = Delta { generation: 7, services: [hostname].into(), ..Delta::default() };
    stage.publisher.publish(alone, delta);
    assert!(hub.run_batch(&mut queue), "the others wait");
    assert_eq!(marked(&mailbox).0, [name(154)]);

    while hub.run_batch(&mut queue) {}
    let last: Vec<_> = subscriptions.iter().map(Subscription::current).collect();
    assert!(
        first.iter().zip(&last).all(|(first, last)| first != last),
        "each was rendered from a newer world"
    );
    drop(subscriptions);
    assert_eq!(hub.renderings(), 0);
}

#[test]
fn sessions_that_want_all_share_one_list_which_the_hub_makes() {
    let stage = Stage::new(&[("a", &[1]), ("b", &[1])]);
    let mailboxes = [(); 2].map(|()| Arc::<Mailbox>::default());
    let wishes = mailboxes.each_ref().map(|mailbox| stage.hub.subscribe_all(mailbox, Kind::Cluster));
    assert!(
        !stage.hub.is_listed(Kind::Cluster) && stage.hub.all_of(Kind::Cluster).is_empty(),
        "no session makes it"
    );
    stage.hub.settle();
    assert!(stage.hub.is_listed(Kind::Cluster));
    let list = stage.hub.all_of(Kind::Cluster);
    assert_eq!(list.len(), 2);
    for mailbox in &mailboxes {
        let [clusters, ..] = mailbox.take().marks;
        assert!(clusters.all);
    }
    stage.hub.settle();
    assert!(Arc::ptr_eq(&list, &stage.hub.all_of(Kind::Cluster)), "it is made once");
    drop(wishes);
    assert!(stage.hub.list(Kind::Cluster).is_unused());
}

#[test]
fn sessions_take_permits_for_a_wide_change() {
    let mut stage = Stage::new(&[("a", &[1])]);
    let (hub, name): (_, Arc<str>) = (stage.hub.clone(), "outbound|80||a".into());
    let viewer = Arc::new(Viewer { network: Network::new("east"), ..Viewer::default() });
    let mailboxes: Vec<Arc<Mailbox>> = (0..3 * SENDERS).map(|_| Arc::default()).collect();
    let subscribe = |mailbox| hub.subscribe(mailbox, Kind::Assignment, &name, &viewer);
    let subscriptions: Vec<Subscription<Rendering>> = mailboxes.iter().map(subscribe).collect();
    drop(subscriptions[0].current());
    let wakes = Arc::new(Wakes::default());
    let waker = wakes.clone().into();
    let context = &mut std::task::Context::from_waker(&waker);
    let mut waits: Vec<_> = mailboxes.iter().map(|mailbox| Box::pin(mailbox.changed())).collect();
    assert!(waits.iter_mut().all(|wait| wait.as_mut().poll(context).is_pending()));
    let mut queue = Queue::new(stage.publisher.current());
    let everything = Delta { generation: 2, everything: true, ..Delta::default() };
    stage.publisher.publish(snapshot(&stage.policy, 2, &[("a", &[2])]), everything);
    while hub.run_batch(&mut queue) {}
    assert_eq!(wakes.0.load(Ordering::Relaxed), SENDERS as u64);
    // Sessions that have sent their part let the next sessions begin. The changes are in all mailboxes already.
    for (at, mailbox) in mailboxes.iter().enumerate() {
        let News { mut wide, permit, .. } = mailbox.take();
        assert_eq!((wide.pop(), permit.is_some()), (Some(name.clone()), true), "{at}");
    }
    assert_eq!(wakes.0.load(Ordering::Relaxed), mailboxes.len() as u64);
}

#[test]
fn viewers_who_get_the_same_share_its_bytes() {
    let mut stage = Stage::new(&[("a", &[1])]);
    let (hub, mailbox) = (stage.hub.clone(), Arc::<Mailbox>::default());
    let subscriptions = ["one", "two"].map(|cluster| {
        let cluster = ClusterId::new(cluster);
        let viewer = Arc::new(Viewer { network: Network::new("east"), cluster, ..Viewer::default() });
        hub.subscribe(&mailbox, Kind::Assignment, &"outbound|80||a".into(), &viewer)
    });
    assert_eq!(hub.renderings(), 2, "another world may tell the clusters apart");
    let [one, two] = &subscriptions;
    assert!(Arc::ptr_eq(one.name(), two.name()));
    let shared = || {
        let [one, two] = [one, two].map(|one| one.current().expect("there"));
        assert!(Arc::ptr_eq(&one, &two));
        one
    };
    let first = shared();
    let next = snapshot(&stage.policy, 2, &[("a", &[2])]);
    let (seen, delta) =
        (stage.publisher.current(), Delta { generation: 2, everything: true, ..Delta::default() });
    stage.publisher.publish(next, delta);
    let mut queue = Queue::new(seen);
    while hub.run_batch(&mut queue) {}
    assert_ne!(first, shared());
}

#[test]
fn sessions_are_woken_when_the_unread_registries_change() {
    let mut stage = Stage::new(&[]);
    stage.restarts_without(&[], &[("a", &[1])]);
    let mailbox = Arc::<Mailbox>::default();
    let subscription = stage.hub.subscribe_unread(&mailbox);
    let mut seen = 0;
    assert!(subscription.newer(&mut seen).is_some_and(|unread| !unread.is_empty()));
    assert!(subscription.newer(&mut seen).is_none() && mailbox.changed().now_or_never().is_none());
    stage.becomes(&[("a", &[1])]);
    assert!(mailbox.changed().now_or_never().is_some());
    assert!(subscription.newer(&mut seen).is_some_and(|unread| unread.is_empty()));
    drop(subscription);
    assert!(stage.hub.unread.is_unused());
}

/// Returns a world in which `web.mesh` has a gateway at this distance, if it is known.
fn world_with_gateway(generation: u64, milliseconds: Option<u64>) -> Snapshot {
    let distance = milliseconds.map(|milliseconds| (Network::new("n1"), Duration::from_millis(milliseconds)));
    let far = NetworkPolicy {
        distance: distance.into_iter().collect(),
        ..network("n2", vec![gateway("192.0.2.1", 1)])
    };
    let web = service("web.mesh", vec![port(80, PortProtocol::Http)], vec![endpoint("10.2.0.1", 1)]);
    let mesh = Mesh::new(vec![far], vec![shard("b", "n2", vec![web])]);
    build::all(mesh.world(), generation)
}

/// Returns the connect timeout of the only cluster, in seconds.
fn connect_timeout(hub: &Hub) -> i64 {
    let clusters = hub.all_of(Kind::Cluster);
    let (_, clusters) = clusters.iter().next().expect("a service");
    let resource = discovery::Resource::decode(clusters[0].message().clone()).expect("a resource");
    let cluster = Cluster::decode(&*resource.resource.expect("an Any").value).expect("a cluster");
    cluster.connect_timeout.expect("there").seconds
}

#[tokio::test(start_paused = true)]
async fn a_connect_timeout_that_was_assumed_is_replaced_once_the_distance_is_known() {
    let (mut publisher, reader) = Publisher::new(world_with_gateway(1, None));
    let (hub, mailbox) = (Hub::new(reader), Arc::<Mailbox>::default());
    let _subscription = hub.subscribe_all(&mailbox, Kind::Cluster);
    let scene = async {
        sleep(Duration::from_secs(5)).await;
        assert_eq!(connect_timeout(&hub), 3);
        // A distance changes no service.
        publisher.publish(world_with_gateway(2, Some(5)), Delta { generation: 2, ..Delta::default() });
        drop(mailbox.take());
        sleep(Duration::from_secs(20)).await;
        assert_eq!(connect_timeout(&hub), 1);
        assert!(mailbox.changed().now_or_never().is_some(), "the sessions are told");
    };
    tokio::select! {
        () = hub.clone().run() => panic!("the hub has ended"),
        () = scene => {}
    }
}

#[tokio::test(start_paused = true)]
async fn the_connect_timeout_of_a_cluster_changes_ten_minutes_after_a_distance() {
    const MINUTE: Duration = Duration::from_secs(60);
    let (mut publisher, reader) = Publisher::new(world_with_gateway(1, Some(200)));
    let (hub, mailbox) = (Hub::new(reader), Arc::<Mailbox>::default());
    let _subscription = hub.subscribe_all(&mailbox, Kind::Cluster);
    let seconds = || connect_timeout(&hub);
    let scene = async {
        sleep(MINUTE).await;
        assert_eq!(seconds(), 3);
        let services = [HostName::parse("web.mesh").expect("legal")].into();
        publisher
            .publish(world_with_gateway(2, Some(5)), Delta { generation: 2, services, ..Delta::default() });
        sleep(9 * MINUTE).await;
        assert_eq!(seconds(), 3);
        drop(mailbox.take());
        sleep(3 * MINUTE).await;
        assert_eq!(seconds(), 1);
        assert!(mailbox.changed().now_or_never().is_some(), "the sessions are told");
    };
    tokio::select! {
        () = hub.clone().run() => panic!("the hub has ended"),
        () = scene => {}
    }
}
