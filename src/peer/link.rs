//! One link, from Hello to its end, and the values that links share.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

use super::budget::Budget;
use super::enrolled::GatewayAddress;
use super::export_times::ExportTimes;
use super::importer::Importer;
use super::instances::{Instances, Newest};
use super::session::{Ended, Order, Outgoing, Session};
use super::status::LinkTable;
use isthmus_model::identity::TrustDomain;
use isthmus_model::link::LinkKey;
use isthmus_net::handed::Carrying;
use isthmus_net::own::OwnAddresses;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::peer::Peer;
use isthmus_tasks::latest::Latest;
use isthmus_tasks::scope::Scope;
use isthmus_tls::context::NodeContext;
use isthmus_tls::proof::Proof;
use isthmus_tls::roots::RootStore;
use isthmus_tls::trust::{TrustBundles, describe};
use isthmus_world::Reader;

/// The time limit of each step: connecting, TLS, and opening the link.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(10);
/// The largest number of simultaneous links with one peer.
const LINKS_OF_PEER_MAX: usize = 64;

/// The state and the handles that all links of this gateway share.
pub(super) struct Shared {
    reader: Reader,
    /// The addresses on which this process listens.
    listening: Arc<OwnAddresses>,
    pub(super) context: NodeContext,
    pub(super) peer_roots: RootStore,
    importer: Arc<dyn Importer>,
    pub(super) table: Arc<LinkTable>,
    pub(super) times: Arc<ExportTimes>,
    instance: Arc<str>,
    pub(super) scope: Scope,
    numbers: AtomicU64,
    /// The queue of carriers to the data plane.
    pub(super) carriers: mpsc::Sender<Carrying>,
    /// The memory of the records of all peers, in bytes.
    pub(super) records: Arc<AtomicUsize>,
    /// Our trust domain.
    pub(super) own: Mutex<Option<TrustDomain>>,
    /// The name servers at which the addresses of peers are looked up; empty: the system's.
    pub(super) name_servers: ArcSwap<Vec<SocketAddr>>,
}

/// The values that all links with one peer share.
#[derive(Clone)]
pub(super) struct Group {
    pub(super) peer: Arc<Peer>,
    /// Orders each link to end.
    pub(super) stop: watch::Receiver<Order>,
    /// The limit of links.
    pub(super) seats: Arc<Semaphore>,
    /// The newest link of each process of the peer.
    instances: Instances,
    /// The memory of the peer's records.
    budget: Arc<Budget>,
    /// The addresses that the peer has announced.
    pub(super) announced: watch::Sender<Vec<GatewayAddress>>,
    /// The number of open links.
    open: watch::Sender<usize>,
    /// True if the peer's gateways allow carriers, as the newest link says.
    pub(super) carries: watch::Sender<bool>,
    /// The time without a link after which roots that were announced are not used.
    expire_after: Duration,
    /// The same time as the peer announced it last with its roots; `None`: it has not.
    valid_for: watch::Sender<Option<Duration>>,
}

/// A link after Hello.
pub(super) struct Running {
    session: Session,
    key: LinkKey,
    verified: Verified,
    /// The number of open links with the peer.
    open: watch::Sender<usize>,
}

/// The verified identity of the peer's gateway, and a reader of the roots. The roots that the reader saw last have verified the
/// identity.
pub(super) type Verified = (Proof, Latest<TrustBundles>);

impl Group {
    pub(super) fn new(
        peer: Arc<Peer>,
        expire_after: Duration,
        records: &Arc<AtomicUsize>,
        stop: watch::Receiver<Order>,
    ) -> Self {
        let budget = Budget::new(peer.limits.memory, records);
        Self {
            peer,
            stop,
            seats: Arc::new(Semaphore::new(LINKS_OF_PEER_MAX)),
            instances: Arc::default(),
            budget,
            announced: watch::Sender::default(),
            open: watch::Sender::default(),
            carries: watch::Sender::default(),
            expire_after,
            valid_for: watch::Sender::default(),
        }
    }

    /// Returns the time without a link after which roots that the peer announced are not used.
    fn roots_last(&self) -> Duration {
        self.valid_for.borrow().map_or(self.expire_after, |time| time.min(self.expire_after))
    }
}

impl Shared {
    pub(super) fn new(
        (reader, listening): (Reader, Arc<OwnAddresses>),
        (context, peer_roots): (NodeContext, RootStore),
        importer: Arc<dyn Importer>,
        (table, times): (Arc<LinkTable>, Arc<ExportTimes>),
        instance: Arc<str>,
        carriers: mpsc::Sender<Carrying>,
        scope: &Scope,
    ) -> Self {
        Self {
            reader,
            listening,
            context,
            peer_roots,
            importer,
            table,
            times,
            instance,
            scope: scope.clone(),
            numbers: AtomicU64::new(1),
            carriers,
            records: Arc::default(),
            own: Mutex::default(),
            name_servers: ArcSwap::default(),
        }
    }

