//! The checked contents of the config file: listeners, routes, exports, tuning, limits, timeouts. The module `config` makes a
//! [`Policy`]; a reload replaces all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZero;
use std::ops::Deref;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::export_tls::{ExportTls, TlsSource};
use super::gateway_api::Backend;
use super::peer::Peer;
use super::steering::{Cost, ServiceSteering, Steering};
use isthmus_model::address::{Bind, Host, canonical_ip, embedded_ip};
use isthmus_model::drain::Drain;
use isthmus_model::endpoint::{Encapsulation, Labels, ProxyVersion, Weight};
use isthmus_model::identity::{Identity, IdentityPattern, TrustDomain};
use isthmus_model::limits::{MemoryLimit, SourceLimits};
use isthmus_model::name::{HostName, NamePattern};
use isthmus_model::place::{ClusterId, Locality, Network};

isthmus_model::words!(Access, ListenerProtocol, LoadBalancing, LocalityMode, ProxyMode, RefusalMode);

/// All parts of the config file that the data path or the aggregator acts on.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The identity and the location of this gateway.
    pub node: Node,
    /// Settings that hold for the whole mesh.
    pub mesh: Mesh,
    /// The listeners, in the order of the file; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// The routes, in the order of the file; keys are unique.
    pub routes: Vec<Arc<Route>>,
    /// The export rules, in the order of the file.
    pub exports: Vec<Arc<ExportRule>>,
    /// Tuning of the mesh's services. Only the most specific name pattern that matches a service applies to it.
    pub tuning: ServiceTuning,
    /// The settings of steering that hold for all services.
    pub steering: Steering,
    /// The networks, in the order of the file; names are unique.
    pub networks: Vec<NetworkPolicy>,
    /// Other organisations, in the order of the file; names are unique.
    pub peers: Vec<Arc<Peer>>,
    /// The planned drains of the config file.
    pub drains: Vec<Arc<Drain>>,
    /// Limits of connections.
    pub limits: Limits,
    /// Limits of HBONE connections and their streams.
    pub hbone: HboneLimits,
    /// Timeouts of dialling and relaying.
    pub timeouts: Timeouts,
}

impl Policy {
    /// Returns true if a listener accepts HBONE, so that callers can request services by address.
    pub fn takes_hbone(&self) -> bool {
        self.listeners.iter().any(|listener| listener.protocol.takes_hbone())
    }

    /// Returns true if active checks are configured for any route or service.
    pub fn has_checks(&self) -> bool {
        let services = &self.tuning;
        services.default.health.is_some()
            || services.policies.iter().any(|(_, tuning)| tuning.health.is_some())
            || self.routes.iter().any(|route| route.is_checked())
    }

    /// Returns true if the calls to any service are divided by steering.
    pub fn steers(&self) -> bool {
        let mut all = self.tuning.policies.iter().map(|(_, tuning)| tuning).chain([&self.tuning.default]);
        all.any(|tuning| tuning.steering.is_on())
    }

    /// Returns true if two policies build the same services from the same registries; they may differ in
    /// listeners, routes, limits, and the gateways and access of networks.
    pub fn is_same_for_services(&self, other: &Self) -> bool {
        self.node == other.node
            && self.mesh == other.mesh
            && self.exports == other.exports
            && self.tuning == other.tuning
            && self.steering == other.steering
            && self.blocks().eq(other.blocks())
            && self.peers == other.peers
    }

    /// Returns the addresses of the networks, which decide on which network an endpoint is.
    fn blocks(&self) -> impl Iterator<Item = (&Network, &IpNet)> {
        self.networks.iter().flat_map(|network| network.cidrs.iter().map(|block| (&network.name, block)))
    }

