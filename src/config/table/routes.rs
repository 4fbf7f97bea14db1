//! The keys of routes, and of the choice and ejection of endpoints.

use crate::document::scalar;
use crate::document::table::{Field, Kind, Object, PORT, Text, Union, default, optional, required, some};

use super::{PATTERN, TEXT, TIMEOUT};

/// The key of a route.
pub(in crate::config) static ROUTE_KEY: Text = Text {
    name: "routeKey",
    expects: "a host name, \"*.suffix\", \"*\", or \"-\" for clients that send no server name",
    pattern: "^(-|\\*|(\\*\\.)?[A-Za-z0-9_.-]+)$",
    number: false,
    check: |text| scalar::route_name(text).map(drop),
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

/// The choice among endpoints: of a route, of all services, of some services.
const LOAD_BALANCING: Field = optional(
    "loadBalancing",
    Kind::Object(&LOAD_BALANCING_OBJECT),
    "defaults",
    "How the gateway chooses an endpoint.",
);
const EJECTION_KEYS: Kind = Kind::Object(&EJECTION);
const EJECTION_OR_OFF: Field = optional(
    "ejection",
    Kind::OrOff(&EJECTION_KEYS),
    "defaults",
    "When a failing endpoint is left out for a while.",
);
const CONNECT_TIMEOUT: Field = optional(
    "connectTimeout",
    TIMEOUT,
    "`timeouts.connect`",
    "Time that an endpoint may take to accept a \
     connection.",
);
const PANIC: Field = default(
    "panic",
    Kind::Boolean,
    "true",
    "If no endpoint is healthy: `true` tries all endpoints, `false` \
     refuses the connection.",
);

pub(super) const LISTENER_NAMES: Kind = Kind::List { of: &TEXT, min: 1 };

pub(in crate::config) static ROUTE: Object = Object {
    name: "route",
    doc: "The target of a name: endpoints, or a service of the mesh.",
    one_of: &["endpoints", "service"],
    fields: &[
        optional("endpoints", some(&Kind::Union(&ROUTE_ENDPOINT_FORMS)), "none", "Endpoints of the route."),
        LOAD_BALANCING,
        EJECTION_OR_OFF,
        CONNECT_TIMEOUT,
        PANIC,
        optional("listeners", LISTENER_NAMES, "all", "Listeners that the route applies to."),
        optional(
            "service",
            Kind::Text(&scalar::HOST_NAME),
            "none",
            "Host name of the mesh service that the route leads to. `defaults` and `policies` apply to that service.",
        ),
        optional("port", PORT, "none", "Port of the service; required with `service`."),
        optional("subset", Kind::Text(&scalar::SUBSET), "all endpoints", "Subset of the service."),
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
            "Address and port of the endpoint. A host name is resolved, and resolved again when its TTL has \
             passed.",
        ),
        default(
            "weight",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "1",
            "Share of new connections, relative to the weights of the other endpoints.",
        ),
        optional(
            "locality",
            Kind::Text(&scalar::LOCALITY),
            "unknown",
            "Region, zone and subzone of the endpoint.",
        ),
    ],
};

pub(in crate::config) static DEFAULTS: Object = Object {
    name: "defaults",
    doc: "Load balancing, ejection and connect timeout for all services of the mesh.",
    one_of: &[],
    fields: &[LOAD_BALANCING, EJECTION_OR_OFF, CONNECT_TIMEOUT, PANIC],
};

pub(in crate::config) static POLICY: Object = Object {
    name: "policy",
    doc: "Load balancing, ejection and connect timeout for some services.",
    one_of: &[],
    fields: &[
        required(
            "services",
            some(&PATTERN),
            "Host names of the services. The same name may not be in two \
             policies.",
        ),
        LOAD_BALANCING,
        EJECTION_OR_OFF,
        CONNECT_TIMEOUT,
        PANIC,
    ],
};

pub(in crate::config) static LOAD_BALANCING_OBJECT: Object = Object {
    name: "loadBalancing",
    doc: "How the gateway chooses one of several endpoints.",
    one_of: &[],
    fields: &[
        default(
            "policy",
            Kind::Choice(&["leastRequest", "roundRobin", "random", "sourceHash"]),
            "leastRequest",
            "`leastRequest`: of two random endpoints, the less busy one. `roundRobin`: endpoints in turn. \
             `random`: a random endpoint. `sourceHash`: the same endpoint for the same source address.",
        ),
        optional(
            "locality",
            Kind::Choice(&["prefer", "ignore"]),
            "`prefer` for routes, `ignore` for services",
            "`prefer`: the nearest healthy endpoints first. `ignore`: all endpoints alike.",
        ),
    ],
};

pub(in crate::config) static EJECTION: Object = Object {
    name: "ejection",
    doc: "When a failing endpoint is left out.",
    one_of: &[],
    fields: &[
        default(
            "failures",
            Kind::Integer { min: 1, max: 1_000_000 },
            "5",
            "Consecutive failures after which an \
             endpoint is ejected.",
        ),
        default("time", TIMEOUT, "30s", "Time that an ejected endpoint is left out."),
        default(
            "maxShare",
            Kind::Text(&scalar::PERCENT),
            "50%",
            "Largest share of the endpoints that may be ejected at the same time.",
        ),
    ],
};
