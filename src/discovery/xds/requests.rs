//! The requests of a stream, out of the data of its HTTP request. No more of a request is held than has arrived, it is
//! counted from its first byte, and it has to be whole in time.

use std::future::poll_fn;
use std::marker::PhantomData;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use tokio::time::Instant;
use tonic::Status;

use super::budget::Account;

/// Compression flag and length of a gRPC message.
const PREFIX: usize = 5;
/// From the first byte of a request to its last.
const WHOLE_WITHIN: Duration = Duration::from_secs(30);

/// Reads requests, one after another.
pub struct Requests<R> {
    body: RecvStream,
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
    pub fn new(body: RecvStream, account: Account) -> Self {
        let (buffer, deadline, request) = (BytesMut::new(), None, PhantomData);
        Self { body, buffer, account, deadline, request }
    }

    /// The next request, of at most so many bytes; `None` at the end. Nothing is lost where the future is dropped.
    pub async fn next(&mut self, bytes_max: usize) -> Result<Option<Whole<R>>, Status> {
        loop {
            if let Some(whole) = read::<R>(&self.buffer, bytes_max)? {
                let taken = PREFIX + whole.bytes;
                self.account.give_back(taken);
                // A buffer that once held a large request would keep its size.
                self.buffer = BytesMut::from(&self.buffer[taken..]);
                self.deadline = (!self.buffer.is_empty()).then(|| Instant::now() + WHOLE_WITHIN);
                return Ok(Some(whole));
            }
            match self.arrives().await? {
                // Of a request that arrives in one piece nothing is held.
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

    /// Keeps the beginning of a request.
    fn hold(&mut self, data: &[u8]) -> Result<(), Status> {
        let taken = self.account.take(data.len());
        taken.map_err(|error| Status::resource_exhausted(format!("requests: {error}")))?;
        self.buffer.extend_from_slice(data);
        if !self.buffer.is_empty() {
            self.deadline.get_or_insert_with(|| Instant::now() + WHOLE_WITHIN);
        }
        Ok(())
    }

    /// More data; `None` at the end of the stream.
    async fn arrives(&mut self) -> Result<Option<Bytes>, Status> {
        let (body, deadline) = (&mut self.body, self.deadline);
        let data = async {
            loop {
                // Trailers say nothing.
                let Some(data) = poll_fn(|context| body.poll_data(context)).await else { return Ok(None) };
                let data = data.map_err(|error| Status::cancelled(error.to_string()))?;
                // Fails only where the stream has ended, which is found next.
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

/// Reads the request that bytes begin with, if it is whole.
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
        Err(error) => Err(Status::internal(format!("a request cannot be read: {error}"))),
    }
}
