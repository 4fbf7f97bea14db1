//! Network addresses: hosts, URLs of servers, and addresses of listening sockets.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

use super::name::HostName;

/// Converts an IPv4-mapped IPv6 address (RFC 4291 §2.5.5.2) to IPv4, so that each address has one spelling.
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// Returns the IPv4 address to which packets for an IPv6 address may be translated or carried, if its form says so; otherwise
/// [`canonical_ip`]. These forms are IPv4-compatible addresses (RFC 4291 §2.5.5.1), NAT64's well-known prefix (RFC 6052 §2.1),
/// prefixes of 96 bits for NAT64 of a network (RFC 8215), 6to4 (RFC 3056 §2), and Teredo's clients (RFC 4380 §4).
///
/// Rules that keep connections away from an address, and counts by source, use this, because such a form would evade them. The
/// gateway dials addresses as they are written, and a rule that lets a source in compares the source as it is written, since
/// whoever chooses an IPv6 address would otherwise choose what it is let in as.
pub fn embedded_ip(ip: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = canonical_ip(ip) else { return canonical_ip(ip) };
    let embedded = match v6.segments() {
        // `::` and `::1` are addresses of IPv6 itself.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => return ip,
        [0, 0, 0, 0, 0, 0, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => [high, low],
        [0x64, 0xff9b, 1, _, _, _, high, low] | [0x2002, high, low, ..] => [high, low],
        [0x2001, 0, _, _, _, _, high, low] => [!high, !low],
        _ => return ip,
    };
    let [[a, b], [c, d]] = embedded.map(u16::to_be_bytes);
    IpAddr::from([a, b, c, d])
}

/// Applies [`canonical_ip`] to the address of a socket address.
pub fn canonical_socket(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(canonical_ip(address.ip()), address.port())
}

/// The address part of an endpoint or a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Host {
    /// One address.
    Ip(#[serde(deserialize_with = "stored_ip")] IpAddr),
    /// Several addresses of one endpoint. The endpoint counts once, and its addresses are tried in turn. An endpoint
    /// without addresses, such as a peer's, can be reached only through the gateways of its network.
    Ips(#[serde(deserialize_with = "stored_ips")] Arc<[IpAddr]>),
    /// A host name that is resolved to addresses later.
    Name(HostName),
}

impl Host {
    /// Parses `10.0.0.1`, `2001:db8::1`, `[2001:db8::1]` or a host name. As in a server name, an IPv4 address may have a
    /// trailing dot.
    pub fn parse(text: &str) -> Result<Self, super::name::NameError> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if let Ok(ip) = bare.parse::<IpAddr>() {
            return Ok(Self::Ip(canonical_ip(ip)));
        }
        let name = HostName::parse(text)?;
        Ok(name.as_str().parse().map_or(Self::Name(name), Self::Ip))
    }

    /// Parses a host as [`parse`](Self::parse) does, with or without `:` and a port above 0. An IPv6 address with a port is in
    /// brackets.
    pub fn parse_with_port(text: &str) -> Option<(Self, Option<u16>)> {
        if let Ok(host) = Self::parse(text) {
            return Some((host, None));
        }
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        Some((Self::parse(host).ok()?, Some(port)))
    }

    /// Returns the host name; `None` for addresses.
    pub fn name(&self) -> Option<&HostName> {
        match self {
            Self::Ip(_) | Self::Ips(_) => None,
            Self::Name(name) => Some(name),
        }
    }
}

/// A target of SRV records, with its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrvTarget {
    /// The host name of the target.
    pub host: HostName,
    /// The port.
    pub port: u16,
    /// The priority: targets of the lowest one are used first.
    pub priority: u16,
    /// The weight among the targets of one priority.
    pub weight: u16,
    /// The addresses of the host; not empty.
    pub addresses: Arc<[IpAddr]>,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Ips(ips) => {
                for (at, ip) in ips.iter().enumerate() {
                    let comma = if at == 0 { "" } else { "," };
                    write!(f, "{comma}{ip}")?;
                }
                Ok(())
            }
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// The scheme of a server's URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// `http`: plain TCP.
    Http,
    /// `https`: TLS.
    Https,
}

impl Scheme {
    /// Returns the scheme as it is written in a URL.
    pub fn text(self) -> &'static str {
        match self {
            Self::Http => "http://",
            Self::Https => "https://",
        }
    }
}

/// The URL of a server: scheme, host and port, without a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Url {
    /// The scheme, which decides if the client uses TLS.
    pub scheme: Scheme,
    /// The server's address or name, never several addresses.
    pub host: Host,
    /// The port, from the URL or the scheme's default.
    pub port: u16,
}

impl Url {
    /// Returns true for a loopback address and for `localhost`.
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            Host::Ip(ip) => ip.is_loopback(),
            Host::Ips(ips) => ips.iter().all(IpAddr::is_loopback),
            Host::Name(name) => name.as_str() == "localhost",
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(IpAddr::V6(ip)) => write!(f, "{}[{ip}]:{}", self.scheme.text(), self.port),
            host => write!(f, "{}{host}:{}", self.scheme.text(), self.port),
        }
    }
}

/// The address of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bind {
    /// `:port`: every address of both families, or only IPv4 if the host has no IPv6.
    Any {
        /// The port, 1 to 65535.
        port: u16,
    },
    /// One address; `0.0.0.0` and `[::]` stand for all addresses of their own family only.
    Address(SocketAddr),
}

