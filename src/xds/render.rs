//! Renders resources from a snapshot, in the forms that Envoy and gRPC accept. Equal snapshots give equal bytes, except for the
//! identities and the connect timeout in a cluster for Envoy, which [`ClusterHistory`] keeps.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use prost_types::value::Kind as ValueKind;
use prost_types::{Any, Struct, Value};
use tokio::time::Instant;

use super::history::{ClusterHistory, Kept};
use super::kind::{Kind, Target, cluster_name};
use super::peers::{Joined, Peers, Roots};
use isthmus_ads::resource::Resource;
use isthmus_decisions::steering::{ENVOY_OVERPROVISIONING_PERCENT, overprovisioning_percent};
use isthmus_decisions::view::{Assignment, ClientKind, Entry, Viewer, view};
use isthmus_model::endpoint::{Health, TlsMode};
use isthmus_model::import::Import;
use isthmus_model::mesh_name::MeshName;
use isthmus_model::name::HostName;
use isthmus_proto::envoy::config::cluster::v3 as cluster;
use isthmus_proto::envoy::config::core::v3 as core;
use isthmus_proto::envoy::config::endpoint::v3 as endpoint;
use isthmus_proto::envoy::config::listener::v3 as listener;
use isthmus_proto::envoy::config::route::v3 as route;
use isthmus_proto::envoy::extensions::filters::http::router::v3::Router;
use isthmus_proto::envoy::extensions::filters::network::http_connection_manager::v3 as http;
use isthmus_proto::envoy::extensions::filters::network::tcp_proxy::v3::{TcpProxy, tcp_proxy};
use isthmus_proto::envoy::extensions::transport_sockets::raw_buffer::v3::RawBuffer;
use isthmus_proto::envoy::extensions::transport_sockets::tls::v3 as tls;
use isthmus_proto::envoy::extensions::upstreams::http::v3 as upstream;
use isthmus_proto::envoy::r#type::matcher::v3 as matcher;
use isthmus_proto::envoy::r#type::matcher::v3::string_matcher::MatchPattern;
use isthmus_proto::envoy::r#type::v3::Percent;
use isthmus_settings::peer::peer_of;
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The metadata namespace by which Envoy selects a transport socket for an endpoint, then the key and the value.
const TRANSPORT_MATCH: &str = "envoy.transport_socket_match";
const TLS_MODE: (&str, &str) = ("tlsMode", "istio");
/// The key of the peer in that namespace, for endpoints of a service that is joined with a name.
const PEER: &str = "peer";
/// The names of the static secrets in Envoy's own config that mutual TLS in the mesh uses.
const CERTIFICATE_SECRET: &str = "default";
const ROOTS_SECRET: &str = "ROOTCA";
/// A name that no certificate has, because nobody can register `.invalid` (RFC 2606).
const NOBODY: &str = "spiffe://no-roots-are-known.invalid/";
/// The SHA-256 of no certificate.
const NO_CERTIFICATE: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// How long Envoy leaves an endpoint out after failed connects at first; each further time in a row takes as much longer, up to
/// the second value. The third one is added at most, by chance, so that not all endpoints return at once.
const EJECTED_FOR: [Duration; 3] = [Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(5)];
/// The ALPN protocol that mesh endpoints and Istio's SNI gateways expect.
const MESH_ALPN: &str = "istio";
/// The ALPN protocol of HTTP/2 (RFC 9113 §3.2).
const HTTP2_ALPN: &str = "h2";
/// The name of Envoy's extension for the version of HTTP, which is also the type of its config.
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// The service, port and subset that a name refers to.
#[derive(Clone, Copy)]
struct Found<'a> {
    service: &'a ServiceView,
    port: &'a PortView,
    subset: &'a str,
}

/// The inputs of clusters.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// The world.
    pub snapshot: &'a Snapshot,
    /// The properties with which clusters were last rendered.
    pub history: &'a ClusterHistory,
    /// The time of the rendering.
    pub now: Instant,
}

