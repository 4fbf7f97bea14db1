//! The PROXY header by which an endpoint learns the client's address.

use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::core::Core;
use super::entry::{ConnectionFacts, Entry, OutgoingHeader};
use super::peek::Replay;
use isthmus_model::address::Host;
use isthmus_model::authority::Authority;
use isthmus_model::endpoint::ProxyVersion;
use isthmus_model::name::{NameBuffer, canonical};
use isthmus_wire::proxy_protocol::{Announced, write};

/// Creates the PROXY header of a connection, unless the connection has one.
pub(super) fn prepare(core: &Core, entry: &Entry, version: ProxyVersion) {
    let mut facts = entry.facts.borrow_mut();
    if facts.header.is_some() {
        return;
    }
    let source = entry.source();
    let local = entry.proxied().map(|proxied| proxied.destination).or_else(|| entry.local.get());
    let announced = Announced { source, destination: local.unwrap_or_else(|| nowhere(source)) };
    let header = match version {
        ProxyVersion::V1 => OutgoingHeader { bytes: write::v1(&announced).into(), unique_id: None },
        ProxyVersion::V2 => {
            let unique_id: Box<str> = format!("{:016x}{:016x}", core.shared.process, entry.id).into();
            let mut buffer = NameBuffer::new();
            let name = requested(&facts, &mut buffer);
            let bytes = write::v2(&announced, name, &unique_id).into();
            OutgoingHeader { bytes, unique_id: Some(unique_id) }
        }
    };
    facts.header = Some(Box::new(header));
}

/// Sends the PROXY header and the bytes read from the client with one system call. Returns how many of the client's bytes
/// were sent.
pub(super) fn send(socket: &impl AsFd, entry: &Entry, replay: Option<&Replay>) -> Result<usize, Errno> {
    let facts = entry.facts.borrow();
    let header = facts.header.as_ref().map_or(&[][..], |header| &header.bytes);
    let rest = replay.map_or(&[][..], |replay| &replay.bytes);
    let pieces = [IoSlice::new(header), IoSlice::new(rest)];
    let sent = sendmsg(socket, &pieces, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?;
    // This cannot fail, because the send buffer of a new socket is larger than a header.
    sent.checked_sub(header.len()).ok_or(Errno::NOBUFS)
}

/// Returns the unspecified address of the source's family, for a connection whose destination the kernel did not report.
fn nowhere(source: SocketAddr) -> SocketAddr {
    let ip: IpAddr =
        if source.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    SocketAddr::new(ip, 0)
}

/// Returns the host name that the client asked for, in the canonical form that is used for lookups.
fn requested<'b>(facts: &ConnectionFacts, buffer: &'b mut NameBuffer) -> Option<&'b str> {
    if let Some(stream) = &facts.stream {
        let Host::Name(name) = Authority::parse(&stream.authority).ok()?.host else { return None };
        return canonical(name.as_str().as_bytes(), buffer).ok();
    }
    canonical(facts.seen.as_ref()?.server_name()?, buffer).ok()
}