    /// Returns the networks whose settings only one of two policies has.
    pub fn networks_apart<'a>(&'a self, other: &'a Self) -> BTreeSet<Network> {
        let by_name = |policy: &'a Self| -> BTreeMap<&'a Network, &'a NetworkPolicy> {
            policy.networks.iter().map(|network| (&network.name, network)).collect()
        };
        let (one, two) = (by_name(self), by_name(other));
        let differs = |name: &&&Network| one.get(*name) != two.get(*name);
        one.keys().chain(two.keys()).filter(differs).copied().cloned().collect()
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
    /// The network of the gateway, which reaches endpoints on this network directly.
    pub network: Network,
    /// The locality of the gateway, from which the distances of endpoints are computed.
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

/// How the gateways of a network are probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GatewayProbes {
    /// Not at all.
    Off,
    /// By connecting.
    Connect,
    /// By connecting, and every other time by a ClientHello.
    #[default]
    Hello,
}

/// The settings of one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// The name of the network.
    pub name: Network,
    /// How other networks reach the endpoints of the network.
    pub access: Access,
    /// The address blocks of the network, which no other network shares. An endpoint without a network belongs to the network
    /// whose block contains its address.
    pub cidrs: Vec<IpNet>,
    /// The gateways of the network.
    pub gateways: Vec<Gateway>,
    /// How the gateways are probed, so that viewers do not get one that has ceased to answer.
    pub probes: GatewayProbes,
    /// The round-trip times from viewers on other networks, as far as the operator sets them.
    pub distance: BTreeMap<Network, Duration>,
    /// The costs of traffic from viewers on other networks.
    pub cost: BTreeMap<Network, Cost>,
}

/// How endpoints of a network are reached from other networks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Access {
    /// Endpoints are reached only through the network's gateways.
    #[default]
    Gateway,
    /// Endpoints are reached by their own addresses: the network is routable from all other networks.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// The address of the gateway, or a host name. Each address of a name gets an equal part of the weight.
    pub host: Host,
    /// The port for TLS that is routed by SNI. At least one of `sni_port` and `hbone_port` is set.
    pub sni_port: Option<u16>,
    /// The port for HBONE.
    pub hbone_port: Option<u16>,
    /// The cluster that the gateway serves; `""`: all clusters of the network.
    pub cluster: ClusterId,
    /// The locality of the gateway.
    pub locality: Locality,
    /// The weight among the gateways of the network.
    pub weight: Weight,
    /// The SPIFFE ID that clients expect of the gateway.
    pub identity: Option<Identity>,
    /// The addresses of the gateway's instances on their own network, as far as a registry knows them.
    pub instances: Arc<[SocketAddr]>,
    /// The parts of [`PARTS`](isthmus_model::drain::PARTS) of the weight that a peer's planned drain has taken away.
    #[serde(default, rename = "drained_parts")]
    pub drained: u16,
}

/// One listener. Its socket is keyed by `bind`; all other fields can change without touching the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The name of the listener, unique.
    pub name: Arc<str>,
    /// The address of the socket.
    pub bind: Bind,
    /// The protocols that the listener accepts.
    pub protocol: ListenerProtocol,
    /// The required ALPN protocols: a hello that is routed by SNI must offer at least one of them; empty: no check.
    pub alpn: Vec<Box<[u8]>>,
    /// Source addresses that are admitted; empty: all.
    pub from: Vec<IpNet>,
    /// Whether connections begin with a PROXY header.
    pub proxy_protocol: ProxyProtocol,
    /// Limits of the ClientHello.
    pub hello: HelloLimits,
    /// How a TLS client learns that it is refused.
    pub refusal: RefusalMode,
    /// True if the port belongs to Gateways of the Gateway API (`gatewayApi.ports`). Only routes apply on it: those of the
    /// Gateways, and those of the config file.
    pub is_of_gateways: bool,
}

impl Listener {
    /// Returns a listener of protocol SNI that admits every source.
    pub fn sni(name: Arc<str>, bind: Bind) -> Self {
        Self {
            name,
            bind,
            protocol: ListenerProtocol::Sni,
            alpn: Vec::new(),
            from: Vec::new(),
            proxy_protocol: ProxyProtocol::Forbid,
            hello: HelloLimits::default(),
            refusal: RefusalMode::Alert,
            is_of_gateways: false,
        }
    }
}

