//! The keys of the config file. To add one: an entry here, and the line that takes it out.

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
use registries::REGISTRY;
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
    doc: "The config file of isthmus. `${NAME}` and `${NAME:-default}` in a value read the environment, `$${` is a \
          literal `${`; `off` and `false` mean the same.",
    one_of: &[],
    fields: &[
        optional(
            "include",
            Kind::Union(&INCLUDE),
            "none",
            "Files to merge into this one: maps are united, lists appended; anything said twice is an error. \
             Relative to this file; `*` stands for any characters in the last part of the path. Included files \
             cannot include others.",
        ),
        optional("node", Kind::Object(&NODE), "empty", "This gateway's own workload."),
        optional("mesh", Kind::Object(&MESH), "defaults", "What is common to the whole mesh."),
        optional(
            "listen",
            BIND,
            "none",
            "The short form of one SNI listener, named `default`; first of the `listeners` if there are others.",
        ),
        optional(
            "listeners",
            list(&Kind::Object(&LISTENER)),
            "none",
            "Where clients connect. A config needs one, here or as `listen`, unless it has `xds`.",
        ),
        optional(
            "routes",
            Kind::Map { key: &ROUTE_KEY, of: &Kind::Union(&ROUTE_FORMS) },
            "none",
            "Names of your own beside the mesh's: a host name, `\"*.suffix\"`, `\"*\"`, or `\"-\"` for clients \
             that give no name. The most specific name wins, whatever the order.",
        ),
        optional(
            "services",
            SERVICES,
            "none",
            "The registry kept in this file; its cluster and network are the node's.",
        ),
        optional(
            "registries",
            list(&Kind::Object(&REGISTRY)),
            "none",
            "More services, from files that are watched and from etcd. A later registry never overrules an earlier one.",
        ),
        optional(
            "exports",
            list(&Kind::Object(&EXPORT)),
            "nothing",
            "What of the mesh's services can be reached through a listener: only what a rule names.",
        ),
        optional(
            "defaults",
            Kind::Object(&DEFAULTS),
            "defaults",
            "How endpoints of the mesh's services are chosen and dialled.",
        ),
        optional(
            "policies",
            list(&Kind::Object(&POLICY)),
            "none",
            "The same for some services. The most specific name wins whole: keys it leaves out have their own \
             default, not that of `defaults`.",
        ),
        optional(
            "networks",
            Kind::Map { key: &scalar::TEXT, of: &Kind::Object(&NETWORK) },
            "none",
            "The networks of the mesh, by name.",
        ),
        optional(
            "identity",
            Kind::Object(&IDENTITY),
            "none",
            "The certificate by which this gateway identifies itself; listeners that take HBONE need one.",
        ),
        optional(
            "trust",
            list(&Kind::Object(&TRUST)),
            "none",
            "Whom it believes: the roots of trust domains, each apart.",
        ),
        optional("hbone", Kind::Object(&HBONE), "defaults", "What HBONE connections and streams may cost."),
        optional("limits", Kind::Object(&LIMITS), "defaults", "How much is taken on at once."),
        optional("timeouts", Kind::Object(&TIMEOUTS), "defaults", "How long is waited."),
        optional("drain", Kind::Object(&DRAIN), "defaults", "How the gateway stops."),
        optional(
            "dns",
            Kind::Object(&DNS),
            "defaults",
            "How host names of endpoints and gateways are looked up.",
        ),
        optional(
            "aggregator",
            Kind::Object(&AGGREGATOR),
            "defaults",
            "How registries are waited for, and doubted.",
        ),
        optional("state", Kind::Object(&STATE), "nothing on disk", "What is kept on disk."),
        optional(
            "xds",
            Kind::OrOff(&Kind::Object(&XDS)),
            "not opened",
            "Endpoints as seen from each client's network, by xDS.",
        ),
        optional(
            "admin",
            Kind::OrOff(&Kind::Object(&ADMIN)),
            "defaults",
            "The HTTP API for operators; it has no authentication of its own.",
        ),
        optional("telemetry", Kind::Object(&TELEMETRY), "defaults", "Metrics, health, logs and traces."),
        default(
            "workers",
            Kind::Union(&WORKERS),
            "auto",
            "Data-plane threads; `auto` is the CPU quota. A change needs a restart.",
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
    doc: "This gateway's own workload, as logs and metrics name it.",
    one_of: &[],
    fields: &[
        optional("name", TEXT, "empty", "Its name, as that of its pod."),
        optional("namespace", TEXT, "empty", "Its namespace."),
        optional("serviceAccount", TEXT, "empty", "Its service account."),
        optional("cluster", TEXT, "empty", "The cluster it is in, which is that of this file's `services`."),
        optional(
            "network",
            TEXT,
            "unknown",
            "The network it is on: it passes connections to endpoints of this network alone.",
        ),
        optional("locality", Kind::Text(&scalar::LOCALITY), "unknown", "Its region, zone and subzone."),
    ],
};

pub(super) static MESH: Object = Object {
    name: "mesh",
    doc: "What is common to the whole mesh.",
    one_of: &[],
    fields: &[
        default(
            "clusterDomain",
            Kind::Text(&scalar::HOST_NAME),
            "cluster.local",
            "The suffix of the hostnames of Kubernetes services.",
        ),
        default(
            "trustDomain",
            Kind::Text(&scalar::TRUST_DOMAIN),
            "cluster.local",
            "The SPIFFE trust domain of the mesh's identities.",
        ),
    ],
};

pub(super) static LISTENER: Object = Object {
    name: "listener",
    doc: "One address on which clients connect.",
    one_of: &[],
    fields: &[
        required("name", TEXT, "Unique; routes, exports, logs and metrics call it so."),
        required(
            "bind",
            BIND,
            "`\":port\"` is dual stack (IPv4 alone where the host has no IPv6). Port 0 takes a free one, on a \
             loopback address only.",
        ),
        default(
            "protocol",
            Kind::Choice(&["sni", "hbone", "auto"]),
            "sni",
            "`sni`: TLS is routed by its server name and passed on as it is. `hbone`: HTTP/2 CONNECT over mutual TLS, \
             ended here. `auto`: both; a hello without server name that offers `h2` alone is HBONE.",
        ),
        optional(
            "alpn",
            some(&Kind::Text(&scalar::ALPN)),
            "no check",
            "Protocols of which a client has to offer one, where it is routed by SNI; HBONE always asks for `h2`.",
        ),
        optional(
            "from",
            some(&CIDR),
            "everyone",
            "Source addresses let in; others are closed before a byte of theirs is read.",
        ),
        optional("hello", Kind::Object(&HELLO), "defaults", "What a ClientHello may cost."),
    ],
};

pub(super) static HELLO: Object = Object {
    name: "hello",
    doc: "What a ClientHello may cost.",
    one_of: &[],
    fields: &[
        default("timeout", TIMEOUT, "10s", "From accept until the hello is whole."),
        default("maxBytes", Kind::Text(&scalar::HELLO_BYTES), "16KiB", "Its size, record headers included."),
        default("maxRecords", Kind::Integer { min: 1, max: 16_384 }, "64", "TLS records it may be cut into."),
    ],
};

pub(super) static EXPORT: Object = Object {
    name: "export",
    doc: "A rule that lets services be reached.",
    one_of: &[],
    fields: &[
        required("services", some(&PATTERN), "Names of services."),
        optional("except", list(&PATTERN), "none", "Names taken out of these again."),
        optional("ports", some(&PORT), "all", "Ports of the services."),
        optional("clusters", some(&TEXT), "all", "The clusters whose endpoints the rule speaks of."),
        optional("listeners", LISTENER_NAMES, "all", "The listeners through which they can be reached."),
        optional(
            "to",
            Kind::Object(&SCOPE),
            "everyone",
            "Who may reach them; of the kinds given, all have to match.",
        ),
    ],
};

pub(super) static SCOPE: Object = Object {
    name: "exportScope",
    doc: "Who may use what a rule offers.",
    one_of: &[],
    fields: &[
        optional("cidrs", some(&CIDR), "any", "Source addresses."),
        optional(
            "identities",
            some(&Kind::Text(&scalar::IDENTITY_PATTERN)),
            "any, or none",
            "Identities; `/*` at the end stands for one or more further segments. Clients of an SNI listener \
             have none.",
        ),
    ],
};

pub(super) static LIMITS: Object = Object {
    name: "limits",
    doc: "How much is taken on at once.",
    one_of: &[],
    fields: &[
        default(
            "connections",
            Kind::Integer { min: 1, max: 10_000_000 },
            "100000",
            "Connections at once: this, or what the descriptors allow, whichever is less.",
        ),
        optional(
            "pendingHellos",
            Kind::Integer { min: 1, max: 10_000_000 },
            "10000, or a quarter of the descriptors",
            "Connections at once whose hello is not yet whole.",
        ),
    ],
};

pub(super) static TIMEOUTS: Object = Object {
    name: "timeouts",
    doc: "How long is waited.",
    one_of: &[],
    fields: &[
        default(
            "connect",
            TIMEOUT,
            "3s",
            "How long an endpoint may take to accept, where nothing else is said.",
        ),
        default(
            "connectTotal",
            TIMEOUT,
            "10s",
            "No further endpoint is tried later than this after the first.",
        ),
        default("idle", DURATION, "0s", "A connection ends after this long without a byte; `0s`: never."),
        default(
            "halfClose",
            DURATION,
            "5m",
            "A connection of which one direction has ended ends after this long without a byte in the other; \
             `0s`: never. On a listener of SNI it ends after 30s at most while the endpoint has not sent a byte.",
        ),
        default(
            "stalled",
            DURATION,
            "15m",
            "A connection or stream is reset when bytes wait for a peer that answers, but has read nothing for this \
             long; `0s`: never. A peer that does not answer is found by itself within two minutes.",
        ),
    ],
};

pub(super) static DRAIN: Object = Object {
    name: "drain",
    doc: "How the gateway stops.",
    one_of: &[],
    fields: &[
        default("delay", DURATION, "0s", "How long it goes on accepting when it is no longer ready."),
        default("timeout", DURATION, "30s", "How long connections may take to finish before they are reset."),
    ],
};
