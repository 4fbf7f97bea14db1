//! Answers to the bytes of queries, for a snapshot of a few services.

use std::collections::BTreeMap;
use std::sync::Arc;

use hickory_proto::rr::rdata::{CNAME, TXT};
use proptest::prelude::*;

use super::*;
use isthmus_document::services::read_registry;
use isthmus_model::import::Import;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{PortProtocol, Service};
use isthmus_registry::change::Dirty;
use isthmus_registry::listing::Listing;
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build;
use isthmus_snapshot::inputs::Inputs;
use isthmus_snapshot::routes::Resolved;
use isthmus_snapshot::testing::{self, policy_of, rule, scoped};
use isthmus_snapshot::virtual_addresses::{Ranges, VirtualAddresses, import_of};
use isthmus_world::Since;

const SERVICES: &str = "services:
- {hostname: ratings.pay.west.global, namespace: pay, addresses: [10.9.9.9], ports: [{name: https, port: 443, protocol: TLS}, {name: web, port: 80}]}
- {hostname: cart.shop.east.global, namespace: shop, addresses: [10.96.0.7, 'fd00::7'], ports: [{name: Http, port: 8080}]}
- {hostname: v4.east.global, namespace: shop, addresses: [10.96.0.8], ports: [{name: http, port: 80}]}
- {hostname: hidden.east.global, namespace: shop, addresses: [10.96.0.9], ports: [{name: http, port: 80}]}
- {hostname: reviews.shop.svc.cluster.local, namespace: shop, addresses: [10.96.0.10], ports: [{name: http, port: 80}]}
";

const SERVER_AT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 53));

fn name(text: &str) -> HostName {
    HostName::parse(text).expect("legal")
}

fn imported(listing: &mut Listing, hostname: &str) {
    for (key, service) in &mut listing.services {
        if key.hostname.as_str() == hostname {
            let import = Import { peer: "west".into(), exported_name: key.hostname.clone(), exported_at: 7 };
            *service = Arc::new(Service { import: Some(Arc::new(import)), ..(**service).clone() });
        }
    }
}

/// Makes the services of pods aliases of `original`, as Kubernetes registries do for a headless service.
fn standing_for(listing: &mut Listing, original: &str) {
    let is_alias = |hostname: &str| hostname != original && hostname.contains("db.shop.svc.");
    for (key, service) in &mut listing.services {
        if is_alias(key.hostname.as_str()) {
            *service = Arc::new(Service { exported_as: Some(name(original)), ..(**service).clone() });
        }
    }
}

/// The services of `SERVICES`: the first is imported, the others are exported except the hidden one.
struct World {
    policy: Arc<Policy>,
    shards: Vec<Arc<Shard>>,
    addresses: VirtualAddresses,
    trust_roots: Arc<isthmus_snapshot::trust_roots::TrustRoots>,
    drains: Arc<isthmus_snapshot::drains::Drains>,
}

impl World {
    fn new(text: &str) -> Self {
        let listing = read_registry("x".as_ref(), text, &ClusterId::new("c0"), &Network::new("east"));
        let mut listing = listing.expect("good");
        imported(&mut listing, "ratings.pay.west.global");
        standing_for(&mut listing, "db.shop.svc.cluster.local");
        let exports = ["cart.shop.east.global", "v4.east.global", "*.cluster.local"].map(rule).to_vec();
        let policy = Arc::new(Policy { exports, ..policy_of("c0", "east") });
        let mut addresses = VirtualAddresses::new(Ranges::default());
        let names: Vec<HostName> = listing.services.keys().map(|key| key.hostname.clone()).collect();
        let shards = vec![scoped(listing)];
        for name in &names {
            addresses.renew(name, import_of(name.as_str(), &shards).map(|import| &**import), 0);
        }
        Self { policy, shards, addresses, trust_roots: Arc::default(), drains: Arc::default() }
    }

    fn inputs<'a>(&'a self, resolved: &'a Resolved) -> Inputs<'a> {
        Inputs {
            trust_roots: &self.trust_roots,
            policy: &self.policy,
            policy_generation: 1,
            shards: &self.shards,
            resolved,
            virtual_addresses: Some(&self.addresses),
            probes: None,
            drains: &self.drains,
            recent: None,
            remembered: None,
        }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::new(build::all(self.inputs(&Resolved::default()), 1))
    }
}

