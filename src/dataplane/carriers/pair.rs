//! Two sockets that are connected with each other over loopback: one for the relay, as that of an endpoint, and one for the bridge. TCP
//! has what the relay relies on: half-closes, resets, acknowledgements. The price is two more copies of each byte.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use isthmus_net::socket::{begin_to_connect, relay_socket};

/// The time within which loopback connects.
const WITHIN: Duration = Duration::from_secs(1);
/// The number of connections of others that are dropped before the own one is found: any process of the host may connect to the port.
const STRANGERS_MAX: usize = 16;

/// Connects two sockets.
pub(crate) async fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let socket: OwnedFd = relay_socket(listener.local_addr()?)?;
    begin_to_connect(&socket, listener.local_addr()?)?;
    let near = TcpStream::from_std(socket.into())?;
    let own = near.local_addr()?;
    // The kernel has connected the two already, unless it is busy.
    let far = match accepted_of(own, || listener.accept()) {
        Some(far) => TcpStream::from_std(far)?,
        None => {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let accepting = async {
                for _ in 0..STRANGERS_MAX {
                    let (far, from) = listener.accept().await?;
                    if from == own {
                        return Ok(far);
                    }
                }
                Err(io::Error::from(io::ErrorKind::AddrInUse))
            };
            timeout(WITHIN, accepting).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??
        }
    };
    far.set_nodelay(true)?;
    Ok((near, far))
}

/// Returns the connection from the address `own` that `accept` returns now, if there is one.
fn accepted_of(
    own: SocketAddr,
    mut accept: impl FnMut() -> io::Result<(std::net::TcpStream, SocketAddr)>,
) -> Option<std::net::TcpStream> {
    for _ in 0..STRANGERS_MAX {
        let (far, from) = accept().ok()?;
        if from == own {
            far.set_nonblocking(true).ok()?;
            return Some(far);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn what_one_end_sends_the_other_receives() {
        let (mut near, mut far) = pair().await.expect("a pair");
        near.write_all(b"up").await.expect("sent");
        near.shutdown().await.expect("ended");
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.expect("received");
        assert_eq!(received, b"up");
        far.write_all(b"down").await.expect("sent");
        drop(far);
        received.clear();
        near.read_to_end(&mut received).await.expect("received");
        assert_eq!(received, b"down");
    }

    #[tokio::test]
    async fn connections_of_others_are_dropped() {
        let strangers = TcpListener::bind("127.0.0.1:0").expect("a port");
        let own = std::net::TcpStream::connect(strangers.local_addr().expect("bound")).expect("connected");
        let own = own.local_addr().expect("bound");
        let mut others = 0;
        let found = accepted_of(own, || {
            others += 1;
            let other = std::net::TcpStream::connect(strangers.local_addr().expect("bound"))?;
            let address = if others < 3 { other.local_addr()? } else { own };
            Ok((other, address))
        });
        assert!(found.is_some() && others == 3);
    }
}
