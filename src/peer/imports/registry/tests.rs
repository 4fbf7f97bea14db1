//! Tests the registry of a peer, event by event.

use super::super::reading::tests::{peer, record};
use prost::Message as _;

use super::*;
use isthmus_model::place::ClusterId;
use isthmus_registry::change::Dirty;
use isthmus_settings::peer::Peer;
use isthmus_settings::scope::RegistryScope;
use std::time::Duration;

fn follower(limit: Option<usize>) -> Follower {
    let spec = PeerSpec {
        peer: Arc::new(peer(limit)),
        stale_after: Duration::from_secs(30),
        expire_after: Duration::from_secs(900),
    };
    Follower::new(spec, AddressScope::Public)
}

fn gateway(key: &str) -> proto::Gateway {
    proto::Gateway {
        key: key.into(),
        network: "net-west".into(),
        host: "192.0.2.1".into(),
        sni_port: 15_443,
        weight: 1,
        ..proto::Gateway::default()
    }
}

/// Returns a shard of the peer's registry that contains only these gateways.
fn in_use(gateways: &[&str]) -> Shard {
    let network = peer(None).network("net-west");
    let mut shard = Shard::new(ClusterId::default(), network, &RegistryScope::default());
    for key in gateways {
        let gateway = reading::gateway(&peer(None), &AddressScope::Public, &gateway(key)).expect("taken");
        shard.put(Item::Gateway(gateway), &mut Dirty::default());
    }
    assert_eq!(shard.counts().gateways, gateways.len(), "the scope allows them");
    shard
}

/// Returns the link with a replica, whose name ends with the number of the link if the replica opens several. Links with odd
/// numbers were dialled by the replica.
fn link(replica: &str) -> LinkKey {
    let (instance, number) = replica.split_once(' ').unwrap_or((replica, "1"));
    let number = number.parse().expect("a number");
    LinkKey { instance: instance.into(), is_dialled: number % 2 == 0, number }
}

/// Delivers a message of a replica; returns the changes and the refusals.
fn give(follower: &mut Follower, replica: &str, delta: proto::Delta) -> (Vec<String>, Vec<String>) {
    let (changes, ack) = follower.take(&link(replica), delta, &in_use(&[]));
    (texts(&changes), answers(ack))
}

/// Returns the refusals of an answer, and `+` with the name of each service that is no longer refused.
fn answers(ack: proto::Ack) -> Vec<String> {
    let refused = ack.refused.into_iter().map(|one| format!("{}: {}", one.item, one.problem));
    refused.chain(ack.taken.into_iter().map(|name| format!("+{name}"))).collect()
}

fn texts(changes: &[Change]) -> Vec<String> {
    let text = |change: &Change| match change {
        Change::Begin => "begin".to_owned(),
        Change::Complete => "complete".to_owned(),
        Change::Put(Item::Service(service)) => {
            let weight: u32 = service.endpoints.iter().map(|endpoint| endpoint.weight.value()).sum();
            format!("{} {weight} since {}", service.key.hostname, exported_at(service))
        }
        Change::Put(Item::Gateway(gateway)) => format!("gateway {}", gateway.key.name),
        Change::Keep(Key::Service(key)) => format!("keep {}", key.hostname),
        Change::Keep(Key::Gateway(key)) => format!("keep gateway {}", key.name),
        Change::Remove(Key::Service(key)) => format!("without {}", key.hostname),
        Change::Remove(Key::Gateway(key)) => format!("without gateway {}", key.name),
        Change::Failed(_) => "failed".to_owned(),
        Change::Readable => "readable".to_owned(),
        Change::StillWorks => "still works".to_owned(),
        Change::Forget => "forget".to_owned(),
        other => panic!("{other:?}"),
    };
    changes.iter().map(text).collect()
}

fn up(follower: &mut Follower, replica: &str) {
    assert!(follower.handle(Event::Up { link: link(replica) }, &in_use(&[])).is_empty());
}

fn listed(follower: &mut Follower, replica: &str) -> Vec<String> {
    let (changes, ack) = follower.listed_by(&link(replica), Extent::Complete, &in_use(&[]));
    assert_eq!(answers(ack), Vec::<String>::new());
    texts(&changes)
}

fn down(follower: &mut Follower, replica: &str, forget: bool) -> Vec<String> {
    let event = Event::Down { link: link(replica), why: "it broke".to_owned(), forget };
    texts(&follower.handle(event, &in_use(&[])))
}

