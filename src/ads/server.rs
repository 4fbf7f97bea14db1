//! The state of a server that all its streams share, and the connections of its listener, from accept to their end.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;

use super::budget::Budget;
use super::connection::{self, Stream};
use super::incoming::{self, CalledOn, Handshake, NotOpened};
use super::status::Clients;
use isthmus_net::incoming::Incoming;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_telemetry::discovery::Discovery as Metrics;

/// The text of the status with which streams end while a new process takes over.
pub const GOES_ON_ELSEWHERE: &str = "a new process of this server has taken over; connect again";

/// The state of a server that all streams share.
pub struct Server {
    /// The connected clients.
    pub clients: Arc<Clients>,
    /// The metrics.
    pub metrics: Metrics,
    /// The scope in which connections are served.
    pub scope: Scope,
    /// The order to stop: then no more are accepted, and those that are connected are asked to connect again.
    pub stop: Stop,
    /// The budget of the names that clients subscribe to.
    pub(super) names: Arc<Budget>,
    /// The budget of incomplete requests.
    pub(super) unfinished: Arc<Budget>,
}

impl Server {
    /// Makes the state of a server without clients of its own.
    pub fn new(clients: Arc<Clients>, metrics: Metrics, scope: Scope, stop: Stop) -> Arc<Self> {
        let (names, unfinished) = (Budget::names(), Budget::requests());
        Arc::new(Self { clients, metrics, scope, stop, names, unfinished })
    }

    /// Counts and records a client that is refused.
    pub fn refuse(&self, peer: SocketAddr, who: String, why: String) {
        self.metrics.refused();
        self.clients.refuse_early(peer, who, why);
    }

    /// Serves connections until the order to stop. `open` starts the stream of a request.
    pub async fn run<O>(self: Arc<Self>, incoming: Incoming, handshake: Handshake, open: O)
    where
        O: Fn(&CalledOn, Request<RecvStream>, SendResponse<Bytes>) -> Stream + Clone + Send + 'static,
    {
        let mut stopped = self.stop.receiver();
        loop {
            let (socket, seat) = tokio::select! {
                biased;
                () = stopped.ordered() => return,
                accepted = incoming.accept() => accepted,
            };
            let (server, handshake, open) = (self.clone(), handshake.clone(), open.clone());
            // One task per connection, so that a slow handshake delays no other client.
            self.scope.spawn(async move {
                let (peer, stopped) = (seat.peer(), server.stop.receiver());
                let connection = match incoming::open(handshake, socket, &seat).await {
                    Ok(connection) => connection,
                    Err(NotOpened::Refused { who, why }) => return server.refuse(peer, who, why),
                    Err(NotOpened::Ended(error)) => {
                        return tracing::debug!(%peer, %error, "an xDS connection ended within its TLS handshake");
                    }
                };
                drop(seat);
                let called_on = connection.called_on.clone();
                let open = move |request, respond| open(&called_on, request, respond);
                // The future is boxed because the task would otherwise contain it several times.
                if let Err(error) = Box::pin(connection::serve(connection, open, stopped)).await {
                    tracing::debug!(%peer, %error, "an xDS connection ended");
                }
            });
        }
    }
}
