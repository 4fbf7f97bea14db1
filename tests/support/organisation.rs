//! Organisations for tests of federation: each has a CA, a trust domain and a gateway of its own.

use std::path::Path;

use tempfile::TempDir;

use super::gateway::Gateway;
use super::pki::Pki;

/// An organisation, with the files of its gateway.
pub struct Organisation {
    /// Its name, which is also that of its network and cluster.
    pub name: &'static str,
    pub trust_domain: String,
    pub pki: Pki,
}

impl Organisation {
    pub fn new(name: &'static str, trust_domain: &str) -> Self {
        Self { name, trust_domain: trust_domain.to_owned(), pki: Pki::new(&format!("the CA of {name}")) }
    }

    /// Returns the SPIFFE ID of its gateway.
    pub fn identity(&self) -> String {
        format!("spiffe://{}/ns/isthmus/sa/gateway", self.trust_domain)
    }

    /// Makes the folder of its gateway: certificate, key and roots, and the roots of these peers.
    pub fn folder(&self, peers: &[&Self]) -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        self.certify(folder.path());
        write(folder.path(), "roots.pem", &self.pki.ca_pem());
        for peer in peers {
            write(folder.path(), &format!("{}.pem", peer.name), &peer.pki.ca_pem());
        }
        folder
    }

    /// Writes a certificate of its gateway.
    pub fn certify(&self, folder: &Path) {
        let own = self.pki.issue(&[], Some(&self.identity()));
        write(folder, "cert.pem", &own.certificate_pem);
        write(folder, "key.pem", &own.key_pem);
    }

    /// Returns the part of a config that every gateway of the organisation has: one listener `mesh` for SNI, HBONE and links.
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

    /// Returns an entry of `peers` for this organisation, with further lines indented by four.
    pub fn as_peer(&self, how: &str, more: &str) -> String {
        let (name, identity) = (self.name, self.identity());
        format!(
            "  - name: {name}\n    {how}\n    identity: {identity}\n    trust: {name}.pem\n    addresses: [127.0.0.0/8]\n{more}"
        )
    }
}

fn write(folder: &Path, name: &str, text: &str) {
    // In one step: the gateway may read the file meanwhile.
    let next = folder.join(format!(".{name}"));
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(name)).expect("renamed");
}

/// Returns a port of loopback that was free a moment ago.
pub fn free_port() -> u16 {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("an address").port()
}

/// Starts a gateway in a folder that may have one from before.
pub fn start(folder: TempDir, config: &str) -> Gateway {
    Gateway::start_in(folder, config, &[])
}
