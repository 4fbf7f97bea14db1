//! A client of a Kubernetes API server: HTTP/1.1 over TLS, JSON objects and streams of watch events. It uses none of the code
//! under test.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustls::{ClientConfig, ClientConnection, StreamOwned};
use serde_json::{Value, json};

use super::client::Tls;
use super::{PATIENCE, eventually};

/// The content types of a request's body.
const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";
const APPLY_PATCH: &str = "application/apply-patch+yaml";
pub const YAML: &str = "application/yaml";

/// A client with one user's token, or an anonymous client (empty token).
pub struct Client {
    address: SocketAddr,
    config: Arc<ClientConfig>,
    token: String,
    /// The content type that the client accepts; with `as=PartialObjectMetadata` the server sends metadata
    /// only.
    pub accept: String,
    /// A connection without a request in flight, kept for the next request.
    idle: Mutex<Option<Connection>>,
}

type Connection = BufReader<Tls>;

/// A response with its whole body.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
}

impl Answer {
    /// Returns the body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Returns the path of an object, or of a list: `at("v1", "pods", "shop/a")`, `at("v1", "pods", "shop/")`, `at("v1",
/// "nodes", "n1")`, `at("discovery.k8s.io/v1", "endpointslices", "")`.
pub fn at(version: &str, kinds: &str, key: &str) -> String {
    let root = if version.contains('/') { "/apis" } else { "/api" };
    let path = match key.split_once('/') {
        Some((namespace, name)) => format!("{root}/{version}/namespaces/{namespace}/{kinds}/{name}"),
        None => format!("{root}/{version}/{kinds}/{key}"),
    };
    path.trim_end_matches('/').to_owned()
}

/// Returns the path of an object by its `apiVersion`, `kind` and `metadata`.
fn path_of(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = text(&object["kind"]).to_lowercase();
    let kinds = match kind.as_str() {
        "endpoints" => kind,
        _ if kind.ends_with("class") => kind + "es",
        _ if kind.ends_with("cy") || kind.ends_with("try") => kind[..kind.len() - 1].to_owned() + "ies",
        _ => kind + "s",
    };
    let (namespace, name) = (text(&object["metadata"]["namespace"]), text(&object["metadata"]["name"]));
    let key = if namespace.is_empty() { name } else { format!("{namespace}/{name}") };
    at(&text(&object["apiVersion"]), &kinds, &key)
}

impl Client {
    pub fn new(address: SocketAddr, config: Arc<ClientConfig>, token: &str) -> Self {
        let (token, accept) = (token.to_owned(), JSON.to_owned());
        Self { address, config, token, accept, idle: Mutex::default() }
    }

    /// Sends a request and reads the response. Returns an error if the server does not answer within [`PATIENCE`].
    pub fn try_call(&self, method: &str, path: &str, body: (&str, &str)) -> io::Result<Answer> {
        let request = self.request(method, path, body);
        let idle = self.idle.lock().expect("not poisoned").take();
        if let Some(mut connection) = idle {
            match exchange(&mut connection, &request) {
                // The server closed the connection while it was idle: the request is sent again over a new one.
                Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                answer => return self.keep(connection, answer),
            }
        }
        let mut connection = self.connect()?;
        let answer = exchange(&mut connection, &request);
        self.keep(connection, answer)
    }

    fn keep(&self, connection: Connection, answer: io::Result<Answer>) -> io::Result<Answer> {
        if answer.is_ok() {
            *self.idle.lock().expect("not poisoned") = Some(connection);
        }
        answer
    }

    fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect_timeout(&self.address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let name = self.address.ip().into();
        let session = ClientConnection::new(self.config.clone(), name).map_err(io::Error::other)?;
        Ok(BufReader::new(StreamOwned::new(session, stream)))
    }

    fn request(&self, method: &str, path: &str, (kind, body): (&str, &str)) -> String {
        let user = if self.token.is_empty() {
            String::new()
        } else {
            format!("Authorization: Bearer {}\r\n", self.token)
        };
        let length = body.len();
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAccept: {}\r\n{user}Content-Type: {kind}\r\n\
             Content-Length: {length}\r\n\r\n{body}",
            self.address, self.accept
        )
    }

    /// Sends a request and returns its answer, whatever its status is.
    #[track_caller]
    pub fn call(&self, method: &str, path: &str, body: (&str, &str)) -> Answer {
        self.try_call(method, path, body).unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    /// Sends a request with a JSON body, fails the test if the status is not 2xx, and returns the JSON of the response.
    #[track_caller]
    fn succeed(&self, method: &str, path: &str, body: (&str, &str)) -> Value {
        let answer = self.call(method, path, body);
        assert!((200..300).contains(&answer.status), "{method} {path} {}: {answer:?}", body.1);
        answer.json()
    }

    /// Returns the answer to a `GET`, whatever its status is.
    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.call("GET", path, (JSON, ""))
    }

    /// Returns an object or a list.
    #[track_caller]
    pub fn read(&self, path: &str) -> Value {
        self.succeed("GET", path, (JSON, ""))
    }

    /// Creates an object; fails if it exists.
    #[track_caller]
    pub fn create(&self, object: &Value) -> Value {
        let path = path_of(object);
        let (list, _) = path.rsplit_once('/').expect("a path");
        self.succeed("POST", list, (JSON, &object.to_string()))
    }

