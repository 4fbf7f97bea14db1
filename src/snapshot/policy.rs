//! The checked contents of the config file, ready for use: listeners, routes, exports, tuning, limits,
//! timeouts. Made by `config`; a reload replaces it whole.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ipnet::IpNet;

use super::peer::Peer;
use crate::model::address::{Bind, Host};
use crate::model::endpoint::{Encapsulation, Labels, ProxyVersion, Weight};
use crate::model::identity::{Identity, IdentityPattern, TrustDomain};
use crate::model::limits::SourceLimits;
use crate::model::name::{HostName, NamePattern};
use crate::model::place::{ClusterId, Locality, Network};

/// All parts of the config file that the data path or the aggregator acts on.
#[derive(Clone, Debug)]
pub struct Policy {
    /// This gateway's own place in the mesh.
    pub node: Node,
    /// Settings that hold for the whole mesh.
    pub mesh: Mesh,
    /// The listeners, in the order of the file; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// The routes, in the order of the file; keys are unique.
    pub routes: Vec<Arc<Route>>,
    /// The export rules, in the order of the file.
    pub exports: Vec<Arc<ExportRule>>,
    /// Tuning of the mesh's services; the most specific name pattern counts whole.
    pub tuning: ServiceTuning,
    /// The networks, in the order of the file; names are unique.
    pub networks: Vec<NetworkPolicy>,
    /// Other organisations, in the order of the file; names are unique.
    pub peers: Vec<Arc<Peer>>,
    /// Limits of connections.
    pub limits: Limits,
    /// Limits of HBONE connections and their streams.
    pub hbone: HboneLimits,
    /// Timeouts of dialling and relaying.
    pub timeouts: Timeouts,
}

impl Policy {
    /// Returns true if a listener takes HBONE, so that callers can ask for services by address.
    pub fn takes_hbone(&self) -> bool {
        self.listeners.iter().any(|listener| listener.protocol != ListenerProtocol::Sni)
    }

    /// Returns true if endpoints of a route or a service are checked.
    pub fn has_checks(&self) -> bool {
        let services = &self.tuning;
        services.default.health.is_some()
            || services.policies.iter().any(|(_, tuning)| tuning.health.is_some())
            || self.routes.iter().any(|route| route.is_checked())
    }

    /// Returns true if two policies build the same services from the same registries; they may differ in
    /// listeners, routes and limits.
    pub fn is_same_for_services(&self, other: &Self) -> bool {
        self.node == other.node
            && self.mesh == other.mesh
            && self.exports == other.exports
            && self.tuning == other.tuning
            && self.networks == other.networks
            && self.peers == other.peers
    }
}

/// This gateway's own workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The name of the gateway, for logs and metrics.
    pub name: Arc<str>,
    /// The namespace of the gateway's identity.
    pub namespace: Arc<str>,
    /// The service account of the gateway's identity.
    pub service_account: Arc<str>,
    /// The cluster of the gateway; may be empty.
    pub cluster: ClusterId,
    /// The network of the gateway; its endpoints are reached directly.
    pub network: Network,
    /// The locality of the gateway, from which distances are counted.
    pub locality: Locality,
}

/// Settings that hold for the whole mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// The domain of the mesh's service names, such as `cluster.local`.
    pub cluster_domain: HostName,
    /// The trust domain of the mesh's identities.
    pub trust_domain: TrustDomain,
}

/// The settings of one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// The name of the network.
    pub name: Network,
    /// How other networks reach its endpoints.
    pub access: Access,
    /// The addresses of the network, for endpoints that give no network. No two networks share a block.
    pub cidrs: Vec<IpNet>,
    /// The gateways of the network.
    pub gateways: Vec<Gateway>,
}

/// How endpoints of a network are reached from other networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only through the network's gateways.
    #[default]
    Gateway,
    /// By address: the network is routable from all others.
    Direct,
}

impl Access {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Gateway, Self::Direct];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Direct => "direct",
        }
    }
}

/// A gateway through which other networks reach a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// The address. A name means all its addresses, each with an equal part of the weight.
    pub host: Host,
    /// The port that takes TLS routed by SNI. At least one of the two ports is set.
    pub sni_port: Option<u16>,
    /// The port that takes HBONE.
    pub hbone_port: Option<u16>,
    /// The cluster that the gateway serves; `""`: all clusters of the network.
    pub cluster: ClusterId,
    /// The locality of the gateway.
    pub locality: Locality,
    /// The share among the gateways of the network.
    pub weight: Weight,
    /// The SPIFFE ID that clients verify.
    pub identity: Option<Identity>,
    /// The addresses of the gateway's instances on their own network, as far as a registry knows them.
    pub instances: Arc<[SocketAddr]>,
}

