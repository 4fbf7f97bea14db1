//! The keys of routes, and of how endpoints are chosen for them and ejected.

use crate::document::scalar;
use crate::document::table::{Field, Kind, Object, PORT, Text, Union, default, optional, required, some};

use super::{PATTERN, TEXT, TIMEOUT};

/// The key of a route.
pub(in crate::config) static ROUTE_KEY: Text = Text {
    name: "routeKey",
    expects: "a host name, \"*.suffix\", \"*\", or \"-\" for clients that give no name",
    pattern: "^(-|\\*|(\\*\\.)?[A-Za-z0-9_.-]+)$",
    number: false,
    check: |text| crate::config::routes::route_name(text).map(drop),
};

pub(super) static ROUTE_FORMS: Union = Union {
    name: "routeForms",
    expects: "an address with its port (\"10.0.0.1:443\"), a list of them, or a map with endpoints or service",
    kinds: &[Kind::Text(&scalar::TARGET), some(&Kind::Union(&ROUTE_ENDPOINT_FORMS)), Kind::Object(&ROUTE)],
};

static ROUTE_ENDPOINT_FORMS: Union = Union {
    name: "routeEndpointForms",
    expects: "an address with its port (\"10.0.0.1:443\"), or a map with address, weight and locality",
    kinds: &[Kind::Text(&scalar::TARGET), Kind::Object(&ROUTE_ENDPOINT)],
};

/// How endpoints are chosen: of a route, of all services, of some.
const LOAD_BALANCING: Field = optional(
    "loadBalancing",
    Kind::Object(&LOAD_BALANCING_OBJECT),
    "defaults",
    "How one of the endpoints is chosen.",
);
const EJECTION_KEYS: Kind = Kind::Object(&EJECTION);
const EJECTION_OR_OFF: Field = optional(
    "ejection",
    Kind::OrOff(&EJECTION_KEYS),
    "defaults",
    "When an endpoint that fails is left out for a while.",
);
const CONNECT_TIMEOUT: Field =
    optional("connectTimeout", TIMEOUT, "`timeouts.connect`", "How long an endpoint may take to accept.");
const PANIC: Field =
    default("panic", Kind::Boolean, "true", "Whether all endpoints are tried when none is healthy.");

pub(super) const LISTENER_NAMES: Kind = Kind::List { of: &TEXT, min: 1 };

pub(in crate::config) static ROUTE: Object = Object {
    name: "route",
    doc: "Where connections for a name go: to endpoints, or to a service of the mesh.",
    one_of: &["endpoints", "service"],
    fields: &[
        optional(
            "endpoints",
            some(&Kind::Union(&ROUTE_ENDPOINT_FORMS)),
            "none",
            "Where connections go; either this or `service`.",
        ),
        LOAD_BALANCING,
        EJECTION_OR_OFF,
        CONNECT_TIMEOUT,
        PANIC,
        optional("listeners", LISTENER_NAMES, "all", "The listeners that have this route."),
        optional(
            "service",
            Kind::Text(&scalar::HOST_NAME),
            "none",
            "The hostname of a service of the mesh that this is another name of; it is tuned by `defaults` and \
             `policies`.",
        ),
        optional("port", PORT, "none", "The port of that service; needed with `service`."),
        optional("subset", Kind::Text(&scalar::SUBSET), "all of it", "The subset of that service."),
    ],
};

pub(in crate::config) static ROUTE_ENDPOINT: Object = Object {
    name: "routeEndpoint",
    doc: "One endpoint of a route.",
    one_of: &[],
    fields: &[
        required(
            "address",
            Kind::Text(&scalar::TARGET),
            "Where it is; a host name is resolved, and again by its TTL.",
        ),
        default(
            "weight",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "1",
            "Its share of the connections.",
        ),
        optional("locality", Kind::Text(&scalar::LOCALITY), "unknown", "Region, zone and subzone."),
    ],
};

pub(in crate::config) static DEFAULTS: Object = Object {
    name: "defaults",
    doc: "How endpoints of the mesh's services are chosen and dialled.",
    one_of: &[],
    fields: &[LOAD_BALANCING, EJECTION_OR_OFF, CONNECT_TIMEOUT, PANIC],
};

pub(in crate::config) static POLICY: Object = Object {
    name: "policy",
    doc: "How endpoints of some services are chosen and dialled.",
    one_of: &[],
    fields: &[
        required("services", some(&PATTERN), "Names of services; no name may be in two policies."),
        LOAD_BALANCING,
        EJECTION_OR_OFF,
        CONNECT_TIMEOUT,
        PANIC,
    ],
};

pub(in crate::config) static LOAD_BALANCING_OBJECT: Object = Object {
    name: "loadBalancing",
    doc: "How one of several endpoints is chosen.",
    one_of: &[],
    fields: &[
        default(
            "policy",
            Kind::Choice(&["leastRequest", "roundRobin", "random", "sourceHash"]),
            "leastRequest",
            "`leastRequest` takes the less busy of two, `sourceHash` keeps a source's endpoint.",
        ),
        optional(
            "locality",
            Kind::Choice(&["prefer", "ignore"]),
            "`prefer` for routes, `ignore` for services",
            "`prefer` fills the nearest endpoints first.",
        ),
    ],
};

pub(in crate::config) static EJECTION: Object = Object {
    name: "ejection",
    doc: "When an endpoint that fails is left out.",
    one_of: &[],
    fields: &[
        default("failures", Kind::Integer { min: 1, max: 1_000_000 }, "5", "Failures in a row."),
        default("time", TIMEOUT, "30s", "How long it is left out."),
        default(
            "maxShare",
            Kind::Text(&scalar::PERCENT),
            "50%",
            "Of the endpoints, how many may be left out at once.",
        ),
    ],
};
