//! Both ends of every connection: the backends, and the clients that send through a proxy and check the answers. They share no
//! code with the gateway; rustls makes the hello that opens a connection.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::try_join_all;
use rustix::net::RecvFlags;
use rustls::client::Resumption;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::Result;

/// The size in bytes of a client's request on an open connection.
const REQUEST: usize = 128;
/// The size in bytes of the answer to a request.
const ANSWER: usize = 1_024;
/// The number of bytes that one call sends.
const PIECE: usize = 256 * 1024;
/// The number of clients at the same time, unless their work is counted.
pub(crate) const AT_ONCE: usize = 64;
/// The number of bulk transfers at the same time.
const STREAMS: usize = 4;
/// The byte of which all answers consist: the content type of a TLS handshake (RFC 8446 §5.1), with which the answer of a real
/// server to a hello begins. Isthmus reports an answer that begins with another byte as a fault of the endpoint.
const ANSWER_BYTE: u8 = 22;
/// The number of bytes that are sent of a hello that is never completed.
const PARTIAL: usize = 300;

/// A kind of backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backend {
    /// Reads the hello, answers it, and answers each request after it.
    Answer,
    /// Reads the hello, a number and that many bytes, and answers.
    Sink,
    /// Reads the hello and a number, and sends that many bytes.
    Source,
    /// Speaks TLS, and answers one request.
    Tls,
}

/// All kinds; a proxy's addresses have the same order.
pub(crate) const BACKENDS: [Backend; 4] = [Backend::Answer, Backend::Sink, Backend::Source, Backend::Tls];

/// The number of names that lead to [`Backend::Answer`]; connections use them in turn.
pub(crate) const NAMES: usize = 100;

/// Returns the name of a route to [`Backend::Answer`].
pub(crate) fn name(index: usize) -> String {
    format!("r{index:06}.bench.test")
}

impl Backend {
    /// Returns the server name of a route to this backend.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Answer => name(0),
            Self::Sink => "sink.bench.test".to_owned(),
            Self::Source => "source.bench.test".to_owned(),
            Self::Tls => "tls.bench.test".to_owned(),
        }
    }
}

/// One address per kind of backend, in the order of [`BACKENDS`].
pub(crate) type Addresses = [SocketAddr; 4];

/// The addresses of the backends, and the hellos and TLS config of the clients.
pub(crate) struct Ends {
    pub(crate) backends: Addresses,
    /// The number of clients at the same time.
    at_once: usize,
    hellos: Arc<Hellos>,
    tls: TlsConnector,
}

struct Hellos {
    answer: Vec<Vec<u8>>,
    sink: Vec<u8>,
    source: Vec<u8>,
}

impl Ends {
    /// Starts the backends on the runtime of the clients, of which so many work at the same time.
    pub(crate) fn start(runtime: &Runtime, at_once: usize) -> Result<Self> {
        let certified = rcgen::generate_simple_self_signed(vec![Backend::Tls.name()])?;
        let mut roots = RootCertStore::empty();
        roots.add(certified.cert.der().clone())?;
        let key = PrivateKeyDer::Pkcs8(certified.signing_key.serialize_der().into());
        let server = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)?;
        let mut client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        client.resumption = Resumption::disabled();
        let client = Arc::new(client);
        let hello = |name: String| -> Result<Vec<u8>> {
            let mut connection = ClientConnection::new(client.clone(), ServerName::try_from(name)?)?;
            let mut bytes = Vec::new();
            connection.write_tls(&mut bytes)?;
            Ok(bytes)
        };
        let answer = (0..NAMES).map(|index| hello(name(index))).collect::<Result<_>>()?;
        let hellos =
            Hellos { answer, sink: hello(Backend::Sink.name())?, source: hello(Backend::Source.name())? };
        let listeners = BACKENDS.map(|_| listen());
        let mut backends = [SocketAddr::from(([127, 0, 0, 1], 0)); 4];
        let acceptor = TlsAcceptor::from(Arc::new(server));
        for ((kind, address), listener) in BACKENDS.into_iter().zip(&mut backends).zip(listeners) {
            let listener = listener?;
            *address = listener.local_addr()?;
            runtime.spawn(serve(kind, listener, acceptor.clone()));
        }
        Ok(Self { backends, at_once, hellos: Arc::new(hellos), tls: TlsConnector::from(client) })
    }
}

