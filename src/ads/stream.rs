//! The streams of a server: requests are read and responses are written one after another. The sockets are those of
//! [`super::connection`], the protocol is that of [`super::session`].

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use tonic::Status;

use super::budget::NAMES_BYTES_MAX;
use super::connection;
use super::incoming::Caller;
use super::kind::ResourceKind;
use super::message::Message;
use super::node::NodeInfo;
use super::protocol::{
    Acknowledgement, DiscoveryRequest, NAME_BYTES_MAX, Parts, Protocol, Request, Response,
};
use super::requests::{Requests, Whole, is_refused};
use super::server::Server;
use super::session::{NAMES_MAX, Refusal, Resources, Session};
use super::status::ClientEntry;
use super::unserved::{self, Unserved};
use isthmus_net::door::Seat;
use isthmus_proto::envoy::config::core::v3::Node;

/// The largest later request of a type in bytes, in addition to the names that the client subscribes to.
const LATER_BYTES_MAX: usize = 1 << 20;
/// The largest number of concurrent streams.
const STREAMS_MAX: usize = 20_000;

/// The client of a stream, as its server sees it.
pub trait Client: Send + 'static {
    /// The resources that clients get.
    type Resources: Resources;

    /// The largest request in bytes.
    const REQUEST_BYTES_MAX: usize;
    /// A client, as log lines name it.
    const NAME: &'static str;
    /// True if requests for types that are not served get answers where possible; false if each ends the stream.
    const ANSWERS_UNSERVED: bool;

    /// Returns the state of the server.
    fn server(&self) -> &Server;

    /// Returns the caller.
    fn caller(&self) -> &Caller;

    /// Checks the claims in the client's node. Returns the parts of the node that operators see, and the resources for the client;
    /// an error ends the stream.
    fn begin(&mut self, node: &Node, protocol: Protocol) -> Result<(NodeInfo, Self::Resources), Status>;

    /// Waits until the server ends the stream. Returns the status of the end.
    fn ended(&mut self) -> impl Future<Output = Status> + Send;
}

/// One client's stream.
pub struct ClientStream<C: Client, R> {
    client: C,
    requests: Requests<R>,
    seat: Arc<Seat>,
    /// The only type of the stream; `None`: all types.
    only: Option<KindOf<C>>,
    entry: ClientEntry,
    /// The session; `None` before the first request.
    session: Option<Session<C::Resources>>,
    /// The requests for types that are not served, which no session handles; `None` if there were none.
    unserved: Option<Box<Unserved>>,
    /// The last reported number of names that are held back from the client.
    held_back: usize,
    /// The types in which the client has refused a response: a bit for each.
    refused: u8,
    /// True if the client has closed its sending direction of the stream.
    is_half_closed: bool,
}

/// The resource types of a server.
type KindOf<C> = <<C as Client>::Resources as Resources>::Kind;

impl<C: Client, R> Drop for ClientStream<C, R> {
    fn drop(&mut self) {
        self.client.server().metrics.gone();
    }
}

impl<C: Client, R: DiscoveryRequest> ClientStream<C, R> {
    /// Makes the stream of a client; an error refuses it. The stream is boxed because futures would otherwise contain it twice.
    pub fn open(
        client: C,
        seat: Arc<Seat>,
        only: Option<KindOf<C>>,
        body: RecvStream,
    ) -> Result<Box<Self>, Status> {
        let (server, caller) = (client.server(), client.caller());
        let Some(entry) = server.clients.register(caller, R::PROTOCOL, STREAMS_MAX) else {
            return Err(Status::resource_exhausted("too many clients"));
        };
        // Twice the request limit, so that a large request is refused for its size and not by the account.
        let account = server.unfinished.account(caller.peer.ip(), 2 * C::REQUEST_BYTES_MAX);
        server.metrics.come();
        Ok(Box::new(Self {
            client,
            requests: Requests::new(body, account),
            seat,
            only,
            entry,
            session: None,
            unserved: None,
            held_back: 0,
            refused: 0,
            is_half_closed: false,
        }))
    }

    /// Sends responses one after another, each when the previous one was sent. On an error, ends the stream with the status of
    /// the error. Requests are read only while the next response is made. Therefore nothing is read from a client that does not
    /// read responses.
    pub async fn serve(mut self: Box<Self>, mut respond: SendResponse<Bytes>) {
        let Some(mut send) = connection::begin(&mut respond) else { return };
        loop {
            let mut message = match self.next().await {
                Ok(response) => Message::new(response),
                Err(status) => {
                    tracing::debug!(peer = %self.client.caller().peer, %status, "the stream of {} ended", C::NAME);
                    return connection::end(&mut send, &status);
                }
            };
            while let Some(piece) = message.next_piece() {
                if !connection::write(&mut send, piece).await {
                    return;
                }
            }
        }
    }

    /// Returns the next response; an error ends the stream.
    async fn next(&mut self) -> Result<Response, Status> {
        loop {
            if let Some(response) = self.next_response().await? {
                return Ok(response);
            }
            // A client that sends no further requests gets the responses to earlier requests, then the status OK.
            if self.is_half_closed && !self.session.as_ref().is_some_and(Session::waits) {
                return Err(Status::ok(""));
            }
            tokio::select! {
                // The end comes first, then requests: the client may unsubscribe from resources that changed.
                biased;
                status = self.client.ended() => return Err(status),
                request = self.requests.next(C::REQUEST_BYTES_MAX), if !self.is_half_closed => match request {
                    Ok(Some(request)) => self.handle(request)?,
                    Ok(None) => self.is_half_closed = true,
                    Err(status) => return Err(self.note_refusal(status)),
                },
                changed = changed(self.session.as_mut()) => changed?,
            }
        }
    }

