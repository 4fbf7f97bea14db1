//! The old process of an upgrade. Until the new process serves, nothing changes here, so that any failure leaves this process as it
//! was. From then on this process only hands over and ends.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::moving::{Giving, Waiter, answer, receive};
use super::sockets::{self, Sockets, UPGRADE};
use super::watching::Watched;
use super::{ANSWER_WITHIN, LOOK_EVERY, OPTION, READY_WITHIN, counters};
use isthmus_admin::{Patience, ProgramStatus};
use isthmus_dataplane::handle::Control;
use isthmus_dataplane::withdrawals::{Standing, Which, Withdrawal};
use isthmus_net::incoming::Accept;
use isthmus_net::unix::UnixSocket;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::recorder::{Known, Recorder};
use isthmus_upgrade::channel::Channel;
use isthmus_upgrade::frame::DESCRIPTORS_MAX;
use isthmus_upgrade::message::{Message, PROTOCOL, Room, SocketName, Withdrawn};

/// The distance of the ids of the new process from the last one of this process, which accepts connections for a few more
/// milliseconds.
const IDS_BETWEEN: u64 = 1 << 20;
/// The program file of this process, also if another file is at its path.
const OWN_FILE: &str = "/proc/self/exe";
/// The end of the path of a program file that has been replaced.
const REPLACED: &str = " (deleted)";
/// The variables that are meant for the process that the service manager has started.
const OF_THIS_PROCESS: [&str; 5] =
    ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "LISTEN_PIDFDID"];

/// The program of this process, as it was started.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    path: PathBuf,
    arguments: Vec<OsString>,
}

impl Program {
    /// Takes the path of the program file and the arguments of this process. Must be called at the start, because the path
    /// changes when the file is replaced.
    pub(crate) fn of_this_process() -> Result<Self, String> {
        let mut path = std::env::current_exe()
            .map_err(|error| format!("the path of the program file is not known: {error}"))?;
        // A process that replaces one that has died runs an earlier file.
        if let Some(replaced) = path.to_str().and_then(|path| path.strip_suffix(REPLACED)) {
            path = replaced.into();
        }
        let mut arguments: Vec<OsString> = Vec::new();
        let mut given = std::env::args_os().skip(1);
        while let Some(argument) = given.next() {
            let text = argument.to_string_lossy();
            if text == OPTION {
                given.next();
            } else if !text.starts_with(&format!("{OPTION}=")) {
                arguments.push(argument);
            }
        }
        Ok(Self { path, arguments })
    }

    /// Starts a program file with the arguments of this process.
    fn start(&self, file: &Path, socket: &Path) -> Result<Child, String> {
        let mut command = Command::new(file);
        command.args(&self.arguments).arg(OPTION).arg(socket);
        for name in OF_THIS_PROCESS {
            command.env_remove(name);
        }
        command.spawn().map_err(|error| format!("cannot start {}: {error}", file.display()))
    }
}

/// The upgrade socket, and the upgrade in progress.
pub(crate) struct Upgrades {
    program: Result<Program, String>,
    door: Result<Door, String>,
    instance: Arc<str>,
    /// The state of the process, which says whether the earlier process of an upgrade has ended.
    status: Arc<ArcSwap<ProgramStatus>>,
    attempt: Option<Attempt>,
    /// The callers that wait until an upgrade can begin.
    later: Vec<Waiter>,
}

struct Door {
    socket: UnixSocket,
    path: PathBuf,
}

/// An upgrade until the new process serves.
struct Attempt {
    begun: Instant,
    deadline: Instant,
    waiters: Vec<Waiter>,
    /// The new process, if this one has started it.
    child: Option<Child>,
    /// The task that agrees with the new process; `None` before it has connected.
    agreeing: Option<JoinHandle<Result<Agreed, String>>>,
    /// The reason why the upgrade has failed.
    failed: Option<String>,
}

