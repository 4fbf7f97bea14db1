//! The keys of the config file. To add one, add an entry here, and read it in the module of its section.

use crate::document::scalar;
use crate::document::services::SERVICES;
use crate::document::table::{Kind, Object, PORT, Union, default, list, optional, required, some};

pub(super) mod identity;
pub(super) mod mesh;
pub(super) mod registries;
pub(super) mod routes;
pub(super) mod telemetry;

use identity::{HBONE, IDENTITY, TRUST};
use mesh::{AGGREGATOR, DNS, NETWORK, STATE, XDS};
use registries::{LABELS, REGISTRY};
use routes::{DEFAULTS, LISTENER_NAMES, POLICY, ROUTE_FORMS, ROUTE_KEY};
use telemetry::{ADMIN, TELEMETRY};

const DURATION: Kind = Kind::Text(&scalar::DURATION);
const TIMEOUT: Kind = Kind::Text(&scalar::TIMEOUT);
const TEXT: Kind = Kind::Text(&scalar::TEXT);
const PATTERN: Kind = Kind::Text(&scalar::PATTERN);
const CIDR: Kind = Kind::Text(&scalar::CIDR);
const BIND: Kind = Kind::Text(&scalar::BIND);

pub(super) static ROOT: Object = Object {
    name: "config",
    doc: "The config file of isthmus. `${NAME}` and `${NAME:-default}` in a value are replaced by an environment \
          variable; `$${` is a literal `${`. `off` and `false` mean the same.",
    one_of: &[],
    fields: &[
        optional(
            "include",
            Kind::Union(&INCLUDE),
            "none",
            "Files to merge into this one: maps are merged, lists are appended, and a key that two files set is \
             an error. Paths are relative to this file; `*` matches any characters in the last part of a path. An \
             included file cannot include others.",
        ),
        optional(
            "node",
            Kind::Object(&NODE),
            "empty",
            "The workload that this gateway is: its name, cluster, \
             network and locality.",
        ),
        optional("mesh", Kind::Object(&MESH), "defaults", "Settings that all members of the mesh share."),
        optional(
            "listen",
            BIND,
            "none",
            "Short form of one SNI listener. Its name is `default`, and it comes before the entries of \
             `listeners`.",
        ),
        optional(
            "listeners",
            list(&Kind::Object(&LISTENER)),
            "none",
            "Addresses on which clients connect. A config needs at least one, here or as `listen`, unless it has \
             `xds`.",
        ),
        optional(
            "routes",
            Kind::Map { key: &ROUTE_KEY, of: &Kind::Union(&ROUTE_FORMS) },
            "none",
            "Routes by server name: a host name, `\"*.suffix\"`, `\"*\"` for every other name, or `\"-\"` for \
             clients that send no server name. The most specific name applies, whatever the order in the file.",
        ),
        optional(
            "services",
            SERVICES,
            "none",
            "Services kept in this file. Their cluster is `node.cluster` and their network `node.network`.",
        ),
        optional(
            "registries",
            list(&Kind::Object(&REGISTRY)),
            "none",
            "Further sources of services: watched files and etcd. Where two registries disagree about a service, \
             the earlier registry applies.",
        ),
        optional(
            "exports",
            list(&Kind::Object(&EXPORT)),
            "nothing",
            "Rules that make services of the mesh reachable through a listener. A service that no rule names \
             cannot be reached.",
        ),
        optional(
            "defaults",
            Kind::Object(&DEFAULTS),
            "defaults",
            "Load balancing, ejection and connect timeout for all services of the mesh.",
        ),
        optional(
            "policies",
            list(&Kind::Object(&POLICY)),
            "none",
            "The settings of `defaults` for some services. Only the most specific policy that matches applies; a \
             key that it omits takes the built-in default, not the value in `defaults`.",
        ),
        optional(
            "networks",
            Kind::Map { key: &scalar::TEXT, of: &Kind::Object(&NETWORK) },
            "none",
            "Networks of the mesh, by name.",
        ),
        optional(
            "identity",
            Kind::Object(&IDENTITY),
            "none",
            "Source of this gateway's own certificate. Listeners of protocol `hbone` or `auto`, and `xds.tls`, \
             need one.",
        ),
        optional(
            "trust",
            list(&Kind::Object(&TRUST)),
            "none",
            "Root certificates of each trust domain, which verify HBONE callers and xDS clients of that domain.",
        ),
        optional("hbone", Kind::Object(&HBONE), "defaults", "Limits of HBONE connections and their streams."),
        optional("limits", Kind::Object(&LIMITS), "defaults", "Limits on simultaneous connections."),
        optional("timeouts", Kind::Object(&TIMEOUTS), "defaults", "Timeouts of connections."),
        optional("drain", Kind::Object(&DRAIN), "defaults", "Timing of a graceful stop."),
        optional(
            "dns",
            Kind::Object(&DNS),
            "defaults",
            "DNS resolution of the host names of endpoints and gateways.",
        ),
        optional(
            "aggregator",
            Kind::Object(&AGGREGATOR),
            "defaults",
            "Start-up wait, staleness, and protection against mass removal of services.",
        ),
        optional("state", Kind::Object(&STATE), "nothing on disk", "Copies of registries on disk."),
        optional(
            "xds",
            Kind::OrOff(&Kind::Object(&XDS)),
            "not opened",
            "The xDS server. It gives each client the endpoints as seen from the client's network.",
        ),
        optional(
            "admin",
            Kind::OrOff(&Kind::Object(&ADMIN)),
            "defaults",
            "The HTTP API for operators; it has no authentication of its own.",
        ),
        optional(
            "telemetry",
            Kind::Object(&TELEMETRY),
            "defaults",
            "Metrics, health checks, logs and traces.",
        ),
        default(
            "workers",
            Kind::Union(&WORKERS),
            "auto",
            "Number of data-plane threads; `auto` is the CPU quota. A change takes effect after a restart.",
        ),
    ],
};

