//! The connections of a listener, from accept to their end.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;

use super::connection::{self, Stream};
use super::incoming::{self, CalledOn, Handshake, NotOpened};
use isthmus_net::incoming::Incoming;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;

/// The text of the status with which streams end while a new process takes over.
pub const GOES_ON_ELSEWHERE: &str = "a new process of this server has taken over; connect again";

/// The connections of one listener.
pub struct Accepting {
    /// The listener.
    pub incoming: Incoming,
    /// The TLS handshake of its connections.
    pub handshake: Handshake,
    /// The scope in which connections are served.
    pub scope: Scope,
    /// The order to stop: then no more are accepted, and those that are connected are asked to connect again.
    pub stop: Stop,
}

impl Accepting {
    /// Serves connections until the order to stop. `open` starts the stream of a request; `refused` is called with the address,
    /// the identity and the reason of each client that is refused in the handshake.
    pub async fn run<O, R>(self, open: O, refused: R)
    where
        O: Fn(&CalledOn, Request<RecvStream>, SendResponse<Bytes>) -> Stream + Clone + Send + 'static,
        R: Fn(SocketAddr, String, String) + Clone + Send + 'static,
    {
        let Self { incoming, handshake, scope, stop } = self;
        let mut stopped = stop.receiver();
        loop {
            let (socket, seat) = tokio::select! {
                biased;
                () = stopped.ordered() => return,
                accepted = incoming.accept() => accepted,
            };
            let (handshake, open, refused, stopped) =
                (handshake.clone(), open.clone(), refused.clone(), stop.receiver());
            // One task per connection, so that a slow handshake delays no other client.
            scope.spawn(async move {
                let peer = seat.peer();
                let connection = match incoming::open(handshake, socket, &seat).await {
                    Ok(connection) => connection,
                    Err(NotOpened::Refused { who, why }) => return refused(peer, who, why),
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