/// A new process that could serve at once.
pub(crate) struct Agreed {
    channel: Channel,
    version: String,
    /// The room of the new process, if it has told it.
    room: Option<Room>,
}

/// A new process has begun to serve.
pub(crate) struct Began {
    /// The metrics that were passed on.
    known: Known,
    /// The sockets that the new process uses.
    taken: Vec<SocketName>,
}

/// The reason why no upgrade can begin.
enum Busy {
    /// It lasts as long as the process.
    ForGood(String),
    /// It passes.
    ForNow(String),
}

/// The next step of an upgrade.
pub(crate) enum Step {
    /// An upgrade for which callers have waited can begin.
    Free(Vec<Waiter>),
    /// A process has connected to the upgrade socket.
    Arrived(UnixStream),
    /// The new process is ready.
    Agreed(Box<Agreed>),
    /// The upgrade has failed; this process goes on.
    Failed(String),
}

impl Upgrades {
    /// Opens the upgrade socket at this path, or takes it over from the earlier process.
    pub(crate) async fn open(
        program: Result<Program, String>,
        path: Result<PathBuf, String>,
        instance: Arc<str>,
        offered: &Sockets,
        status: Arc<ArcSwap<ProgramStatus>>,
    ) -> Self {
        let door = match path {
            Ok(path) => open_door(path, offered).await,
            Err(why) => Err(why),
        };
        match &door {
            Ok(Door { path, .. }) => tracing::debug!(path = %path.display(), "the upgrade socket is open"),
            Err(why) => tracing::debug!("upgrades without a restart are not possible: {why}"),
        }
        Self { program, door, instance, status, attempt: None, later: Vec::new() }
    }

    /// Begins an upgrade, or keeps the callers that wait until one can begin.
    pub(crate) fn ordered(&mut self, callers: Vec<(Waiter, Patience)>) {
        let waits = |(_, patience): &(Waiter, Patience)| *patience == Patience::Wait;
        let is_busy_for_now = matches!(self.busy(), Some(Busy::ForNow(_)));
        let (later, now): (Vec<_>, Vec<_>) =
            callers.into_iter().partition(|caller| is_busy_for_now && waits(caller));
        let refuses = !now.is_empty() || later.is_empty();
        self.later.extend(later.into_iter().map(|(waiter, _)| waiter));
        // An order by signal has no caller.
        if refuses {
            self.begin(now.into_iter().map(|(waiter, _)| waiter).collect());
        }
    }

    /// Starts a new process of the program file that is at the path now.
    pub(crate) fn begin(&mut self, waiters: Vec<Waiter>) {
        let file = self.program.as_ref().map(|program| program.path.clone()).map_err(String::clone);
        match file.and_then(|file| self.start(&file)) {
            Ok(child) => {
                tracing::info!(process = child.id(), "an upgrade begins: the new process was started");
                self.attempt = Some(Attempt::new(waiters, Some(child)));
            }
            Err(why) => {
                tracing::error!("the upgrade is refused: {why}");
                answer(waiters, &Err(why));
            }
        }
    }

    /// Starts a new process of this file.
    fn start(&self, file: &Path) -> Result<Child, String> {
        match (self.busy(), &self.door, &self.program) {
            (Some(Busy::ForGood(why) | Busy::ForNow(why)), ..) => Err(why),
            (None, Err(why), _) | (None, _, Err(why)) => Err(why.clone()),
            (None, Ok(door), Ok(program)) => {
                isthmus_upgrade::place::check(&door.path).and_then(|()| program.start(file, &door.path))
            }
        }
    }

