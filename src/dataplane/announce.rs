//! The PROXY header by which an endpoint learns the client's address.

use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::attempts::Replay;
use super::core::Core;
use super::entry::Entry;
use isthmus_model::address::Host;
use isthmus_model::authority::Authority;
use isthmus_model::endpoint::ProxyVersion;
use isthmus_model::name::{NameBuffer, canonical};
use isthmus_model::record::ConnectionRecord;
use isthmus_wire::proxy_protocol::{Announced, write};

/// Creates the PROXY header of a connection, unless the connection has one.
pub(super) fn prepare(core: &Core, entry: &Entry, version: ProxyVersion) {
    let (mut facts, mut record) = (entry.facts.borrow_mut(), entry.record.borrow_mut());
    if facts.header.is_some() {
        return;
    }
    let source = record.source;
    let local = record.proxied.as_ref().map(|proxied| proxied.destination).or(record.local);
    let announced = Announced { source, destination: local.unwrap_or_else(|| nowhere(source)) };
    let header = match version {
        ProxyVersion::V1 => write::v1(&announced).into(),
        ProxyVersion::V2 => {
            let unique_id = format!("{:016x}{:016x}", core.shared.process, record.id);
            let mut buffer = NameBuffer::new();
            let header = write::v2(&announced, requested(&record, &mut buffer), &unique_id).into();
            record.unique_id = Some(unique_id.into());
            header
        }
    };
    facts.header = Some(Box::new(header));
}

/// Sends the PROXY header and the bytes read from the client with one system call. Returns how many of the client's bytes
/// were sent.
pub(super) fn send(socket: &impl AsFd, entry: &Entry, replay: Option<&Replay>) -> Result<usize, Errno> {
    let facts = entry.facts.borrow();
    let header = facts.header.as_ref().map_or(&[][..], |header| &***header);
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
fn requested<'b>(record: &ConnectionRecord, buffer: &'b mut NameBuffer) -> Option<&'b str> {
    if let Some(authority) = record.authority() {
        let Host::Name(name) = Authority::parse(authority).ok()?.host else { return None };
        return canonical(name.as_str().as_bytes(), buffer).ok();
    }
    canonical(record.sni.as_deref()?, buffer).ok()
}