/// Returns a listener whose queue has room for all clients at once.
fn listen() -> Result<std::net::TcpListener> {
    let socket =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM.nonblocking().cloexec(), None)?;
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
    socket.set_tcp_nodelay(true)?;
    socket.listen(4_096)?;
    Ok(socket.into())
}

async fn serve(kind: Backend, listener: std::net::TcpListener, acceptor: TlsAcceptor) -> Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let mut tasks = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        let acceptor = acceptor.clone();
        tasks.spawn(async move {
            // The client reports wrong answers; a connection that ends early is no error here.
            let _ = match kind {
                Backend::Answer => answer(stream).await,
                Backend::Sink => sink(stream).await,
                Backend::Source => source(stream).await,
                Backend::Tls => speak_tls(stream, acceptor).await,
            };
        });
        while tasks.try_join_next().is_some() {}
    }
}

/// Reads one TLS record.
async fn read_hello(stream: &mut TcpStream) -> Result<()> {
    // The buffer holds the whole record, so that one call can read it, as in a server.
    let mut bytes = [0; 4_096];
    let mut count = 0;
    loop {
        match stream.read(&mut bytes[count..]).await? {
            0 => return Err("no hello".into()),
            more => count += more,
        }
        let length = 5 + usize::from(u16::from_be_bytes([bytes[3], bytes[4]]));
        if count >= length.max(5) {
            return if count == length { Ok(()) } else { Err("more than a hello".into()) };
        }
    }
}

async fn answer(mut stream: TcpStream) -> Result<()> {
    read_hello(&mut stream).await?;
    let answer = [ANSWER_BYTE; ANSWER];
    stream.write_all(&answer).await?;
    loop {
        stream.read_exact(&mut [0; REQUEST]).await?;
        stream.write_all(&answer).await?;
    }
}

async fn sink(mut stream: TcpStream) -> Result<()> {
    read_hello(&mut stream).await?;
    stream.write_all(&[ANSWER_BYTE]).await?;
    let count = stream.read_u64().await?;
    discard(&stream, count).await?;
    Ok(stream.write_all(&[ANSWER_BYTE]).await?)
}

async fn source(mut stream: TcpStream) -> Result<()> {
    read_hello(&mut stream).await?;
    stream.write_all(&[ANSWER_BYTE]).await?;
    let count = stream.read_u64().await?;
    send(&mut stream, count).await?;
    // The client closes first.
    let _ = stream.read(&mut [0]).await;
    Ok(())
}

async fn speak_tls(stream: TcpStream, acceptor: TlsAcceptor) -> Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    stream.read_exact(&mut [0; REQUEST]).await?;
    stream.write_all(&[ANSWER_BYTE; ANSWER]).await?;
    stream.shutdown().await?;
    let _ = stream.read(&mut [0]).await;
    Ok(())
}

async fn send(stream: &mut TcpStream, count: u64) -> Result<()> {
    let piece = vec![7; PIECE];
    let mut left = usize::try_from(count)?;
    while left > 0 {
        left -= stream.write(&piece[..left.min(PIECE)]).await?;
    }
    Ok(())
}

