//! A WDS client as a ztunnel is one, scripted by a test. Messages are written and read by their field numbers alone, so that no
//! definition is shared with the server.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::{RecvStream, SendStream};
use http::Request;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;

use super::PATIENCE;

pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";
const PATH: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
/// How long a client that should get nothing waits for it.
const QUIET: Duration = Duration::from_millis(400);

/// A protobuf message as its fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(Vec<(u64, Field)>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Fields {
    pub fn read(mut bytes: &[u8]) -> Self {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes);
            let field = match tag & 7 {
                0 => Field::Number(varint(&mut bytes)),
                2 => {
                    let length = usize::try_from(varint(&mut bytes)).expect("a length");
                    let (value, rest) = bytes.split_at(length);
                    bytes = rest;
                    Field::Bytes(value.to_vec())
                }
                other => panic!("wire type {other}"),
            };
            fields.push((tag >> 3, field));
        }
        Self(fields)
    }

    pub fn number(&self, field: u64) -> u64 {
        self.0
            .iter()
            .find_map(|(number, value)| match value {
                Field::Number(value) if *number == field => Some(*value),
                _ => None,
            })
            .unwrap_or(0)
    }

    pub fn numbers(&self, field: u64) -> Vec<u64> {
        // A repeated number is packed.
        self.all(field)
            .iter()
            .flat_map(|packed| {
                let (mut rest, mut all) = (&packed[..], Vec::new());
                while !rest.is_empty() {
                    all.push(varint(&mut rest));
                }
                all
            })
            .collect()
    }

    pub fn all(&self, field: u64) -> Vec<Vec<u8>> {
        self.0
            .iter()
            .filter_map(|(number, value)| match value {
                Field::Bytes(bytes) if *number == field => Some(bytes.clone()),
                _ => None,
            })
            .collect()
    }

    pub fn has(&self, field: u64) -> bool {
        self.0.iter().any(|(number, _)| *number == field)
    }

    pub fn bytes(&self, field: u64) -> Vec<u8> {
        self.all(field).pop().unwrap_or_default()
    }

    pub fn text(&self, field: u64) -> String {
        String::from_utf8(self.bytes(field)).expect("UTF-8")
    }

    pub fn texts(&self, field: u64) -> Vec<String> {
        self.all(field).into_iter().map(|bytes| String::from_utf8(bytes).expect("UTF-8")).collect()
    }

    pub fn message(&self, field: u64) -> Self {
        Self::read(&self.bytes(field))
    }

    pub fn messages(&self, field: u64) -> Vec<Self> {
        self.all(field).iter().map(|bytes| Self::read(bytes)).collect()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
        shift += 7;
    }
}

fn put(to: &mut Vec<u8>, field: u8, value: &[u8]) {
    to.push(field << 3 | 2);
    let mut length = value.len();
    while length >= 0x80 {
        to.push(u8::try_from(length & 0x7f).expect("7 bits") | 0x80);
        length >>= 7;
    }
    to.push(u8::try_from(length).expect("7 bits"));
    to.extend_from_slice(value);
}

/// Returns an encoded field of bytes.
pub fn field(number: u8, value: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::new();
    put(&mut encoded, number, value);
    encoded
}

fn pair(key: &str, value: &[u8]) -> Vec<u8> {
    let mut both = Vec::new();
    put(&mut both, 1, key.as_bytes());
    put(&mut both, 2, value);
    both
}

/// What a client says of itself.
#[derive(Clone, Debug)]
pub struct Who {
    pub token: String,
    /// The header `clusterid`; empty: it is not sent.
    pub cluster: String,
    pub metadata: Vec<(&'static str, String)>,
}

impl Who {
    pub fn with(mut self, key: &'static str, value: &str) -> Self {
        self.metadata.retain(|(known, _)| *known != key);
        self.metadata.push((key, value.to_owned()));
        self
    }

    fn node(&self) -> Vec<u8> {
        let mut metadata = Vec::new();
        for (key, value) in &self.metadata {
            let mut text = Vec::new();
            put(&mut text, 3, value.as_bytes());
            put(&mut metadata, 1, &pair(key, &text));
        }
        let mut node = Vec::new();
        put(&mut node, 1, b"ztunnel~1.1.1.1~ztunnel-1.istio-system~istio-system.svc.cluster.local");
        put(&mut node, 3, &metadata);
        node
    }
}

/// A request of a client.
#[derive(Clone, Debug, Default)]
pub struct Ask<'a> {
    pub subscribe: &'a [&'a str],
    pub unsubscribe: &'a [&'a str],
    pub has: &'a [(String, String)],
    pub nonce: &'a str,
    /// The text of a NACK.
    pub error: &'a str,
}

