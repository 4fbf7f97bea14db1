//! The format of a copy: a line that identifies it, the items of a shard, and a hash of all
//! (`proto/isthmus/registry/v1`).

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::io::{self, BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use prost::Message;
use twox_hash::XxHash3_64;

use isthmus_document::intern::Interner;
use isthmus_model::address::{Host, canonical_ip};
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, Health, Labels, Weight,
};
use isthmus_model::identity::Identity;
use isthmus_model::import::Import;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{PortProtocol, Service, ServiceKey, ServicePort, Waypoint};
use isthmus_proto::isthmus::registry::v1 as proto;
use isthmus_snapshot::change::{
    EndpointSet, EndpointSetKey, Export, GatewayKey, Item, Mark, MarkKey, MarkKind, RegistryGateway,
};
use isthmus_snapshot::policy::Gateway;

const HEAD: &[u8] = b"isthmus registry copy 1\n";
/// The largest record in bytes: a service with some millions of endpoints.
const RECORD_BYTES_MAX: u64 = 256 << 20;

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
pub(super) fn write(items: impl Iterator<Item = Item>, to: impl Write) -> io::Result<()> {
    let mut to = Hashed { inner: to, hasher: XxHash3_64::new() };
    to.write_all(HEAD)?;
    let (mut buffer, mut count) = (Vec::new(), 0);
    for item in items {
        count += 1;
        buffer.clear();
        let record = proto::Record { kind: Some(record(&item)) };
        record.encode_length_delimited(&mut buffer).map_err(io::Error::other)?;
        to.write_all(&buffer)?;
    }
    let end = proto::End { items: count, hash: to.hasher.finish() };
    let end = proto::Record { kind: Some(proto::record::Kind::End(end)) };
    to.write_all(&end.encode_length_delimited_to_vec())?;
    to.inner.flush()
}

/// Reads items that [`write()`] has written, all or none.
pub(super) fn read(from: impl BufRead) -> Result<Vec<Item>, CopyFault> {
    let mut from = Hashed { inner: from, hasher: XxHash3_64::new() };
    let mut head = [0; HEAD.len()];
    from.read_exact(&mut head).map_err(|_| CopyFault::Head)?;
    if head != HEAD {
        return Err(CopyFault::Head);
    }
    let (mut items, mut decoder, mut buffer) = (Vec::new(), Decoder::default(), Vec::new());
    loop {
        let hash = from.hasher.finish();
        let length = length(&mut from)?;
        buffer.clear();
        let taken = (&mut from).take(length).read_to_end(&mut buffer)?;
        if taken as u64 != length {
            return Err(CopyFault::Damaged("the file is truncated"));
        }
        let record =
            proto::Record::decode(&*buffer).map_err(|_| CopyFault::Damaged("a record cannot be read"))?;
        match record.kind {
            Some(proto::record::Kind::End(end)) if end.hash == hash && end.items == items.len() as u64 => {
                break;
            }
            Some(proto::record::Kind::End(_)) => {
                return Err(CopyFault::Damaged("the checksum does not match"));
            }
            Some(kind) => items.push(decoder.item(kind).ok_or(CopyFault::Damaged("a record is invalid"))?),
            None => return Err(CopyFault::Damaged("a record has an unknown kind")),
        }
    }
    if from.read(&mut [0])? > 0 {
        return Err(CopyFault::Damaged("the file has bytes after its end record"));
    }
    Ok(items)
}

/// Reads a varint of at most ten bytes.
fn length(from: &mut impl Read) -> Result<u64, CopyFault> {
    let mut bytes = Vec::new();
    loop {
        let mut byte = [0];
        if from.read(&mut byte)? == 0 {
            return Err(CopyFault::Damaged("the file has no end record"));
        }
        bytes.push(byte[0]);
        if byte[0] & 0x80 == 0 {
            break;
        }
        if bytes.len() == 10 {
            return Err(CopyFault::Damaged("the length of a record cannot be read"));
        }
    }
    let length = prost::encoding::decode_varint(&mut &*bytes);
    let length = length.map_err(|_| CopyFault::Damaged("the length of a record cannot be read"))?;
    if length > RECORD_BYTES_MAX {
        return Err(CopyFault::Damaged("a record is too long"));
    }
    Ok(length)
}

/// Hashes the bytes that are read or written through it.
struct Hashed<T> {
    inner: T,
    hasher: XxHash3_64,
}

