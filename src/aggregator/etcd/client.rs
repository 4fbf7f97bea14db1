//! A client of etcd's API v3: one connection to one member, its calls, and the change to another member after
//! a fault.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use http::Uri;
use rustls::pki_types::InvalidDnsNameError;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request};

use crate::spec::etcd::{EtcdSpec, Login};
use isthmus_files::file;
use isthmus_files::reading::{ReadError, Readings};
use isthmus_model::address::{Scheme, Url};
use isthmus_net::channel::{CallFault, Channel, Limits, TwoWay};
use isthmus_net::dial::dial;
use isthmus_proto::etcdserverpb::watch_request::RequestUnion;
use isthmus_proto::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse,
    WatchCreateRequest, WatchRequest, WatchResponse,
};
use isthmus_tasks::scope::Scope;
use isthmus_tls::client::{secure, server_name};
use isthmus_tls::files::READ_WITHIN;
use isthmus_wire::outline::Outlined;

/// The time limit of connecting to a member, from the look-up of its name to the login.
const CONNECT: Duration = Duration::from_secs(5);
/// The time limit of a response. A member waits 7 s for the other members before it reports that it cannot answer.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a connection is silent before a PING is sent. etcd closes connections that send PINGs more often than every 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The largest response in bytes. The values of a listing are requested in smaller pages; a larger single
/// value is refused.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// The largest number of items of a response: keys with their values.
const ITEMS_MAX: usize = 1 << 18;
/// The largest number of reads of certificates and passwords that may hang at the same time.
const READINGS: usize = 3;
/// The largest password file in bytes.
const PASSWORD_BYTES_MAX: u64 = 4096;

const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

