//! A service that clusters export under one name in their cluster set (KEP-1645): the oldest ServiceExport decides what they
//! disagree about, and the disagreement is what the condition `Conflict` of each of them says.

use super::change::Export;
use crate::model::place::ClusterId;
use crate::model::service::ServicePort;

/// Ports that a message names; more are counted.
const PORTS_SHOWN: usize = 10;

/// Characters of a port's name that a message has: as many as Kubernetes allows, and more than an API server may send.
const NAME_SHOWN: usize = 63;

/// A disagreement of the clusters that export a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportConflict {
    /// The reasons as the Multi-Cluster Services API names them, with commas between them.
    pub reason: String,
    /// The properties in conflict, the cluster whose export applies, and how many clusters disagree.
    pub message: String,
}

/// A service as one cluster exports it.
#[derive(Clone, Copy)]
pub(super) struct Exported<'a> {
    pub(super) cluster: &'a ClusterId,
    pub(super) export: &'a Export,
    pub(super) ports: &'a [ServicePort],
}

/// A property that has one value for all clusters that export a service.
struct Property<'a> {
    reason: &'static str,
    name: &'static str,
    differs: &'a dyn Fn(&Exported<'_>) -> bool,
    /// The value of the oldest export.
    value: String,
}

/// Returns what the clusters that export a service disagree about. The exports are in order of age.
pub(super) fn conflict(exports: &[Exported<'_>]) -> Option<ExportConflict> {
    // One export cannot disagree with itself.
    let [oldest, _, ..] = exports else { return None };
    let (wanted, ports) = (oldest.export, oldest.sorted_ports());
    let properties = [
        Property {
            reason: "PortConflict",
            name: "ports",
            differs: &|other| other.sorted_ports() != ports,
            value: shown(&ports),
        },
        Property {
            reason: "TypeConflict",
            name: "type",
            differs: &|other| other.export.is_headless != wanted.is_headless,
            value: if wanted.is_headless { "Headless" } else { "ClusterSetIP" }.to_owned(),
        },
        Property {
            reason: "SessionAffinityConflict",
            name: "session affinity",
            differs: &|other| other.export.session_affinity != wanted.session_affinity,
            value: wanted.session_affinity.to_string(),
        },
        Property {
            reason: "SessionAffinityConfigConflict",
            name: "timeout of session affinity",
            differs: &|other| {
                other.export.session_affinity == wanted.session_affinity
                    && other.export.session_seconds != wanted.session_seconds
            },
            value: format!("{} s", wanted.session_seconds),
        },
    ];
    let (mut reasons, mut sentences) = (Vec::new(), Vec::new());
    for Property { reason, name, differs, value } in properties {
        let disagree = exports.iter().filter(|other| differs(other)).count();
        if disagree > 0 {
            reasons.push(reason);
            sentences.push(format!(
                "Conflicting {name}. Using {value} from the oldest service export in {:?}. {disagree}/{} clusters disagree.",
                oldest.cluster.as_str(),
                exports.len()
            ));
        }
    }
    let is_any = !reasons.is_empty();
    is_any.then(|| ExportConflict { reason: reasons.join(","), message: sentences.join(" ") })
}

impl<'a> Exported<'a> {
    /// Returns the key by which exports are in order of age, and equally old ones of cluster. RFC 3339 times of one form sort by time;
    /// exports of unknown age are the youngest.
    pub(super) fn age(&self) -> (bool, &'a str, &'a str) {
        let created = &*self.export.created;
        (created.is_empty(), created, self.cluster.as_str())
    }

    /// Returns the ports in order of name.
    fn sorted_ports(&self) -> Vec<&'a ServicePort> {
        let mut ports: Vec<&ServicePort> = self.ports.iter().collect();
        ports.sort_by(|one, other| one.name.cmp(&other.name));
        ports
    }
}

fn shown(ports: &[&ServicePort]) -> String {
    let one =
        |port: &&ServicePort| format!("{:.NAME_SHOWN$} {} {}", port.name, port.protocol.text(), port.port);
    let mut all: Vec<String> = ports.iter().take(PORTS_SHOWN).map(one).collect();
    match ports.len().saturating_sub(PORTS_SHOWN) {
        0 => {}
        more => all.push(format!("{more} more")),
    }
    all.join(", ")
}

#[cfg(test)]
mod tests;
