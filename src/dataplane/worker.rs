//! One data-plane thread: its runtime, its listeners and its mailbox. The connections of the thread borrow its [`Core`].

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::carriers::dialled;
use super::clock::TICK;
use super::connections::AT_ONCE;
use super::core::Core;
use super::entry::{Entry, Transit};
use super::eviction::take_back;
use super::handover::{park, settle, take_over};
use super::hbone::{self, held};
use super::killing::kill;
use super::listener::{OpenListener, Stop};
use super::readmission::readmit_all;
use super::retire;
use super::shared::{ListeningSockets, Message, Queue, Shared};
use super::socket_key::SocketKey;
use super::tick::tick;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionRecord;
use isthmus_tasks::timer::Timer;
use isthmus_world::Reader;

/// The time between two looks whether all connections of a draining worker have finished.
const FINISHED_EVERY: Duration = Duration::from_millis(10);
/// The time within which it is known which process goes on with parked connections, and the time between two looks.
const DECIDED_WITHIN: Duration = Duration::from_secs(15);
const UNDECIDED: Duration = Duration::from_millis(100);
/// The number of connections that one worker lists at most.
const LISTED_MAX: usize = 10_000;

/// A worker: its state and its open listeners.
struct Worker {
    core: Rc<Core>,
    /// The open sockets of each listener. There may be several if an earlier process had more workers.
    listeners: BTreeMap<SocketKey, Vec<OpenListener>>,
}

impl Worker {
    /// Handles messages until the worker is drained.
    async fn run(mut self, timer: Timer, mut mailbox: mpsc::Receiver<Message>) {
        self.core.scope.spawn(keep_ticking(self.core.clone(), timer));
        loop {
            match mailbox.recv().await {
                Some(Message::Drain { within, queue }) => {
                    return self.drain(within, queue, &mut mailbox).await;
                }
                Some(message) => self.obey(message),
                None => return self.drain(Duration::ZERO, Queue::Accept, &mut mailbox).await,
            }
        }
    }

    fn obey(&mut self, message: Message) {
        let core = &self.core;
        match message {
            Message::Open { key, socket } => match OpenListener::start(core, key.clone(), socket) {
                Ok(open) => self.listeners.entry(key).or_default().push(open),
                Err(error) => {
                    tracing::error!(on = %key, %error, "a data-plane thread cannot accept connections on its listening \
                                                           socket")
                }
            },
            Message::Close { key, closed } => {
                stop(self.listeners.remove(&key).unwrap_or_default(), Queue::Accept, closed);
            }
            Message::Retire { listener, before, within } => {
                core.scope.spawn(end_listener(core.clone(), listener, before, within));
            }
            Message::Arrive(arrival) => hbone::arrive(core, *arrival),
            Message::Carry(carrying, place) => {
                core.scope.spawn(Box::pin(dialled::serve(core.clone(), *carrying, place)));
            }
            Message::Readmit => core.scope.spawn(readmit_all(core.clone())),
            Message::Kill { which, answer } => core.scope.spawn(kill(core.clone(), which, answer)),
            Message::Connections { to, answer } => core.scope.spawn(list(core.clone(), to, answer)),
            Message::TakeBack { holder, asked } => take_back(core, holder, asked),
            Message::Largest(answer) => {
                let _ = answer.send(held::largest(core));
            }
            Message::GiveWay(id) => held::give_way(core, id),
            Message::Alive(answer) => {
                let _ = answer.send(());
            }
            Message::Sockets(answer) => {
                // The caller may have stopped waiting.
                let _ = answer.send(self.sockets());
            }
            Message::Park { most, answer } => core.scope.spawn(park(core.clone(), most, answer)),
            Message::TakeOver { parcels, answer } => {
                let _ = answer.send(parcels.into_iter().map(|parcel| take_over(core, parcel)).collect());
            }
            Message::Settle { places, transit } => settle(core, &places, transit),
            Message::EndLeft { within } => retire::end_all(core, within),
            Message::Drain { .. } => {}
        }
    }

    /// Returns other descriptors of the listening sockets. A socket without another descriptor, because the process has too many,
    /// is left out.
    fn sockets(&self) -> ListeningSockets {
        let all = self.listeners.iter().flat_map(|(key, open)| open.iter().map(move |open| (key, open)));
        let sockets = all.filter_map(|(key, open)| Some((key.clone(), open.socket().ok()?))).collect();
        ListeningSockets { sockets, unused_id: self.core.unused_id() }
    }

    /// Stops listening, waits up to `within` for connections to finish, and ends the rest. Obeys messages meanwhile: an
    /// operator may look for the connections that are still open, and close them.
    async fn drain(&mut self, within: Duration, queue: Queue, mailbox: &mut mpsc::Receiver<Message>) {
        let stop = |open: Vec<OpenListener>| {
            let (closed, is_closed) = oneshot::channel();
            stop(open, queue, closed);
            is_closed
        };
        join_all(std::mem::take(&mut self.listeners).into_values().map(stop)).await;
        self.core.start_draining();
        // The connections that another process may take over wait for it.
        if queue == Queue::Accept {
            retire::end_all(&self.core, within);
        }
        self.finish(within, mailbox).await;
        // The other process may still leave a parked connection to this one.
        let decided = Instant::now() + DECIDED_WITHIN;
        while self.has_parked() && Instant::now() < decided {
            self.finish(UNDECIDED, mailbox).await;
        }
        self.core.connections.cut_where(|_| true, Reason::Draining);
        // Ended connections need time to close: a client may take up to a second to read an alert.
        self.finish(Duration::from_millis(1_500), mailbox).await;
        self.core.shared.workers[self.core.numbers.index()].is_drained.store(true, Ordering::Release);
    }

