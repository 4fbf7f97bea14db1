//! Opens listening sockets: one per worker and address; the kernel distributes connections among them (SO_REUSEPORT).

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::inherited;
use super::socket::{UNSENT_MAX, bound_unsent, keep_alive};
use isthmus_model::address::Bind;

/// The length of the kernel's accept queue; the kernel reduces it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// The sockets of one bind address.
#[derive(Debug)]
pub struct Listening {
    /// The address with the port that the kernel chose if the bind address had port 0.
    pub address: SocketAddr,
    /// The listening sockets, one per worker.
    pub sockets: Vec<OwnedFd>,
}

/// Opens a bind address for a number of workers. Returns an error if any process already listens on the address, including
/// another isthmus.
pub fn listen(bind: Bind, workers: usize) -> io::Result<Listening> {
    // The first socket is bound without SO_REUSEPORT, so that binding fails if the address is in use. It gets the option only
    // afterwards, so that the sockets of the other workers can be bound to the same address.
    let first = bind_first(bind, false).map_err(|error| advised(&error, bind))?;
    first.set_reuse_port(true)?;
    listen_with(first, bind, workers)
}

/// As [`listen`], but next to sockets of this process on the same port, for example on all addresses of the host, which are about
/// to be closed. Until then, connections go to the sockets with the narrower address.
pub fn listen_beside(bind: Bind, workers: usize) -> io::Result<Listening> {
    let first = bind_first(bind, true).map_err(|error| advised(&error, bind))?;
    listen_with(first, bind, workers)
}

fn listen_with(first: Socket, bind: Bind, workers: usize) -> io::Result<Listening> {
    let address = first.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let mut sockets = vec![first];
    for _ in 1..workers {
        let socket = new_socket(address, bind)?;
        socket.set_reuse_port(true)?;
        socket.bind(&address.into())?;
        sockets.push(socket);
    }
    for socket in &sockets {
        prepare(socket)?;
        socket.listen(BACKLOG)?;
    }
    Ok(Listening { address, sockets: sockets.into_iter().map(OwnedFd::from).collect() })
}

/// Distributes the sockets that the service manager has opened to this number of workers. `passed` must not be empty. Returns
/// an error if there are more sockets than workers, because connections to a socket without a worker would hang, or if the
/// sockets have different ports, because a listener has one. The caller's descriptors stay open.
pub fn share(passed: &[OwnedFd], workers: usize) -> io::Result<Listening> {
    if passed.len() > workers {
        let problem = format!(
            "the service manager passed {} sockets, but there are only {workers} workers; pass at most one \
             socket for each worker",
            passed.len()
        );
        return Err(io::Error::other(problem));
    }
    for socket in passed {
        SockRef::from(socket).set_nonblocking(true)?;
        prepare(socket)?;
    }
    let addresses: Result<Vec<_>, _> =
        passed.iter().map(|socket| inherited::address(&SockRef::from(socket))).collect();
    let addresses = addresses.map_err(io::Error::other)?;
    let address = *addresses.first().ok_or(io::ErrorKind::NotFound)?;
    if let Some(other) = addresses.iter().find(|other| other.port() != address.port()) {
        let problem = format!(
            "the service manager passed sockets for {address} and {other}, but a listener has one port; give each port a \
             FileDescriptorName= and a listener of its own"
        );
        return Err(io::Error::other(problem));
    }
    let sockets: io::Result<Vec<OwnedFd>> =
        passed.iter().cycle().take(workers).map(OwnedFd::try_clone).collect();
    Ok(Listening { address, sockets: sockets? })
}

/// Distributes the sockets of a bind address that an earlier process has opened. Each is used, even if there are more sockets than
/// workers, because the kernel distributes connections among all of them. `sockets` must not be empty.
pub fn adopt(mut sockets: Vec<OwnedFd>, workers: usize) -> io::Result<Listening> {
    let first = sockets.first().ok_or(io::ErrorKind::NotFound)?;
    let address = inherited::address(&SockRef::from(first)).map_err(io::Error::other)?;
    let more: io::Result<Vec<OwnedFd>> =
        sockets.iter().cycle().take(workers.saturating_sub(sockets.len())).map(OwnedFd::try_clone).collect();
    sockets.extend(more?);
    Ok(Listening { address, sockets })
}

