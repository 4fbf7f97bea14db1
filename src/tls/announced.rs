//! The roots that peers have announced, stored in the state folder as `peers/NAME.roots.pem`. A peer may have announced other
//! roots than those of its configured file. After a restart, the gateway verifies such a peer with the stored roots, until the
//! link is open again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::root_file::{FOLDER, RootFile};
use super::roots::{Announced, PeerTrust, RootStore, kept_text};
use super::status::trust_of;
use isthmus_files::whole_file::{remove, set_aside};
use isthmus_model::hex::{Hex, parse_array};
use isthmus_model::identity::TrustDomain;

/// The kind of file that the first line names.
const KIND: &str = "peer roots";

/// How long a write waits after one that has failed.
const RETRY: Duration = Duration::from_secs(60);

/// The suffix of file names, after the name of the peer.
const SUFFIX: &str = ".roots.pem";

fn path(state: &Path, peer: &str) -> PathBuf {
    state.join(FOLDER).join(format!("{peer}{SUFFIX}"))
}

/// Applies the kept roots of peers that have announced no roots to this process. A file that cannot be used is reported in the
/// status; a damaged file is also set aside.
pub(super) async fn restore(store: &RootStore, state: &Path) {
    let known = store.roots.borrow().clone();
    let missing: Vec<PeerTrust> = known
        .announced_by()
        .filter(|(_, announced)| announced.is_none())
        .map(|(peer, _)| peer.clone())
        .collect();
    let names: BTreeSet<String> = known.announced_by().map(|(peer, _)| peer.peer.to_string()).collect();
    let state = state.to_owned();
    let reading = tokio::task::spawn_blocking(move || {
        forget_others(&state, &names);
        missing.into_iter().map(|peer| (read(&path(&state, &peer.peer), &peer), peer)).collect::<Vec<_>>()
    });
    let Ok(read) = reading.await else {
        return tracing::error!("internal error: reading the announced roots of peers panicked");
    };
    for (read, peer) in read {
        let restored = match read {
            Ok(Some(announced)) => store.restore(&peer.alias, announced),
            Ok(None) => Ok(()),
            Err(fault) => Err(fault),
        };
        if let Err(fault) = restored {
            let name = &peer.peer;
            let text = format!(
                "the stored roots that the peer {name} announced before the last start are not used: {fault}"
            );
            store.problem(&kept_text(&peer.alias), text);
        }
    }
}

/// Removes the files of peers that are not configured. A peer that is added again begins with the roots of its configured file.
/// Blocks.
fn forget_others(state: &Path, peers: &BTreeSet<String>) {
    let Ok(folder) = fs::read_dir(state.join(FOLDER)) else { return };
    for file in folder.flatten() {
        let name = file.file_name();
        let of = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
        if of.is_some_and(|of| !peers.contains(of))
            && let Err(problem) = write(&file.path(), None)
        {
            tracing::error!("{problem}");
        }
    }
}

/// Reads the stored roots of a peer; `None` if there are none, or if they are of another trust domain. Blocks.
fn read(path: &Path, peer: &PeerTrust) -> Result<Option<Announced>, String> {
    let file = RootFile::load(path, KIND)
        .map_err(|fault| format!("{fault}; the file is not used and {}", set_aside(path)))?;
    let Some(file) = file else { return Ok(None) };
    let is_of_peer = file.field("alias") == Some(peer.alias.as_str())
        && file.field("trustDomain") == Some(peer.trust_domain.as_str());
    let base = file.field("base").and_then(|text| parse_array(text.as_bytes()));
    Ok(base.filter(|_| is_of_peer).map(|base| Announced { roots: file.roots, base, is_unconfirmed: false }))
}

