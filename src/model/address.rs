//! Network addresses as this field writes them: hosts, targets, sources.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use super::name::HostName;

/// An address with IPv4-mapped IPv6 made IPv4, so that one peer has one spelling.
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// [`canonical_ip`] of a socket address.
pub fn canonical_socket(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(canonical_ip(address.ip()), address.port())
}

/// What a source is counted as for limits: an IPv4 address, or the /64 of an IPv6 address.
pub fn source_block(ip: IpAddr) -> IpAddr {
    match canonical_ip(ip) {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => {
            let mut octets = v6.octets();
            octets[8..].fill(0);
            IpAddr::V6(Ipv6Addr::from(octets))
        }
    }
}

/// An address, or a name that stands for some.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    Ip(IpAddr),
    /// Several addresses of one endpoint, which counts once: of each family, the first is used.
    Ips(Arc<[IpAddr]>),
    Name(HostName),
}

impl Host {
    /// From `10.0.0.1`, `2001:db8::1`, `[2001:db8::1]` or a host name.
    pub fn parse(text: &str) -> Result<Self, super::name::NameError> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        match bare.parse::<IpAddr>() {
            Ok(ip) => Ok(Self::Ip(canonical_ip(ip))),
            Err(_) => HostName::parse(text).map(Self::Name),
        }
    }
}

impl Host {
    /// The name, if it is one.
    pub fn name(&self) -> Option<&HostName> {
        match self {
            Self::Ip(_) | Self::Ips(_) => None,
            Self::Name(name) => Some(name),
        }
    }
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

/// What a server is spoken to by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// Plain TCP.
    Http,
    /// TLS.
    Https,
}

impl Scheme {
    /// What a URL begins with.
    pub fn text(self) -> &'static str {
        match self {
            Self::Http => "http://",
            Self::Https => "https://",
        }
    }
}

/// A server: a URL without a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Url {
    pub scheme: Scheme,
    pub host: Host,
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

/// Where to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Bind {
    /// `:port`: every address of both families, or of IPv4 alone where the host has no IPv6.
    Any { port: u16 },
    /// One address (`0.0.0.0` and `[::]` stand for their own family alone).
    Address(SocketAddr),
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any { port } => write!(f, ":{port}"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_addresses_are_ipv4_and_sources_are_blocks() {
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().expect("legal");
        assert_eq!(canonical_ip(mapped), "10.0.0.1".parse::<IpAddr>().expect("legal"));
        let v6: IpAddr = "2001:db8:0:1:2:3:4:5".parse().expect("legal");
        assert_eq!(source_block(v6), "2001:db8:0:1::".parse::<IpAddr>().expect("legal"));
        assert_eq!(Host::parse("[::1]").map(|host| host.to_string()).as_deref(), Ok("::1"));
        let url =
            |host: &str| Url { scheme: Scheme::Https, host: Host::parse(host).expect("legal"), port: 2379 };
        assert_eq!(url("::1").to_string(), "https://[::1]:2379");
        assert_eq!(url("etcd-0.example").to_string(), "https://etcd-0.example:2379");
        assert!(url("::1").is_loopback() && url("localhost").is_loopback() && !url("10.0.0.1").is_loopback());
    }
}
