//! The format of a copy: a line that identifies it, the items of a shard as JSON, one per line, and a line with a hash of all
//! lines before it.

use std::hash::Hasher;
use std::io::{self, BufRead, Read, Write};
use std::sync::Arc;

use twox_hash::XxHash3_64;

use isthmus_document::intern::Interner;
use isthmus_model::endpoint::Endpoint;
use isthmus_registry::change::Item;

const HEAD: &[u8] = b"isthmus registry copy 2\n";
/// The longest line in bytes: a service with some millions of endpoints.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// The reason why a copy cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyFault {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the file is not a registry copy written by this version of isthmus")]
    Head,
    #[error("the file is damaged: {0}")]
    Damaged(&'static str),
}

/// Writes items in the format of a copy.
pub(super) fn write(items: impl Iterator<Item = Item>, mut to: impl Write) -> io::Result<()> {
    let (mut line, mut hasher) = (Vec::new(), XxHash3_64::new());
    to.write_all(HEAD)?;
    for item in items {
        line.clear();
        serde_json::to_writer(&mut line, &item)?;
        line.push(b'\n');
        hasher.write(&line);
        to.write_all(&line)?;
    }
    to.write_all(&end(&hasher))?;
    to.flush()
}

/// Reads items that [`write()`] has written, all or none.
pub(super) fn read(mut from: impl BufRead) -> Result<Vec<Item>, CopyFault> {
    let mut head = [0; HEAD.len()];
    from.read_exact(&mut head).map_err(|_| CopyFault::Head)?;
    if head != HEAD {
        return Err(CopyFault::Head);
    }
    let (mut items, mut shared) = (Vec::new(), Interner::default());
    let (mut line, mut hasher) = (Vec::new(), XxHash3_64::new());
    loop {
        line.clear();
        from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line == end(&hasher) {
            break;
        }
        if line.last() != Some(&b'\n') {
            return Err(CopyFault::Damaged("the file is truncated, or a line is too long"));
        }
        let item = serde_json::from_slice(&line);
        let mut item =
            item.map_err(|_| CopyFault::Damaged("a line is not an item, or its hash is another"))?;
        share(&mut item, &mut shared);
        items.push(item);
        hasher.write(&line);
    }
    if from.read(&mut [0])? > 0 {
        return Err(CopyFault::Damaged("the file has bytes after its end"));
    }
    Ok(items)
}

/// Returns the last line of a copy.
fn end(hasher: &XxHash3_64) -> Vec<u8> {
    format!("end {:016x}\n", hasher.finish()).into_bytes()
}

/// Replaces values of an item that has just been read by equal values of items before it.
fn share(item: &mut Item, shared: &mut Interner) {
    match item {
        Item::Service(service) => {
            let Some(service) = Arc::get_mut(service) else { return };
            shared.share_text(&mut service.key.namespace);
            service.ports.iter_mut().for_each(|port| shared.share_text(&mut port.name));
            share_endpoints(&mut service.endpoints, shared);
        }
        Item::Endpoints(set) => {
            shared.share_text(&mut set.key.service.namespace);
            share_endpoints(&mut set.endpoints, shared);
        }
        Item::Drain(_) | Item::GatewayPlaces(_) | Item::GatewayRoute(_) => {}
        Item::Mark(mark) => shared.share_text(&mut mark.key.service.namespace),
        Item::Workload(workload) => {
            let Some(workload) = Arc::get_mut(workload) else { return };
            shared.share_text(&mut workload.namespace);
            shared.share_text(&mut workload.node);
            shared.share_locality(&mut workload.locality);
            workload.policies.iter_mut().for_each(|name| shared.share_text(name));
            shared.share_names(&mut workload.names);
        }
        Item::Gateway(_) | Item::Cluster(_) => {}
    }
}

