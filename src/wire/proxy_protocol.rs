//! The PROXY protocol, versions 1 and 2: a header before the first byte of a connection, by which a proxy announces the
//! connection's real source and destination.
//!
//! The specification is HAProxy's `doc/proxy-protocol.txt`, whose section numbers the comments give. A header is
//! [read](mod@read) byte by byte with bounds on its length, and [written](mod@write) for endpoints that expect one.

use std::net::SocketAddr;

pub mod read;
pub mod write;

/// The longest header of version 1 in bytes, including CRLF (§2.1).
pub const V1_BYTES_MAX: usize = 107;
/// The longest header of version 2 that is accepted, in bytes. The protocol allows 64 KiB; headers of real proxies have
/// some hundred bytes, or a few thousand with a client's certificate.
pub const V2_BYTES_MAX: usize = 4096;

/// The beginning of a header of version 1.
const V1_PREFIX: &[u8] = b"PROXY ";
/// The beginning of a header of version 2.
const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// The length of the fixed part of version 2 in bytes: signature, version and command, family and protocol, length of the
/// rest.
const V2_FIXED: usize = 16;
/// The byte for family and protocol that means TCP over IPv4.
const TCP4: u8 = 0x11;
/// The byte for family and protocol that means TCP over IPv6.
const TCP6: u8 = 0x21;
/// The byte for version 2 and the command LOCAL.
const LOCAL: u8 = 0x20;
/// The byte for version 2 and the command PROXY.
const PROXY: u8 = 0x21;
/// The type of the TLV that contains the host name requested by the client (§2.2.2).
const TLV_AUTHORITY: u8 = 0x02;
/// The type of the TLV that contains the checksum of the header (§2.2.3).
const TLV_CRC32C: u8 = 0x03;
/// The type of the TLV that contains an id of the connection (§2.2.5).
const TLV_UNIQUE_ID: u8 = 0x05;

/// The addresses that a proxy announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// The client's address and port.
    pub source: SocketAddr,
    /// The address and port that the client connected to.
    pub destination: SocketAddr,
}

/// Returns true if a stream begins with the first bytes of a header of either version.
pub fn begins_header(bytes: &[u8]) -> bool {
    bytes.starts_with(V1_PREFIX) || bytes.starts_with(V2_SIGNATURE)
}

#[cfg(test)]
mod tests;
