//! The new process of an upgrade: it takes the sockets of the old one, gets ready, serves, and goes on with its connections. If the
//! old process dies on the way, this one serves as if it had been handed over, since it has the sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::time::{Instant, sleep, timeout};

use super::sockets::{PASSED, Sockets};
use super::{ANSWER_WITHIN, LOOK_EVERY, READY_WITHIN, counters, has_died};
use crate::beliefs;
use isthmus_admin::{ProgramStatus, TakenOver};
use isthmus_dataplane::handle::{Control, GoesOn};
use isthmus_dataplane::parcel::{Parcel, Place};
use isthmus_dataplane::withdrawals::{Standing, Which, Withdrawal};
use isthmus_net::inherited::Inherited;
use isthmus_tasks::stop::Stopped;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::control::{UpgradeResult, UpgradedConnection};
use isthmus_upgrade::belief::Beliefs;
use isthmus_upgrade::channel::{Channel, Received};
use isthmus_upgrade::message::{Message, PROTOCOL, Room, Withdrawn};
use isthmus_upgrade::place;
use isthmus_upgrade::record::Record;

/// The time from the start until this process says that it is not ready, before the old one stops waiting.
const SAY_WITHIN: Duration = Duration::from_secs(READY_WITHIN.as_secs() - 5);

/// The conversation with the old process.
pub(crate) struct Taking {
    channel: Channel,
    begun: Instant,
    /// The name of the process among the replicas of the gateway.
    pub(crate) instance: Arc<str>,
    version: String,
    process: u32,
    /// True once the old process has died.
    is_alone: bool,
    /// The documents of the operators' orders to drain, if the old process has passed them on.
    drains: Option<Vec<String>>,
    /// The beliefs of the old process; `None` if its program sends none.
    beliefs: Option<Beliefs>,
    /// The beliefs that the old process sent as it let this one serve; `None` before.
    last: Option<Beliefs>,
}

impl Taking {
    /// Connects to the old process, and takes descriptors of its listening sockets; those of the service manager are added to
    /// `inherited`.
    pub(crate) async fn connect(
        path: &Path,
        sockets: &Sockets,
        inherited: &mut Inherited,
    ) -> Result<Self, String> {
        place::check(path)?;
        let cannot =
            |error: io::Error| format!("cannot take over from the gateway at {}: {error}", path.display());
        let channel = Channel::connect(path).await.map_err(cannot)?;
        let (instance, version) = (Arc::from(""), String::new());
        let begun = Instant::now();
        let mut taking = Self {
            channel,
            begun,
            instance,
            version,
            process: 0,
            is_alone: false,
            drains: None,
            beliefs: None,
            last: None,
        };
        match timeout(ANSWER_WITHIN, taking.greet(sockets)).await {
            Ok(greeted) => greeted?,
            Err(_) => return Err("the gateway does not answer at its upgrade socket".to_owned()),
        }
        for (name, passed) in sockets.take_all(PASSED) {
            for socket in passed {
                inherited.add(&name.key, socket)?;
            }
        }
        Ok(taking)
    }

    async fn greet(&mut self, sockets: &Sockets) -> Result<(), String> {
        let lost = |error: io::Error| format!("the conversation with the old process has failed: {error}");
        let hello = Message::Hello { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() };
        self.channel.send(&hello).await.map_err(lost)?;
        loop {
            let Received { message, descriptors, .. } = self.channel.receive().await.map_err(lost)?;
            match message {
                Message::Welcome { protocol: PROTOCOL, version, process, instance } => {
                    (self.version, self.process, self.instance) = (version, process, instance.into());
                }
                Message::Welcome { protocol, version, .. } => {
                    return Err(format!(
                        "the old process has version {version}, whose upgrade protocol {protocol} is not {PROTOCOL}; restart the \
                         gateway"
                    ));
                }
                Message::Sockets { sockets: names } if names.len() == descriptors.len() => {
                    names.into_iter().zip(descriptors).for_each(|(name, socket)| sockets.offer(name, socket));
                }
                Message::Offered { beliefs } => {
                    self.beliefs = beliefs.map(beliefs::read);
                    return Ok(());
                }
                Message::Abort { why } => return Err(format!("the old process goes on: {why}")),
                _ => return Err("the old process has sent a message that does not fit here".to_owned()),
            }
        }
    }

    /// Tells the old process why this one cannot serve.
    pub(crate) async fn fail(&self, why: &str) {
        let _ = timeout(ANSWER_WITHIN, self.channel.send(&Message::Failed { why: why.to_owned() })).await;
    }