/// Writes the announced roots of each peer to the peer's file, whenever the roots change. Roots that cannot be written are
/// reported in the status, and written again after [`RETRY`].
pub(super) async fn keep(store: RootStore, state: PathBuf) {
    let mut changes = store.roots.subscribe();
    let mut kept: BTreeMap<PathBuf, Stored> = BTreeMap::new();
    loop {
        let next: BTreeMap<PathBuf, Stored> = {
            let roots = changes.borrow_and_update();
            let stored = |(peer, announced): (&PeerTrust, Option<&Announced>)| {
                let file = announced.map(|announced| file(peer, announced));
                (path(&state, &peer.peer), Stored { alias: peer.alias.clone(), file })
            };
            // Kept roots are valid only with the peer's configured file from which they began. While that file cannot be read,
            // the kept roots stay.
            let is_known = |(peer, announced): &(&PeerTrust, Option<&Announced>)| {
                announced.is_some() || peer.roots.is_none() || roots.of_peers.contains_key(&peer.alias)
            };
            roots.announced_by().filter(is_known).map(stored).collect()
        };
        let changed: Vec<(PathBuf, Stored)> = next
            .iter()
            .filter(|(path, stored)| kept.get(*path) != Some(stored))
            .map(|(path, stored)| (path.clone(), stored.clone()))
            .collect();
        kept = next;
        let writing = tokio::task::spawn_blocking(move || {
            let write = |(path, stored): (PathBuf, Stored)| {
                let written = write(&path, stored.file.as_ref());
                (path, stored.alias, written)
            };
            changed.into_iter().map(write).collect::<Vec<_>>()
        });
        let Ok(written) = writing.await else {
            return tracing::error!("internal error: writing the announced roots of peers panicked");
        };
        let mut has_failed = false;
        for (path, alias, written) in written {
            let key = format!("{} (announced roots)", trust_of(&alias));
            match written {
                Ok(()) => store.solved(&key),
                Err(problem) => {
                    (has_failed, _) = (true, kept.remove(&path));
                    store.problem(&key, problem);
                }
            }
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() {
                return;
            },
            () = tokio::time::sleep(RETRY), if has_failed => {}
        }
    }
}

/// The contents of a peer's file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    alias: TrustDomain,
    /// `None`: the peer has announced no roots.
    file: Option<RootFile>,
}

/// Writes a file, or removes it if there are no roots. Blocks.
fn write(path: &Path, file: Option<&RootFile>) -> Result<(), String> {
    let written = match file {
        Some(file) => file.store(path, KIND),
        None => remove(path),
    };
    written.map_err(|error| {
        format!("cannot store the roots that a peer announced in {}: {error}", path.display())
    })
}