    /// Records a client whose request has too many items.
    fn note_refusal(&self, status: Status) -> Status {
        if is_refused(&status) {
            let caller = self.client.caller();
            self.client.server().refuse(caller.peer, caller.name(), status.message().to_owned());
        }
        status
    }

    fn handle(&mut self, request: Whole<R>) -> Result<(), Status> {
        let Whole { request, bytes, turn: _turn } = request;
        let Parts { node, type_url, request } = request.take_apart();
        let kind = match self.only {
            Some(only) => Some(only).filter(|only| type_url.is_empty() || type_url == only.type_url()),
            None => ResourceKind::of_type_url(&type_url),
        };
        if kind.is_none() && !C::ANSWERS_UNSERVED {
            self.client.server().metrics.unserved();
            return Err(unserved::refusal::<KindOf<C>>(&type_url));
        }
        if self.session.is_none() {
            let (node_info, resources) = self.client.begin(&node.unwrap_or_default(), R::PROTOCOL)?;
            self.entry.set_node(node_info);
            self.seat.asked();
            let (names, source) = (&self.client.server().names, self.client.caller().peer.ip());
            let account = names.account(source, NAMES_BYTES_MAX.0);
            self.session = Some(Session::new(resources, R::PROTOCOL, account));
        }
        let Some(session) = &mut self.session else { return Ok(()) };
        let Some(kind) = kind else { return self.handle_unserved(type_url, &request, bytes) };
        if bytes > LATER_BYTES_MAX && session.has_asked(kind) {
            let bytes_max = LATER_BYTES_MAX + session.resources().names_bytes(kind);
            if bytes > bytes_max {
                let text = format!(
                    "a request of {bytes} bytes exceeds the limit of {bytes_max} for requests after the first"
                );
                return Err(Status::resource_exhausted(text));
            }
        }
        let answer = session.request(kind, request)?;
        let metrics = &self.client.server().metrics;
        match &answer {
            Acknowledgement::None => {}
            Acknowledgement::Ack(since) => {
                if let Some(since) = since {
                    metrics.converged(Instant::now() - *since);
                }
            }
            Acknowledgement::Nack(text) => {
                metrics.rejected(kind.text());
                // The log gets one line per type, because a client that refuses everything would fill it.
                let bit = 1 << kind.index();
                if self.refused & bit == 0 {
                    let peer = self.client.caller().peer;
                    tracing::warn!(%peer, kind = kind.text(), text, "{} refused a response", C::NAME);
                }
                self.refused |= bit;
            }
        }
        self.entry.note(kind.text(), session.overview(kind), &answer);
        Ok(())
    }

    /// Handles a request for a type that is not served, or is not the one of the stream.
    fn handle_unserved(&mut self, type_url: String, request: &Request, bytes: usize) -> Result<(), Status> {
        if let Some(only) = self.only {
            return Err(Status::invalid_argument(format!(
                "the request is for another type than {}, which this stream serves; send it on a stream of its own type or \
                 on an aggregated stream (ADS)",
                only.type_url()
            )));
        }
        if type_url.len() > NAME_BYTES_MAX || request.names.iter().any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(Refusal::TooLongName.into());
        }
        if bytes > LATER_BYTES_MAX || request.names.len() > NAMES_MAX {
            return Err(Status::resource_exhausted(format!(
                "a request of {bytes} bytes for a type that is not served"
            )));
        }
        let Some(session) = &mut self.session else { return Ok(()) };
        let serves = KindOf::<C>::ALL.iter().any(|&kind| session.has_asked(kind));
        let unserved = self.unserved.get_or_insert_default();
        let is_first = unserved.is_empty();
        let answer = unserved.request::<KindOf<C>>(&type_url, request, serves);
        if !matches!(answer, Ok(None)) {
            self.client.server().metrics.unserved();
            // One line per stream, because a client may ask often.
            if is_first {
                let peer = self.client.caller().peer;
                tracing::warn!(%peer, type_url, "{} asks for a type that is not served", C::NAME);
            }
        }
        if let Some(names) = answer? {
            unserved.response = Some(unserved::response(R::PROTOCOL, type_url, session.next_nonce(), names));
        }
        Ok(())
    }

    /// Returns the next response if there is one; an error ends the stream.
    async fn next_response(&mut self) -> Result<Option<Response>, Status> {
        let Some(session) = &mut self.session else { return Ok(None) };
        if let Some(response) = self.unserved.as_mut().and_then(|unserved| unserved.response.take()) {
            return Ok(Some(response));
        }
        loop {
            if let Some(response) = session.response() {
                if let Some(kind) = <KindOf<C>>::of_type_url(&response.type_url) {
                    self.client.server().metrics.pushed(kind.text());
                    self.entry.note(kind.text(), session.overview(kind), &Acknowledgement::None);
                }
                return Ok(Some(response));
            }
            if !session.is_unfinished() {
                let held_back = session.held_back();
                if std::mem::replace(&mut self.held_back, held_back) != held_back {
                    for &kind in KindOf::<C>::ALL {
                        self.entry.note(kind.text(), session.overview(kind), &Acknowledgement::None);
                    }
                }
                return session.resources().fault().map_or(Ok(None), Err);
            }
            // Other tasks run between two parts of the work.
            tokio::task::yield_now().await;
        }
    }
}

/// Waits until the session may have a response to send. Without a session, that is before the first request, waits forever.
async fn changed<R: Resources>(session: Option<&mut Session<R>>) -> Result<(), Status> {
    match session {
        Some(session) => session.changed().await,
        None => std::future::pending().await,
    }
}
