//! Names that are unknown because a registry that may have them has not been read.

use super::decision::Requested;
use isthmus_model::address::Host;
use isthmus_model::mesh_name::{self, Dialect};
use isthmus_model::name::{NameBuffer, canonical};
use isthmus_model::reason::Reason;
use isthmus_snapshot::Snapshot;

/// Returns the explanation if the name is unknown and a registry that has not been read may have it. The explanation begins
/// with the code of the problem in `status`.
pub fn missing_for(snapshot: &Snapshot, reason: Reason, requested: Requested<'_>) -> Option<String> {
    let is_unknown = matches!(reason, Reason::SniUnknown | Reason::AuthorityUnknown);
    if !is_unknown || snapshot.unread.is_empty() {
        return None;
    }
    let mut buffer = NameBuffer::new();
    let hostname = match requested {
        Requested::ServerName(name) => {
            let name = canonical(name?, &mut buffer).ok()?;
            match mesh_name::read(name) {
                Dialect::Mesh(mesh) => mesh.hostname,
                Dialect::Plain => name,
                Dialect::Malformed => return None,
            }
        }
        Requested::Authority(authority) => match &authority.host {
            Host::Name(name) => name.as_str(),
            Host::Ip(_) | Host::Ips(_) => return None,
        },
        Requested::Nothing => return None,
    };
    let registry = snapshot.unread.that_may_have(hostname).next()?;
    Some(format!(
        "registry_missing: the registry {} has not been read since the start, and may have a service of this name",
        registry.name
    ))
}
