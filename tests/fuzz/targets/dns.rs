//! A query of a DNS client, and what another server answers to it. The first byte chooses the transport and whether the source may
//! get records. A length in two bytes and the query follow. The rest is for a query that is forwarded: the flags, counts and records
//! of the other server's answer, which has the id and the question of the forwarded query.

use std::cell::OnceCell;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use hickory_proto::op::{Message, MessageType, OpCode};
use hickory_proto::rr::{Name, RData, RecordType};
use isthmus::dns::answer::{
    Extent, HEADER_BYTES, Question, Reply, Transport, UDP_BYTES_MAX, Verdict, answer,
};
use isthmus::dns::names::Names;
use isthmus::document::services::read_registry;
use isthmus::model::import::Import;
use isthmus::model::name::HostName;
use isthmus::model::place::{ClusterId, Network};
use isthmus::model::service::Service;
use isthmus::registry::shard::Shard;
use isthmus::settings::scope::RegistryScope;
use isthmus::snapshot::build;
use isthmus::snapshot::inputs::Inputs;
use isthmus::snapshot::routes::Resolved;
use isthmus::snapshot::virtual_addresses::{Ranges, VirtualAddresses, import_of};

use super::policy;

const ZONES: [&str; 2] = ["global", "clusterset.local"];
const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 53));
/// The id of a forwarded query.
const ID: u16 = 7;
const IMPORTED: &str = "ratings.pay.west.global";
const SERVICES: &str = "services:
- {hostname: ratings.pay.west.global, namespace: pay, ports: [{name: https, port: 443, protocol: TLS}, {name: web, port: 80}]}
- {hostname: cart.shop.east.global, namespace: shop, addresses: [10.96.0.7, 'fd00::7'], ports: [{name: Http, port: 8080}]}
- {hostname: db.shop.svc.clusterset.local, namespace: shop, ports: [{name: tls, port: 443}], endpoints: [{address: 10.9.0.1}, {address: 10.9.0.2}]}
";

pub(super) fn run(data: &[u8]) {
    thread_local!(static NAMES: OnceCell<Names> = const { OnceCell::new() });
    let [mode, high, low, rest @ ..] = data else { return };
    let transport = if mode & 1 == 0 { Transport::Udp } else { Transport::Tcp };
    let extent = if mode & 2 == 0 { Extent::Full } else { Extent::Truncated };
    let (query, answered) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])).min(rest.len()));
    NAMES.with(|names| {
        let names = names.get_or_init(names_of_services);
        match answer(query, names, transport, extent) {
            Verdict::Drop => {
                assert!(query.len() < HEADER_BYTES || query[2] & 0x80 != 0, "a query without an answer");
            }
            Verdict::Forward(question) => forwarded(query, answered, &question, names),
            Verdict::Reply(reply) => {
                let (message, _) = checked(query, &reply, transport);
                if extent == Extent::Truncated {
                    assert!(message.answers.is_empty(), "records for a source that may be forged");
                } else if transport == Transport::Udp && !message.metadata.truncation {
                    let Verdict::Reply(whole) = answer(query, names, Transport::Tcp, extent) else {
                        panic!("an answer over UDP alone")
                    };
                    assert_eq!(message.answers, checked(query, &whole, Transport::Tcp).0.answers);
                }
            }
        }
    });
}

/// Checks an answer to a client. Returns it, and the query.
fn checked(query: &[u8], reply: &Reply, transport: Transport) -> (Message, Option<Message>) {
    let asked = Message::from_vec(query).ok();
    let most = match (transport, asked.as_ref().and_then(|asked| asked.edns.as_ref())) {
        (Transport::Tcp, _) => u16::MAX,
        (Transport::Udp, None) => 512,
        (Transport::Udp, Some(edns)) => edns.max_payload().clamp(512, UDP_BYTES_MAX),
    };
    assert!(reply.bytes.len() <= usize::from(most), "{} of {most} bytes", reply.bytes.len());
    let message = Message::from_vec(&reply.bytes).expect("an answer that can be read");
    assert_eq!(reply.bytes[..2], query[..2], "the answer to another query");
    assert_eq!(message.metadata.message_type, MessageType::Response);
    let code = OpCode::from_u8((query[2] & 0x78) >> 3);
    assert_eq!(message.metadata.op_code, code);
    if let [question] = &*message.queries {
        let asked = asked.as_ref().expect("a query that can be read");
        assert_eq!(Some(question), asked.queries.first());
    }
    (message, asked)
}