/// Renders the resource of a name for a viewer; `None` if the resource does not exist. Every assignment exists, and the
/// assignment of an unknown service is empty. The only exception is the empty name, which has no assignment: some clients
/// subscribe to the empty name in order to unsubscribe from all others, but refuse a resource without a name.
pub fn resource(
    inputs: Inputs<'_>,
    kind: Kind,
    name: &Arc<str>,
    target: Option<&Target>,
    viewer: &Viewer,
) -> Option<Resource> {
    let snapshot = inputs.snapshot;
    if name.is_empty() {
        return None;
    }
    let found = target.and_then(|target| {
        let service = snapshot.service(target.hostname.as_str())?;
        Some(Found { service, port: service.port(target.port)?, subset: &target.subset })
    });
    // A gRPC client can use an imported service only if two conditions hold. The endpoints must not speak mutual TLS, because
    // the client's credentials do not include the peer's roots. And the peer must export the service under our name for it,
    // because the client sends that name as the server name, which the peer's gateway must know.
    let is_usable = |found: &Found<'_>| {
        let is_for_all = |import: &Arc<Import>| {
            import.exported_name == found.service.key.hostname
                && !Peers::of(snapshot, found.service, found.port).any
        };
        viewer.client == ClientKind::Envoy || found.service.import.as_ref().is_none_or(is_for_all)
    };
    let found = found.filter(is_usable);
    match (kind, found) {
        (Kind::Assignment, found) => Some(assignment(snapshot, name, found, viewer)),
        (Kind::Cluster, Some(found)) => {
            let known = found.subset.is_empty() || found.service.subsets.contains_key(found.subset);
            let kept =
                (known && viewer.client == ClientKind::Envoy).then(|| inputs.keep(found.service, found.port));
            known.then(|| cluster_of(snapshot, name, found, kept.as_ref()))
        }
        (Kind::Listener, Some(_)) => Some(listener_of(name)),
        (Kind::Route, Some(found)) => Some(route_of(name, found)),
        (Kind::Cluster | Kind::Listener | Kind::Route, None) => None,
    }
}

/// Returns the resource of a name that no registry has: an empty assignment, and `None` for other types.
pub fn nothing(kind: Kind, name: &Arc<str>) -> Option<Resource> {
    let made = || endpoint::ClusterLoadAssignment {
        cluster_name: name.to_string(),
        ..endpoint::ClusterLoadAssignment::default()
    };
    let is_empty = kind == Kind::Assignment && !name.is_empty();
    is_empty.then(|| Resource::new(kind, name.clone(), &made()).without_endpoints())
}

/// Renders the clusters of a service, one for each port and subset, for clients with a wildcard subscription
/// (Envoy).
pub fn clusters(inputs: Inputs<'_>, hostname: &HostName) -> Vec<Resource> {
    let snapshot = inputs.snapshot;
    let Some(service) = snapshot.service(hostname.as_str()) else {
        return Vec::new();
    };
    let mut clusters = Vec::new();
    for port in &service.ports {
        let kept = inputs.keep(service, port);
        let subsets = std::iter::once("").chain(service.subsets.keys().map(|subset| &**subset));
        for subset in subsets {
            let name = cluster_name(port.port, subset, &service.name).into();
            clusters.push(cluster_of(snapshot, &name, Found { service, port, subset }, Some(&kept)));
        }
    }
    clusters
}

