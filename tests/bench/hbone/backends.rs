//! The endpoints of the gateways, in a process of their own.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::Result;

/// The kinds of endpoints; the first part of an endpoint's name is its kind.
pub(crate) const KINDS: [&str; 4] = ["echo", "sink", "source", "hole"];

/// Prints the addresses of the endpoints in the order of [`KINDS`], and serves until the process is killed.
#[expect(clippy::print_stdout, reason = "it tells its parent")]
pub(crate) async fn serve() -> Result<()> {
    let mut all = JoinSet::new();
    for kind in KINDS {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
        println!("{}", listener.local_addr()?);
        all.spawn(accept(listener, kind));
    }
    all.join_next().await.ok_or("no listener")??
}

async fn accept(listener: TcpListener, kind: &'static str) -> Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        connections.spawn(async move {
            // A caller that goes away is no error here.
            let _ = match kind {
                "echo" => echo(socket).await,
                "sink" => sink(socket).await,
                "source" => source(socket).await,
                _ => hole(socket).await,
            };
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn echo(mut socket: TcpStream) -> io::Result<()> {
    // The buffer is small because there are thousands of connections.
    let mut bytes = [0; 1024];
    loop {
        match socket.read(&mut bytes).await? {
            0 => return Ok(()),
            count => socket.write_all(&bytes[..count]).await?,
        }
    }
}

/// Reads to the end, and sends the number of bytes read.
async fn sink(mut socket: TcpStream) -> io::Result<()> {
    let (mut bytes, mut total) = (vec![0; 256 * 1024], 0);
    loop {
        match socket.read(&mut bytes).await? {
            0 => return socket.write_u64(total).await,
            count => total += count as u64,
        }
    }
}

/// Reads a number and sends that many bytes. The caller closes first: when an endpoint closes first, Envoy resets the stream
/// and drops the bytes that it has not sent yet.
async fn source(mut socket: TcpStream) -> io::Result<()> {
    static BYTES: [u8; 256 * 1024] = [7; 256 * 1024];
    let mut left = usize::try_from(socket.read_u64().await?).map_err(io::Error::other)?;
    while left > 0 {
        left -= socket.write(&BYTES[..left.min(BYTES.len())]).await?;
    }
    socket.read(&mut [0]).await.map(drop)
}

/// Reads nothing, and closes when the caller's FIN has arrived after the unread bytes.
async fn hole(socket: TcpStream) -> io::Result<()> {
    while !socket.ready(Interest::READABLE).await?.is_read_closed() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