    /// Starts another process, of the program file of this one, because the new process has died or hangs. It gets the sockets, in whose queues
    /// clients wait meanwhile. Returns the hand-over to it. The orders in `last` are those that are kept nowhere else.
    pub(crate) async fn replace(
        &mut self,
        sockets: Vec<(SocketName, OwnedFd)>,
        last: Last,
        control: &Control,
        (recorder, scope): (&Recorder, &Scope),
    ) -> Result<Giving, String> {
        let child = self.start(Path::new(OWN_FILE))?;
        tracing::error!(process = child.id(), "another one of this program was started");
        self.attempt = Some(Attempt::new(Vec::new(), Some(child)));
        let mut offer = Some(sockets);
        let why = loop {
            match self.next().await {
                Step::Arrived(stream) => {
                    let Some(channel) = self.admit(stream, scope) else { continue };
                    let sockets = offer.take().ok_or_else(|| io::Error::other("they were offered before"));
                    self.talk(channel, (sockets, last.1.clone()), scope);
                }
                // Nobody else listens, so it serves also where it has no room for all connections: the others end here.
                Step::Agreed(mut agreed) => match agreed.go(control, recorder, || last.clone()).await {
                    Ok(began) => return Ok(self.hand_over(*agreed, began, Vec::new(), scope)),
                    Err(why) => break why,
                },
                Step::Free(waiters) => self.later.extend(waiters),
                Step::Failed(why) => break why,
            }
        };
        self.fail(&why);
        Err(why)
    }

    /// Returns why no upgrade can begin at present, if none can. While the earlier process of the last upgrade has connections, none
    /// can: processes would pile up.
    fn busy(&self) -> Option<Busy> {
        if std::process::id() == 1 {
            let why = "this process is the first of its container (PID 1): all others end with it; replace the container";
            return Some(Busy::ForGood(why.to_owned()));
        }
        if self.attempt.is_some() {
            return Some(Busy::ForNow(
                "an upgrade is in progress; `isthmus upgrade --wait` begins after it".to_owned(),
            ));
        }
        let status = self.status.load();
        let earlier = status.taken_over.as_ref().filter(|earlier| !earlier.has_ended)?;
        Some(Busy::ForNow(format!(
            "process {}, from which this one has taken over, still has connections; `isthmus upgrade --wait` begins when it has ended",
            earlier.process
        )))
    }

    /// Returns true for the process from which this one has taken over.
    fn is_earlier(&self, process: u32) -> bool {
        self.status.load().taken_over.as_ref().is_some_and(|earlier| earlier.process == process)
    }

