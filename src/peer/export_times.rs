//! The time at which each service was first exported, by peer and exported name. All links of a peer share the times. A file in
//! the state folder keeps them over a restart, because the peer assigns virtual addresses in the order of these times.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::status::LinkTable;
use isthmus_files::line_file::LineFile;
use isthmus_files::whole_file::set_aside;
use isthmus_model::name::HostName;
use isthmus_tasks::scope::Scope;

/// The name of the file.
const FILE: &str = "export-times";
/// The largest number of recorded export times. When it is reached, the times of services that this process has not exported
/// are dropped.
const TIMES_MAX: usize = 1 << 20;
const LIST: LineFile = LineFile { name: "export times", lines_max: TIMES_MAX, line_bytes_max: 1_024 };
/// The shortest time between two writes.
const WRITE_EVERY: Duration = Duration::from_secs(1);
/// How long a write waits after one that has failed.
const RETRY: Duration = Duration::from_secs(60);

/// The time at which each service was first exported.
pub(super) struct ExportTimes {
    known: Mutex<BTreeMap<(Arc<str>, HostName), Time>>,
    /// The path of the file; `None`: there is no state folder.
    place: Mutex<Option<PathBuf>>,
    /// Held while the file is written, so that the last write is of the newest times.
    writing: Mutex<()>,
    /// Shows operators why the times cannot be read or written.
    table: Arc<LinkTable>,
    /// Notified when the times or the path of the file change.
    changes: watch::Sender<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Time {
    /// The time of the first export, in seconds since 1970.
    at: u64,
    /// True if this process has exported the service.
    is_used: bool,
}

impl Default for ExportTimes {
    fn default() -> Self {
        Self {
            known: Mutex::default(),
            place: Mutex::default(),
            writing: Mutex::default(),
            table: Arc::default(),
            changes: watch::Sender::new(()),
        }
    }
}

/// A line of the file: the peer, the exported name, and the time.
struct Line<'a>(&'a Arc<str>, &'a HostName, u64);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.0, self.1, self.2)
    }
}

fn time(line: &str) -> Option<((Arc<str>, HostName), Time)> {
    let mut fields = line.splitn(3, ' ');
    let (peer, name) = (fields.next()?.into(), HostName::parse(fields.next()?).ok()?);
    Some(((peer, name), Time { at: fields.next()?.parse().ok()?, is_used: false }))
}

impl ExportTimes {
    /// Returns no times yet.
    pub(super) fn new(table: Arc<LinkTable>) -> Self {
        Self { table, ..Self::default() }
    }

    /// Sets the state folder, and reads the file there. A file that cannot be used is named in the log and set aside. Blocks.
    pub(super) fn read(&self, state: Option<&Path>) {
        self.keep_in(state);
        if let Some(place) = state.map(|state| state.join(FILE)) {
            match LIST.load(&place, time) {
                Ok(list) => lock(&self.known).extend(list),
                Err(fault) => {
                    let aside = set_aside(&place);
                    let text = format!(
                        "{}: {fault}; the file is not used and {aside}; all services count as exported from this time on, so \
                         new peers may assign other virtual addresses to them",
                        place.display()
                    );
                    tracing::error!("{text}");
                    self.table.set_times_problem(Some(text));
                }
            }
        }
    }

    /// Sets the state folder.
    pub(super) fn keep_in(&self, state: Option<&Path>) {
        let next = state.map(|state| state.join(FILE));
        let mut place = lock(&self.place);
        if *place != next {
            *place = next;
            self.changes.send_replace(());
        }
    }

    /// Returns the time of the first export in seconds since 1970. If there was none, it is `now`.
    pub(super) fn of(&self, peer: &Arc<str>, name: &HostName, now: u64) -> u64 {
        let mut known = lock(&self.known);
        let key = (peer.clone(), name.clone());
        if let Some(time) = known.get_mut(&key) {
            time.is_used = true;
            return time.at;
        }
        if known.len() >= TIMES_MAX {
            known.retain(|_, time| time.is_used);
        }
        if known.len() < TIMES_MAX {
            known.insert(key, Time { at: now, is_used: true });
            self.changes.send_replace(());
        }
        now
    }

    /// Forgets the time of a service that is not exported to the peer any more.
    pub(super) fn forget(&self, peer: &Arc<str>, name: &HostName) {
        if lock(&self.known).remove(&(peer.clone(), name.clone())).is_some() {
            self.changes.send_replace(());
        }
    }