fn services(begins: bool, all: &[(&str, u32)]) -> proto::Delta {
    let service =
        |(name, weight): &(&str, u32)| record(&format!("{name}.pay.west.global"), *weight).encode_to_vec();
    let services = all.iter().map(service).collect();
    proto::Delta { begins, services, ..proto::Delta::default() }
}

/// Returns a service of the peer as the registry reads it.
fn read(name: &str, weight: u32) -> Item {
    let record = record(&format!("{name}.pay.west.global"), weight).encode_to_vec();
    let read = reading::service(&peer(None), &record, 7, &mut Interner::default());
    Item::Service(read.expect("taken").service)
}

const NOTHING: (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());

#[test]
fn a_listing_takes_effect_at_its_end_and_changes_at_once() {
    let mut follower = follower(None);
    up(&mut follower, "a");
    assert_eq!(give(&mut follower, "a", services(true, &[("one", 1), ("two", 2)])), NOTHING);
    let all = proto::Delta { gateways: vec![gateway("g")], ..proto::Delta::default() };
    assert_eq!(give(&mut follower, "a", all), NOTHING);
    let first = listed(&mut follower, "a");
    assert_eq!(first, ["begin", "one.pay.here 1 since 7", "two.pay.here 2 since 7", "gateway g", "complete"]);
    assert_eq!(give(&mut follower, "a", services(false, &[("two", 3)])).0, ["two.pay.here 3 since 7"]);
    assert_eq!(give(&mut follower, "a", services(false, &[("two", 3)])), NOTHING, "it is as it was");
    let gone =
        proto::Delta { removed_services: vec!["one.pay.west.global".into()], ..proto::Delta::default() };
    assert_eq!(give(&mut follower, "a", gone).0, ["without one.pay.here"]);
    // The same link lists a second time.
    assert_eq!(give(&mut follower, "a", services(true, &[("three", 3)])), NOTHING);
    assert_eq!(
        listed(&mut follower, "a"),
        ["without two.pay.here", "three.pay.here 3 since 7", "without gateway g"]
    );
}

#[test]
fn a_newer_link_of_a_process_outlives_the_end_of_its_older_one() {
    let mut follower = follower(None);
    up(&mut follower, "a 1");
    give(&mut follower, "a 1", services(true, &[("one", 1)]));
    listed(&mut follower, "a 1");
    up(&mut follower, "a 3");
    assert!(down(&mut follower, "a 1", false).is_empty(), "the process has a newer link");
    assert_eq!(give(&mut follower, "a 1", services(false, &[("late", 1)])), NOTHING);
    give(&mut follower, "a 3", services(true, &[("one", 2)]));
    assert_eq!(listed(&mut follower, "a 3"), ["one.pay.here 2 since 7"]);
}

#[test]
fn links_of_both_directions_with_one_process_live_side_by_side() {
    let mut follower = follower(None);
    for link in ["a 1", "a 2"] {
        up(&mut follower, link);
        give(&mut follower, link, services(true, &[("one", 1)]));
        listed(&mut follower, link);
    }
    assert_eq!(give(&mut follower, "a 2", services(false, &[("one", 2)])).0, ["one.pay.here 2 since 7"]);
    assert_eq!(give(&mut follower, "a 1", services(false, &[("one", 2)])), NOTHING);
    assert!(down(&mut follower, "a 2", false).is_empty(), "the other link has everything");
    assert_eq!(give(&mut follower, "a 1", services(false, &[("one", 3)])).0, ["one.pay.here 3 since 7"]);
    assert_eq!(down(&mut follower, "a 1", false), ["failed"]);
}

#[test]
fn a_peer_without_imports_is_complete_with_or_without_a_link() {
    let mut follower = follower(None);
    assert_eq!(texts(&follower.first()), ["failed"]);
    let peer = Peer { imports: Vec::new(), ..(*follower.peer.peer).clone() };
    follower.peer.peer = Arc::new(peer);
    assert_eq!(texts(&follower.first()), ["forget", "begin", "complete"]);
    up(&mut follower, "a");
    assert!(down(&mut follower, "a", false).is_empty());
    up(&mut follower, "b");
    assert!(down(&mut follower, "b", true).is_empty());
}