impl<T: Write> Write for Hashed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.write(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Hashed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.hasher.write(&bytes[..read]);
        Ok(read)
    }
}

fn record(item: &Item) -> proto::record::Kind {
    match item {
        Item::Service(one) => proto::record::Kind::Service(service(one)),
        Item::Endpoints(set) => proto::record::Kind::Endpoints(proto::EndpointSet {
            service: Some(key(&set.key.service)),
            name: set.key.name.to_string(),
            endpoints: Some(endpoints(&set.endpoints)),
        }),
        Item::Gateway(found) => proto::record::Kind::Gateway(gateway(found)),
        Item::Mark(mark) => proto::record::Kind::Mark(proto::Mark {
            service: Some(key(&mark.key.service)),
            object: mark.key.object.to_string(),
            labels: texts(&mark.labels),
            kind: mark.kind.text().to_owned(),
            export: mark.export.as_deref().map(|export| proto::Export {
                created: export.created.to_string(),
                is_headless: export.is_headless,
                session_affinity: export.session_affinity.to_string(),
                session_seconds: export.session_seconds,
            }),
        }),
    }
}

fn key(key: &ServiceKey) -> proto::ServiceKey {
    proto::ServiceKey { namespace: key.namespace.to_string(), hostname: key.hostname.to_string() }
}

fn service(service: &Service) -> proto::Service {
    let port = |port: &ServicePort| proto::ServicePort {
        name: port.name.to_string(),
        port: port.port.into(),
        target_port: port.target_port.into(),
        protocol: port.protocol.text().to_owned(),
    };
    let subset =
        |(name, labels): (&Arc<str>, &Labels)| (name.to_string(), proto::Labels { labels: texts(labels) });
    proto::Service {
        key: Some(key(&service.key)),
        addresses: service.addresses.iter().map(|ip| octets(*ip)).collect(),
        ports: service.ports.iter().map(port).collect(),
        subsets: service.subsets.iter().map(subset).collect(),
        waypoint: service.waypoint.as_ref().map(|waypoint| proto::Waypoint {
            address: octets(waypoint.address.ip()),
            port: waypoint.address.port().into(),
            identity: identity_text(waypoint.identity.as_ref()),
        }),
        endpoints: Some(endpoints(&service.endpoints)),
        exported_as: service.exported_as.as_ref().map(ToString::to_string).unwrap_or_default(),
        import: service.import.as_deref().map(|import| proto::Import {
            peer: import.peer.to_string(),
            exported_name: import.exported_name.to_string(),
            exported_at: import.exported_at,
        }),
    }
}

fn gateway(found: &RegistryGateway) -> proto::Gateway {
    let RegistryGateway { key, gateway } = found;
    proto::Gateway {
        network: key.network.to_string(),
        name: key.name.to_string(),
        host: gateway.host.to_string(),
        sni_port: gateway.sni_port.unwrap_or(0).into(),
        hbone_port: gateway.hbone_port.unwrap_or(0).into(),
        cluster: gateway.cluster.to_string(),
        locality: gateway.locality.to_string(),
        weight: gateway.weight.value(),
        identity: identity_text(gateway.identity.as_ref()),
        instances: gateway.instances.iter().map(ToString::to_string).collect(),
    }
}

fn endpoints(all: &[Endpoint]) -> proto::Endpoints {
    let mut list = proto::Endpoints::default();
    let mut workloads: BTreeMap<*const EndpointTemplate, u32> = BTreeMap::new();
    let mut localities: BTreeMap<&str, u32> = BTreeMap::new();
    for endpoint in all {
        let next = u32::try_from(list.workloads.len()).unwrap_or(u32::MAX);
        let workload_at = *workloads.entry(Arc::as_ptr(&endpoint.template)).or_insert_with(|| {
            list.workloads.push(workload(&endpoint.template));
            next
        });
        let next = u32::try_from(list.localities.len()).unwrap_or(u32::MAX);
        let locality_at = *localities.entry(endpoint.locality.as_str()).or_insert_with(|| {
            list.localities.push(endpoint.locality.to_string());
            next
        });
        let health = if endpoint.health == Health::Healthy { "" } else { endpoint.health.text() };
        list.endpoints.push(proto::Endpoint {
            host: Some(match &endpoint.host {
                Host::Ip(ip) => proto::endpoint::Host::Ip(octets(*ip)),
                Host::Ips(ips) => {
                    let ips = ips.iter().map(|ip| octets(*ip)).collect();
                    proto::endpoint::Host::Ips(proto::Addresses { ips })
                }
                Host::Name(name) => proto::endpoint::Host::Name(name.to_string()),
            }),
            workload: workload_at,
            locality: locality_at,
            weight: endpoint.weight.value(),
            health: health.to_owned(),
        });
    }
    list
}

