//! Dials the endpoints that `explain` shows, to find out whether they accept a connection. If the question is about a server name,
//! each endpoint is sent a ClientHello with that name, and no data.

use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::explain::Explanation;
use isthmus_api::explanation::{Probe, TlsAnswer};
use isthmus_api::text::milliseconds;
use isthmus_model::reason::Reason;
use isthmus_net::socket::dial_reason;
use isthmus_telemetry::clock::rfc3339;
use isthmus_tls::probe::{Answer, PROBED, hello};

/// The largest number of candidates that are dialled; further ones are not.
const PROBED_MAX: usize = 32;
/// The upper limit for the timeout of a dial, and of a handshake.
const WITHIN: Duration = Duration::from_secs(5);

impl Explanation {
    /// Dials the candidates at the same time, each with its own connect timeout.
    pub async fn probe(&mut self) {
        let name = self.server_name();
        let some = self.candidates.iter_mut().take(PROBED_MAX);
        join_all(some.map(|candidate| async {
            let within = candidate.connect_timeout.min(WITHIN);
            candidate.probe = Some(probe(candidate.address, within, name.as_deref()).await);
        }))
        .await;
        let probed = || self.candidates.iter().filter_map(|candidate| candidate.probe.as_ref());
        if probed().next().is_some() && probed().all(|probe| probe.reason != Reason::Ok.text()) {
            self.warnings.push(
                "the gateway dialled the endpoints for this request, and none of them accepted a connection with a certificate that \
                 clients take"
                    .to_owned(),
            );
        }
    }
}

/// Connects to an endpoint, and with a name sends it a ClientHello.
async fn probe(address: SocketAddr, within: Duration, name: Option<&str>) -> Probe {
    let begun = Instant::now();
    let (reason, tls) = match (timeout(within, TcpStream::connect(address)).await, name) {
        (Ok(Ok(stream)), Some(name)) => match timeout(WITHIN, hello(stream, name, &PROBED)).await {
            Ok(answer) => answered(answer, name),
            Err(_) => {
                let fault =
                    format!("endpoint_silent: no answer to a ClientHello within {} s", WITHIN.as_secs());
                (
                    Reason::EndpointTimeout.text(),
                    Some(TlsAnswer { fault: Some(fault), ..TlsAnswer::default() }),
                )
            }
        },
        (Ok(Ok(_)), None) => (Reason::Ok.text(), None),
        (Ok(Err(error)), _) => (dial_reason(Errno::from_io_error(&error).unwrap_or(Errno::IO)).text(), None),
        (Err(_), _) => (Reason::EndpointTimeout.text(), None),
    };
    Probe { reason: reason.to_owned(), ms: milliseconds(begun.elapsed()), tls }
}

/// Returns the reason that a connection with this answer to a hello for `name` would get, or the word for a fault of the certificates,
/// and the answer in the form of the API.
fn answered(answer: Answer, name: &str) -> (&'static str, Option<TlsAnswer>) {
    let none = TlsAnswer::default();
    match answer {
        Answer::Certificate(shown) => {
            let faults = shown.faults(name, SystemTime::now());
            let word = faults.first().map_or(Reason::Ok.text(), |fault| fault.word);
            let texts: Vec<String> =
                faults.iter().map(|fault| format!("{}: {}", fault.word, fault.detail)).collect();
            let fault = (!texts.is_empty()).then(|| texts.join(", "));
            let (names, not_after) = (shown.names(), shown.not_after().map(rfc3339));
            (word, Some(TlsAnswer { fault, names, not_after, alpn: shown.alpn, ..none }))
        }
        Answer::Alert(alert) => {
            (Reason::EndpointAlert.text(), Some(TlsAnswer { alert: Some(alert.to_owned()), ..none }))
        }
        Answer::NotTls => (Reason::EndpointNotTls.text(), None),
        Answer::Closed => (Reason::EndpointClosed.text(), None),
        Answer::Failed(fault) => (Reason::Ok.text(), Some(TlsAnswer { fault: Some(fault), ..none })),
    }
}