impl Bind {
    /// Returns the port.
    pub fn port(&self) -> u16 {
        match self {
            Self::Any { port } => *port,
            Self::Address(address) => address.port(),
        }
    }

    /// Returns true if some address and port belong to both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let parts = |bind: &Self| match bind {
            Self::Any { port } => (*port, None),
            Self::Address(address) => (address.port(), Some(address.ip())),
        };
        let ((port, ip), (other_port, other_ip)) = (parts(self), parts(other));
        let do_overlap = |one: IpAddr, other: IpAddr| {
            one.is_ipv4() == other.is_ipv4()
                && (one == other || one.is_unspecified() || other.is_unspecified())
        };
        port == other_port && port != 0 && ip.zip(other_ip).is_none_or(|(one, other)| do_overlap(one, other))
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any { port } => write!(f, ":{port}"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// The address of the admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminBind {
    /// One address of the host.
    Address(SocketAddr),
    /// The path of a unix socket.
    Unix(PathBuf),
}

impl fmt::Display for AdminBind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Reads an address of a copy on disk, in the one form that addresses have here.
fn stored_ip<'de, D: Deserializer<'de>>(from: D) -> Result<IpAddr, D::Error> {
    IpAddr::deserialize(from).map(canonical_ip)
}

/// Reads the addresses of a copy on disk.
pub(super) fn stored_ips<'de, D: Deserializer<'de>, T: FromIterator<IpAddr>>(from: D) -> Result<T, D::Error> {
    Ok(Vec::deserialize(from)?.into_iter().map(canonical_ip).collect())
}

/// Reads a socket address of a copy on disk.
pub(super) fn stored_socket<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    SocketAddr::deserialize(from).map(canonical_socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binds_overlap_if_they_share_an_address_and_the_port() {
        let bind = |text: &str| match text.strip_prefix(':') {
            Some(port) => Bind::Any { port: port.parse().expect("a port") },
            None => Bind::Address(text.parse().expect("an address")),
        };
        for (one, other, wanted) in [
            ("10.0.0.1:443", "0.0.0.0:443", true),
            ("10.0.0.1:443", ":443", true),
            ("[::1]:443", ":443", true),
            ("10.0.0.1:443", "10.0.0.2:443", false),
            ("10.0.0.1:443", "0.0.0.0:444", false),
            ("[::1]:443", "0.0.0.0:443", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            assert_eq!(bind(one).overlaps(&bind(other)), wanted, "{one} {other}");
            assert_eq!(bind(other).overlaps(&bind(one)), wanted, "{other} {one}");
        }
    }

    #[test]
    fn a_host_has_a_port_or_none() {
        let read = |text| Host::parse_with_port(text).map(|(host, port)| (host.to_string(), port));
        assert_eq!(read("a.example.com"), Some(("a.example.com".into(), None)));
        assert_eq!(read("1.2.3.4:31443"), Some(("1.2.3.4".into(), Some(31_443))));
        assert_eq!(read("[2001:db8::1]:443"), Some(("2001:db8::1".into(), Some(443))));
        assert_eq!(read("2001:db8::1"), Some(("2001:db8::1".into(), None)));
        assert_eq!(read("a b"), None);
        assert_eq!(read("a:0"), None);
    }

    #[test]
    fn ipv4_addresses_are_found_in_every_ipv6_form() {
        let embedded = |text: &str| embedded_ip(text.parse().expect("an address")).to_string();
        for (written, wanted) in [
            ("64:ff9b::7f00:1", "127.0.0.1"),
            ("64:ff9b::a9fe:a9fe", "169.254.169.254"),
            ("2002:7f00:1::", "127.0.0.1"),
            ("2002:a00:7:ffff:1:2:3:4", "10.0.0.7"),
            ("::127.0.0.1", "127.0.0.1"),
            ("::10.0.0.7", "10.0.0.7"),
            ("::ffff:10.0.0.7", "10.0.0.7"),
            ("10.0.0.7", "10.0.0.7"),
            ("::1", "::1"),
            ("::", "::"),
            ("::1:0:0", "::1:0:0"),
            ("64:ff9b:1::7f00:1", "127.0.0.1"),
            ("64:ff9b:1:2:3:4:a9fe:a9fe", "169.254.169.254"),
            ("64:ff9b:2::7f00:1", "64:ff9b:2::7f00:1"),
            ("2001:0:102:304:0:ffff:80ff:fffe", "127.0.0.1"),
            ("2001:1::80ff:fffe", "2001:1::80ff:fffe"),
            ("2001:db8::1", "2001:db8::1"),
        ] {
            assert_eq!(embedded(written), wanted, "{written}");
        }
    }

    #[test]
    fn mapped_addresses_are_ipv4_and_hosts_are_written_as_in_urls() {
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().expect("legal");
        assert_eq!(canonical_ip(mapped), "10.0.0.1".parse::<IpAddr>().expect("legal"));
        assert_eq!(Host::parse("[::1]").map(|host| host.to_string()).as_deref(), Ok("::1"));
        assert_eq!(Host::parse("10.0.0.1."), Host::parse("10.0.0.1"));
        let url =
            |host: &str| Url { scheme: Scheme::Https, host: Host::parse(host).expect("legal"), port: 2379 };
        assert_eq!(url("::1").to_string(), "https://[::1]:2379");
        assert_eq!(url("etcd-0.example").to_string(), "https://etcd-0.example:2379");
        assert!(url("::1").is_loopback() && url("localhost").is_loopback() && !url("10.0.0.1").is_loopback());
    }
}
