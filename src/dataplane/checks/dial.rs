//! One health check: connects to the endpoint, and resets the connection. A FIN would leave the connection in TIME_WAIT for a
//! minute after each check.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::time::timeout;

use isthmus_model::reason::Reason;
use isthmus_net::socket::{dial_reason, reset_on_close};

/// Connects to an endpoint and sends it the greeting. Fails with [`Reason::Internal`] if the check says nothing about the
/// endpoint.
pub(super) async fn dial(address: SocketAddr, within: Duration, greeting: &[u8]) -> Result<(), Reason> {
    let connected = timeout(within, TcpStream::connect(address)).await;
    match connected.map_err(|_| Reason::EndpointTimeout)? {
        Ok(stream) => {
            if !greeting.is_empty() {
                // The send buffer of a new connection has room for a few bytes. If the endpoint has reset the connection,
                // nobody reads them.
                let _ = stream.try_write(greeting);
            }
            reset_on_close(&stream);
            Ok(())
        }
        Err(error) => verdict(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

/// Returns what a failed `connect` says about the endpoint.
fn verdict(error: Errno) -> Result<(), Reason> {
    match error {
        // An endpoint that resets the connection has accepted it.
        Errno::CONNRESET | Errno::PIPE => Ok(()),
        // This host is out of ports.
        Errno::ADDRNOTAVAIL => Err(Reason::Internal),
        error => Err(dial_reason(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().expect("a runtime")
    }

    /// Makes one check.
    fn check(address: SocketAddr) -> Result<(), Reason> {
        runtime().block_on(dial(address, Duration::from_millis(200), b"hello"))
    }

    #[test]
    fn an_endpoint_that_accepts_passes_and_is_greeted_and_reset() {
        use std::io::Read;
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        assert_eq!(check(listener.local_addr().expect("bound")), Ok(()));
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut read = Vec::new();
        let error = stream.read_to_end(&mut read).expect_err("a reset");
        assert_eq!((error.kind(), &read[..]), (std::io::ErrorKind::ConnectionReset, &b"hello"[..]));
    }

    #[test]
    fn an_endpoint_that_refuses_or_is_silent_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        drop(listener);
        assert_eq!(check(address), Err(Reason::EndpointRefused));
        let silent =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        silent.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bound");
        silent.listen(0).expect("listening");
        let address = silent.local_addr().expect("bound").as_socket().expect("an address");
        let _queued: Vec<_> = (0..4)
            .map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50)))
            .collect();
        assert_eq!(check(address), Err(Reason::EndpointTimeout));
    }

    #[test]
    fn an_endpoint_that_accepts_and_resets_passes() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let result = runtime().block_on(async {
            let mut check = std::pin::pin!(dial(address, Duration::from_millis(200), b"hello"));
            // The first poll begins to connect. The connection has been reset by the next one.
            std::future::poll_fn(|context| {
                assert!(check.as_mut().poll(context).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
            let accepted = socket2::Socket::from(listener.accept().expect("a connection").0);
            accepted.set_linger(Some(Duration::ZERO)).expect("a socket");
            drop(accepted);
            check.await
        });
        assert_eq!(result, Ok(()));
    }

    #[test]
    fn a_fault_of_this_host_says_nothing_about_the_endpoint() {
        assert_eq!(verdict(Errno::MFILE), Err(Reason::Internal));
        assert_eq!(verdict(Errno::ADDRNOTAVAIL), Err(Reason::Internal));
        assert_eq!(verdict(Errno::HOSTUNREACH), Err(Reason::EndpointUnreachable));
    }
}
