//! The stored links of peers that the config does not have. The file of such a link is renamed, so that it is not read any
//! more. Otherwise a peer that the operator later adds under the same name would be enrolled by the old link.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::enrolled::HEAD;
use isthmus_files::whole_file::{remove, with_suffix};
use isthmus_tls::root_file::FOLDER;

/// The end of the name of a link's file, behind the name of the peer.
const LINK: &str = ".pem";
/// The further suffix of a link that was set aside.
const REMOVED: &str = ".removed";
/// The largest number of set-aside links that are kept; the oldest are removed.
const KEPT_MAX: usize = 16;

/// Sets aside the links of all but these peers. Blocks.
pub(super) fn set_aside(state: &Path, is_peer: impl Fn(&str) -> bool) {
    let folder = state.join(FOLDER);
    let mut has_changed = false;
    for path in files(&folder) {
        let name = path.file_name().and_then(|name| name.to_str());
        // `NAME.roots.pem` is not a link: it has the roots that the peer announced. Its second dot tells it apart, because a
        // peer's name has no dot.
        let peer = name.and_then(|name| name.strip_suffix(LINK)).filter(|peer| !peer.contains('.'));
        let Some(peer) = peer.filter(|peer| !is_peer(peer) && is_link(&path)) else { continue };
        let aside = with_suffix(&path, REMOVED);
        has_changed = true;
        match fs::rename(&path, &aside) {
            Ok(()) => tracing::warn!(
                peer,
                file = %aside.display(),
                "the config does not have this peer, so its enrolled link is set aside; to use the link again, add the peer, remove \
                 {REMOVED} from the name of the file, and reload"
            ),
            Err(error) => tracing::error!(
                peer,
                file = %path.display(),
                "the config does not have this peer, but its stored enrolment cannot be renamed: {error}; remove the file, because \
                 a peer that is added under this name would use the link"
            ),
        }
    }
    if has_changed {
        forget_oldest(&folder);
    }
}

/// Removes the links that were set aside first, if more than [`KEPT_MAX`] are set aside.
fn forget_oldest(folder: &Path) {
    let is_aside =
        |path: &PathBuf| path.to_str().is_some_and(|path| path.ends_with(&format!("{LINK}{REMOVED}")));
    // The rename that set a link aside was the last change of the file's status, so its ctime orders the links.
    let since = |path: &PathBuf| {
        let metadata = fs::symlink_metadata(path).ok();
        metadata.map(|metadata| (metadata.ctime(), metadata.ctime_nsec()))
    };
    let mut all: Vec<_> = files(folder).filter(is_aside).map(|path| (since(&path), path)).collect();
    all.sort();
    let surplus = all.len().saturating_sub(KEPT_MAX);
    for (_, path) in all.into_iter().take(surplus) {
        match remove(&path) {
            Ok(()) => {
                tracing::info!(file = %path.display(), "removed a link that was set aside, because there are {KEPT_MAX} newer \
                                                        ones")
            }
            Err(error) => {
                tracing::error!(file = %path.display(), "cannot remove a link that was set aside: {error}")
            }
        }
    }
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Returns true if a file is a link that an enrolment has stored, and not another file of an operator.
fn is_link(path: &Path) -> bool {
    let begins = || {
        if !fs::symlink_metadata(path)?.is_file() {
            return Ok(false);
        }
        let mut first = [0; HEAD.len()];
        File::open(path)?.read_exact(&mut first)?;
        Ok::<_, io::Error>(first == *HEAD.as_bytes())
    };
    begins().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enrolled::{Dialling, EnrolledLink};
    use isthmus_model::identity::Identity;

    fn store(state: &Path, peer: &str) -> EnrolledLink {
        let identity = Identity::parse("spiffe://west.example/ns/isthmus/sa/gateway").expect("legal");
        let link = EnrolledLink { identity, roots: vec![vec![7; 9].into()], dialling: Dialling::Theirs };
        link.store(state, peer).expect("stored");
        link
    }

    fn names(state: &Path) -> Vec<String> {
        let mut names: Vec<_> = files(&state.join(FOLDER))
            .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_link_of_a_removed_peer_alone_is_set_aside_and_can_be_put_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path();
        set_aside(state, |_| false);
        assert!(!state.join(FOLDER).exists(), "nothing is made");
        let link = store(state, "west");
        store(state, "south");
        let foreign = ["west.roots.pem", "ca.pem", "x.pem.new", "west.pem.damaged"];
        for name in foreign {
            fs::write(state.join(FOLDER).join(name), "-----BEGIN CERTIFICATE-----").expect("written");
        }
        fs::create_dir(state.join(FOLDER).join("folder.pem")).expect("made");
        let mut expected = [&foreign[..], &["folder.pem", "south.pem", "west.pem.removed"]].concat();
        expected.sort_unstable();
        set_aside(state, |peer| peer == "south");
        assert_eq!(names(state), expected);
        assert_eq!(EnrolledLink::load(state, "west"), Ok(None));
        let path = EnrolledLink::path(state, "west");
        fs::rename(with_suffix(&path, REMOVED), path).expect("renamed");
        set_aside(state, |_| true);
        assert_eq!(EnrolledLink::load(state, "west"), Ok(Some(link)));
    }

    #[test]
    fn the_links_that_are_kept_are_bounded_and_the_newest_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path();
        for number in 0..KEPT_MAX + 4 {
            store(state, &format!("p{number}"));
            set_aside(state, |_| false);
            // The clock of the file system moves on in steps of some milliseconds.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let kept = names(state);
        assert_eq!(kept.len(), KEPT_MAX, "{kept:?}");
        for (name, is_kept) in
            [("p3.pem.removed", false), ("p4.pem.removed", true), ("p19.pem.removed", true)]
        {
            assert_eq!(kept.contains(&name.to_owned()), is_kept, "{name}: {kept:?}");
        }
    }
}