#[test]
fn a_bad_item_stalls_no_other_and_takes_its_good_state_back() {
    let mut follower = follower(None);
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &[("one", 1), ("two", 2)]));
    listed(&mut follower, "a");
    let mut delta = services(false, &[("one", 0), ("two", 5)]);
    delta.services.push(record("other.shop.west.global", 1).encode_to_vec());
    let (changes, refused) = give(&mut follower, "a", delta);
    assert_eq!(changes, ["without one.pay.here", "two.pay.here 5 since 7"]);
    assert_eq!(refused.len(), 2, "{refused:?}");
}

#[test]
fn a_rule_takes_as_many_as_its_limit_and_a_name_belongs_to_one() {
    let mut follower = follower(Some(2));
    up(&mut follower, "a");
    let (_, refused) = give(&mut follower, "a", services(true, &[("a", 1), ("b", 1), ("c", 1)]));
    assert_eq!(refused, ["c.pay.west.global: peers[0].import[0] has reached its limit of 2 services"]);
    // A place that becomes free goes to a service that was refused.
    let gone = |name: &str| proto::Delta {
        removed_services: vec![format!("{name}.pay.west.global")],
        ..proto::Delta::default()
    };
    listed(&mut follower, "a");
    let (changes, answer) = give(&mut follower, "a", gone("b"));
    assert_eq!(changes, ["without b.pay.here", "c.pay.here 1 since 7"]);
    assert_eq!(answer, ["+c.pay.west.global"]);
    // A service that is in use keeps its place in the next listing, although that one has earlier names.
    up(&mut follower, "a 3");
    let (_, refused) = give(&mut follower, "a 3", services(true, &[("a", 1), ("b", 1), ("c", 1)]));
    assert_eq!(refused.len(), 1, "{refused:?}");
    let (changes, ack) = follower.listed_by(&link("a 3"), Extent::Complete, &in_use(&[]));
    assert_eq!(texts(&changes), Vec::<String>::new());
    let limit = "peers[0].import[0] has reached its limit of 2 services";
    assert_eq!(answers(ack), [format!("b.pay.west.global: {limit}"), "+c.pay.west.global".to_owned()]);
    // A service that waits and is removed does not come back.
    assert_eq!(give(&mut follower, "a 3", gone("b")), NOTHING);
    assert_eq!(give(&mut follower, "a 3", gone("c")).0, ["without c.pay.here"]);
    let mut follower = self::follower(Some(2));
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &[("a", 1), ("b", 1)]));
    listed(&mut follower, "a");
    // A service that is sent again counts only once.
    assert_eq!(give(&mut follower, "a", services(false, &[("a", 2)])).0, ["a.pay.here 2 since 7"]);
    let mut other = follower_of_two_namesakes();
    let (_, refused) = give(&mut other, "a", services(true, &[("x.one", 1), ("x.two", 1)]));
    assert_eq!(
        refused,
        [
            "x.two.pay.west.global: another service of the peer, x.one.pay.west.global, has the same name here, x.pay.here"
        ]
    );
}

#[test]
fn a_name_that_passes_to_another_exported_service_stays() {
    for (first, second) in [("x.one", "x.two"), ("x.two", "x.one")] {
        let removal = || proto::Delta {
            removed_services: vec![format!("{first}.pay.west.global")],
            ..proto::Delta::default()
        };
        let mut follower = follower(None);
        up(&mut follower, "a");
        give(&mut follower, "a", services(true, &[(first, 1)]));
        listed(&mut follower, "a");
        assert_eq!(give(&mut follower, "a", services(false, &[(second, 2)])).1.len(), 1, "the name is taken");
        let (changes, answers) = give(&mut follower, "a", removal());
        assert_eq!(changes, ["x.pay.here 2 since 7"], "{first} is gone, {second} has its name");
        assert_eq!(answers, [format!("+{second}.pay.west.global")]);
        // Another replica exports the first one: its end uncovers the second one again.
        up(&mut follower, "b");
        give(&mut follower, "b", services(true, &[(first, 1)]));
        listed(&mut follower, "b");
        assert_eq!(down(&mut follower, "b", false), ["x.pay.here 2 since 7"]);
        // A listing replaces the one by the other, too.
        give(&mut follower, "a", services(true, &[(first, 1)]));
        assert_eq!(listed(&mut follower, "a"), ["x.pay.here 1 since 7"]);
    }
}

