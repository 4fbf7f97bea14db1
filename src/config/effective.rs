//! The config in use with all defaults, in the form of the file: the response of `/api/v1/config`. It has no secrets, because a
//! config only names the files with secrets. The file's own `services` are left out; `/api/v1/services` shows them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{Config, Workers};
use isthmus_aggregator::spec::RegistryKind;
use isthmus_aggregator::spec::etcd::EtcdSpec;
use isthmus_aggregator::spec::kubernetes::{AccessSpec, ClusterSource, ClustersSpec, KubernetesSpec};
use isthmus_model::address::{Bind, Host};
use isthmus_model::endpoint::{Labels, ProxyVersion};
use isthmus_model::limits::SourceLimits;
use isthmus_peer::options::LinkOptions;
use isthmus_snapshot::policy::{
    AddressScope, ExportRule, Gateway, Listener, MarkCondition, NetworkPolicy, Policy, ProxyMode,
    ProxyProtocol, RegistryScope, Route, RouteEndpoint, RouteTarget, Tuning,
};
use isthmus_telemetry::access_log::{AccessLog, Sink};
use isthmus_tls::source::Source;
use isthmus_xds::options::ClientRule;

/// Returns the config in use.
pub fn effective(config: &Config) -> Value {
    let policy = &config.policy;
    let node = &policy.node;
    let limits = &policy.limits;
    let timeouts = &policy.timeouts;
    let routes: Map<String, Value> =
        policy.routes.iter().map(|route| (route.key.to_string(), self::route(route))).collect();
    let networks: Map<String, Value> = policy
        .networks
        .iter()
        .map(|network| (network.name.as_str().to_owned(), self::network(network)))
        .collect();
    let mut shown = kept(json!({
        "node": {
            "name": text(&node.name),
            "namespace": text(&node.namespace),
            "serviceAccount": text(&node.service_account),
            "cluster": text(node.cluster.as_str()),
            "network": text(node.network.as_str()),
            "locality": text(node.locality.as_str()),
        },
        "mesh": {
            "clusterDomain": policy.mesh.cluster_domain.as_str(),
            "trustDomain": policy.mesh.trust_domain.as_str(),
        },
        "listeners": policy.listeners.iter().map(|listener| self::listener(listener)).collect::<Vec<_>>(),
        "routes": routes,
        "registries": registries(config),
        "exports": policy.exports.iter().map(|rule| export(rule)).collect::<Vec<_>>(),
        "defaults": tuning(&policy.tuning.default),
        "policies": policies(policy),
        "networks": networks,
        "peers": peers(config),
        "identity": identity(config),
        "trust": config.identity.trust.iter().map(|trust| json!({
            "trustDomain": trust.trust_domain.as_str(),
            "roots": trust.roots.display().to_string(),
        })).collect::<Vec<_>>(),
        "hbone": hbone(policy),
        "limits": {
            "connections": limits.connections,
            "pendingHellos": limits.pending_hellos,
            "perSource": per_source(&limits.per_source),
            "perService": {"connections": limits.per_service},
        },
        "timeouts": {
            "connect": duration(timeouts.connect),
            "connectTotal": duration(timeouts.connect_total),
            "idle": duration(timeouts.idle.unwrap_or_default()),
            "halfClose": duration(timeouts.half_close.unwrap_or_default()),
            "stalled": duration(timeouts.stalled.unwrap_or_default()),
        },
        "drain": {"delay": duration(config.drain.delay), "timeout": duration(config.drain.timeout)},
        "dns": {
            "servers": texts(&config.aggregator.dns.servers),
            "minTtl": duration(config.aggregator.dns.ttl_min),
            "maxTtl": duration(config.aggregator.dns.ttl_max),
        },
        "dnsServer": dns_server(config),
        "aggregator": {
            "staleAfter": duration(config.aggregator.stale_after),
            "expireAfter": config.aggregator.expire_after.map_or_else(|| "never".into(), duration),
            "withdrawalHold": duration(config.aggregator.withdrawal_hold),
            "startTimeout": duration(config.aggregator.start_timeout),
        },
        "state": config.aggregator.state.as_ref().map(|dir| json!({"dir": dir.display().to_string()})),
        "xds": xds(config),
        "admin": {"bind": config.admin.as_ref().map_or_else(|| false.into(), |bind| Value::from(bind.to_string()))},
        "telemetry": telemetry(config),
        "workers": match config.workers {
            Workers::Auto => Value::from("auto"),
            Workers::Count(count) => count.get().into(),
        },
    }));
    if config.xds.as_ref().is_some_and(|xds| xds.tls) {
        // An empty map means that TLS is on.
        shown["xds"]["tls"] = json!({});
    }
    literal(&mut shown);
    shown
}

