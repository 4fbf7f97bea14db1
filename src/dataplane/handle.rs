//! The interface of the data plane to the rest of the program: starts the workers and sends them messages.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::carriers::pool::Carriers;
use super::checks;
use super::entry::Transit;
use super::onward::returning::PassedOn;
use super::parcel::{Parcel, Place};
use super::permits;
use super::shared::{
    Condemned, Hbone, HbonePlace, LargestHolder, Message, Parked, Queue, Shared, WorkerHandle,
};
use super::socket_key::SocketKey;
use super::upstreams::Upstreams;
use super::withdrawals::{Which, Withdrawal, WithdrawalError};
use super::worker;
use isthmus_model::limits::{MemoryLimit, SourceLimits};
use isthmus_model::record::ConnectionRecord;
use isthmus_net::admission::Admission;
use isthmus_net::admission::bandwidth::Bandwidths;
use isthmus_net::admission::peers::Peers;
use isthmus_net::admission::refusals::{FullLimit, Refusals, Spell};
use isthmus_net::admission::services::Services;
use isthmus_net::budget::{
    checks_for, connections_for, dns_connections_for, http_connections_for, xds_connections_for,
};
use isthmus_net::handed::{Carrying, HandedOver};
use isthmus_net::listen::Listening;
use isthmus_net::memory::{Judgement, Measured, set_budget};
use isthmus_net::own::OwnAddresses;
use isthmus_settings::limits::Limits;
use isthmus_settings::peer::CARRY_PROTOCOL;
use isthmus_telemetry::Telemetry;
use isthmus_tls::context::NodeContext;
use isthmus_tls::server::mutual;
use isthmus_tls::trust::Shower;
use isthmus_world::Reader;

/// The number of messages that may wait for a worker; a sender waits while the mailbox is full.
const MAILBOX: usize = 64;

/// The time that closing a listener takes at most for its caller; a worker that hangs closes its socket later.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// The time between two looks whether all connections have been reset.
const RESET_EVERY: Duration = Duration::from_millis(2);

/// The time within which the workers say what they hold.
const LARGEST_WITHIN: Duration = Duration::from_millis(500);
/// The smallest number of bytes held by an identity that are worth the end of one of its streams while memory is short.
const GIVES_WAY: usize = 256 << 10;

/// The running data plane.
pub struct Dataplane {
    shared: Arc<Shared>,
    threads: Vec<thread::JoinHandle<()>>,
    open: BTreeMap<SocketKey, SocketAddr>,
}

/// A handle that reads and controls a running data plane; cheap to clone.
#[derive(Clone)]
pub struct Control {
    shared: Arc<Shared>,
}

/// The process that goes on with a parked connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoesOn {
    /// This process.
    Here,
    /// This process, which does not offer the connection to the other one again.
    HereForGood,
    /// The other process.
    There,
}

/// The limits of the config, reduced to what the file descriptors of the process allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EffectiveLimits {
    /// The number of descriptors that the process may have open.
    pub descriptors: usize,
    /// The limit of connections and CONNECT streams of the data plane.
    pub connections: usize,
    /// The limit of incomplete hellos of all workers together.
    pub pending_hellos: usize,
    /// The limits of each source.
    pub per_source: SourceLimits,
    /// The limit of connections and CONNECT streams to one service; `None` means no limit.
    pub per_service: Option<usize>,
    /// The limit of the bandwidth of one service in each direction, in bytes per second; `None` means no limit.
    pub bytes_per_second: Option<u64>,
    /// The limit of connections of xDS clients; 0 if xDS is off.
    pub xds_connections: usize,
    /// The limit of connections of DNS clients, and separately of questions that wait for other DNS servers; 0 if there is
    /// no DNS server.
    pub dns_connections: usize,
    /// The limit of connections of each HTTP listener.
    pub http_connections: usize,
    /// The limit of simultaneous health checks; 0 if no endpoint is checked.
    pub health_checks: usize,
}

/// The number of descriptors of a connection: one socket to the client and one to the endpoint.
const PER_CONNECTION: usize = 2;
/// The number of descriptors of a call on a carrier: one socket to the client, and two that are connected with each other.
const PER_CARRIED_CALL: usize = 3;

/// The parts of the program for which descriptors are reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorUses {
    /// True if there is an xDS server.
    pub xds: bool,
    /// True if there is a DNS server.
    pub dns: bool,
    /// True if endpoints have health checks.
    pub health_checks: bool,
    /// True if calls may be passed on to another gateway, on a carrier or by HBONE.
    pub passes_on: bool,
}

