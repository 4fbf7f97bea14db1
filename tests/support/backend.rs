//! Backends with a given behaviour, each on its own port.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// A listening socket; a function handles each connection in its own thread.
pub struct Backend {
    pub address: SocketAddr,
    accepted: Arc<AtomicUsize>,
}

impl Backend {
    /// Serves connections with `handle` until the process ends.
    pub fn start(handle: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), handle)
    }

    pub fn start_at(address: SocketAddr, handle: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        Self::serve(TcpListener::bind(address).expect("a port"), handle)
    }

    /// Serves the connections of a socket that is already listening.
    pub fn serve(listener: TcpListener, handle: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let address = listener.local_addr().expect("bound");
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = accepted.clone();
        let handle = Arc::new(handle);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                count.fetch_add(1, Ordering::SeqCst);
                let handle = handle.clone();
                thread::spawn(move || handle(stream));
            }
        });
        Self { address, accepted }
    }

    /// Returns the number of accepted connections.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Starts a backend that echoes all bytes without TLS and answers a FIN with a FIN.
    pub fn echo() -> Self {
        Self::start(|mut stream| {
            let mut bytes = [0; 16 * 1024];
            while let Ok(count) = stream.read(&mut bytes) {
                if count == 0 || stream.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
        })
    }

    /// Starts a backend that terminates TLS and echoes all bytes; it sends `mark` before each echoed chunk.
    pub fn tls_echo(config: Arc<ServerConfig>, mark: &'static str) -> Self {
        Self::start(move |stream| tls_echo(stream, config.clone(), mark))
    }

    /// Starts a backend that resets each connection after it has received the first bytes.
    pub fn resetting() -> Self {
        Self::start(|mut stream| {
            let _ = stream.read(&mut [0; 16]);
            reset(&stream);
        })
    }
}

/// Serves one TLS connection as [`Backend::tls_echo`] does.
pub fn tls_echo(stream: TcpStream, config: Arc<ServerConfig>, mark: &str) {
    let connection = ServerConnection::new(config).expect("a connection");
    let mut tls = StreamOwned::new(connection, stream);
    let mut bytes = [0; 16 * 1024];
    while let Ok(count) = tls.read(&mut bytes) {
        if count == 0 {
            tls.conn.send_close_notify();
            let _ = tls.flush();
            let _ = tls.sock.shutdown(Shutdown::Write);
            break;
        }
        if tls.write_all(mark.as_bytes()).and_then(|()| tls.write_all(&bytes[..count])).is_err() {
            break;
        }
    }
}

/// Closes the connection with a reset.
pub fn reset(stream: &TcpStream) {
    socket2::SockRef::from(stream).set_linger(Some(std::time::Duration::ZERO)).expect("set");
}

/// Returns an address that refuses connections: a socket is bound to it, so that no other program takes the port, but the
/// socket does not listen.
pub fn refusing() -> SocketAddr {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    // Allows a test to bind this port later.
    socket.set_reuse_address(true).expect("set");
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
    let address = socket.local_addr().expect("bound").as_socket().expect("an address");
    std::mem::forget(socket);
    address
}

/// An address that does not answer: a listener whose queue is full.
pub struct Silent {
    pub address: SocketAddr,
    _listener: socket2::Socket,
    _queued: Vec<socket2::Socket>,
}

impl Silent {
    pub fn new() -> Self {
        Self::bound_to([127, 0, 0, 1])
    }

    /// Binds the silent listener to every address of this host.
    pub fn anywhere() -> Self {
        Self::bound_to([0, 0, 0, 0])
    }

    fn bound_to(ip: [u8; 4]) -> Self {
        use socket2::{Domain, Socket, Type};
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        listener.bind(&SocketAddr::from((ip, 0)).into()).expect("bound");
        listener.listen(0).expect("listening");
        let address = listener.local_addr().expect("bound").as_socket().expect("an address");
        let queued = (0..8)
            .map(|_| {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
                socket.set_nonblocking(true).expect("set");
                let _ = socket.connect(&address.into());
                socket
            })
            .collect();
        Self { address, _listener: listener, _queued: queued }
    }
}
