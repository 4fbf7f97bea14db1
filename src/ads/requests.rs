//! Parses the requests of a stream from the body of its HTTP request. Only received bytes are buffered; they are counted from
//! the first byte of a request, and a request must be complete in time. Its items are counted before it is decoded.

use std::error::Error;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use tokio::time::Instant;
use tonic::Status;

use super::budget::{Account, Turn};
use isthmus_net::channel::refused;
use isthmus_wire::outline::{self, Outlined, Refusal};

/// The length of the prefix of a gRPC message, in bytes: the compression flag and the message length.
const PREFIX: usize = 5;
/// The largest number of items in a request: more names than a client may hold ([`super::budget`]).
const ITEMS_MAX: usize = 1 << 19;
/// The length in bytes from which a request waits for its turn to be decoded. A shorter one takes little memory.
const LARGE: usize = 64 << 10;
/// The deadline of a request, from its first byte to its last.
const WHOLE_WITHIN: Duration = Duration::from_secs(30);

/// Reads the requests of a stream, one after another.
pub struct Requests<R> {
    body: RecvStream,
    /// Received bytes of an incomplete request.
    buffer: BytesMut,
    /// Accounts for the bytes in the buffer.
    account: Account,
    /// The deadline of the incomplete request.
    deadline: Option<Instant>,
    request: PhantomData<fn() -> R>,
}

/// A complete request with its length.
pub struct Whole<R> {
    /// The request.
    pub request: R,
    /// The length of the request in bytes.
    pub bytes: usize,
    /// The turn of a large request, kept until the request is handled. Another request of the same source may be decoded
    /// as soon as this one is, if the source holds no further bytes.
    pub turn: Option<Turn>,
}

impl<R: Outlined> Requests<R> {
    /// Reads requests from `body`.
    pub fn new(body: RecvStream, account: Account) -> Self {
        let (buffer, deadline, request) = (BytesMut::new(), None, PhantomData);
        Self { body, buffer, account, deadline, request }
    }

    /// Returns the next request of at most `bytes_max` bytes; `None` at the end. Cancel safe.
    pub async fn next(&mut self, bytes_max: usize) -> Result<Option<Whole<R>>, Status> {
        loop {
            if let Some(message) = whole(&self.buffer, bytes_max)? {
                let bytes = message.len();
                let turn = match bytes {
                    ..LARGE => None,
                    LARGE.. => Some(self.account.turn(bytes).await),
                };
                let request = decode(message)?;
                let taken = PREFIX + bytes;
                self.account.release(taken);
                // A new buffer, because the old one would keep the size of the largest request.
                self.buffer = BytesMut::from(&self.buffer[taken..]);
                self.deadline = (!self.buffer.is_empty()).then(|| Instant::now() + WHOLE_WITHIN);
                return Ok(Some(Whole { request, bytes, turn }));
            }
            match self.arrives().await? {
                // A request that arrives in one piece needs no buffer.
                Some(data) if self.buffer.is_empty() => match whole(&data, bytes_max)? {
                    Some(message) if message.len() < LARGE => {
                        let (request, bytes) = (decode(message)?, message.len());
                        self.hold(&data[PREFIX + bytes..])?;
                        return Ok(Some(Whole { request, bytes, turn: None }));
                    }
                    Some(_) | None => self.hold(&data)?,
                },
                Some(data) => self.hold(&data)?,
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Status::internal("the stream ended within a request")),
            }
        }
    }

    /// Buffers the received part of a request.
    fn hold(&mut self, data: &[u8]) -> Result<(), Status> {
        let taken = self.account.take(data.len());
        taken.map_err(|error| Status::resource_exhausted(format!("cannot read the requests: {error}")))?;
        self.buffer.extend_from_slice(data);
        if !self.buffer.is_empty() {
            self.deadline.get_or_insert_with(|| Instant::now() + WHOLE_WITHIN);
        }
        Ok(())
    }

    /// Waits for further data and returns it; `None` at the end of the stream.
    async fn arrives(&mut self) -> Result<Option<Bytes>, Status> {
        let (body, deadline) = (&mut self.body, self.deadline);
        let data = async {
            loop {
                // Trailers are ignored.
                let Some(data) = poll_fn(|context| body.poll_data(context)).await else { return Ok(None) };
                let data = data.map_err(|error| Status::cancelled(error.to_string()))?;
                // The call fails only if the stream has ended, which the next call returns.
                let _ = body.flow_control().release_capacity(data.len());
                if !data.is_empty() {
                    return Ok(Some(data));
                }
            }
        };
        match deadline {
            None => data.await,
            Some(deadline) => tokio::time::timeout_at(deadline, data).await.unwrap_or_else(|_| {
                Err(Status::deadline_exceeded(format!("a request was incomplete after {WHOLE_WITHIN:?}")))
            }),
        }
    }
}

