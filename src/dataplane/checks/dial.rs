//! One health check: connects to the endpoint, sends it a ClientHello if the check has a name for it, and resets the connection. A
//! FIN would leave the connection in TIME_WAIT for a minute after each check.

use std::net::SocketAddr;

use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::schedule::Due;
use crate::upstreams::Failure;
use isthmus_model::name::HostName;
use isthmus_model::reason::Reason;
use isthmus_net::socket::{dial_reason, reset_on_close};
use isthmus_tls::probe::{Answer, hello};

/// Connects to an address of an endpoint and sends it the greeting and the ClientHello. Fails with [`Reason::Internal`] if the check says nothing
/// about the endpoint.
pub(super) async fn dial(address: SocketAddr, due: &Due) -> Result<(), Failure> {
    let until = Instant::now() + due.timeout;
    let connected = timeout_at(until, TcpStream::connect(address)).await;
    let stream = match connected.map_err(|_| Reason::EndpointTimeout)? {
        Ok(stream) => stream,
        Err(error) => {
            let reason = verdict(Errno::from_io_error(&error).unwrap_or(Errno::IO));
            return match (reason, &due.name) {
                // It has accepted the connection, and did not answer a ClientHello.
                (Ok(()), Some(_)) => Err(Reason::EndpointReset.into()),
                (reason, _) => reason.map_err(Failure::from),
            };
        }
    };
    if !due.greeting.is_empty() {
        // The send buffer of a new connection has room for a few bytes. If the endpoint has reset the connection, nobody reads
        // them.
        let _ = stream.try_write(due.greeting);
    }
    reset_on_close(&stream);
    match &due.name {
        None => Ok(()),
        Some(name) => match timeout_at(until, answer(stream, name)).await {
            Ok(answer) => answer,
            Err(_) => Err(failure(Reason::EndpointTimeout, "no answer to the ClientHello".to_owned())),
        },
    }
}

/// Sends a ClientHello, and returns what the answer says about the endpoint. The hello offers no protocols (ALPN), because a
/// server may refuse all those that it does not know.
async fn answer(stream: TcpStream, name: &HostName) -> Result<(), Failure> {
    match hello(stream, name.as_str(), &[]).await {
        Answer::Certificate(_) => Ok(()),
        Answer::Alert(alert) => Err(failure(
            Reason::EndpointAlert,
            format!("the endpoint answered the ClientHello with the alert {alert}"),
        )),
        Answer::NotTls => Err(Reason::EndpointNotTls.into()),
        Answer::Closed => Err(Reason::EndpointClosed.into()),
        Answer::Failed(why) => Err(failure(Reason::TlsFailed, why)),
    }
}

fn failure(reason: Reason, detail: String) -> Failure {
    Failure { reason, detail: Some(detail.into()) }
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
    use std::time::Duration;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().expect("a runtime")
    }

    fn due(address: SocketAddr) -> Due {
        Due { address, others: None, timeout: Duration::from_millis(200), greeting: b"hello", name: None }
    }

    /// Makes one check.
    fn check(address: SocketAddr) -> Result<(), Reason> {
        runtime().block_on(dial(address, &due(address))).map_err(|failure| failure.reason)
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
            let due = due(address);
            let mut check = std::pin::pin!(dial(due.address, &due));
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
    fn an_endpoint_must_answer_a_hello_with_its_certificate() {
        use std::io::{Read, Write};
        /// Returns the result of a check of a server that answers the hello with these bytes and closes, or with none: waits.
        fn answered(bytes: Option<&'static [u8]>) -> Result<(), String> {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = listener.local_addr().expect("bound");
            let server = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("a connection");
                let mut read = [0; 5];
                stream.read_exact(&mut read).expect("a hello");
                assert_eq!(read[..2], [22, 3], "a TLS handshake record");
                match bytes {
                    Some(bytes) => stream.write_all(bytes).expect("written"),
                    None => drop(stream.read_to_end(&mut Vec::new())),
                }
            });
            let name = Some(HostName::parse("a.test").expect("legal"));
            let due = Due { greeting: &[], timeout: Duration::from_millis(500), name, ..due(address) };
            let result = runtime().block_on(dial(address, &due));
            server.join().expect("no panic");
            result
                .map_err(|failure| format!("{} {}", failure.reason, failure.detail.as_deref().unwrap_or("-")))
        }
        // A fatal alert, unrecognized_name (112).
        let alert = answered(Some(&[21, 3, 3, 0, 2, 2, 112])).expect_err("an alert");
        assert!(alert.starts_with("endpoint_alert ") && alert.ends_with("unrecognized_name"), "{alert}");
        assert_eq!(answered(Some(b"HTTP/1.1 400 Bad Request\r\n\r\n")), Err("endpoint_not_tls -".to_owned()));
        assert_eq!(answered(None), Err("endpoint_timeout no answer to the ClientHello".to_owned()));
    }

    #[test]
    fn a_fault_of_this_host_says_nothing_about_the_endpoint() {
        assert_eq!(verdict(Errno::MFILE), Err(Reason::Internal));
        assert_eq!(verdict(Errno::ADDRNOTAVAIL), Err(Reason::Internal));
        assert_eq!(verdict(Errno::HOSTUNREACH), Err(Reason::EndpointUnreachable));
    }
}