impl EffectiveLimits {
    /// Computes the limits for a process that may have `descriptors` descriptors open.
    pub fn new(limits: &Limits, descriptors: usize, uses: DescriptorUses) -> Self {
        let xds_connections = if uses.xds { xds_connections_for(descriptors) } else { 0 };
        let dns_connections = if uses.dns { dns_connections_for(descriptors) } else { 0 };
        let health_checks = if uses.health_checks { checks_for(descriptors) } else { 0 };
        let each = if uses.passes_on { PER_CARRIED_CALL } else { PER_CONNECTION };
        let allowed =
            connections_for(descriptors, xds_connections + 2 * dns_connections + health_checks, each);
        let pending = limits.pending_hellos.unwrap_or(10_000).min(descriptors / 4);
        Self {
            descriptors,
            connections: limits.connections.min(allowed),
            pending_hellos: pending.max(1),
            per_source: limits.per_source,
            per_service: limits.per_service,
            bytes_per_second: limits.bytes_per_second,
            xds_connections,
            dns_connections,
            http_connections: http_connections_for(descriptors),
            health_checks,
        }
    }
}

impl Dataplane {
    /// Starts the worker threads, which listen on no address yet. Returns an error if a thread cannot be started or the TLS
    /// configuration is invalid.
    pub fn start(
        workers: usize,
        limits: EffectiveLimits,
        reader: &Reader,
        telemetry: &Telemetry,
        context: NodeContext,
        own: Arc<OwnAddresses>,
        links: mpsc::Sender<HandedOver>,
    ) -> std::io::Result<Self> {
        let tls = mutual(context.certificate.clone(), context.trust.clone(), Shower::Client, &[b"h2"]);
        let tls = Arc::new(tls.map_err(std::io::Error::other)?);
        let (certificate, trust) = (context.certificate.clone(), context.trust.clone());
        let carriers = mutual(certificate, trust, Shower::Gateway, &[CARRY_PROTOCOL]);
        let carriers = Arc::new(carriers.map_err(std::io::Error::other)?);
        let (mailboxes, messages): (Vec<_>, Vec<_>) = (0..workers).map(|_| mpsc::channel(MAILBOX)).unzip();
        let shared = Arc::new(Shared {
            process: RandomState::new().hash_one(()),
            first_id: AtomicU64::new(0),
            upstreams: Arc::new(Upstreams::new(&telemetry.recorder)),
            telemetry: telemetry.clone(),
            limits: Arc::new(permits::Limits {
                admission: Admission::new(0),
                services: Services::default(),
                peers: Peers::default(),
                bandwidths: Bandwidths::default(),
                refusals: Refusals::default(),
            }),
            pending_cap: AtomicUsize::new(0),
            check_places: Arc::default(),
            checks: watch::Sender::default(),
            own,
            workers: mailboxes.into_iter().map(WorkerHandle::new).collect(),
            hbone: Hbone { tls, carriers, context },
            holders: Arc::default(),
            memory: watch::Sender::default(),
            carriers: Arc::default(),
            passed_on: PassedOn::default(),
            links,
            kernel_memory: Arc::default(),
        });
        let mut dataplane = Self { shared, threads: Vec::new(), open: BTreeMap::new() };
        dataplane.set_limits(limits);
        for (index, messages) in messages.into_iter().enumerate() {
            let (shared, reader) = (dataplane.shared.clone(), reader.clone());
            let builder = thread::Builder::new().name(format!("isthmus-{index}"));
            let thread = builder.spawn(move || worker::thread(index, shared, reader, messages))?;
            dataplane.threads.push(thread);
        }
        Ok(dataplane)
    }

    /// Returns the state that all workers share.
    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns a handle that reads and controls the data plane.
    pub fn control(&self) -> Control {
        Control { shared: self.shared.clone() }
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.shared.workers.len()
    }

    /// Applies new limits. Connections above the new limits stay open.
    pub fn set_limits(&self, limits: EffectiveLimits) {
        self.shared.limits.admission.set_limit(limits.connections);
        self.shared.limits.admission.set_source_limits(&limits.per_source);
        self.shared.limits.services.set_limit(limits.per_service);
        let each = limits.pending_hellos.div_ceil(self.workers());
        self.shared.pending_cap.store(each, Ordering::Relaxed);
        self.shared.check_places.store(limits.health_checks, Ordering::Relaxed);
    }

