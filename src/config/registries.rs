//! `registries`: files with more services. Only where they are is read here; what they hold is the
//! business of those who watch them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::aggregator::spec::{RegistryKind, RegistrySpec};
use crate::document::problem::{Path, Position, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::model::place::{ClusterId, Network};
use crate::snapshot::policy::{AddressScope, RegistryScope};

use super::file::relative_to;
use super::table::{ALLOW, REGISTRY, REGISTRY_PATH};

/// The addresses that a registry may give: any, unless something is said of what it may speak of at all.
fn addresses(allow: &Fields<'_>, is_limited: bool) -> AddressScope {
    match allow.node("addresses") {
        Some(_) => AddressScope::Blocks(allow.read_all("addresses", scalar::cidr).into()),
        None if is_limited => AddressScope::Public,
        None => AddressScope::Any,
    }
}

/// The registries in the order of the file.
pub(super) fn read(root: &Fields<'_>, problems: &mut Problems) -> Vec<RegistrySpec> {
    let list = Path::Root.key("registries");
    let mut places: HashMap<PathBuf, Position> = HashMap::new();
    let mut registries: Vec<RegistrySpec> = Vec::new();
    for (index, node) in root.items("registries").iter().enumerate() {
        let fields = Fields::new(Some(node), &REGISTRY);
        let file = fields.fields("file", &REGISTRY_PATH);
        let Some((written, node)) = file.read("path", scalar::path).zip(file.node("path")) else { continue };
        let path = relative_to(problems.file(node.position.file), written);
        if let Some(first) = places.get(&path) {
            let first = problems.place(*first);
            let fault = format!("{node} is the file of two registries; first at {first}");
            problems.error(node.position, &list.index(index).key("file").key("path"), fault);
            continue;
        }
        places.insert(path.clone(), node.position);
        let written: Arc<str> = written.to_string_lossy().into();
        let taken = registries.iter().any(|other| other.name == written);
        let allow = fields.fields("allow", &ALLOW);
        let networks = allow.node("networks").map(|_| {
            let texts = allow.read_all("networks", scalar::text);
            texts.into_iter().map(Network::new).collect()
        });
        registries.push(RegistrySpec {
            name: if taken { path.to_string_lossy().into() } else { written },
            kind: RegistryKind::File { path },
            cluster: file.read("cluster", scalar::text).map(ClusterId::new).unwrap_or_default(),
            network: file.read("network", scalar::text).map(Network::new).unwrap_or_default(),
            scope: RegistryScope {
                services: allow.read_all("services", scalar::pattern),
                networks,
                addresses: addresses(&allow, fields.node("allow").is_some()),
            },
        });
    }
    registries
}
