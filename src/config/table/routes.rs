//! The keys of routes, and of the choice and ejection of endpoints.

use std::time::Duration;

use isthmus_document::form::{self, Form, Keys, text_forms};
use isthmus_document::key::{Defaulted, Key, keys};
use isthmus_document::problem::InvalidValue;
use isthmus_document::scalar;
use isthmus_document::table::{Kind, Union};
use isthmus_document::tree::Node;
use isthmus_model::endpoint::{ProxyVersion, Weight};
use isthmus_model::name::HostName;
use isthmus_settings::limits::Timeouts;
use isthmus_settings::route::RouteName;
use isthmus_settings::tuning::{self, LocalityMode, Tuning};

use super::steering::PolicySteering;

text_forms! {
    /// The key of a route.
    pub(crate) RouteKey: RouteName = scalar::route_name, "routeKey", "^(-|\\*|(\\*\\.)?[A-Za-z0-9_.-]+)$",
        "a host name, \"*.suffix\", \"*\", or \"-\" for clients that send no server name";
    /// A name of SRV records.
    pub(crate) SrvName: HostName = srv_name, "srvName", "^_[A-Za-z0-9_-]+\\._[A-Za-z0-9_-]+\\..+$",
        "a name of SRV records such as _https._tcp.shop.internal";
    /// The interval of checks.
    pub(crate) CheckInterval: Duration = check_interval, "checkInterval",
        "^0*([1-9][0-9]{2,}ms|[1-9][0-9]*(s|m|h))$",
        "a whole number with its unit, at least 100ms: 250ms, 5s, 1m or 1h", written by form::Timeout::write, shown by form::seconds;
}

fn srv_name(text: &str) -> Result<HostName, InvalidValue> {
    let name = scalar::host_name(text)?;
    if name.is_service() { Ok(name) } else { Err("it does not begin with _SERVICE._PROTOCOL".into()) }
}

/// The shortest interval of checks.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(100);

fn check_interval(text: &str) -> Result<Duration, InvalidValue> {
    let interval = scalar::timeout(text)?;
    if interval < CHECK_INTERVAL_MIN { Err("it is shorter than 100ms".into()) } else { Ok(interval) }
}

/// The defaults of the keys that have the same default for routes and services.
fn base() -> Tuning {
    Tuning::for_routes(&Timeouts::default())
}

// The keys that routes, `defaults` and `policies` share.
pub(crate) const LOAD_BALANCING: Key<LoadBalancing> =
    Key::optional("loadBalancing", "defaults", "How the gateway chooses an endpoint.");
pub(crate) const EJECTION: Key<form::OrOff<Ejection>> =
    Key::optional("ejection", "defaults", "When a failing endpoint is left out for a while.");
pub(crate) const HEALTH: Key<form::OrOff<HealthCheck>> =
    Key::optional("health", "off", "How the gateway checks endpoints by connecting to them.");
pub(crate) const CONNECT_TIMEOUT: Key<form::Timeout> = Key::optional(
    "connectTimeout",
    "`timeouts.connect`",
    "Time that an endpoint may take to accept a connection.",
);
pub(crate) const PANIC: Defaulted<form::Boolean> = Defaulted::new(
    "panic",
    || base().panic,
    "If no endpoint is healthy: `true` tries all endpoints, `false` refuses the connection.",
);

pub(crate) const SEND_PROXY_PROTOCOL: Key<form::Choice<ProxyVersion>> = Key::optional(
    "sendProxyProtocol",
    "none",
    "PROXY header that an endpoint is sent before the client's first byte, with the client's address. `v2` adds the name that \
     the client asked for and the `unique_id` of the access log. Endpoints with `tunnel: hbone` are sent none.",
);

