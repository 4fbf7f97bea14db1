//! Follows the objects of one kind: lists them, watches them from the listed revision, and starts again after a fault. Each
//! kind has a task of its own, so that a fault of one kind does not delay another.
//!
//! An API server can send the list on the watch itself (`sendInitialEvents`). If it refuses that, the list is requested in
//! pages.

mod lines;

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use hyper::body::Incoming;
use serde_json::value::RawValue;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::lines::{LINE_BYTES_MAX, Lines};
use super::client::{ANSWER, Client, Fault, collected, next, retry_after};
use super::kinds::{Facts, Kind, Object};
use super::objects::{Items, List, Meta, Status, VALUES_MAX, WatchLine, has_too_many_values};
use isthmus_net::budget::registry_bytes;
use isthmus_net::channel::cut;
use isthmus_tasks::backoff::Backoff;

/// The longest wait between attempts, before jitter of a fifth.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// The shortest wait between attempts, even if another watch of the server works meanwhile.
const WOKEN_AFTER: Duration = Duration::from_millis(500);
/// The longest wait of the first watch of a server that is away, by which the others learn that it is back; and that of the others after
/// its return, while it may still refuse some kinds.
const AT_RETURN: Duration = Duration::from_secs(2);
/// How long after its return a server may still refuse some kinds, because it is starting.
const RETURN_LASTS: Duration = Duration::from_secs(60);
/// The interval at which the server is asked for a kind that it does not have.
const ABSENT_WAIT: Duration = Duration::from_secs(60);
/// The largest number of versions of an API group that the server is asked for.
const VERSIONS_MAX: usize = 8;
/// The time limit of a whole listing.
const LIST_WITHIN: Duration = Duration::from_secs(600);
/// The server is asked to end a watch after this number of seconds, plus a random time of up to half of it. The next watch
/// resumes at the last revision.
const WATCH_SECONDS: u64 = 240;
/// The number of objects of one page.
const PAGE: usize = 500;
/// The largest size of a page, in bytes. An object in etcd usually has at most 1.5 MiB.
const PAGE_BYTES_MAX: usize = 64 << 20;
/// The largest size of an object of a page, in bytes. A larger object counts as unreadable.
const OBJECT_BYTES_MAX: usize = LINE_BYTES_MAX;
/// The largest number of objects of a page that are sent in one batch.
const BATCH: usize = PAGE;
/// The largest number of objects of one listing.
const LISTED_MAX: usize = 2_000_000;
/// The largest number of empty pages in a row.
const EMPTY_PAGES_MAX: usize = 100;
/// The number of expired listings in a row after which all objects are requested in one response, and the fault is reported.
const EXPIRED_MAX: u32 = 2;
/// The number of useless responses in a row after which the kind is listed again: a watch that resumes from the same revision
/// would get the same response.
const USELESS_MAX: u32 = 2;
/// How long a watch may bring neither an event nor a bookmark before the kind is listed again. An API server sends a bookmark each
/// minute. It sends nothing on a watch from a revision that is newer than its own, as after a restore of an older backup.
const QUIET_MAX: Duration = Duration::from_secs(180);
/// The number of resumed watches in a row that bring neither an event nor a bookmark, after which the kind is listed again.
const VAIN_MAX: u32 = 3;
/// A watch that has lasted this long may end without a fault, and resets the counts of expired listings and useless responses.
const STEADY: Duration = Duration::from_secs(10);
/// The time without a fault after which a watch that has received nothing counts as working. Its kind is then reported as
/// followed again.
const SETTLED: Duration = Duration::from_secs(1);
/// The annotation of the bookmark that ends the list on a watch.
const INITIAL_END: &str = "k8s.io/initial-events-end";

/// The index of a watch among the watches of a cluster.
pub(super) type WatchId = usize;

/// An event of a watch.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) watch: WatchId,
    pub(super) kind: Kind,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// A listing begins; it replaces an unfinished listing.
    Begin,
    Put(Object),
    Gone(Meta),
    /// An object that cannot be read: its last good state stays.
    Broken(Meta, String),
    /// The listing is complete.
    Complete,
    /// The cluster does not have the kind in a version that is read; with a sentence about the versions that it has.
    Absent(Arc<str>),
    /// The kind cannot be followed at the moment.
    Failing(Arc<str>, Option<StatusCode>),
    /// The kind is followed again, from the last revision.
    Resumed,
}