    /// Obeys messages until all connections have finished, at most for the time `within`, or for that of a later order to drain.
    async fn finish(&mut self, within: Duration, mailbox: &mut mpsc::Receiver<Message>) {
        let mut deadline = Instant::now() + within;
        while self.is_busy() && Instant::now() < deadline {
            tokio::select! {
                Some(message) = mailbox.recv() => match message {
                    Message::Drain { within, .. } => deadline = deadline.min(Instant::now() + within),
                    message => self.obey(message),
                },
                () = tokio::time::sleep_until(deadline.min(Instant::now() + FINISHED_EVERY)) => {}
            }
        }
    }

    /// Returns true if it is not known which process goes on with a connection.
    fn has_parked(&self) -> bool {
        self.core.connections.table.borrow().iter().any(|(_, entry)| entry.transit() == Transit::Parked)
    }

    /// Returns true if the table contains a connection.
    fn is_busy(&self) -> bool {
        !self.core.connections.table.borrow().is_empty()
    }
}

/// Stops the sockets of one listener; drops `closed` once all are closed.
fn stop(open: Vec<OpenListener>, queue: Queue, closed: oneshot::Sender<()>) {
    let closed = Rc::new(closed);
    for open in open {
        open.stop(Stop { queue, closed: closed.clone() });
    }
}

/// Ticks about once a second, also while the worker drains: the connections that are left keep their limits and timeouts.
async fn keep_ticking(core: Rc<Core>, timer: Timer) {
    loop {
        // The time to the next tick begins before this one, also if it is late: connections have their whole time to move bytes.
        let set = timer.set(TICK);
        tick(&core).await;
        let expired = match set {
            Ok(()) => timer.expired().await,
            failed => failed,
        };
        if let Err(error) = expired {
            // Neither call has a reason to fail; should one, the worker ticks at a higher cost.
            tracing::error!(index = core.numbers.index(), %error, "the timer of a data-plane thread does not work");
            tokio::time::sleep(TICK).await;
        }
    }
}

/// Sends the records of the live connections to `answer`, only those to the service or route `to` if it is given. Yields to other tasks
/// after each batch.
async fn list(core: Rc<Core>, to: Option<Arc<str>>, answer: oneshot::Sender<Vec<ConnectionRecord>>) {
    let is_listed = |entry: &&Rc<Entry>| match &to {
        None => core.connections.has(entry),
        Some(to) => entry.record.borrow().destination() == Some(to) && core.connections.has(entry),
    };
    let entries: Vec<Rc<Entry>> =
        core.connections.table.borrow().iter().take(LISTED_MAX).map(|(_, entry)| entry.clone()).collect();
    let mut listed = Vec::new();
    for some in entries.chunks(AT_ONCE) {
        listed.extend(
            some.iter()
                .filter(is_listed)
                .map(|entry| entry.record_so_far(core.mesh.network_of(entry.source().ip()))),
        );
        tokio::task::yield_now().await;
    }
    // The caller may have stopped waiting.
    let _ = answer.send(listed);
}

/// Lets the connections of a listener name that was removed at the time `removed` finish within the time `within`, then ends
/// the rest, unless the name was added again. If it was added and removed again, its later connections have their own time.
async fn end_listener(core: Rc<Core>, listener: Arc<str>, removed: Instant, within: Duration) {
    let is_of_it = |entry: &Entry| entry.listener.name == listener && entry.accepted <= removed;
    core.connections.retire_where(is_of_it);
    tokio::time::sleep(within).await;
    if core.mesh.snapshot().listener(&listener).is_none() {
        core.connections.cut_where(is_of_it, Reason::Draining);
    }
}

/// Runs a worker in this thread until it is drained.
pub(crate) fn thread(index: usize, shared: Arc<Shared>, reader: Reader, mailbox: mpsc::Receiver<Message>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build_local(tokio::runtime::LocalOptions::default());
    let ready = runtime.and_then(|runtime| {
        let timer = runtime.block_on(async { Timer::new() })?;
        Ok((runtime, timer))
    });
    let core = Core::new(index, shared, reader);
    match ready {
        Ok((runtime, timer)) => {
            runtime.block_on(Worker { core, listeners: BTreeMap::new() }.run(timer, mailbox));
        }
        Err(error) => tracing::error!(index, %error, "a data-plane thread cannot start"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::on_paused_clock;
    use isthmus_model::record::ConnectionProtocol;

    /// The connections here have no task, so they never end, and the worker waits 1.5 s more for those that it has reset.
    #[test]
    fn a_worker_that_drains_waits_for_its_connections_as_long_as_it_should() {
        let within = Duration::from_secs(7);
        for (transit, sooner, milliseconds) in [
            (Transit::Here, None, 8_500),
            (Transit::Here, Some(Duration::from_secs(2)), 3_500),
            // Another process may still leave the connection to this one.
            (Transit::Parked, None, 23_500),
        ] {
            on_paused_clock(async |rig| {
                let entry = rig.entry(ConnectionProtocol::Tcp);
                let _registration = rig.core.register(entry.clone());
                entry.set_transit(transit);
                let (orders, mut mailbox) = mpsc::channel(1);
                if let Some(within) = sooner {
                    orders.try_send(Message::Drain { within, queue: Queue::Accept }).expect("a place");
                }
                let begun = Instant::now();
                let mut worker = Worker { core: rig.core.clone(), listeners: BTreeMap::new() };
                worker.drain(within, Queue::Accept, &mut mailbox).await;
                let waited = begun.elapsed().as_millis();
                assert!((milliseconds..milliseconds + 200).contains(&waited), "{waited} ms: {transit:?}");
                assert!(entry.is_cut());
            });
        }
    }
}
