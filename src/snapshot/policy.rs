//! What the operator has written, checked and ready for use: listeners, routes, exports, tuning,
//! limits, timeouts. Made by `config`; replaced whole by a reload.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ipnet::IpNet;

use crate::model::address::{Bind, Host};
use crate::model::endpoint::Weight;
use crate::model::identity::{Identity, IdentityPattern, TrustDomain};
use crate::model::name::{HostName, NamePattern};
use crate::model::place::{ClusterId, Locality, Network};

/// Everything the config file says that the data path or the aggregator acts on.
#[derive(Clone, Debug)]
pub struct Policy {
    pub node: Node,
    pub mesh: Mesh,
    /// In the order of the file; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// In the order of the file; keys are unique.
    pub routes: Vec<Arc<Route>>,
    /// In the order of the file.
    pub exports: Vec<Arc<ExportRule>>,
    /// Tuning of the mesh's services; the most specific name wins whole.
    pub tuning: ServiceTuning,
    /// In the order of the file; names are unique.
    pub networks: Vec<NetworkPolicy>,
    pub limits: Limits,
    pub hbone: HboneLimits,
    pub timeouts: Timeouts,
}

impl Policy {
    /// Whether a listener takes HBONE, so that services are asked for by address too.
    pub fn takes_hbone(&self) -> bool {
        self.listeners.iter().any(|listener| listener.protocol != ListenerProtocol::Sni)
    }

    /// Whether two policies make the same of what registries say: they may differ in listeners, routes, limits.
    pub fn is_same_for_services(&self, other: &Self) -> bool {
        self.node == other.node
            && self.mesh == other.mesh
            && self.exports == other.exports
            && self.tuning == other.tuning
            && self.networks == other.networks
    }
}

/// This gateway's own workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    pub service_account: Arc<str>,
    pub cluster: ClusterId,
    pub network: Network,
    pub locality: Locality,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub cluster_domain: HostName,
    pub trust_domain: TrustDomain,
}

/// What the operator says of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    pub name: Network,
    pub access: Access,
    /// Where an address without a network of its own belongs; no block is of two networks.
    pub cidrs: Vec<IpNet>,
    pub gateways: Vec<Gateway>,
}

/// How endpoints of a network are reached from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Access {
    /// Through its gateways alone.
    #[default]
    Gateway,
    /// By address: it is routable from everywhere.
    Direct,
}

/// Where a network is entered from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// A name stands for all its addresses, each with an equal part of the weight.
    pub host: Host,
    /// Where it takes TLS by SNI. At least one of the two ports is there.
    pub sni_port: Option<u16>,
    /// Where it takes HBONE.
    pub hbone_port: Option<u16>,
    /// The cluster it belongs to; `""`: none in particular.
    pub cluster: ClusterId,
    pub locality: Locality,
    pub weight: Weight,
    pub identity: Option<Identity>,
}

/// One listener. Its socket is keyed by `bind`; all else can change without touching it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    pub name: Arc<str>,
    pub bind: Bind,
    pub protocol: ListenerProtocol,
    /// Any one must be offered by those who are routed by SNI; empty: no check.
    pub alpn: Vec<Box<[u8]>>,
    /// Source addresses let in; empty: all.
    pub from: Vec<IpNet>,
    pub hello: HelloLimits,
}

impl Listener {
    /// A listener of protocol SNI that lets everyone in.
    pub fn sni(name: Arc<str>, bind: Bind) -> Self {
        let (protocol, hello) = (ListenerProtocol::Sni, HelloLimits::default());
        Self { name, bind, protocol, alpn: Vec::new(), from: Vec::new(), hello }
    }
}

/// What a listener takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ListenerProtocol {
    /// TLS, routed by its server name and passed on as it is.
    #[default]
    Sni,
    /// HTTP/2 CONNECT over mutual TLS, ended here.
    Hbone,
    /// Either: a hello without server name that offers `h2` alone is HBONE.
    Auto,
}

impl ListenerProtocol {
    pub const ALL: [Self; 3] = [Self::Sni, Self::Hbone, Self::Auto];

    pub fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
            Self::Auto => "auto",
        }
    }
}

/// What HBONE connections and their streams may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HboneLimits {
    /// Streams of a connection at once.
    pub streams: u32,
    /// What a client may send on a stream ahead of what its endpoint has taken, in bytes.
    pub stream_window: u32,
    /// The same for all streams of a connection together.
    pub connection_window: u32,
    /// Largest frame taken, in bytes.
    pub frame_size: u32,
    /// Largest header list taken, in bytes (RFC 9113 §6.5.2).
    pub header_bytes: u32,
    /// What streams of a connection may hold together before one that stands still is reset, in bytes.
    pub held_per_connection: usize,
    /// The same for all connections of a worker.
    pub held_per_worker: usize,
    /// How long a stream may stand still while too much is held.
    pub stalled: Duration,
    /// From accept until TLS and HTTP/2 are agreed on.
    pub handshake_timeout: Duration,
    pub ping_interval: Duration,
    pub ping_timeout: Duration,
    /// How long a connection may be without a stream.
    pub idle: Duration,
    /// Per second and connection: streams given up before they were answered.
    pub resets: u32,
    /// Per second and connection: PING frames.
    pub pings: u32,
    /// Per second and connection: SETTINGS frames.
    pub settings: u32,
    /// Per second and connection: frames that carry nothing.
    pub empty_frames: u32,
}