fn names() -> Names {
    let zones = ["global", "clusterset.local"].map(name);
    Names::new(World::new(SERVICES).snapshot(), zones.into(), Ranges::default(), SERVER_AT)
}

fn query(name: &str, kind: RecordType) -> Message {
    let mut query = Message::new(4711, MessageType::Query, OpCode::Query);
    query.metadata.recursion_desired = true;
    query.queries.push(Query::query(Name::from_ascii(name).expect("a name"), kind));
    query
}

fn with_edns(mut query: Message, payload: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    query.edns = Some(edns);
    query
}

fn reply_to(query: &Message, transport: Transport) -> (Message, usize) {
    let bytes = query.to_vec().expect("encoded");
    match answer(&bytes, &names(), transport, Extent::Full) {
        Verdict::Reply(reply) => {
            let message = Message::from_vec(&reply.bytes).expect("a message");
            // The numbers are compared, because the code 16 has two names (BADVERS and BADSIG).
            assert_eq!(u16::from(message.metadata.response_code), u16::from(reply.code));
            assert_eq!((message.metadata.id, message.metadata.message_type), (4711, MessageType::Response));
            (message, reply.bytes.len())
        }
        other => panic!("{other:?}"),
    }
}

fn asked(name: &str, kind: RecordType) -> Message {
    reply_to(&query(name, kind), Transport::Udp).0
}

fn data(records: &[Record]) -> Vec<String> {
    records.iter().map(|record| record.data.to_string()).collect()
}

fn is_negative(reply: &Message, code: ResponseCode) {
    assert_eq!((reply.metadata.response_code, reply.answers.len()), (code, 0), "{reply:?}");
    let [soa] = &*reply.authorities else { panic!("{reply:?}") };
    assert_eq!((soa.name.to_ascii().as_str(), soa.ttl), ("global.", NEGATIVE_TTL));
    assert!(matches!(&soa.data, RData::SOA(soa) if soa.minimum == NEGATIVE_TTL));
    assert!(reply.metadata.authoritative);
}

#[test]
fn a_joined_name_has_one_set_of_addresses() {
    let text = "services:\n- {hostname: fees.global, namespace: shop, ports: [{name: http, port: 80}], endpoints: [{address: 10.0.0.1}]}\n\
                - {hostname: paid.global, namespace: shop, addresses: [10.96.0.9], ports: [{name: http, port: 80}]}";
    let mut world = World::new(text);
    let hosts = ["fees.global", "paid.global"];
    for host in hosts {
        let of_one = testing::service(host, vec![testing::port(80, PortProtocol::Http)], Vec::new());
        world.shards.push(scoped(testing::of_peer("west", host, of_one)));
        let import = import_of(host, &world.shards).map(|import| &**import);
        world.addresses.renew(&name(host), import, 0);
    }
    let addresses = |world: &World| {
        let names = Names::new(world.snapshot(), [name("global")].into(), Ranges::default(), SERVER_AT);
        hosts.map(|host| match names.find(host) {
            Found::Service(service) => Some(names.addresses(service)),
            _ => None,
        })
    };
    assert_eq!(addresses(&world), [None, None], "the names are neither exported nor joined");
    let peers = vec![Arc::new(testing::importing("west", true))];
    world.policy = Arc::new(Policy { peers, ..(*world.policy).clone() });
    let [Some(fees), Some(paid)] = addresses(&world) else { panic!("both are answered") };
    assert_eq!(paid, [IpAddr::from([10, 96, 0, 9])], "the addresses of this mesh");
    assert!(fees.len() == 2 && fees.iter().all(|ip| Ranges::default().has(*ip)), "virtual ones: {fees:?}");
}

#[test]
fn an_imported_service_has_its_virtual_addresses_and_no_others() {
    let reply = asked("ratings.pay.west.global.", RecordType::A);
    let addresses = data(&reply.answers);
    assert!(addresses.len() == 1 && addresses[0].starts_with("240.250."), "{addresses:?}");
    assert!(reply.metadata.authoritative && reply.metadata.recursion_desired);
    assert_eq!((reply.answers[0].ttl, reply.authorities.len()), (TTL, 0));
    let addresses = data(&asked("ratings.pay.west.global.", RecordType::AAAA).answers);
    assert!(addresses.len() == 1 && addresses[0].starts_with("fd69:7374:686d:"), "{addresses:?}");
}

