//! The state that both transports share, and the task that keeps the names up to date.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;

use super::Options;
use super::answer::{Extent, Question, Reply, Transport, Verdict, answer};
use super::forward::{Forwarder, may_ask};
use super::names::Names;
use isthmus_tasks::background;
use isthmus_telemetry::names::{NameMetrics, Unanswered};
use isthmus_telemetry::recorder::Recorder;
use isthmus_world::Reader;

/// The DNS server.
pub struct Server {
    names: ArcSwap<Names>,
    forwarder: Forwarder,
    address: SocketAddr,
    bind: SocketAddr,
    serving: AtomicBool,
    pub(super) metrics: NameMetrics,
}

/// The reaction to a message of a client.
pub(super) enum Next {
    /// An answer is ready.
    Send(Reply),
    /// Another server must be asked.
    Ask(Box<Question>),
    /// The message gets no answer.
    Ignore,
}

impl Server {
    /// Makes the server for a bound address. At most `pending` questions to other servers wait at a time.
    pub fn new(
        options: &Options,
        address: SocketAddr,
        reader: &Reader,
        pending: usize,
        recorder: &Recorder,
    ) -> Arc<Self> {
        let names = Names::new(reader.latest(), options.zones.clone(), options.ranges, address.ip());
        let metrics = NameMetrics::new(recorder);
        metrics.services(names.services());
        let forwarder = Forwarder::new(options.upstream.clone(), pending);
        Arc::new(Self {
            names: ArcSwap::from_pointee(names),
            forwarder,
            address,
            bind: options.bind,
            serving: AtomicBool::new(false),
            metrics,
        })
    }

    /// Updates the names for each new snapshot, until there are no more snapshots.
    pub async fn follow(self: Arc<Self>, reader: Reader) {
        loop {
            let names = self.names.load_full();
            let seen = names.snapshot().generation;
            drop(names);
            if !reader.changed(seen).await {
                return;
            }
            let (server, reader) = (self.clone(), reader.clone());
            // A new policy may change every service, so the update runs in the background.
            let renewed = background::run(move || {
                let snapshot = reader.latest();
                let before = server.names.load_full();
                let since = reader.since(before.snapshot().generation, snapshot.generation);
                server.names.store(Arc::new(before.next(snapshot, &since)));
            });
            if renewed.await.is_err() {
                tracing::error!(
                    "internal error: cannot update the names of the DNS server; the server answers with the names before"
                );
                return;
            }
            self.metrics.services(self.names.load().services());
        }
    }

    /// Records that the server is serving.
    pub fn serves(&self) {
        self.serving.store(true, Ordering::Relaxed);
    }

    /// Returns true if queries are answered.
    pub fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Relaxed)
    }

    /// Returns the bind address.
    pub fn bind(&self) -> SocketAddr {
        self.bind
    }

    /// Returns the bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the zones that the server answers for, as text.
    pub fn zones(&self) -> Vec<String> {
        self.names.load().zones().iter().map(ToString::to_string).collect()
    }

    /// Returns the number of services in the zones.
    pub fn services(&self) -> usize {
        self.names.load().services()
    }

    /// Returns the reaction to a message of a client.
    pub(super) fn decide(&self, bytes: &[u8], client: IpAddr, transport: Transport, extent: Extent) -> Next {
        match answer(bytes, &self.names.load(), transport, extent) {
            Verdict::Reply(reply) => Next::Send(reply),
            Verdict::Forward(question) if self.forwarder.is_off() || !may_ask(client) => {
                Next::Send(question.refused())
            }
            Verdict::Forward(question) => Next::Ask(question),
            Verdict::Drop => {
                self.metrics.unanswered(Unanswered::NoQuery);
                Next::Ignore
            }
        }
    }

    /// Forwards a question of a client to another server.
    pub(super) async fn ask(&self, question: &Question, client: IpAddr) -> Reply {
        match self.forwarder.ask(question, client, &self.metrics).await {
            Some(answer) => question.relay(answer.to_vec(), &self.names.load()),
            None => question.failed(),
        }
    }
}