impl Default for HboneLimits {
    fn default() -> Self {
        let (streams, stream_window) = (1_000, 4 << 20);
        Self {
            streams,
            stream_window,
            // As much for each stream, but no more than the protocol and memory stand.
            connection_window: 1 << 30,
            frame_size: 64 * 1024,
            header_bytes: 16 * 1024,
            held_per_connection: 64 << 20,
            held_per_worker: 256 << 20,
            stalled: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(20),
            idle: Duration::from_secs(3600),
            resets: 100,
            pings: 100,
            settings: 50,
            empty_frames: 1_000,
        }
    }
}

/// What a ClientHello may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloLimits {
    /// From accept to the whole hello.
    pub timeout: Duration,
    /// Of the stream up to the end of the hello, record headers included.
    pub bytes_max: usize,
    pub records_max: usize,
}

impl Default for HelloLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), bytes_max: 16 * 1024, records_max: 64 }
    }
}

/// A name of the operator's own.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    pub key: RouteName,
    /// Names of listeners; empty: all.
    pub listeners: Vec<Arc<str>>,
    pub to: RouteTarget,
}

/// The key of a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteName {
    /// `"-"`: clients that give no host name.
    NoSni,
    /// A name, `*.suffix`, or `"*"`.
    Name(NamePattern),
}

impl std::fmt::Display for RouteName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoSni => f.write_str("-"),
            Self::Name(pattern) => pattern.fmt(f),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum RouteTarget {
    Endpoints {
        endpoints: Vec<RouteEndpoint>,
        tuning: Arc<Tuning>,
    },
    /// An alias of a service port; it is tuned as the service is.
    Service {
        hostname: HostName,
        port: u16,
        subset: Arc<str>,
    },
}

/// One endpoint of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteEndpoint {
    pub host: Host,
    pub port: u16,
    pub weight: Weight,
    pub locality: Locality,
}

/// Whom an operator lets reach what. Without a rule nothing of the mesh can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRule {
    /// As shown: `exports[0]`.
    pub name: Arc<str>,
    pub services: Vec<NamePattern>,
    pub except: Vec<NamePattern>,
    /// Service ports; empty: all.
    pub ports: Vec<u16>,
    /// Whose endpoints the rule speaks of; empty: every cluster.
    pub clusters: Vec<ClusterId>,
    /// Names of listeners; empty: all.
    pub listeners: Vec<Arc<str>>,
    pub to: ExportScope,
}

/// Who may use what a rule offers; all the kinds given must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportScope {
    /// Empty: any source address.
    pub cidrs: Vec<IpNet>,
    /// Empty: any identity, or none.
    pub identities: Vec<IdentityPattern>,
}

/// How endpoints are chosen and dialled.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    pub policy: LoadBalancing,
    pub locality: LocalityMode,
    /// `None`: `off`.
    pub ejection: Option<Ejection>,
    /// Per attempt.
    pub connect_timeout: Duration,
    /// Whether all are tried when none is healthy.
    pub panic: bool,
}

impl Tuning {
    pub fn for_routes(timeouts: &Timeouts) -> Self {
        Self {
            policy: LoadBalancing::LeastRequest,
            locality: LocalityMode::Prefer,
            ejection: Some(Ejection::default()),
            connect_timeout: timeouts.connect,
            panic: true,
        }
    }

