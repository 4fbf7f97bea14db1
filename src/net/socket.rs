//! The options, closing and non-blocking dialling of TCP sockets.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::set_tcp_keepidle;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, ipproto, sockopt,
};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::diag;
use super::option::set_option;
use isthmus_model::address::canonical_socket;
use isthmus_model::reason::Reason;

/// The silence after which keep-alive probes a peer. The next two constants are the interval and the number of probes.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(60);
/// The seconds over which the first probes of many silent connections are spread.
const KEEP_ALIVE_SPREAD: u64 = 30;
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(15);
const KEEP_ALIVE_PROBES: u32 = 4;
/// How long bytes may stay unacknowledged if the kernel does not answer [`diag`] requests.
const USER_TIMEOUT: Duration = Duration::from_secs(120);

/// The number of bytes that a socket may hold unsent: one and a half times the size of a pipe. The kernel reports a socket as
/// writable once half of this number is free. If the number were the size of one pipe, a download would cost up to a fifth more
/// processor time.
pub const UNSENT_MAX: u32 = 3 << 19;
/// The number of bytes that a socket may receive ahead of its reader when memory is short. The kernel doubles the number for its
/// own overhead.
const RECEIVED_MAX: usize = 128 * 1024;
/// The number of bytes that a socket may hold unsent when memory is short.
const UNSENT_SHORT: u32 = 128 * 1024;
/// `SO_BUF_LOCK` (asm-generic/socket.h), since Linux 5.15.
const BUFFER_LOCK: libc::c_int = 72;

/// Returns the address that the client has dialled, if the host has translated it (DNAT).
pub fn original_destination(socket: &impl AsFd) -> Option<SocketAddr> {
    let socket = SockRef::from(socket);
    let dialled = socket.original_dst_v4().or_else(|_| socket.original_dst_v6()).ok()?;
    dialled.as_socket().map(canonical_socket)
}

/// Enables keep-alive, which detects peers that have vanished.
pub fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    let schedule = TcpKeepalive::new()
        .with_time(KEEP_ALIVE_AFTER)
        .with_interval(KEEP_ALIVE_EVERY)
        .with_retries(KEEP_ALIVE_PROBES);
    socket.set_tcp_keepalive(&schedule)?;
    if diag::is_answered() {
        // TCP_USER_TIMEOUT is not set: [`diag`](super::diag) detects unacknowledged bytes, and the timeout would also end
        // connections of live peers that do not read for a while.
        return Ok(());
    }
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
}

/// Delays the first keep-alive probe by up to half a minute. Connections whose `id`s follow each other get different delays.
/// Otherwise the kernel probes the peers of connections that became silent together at the same moment, four times in a row, and
/// ends the connections whose probes or answers are lost in each burst: the kernel queues a thousand packets on loopback.
pub fn spread_keep_alive(socket: &impl AsFd, id: u64) -> io::Result<()> {
    let after = KEEP_ALIVE_AFTER + Duration::from_secs(id % KEEP_ALIVE_SPREAD);
    Ok(set_tcp_keepidle(socket, after)?)
}

/// Bounds the unsent bytes that the kernel buffers, and so the memory for a peer that does not read. The bound is [`UNSENT_MAX`], or
/// less for a paced socket.
pub fn bound_unsent(socket: &impl AsFd, bytes: u32) -> io::Result<()> {
    SockRef::from(socket).set_tcp_notsent_lowat(bytes)
}

/// Bounds the bytes that the socket of a new connection receives ahead of its reader, until [`unbound_received`] is called. Used when
/// memory is short.
pub fn bound_received(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_recv_buffer_size(RECEIVED_MAX)
}

/// Lets the kernel choose the size of the receive buffer again. Before Linux 5.15 this fails, and the bound stays.
pub fn unbound_received(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, BUFFER_LOCK, &0_u32.to_ne_bytes())
}