/// The rule of a listener for PROXY headers at the beginning of its connections. There is no mode with an optional header,
/// because every client could forge one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyProtocol {
    /// Connections have no header. A connection that begins with one is refused, as it is not TLS.
    #[default]
    Forbid,
    /// Each connection begins with a header, which announces the client's address.
    Require {
        /// The addresses of TCP peers whose headers are trusted; not empty.
        from: Vec<IpNet>,
    },
}

/// The mode of [`ProxyProtocol`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyMode {
    /// Connections have no header.
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

/// The protocols that a listener accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ListenerProtocol {
    /// TLS, routed by its server name and passed on as it is.
    #[default]
    Sni,
    /// HTTP/2 CONNECT over mutual TLS, terminated here.
    Hbone,
    /// Both SNI and HBONE: a hello without server name that offers `h2` alone is HBONE.
    Auto,
    /// Any bytes, passed on as they are to the target of the listener.
    Tcp,
}

impl ListenerProtocol {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 4] = [Self::Sni, Self::Hbone, Self::Auto, Self::Tcp];

    /// Returns true if connections are routed by the server name of their hello.
    pub fn takes_sni(self) -> bool {
        matches!(self, Self::Sni | Self::Auto)
    }

    /// Returns true if connections may be HBONE.
    pub fn takes_hbone(self) -> bool {
        matches!(self, Self::Hbone | Self::Auto)
    }

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
            Self::Auto => "auto",
            Self::Tcp => "tcp",
        }
    }
}

/// How a TLS client that gets an alert learns that it is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RefusalMode {
    /// The client gets a TLS alert that names the kind of fault, and then the end of the connection.
    #[default]
    Alert,
    /// The client gets the end of the connection (FIN) alone.
    Close,
    /// The connection is reset (RST).
    Reset,
}

impl RefusalMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 3] = [Self::Alert, Self::Close, Self::Reset];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Alert => "alert",
            Self::Close => "close",
            Self::Reset => "reset",
        }
    }
}

/// Limits of HBONE connections and their streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HboneLimits {
    /// The largest number of concurrent streams of a connection.
    pub streams: u32,
    /// The receive window of a stream, in bytes: how far a client may send ahead of the endpoint. `None`: a window that fits the
    /// round trip to the client.
    pub stream_window: Option<u32>,
    /// The number of bytes that the streams of a connection may buffer together before a stalled stream is reset, where the
    /// memory budget does not give less.
    pub held_per_connection: usize,
    /// The number of bytes, times the number of workers, that all HBONE connections may buffer together before a stalled stream is
    /// reset; `None`: as many as the memory budget gives.
    pub held_per_worker: Option<usize>,
    /// The time after which a stalled stream is reset, if more than half of a share of the memory budget is held.
    pub stalled: Duration,
    /// The time after which a connection without streams is closed.
    pub idle: Duration,
}

impl Default for HboneLimits {
    fn default() -> Self {
        Self {
            streams: 1_000,
            stream_window: None,
            held_per_connection: 64 << 20,
            held_per_worker: None,
            stalled: Duration::from_secs(10),
            idle: Duration::from_secs(3600),
        }
    }
}

/// Limits of a ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloLimits {
    /// The timeout for the whole hello, measured from accept; then the connection is refused.
    pub timeout: Duration,
    /// The largest number of bytes up to the end of the hello, record headers included.
    pub bytes_max: usize,
    /// The largest number of TLS records that the hello may span.
    pub records_max: usize,
}

impl Default for HelloLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), bytes_max: 16 * 1024, records_max: 64 }
    }
}

/// A route of the config file, or of the Gateway API.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The name in logs and labels, unique: the key, for a route of one listener `LISTENER/KEY`, and for one that another route
    /// leads to `KEY#PROTOCOL`; of the Gateway API the object, such as `TLSRoute shop/web`.
    pub name: Arc<str>,
    /// The names that the route matches.
    pub key: RouteName,
    /// The conditions under which the route applies.
    pub conditions: RouteConditions,
    /// The destination of the route's connections.
    pub to: RouteTarget,
}

