//! Writes the header that is sent to an endpoint before the client's first byte.

use std::net::{IpAddr, SocketAddr};

use super::{Announced, PROXY, TCP4, TCP6, TLV_AUTHORITY, TLV_UNIQUE_ID, V2_SIGNATURE};
use isthmus_model::endpoint::ProxyVersion;

/// Returns a header of version 1.
pub fn v1(announced: &Announced) -> Vec<u8> {
    let Announced { source, destination } = of_one_family(announced);
    let protocol = if source.is_ipv4() { "TCP4" } else { "TCP6" };
    let (from, to) = (source.ip(), destination.ip());
    format!("PROXY {protocol} {from} {to} {} {}\r\n", source.port(), destination.port()).into_bytes()
}

/// Returns a header of version 2 with the host name that the client requested, if there is one, and an id of the
/// connection.
pub fn v2(announced: &Announced, authority: Option<&str>, unique_id: &str) -> Vec<u8> {
    let Announced { source, destination } = of_one_family(announced);
    let mut rest = Vec::new();
    let mut address = |ip| match ip {
        IpAddr::V4(v4) => rest.extend(v4.octets()),
        IpAddr::V6(v6) => rest.extend(v6.octets()),
    };
    address(source.ip());
    address(destination.ip());
    rest.extend(source.port().to_be_bytes());
    rest.extend(destination.port().to_be_bytes());
    for (kind, value) in
        authority.map(|name| (TLV_AUTHORITY, name)).into_iter().chain([(TLV_UNIQUE_ID, unique_id)])
    {
        // A value that is too long for the length of a TLV is left out.
        if let Ok(length) = u16::try_from(value.len()) {
            rest.push(kind);
            rest.extend(length.to_be_bytes());
            rest.extend(value.as_bytes());
        }
    }
    binary(if source.is_ipv4() { TCP4 } else { TCP6 }, &rest)
}

/// Returns a header with which the gateway speaks for itself, as in a health check.
pub fn local(version: ProxyVersion) -> &'static [u8] {
    match version {
        ProxyVersion::V1 => b"PROXY UNKNOWN\r\n",
        ProxyVersion::V2 => b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0",
    }
}

fn binary(family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len());
    debug_assert!(length.is_ok(), "a header has two addresses, a host name and an id");
    let length = length.unwrap_or_default().to_be_bytes();
    [V2_SIGNATURE, &[PROXY, family][..], &length, &rest[..usize::from(u16::from_be_bytes(length))]].concat()
}

/// Returns both addresses in the same family, because a header has only one family: an IPv4 address beside an IPv6 address
/// becomes an IPv4-mapped one.
fn of_one_family(announced: &Announced) -> Announced {
    let Announced { source, destination } = *announced;
    if source.is_ipv4() == destination.is_ipv4() {
        return Announced { source, destination };
    }
    let mapped = |address: SocketAddr| match address.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    };
    Announced { source: mapped(source), destination: mapped(destination) }
}
