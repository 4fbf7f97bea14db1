//! Tests of the protocol, without sockets.

use isthmus_ads::budget::Budget;
use isthmus_ads::protocol::{Acknowledgement, NAME_BYTES_MAX, Protocol, Request, Response};
use isthmus_ads::session::Resources as _;
use isthmus_snapshot::testing::Mesh;
use isthmus_snapshot::unread::{Unread, UnreadRegistry};
use isthmus_tasks::scope::Scope;
use isthmus_world::Publisher;
use tokio::sync::watch;
use tonic::Code;

use super::*;
use crate::table::{Index, Resources};

/// A client, and the sender of its tables.
struct Client {
    session: Session,
    tables: watch::Sender<Option<Arc<Table>>>,
}

impl Client {
    fn new(account: Account) -> Self {
        let (_, reader) = Publisher::new(Mesh::new(Vec::new(), Vec::new()).snapshot());
        let hub = Hub::new(reader, Scope::default(), Vec::new());
        let (tables, receiver) = watch::channel(None);
        let resources = ClientResources::new(hub, ClusterId::new("c"), "c/node".into(), receiver);
        Self { session: Session::new(resources, Protocol::Delta, account), tables }
    }

    fn request(&mut self, kind: Kind, request: Request) -> Result<Acknowledgement, Refusal> {
        self.session.request(kind, request)
    }

    fn response(&mut self, table: &Arc<Table>) -> Option<Response> {
        self.tables.send_replace(Some(table.clone()));
        self.session.response()
    }

    fn held_back(&self) -> usize {
        self.session.overview(Kind::Address).held_back
    }
}

fn session() -> Client {
    Client::new(Budget::new(1 << 20).account([127, 0, 0, 1].into(), 1 << 20))
}

/// Returns a table with these resources, each a name and its content.
fn table(resources: &[(&str, &str)], groups: &[(&str, &[&str])], aliases: &[(&str, &str)]) -> Arc<Table> {
    let made = |(name, content): &(&str, &str)| {
        let name: Arc<str> = (*name).into();
        (name.clone(), Arc::new(Resource::encoded(Kind::Address.type_url(), name, content.as_bytes())))
    };
    let mut addresses = Resources::default();
    resources.iter().map(made).for_each(|(name, resource)| drop(addresses.insert(name, resource)));
    let names = |names: &[&str]| -> Arc<[Arc<str>]> { names.iter().map(|name| Arc::from(*name)).collect() };
    let (mut of_groups, mut of_aliases) = (Index::default(), Index::default());
    groups.iter().for_each(|(name, members)| drop(of_groups.insert((*name).into(), names(members))));
    aliases.iter().for_each(|(alias, name)| drop(of_aliases.insert((*alias).into(), names(&[name]))));
    Arc::new(Table {
        addresses,
        policies: Some(Resources::default()),
        groups: of_groups,
        aliases: of_aliases,
        ..Table::default()
    })
}

fn ask(names: &[&str], unsubscribe: &[&str]) -> Request {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Request { names: owned(names), unsubscribe: owned(unsubscribe), ..Request::default() }
}

/// Returns the names of the next response of addresses and the removed names, and accepts it.
fn next(session: &mut Client, table: &Arc<Table>) -> Option<(Vec<String>, Vec<String>)> {
    let response = session.response(table)?;
    assert_eq!(response.type_url, Kind::Address.type_url());
    let names = response.resources.iter().map(|resource| resource.name.to_string()).collect();
    let removed = response.removed.iter().map(ToString::to_string).collect();
    let accepted = Request { nonce: response.nonce, ..Request::default() };
    assert_eq!(session.request(Kind::Address, accepted), Ok(Acknowledgement::Ack(None)));
    Some((names, removed))
}

fn of(names: &[&str], removed: &[&str]) -> Option<(Vec<String>, Vec<String>)> {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Some((owned(names), owned(removed)))
}