impl Route {
    /// Returns a route of the table that all listeners share, which admits every source.
    pub fn new(key: RouteName, to: RouteTarget) -> Self {
        Self { name: key.shared(), key, conditions: RouteConditions::default(), to }
    }

    /// Returns true if the route applies on the listener, of those that share its table.
    pub fn on_listener(&self, listener: &str) -> bool {
        has_listener(&self.conditions.listeners, listener)
    }

    /// Returns true if the route has its own endpoints and they are checked actively.
    pub fn is_checked(&self) -> bool {
        matches!(&self.to, RouteTarget::Endpoints { tuning, .. } if tuning.health.is_some())
    }
}

/// Returns true if a list of the names of listeners has this one, or is empty, which means all.
pub(crate) fn has_listener(listeners: &[Arc<str>], listener: &str) -> bool {
    listeners.is_empty() || listeners.iter().any(|name| &**name == listener)
}

/// The listeners, sources and protocols that a route distinguishes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conditions {
    /// The listener whose own route this is; `None`: the route is in the table that all listeners share.
    pub own_of: Option<Arc<str>>,
    /// The names of the listeners on which the route applies; empty: all.
    pub listeners: Vec<Arc<str>>,
    /// The source addresses that the route admits; empty: all.
    pub from: Vec<IpNet>,
    /// The names of the routes that clients take whose ALPN protocols are named here, in the order of the file.
    pub by_alpn: Vec<(Box<[u8]>, Arc<str>)>,
}

/// The [`Conditions`] of a route in the 8 bytes of a pointer: most routes of a large config have none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteConditions(Option<Box<Conditions>>);

impl From<Conditions> for RouteConditions {
    fn from(conditions: Conditions) -> Self {
        Self((conditions != Conditions::default()).then(|| Box::new(conditions)))
    }
}

impl Deref for RouteConditions {
    type Target = Conditions;

    fn deref(&self) -> &Conditions {
        static NONE: Conditions =
            Conditions { own_of: None, listeners: Vec::new(), from: Vec::new(), by_alpn: Vec::new() };
        self.0.as_deref().unwrap_or(&NONE)
    }
}

/// The key of a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteName {
    /// `"-"`: hellos without a host name.
    NoSni,
    /// A name, `*.suffix`, or `"*"`.
    Name(NamePattern),
    /// Connections from which no hello is read: those of a listener of protocol `tcp`, and those whose first bytes are not TLS.
    Raw,
    /// None: another route leads to this one, by the client's ALPN protocols.
    Alpn,
}

impl RouteName {
    /// Returns the key as text. A single name shares its own text.
    pub fn shared(&self) -> Arc<str> {
        match self {
            Self::Name(NamePattern::Exact(name)) => name.shared(),
            Self::NoSni | Self::Name(_) | Self::Raw | Self::Alpn => self.to_string().into(),
        }
    }

    /// Returns the names, if the route is one for names.
    pub fn pattern(&self) -> Option<&NamePattern> {
        match self {
            Self::Name(pattern) => Some(pattern),
            Self::NoSni | Self::Raw | Self::Alpn => None,
        }
    }
}

impl fmt::Display for RouteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSni => f.write_str("-"),
            Self::Name(pattern) => pattern.fmt(f),
            Self::Raw => f.write_str("raw"),
            Self::Alpn => f.write_str("byAlpn"),
        }
    }
}

/// The destination of a route's connections.
#[derive(Clone, Debug, PartialEq)]
pub enum RouteTarget {
    /// The route's own endpoints.
    Endpoints {
        /// The endpoints, in the order of the file.
        endpoints: Vec<RouteEndpoint>,
        /// The settings by which the endpoints are chosen and dialled.
        tuning: Arc<Tuning>,
    },
    /// A service port; the tuning of the service applies to it.
    Service {
        /// The host name of the service.
        hostname: HostName,
        /// The service port.
        port: u16,
        /// The subset; empty for all endpoints.
        subset: Arc<str>,
    },
    /// The backends of a route of the Gateway API, among which connections are divided by weight.
    Backends(Arc<[Backend]>),
}