#[test]
fn an_exported_service_has_its_own_addresses() {
    assert_eq!(data(&asked("cart.shop.east.global.", RecordType::A).answers), ["10.96.0.7"]);
    assert_eq!(data(&asked("cart.shop.east.global.", RecordType::AAAA).answers), ["fd00::7"]);
    is_negative(&asked("v4.east.global.", RecordType::AAAA), ResponseCode::NoError);
    is_negative(&asked("v4.east.global.", RecordType::TXT), ResponseCode::NoError);
}

#[test]
fn a_named_port_has_a_service_record_with_the_addresses() {
    let reply = asked("_https._tcp.ratings.pay.west.global.", RecordType::SRV);
    assert_eq!(data(&reply.answers), ["0 0 443 ratings.pay.west.global."]);
    assert_eq!(reply.additionals.len(), 2);
    assert_eq!(
        data(&asked("_http._tcp.Cart.shop.east.global.", RecordType::SRV).answers),
        ["0 0 8080 Cart.shop.east.global."]
    );
    is_negative(&asked("_https._tcp.ratings.pay.west.global.", RecordType::A), ResponseCode::NoError);
    is_negative(&asked("_tcp.ratings.pay.west.global.", RecordType::SRV), ResponseCode::NoError);
    is_negative(&asked("_grpc._tcp.ratings.pay.west.global.", RecordType::SRV), ResponseCode::NXDomain);
    is_negative(&asked("_https._udp.ratings.pay.west.global.", RecordType::SRV), ResponseCode::NXDomain);
}

#[test]
fn a_headless_service_has_a_service_record_for_each_pod_that_has_a_name_and_is_ready_here() {
    let db = |hostname: &str, endpoints: &str| {
        format!(
            "- {{hostname: {hostname}, namespace: shop, ports: [{{name: db, port: 5432}}], endpoints: [{endpoints}]}}\n"
        )
    };
    let pod = |name: &str| format!("{name}.c0.db.shop.svc.clusterset.local");
    let ready = ["{address: 10.7.1.1}", "{address: 10.7.1.2}", "{address: 10.7.1.3}"];
    let sick = "{address: 10.7.1.4, health: unhealthy}";
    let away = "{address: 10.7.1.5, network: net-west}";
    let all = [&ready[..], &[sick, away]].concat().join(", ");
    let lines = [
        db("db.shop.svc.cluster.local", &all),
        db("db.shop.svc.clusterset.local", &all),
        db(&pod("db-0"), ready[0]),
        db(&pod("db-1"), ready[1]),
        db(&pod("db-2"), sick),
        db(&pod("db-3"), away),
        db("db-0.db.shop.svc.cluster.local", ready[0]),
        // This service is not a pod of `db.shop`, although it has an endpoint of `db.shop`.
        db("other.shop.svc.clusterset.local", ready[2]),
    ];
    let world = World::new(&format!("services:\n{}", lines.concat()));
    let zones: Arc<[HostName]> = ["cluster.local", "clusterset.local"].map(name).into();
    let names = Names::new(world.snapshot(), zones, Ranges::default(), SERVER_AT);
    let asked = |names: &Names, name: &str, kind| {
        let query = query(name, kind).to_vec().expect("encoded");
        let Verdict::Reply(reply) = answer(&query, names, Transport::Tcp, Extent::Full) else {
            panic!("no reply")
        };
        Message::from_vec(&reply.bytes).expect("a message")
    };
    let record = "_db._tcp.db.shop.svc.clusterset.local.";
    let reply = asked(&names, record, RecordType::SRV);
    let of_pods = ["db-0", "db-1"].map(|name| format!("0 0 5432 {}.", pod(name)));
    assert_eq!(data(&reply.answers), of_pods);
    assert_eq!(data(&reply.additionals), ["10.7.1.1", "10.7.1.2"]);
    // Each target has the address of its pod alone.
    for (name, wanted) in [("db-0", &["10.7.1.1"][..]), ("db-1", &["10.7.1.2"]), ("db-2", &[]), ("db-3", &[])]
    {
        assert_eq!(data(&asked(&names, &format!("{}.", pod(name)), RecordType::A).answers), wanted, "{name}");
    }
    let whole = asked(&names, "db.shop.svc.clusterset.local.", RecordType::A);
    assert_eq!(data(&whole.answers), ["10.7.1.1", "10.7.1.2", "10.7.1.3"]);
    let within = asked(&names, "_db._tcp.db.shop.svc.cluster.local.", RecordType::SRV);
    assert_eq!(data(&within.answers), ["0 0 5432 db-0.db.shop.svc.cluster.local."]);
    // An incremental update removes the pods; then the service itself is the target.
    let next = World::new(&format!("services:\n{}", lines[..2].concat()));
    let next = World { policy: world.policy, ..next };
    let dirty = Dirty {
        services: ["db-0", "db-1", "db-2", "db-3"].map(|pod_name| name(&pod(pod_name))).into(),
        ..Dirty::default()
    };
    let resolved = Resolved::default();
    let (snapshot, delta) = build::next(names.snapshot(), next.inputs(&resolved), &dirty);
    let later = names.next(Arc::new(snapshot), &Since::Deltas(vec![Arc::new(delta)]));
    let reply = asked(&later, record, RecordType::SRV);
    assert_eq!(data(&reply.answers), ["0 0 5432 db.shop.svc.clusterset.local."]);
    assert!(
        later.pods.get("db.shop.svc.clusterset.local").is_none(),
        "nothing is kept of those that are gone"
    );
}