static INCLUDE: Union = Union {
    name: "include",
    expects: "a path such as conf.d/*.yaml, or a list of paths",
    kinds: &[Kind::Text(&scalar::PATH), some(&Kind::Text(&scalar::PATH))],
};

static WORKERS: Union = Union {
    name: "workers",
    expects: "auto, or a whole number from 1 to 1024",
    kinds: &[Kind::Choice(&["auto"]), Kind::Integer { min: 1, max: 1024 }],
};

pub(super) static INCLUDE_ONLY: Object = Object {
    name: "config",
    doc: "",
    one_of: &[],
    fields: &[optional("include", Kind::Union(&INCLUDE), "none", "")],
};

pub(super) static NODE: Object = Object {
    name: "node",
    doc: "The workload that this gateway is. Logs and metrics carry these names.",
    one_of: &[],
    fields: &[
        optional("name", TEXT, "empty", "Name of the gateway, for example its pod name."),
        optional("namespace", TEXT, "empty", "Kubernetes namespace of the gateway."),
        optional("serviceAccount", TEXT, "empty", "Kubernetes service account of the gateway."),
        optional("cluster", TEXT, "empty", "Cluster of the gateway, and of the `services` in this file."),
        optional(
            "network",
            TEXT,
            "unknown",
            "Network of the gateway. The gateway connects clients only to endpoints of this network.",
        ),
        optional(
            "locality",
            Kind::Text(&scalar::LOCALITY),
            "unknown",
            "Region, zone and subzone of the gateway.",
        ),
    ],
};

pub(super) static MESH: Object = Object {
    name: "mesh",
    doc: "Settings that all members of the mesh share.",
    one_of: &[],
    fields: &[
        default(
            "clusterDomain",
            Kind::Text(&scalar::HOST_NAME),
            "cluster.local",
            "Suffix of the host names of Kubernetes services.",
        ),
        default(
            "trustDomain",
            Kind::Text(&scalar::TRUST_DOMAIN),
            "cluster.local",
            "SPIFFE trust domain of the mesh's identities.",
        ),
    ],
};

pub(super) static LISTENER: Object = Object {
    name: "listener",
    doc: "One address on which clients connect.",
    one_of: &[],
    fields: &[
        required(
            "name",
            TEXT,
            "Name of the listener, unique in the file. Routes, exports, logs and metrics refer \
             to it.",
        ),
        required(
            "bind",
            BIND,
            "Address and port. `\":port\"` is dual stack, or IPv4 only on a host without IPv6. Port 0 means a \
             free port and is allowed only on a loopback address.",
        ),
        default(
            "protocol",
            Kind::Choice(&["sni", "hbone", "auto"]),
            "sni",
            "`sni`: TLS connections are routed by server name and passed through unchanged. `hbone`: HTTP/2 \
             CONNECT over mutual TLS, which the gateway terminates. `auto`: both; a hello without a server name \
             whose only ALPN is `h2` is treated as HBONE.",
        ),
        optional(
            "alpn",
            some(&Kind::Text(&scalar::ALPN)),
            "no check",
            "ALPN protocols for SNI: a client must offer at least one of them. HBONE always requires `h2`.",
        ),
        optional(
            "from",
            some(&CIDR),
            "everyone",
            "Source addresses that may connect. The gateway closes other connections before it reads a byte.",
        ),
        optional("hello", Kind::Object(&HELLO), "defaults", "Limits of a ClientHello."),
    ],
};