/// One listener. Its socket is keyed by `bind`; all other fields can change without touching the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The name of the listener, unique.
    pub name: Arc<str>,
    /// The address of the socket.
    pub bind: Bind,
    /// The protocols that the listener takes.
    pub protocol: ListenerProtocol,
    /// Protocols of which a hello routed by SNI must offer one; empty: no check.
    pub alpn: Vec<Box<[u8]>>,
    /// Source addresses that are admitted; empty: all.
    pub from: Vec<IpNet>,
    /// Whether connections begin with a PROXY header.
    pub proxy_protocol: ProxyProtocol,
    /// Limits of the ClientHello.
    pub hello: HelloLimits,
}

impl Listener {
    /// Returns a listener of protocol SNI that admits every source.
    pub fn sni(name: Arc<str>, bind: Bind) -> Self {
        let (protocol, hello) = (ListenerProtocol::Sni, HelloLimits::default());
        let proxy_protocol = ProxyProtocol::Forbid;
        Self { name, bind, protocol, alpn: Vec::new(), from: Vec::new(), proxy_protocol, hello }
    }
}

/// Whether the connections of a listener begin with a PROXY header. A header that may be there or not could be forged by
/// everybody, so there is no third mode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyProtocol {
    /// There is no header; one is not TLS.
    #[default]
    Forbid,
    /// Each connection begins with a header, which announces the client's address.
    Require {
        /// The peers whose headers are believed; not empty.
        from: Vec<IpNet>,
    },
}

/// The mode of [`ProxyProtocol`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyMode {
    /// There is no header.
    #[default]
    Forbid,
    /// Each connection begins with a header.
    Require,
}

impl ProxyMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Forbid, Self::Require];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Forbid => "forbid",
            Self::Require => "require",
        }
    }
}

/// The protocols that a listener takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ListenerProtocol {
    /// TLS, routed by its server name and passed on as it is.
    #[default]
    Sni,
    /// HTTP/2 CONNECT over mutual TLS, terminated here.
    Hbone,
    /// Both SNI and HBONE: a hello without server name that offers `h2` alone is HBONE.
    Auto,
}

impl ListenerProtocol {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 3] = [Self::Sni, Self::Hbone, Self::Auto];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
            Self::Auto => "auto",
        }
    }
}

/// Limits of HBONE connections and their streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HboneLimits {
    /// Concurrent streams of a connection.
    pub streams: u32,
    /// Receive window of a stream in bytes: what a client may send ahead of what the endpoint has taken.
    pub stream_window: u32,
    /// Receive window of a connection in bytes.
    pub connection_window: u32,
    /// Largest accepted frame in bytes.
    pub frame_size: u32,
    /// Largest accepted header list in bytes (RFC 9113 §6.5.2).
    pub header_bytes: u32,
    /// Bytes that the streams of a connection may buffer together before a stalled stream is reset.
    pub held_per_connection: usize,
    /// Bytes that all HBONE connections of a worker may buffer together before a stalled stream is reset.
    pub held_per_worker: usize,
    /// How long a stream may stall while too much is buffered.
    pub stalled: Duration,
    /// From accept until the TLS and HTTP/2 handshakes are done.
    pub handshake_timeout: Duration,
    /// How long a connection is silent before a PING is sent.
    pub ping_interval: Duration,
    /// How long the PING may stay unanswered.
    pub ping_timeout: Duration,
    /// How long a connection may have no stream.
    pub idle: Duration,
    /// Streams reset before they were answered, per second and connection.
    pub resets: u32,
    /// PING frames per second and connection.
    pub pings: u32,
    /// SETTINGS frames per second and connection.
    pub settings: u32,
    /// Frames without content, per second and connection.
    pub empty_frames: u32,
}

impl Default for HboneLimits {
    fn default() -> Self {
        let (streams, stream_window) = (1_000, 4 << 20);
        Self {
            streams,
            stream_window,
            // As much as all streams together need, but no more than protocol and memory allow.
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

/// Limits of a ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloLimits {
    /// From accept to the whole hello.
    pub timeout: Duration,
    /// The stream up to the end of the hello in bytes, record headers included.
    pub bytes_max: usize,
    /// TLS records of the hello.
    pub records_max: usize,
}

impl Default for HelloLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), bytes_max: 16 * 1024, records_max: 64 }
    }
}

/// A route of the config file.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The names that the route matches.
    pub key: RouteName,
    /// Names of listeners; empty: all.
    pub listeners: Vec<Arc<str>>,
    /// The target of the connections.
    pub to: RouteTarget,
}