    /// Waits for the next step. Cancel safe.
    pub(crate) async fn next(&mut self) -> Step {
        self.later.retain(|waiter| !waiter.is_closed());
        let arrival = arrival(&self.door);
        if let Some(attempt) = &mut self.attempt {
            return tokio::select! {
                biased;
                step = attempt.next() => step,
                stream = arrival => Step::Arrived(stream),
            };
        }
        let is_free = async {
            while self.later.is_empty() || self.busy().is_some() {
                sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            biased;
            () = is_free, if !self.later.is_empty() => {}
            // The earlier process may ask whether this one answers.
            stream = arrival => return Step::Arrived(stream),
        }
        // Some may have given up meanwhile.
        self.later.retain(|waiter| !waiter.is_closed());
        Step::Free(std::mem::take(&mut self.later))
    }

    /// Returns the channel to a process that has connected to the upgrade socket, if it may take over; another one is answered. The
    /// upgrade begins with [`Self::talk`].
    pub(crate) fn admit(&self, stream: UnixStream, scope: &Scope) -> Option<Channel> {
        let channel = match Channel::new(stream) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::warn!(%error, "a process is refused at the upgrade socket");
                return None;
            }
        };
        if self.is_earlier(channel.peer()) || channel.peer() == std::process::id() {
            // It asks whether the process at this socket still answers.
            scope.spawn(async move { abort(&channel, "this process serves").await });
            return None;
        }
        let expected = self.attempt.as_ref().and_then(|attempt| attempt.child.as_ref().map(Child::id));
        let is_expected = expected == Some(channel.peer())
            && self.attempt.as_ref().is_some_and(|attempt| attempt.agreeing.is_none());
        if let Some(Busy::ForGood(why) | Busy::ForNow(why)) = self.busy().filter(|_| !is_expected) {
            tracing::warn!(process = channel.peer(), "a process is refused at the upgrade socket: {why}");
            scope.spawn(async move {
                abort(&channel, &why).await;
            });
            return None;
        }
        Some(channel)
    }

    /// Talks with a process that may take over.
    pub(crate) fn talk(&mut self, channel: Channel, offer: Offer, scope: &Scope) {
        let attempt = self.attempt.get_or_insert_with(|| {
            tracing::info!(
                process = channel.peer(),
                "an upgrade begins: a new process has connected to the upgrade socket"
            );
            Attempt::new(Vec::new(), None)
        });
        let (deadline, instance) = (attempt.deadline, self.instance.clone());
        attempt.agreeing = Some(scope.spawn(agree(channel, offer, instance, deadline)));
    }

    /// Ends the upgrade in progress without a result: this process goes on, and tells why.
    pub(crate) fn fail(&mut self, why: &str) {
        let Some(Attempt { waiters, child, agreeing, .. }) = self.attempt.take() else { return };
        if let Some(mut child) = child {
            // It may have ended by itself.
            let _ = child.kill().and_then(|()| child.wait());
        }
        if let Some(agreeing) = agreeing {
            agreeing.abort();
        }
        tracing::error!("the upgrade has failed, and this process goes on: {why}");
        answer(waiters, &Err(why.to_owned()));
    }

    /// Returns the hand-over to a process that serves. The upgrade socket belongs to it, if it has taken it. `sockets` are descriptors
    /// of the listening sockets; this process keeps those that the new one has taken, and gives them to another one if it dies.
    pub(crate) fn hand_over(
        &mut self,
        agreed: Agreed,
        Began { known, taken }: Began,
        mut sockets: Vec<(SocketName, OwnedFd)>,
        scope: &Scope,
    ) -> Giving {
        let Agreed { channel, version, .. } = agreed;
        // The end of their requests makes the callers that wait for a further upgrade ask the new process.
        self.later.clear();
        let attempt = self.attempt.take();
        let (waiters, begun) =
            attempt.map_or_else(|| (Vec::new(), Instant::now()), |attempt| (attempt.waiters, attempt.begun));
        let takes = |kind: &str| taken.iter().any(|name| name.kind == kind);
        let door = self.door.as_ref().ok().filter(|_| takes(UPGRADE)).map(|door| door.path.clone());
        if let Ok(Door { socket, .. }) = &self.door
            && takes(UPGRADE)
        {
            socket.file().leave();
        }
        let takes_admin = takes("admin");
        sockets.retain(|(name, _)| taken.contains(name));
        let watched = door.filter(|_| !sockets.is_empty()).map(|door| Watched::start(door, scope));
        Giving {
            takes_admin,
            sockets,
            channel,
            version,
            known,
            waiters,
            begun,
            is_broken: false,
            watched,
            was_looked_for: false,
        }
    }

    /// Returns a descriptor of the upgrade socket.
    pub(crate) fn socket(&self) -> Option<(SocketName, OwnedFd)> {
        let Door { socket, path } = self.door.as_ref().ok()?;
        Some((sockets::name(UPGRADE, &path.display().to_string()), socket.socket().ok()?))
    }
}

/// Waits for a process that connects to the upgrade socket. Cancel safe.
async fn arrival(door: &Result<Door, String>) -> UnixStream {
    let Ok(door) = door else { return std::future::pending().await };
    loop {
        match door.socket.accept().await {
            Ok((stream, _)) => return stream,
            Err(_) => sleep(LOOK_EVERY).await,
        }
    }
}

