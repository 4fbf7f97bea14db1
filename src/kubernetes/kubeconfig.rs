//! Reads kubeconfigs. A kubeconfig is code: it can name programs to start and files to read. Such keys are refused before a
//! client is made, each with its position in the file.

use std::path::Path as FilePath;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use super::credentials::{Access, Identification, Server};
use isthmus_document::problem::{Path, Problems};
use isthmus_document::tree::{Node, Source, parse};
use isthmus_model::address::{Host, Scheme, Url};
use isthmus_tls::certificate::certificates;
use isthmus_tls::client::OwnCertificate;

/// The largest size of a kubeconfig, in bytes; real ones have a few KiB.
pub(super) const BYTES_MAX: u64 = 1 << 20;
/// The port of an API server whose URL names none.
const HTTPS_PORT: u16 = 443;

/// Keys of a kubeconfig's user that would start a program or read a file, each with what to do instead.
const REFUSED_OF_USER: [(&str, &str); 5] = [
    ("exec", "this key would start a program; use a token, or `tokenFile` of the registry"),
    ("auth-provider", "this key would start a program; use a token, or `tokenFile` of the registry"),
    ("tokenFile", "this key would read a file; set `tokenFile` of the registry to that file, or use `token`"),
    ("client-certificate", "this key would read a file; use `client-certificate-data`"),
    ("client-key", "this key would read a file; use `client-key-data`"),
];
/// Keys of a cluster that would read a file, disable the verification of the server, or use a proxy.
const REFUSED_OF_CLUSTER: [(&str, &str); 3] = [
    ("certificate-authority", "this key would read a file; use `certificate-authority-data`"),
    (
        "insecure-skip-tls-verify",
        "with this key the server would not be verified; use `certificate-authority-data`",
    ),
    ("proxy-url", "proxies are not supported; reach the server directly"),
];

/// Reads the text of a kubeconfig. Messages show `name` as its file; `has_token` is true if a token comes from elsewhere. The
/// error is the list of mistakes, a line each.
pub(super) fn read(
    name: &FilePath,
    text: &str,
    context: Option<&str>,
    has_token: bool,
) -> Result<Access, Vec<String>> {
    let mut problems = Problems::new();
    let file = problems.add_file(name);
    let node = file.and_then(|file| parse(Source { file, text, environment: None }, None, &mut problems));
    let access = node.and_then(|node| Reader { problems: &mut problems, has_token }.access(&node, context));
    match access {
        Some(access) if problems.is_empty() => Ok(access),
        _ => {
            let (errors, _) = problems.finish();
            Err(errors.iter().map(ToString::to_string).collect())
        }
    }
}

struct Reader<'p> {
    problems: &'p mut Problems,
    has_token: bool,
}

