//! The addresses of one peer to which this gateway connects, and the attempts to open a link with each replica behind them.
//!
//! The addresses are those of the config, all addresses of its host names, and those that the peer announces over its links. One
//! address may lead to several replicas, as that of a load balancer does. Therefore further connections look for them; a
//! connection that arrives at a replica with a link is closed before Hello.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tonic::Streaming;

use super::carrying::{Carrier, OF_ADDRESS};
use super::enrolled::GatewayAddress;
use super::link::{Group, Running, STEP_WITHIN, Shared, Verified};
use super::options::DIAL_MAX;
use super::session::{Ended, Order, Outgoing};
use super::transport;
use isthmus_model::address::Host;
use isthmus_net::dial;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::peer::{Carry, LINK_PROTOCOL, PeerIdentity};
use isthmus_settings::scope::AddressScope;
use isthmus_tasks::backoff::Backoff;
use isthmus_tls::client;
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::trust::{REFUSED, describe};

/// The longest wait between two attempts to connect.
const RETRY: Duration = Duration::from_secs(15);
/// The longest wait between two connections that look for further replicas behind an address.
const EXPLORE: Duration = Duration::from_secs(60);
/// The time between two look-ups of the host names.
const LOOK_UP_EVERY: Duration = Duration::from_secs(15);

/// Connects to one peer for as long as it is configured.
pub(super) struct Dialler {
    shared: Arc<Dialling>,
    /// The addresses of the config.
    given: Vec<GatewayAddress>,
    /// The addresses that the peer may announce.
    scope: AddressScope,
}

/// The values that the tasks of one peer's addresses share.
struct Dialling {
    links: Arc<Shared>,
    group: Group,
    who: PeerIdentity,
    /// Counts the links that this gateway has dialled and that have ended.
    lost: watch::Sender<u64>,
}

/// The result of looking up the addresses of a peer.
#[derive(Default)]
struct Found {
    /// The addresses, each with the entry that it is from.
    addresses: BTreeMap<SocketAddr, GatewayAddress>,
    /// Why a host has no address.
    problem: Option<String>,
}

impl Dialler {
    pub(super) fn new(
        links: Arc<Shared>,
        group: Group,
        who: PeerIdentity,
        given: Vec<GatewayAddress>,
        scope: AddressScope,
    ) -> Self {
        let shared = Arc::new(Dialling { links, group, who, lost: watch::Sender::default() });
        Self { shared, given, scope }
    }

    /// Starts a task for each address, and ends the task of an address that is no longer one of the peer. Links that are open at
    /// such an address stay open.
    pub(super) async fn run(self) {
        let shared = self.shared.clone();
        let row = shared.links.number();
        let mut announced = shared.group.announced.subscribe();
        let mut stop = shared.group.stop.clone();
        // The tasks of an address end when their senders are dropped.
        let mut tasks: BTreeMap<SocketAddr, (oneshot::Sender<()>, watch::Sender<()>)> = BTreeMap::new();
        loop {
            let theirs = announced.borrow_and_update().clone();
            let found = tokio::select! {
                _ = stop.wait_for(|order| *order != Order::GoOn) => break,
                found = self.find(&theirs) => found,
            };
            match found.problem {
                Some(problem) => shared.note_down(row, "", problem),
                None => shared.note_no_problem(row),
            }
            tasks.retain(|address, _| found.addresses.contains_key(address));
            for (address, of) in found.addresses {
                tasks.entry(address).or_insert_with(|| {
                    let (task, removed) = oneshot::channel();
                    let explorer = Explorer { shared: shared.clone(), address, name: name_of(&of, address) };
                    shared.links.scope.spawn(explorer.run(removed));
                    (task, shared.carry(address))
                });
            }
            tokio::select! {
                _ = stop.wait_for(|order| *order != Order::GoOn) => break,
                changed = announced.changed() => if changed.is_err() {
                    break;
                },
                () = sleep(LOOK_UP_EVERY) => {}
            }
        }
        shared.note_no_problem(row);
    }

    /// Returns the addresses of the peer: those of the config, then those that the peer has announced, at most [`DIAL_MAX`].
    async fn find(&self, announced: &[GatewayAddress]) -> Found {
        let mut found = Found::default();
        let given = self.given.iter().map(|entry| (entry, &AddressScope::Any));
        let announced = announced.iter().filter(|entry| !self.given.contains(entry));
        for (entry, scope) in given.chain(announced.map(|entry| (entry, &self.scope))) {
            let name_servers = self.shared.links.name_servers.load_full();
            let ips = match dial::addresses(&entry.host, &name_servers).await {
                Ok(ips) => ips,
                Err(error) => {
                    found.problem.get_or_insert_with(|| error.to_string());
                    continue;
                }
            };
            for ip in ips.iter().filter(|ip| scope.allows(**ip)) {
                if found.addresses.len() < DIAL_MAX {
                    found.addresses.entry(SocketAddr::new(*ip, entry.port)).or_insert_with(|| entry.clone());
                }
            }
        }
        found
    }
}