async fn open_door(path: PathBuf, offered: &Sockets) -> Result<Door, String> {
    let prepared = path.clone();
    let prepared = tokio::task::spawn_blocking(move || isthmus_upgrade::place::prepare(&prepared)).await;
    prepared.map_err(|_| "checking the upgrade socket panicked".to_owned())??;
    let cannot = |error: io::Error| format!("cannot use the upgrade socket {}: {error}", path.display());
    let socket = match offered
        .take(UPGRADE, &path.display().to_string())
        .and_then(|sockets| sockets.into_iter().next())
    {
        Some(socket) => UnixSocket::of(socket, &path).map_err(cannot)?,
        None => UnixSocket::listen(&path).await.map_err(cannot)?,
    };
    Ok(Door { socket, path })
}

impl Attempt {
    fn new(waiters: Vec<Waiter>, child: Option<Child>) -> Self {
        let begun = Instant::now();
        Self { begun, deadline: begun + READY_WITHIN, waiters, child, agreeing: None, failed: None }
    }

    /// Waits for the next step. Cancel safe.
    async fn next(&mut self) -> Step {
        let Self { child, agreeing, failed, deadline, .. } = self;
        if let Some(running) = agreeing
            && failed.is_none()
        {
            let why = match running.await {
                Ok(Ok(agreed)) => return Step::Agreed(Box::new(agreed)),
                Ok(Err(why)) => why,
                Err(_) => "internal error: the upgrade panicked".to_owned(),
            };
            *failed = Some(why);
        }
        if let Some(why) = failed {
            return Step::Failed(with_end(why.clone(), child).await);
        }
        let Some(child) = child else { return std::future::pending().await };
        while Instant::now() < *deadline {
            if let Ok(Some(status)) = child.try_wait() {
                return Step::Failed(format!(
                    "the new process {} before it asked for the sockets",
                    ended(status)
                ));
            }
            sleep(LOOK_EVERY).await;
        }
        Step::Failed(format!(
            "the new process has not asked for the sockets within {} s",
            READY_WITHIN.as_secs()
        ))
    }
}

/// Adds how the new process has ended, if it has.
async fn with_end(why: String, child: &mut Option<Child>) -> String {
    let Some(child) = child else { return why };
    for _ in 0..10 {
        if let Ok(Some(status)) = child.try_wait() {
            return format!("{why}; the new process {}", ended(status));
        }
        sleep(LOOK_EVERY).await;
    }
    why
}

fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("has ended with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "has ended".to_owned(),
    }
}

/// The listening sockets, and the beliefs of this process.
type Offer = (io::Result<Vec<(SocketName, OwnedFd)>>, Vec<Value>);

/// Offers the listening sockets, and waits until the new process could serve. On an error the new process is told to end.
async fn agree(
    mut channel: Channel,
    offer: Offer,
    instance: Arc<str>,
    deadline: Instant,
) -> Result<Agreed, String> {
    let process = channel.peer();
    let why = match timeout_at(deadline, talk(&mut channel, offer, &instance)).await {
        Ok(Ok((version, room))) => return Ok(Agreed { channel, version, room }),
        Ok(Err(Disagreed::Failed(why))) => {
            return Err(format!("the new process (pid {process}) cannot serve: {why}"));
        }
        Ok(Err(Disagreed::Here(why))) => why,
        Err(_) => {
            format!("the new process (pid {process}) was not ready within {} s", READY_WITHIN.as_secs())
        }
    };
    abort(&channel, &why).await;
    Err(why)
}

enum Disagreed {
    /// The new process has failed.
    Failed(String),
    /// The conversation has failed.
    Here(String),
}