#[test]
fn services_of_the_last_run_keep_their_places() {
    let mut follower = follower(Some(1));
    let mut of_last_run = in_use(&[]);
    of_last_run.put(read("b", 1), &mut Dirty::default());
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &[("a", 1), ("b", 1)]));
    let (changes, ack) = follower.listed_by(&link("a"), Extent::Complete, &of_last_run);
    assert_eq!(texts(&changes), ["begin", "b.pay.here 1 since 7", "complete"]);
    assert_eq!(ack.taken, ["b.pay.west.global"]);
}

fn listed_in_part(follower: &mut Follower, replica: &str, in_use: &Shard) -> Vec<String> {
    texts(&follower.listed_by(&link(replica), Extent::Partial, in_use).0)
}

#[test]
fn a_partial_listing_removes_nothing_until_a_complete_one_follows() {
    let mut follower = follower(None);
    up(&mut follower, "a");
    let mut all = services(true, &[("one", 1), ("two", 2)]);
    all.gateways = vec![gateway("g"), gateway("h")];
    give(&mut follower, "a", all);
    listed(&mut follower, "a");
    // The peer restarts, and has read one of its registries.
    assert_eq!(down(&mut follower, "a", false), ["failed"]);
    up(&mut follower, "b");
    let mut some = services(true, &[("one", 3)]);
    some.gateways = vec![gateway("g")];
    give(&mut follower, "b", some);
    assert_eq!(listed_in_part(&mut follower, "b", &in_use(&[])), ["one.pay.here 3 since 7"]);
    assert_eq!(follower.given.gateways.len(), 2, "the gateway that the partial listing lacks stays");
    // A second replica restarts as well.
    up(&mut follower, "c");
    give(&mut follower, "c", services(true, &[("one", 3)]));
    assert_eq!(listed_in_part(&mut follower, "c", &in_use(&[])), Vec::<String>::new());
    assert_eq!(down(&mut follower, "b", false), Vec::<String>::new());
    give(&mut follower, "c", services(true, &[("one", 3)]));
    assert_eq!(
        listed(&mut follower, "c"),
        ["without two.pay.here", "without gateway g", "without gateway h"]
    );
}

#[test]
fn a_partial_listing_keeps_the_items_of_the_last_run() {
    let mut follower = follower(None);
    let mut of_last_run = in_use(&["g"]);
    of_last_run.put(read("b", 1), &mut Dirty::default());
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &[("a", 1)]));
    assert_eq!(
        listed_in_part(&mut follower, "a", &of_last_run),
        ["begin", "keep b.pay.here", "keep gateway g", "a.pay.here 1 since 7", "complete"]
    );
    give(&mut follower, "a", services(true, &[("a", 1)]));
    assert_eq!(listed(&mut follower, "a"), ["without b.pay.here", "without gateway g"]);
}

#[test]
fn what_partial_listings_leave_behind_is_bounded() {
    let mut follower = follower(None);
    let limits = isthmus_settings::peer::PeerLimits { services: 2, ..peer(None).limits };
    follower.peer.peer = Arc::new(Peer { limits, ..peer(None) });
    up(&mut follower, "a");
    for number in 0..10 {
        give(&mut follower, "a", services(true, &[(&format!("s{number}"), 1)]));
        listed_in_part(&mut follower, "a", &in_use(&[]));
    }
    assert!(follower.given.services.len() <= 4, "{:?}", follower.given.services.keys());
}

#[test]
fn services_that_wait_for_a_place_are_bounded_but_those_in_use_always_wait() {
    let mut follower = follower(Some(1));
    let names: Vec<String> = (0..1_200).map(|number| format!("s{number:04}")).collect();
    let all: Vec<(&str, u32)> = names.iter().map(|name| (&**name, 1)).collect();
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &all[1_199..]));
    listed(&mut follower, "a");
    assert_eq!(give(&mut follower, "a", services(true, &all)).1.len(), 1_199);
    let (changes, ack) = follower.listed_by(&link("a"), Extent::Complete, &in_use(&[]));
    assert_eq!(texts(&changes), Vec::<String>::new(), "the service in use stays");
    assert_eq!(ack.taken, ["s1199.pay.west.global"]);
    let waiting = follower.replicas[0].items.waiting();
    assert_eq!(waiting, 1_001, "1,000, and the one whose place went to the service in use");
}

fn follower_of_two_namesakes() -> Follower {
    let mut follower = follower(None);
    up(&mut follower, "a");
    follower
}

