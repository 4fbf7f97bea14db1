//! The hand-over of live connections, from the moment when the new process serves until the old one is empty.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use super::watching::{Health, Watched};
use super::{counters, end, has_died};
use isthmus_admin::Upgraded;
use isthmus_dataplane::handle::{Control, GoesOn};
use isthmus_dataplane::parcel::{Parcel, Place};
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::control::{UpgradeResult, UpgradedConnection};
use isthmus_telemetry::recorder::Known;
use isthmus_upgrade::channel::Channel;
use isthmus_upgrade::frame::TAIL_BYTES_MAX;
use isthmus_upgrade::message::{CONNECTIONS_MAX, Message, SocketName};

/// The interval at which connections are looked for that could not be moved before.
const LATER: Duration = Duration::from_millis(20);
/// The time for hellos, dials and first answers to be complete. Connections for which it does not suffice are moved later, and are
/// reported as left.
const COMPLETE_WITHIN: Duration = Duration::from_millis(1_500);
/// The time within which the new process must take connections, whose bytes wait meanwhile.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// The interval at which the increases of metrics are sent.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// The time after which a new process that dies is not replaced. Until then this process has the listening sockets, so that an address
/// that a reload removes from the config of the new process stays in use.
const REPLACED_WITHIN: Duration = Duration::from_secs(60);
/// Sends the result of an upgrade to a caller.
pub(crate) type Waiter = oneshot::Sender<Result<Upgraded, String>>;

/// The hand-over of live connections to a new process that serves.
pub(crate) struct Giving {
    /// True if the new process has taken the admin socket.
    pub(crate) takes_admin: bool,
    /// Descriptors of the listening sockets that the new process uses; none if it must not be replaced.
    pub(super) sockets: Vec<(SocketName, OwnedFd)>,
    pub(super) channel: Channel,
    pub(super) version: String,
    pub(super) known: Known,
    pub(super) waiters: Vec<Waiter>,
    pub(super) begun: Instant,
    /// True if the new process does not answer any more: all connections that are left end here.
    pub(super) is_broken: bool,
    /// The watch on the new process; `None` if it must not be replaced, or has not taken the upgrade socket.
    pub(super) watched: Option<Watched>,
    /// True once it was found out whether a new process that has closed the channel has died.
    pub(super) was_looked_for: bool,
}

/// The end of a hand-over.
#[derive(Debug)]
pub(crate) enum Given {
    /// No connection is left in this process.
    All,
    /// The new process has died, or was ended because it hangs. The listening sockets, on which nobody accepts connections, come
    /// back.
    Died(Vec<(SocketName, OwnedFd)>),
}

impl Giving {
    /// Returns the id of the new process.
    pub(crate) fn process(&self) -> u32 {
        self.channel.peer()
    }

    /// Notifies the new process that this one accepts no connections and writes no state any more.
    pub(crate) async fn commit(&mut self) {
        self.is_broken = self.channel.send(&Message::Committed {}).await.is_err();
    }

    /// Moves connections until none is left in this process, and passes on metrics. `within` is the time after which connections
    /// that are left here are reset.
    pub(crate) async fn give(&mut self, control: &Control, telemetry: &Telemetry, within: Duration) -> Given {
        let (mut moved, mut passed, mut counted) = (0, false, Instant::now());
        let begun = Instant::now();
        let patience = begun + COMPLETE_WITHIN;
        loop {
            let (mut is_alive, mut given, mut left, mut waiting) = (false, 0, 0, 0);
            for worker in 0..control.workers() {
                let most = if self.is_broken { 0 } else { CONNECTIONS_MAX };
                let Some((parcels, later, of_worker)) = control.park(worker, most).await else { continue };
                is_alive = true;
                waiting += later;
                left += (later + of_worker) as u64;
                for some in batches(parcels) {
                    let count = self.pass(control, some).await;
                    given += count;
                }
            }
            moved += given;
            if given == 0 && !passed && (waiting == 0 || Instant::now() >= patience) {
                passed = true;
                self.passed(telemetry, moved, left, within).await;
                control.end_left(within.saturating_sub(begun.elapsed())).await;
            }
            if let Some(sockets) = self.abandoned(is_alive).await {
                telemetry.control.upgraded(UpgradeResult::Failed);
                return Given::Died(sockets);
            }
            if !is_alive {
                break;
            }
            if !self.is_broken && (counted.elapsed() >= COUNT_EVERY || passed && given > 0) {
                counted = Instant::now();
                self.is_broken |=
                    counters::send(&self.channel, &telemetry.recorder, &mut self.known).await.is_err();
            }
            if given == 0 {
                self.listen().await;
            }
            if begun.elapsed() >= REPLACED_WITHIN {
                self.keep_no_sockets();
            }
        }
        tracing::info!(moved, "no connection is left in this process");
        if counters::send(&self.channel, &telemetry.recorder, &mut self.known).await.is_ok() {
            let _ = self.channel.send(&Message::Left {}).await;
        }
        Given::All
    }