/// Checks a query that is forwarded, and the answer that the client gets to it.
fn forwarded(query: &[u8], answered: &[u8], question: &Question, names: &Names) {
    let asked = Message::from_vec(query).expect("a query that can be read");
    assert!(!is_ours(asked.queries[0].name()), "a name of this server is asked of another one");
    let bytes = question.query(ID).expect("a query to another server");
    let sent = Message::from_vec(&bytes).expect("a query that can be read");
    assert_eq!((sent.metadata.id, &sent.queries), (ID, &asked.queries));
    assert!(sent.answers.is_empty() && sent.authorities.is_empty() && sent.additionals.is_empty());
    let name: usize = bytes[HEADER_BYTES..]
        .iter()
        .scan(0_usize, |left, byte| {
            // Each label begins with its length; that of the root is 0.
            let is_end = *left == 0 && *byte == 0;
            *left = if *left == 0 { usize::from(*byte) } else { *left - 1 };
            (!is_end).then_some(1)
        })
        .sum();
    let whole = HEADER_BYTES + name + 5;
    let [first, second, counts @ ..] = answered else { return };
    let (counts, records) = counts.split_at(counts.len().min(6));
    let mut answer = bytes[..whole].to_vec();
    (answer[2], answer[3]) = (0x80 | first & 7, *second);
    answer[6..6 + counts.len()].copy_from_slice(counts);
    answer.extend_from_slice(records);
    assert!(question.is_answered_by(&bytes, &answer));
    for at in [1, HEADER_BYTES] {
        let mut forged = answer.clone();
        forged[at] ^= 0x20;
        assert!(!question.is_answered_by(&bytes, &forged), "an answer to another question");
    }
    let reply = question.relay(answer, names);
    let most = match question.transport() {
        Transport::Tcp => usize::from(u16::MAX),
        Transport::Udp => usize::from(UDP_BYTES_MAX),
    };
    assert!(reply.bytes.len() <= most && reply.bytes[..2] == query[..2], "{:?}", reply.bytes);
    let message = Message::from_vec(&reply.bytes);
    let message = message.unwrap_or_else(|error| panic!("{error}: {:02x?}", reply.bytes));
    for record in message.answers.iter().chain(&message.additionals) {
        let ip: Option<IpAddr> = match &record.data {
            RData::A(ip) => Some(ip.0.into()),
            RData::AAAA(ip) => Some(ip.0.into()),
            _ => None,
        };
        let is_known = ip.is_none_or(|ip| ip == SERVER || addresses(names).contains(&ip));
        assert!(!is_ours(&record.name) || is_known, "{record} is from another server");
        assert!(!is_ours(&record.name) || record.record_type() != RecordType::CNAME, "{record}");
    }
}

fn is_ours(name: &Name) -> bool {
    let text = name.to_ascii().to_ascii_lowercase();
    let text = text.trim_end_matches('.');
    ZONES
        .iter()
        .any(|zone| text.strip_suffix(zone).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

/// Returns the addresses of all services.
fn addresses(names: &Names) -> Vec<IpAddr> {
    names.snapshot().services().into_iter().flat_map(|service| names.addresses(service)).collect()
}

fn names_of_services() -> Names {
    let listing = read_registry("x.yaml".as_ref(), SERVICES, &ClusterId::new("east"), &Network::new("east"));
    let mut listing = listing.expect("good");
    for (key, service) in &mut listing.services {
        if key.hostname.as_str() == IMPORTED {
            let import = Import { peer: "west".into(), exported_name: key.hostname.clone(), exported_at: 7 };
            *service = Arc::new(Service { import: Some(Arc::new(import)), ..(**service).clone() });
        }
    }
    let scope = RegistryScope { networks: None, ..RegistryScope::default() };
    let shards = [Arc::new(Shard::of(listing, &scope))];
    let mut addresses = VirtualAddresses::new(Ranges::default());
    let imported = HostName::parse(IMPORTED).expect("legal");
    addresses.renew(&imported, import_of(IMPORTED, &shards).map(|import| &**import), 0);
    let (resolved, trust_roots, drains) = (Resolved::default(), Default::default(), Arc::default());
    let inputs = Inputs {
        trust_roots: &trust_roots,
        policy_generation: 1,
        policy: &policy(),
        shards: &shards,
        resolved: &resolved,
        virtual_addresses: Some(&addresses),
        probes: None,
        drains: &drains,
        recent: None,
        remembered: None,
    };
    let zones = ZONES.map(|zone| HostName::parse(zone).expect("legal"));
    Names::new(Arc::new(build::all(inputs, 1)), zones.into(), Ranges::default(), SERVER)
}
