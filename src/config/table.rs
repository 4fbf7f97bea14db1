//! The keys of the config file. To add a key, add it here, and read it in the module of its section.

use std::num::NonZeroUsize;

use isthmus_document::drains::PlannedDrain;
use isthmus_document::form::{self, Form};
use isthmus_document::key::keys;
use isthmus_document::services;
use isthmus_document::table::{Kind, Union};
use isthmus_document::tree;
use isthmus_model::identity::TrustDomain;
use isthmus_model::limits::{self, MemoryLimit};
use isthmus_model::name::HostName;
use isthmus_settings::export_tls::ExportTls;
use isthmus_settings::limits as settings;
use isthmus_settings::listener::{HelloLimits, ListenerProtocol, ProxyMode, RefusalMode};

pub(super) mod dns;
pub(super) mod identity;
pub(super) mod mesh;
pub(super) mod peers;
pub(super) mod registries;
pub(super) mod routes;
pub(super) mod steering;
pub(super) mod telemetry;

use dns::DnsServer;
use identity::{Hbone, Identity, Trust};
use mesh::{Aggregator, Dns, Network, State, Xds};
use peers::Peer;
use registries::Registry;
use routes::{Defaults, Policy, RouteForms, RouteKey};
use steering::Steering;
use telemetry::{Admin, Telemetry};

/// The default domain of a mesh, for host names and for identities.
const DOMAIN: &str = "cluster.local";