fn workload(template: &EndpointTemplate) -> proto::Workload {
    proto::Workload {
        ports: template.ports.iter().map(|(name, port)| (name.to_string(), u32::from(*port))).collect(),
        labels: texts(&template.labels),
        network: template.network.as_ref().map(ToString::to_string),
        tls: template.tls.map(|mode| mode.text().to_owned()).unwrap_or_default(),
        tunnel: template.encapsulation.text().to_owned(),
        identity: identity_text(template.identity.as_ref()),
    }
}

fn texts(labels: &Labels) -> BTreeMap<String, String> {
    labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

fn identity_text(identity: Option<&Identity>) -> String {
    identity.map(|identity| identity.as_str().to_owned()).unwrap_or_default()
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Decodes records into items, which share equal values. Each function returns `None` for a record that is not a valid item.
#[derive(Default)]
struct Decoder {
    interner: Interner,
}

impl Decoder {
    fn item(&mut self, kind: proto::record::Kind) -> Option<Item> {
        Some(match kind {
            proto::record::Kind::Service(service) => Item::Service(Arc::new(self.service(service)?)),
            proto::record::Kind::Endpoints(set) => {
                let key = EndpointSetKey { service: self.key(set.service?)?, name: set.name.into() };
                Item::Endpoints(EndpointSet {
                    key,
                    endpoints: self.endpoints(set.endpoints.unwrap_or_default())?,
                })
            }
            proto::record::Kind::Gateway(gateway) => Item::Gateway(self.gateway(gateway)?),
            proto::record::Kind::Mark(mark) => {
                let key = MarkKey { service: self.key(mark.service?)?, object: mark.object.into() };
                let kind = choice(&mark.kind, &MarkKind::ALL, MarkKind::text)?;
                let export = mark.export.map(|export| {
                    Arc::new(Export {
                        created: export.created.into(),
                        is_headless: export.is_headless,
                        session_affinity: export.session_affinity.into(),
                        session_seconds: export.session_seconds,
                    })
                });
                Item::Mark(Mark { key, kind, labels: self.labels(mark.labels), export })
            }
            proto::record::Kind::End(_) => return None,
        })
    }

    fn key(&mut self, key: proto::ServiceKey) -> Option<ServiceKey> {
        let hostname = HostName::parse(&key.hostname).ok()?;
        Some(ServiceKey { namespace: self.interner.text(&key.namespace), hostname })
    }

    fn service(&mut self, service: proto::Service) -> Option<Service> {
        let port = |port: proto::ServicePort| {
            Some(ServicePort {
                name: self.interner.text(&port.name),
                port: number(port.port)?,
                target_port: number(port.target_port)?,
                protocol: choice(&port.protocol, &PortProtocol::ALL, PortProtocol::text)?,
            })
        };
        let mut ports: Vec<ServicePort> = service.ports.into_iter().map(port).collect::<Option<_>>()?;
        ports.shrink_to_fit();
        let subsets = service.subsets.into_iter();
        let subsets =
            subsets.map(|(name, labels)| (self.interner.text(&name), self.labels(labels.labels))).collect();
        let waypoint = match service.waypoint {
            Some(waypoint) => Some(Waypoint {
                address: SocketAddr::new(ip(&waypoint.address)?, number(waypoint.port)?),
                identity: self.identity(&waypoint.identity)?,
            }),
            None => None,
        };
        Some(Service {
            key: self.key(service.key?)?,
            addresses: service.addresses.iter().map(|bytes| ip(bytes)).collect::<Option<_>>()?,
            ports,
            subsets,
            waypoint: waypoint.map(Arc::new),
            endpoints: self.endpoints(service.endpoints.unwrap_or_default())?,
            exported_as: match service.exported_as.is_empty() {
                true => None,
                false => Some(HostName::parse(&service.exported_as).ok()?),
            },
            import: match service.import {
                Some(import) => Some(Arc::new(Import {
                    peer: self.interner.text(&import.peer),
                    exported_name: HostName::parse(&import.exported_name).ok()?,
                    exported_at: import.exported_at,
                })),
                None => None,
            },
            // A copy does not record how many endpoints were withheld.
            withheld: Box::default(),
        })
    }

    fn endpoints(&mut self, list: proto::Endpoints) -> Option<Arc<[Endpoint]>> {
        let templates = list.workloads.into_iter().map(|workload| self.template(workload));
        let templates: Vec<Arc<EndpointTemplate>> = templates.collect::<Option<_>>()?;
        let localities: Vec<Locality> =
            list.localities.iter().map(|text| self.locality(text)).collect::<Option<_>>()?;
        let endpoint = |endpoint: proto::Endpoint| {
            let health = &endpoint.health;
            Some(Endpoint {
                host: match endpoint.host? {
                    proto::endpoint::Host::Ip(bytes) => Host::Ip(ip(&bytes)?),
                    proto::endpoint::Host::Ips(all) => {
                        Host::Ips(all.ips.iter().map(|bytes| ip(bytes)).collect::<Option<_>>()?)
                    }
                    proto::endpoint::Host::Name(name) => Host::Name(HostName::parse(&name).ok()?),
                },
                locality: localities.get(usize::try_from(endpoint.locality).ok()?)?.clone(),
                weight: Weight::new(endpoint.weight)?,
                health: match health.is_empty() {
                    true => Health::Healthy,
                    false => choice(health, &Health::ALL, Health::text)?,
                },
                template: templates.get(usize::try_from(endpoint.workload).ok()?)?.clone(),
            })
        };
        list.endpoints.into_iter().map(endpoint).collect()
    }

    fn template(&mut self, workload: proto::Workload) -> Option<Arc<EndpointTemplate>> {
        // The port 0 says that the instances do not listen for this service port.
        let port = |(name, port): (String, u32)| Some((self.interner.text(&name), u16::try_from(port).ok()?));
        let template = EndpointTemplate {
            ports: workload.ports.into_iter().map(port).collect::<Option<_>>()?,
            labels: self.labels(workload.labels),
            network: workload.network.map(|network| self.interner.network(&network)),
            tls: match workload.tls.is_empty() {
                true => None,
                false => Some(choice(&workload.tls, &DeclaredTls::ALL, DeclaredTls::text)?),
            },
            encapsulation: choice(&workload.tunnel, &Encapsulation::ALL, Encapsulation::text)?,
            identity: self.identity(&workload.identity)?,
        };
        Some(self.interner.template(template))
    }

    fn gateway(&mut self, gateway: proto::Gateway) -> Option<RegistryGateway> {
        let key = GatewayKey { network: Network::new(&gateway.network), name: gateway.name.into() };
        let port = |port: u32| if port == 0 { Some(None) } else { number(port).map(Some) };
        let gateway = Gateway {
            host: Host::parse(&gateway.host).ok()?,
            sni_port: port(gateway.sni_port)?,
            hbone_port: port(gateway.hbone_port)?,
            cluster: ClusterId::new(&gateway.cluster),
            locality: self.locality(&gateway.locality)?,
            weight: Weight::new(gateway.weight)?,
            identity: self.identity(&gateway.identity)?,
            instances: gateway.instances.iter().map(|text| text.parse().ok()).collect::<Option<_>>()?,
        };
        Some(RegistryGateway { key, gateway })
    }

    fn labels(&mut self, labels: BTreeMap<String, String>) -> Labels {
        labels.iter().map(|(key, value)| (self.interner.text(key), self.interner.text(value))).collect()
    }

    fn locality(&mut self, text: &str) -> Option<Locality> {
        if text.is_empty() { Some(Locality::default()) } else { self.interner.written_locality(text) }
    }

    /// Parses an identity. The inner `None` means no identity; the outer `None` means that the text is not an identity.
    fn identity(&mut self, text: &str) -> Option<Option<Identity>> {
        if text.is_empty() { Some(None) } else { self.interner.identity(text).ok().map(Some) }
    }
}

fn number(value: u32) -> Option<u16> {
    u16::try_from(value).ok().filter(|number| *number > 0)
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let ip = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    Some(canonical_ip(ip))
}

fn choice<T: Copy>(text: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Option<T> {
    all.iter().copied().find(|one| name(*one) == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_document::services::read_registry;
    use isthmus_snapshot::policy::RegistryScope;
    use isthmus_snapshot::shard::Shard;

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
            })),
        }));
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
        assert!(matches!(read(&b"- hostname: a.mesh\n"[..]), Err(CopyFault::Head)));
    }
}
