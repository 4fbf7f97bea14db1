//! Queries over TCP (RFC 7766): a client may send several queries before it reads an answer, and gets each answer as soon as it
//! is ready.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::answer::{Extent, HEADER_BYTES, Reply, Transport};
use super::server::{Next, Server};
use isthmus_net::door::{Limits, Seat};
use isthmus_net::incoming::{Guarded, Incoming};
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stopped;

/// The longest query in bytes.
const QUERY_BYTES_MAX: usize = 4_096;
/// The largest number of queries of one connection that wait for another server. Further queries are not read meanwhile.
pub const PENDING_MAX: usize = 16;
/// The longest time without a byte from a client while no answer is pending.
const IDLE: Duration = Duration::from_secs(10);

/// Returns the limits of the listener for this many connections.
pub fn limits(connections: usize) -> Limits {
    Limits { first_request: Some(IDLE), ..Limits::new(connections) }
}

/// Answers the queries of all connections, and accepts no more after the order to stop.
pub async fn serve(server: Arc<Server>, incoming: Incoming, scope: Scope, mut stopped: Stopped) {
    loop {
        let (stream, seat) = tokio::select! {
            biased;
            () = stopped.ordered() => return,
            accepted = incoming.accept() => accepted,
        };
        let server = server.clone();
        scope.spawn(async move {
            let peer = seat.peer();
            if let Err(error) = connection(&server, stream, &seat).await {
                tracing::debug!(listener = "dns", %peer, %error, "a DNS connection over TCP ended");
            }
        });
    }
}

async fn connection(server: &Server, stream: TcpStream, seat: &Arc<Seat>) -> io::Result<()> {
    let client = seat.peer().ip();
    let mut stream = Guarded::new(stream, seat);
    let mut buffer = BytesMut::new();
    let mut pending = FuturesUnordered::new();
    loop {
        while pending.len() < PENDING_MAX
            && let Some(query) = take(&mut buffer)?
        {
            seat.asked();
            match server.decide(&query, client, Transport::Tcp, Extent::Full) {
                Next::Send(reply) => write(server, &mut stream, &reply).await?,
                Next::Ask(question) => pending.push(async move { server.ask(&question, client).await }),
                Next::Ignore => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        let is_full = pending.len() >= PENDING_MAX;
        // Answers come first, because they make room for queries. Both futures can be dropped without losing data.
        tokio::select! {
            biased;
            Some(reply) = pending.next() => write(server, &mut stream, &reply).await?,
            read = timeout(IDLE, stream.read_buf(&mut buffer)), if !is_full => match read {
                // Queries that came before the client's FIN are answered below.
                Ok(Ok(0)) => break,
                Ok(read) => drop(read?),
                Err(_) if pending.is_empty() => return Err(io::ErrorKind::TimedOut.into()),
                Err(_) => {}
            },
        }
    }
    while let Some(reply) = pending.next().await {
        write(server, &mut stream, &reply).await?;
    }
    stream.shutdown().await
}

/// Removes the next query from the buffer; `None` if it is not complete yet.
fn take(buffer: &mut BytesMut) -> io::Result<Option<BytesMut>> {
    let Some([high, low]) = buffer.get(..2) else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if !(HEADER_BYTES..=QUERY_BYTES_MAX).contains(&length) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    if buffer.len() < 2 + length {
        buffer.reserve(2 + length - buffer.len());
        return Ok(None);
    }
    buffer.advance(2);
    Ok(Some(buffer.split_to(length)))
}

async fn write(server: &Server, stream: &mut Guarded<TcpStream>, reply: &Reply) -> io::Result<()> {
    let length = u16::try_from(reply.bytes.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    let mut framed = Vec::with_capacity(2 + reply.bytes.len());
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(&reply.bytes);
    stream.write_all(&framed).await?;
    server.metrics.answered(reply.code.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;
    use crate::Options;
    use isthmus_net::door::Door;
    use isthmus_snapshot::testing::Mesh;
    use isthmus_snapshot::virtual_addresses::Ranges;
    use isthmus_telemetry::recorder::Recorder;
    use isthmus_world::Publisher;

    #[tokio::test(start_paused = true)]
    async fn a_client_may_be_silent_for_10_s() {
        assert_eq!(limits(1).first_request, Some(Duration::from_secs(10)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let bind = listener.local_addr().expect("bound");
        let (_publisher, reader) = Publisher::new(Mesh::new(Vec::new(), Vec::new()).snapshot());
        let recorder = Recorder::default();
        let ranges = Ranges::default();
        let options = Options { bind, zones: Arc::default(), ranges, upstream: Vec::new() };
        let server = Server::new(&options, bind, &reader, 1, &recorder);
        let _client = TcpStream::connect(bind).await.expect("connected");
        let (stream, peer) = listener.accept().await.expect("accepted");
        let door = Door::new("dns", Limits::new(1), &recorder);
        let seat = Arc::new(door.enter(peer).await.expect("a place"));
        let begun = Instant::now();
        let error = connection(&server, stream, &seat).await.expect_err("the client is silent");
        assert_eq!((error.kind(), begun.elapsed().as_secs()), (io::ErrorKind::TimedOut, 10));
    }

    #[test]
    fn queries_are_taken_whole_however_they_arrive() {
        let query = [7; HEADER_BYTES + 9];
        let mut sent = Vec::new();
        for _ in 0..3 {
            sent.extend_from_slice(&[0, 21]);
            sent.extend_from_slice(&query);
        }
        for piece in 1..sent.len() {
            let (mut buffer, mut found) = (BytesMut::new(), 0);
            for bytes in sent.chunks(piece) {
                buffer.extend_from_slice(bytes);
                while let Some(whole) = take(&mut buffer).expect("legal") {
                    assert_eq!(&whole[..], &query[..]);
                    found += 1;
                }
            }
            assert_eq!((found, buffer.len()), (3, 0));
        }
        for bad in [[0, 11], [0x10, 1], [0xff, 0xff], [0, 0]] {
            take(&mut BytesMut::from(&bad[..])).expect_err("no length of a query");
        }
    }
}