    /// Waits until the readiness gates are open, and then until the old process lets this one serve. `closed` returns the gates that
    /// are closed, `room` what this process has room for then.
    pub(crate) async fn ready(
        &mut self,
        closed: impl Fn() -> Vec<String>,
        room: impl FnOnce() -> Room,
        control: &Control,
        telemetry: &Telemetry,
    ) -> Result<(), String> {
        loop {
            let closed = closed();
            if closed.is_empty() {
                break;
            }
            if self.begun.elapsed() >= SAY_WITHIN {
                return Err(format!("it is not ready: {}", closed.join(", ")));
            }
            if self.is_alone {
                sleep(LOOK_EVERY).await;
            } else if let Ok(received) = timeout(LOOK_EVERY, self.channel.receive()).await {
                self.expect_nothing(received).await?;
            }
        }
        if !self.is_alone {
            let sent = self.channel.send(&Message::Ready { room: Some(room()) }).await;
            self.go(sent, control, telemetry).await?;
        }
        Ok(())
    }

    async fn go(
        &mut self,
        sent: io::Result<()>,
        control: &Control,
        telemetry: &Telemetry,
    ) -> Result<(), String> {
        if let Err(error) = sent {
            return self.expect_nothing(Err(error)).await;
        }
        loop {
            match self.channel.receive().await {
                Ok(Received { message: Message::Counters { counters, histograms }, .. }) => {
                    counters::add(&telemetry.recorder, &counters, &histograms);
                }
                Ok(Received { message: Message::Go { next_id, withdrawn, drains, beliefs }, .. }) => {
                    control.number_from(next_id);
                    withdraw(control, &withdrawn);
                    self.drains = drains;
                    self.last = Some(beliefs::read(beliefs));
                    return Ok(());
                }
                other => return self.expect_nothing(other).await,
            }
        }
    }

    /// Handles a message while none is expected: the old process goes on alone, or it has died.
    async fn expect_nothing(&mut self, received: io::Result<Received>) -> Result<(), String> {
        match received {
            Ok(Received { message: Message::Abort { why }, .. }) => {
                Err(format!("the old process goes on: {why}"))
            }
            Ok(_) => Err("the old process has sent a message that does not fit here".to_owned()),
            Err(error) => self.take_alone(&error).await,
        }
    }

    /// Returns what the old process knows; `None` if its program does not tell.
    pub(crate) fn beliefs(&self) -> Option<&Beliefs> {
        self.beliefs.as_ref()
    }

    /// Returns what the old process knew of endpoints and drains when it let this one serve; `None` if it has died before.
    pub(crate) fn last_beliefs(&mut self) -> Option<Beliefs> {
        self.last.take()
    }

    /// Returns the documents of the operators' orders to drain, if the old process has passed them on.
    pub(crate) fn drains(&mut self) -> Option<Vec<String>> {
        self.drains.take()
    }

    /// Goes on without the old process, if it has died. While it lives, only one of the two may serve.
    async fn take_alone(&mut self, error: &io::Error) -> Result<(), String> {
        if !has_died(self.process).await {
            return Err(format!("the old process has closed the upgrade socket: {error}"));
        }
        tracing::warn!(
            process = self.process,
            "the old process has died, so this one serves without its connections"
        );
        self.is_alone = true;
        Ok(())
    }

    /// Tells the old process that this one serves, and waits until the old one accepts and writes nothing any more. From then on there
    /// is no way back, so a failure of the old process changes nothing.
    pub(crate) async fn serves(&mut self, sockets: &Sockets) {
        sockets.close_others();
        if self.is_alone {
            return;
        }
        let committing = async {
            self.channel.send(&Message::Serving { taken: sockets.taken() }).await?;
            self.channel.receive().await
        };
        match timeout(ANSWER_WITHIN, committing).await {
            Ok(Ok(Received { message: Message::Committed {}, .. })) => {}
            Ok(Ok(_) | Err(_)) | Err(_) => {
                tracing::warn!("the old process does not hand over its connections");
                self.is_alone = true;
            }
        }
    }

    /// Returns the state of the upgrade before the first connection was taken over.
    pub(crate) fn taken_over(&self) -> TakenOver {
        TakenOver {
            since: SystemTime::now(),
            process: self.process,
            version: self.version.clone(),
            moved: 0,
            left: 0,
            has_ended: self.is_alone,
        }
    }