    /// Starts a task that writes the file soon after each change, until `self` is dropped.
    pub(super) fn keep(self: &Arc<Self>, scope: &Scope) {
        let (times, mut changes) = (Arc::downgrade(self), self.changes.subscribe());
        scope.spawn(async move {
            let mut is_written = true;
            loop {
                tokio::select! {
                    changed = changes.changed() => if changed.is_err() {
                        break;
                    },
                    () = tokio::time::sleep(RETRY), if !is_written => {}
                }
                tokio::time::sleep(WRITE_EVERY).await;
                changes.mark_unchanged();
                let Some(times) = times.upgrade() else { break };
                let Ok(written) = tokio::task::spawn_blocking(move || times.write()).await else {
                    return tracing::error!("internal error: writing the times of exports panicked");
                };
                is_written = written;
            }
        });
    }

    /// Writes the file; returns false if it cannot be written. Blocks.
    pub(super) fn write(&self) -> bool {
        let _writing = lock(&self.writing);
        let Some(place) = lock(&self.place).clone() else { return true };
        let all: Vec<_> = lock(&self.known).iter().map(|(key, time)| (key.clone(), time.at)).collect();
        let lines = all.iter().map(|((peer, name), at)| Line(peer, name, *at));
        let problem = LIST
            .store(&place, lines)
            .err()
            .map(|error| format!("cannot write the times of exports to {}: {error}", place.display()));
        if let Some(problem) = &problem {
            tracing::error!("{problem}");
        }
        let is_written = problem.is_none();
        self.table.set_times_problem(problem);
        is_written
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HostName {
        HostName::parse(text).expect("legal")
    }

    #[test]
    fn times_are_kept_over_a_restart_and_a_damaged_file_is_set_aside() {
        let state = tempfile::tempdir().expect("a folder");
        let (west, file) = ("west".into(), state.path().join(FILE));
        let start = |state: &Path| {
            let times = ExportTimes::default();
            times.read(Some(state));
            times
        };
        let first = start(state.path());
        assert_eq!(first.of(&west, &name("a.global"), 7), 7);
        assert_eq!(first.of(&west, &name("b.global"), 8), 8);
        assert_eq!(first.of(&west, &name("a.global"), 9), 7, "the first export counts");
        first.forget(&west, &name("b.global"));
        first.write();
        let second = start(state.path());
        assert_eq!(second.of(&west, &name("a.global"), 20), 7);
        assert_eq!(second.of(&west, &name("b.global"), 20), 20, "it was not exported in between");
        let whole = std::fs::read_to_string(&file).expect("written");
        std::fs::write(&file, whole.replace("a.global 7", "a.global 6")).expect("written");
        let third = start(state.path());
        assert_eq!(third.of(&west, &name("a.global"), 30), 30);
        assert!(third.table.times_problem().is_some_and(|text| text.contains("the file is not used")));
        assert!(third.write());
        assert!(state.path().join("export-times.damaged").exists(), "it is kept for the operator");
        let problem = third.table.times_problem();
        assert_eq!(problem, None, "the file is good again");
        assert_eq!(start(state.path()).of(&west, &name("a.global"), 40), 30);
    }

    #[test]
    fn times_that_cannot_be_written_are_a_problem_until_they_are() {
        let state = tempfile::tempdir().expect("a folder");
        let folder = state.path().join("folder");
        std::fs::write(&folder, "in the way").expect("written");
        let times = ExportTimes::default();
        times.keep_in(Some(&folder));
        assert!(!times.write());
        let problem = times.table.times_problem().expect("a problem");
        assert!(
            problem.starts_with("cannot write the times of exports to ") && problem.contains("folder"),
            "{problem}"
        );
        std::fs::remove_file(&folder).expect("removed");
        assert!(times.write());
        assert_eq!(times.table.times_problem(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn times_are_written_a_second_after_a_change_and_a_minute_after_a_failure() {
        let state = tempfile::tempdir().expect("a folder");
        let folder = state.path().join("folder");
        std::fs::write(&folder, "in the way").expect("written");
        let (times, scope) = (Arc::new(ExportTimes::default()), Scope::default());
        times.keep_in(Some(&folder));
        times.keep(&scope);
        let has_failed = || times.table.times_problem().is_some();
        let sleep = async |millis| tokio::time::sleep(Duration::from_millis(millis)).await;
        times.of(&"west".into(), &name("a.global"), 7);
        sleep(990).await;
        assert!(!has_failed());
        sleep(20).await;
        assert!(has_failed());
        std::fs::remove_file(&folder).expect("removed");
        sleep(60_900).await;
        assert!(has_failed());
        sleep(100).await;
        assert!(!has_failed());
    }

    #[test]
    fn without_a_state_folder_nothing_is_written() {
        let times = ExportTimes::default();
        assert_eq!(times.of(&"west".into(), &name("a.global"), 7), 7);
        assert!(times.write());
    }
}
