//! Headers of the PROXY protocol, made by hand.

use std::net::{IpAddr, SocketAddr};

/// The first bytes of a header of version 2.
pub const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command LOCAL.
pub const LOCAL: u8 = 0x20;
/// Version 2, command PROXY.
pub const PROXY: u8 = 0x21;

/// Returns a header of version 1.
pub fn v1(source: &str, destination: &str) -> Vec<u8> {
    let (source, destination) = (address(source), address(destination));
    let (family, from, to) = (if source.is_ipv4() { 4 } else { 6 }, source.ip(), destination.ip());
    format!("PROXY TCP{family} {from} {to} {} {}\r\n", source.port(), destination.port()).into_bytes()
}

/// Returns a header of version 2 with these TLVs.
pub fn v2(source: &str, destination: &str, tlvs: &[(u8, &[u8])]) -> Vec<u8> {
    let (source, destination) = (address(source), address(destination));
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let mut rest = [octets(source.ip()), octets(destination.ip())].concat();
    rest.extend(source.port().to_be_bytes());
    rest.extend(destination.port().to_be_bytes());
    for (kind, value) in tlvs {
        rest.push(*kind);
        rest.extend(u16::try_from(value.len()).expect("short").to_be_bytes());
        rest.extend(*value);
    }
    binary(PROXY, if source.is_ipv4() { 0x11 } else { 0x21 }, &rest)
}

/// Returns a header of version 2 with this command and family.
pub fn binary(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
    [SIGNATURE, &[command, family], &length, rest].concat()
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}