keys! {
    /// The config file of isthmus. `${NAME}` and `${NAME:-default}` in a value are replaced by an environment
    /// variable; `$${` is a literal `${`. `off` and `false` mean the same.
    pub(super) Root "config" {
        /// Files to merge into this one: maps are merged, lists are appended, and a key that two files set is an
        /// error. Paths are relative to this file; `*` matches any characters in the last part of a path, whose folder
        /// must exist. An included file cannot include others.
        INCLUDE "include": Include => "none";
        /// The workload that this gateway is: its name, cluster, network and locality.
        NODE "node": Node => "empty";
        /// Settings that all members of the mesh share.
        MESH "mesh": Mesh => "defaults";
        /// Short form of one SNI listener. Its name is `default`, and it comes before the entries of `listeners`.
        LISTEN "listen": form::Bind => "none";
        /// Addresses on which clients connect. A config needs at least one, here or as `listen`, unless it has
        /// `xds`.
        LISTENERS "listeners": form::List<Listener> => "none";
        /// Routes by server name: a host name, `"*.suffix"`, `"*"` for every other name, or `"-"` for clients that
        /// send no server name. The most specific name applies, whatever the order in the file.
        ROUTES "routes": form::MapOf<RouteKey, RouteForms> => "none";
        /// Services kept in this file. Their cluster is `node.cluster` and their network `node.network`.
        SERVICES "services": form::List<services::keys::Service> => "none";
        /// Further sources of services: watched files and etcd. Where two registries disagree about a service, the
        /// earlier registry applies.
        REGISTRIES "registries": form::List<Registry> => "none";
        /// Rules that make services of the mesh reachable through a listener. A service that no rule names cannot
        /// be reached.
        EXPORTS "exports": form::List<Export> => "nothing";
        /// Load balancing, ejection, connect timeout and PROXY header for all services of the mesh.
        DEFAULTS "defaults": Defaults => "defaults";
        /// The settings of `defaults` for some services. Only the most specific policy that matches applies; a key
        /// that it omits takes the built-in default, not the value in `defaults`.
        POLICIES "policies": form::List<Policy> => "none";
        /// How the calls of xDS clients are divided among the networks that have a service.
        STEERING "steering": Steering => "defaults";
        /// Networks of the mesh, by name.
        NETWORKS "networks": form::MapOf<form::NetworkName, Network> => "none";
        /// Other organisations with which services are exchanged.
        PEERS "peers": form::List<Peer> => "none";
        /// Planned drains: parts of the mesh from which calls are moved away.
        DRAINS "drains": form::List<PlannedDrain> => "none";
        /// Source of this gateway's own certificate. Listeners of protocol `hbone` or `auto`, and `xds.tls`, need
        /// one.
        IDENTITY "identity": Identity => "none";
        /// Root certificates of each trust domain, which verify HBONE callers and xDS clients of that domain.
        TRUST "trust": form::List<Trust> => "none";
        /// Limits of HBONE connections and their streams.
        HBONE "hbone": Hbone => "defaults";
        /// Limits on simultaneous connections.
        LIMITS "limits": Limits => "defaults";
        /// Timeouts of connections.
        TIMEOUTS "timeouts": Timeouts => "defaults";
        /// Timing of a graceful stop.
        DRAIN "drain": Drain => "defaults";
        /// DNS resolution of the host names of endpoints and gateways, also of the gateways of peers (`dial`).
        DNS "dns": Dns => "defaults";
        /// The DNS server. It answers for the services of other organisations with virtual addresses, and for exported services
        /// of our own with their addresses. A change takes effect after a restart.
        DNS_SERVER "dnsServer": form::OrOff<DnsServer> => "off";
        /// Start-up wait, staleness, and protection against mass removal of services.
        AGGREGATOR "aggregator": Aggregator => "defaults";
        /// Files that a restart uses.
        STATE "state": State => "nothing on disk";
        /// The xDS server. It gives each client the endpoints as seen from the client's network.
        XDS "xds": form::OrOff<Xds> => "off";
        /// The HTTP API for operators; it has no authentication of its own.
        ADMIN "admin": form::OrOff<Admin> => "defaults";
        /// Metrics, health checks, logs and traces.
        TELEMETRY "telemetry": Telemetry => "defaults";
        /// Number of data-plane threads; `auto` is the CPU quota. A change takes effect after a restart.
        WORKERS "workers": Workers = crate::Workers::Auto;
    }

    /// The workload that this gateway is. Logs and metrics carry these names.
    pub(super) Node "node" {
        /// Name of the gateway, for example its pod name.
        NAME "name": form::Text => "empty";
        /// Kubernetes namespace of the gateway.
        NAMESPACE "namespace": form::Text => "empty";
        /// Kubernetes service account of the gateway.
        SERVICE_ACCOUNT "serviceAccount": form::Text => "empty";
        /// Cluster of the gateway, and of the `services` in this file.
        CLUSTER "cluster": form::ClusterName => "empty";
        /// Network of the gateway. The gateway connects clients only to endpoints of this network.
        NETWORK "network": form::NetworkName => "unknown";
        /// Region, zone and subzone of the gateway.
        LOCALITY "locality": form::Locality => "unknown";
    }

    /// Settings that all members of the mesh share.
    pub(super) Mesh "mesh" {
        /// Suffix of the host names of Kubernetes services.
        CLUSTER_DOMAIN "clusterDomain": form::HostName = HostName::parse(DOMAIN).expect("cluster.local is a legal name");
        /// SPIFFE trust domain of the mesh's identities.
        TRUST_DOMAIN "trustDomain": form::TrustDomain = TrustDomain::parse(DOMAIN).expect("cluster.local is a legal trust domain");
    }

    /// One address on which clients connect.
    pub(super) Listener "listener" {
        /// Name of the listener, unique in the file. Routes, exports, logs and metrics refer to it.
        NAME "name": form::Text => required;
        /// Address and port. `":port"` is dual stack, or IPv4 only on a host without IPv6. Port 0 means a free port
        /// and is allowed only on a loopback address.
        BIND "bind": form::Bind => required;
        /// `sni`: TLS connections are routed by server name and passed through unchanged. `hbone`: HTTP/2 CONNECT
        /// over mutual TLS, which the gateway terminates. `auto`: both; a hello without a server name whose only
        /// ALPN is `h2` is treated as HBONE. `tcp`: any bytes, passed through unchanged to `target`; no hello is read.
        PROTOCOL "protocol": form::Choice<ListenerProtocol> = ListenerProtocol::default();
        /// ALPN protocols for SNI: a client must offer at least one of them. HBONE always requires `h2`.
        ALPN "alpn": form::NonEmpty<form::Alpn> => "no check";
        /// Source addresses that may connect. The gateway closes other connections before it reads a byte.
        /// With `proxyProtocol`, the address that the header announces is judged.
        FROM "from": form::NonEmpty<form::Cidr> => "everyone";
        /// Source addresses that may not connect, although `from` has them.
        EXCEPT_FROM "exceptFrom": form::NonEmpty<form::Cidr> => "none";
        /// PROXY protocol, versions 1 and 2: a header by which a load balancer in front of the gateway announces the client's
        /// address.
        PROXY_PROTOCOL "proxyProtocol": ProxyProtocol => "forbidden";
        /// Limits of a ClientHello.
        HELLO "hello": Hello => "defaults";
        /// How a TLS client learns that it is refused. `alert`: it gets a TLS alert that names the kind of fault, and then the end
        /// of the connection. `close`: it gets the end of the connection alone. `reset`: the connection is reset. The last two are
        /// for clients that count only a closed connection as refused. HBONE callers are refused within TLS, whatever this key is.
        REFUSAL "refusal": form::Choice<RefusalMode> = RefusalMode::default();
        /// Routes of this listener, in addition to those of the top level. Of two equal keys, that of the listener wins.
        ROUTES "routes": form::MapOf<RouteKey, RouteForms> => "none";
        /// Target of connections whose first bytes are not TLS, such as SSH on port 443, in the forms of `target`. A client that sends
        /// nothing is still refused (`hello_timeout`), and so is one that sends a PROXY header.
        FALLBACK "fallback": RouteForms => "they are refused (`not_tls`)";
        /// Where a listener of protocol `tcp` leads; required there. A service needs no export rule for it. Of its endpoints those
        /// with `tls: none` are chosen, or else those with `tls: own`, but never those with `tls: mesh`.
        TARGET "target": RouteForms => "none";
    }

    /// The PROXY header at the beginning of connections.
    pub(super) ProxyProtocol "proxyProtocol" {
        /// `forbid`: a connection that begins with a header is refused with the reason `not_tls`. `require`: each
        /// connection begins with a header, and the address that the header announces counts as the address of the
        /// client everywhere; a connection without a header is refused with the reason `proxy_protocol`.
        MODE "mode": form::Choice<ProxyMode> = ProxyMode::default();
        /// Addresses of the load balancers whose headers are believed; required with `mode: require`. Other peers are
        /// refused before a byte is read.
        FROM "from": form::NonEmpty<form::Cidr> => "nobody";
    }

    /// Limits of a ClientHello.
    pub(super) Hello "hello" {
        /// Time from accept until the whole hello has arrived.
        TIMEOUT "timeout": form::Timeout = HelloLimits::default().timeout;
        /// Size of a hello, including record headers.
        MAX_BYTES "maxBytes": form::HelloSize = HelloLimits::default().bytes_max;
        /// Number of TLS records that a hello may span.
        MAX_RECORDS "maxRecords": form::Integer<usize, 1, 16_384> = HelloLimits::default().records_max;
    }

    /// A rule that makes services reachable through listeners.
    pub(super) Export "export" {
        /// Host names of the services that the rule makes reachable.
        SERVICES "services": form::NonEmpty<form::Pattern> => required;
        /// Host names that the rule does not make reachable although `services` matches them.
        EXCEPT "except": form::List<form::Pattern> => "none";
        /// Service ports that the rule applies to.
        PORTS "ports": form::NonEmpty<form::Port> => "all";
        /// Clusters whose endpoints the rule makes reachable.
        CLUSTERS "clusters": form::NonEmpty<form::ClusterName> => "all";
        /// Mark that a service must have to match the rule. The team that runs the service sets it, separately in
        /// each cluster.
        MARKED "marked": Marked => "no mark is needed";
        /// Listeners through which the services can be reached.
        LISTENERS "listeners": form::NonEmpty<form::Text> => "all";
        /// Callers that may reach the services. A caller must match both `cidrs` and `identities` where both are
        /// given.
        TO "to": Scope => "everyone";
        /// Endpoints that are reachable where Kubernetes or an istiod says their TLS mode, which they infer from labels of pods and
        /// names of ports. `mesh`: those with mTLS of the mesh, by mesh name and by authority. `own`: those outside the mesh too, and
        /// all of them by plain host name. Modes that you write in `services`, files or etcd are not affected. Only a rule that names
        /// the namespace, as `*.kube-system.svc.cluster.local` does, reaches services of `kube-system` and of the mesh's system
        /// namespace.
        TLS "tls": form::Choice<ExportTls> => "`mesh`";
    }

    /// A mark of services in Kubernetes registries. A mark alone makes nothing reachable.
    pub(super) Marked "exportMark" one of [SERVICE_EXPORT, LABELS, NAMESPACE_LABELS] {
        /// `true`: a ServiceExport (`multicluster.x-k8s.io`) with the service's name and namespace must exist.
        SERVICE_EXPORT "serviceExport": form::Boolean => "not required";
        /// Labels that the Service must have.
        LABELS "labels": form::Labels => "not required";
        /// Labels that the Service's namespace must have.
        NAMESPACE_LABELS "namespaceLabels": form::Labels => "not required";
    }

    /// Callers that an export rule allows.
    pub(super) Scope "exportScope" {
        /// Source addresses of the callers.
        CIDRS "cidrs": form::NonEmpty<form::Cidr> => "any";
        /// SPIFFE IDs of the callers; `/*` at the end matches one or more further path segments. Clients of an SNI
        /// listener have no identity, so a rule with this key never matches them.
        IDENTITIES "identities": form::NonEmpty<form::IdentityPattern> => "any caller, with or without identity";
    }

    /// Limits on simultaneous connections.
    pub(super) Limits "limits" {
        /// Simultaneous connections. The file descriptor limit of the process may lower this value.
        CONNECTIONS "connections": form::Integer<usize, 1, 10_000_000> = settings::Limits::default().connections;
        /// Simultaneous connections whose hello has not arrived completely. Each worker may have an equal part of them; above it, the
        /// worker closes a connection of the source that has most there.
        PENDING_HELLOS "pendingHellos": form::Integer<usize, 1, 10_000_000>
            => "10000, or a quarter of the descriptor limit if that is less";
        /// Memory of the process: a share of the smallest limit of its cgroups (`memory.max`, `memory.high`), or of the host's memory,
        /// or a size, at most that much. HBONE may hold half of it, and one identity a quarter of that; names of xDS clients, of
        /// ztunnels, records of peers and unread bytes in the kernel have shares of their own; the files of a registry, and one answer
        /// of another registry, have at most a quarter. While more than 80% are in use, new HBONE connections have windows of 256KiB;
        /// above 90%, the gateway ends the CONNECT stream that holds most, one each second.
        MEMORY "memory": form::Memory = MemoryLimit::default();
        /// Limits of each source. A source at its limit does not affect other sources.
        PER_SOURCE "perSource": PerSource => "none";
        /// Limits of each service.
        PER_SERVICE "perService": PerService => "none";
    }

    /// Limits of each source: the client's address, or the address block of the length in `prefix`. A connection above
    /// a limit is refused with the reason `limit_source`. An HBONE connection counts once, whatever the number of its
    /// CONNECT streams.
    pub(super) PerSource "perSource" {
        /// Simultaneous connections.
        CONNECTIONS "connections": form::Integer<usize, 1, 10_000_000> => "no limit";
        /// New connections per second. A source may open the connections of one second at once.
        NEW_PER_SECOND "newPerSecond": form::Integer<u32, 1, 1_000_000> => "no limit";
        /// Simultaneous connections whose hello or HBONE handshake is not complete. When a source exceeds this limit,
        /// the gateway closes the connection of the source that has waited longest.
        PENDING_HELLOS "pendingHellos": form::Integer<usize, 1, 10_000_000> => "no limit";
        /// Addresses that count as one source, here and for the shares of `limits.connections`. After a change,
        /// open connections stay counted for their former block.
        PREFIX "prefix": SourcePrefix => "defaults";
    }

    /// Number of leading bits of an address that make one source.
    pub(super) SourcePrefix "sourcePrefix" {
        /// Bits of an IPv4 address.
        IPV4 "ipv4": form::Integer<u8, 1, 32> = limits::SourcePrefix::default().ipv4;
        /// Bits of an IPv6 address.
        IPV6 "ipv6": form::Integer<u8, 1, 128> = limits::SourcePrefix::default().ipv6;
    }

    /// Limits of each service: one service of the mesh, with all of its ports and subsets, or one route with `endpoints`.
    pub(super) PerService "perService" {
        /// Simultaneous connections and CONNECT streams. A connection above the limit is refused with the reason `limit_service`.
        CONNECTIONS "connections": form::Integer<usize, 1, 10_000_000> => "no limit";
        /// Bytes per second to the service, and from it, through one replica of the gateway. Busy sources (as in `perSource`) and
        /// identities of HBONE callers get equal shares, which their busy connections and CONNECT streams divide.
        BYTES_PER_SECOND "bytesPerSecond": form::Bandwidth => "no limit";
    }

    /// Timeouts of connections.
    pub(super) Timeouts "timeouts" {
        /// Time that an endpoint may take to accept a connection, unless a route, a policy or `defaults` sets
        /// `connectTimeout`.
        CONNECT "connect": form::Timeout = settings::Timeouts::default().connect;
        /// Deadline for starting another connection attempt, counted from the first attempt.
        CONNECT_TOTAL "connectTotal": form::Timeout = settings::Timeouts::default().connect_total;
        /// A connection without a byte in either direction is closed after this time; `0s`: never. This time and the next two are
        /// checked once a second, so connections end up to about two seconds later.
        IDLE "idle": form::TimeoutOrZero = settings::Timeouts::default().idle;
        /// A half-closed connection is closed after this time without a byte in the open direction; `0s`: never. On
        /// an SNI listener the time is at most 30s while the endpoint has not sent a byte.
        HALF_CLOSE "halfClose": form::TimeoutOrZero = settings::Timeouts::default().half_close;
        /// A connection or stream is reset if bytes wait for a peer that is alive but has read nothing for this
        /// time; `0s`: never. A connection that `bytesPerSecond` slows is not reset for this. Independently of this key, a peer that
        /// does not answer at all is detected within two minutes, and the kernel memory of all connections with bytes that wait for
        /// a peer has a limit: a quarter of the memory at which the kernel begins to reduce all TCP buffers of the host (the second
        /// value of `net.ipv4.tcp_mem`), or of `limits.memory` if that is less. Above half of the limit, new connections get small
        /// receive buffers, and so does each connection whose peer has read nothing for a second, or that `bytesPerSecond` slows, so
        /// that the sender keeps the bytes. Above the limit, the largest
        /// connection whose peer has read nothing for a minute is reset, and then the next, until the rest is within the limit.
        /// Connections of at most 256KiB, or their equal share of the limit if that is less, are not reset for this.
        STALLED "stalled": form::TimeoutOrZero = settings::Timeouts::default().stalled;
    }

    /// Timing of a graceful stop.
    pub(super) Drain "drain" {
        /// Time between failing `/readyz` and closing the listeners.
        DELAY "delay": form::Period = crate::Drain::default().delay;
        /// Time that open connections may take to finish before the gateway resets them.
        TIMEOUT "timeout": form::Period = crate::Drain::default().timeout;
    }
}

