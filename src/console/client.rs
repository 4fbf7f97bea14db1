//! An HTTP client of a running gateway's admin API.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use isthmus_api::requests::Request;

/// The time within which a response must be complete.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time within which the response to a question must begin: a gateway that hangs accepts connections, and says nothing.
const BEGINS_WITHIN: Duration = Duration::from_secs(3);

/// The unix socket of the shipped systemd unit, which is the default address if it exists.
pub const SOCKET: &str = "/run/isthmus/admin.sock";
/// The URL that is used if the user gives none and [`SOCKET`] does not exist: the default of `admin.bind`.
const URL: &str = "http://127.0.0.1:15000";

/// Returns the default address of the API.
pub fn default_address(socket: &Path) -> String {
    let is_socket = std::fs::metadata(socket).is_ok_and(|found| found.file_type().is_socket());
    if is_socket { format!("unix:{}", socket.display()) } else { URL.to_owned() }
}

/// The reason why there is no response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The API cannot be reached.
    #[error(
        "cannot reach the admin API at {url}: {cause}; check that isthmus runs and that `--admin` (or \
         ISTHMUS_ADMIN) is the value of its `admin.bind`"
    )]
    Unreachable {
        /// The URL of the API.
        url: String,
        /// The cause.
        cause: String,
    },
    /// The user may not open the API's socket.
    #[error(
        "cannot reach the admin API at {url}: {cause}; only root and the user that the gateway runs as may open this socket"
    )]
    Forbidden {
        /// The URL of the API.
        url: String,
        /// The cause.
        cause: String,
    },
    /// The given address is not one of an admin API. The text does not quote it, because it may contain a password.
    #[error("cannot use the address in `--admin` or ISTHMUS_ADMIN: {0}")]
    Address(&'static str),
    /// The API answered with an error status; the text is the body.
    #[error("{0}")]
    Refused(String),
}

/// A response of the API.
pub struct ApiResponse {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

impl ApiResponse {
    /// Parses the body as JSON; an error status becomes an error.
    pub fn json(self) -> Result<Value, ClientError> {
        let value: Value = serde_json::from_str(&self.body)
            .map_err(|error| ClientError::Refused(format!("the answer is not JSON: {error}")))?;
        match value.get("error").and_then(Value::as_str) {
            Some(text) if self.status >= 400 => Err(ClientError::Refused(text.to_owned())),
            _ => Ok(value),
        }
    }
}

/// Deserialises a value of the API.
pub fn typed<T: DeserializeOwned>(value: Value) -> Result<T, ClientError> {
    serde_json::from_value(value).map_err(mismatch)
}

/// Returns the failure for an answer of another type than the one that was expected.
pub fn mismatch(error: serde_json::Error) -> ClientError {
    ClientError::Refused(format!("the answer does not match the admin API of this version: {error}"))
}

/// Requests a value by `GET`.
pub fn read<T: DeserializeOwned>(admin: &str, request: &Request<T>) -> Result<T, ClientError> {
    typed(get(admin, request.path)?.json()?)
}

/// Sends a `GET` for a path below an admin URL (`http://host:port`, `host:port`, or `unix:/path`).
pub fn get(admin: &str, path: &str) -> Result<ApiResponse, ClientError> {
    request(admin, "GET", path, Sent::NOTHING)
}

/// Sends a `POST` with a text body, and waits for the response for at most this time.
pub fn post_text(
    admin: &str,
    path: &str,
    text: &str,
    patience: Duration,
) -> Result<ApiResponse, ClientError> {
    request(admin, "POST", path, Sent { text, patience })
}

/// Sends a `POST` without a body.
pub fn post(admin: &str, path: &str) -> Result<ApiResponse, ClientError> {
    request(admin, "POST", path, Sent::NOTHING)
}

/// The body of a request, and the time within which the response must arrive.
#[derive(Clone, Copy)]
struct Sent<'a> {
    text: &'a str,
    patience: Duration,
}

impl Sent<'_> {
    const NOTHING: Self = Self { text: "", patience: PATIENCE };
}

fn request(admin: &str, method: &str, path: &str, sent: Sent<'_>) -> Result<ApiResponse, ClientError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| ClientError::Unreachable { url: admin.to_owned(), cause: error.to_string() })?;
    runtime.block_on(send(admin, method, path, sent))
}

/// Sends a request without a body within the caller's runtime.
pub async fn ask(admin: &str, method: &str, path: &str) -> Result<ApiResponse, ClientError> {
    send(admin, method, path, Sent::NOTHING).await
}