#[test]
fn names_without_a_service_do_not_exist_but_for_those_above_one() {
    for absent in [
        "nobody.pay.west.global.",
        "hidden.east.global.",
        "x.ratings.pay.west.global.",
        "*.global.",
        "a\\.b.global.",
    ] {
        is_negative(&asked(absent, RecordType::A), ResponseCode::NXDomain);
    }
    for above in ["west.global.", "pay.west.global.", "East.Global.", "global."] {
        is_negative_or_zone(&asked(above, RecordType::A));
    }
    assert_eq!(asked("global.", RecordType::SOA).answers.len(), 1);
}

#[test]
fn names_between_nested_zones_exist() {
    let zones = ["global", "pay.west.global", "lone.south.global"].map(name);
    let names = Names::new(World::new(SERVICES).snapshot(), zones.into(), Ranges::default(), SERVER_AT);
    let found = |name: &str| match names.find(name) {
        Found::Zone => "zone",
        Found::Service(_) => "service",
        Found::Above => "above",
        Found::Nothing => "nothing",
        Found::Foreign | Found::Server | Found::Port(..) => "other",
    };
    assert_eq!(found("ratings.pay.west.global"), "service");
    assert_eq!(found("pay.west.global"), "zone");
    assert_eq!(found("west.global"), "above", "a zone with a service is below");
    assert_eq!(found("south.global"), "above", "an empty zone is below");
    assert_eq!(found("other.south.global"), "nothing");
}

#[test]
fn a_zone_has_a_name_server_whose_name_resolves() {
    let names = names();
    let asked = |name: &str, kind| reply_to(&query(name, kind), Transport::Udp).0;
    let soa = asked("global.", RecordType::SOA);
    let RData::SOA(soa) = &soa.answers[0].data else { panic!("{soa}") };
    let servers = asked("Global.", RecordType::NS);
    assert!(servers.metadata.authoritative);
    let RData::NS(server) = &servers.answers[0].data else { panic!("{servers}") };
    assert_eq!((&server.0, servers.answers.len()), (&soa.mname, 1));
    assert_eq!(
        (&servers.additionals[0].name, data(&servers.additionals)),
        (&server.0, vec!["10.0.0.53".into()])
    );
    assert_eq!(data(&asked(&server.0.to_string(), RecordType::A).answers), ["10.0.0.53"]);
    is_negative_or_zone(&asked(&server.0.to_string(), RecordType::AAAA));
    // Names below the zone have no name servers.
    is_negative_or_zone(&asked("east.global.", RecordType::NS));
    assert!(matches!(names.find("ns.east.global"), Found::Nothing));
}

fn is_negative_or_zone(reply: &Message) {
    assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
    assert_eq!((reply.answers.len(), reply.authorities.len()), (0, 1));
}

#[test]
fn the_letters_of_the_question_are_kept() {
    let query = query("RaTinGs.pAy.wEst.gLoBal.", RecordType::A);
    let (reply, _) = reply_to(&query, Transport::Udp);
    assert!(reply.queries[0].name().eq_case(query.queries[0].name()));
    assert!(reply.answers[0].name.eq_case(query.queries[0].name()));
}