    /// Starts to accept connections on one more listener's sockets.
    pub async fn open(&mut self, key: SocketKey, listening: Listening) {
        self.shared.own.listens(listening.address);
        let sockets: Vec<OwnedFd> = listening.sockets;
        // There are more sockets than workers if they come from an earlier process with more workers. Each needs a worker, because
        // the kernel distributes connections among all of them.
        for (worker, socket) in self.shared.workers.iter().cycle().zip(sockets) {
            // This fails only if the worker's thread has ended.
            let _ = worker.mailbox.send(Message::Open { key: key.clone(), socket }).await;
        }
        self.open.insert(key, listening.address);
    }

    /// Stops accepting connections on a listener's sockets, and waits up to a second until the sockets are closed. The open
    /// connections stay open until their listener is retired.
    pub async fn close(&mut self, key: &SocketKey) {
        if let Some(address) = self.open.remove(key) {
            self.shared.own.closed(address);
        }
        let mut all_closed = Vec::new();
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            let (closed, is_closed) = oneshot::channel();
            let _ = mailbox.send(Message::Close { key: key.clone(), closed }).await;
            all_closed.push(is_closed);
        }
        let _ = tokio::time::timeout(CLOSED_WITHIN, join_all(all_closed)).await;
    }

    /// Asks the callers on the connections that a listener accepted before the time `before` to open no more streams. If the
    /// config does not name the listener any more, the connections may finish within the time `within`.
    pub async fn retire(&self, listener: &Arc<str>, before: Instant, within: Duration) {
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            let _ = mailbox.send(Message::Retire { listener: listener.clone(), before, within }).await;
        }
    }

    /// Ends the connections that the newest config file does not admit any more.
    pub async fn readmit(&self) {
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            let _ = mailbox.send(Message::Readmit).await;
        }
    }

    /// Stops listening, waits up to `within` for the connections to finish, resets the rest, and ends the threads.
    pub async fn drain(self, within: Duration) {
        self.end(within, Queue::Accept).await;
    }

    /// As [`drain`](Self::drain), but leaves the connections that the kernel has queued to another process, which has the same
    /// listening sockets. Connections can be [parked](Control::park) meanwhile, and are left alone until [`Control::end_left`].
    pub async fn leave(self, within: Duration) {
        self.end(within, Queue::Leave).await;
    }

    async fn end(self, within: Duration, queue: Queue) {
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            let _ = mailbox.send(Message::Drain { within, queue }).await;
        }
        let join = tokio::task::spawn_blocking(move || {
            for thread in self.threads {
                if thread.join().is_err() {
                    tracing::error!("a data-plane thread panicked");
                }
            }
        });
        let _ = join.await;
    }
}

impl Control {
    /// Returns the run-time state of endpoints.
    pub fn upstreams(&self) -> &Arc<Upstreams> {
        &self.shared.upstreams
    }

    /// Returns the admission counts of connections and CONNECT streams.
    pub fn admission(&self) -> &Admission {
        &self.shared.limits.admission
    }

    /// Returns the counts of connections and CONNECT streams by service.
    pub fn services(&self) -> &Services {
        &self.shared.limits.services
    }

    /// Returns the bandwidth that is used of each limit.
    pub fn bandwidths(&self) -> &Bandwidths {
        &self.shared.limits.bandwidths
    }

    /// Returns the carriers in use.
    pub fn carriers(&self) -> &Arc<Carriers> {
        &self.shared.carriers
    }

    /// Serves the carriers that arrive until there are no more. Each goes to the worker with the fewest HBONE connections.
    pub fn carry(&self, mut arriving: mpsc::Receiver<Carrying>) -> impl Future<Output = ()> + Send + use<> {
        let shared = self.shared.clone();
        async move {
            while let Some(carrying) = arriving.recv().await {
                let workers = shared.workers.iter().enumerate();
                let count = |worker: &WorkerHandle| worker.hbone_connections.load(Ordering::Relaxed);
                let Some((index, worker)) = workers.min_by_key(|(_, worker)| count(worker)) else { break };
                let place = HbonePlace::take(&shared, index);
                // This fails only if the worker's thread has ended. The dialling task finds its sender dropped.
                let _ = worker.mailbox.send(Message::Carry(Box::new(carrying), place)).await;
            }
        }
    }