/// How one API server sends lists, on watches or in pages, and whether it works. All watches of the server share this state.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// Notified when a watch works, so that watches that have failed while the server was away try again.
    works: Notify,
    presence: Mutex<Presence>,
    /// True if the server has refused to send a list on a watch.
    pages: AtomicBool,
    /// One bit for each kind of which objects were left out because there are too many. Only a listing shows whether there is
    /// room again.
    crowded: AtomicU32,
    pub(super) streamed: AtomicU64,
    pub(super) paged: AtomicU64,
    pub(super) resumed: AtomicU64,
}

/// Tells whether a server is there, as its first watch finds it.
#[derive(Clone, Copy, Debug, Default)]
enum Presence {
    #[default]
    Here,
    Away,
    /// The server is back since this time.
    Back(Instant),
}

impl Way {
    fn presence(&self) -> MutexGuard<'_, Presence> {
        self.presence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_away(&self) {
        *self.presence() = Presence::Away;
    }

    /// Wakes the watches that wait for the server, because it works.
    fn note_works(&self) {
        let mut presence = self.presence();
        if matches!(*presence, Presence::Away) {
            *presence = Presence::Back(Instant::now());
        }
        drop(presence);
        self.works.notify_waiters();
    }

    /// Returns true if the server is back after it was away, and may still be starting.
    fn is_returning(&self) -> bool {
        matches!(*self.presence(), Presence::Back(since) if since.elapsed() < RETURN_LASTS)
    }

    /// Sets the kinds that are listed again when their watches end.
    pub(super) fn note_crowded(&self, kinds: impl Iterator<Item = Kind>) {
        let bits = kinds.fold(0, |bits, kind| bits | 1 << kind as u32);
        self.crowded.store(bits, Ordering::Relaxed);
    }

    fn is_crowded(&self, kind: Kind) -> bool {
        self.crowded.load(Ordering::Relaxed) & 1 << kind as u32 != 0
    }
}

/// The events in the complete lines of a watch.
#[derive(Default)]
struct Heard {
    batch: Vec<What>,
    /// True if one of the lines ends the list on the watch.
    is_whole: bool,
    /// The reason to stop following the kind after the batch; `None` if the watch continues.
    ended: Option<Ended>,
}

/// The start of the next request. A fault does not change the state by itself: a list that is not whole starts again, and a
/// watch resumes.
///
/// ```text
/// Listing  ──▶ Watching: the list is whole
/// Watching ──▶ Watching: an event or a bookmark has a newer revision
/// Watching ──▶ Listing:  the revision is too old; USELESS_MAX useless responses; VAIN_MAX watches resumed in vain; nothing
///                        arrives for QUIET_MAX; a deleted object without a name; the kind is absent; objects were left out, for
///                        which there may be room again
/// ```
enum State {
    /// The kind has to be listed. Objects of a list are not in the order of their revisions, so these do not count.
    Listing,
    /// All is known up to the revision.
    Watching { revision: String },
}

/// The reason why a kind is not followed any more.
enum Ended {
    /// The receiver of events is gone.
    Closed,
    /// The server has ended the watch at the requested time.
    InTime,
    /// The last revision is too old to resume from.
    Expired,
    Absent,
    Fault(Fault),
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Self {
        match fault.status() {
            Some(StatusCode::GONE) => Self::Expired,
            _ => Self::Fault(fault),
        }
    }
}

impl Ended {
    /// Returns true if a server may refuse a revision in this way because it is newer than its own.
    fn refuses_revision(&self) -> bool {
        let status = match self {
            Self::Fault(fault) => fault.status(),
            Self::Closed | Self::InTime | Self::Expired | Self::Absent => None,
        };
        matches!(status, Some(StatusCode::INTERNAL_SERVER_ERROR | StatusCode::GATEWAY_TIMEOUT))
    }
}

/// Describes the versions of a kind that a server has, beside those that are read.
fn lacks(group: &str, read: &[(&str, &str)], found: &[String]) -> String {
    let read = read.iter().map(|(_, version)| *version).collect::<Vec<_>>().join(" or ");
    let found = match found {
        [] => "no version of this kind".to_owned(),
        found => format!("only {}", found.join(", ")),
    };
    format!("the API server does not serve {group}/{read}; it has {found}")
}

