//! Dials the endpoints that `explain` shows, to find out whether they accept a connection. Sends no data to them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use rustix::io::Errno;
use tokio::net::TcpStream;

use super::explain::Explanation;
use isthmus_api::explanation::Probe;
use isthmus_model::reason::Reason;
use isthmus_net::socket::dial_reason;

/// The largest number of candidates that are dialled; further ones are not.
const PROBED_MAX: usize = 32;
/// The upper limit for the timeout of a dial.
const WITHIN: Duration = Duration::from_secs(5);

impl Explanation {
    /// Dials the candidates at the same time, each with its own connect timeout.
    pub async fn probe(&mut self) {
        let some = self.candidates.iter_mut().take(PROBED_MAX);
        join_all(some.map(|candidate| async {
            candidate.probe = Some(dial(candidate.address, candidate.connect_timeout.min(WITHIN)).await);
        }))
        .await;
        let probed = || self.candidates.iter().filter_map(|candidate| candidate.probe.as_ref());
        if probed().next().is_some() && probed().all(|probe| probe.reason != Reason::Ok.text()) {
            self.warnings.push(
                "the gateway dialled the endpoints for this request, and none of them accepted a connection"
                    .to_owned(),
            );
        }
    }
}

async fn dial(address: SocketAddr, within: Duration) -> Probe {
    let begun = Instant::now();
    let reason = match tokio::time::timeout(within, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Reason::Ok,
        Ok(Err(error)) => dial_reason(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        Err(_) => Reason::EndpointTimeout,
    };
    Probe { reason: reason.text().to_owned(), ms: (begun.elapsed().as_secs_f64() * 1e6).round() / 1e3 }
}