/// Renders the listeners of a service on the virtual addresses that this gateway gives it, one for each port, for clients that accept
/// them. A listener sends its connections to the service port's cluster.
pub fn listeners(snapshot: &Snapshot, hostname: &HostName) -> Vec<Resource> {
    let imported = snapshot.service(hostname.as_str()).filter(|service| service.has_virtual_addresses());
    let Some(service) = imported else { return Vec::new() };
    let of_port = |port: &PortView| {
        let mut addresses = service.addresses.iter().map(|ip| address(SocketAddr::new(*ip, port.port)));
        let first = addresses.next()?;
        let name: Arc<str> = format!("{}:{}", service.name, port.port).into();
        let cluster = cluster_name(port.port, "", &service.name);
        let proxy = TcpProxy {
            stat_prefix: name.to_string(),
            cluster_specifier: Some(tcp_proxy::ClusterSpecifier::Cluster(cluster)),
        };
        let filter = listener::Filter {
            name: "envoy.filters.network.tcp_proxy".into(),
            config_type: Some(listener::filter::ConfigType::TypedConfig(Any {
                type_url: "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy".into(),
                ..any(&proxy)
            })),
        };
        let more = addresses.map(|address| listener::AdditionalAddress { address: Some(address) });
        let made = listener::Listener {
            name: name.to_string(),
            address: Some(first),
            additional_addresses: more.collect(),
            filter_chains: vec![listener::FilterChain { filters: vec![filter] }],
            // The address is virtual: no interface of the client's host has it, and without this option the bind would fail.
            freebind: Some(true),
            ..listener::Listener::default()
        };
        Some(Resource::new(Kind::Listener, name, &made))
    };
    service.ports.iter().filter_map(of_port).collect()
}

impl Inputs<'_> {
    fn keep(&self, service: &ServiceView, port: &PortView) -> Kept {
        self.history.keep(self.snapshot, service, port, self.now)
    }
}

/// Renders a cluster: with `kept` for Envoy, without it for gRPC, whose clients have their own credentials.
fn cluster_of(snapshot: &Snapshot, name: &Arc<str>, found: Found<'_>, kept: Option<&Kept>) -> Resource {
    let tuning = snapshot.policy.tuning.of(&found.service.name);
    let mut made = cluster::Cluster {
        name: name.to_string(),
        cluster_discovery_type: Some(cluster::cluster::ClusterDiscoveryType::Type(
            cluster::cluster::DiscoveryType::Eds.into(),
        )),
        eds_cluster_config: Some(cluster::cluster::EdsClusterConfig {
            eds_config: Some(from_this_stream()),
            service_name: name.to_string(),
        }),
        connect_timeout: Some(duration(tuning.connect_timeout)),
        lb_policy: cluster::cluster::LbPolicy::RoundRobin.into(),
        circuit_breakers: Some(no_limits()),
        ..cluster::Cluster::default()
    };
    if let Some(Kept { peers, connect_timeout }) = kept {
        // Endpoints that are not ready are sent with their health. Envoy uses them only if no endpoint is ready and the
        // threshold is above 0, which the policy decides.
        let threshold = if tuning.panic { 0.01 } else { 0.0 };
        made.common_lb_config = Some(cluster::cluster::CommonLbConfig {
            healthy_panic_threshold: Some(Percent { value: threshold }),
            locality_config_specifier: Some(by_weights()),
        });
        made.connect_timeout = Some(duration(*connect_timeout));
        made.outlier_detection = Some(connect_failures(found.service, tuning));
        if found.port.protocol.is_http2() {
            made.typed_extension_protocol_options = [(HTTP_OPTIONS.to_owned(), http2())].into();
        }
        made.transport_socket_matches = transport_sockets(found, peers);
    }
    Resource::new(Kind::Cluster, name.clone(), &made)
}

/// Returns circuit breakers that break nothing, for the routes of either priority; by themselves, Envoy and gRPC fail what exceeds
/// 1,024 at once.
fn no_limits() -> cluster::CircuitBreakers {
    let all = Some(u32::MAX);
    let of = |priority: core::RoutingPriority| cluster::circuit_breakers::Thresholds {
        priority: priority.into(),
        max_connections: all,
        max_pending_requests: all,
        max_requests: all,
        max_retries: all,
    };
    let thresholds = [core::RoutingPriority::Default, core::RoutingPriority::High].map(of).into();
    cluster::CircuitBreakers { thresholds }
}