impl Route {
    /// Returns true if endpoints of the route's own are checked.
    pub fn is_checked(&self) -> bool {
        matches!(&self.to, RouteTarget::Endpoints { tuning, .. } if tuning.health.is_some())
    }
}

/// The key of a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteName {
    /// `"-"`: hellos without a host name.
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

/// The target of a route.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteTarget {
    /// Endpoints of the route's own.
    Endpoints {
        /// The endpoints, in the order of the file.
        endpoints: Vec<RouteEndpoint>,
        /// How they are chosen and dialled.
        tuning: Arc<Tuning>,
    },
    /// A service port, which is tuned as the service is.
    Service {
        /// The host name of the service.
        hostname: HostName,
        /// The service port.
        port: u16,
        /// The subset; empty for all endpoints.
        subset: Arc<str>,
    },
}

/// An endpoint of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteEndpoint {
    /// Its address, or a name that is resolved.
    pub host: Host,
    /// The port that is dialled.
    pub port: u16,
    /// Its share.
    pub weight: Weight,
    /// Its locality; may be empty.
    pub locality: Locality,
}

/// A rule that lets callers reach services. Without a rule no service can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRule {
    /// The name in messages: `exports[0]`.
    pub name: Arc<str>,
    /// The services that the rule covers.
    pub services: Vec<NamePattern>,
    /// Services that the rule does not cover although `services` matches them.
    pub except: Vec<NamePattern>,
    /// Service ports that the rule covers; empty: all.
    pub ports: Vec<u16>,
    /// Clusters whose endpoints the rule offers; empty: all.
    pub clusters: Vec<ClusterId>,
    /// The mark that the services must have, each in the cluster of its endpoints; `None`: none is needed.
    pub marked: Option<MarkCondition>,
    /// Names of listeners; empty: all.
    pub listeners: Vec<Arc<str>>,
    /// The callers that the rule admits.
    pub to: ExportScope,
}

/// The mark that an export rule requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MarkCondition {
    /// A `ServiceExport` of the service's name and namespace.
    ServiceExport,
    /// Labels of the service.
    Labels(Labels),
    /// Labels of the service's namespace.
    NamespaceLabels(Labels),
}

impl MarkCondition {
    /// Names the mark, for messages.
    pub fn text(&self) -> String {
        let list = |labels: &Labels| {
            labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::ServiceExport => "a ServiceExport".to_owned(),
            Self::Labels(labels) => format!("the labels {} of the service", list(labels)),
            Self::NamespaceLabels(labels) => format!("the labels {} of its namespace", list(labels)),
        }
    }
}

/// The callers that a rule admits; a caller must match every kind that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportScope {
    /// Source addresses; empty: all.
    pub cidrs: Vec<IpNet>,
    /// Identities; empty: any identity, or none.
    pub identities: Vec<IdentityPattern>,
}

/// How endpoints are chosen and dialled.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// The method of choice.
    pub policy: LoadBalancing,
    /// The preference for nearer endpoints.
    pub locality: LocalityMode,
    /// When a failing endpoint is ejected; `None`: never.
    pub ejection: Option<Ejection>,
    /// How the gateway checks the endpoints; `None`: it does not.
    pub health: Option<HealthCheck>,
    /// Timeout of one attempt to connect.
    pub connect_timeout: Duration,
    /// True if endpoints that are not healthy are chosen when none is healthy.
    pub panic: bool,
    /// The PROXY header that endpoints are sent before the client's first byte, but for those with `tunnel: hbone`.
    pub send_proxy: Option<ProxyVersion>,
}

impl Tuning {
    /// Returns the default of routes.
    pub fn for_routes(timeouts: &Timeouts) -> Self {
        Self {
            policy: LoadBalancing::LeastRequest,
            locality: LocalityMode::Prefer,
            ejection: Some(Ejection::default()),
            health: None,
            connect_timeout: timeouts.connect,
            panic: true,
            send_proxy: None,
        }
    }

    /// Returns the version of the PROXY header that an endpoint is sent. A tunnel begins with TLS, and the bytes in it are not
    /// the gateway's to add to.
    pub fn header_for(&self, encapsulation: Encapsulation) -> Option<ProxyVersion> {
        self.send_proxy.filter(|_| encapsulation == Encapsulation::None)
    }

    /// Returns the default of services.
    pub fn for_services(timeouts: &Timeouts) -> Self {
        Self { locality: LocalityMode::Ignore, ..Self::for_routes(timeouts) }
    }
}