#[test]
fn replicas_are_merged_and_the_last_one_decides_about_loss() {
    let mut follower = follower(None);
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &[("one", 1), ("two", 2)]));
    listed(&mut follower, "a");
    up(&mut follower, "b");
    // The newer link has precedence. A service that only the older link offers remains. Of two export times, the earlier one is
    // used.
    let mut newer = services(true, &[]);
    let one = proto::Service { exported_at: 9, ..record("one.pay.west.global", 9) };
    newer.services.push(one.encode_to_vec());
    assert_eq!(give(&mut follower, "b", newer), NOTHING);
    assert_eq!(listed(&mut follower, "b"), ["one.pay.here 9 since 7"]);
    assert_eq!(down(&mut follower, "a", false), ["without two.pay.here"]);
    assert_eq!(down(&mut follower, "a", false), Vec::<String>::new(), "it was down already");
    assert_eq!(down(&mut follower, "b", false), ["failed"]);
    // The changes of the next link start from the items in use.
    up(&mut follower, "c");
    give(&mut follower, "c", services(true, &[("one", 9)]));
    assert_eq!(
        listed(&mut follower, "c"),
        ["readable"],
        "the aggregator is told, although nothing has changed"
    );
    assert_eq!(
        down(&mut follower, "c", true),
        ["forget", "failed"],
        "the peer said that it shall be forgotten"
    );
    assert!(follower.given.services.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_peer_orders_to_forget_its_services_at_most_every_ten_minutes() {
    let mut follower = follower(None);
    let forget = |follower: &mut Follower| {
        up(follower, "a");
        give(follower, "a", services(true, &[("one", 1)]));
        listed(follower, "a");
        down(follower, "a", true)
    };
    let later = async |millis| tokio::time::advance(Duration::from_millis(millis)).await;
    assert_eq!(forget(&mut follower), ["forget", "failed"]);
    later(599_999).await;
    assert_eq!(forget(&mut follower), ["failed"], "what it has given stays in use");
    later(1).await;
    assert_eq!(forget(&mut follower), ["forget", "failed"]);
    // If one replica orders the removal of its items, the items of other replicas stay.
    later(600_000).await;
    for replica in ["a", "b"] {
        up(&mut follower, replica);
        give(&mut follower, replica, services(true, &[("one", 1)]));
        listed(&mut follower, replica);
    }
    assert_eq!(down(&mut follower, "b", true), Vec::<String>::new());
    assert_eq!(down(&mut follower, "a", true), ["forget", "failed"]);
}

#[test]
fn f_4_gateways_that_answer_keep_a_peer_without_a_link() {
    let mut follower = follower(None);
    let works = |follower: &Follower, gateways: &[&str]| {
        let network = peer(None).network("net-west");
        let change = follower.still_works(&in_use(gateways), |networks| networks.contains(&network));
        texts(&change.into_iter().collect::<Vec<_>>())
    };
    assert_eq!(works(&follower, &[]), Vec::<String>::new(), "no copy was read yet");
    assert_eq!(works(&follower, &["g"]), ["still works"]);
    assert_eq!(follower.still_works(&in_use(&["g"]), |_| false), None);
    up(&mut follower, "a");
    give(&mut follower, "a", services(true, &[("one", 1)]));
    listed(&mut follower, "a");
    assert_eq!(works(&follower, &["g"]), Vec::<String>::new(), "the link says what there is");
}

#[test]
fn services_to_which_no_gateway_leads_are_reported() {
    let mut follower = follower(None);
    let report = |follower: &mut Follower| match follower.report() {
        Some(Change::Report(report)) => report.left_out_because(NO_GATEWAY),
        _ => None,
    };
    up(&mut follower, "a");
    let mut all = services(true, &[("one", 1), ("two", 1)]);
    let other = proto::Gateway { host: "127.0.0.1".into(), ..gateway("h") };
    all.gateways = vec![other];
    let (_, refused) = give(&mut follower, "a", all);
    assert_eq!(
        refused,
        ["h: the receiver's `peers[].addresses` does not allow the gateway's address, 127.0.0.1"]
    );
    listed(&mut follower, "a");
    assert_eq!(report(&mut follower), Some(2));
    give(&mut follower, "a", proto::Delta { gateways: vec![gateway("g")], ..proto::Delta::default() });
    // As after each event.
    follower.is_report_due = true;
    assert_eq!(report(&mut follower), None);
    assert_eq!(follower.report, Arc::default(), "the report is taken back");
}