    /// Goes on with the connections of the old process, until it has ended. Tells the old process when this one is ordered to stop.
    pub(crate) async fn follow(
        mut self,
        control: Control,
        telemetry: Telemetry,
        status: Arc<ArcSwap<ProgramStatus>>,
        mut stopping: Stopped,
    ) {
        telemetry.control.upgraded(UpgradeResult::Done);
        let mut taken = self.taken_over();
        let show = |taken: &TakenOver| {
            status.rcu(|status| ProgramStatus { taken_over: Some(taken.clone()), ..(**status).clone() });
        };
        let (mut next_worker, mut is_stopping) = (0, false);
        while !taken.has_ended {
            let received = tokio::select! {
                // The old process may end at any time, so it learns first.
                biased;
                () = stopping.ordered(), if !is_stopping => {
                    is_stopping = true;
                    // An old process that has ended needs no message.
                    let _ = self.channel.send(&Message::Stopping {}).await;
                    continue;
                }
                received = self.channel.receive() => received,
            };
            match received {
                Ok(Received { message: Message::Connections { records, held }, tail, descriptors }) => {
                    let parcels = parcels(records, &held, tail, descriptors);
                    let Ok(parcels) = parcels.inspect_err(|why| tracing::error!("{why}")) else { break };
                    let moved = self.take(&control, parcels, &mut next_worker).await;
                    telemetry.control.upgraded_connections(UpgradedConnection::Moved, moved);
                    taken.moved += moved;
                }
                Ok(Received { message: Message::Counters { counters, histograms }, .. }) => {
                    counters::add(&telemetry.recorder, &counters, &histograms);
                }
                Ok(Received { message: Message::Passed { left, .. }, .. }) => {
                    taken.left = left;
                    show(&taken);
                }
                Ok(Received { message: Message::Left {}, .. }) => taken.has_ended = true,
                Ok(_) => break,
                Err(error) => {
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        tracing::error!(%error, "the conversation with the old process has failed");
                    }
                    break;
                }
            }
        }
        taken.has_ended = true;
        show(&taken);
        tracing::info!(
            process = taken.process,
            moved = taken.moved,
            "the old process has handed over its connections"
        );
    }

    /// Takes connections over; returns how many.
    async fn take(
        &self,
        control: &Control,
        parcels: Vec<Result<Parcel, String>>,
        next_worker: &mut usize,
    ) -> u64 {
        let workers = control.workers();
        let mut of_workers: Vec<Vec<Parcel>> = (0..workers).map(|_| Vec::new()).collect();
        let mut stays: Vec<Result<usize, String>> = Vec::new();
        for parcel in parcels {
            stays.push(parcel.map(|parcel| {
                *next_worker = (*next_worker + 1) % workers;
                of_workers[*next_worker].push(parcel);
                *next_worker
            }));
        }
        let mut answers = Vec::new();
        for (worker, parcels) in of_workers.into_iter().enumerate() {
            let answer =
                if parcels.is_empty() { Vec::new() } else { control.take_over(worker, parcels).await };
            answers.push(answer.into_iter());
        }
        let mut places: Vec<Place> = Vec::new();
        let stays: Vec<Option<String>> = stays
            .into_iter()
            .map(|stays| {
                let none = || Err("the new process is stopping".to_owned());
                let answer = stays.and_then(|worker| answers[worker].next().unwrap_or_else(none));
                answer.map(|place| places.push(place)).err()
            })
            .collect();
        // Once the answer is sent, the connections are those of this process; before that, those of the old one.
        let sent = timeout(ANSWER_WITHIN, self.channel.send(&Message::Taken { stays })).await;
        let is_sent = matches!(sent, Ok(Ok(())));
        control.settle(&places, if is_sent { GoesOn::Here } else { GoesOn::There }).await;
        if is_sent { places.len() as u64 } else { 0 }
    }
}

/// Takes the endpoints out of service that operators have taken out of service in the old process.
fn withdraw(control: &Control, withdrawn: &[Withdrawn]) {
    for Withdrawn { address, service, disabled, since } in withdrawn {
        let withdrawal = if *disabled { Withdrawal::Disabled } else { Withdrawal::Drained };
        let done = Which::parse(address, service.as_deref()).and_then(|which| {
            let order = Standing { which, withdrawal, since: since.unwrap_or_else(SystemTime::now) };
            control.upstreams().withdrawals().apply(order).map_err(|error| error.to_string())
        });
        if let Err(why) = done {
            tracing::warn!(
                address,
                "an endpoint that was taken out of service gets connections again: {why}"
            );
        }
    }
}

/// Returns the connections of a message, each by itself: one whose record cannot be read stays in the old process. The error is a
/// message whose parts do not fit together.
fn parcels(
    records: Vec<serde_json::Value>,
    held: &[[usize; 2]],
    tail: Vec<u8>,
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<Result<Parcel, String>>, String> {
    let bytes = held.iter().flatten().try_fold(0_usize, |sum, length| sum.checked_add(*length));
    if descriptors.len() < 2 * records.len() && held.len() == records.len() {
        let why = "the new process has reached its limit of descriptors";
        return Ok(records.iter().map(|_| Err(why.to_owned())).collect());
    }
    if held.len() != records.len() || descriptors.len() != 2 * records.len() || bytes != Some(tail.len()) {
        return Err(
            "the old process has sent connections whose records, sockets and bytes do not fit together"
                .to_owned(),
        );
    }
    let (mut rest, mut descriptors) = (tail.as_slice(), descriptors.into_iter());
    let mut parcels = Vec::new();
    for (record, [up, down]) in records.into_iter().zip(held) {
        let (up, after) = rest.split_at(*up);
        let (down, after) = after.split_at(*down);
        rest = after;
        let (Some(client), Some(endpoint)) = (descriptors.next(), descriptors.next()) else { break };
        let record =
            Record::read(record).map_err(|why| format!("the new process cannot read its record: {why}"));
        parcels.push(record.map(|record| Parcel {
            place: Place { worker: usize::MAX, key: usize::MAX, id: record.connection.id },
            record,
            client,
            endpoint,
            up: up.into(),
            down: down.into(),
        }));
    }
    Ok(parcels)
}
