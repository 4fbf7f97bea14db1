//! A fake Kubernetes API server on HTTP/2 (and HTTP/1.1) with TLS, for faults that a test cannot provoke in a real API server.
//! `kube_world` makes its ordinary answers. A test can add rules, each of which replaces some answers by any bytes at any pace.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, DATE};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{broadcast, mpsc, watch};
use tokio_rustls::TlsAcceptor;

use super::etcd::encoded;
use super::eventually;
use super::kube_client::Client;
use super::kube_world::{Answer, Asked, TOKEN, World};
use super::pki::Pki;

/// A piece of a misbehaving answer.
pub enum Part {
    Bytes(Vec<u8>),
    /// The bytes, one per second.
    Drip(Vec<u8>),
    /// An endless sequence of pieces; the function returns the bytes of a piece, given its number from 0.
    Endless(Box<dyn Fn(u64) -> Vec<u8> + Send>),
    /// Nothing more is sent until [`FakeKube::behave`] is called, which resets the stream.
    Hang,
    /// The fake resets the stream.
    Reset,
    /// The fake closes the whole connection.
    Cut,
}

/// A misbehaving answer.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub parts: Vec<Part>,
}

impl Reply {
    /// Returns an answer with status 200 and these pieces.
    pub fn ok(parts: Vec<Part>) -> Self {
        Self { status: 200, headers: Vec::new(), parts }
    }

    pub fn text(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), parts: vec![Part::Bytes(body.into())] }
    }

    pub fn json(status: u16, body: &Value) -> Self {
        Self::text(status, body.to_string())
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }
}

/// A request that the fake has received.
#[derive(Clone)]
pub struct Seen {
    pub at: Instant,
    pub asked: Asked,
}

type Rule = Box<dyn Fn(&Asked) -> Option<Reply> + Send>;

struct State {
    world: World,
    rules: Vec<Rule>,
    seen: Vec<Seen>,
    /// The number of seconds by which the `Date` of the fake's answers is ahead; 0 for no `Date`.
    ahead: i64,
    /// True if the fake answers nothing on a connection that it accepts, not even the TLS hello.
    is_mute: bool,
    /// The number of open watches, by kind (`pods`).
    open: BTreeMap<String, usize>,
}

/// A command to the open connections and watches.
#[derive(Clone)]
enum Order {
    /// Sends these bytes, in one piece, on the open watches of a kind.
    Send(String, Bytes),
    /// Ends the open watches of a kind.
    End(String, Finish),
    /// Closes all connections.
    Cut,
}

/// How the fake ends a watch: by the regular end of the response, or by a reset of the stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    InOrder,
    Reset,
}

struct Shared {
    state: Mutex<State>,
    /// The number of changes of the world so far.
    changed: watch::Sender<u64>,
    /// The number of calls of [`FakeKube::behave`] so far.
    behaves: watch::Sender<u64>,
    orders: broadcast::Sender<Order>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }
}

/// A running fake; dropping it closes its connections.
pub struct FakeKube {
    pub address: SocketAddr,
    pki: Pki,
    shared: Arc<Shared>,
    _runtime: Runtime,
}

