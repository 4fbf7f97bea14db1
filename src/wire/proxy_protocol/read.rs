//! Reads a header (`doc/proxy-protocol.txt`) from the first bytes of a stream. A fault is reported at the byte that shows it, so the
//! verdict does not depend on how the bytes were cut.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use super::{
    Announced, LOCAL, PROXY, TCP4, TCP6, TLV_CRC32C, V1_BYTES_MAX, V1_PREFIX, V2_BYTES_MAX, V2_FIXED,
    V2_SIGNATURE,
};
use isthmus_model::address::canonical_ip;

/// The content of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// The proxy speaks for itself, as in a health check, or does not know the client: `LOCAL` or `UNSPEC` of version 2,
    /// `UNKNOWN` of version 1. The addresses of the connection itself apply.
    Local,
    /// The proxy speaks for a client.
    Proxied(Announced),
}

/// The result of reading the bytes received so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The bytes are valid so far, and the header is not complete.
    NeedMore,
    /// The header is complete.
    Whole {
        /// The content of the header.
        header: Header,
        /// The length of the header in bytes; the client's stream begins after it.
        length: usize,
    },
    /// The bytes are not a header that the gateway accepts.
    Refused(HeaderFault),
}

/// The reason why a header is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// The first bytes are not those of a header of either version.
    #[error("the first bytes are not a PROXY header")]
    Missing,
    /// A header of version 1 or 2 is malformed; the text names the part.
    #[error("the PROXY header is malformed: {0}")]
    Malformed(&'static str),
    /// The header is longer than the gateway accepts.
    #[error("the PROXY header is longer than {0} bytes")]
    TooLong(usize),
}

/// Reads a header from the beginning of a stream.
pub fn read(bytes: &[u8]) -> Verdict {
    let verdict = if begins(bytes, V2_SIGNATURE) {
        read_v2(bytes)
    } else if begins(bytes, V1_PREFIX) {
        read_v1(bytes)
    } else {
        Err(HeaderFault::Missing)
    };
    match verdict {
        Ok(Some((header, length))) => {
            debug_assert!(length <= bytes.len(), "a header ends within the bytes that were read");
            Verdict::Whole { header, length }
        }
        Ok(None) => Verdict::NeedMore,
        Err(fault) => Verdict::Refused(fault),
    }
}

/// Returns true if the bytes and the prefix agree up to the end of the shorter one.
fn begins(bytes: &[u8], prefix: &[u8]) -> bool {
    bytes.iter().zip(prefix).all(|(byte, expected)| byte == expected)
}

type Read = Result<Option<(Header, usize)>, HeaderFault>;

/// Reads a header such as `PROXY TCP4 192.0.2.1 192.0.2.2 1234 443` and its CRLF (§2.1).
fn read_v1(bytes: &[u8]) -> Read {
    let within = &bytes[..bytes.len().min(V1_BYTES_MAX)];
    let Some(end) = within.iter().position(|byte| *byte == b'\n') else {
        return if bytes.len() < V1_BYTES_MAX { Ok(None) } else { Err(HeaderFault::TooLong(V1_BYTES_MAX)) };
    };
    let line = within[..end]
        .strip_suffix(b"\r")
        .ok_or(HeaderFault::Malformed("the line does not end with CR LF"))?;
    let line = line.get(V1_PREFIX.len()..).ok_or(HeaderFault::Malformed("the line has no protocol"))?;
    let line = std::str::from_utf8(line).map_err(|_| HeaderFault::Malformed("the line is not UTF-8 text"))?;
    Ok(Some((line_header(line)?, end + 1)))
}

fn line_header(line: &str) -> Result<Header, HeaderFault> {
    let mut fields = line.split(' ');
    let protocol = fields.next().unwrap_or_default();
    if protocol == "UNKNOWN" {
        // The specification says that a receiver must ignore the rest of the line.
        return Ok(Header::Local);
    }
    let mut address = || match (protocol, fields.next().unwrap_or_default()) {
        ("TCP4", text) => {
            Ipv4Addr::from_str(text).map(IpAddr::V4).map_err(|_| "an address is not an IPv4 address")
        }
        ("TCP6", text) => {
            Ipv6Addr::from_str(text).map(IpAddr::V6).map_err(|_| "an address is not an IPv6 address")
        }
        _ => Err("the protocol is none of TCP4, TCP6 and UNKNOWN"),
    };
    let addresses = address().and_then(|source| Ok((source, address()?)));
    let (source, destination) = addresses.map_err(HeaderFault::Malformed)?;
    let mut port =
        || fields.next().and_then(port).ok_or(HeaderFault::Malformed("a port is not a number up to 65535"));
    let (source_port, destination_port) = (port()?, port()?);
    if fields.next().is_some() {
        return Err(HeaderFault::Malformed("the line continues after the ports"));
    }
    Ok(proxied((source, source_port), (destination, destination_port)))
}