pub(super) static HELLO: Object = Object {
    name: "hello",
    doc: "Limits of a ClientHello.",
    one_of: &[],
    fields: &[
        default("timeout", TIMEOUT, "10s", "Time from accept until the whole hello has arrived."),
        default(
            "maxBytes",
            Kind::Text(&scalar::HELLO_BYTES),
            "16KiB",
            "Size of a hello, including record headers.",
        ),
        default(
            "maxRecords",
            Kind::Integer { min: 1, max: 16_384 },
            "64",
            "Number of TLS records that a hello \
             may span.",
        ),
    ],
};

pub(super) static EXPORT: Object = Object {
    name: "export",
    doc: "A rule that makes services reachable through listeners.",
    one_of: &[],
    fields: &[
        required("services", some(&PATTERN), "Host names of the services that the rule makes reachable."),
        optional(
            "except",
            list(&PATTERN),
            "none",
            "Host names that the rule does not make reachable although \
             `services` matches them.",
        ),
        optional("ports", some(&PORT), "all", "Service ports that the rule applies to."),
        optional("clusters", some(&TEXT), "all", "Clusters whose endpoints the rule makes reachable."),
        optional(
            "marked",
            Kind::Object(&MARKED),
            "no mark is needed",
            "Mark that a service must have to match the rule. The team that runs the service sets it, separately \
             in each cluster.",
        ),
        optional("listeners", LISTENER_NAMES, "all", "Listeners through which the services can be reached."),
        optional(
            "to",
            Kind::Object(&SCOPE),
            "everyone",
            "Callers that may reach the services. A caller must match both `cidrs` and `identities` where both \
             are given.",
        ),
    ],
};

pub(super) static MARKED: Object = Object {
    name: "exportMark",
    doc: "A mark of services in Kubernetes registries. A mark alone makes nothing reachable.",
    one_of: &["serviceExport", "labels", "namespaceLabels"],
    fields: &[
        optional(
            "serviceExport",
            Kind::Boolean,
            "not required",
            "`true`: a ServiceExport (`multicluster.x-k8s.io`) with the service's name and namespace must exist.",
        ),
        optional("labels", LABELS, "not required", "Labels that the Service must have."),
        optional("namespaceLabels", LABELS, "not required", "Labels that the Service's namespace must have."),
    ],
};

pub(super) static SCOPE: Object = Object {
    name: "exportScope",
    doc: "Callers that an export rule allows.",
    one_of: &[],
    fields: &[
        optional("cidrs", some(&CIDR), "any", "Source addresses of the callers."),
        optional(
            "identities",
            some(&Kind::Text(&scalar::IDENTITY_PATTERN)),
            "any caller, with or without identity",
            "SPIFFE IDs of the callers; `/*` at the end matches one or more further path segments. Clients of an \
             SNI listener have no identity, so a rule with this key never matches them.",
        ),
    ],
};

pub(super) static LIMITS: Object = Object {
    name: "limits",
    doc: "Limits on simultaneous connections.",
    one_of: &[],
    fields: &[
        default(
            "connections",
            Kind::Integer { min: 1, max: 10_000_000 },
            "100000",
            "Simultaneous connections. The file descriptor limit of the process may lower this value.",
        ),
        optional(
            "pendingHellos",
            Kind::Integer { min: 1, max: 10_000_000 },
            "10000, or a quarter of the descriptor limit if that is less",
            "Simultaneous connections whose hello has not arrived completely.",
        ),
    ],
};

pub(super) static TIMEOUTS: Object = Object {
    name: "timeouts",
    doc: "Timeouts of connections.",
    one_of: &[],
    fields: &[
        default(
            "connect",
            TIMEOUT,
            "3s",
            "Time that an endpoint may take to accept a connection, unless a route, a policy or `defaults` sets \
             `connectTimeout`.",
        ),
        default(
            "connectTotal",
            TIMEOUT,
            "10s",
            "Deadline for starting another connection attempt, counted from the first attempt.",
        ),
        default(
            "idle",
            DURATION,
            "0s",
            "A connection without a byte in either direction is closed after this \
             time; `0s`: never.",
        ),
        default(
            "halfClose",
            DURATION,
            "5m",
            "A half-closed connection is closed after this time without a byte in the open direction; `0s`: \
             never. On an SNI listener the time is at most 30s while the endpoint has not sent a byte.",
        ),
        default(
            "stalled",
            DURATION,
            "15m",
            "A connection or stream is reset if bytes wait for a peer that is alive but has read nothing for this \
             time; `0s`: never. Independently of this key, a peer that does not answer at all is detected within \
             two minutes.",
        ),
    ],
};

pub(super) static DRAIN: Object = Object {
    name: "drain",
    doc: "Timing of a graceful stop.",
    one_of: &[],
    fields: &[
        default("delay", DURATION, "0s", "Time between failing `/readyz` and closing the listeners."),
        default(
            "timeout",
            DURATION,
            "30s",
            "Time that open connections may take to finish before the gateway \
             resets them.",
        ),
    ],
};