/// The method by which an endpoint is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalancing {
    /// Weighted power of two choices by the number of connections in flight.
    LeastRequest,
    /// Each in turn, by weight.
    RoundRobin,
    /// At random, by weight.
    Random,
    /// By a hash of the source address, so that a source keeps its endpoint.
    SourceHash,
}

impl LoadBalancing {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 4] = [Self::LeastRequest, Self::RoundRobin, Self::Random, Self::SourceHash];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::LeastRequest => "leastRequest",
            Self::RoundRobin => "roundRobin",
            Self::Random => "random",
            Self::SourceHash => "sourceHash",
        }
    }
}

/// A preference for nearer endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalityMode {
    /// The nearest level that has healthy endpoints comes first.
    Prefer,
    /// All endpoints form one level.
    Ignore,
}

impl LocalityMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Prefer, Self::Ignore];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Prefer => "prefer",
            Self::Ignore => "ignore",
        }
    }
}

/// When an endpoint that fails is ejected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ejection {
    /// Consecutive failures after which an endpoint is ejected.
    pub failures: u32,
    /// How long an endpoint stays ejected.
    pub time: Duration,
    /// The largest share of a service's endpoints that may be ejected, in percent (0 to 100).
    pub share_max_percent: u8,
}

/// How endpoints are checked: by a TCP connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HealthCheck {
    /// Time from one check of an endpoint to the next.
    pub interval: Duration,
    /// Time that an endpoint may take to accept the connection of a check.
    pub timeout: Duration,
    /// Failed checks in a row after which an endpoint is unhealthy.
    pub unhealthy_after: u32,
    /// Passed checks in a row after which an unhealthy endpoint is healthy again.
    pub healthy_after: u32,
}

impl HealthCheck {
    /// Returns the check of an endpoint that two services share: of each value the stricter one.
    pub fn strictest(self, other: Self) -> Self {
        Self {
            interval: self.interval.min(other.interval),
            timeout: self.timeout.min(other.timeout),
            unhealthy_after: self.unhealthy_after.min(other.unhealthy_after),
            healthy_after: self.healthy_after.max(other.healthy_after),
        }
    }
}

impl Default for HealthCheck {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(1),
            unhealthy_after: 3,
            healthy_after: 2,
        }
    }
}

impl Default for Ejection {
    fn default() -> Self {
        Self { failures: 5, time: Duration::from_secs(30), share_max_percent: 50 }
    }
}

/// Tuning of the mesh's services by name pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceTuning {
    /// Tuning of services that no pattern matches.
    pub default: Arc<Tuning>,
    /// Tuning by pattern; the most specific pattern counts.
    pub policies: Vec<(NamePattern, Arc<Tuning>)>,
}

/// Limits of the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent connections; the number of descriptors may allow fewer.
    pub connections: usize,
    /// Concurrent connections whose hello is not whole yet; `None`: 10,000 or a quarter of the descriptors.
    pub pending_hellos: Option<usize>,
    /// Connections of one source.
    pub per_source: SourceLimits,
    /// Concurrent connections and CONNECT streams to one service; `None`: no limit.
    pub per_service: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        let per_source = SourceLimits::default();
        Self { connections: 100_000, pending_hellos: None, per_source, per_service: None }
    }
}

/// Timeouts of dialling and relaying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of one attempt to connect.
    pub connect: Duration,
    /// After this time since the first attempt no further one begins.
    pub connect_total: Duration,
    /// How long no byte may come in either direction; `None`: forever.
    pub idle: Option<Duration>,
    /// How long no byte may come after one direction has ended; `None`: forever.
    pub half_close: Option<Duration>,
    /// How long bytes may wait for a peer that is alive but does not read; `None`: forever.
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

/// The items that a registry may give; others are dropped and counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryScope {
    /// Services; empty: all.
    pub services: Vec<NamePattern>,
    /// Networks that its endpoints may name; `None`: only the registry's own.
    pub networks: Option<Vec<Network>>,
    /// True if the registry itself finds out which network is its own, and keeps to it.
    pub finds_network: bool,
    /// Addresses that its endpoints may have.
    pub addresses: AddressScope,
}

/// The addresses that the endpoints of a registry may have; it applies to the addresses of their names too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressScope {
    /// Any address that can be connected to.
    #[default]
    Any,
    /// All but loopback and link-local addresses, which are this host and its surroundings.
    Public,
    /// Addresses in these blocks. A loopback or link-local address is allowed only by a block that lies
    /// inside the special block: an operator who writes `0.0.0.0/0` does not mean loopback.
    Blocks(Arc<[IpNet]>),
}

impl AddressScope {
    /// Returns true if the scope allows the address.
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

/// Returns true if an address is in one of the blocks, or if there are no blocks.
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