/// Escapes `${` in all texts, so that a reader takes none of them for a variable.
fn literal(value: &mut Value) {
    match value {
        Value::String(text) if text.contains("${") => *text = text.replace("${", "$${"),
        Value::Array(items) => items.iter_mut().for_each(literal),
        Value::Object(members) => members.values_mut().for_each(literal),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn dns_server(config: &Config) -> Value {
    let Some(server) = &config.dns_server else { return false.into() };
    json!({
        "bind": server.bind.to_string(),
        "zones": texts(&server.zones),
        "vips": texts(&server.ranges.list()),
        "upstream": texts(&server.upstream),
    })
}

/// Removes `null`, and empty maps and lists.
fn kept(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let some = members.into_iter().map(|(key, value)| (key, kept(value)));
            Value::Object(some.filter(|(_, value)| !is_nothing(value)).collect())
        }
        Value::Array(items) => items.into_iter().map(kept).collect(),
        other => other,
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn text(text: &str) -> Value {
    if text.is_empty() { Value::Null } else { text.into() }
}

fn texts<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

fn duration(time: Duration) -> Value {
    let milliseconds = time.as_millis();
    match milliseconds % 1000 {
        0 => format!("{}s", milliseconds / 1000).into(),
        _ => format!("{milliseconds}ms").into(),
    }
}

fn per_source(limits: &SourceLimits) -> Value {
    json!({
        "connections": limits.connections,
        "newPerSecond": limits.new_per_second,
        "pendingHellos": limits.pending_hellos,
        "prefix": {"ipv4": limits.prefix.ipv4, "ipv6": limits.prefix.ipv6},
    })
}

fn listener(listener: &Listener) -> Value {
    json!({
        "name": &*listener.name,
        "bind": listener.bind.to_string(),
        "protocol": listener.protocol.text(),
        "alpn": listener.alpn.iter().map(|name| String::from_utf8_lossy(name)).collect::<Vec<_>>(),
        "from": texts(&listener.from),
        "proxyProtocol": match &listener.proxy_protocol {
            ProxyProtocol::Forbid => json!({"mode": ProxyMode::Forbid.text()}),
            ProxyProtocol::Require { from } => json!({"mode": ProxyMode::Require.text(), "from": texts(from)}),
        },
        "hello": {
            "timeout": duration(listener.hello.timeout),
            "maxBytes": listener.hello.bytes_max,
            "maxRecords": listener.hello.records_max,
        },
    })
}

fn route(route: &Route) -> Value {
    let mut shown = match &route.to {
        RouteTarget::Endpoints { endpoints, tuning } => {
            let mut shown = self::tuning(tuning);
            shown["endpoints"] = endpoints.iter().map(endpoint).collect();
            shown
        }
        RouteTarget::Service { hostname, port, subset } => {
            json!({"service": hostname.as_str(), "port": port, "subset": text(subset)})
        }
    };
    shown["listeners"] = texts(&route.listeners).into();
    shown
}

fn endpoint(endpoint: &RouteEndpoint) -> Value {
    let address = target(&endpoint.host, endpoint.port);
    json!({"address": address, "weight": endpoint.weight.value(), "locality": text(endpoint.locality.as_str())})
}

fn target(host: &Host, port: u16) -> String {
    match host {
        Host::Ip(ip) => SocketAddr::new(*ip, port).to_string(),
        Host::Ips(_) | Host::Name(_) => format!("{host}:{port}"),
    }
}

fn tuning(tuning: &Tuning) -> Value {
    json!({
        "loadBalancing": {"policy": tuning.policy.text(), "locality": tuning.locality.text()},
        "ejection": match &tuning.ejection {
            None => Value::from(false),
            Some(ejection) => json!({
                "failures": ejection.failures,
                "time": duration(ejection.time),
                "maxShare": format!("{}%", ejection.share_max_percent),
            }),
        },
        "health": match &tuning.health {
            None => Value::from(false),
            Some(health) => json!({
                "interval": duration(health.interval),
                "timeout": duration(health.timeout),
                "unhealthyAfter": health.unhealthy_after,
                "healthyAfter": health.healthy_after,
            }),
        },
        "connectTimeout": duration(tuning.connect_timeout),
        "panic": tuning.panic,
        "sendProxyProtocol": tuning.send_proxy.map(ProxyVersion::text),
    })
}

fn policies(policy: &Policy) -> Vec<Value> {
    let policies = policy.tuning.policies.iter().map(|(pattern, tuning)| {
        let mut shown = self::tuning(tuning);
        shown["services"] = vec![pattern.to_string()].into();
        shown
    });
    policies.collect()
}

fn registries(config: &Config) -> Vec<Value> {
    let registries = config.registries.iter().filter_map(|registry| {
        let scope = &registry.scope;
        let (kind, mut shown) = match &registry.kind {
            // The peer is shown under `peers`.
            RegistryKind::Peer(_) => return None,
            RegistryKind::File { path } => ("file", json!({"path": path.display().to_string()})),
            RegistryKind::Etcd(spec) => ("etcd", etcd(spec)),
            RegistryKind::Kubernetes(spec) => ("kubernetes", kubernetes(spec)),
            RegistryKind::KubernetesClusters(spec) => {
                return Some(json!({"kubernetesClusters": clusters(spec), "allow": allow(scope)}));
            }
        };
        shown["cluster"] = registry.cluster.as_str().into();
        shown["network"] = json!(text(registry.network.as_str()));
        Some(json!({
            kind: shown,
            "allow": allow(scope),
        }))
    });
    registries.collect()
}

fn peers(config: &Config) -> Vec<Value> {
    let registry_of = |name: &Arc<str>| {
        config.registries.iter().find_map(|registry| match &registry.kind {
            RegistryKind::Peer(spec) if spec.peer.name == *name => Some((spec, &registry.scope)),
            _ => None,
        })
    };
    let peer = |link: &LinkOptions| {
        let peer = &link.peer;
        let (spec, scope) = registry_of(&peer.name).unzip();
        let who = peer.who.as_ref();
        json!({
            "name": &*peer.name,
            "accept": link.accept,
            "dial": link.dial.as_ref().map(|(host, port)| target(host, *port)),
            "identity": who.map(|who| who.gateway.as_str()),
            "trustDomain": who.map(|who| who.trust_domain.as_str()),
            "trustAlias": who.map(|who| who.alias.as_str()),
            "trust": link.trust.as_ref().map(|path| path.display().to_string()),
            "from": texts(&peer.from),
            "addresses": scope.map(|scope| blocks(&scope.addresses)),
            "export": peer.exports.iter().map(|rule| json!({
                "services": texts(&rule.services),
                "except": texts(&rule.except),
                "as": rule.rename.as_ref().map(ToString::to_string),
            })).collect::<Vec<_>>(),
            "import": peer.imports.iter().map(|rule| json!({
                "services": texts(&rule.services),
                "as": rule.rename.as_ref().map(ToString::to_string),
                "limit": rule.limit,
            })).collect::<Vec<_>>(),
            "staleAfter": spec.map(|spec| duration(spec.stale_after)),
            "expireAfter": spec.map(|spec| duration(spec.expire_after)),
            "limits": {
                "services": peer.limits.services,
                "connections": peer.limits.connections,
                "newPerSecond": peer.limits.new_per_second,
            },
        })
    };
    config.links.iter().map(peer).collect()
}

fn etcd(spec: &EtcdSpec) -> Value {
    let tls = spec.tls.as_ref().map(|files| {
        let certificate = files.certificate.as_ref();
        json!({
            "roots": files.roots.display().to_string(),
            "certificate": certificate.map(|files| files.chain.display().to_string()),
            "key": certificate.map(|files| files.key.display().to_string()),
        })
    });
    json!({
        "endpoints": texts(&spec.endpoints),
        "prefix": &*spec.prefix,
        "tls": tls,
        "user": spec.login.as_ref().map(|login| &login.user),
        "passwordFile": spec.login.as_ref().map(|login| login.password.display().to_string()),
    })
}

fn allow(scope: &RegistryScope) -> Value {
    json!({
        "services": texts(&scope.services),
        "networks": scope.networks.as_deref().map(texts),
        "addresses": blocks(&scope.addresses),
    })
}

/// Returns the address blocks of a scope in the form of the config.
fn blocks(scope: &AddressScope) -> Vec<String> {
    match scope {
        AddressScope::Any | AddressScope::Public => Vec::new(),
        AddressScope::Blocks(blocks) => texts(blocks),
    }
}

fn clusters(spec: &ClustersSpec) -> Value {
    let (folder, secrets) = match &spec.source {
        ClusterSource::Folder(folder) => (Some(folder.display().to_string()), None),
        ClusterSource::Secrets { namespace } => (None, Some(json!({"namespace": &**namespace}))),
    };
    let template = kubernetes(&spec.template);
    json!({
        "folder": folder,
        "secrets": secrets,
        "trustDomain": template["trustDomain"],
        "meshConfig": template["meshConfig"],
        "manualEndpoints": template["manualEndpoints"],
        "destinationRules": template["destinationRules"],
        "systemNamespace": template["systemNamespace"],
        "namespaces": template["namespaces"],
        "gateways": template["gateways"],
    })
}

fn kubernetes(spec: &KubernetesSpec) -> Value {
    let (kubeconfig, context, token_file) = match &spec.access {
        AccessSpec::ServiceAccount | AccessSpec::Found(_) | AccessSpec::Unknown => (None, None, None),
        AccessSpec::Kubeconfig { path, context, token_file } => {
            (Some(path.display().to_string()), context.clone(), token_file.as_ref())
        }
    };
    json!({
        "kubeconfig": kubeconfig,
        "context": context,
        "tokenFile": token_file.map(|path| path.display().to_string()),
        "trustDomain": spec.trust_domain.as_str(),
        "meshConfig": spec.mesh_config,
        "systemNamespace": &*spec.system_namespace,
        "namespaces": {
            "only": texts(&spec.namespaces.only),
            "except": texts(&spec.namespaces.except),
            "labels": labels(&spec.namespaces.labels),
        },
        "manualEndpoints": spec.manual_endpoints,
        "destinationRules": spec.destination_rules,
        "gateways": spec.gateways.as_ref().map(|namespaces| json!({"namespaces": texts(namespaces)})),
    })
}

fn labels(labels: &Labels) -> Value {
    labels.iter().map(|(key, value)| (key.to_string(), Value::from(&**value))).collect()
}

fn marked(condition: &MarkCondition) -> Value {
    match condition {
        MarkCondition::ServiceExport => json!({"serviceExport": true}),
        MarkCondition::Labels(labels) => json!({"labels": self::labels(labels)}),
        MarkCondition::NamespaceLabels(labels) => json!({"namespaceLabels": self::labels(labels)}),
    }
}

fn export(rule: &ExportRule) -> Value {
    json!({
        "services": texts(&rule.services),
        "except": texts(&rule.except),
        "ports": rule.ports,
        "clusters": texts(&rule.clusters),
        "marked": rule.marked.as_ref().map(marked),
        "listeners": texts(&rule.listeners),
        "to": {"cidrs": texts(&rule.to.cidrs), "identities": texts(&rule.to.identities)},
    })
}

fn network(network: &NetworkPolicy) -> Value {
    let gateway = |gateway: &Gateway| {
        json!({
            "address": gateway.host.to_string(),
            "sniPort": gateway.sni_port,
            "hbonePort": gateway.hbone_port,
            "cluster": text(gateway.cluster.as_str()),
            "locality": text(gateway.locality.as_str()),
            "weight": gateway.weight.value(),
            "identity": gateway.identity.as_ref().map(ToString::to_string),
        })
    };
    json!({
        "access": network.access.text(),
        "cidrs": texts(&network.cidrs),
        "gateways": network.gateways.iter().map(gateway).collect::<Vec<_>>(),
    })
}

fn identity(config: &Config) -> Value {
    match &config.identity.source {
        None => Value::Null,
        Some(Source::Files { certificate, key }) => json!({"files": {
            "certificate": certificate.display().to_string(),
            "key": key.display().to_string(),
        }}),
        Some(Source::IstioCa(authority)) => json!({"istioCa": {
            "address": authority.address,
            "roots": authority.roots.display().to_string(),
            "token": authority.token.display().to_string(),
            "validity": duration(authority.validity),
        }}),
        Some(Source::WorkloadApi { socket }) => {
            json!({"workloadApi": {"socket": format!("unix://{}", socket.display())}})
        }
    }
}

fn hbone(policy: &Policy) -> Value {
    let hbone = &policy.hbone;
    json!({
        "streams": hbone.streams,
        "streamWindow": hbone.stream_window,
        "heldPerConnection": hbone.held_per_connection,
        "heldPerWorker": hbone.held_per_worker,
        "stalled": duration(hbone.stalled),
        "idle": duration(hbone.idle),
    })
}

fn xds(config: &Config) -> Value {
    let Some(xds) = &config.xds else { return false.into() };
    let rule = |rule: &ClientRule| {
        json!({
            "identities": texts(&rule.identities),
            "cidrs": texts(&rule.cidrs),
            "networks": rule.networks.as_deref().map(texts),
            "clusters": rule.clusters.as_deref().map(texts),
        })
    };
    json!({
        "bind": xds.bind.to_string(),
        "clients": xds.clients.as_ref().map(|rules| rules.iter().map(rule).collect::<Vec<_>>()),
    })
}

fn telemetry(config: &Config) -> Value {
    let opened = |bind: Option<Bind>| bind.map(|bind| json!({"bind": bind.to_string()}));
    let access_log = match &config.access_log {
        AccessLog::Off => Value::from(false),
        AccessLog::To { sink, format } => {
            let path = match sink {
                Sink::Stdout => "stdout".to_owned(),
                Sink::Stderr => "stderr".to_owned(),
                Sink::File(path) => path.display().to_string(),
            };
            json!({"path": path, "format": format.text()})
        }
    };
    json!({
        "metrics": opened(config.metrics),
        "health": opened(config.health),
        "accessLog": access_log,
        "log": {"level": config.log.level.text(), "format": config.log.format.text()},
        "tracing": config.tracing.as_ref().map_or_else(|| false.into(), |tracing| json!({
            "otlp": tracing.otlp,
            "sample": tracing.sample.share(),
        })),
    })
}