/// Returns an address for messages, with the host name that it is from.
fn name_of(entry: &GatewayAddress, address: SocketAddr) -> String {
    match entry.host {
        Host::Name(_) => format!("{entry} ({})", address.ip()),
        Host::Ip(_) | Host::Ips(_) => address.to_string(),
    }
}

impl Dialling {
    /// Starts to keep carriers open to an address, if the config says so, until the sender is dropped.
    fn carry(&self, address: SocketAddr) -> watch::Sender<()> {
        let removed = watch::Sender::default();
        for _ in 0..if self.group.peer.carries(Carry::FromPeer) { OF_ADDRESS } else { 0 } {
            let carrier = Carrier::new(self.links.clone(), self.group.clone(), self.who.clone(), address);
            self.links.scope.spawn(carrier.run(removed.subscribe()));
        }
        removed
    }

    fn note_down(&self, row: u64, address: &str, problem: String) {
        self.links.table.note_down(&self.group.peer.name, row, address, problem);
    }

    fn note_no_problem(&self, row: u64) {
        self.links.table.remove(&self.group.peer.name, row);
    }
}

/// The waits before the next attempt at one address.
struct Waits {
    random: u64,
    failures: Backoff,
    explorations: Backoff,
    /// When the last link was opened.
    opened_at: Instant,
}

impl Waits {
    fn new(random: u64) -> Self {
        let (failures, explorations) = (Backoff::up_to(RETRY), Backoff::up_to(EXPLORE));
        Self { random, failures, explorations, opened_at: Instant::now() }
    }

    /// Returns the wait after an attempt that has failed.
    fn after_failure(&mut self) -> Duration {
        self.failures.wait(self.random)
    }

    /// Returns the wait after an attempt that has opened a link: there may be further replicas behind the address.
    fn after_opening(&mut self) -> Duration {
        self.opened_at = Instant::now();
        self.explorations.reset();
        self.explorations.wait(self.random)
    }

    /// Returns the wait after an attempt that has found no further replica.
    fn after_nothing_new(&mut self) -> Duration {
        self.failures.reset();
        self.explorations.wait(self.random)
    }

    /// Returns the wait after a link of the peer has ended. Links that end soon after they were opened count as failures.
    fn after_loss(&mut self) -> Duration {
        if self.opened_at.elapsed() > RETRY {
            self.failures.reset();
        }
        self.explorations.reset();
        self.failures.wait(self.random)
    }
}

/// Connects to one address, again after each failure, and again to look for further replicas behind it.
struct Explorer {
    shared: Arc<Dialling>,
    address: SocketAddr,
    /// The address for messages.
    name: String,
}

/// The result of an attempt to open a link.
enum Attempt {
    /// A link with a replica that had none, and the link's place among those of the peer.
    Opened(Box<Running>, OwnedSemaphorePermit),
    /// There is nothing to open: the replica has a link, or the peer has as many links as it may have.
    NothingNew,
}

impl Explorer {
    async fn run(self, mut removed: oneshot::Receiver<()>) {
        let Dialling { links, group, lost, .. } = &*self.shared;
        let row = links.number();
        let random = u64::from(std::process::id()) ^ row;
        let (mut stop, mut losses) = (group.stop.clone(), lost.subscribe());
        let mut waits = Waits::new(random);
        links.table.note_connecting(&group.peer.name, row, &self.address.to_string());
        let mut wait = Duration::ZERO;
        loop {
            let attempt = tokio::select! {
                // An order to stop comes first. An open link ends by itself with Goodbye; an attempt is dropped at once.
                biased;
                _ = stop.wait_for(|order| *order != Order::GoOn) => break,
                _ = &mut removed => break,
                _ = losses.changed() => {
                    wait = waits.after_loss();
                    continue;
                }
                attempt = async { sleep(wait).await; Box::pin(self.attempt()).await } => attempt,
            };
            wait = match attempt {
                Ok(Attempt::Opened(running, seat)) => {
                    self.shared.note_no_problem(row);
                    links.scope.spawn(run(self.shared.clone(), *running, seat));
                    waits.after_opening()
                }
                Ok(Attempt::NothingNew) => {
                    self.shared.note_no_problem(row);
                    waits.after_nothing_new()
                }
                Err(problem) => {
                    self.shared.note_down(row, &self.address.to_string(), problem);
                    waits.after_failure()
                }
            };
        }
        self.shared.note_no_problem(row);
    }

