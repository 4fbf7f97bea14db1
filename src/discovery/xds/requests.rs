//! The requests of a stream, out of the body of its HTTP request. No more of a request is held than has arrived, it is
//! counted from its first byte, and it has to be whole in time.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body as _;
use tokio::time::Instant;
use tonic::Status;

use super::budget::Account;

/// Compression flag and length of a gRPC message.
const PREFIX: usize = 5;
/// From the first byte of a request to its last.
const WHOLE_WITHIN: Duration = Duration::from_secs(30);

/// Reads requests, one after another.
pub struct Requests<R> {
    body: Pin<Box<axum::body::Body>>,
    /// What has arrived and was not given out.
    buffer: BytesMut,
    /// Holds as much as is in the buffer.
    account: Account,
    /// When the request that has begun has to be whole.
    deadline: Option<Instant>,
    request: PhantomData<fn() -> R>,
}

/// A request, and how long it is.
pub struct Whole<R> {
    pub request: R,
    pub bytes: usize,
}

impl<R: prost::Message + Default> Requests<R> {
    pub fn new(body: axum::body::Body, account: Account) -> Self {
        let (buffer, deadline, request) = (BytesMut::new(), None, PhantomData);
        Self { body: Box::pin(body), buffer, account, deadline, request }
    }

    /// The next request, of at most so many bytes; `None` at the end. Nothing is lost where the future is dropped.
    pub async fn next(&mut self, bytes_max: usize) -> Result<Option<Whole<R>>, Status> {
        loop {
            if let Some(request) = self.take(bytes_max)? {
                return Ok(Some(request));
            }
            match self.arrives().await? {
                Some(data) => {
                    let taken = self.account.take(data.len());
                    taken.map_err(|error| Status::resource_exhausted(format!("requests: {error}")))?;
                    self.buffer.extend_from_slice(&data);
                    if !self.buffer.is_empty() {
                        self.deadline.get_or_insert_with(|| Instant::now() + WHOLE_WITHIN);
                    }
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Status::internal("the stream ends within a request")),
            }
        }
    }

    /// Takes a whole request out of the buffer.
    fn take(&mut self, bytes_max: usize) -> Result<Option<Whole<R>>, Status> {
        let Some((prefix, rest)) = self.buffer.split_at_checked(PREFIX) else { return Ok(None) };
        if prefix[0] != 0 {
            return Err(Status::unimplemented("requests must not be compressed"));
        }
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if bytes > bytes_max {
            let text = format!("a request of {bytes} bytes; at most {bytes_max} are taken here");
            return Err(Status::resource_exhausted(text));
        }
        if rest.len() < bytes {
            return Ok(None);
        }
        self.buffer.advance(PREFIX);
        let message = self.buffer.split_to(bytes);
        let request = R::decode(message);
        self.account.give_back(PREFIX + bytes);
        // A buffer that once held a large request would keep its size.
        self.buffer = BytesMut::from(&self.buffer[..]);
        self.deadline = (!self.buffer.is_empty()).then(|| Instant::now() + WHOLE_WITHIN);
        match request {
            Ok(request) => Ok(Some(Whole { request, bytes })),
            Err(error) => Err(Status::internal(format!("a request cannot be read: {error}"))),
        }
    }

    /// More data; `None` at the end of the stream.
    async fn arrives(&mut self) -> Result<Option<Bytes>, Status> {
        let (body, deadline) = (&mut self.body, self.deadline);
        let data = async {
            loop {
                match poll_fn(|context| body.as_mut().poll_frame(context)).await {
                    None => return Ok(None),
                    Some(Err(error)) => return Err(Status::cancelled(error.to_string())),
                    // Trailers say nothing.
                    Some(Ok(frame)) => {
                        if let Ok(data) = frame.into_data() {
                            return Ok(Some(data));
                        }
                    }
                }
            }
        };
        match deadline {
            None => data.await,
            Some(deadline) => tokio::time::timeout_at(deadline, data).await.unwrap_or_else(|_| {
                Err(Status::deadline_exceeded(format!("a request was not whole within {WHOLE_WITHIN:?}")))
            }),
        }
    }
}
