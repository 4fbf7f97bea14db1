//! The planned drains of the config file.

use std::sync::Arc;

use isthmus_document::drains::of;
use isthmus_document::problem::{Path, Problems};
use isthmus_document::reader::Fields;
use isthmus_model::drain::Drain;

use super::table::Root;

/// Reads the planned drains. Each target has at most one.
pub(super) fn read(root: &Fields<'_>, problems: &mut Problems) -> Vec<Arc<Drain>> {
    let list = Path::Root.key(Root::DRAINS.name());
    let mut all: Vec<Arc<Drain>> = Vec::new();
    for (at, _, node) in root.maps(&Root::DRAINS) {
        let path = list.index(at);
        let Some(drain) = of(node, &path, problems) else { continue };
        if all.iter().any(|known| known.target == drain.target) {
            problems.error(node.position, &path, format!("the {} is drained twice", drain.target));
        }
        all.push(drain.into());
    }
    all
}