impl Reader<'_> {
    fn access(&mut self, root: &Node, context: Option<&str>) -> Option<Access> {
        let wanted = context.or_else(|| root.get("current-context").and_then(Node::text));
        let Some(wanted) = wanted.filter(|name| !name.is_empty()) else {
            self.error(root, &Path::Root, "found no current-context; set `context` of the registry");
            return None;
        };
        let contexts = Path::Root.key("contexts");
        let (context, _) = self.named(root, "contexts", "context", wanted, &contexts)?;
        let of = |key| context.get(key).and_then(Node::text).unwrap_or_default();
        let (cluster, user) = (of("cluster"), of("user"));
        let clusters = Path::Root.key("clusters");
        let users = Path::Root.key("users");
        let cluster = self.named(root, "clusters", "cluster", cluster, &clusters);
        let user = self.named(root, "users", "user", user, &users);
        let ((cluster, cluster_at), (user, user_at)) = (cluster?, user?);
        let (cluster_list, user_list) = (clusters.index(cluster_at), users.index(user_at));
        let (cluster_path, user_path) = (cluster_list.key("cluster"), user_list.key("user"));
        let refused = self.refuse(cluster, &REFUSED_OF_CLUSTER, &cluster_path)
            | self.refuse(user, &REFUSED_OF_USER, &user_path);
        let server = self.server(cluster, &cluster_path);
        let roots = self.roots(cluster, &cluster_path);
        let name = self.server_name(cluster, &cluster_path);
        let identification = self.identification(user, &user_path);
        if refused {
            return None;
        }
        Some(Access { server: server?, roots: roots?, server_name: name?, identification: identification? })
    }

    /// Returns the entry with a name in one of the lists, and its index.
    fn named<'n>(
        &mut self,
        root: &'n Node,
        list: &str,
        inner: &str,
        name: &str,
        at: &Path<'_>,
    ) -> Option<(&'n Node, usize)> {
        let items = root.get(list).map_or(&[][..], Node::items);
        let of_name =
            items.iter().enumerate().find(|(_, item)| item.get("name").and_then(Node::text) == Some(name));
        let found = of_name.and_then(|(index, item)| Some((item.get(inner)?, index)));
        if found.is_none() {
            let place = root.get(list).unwrap_or(root);
            self.error(place, at, format!("found no {inner} with the name {name:?}"));
        }
        found
    }

    /// Reports the keys that are refused; returns true if there are any. A key with the value `false`, `null` or an empty text
    /// counts as absent.
    fn refuse(&mut self, node: &Node, keys: &[(&str, &str)], at: &Path<'_>) -> bool {
        let mut refused = false;
        for (key, why) in keys {
            let Some(found) = node.get(key) else { continue };
            if matches!(found.text(), Some("" | "false" | "null" | "~")) {
                continue;
            }
            let is_oidc = *key == "auth-provider"
                && found.get("name").and_then(Node::text) == Some("oidc")
                && found.get("config").and_then(|config| config.get("id-token")).is_some();
            if !is_oidc {
                self.error(found, &at.key(key), format!("refused: {why}"));
                refused = true;
            }
        }
        refused
    }

    fn server(&mut self, cluster: &Node, at: &Path<'_>) -> Option<Server> {
        let Some(node) = cluster.get("server") else {
            self.error(cluster, at, "found no server");
            return None;
        };
        let text = node.text().unwrap_or_default();
        let server = server(text);
        if server.is_none() {
            let fault = format!("found {node}; expected https://HOST[:PORT][/PATH] without a query");
            self.error(node, &at.key("server"), fault);
        }
        server
    }

    fn roots(&mut self, cluster: &Node, at: &Path<'_>) -> Option<Vec<CertificateDer<'static>>> {
        let key = "certificate-authority-data";
        let Some(node) = cluster.get(key) else {
            self.error(cluster, at, format!("found no {key}, so the gateway could not verify the server"));
            return None;
        };
        let pem = decoded(node.text().unwrap_or_default()).unwrap_or_default();
        self.certificates(node, &at.key(key), &pem)
    }

    /// Returns the server name. `Some(None)`: the cluster has none. `None`: the name has a mistake, which was reported.
    fn server_name(&mut self, cluster: &Node, at: &Path<'_>) -> Option<Option<ServerName<'static>>> {
        let key = "tls-server-name";
        let Some(node) = cluster.get(key) else { return Some(None) };
        match ServerName::try_from(node.text().unwrap_or_default().to_owned()) {
            Ok(name) => Some(Some(name)),
            Err(_) => {
                self.error(node, &at.key(key), format!("found {node}; expected a host name or an address"));
                None
            }
        }
    }

    fn identification(&mut self, user: &Node, at: &Path<'_>) -> Option<Identification> {
        let text = |key: &str| user.get(key).and_then(Node::text).filter(|text| !text.is_empty());
        let oidc = user.get("auth-provider").and_then(|provider| provider.get("config"));
        let id_token = oidc.and_then(|config| config.get("id-token")).and_then(Node::text);
        let token = text("token").or(id_token);
        let own = self.certificate(user, at)?;
        let mut impersonation = Vec::new();
        let groups = user.get("as-groups").map_or(&[][..], Node::items);
        let groups = groups.iter().map(|group| ("as-groups", "impersonate-group", group.text()));
        let others = [("as", "impersonate-user"), ("as-uid", "impersonate-uid")];
        let others = others.map(|(key, header)| (key, header, text(key)));
        for (key, header, value) in others.into_iter().chain(groups) {
            match value.map(|value| header_of(header, value)) {
                None => {}
                Some(Some(found)) => impersonation.push(found),
                // Without this header, requests would have more rights than intended.
                Some(None) => {
                    self.error(user, &at.key(key), "found characters that an HTTP header cannot have")
                }
            }
        }
        if token.is_none() && own.is_none() && !self.has_token {
            self.error(user, at, "found neither token nor client-certificate-data with client-key-data");
        }
        Some(Identification { token: token.map(str::to_owned), own, impersonation })
    }

    /// Returns the client certificate. `Some(None)`: the user has none. `None`: the certificate has a mistake, which was
    /// reported.
    fn certificate(&mut self, user: &Node, at: &Path<'_>) -> Option<Option<OwnCertificate>> {
        let (chain_key, key_key) = ("client-certificate-data", "client-key-data");
        let (chain, key) = match (user.get(chain_key), user.get(key_key)) {
            (None, None) => return Some(None),
            (Some(chain), Some(key)) => (chain, key),
            _ => {
                self.error(
                    user,
                    at,
                    format!("found only one of {chain_key} and {key_key}; expected both or neither"),
                );
                return None;
            }
        };
        let pem = |node: &Node| decoded(node.text().unwrap_or_default()).unwrap_or_default();
        let certificates = self.certificates(chain, &at.key(chain_key), &pem(chain));
        let private = PrivateKeyDer::from_pem_slice(&pem(key)).ok();
        if private.is_none() {
            self.error(key, &at.key(key_key), "found no private key; expected PEM text in base64");
        }
        Some(Some((certificates?, private?)))
    }

    /// Reads certificates in PEM, and reports a fault.
    fn certificates(
        &mut self,
        node: &Node,
        at: &Path<'_>,
        pem: &[u8],
    ) -> Option<Vec<CertificateDer<'static>>> {
        let read = certificates(pem);
        read.map_err(|fault| self.error(node, at, format!("{fault}; expected PEM text in base64"))).ok()
    }

    fn error(&mut self, node: &Node, at: &Path<'_>, fault: impl Into<String>) {
        self.problems.error(node.position, at, fault.into());
    }
}