/// Returns the config that makes Envoy heed the weights alone. An Envoy whose bootstrap names a local cluster would otherwise prefer
/// endpoints in its own zone by their number, in which a gateway counts as one endpoint.
fn by_weights() -> cluster::cluster::common_lb_config::LocalityConfigSpecifier {
    let never = Some(Percent { value: 0.0 });
    let zones = cluster::cluster::common_lb_config::ZoneAwareLbConfig { routing_enabled: never };
    cluster::cluster::common_lb_config::LocalityConfigSpecifier::ZoneAwareLbConfig(zones)
}

/// Returns the config by which Envoy speaks HTTP/2 with endpoints; by itself, it speaks HTTP/1.1.
fn http2() -> Any {
    use upstream::http_protocol_options::explicit_http_config::ProtocolConfig;
    use upstream::http_protocol_options::{ExplicitHttpConfig, UpstreamProtocolOptions};
    let protocol_config = Some(ProtocolConfig::Http2ProtocolOptions(core::Http2ProtocolOptions {}));
    let explicit = UpstreamProtocolOptions::ExplicitHttpConfig(ExplicitHttpConfig { protocol_config });
    let options = upstream::HttpProtocolOptions { upstream_protocol_options: Some(explicit) };
    Any { type_url: format!("type.googleapis.com/{HTTP_OPTIONS}"), ..any(&options) }
}

/// Returns the largest share of a cluster's endpoints that Envoy leaves out: all of them if it then goes on to other endpoints, or
/// in panic tries all. Otherwise half of them, since the rest would be no endpoint at all.
fn ejected_max_percent(service: &ServiceView, tuning: &Tuning) -> u32 {
    let has_priorities = tuning.steering.is_on() || service.prefers_near || !service.joined.is_empty();
    if tuning.panic || has_priorities && service.networks.len() > 1 { 100 } else { 50 }
}

/// Returns the outlier detection that leaves out an endpoint or gateway after three failed connects, for the seconds until a
/// probe knows of it (`docs/split-horizon.md, "Clusters and endpoints beside istiod's"`). Nothing else counts: a gateway passes
/// on the errors of all endpoints behind it.
fn connect_failures(service: &ServiceView, tuning: &Tuning) -> cluster::OutlierDetection {
    let never = Some(0);
    let [base, largest, jitter] = EJECTED_FOR.map(|time| Some(duration(time)));
    cluster::OutlierDetection {
        base_ejection_time: base,
        max_ejection_time: largest,
        max_ejection_time_jitter: jitter,
        max_ejection_percent: Some(ejected_max_percent(service, tuning)),
        split_external_local_origin_errors: true,
        consecutive_local_origin_failure: Some(3),
        enforcing_consecutive_local_origin_failure: Some(100),
        enforcing_consecutive_5xx: never,
        enforcing_consecutive_gateway_failure: never,
        enforcing_success_rate: never,
        enforcing_local_origin_success_rate: never,
        enforcing_failure_percentage: never,
        enforcing_failure_percentage_local_origin: never,
    }
}

