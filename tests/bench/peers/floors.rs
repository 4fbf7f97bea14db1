//! The floors: two relays that read no hello and connect each of their listeners to one fixed backend. They make no decisions,
//! count nothing and have no timeouts, so their cost is that of the connections themselves. One uses epoll alone, the other
//! tokio. Both relay by the same [`Direction`]: small reads are copied through one buffer of the program, and after a large
//! read the bytes stay in the kernel.

use std::cell::RefCell;
use std::error::Error;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::pipe::{PipeFlags, SpliceFlags};
use socket2::{Domain, Socket, Type};
use tokio::io::Interest;
use tokio::task::LocalSet;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A listening address and the backend of its connections.
pub(crate) type Pair = (SocketAddr, SocketAddr);

const SCRATCH: usize = 64 * 1024;
const PIPE: usize = 1 << 20;
/// A read of this number of bytes or more counts as bulk.
const BULK: usize = 16 * 1024;

/// Nonblocking calls on one end of a connection.
trait End {
    /// Returns the bytes read, and true if a further read would find nothing.
    fn read(&self, into: &mut [u8]) -> io::Result<(usize, bool)>;
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;
    fn read_into_pipe(&self, pipe: &OwnedFd) -> io::Result<usize>;
    fn write_from_pipe(&self, pipe: &OwnedFd, count: usize) -> io::Result<usize>;
    fn end(&self);
}

fn splice(from: impl AsFd, to: impl AsFd, count: usize) -> io::Result<usize> {
    Ok(rustix::pipe::splice(from, None, to, None, count, SpliceFlags::NONBLOCK | SpliceFlags::MOVE)?)
}

/// A socket. `hung_up` is true if the peer has closed its direction, so that the end of the peer's bytes has to be read.
struct Plain<'a> {
    socket: BorrowedFd<'a>,
    hung_up: bool,
}

impl End for Plain<'_> {
    fn read(&self, into: &mut [u8]) -> io::Result<(usize, bool)> {
        let room = into.len();
        let (count, _) = rustix::net::recv(self.socket, into, RecvFlags::empty())?;
        Ok((count, count < room && !self.hung_up))
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.socket, bytes, SendFlags::NOSIGNAL)?)
    }

    fn read_into_pipe(&self, pipe: &OwnedFd) -> io::Result<usize> {
        splice(self.socket, pipe, PIPE)
    }

    fn write_from_pipe(&self, pipe: &OwnedFd, count: usize) -> io::Result<usize> {
        splice(pipe, self.socket, count)
    }

    fn end(&self) {
        let _ = rustix::net::shutdown(self.socket, Shutdown::Write);
    }
}

/// Uses tokio's readiness, which these calls clear when they find nothing.
impl End for tokio::net::TcpStream {
    fn read(&self, into: &mut [u8]) -> io::Result<(usize, bool)> {
        let mut short = None;
        let result = self.try_io(Interest::READABLE, || {
            let room = into.len();
            let (count, _) = rustix::net::recv(self, into, RecvFlags::empty())?;
            if count == 0 || count == room {
                return Ok(count);
            }
            // Clears the readiness, which saves a call that would find nothing.
            short = Some(count);
            Err(ErrorKind::WouldBlock.into())
        });
        match short {
            Some(count) => Ok((count, true)),
            None => result.map(|count| (count, false)),
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, || Ok(rustix::net::send(self, bytes, SendFlags::NOSIGNAL)?))
    }

    fn read_into_pipe(&self, pipe: &OwnedFd) -> io::Result<usize> {
        self.try_io(Interest::READABLE, || splice(self, pipe, PIPE))
    }

    fn write_from_pipe(&self, pipe: &OwnedFd, count: usize) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, || splice(pipe, self, count))
    }

    fn end(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Write);
    }
}

type Pipe = (OwnedFd, OwnedFd);

/// The buffer and the free pipes that all connections share.
struct Shared {
    scratch: Vec<u8>,
    pipes: Vec<Pipe>,
}

impl Shared {
    fn new() -> Self {
        Self { scratch: vec![0; SCRATCH], pipes: Vec::new() }
    }

    fn pipe(&mut self) -> io::Result<Pipe> {
        if let Some(pipe) = self.pipes.pop() {
            return Ok(pipe);
        }
        let pipe = rustix::pipe::pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC)?;
        // If the size is not allowed, the kernel's default size is good enough.
        let _ = rustix::pipe::fcntl_setpipe_size(&pipe.0, PIPE);
        Ok(pipe)
    }
}