impl FakeKube {
    pub fn start() -> Self {
        let pki = Pki::new("the fake's CA");
        let mut tls = (*pki.server("127.0.0.1")).clone();
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let state = State {
            world: World::default(),
            rules: Vec::new(),
            seen: Vec::new(),
            ahead: 0,
            is_mute: false,
            open: BTreeMap::new(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: watch::channel(0).0,
            behaves: watch::channel(0).0,
            orders: broadcast::channel(64).0,
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("bound");
        runtime.spawn(accept(listener, acceptor, shared.clone()));
        Self { address, pki, shared, _runtime: runtime }
    }

    pub fn kubeconfig(&self) -> String {
        self.kubeconfig_of(&self.cluster(), &format!("{{token: {TOKEN}}}"))
    }

    pub fn ca_pem(&self) -> String {
        self.pki.ca_pem()
    }

    /// Returns the keys of `cluster` in a kubeconfig for the fake, in YAML without the braces.
    pub fn cluster(&self) -> String {
        let ca = encoded(self.pki.ca_pem().as_bytes());
        format!("server: \"https://{}\", certificate-authority-data: {ca}", self.address)
    }

    /// Returns a kubeconfig with these keys of its cluster (YAML without the braces) and this user (YAML).
    pub fn kubeconfig_of(&self, cluster: &str, user: &str) -> String {
        format!(
            "{{apiVersion: v1, kind: Config, current-context: fake, contexts: [{{name: fake, context: {{cluster: fake, user: \
             fake}}}}], clusters: [{{name: fake, cluster: {{{cluster}}}}}], users: [{{name: fake, user: {user}}}]}}\n"
        )
    }

    /// Returns a client over HTTP/1.1.
    pub fn client(&self, token: &str) -> Client {
        Client::new(self.address, self.pki.client(&["http/1.1"]), token)
    }

    /// Changes the objects and settings of the fake.
    pub fn change<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        let done = change(&mut self.shared.state().world);
        self.shared.changed.send_modify(|count| *count += 1);
        done
    }

    pub fn put(&self, object: &Value) {
        self.change(|world| world.put(object));
    }

    pub fn delete(&self, plural: &str, key: &str) {
        self.change(|world| world.delete(plural, key));
    }

    /// Sets the `Date` of all answers ahead by `ahead` seconds, and closes all connections, so that clients connect again and
    /// see the new `Date`.
    pub fn set_clock(&self, ahead: i64) {
        self.shared.state().ahead = ahead;
        self.cut();
    }

    /// Adds a rule, which is asked before all earlier rules. If it returns a reply, the fake sends this reply.
    pub fn rule(&self, rule: impl Fn(&Asked) -> Option<Reply> + Send + 'static) {
        self.shared.state().rules.insert(0, Box::new(rule));
    }

    /// Drops all rules, and resets the answers that hang, drip or have no end.
    pub fn behave(&self) {
        {
            let mut state = self.shared.state();
            state.rules.clear();
            state.is_mute = false;
        }
        self.shared.behaves.send_modify(|count| *count += 1);
    }

    /// Closes all connections. The fake answers nothing on later connections, not even the TLS hello.
    pub fn mute(&self) {
        self.shared.state().is_mute = true;
        self.cut();
    }

    /// Closes all connections.
    pub fn cut(&self) {
        let _ = self.shared.orders.send(Order::Cut);
    }

    /// Waits until a client watches a kind.
    #[track_caller]
    fn watched(&self, plural: &str) {
        eventually(&format!("a watch of {plural}"), || {
            self.shared.state().open.get(plural).filter(|count| **count > 0).map(|_| ())
        });
    }

    /// Sends bytes on the open watches of a kind; waits first until there is one.
    #[track_caller]
    pub fn send(&self, plural: &str, bytes: impl Into<Bytes>) {
        self.watched(plural);
        let _ = self.shared.orders.send(Order::Send(plural.to_owned(), bytes.into()));
    }

    /// Sends a bookmark on the open watches of a kind.
    pub fn bookmark(&self, plural: &str) {
        let line = self.change(|world| world.bookmark(plural));
        self.send(plural, line);
    }

    /// Ends the open watches of a kind; waits first until there is one.
    #[track_caller]
    pub fn end(&self, plural: &str, finish: Finish) {
        self.watched(plural);
        let _ = self.shared.orders.send(Order::End(plural.to_owned(), finish));
    }

    /// Returns the requests so far that match.
    pub fn seen(&self, so: impl Fn(&Asked) -> bool) -> Vec<Seen> {
        self.shared.state().seen.iter().filter(|seen| so(&seen.asked)).cloned().collect()
    }
}

async fn accept(listener: TcpListener, acceptor: TlsAcceptor, shared: Arc<Shared>) {
    while let Ok((socket, _)) = listener.accept().await {
        let _ = socket.set_nodelay(true);
        start(connection(socket, acceptor.clone(), shared.clone()));
    }
}

/// Starts a task on the fake's own runtime.
fn start(task: impl Future<Output = ()> + Send + 'static) {
    #[expect(clippy::disallowed_methods, reason = "the runtime is the fake's own, and ends with it")]
    tokio::spawn(task);
}

async fn connection(socket: TcpStream, acceptor: TlsAcceptor, shared: Arc<Shared>) {
    let (mut orders, mut behaves) = (shared.orders.subscribe(), shared.behaves.subscribe());
    if shared.state().is_mute {
        let _ = behaves.changed().await;
        return;
    }
    let Ok(tls) = acceptor.accept(socket).await else { return };
    let is_http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
    let (cut, mut is_cut) = mpsc::channel::<()>(1);
    let service = service_fn(move |request| answer(request, shared.clone(), cut.clone()));
    let io = TokioIo::new(tls);
    let serve: Pin<Box<dyn Future<Output = ()> + Send>> = if is_http2 {
        let served =
            hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service);
        Box::pin(async { drop(served.await) })
    } else {
        let served = hyper::server::conn::http1::Builder::new().serve_connection(io, service);
        Box::pin(async { drop(served.await) })
    };
    let cut_by_order = async { while !matches!(orders.recv().await, Ok(Order::Cut) | Err(_)) {} };
    tokio::select! {
        () = serve => {}
        () = cut_by_order => {}
        _ = is_cut.recv() => {}
    }
}