/// An endpoint of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteEndpoint {
    /// The address of the endpoint, or a host name that is resolved, or a name of SRV records.
    pub host: Host,
    /// The port that is dialled; 0 with a name of SRV records, which have the ports.
    pub port: u16,
    /// The weight of the endpoint among the endpoints of the route.
    pub weight: Weight,
    /// The locality of the endpoint; may be empty.
    pub locality: Locality,
    /// True if the endpoint is chosen only while no other endpoint of the route is healthy.
    pub is_backup: bool,
    /// The number of connections with which the endpoint is full, on each replica; `None`: there is no limit.
    pub connections_max: Option<NonZero<u32>>,
}

impl fmt::Display for RouteEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.name() {
            Some(name) if name.is_service() => name.fmt(f),
            Some(_) | None => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// A rule that lets callers reach services. Without a rule no service can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRule {
    /// The name of the rule in messages, such as `exports[0]`.
    pub name: Arc<str>,
    /// The services that the rule covers.
    pub services: Vec<NamePattern>,
    /// Services that the rule does not cover although `services` matches them.
    pub except: Vec<NamePattern>,
    /// Service ports that the rule covers; empty: all.
    pub ports: Vec<u16>,
    /// Clusters whose endpoints the rule offers; empty: all.
    pub clusters: Vec<ClusterId>,
    /// The mark that a service needs in a cluster, so that its endpoints there are offered; `None`: no mark is needed.
    pub marked: Option<MarkCondition>,
    /// The names of the listeners on which the rule applies; empty: all.
    pub listeners: Vec<Arc<str>>,
    /// The callers that the rule admits.
    pub to: ExportScope,
    /// The endpoints that the rule offers where nobody has written their TLS modes; `None`: the rule does not say, and
    /// [`ExportTls::Mesh`] applies.
    pub tls: Option<ExportTls>,
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
    /// Returns a description of the mark, for messages.
    pub fn text(&self) -> String {
        let list = |labels: &Labels| {
            labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::ServiceExport => "a ServiceExport".to_owned(),
            Self::Labels(labels) => format!("the labels {} of the service", list(labels)),
            Self::NamespaceLabels(labels) => {
                format!("the labels {} of the namespace of the service", list(labels))
            }
        }
    }
}

/// The callers that a rule admits. If both lists are given, a caller must match both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportScope {
    /// The source addresses that are admitted; empty: all.
    pub cidrs: Vec<IpNet>,
    /// The identities that are admitted; empty: callers with any identity, and callers without one.
    pub identities: Vec<IdentityPattern>,
}

/// The settings by which endpoints are chosen and dialled.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// The algorithm that chooses an endpoint, such as round robin.
    pub policy: LoadBalancing,
    /// The preference for nearer endpoints.
    pub locality: LocalityMode,
    /// The conditions under which a failing endpoint is ejected; `None`: it is never ejected.
    pub ejection: Option<Ejection>,
    /// The active checks of the endpoints; `None`: there are none.
    pub health: Option<HealthCheck>,
    /// Timeout of one attempt to connect.
    pub connect_timeout: Duration,
    /// True if endpoints that are not healthy are chosen when none is healthy.
    pub panic: bool,
    /// The version of the PROXY header that is sent to endpoints before the client's first byte. Endpoints with `tunnel: hbone`
    /// get none.
    pub send_proxy: Option<ProxyVersion>,
    /// The age at which a connection is ended gently; `None`: at none.
    pub max_connection_age: Option<Duration>,
    /// How the calls of xDS clients are divided among networks; of no effect for routes.
    pub steering: ServiceSteering,
}

impl Tuning {
    /// Returns the default settings for the endpoints of routes.
    pub fn for_routes(timeouts: &Timeouts) -> Self {
        Self {
            policy: LoadBalancing::LeastRequest,
            locality: LocalityMode::Prefer,
            ejection: Some(Ejection::default()),
            health: None,
            connect_timeout: timeouts.connect,
            panic: true,
            send_proxy: None,
            max_connection_age: None,
            steering: ServiceSteering::default(),
        }
    }