#[test]
fn a_client_that_wants_everything_gets_the_differences() {
    let mut session = session();
    let first = table(&[("a", "1"), ("b", "1")], &[], &[]);
    assert_eq!(next(&mut session, &first), None, "nothing was asked");
    session.request(Kind::Address, Request::default()).expect("good");
    assert_eq!(next(&mut session, &first), of(&["a", "b"], &[]));
    assert_eq!(next(&mut session, &first), None);
    let second = table(&[("b", "2"), ("c", "1")], &[], &[]);
    assert_eq!(next(&mut session, &second), of(&["b", "c"], &["a"]));
}

#[test]
fn a_response_has_a_resource_once_though_several_names_lead_to_it() {
    let now = |version: &str| table(&[("a", version), ("b", "1")], &[("b", &["a"])], &[("n/1", "a")]);
    let mut everything = session();
    everything.request(Kind::Address, Request::default()).expect("good");
    next(&mut everything, &now("1"));
    everything.request(Kind::Address, ask(&["a", "b", "n/1", "c"], &[])).expect("good");
    assert_eq!(next(&mut everything, &now("1")), of(&["a", "b"], &["c", "n/1"]));
    let mut on_demand = session();
    on_demand.request(Kind::Address, ask(&["*", "a", "n/1"], &["*"])).expect("good");
    assert_eq!(next(&mut on_demand, &now("1")), of(&["a"], &["n/1"]));
    on_demand.request(Kind::Address, ask(&["a"], &[])).expect("good");
    assert_eq!(next(&mut on_demand, &now("2")), of(&["a"], &[]));
}

#[test]
fn an_empty_mesh_is_answered_too() {
    let mut session = session();
    session.request(Kind::Address, Request::default()).expect("good");
    session.request(Kind::Authorization, Request::default()).expect("good");
    let empty = table(&[], &[], &[]);
    let policies = session.response(&empty).expect("policies go first");
    assert_eq!(policies.type_url, Kind::Authorization.type_url());
    assert_eq!(session.response(&empty), None, "until the client has them");
    let accepted = Request { nonce: policies.nonce, ..Request::default() };
    session.request(Kind::Authorization, accepted).expect("good");
    assert_eq!(next(&mut session, &empty), of(&[], &[]));
}

#[test]
fn new_members_of_a_service_come_unasked() {
    let mut session = session();
    session.request(Kind::Address, ask(&["*"], &["*"])).expect("good");
    let first = table(&[("s", "1"), ("w1", "1"), ("x", "1")], &[("s", &["w1"])], &[("n/1", "s")]);
    assert_eq!(next(&mut session, &first), of(&[], &[]));
    session.request(Kind::Address, ask(&["n/1"], &[])).expect("good");
    assert_eq!(next(&mut session, &first), of(&["s", "w1"], &["n/1"]));
    let second =
        table(&[("s", "1"), ("w1", "1"), ("w2", "1"), ("x", "2")], &[("s", &["w1", "w2"])], &[("n/1", "s")]);
    assert_eq!(next(&mut session, &second), of(&["w2"], &[]), "and `x` does not");
    let third = table(&[("s", "1"), ("w2", "2")], &[("s", &["w2"])], &[("n/1", "s")]);
    assert_eq!(next(&mut session, &third), of(&["w2"], &["w1"]));
    // The address moves to another service.
    let fourth = table(&[("t", "1"), ("w2", "2")], &[("t", &["w2"])], &[("n/1", "t")]);
    assert_eq!(next(&mut session, &fourth), of(&["t"], &["s"]));
}

#[test]
fn a_name_that_is_unsubscribed_is_not_sent_any_more() {
    let mut session = session();
    session.request(Kind::Address, ask(&["*"], &["*"])).expect("good");
    let first = table(&[("s", "1")], &[], &[]);
    next(&mut session, &first);
    session.request(Kind::Address, ask(&["s"], &[])).expect("good");
    assert_eq!(next(&mut session, &first), of(&["s"], &[]));
    session.request(Kind::Address, ask(&[], &["s"])).expect("good");
    assert_eq!(next(&mut session, &table(&[("s", "2")], &[], &[])), None);
}