/// The task that follows one kind.
pub(super) struct Watcher {
    client: Arc<Client>,
    way: Arc<Way>,
    id: WatchId,
    kind: Kind,
    namespace: Option<Arc<str>>,
    events: mpsc::Sender<Vec<Event>>,
    /// The index of the requested version in [`Facts::versions`](super::kinds::Facts::versions).
    version: usize,
    state: State,
    /// The number of expired listings in a row.
    expired: u32,
    /// The number of useless responses in a row.
    useless: u32,
    /// The number of watches in a row that were resumed, and have brought neither an event nor a bookmark.
    vain: u32,
    backoff: Backoff,
}

impl Watcher {
    /// Makes the task for a kind in one namespace, or in all.
    pub(super) fn new(
        (client, way): (Arc<Client>, Arc<Way>),
        id: WatchId,
        (kind, namespace): (Kind, Option<Arc<str>>),
        events: mpsc::Sender<Vec<Event>>,
    ) -> Self {
        Self {
            client,
            way,
            id,
            kind,
            namespace,
            events,
            version: 0,
            state: State::Listing,
            expired: 0,
            useless: 0,
            vain: 0,
            backoff: Backoff::up_to(WAIT_MAX),
        }
    }

    /// Follows the kind until the receiver of events is gone.
    pub(super) async fn run(mut self) {
        loop {
            let Err(ended) = self.follow().await;
            if self.way.is_crowded(self.kind) {
                self.state = State::Listing;
            }
            let is_of_server = matches!(&ended, Ended::Fault(fault) if fault.is_of_server());
            let (wait, report) = match ended {
                Ended::Closed => return,
                Ended::InTime => continue,
                Ended::Expired => {
                    self.state = State::Listing;
                    self.expired += 1;
                    let wait = self.wait();
                    (wait, (self.expired >= EXPIRED_MAX).then(|| expired_again(wait)))
                }
                Ended::Absent => {
                    self.state = State::Listing;
                    self.version = 0;
                    let wait = if self.way.is_returning() { AT_RETURN } else { ABSENT_WAIT };
                    (wait, Some(What::Absent(self.lack().await)))
                }
                Ended::Fault(fault) => {
                    // The next listing is in pages, because a response with all objects may have been too large.
                    self.expired = 0;
                    self.useless += u32::from(matches!(fault, Fault::Answer(_)));
                    if self.useless >= USELESS_MAX {
                        self.useless = 0;
                        self.state = State::Listing;
                    }
                    let wait = self.wait().max(fault.retry_after().unwrap_or_default());
                    let wait = if is_of_server { wait.min(self.longest_wait()) } else { wait };
                    let text = format!("{fault}; {}", next_attempt(wait));
                    (wait, Some(What::Failing(text.into(), fault.status())))
                }
            };
            if let Some(report) = report
                && self.send(vec![report]).await.is_err()
            {
                return;
            }
            self.pause(wait, is_of_server).await;
        }
    }

    /// Waits before the next attempt. If the server was away, the wait ends soon after another watch works.
    async fn pause(&mut self, wait: Duration, is_of_server: bool) {
        let way = self.way.clone();
        let mut works = pin!(way.works.notified());
        // From here on, no notification is missed.
        works.as_mut().enable();
        let shortest = if is_of_server { wait.min(WOKEN_AFTER) } else { wait };
        sleep(shortest).await;
        tokio::select! {
            () = works, if is_of_server => self.backoff.reset(),
            () = sleep(wait - shortest) => {}
        }
    }

    fn wait(&mut self) -> Duration {
        // The random number need not be secret; it only has to differ between gateways.
        self.backoff.wait(RandomState::new().hash_one(self.id))
    }

    /// Returns the longest wait after a fault of the server. The first watch finds out when the server is back, and the others wait for
    /// it.
    fn longest_wait(&self) -> Duration {
        let is_first = self.id == 0;
        if is_first {
            self.way.note_away();
        }
        if is_first || self.way.is_returning() { AT_RETURN } else { Duration::MAX }
    }

    async fn send(&self, what: Vec<What>) -> Result<(), Ended> {
        let (watch, kind) = (self.id, self.kind);
        let events = what.into_iter().map(|what| Event { watch, kind, what }).collect();
        self.events.send(events).await.map_err(|_| Ended::Closed)
    }