#[test]
fn any_gets_one_small_record() {
    let reply = asked("cart.shop.east.global.", RecordType::ANY);
    assert_eq!(data(&reply.answers).len(), 1);
    assert_eq!(reply.answers[0].record_type(), RecordType::HINFO);
    is_negative(&asked("nobody.global.", RecordType::ANY), ResponseCode::NXDomain);
}

#[test]
fn transfers_updates_and_other_classes_are_refused() {
    let code = |query: &Message| reply_to(query, Transport::Tcp).0.metadata.response_code;
    assert_eq!(code(&query("global.", RecordType::AXFR)), ResponseCode::Refused);
    assert_eq!(code(&query("global.", RecordType::IXFR)), ResponseCode::Refused);
    let mut chaos = query("version.bind.", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert_eq!(code(&chaos), ResponseCode::Refused);
    for (operation, expected) in [
        (OpCode::Update, ResponseCode::Refused),
        (OpCode::Notify, ResponseCode::NotImp),
        (OpCode::Status, ResponseCode::NotImp),
        (OpCode::Unknown(9), ResponseCode::NotImp),
    ] {
        let mut other = query("global.", RecordType::SOA);
        other.metadata.op_code = operation;
        assert_eq!(code(&other), expected, "{operation:?}");
    }
    let mut two = query("global.", RecordType::A);
    two.queries.push(two.queries[0].clone());
    assert_eq!(code(&two), ResponseCode::FormErr);
    let mut later = with_edns(query("global.", RecordType::A), 1232);
    later.edns.as_mut().expect("set").set_version(1);
    assert_eq!(u16::from(code(&later)), u16::from(ResponseCode::BADVERS));
}

#[test]
fn an_answer_is_as_long_as_its_client_takes() {
    let many: Vec<String> = (0..100).map(|at| format!("10.1.0.{at}")).collect();
    let text = format!(
        "services: [{{hostname: v4.east.global, namespace: n, addresses: [{}], ports: [{{name: p, port: 1}}]}}]",
        many.join(", ")
    );
    let names =
        Names::new(World::new(&text).snapshot(), [name("global")].into(), Ranges::default(), SERVER_AT);
    let reply = |query: &Message, transport, extent| {
        let Verdict::Reply(reply) = answer(&query.to_vec().expect("encoded"), &names, transport, extent)
        else {
            panic!("no reply");
        };
        (Message::from_vec(&reply.bytes).expect("a message"), reply.bytes.len())
    };
    let plain = query("v4.east.global.", RecordType::A);
    for (query, transport, fits, limit) in [
        (plain.clone(), Transport::Udp, false, 512),
        (with_edns(plain.clone(), 512), Transport::Udp, false, 512),
        // The client accepts more, but longer datagrams may be fragmented.
        (with_edns(plain.clone(), 65_535), Transport::Udp, false, 1_232),
        (with_edns(plain.clone(), 0), Transport::Udp, false, 512),
        (plain.clone(), Transport::Tcp, true, 65_535),
    ] {
        let (message, length) = reply(&query, transport, Extent::Full);
        assert!(length <= limit, "{length}");
        assert_eq!(message.metadata.truncation, !fits);
        assert_eq!(message.answers.len(), if fits { 100 } else { 0 });
        assert_eq!(message.queries.len(), 1);
        assert_eq!(message.edns.is_some(), query.edns.is_some());
    }
    let (message, length) = reply(&plain, Transport::Udp, Extent::Truncated);
    assert!(message.metadata.truncation && message.answers.is_empty());
    assert_eq!(length, plain.to_vec().expect("encoded").len(), "no amplification");
}

#[test]
fn what_is_no_query_gets_no_answer_or_an_error_without_its_bytes() {
    let names = names();
    let given = |bytes: &[u8]| answer(bytes, &names, Transport::Udp, Extent::Full);
    let good = query("global.", RecordType::SOA).to_vec().expect("encoded");
    for length in 0..HEADER_BYTES {
        assert!(matches!(given(&good[..length]), Verdict::Drop));
    }
    let mut response = good.clone();
    response[2] |= 0x80;
    assert!(matches!(given(&response), Verdict::Drop), "answers are not answered");
    for length in HEADER_BYTES..good.len() {
        let Verdict::Reply(reply) = given(&good[..length]) else { panic!("no reply") };
        assert_eq!((reply.code, reply.bytes.len()), (ResponseCode::FormErr, HEADER_BYTES));
    }
    // A compressed name that points to itself.
    let mut looping = good[..HEADER_BYTES].to_vec();
    looping.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1]);
    assert!(matches!(given(&looping), Verdict::Reply(reply) if reply.code == ResponseCode::FormErr));
}