    /// Returns the version of the PROXY header to send to an endpoint. An endpoint with a tunnel gets no header: the tunnel
    /// begins with TLS, and the gateway does not alter the bytes inside it.
    pub fn header_for(&self, encapsulation: Encapsulation) -> Option<ProxyVersion> {
        self.send_proxy.filter(|_| encapsulation == Encapsulation::None)
    }

    /// Returns the default settings for the endpoints of services.
    pub fn for_services(timeouts: &Timeouts) -> Self {
        Self { locality: LocalityMode::Ignore, ..Self::for_routes(timeouts) }
    }
}

/// The method by which an endpoint is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalancing {
    /// Weighted power of two choices by the number of connections in flight.
    LeastRequest,
    /// Each endpoint in turn, by weight.
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
    /// Endpoints are chosen first at the nearest distance that has a healthy endpoint.
    Prefer,
    /// Distances are ignored.
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

/// The conditions under which a failing endpoint is ejected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ejection {
    /// Consecutive failures after which an endpoint is ejected.
    pub failures: u32,
    /// The time for which an endpoint stays ejected.
    pub time: Duration,
    /// The largest share of a service's endpoints that may be ejected, in percent (0 to 100).
    pub share_max_percent: u8,
}

/// The active check of endpoints by a TCP connect, and by a ClientHello if there is a name for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HealthCheck {
    /// The time from one check of an endpoint to the next.
    pub interval: Duration,
    /// The time within which an endpoint must accept the connection of a check, and answer the ClientHello.
    pub timeout: Duration,
    /// Failed checks in a row after which an endpoint is unhealthy.
    pub unhealthy_after: u32,
    /// Passed checks in a row after which an unhealthy endpoint is healthy again.
    pub healthy_after: u32,
    /// The server name of the ClientHello that a check sends; `None`: a check only connects.
    pub tls: Option<HostName>,
}

impl HealthCheck {
    /// Returns the health check for an endpoint that belongs to two services: the stricter value of each field. Of two server
    /// names, the first in order applies.
    pub fn strictest(self, other: Self) -> Self {
        Self {
            interval: self.interval.min(other.interval),
            timeout: self.timeout.min(other.timeout),
            unhealthy_after: self.unhealthy_after.min(other.unhealthy_after),
            healthy_after: self.healthy_after.max(other.healthy_after),
            tls: [self.tls, other.tls].into_iter().flatten().min(),
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
            tls: None,
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
    /// Tuning of services whose host names match a pattern; only the most specific pattern applies.
    pub policies: Vec<(NamePattern, Arc<Tuning>)>,
}

/// Limits of the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of concurrent connections; the number of descriptors may allow fewer.
    pub connections: usize,
    /// The largest number of concurrent connections whose hello is incomplete; `None`: 10,000. The gateway never allows more
    /// than a quarter of the descriptors.
    pub pending_hellos: Option<usize>,
    /// The limits of connections from one source.
    pub per_source: SourceLimits,
    /// The largest number of concurrent connections and CONNECT streams to one service; `None`: no limit.
    pub per_service: Option<usize>,
    /// The bandwidth of one service in each direction, in bytes per second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// The memory budget of the process.
    pub memory: MemoryLimit,
}

impl Default for Limits {
    fn default() -> Self {
        let per_source = SourceLimits::default();
        Self {
            connections: 100_000,
            pending_hellos: None,
            per_source,
            per_service: None,
            bytes_per_second: None,
            memory: MemoryLimit::default(),
        }
    }
}

/// Timeouts of dialling and relaying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of one attempt to connect.
    pub connect: Duration,
    /// The time, measured from the first attempt to connect, after which no further attempt begins.
    pub connect_total: Duration,
    /// The time without bytes in either direction after which a connection is closed; `None`: never.
    pub idle: Option<Duration>,
    /// The time without bytes after which a half-closed connection is closed; `None`: never.
    pub half_close: Option<Duration>,
    /// The time after which a connection is closed if a peer is alive but does not read its bytes; `None`: never.
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

/// The items that a registry may give; all other items are dropped, and their number is reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryScope {
    /// The services that the registry may provide; empty: all.
    pub services: Vec<NamePattern>,
    /// The networks that the endpoints of the registry may name; `None`: only the registry's own.
    pub networks: Option<Vec<Network>>,
    /// True if the registry itself determines its networks, so that any network is allowed.
    pub finds_network: bool,
    /// The addresses that the endpoints of the registry may have.
    pub addresses: AddressScope,
    /// Tells who says the TLS modes of the endpoints.
    pub tls: TlsSource,
}