    /// Returns the listening sockets if the new process has died or hangs, so that another one must take them. If this process has no
    /// connection any more (`is_alive` is false), waits until the new one has answered once.
    async fn abandoned(&mut self, is_alive: bool) -> Option<Vec<(SocketName, OwnedFd)>> {
        if self.sockets.is_empty() {
            return None;
        }
        let health = match &mut self.watched {
            Some(watched) if !is_alive && !self.is_broken => watched.is_known().await,
            Some(watched) => watched.health(),
            None => Health::Unknown,
        };
        let process = self.process();
        let why = if health == Health::Hangs {
            end(process);
            format!(
                "the new process (pid {process}) served and then answered nothing for 10 s, so it was ended"
            )
        } else if self.is_broken
            && !std::mem::replace(&mut self.was_looked_for, true)
            && has_died(process).await
        {
            format!("the new process (pid {process}) has died")
        } else {
            return None;
        };
        tracing::error!("{why}");
        self.is_broken = true;
        self.watched = None;
        let why = format!("{why}; another process of the running program takes over, see `isthmus status`");
        answer(std::mem::take(&mut self.waiters), &Err(why));
        Some(std::mem::take(&mut self.sockets))
    }

    /// From here on the new process is not replaced.
    fn keep_no_sockets(&mut self) {
        self.sockets.clear();
        self.watched = None;
    }

    /// Waits for [`LATER`], or less if the new process sends something or dies.
    async fn listen(&mut self) {
        if self.is_broken {
            return sleep(LATER).await;
        }
        match timeout(LATER, receive(&mut self.channel)).await {
            Err(_) => {}
            Ok(Ok(Message::Stopping {})) => self.keep_no_sockets(),
            Ok(_) => self.is_broken = true,
        }
    }

    /// Reports that all connections were moved that can be moved at present.
    async fn passed(&mut self, telemetry: &Telemetry, moved: u64, left: u64, within: Duration) {
        let took = self.begun.elapsed();
        telemetry.control.upgraded_connections(UpgradedConnection::Left, left);
        if self.is_broken {
            let why = format!(
                "the new process (pid {}) takes no connections any more: {moved} have moved, {left} end in the old one within {} s",
                self.process(),
                within.as_secs()
            );
            tracing::error!("{why}");
            return answer(std::mem::take(&mut self.waiters), &Err(why));
        }
        tracing::info!(process = self.process(), moved, left, ?took, "the new process has taken over");
        self.is_broken |= self.channel.send(&Message::Passed { moved, left }).await.is_err();
        let upgraded =
            Upgraded { process: self.process(), version: self.version.clone(), moved, left, took, within };
        answer(std::mem::take(&mut self.waiters), &Ok(upgraded));
    }