#[test]
fn a_forwarded_question_takes_only_its_own_answer() {
    let asked = with_edns(query("Www.Example.com.", RecordType::TXT), 4096).to_vec().expect("encoded");
    let Verdict::Forward(question) = answer(&asked, &names(), Transport::Udp, Extent::Full) else {
        panic!("not forwarded");
    };
    let [sent, another] = [7, 8].map(|id| question.query(id).expect("encoded"));
    let mut reply = Message::from_vec(&sent).expect("a message");
    assert_eq!(reply.edns.as_ref().map(Edns::max_payload), Some(UDP_BYTES_MAX));
    reply.metadata.message_type = MessageType::Response;
    let owner = reply.queries[0].name().clone();
    reply.answers.push(Record::from_rdata(owner, 9, RData::TXT(TXT::new(vec!["x".to_owned()]))));
    let bytes = reply.to_vec().expect("encoded");
    assert!(question.is_answered_by(&sent, &bytes) && !question.is_answered_by(&another, &bytes));
    let mut other = bytes.clone();
    other[HEADER_BYTES + 1] ^= 0x20;
    assert!(!question.is_answered_by(&sent, &other), "the letters of the name are part of the secret");
    assert!(!question.is_answered_by(&sent, &bytes[..20]) && !question.is_answered_by(&sent, &[]));
    let names = names();
    let relayed = question.relay(bytes.clone(), &names).bytes;
    assert_eq!((&relayed[..2], &relayed[2..]), (&4711_u16.to_be_bytes()[..], &bytes[2..]), "as it came");
    assert_eq!(question.relay(bytes[..20].to_vec(), &names).code, ResponseCode::ServFail, "cut off");
    let long = question.relay(vec![0; 2_000], &names);
    assert!(Message::from_vec(&long.bytes).expect("a message").metadata.truncation);
    assert_eq!(question.failed().code, ResponseCode::ServFail);
}

/// Returns the answer to a question for a foreign name, made of another server's answer with these records.
fn relayed(kind: RecordType, code: ResponseCode, [answers, additionals]: [&[(&str, RData)]; 2]) -> Message {
    let asked = query("www.example.com.", kind).to_vec().expect("encoded");
    let names = names();
    let Verdict::Forward(question) = answer(&asked, &names, Transport::Udp, Extent::Full) else {
        panic!("not forwarded");
    };
    let mut reply = Message::from_vec(&question.query(7).expect("encoded")).expect("a message");
    reply.metadata.message_type = MessageType::Response;
    reply.metadata.response_code = code;
    reply.metadata.authentic_data = true;
    let record = |(name, data): &(&str, RData)| {
        Record::from_rdata(Name::from_ascii(name).expect("a name"), 9, data.clone())
    };
    reply.answers.extend(answers.iter().map(record));
    reply.additionals.extend(additionals.iter().map(record));
    let reply = question.relay(reply.to_vec().expect("encoded"), &names);
    let message = Message::from_vec(&reply.bytes).expect("a message");
    assert_eq!((message.metadata.id, message.metadata.response_code), (4711, reply.code));
    message
}

fn alias(target: &str) -> RData {
    RData::CNAME(CNAME(Name::from_ascii(target).expect("a name")))
}

fn a(last: u8) -> RData {
    RData::A(A::new(6, 6, 6, last))
}

#[test]
fn other_servers_do_not_answer_for_names_of_our_zones() {
    let mixed = relayed(
        RecordType::A,
        ResponseCode::NoError,
        [
            &[("www.example.com.", a(1)), ("Cart.shop.east.GLOBAL.", a(6))],
            &[("x.global.", a(6)), ("ns.example.com.", a(2))],
        ],
    );
    assert_eq!(
        (data(&mixed.answers), data(&mixed.additionals)),
        (vec!["6.6.6.1".into()], vec!["6.6.6.2".into()])
    );
    assert!(!mixed.metadata.authentic_data, "the records were changed");
    let foreign = relayed(RecordType::A, ResponseCode::NoError, [&[("www.example.com.", a(1))], &[]]);
    assert!(foreign.metadata.authentic_data && data(&foreign.answers) == ["6.6.6.1"]);
}