fn share_endpoints(endpoints: &mut Arc<[Endpoint]>, shared: &mut Interner) {
    for endpoint in Arc::get_mut(endpoints).unwrap_or_default() {
        shared.share_locality(&mut endpoint.locality);
        shared.share_template(&mut endpoint.template);
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use isthmus_document::services::read_registry;
    use isthmus_model::address::Host;
    use isthmus_model::ambient::{Workload, WorkloadKind, WorkloadNames};
    use isthmus_model::endpoint::{Encapsulation, Health, Labels, Weight};
    use isthmus_model::place::{ClusterId, Locality, Network};
    use isthmus_registry::change::{
        EndpointSet, EndpointSetKey, Export, ExportedPort, GatewayKey, Mark, MarkKey, MarkKind,
        RegistryGateway,
    };
    use isthmus_registry::gateway_api::{
        Claim, GatewayListener, GatewayPlaces, GatewayRoute, ListenerKey, Place, PlaceProtocol,
    };
    use isthmus_registry::shard::Shard;
    use isthmus_settings::backend::{Backend, BackendPort};
    use isthmus_settings::scope::RegistryScope;

    fn items() -> Vec<Item> {
        let text = "services:\n\
            - {hostname: a.mesh, namespace: n, addresses: [240.0.0.1, 'fd00::1'], ports: [{name: p, port: 80, targetPort: 8080, \
              protocol: HTTP}], subsets: {v1: {version: v1}}, waypoint: {address: 10.0.0.9, identity: 'spiffe://td/ns/n/sa/w'}, \
              endpoints: [{address: 10.0.0.1, ports: {p: 81}, labels: {version: v1}, locality: r/z, weight: 3, health: draining, \
              tls: none, tunnel: hbone, identity: 'spiffe://td/ns/n/sa/a', network: ''}, {address: db.test}]}\n\
            - {hostname: b.mesh, namespace: n, ports: [{name: p, port: 443, protocol: TLS}]}\n";
        let (cluster, network) = (ClusterId::new("east"), Network::new("net"));
        let text = text.replace("network: ''", "network: net");
        let listing = read_registry("x".as_ref(), &text, &cluster, &network).expect("good");
        let shard = Shard::of(listing, &RegistryScope::default());
        let key = shard.services_of("b.mesh")[0].key.clone();
        let mut items: Vec<Item> = shard.items().collect();
        items.sort_by_key(Item::key);
        let endpoint = Endpoint {
            host: Host::Ips([IpAddr::from([10, 0, 0, 2]), "fd00::2".parse().expect("an address")].into()),
            // A node of Kubernetes may have a zone and no region.
            locality: Locality::parse("/z").expect("two parts"),
            weight: Weight::ONE,
            health: Health::Healthy,
            template: Arc::default(),
        };
        let set = EndpointSetKey { service: key.clone(), name: "slice-1".into() };
        items.push(Item::Endpoints(EndpointSet { key: set, endpoints: [endpoint].into() }));
        let gateway = isthmus_snapshot::testing::gateway("192.0.2.1", 2);
        let gateway_key = GatewayKey { network: Network::new("west"), name: "gw".into() };
        items.push(Item::Gateway(RegistryGateway { key: gateway_key, gateway }));
        let labels = Labels::from_iter([("a".into(), "b".into())]);
        items.push(Item::Mark(Mark {
            key: MarkKey { service: key, object: "ServiceExport n/b".into() },
            kind: MarkKind::ServiceExport,
            labels,
            export: Some(Arc::new(Export {
                created: "2026-01-01T00:00:00Z".into(),
                is_headless: true,
                session_affinity: "ClientIP".into(),
                session_seconds: 10_800,
                labels: Labels::from_iter([("c".into(), "d".into())]),
                annotations: Labels::default(),
                traffic_distribution: "PreferClose".into(),
                ip_families: "IPv4, IPv6".into(),
                ports: [ExportedPort {
                    name: "dns".into(),
                    port: 53,
                    protocol: "UDP".into(),
                    app_protocol: "".into(),
                }]
                .into(),
            })),
        }));
        items.push(Item::Workload(Arc::new(Workload {
            uid: "c//Pod/n/w".into(),
            name: "w".into(),
            namespace: "n".into(),
            addresses: vec![[10, 0, 0, 3].into()],
            node: "node".into(),
            network: None,
            locality: Locality::default(),
            identity: None,
            encapsulation: Encapsulation::Hbone,
            has_native_tunnel: false,
            is_on_host_network: false,
            policies: vec!["n/p".into()],
            waypoint: None,
            names: Arc::new(WorkloadNames {
                owner: "o".into(),
                kind: WorkloadKind::Job,
                canonical: "c".into(),
                revision: "v1".into(),
            }),
        })));
        let place = |address: Option<IpAddr>| Place { port: 443, address };
        let places =
            vec![(place(None), PlaceProtocol::Tls), (place(Some([127, 0, 0, 1].into())), PlaceProtocol::Tcp)];
        let name = isthmus_snapshot::testing::pattern("*.b.test");
        let key = ListenerKey { owner: "n".into(), name: isthmus_snapshot::testing::pattern("*.test") };
        let created = "2026-01-01T00:00:00Z".into();
        let listeners = vec![GatewayListener { place: place(None), key: key.clone(), created }];
        let gateway = GatewayPlaces { object: "Gateway n/g".into(), generation: 3, places, listeners };
        items.push(Item::GatewayPlaces(gateway.into()));
        let hostname = isthmus_snapshot::testing::host_name("b.mesh");
        items.push(Item::GatewayRoute(Arc::new(GatewayRoute {
            object: "TLSRoute n/r".into(),
            created: "2026-01-01T00:00:00Z".into(),
            claims: vec![
                Claim { place: place(None), listener: key, name: Some(name) },
                Claim { place: place(None), listener: ListenerKey::default(), name: None },
            ],
            backends: [
                Backend { weight: 2, to: Ok(BackendPort { hostname, port: 443 }) },
                Backend { weight: 1, to: Err("Service n/no does not exist".into()) },
            ]
            .into(),
        })));
        items
    }

    fn written() -> Vec<u8> {
        let mut bytes = Vec::new();
        write(items().into_iter(), &mut bytes).expect("memory");
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read(&*written()).expect("whole"), items());
        let mut none = Vec::new();
        write(std::iter::empty(), &mut none).expect("memory");
        assert_eq!(read(&*none).expect("whole"), []);
    }

    #[test]
    fn no_damaged_copy_is_taken() {
        let good = written();
        for end in 0..good.len() {
            assert!(read(&good[..end]).is_err(), "cut after {end} bytes");
        }
        for at in 0..good.len() {
            for bit in [0x01, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= bit;
                assert!(read(&*bad).is_err(), "byte {at} with bit {bit:#x} turned");
            }
        }
        assert!(read(&*[good.as_slice(), b"x"].concat()).is_err());
        let endless = [HEAD, &[0xff; 16]].concat();
        assert!(matches!(read(&*endless), Err(CopyFault::Damaged(_))));
        for other in ["- hostname: a.mesh\n", "isthmus registry copy 1\n", ""] {
            assert!(matches!(read(other.as_bytes()), Err(CopyFault::Head)), "{other:?}");
        }
    }

    /// Returns a copy in which the text `from` is replaced, with the right hash.
    fn forged(from: &str, to: &str) -> Vec<u8> {
        let text = String::from_utf8(written()).expect("text");
        let items = text.strip_prefix("isthmus registry copy 2\n").and_then(|rest| rest.rsplit_once("end "));
        let items = items.expect("a head and an end").0.replacen(from, to, 1);
        let mut hasher = XxHash3_64::new();
        hasher.write(items.as_bytes());
        [HEAD, items.as_bytes(), &end(&hasher)].concat()
    }

    #[test]
    fn values_are_checked_like_those_of_any_source() {
        for (good, bad) in [
            ("\"hostname\":\"a.mesh\"", "\"hostname\":\"..\""),
            ("\"port\":80", "\"port\":0"),
            ("\"port\":80", "\"port\":65536"),
            ("\"r/z\",3,", "\"r/z\",0,"),
            ("\"r/z\",3,", "\"r/z/s/t\",3,"),
            ("spiffe://td/ns/n/sa/a", "td/ns/n/sa/a"),
            ("\"Draining\"", "\"Sleeping\""),
            ("{\"Service\"", "{\"Forget\""),
        ] {
            assert!(read(&*forged(good, good)).is_ok());
            assert!(matches!(read(&*forged(good, bad)), Err(CopyFault::Damaged(_))), "{bad}");
        }
        let nested = "[".repeat(100_000);
        assert!(matches!(read(&*forged("{\"Service\"", &nested)), Err(CopyFault::Damaged(_))));
        let mapped = read(&*forged("\"10.0.0.1\"", "\"::ffff:10.0.0.1\"")).expect("an address");
        assert_eq!(mapped, items(), "each address has one spelling");
    }

    #[test]
    fn equal_values_are_in_memory_once() {
        let mut bytes = Vec::new();
        write(items().into_iter().chain(items()), &mut bytes).expect("memory");
        let read = read(&*bytes).expect("whole");
        let services: Vec<_> = read
            .iter()
            .filter_map(|item| match item {
                Item::Service(service) if !service.endpoints.is_empty() => Some(service),
                _ => None,
            })
            .collect();
        let [one, other] = services[..] else { panic!("{services:?}") };
        assert!(Arc::ptr_eq(&one.endpoints[0].template, &other.endpoints[0].template));
        assert!(Arc::ptr_eq(&one.key.namespace, &other.key.namespace));
        let names: Vec<_> = read
            .iter()
            .filter_map(|item| match item {
                Item::Workload(workload) => Some((&workload.names, &workload.node)),
                _ => None,
            })
            .collect();
        let [one, other] = names[..] else { panic!("{names:?}") };
        assert!(Arc::ptr_eq(one.0, other.0) && Arc::ptr_eq(one.1, other.1));
    }
}
