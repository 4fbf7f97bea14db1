//! Configs of programs that have no conversion, by words that only they have.

/// A kind of config, the words of which one is in its text, and the page that helps.
struct Other {
    name: &'static str,
    words: &'static [&'static str],
    help: &'static str,
}

/// The help for the configs of other proxies.
const PROXIES: &str = "docs/migrate.md, \"Other programs\", says what corresponds";

/// The kinds, the more specific ones first.
const OTHERS: &[Other] = &[
    Other {
        name: "objects of Istio",
        words: &["networking.istio.io/", "security.istio.io/", "install.istio.io/"],
        help: "docs/replace-istio-gateway.md says what replaces them",
    },
    Other {
        name: "objects of the Gateway API",
        words: &["gateway.networking.k8s.io/"],
        help: "isthmus reads them from Kubernetes, as docs/gateway-api.md says",
    },
    Other {
        name: "a config of Traefik",
        words: &[
            "entryPoints",
            "HostSNI(",
            "traefik.io/",
            "traefik.containo.us/",
            "[tcp.routers",
            "[http.routers",
        ],
        help: PROXIES,
    },
    Other {
        name: "a config of Envoy",
        words: &[
            "static_resources",
            "dynamic_resources",
            "filter_chains",
            "envoy.filters.",
            "envoy.extensions.",
        ],
        help: PROXIES,
    },
    Other {
        name: "Kubernetes objects",
        words: &["apiVersion:", "\"apiVersion\":"],
        help: "docs/kubernetes.md says how isthmus reads services there",
    },
    Other {
        name: "a config of Caddy",
        words: &["reverse_proxy ", "file_server", "layer4 {", "\"layer4\":", "\"reverse_proxy\""],
        help: PROXIES,
    },
    Other {
        name: "a config of isthmus",
        words: &["\nlisteners:", "\nroutes:", "\nlisten:", "\nservices:"],
        help: "`isthmus validate` checks it",
    },
];

/// Returns the kind of a text that is a config of another program, and what helps.
pub(super) fn of(text: &str) -> Option<String> {
    // A key at the beginning of the file is one at the beginning of a line.
    let text = format!("\n{text}");
    let found = OTHERS.iter().find(|other| other.words.iter().any(|word| text.contains(word)))?;
    Some(format!("{}, which has no conversion; {}", found.name, found.help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configs_of_other_programs_are_named_with_the_page_that_helps() {
        for (text, name, page) in [
            ("[tcp.routers.a]\nrule = \"HostSNI(`a.test`)\"\n", "Traefik", "migrate.md"),
            ("entryPoints:\n  web:\n    address: :80\n", "Traefik", "migrate.md"),
            ("apiVersion: traefik.io/v1alpha1\nkind: IngressRouteTCP\n", "Traefik", "migrate.md"),
            ("{\"static_resources\": {\"listeners\": []}}", "Envoy", "migrate.md"),
            ("apiVersion: networking.istio.io/v1\nkind: Gateway\n", "Istio", "replace-istio-gateway.md"),
            ("apiVersion: gateway.networking.k8s.io/v1\nkind: TLSRoute\n", "Gateway API", "gateway-api.md"),
            ("apiVersion: v1\nkind: Service\n", "Kubernetes objects", "kubernetes.md"),
            ("example.com {\n  reverse_proxy 10.0.0.1:80\n}\n", "Caddy", "migrate.md"),
            ("listen: \":443\"\nroutes: {}\n", "isthmus", "validate"),
        ] {
            let found = of(text).unwrap_or_default();
            assert!(found.contains(name) && found.contains(page), "{text}: {found}");
        }
        assert_eq!(of("some text"), None);
    }
}
