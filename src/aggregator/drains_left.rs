//! The shares that planned drains have left of their targets, for the process that follows this one: a document that was amended in the
//! config, in a registry or in an annotation must not raise a share in the next process either. A list in the state folder, an entry per line:
//!
//! ```text
//! ["Config",{"Network":"west"},1600]
//! ```
//!
//! Orders of operators are not in it: what they begin from is decided when they are given.

use std::io;
use std::path::Path;

use isthmus_files::line_file::LineFile;
use isthmus_model::drain::{DrainTarget, PARTS};
use isthmus_snapshot::drains::{DrainSource, Left};

/// The name of the list in the state folder.
const FILE: &str = "drains-left";
/// The limits of the file: 100 drains of each of many registries.
const LIST: LineFile = LineFile { name: "drains left", lines_max: 100_000, line_bytes_max: 4_096 };

/// Replaces the file. Blocks.
pub(super) fn store(state: &Path, left: &Left) -> io::Result<()> {
    LIST.store(&state.join(FILE), lines(left))
}

/// Reads the file; without one, or with one that cannot be used, nothing is known. Blocks.
pub(super) fn load(state: Option<&Path>) -> Left {
    let Some(state) = state else { return Left::default() };
    let read = LIST.load(&state.join(FILE), entry);
    let read = read.inspect_err(|error| {
        tracing::warn!(%error, "what earlier drains have left of their targets is not known any more");
    });
    Left(read.unwrap_or_default().into_iter().collect())
}

/// Returns the entries, a line each.
pub(super) fn lines(left: &Left) -> impl Iterator<Item = String> {
    left.0.iter().map(|((source, target), left)| {
        // No value of an entry is a map whose keys are not texts, so this cannot fail.
        serde_json::to_string(&(source, target, left)).unwrap_or_default()
    })
}

/// Reads an entry.
pub(super) fn entry(line: &str) -> Option<((DrainSource, DrainTarget), u16)> {
    let (source, target, left) = serde_json::from_str(line).ok()?;
    (left <= PARTS).then_some(((source, target), left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_damaged_is_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(load(Some(folder.path())), Left::default(), "there is no file");
        let of = |kind, name| DrainTarget::parse(kind, name).expect("a target");
        let left = Left(
            [
                ((DrainSource::Config, of("network", "west")), 1_600),
                ((DrainSource::Registry("etcd é".into()), of("endpoint", "[fd00::1]:8443")), 0),
                ((DrainSource::Registry("k".into()), of("gateway", "gw.example")), 3_168),
            ]
            .into_iter()
            .collect(),
        );
        store(folder.path(), &left).expect("written");
        assert_eq!(load(Some(folder.path())), left);
        for line in ["", "[]", "{\"network\": \"west\"}", "[\"Config\",{\"Network\":\"west\"},3201]"] {
            assert_eq!(entry(line), None, "{line}");
        }
        std::fs::write(folder.path().join(FILE), "x").expect("written");
        assert_eq!(load(Some(folder.path())), Left::default());
    }
}