pub(crate) const MAX_CONNECTION_AGE: Key<form::Timeout> = Key::optional(
    "maxConnectionAge",
    "none",
    "Age, varied by a tenth, at which a connection ends: it is closed in the first pause of a second after its endpoint has sent \
     last, after 30 s in any such pause, and reset after 35 s (`drained`). HBONE connections have the age in `defaults`: they get a \
     GOAWAY, and end with their last stream.",
);

keys! {
    /// The target of a name: endpoints, or a service of the mesh.
    pub(crate) Route "route" one of [ENDPOINTS, SERVICE] {
        /// Endpoints of the route.
        ENDPOINTS "endpoints": form::NonEmpty<RouteEndpointForms> => "none";
        /// Listeners that the route applies to.
        LISTENERS "listeners": form::NonEmpty<form::Text> => "all";
        /// Host name of the mesh service that the route leads to. `defaults` and `policies` apply to that service.
        SERVICE "service": form::HostName => "none";
        /// Port of the service; required with `service`.
        PORT "port": form::Port => "none";
        /// Subset of the service.
        SUBSET "subset": form::Subset => "all endpoints";
        /// Source addresses that may use the route. To other clients the name is unknown, even if a wildcard route matches it; the
        /// log says `source_denied`.
        FROM "from": form::NonEmpty<form::Cidr> => "everyone whom the listener admits";
        /// Source addresses that may not use the route, although `from` has them.
        EXCEPT_FROM "exceptFrom": form::NonEmpty<form::Cidr> => "none";
        /// Targets of clients that offer certain ALPN protocols, by protocol, in the forms of a route; the first of the client's
        /// protocols that is named here decides. `from` and `listeners` are those of the route. If the listener has `alpn`, that
        /// list must name the protocols too.
        BY_ALPN "byAlpn": form::MapOf<form::Alpn, RouteForms> => "none";
    } + LOAD_BALANCING + HEALTH + EJECTION + CONNECT_TIMEOUT + PANIC + SEND_PROXY_PROTOCOL + MAX_CONNECTION_AGE

    /// One endpoint of a route.
    pub(crate) RouteEndpoint "routeEndpoint" one of [ADDRESS, SRV] {
        /// Address and port of the endpoint. A host name is resolved, and resolved again when its TTL has passed.
        ADDRESS "address": form::Target => "`srv`";
        /// Name of SRV records, which have host names, ports, weights and priorities; at most 64 are used. Targets that are not of
        /// the lowest priority are backups. The records and the addresses are looked up again when their TTL has passed.
        SRV "srv": SrvName => "`address`";
        /// Share of new connections, relative to the weights of the other endpoints. Not with `srv`.
        WEIGHT "weight": form::Weight = Weight::ONE;
        /// Region, zone and subzone of the endpoint.
        LOCALITY "locality": form::Locality => "unknown";
        /// If `true`, the endpoint gets connections only while no other endpoint of the route can be used: each is unhealthy, ejected,
        /// full, or taken out by an operator.
        BACKUP "backup": form::Boolean = false;
        /// Largest number of concurrent connections to the endpoint, of each replica. A full endpoint is passed over; while all are
        /// full, connections are refused (`limit_service`).
        MAX_CONNECTIONS "maxConnections": form::Integer<u32, 1, 1_000_000> => "none";
    }

    /// Load balancing, health checks, ejection, connect timeout and PROXY header for all services of the mesh.
    pub(crate) Defaults "defaults" {} + LOAD_BALANCING + HEALTH + EJECTION + CONNECT_TIMEOUT + PANIC + SEND_PROXY_PROTOCOL + MAX_CONNECTION_AGE

    /// Load balancing, health checks, ejection, connect timeout and PROXY header for some services.
    pub(crate) Policy "policy" {
        /// Host names of the services. The same name may not be in two policies.
        SERVICES "services": form::NonEmpty<form::Pattern> => required;
        /// How the calls of xDS clients are divided among networks.
        STEERING "steering": PolicySteering => "`steering`";
    } + LOAD_BALANCING + HEALTH + EJECTION + CONNECT_TIMEOUT + PANIC + SEND_PROXY_PROTOCOL + MAX_CONNECTION_AGE

    /// How the gateway chooses one of several endpoints.
    pub(crate) LoadBalancing "loadBalancing" {
        /// `leastRequest`: of two random endpoints, the less busy one. `roundRobin`: endpoints in turn. `random`: a
        /// random endpoint. `sourceHash`: the same endpoint for the same source address.
        POLICY "policy": form::Choice<tuning::LoadBalancing> = base().policy;
        /// `prefer`: the nearest healthy endpoints first. `ignore`: all endpoints alike.
        LOCALITY "locality": form::Choice<LocalityMode> => "`prefer` for routes, `ignore` for services";
    }

    /// Checks of endpoints by a TCP connect. An endpoint that services share is checked once, with the strictest of their
    /// settings: the shortest `interval` and `timeout`, the lowest `unhealthyAfter`, the highest `healthyAfter`.
    pub(crate) HealthCheck "healthCheck" {
        /// Time from one check of an endpoint to the next. The checks of different endpoints are spread over the interval.
        INTERVAL "interval": CheckInterval = tuning::HealthCheck::default().interval;
        /// Time that an endpoint may take to accept the connection of a check, and to answer its ClientHello if `tls` is set. A
        /// check takes no longer than the interval.
        TIMEOUT "timeout": form::Timeout = tuning::HealthCheck::default().timeout;
        /// Failed checks in a row after which an endpoint gets no connections while another endpoint is healthy.
        UNHEALTHY_AFTER "unhealthyAfter": form::Integer<u32, 1, 1_000_000> = tuning::HealthCheck::default().unhealthy_after;
        /// Passed checks in a row after which an unhealthy endpoint gets connections again.
        HEALTHY_AFTER "healthyAfter": form::Integer<u32, 1, 1_000_000> = tuning::HealthCheck::default().healthy_after;
        /// Server name of the ClientHello that a check sends. The endpoint passes if it answers with a certificate, which is not
        /// verified. Where services with different names share an endpoint, the first name in order is sent.
        TLS "tls": form::HostName => "none: a check only connects";
    }

    /// When a failing endpoint is left out.
    pub(crate) Ejection "ejection" {
        /// Consecutive failures after which an endpoint is ejected.
        FAILURES "failures": form::Integer<u32, 1, 1_000_000> = tuning::Ejection::default().failures;
        /// Time that an ejected endpoint is left out.
        TIME "time": form::Timeout = tuning::Ejection::default().time;
        /// Largest share of the endpoints that may be ejected at the same time. One endpoint always stays available, also at
        /// `100%`.
        MAX_SHARE "maxShare": form::Percent = tuning::Ejection::default().share_max_percent;
    }
}

/// The forms of a route; its reader looks at the type of the node.
#[derive(Debug)]
pub(crate) struct RouteForms;

impl Form for RouteForms {
    type Value = ();
    const KIND: Kind = Kind::Union(&Union {
        name: "routeForms",
        expects: "an address with its port (\"10.0.0.1:443\"), a list of them, or a map with `endpoints` or `service`",
        kinds: &[form::Target::KIND, form::NonEmpty::<RouteEndpointForms>::KIND, Kind::Object(Route::OBJECT)],
    });

    fn read(_: &Node) -> Option<()> {
        Some(())
    }
}

/// The forms of an endpoint of a route; its reader looks at the type of the node.
#[derive(Debug)]
pub(crate) struct RouteEndpointForms;

impl Form for RouteEndpointForms {
    type Value = ();
    const KIND: Kind = Kind::Union(&Union {
        name: "routeEndpointForms",
        expects: "an address with its port (\"10.0.0.1:443\"), or a map with `address` or `srv`",
        kinds: &[form::Target::KIND, Kind::Object(RouteEndpoint::OBJECT)],
    });

    fn read(_: &Node) -> Option<()> {
        Some(())
    }
}