/// Sets the options that accepted sockets inherit, which saves a system call per connection.
fn prepare(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).set_tcp_nodelay(true)?;
    keep_alive(socket)?;
    SockRef::from(socket).set_out_of_band_inline(true)?;
    bound_unsent(socket, UNSENT_MAX)
}

/// Adds advice for the operator to a bind error.
fn advised(error: &io::Error, bind: Bind) -> io::Error {
    let port = match bind {
        Bind::Any { port } => port,
        Bind::Address(address) => address.port(),
    };
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied if port < 1024 => {
            "; a port below 1024 requires the capability CAP_NET_BIND_SERVICE".to_owned()
        }
        io::ErrorKind::AddrInUse => {
            format!("; `ss -ltnp 'sport = :{port}'` shows the process that uses the port")
        }
        _ => String::new(),
    };
    io::Error::new(error.kind(), format!("{error}{advice}"))
}

fn bind_first(bind: Bind, reuse_port: bool) -> io::Result<Socket> {
    let bound = |address: SocketAddr| {
        let socket = new_socket(address, bind)?;
        socket.set_reuse_port(reuse_port)?;
        socket.bind(&address.into())?;
        Ok(socket)
    };
    match bind {
        Bind::Address(address) => bound(address),
        Bind::Any { port } => match bound((Ipv6Addr::UNSPECIFIED, port).into()) {
            // The host has no IPv6, or it is disabled.
            Err(error) if no_ipv6(&error) => bound((Ipv4Addr::UNSPECIFIED, port).into()),
            other => other,
        },
    }
}

fn no_ipv6(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(
        error.raw_os_error().map(Errno::from_raw_os_error),
        Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL | Errno::PROTONOSUPPORT)
    )
}

fn new_socket(address: SocketAddr, bind: Bind) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // Allows a restarted process to bind while old connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(!matches!(bind, Bind::Any { .. }))?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_in_use_is_an_error_also_among_ourselves() {
        let bind = Bind::Address(SocketAddr::from(([127, 0, 0, 1], 0)));
        let first = listen(bind, 2).expect("a free port");
        assert_eq!(first.sockets.len(), 2);
        let error = listen(Bind::Address(first.address), 2).expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn passed_sockets_of_one_listener_have_one_port() {
        let bind = Bind::Address(SocketAddr::from(([127, 0, 0, 1], 0)));
        let (one, other) = (listen(bind, 1).expect("a port"), listen(bind, 1).expect("a port"));
        let passed: Vec<OwnedFd> = one.sockets.into_iter().chain(other.sockets).collect();
        let error = share(&passed, 2).expect_err("two ports").to_string();
        assert!(error.contains(&other.address.to_string()), "{error}");
        assert_eq!(share(&passed[..1], 3).expect("one port").sockets.len(), 3);
    }

    #[test]
    fn a_narrower_address_takes_connections_from_a_wider_one_of_ours() {
        let any = Bind::Address(SocketAddr::from(([0, 0, 0, 0], 0)));
        let wide = listen(any, 2).expect("a free port");
        let bind = Bind::Address(SocketAddr::from(([127, 0, 0, 1], wide.address.port())));
        assert_eq!(listen(bind, 1).expect_err("in use").kind(), io::ErrorKind::AddrInUse);
        let narrow = listen_beside(bind, 2).expect("it is ours");
        let _client = std::net::TcpStream::connect(narrow.address).expect("connected");
        let accepts = |listening: &Listening| {
            listening.sockets.iter().any(|socket| SockRef::from(socket).accept().is_ok())
        };
        assert!(accepts(&narrow) && !accepts(&wide));
    }
}
