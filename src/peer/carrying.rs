//! The carriers that this gateway opens to a peer's gateway at one address, so that callers of the peer reach a network that takes no
//! connections. The data plane serves them; here they are dialled, and again after each loss.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::link::{Group, STEP_WITHIN, Shared};
use super::session::Order;
use isthmus_model::address::Host;
use isthmus_net::dial;
use isthmus_net::handed::Carrying;
use isthmus_settings::peer::PeerIdentity;
use isthmus_tasks::backoff::Backoff;

/// The number of carriers to each address of a peer. A lost packet delays the calls of one carrier alone.
pub(super) const OF_ADDRESS: usize = 4;
/// The longest wait before a carrier is opened again. One that lasted longer was no failure.
const RETRY: Duration = Duration::from_secs(12);

/// Keeps one carrier open to one address for as long as the peer is configured.
pub(super) struct Carrier {
    links: Arc<Shared>,
    group: Group,
    who: PeerIdentity,
    address: SocketAddr,
    /// The row of its problem in the table of links.
    row: u64,
}

impl Carrier {
    pub(super) fn new(links: Arc<Shared>, group: Group, who: PeerIdentity, address: SocketAddr) -> Self {
        let row = links.number();
        Self { links, group, who, address, row }
    }

    /// Dials again and again. `removed` ends when the address is one of the peer no longer.
    pub(super) async fn run(self, mut removed: watch::Receiver<()>) {
        let (mut stop, mut wanted) = (self.group.stop.clone(), self.group.carries.subscribe());
        let mut waits = Backoff::up_to(RETRY);
        loop {
            let opening = async {
                // The peer's gateways say over a link whether they use carriers. This fails only if the peer is removed.
                let _ = wanted.wait_for(|wanted| *wanted).await;
                self.open().await
            };
            let opened = tokio::select! {
                biased;
                _ = stop.wait_for(|order| *order != Order::GoOn) => break,
                _ = removed.changed() => break,
                opened = opening => opened,
            };
            let (begun, problem) = (
                Instant::now(),
                match opened {
                    Ok((end, ended)) => {
                        self.links.table.note_carrier(&self.group.peer.name, self.row, None);
                        tokio::select! {
                            biased;
                            order = stop.wait_for(|order| *order != Order::GoOn) => {
                                // A gateway that stops lets its calls end, and a successor opens carriers of its own.
                                let ends = order.is_ok_and(|order| matches!(*order, Order::End | Order::Part));
                                let _ = ends.then(|| end.send(()));
                                break;
                            }
                            _ = removed.changed() => {
                                let _ = end.send(());
                                break;
                            }
                            ended = ended => ended.unwrap_or_else(|_| "the data plane has stopped".to_owned()),
                        }
                    }
                    Err(problem) => problem,
                },
            );
            if begun.elapsed() > RETRY {
                waits.reset();
            }
            self.links.table.note_carrier(&self.group.peer.name, self.row, Some((self.address, problem)));
            tokio::select! {
                biased;
                _ = stop.wait_for(|order| *order != Order::GoOn) => break,
                _ = removed.changed() => break,
                () = sleep(waits.wait(u64::from(std::process::id()) ^ self.row.wrapping_mul(97))) => {}
            }
        }
        self.links.table.note_carrier(&self.group.peer.name, self.row, None);
    }

    /// Connects, and hands the connection to the data plane. Returns the order to end it, and its end.
    async fn open(&self) -> Result<(oneshot::Sender<()>, oneshot::Receiver<String>), String> {
        let host = Host::Ip(self.address.ip());
        let connecting = dial::dial(&host, self.address.port(), &[]);
        let socket =
            timeout(STEP_WITHIN, connecting).await.map_err(|_| "it does not accept the connection")?;
        let socket = socket.and_then(tokio::net::TcpStream::into_std).map_err(|error| error.to_string())?;
        let ((end, ends), (ending, ended)) = (oneshot::channel(), oneshot::channel());
        let carrying = Carrying {
            socket: socket.into(),
            address: self.address,
            peer: self.group.peer.name.clone(),
            gateway: self.who.known_gateway(),
            alias: self.who.alias.clone(),
            end: ends,
            ended: ending,
        };
        let given: Result<(), mpsc::error::SendError<Carrying>> = self.links.carriers.send(carrying).await;
        given.map_err(|_| "the data plane has stopped")?;
        Ok((end, ended))
    }
}