    /// Moves some parked connections; returns how many have moved.
    async fn pass(&mut self, control: &Control, parcels: Vec<Parcel>) -> u64 {
        let places: Vec<Place> = parcels.iter().map(|parcel| parcel.place).collect();
        let stays = if self.is_broken { None } else { self.exchange(&parcels).await };
        // This process keeps its descriptors until it knows which process goes on.
        drop(parcels);
        let Some(stays) = stays else {
            control.settle(&places, GoesOn::HereForGood).await;
            return 0;
        };
        let (mut gone, mut kept) = (Vec::new(), Vec::new());
        for (place, why) in places.into_iter().zip(stays) {
            match why {
                None => gone.push(place),
                Some(why) => {
                    tracing::info!(id = place.id, "a connection stays in the old process: {why}");
                    kept.push(place);
                }
            }
        }
        control.settle(&gone, GoesOn::There).await;
        control.settle(&kept, GoesOn::HereForGood).await;
        gone.len() as u64
    }

    /// Sends connections, and returns for each why it stays here, if it does. Returns `None` if the new process goes on with none
    /// of them; the others may still be sent, unless the channel is broken then.
    async fn exchange(&mut self, parcels: &[Parcel]) -> Option<Vec<Option<String>>> {
        let message = Message::Connections {
            records: parcels.iter().map(|parcel| parcel.record.write()).collect(),
            held: parcels.iter().map(|parcel| [parcel.up.len(), parcel.down.len()]).collect(),
        };
        let held = parcels.iter().flat_map(|parcel| [&*parcel.up, &*parcel.down]);
        let tail: Vec<u8> = held.flatten().copied().collect();
        let descriptors: Vec<_> =
            parcels.iter().flat_map(|parcel| [parcel.client.as_fd(), parcel.endpoint.as_fd()]).collect();
        let sending = self.channel.send_with(&message, &tail, &descriptors);
        let sent = timeout(TAKEN_WITHIN, sending).await;
        let answer = match sent {
            Ok(Ok(())) => timeout(TAKEN_WITHIN, self.answer()).await,
            Ok(Err(error)) if self.channel.is_intact() => {
                tracing::error!(%error, connections = parcels.len(), "connections cannot be sent, so they end in this process");
                return None;
            }
            Ok(Err(error)) => Ok(Err(error)),
            Err(late) => Err(late),
        };
        let answer = match answer {
            Ok(answer) => answer.ok(),
            Err(_) => {
                // The new process goes on with the connections only if its answer was sent. After this call it cannot be.
                self.channel.stop_receiving();
                self.is_broken = true;
                timeout(TAKEN_WITHIN, self.answer()).await.ok().and_then(Result::ok)
            }
        };
        match answer {
            Some(Message::Taken { stays }) if stays.len() == parcels.len() => Some(stays),
            Some(_) | None => {
                self.is_broken = true;
                tracing::error!(
                    "the new process does not answer, so the connections that are left end in this process"
                );
                None
            }
        }
    }

    /// Waits for the answer of the new process.
    async fn answer(&mut self) -> io::Result<Message> {
        loop {
            match receive(&mut self.channel).await? {
                Message::Stopping {} => self.keep_no_sockets(),
                message => return Ok(message),
            }
        }
    }
}

/// Splits connections so that what they hold fits in a message.
fn batches(parcels: Vec<Parcel>) -> Vec<Vec<Parcel>> {
    let mut all: Vec<Vec<Parcel>> = Vec::new();
    let mut bytes = 0;
    for parcel in parcels {
        let held = parcel.up.len() + parcel.down.len();
        match all.last_mut().filter(|_| bytes + held <= TAIL_BYTES_MAX / 4) {
            Some(last) => {
                bytes += held;
                last.push(parcel);
            }
            None => {
                bytes = held;
                all.push(vec![parcel]);
            }
        }
    }
    all
}

/// Tells the callers of an upgrade how it went.
pub(super) fn answer(waiters: Vec<Waiter>, result: &Result<Upgraded, String>) {
    for waiter in waiters {
        // The caller may have stopped waiting.
        let _ = waiter.send(result.clone());
    }
}

/// Waits for the next message, which has no descriptors.
pub(super) async fn receive(channel: &mut Channel) -> io::Result<Message> {
    channel.receive().await.map(|received| received.message)
}