/// The event for which a direction waits.
enum Wait {
    Read,
    Write,
    Nothing,
}

/// One direction of a connection.
#[derive(Default)]
struct Direction {
    /// Bytes that were read, but not written yet.
    unsent: Vec<u8>,
    pipe: Option<Pipe>,
    in_pipe: usize,
    bulk: bool,
    ended: bool,
    done: bool,
}

impl Direction {
    /// Moves as many bytes as possible. If `last` is true, the other direction is done. The caller then closes the socket,
    /// which also ends this direction, so no FIN is sent here.
    fn pump(&mut self, from: &impl End, to: &impl End, shared: &mut Shared, last: bool) -> io::Result<Wait> {
        match self.advance(from, to, shared, last) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Wait::Write),
            other => other,
        }
    }

    /// Moves bytes; fails with `WouldBlock` if it cannot write.
    fn advance(
        &mut self,
        from: &impl End,
        to: &impl End,
        shared: &mut Shared,
        last: bool,
    ) -> io::Result<Wait> {
        while !self.done {
            if let (1.., Some((out, _))) = (self.in_pipe, &self.pipe) {
                self.in_pipe -= to.write_from_pipe(out, self.in_pipe)?;
            } else if !self.unsent.is_empty() {
                let count = to.write(&self.unsent)?;
                self.unsent.drain(..count);
            } else if self.ended {
                if !last {
                    to.end();
                }
                self.done = true;
            } else {
                let read = match self.bulk {
                    true => self.read_into_pipe(from, shared),
                    false => self.copy(from, to, shared),
                };
                match read {
                    Ok(true) => return Ok(Wait::Read),
                    Ok(false) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        shared.pipes.extend(self.pipe.take());
                        return Ok(Wait::Read);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        shared.pipes.extend(self.pipe.take());
        Ok(Wait::Nothing)
    }

    fn read_into_pipe(&mut self, from: &impl End, shared: &mut Shared) -> io::Result<bool> {
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            none => none.insert(shared.pipe()?),
        };
        self.in_pipe = from.read_into_pipe(&pipe.1)?;
        self.ended = self.in_pipe == 0;
        self.bulk = self.in_pipe >= BULK;
        Ok(false)
    }

    /// Reads once from `from` into the shared buffer, and writes these bytes to `to`. Returns true if there is nothing more to
    /// read.
    fn copy(&mut self, from: &impl End, to: &impl End, shared: &mut Shared) -> io::Result<bool> {
        let (count, drained) = from.read(&mut shared.scratch)?;
        self.ended = count == 0;
        self.bulk = count >= BULK;
        let read = &shared.scratch[..count];
        let sent = match if self.ended { Ok(0) } else { to.write(read) } {
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            other => other?,
        };
        self.unsent.extend_from_slice(&read[sent..]);
        Ok(drained && self.unsent.is_empty())
    }
}

/// Begins to connect to a backend; on loopback it is connected when this returns.
fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking().cloexec(), None)?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {
            return Err(error);
        }
        _ => {}
    }
    Ok(socket.into())
}

/// Returns a listener; its connections inherit its options.
fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking().cloexec(), None)?;
    socket.set_reuse_address(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.bind(&at.into())?;
    socket.listen(4_096)?;
    Ok(socket.into())
}

/// A connection of the relay on epoll: the client's and the backend's socket, and the direction that begins at each.
struct Relayed {
    ends: [TcpStream; 2],
    hung_up: [bool; 2],
    directions: [Direction; 2],
}

impl Relayed {
    /// Moves the bytes of the direction that begins at this end; returns true once both directions are done.
    fn pump(&mut self, end: usize, shared: &mut Shared) -> io::Result<bool> {
        let last = self.directions[1 - end].done;
        let [from, to] =
            [end, 1 - end].map(|end| Plain { socket: self.ends[end].as_fd(), hung_up: self.hung_up[end] });
        self.directions[end].pump(&from, &to, shared, last)?;
        Ok(last && self.directions[end].done)
    }

    fn woken(&mut self, end: usize, flags: EventFlags, shared: &mut Shared) -> io::Result<bool> {
        let gone = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        self.hung_up[end] |= flags.intersects(gone);
        if flags.intersects(EventFlags::IN | gone) && self.pump(end, shared)? {
            return Ok(true);
        }
        let other = &self.directions[1 - end];
        match flags.contains(EventFlags::OUT) && (other.in_pipe > 0 || !other.unsent.is_empty()) {
            true => self.pump(1 - end, shared),
            false => Ok(false),
        }
    }
}