/// A response body whose pieces a task sends.
pub struct Pieces(mpsc::Receiver<io::Result<Bytes>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

type Pen = mpsc::Sender<io::Result<Bytes>>;

async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
    cut: mpsc::Sender<()>,
) -> Result<Response<Pieces>, Infallible> {
    let token =
        request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let uri = request.uri().path_and_query().map_or("/", |both| both.as_str());
    let asked = Asked::new(uri, token.unwrap_or_default());
    let (pen, pieces) = mpsc::channel(4);
    // A test that sees the request in `seen` may call `behave` at once, so this subscribes first.
    let behaves = shared.behaves.subscribe();
    let (reply, answer, ahead) = {
        let mut state = shared.state();
        state.seen.push(Seen { at: Instant::now(), asked: asked.clone() });
        let reply = state.rules.iter().find_map(|rule| rule(&asked));
        let answer = if reply.is_none() { Some(state.world.answer(&asked)) } else { None };
        (reply, answer, state.ahead)
    };
    let mut response = Response::builder();
    if ahead != 0 {
        let shift = Duration::from_secs(ahead.unsigned_abs());
        let now = SystemTime::now();
        let shown = if ahead > 0 { now + shift } else { now - shift };
        response = response.header(DATE, httpdate::fmt_http_date(shown));
    }
    match (reply, answer) {
        (Some(reply), _) => {
            response = response.status(reply.status).header(CONTENT_TYPE, "application/json");
            for (name, value) in reply.headers {
                response = response.header(name, value);
            }
            start(perform(reply.parts, pen, behaves, cut));
        }
        (None, Some(Answer::Json(status, body))) => {
            response = response.status(status).header(CONTENT_TYPE, "application/json");
            start(write(pen, vec![body.to_string()]));
        }
        (None, Some(Answer::Text(status, body))) => {
            response = response.status(status).header(CONTENT_TYPE, "text/plain");
            start(write(pen, vec![body.to_owned()]));
        }
        (None, Some(Answer::Lines(lines))) => start(write(pen, lines)),
        (None, Some(Answer::Follow(lines, version))) => start(follow(pen, asked, lines, version, shared)),
        (None, None) => unreachable!("one of them"),
    }
    Ok(response.body(Pieces(pieces)).expect("a response"))
}

async fn write(pen: Pen, texts: Vec<String>) {
    for text in texts {
        let _ = pen.send(Ok(text.into())).await;
    }
}

/// Sends the pieces of a misbehaving answer.
async fn perform(parts: Vec<Part>, pen: Pen, mut behaves: watch::Receiver<u64>, cut: mpsc::Sender<()>) {
    let misbehave = async {
        for part in parts {
            match part {
                Part::Bytes(bytes) => drop(pen.send(Ok(bytes.into())).await),
                Part::Drip(bytes) => {
                    for byte in bytes {
                        let _ = pen.send(Ok(vec![byte].into())).await;
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                }
                Part::Endless(bytes) => {
                    for number in 0.. {
                        if pen.send(Ok(bytes(number).into())).await.is_err() {
                            return true;
                        }
                    }
                }
                Part::Hang => std::future::pending().await,
                Part::Reset => return false,
                Part::Cut => drop(cut.send(()).await),
            }
        }
        true
    };
    let is_whole = tokio::select! {
        is_whole = misbehave => is_whole,
        _ = behaves.changed() => false,
    };
    if !is_whole {
        let _ = pen.send(Err(io::ErrorKind::ConnectionReset.into())).await;
    }
}

/// Counts an open watch for as long as it lives.
struct Open {
    plural: String,
    shared: Arc<Shared>,
}

impl Open {
    fn new(plural: &str, shared: &Arc<Shared>) -> Self {
        *shared.state().open.entry(plural.to_owned()).or_default() += 1;
        Self { plural: plural.to_owned(), shared: shared.clone() }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *self.shared.state().open.get_mut(&self.plural).expect("counted") -= 1;
    }
}

/// Sends the events of a watch until the watch's `timeoutSeconds` have passed.
async fn follow(pen: Pen, asked: Asked, lines: Vec<String>, mut version: u64, shared: Arc<Shared>) {
    let (mut orders, mut changed) = (shared.orders.subscribe(), shared.changed.subscribe());
    let _open = Open::new(&asked.plural, &shared);
    let seconds = asked.number("timeoutSeconds").unwrap_or(1800);
    let end = tokio::time::sleep(Duration::from_secs(seconds));
    tokio::pin!(end);
    for line in lines {
        if pen.send(Ok(line.into())).await.is_err() {
            return;
        }
    }
    loop {
        let (events, newest) = shared.state().world.since(&asked, version);
        version = newest;
        for event in events {
            if pen.send(Ok(event.into())).await.is_err() {
                return;
            }
        }
        // `biased` sends the events of earlier changes before it obeys an order or ends the watch.
        tokio::select! {
            biased;
            _ = changed.changed() => {}
            order = orders.recv() => match order {
                Ok(Order::Send(plural, bytes)) if plural == asked.plural => drop(pen.send(Ok(bytes)).await),
                Ok(Order::End(plural, finish)) if plural == asked.plural => {
                    if finish == Finish::Reset {
                        let _ = pen.send(Err(io::ErrorKind::ConnectionReset.into())).await;
                    }
                    return;
                }
                _ => {}
            },
            () = &mut end => {
                let last = shared.state().world.last_bookmark(&asked);
                let _ = pen.send(Ok(last.unwrap_or_default().into())).await;
                return;
            }
            () = pen.closed() => return,
        }
    }
}