/// Returns the transport sockets: mutual TLS for endpoints and gateways that speak it, one for the owner of the name and one for each
/// peer that is joined with it, and a plain socket for the rest. If no endpoint of the owner speaks
/// mutual TLS, Envoy needs no secrets for the cluster, and cannot connect to an endpoint that does: Envoy may learn of the first one
/// before the cluster changes, and would call it in the clear.
fn transport_sockets(found: Found<'_>, peers: &Peers) -> Vec<cluster::cluster::TransportSocketMatch> {
    let Found { service, port, subset } = found;
    let socket = |name: &str, kind: &str, config: Any| core::TransportSocket {
        name: format!("envoy.transport_sockets.{name}"),
        config_type: Some(core::transport_socket::ConfigType::TypedConfig(Any {
            type_url: format!("type.googleapis.com/envoy.extensions.transport_sockets.{kind}"),
            ..config
        })),
    };
    let context = match peers.any {
        true => mutual_tls(sni_of(service, port, subset), alpn(port), peers),
        false => no_server(),
    };
    let tls = |name: String, of: Struct, context: &tls::UpstreamTlsContext| {
        cluster::cluster::TransportSocketMatch {
            name,
            r#match: Some(of),
            transport_socket: Some(socket("tls", "tls.v3.UpstreamTlsContext", any(context))),
        }
    };
    let of_peer = |(name, joined): (&Arc<str>, &Joined)| {
        let sni = MeshName { port: port.port, subset: "", hostname: joined.exported_name.as_str() };
        tls(format!("peer/{name}"), mesh_mode_of(name), &mutual_tls(sni.text(), alpn(port), &joined.peers))
    };
    // Envoy takes the first match, and the mode alone would match the endpoints of peers too.
    let mut all: Vec<_> = peers.joined.iter().map(of_peer).collect();
    all.push(tls("mesh".into(), mesh_mode(), &context));
    let raw = cluster::cluster::TransportSocketMatch {
        name: "raw".into(),
        r#match: Some(Struct::default()),
        transport_socket: Some(socket("raw_buffer", "raw_buffer.v3.RawBuffer", any(&RawBuffer {}))),
    };
    all.push(raw);
    all
}

/// Returns the ALPN protocols that clients offer: also the application's own, as Istio does, if it is known to be HTTP/2.
fn alpn(port: &PortView) -> Vec<String> {
    let http2 = port.protocol.is_http2().then_some(HTTP2_ALPN);
    [MESH_ALPN].into_iter().chain(http2).map(str::to_owned).collect()
}

/// Returns a TLS context that accepts no server.
fn no_server() -> tls::UpstreamTlsContext {
    let nobody = tls::CertificateValidationContext {
        verify_certificate_hash: vec![NO_CERTIFICATE.to_owned()],
        ..tls::CertificateValidationContext::default()
    };
    tls::UpstreamTlsContext {
        common_tls_context: Some(tls::CommonTlsContext {
            validation_context_type: Some(tls::common_tls_context::ValidationContextType::ValidationContext(
                nobody,
            )),
            ..tls::CommonTlsContext::default()
        }),
        ..tls::UpstreamTlsContext::default()
    }
}

/// Returns the server name that clients send. For an imported service it is the name by which the peer exports the service,
/// because no gateway on the path changes the server name.
fn sni_of(service: &ServiceView, port: &PortView, subset: &str) -> String {
    let name = match &service.import {
        None => MeshName { port: port.port, subset, hostname: &service.name },
        Some(import) => MeshName { port: port.port, subset: "", hostname: import.exported_name.as_str() },
    };
    name.text()
}

fn matchers(peers: &Peers) -> Vec<tls::SubjectAltNameMatcher> {
    let exact = peers.identities.iter().map(|identity| MatchPattern::Exact(identity.to_string()));
    let prefix = peers.prefix.iter().map(|prefix| MatchPattern::Prefix(prefix.to_string()));
    exact.chain(prefix).map(uri_matcher).collect()
}

fn uri_matcher(pattern: MatchPattern) -> tls::SubjectAltNameMatcher {
    tls::SubjectAltNameMatcher {
        san_type: tls::subject_alt_name_matcher::SanType::Uri.into(),
        matcher: Some(matcher::StringMatcher {
            match_pattern: Some(pattern),
            ..matcher::StringMatcher::default()
        }),
    }
}