/// The addresses that the endpoints of a registry may have, also those to which host names of endpoints resolve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressScope {
    /// Any address that can be connected to.
    #[default]
    Any,
    /// All addresses except loopback and link-local ones, which belong to this host and its surroundings.
    Public,
    /// Addresses in these blocks. A loopback or link-local address is allowed only by a block that lies inside the loopback or
    /// link-local range: an operator who writes `0.0.0.0/0` does not mean loopback.
    Blocks(Arc<[IpNet]>),
}

impl AddressScope {
    /// Returns true if the scope allows the address.
    pub fn allows(&self, address: IpAddr) -> bool {
        let (written, reached) = (canonical_ip(address), embedded_ip(address));
        if reached.is_unspecified() || reached.is_multicast() || reached == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return false;
        }
        let special = SPECIAL_BLOCKS.iter().find(|special| special.contains(&reached));
        match (self, special) {
            (Self::Any, _) => true,
            (Self::Public, special) => special.is_none(),
            (Self::Blocks(blocks), None) => {
                blocks.iter().any(|block| block.contains(&written) || block.contains(&reached))
            }
            (Self::Blocks(blocks), Some(special)) => {
                blocks.iter().any(|block| special.contains(block) && block.contains(&reached))
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
    fn conditions_cost_a_route_that_has_none_a_pointer() {
        assert_eq!((size_of::<RouteConditions>(), size_of::<Route>()), (8, 88));
        assert_eq!(RouteConditions::from(Conditions::default()), RouteConditions(None));
    }

    #[test]
    fn special_addresses_are_allowed_only_by_blocks_of_their_own() {
        let allows = |scope: &AddressScope, ip: &str| scope.allows(ip.parse().expect("an address"));
        let blocks = |blocks: &[&str]| {
            AddressScope::Blocks(blocks.iter().map(|block| block.parse().expect("a block")).collect())
        };
        let special = [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::127.0.0.1",
            "2002:7f00:1::1",
            "64:ff9b:1::127.0.0.1",
            "2001:0:102:304::5601:5601",
            "169.254.169.254",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::",
            "fe80::1",
        ];
        let everything = blocks(&["0.0.0.0/0", "::/0"]);
        for ip in special {
            assert!(allows(&AddressScope::Any, ip), "{ip}");
            assert!(!allows(&AddressScope::Public, ip) && !allows(&everything, ip), "{ip}");
        }
        let own = blocks(&["127.0.0.0/8", "::1/128", "169.254.169.254/32", "fe80::/64"]);
        assert!(special.iter().all(|ip| allows(&own, ip)));
        assert!(!allows(&own, "169.254.1.1") && !allows(&own, "10.0.0.1"));
        assert!(allows(&everything, "10.0.0.1") && allows(&AddressScope::Public, "2001:db8::1"));
        // A block may name an address in either form.
        for block in ["10.0.0.0/8", "64:ff9b::/96"] {
            assert!(allows(&blocks(&[block]), "64:ff9b::10.0.0.1"), "{block}");
        }
        assert!(!allows(&blocks(&["64:ff9b::/96"]), "10.0.0.1"));
        for never in [
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
            "::ffff:0.0.0.0",
            "64:ff9b::224.0.0.1",
            "2002::1",
        ] {
            for scope in [&AddressScope::Any, &AddressScope::Public, &everything, &own] {
                assert!(!allows(scope, never), "{never} by {scope:?}");
            }
        }
    }
}
