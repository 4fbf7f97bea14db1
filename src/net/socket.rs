//! Options and endings of TCP sockets, and non-blocking dialling.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, ipproto, sockopt,
};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::diag;
use crate::model::reason::Reason;

/// When a silent peer is first asked, and how long unacknowledged bytes may wait where nobody examines the connection.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(60);
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(15);
const KEEP_ALIVE_PROBES: u32 = 4;
const USER_TIMEOUT: Duration = Duration::from_secs(120);

/// What a socket may hold unsent: as much as a pipe, so that bulk goes on in large pieces.
const UNSENT_MAX: u32 = 1 << 20;
/// What a socket may receive ahead where memory is short.
const RECEIVED_MAX: usize = 128 * 1024;

/// Finds out when a peer has vanished.
pub fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    let schedule = TcpKeepalive::new()
        .with_time(KEEP_ALIVE_AFTER)
        .with_interval(KEEP_ALIVE_EVERY)
        .with_retries(KEEP_ALIVE_PROBES);
    socket.set_tcp_keepalive(&schedule)?;
    if diag::is_answered() {
        // Bytes that are not acknowledged are seen to by who examines the connection: this option would end peers too
        // that answer, and read nothing for a while.
        return Ok(());
    }
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
}

/// Bounds what the kernel holds of what was written and not sent: a peer that does not read costs no more of it than this.
pub fn bound_unsent(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_tcp_notsent_lowat(UNSENT_MAX)
}

/// Bounds what a socket receives ahead of its reader, for as long as it lives: where memory is short.
pub fn bound_received(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_recv_buffer_size(RECEIVED_MAX)
}

/// Makes the close of a socket a reset, so that its peer cannot take what it has for the whole.
pub fn reset_on_close(socket: &impl AsFd) {
    // Fails only on a socket that has no peer any more, where there is nobody to tell.
    let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

/// Whether an error only says to try again when the socket is ready.
pub fn is_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Reads what is there, as far as it fits; 0 at the end.
///
/// A short read has emptied the socket: that it was readable is forgotten without a system call that would only say so,
/// as the poller is edge-triggered and reports what comes next.
pub fn receive(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    let room = bytes.len();
    at_once(socket, Interest::READABLE, room, || Ok(rustix::net::recv(socket, bytes, RecvFlags::empty())?.0))
}

/// As [`receive`], of a socket with urgent data: a read stops before it, so that a short one has not emptied the socket.
pub fn receive_to_mark(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    socket.try_io(Interest::READABLE, || receive_unasked(socket, bytes))
}

/// Reads what is there, also where the poller has not said that there is anything.
pub fn receive_unasked(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, bytes, RecvFlags::DONTWAIT)?.0)
}

/// As [`receive`], into what the buffer has room for.
pub fn receive_more(socket: &TcpStream, buffer: &mut Vec<u8>) -> io::Result<usize> {
    let room = buffer.capacity() - buffer.len();
    at_once(socket, Interest::READABLE, room, || {
        Ok(rustix::net::recv(socket, spare_capacity(buffer), RecvFlags::empty())?.0)
    })
}

/// Writes what the socket takes of these pieces, which are as many as one call takes.
///
/// A short write has filled the socket: that it was writable is forgotten without asking it again, as [`receive`] does.
pub fn send(socket: &TcpStream, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
    let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
    at_once(socket, Interest::WRITABLE, wanted, || {
        Ok(match pieces {
            [only] => rustix::net::send(socket, only, SendFlags::NOSIGNAL)?,
            many => {
                rustix::net::sendmsg(socket, many, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?
            }
        })
    })
}

/// Moves up to so many bytes with one system call, and forgets that the socket was ready where it moved fewer.
fn at_once(
    socket: &TcpStream,
    interest: Interest,
    most: usize,
    call: impl FnOnce() -> io::Result<usize>,
) -> io::Result<usize> {
    let mut moved = None;
    let result = socket.try_io(interest, || {
        let count = call()?;
        moved = Some(count);
        if count > 0 && count < most { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    });
    match moved {
        Some(count) => Ok(count),
        None => result.map(|()| 0),
    }
}

/// Begins to connect; the socket is not waited for.
pub fn dial(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // Urgent data in its place: it would be lost to the reader, and `splice` stops before it as at an end.
    sockopt::set_socket_oobinline(&socket, true)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Why an endpoint could not be dialled.
pub fn dial_reason(error: Errno) -> Reason {
    match error {
        Errno::CONNREFUSED => Reason::EndpointRefused,
        Errno::TIMEDOUT => Reason::EndpointTimeout,
        Errno::CONNRESET | Errno::PIPE | Errno::CONNABORTED => Reason::EndpointReset,
        Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM => Reason::Internal,
        _ => Reason::EndpointUnreachable,
    }
}
