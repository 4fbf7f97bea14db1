//! A link that an enrolment created, stored as a file of the state folder: `peers/NAME.pem`.
//!
//! ```text
//! isthmus peer link 1
//! identity: spiffe://west.example/ns/isthmus/sa/gateway
//! dial: gw.west.example:15443
//! ```
//!
//! `dial` has the addresses of the peer's gateways, with a space between two of them. Where the peer dials, the line `accept: true`
//! replaces the line `dial`. The roots follow as PEM ([`RootFile`]).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustls::pki_types::CertificateDer;

use isthmus_model::address::Host;
use isthmus_model::identity::Identity;
use isthmus_tls::certificate::pem;
use isthmus_tls::root_file::{FOLDER, RootFile};

/// The kind of file, as the first line of the file names it.
const KIND: &str = "peer link";
/// The beginning of the file, in each version.
pub(super) const HEAD: &str = "isthmus peer link ";

/// A link with a peer as an enrolment stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolledLink {
    /// The SPIFFE ID of the peer's gateways. Its trust domain is that of the peer.
    pub identity: Identity,
    /// The root certificates of the peer's trust domain.
    pub roots: Vec<CertificateDer<'static>>,
    /// The gateway that dials.
    pub dialling: Dialling,
}

/// The gateway that opens the connection of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dialling {
    /// The peer dials.
    Theirs,
    /// This gateway dials the peer, at each of these addresses. There is at least one.
    Ours(Vec<GatewayAddress>),
}

/// The address at which a gateway accepts connections of peers: `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayAddress {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
}

impl GatewayAddress {
    /// Reads `10.0.0.1:443`, `[fd00::1]:443` or `gw.west.example:443`; an error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not an address; expected host:port");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        // Without brackets, the last part of an IPv6 address looks like a port.
        if host.contains(':') && !host.starts_with('[') {
            return Err(wrong());
        }
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        Ok(Self { host: Host::parse(host).map_err(|_| wrong())?, port })
    }
}

impl fmt::Display for GatewayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host.to_string();
        match host.contains(':') {
            true => write!(f, "[{host}]:{}", self.port),
            false => write!(f, "{host}:{}", self.port),
        }
    }
}

impl EnrolledLink {
    /// Returns the path of the link of a peer in a state folder.
    pub fn path(state: &Path, peer: &str) -> PathBuf {
        state.join(FOLDER).join(format!("{peer}.pem"))
    }

    /// Reads the link of a peer; `None` if the peer is not enrolled. An error names the file and what is wrong with it. Blocks.
    pub fn load(state: &Path, peer: &str) -> Result<Option<Self>, String> {
        let path = Self::path(state, peer);
        let again = |fault: String| {
            format!("{fault}; enrol the peer again with `isthmus peer invite --replace` and `join --replace`")
        };
        let Some(file) = RootFile::load(&path, KIND).map_err(again)? else { return Ok(None) };
        let link = Self::of_file(file);
        link.map(Some).ok_or_else(|| again(format!("{}: a field of the file is malformed", path.display())))
    }

    /// Writes the link of a peer, and replaces an earlier one. Blocks.
    pub fn store(&self, state: &Path, peer: &str) -> io::Result<()> {
        let dialling = match &self.dialling {
            Dialling::Theirs => ("accept".to_owned(), "true".to_owned()),
            Dialling::Ours(addresses) => ("dial".to_owned(), texts(addresses).join(" ")),
        };
        let fields = vec![("identity".to_owned(), self.identity.to_string()), dialling];
        RootFile { fields, roots: self.roots.clone() }.store(&Self::path(state, peer), KIND)
    }

    fn of_file(file: RootFile) -> Option<Self> {
        let dialling = match (file.field("dial"), file.field("accept")) {
            (Some(addresses), None) => {
                let addresses = addresses.split(' ').map(|text| GatewayAddress::parse(text).ok());
                Dialling::Ours(addresses.collect::<Option<_>>()?)
            }
            (None, Some("true")) => Dialling::Theirs,
            _ => return None,
        };
        Some(Self { identity: Identity::parse(file.field("identity")?).ok()?, roots: file.roots, dialling })
    }

    /// Returns the line of the config that says which gateway dials.
    pub fn dialling_key(&self) -> String {
        match &self.dialling {
            Dialling::Theirs => "accept: true".to_owned(),
            Dialling::Ours(addresses) => match &texts(addresses)[..] {
                [one] => format!("dial: \"{one}\""),
                several => format!("dial: [\"{}\"]", several.join("\", \"")),
            },
        }
    }

    /// Returns the roots as PEM.
    pub fn pem(&self) -> String {
        pem(&self.roots)
    }
}

fn texts(addresses: &[GatewayAddress]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(dialling: Dialling) -> EnrolledLink {
        EnrolledLink {
            identity: Identity::parse("spiffe://west.example/ns/isthmus/sa/gateway").expect("legal"),
            roots: vec![CertificateDer::from(vec![7; 400]), CertificateDer::from(vec![8; 3])],
            dialling,
        }
    }

    fn address(text: &str) -> GatewayAddress {
        GatewayAddress::parse(text).expect(text)
    }

    #[test]
    fn a_stored_link_is_loaded() {
        let state = tempfile::tempdir().expect("a folder");
        assert_eq!(EnrolledLink::load(state.path(), "west"), Ok(None));
        let several = vec![address("[fd00::1]:15443"), address("gw.west.example:443")];
        for dialling in
            [Dialling::Theirs, Dialling::Ours(vec![address("10.0.0.1:1")]), Dialling::Ours(several)]
        {
            let link = link(dialling);
            link.store(state.path(), "west").expect("stored");
            assert_eq!(EnrolledLink::load(state.path(), "west"), Ok(Some(link)));
        }
        let file = |fields: &[(&str, &str)]| RootFile {
            fields: fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            roots: link(Dialling::Theirs).roots,
        };
        let identity = ("identity", "spiffe://west.example/x");
        for fields in [
            &[identity][..],
            &[identity, ("dial", "x")],
            &[identity, ("dial", "a:1 x")],
            &[("dial", "a:1")],
            &[("identity", "x"), ("accept", "true")],
        ] {
            file(fields).store(&EnrolledLink::path(state.path(), "west"), KIND).expect("stored");
            let fault = EnrolledLink::load(state.path(), "west").expect_err("illegal");
            assert!(
                fault.contains("west.pem: a field of the file is malformed; enrol the peer again"),
                "{fault}"
            );
        }
    }

    #[test]
    fn the_key_of_the_config_has_all_addresses() {
        let key = |addresses: &[&str]| {
            let addresses = addresses.iter().map(|text| address(text)).collect();
            link(Dialling::Ours(addresses)).dialling_key()
        };
        assert_eq!(key(&["10.0.0.1:1"]), "dial: \"10.0.0.1:1\"");
        assert_eq!(key(&["10.0.0.1:1", "[fd00::1]:2"]), "dial: [\"10.0.0.1:1\", \"[fd00::1]:2\"]");
        assert_eq!(link(Dialling::Theirs).dialling_key(), "accept: true");
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for text in ["10.0.0.1:443", "[fd00::1]:443", "gw.west.example:1"] {
            assert_eq!(address(text).to_string(), text);
        }
        for text in ["", "gw.west.example", "gw:0", "gw:70000", "fd00::1:443", ":443", "a b:1", "gw:+"] {
            assert!(GatewayAddress::parse(text).is_err(), "{text}");
        }
    }
}