/// Files to merge.
#[derive(Debug)]
pub(super) struct Include;

impl Form for Include {
    /// A node that is a path or a list of them.
    type Value = ();
    const KIND: Kind = Kind::Union(&Union {
        name: "include",
        expects: "a path such as conf.d/*.yaml, or a list of paths",
        kinds: &[form::Path::KIND, form::NonEmpty::<form::Path>::KIND],
    });

    fn read(_: &tree::Node) -> Option<()> {
        Some(())
    }
}

/// A number of threads.
#[derive(Debug)]
pub(super) struct Workers;

impl Form for Workers {
    type Value = crate::Workers;
    const KIND: Kind = Kind::Union(&Union {
        name: "workers",
        expects: "auto, or a whole number from 1 to 1024",
        kinds: &[Kind::Choice(&["auto"]), Kind::Integer { min: 1, max: 1024 }],
    });

    fn read(node: &tree::Node) -> Option<crate::Workers> {
        match node.text()? {
            "auto" => Some(crate::Workers::Auto),
            count => count.parse().ok().and_then(NonZeroUsize::new).map(crate::Workers::Count),
        }
    }
}

impl form::Written for Workers {
    fn write(value: &crate::Workers) -> String {
        match value {
            crate::Workers::Auto => "auto".to_owned(),
            crate::Workers::Count(count) => count.to_string(),
        }
    }
}