    pub fn for_services(timeouts: &Timeouts) -> Self {
        Self { locality: LocalityMode::Ignore, ..Self::for_routes(timeouts) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalancing {
    /// Weighted power of two choices on connections in flight.
    LeastRequest,
    RoundRobin,
    Random,
    /// By source address, so that one source keeps its endpoint.
    SourceHash,
}

impl LoadBalancing {
    pub const ALL: [Self; 4] = [Self::LeastRequest, Self::RoundRobin, Self::Random, Self::SourceHash];

    pub fn text(self) -> &'static str {
        match self {
            Self::LeastRequest => "leastRequest",
            Self::RoundRobin => "roundRobin",
            Self::Random => "random",
            Self::SourceHash => "sourceHash",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalityMode {
    /// The nearest level first.
    Prefer,
    /// All endpoints alike.
    Ignore,
}

/// When an endpoint that fails is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ejection {
    /// Failures in a row.
    pub failures: u32,
    pub time: Duration,
    /// Of a service's endpoints, in percent (0 to 100).
    pub share_max_percent: u8,
}

impl Default for Ejection {
    fn default() -> Self {
        Self { failures: 5, time: Duration::from_secs(30), share_max_percent: 50 }
    }
}

/// Tuning of the mesh's services by name.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceTuning {
    pub default: Arc<Tuning>,
    pub policies: Vec<(NamePattern, Arc<Tuning>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once; effective: this, or what the descriptors allow, whichever is less.
    pub connections: usize,
    /// Hellos not yet whole at once; `None`: 10,000 or a quarter of the descriptors.
    pub pending_hellos: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 100_000, pending_hellos: None }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Per attempt.
    pub connect: Duration,
    /// No attempt begins later than this after the first.
    pub connect_total: Duration,
    /// Without a byte in either direction; `None`: never.
    pub idle: Option<Duration>,
    /// One direction ended, no byte in the other; `None`: never.
    pub half_close: Option<Duration>,
    /// Bytes wait for a peer that answers and reads nothing; `None`: never.
    pub stalled: Option<Duration>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(3),
            connect_total: Duration::from_secs(10),
            idle: None,
            half_close: Some(Duration::from_secs(300)),
            stalled: Some(Duration::from_secs(900)),
        }
    }
}

/// What a registry may speak of; the rest is dropped and shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryScope {
    /// Empty: any service.
    pub services: Vec<NamePattern>,
    /// Networks its endpoints may say; `None`: its own.
    pub networks: Option<Vec<Network>>,
    pub addresses: AddressScope,
}

/// The addresses that the endpoints of a registry may have, also those that their names resolve to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressScope {
    /// Any that can be connected to: the registry is believed as the config file is.
    #[default]
    Any,
    /// All but loopback and link-local addresses, behind which are this host and its surroundings.
    Public,
    /// Those in these blocks. Loopback and link-local addresses only by a block that lies inside of theirs: who writes
    /// `0.0.0.0/0` has not thought of them.
    Blocks(Arc<[IpNet]>),
}

impl AddressScope {
    pub fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        if address.is_unspecified() || address.is_multicast() || address == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return false;
        }
        let special = SPECIAL_BLOCKS.iter().find(|special| special.contains(&address));
        match (self, special) {
            (Self::Any, _) => true,
            (Self::Public, special) => special.is_none(),
            (Self::Blocks(blocks), None) => blocks.iter().any(|block| block.contains(&address)),
            (Self::Blocks(blocks), Some(special)) => {
                blocks.iter().any(|block| special.contains(block) && block.contains(&address))
            }
        }
    }
}

/// Loopback and link-local addresses (RFC 1122 §3.2.1.3, RFC 3927, RFC 4291 §2.5).
static SPECIAL_BLOCKS: LazyLock<[IpNet; 4]> = LazyLock::new(|| {
    let net = |address: IpAddr, length| IpNet::new_assert(address, length);
    [
        net(IpAddr::from([127, 0, 0, 0]), 8),
        net(IpAddr::from([169, 254, 0, 0]), 16),
        net(Ipv6Addr::LOCALHOST.into(), 128),
        net(IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 0]), 10),
    ]
});

/// Whether an address is in one of the blocks; no blocks: it is.
pub fn admits(blocks: &[IpNet], address: IpAddr) -> bool {
    blocks.is_empty() || blocks.iter().any(|block| block.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_addresses_are_allowed_only_by_blocks_of_their_own() {
        let allows = |scope: &AddressScope, ip: &str| scope.allows(ip.parse().expect("an address"));
        let blocks = |blocks: &[&str]| {
            AddressScope::Blocks(blocks.iter().map(|block| block.parse().expect("a block")).collect())
        };
        let special = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1"];
        let everything = blocks(&["0.0.0.0/0", "::/0"]);
        for ip in special {
            assert!(allows(&AddressScope::Any, ip), "{ip}");
            assert!(!allows(&AddressScope::Public, ip) && !allows(&everything, ip), "{ip}");
        }
        let own = blocks(&["127.0.0.0/8", "::1/128", "169.254.169.254/32", "fe80::/64"]);
        assert!(special.iter().all(|ip| allows(&own, ip)));
        assert!(!allows(&own, "169.254.1.1") && !allows(&own, "10.0.0.1"));
        assert!(allows(&everything, "10.0.0.1") && allows(&AddressScope::Public, "2001:db8::1"));
        for never in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:0.0.0.0"] {
            for scope in [&AddressScope::Any, &AddressScope::Public, &everything, &own] {
                assert!(!allows(scope, never), "{never} by {scope:?}");
            }
        }
    }
}