fn mutual_tls(sni: String, alpn_protocols: Vec<String>, peers: &Peers) -> tls::UpstreamTlsContext {
    let secret = |name: &str| tls::SdsSecretConfig { name: name.to_owned(), sds_config: None };
    let by_secret = |match_typed_subject_alt_names| {
        let names = tls::CertificateValidationContext {
            match_typed_subject_alt_names,
            ..tls::CertificateValidationContext::default()
        };
        let validation = tls::common_tls_context::CombinedCertificateValidationContext {
            default_validation_context: Some(names),
            validation_context_sds_secret_config: Some(secret(ROOTS_SECRET)),
        };
        tls::common_tls_context::ValidationContextType::CombinedValidationContext(validation)
    };
    let validation = match &peers.roots {
        Roots::Secret => by_secret(matchers(peers)),
        Roots::ByDomain(roots) => tls::common_tls_context::ValidationContextType::ValidationContext(
            tls::CertificateValidationContext {
                match_typed_subject_alt_names: matchers(peers),
                ..by_domain(roots)
            },
        ),
        // No server may be accepted as the peer's. Therefore the required name is one that no certificate has.
        Roots::Unknown => by_secret(vec![uri_matcher(MatchPattern::Exact(NOBODY.to_owned()))]),
    };
    tls::UpstreamTlsContext {
        sni,
        common_tls_context: Some(tls::CommonTlsContext {
            tls_params: Some(tls_1_2_and_1_3()),
            alpn_protocols,
            tls_certificate_sds_secret_configs: vec![secret(CERTIFICATE_SECRET)],
            validation_context_type: Some(validation),
        }),
    }
}

/// Returns the versions of TLS that clients speak. By itself, an Envoy that is a client speaks TLS 1.2 at most, which a mesh may not
/// accept.
fn tls_1_2_and_1_3() -> tls::TlsParameters {
    use tls::tls_parameters::TlsProtocol::{TlSv12, TlSv13};
    tls::TlsParameters {
        tls_minimum_protocol_version: TlSv12.into(),
        tls_maximum_protocol_version: TlSv13.into(),
    }
}

/// Returns a validation of servers by the roots of their own trust domain. Envoy's usual validator would verify every name by
/// every root, so several domains need the SPIFFE validator, which chooses the roots by the first URI of the certificate. It
/// accepts a certificate if any of its URIs matches. Therefore `roots` must have the domains of the accepted names and no others.
fn by_domain(roots: &BTreeMap<Arc<str>, Arc<str>>) -> tls::CertificateValidationContext {
    let inline = |roots: &Arc<str>| core::DataSource {
        specifier: Some(core::data_source::Specifier::InlineString(roots.to_string())),
    };
    if roots.len() <= 1 {
        let trusted_ca = roots.values().next().map(inline);
        return tls::CertificateValidationContext { trusted_ca, ..Default::default() };
    }
    let bundle = |(domain, roots): (&Arc<str>, &Arc<str>)| tls::spiffe_cert_validator_config::TrustDomain {
        name: domain.to_string(),
        trust_bundle: Some(inline(roots)),
    };
    let validator = tls::SpiffeCertValidatorConfig { trust_domains: roots.iter().map(bundle).collect() };
    let url = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.SPIFFECertValidatorConfig";
    tls::CertificateValidationContext {
        custom_validator_config: Some(core::TypedExtensionConfig {
            name: "envoy.tls.cert_validator.spiffe".into(),
            typed_config: Some(Any { type_url: url.into(), ..any(&validator) }),
        }),
        ..Default::default()
    }
}

fn assignment(snapshot: &Snapshot, name: &Arc<str>, found: Option<Found<'_>>, viewer: &Viewer) -> Resource {
    let given = found.and_then(|found| view(snapshot, found.service, found.port, found.subset, viewer));
    let Assignment { entries, groups, .. } = given.unwrap_or_default();
    let factor = overprovisioning_percent(&groups);
    let is_told = viewer.client == ClientKind::Envoy && factor != ENVOY_OVERPROVISIONING_PERCENT;
    let policy = is_told.then(|| endpoint::cluster_load_assignment::Policy {
        overprovisioning_factor: Some(factor),
        ..endpoint::cluster_load_assignment::Policy::default()
    });
    let owner = found.and_then(|found| Some(&*found.service.import.as_ref()?.peer));
    let made = endpoint::ClusterLoadAssignment {
        cluster_name: name.to_string(),
        endpoints: match viewer.client {
            ClientKind::Envoy => for_envoy(&entries, owner),
            ClientKind::Grpc => for_grpc(&entries, owner),
        },
        policy,
    };
    let resource = Resource::new(Kind::Assignment, name.clone(), &made);
    if entries.is_empty() { resource.without_endpoints() } else { resource }
}

