//! The keys that speak of other networks: where they are entered, how registries are doubted, who is told of what.

use crate::document::scalar;
use crate::document::table::{Kind, Object, PORT, Union, default, list, optional, required, some};

use super::{CIDR, DURATION, TEXT, TIMEOUT};

pub(in crate::config) static NETWORK: Object = Object {
    name: "network",
    doc: "One network.",
    one_of: &[],
    fields: &[
        default(
            "access",
            Kind::Choice(&["gateway", "direct"]),
            "gateway",
            "How its endpoints are reached from other networks: `gateway` through its gateways alone, `direct` by \
             their addresses.",
        ),
        optional(
            "cidrs",
            list(&CIDR),
            "none",
            "Its addresses, by which the network of a source, and of an endpoint of a registry without one, is known.",
        ),
        optional(
            "gateways",
            list(&Kind::Object(&GATEWAY)),
            "none",
            "Where it is entered from other networks.",
        ),
    ],
};

pub(in crate::config) static GATEWAY: Object = Object {
    name: "gateway",
    doc: "One gateway of a network. It has at least one of the two ports.",
    one_of: &[],
    fields: &[
        required(
            "address",
            Kind::Text(&scalar::HOST),
            "Where it is; a host name is resolved, and stands for all its addresses.",
        ),
        optional("sniPort", PORT, "it takes none", "Where it takes TLS by SNI."),
        optional("hbonePort", PORT, "it takes none", "Where it takes HBONE."),
        optional("cluster", TEXT, "none in particular", "The cluster it belongs to."),
        optional("locality", Kind::Text(&scalar::LOCALITY), "unknown", "Region, zone and subzone."),
        default(
            "weight",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "1",
            "Its share of what goes to the network; gateways with the same address and port add up.",
        ),
        optional("identity", Kind::Text(&scalar::IDENTITY), "none", "Its SPIFFE ID."),
    ],
};

pub(in crate::config) static AGGREGATOR: Object = Object {
    name: "aggregator",
    doc: "How registries are waited for, and doubted. A registry that cannot be read keeps its last good state.",
    one_of: &[],
    fields: &[
        default(
            "staleAfter",
            TIMEOUT,
            "2m",
            "A registry that cannot be read for this long counts only for service ports without a ready endpoint \
             from another.",
        ),
        default(
            "expireAfter",
            Kind::Union(&EXPIRY),
            "never",
            "The endpoints of a registry that cannot be read for this long are withdrawn.",
        ),
        default(
            "withdrawalHold",
            DURATION,
            "30s",
            "For this long an update has to persist that takes the last ready endpoint from more than 10 services and \
             30 % of a registry's; `0s`: not at all.",
        ),
        default(
            "startTimeout",
            DURATION,
            "30s",
            "How long registries are waited for at start before the listeners open without them.",
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
    doc: "How host names of endpoints and gateways are looked up.",
    one_of: &[],
    fields: &[
        optional(
            "servers",
            list(&Kind::Text(&scalar::NAME_SERVER)),
            "the system's",
            "The servers to ask, by UDP and TCP.",
        ),
        default("minTtl", TIMEOUT, "1s", "No name is looked up again sooner than this after an answer."),
        default("maxTtl", TIMEOUT, "1h", "Nor later than this."),
    ],
};

pub(in crate::config) static STATE: Object = Object {
    name: "state",
    doc: "What is kept on disk.",
    one_of: &[],
    fields: &[required(
        "dir",
        Kind::Text(&scalar::PATH),
        "A directory for the last good copies of registries, from which a start goes on while they cannot be read.",
    )],
};

pub(in crate::config) static XDS: Object = Object {
    name: "xds",
    doc: "Endpoints as seen from each client's network, by xDS.",
    one_of: &[],
    fields: &[
        required(
            "bind",
            Kind::Text(&scalar::BIND_ADDRESS),
            "Where it listens; on anything but loopback with `tls` and `clients` alone.",
        ),
        optional(
            "tls",
            Kind::Object(&XDS_TLS),
            "none",
            "Mutual TLS 1.3 by this gateway's own `identity`; clients are held against `trust`.",
        ),
        optional(
            "clients",
            some(&Kind::Object(&XDS_CLIENT)),
            "any client may claim anything",
            "What clients may say they are; one of the rules has to let them.",
        ),
    ],
};

pub(in crate::config) static XDS_TLS: Object =
    Object { name: "xdsTls", doc: "TLS for xDS clients; it has no keys yet.", one_of: &[], fields: &[] };

pub(in crate::config) static XDS_CLIENT: Object = Object {
    name: "xdsClient",
    doc: "What some clients may say they are.",
    one_of: &[],
    fields: &[
        optional(
            "identities",
            some(&Kind::Text(&scalar::IDENTITY_PATTERN)),
            "any, or none",
            "Who the clients have to be, by their certificates: a SPIFFE ID, or all below a path (`…/*`).",
        ),
        optional("cidrs", list(&CIDR), "any", "Source addresses of the clients."),
        optional("networks", some(&TEXT), "any", "Networks they may be on."),
        optional("clusters", some(&TEXT), "any", "Clusters they may be in."),
    ],
};