/// A response of the server.
#[derive(Clone, Debug, Default)]
pub struct Told {
    pub kind: String,
    pub nonce: String,
    /// Version and message by name.
    pub resources: BTreeMap<String, (String, Fields)>,
    pub removed: Vec<String>,
}

impl Told {
    fn read(bytes: &[u8]) -> Self {
        let fields = Fields::read(bytes);
        // Once, because a look at one field passes all of a large response.
        let kind = fields.text(4);
        let mut resources = BTreeMap::new();
        for resource in fields.messages(2) {
            let any = resource.message(2);
            let before = resources.insert(resource.text(3), (resource.text(1), any.message(2)));
            assert!(before.is_none(), "a name occurs once in a response");
            assert_eq!(any.text(1), kind);
        }
        Self { kind, nonce: fields.text(5), resources, removed: fields.texts(6) }
    }

    /// Returns the names of the resources.
    pub fn names(&self) -> Vec<&str> {
        self.resources.keys().map(String::as_str).collect()
    }

    /// Returns a workload.
    #[track_caller]
    pub fn workload(&self, name: &str) -> Fields {
        let (_, address) =
            self.resources.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.names()));
        assert!(address.has(1), "{name} is a workload");
        address.message(1)
    }

    /// Returns a service.
    #[track_caller]
    pub fn service(&self, name: &str) -> Fields {
        let (_, address) =
            self.resources.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.names()));
        assert!(address.has(2), "{name} is a service");
        address.message(2)
    }

    /// Returns what a client says on its next connection that it has.
    pub fn held(&self) -> Vec<(String, String)> {
        self.resources.iter().map(|(name, (version, _))| (name.clone(), version.clone())).collect()
    }
}

/// What comes next on a stream.
#[derive(Debug)]
pub enum Next {
    Told(Told),
    /// The gRPC status and its text.
    Ended(u32, String),
    Nothing,
}

/// A client with one stream.
pub struct Ztunnel {
    runtime: Runtime,
    who: Who,
    send: SendStream<Bytes>,
    response: Option<h2::client::ResponseFuture>,
    body: Option<RecvStream>,
    ahead: BytesMut,
}

