//! A path to a gateway that can be closed: a relay that accepts no connections and whose queue is full, so that the kernel drops
//! further ones, as a blackhole does.

use std::io::copy;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// The connections that wait in the queue of the relay at most.
const QUEUE: i32 = 16;

pub(super) struct Road {
    pub(super) address: SocketAddr,
    is_closed: Arc<AtomicBool>,
    /// The connections that fill the queue.
    fillers: Vec<Socket>,
}

impl Road {
    /// Starts a relay at this address.
    pub(super) fn start(address: SocketAddr, to: SocketAddr) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("set");
        socket.bind(&address.into()).expect("bound");
        socket.listen(QUEUE).expect("listening");
        let (listener, is_closed) = (TcpListener::from(socket), Arc::new(AtomicBool::new(false)));
        let closed = is_closed.clone();
        listener.set_nonblocking(true).expect("set");
        thread::spawn(move || {
            loop {
                match listener.accept() {
                    Ok((near, _)) if !closed.load(Ordering::SeqCst) => pass(near, to),
                    // One that came as the road was closed.
                    Ok((near, _)) => std::mem::forget(near),
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
                while closed.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self { address, is_closed, fillers: Vec::new() }
    }

    pub(super) fn close(&mut self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let filler = |_| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            socket.set_nonblocking(true).expect("set");
            let _ = socket.connect(&self.address.into());
            socket
        };
        self.fillers = (0..2 * QUEUE).map(filler).collect();
    }

    pub(super) fn open(&mut self) {
        self.fillers.clear();
        self.is_closed.store(false, Ordering::SeqCst);
    }
}

/// Passes the bytes of a connection on, in both directions.
fn pass(near: TcpStream, to: SocketAddr) {
    thread::spawn(move || {
        near.set_nonblocking(false).expect("set");
        let Ok(far) = TcpStream::connect(to) else { return };
        let _ = (near.set_nodelay(true), far.set_nodelay(true));
        let (mut near_read, mut far_write) =
            (near.try_clone().expect("cloned"), far.try_clone().expect("cloned"));
        thread::spawn(move || {
            let _ = copy(&mut near_read, &mut far_write);
            let _ = far_write.shutdown(Shutdown::Write);
        });
        let (mut far, mut near) = (far, near);
        let _ = copy(&mut far, &mut near);
        let _ = near.shutdown(Shutdown::Write);
    });
}