/// Shrinks the buffers of a direction whose sink reads nothing; a CONNECT stream has a socket at one end only. Returns the size of the
/// source's receive buffer in bytes, which [`restore`] needs.
///
/// The kernel gives up no byte that it has acknowledged, and takes back no window that it has advertised, so the buffer shrinks as the
/// sink reads, and until then the sender keeps what is above the bound. The buffer is not locked: the kernel would drop bytes within
/// the advertised window, and their sender would take this host for dead. For the same cause an older kernel, which cannot unlock it,
/// leaves it as it is.
pub fn shrink<S: AsFd>(source: Option<&S>, sink: Option<&S>) -> io::Result<usize> {
    if let Some(sink) = sink {
        bound_unsent(sink, UNSENT_SHORT)?;
    }
    let Some(source) = source else { return Ok(0) };
    let size = SockRef::from(source).recv_buffer_size()?;
    if size > 2 * RECEIVED_MAX {
        unbound_received(source)?;
        bound_received(source)?;
        unbound_received(source)?;
    }
    Ok(size)
}

/// Undoes [`shrink`] for a source whose receive buffer had `size` bytes. The kernel enlarges a buffer by itself only once more is read
/// within a round trip than ever before, which a small buffer prevents. `SO_RCVLOWAT` enlarges it to hold so many bytes, up to half of
/// `tcp_rmem`, without a privilege; three quarters of its size are about as many as it could hold.
pub fn restore<S: AsFd>(source: Option<&S>, sink: Option<&S>, size: usize) -> io::Result<()> {
    if let Some(sink) = sink {
        bound_unsent(sink, UNSENT_MAX)?;
    }
    let Some(source) = source else { return Ok(()) };
    let bytes = i32::try_from(size / 4 * 3).unwrap_or(i32::MAX);
    set_option(source, libc::SO_RCVLOWAT, &bytes.to_ne_bytes())?;
    set_option(source, libc::SO_RCVLOWAT, &1_i32.to_ne_bytes())
}

/// Makes closing the socket send a reset, so that the peer does not take a truncated transfer for a complete one.
pub fn reset_on_close(socket: &impl AsFd) {
    // The call fails only if the peer has gone.
    let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

/// Returns true if the call must be repeated once the socket is ready.
pub fn is_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Reads the available bytes into `bytes`; returns 0 at the end of the stream.
///
/// A read shorter than the buffer has emptied the socket, so its readiness is cleared without another system
/// call; the poller is edge-triggered and reports later bytes.
pub fn receive(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    let room = bytes.len();
    at_once(socket, Interest::READABLE, room, || Ok(rustix::net::recv(socket, bytes, RecvFlags::empty())?.0))
}

/// Reads like [`receive`], from a socket with urgent data. A read stops before the urgent mark, so a short read does not
/// mean that the socket is empty.
pub fn receive_to_mark(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    socket.try_io(Interest::READABLE, || receive_unasked(socket, bytes))
}

/// Reads the available bytes even if the poller has not reported readiness.
pub fn receive_unasked(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(socket, bytes, RecvFlags::DONTWAIT)?.0)
}

/// Reads like [`receive_unasked`]. Returns the number of bytes, and true if urgent data was waiting: then reads stop before the
/// urgent mark, and only [`receive_to_mark`] may be used from now on.
pub fn receive_looking(socket: &TcpStream, bytes: &mut [u8]) -> io::Result<(usize, bool)> {
    let mut polled = [PollFd::new(socket, PollFlags::IN | PollFlags::PRI)];
    poll(&mut polled, Some(&Timespec::default()))?;
    let found = polled[0].revents();
    if found.is_empty() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok((receive_unasked(socket, bytes)?, found.contains(PollFlags::PRI)))
}

/// Reads like [`receive`] into the spare capacity of a buffer.
pub fn receive_more(socket: &TcpStream, buffer: &mut Vec<u8>) -> io::Result<usize> {
    let room = buffer.capacity() - buffer.len();
    at_once(socket, Interest::READABLE, room, || {
        Ok(rustix::net::recv(socket, spare_capacity(buffer), RecvFlags::empty())?.0)
    })
}