/// Groups endpoints by priority and locality. Each endpoint has its own weight. `owner` is the peer whose name it is, if it is one.
fn for_envoy(entries: &[Entry], owner: Option<&str>) -> Vec<endpoint::LocalityLbEndpoints> {
    let mut localities: BTreeMap<(u32, &str), Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        localities.entry((entry.priority, entry.locality.as_str())).or_default().push(entry);
    }
    let of = |entries: Vec<&Entry>| endpoint::LocalityLbEndpoints {
        locality: locality(entries[0], None),
        priority: entries[0].priority,
        lb_endpoints: entries.into_iter().map(|entry| lb_endpoint(entry, owner)).collect(),
        ..endpoint::LocalityLbEndpoints::default()
    };
    localities.into_values().map(of).collect()
}

/// Groups endpoints by priority, locality and weight. gRPC uses the weights of localities only, so endpoints of one locality with
/// different weights are sent as several localities with different sub-zones.
fn for_grpc(entries: &[Entry], owner: Option<&str>) -> Vec<endpoint::LocalityLbEndpoints> {
    let mut localities: BTreeMap<(u32, &str), BTreeMap<u32, Vec<&Entry>>> = BTreeMap::new();
    for entry in entries {
        let place = (entry.priority, entry.locality.as_str());
        localities.entry(place).or_default().entry(entry.weight).or_default().push(entry);
    }
    let mut all = Vec::new();
    for by_weight in localities.into_values() {
        let several = by_weight.len() > 1;
        for (weight, entries) in by_weight {
            // The sum of all weights of an assignment is below 2^32, so the number of entries is too.
            let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
            all.push(endpoint::LocalityLbEndpoints {
                locality: locality(entries[0], several.then_some(weight)),
                load_balancing_weight: Some(weight.saturating_mul(count)),
                priority: entries[0].priority,
                lb_endpoints: entries.into_iter().map(|entry| lb_endpoint(entry, owner)).collect(),
                ..endpoint::LocalityLbEndpoints::default()
            });
        }
    }
    all
}

fn locality(entry: &Entry, apart: Option<u32>) -> Option<core::Locality> {
    let locality = &entry.locality;
    let sub_zone = match apart {
        None => locality.subzone().to_owned(),
        Some(weight) => format!("{}/weight-{weight}", locality.subzone()),
    };
    Some(core::Locality { region: locality.region().to_owned(), zone: locality.zone().to_owned(), sub_zone })
}

fn address(address: SocketAddr) -> core::Address {
    let address = core::SocketAddress {
        address: address.ip().to_string(),
        port_specifier: Some(core::socket_address::PortSpecifier::PortValue(address.port().into())),
        ..core::SocketAddress::default()
    };
    core::Address { address: Some(core::address::Address::SocketAddress(address)) }
}