/// Runs the relay on epoll alone; returns only with an error.
pub(crate) fn on_epoll(pairs: &[Pair]) -> Result<()> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    let listeners = pairs.iter().map(|pair| listen(pair.0)).collect::<io::Result<Vec<_>>>()?;
    for (index, listener) in listeners.iter().enumerate() {
        epoll::add(&epoll, listener, EventData::new_u64(index as u64), EventFlags::IN)?;
    }
    let first = listeners.len();
    let mut shared = Shared::new();
    let mut connections: Vec<Option<Relayed>> = Vec::new();
    let mut free = Vec::new();
    let mut events = Vec::with_capacity(256);
    loop {
        events.clear();
        match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        for &Event { flags, data } in &events {
            let token = usize::try_from(data.u64())?;
            if token < first {
                while let Ok((client, _)) = listeners[token].accept() {
                    client.set_nonblocking(true)?;
                    let Ok(backend) = connect(pairs[token].1) else { continue };
                    let slot = free.pop().unwrap_or_else(|| {
                        connections.push(None);
                        connections.len() - 1
                    });
                    let mut relayed = Relayed {
                        ends: [client, backend],
                        hung_up: [false; 2],
                        directions: Default::default(),
                    };
                    let _ = relayed.pump(0, &mut shared);
                    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
                    for (end, socket) in relayed.ends.iter().enumerate() {
                        let data = EventData::new_u64((first + slot * 2 + end) as u64);
                        epoll::add(&epoll, socket, data, flags)?;
                    }
                    connections[slot] = Some(relayed);
                }
                continue;
            }
            let (slot, end) = ((token - first) / 2, (token - first) % 2);
            // An earlier event of the same turn may have ended the connection.
            let Some(relayed) = &mut connections[slot] else { continue };
            if relayed.woken(end, flags, &mut shared).unwrap_or(true) {
                connections[slot] = None;
                free.push(slot);
            }
        }
    }
}

/// Runs the relay on tokio, on one thread; returns only with an error.
pub(crate) fn on_tokio(pairs: &[Pair]) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let shared = Rc::new(RefCell::new(Shared::new()));
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        let accepting = pairs.iter().map(|&pair| accept(pair, shared.clone()));
        futures_util::future::try_join_all(accepting).await.map(drop)
    })
}

#[expect(clippy::disallowed_methods, reason = "nothing waits for the relay's connections")]
async fn accept((at, backend): Pair, shared: Rc<RefCell<Shared>>) -> Result<()> {
    let listener = tokio::net::TcpListener::from_std(listen(at)?)?;
    loop {
        let (client, _) = listener.accept().await?;
        if let Ok(relay) = Lean::begin(client, backend, shared.clone()) {
            tokio::task::spawn_local(relay.run());
        }
    }
}

/// A connection of the relay on tokio.
struct Lean {
    ends: [tokio::net::TcpStream; 2],
    directions: [Direction; 2],
    shared: Rc<RefCell<Shared>>,
}

impl Lean {
    /// Connects to the backend, and forwards the client's first bytes if they have arrived.
    fn begin(
        client: tokio::net::TcpStream,
        backend: SocketAddr,
        shared: Rc<RefCell<Shared>>,
    ) -> io::Result<Self> {
        let backend = connect(backend)?;
        let mut up = Direction::default();
        // The sockets are used directly, because tokio does not know their readiness yet.
        let [from, to] = [client.as_fd(), backend.as_fd()].map(|socket| Plain { socket, hung_up: false });
        up.pump(&from, &to, &mut shared.borrow_mut(), false)?;
        let backend = tokio::net::TcpStream::from_std(backend)?;
        Ok(Self { ends: [client, backend], directions: [up, Direction::default()], shared })
    }

    async fn run(mut self) {
        std::future::poll_fn(|context| {
            for end in [0, 1] {
                if self.pump(end, context).is_err() {
                    return Poll::Ready(());
                }
            }
            match self.directions.iter().all(|direction| direction.done) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    fn pump(&mut self, end: usize, context: &mut Context<'_>) -> io::Result<()> {
        let (from, to) = (&self.ends[end], &self.ends[1 - end]);
        while !self.directions[end].done {
            let last = self.directions[1 - end].done;
            let waits = self.directions[end].pump(from, to, &mut self.shared.borrow_mut(), last)?;
            let ready = match waits {
                Wait::Read => from.poll_read_ready(context),
                Wait::Write => to.poll_write_ready(context),
                Wait::Nothing => continue,
            };
            match ready {
                Poll::Ready(result) => result?,
                Poll::Pending => break,
            }
        }
        Ok(())
    }
}
