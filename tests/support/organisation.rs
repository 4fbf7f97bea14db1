//! Organisations for tests of federation: each has a CA, a trust domain and a gateway of its own.

use std::path::Path;

use tempfile::TempDir;

use super::etcd::free_ports;
use super::gateway::Gateway;
use super::pki::Pki;

/// An organisation, with the files of its gateway.
pub struct Organisation {
    /// The name of the organisation, its network and its cluster.
    pub name: &'static str,
    pub trust_domain: String,
    pub pki: Pki,
}

impl Organisation {
    pub fn new(name: &'static str, trust_domain: &str) -> Self {
        Self { name, trust_domain: trust_domain.to_owned(), pki: Pki::new(&format!("the CA of {name}")) }
    }

    /// Returns the SPIFFE ID of the organisation's gateway.
    pub fn identity(&self) -> String {
        format!("spiffe://{}/ns/isthmus/sa/gateway", self.trust_domain)
    }

    /// Creates the folder of the organisation's gateway: its certificate, key and roots, and the roots of `peers`.
    pub fn folder(&self, peers: &[&Self]) -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        self.certify(folder.path());
        write(folder.path(), "roots.pem", &self.pki.ca_pem());
        for peer in peers {
            write(folder.path(), &format!("{}.pem", peer.name), &peer.pki.ca_pem());
        }
        folder
    }

    /// Writes a new certificate and key of the organisation's gateway.
    pub fn certify(&self, folder: &Path) {
        let own = self.pki.issue(&[], Some(&self.identity()));
        write(folder, "cert.pem", &own.certificate_pem);
        write(folder, "key.pem", &own.key_pem);
    }

    /// Returns the part of a config that every gateway of the organisation has. Its one listener `mesh` accepts SNI, HBONE and
    /// links of peers.
    pub fn base(&self, port: u16) -> String {
        let Self { name, trust_domain, .. } = self;
        format!(
            "node: {{name: gw-{name}, namespace: isthmus, serviceAccount: gateway, cluster: {name}, network: net-{name}}}\n\
             mesh: {{trustDomain: {trust_domain}}}\n\
             listeners: [{{name: mesh, bind: \"127.0.0.1:{port}\", protocol: auto}}]\n\
             identity: {{files: {{certificate: cert.pem, key: key.pem}}}}\n\
             trust: [{{trustDomain: {trust_domain}, roots: roots.pem}}]\n"
        )
    }

    /// Returns an entry of `peers` for this organisation; `how` says how to reach it, and `more` is further lines, indented by
    /// four spaces.
    pub fn as_peer(&self, how: &str, more: &str) -> String {
        let (name, identity) = (self.name, self.identity());
        format!(
            "  - name: {name}\n    {how}\n    identity: {identity}\n    trust: {name}.pem\n    addresses: [127.0.0.0/8]\n{more}"
        )
    }
}

/// Writes a file that the gateway may be reading.
pub fn write(folder: &Path, name: &str, text: &str) {
    // A rename replaces the file in one step.
    let next = folder.join(format!(".{name}"));
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(name)).expect("renamed");
}

/// Returns a loopback port that was free a moment ago. The port is outside the range from which the kernel chooses ports for
/// connections of other tests.
pub fn free_port() -> u16 {
    free_ports(1)[0]
}

/// Starts a gateway in a folder, in which an earlier gateway may have run.
pub fn start(folder: TempDir, config: &str) -> Gateway {
    Gateway::start_in(folder, config, &[])
}