fn header_of(name: &'static str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    Some((HeaderName::from_static(name), HeaderValue::from_str(value).ok()?))
}

/// Parses `https://HOST[:PORT][/PATH]`, with or without a slash at its end.
fn server(text: &str) -> Option<Server> {
    let rest = text.strip_prefix("https://")?;
    let (rest, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let path = path.trim_end_matches('/');
    // The paths of requests are appended to the path.
    let is_path = |path: &str| path.parse::<PathAndQuery>().is_ok_and(|parsed| parsed.path() == path);
    if !path.is_empty() && !is_path(path) {
        return None;
    }
    let bracketed = rest.strip_prefix('[').and_then(|inner| inner.split_once(']'));
    let (host, port) = match (bracketed, rest.rsplit_once(':')) {
        (Some((host, "")), _) => (host, HTTPS_PORT),
        (Some((host, port)), _) => (host, port.strip_prefix(':')?.parse().ok()?),
        (None, Some((host, port))) => (host, port.parse().ok()?),
        (None, None) => (rest, HTTPS_PORT),
    };
    let address = Url { scheme: Scheme::Https, host: Host::parse(host).ok()?, port };
    Some(Server { address, path: path.to_owned() })
}

/// Decodes base64; returns `None` if the text is not base64.
pub(super) fn decoded(text: &str) -> Option<Vec<u8>> {
    let compact: String = text.chars().filter(|letter| !letter.is_ascii_whitespace()).collect();
    BASE64_STANDARD.decode(compact).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_url_of_a_server_may_have_a_port_and_a_path() {
        for (text, shown) in [
            ("https://10.0.0.1", "https://10.0.0.1:443"),
            ("https://api.example:6443/", "https://api.example:6443"),
            ("https://[fd00::1]:6443", "https://[fd00::1]:6443"),
            ("https://rancher.example/k8s/clusters/c-1/", "https://rancher.example:443/k8s/clusters/c-1"),
        ] {
            assert_eq!(server(text).expect("legal").to_string(), shown);
        }
        for bad in
            ["http://a", "https://", "https://a/b?c=d", "https://a/b#c", "https://a/b c", "https://a:x/b"]
        {
            assert_eq!(server(bad), None, "{bad}");
        }
    }
}