async fn talk(
    channel: &mut Channel,
    (offer, beliefs): Offer,
    instance: &str,
) -> Result<(String, Option<Room>), Disagreed> {
    let here = |error: io::Error| Disagreed::Here(lost(&error));
    let offer = offer.map_err(|error| Disagreed::Here(format!("the sockets cannot be offered: {error}")))?;
    let version = match receive(channel).await.map_err(here)? {
        Message::Hello { protocol: PROTOCOL, version } => version,
        Message::Hello { protocol, version } => {
            return Err(Disagreed::Here(format!(
                "the new process has version {version}, whose upgrade protocol {protocol} is not {PROTOCOL}; restart the gateway"
            )));
        }
        other => return Err(unexpected(other)),
    };
    let welcome = Message::Welcome {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        process: std::process::id(),
        instance: instance.to_owned(),
    };
    channel.send(&welcome).await.map_err(here)?;
    for some in offer.chunks(DESCRIPTORS_MAX) {
        let sockets = some.iter().map(|(name, _)| name.clone()).collect();
        let descriptors: Vec<_> = some.iter().map(|(_, socket)| socket.as_fd()).collect();
        channel.send_with(&Message::Sockets { sockets }, &[], &descriptors).await.map_err(here)?;
    }
    channel.send(&Message::Offered { beliefs: Some(beliefs) }).await.map_err(here)?;
    match receive(channel).await.map_err(here)? {
        Message::Ready { room } => Ok((version, room)),
        other => Err(unexpected(other)),
    }
}

fn unexpected(message: Message) -> Disagreed {
    match message {
        Message::Failed { why } => Disagreed::Failed(why),
        _ => Disagreed::Here("the new process has sent a message that does not fit here".to_owned()),
    }
}

fn lost(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            "the new process has closed the upgrade socket".to_owned()
        }
        _ => format!("the conversation with the new process has failed: {error}"),
    }
}

/// Tells the new process to end.
async fn abort(channel: &Channel, why: &str) {
    let _ = timeout(ANSWER_WITHIN, channel.send(&Message::Abort { why: why.to_owned() })).await;
}

/// The documents of orders to drain, if they are handed over, and beliefs.
type Last = (Option<Vec<String>>, Vec<Value>);

impl Agreed {
    /// Ends the new process if it has no room for the connections of this one; the error says what it lacks.
    pub(crate) async fn has_room(&self, control: &Control) -> Result<(), String> {
        let open = control.connections_active() as u64;
        let Some(lacks) = self.room.and_then(|room| room.lacks(open)) else { return Ok(()) };
        let process = self.channel.peer();
        let why = format!("the new process (pid {process}) has no room for the connections: {lacks}");
        abort(&self.channel, &why).await;
        Err(why)
    }

    /// Lets the new process accept connections, and waits until it does. `last` returns what the new process learns at this moment.
    pub(crate) async fn go(
        &mut self,
        control: &Control,
        recorder: &Recorder,
        last: impl FnOnce() -> Last,
    ) -> Result<Began, String> {
        let (_, unused_id) = control.sockets().await;
        let mut known = Known::default();
        let going = async {
            counters::send(&self.channel, recorder, &mut known).await?;
            let next_id = unused_id + IDS_BETWEEN;
            let (drains, beliefs) = last();
            let go = Message::Go { next_id, withdrawn: withdrawn(control), drains, beliefs };
            self.channel.send(&go).await?;
            receive(&mut self.channel).await
        };
        let why = match timeout(ANSWER_WITHIN, going).await {
            Ok(Ok(Message::Serving { taken })) => return Ok(Began { known, taken }),
            Ok(Ok(other)) => match unexpected(other) {
                Disagreed::Failed(why) | Disagreed::Here(why) => why,
            },
            Ok(Err(error)) => lost(&error),
            Err(_) => format!("the new process has not begun to serve within {} s", ANSWER_WITHIN.as_secs()),
        };
        abort(&self.channel, &why).await;
        Err(why)
    }
}

/// Returns the endpoints that operators have taken out of service.
fn withdrawn(control: &Control) -> Vec<Withdrawn> {
    let all = control.upstreams().withdrawals().list().into_iter();
    all.map(|Standing { which: Which { ip, port, service }, withdrawal, since }| Withdrawn {
        address: Which { ip, port, service: None }.to_string(),
        service: service.map(|service| service.to_string()),
        disabled: withdrawal == Withdrawal::Disabled,
        since: Some(since),
    })
    .collect()
}