fn file(peer: &PeerTrust, announced: &Announced) -> RootFile {
    let field = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    RootFile {
        fields: vec![
            field("alias", peer.alias.as_str()),
            field("trustDomain", peer.trust_domain.as_str()),
            field("base", &Hex(&announced.base).to_string()),
        ],
        roots: announced.roots.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap as Map;
    use std::time::Duration;

    use rustls::pki_types::CertificateDer;

    use super::*;
    use crate::certificate::certificates;
    use crate::development::Authority;
    use isthmus_model::identity::TrustDomain;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).expect("legal")
    }

    fn root() -> Vec<CertificateDer<'static>> {
        let authority = Authority::new(domain("west.example")).expect("a CA");
        certificates(authority.certificate_pem().as_bytes()).expect("PEM")
    }

    /// Returns the store of a process whose file for the peer west has these roots.
    fn store(of_file: &[CertificateDer<'static>]) -> RootStore {
        let store = RootStore::of(Map::new());
        let west = PeerTrust {
            peer: "west".into(),
            alias: domain("alias"),
            trust_domain: domain("west.example"),
            roots: None,
            is_enrolled: false,
        };
        store.roots.send_modify(|roots| {
            roots.set_peers(&[west]);
            roots.of_peers = Map::from([(domain("alias"), of_file.to_vec())]);
        });
        store
    }

    /// Runs [`keep`] until the file exists, or with `is_there` false until it does not exist.
    async fn kept(store: &RootStore, state: &Path, is_there: bool) {
        let waiting = async {
            while path(state, "west").exists() != is_there {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            () = keep(store.clone(), state.to_owned()) => {}
            waited = tokio::time::timeout(Duration::from_secs(20), waiting) => waited.expect("written"),
        }
    }

    #[tokio::test]
    async fn what_a_peer_announced_is_used_by_the_next_process_unless_its_file_has_changed() {
        let (folder, old, new) = (tempfile::tempdir().expect("a folder"), root(), root());
        let state = folder.path();
        let first = store(&old);
        first.announce(&domain("alias"), new.clone()).expect("good");
        kept(&first, state, true).await;
        let second = store(&old);
        restore(&second, state).await;
        assert_eq!(second.announced(&domain("alias")), new);
        let other = store(&root());
        restore(&other, state).await;
        assert!(other.announced(&domain("alias")).is_empty(), "the operator has replaced the file");
        // The peer withdraws the announced roots.
        second.announce(&domain("alias"), Vec::new()).expect("good");
        kept(&second, state, false).await;
    }

    #[tokio::test]
    async fn what_a_removed_peer_announced_is_forgotten_and_an_unreadable_file_costs_nothing() {
        let (folder, old, new) = (tempfile::tempdir().expect("a folder"), root(), root());
        let state = folder.path();
        let first = store(&old);
        first.announce(&domain("alias"), new).expect("good");
        kept(&first, state, true).await;
        // The file of the peer's roots cannot be read.
        let second = store(&old);
        second.roots.send_modify(|roots| {
            roots.peers[0].roots = Some("west.pem".into());
            roots.of_peers.clear();
        });
        restore(&second, state).await;
        let some_time = Duration::from_millis(100);
        drop(tokio::time::timeout(some_time, keep(second, state.to_owned())).await);
        assert!(path(state, "west").exists());
        // The peer is removed, and added again.
        restore(&RootStore::of(Map::new()), state).await;
        assert!(!path(state, "west").exists());
        let again = store(&old);
        restore(&again, state).await;
        assert!(again.announced(&domain("alias")).is_empty());
    }

    #[tokio::test]
    async fn roots_that_cannot_be_stored_are_a_problem_until_they_are() {
        let (folder, old, new) = (tempfile::tempdir().expect("a folder"), root(), root());
        let state = folder.path();
        fs::write(state.join(FOLDER), "in the way").expect("written");
        let store = store(&old);
        store.announce(&domain("alias"), new).expect("good");
        let keeping = keep(store.clone(), state.to_owned());
        let watching = async {
            let mut status = store.status.subscribe();
            let key = "trust of alias (announced roots)";
            let found = status.wait_for(|status| status.problems.contains_key(key)).await.expect("a problem");
            assert!(found.problems[key].contains("west.roots.pem"), "{:?}", found.problems);
            drop(found);
            fs::remove_file(state.join(FOLDER)).expect("removed");
            store.announce(&domain("alias"), root()).expect("good");
            status.wait_for(|status| status.problems.is_empty()).await.expect("stored");
            assert!(path(state, "west").exists());
        };
        tokio::select! {
            () = keeping => panic!("it goes on"),
            () = watching => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn roots_that_could_not_be_stored_are_stored_a_minute_later() {
        let (folder, old, new) = (tempfile::tempdir().expect("a folder"), root(), root());
        let state = folder.path();
        fs::write(state.join(FOLDER), "in the way").expect("written");
        let store = store(&old);
        store.announce(&domain("alias"), new).expect("good");
        let keeping = keep(store.clone(), state.to_owned());
        let watching = async {
            let mut status = store.status.subscribe();
            drop(status.wait_for(|status| !status.problems.is_empty()).await.expect("a problem"));
            let failed = tokio::time::Instant::now();
            fs::remove_file(state.join(FOLDER)).expect("removed");
            drop(status.wait_for(|status| status.problems.is_empty()).await.expect("stored"));
            failed.elapsed()
        };
        let waited = tokio::select! {
            () = keeping => panic!("it goes on"),
            waited = watching => waited,
        };
        assert_eq!(waited, Duration::from_secs(60));
    }

    #[tokio::test]
    async fn a_damaged_file_is_named_and_set_aside() {
        let (folder, old) = (tempfile::tempdir().expect("a folder"), root());
        let state = folder.path();
        let first = store(&old);
        first.announce(&domain("alias"), root()).expect("good");
        kept(&first, state, true).await;
        let file = path(state, "west");
        let text = fs::read_to_string(&file).expect("text");
        fs::write(&file, text.replacen("west.example", "west.examplf", 1)).expect("written");
        let second = store(&old);
        restore(&second, state).await;
        assert!(second.announced(&domain("alias")).is_empty());
        let problem = second.status.borrow().problems["trust of alias (stored roots)"].clone();
        assert!(
            problem.contains("the file is damaged") && problem.contains("west.roots.pem.damaged"),
            "{problem}"
        );
        assert!(!file.exists() && state.join("peers/west.roots.pem.damaged").exists());
        second.announce(&domain("alias"), root()).expect("good");
        assert!(second.status.borrow().problems.is_empty(), "the link has said it again");
    }
}
