//! The keys of other networks: their gateways, the aggregator, and the xDS server.

use crate::document::scalar;
use crate::document::table::{Kind, Object, PORT, Union, default, list, optional, required, some};

use super::{CIDR, DURATION, TEXT, TIMEOUT};

pub(in crate::config) static NETWORK: Object = Object {
    name: "network",
    doc: "One network, and how other networks reach it.",
    one_of: &[],
    fields: &[
        default(
            "access",
            Kind::Choice(&["gateway", "direct"]),
            "gateway",
            "How other networks reach the endpoints: `gateway`: only through the network's gateways; `direct`: by \
             the endpoints' own addresses.",
        ),
        optional(
            "cidrs",
            list(&CIDR),
            "none",
            "Address blocks of the network. They determine the network of a client's address, and of an endpoint \
             whose registry sets no network.",
        ),
        optional(
            "gateways",
            list(&Kind::Object(&GATEWAY)),
            "none",
            "Gateways through which other networks reach the network.",
        ),
    ],
};

pub(in crate::config) static GATEWAY: Object = Object {
    name: "gateway",
    doc: "One gateway of a network. At least one of the two ports is required.",
    one_of: &[],
    fields: &[
        required(
            "address",
            Kind::Text(&scalar::HOST),
            "Address of the gateway. A host name is resolved and stands for all of its addresses.",
        ),
        optional("sniPort", PORT, "no SNI traffic", "Port for TLS connections routed by SNI."),
        optional("hbonePort", PORT, "no HBONE traffic", "Port for HBONE."),
        optional(
            "cluster",
            TEXT,
            "none",
            "Cluster of the gateway. If a cluster has gateways of its own, its endpoints are reached only \
             through these.",
        ),
        optional(
            "locality",
            Kind::Text(&scalar::LOCALITY),
            "unknown",
            "Region, zone and subzone of the gateway.",
        ),
        default(
            "weight",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "1",
            "Share of the network's traffic, relative to the other gateways. The weights of gateways with the \
             same address and port are added.",
        ),
        optional("identity", Kind::Text(&scalar::IDENTITY), "none", "SPIFFE ID of the gateway."),
    ],
};

pub(in crate::config) static AGGREGATOR: Object = Object {
    name: "aggregator",
    doc: "Start-up wait, staleness, and protection against mass removal of services. While a registry cannot be \
          read, its last good state stays in use.",
    one_of: &[],
    fields: &[
        default(
            "staleAfter",
            TIMEOUT,
            "2m",
            "After a registry has been unreadable for this time, its endpoints are used only for service ports \
             without a ready endpoint from another registry.",
        ),
        default(
            "expireAfter",
            Kind::Union(&EXPIRY),
            "never",
            "After a registry has been unreadable for this time, its endpoints are removed.",
        ),
        default(
            "withdrawalHold",
            DURATION,
            "30s",
            "An update that removes the last ready endpoint of more than 10 services and of more than 30 % of the \
             registry's services is applied only after this time; `0s`: at once.",
        ),
        default(
            "startTimeout",
            DURATION,
            "30s",
            "Time that a start waits for registries before the listeners open without them.",
        ),
    ],
};

static EXPIRY: Union = Union {
    name: "expiry",
    expects: "never, or a whole number above 0 with its unit: 250ms, 10s, 5m or 1h",
    kinds: &[Kind::Choice(&["never"]), TIMEOUT],
};

pub(in crate::config) static DNS: Object = Object {
    name: "dns",
    doc: "DNS resolution of the host names of endpoints and gateways.",
    one_of: &[],
    fields: &[
        optional(
            "servers",
            list(&Kind::Text(&scalar::NAME_SERVER)),
            "the system's",
            "DNS servers, which the gateway asks over UDP and TCP.",
        ),
        default("minTtl", TIMEOUT, "1s", "Shortest time for which an answer is used, whatever its TTL."),
        default("maxTtl", TIMEOUT, "1h", "Longest time for which an answer is used, whatever its TTL."),
    ],
};

pub(in crate::config) static STATE: Object = Object {
    name: "state",
    doc: "Copies of registries on disk.",
    one_of: &[],
    fields: &[required(
        "dir",
        Kind::Text(&scalar::PATH),
        "Directory for the last good copy of each registry. A start uses the copy of a registry that cannot be \
         read.",
    )],
};

pub(in crate::config) static XDS: Object = Object {
    name: "xds",
    doc: "The xDS server. It gives each client the endpoints as seen from the client's network.",
    one_of: &[],
    fields: &[
        required(
            "bind",
            Kind::Text(&scalar::BIND_ADDRESS),
            "Address of the xDS server. An address other than loopback requires `tls` and `clients`.",
        ),
        optional(
            "tls",
            Kind::Object(&XDS_TLS),
            "none",
            "Mutual TLS 1.3. The server uses this gateway's own `identity` and verifies clients against `trust`.",
        ),
        optional(
            "clients",
            some(&Kind::Object(&XDS_CLIENT)),
            "any client may claim anything",
            "Rules that say which network and cluster a client may claim. A client is refused unless one rule \
             allows it.",
        ),
    ],
};

pub(in crate::config) static XDS_TLS: Object = Object {
    name: "xdsTls",
    doc: "TLS for xDS clients. It has no keys; write `tls: {}`.",
    one_of: &[],
    fields: &[],
};

pub(in crate::config) static XDS_CLIENT: Object = Object {
    name: "xdsClient",
    doc: "The networks and clusters that some clients may claim.",
    one_of: &[],
    fields: &[
        optional(
            "identities",
            some(&Kind::Text(&scalar::IDENTITY_PATTERN)),
            "any client, with or without identity",
            "SPIFFE IDs of the clients, from their certificates; `/*` at the end matches one or more further path \
             segments.",
        ),
        optional("cidrs", list(&CIDR), "any", "Source addresses of the clients."),
        optional("networks", some(&TEXT), "any", "Networks that the clients may claim."),
        optional("clusters", some(&TEXT), "any", "Clusters that the clients may claim."),
    ],
};