    /// Returns the limits that have refused connections within the last minute.
    pub fn refusals(&self) -> Vec<(FullLimit, Spell)> {
        self.shared.limits.refusals.recent()
    }

    /// Runs the health checks until there are no more snapshots.
    pub fn check(&self, reader: Reader) -> impl Future<Output = ()> + Send + use<> {
        let around = checks::Surroundings {
            upstreams: self.shared.upstreams.clone(),
            own: self.shared.own.clone(),
            places: self.shared.check_places.clone(),
            recorder: self.shared.telemetry.recorder.clone(),
            summary: self.shared.checks.clone(),
        };
        checks::run(around, reader)
    }

    /// Returns the state of the health checks.
    pub fn checks(&self) -> Arc<checks::Summary> {
        self.shared.checks.borrow().clone()
    }

    /// Returns the newest state of the memory budget.
    pub fn memory(&self) -> Judgement {
        *self.shared.memory.borrow()
    }

    /// Judges the memory budget anew. While memory is short, ends the CONNECT stream that holds most.
    pub async fn judge_memory(&self, limit: MemoryLimit, measured: Measured) {
        let judgement = self.memory().next(limit, measured);
        set_budget(judgement.budget);
        self.shared.holders.judged(&judgement);
        self.shared.memory.send_replace(judgement);
        if judgement.ends_a_holder() && self.end_largest().await {
            self.shared.memory.send_modify(|state| state.count_ended(SystemTime::now()));
        }
    }

    /// Ends the CONNECT stream that holds most, of the identity that holds most; returns false if none holds enough to make a
    /// difference.
    async fn end_largest(&self) -> bool {
        if !self.shared.holders.is_above_kept() {
            return false;
        }
        // A worker that does not answer in time is busy for another reason.
        let asked = self.shared.workers.iter().map(|WorkerHandle { mailbox, .. }| {
            tokio::time::timeout(LARGEST_WITHIN, async {
                let (sender, answer) = oneshot::channel();
                mailbox.send(Message::Largest(sender)).await.ok()?;
                answer.await.ok()?
            })
        });
        let largest = join_all(asked).await.into_iter().filter_map(|answer| answer.ok()?).max();
        let Some(LargestHolder { of_identity, bytes, worker, id }) =
            largest.filter(|holder| holder.of_identity >= GIVES_WAY)
        else {
            return false;
        };
        tracing::warn!(
            id,
            bytes,
            of_identity,
            "memory is short, so the CONNECT stream that holds most is ended"
        );
        self.shared.workers[worker].mailbox.try_send(Message::GiveWay(id)).is_ok()
    }

    /// Returns the number of live connections and CONNECT streams.
    pub fn connections_active(&self) -> usize {
        self.shared.limits.admission.used()
    }

    /// Withdraws endpoints: they get no new connections. If they are disabled, also closes their open connections; returns
    /// the number of closed connections.
    pub async fn withdraw(&self, which: Which, withdrawal: Withdrawal) -> Result<usize, WithdrawalError> {
        // The endpoints are withdrawn first, so that no connection to them begins after the open ones are listed.
        self.shared.upstreams.withdrawals().withdraw(which.clone(), withdrawal)?;
        Ok(match withdrawal {
            Withdrawal::Drained => 0,
            Withdrawal::Disabled => self.kill(Condemned::Endpoint(which)).await,
        })
    }

