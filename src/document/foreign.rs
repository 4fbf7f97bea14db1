//! Keys of other programs' configs, with better messages than "unknown key".

use super::table::Object;

/// Keys of other programs with their equivalent in this program: a key of the same object, or text in backquotes.
const WORDS: &[(&str, &str)] = &[
    ("frontend", "listeners"),
    ("frontends", "listeners"),
    // These two are for the keys of a route. The two below them are for those of the file.
    ("server", "endpoints"),
    ("servers", "endpoints"),
    ("server", "listeners"),
    ("servers", "listeners"),
    ("port", "listen"),
    ("ports", "listen"),
    ("backend", "routes"),
    ("backends", "routes"),
    ("upstream", "routes"),
    ("upstreams", "routes"),
    ("clusters", "routes"),
    ("virtual_hosts", "routes"),
    ("hosts", "routes"),
    ("map", "routes"),
    ("lb_policy", "loadBalancing"),
    ("lbPolicy", "loadBalancing"),
    ("balance", "loadBalancing"),
    ("loadBalancer", "loadBalancing"),
    ("connect_timeout", "connectTimeout"),
    ("timeout", "connectTimeout"),
    ("sendProxy", "sendProxyProtocol"),
    ("send_proxy", "sendProxyProtocol"),
    ("proxyProtocol", "sendProxyProtocol"),
    ("check", "health"),
    ("checks", "health"),
    ("healthCheck", "health"),
    ("healthChecks", "health"),
    ("health_check", "health"),
    ("health_checks", "health"),
    ("outlierDetection", "ejection"),
    ("outlier_detection", "ejection"),
    ("load_assignment", "endpoints"),
    ("lb_endpoints", "endpoints"),
    ("targets", "endpoints"),
    ("backends", "endpoints"),
    ("host", "address"),
    ("hostname", "address"),
    ("ip", "address"),
    ("target", "address"),
    ("host", "endpoints"),
    ("address", "bind"),
    ("sni", "routes"),
    ("tls", "identity"),
    ("ca", "trust"),
    ("log", "telemetry"),
    ("metrics", "telemetry"),
    ("health", "telemetry"),
    ("accessLog", "telemetry"),
    ("tracing", "telemetry"),
    ("allowFrom", "from"),
    ("allow", "from"),
];

/// Programs by the keys that their configs have.
const PROGRAMS: &[(&[&str], &str)] = &[
    (&["apiVersion", "kind"], "a Kubernetes manifest"),
    (&["static_resources"], "an Envoy bootstrap"),
    (&["dynamic_resources"], "an Envoy bootstrap"),
    (&["entryPoints"], "a Traefik config"),
];

/// Returns the key of an object that is the equivalent of another program's key.
pub(super) fn meant(object: &Object, word: &str) -> Option<&'static str> {
    WORDS.iter().find(|(foreign, ours)| *foreign == word && object.key(ours).is_some()).map(|(_, ours)| *ours)
}

/// Returns the kind of another program's config, such as `an Envoy bootstrap`, if a map has the keys of that kind.
pub(super) fn program(object: &Object, has: impl Fn(&str) -> bool) -> Option<&'static str> {
    let found = PROGRAMS.iter().find(|(keys, _)| keys.iter().all(|key| has(key)));
    found.filter(|_| object.name == "config").map(|(_, name)| *name)
}
