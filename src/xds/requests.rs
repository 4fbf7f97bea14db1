//! Parses the requests of a stream from the body of its HTTP request. Only received bytes are buffered; they are counted from
//! the first byte of a request, and a request must be complete in time.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use tokio::time::Instant;
use tonic::Status;

use super::budget::Account;

/// The length of the prefix of a gRPC message, in bytes: the compression flag and the message length.
const PREFIX: usize = 5;
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
}

impl<R: prost::Message + Default> Requests<R> {
    /// Reads requests from `body`.
    pub fn new(body: RecvStream, account: Account) -> Self {
        let (buffer, deadline, request) = (BytesMut::new(), None, PhantomData);
        Self { body, buffer, account, deadline, request }
    }

    /// Returns the next request of at most `bytes_max` bytes; `None` at the end. Cancel safe.
    pub async fn next(&mut self, bytes_max: usize) -> Result<Option<Whole<R>>, Status> {
        loop {
            if let Some(whole) = read::<R>(&self.buffer, bytes_max)? {
                let taken = PREFIX + whole.bytes;
                self.account.release(taken);
                // A new buffer, because the old one would keep the size of the largest request.
                self.buffer = BytesMut::from(&self.buffer[taken..]);
                self.deadline = (!self.buffer.is_empty()).then(|| Instant::now() + WHOLE_WITHIN);
                return Ok(Some(whole));
            }
            match self.arrives().await? {
                // A request that arrives in one piece needs no buffer.
                Some(data) if self.buffer.is_empty() => match read::<R>(&data, bytes_max)? {
                    Some(whole) => {
                        self.hold(&data[PREFIX + whole.bytes..])?;
                        return Ok(Some(whole));
                    }
                    None => self.hold(&data)?,
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

/// Parses the request at the start of `bytes`, if it is complete.
fn read<R: prost::Message + Default>(bytes: &[u8], bytes_max: usize) -> Result<Option<Whole<R>>, Status> {
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
    let Some(message) = rest.get(..length) else { return Ok(None) };
    match R::decode(message) {
        Ok(request) => Ok(Some(Whole { request, bytes: length })),
        Err(error) => Err(Status::internal(format!("a request is malformed: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use http::Request;
    use isthmus_proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
    use tokio::io::duplex;
    use tonic::Code;

    use super::*;
    use crate::budget::Budget;

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