fn lb_endpoint(entry: &Entry, owner: Option<&str>) -> endpoint::LbEndpoint {
    // `UNKNOWN` counts as healthy and needs no bytes.
    let health = match entry.health {
        Health::Healthy => core::HealthStatus::Unknown,
        Health::Unhealthy => core::HealthStatus::Unhealthy,
        Health::Draining => core::HealthStatus::Draining,
    };
    let joined = peer_of(&entry.network).filter(|peer| owner != Some(peer));
    let mode = (entry.tls == TlsMode::Mesh).then(|| joined.map_or_else(mesh_mode, mesh_mode_of));
    let metadata =
        mode.map(|mode| core::Metadata { filter_metadata: [(TRANSPORT_MATCH.to_owned(), mode)].into() });
    let other = |ip: &IpAddr| endpoint::endpoint::AdditionalAddress {
        address: Some(address(SocketAddr::new(*ip, entry.address.port()))),
    };
    endpoint::LbEndpoint {
        host_identifier: Some(endpoint::lb_endpoint::HostIdentifier::Endpoint(endpoint::Endpoint {
            address: Some(address(entry.address)),
            additional_addresses: entry.others.iter().map(other).collect(),
            ..endpoint::Endpoint::default()
        })),
        health_status: health.into(),
        metadata,
        load_balancing_weight: Some(entry.weight),
    }
}

/// Renders the listener that gRPC requests first. The listener refers to the route configuration of the same name.
fn listener_of(name: &Arc<str>) -> Resource {
    let router = http::HttpFilter {
        name: "envoy.filters.http.router".into(),
        config_type: Some(http::http_filter::ConfigType::TypedConfig(Any {
            type_url: "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router".into(),
            ..any(&Router {})
        })),
    };
    let manager = http::HttpConnectionManager {
        route_specifier: Some(http::http_connection_manager::RouteSpecifier::Rds(http::Rds {
            config_source: Some(from_this_stream()),
            route_config_name: name.to_string(),
        })),
        http_filters: vec![router],
        ..http::HttpConnectionManager::default()
    };
    let url = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    let made = listener::Listener {
        name: name.to_string(),
        api_listener: Some(listener::ApiListener {
            api_listener: Some(Any { type_url: url.into(), ..any(&manager) }),
        }),
        ..listener::Listener::default()
    };
    Resource::new(Kind::Listener, name.clone(), &made)
}

/// Renders a route configuration that sends all calls to the cluster of the service port.
fn route_of(name: &Arc<str>, found: Found<'_>) -> Resource {
    let cluster = cluster_name(found.port.port, "", &found.service.name);
    let action = route::RouteAction {
        cluster_specifier: Some(route::route_action::ClusterSpecifier::Cluster(cluster)),
    };
    let all =
        route::RouteMatch { path_specifier: Some(route::route_match::PathSpecifier::Prefix(String::new())) };
    let route = route::Route {
        r#match: Some(all),
        action: Some(route::route::Action::Route(action)),
        ..route::Route::default()
    };
    let host =
        route::VirtualHost { name: name.to_string(), domains: vec!["*".to_owned()], routes: vec![route] };
    let made = route::RouteConfiguration { name: name.to_string(), virtual_hosts: vec![host] };
    Resource::new(Kind::Route, name.clone(), &made)
}

fn from_this_stream() -> core::ConfigSource {
    core::ConfigSource {
        config_source_specifier: Some(core::config_source::ConfigSourceSpecifier::Ads(
            core::AggregatedConfigSource {},
        )),
        resource_api_version: core::ApiVersion::V3.into(),
        ..core::ConfigSource::default()
    }
}

fn mesh_mode() -> Struct {
    let (key, value) = TLS_MODE;
    let value = Value { kind: Some(ValueKind::StringValue(value.to_owned())) };
    Struct { fields: [(key.to_owned(), value)].into() }
}

/// Returns the same for an endpoint of a peer that is joined with a name.
fn mesh_mode_of(peer: &str) -> Struct {
    let mut mode = mesh_mode();
    let value = Value { kind: Some(ValueKind::StringValue(peer.to_owned())) };
    mode.fields.insert(PEER.to_owned(), value);
    mode
}

/// Encodes a message without its type URL, which the caller sets.
fn any(message: &impl Message) -> Any {
    Any { type_url: String::new(), value: message.encode_to_vec() }
}

fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or_default()
}

#[cfg(test)]
mod tests;