async fn send(admin: &str, method: &str, path: &str, sent: Sent<'_>) -> Result<ApiResponse, ClientError> {
    let server = Server::parse(admin)?;
    // An order, or a probe of endpoints, which is a POST too, ends before the response begins.
    let begins_within = if method == "GET" { BEGINS_WITHIN } else { sent.patience };
    let unreachable = |cause: String| ClientError::Unreachable { url: admin.to_owned(), cause };
    match tokio::time::timeout(sent.patience, exchange(server, begins_within, method, path, sent.text)).await
    {
        Ok(answer) => answer.map_err(|error| match is_forbidden(admin, &error) {
            true => ClientError::Forbidden { url: admin.to_owned(), cause: error.to_string() },
            false => unreachable(error.to_string()),
        }),
        Err(_) => Err(unreachable(format!("no answer within {} s", sent.patience.as_secs()))),
    }
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Returns true if the error says that this user may not open the socket at `admin`.
fn is_forbidden(admin: &str, error: &Failed) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    admin.starts_with("unix:")
        && error.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// The place where an admin API listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server<'a> {
    /// The path of a unix socket.
    Socket(&'a str),
    /// A host with its port.
    Host(&'a str),
}

impl<'a> Server<'a> {
    /// Parses `unix:/path`, `unix:///path`, `http://host:port` or `host:port`.
    fn parse(admin: &'a str) -> Result<Self, ClientError> {
        if let Some(socket) = admin.strip_prefix("unix:") {
            return Ok(Self::Socket(socket.strip_prefix("//").unwrap_or(socket)));
        }
        let host = admin.strip_prefix("http://").unwrap_or(admin).trim_end_matches('/');
        if admin.starts_with("https://") {
            Err(ClientError::Address("the admin API has no TLS; write http://HOST:PORT or unix:/PATH"))
        } else if host.contains('@') {
            Err(ClientError::Address(
                "the admin API has no users; write http://HOST:PORT without user and password",
            ))
        } else if host.contains(['/', '?', '#']) {
            Err(ClientError::Address("the address has a path; write http://HOST:PORT or unix:/PATH"))
        } else {
            Ok(Self::Host(host))
        }
    }
}

async fn exchange(
    server: Server<'_>,
    begins_within: Duration,
    method: &str,
    path: &str,
    text: &str,
) -> Result<ApiResponse, Failed> {
    let host = match server {
        Server::Socket(_) => "localhost",
        Server::Host(host) => host,
    };
    let request = hyper::Request::builder()
        .method(method)
        .uri(path)
        .header("host", host)
        .body(Full::new(Bytes::copy_from_slice(text.as_bytes())))?;
    match server {
        Server::Socket(socket) => {
            exchange_over(UnixStream::connect(socket).await?, request, begins_within).await
        }
        Server::Host(host) => exchange_over(TcpStream::connect(host).await?, request, begins_within).await,
    }
}

async fn exchange_over(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: hyper::Request<Full<Bytes>>,
    begins_within: Duration,
) -> Result<ApiResponse, Failed> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let answered = async {
        let begun = tokio::time::timeout(begins_within, sender.send_request(request)).await;
        let response = begun.map_err(|_| format!("no answer within {} s", begins_within.as_secs()))??;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await?.to_bytes();
        Ok::<_, Failed>(ApiResponse { status, body: String::from_utf8_lossy(&body).into_owned() })
    };
    // This function drives the connection too. When either future ends, the response is complete or lost.
    tokio::pin!(answered, connection);
    tokio::select! {
        biased;
        answer = &mut answered => answer,
        ended = &mut connection => {
            ended?;
            answered.await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_exists_comes_before_the_default_url() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("admin.sock");
        assert_eq!(default_address(&socket), URL);
        std::fs::write(&socket, "").expect("written");
        assert_eq!(default_address(&socket), URL, "it is no socket");
        std::fs::remove_file(&socket).expect("removed");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
        assert_eq!(default_address(&socket), format!("unix:{}", socket.display()));
    }

    #[test]
    fn a_socket_that_the_user_may_not_open_is_told_from_one_that_nobody_serves() {
        let of = |kind: std::io::ErrorKind| Failed::from(std::io::Error::from(kind));
        assert!(is_forbidden("unix:/run/isthmus/admin.sock", &of(std::io::ErrorKind::PermissionDenied)));
        assert!(!is_forbidden("unix:/run/isthmus/admin.sock", &of(std::io::ErrorKind::ConnectionRefused)));
        assert!(!is_forbidden("http://127.0.0.1:1", &of(std::io::ErrorKind::PermissionDenied)));
    }

    #[test]
    fn an_address_that_no_admin_api_has_is_refused_without_its_password() {
        assert!(matches!(Server::parse("http://[::1]:15000/"), Ok(Server::Host("[::1]:15000"))));
        assert!(matches!(Server::parse("localhost:1"), Ok(Server::Host("localhost:1"))));
        assert!(matches!(Server::parse("unix:///run/a.sock"), Ok(Server::Socket("/run/a.sock"))));
        for (admin, wanted) in [
            ("https://127.0.0.1:15000", "has no TLS"),
            ("http://localhost:15000/foo", "has a path"),
            ("http://user:secret@localhost:15000", "has no users"),
        ] {
            let text = get(admin, "/").err().map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains(wanted) && !text.contains("secret"), "{text}");
        }
    }
}