    /// Returns a number that no other link and no other row of the table has.
    pub(super) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Exchanges Hello messages over a connection with a gateway at `address`.
    pub(super) async fn greet(
        self: &Arc<Self>,
        group: &Group,
        address: String,
        (outgoing, incoming): (Outgoing, tonic::Streaming<proto::Message>),
        verified: Verified,
    ) -> Result<Running, Ended> {
        let number = self.number();
        let (replace, replaced) = watch::channel(false);
        let mut session = Session {
            peer: group.peer.clone(),
            budget: group.budget.clone(),
            number,
            address,
            instance: self.instance.clone(),
            reader: self.reader.clone(),
            own: self.listening.clone(),
            times: self.times.clone(),
            trust: self.context.trust.clone(),
            roots: self.own_roots(group.expire_after),
            valid_for: group.valid_for.clone(),
            peer_roots: self.peer_roots.clone(),
            importer: self.importer.clone(),
            table: self.table.clone(),
            outgoing,
            incoming,
            stop: group.stop.clone(),
            replaced,
            newest: Newest::new(group.instances.clone(), number, replace),
            announced: group.announced.clone(),
            carries: group.carries.clone(),
        };
        let key = session.greet().await?;
        Ok(Running { session, key, verified, open: group.open.clone() })
    }

    /// Runs a link to its end.
    pub(super) async fn run(&self, running: Running) -> Ended {
        let Running { session, key, verified: (proof, trust), open } = running;
        open.send_modify(|count| *count += 1);
        let (peer, number) = (session.peer.name.clone(), session.number);
        let ended = tokio::select! {
            // The session comes first: it can say Goodbye even if the order to end comes together with the loss of the roots.
            biased;
            ended = Box::pin(session.run(key)) => ended,
            // The roots have changed and do not verify the peer's certificate any more.
            error = proof.until_distrusted(trust) => Ended::Lost(describe(&error)),
        };
        self.table.end(&peer, number, &ended.text());
        open.send_modify(|count| *count -= 1);
        ended
    }

    /// Returns a function that reads the newest roots of our own trust domain, for messages to a peer, whose replicas may use them
    /// for this time without a link.
    fn own_roots(
        self: &Arc<Self>,
        valid_for: Duration,
    ) -> Arc<dyn Fn() -> Option<proto::Roots> + Send + Sync> {
        let shared = self.clone();
        Arc::new(move || {
            let own = shared.own.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
            let bundles = shared.context.trust.newest()?;
            let roots = bundles.roots_of(&own)?;
            let certificates = roots.iter().map(|root| root.to_vec()).collect();
            let valid_for = u32::try_from(valid_for.as_secs()).unwrap_or(u32::MAX);
            Some(proto::Roots { trust_domain: own.to_string(), certificates, valid_for })
        })
    }
}

/// Calls `suspend`, which suspends the roots that a peer has announced, whenever there has been no link with the peer for so long
/// that the peer may have withdrawn them meanwhile. The next announcement ends the suspension.
pub(super) async fn expire_roots(group: Group, suspend: impl Fn()) {
    let (mut stop, mut open) = (group.stop.clone(), group.open.subscribe());
    let expiring = async {
        // Fails only if the group does not exist any more.
        while open.wait_for(|count| *count == 0).await.is_ok() {
            if timeout(group.roots_last(), open.wait_for(|count| *count > 0)).await.is_err() {
                suspend();
                let _ = open.wait_for(|count| *count > 0).await;
            }
        }
    };
    tokio::select! {
        _ = stop.wait_for(|order| *order != Order::GoOn) => {}
        () = expiring => {}
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::{Instant, sleep};

    use super::*;
    use isthmus_snapshot::testing::peer;

    #[tokio::test(start_paused = true)]
    async fn announced_roots_are_suspended_once_there_was_no_link_for_the_whole_time() {
        let (_stop, stopped) = watch::channel(Order::GoOn);
        let most = Duration::from_secs(600);
        let group = Group::new(Arc::new(peer("west", &[])), most, &Arc::default(), stopped);
        let (open, valid_for) = (group.open.clone(), group.valid_for.clone());
        let (begun, suspended) = (Instant::now(), RefCell::new(Vec::new()));
        let story = async {
            let times = [(0, 599), (1, 9_000), (0, 599), (2, 1), (1, 9_000), (0, 2_000), (1, 1), (0, 601)];
            for (links, seconds) in times {
                open.send_replace(links);
                sleep(Duration::from_secs(seconds)).await;
            }
            // The peer may shorten the time, and not lengthen it.
            for (announced, links, seconds) in [(9_000, 1, 1), (9_000, 0, 601), (60, 1, 1), (60, 0, 61)] {
                valid_for.send_replace(Some(Duration::from_secs(announced)));
                open.send_replace(links);
                sleep(Duration::from_secs(seconds)).await;
            }
        };
        let suspend = || suspended.borrow_mut().push(begun.elapsed().as_secs());
        tokio::select! {
            () = expire_roots(group, suspend) => panic!("it ended"),
            () = story => {}
        }
        let begin = 599 + 9_000 + 599 + 1 + 9_000;
        let second = begin + 2_000 + 1 + 600;
        assert_eq!(*suspended.borrow(), [begin + 600, second, second + 2 + 600, second + 2 + 601 + 1 + 60]);
    }
}