/// Reads and drops `count` bytes; the kernel does not copy them to this process, because only the proxy is to be measured.
async fn discard(stream: &TcpStream, count: u64) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut left = usize::try_from(count)?;
    while left > 0 {
        stream.readable().await?;
        let room = left.min(buffer.len());
        let read = stream.try_io(Interest::READABLE, || {
            Ok(rustix::net::recv(stream, &mut buffer[..room], RecvFlags::TRUNC | RecvFlags::DONTWAIT)?.1)
        });
        match read {
            Ok(0) => return Err(format!("{left} bytes of {count} are missing").into()),
            Ok(read) => left -= read,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

async fn check_answer(stream: &mut (impl AsyncRead + Unpin)) -> Result<()> {
    let mut answer = [0; ANSWER];
    stream.read_exact(&mut answer).await?;
    if answer != [ANSWER_BYTE; ANSWER] { Err("the answer is not the backend's".into()) } else { Ok(()) }
}

async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<()> {
    stream.write_all(&[1; REQUEST]).await?;
    check_answer(stream).await
}

async fn connect(to: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

impl Ends {
    /// Opens a connection, and waits for the answer to its hello.
    async fn open(&self, to: SocketAddr, index: usize) -> Result<TcpStream> {
        let mut stream = connect(to).await?;
        stream.write_all(&self.hellos.answer[index % NAMES]).await?;
        check_answer(&mut stream).await?;
        Ok(stream)
    }

    /// Opens a connection to the route of this name, which may be outside of the first [`NAMES`], and checks the answer.
    pub(crate) async fn open_name(&self, to: SocketAddr, name: &str) -> Result<()> {
        // All names have the same length, so the name in a known hello can be replaced.
        let (known, mut hello) = (self::name(0), self.hellos.answer[0].clone());
        let at = hello.windows(known.len()).position(|found| found == known.as_bytes()).ok_or("no name")?;
        (&mut hello[at..]).write_all(name.as_bytes())?;
        let mut stream = connect(to).await?;
        stream.write_all(&hello).await?;
        check_answer(&mut stream).await
    }

    /// Makes short connections (hello, answer, end); returns their number.
    pub(crate) async fn connections(&self, to: &Addresses, count: usize) -> Result<f64> {
        let each = count / self.at_once;
        try_join_all((0..self.at_once).map(|client| async move {
            for index in 0..each {
                drop(self.open(to[0], client + index).await?);
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }))
        .await?;
        Ok((each * self.at_once) as f64)
    }

    /// Makes full TLS handshakes with one request each, a quarter as many at the same time as there are clients; returns their number.
    pub(crate) async fn handshakes(&self, to: &Addresses, count: usize) -> Result<f64> {
        let clients = (self.at_once / 4).max(1);
        let each = count / clients;
        try_join_all((0..clients).map(|_| async move {
            for _ in 0..each {
                let stream = connect(to[3]).await?;
                let name = ServerName::try_from(Backend::Tls.name())?;
                let mut stream = self.tls.connect(name, stream).await?;
                ask(&mut stream).await?;
                stream.shutdown().await?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }))
        .await?;
        Ok((each * clients) as f64)
    }

    /// Sends bytes from clients to backends; returns their number in GiB.
    pub(crate) async fn up(&self, to: &Addresses, bytes: u64) -> Result<f64> {
        let each = bytes / STREAMS as u64;
        try_join_all((0..STREAMS).map(|_| async move {
            let mut stream = connect(to[1]).await?;
            stream.write_all(&self.hellos.sink).await?;
            stream.read_exact(&mut [0]).await?;
            stream.write_u64(each).await?;
            send(&mut stream, each).await?;
            stream.read_exact(&mut [0]).await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }))
        .await?;
        Ok((each * STREAMS as u64) as f64 / f64::from(1 << 30))
    }

    /// Sends bytes from backends to clients; returns their number in GiB.
    pub(crate) async fn down(&self, to: &Addresses, bytes: u64) -> Result<f64> {
        let each = bytes / STREAMS as u64;
        try_join_all((0..STREAMS).map(|_| async move {
            let mut stream = connect(to[2]).await?;
            stream.write_all(&self.hellos.source).await?;
            stream.read_exact(&mut [0]).await?;
            stream.write_u64(each).await?;
            discard(&stream, each).await
        }))
        .await?;
        Ok((each * STREAMS as u64) as f64 / f64::from(1 << 30))
    }

    /// Opens the connections that [`Ends::round_trips`] uses.
    pub(crate) async fn open_many(&self, to: &Addresses, count: usize) -> Result<Vec<TcpStream>> {
        let mut all = Vec::with_capacity(count);
        while all.len() < count {
            let now = self.at_once.min(count - all.len());
            all.extend(try_join_all((0..now).map(|index| self.open(to[0], index))).await?);
        }
        Ok(all)
    }

    /// Makes requests on open connections, and reads the answers; returns their number.
    pub(crate) async fn round_trips(&self, streams: &mut [TcpStream], count: usize) -> Result<f64> {
        let (each, clients) = (count / streams.len(), streams.len());
        try_join_all(streams.iter_mut().map(|stream| async move {
            for _ in 0..each {
                ask(stream).await?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }))
        .await?;
        Ok((each * clients) as f64)
    }

    /// Opens connections that send part of their hello.
    pub(crate) async fn open_partly(&self, to: &Addresses, count: usize) -> Result<Vec<TcpStream>> {
        let mut all = Vec::with_capacity(count);
        for index in 0..count {
            let mut stream = connect(to[0]).await?;
            stream.write_all(&self.hellos.answer[index % NAMES][..PARTIAL]).await?;
            all.push(stream);
        }
        Ok(all)
    }
}

/// The number of open connections that [`Ends::round_trips`] uses.
pub(crate) const ROUND_TRIP_CONNECTIONS: usize = AT_ONCE;