/// Writes as many bytes of the pieces as the socket takes in one call.
///
/// A short write has filled the socket, so its readiness is cleared without another system call, as in
/// [`receive`].
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

/// Calls `call` once. If `call` moves fewer than `most` bytes, clears the socket's readiness.
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

/// Returns an unconnected socket with the options of a relayed connection.
pub fn relay_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = unconnected(address)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // Urgent data is delivered inline; otherwise the reader would lose it, and `splice` would stop before it as at the end
    // of the stream.
    sockopt::set_socket_oobinline(&socket, true)?;
    Ok(socket)
}

/// Has the first bytes that are sent acknowledge the peer's part of the handshake, which saves a packet. Called before the
/// socket is connected, if there are bytes to send as soon as it is.
pub fn acknowledge_with_data(socket: &impl AsFd) {
    // If the kernel refuses this, it sends one more packet.
    let _ = sockopt::set_tcp_quickack(socket, false);
}

/// Returns an unconnected socket with default options.
fn unconnected(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
}

/// Begins to connect an unconnected socket, without waiting.
pub fn begin_to_connect(socket: &impl AsFd, address: SocketAddr) -> Result<(), Errno> {
    match rustix::net::connect(socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns the reason of a failed dial.
pub fn dial_reason(error: Errno) -> Reason {
    match error {
        Errno::CONNREFUSED => Reason::EndpointRefused,
        Errno::TIMEDOUT => Reason::EndpointTimeout,
        Errno::CONNRESET | Errno::PIPE | Errno::CONNABORTED => Reason::EndpointReset,
        Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM => Reason::Internal,
        _ => Reason::EndpointUnreachable,
    }
}

/// Returns true if no socket can be opened or accepted, because the process or the host has no file descriptor left.
pub fn is_out_of_descriptors(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;
    use crate::diag::Diag;

    /// Returns a connection whose receiver's buffer the kernel has enlarged: the sender, and the receiver.
    fn busy() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut sender = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (mut receiver, _) = listener.accept().expect("accepted");
        sender.set_nonblocking(true).expect("set");
        receiver.set_nonblocking(true).expect("set");
        for _ in 0..100_000 {
            if size(&receiver) > 16 * RECEIVED_MAX {
                break;
            }
            while sender.write(&[7; 1 << 18]).is_ok() {}
            while receiver.read(&mut [0; 1 << 18]).is_ok() {}
        }
        (sender, receiver)
    }

    fn size(socket: &TcpStream) -> usize {
        SockRef::from(socket).recv_buffer_size().expect("a size")
    }

    #[test]
    fn a_bounded_socket_takes_all_that_it_has_advertised_and_is_enlarged_again() {
        let Some(diag) = diag::is_answered().then(Diag::open).flatten() else { return };
        let (mut sender, receiver) = busy();
        let before = size(&receiver);
        let told = shrink(Some(&receiver), Some(&sender)).expect("the kernel shrinks");
        assert!(
            told == before && before > 16 * RECEIVED_MAX && size(&receiver) == 2 * RECEIVED_MAX,
            "{before}"
        );
        // The window is as large as before.
        let begun = Instant::now();
        while diag.state(&receiver).is_none_or(|state| state.unread < 1 << 20) {
            let _ = sender.write(&[7; 1 << 18]);
            assert!(begun.elapsed() < Duration::from_secs(10), "the kernel drops bytes");
        }
        shrink(Some(&receiver), None).expect("the kernel shrinks");
        restore(Some(&receiver), Some(&sender), before).expect("the kernel enlarges");
        assert!(size(&receiver) > before / 2, "{} of {before}", size(&receiver));
        assert_eq!((&receiver).read(&mut [0; 8]).expect("bytes wait"), 8);
    }
}