    async fn attempt(&self) -> Result<Attempt, String> {
        let Dialling { links, group, .. } = &*self.shared;
        let Ok(seat) = group.seats.clone().try_acquire_owned() else { return Ok(Attempt::NothingNew) };
        let (outgoing, incoming, verified) = self.open().await?;
        match links.greet(group, self.address.to_string(), (outgoing, incoming), verified).await {
            Ok(running) => Ok(Attempt::Opened(Box::new(running), seat)),
            Err(Ended::AlreadyLinked) => Ok(Attempt::NothingNew),
            Err(Ended::Lost(why)) => Err(self.unheard(&why)),
            Err(ended) => Err(format!("{}: {}", self.name, ended.text())),
        }
    }

    /// Returns the problem of a connection that broke after the TLS handshake and before Hello. A server of TLS 1.3 that refuses this
    /// gateway's certificate ends it then, and its alert may be lost.
    fn unheard(&self, why: &str) -> String {
        let name = &self.name;
        match why.contains(REFUSED) {
            true => format!("{name}: {why}"),
            false => {
                format!("{name}: {why}; the gateway there may {REFUSED}: its `isthmus peers` has the reason")
            }
        }
    }

    /// Connects and verifies the peer's gateway.
    async fn open(&self) -> Result<(Outgoing, Streaming<proto::Message>, Verified), String> {
        let Self { shared, address, name } = self;
        let who = &shared.who;
        let mut context = shared.links.context.clone();
        let waiting = async {
            context.certificate.get().await;
            context.trust.get().await;
        };
        timeout(STEP_WITHIN, waiting).await.map_err(|_| "this gateway has no certificate yet".to_owned())?;
        let connecting = timeout(STEP_WITHIN, dial::dial(&Host::Ip(address.ip()), address.port(), &[])).await;
        let socket = connecting
            .map_err(|_| format!("{name} does not accept the connection"))?
            .map_err(|error| format!("{name}: {error}"))?;
        let config = client::mutual(
            context.certificate.clone(),
            context.trust.clone(),
            who.alias.clone(),
            &[LINK_PROTOCOL],
        );
        let config = config.map_err(|error| error.to_string())?;
        let mut trust = context.trust.clone();
        trust.see();
        let tls = TlsConnector::from(Arc::new(config)).connect(client::no_name(), socket);
        let stream = timeout(STEP_WITHIN, tls)
            .await
            .map_err(|_| format!("{name} does not answer the TLS handshake"))?;
        let stream = stream.map_err(|error| {
            let text = tls_error_of(&error).map_or_else(|| error.to_string(), describe);
            format!("{name}: {text}")
        })?;
        let proof = Proof::of_server(stream.get_ref().1, &mut trust)?;
        if proof.identity != who.known_gateway() {
            return Err(format!(
                "the gateway at {name} has the identity {}, expected {}",
                proof.identity, who.gateway
            ));
        }
        let opening = timeout(STEP_WITHIN, transport::open(stream, &shared.links.scope)).await;
        let link = opening.map_err(|_| format!("{name} does not answer"))?;
        let link = link.map_err(|why| self.unheard(&why))?;
        Ok((Outgoing::Dialled(link.requests), link.answers, (proof, trust)))
    }
}

/// Runs a link to its end, and tells the tasks of all addresses of the peer that it has ended.
async fn run(shared: Arc<Dialling>, running: Running, seat: OwnedSemaphorePermit) {
    let ended = shared.links.run(running).await;
    drop(seat);
    if *shared.group.stop.borrow() == Order::GoOn {
        tracing::warn!(peer = &*shared.group.peer.name, "a link with the peer ended: {}", ended.text());
    }
    shared.lost.send_modify(|count| *count += 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A random number with which waits are neither lengthened nor shortened.
    const MIDDLE: u64 = 200;

    fn waits(count: usize, mut wait: impl FnMut() -> Duration) -> Vec<f64> {
        (0..count).map(|_| wait().as_secs_f64()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_fails_is_tried_each_fifteen_seconds_and_replicas_are_looked_for_each_minute() {
        let mut all = Waits::new(MIDDLE);
        assert_eq!(waits(7, || all.after_failure()), [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]);
        assert_eq!(all.after_opening(), Duration::from_millis(500));
        let expected = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0];
        assert_eq!(waits(8, || all.after_nothing_new()), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_that_is_lost_within_fifteen_seconds_counts_as_a_failure() {
        let mut all = Waits::new(MIDDLE);
        assert_eq!(waits(3, || all.after_failure()), [0.5, 1.0, 2.0]);
        all.after_opening();
        tokio::time::advance(Duration::from_secs(15)).await;
        assert_eq!(all.after_loss(), Duration::from_secs(4));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(all.after_loss(), Duration::from_millis(500));
        assert_eq!(all.after_nothing_new(), Duration::from_millis(500), "replicas are looked for at once");
    }
}