#[test]
fn an_alias_of_another_zone_for_a_name_of_ours_leads_to_our_records() {
    let to =
        |target: &str| [("www.example.com.", alias("cdn.example.net.")), ("CDN.example.net.", alias(target))];
    let cart = [&to("cart.shop.east.global.")[..], &[("cart.shop.east.global.", a(6))]].concat();
    let reply = relayed(RecordType::A, ResponseCode::NoError, [&cart, &[]]);
    assert_eq!(data(&reply.answers)[2..], ["10.96.0.7"]);
    // Another server does not know the name.
    let reply = relayed(RecordType::AAAA, ResponseCode::NXDomain, [&to("cart.shop.east.global."), &[]]);
    assert_eq!(
        (data(&reply.answers)[2..].to_vec(), reply.metadata.response_code),
        (vec!["fd00::7".into()], ResponseCode::NoError)
    );
    let reply = relayed(RecordType::A, ResponseCode::NoError, [&to("nobody.east.global."), &[]]);
    assert_eq!((reply.answers.len(), reply.authorities.len()), (2, 1));
    assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
    // Aliases that lead in a circle end.
    let reply = relayed(RecordType::A, ResponseCode::NoError, [&to("www.example.com."), &[]]);
    assert_eq!(reply.answers.len(), 2);
    let asked = relayed(RecordType::CNAME, ResponseCode::NoError, [&to("cart.shop.east.global."), &[]]);
    assert_eq!(asked.answers.len(), 2, "the alias itself is the answer");
}

#[test]
fn names_step_by_step_are_names_at_once() {
    let zones: Arc<[HostName]> = [name("global")].into();
    let lines: Vec<&str> = SERVICES.lines().skip(1).collect();
    let mut world = World::new(SERVICES);
    let mut names = Names::new(world.snapshot(), zones.clone(), Ranges::default(), SERVER_AT);
    for mask in [0b11111_u32, 0b10110, 0b00001, 0, 0b01010, 0b11111] {
        let chosen = lines.iter().enumerate().filter(|(at, _)| mask & (1 << at) != 0).map(|(_, line)| *line);
        let text = format!("services:\n{}", chosen.collect::<Vec<_>>().join("\n"));
        let text = if mask == 0 { "services: []".to_owned() } else { text };
        let next = World::new(&text);
        world = World { policy: world.policy.clone(), ..next };
        let dirty = Dirty {
            services: lines.iter().filter_map(|line| Some(name(line.split([' ', ',']).nth(2)?))).collect(),
            ..Dirty::default()
        };
        let resolved = Resolved::default();
        let (snapshot, delta) = build::next(names.snapshot(), world.inputs(&resolved), &dirty);
        let snapshot = Arc::new(snapshot);
        names = names.next(snapshot.clone(), &Since::Deltas(vec![Arc::new(delta)]));
        let whole = Names::new(snapshot, zones.clone(), Ranges::default(), SERVER_AT);
        let of = |names: &Names| {
            let above = names.above.sorted().into_iter().map(|(name, count)| (name.to_string(), *count));
            (above.collect::<BTreeMap<_, _>>(), names.services)
        };
        assert_eq!(of(&names), of(&whole), "{mask:b}");
    }
    assert_eq!(names.services(), 3);
}

proptest! {
    #[test]
    fn no_bytes_panic_and_no_answer_is_longer_than_allowed(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..600),
        query_like in any::<bool>(),
    ) {
        if query_like && bytes.len() > HEADER_BYTES {
            bytes[2] &= 0x07;
            bytes[4..HEADER_BYTES].copy_from_slice(&[0, 1, 0, 0, 0, 0, 0, 1]);
        }
        if let Verdict::Reply(reply) = answer(&bytes, &names(), Transport::Udp, Extent::Full) {
            prop_assert!(reply.bytes.len() <= usize::from(UDP_BYTES_MAX) && reply.bytes.len() >= HEADER_BYTES);
        }
    }
}