/// The reason why a request to etcd failed.
#[derive(Debug, thiserror::Error)]
pub enum EtcdFault {
    /// A file of the config cannot be used.
    #[error("{0}")]
    File(String),
    /// The URL's host cannot be a TLS server name.
    #[error("the host in the address is not a legal name, so the certificate of etcd cannot be verified")]
    Address(#[from] InvalidDnsNameError),
    /// Connecting failed.
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
    /// The name of a plain-text URL resolves to an address that is not loopback.
    #[error("the host name resolves to {0}, but plain TCP is allowed only to loopback addresses")]
    NotLoopback(IpAddr),
    /// The TLS handshake failed.
    #[error("the TLS handshake failed: {0}")]
    Tls(String),
    /// The member did not answer within this time.
    #[error("there was no answer within {} s", .0.as_secs())]
    Late(Duration),
    /// The login of this user failed with this text.
    #[error("etcd refused to log in the user {0:?}: {1}")]
    Login(String, String),
    /// The call failed.
    #[error("{0}")]
    Call(CallFault),
    /// The requested revision is not kept any more.
    #[error("etcd has compacted the requested revision")]
    Compacted,
    /// The response is larger than `MESSAGE_BYTES_MAX`.
    #[error("an answer is larger than {} MiB", MESSAGE_BYTES_MAX >> 20)]
    TooLarge,
    /// The values of the registry have more than this number of bytes together.
    #[error("the values exceed {} MiB together", .0 >> 20)]
    Exceeded(usize),
    /// The response violates the API.
    #[error("the answer is invalid: {0}")]
    Answer(&'static str),
    /// The member ended the watch with this reason.
    #[error("etcd ended the watch: {0}")]
    WatchEnded(String),
}

impl From<CallFault> for EtcdFault {
    fn from(fault: CallFault) -> Self {
        match &fault {
            // Messages from etcd begin with `etcdserver:`; another message is from the codec of this program.
            CallFault::Refused { code: Code::OutOfRange, message } if message.starts_with("etcdserver:") => {
                Self::Compacted
            }
            CallFault::Refused { code: Code::OutOfRange, .. } => Self::TooLarge,
            CallFault::Refused { .. } | CallFault::Broken(_) | CallFault::Answer(_) => Self::Call(fault),
        }
    }
}

impl EtcdFault {
    /// Returns true if the member could not be reached or did not answer, so that the effect of the request
    /// is unknown.
    pub fn is_silence(&self) -> bool {
        matches!(
            self,
            Self::Unreachable(_)
                | Self::Late(_)
                | Self::Tls(_)
                | Self::Call(CallFault::Broken(_) | CallFault::Refused { code: Code::Unavailable, .. })
        )
    }
}

/// Connects to the members of a cluster, one at a time.
pub struct Connector {
    spec: EtcdSpec,
    scope: Scope,
    readings: Readings,
    /// The index of the member to try first.
    next: usize,
}

/// A fault of one member.
#[derive(Debug, thiserror::Error)]
#[error("etcd at {member}: {fault}")]
pub struct MemberFault {
    /// The URL of the member.
    pub member: Url,
    /// The error of the member.
    pub fault: EtcdFault,
}

impl Connector {
    /// Makes a connector; tasks of its connections run in `scope`.
    pub fn new(spec: EtcdSpec, scope: Scope) -> Self {
        Self { spec, scope, readings: Readings::new(READINGS), next: 0 }
    }

    /// Connects to the first member that accepts, or returns the fault of each member.
    pub async fn connect(&mut self) -> Result<EtcdClient, Vec<MemberFault>> {
        let mut faults = Vec::new();
        for _ in 0..self.spec.endpoints.len() {
            let member = self.spec.endpoints[self.next].clone();
            // The next attempt begins with another member, whatever the result of this one.
            self.next = (self.next + 1) % self.spec.endpoints.len();
            match timeout(CONNECT, self.open(&member)).await.unwrap_or(Err(EtcdFault::Late(CONNECT))) {
                Ok(client) => return Ok(client),
                Err(fault) => faults.push(MemberFault { member, fault }),
            }
        }
        Err(faults)
    }

    async fn open(&self, member: &Url) -> Result<EtcdClient, EtcdFault> {
        let origin: Uri = member.to_string().parse().unwrap_or_default();
        let limits = Limits {
            message_bytes_max: MESSAGE_BYTES_MAX,
            items_max: ITEMS_MAX,
            ping_interval: Some(PING_INTERVAL),
        };
        let channel = match member.scheme {
            Scheme::Http => {
                let stream = dial(&member.host, member.port, &[]).await.map_err(EtcdFault::Unreachable)?;
                // The name may resolve to another address than when the config was checked.
                let peer = stream.peer_addr().map_err(EtcdFault::Unreachable)?.ip();
                if !peer.to_canonical().is_loopback() {
                    return Err(EtcdFault::NotLoopback(peer));
                }
                Channel::open_with(stream, origin, &self.scope, limits).await
            }
            Scheme::Https => {
                let files = self.spec.tls.clone();
                let files = files.ok_or_else(|| {
                    EtcdFault::File(
                        "there are no root certificates that verify the certificate of etcd".into(),
                    )
                })?;
                let config = self.read(move || files.config(&[b"h2"])).await?;
                let stream = dial(&member.host, member.port, &[]).await.map_err(EtcdFault::Unreachable)?;
                let stream =
                    secure(stream, server_name(&member.host)?, config).await.map_err(EtcdFault::Tls)?;
                Channel::open_with(stream, origin, &self.scope, limits).await
            }
        };
        let channel = channel.map_err(EtcdFault::from)?;
        let mut client = EtcdClient { member: member.clone(), channel, token: None };
        if let Some(login) = &self.spec.login {
            let password = self.password(login).await?;
            client.log_in(&login.user, password).await?;
        }
        Ok(client)
    }

    async fn password(&self, login: &Login) -> Result<String, EtcdFault> {
        let path = login.password.clone();
        self.read(move || {
            let named = |fault: &dyn std::fmt::Display| format!("{}: {fault}", path.display());
            let bytes = file::read(&path, PASSWORD_BYTES_MAX).map_err(|fault| named(&fault))?;
            let text = String::from_utf8(bytes).map_err(|_| named(&"the file is not UTF-8"))?;
            let password = text.strip_suffix('\n').unwrap_or(&text);
            Ok(password.strip_suffix('\r').unwrap_or(password).to_owned())
        })
        .await
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, EtcdFault> {
        let unread = |unread: ReadError| Err(format!("the files for etcd cannot be read: {unread}"));
        self.readings.read(READ_WITHIN, work).await.unwrap_or_else(unread).map_err(EtcdFault::File)
    }
}

/// A connection to one member.
pub struct EtcdClient {
    member: Url,
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

/// A stream of the changes of a range of keys from a revision on.
pub struct Watch {
    call: TwoWay<WatchRequest, WatchResponse>,
}

impl EtcdClient {
    /// Returns the URL of the member that this client is connected to.
    pub fn member(&self) -> &Url {
        &self.member
    }

    /// Reads keys.
    pub async fn range(&mut self, request: RangeRequest) -> Result<RangeResponse, EtcdFault> {
        self.call(RANGE, request).await
    }

    /// Writes keys, all or none.
    pub async fn transaction(&mut self, request: TxnRequest) -> Result<TxnResponse, EtcdFault> {
        self.call(TXN, request).await
    }

    /// Watches the keys from `begin` to just before `end`, from `revision` on. Returns the watch, and etcd's first response,
    /// which identifies the cluster and has its newest revision.
    pub async fn watch(
        &mut self,
        (begin, end): (Vec<u8>, Vec<u8>),
        revision: i64,
    ) -> Result<(Watch, WatchResponse), EtcdFault> {
        let create = WatchCreateRequest {
            key: begin,
            range_end: end,
            start_revision: revision,
            progress_notify: true,
            fragment: true,
        };
        let request = self.request(WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) });
        let open = async {
            let mut watch = Watch { call: self.channel.two_way(WATCH, request, Vec::new()).await? };
            let first = watch.next().await?;
            match first.created {
                true => Ok((watch, first)),
                false => Err(EtcdFault::Answer(
                    "the first answer of a watch does not say that the watch was created",
                )),
            }
        };
        timeout(ANSWER, open).await.unwrap_or(Err(EtcdFault::Late(ANSWER)))
    }

    /// Requests a token for later calls. An etcd cluster without authentication needs no token.
    async fn log_in(&mut self, user: &str, password: String) -> Result<(), EtcdFault> {
        let request = AuthenticateRequest { name: user.to_owned(), password };
        let answer: Result<AuthenticateResponse, EtcdFault> = self.call(AUTHENTICATE, request).await;
        let token = match answer {
            Ok(answer) => answer.token,
            Err(EtcdFault::Call(CallFault::Refused { code: Code::FailedPrecondition, message })) => {
                tracing::debug!(member = %self.member, message, "etcd has authentication turned off; the user and \
                                                                 password are not used");
                return Ok(());
            }
            Err(EtcdFault::Call(CallFault::Refused {
                code: Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated,
                message,
            })) => return Err(EtcdFault::Login(user.to_owned(), message)),
            Err(fault) => return Err(fault),
        };
        let mut token: MetadataValue<Ascii> = token.parse().map_err(|_| {
            EtcdFault::Answer("the token from etcd has characters that an HTTP header cannot have")
        })?;
        token.set_sensitive(true);
        self.token = Some(token);
        Ok(())
    }

    async fn call<Q, A>(&mut self, method: &'static str, message: Q) -> Result<A, EtcdFault>
    where
        Q: prost::Message + 'static,
        A: Outlined + 'static,
    {
        let request = self.request(message);
        let answer = timeout(ANSWER, self.channel.unary(method, request)).await;
        Ok(answer.map_err(|_| EtcdFault::Late(ANSWER))??)
    }

    fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        // A member that has lost its leader does not learn of changes. With this header, such a member refuses calls and ends
        // watches at once.
        metadata.insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            metadata.insert("token", token.clone());
        }
        request
    }
}

impl Watch {
    /// Waits for the next response. A response that ends the watch is a fault. Cancel safe.
    pub async fn next(&mut self) -> Result<WatchResponse, EtcdFault> {
        let answer =
            self.call.answers.message().await.map_err(|status| EtcdFault::from(CallFault::from(status)))?;
        let answer = answer.ok_or_else(|| EtcdFault::WatchEnded("the stream of the watch ended".into()))?;
        if answer.compact_revision > 0 {
            return Err(EtcdFault::Compacted);
        }
        if answer.canceled {
            return Err(EtcdFault::WatchEnded(answer.cancel_reason));
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::address::Host;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn a_member_that_does_not_answer_is_late_after_ten_seconds() {
        let (ours, _theirs) = tokio::io::duplex(64 << 10);
        let origin = Uri::from_static("http://localhost");
        let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
        let channel = Channel::open_with(ours, origin, &Scope::default(), limits).await.expect("room");
        let host = Host::parse("localhost").expect("legal");
        let member = Url { scheme: Scheme::Http, host, port: 2379 };
        let mut client = EtcdClient { member, channel, token: None };
        let begun = Instant::now();
        let answer = client.range(RangeRequest::default()).await.map(drop);
        assert!(matches!(answer, Err(EtcdFault::Late(_))), "{answer:?}");
        assert_eq!(begun.elapsed(), Duration::from_secs(10));
        let begun = Instant::now();
        let answer = client.watch((b"a".to_vec(), b"b".to_vec()), 1).await.map(drop);
        assert!(matches!(answer, Err(EtcdFault::Late(_))), "{answer:?}");
        assert_eq!(begun.elapsed(), Duration::from_secs(10));
    }
}