/// Reads a port in the form of the protocol: without a sign or leading zeros.
fn port(text: &str) -> Option<u16> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

fn proxied(source: (IpAddr, u16), destination: (IpAddr, u16)) -> Header {
    let address = |(ip, port)| SocketAddr::new(canonical_ip(ip), port);
    Header::Proxied(Announced { source: address(source), destination: address(destination) })
}

/// Reads a header of version 2, which is binary (§2.2).
fn read_v2(bytes: &[u8]) -> Read {
    let command = match bytes.get(12) {
        None => return Ok(None),
        Some(command @ (&LOCAL | &PROXY)) => *command,
        Some(_) => return Err(HeaderFault::Malformed("the version is not 2, or the command is unknown")),
    };
    let family = match (command, bytes.get(13)) {
        (_, None) => return Ok(None),
        // A receiver ignores the rest of a LOCAL header.
        (LOCAL, Some(_)) => None,
        (_, Some(&TCP4)) => Some(TCP4),
        (_, Some(&TCP6)) => Some(TCP6),
        (_, Some(0x00)) => None,
        (_, Some(_)) => {
            return Err(HeaderFault::Malformed(
                "the header announces neither TCP over IPv4 nor TCP over IPv6",
            ));
        }
    };
    let Some(&[high, low]) = bytes.get(14..V2_FIXED).and_then(|length| length.first_chunk()) else {
        return Ok(None);
    };
    let length = V2_FIXED + usize::from(u16::from_be_bytes([high, low]));
    if length > V2_BYTES_MAX {
        return Err(HeaderFault::TooLong(V2_BYTES_MAX));
    }
    let addresses_end = V2_FIXED + family.map_or(0, |family| if family == TCP4 { 12 } else { 36 });
    if length < addresses_end {
        return Err(HeaderFault::Malformed("the header is too short for its addresses"));
    }
    let Some(header) = bytes.get(..length) else { return Ok(None) };
    let Some(family) = family else { return Ok(Some((Header::Local, length))) };
    check_tlvs(header, addresses_end)?;
    let addresses = addresses(family, &header[V2_FIXED..addresses_end]);
    Ok(Some((addresses.ok_or(HeaderFault::Malformed("the header is too short for its addresses"))?, length)))
}

/// Reads both addresses, then both ports.
fn addresses(family: u8, block: &[u8]) -> Option<Header> {
    let (source, destination, ports): (IpAddr, IpAddr, &[u8]) = if family == TCP4 {
        let (source, rest) = block.split_first_chunk::<4>()?;
        let (destination, ports) = rest.split_first_chunk::<4>()?;
        ((*source).into(), (*destination).into(), ports)
    } else {
        let (source, rest) = block.split_first_chunk::<16>()?;
        let (destination, ports) = rest.split_first_chunk::<16>()?;
        ((*source).into(), (*destination).into(), ports)
    };
    let &[a, b, c, d] = ports.first_chunk::<4>()?;
    Some(proxied((source, u16::from_be_bytes([a, b])), (destination, u16::from_be_bytes([c, d]))))
}

/// Checks that the TLVs after the addresses fill the header exactly, and that the checksum is correct if there is one
/// (§2.2).
fn check_tlvs(header: &[u8], from: usize) -> Result<(), HeaderFault> {
    let mut at = from;
    let mut checksum = None;
    while let Some(rest) = header.get(at..).filter(|rest| !rest.is_empty()) {
        let Some(&[kind, high, low]) = rest.first_chunk() else {
            return Err(HeaderFault::Malformed("the header ends within the type or length of a TLV"));
        };
        let value = at + 3;
        let end = value + usize::from(u16::from_be_bytes([high, low]));
        if end > header.len() {
            return Err(HeaderFault::Malformed("a TLV extends beyond the end of the header"));
        }
        if kind == TLV_CRC32C {
            if end - value != 4 || checksum.is_some() {
                return Err(HeaderFault::Malformed("the checksum does not have 4 bytes, or appears twice"));
            }
            checksum = Some(value);
        }
        at = end;
    }
    let Some(at) = checksum else { return Ok(()) };
    let (before, rest) = header.split_at(at);
    let (announced, after) = rest.split_at(4);
    // The checksum is computed over the header with zeros in the bytes of the checksum.
    let computed = !crc32c(crc32c(crc32c(u32::MAX, before), &[0; 4]), after);
    if announced == computed.to_be_bytes() {
        Ok(())
    } else {
        Err(HeaderFault::Malformed("the checksum does not match"))
    }
}

/// Continues a CRC-32C (RFC 3720 §B.4) over more bytes, without the initial and the final inversion.
pub(super) fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(crc, |crc, byte| {
        let [low, ..] = crc.to_le_bytes();
        CRC32C[usize::from(low ^ byte)] ^ (crc >> 8)
    })
}

/// The CRC-32C of each byte value.
static CRC32C: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte: u32 = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
};
