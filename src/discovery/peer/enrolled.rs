//! A link that an enrolment gave, as a file of the state folder: `peers/NAME.pem`. The roots follow the other fields, so that the file
//! is written whole, and is a file of roots as any other.
//!
//! ```text
//! isthmus peer link 1
//! identity: spiffe://west.example/ns/isthmus/sa/gateway
//! dial: gw.west.example:15443
//! sum: 0123456789abcdef
//!
//! -----BEGIN CERTIFICATE-----
//! ```
//!
//! Instead of `dial` there is `accept: true` where the peer dials. `sum` is the XXH3 hash of all other bytes.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustls::pki_types::CertificateDer;
use twox_hash::XxHash3_64;

use crate::model::address::Host;
use crate::model::identity::Identity;
use crate::net::file;
use crate::net::whole_file::write_whole;
use crate::tls::certificate::{certificates, pem};

/// The folder of enrolled links in the state folder.
const FOLDER: &str = "peers";
const HEAD: &str = "isthmus peer link 1";
/// The largest file in bytes: the roots of a party have at most 64 KiB, which is less than 128 KiB as PEM.
const BYTES_MAX: u64 = 256 << 10;

/// What is needed for the link with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolledLink {
    /// The SPIFFE ID of its gateways; its certificates are of the trust domain of this.
    pub identity: Identity,
    /// The root certificates of that trust domain.
    pub roots: Vec<CertificateDer<'static>>,
    /// Which side dials.
    pub dialling: Dialling,
}

/// Which side dials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dialling {
    /// The peer.
    Theirs,
    /// This gateway, to this address.
    Ours(GatewayAddress),
}

/// Where a gateway takes connections of peers: `host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayAddress {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
}

impl GatewayAddress {
    /// Reads `10.0.0.1:443`, `[fd00::1]:443` or `gw.west.example:443`; an error says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address; expected host:port");
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

    /// Reads the link of a peer; `None` if it is not enrolled. An error names the file and what is wrong with it. Blocks.
    pub fn load(state: &Path, peer: &str) -> Result<Option<Self>, String> {
        let path = Self::path(state, peer);
        let named = |fault: &dyn fmt::Display| format!("{}: {fault}", path.display());
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(named(&error)),
            Ok(metadata) if metadata.permissions().mode() & 0o002 != 0 && metadata.is_file() => {
                return Err(named(
                    &"anybody may write it, so anybody may have; run chmod 600 on it if you know it",
                ));
            }
            Ok(_) => {}
        }
        let bytes = file::read(&path, BYTES_MAX).map_err(|fault| named(&fault))?;
        let text = String::from_utf8(bytes).map_err(|_| named(&DAMAGED))?;
        Self::parse(&text).map(Some).map_err(|fault| named(&fault))
    }

    /// Writes the link of a peer, in place of an earlier one. Blocks.
    pub fn store(&self, state: &Path, peer: &str) -> io::Result<()> {
        write_whole(&Self::path(state, peer), |mut file| {
            file.write_all(self.text().as_bytes())?;
            Ok(file)
        })
    }

    /// Returns the key of the config that says which side dials.
    pub fn dialling_key(&self) -> String {
        match &self.dialling {
            Dialling::Theirs => "accept: true".to_owned(),
            Dialling::Ours(address) => format!("dial: \"{address}\""),
        }
    }

    /// Returns the roots as PEM.
    pub fn pem(&self) -> String {
        pem(&self.roots)
    }

    fn text(&self) -> String {
        let how = match &self.dialling {
            Dialling::Theirs => "accept: true".to_owned(),
            Dialling::Ours(address) => format!("dial: {address}"),
        };
        let head = format!("{HEAD}\nidentity: {}\n{how}\n", self.identity);
        let roots = format!("\n{}", self.pem());
        format!("{head}sum: {:016x}\n{roots}", sum(&head, &roots))
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        let (head, rest) = text.split_once("sum: ").ok_or(DAMAGED)?;
        let (written, roots) = rest.split_once('\n').ok_or(DAMAGED)?;
        if !head.starts_with(HEAD) || written != format!("{:016x}", sum(head, roots)) {
            return Err(DAMAGED);
        }
        let mut lines = head.lines().skip(1);
        let identity = lines.next().and_then(|line| line.strip_prefix("identity: "));
        let identity = identity.and_then(|text| Identity::parse(text).ok()).ok_or(DAMAGED)?;
        let dialling = match lines.next().and_then(|line| line.split_once(": ")) {
            Some(("accept", "true")) => Dialling::Theirs,
            Some(("dial", address)) => Dialling::Ours(GatewayAddress::parse(address).map_err(|_| DAMAGED)?),
            _ => return Err(DAMAGED),
        };
        let roots = certificates(roots.as_bytes()).map_err(|_| DAMAGED)?;
        Ok(Self { identity, roots, dialling })
    }
}

const DAMAGED: &str =
    "it is damaged, or not written by this version of isthmus; enrol the peer again with `isthmus peer`";

fn sum(head: &str, roots: &str) -> u64 {
    XxHash3_64::oneshot([head, roots].concat().as_bytes())
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
    fn a_stored_link_is_loaded_and_only_its_owner_reads_it() {
        let state = tempfile::tempdir().expect("a folder");
        assert_eq!(EnrolledLink::load(state.path(), "west"), Ok(None));
        for dialling in [Dialling::Theirs, Dialling::Ours(address("[fd00::1]:15443"))] {
            let link = link(dialling);
            link.store(state.path(), "west").expect("stored");
            assert_eq!(EnrolledLink::load(state.path(), "west"), Ok(Some(link.clone())));
            let bytes = fs::read(EnrolledLink::path(state.path(), "west")).expect("written");
            assert_eq!(certificates(&bytes).expect("a file of roots"), link.roots);
        }
        let path = EnrolledLink::path(state.path(), "west");
        assert_eq!(path.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o606)).expect("set");
        let refused = EnrolledLink::load(state.path(), "west").expect_err("others may have written it");
        assert!(refused.contains("west.pem") && refused.contains("chmod 600"), "{refused}");
    }

    #[test]
    fn a_file_that_differs_in_one_bit_or_is_cut_is_refused() {
        let whole = link(Dialling::Ours(address("gw.west.example:15443"))).text();
        for at in 0..whole.len() {
            EnrolledLink::parse(&whole[..at]).expect_err("cut");
            let mut other = whole.clone().into_bytes();
            other[at] ^= 1;
            let other = String::from_utf8(other).expect("ASCII");
            EnrolledLink::parse(&other).expect_err(&other);
        }
        EnrolledLink::parse(&format!("{whole}x")).expect_err("longer");
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