#[test]
fn what_an_unread_registry_may_have_is_not_removed() {
    let mut unread = Unread::default();
    unread = unread.with_registries(vec![UnreadRegistry {
        name: "west".into(),
        services: Vec::new(),
        is_peer: false,
    }]);
    let with = |unread: Unread, resources: &[(&str, &str)]| {
        let table = Table { unread: Arc::new(unread), ..Table::clone(&table(resources, &[], &[])) };
        Arc::new(table)
    };
    let has = ["n/gone", "n/changed", "SplitHorizon/w/192.0.2.1:15008/n/gone"];
    let has = has.map(|name| (name.to_owned(), "old".to_owned())).to_vec();
    for on_demand in [false, true] {
        let mut session = session();
        let star: &[&str] = if on_demand { &["*"] } else { &[] };
        let first = Request { has: has.clone(), returns: true, ..ask(star, star) };
        session.request(Kind::Address, first).expect("good");
        assert_eq!(
            next(&mut session, &with(unread.clone(), &[("n/changed", "2")])),
            of(&[], &[]),
            "{on_demand}"
        );
        assert_eq!(session.held_back(), 3);
        let read = with(Unread::default(), &[("n/changed", "2")]);
        let removed = ["SplitHorizon/w/192.0.2.1:15008/n/gone", "n/gone"];
        assert_eq!(next(&mut session, &read), of(&["n/changed"], &removed), "{on_demand}");
        assert_eq!(session.held_back(), 0);
    }
}

#[test]
fn a_large_mesh_is_sent_in_several_responses() {
    let content = "x".repeat(RESPONSE_BYTES_MAX / 2 - 100);
    let all = table(&[("a", &content), ("b", &content), ("c", &content)], &[], &[]);
    let mut session = session();
    let has = vec![("gone".to_owned(), String::new())];
    session.request(Kind::Address, Request { has, ..Request::default() }).expect("good");
    assert_eq!(next(&mut session, &all), of(&["a", "b"], &[]));
    assert_eq!(next(&mut session, &all), of(&["c"], &["gone"]), "removals come last");
    assert_eq!(next(&mut session, &all), None);
}

#[test]
fn the_names_of_a_client_have_limits() {
    let budget = Budget::new(1 << 20);
    let account = budget.account([127, 0, 0, 1].into(), 2 * (NAME_COST + 1));
    let mut session = Client::new(account);
    session.request(Kind::Address, ask(&["*", "a", "b"], &["*"])).expect("good");
    let more = session.request(Kind::Address, ask(&["c"], &[]));
    assert!(matches!(more, Err(Refusal::TooManyBytes(_))), "{more:?}");
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    assert_eq!(session.request(Kind::Address, ask(&[&long], &[])), Err(Refusal::TooLongName));
    assert_eq!(session.request(Kind::Authorization, ask(&["a/p"], &[])), Err(Refusal::Named("policies")));
    drop(session);
    assert_eq!(budget.bytes(), 0);
}

#[test]
fn the_bytes_of_an_earlier_stream_are_released_when_it_was_compared() {
    let budget = Budget::new(1 << 20);
    let account = budget.account([127, 0, 0, 1].into(), 1 << 20);
    let mut session = Client::new(account);
    let has = vec![("a".to_owned(), String::new())];
    session.request(Kind::Address, Request { has, ..Request::default() }).expect("good");
    assert!(budget.bytes() > 0);
    assert_eq!(next(&mut session, &table(&[], &[], &[])), of(&[], &["a"]));
    assert_eq!(budget.bytes(), 0);
}

#[test]
fn nothing_is_sent_while_the_policies_are_unknown() {
    let known = table(&[("a", "1")], &[], &[]);
    let unknown = Arc::new(Table { policies: None, ..Table::clone(&known) });
    let mut session = session();
    for &kind in Kind::ALL {
        session.request(kind, Request::default()).expect("taken");
    }
    assert!(session.response(&unknown).is_none());
    let fault = session.session.resources().fault().expect("the stream ends");
    assert_eq!(fault.code(), Code::FailedPrecondition);
    // A client that has policies keeps them.
    let policies = session.response(&known).expect("policies");
    session
        .request(Kind::Authorization, Request { nonce: policies.nonce, ..Request::default() })
        .expect("taken");
    assert!(session.response(&unknown).is_none());
    assert!(session.response(&known).is_some());
}