/// Returns the message of the request at the start of `bytes`, if the request is complete.
fn whole(bytes: &[u8], bytes_max: usize) -> Result<Option<&[u8]>, Status> {
    let Some((prefix, rest)) = bytes.split_at_checked(PREFIX) else { return Ok(None) };
    if prefix[0] != 0 {
        return Err(Status::unimplemented("requests must not be compressed"));
    }
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > bytes_max {
        let text = format!("a request of {length} bytes exceeds the limit of {bytes_max}");
        return Err(Status::resource_exhausted(text));
    }
    Ok(rest.get(..length))
}

/// Decodes a request whose items are within the limits.
pub fn decode<R: Outlined>(message: &[u8]) -> Result<R, Status> {
    outline::decode(message, ITEMS_MAX).map_err(|refusal| match refusal {
        Refusal::Malformed | Refusal::Undecodable(_) => Status::internal(refusal.to_string()),
        _ => refused(refusal),
    })
}

/// Returns true if the status is that of a request with too many items.
pub fn is_refused(status: &Status) -> bool {
    status.source().is_some_and(|source| source.is::<Refusal>())
}

#[cfg(test)]
mod tests {
    use http::Request;
    use isthmus_proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
    use tokio::io::duplex;
    use tonic::Code;

    use super::*;
    use crate::budget::Budget;

    #[test]
    fn a_request_with_very_many_items_is_refused_and_not_decoded() {
        let names = |count: usize| [0x1a, 1, b'a'].repeat(count);
        let request = decode::<DeltaDiscoveryRequest>(&names(10_000)).expect("few");
        assert_eq!(request.resource_names_subscribe.len(), 10_000);
        let many = decode::<DeltaDiscoveryRequest>(&names(ITEMS_MAX + 1)).expect_err("refused");
        assert_eq!(
            (many.code(), many.message()),
            (Code::ResourceExhausted, "a message with 524289 items; at most 524288 are allowed")
        );
        assert!(is_refused(&many));
        let malformed = decode::<DeltaDiscoveryRequest>(&[0x1a, 1]).expect_err("refused");
        assert!(malformed.code() == Code::Internal && !is_refused(&malformed), "{malformed}");
    }

    /// A client that sends some bytes now and then does not get more time.
    #[tokio::test(start_paused = true)]
    async fn a_request_must_be_complete_30_s_after_its_first_byte() {
        let (near, far) = duplex(1 << 16);
        let (client, server) = tokio::join!(h2::client::handshake(near), h2::server::handshake(far));
        let (mut client, driver) = client.expect("HTTP/2");
        let mut server = server.expect("HTTP/2");
        let drive = async {
            let (_response, mut body) = client.send_request(Request::new(()), false).expect("sent");
            let drive = async { drop(driver.await) };
            let send = async {
                loop {
                    tokio::time::sleep(Duration::from_secs(4)).await;
                    body.send_data(Bytes::from_static(&[0, 0, 0, 1, 0]), false).expect("sent");
                }
            };
            tokio::join!(drive, send);
        };
        let serve = async {
            let (request, _respond) = server.accept().await.expect("a stream").expect("HTTP/2");
            let account = Budget::new(1 << 20).account([192, 0, 2, 1].into(), 1 << 20);
            let mut requests = Requests::<DeltaDiscoveryRequest>::new(request.into_body(), account);
            let begun = Instant::now();
            let next = async { requests.next(1 << 20).await };
            let frames = async {
                while server.accept().await.is_some() {}
                std::future::pending::<()>().await
            };
            let status = tokio::select! {
                next = next => next.err().expect("incomplete"),
                () = frames => unreachable!("the client stays"),
            };
            (status.code(), begun.elapsed().as_secs())
        };
        let ended = tokio::select! {
            ended = serve => ended,
            () = drive => panic!("the client stays"),
        };
        assert_eq!(ended, (Code::DeadlineExceeded, 4 + 30));
    }
}