    /// Has the server judge a new object as strictly as it can, without creating it. The error is what the server says.
    pub fn judge(&self, object: &Value) -> Result<(), String> {
        let path = path_of(object);
        let (list, _) = path.rsplit_once('/').expect("a path");
        let path = format!("{list}?dryRun=All&fieldValidation=Strict");
        let answer = self.call("POST", &path, (JSON, &object.to_string()));
        if (200..300).contains(&answer.status) { Ok(()) } else { Err(answer.body) }
    }

    /// Sends an object to a path that does not follow from the object's kind: another list, or a subresource.
    #[track_caller]
    pub fn post(&self, path: &str, object: &Value) -> Value {
        self.succeed("POST", path, (JSON, &object.to_string()))
    }

    /// Sends an object in YAML to a list.
    #[track_caller]
    pub fn post_yaml(&self, path: &str, object: &str) -> Value {
        self.succeed("POST", path, (YAML, object))
    }

    /// Creates an object or updates the existing one (server-side apply). Fields that an earlier `apply` has set, and that
    /// `object` lacks, are removed.
    #[track_caller]
    pub fn apply(&self, object: &Value) -> Value {
        let path = format!("{}?fieldManager=tests&force=true", path_of(object));
        self.succeed("PATCH", &path, (APPLY_PATCH, &object.to_string()))
    }

    /// Changes fields of an object (a merge patch: null removes a field, a list is replaced whole).
    #[track_caller]
    pub fn patch(&self, path: &str, change: &Value) -> Value {
        self.succeed("PATCH", path, (MERGE_PATCH, &change.to_string()))
    }

    /// Changes fields of an object's status.
    #[track_caller]
    pub fn patch_status(&self, path: &str, status: &Value) -> Value {
        self.patch(&format!("{path}/status"), &json!({"status": status}))
    }

    /// Deletes an object at once, if it exists.
    #[track_caller]
    pub fn delete(&self, path: &str) {
        let path = format!("{path}?gracePeriodSeconds=0");
        let answer = self.call("DELETE", &path, (JSON, ""));
        assert!(matches!(answer.status, 200 | 202 | 404), "{path}: {answer:?}");
    }

    /// Opens a stream of watch events, by a path with its query: `…/pods?watch=1&resourceVersion=7`.
    #[track_caller]
    pub fn watch(&self, path: &str) -> Watch {
        let mut connection = self.connect().expect("a connection");
        let request = self.request("GET", path, (JSON, ""));
        connection.get_mut().write_all(request.as_bytes()).expect("sent");
        let head = read_head(&mut connection).expect("a head");
        assert_eq!(head.status, 200, "{path}: {:?}", read_body(&mut connection, &head));
        Watch { connection, read: Vec::new() }
    }
}

/// A stream of watch events.
pub struct Watch {
    connection: Connection,
    read: Vec<u8>,
}

impl Watch {
    /// Waits for the next event; `None` if the server ended the stream.
    #[track_caller]
    pub fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).expect("an event"));
            }
            let chunk = read_chunk(&mut self.connection).expect("an event in time");
            if chunk.is_empty() {
                return None;
            }
            self.read.extend(chunk);
        }
    }

    /// Waits for an event that matches, and returns it; fails the test if the stream ends, or after [`PATIENCE`].
    #[track_caller]
    pub fn until(&mut self, what: &str, so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        while let Some(event) = self.next() {
            if so(&event) {
                return event;
            }
            assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain: {what}");
        }
        panic!("the server ended the stream before {what}");
    }
}

/// The status of a response and the framing of its body.
struct Head {
    status: u16,
    /// The body's length in bytes; `None` if the body is chunked.
    length: Option<usize>,
}

fn exchange(connection: &mut Connection, request: &str) -> io::Result<Answer> {
    connection.get_mut().write_all(request.as_bytes())?;
    let head = read_head(connection)?;
    let body = read_body(connection, &head)?;
    Ok(Answer { status: head.status, body })
}

fn read_line(connection: &mut Connection) -> io::Result<String> {
    let mut line = String::new();
    if connection.read_line(&mut line)? == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}

fn read_head(connection: &mut Connection) -> io::Result<Head> {
    let first = read_line(connection)?;
    let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("not an answer: {first:?}")))?;
    let mut length = None;
    loop {
        let line = read_line(connection)?.to_lowercase();
        if line.is_empty() {
            return Ok(Head { status, length });
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok();
        }
    }
}

fn read_body(connection: &mut Connection, head: &Head) -> io::Result<String> {
    let mut body = Vec::new();
    if let Some(length) = head.length {
        body.resize(length, 0);
        connection.read_exact(&mut body)?;
    } else {
        loop {
            let chunk = read_chunk(connection)?;
            if chunk.is_empty() {
                break;
            }
            body.extend(chunk);
        }
    }
    String::from_utf8(body).map_err(io::Error::other)
}

/// Reads a chunk of a body; an empty chunk is the end of the body.
fn read_chunk(connection: &mut Connection) -> io::Result<Vec<u8>> {
    let length = usize::from_str_radix(&read_line(connection)?, 16).map_err(io::Error::other)?;
    let mut chunk = vec![0; length + 2];
    connection.read_exact(&mut chunk)?;
    chunk.truncate(length);
    Ok(chunk)
}

/// Waits until an object matches, and returns it.
#[track_caller]
pub fn becomes(client: &Client, path: &str, so: impl Fn(&Value) -> bool) -> Value {
    eventually(path, || {
        Some(client.get(path)).filter(|answer| answer.status == 200).map(|a| a.json()).filter(&so)
    })
}

/// Waits until a condition holds; returns the time that this took.
#[track_caller]
pub fn takes(what: &str, mut so: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    eventually(what, || so().then_some(()));
    began.elapsed()
}