    async fn follow(&mut self) -> Result<Infallible, Ended> {
        if self.vain >= VAIN_MAX {
            self.vain = 0;
            self.state = State::Listing;
        }
        let (mut body, mut lines) = match &self.state {
            State::Watching { revision } => {
                let begun = self.watch(&format!("&resourceVersion={revision}")).await;
                self.vain += u32::from(begun.as_ref().map_or_else(Ended::refuses_revision, |_| true));
                let begun = begun?;
                self.way.resumed.fetch_add(1, Ordering::Relaxed);
                (begun, Lines::default())
            }
            State::Listing => match self.listed_on_watch().await? {
                Some(begun) => begun,
                None => {
                    let pages = timeout(LIST_WITHIN, self.pages()).await;
                    let revision = pages.map_err(|_| Fault::Late(LIST_WITHIN))??;
                    let more = format!("&resourceVersion={revision}");
                    self.state = State::Watching { revision };
                    (self.watch(&more).await?, Lines::default())
                }
            },
        };
        let begun = Instant::now();
        let Err(ended) = self.attend(&mut body, &mut lines).await;
        let lasted = begun.elapsed();
        if lasted >= STEADY {
            self.backoff.reset();
            self.expired = 0;
            self.useless = 0;
            return Err(ended);
        }
        Err(match ended {
            Ended::InTime => Fault::Broken(format!("the watch ended after {} s", lasted.as_secs())).into(),
            ended => ended,
        })
    }

    /// Sends the events of a watch until the watch ends.
    async fn attend(&mut self, body: &mut Incoming, lines: &mut Lines) -> Result<Infallible, Ended> {
        let mut is_settled = false;
        loop {
            let within = if is_settled { QUIET_MAX } else { SETTLED };
            let part = match next(body, within).await {
                Err(Fault::Late(_)) if is_settled => {
                    self.state = State::Listing;
                    return Err(Ended::InTime);
                }
                Err(Fault::Late(_)) => {
                    is_settled = true;
                    self.settled();
                    self.send(vec![What::Resumed]).await?;
                    continue;
                }
                part => part?,
            };
            let Some(part) = part else {
                return Err(if lines.is_between() { Ended::InTime } else { Ended::Fault(cut_off()) });
            };
            lines.push(&part)?;
            let mut heard = self.read(lines);
            if !is_settled && heard.ended.is_none() && lines.is_between() {
                is_settled = true;
                self.settled();
                heard.batch.push(What::Resumed);
            }
            if !heard.batch.is_empty() {
                self.send(heard.batch).await?;
            }
            if let Some(ended) = heard.ended {
                return Err(ended);
            }
        }
    }

    /// Resets the back-off, and wakes the other watches, because the server works. Does nothing after an expired listing or a
    /// useless response: then a watch must have lasted for [`STEADY`] before the back-off is reset.
    fn settled(&mut self) {
        if self.expired == 0 && self.useless == 0 {
            self.backoff.reset();
            self.way.note_works();
        }
    }

    /// Begins a watch.
    async fn watch(&mut self, more: &str) -> Result<Incoming, Ended> {
        let seconds = WATCH_SECONDS + RandomState::new().hash_one(self.id) % (WATCH_SECONDS / 2);
        let more = format!("watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}{more}");
        self.get(&more).await
    }