    /// Resets the connections of a data plane that drains, and returns when all have ended.
    pub async fn reset(&self) {
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            // This fails only if the worker has drained.
            let _ = mailbox.send(Message::Drain { within: Duration::ZERO, queue: Queue::Accept }).await;
        }
        let has_drained = |worker: &WorkerHandle| worker.is_drained.load(Ordering::Acquire);
        while self.connections_active() > 0 && !self.shared.workers.iter().all(has_drained) {
            tokio::time::sleep(RESET_EVERY).await;
        }
    }

    /// Closes the connection or CONNECT stream with this id. Returns false if there is none.
    pub async fn close(&self, id: u64) -> bool {
        self.kill(Condemned::Connection(id)).await > 0
    }

    async fn kill(&self, which: Condemned) -> usize {
        let counts = self.ask(|answer| Message::Kill { which: which.clone(), answer }).await;
        counts.into_iter().sum()
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.shared.workers.len()
    }

    /// Returns other descriptors of all listening sockets, and an id above those of all connections.
    pub async fn sockets(&self) -> (Vec<(SocketKey, OwnedFd)>, u64) {
        let (mut sockets, mut unused_id) = (Vec::new(), 0);
        for of_worker in self.ask(Message::Sockets).await {
            sockets.extend(of_worker.sockets);
            unused_id = unused_id.max(of_worker.unused_id);
        }
        (sockets, unused_id)
    }

    /// Has the ids of later connections begin above this one.
    pub fn number_from(&self, first_id: u64) {
        self.shared.first_id.store(first_id, Ordering::Relaxed);
    }

    /// Stops at most `most` relayed connections of a worker at a safe point. No byte of them moves until they are
    /// [settled](Self::settle). Also returns how many can be parked later, and how many end in this process. The numbers are 0 if
    /// more connections can be parked at once. If `most` is 0, all connections go on here. Returns `None` if the worker has drained.
    pub async fn park(&self, worker: usize, most: usize) -> Option<(Vec<Parcel>, usize, usize)> {
        let (answer, parked) = oneshot::channel();
        self.shared.workers[worker].mailbox.send(Message::Park { most, answer }).await.ok()?;
        let Parked { parcels, later, left } = parked.await.ok()?;
        Some((parcels, later, left))
    }

    /// Ends the connections that no other process takes over, each in a pause, over the time `within`.
    pub async fn end_left(&self, within: Duration) {
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            let _ = mailbox.send(Message::EndLeft { within }).await;
        }
    }

    /// Takes over connections that another process has parked; they wait until they are [settled](Self::settle). Returns for each
    /// its place, or why it cannot be taken.
    pub async fn take_over(&self, worker: usize, parcels: Vec<Parcel>) -> Vec<Result<Place, String>> {
        let (answer, taken) = oneshot::channel();
        let sent = self.shared.workers[worker].mailbox.send(Message::TakeOver { parcels, answer }).await;
        match sent {
            Ok(()) => taken.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }

    /// Says which process goes on with parked connections.
    pub async fn settle(&self, places: &[Place], goes_on: GoesOn) {
        let transit = match goes_on {
            GoesOn::Here => Transit::Here,
            GoesOn::HereForGood => Transit::Kept,
            GoesOn::There => Transit::Gone,
        };
        for (worker, WorkerHandle { mailbox, .. }) in self.shared.workers.iter().enumerate() {
            let places: Vec<Place> = places.iter().filter(|place| place.worker == worker).copied().collect();
            if !places.is_empty() {
                let _ = mailbox.send(Message::Settle { places, transit }).await;
            }
        }
    }

    /// Sends each worker a message in turn and collects the answers. A worker whose thread has ended does not answer.
    async fn ask<T>(&self, message: impl Fn(oneshot::Sender<T>) -> Message) -> Vec<T> {
        let mut answers = Vec::new();
        for WorkerHandle { mailbox, .. } in &self.shared.workers {
            let (sender, answer) = oneshot::channel();
            if mailbox.send(message(sender)).await.is_ok() {
                answers.extend(answer.await);
            }
        }
        answers
    }

    /// Returns all live connections, oldest first; at most 10,000 per worker.
    pub async fn connections(&self) -> Vec<ConnectionRecord> {
        self.listed(None).await
    }

    /// Returns the live connections to a service or route, oldest first, of the first 10,000 connections of each worker.
    pub async fn connections_to(&self, destination: &str) -> Vec<ConnectionRecord> {
        self.listed(Some(destination.into())).await
    }

    async fn listed(&self, to: Option<Arc<str>>) -> Vec<ConnectionRecord> {
        let asked = self.ask(|answer| Message::Connections { to: to.clone(), answer }).await;
        let mut all: Vec<ConnectionRecord> = asked.into_iter().flatten().collect();
        all.sort_by_key(|record| record.id);
        all
    }

    /// Returns true if every worker that has not drained answers within the time `within`.
    pub async fn alive(&self, within: Duration) -> bool {
        let all = async {
            for WorkerHandle { mailbox, is_drained, .. } in &self.shared.workers {
                let (answer, alive) = oneshot::channel();
                let answers = mailbox.send(Message::Alive(answer)).await.is_ok() && alive.await.is_ok();
                if !answers && !is_drained.load(Ordering::Acquire) {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(within, all).await.unwrap_or(false)
    }
}