impl Ztunnel {
    pub fn open(address: SocketAddr, tls: &Arc<ClientConfig>, who: &Who) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let (tls, name) = (tls.clone(), ServerName::try_from("isthmus.test").expect("a name"));
        let stream = runtime.block_on(async {
            let socket = TcpStream::connect(address).await.expect("the server");
            TlsConnector::from(tls).connect(name, socket).await.expect("its certificate is verified")
        });
        Self::over(runtime, stream, who)
    }

    /// Does the same as [`Ztunnel::open`] without TLS.
    pub fn open_plain(address: SocketAddr, who: &Who) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let stream = runtime.block_on(TcpStream::connect(address)).expect("the server");
        Self::over(runtime, stream, who)
    }

    fn over(
        runtime: Runtime,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        who: &Who,
    ) -> Self {
        let handle = runtime.handle().clone();
        let (send, response) = runtime.block_on(async {
            let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
            handle.spawn(connection);
            let mut request = Request::post(format!("https://isthmus.test{PATH}"))
                .header("content-type", "application/grpc")
                .header("te", "trailers");
            if !who.token.is_empty() {
                request = request.header("authorization", format!("Bearer {}", who.token));
            }
            if !who.cluster.is_empty() {
                request = request.header("clusterid", &who.cluster);
            }
            let mut client = client.ready().await.expect("ready");
            let (response, send) =
                client.send_request(request.body(()).expect("legal"), false).expect("sent");
            (send, response)
        });
        Self { runtime, who: who.clone(), send, response: Some(response), body: None, ahead: BytesMut::new() }
    }

    pub fn ask(&mut self, kind: &str, ask: &Ask<'_>) {
        let mut message = Vec::new();
        if ask.nonce.is_empty() {
            put(&mut message, 1, &self.who.node());
        }
        put(&mut message, 2, kind.as_bytes());
        ask.subscribe.iter().for_each(|name| put(&mut message, 3, name.as_bytes()));
        ask.unsubscribe.iter().for_each(|name| put(&mut message, 4, name.as_bytes()));
        ask.has.iter().for_each(|(name, version)| put(&mut message, 5, &pair(name, version.as_bytes())));
        if !ask.nonce.is_empty() {
            put(&mut message, 6, ask.nonce.as_bytes());
        }
        if !ask.error.is_empty() {
            let mut status = vec![1 << 3, 3];
            put(&mut status, 2, ask.error.as_bytes());
            put(&mut message, 7, &status);
        }
        self.send(&message);
    }

    /// Sends an encoded message.
    pub fn send(&mut self, message: &[u8]) {
        let mut framed = vec![0];
        framed.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
        framed.extend(message);
        // Fails if the server has ended the stream, which the next read says.
        let _ = self.send.send_data(framed.into(), false);
    }

    /// Sends the first two messages of a ztunnel that wants everything.
    pub fn begin(&mut self, has: &[(String, String)]) {
        self.ask(ADDRESS, &Ask { has, ..Ask::default() });
        self.ask(AUTHORIZATION, &Ask::default());
    }

    /// Sends the first two messages of a ztunnel on demand.
    pub fn begin_on_demand(&mut self, has: &[(String, String)]) {
        self.ask(ADDRESS, &Ask { subscribe: &["*"], unsubscribe: &["*"], has, ..Ask::default() });
        self.ask(AUTHORIZATION, &Ask::default());
    }

    pub fn next(&mut self) -> Next {
        self.within(PATIENCE)
    }

    pub fn within(&mut self, limit: Duration) -> Next {
        let Self { runtime, response, body, ahead, .. } = self;
        let next = async {
            if let Some(coming) = response.take() {
                let head = coming.await;
                let (head, stream) = match head {
                    Ok(head) => head.into_parts(),
                    Err(error) => return Next::Ended(u32::MAX, error.to_string()),
                };
                if head.headers.contains_key("grpc-status") {
                    return ended(&head.headers);
                }
                *body = Some(stream);
            }
            let Some(body) = body else { return Next::Nothing };
            loop {
                if let Some(length) = ahead.get(1..5) {
                    let length = 5 + u32::from_be_bytes(length.try_into().expect("4 bytes")) as usize;
                    if ahead.len() >= length {
                        return Next::Told(Told::read(&ahead.split_to(length)[5..]));
                    }
                }
                match body.data().await {
                    Some(Ok(data)) => {
                        body.flow_control().release_capacity(data.len()).expect("released");
                        ahead.extend_from_slice(&data);
                    }
                    Some(Err(error)) => return Next::Ended(u32::MAX, error.to_string()),
                    None => {
                        let trailers = poll_fn(|context| body.poll_trailers(context)).await;
                        return ended(&trailers.expect("trailers").unwrap_or_default());
                    }
                }
            }
        };
        let task = async { tokio::time::timeout(limit, next).await };
        match runtime.block_on(task) {
            Ok(next) => next,
            // The head of the response has not come.
            Err(_) => Next::Nothing,
        }
    }

    /// Returns the next response, and accepts it.
    #[track_caller]
    pub fn told(&mut self, kind: &str) -> Told {
        match self.next() {
            Next::Told(told) => {
                assert_eq!(told.kind, kind);
                self.ask(kind, &Ask { nonce: &told.nonce, ..Ask::default() });
                told
            }
            other => panic!("no response of {kind}: {other:?}"),
        }
    }

    /// Returns the first responses of both types, whichever comes first.
    #[track_caller]
    pub fn first(&mut self) -> (Told, Told) {
        let mut both = BTreeMap::new();
        while both.len() < 2 {
            match self.next() {
                Next::Told(told) => {
                    self.ask(&told.kind.clone(), &Ask { nonce: &told.nonce, ..Ask::default() });
                    both.insert(told.kind.clone(), told);
                }
                other => panic!("{} of two responses: {other:?}", both.len()),
            }
        }
        (both.remove(ADDRESS).expect("addresses"), both.remove(AUTHORIZATION).expect("policies"))
    }

    #[track_caller]
    pub fn gets_nothing(&mut self) {
        match self.within(QUIET) {
            Next::Nothing => {}
            other => panic!("something came: {other:?}"),
        }
    }

    /// Waits for the end of the stream, and returns the gRPC status and its text.
    #[track_caller]
    pub fn ended(&mut self) -> (u32, String) {
        loop {
            match self.next() {
                Next::Ended(code, text) => return (code, text),
                Next::Told(_) => {}
                Next::Nothing => panic!("the stream goes on"),
            }
        }
    }
}

fn ended(headers: &http::HeaderMap) -> Next {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let decoded = text("grpc-message").replace("%20", " ").replace("%22", "\"");
    Next::Ended(text("grpc-status").parse().unwrap_or(u32::MAX), decoded)
}