    /// Requests the kind in the first version that the server has.
    async fn get(&mut self, more: &str) -> Result<Incoming, Ended> {
        loop {
            let version = self.kind.facts().versions[self.version];
            let path = self.kind.request(version, self.namespace.as_deref(), more);
            match self.client.get(&path).await {
                Err(fault)
                    if fault.status() == Some(StatusCode::NOT_FOUND) && self.kind.facts().is_custom =>
                {
                    if self.version + 1 == self.kind.facts().versions.len() {
                        return Err(Ended::Absent);
                    }
                    self.version += 1;
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// Describes the versions of the kind that the server has, none of which is read.
    async fn lack(&self) -> Arc<str> {
        let Facts { plural, versions, .. } = self.kind.facts();
        let read: Vec<(&str, &str)> =
            versions.iter().filter_map(|version| version.rsplit_once('/')).collect();
        let Some((group, _)) = read.first() else { return "".into() };
        let mut found = Vec::new();
        // A server that does not know the group has no version of it.
        let answer = self.value(&format!("/{group}")).await;
        let all = answer["versions"].as_array().into_iter().flatten();
        let all = all.filter_map(|one| one["version"].as_str()).take(VERSIONS_MAX);
        for version in all.filter(|version| read.iter().all(|(_, known)| known != version)) {
            let answer = self.value(&format!("/{group}/{version}")).await;
            let mut kinds = answer["resources"].as_array().into_iter().flatten();
            if kinds.any(|kind| kind["name"] == *plural) {
                found.push(cut(version));
            }
        }
        lacks(group.trim_start_matches("apis/"), &read, &found).into()
    }

    /// Returns what the server says under a path; null if it says nothing that can be read.
    async fn value(&self, path: &str) -> serde_json::Value {
        let answer = self.client.object(path).await.ok();
        answer.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    /// Requests a watch that begins with the list, and reads the list. Returns the watch, with the bytes after the list that
    /// were read already; `None` if the server does not send lists on watches.
    async fn listed_on_watch(&mut self) -> Result<Option<(Incoming, Lines)>, Ended> {
        if self.way.pages.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let more = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        let mut body = match self.watch(more).await {
            Ok(body) => body,
            Err(Ended::Fault(Fault::Refused {
                status: StatusCode::UNPROCESSABLE_ENTITY | StatusCode::BAD_REQUEST,
                message,
                ..
            })) => {
                tracing::debug!(
                    kind = self.kind.plural(),
                    message,
                    "the API server cannot list on a watch, so the gateway lists in pages"
                );
                self.way.pages.store(true, Ordering::Relaxed);
                return Ok(None);
            }
            Err(ended) => return Err(ended),
        };
        let end = Instant::now() + LIST_WITHIN;
        let mut lines = Lines::default();
        let mut listed = 0;
        self.send(vec![What::Begin]).await?;
        loop {
            let part = timeout_at(end, next(&mut body, ANSWER)).await;
            let part = part.map_err(|_| Fault::Late(LIST_WITHIN))??;
            let part =
                part.ok_or_else(|| Fault::Broken("the watch ended before the end of its list".to_owned()))?;
            lines.push(&part)?;
            let Heard { mut batch, is_whole, ended } = self.read(&mut lines);
            listed += batch.len();
            if listed > LISTED_MAX {
                return Err(Fault::Answer(format!("the list has more than {LISTED_MAX} objects")).into());
            }
            if is_whole {
                self.way.streamed.fetch_add(1, Ordering::Relaxed);
                self.way.note_works();
            }
            if !batch.is_empty() {
                batch.shrink_to_fit();
                self.send(batch).await?;
            }
            if let Some(ended) = ended {
                return Err(ended);
            }
            if is_whole {
                return Ok(Some((body, lines)));
            }
        }
    }

    /// Lists the objects page by page, and returns the revision to watch from.
    async fn pages(&mut self) -> Result<String, Ended> {
        let (mut token, mut listed, mut empty) = (String::new(), 0, 0);
        self.send(vec![What::Begin]).await?;
        // Listings in pages have expired several times. One response with all objects comes from the server's cache, and does
        // not expire.
        let first = if self.expired >= EXPIRED_MAX {
            "resourceVersion=0&resourceVersionMatch=NotOlderThan".to_owned()
        } else {
            format!("limit={PAGE}")
        };
        loop {
            let more =
                if token.is_empty() { first.clone() } else { format!("limit={PAGE}&continue={token}") };
            let body = self.get(&more).await?;
            let page = collected(body, registry_bytes(PAGE_BYTES_MAX)).await?;
            let list: List<'_> =
                serde_json::from_slice(&page).map_err(|error| unreadable("the list", &error))?;
            let Items(items) = list.items;
            listed += items.len();
            empty = if items.is_empty() { empty + 1 } else { 0 };
            for items in items.chunks(BATCH) {
                let batch = items.iter().map(|item| self.object(item)).collect();
                self.send(batch).await?;
            }
            let next = percent_encoded(&list.metadata.token);
            if next.is_empty() {
                if list.metadata.resource_version.is_empty() {
                    return Err(Fault::Answer("the list has no resourceVersion".to_owned()).into());
                }
                self.way.paged.fetch_add(1, Ordering::Relaxed);
                self.way.note_works();
                self.send(vec![What::Complete]).await?;
                return Ok(list.metadata.resource_version);
            }
            if next == token || empty > EMPTY_PAGES_MAX || listed > LISTED_MAX {
                return Err(Fault::Answer("the list never ends".to_owned()).into());
            }
            token = next;
        }
    }

    /// Parses the complete lines of a watch, up to a line that ends the watch.
    fn read(&mut self, lines: &mut Lines) -> Heard {
        let mut heard = Heard::default();
        while let Some(line) = lines.next() {
            if line.is_empty() {
                continue;
            }
            let taken = match serde_json::from_slice::<WatchLine<'_>>(line) {
                Ok(line) => self.take(&line, &mut heard),
                Err(error) => Err(unreadable("an event of the watch", &error).into()),
            };
            if let Err(ended) = taken {
                heard.ended = Some(ended);
                break;
            }
        }
        heard
    }

    fn take(&mut self, line: &WatchLine<'_>, heard: &mut Heard) -> Result<(), Ended> {
        if line.kind != "ERROR" {
            self.vain = 0;
        }
        match line.kind {
            "ADDED" | "MODIFIED" => {
                let what = self.object(line.object);
                match &what {
                    What::Put(object) => self.reached(&object.meta().resource_version),
                    What::Broken(meta, _) => self.reached(&meta.resource_version),
                    _ => {}
                }
                heard.batch.push(what);
            }
            "DELETED" => {
                let meta = Meta::lenient(line.object);
                // The deleted object is not known, so the kind is listed again.
                if meta.name.is_empty() {
                    self.state = State::Listing;
                    let fault = "a deleted object has no name".to_owned();
                    return Err(Fault::Answer(fault).into());
                }
                self.reached(&meta.resource_version);
                heard.batch.push(What::Gone(meta));
            }
            "BOOKMARK" => {
                let meta = Meta::lenient(line.object);
                if meta.annotations.get(INITIAL_END).is_some_and(|value| value == "true") {
                    if meta.resource_version.is_empty() {
                        let fault = "the bookmark that ends the watch's initial list has no resourceVersion"
                            .to_owned();
                        return Err(Fault::Answer(fault).into());
                    }
                    self.state = State::Watching { revision: meta.resource_version.clone() };
                    heard.batch.push(What::Complete);
                    heard.is_whole = true;
                }
                self.reached(&meta.resource_version);
            }
            "ERROR" => {
                let status: Status = serde_json::from_str(line.object.get()).unwrap_or_default();
                return Err(of_status(&status));
            }
            // An unknown type of event comes from a newer server.
            _ => {}
        }
        Ok(())
    }

    /// Stores the revision that a watch has reached.
    fn reached(&mut self, reached: &str) {
        if let State::Watching { revision } = &mut self.state
            && !reached.is_empty()
        {
            reached.clone_into(revision);
        }
    }

    fn object(&self, raw: &RawValue) -> What {
        if raw.get().len() > OBJECT_BYTES_MAX {
            let why = format!("the object is larger than {} MiB", OBJECT_BYTES_MAX >> 20);
            return What::Broken(Meta::lenient(raw), why);
        }
        if has_too_many_values(raw.get()) {
            return What::Broken(Meta::lenient(raw), format!("an object has more than {VALUES_MAX} values"));
        }
        match self.kind.read(raw.get()) {
            Ok(object) => match object.meta().lack() {
                None => What::Put(object),
                Some(lack) => What::Broken(Meta::lenient(raw), format!("the object has no {lack}")),
            },
            Err(error) => What::Broken(Meta::lenient(raw), cut(error)),
        }
    }
}

fn unreadable(what: &str, error: &serde_json::Error) -> Fault {
    Fault::Answer(format!("{what} is malformed: {}", cut(error)))
}

fn cut_off() -> Fault {
    Fault::Broken("the watch ended in the middle of a line".to_owned())
}

fn next_attempt(wait: Duration) -> String {
    format!("next attempt in {:.0?}", wait.max(Duration::from_secs(1)))
}

fn expired_again(wait: Duration) -> What {
    let text = format!(
        "the API server repeatedly refuses the revision of its own list as too old; {}",
        next_attempt(wait)
    );
    What::Failing(text.into(), Some(StatusCode::GONE))
}

fn of_status(status: &Status) -> Ended {
    let code = u16::try_from(status.code).ok().and_then(|code| StatusCode::from_u16(code).ok());
    let code = code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Fault::Refused { status: code, message: cut(&status.message), retry_after: retry_after(status) }.into()
}

/// Encodes a token for a query.
fn percent_encoded(text: &str) -> String {
    use std::fmt::Write as _;
    text.bytes().fold(String::with_capacity(text.len()), |mut all, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => all.push(byte.into()),
            byte => drop(write!(all, "%{byte:02X}")),
        }
        all
    })
}

#[cfg(test)]
mod tests;
