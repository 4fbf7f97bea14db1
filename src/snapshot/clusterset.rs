//! Conflicts between clusters that export one service to their cluster set (KEP-1645). Where the exports differ, the oldest
//! ServiceExport applies. Each of the ServiceExports gets the condition `Conflict`, which describes the difference.

use isthmus_model::endpoint::Labels;
use isthmus_model::place::ClusterId;
use isthmus_model::service::ServicePort;
use isthmus_registry::change::{Export, ExportedPort};

/// The domain of the names under which a service is known in all clusters that export it.
pub const DOMAIN: &str = "clusterset.local";

/// The largest number of ports that a message lists; further ports are only counted.
const PORTS_SHOWN: usize = 10;

/// The largest number of characters of a port's name in a message. Kubernetes has the same limit for the names of ports, but an
/// API server might exceed it.
const NAME_SHOWN: usize = 63;

/// The largest number of characters of labels or annotations in a message.
const TEXTS_SHOWN: usize = 200;

/// The properties that `conflict` compares, for messages.
pub const COMPARED: &str =
    "ports, type, session affinity, labels, annotations, traffic distribution and IP families";

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

/// Returns the conflict between the clusters that export a service, if there is one. `exports` is sorted by age, oldest first.
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
        Property {
            reason: "LabelsConflict",
            name: "labels",
            differs: &|other| other.export.labels != wanted.labels,
            value: texts_shown(&wanted.labels),
        },
        Property {
            reason: "AnnotationsConflict",
            name: "annotations",
            differs: &|other| other.export.annotations != wanted.annotations,
            value: texts_shown(&wanted.annotations),
        },
        Property {
            reason: "TrafficDistributionConflict",
            name: "traffic distribution",
            differs: &|other| other.export.traffic_distribution != wanted.traffic_distribution,
            value: if wanted.traffic_distribution.is_empty() {
                "none"
            } else {
                &*wanted.traffic_distribution
            }
            .to_owned(),
        },
        Property {
            reason: "IPFamilyConflict",
            name: "IP families",
            differs: &|other| other.export.ip_families != wanted.ip_families,
            value: wanted.ip_families.to_string(),
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
    /// Returns the sort key of an export: by age, then by cluster. RFC 3339 times of one form sort as text; exports of unknown
    /// age come last, as if they were the youngest.
    pub(super) fn age(&self) -> (bool, &'a str, &'a str) {
        let created = &*self.export.created;
        (created.is_empty(), created, self.cluster.as_str())
    }

    /// Returns the ports in order of name.
    fn sorted_ports(&self) -> Vec<ExportedPort> {
        let mut ports = exported_ports(Some(self.export), self.ports);
        ports.sort_by(|one, other| one.name.cmp(&other.name));
        ports
    }
}

/// Returns labels or annotations as text, cut to [`TEXTS_SHOWN`] characters.
fn texts_shown(texts: &Labels) -> String {
    if texts.is_empty() {
        return "none".to_owned();
    }
    let all: Vec<String> = texts.iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{:.TEXTS_SHOWN$}", all.join(", "))
}

/// Returns the ports of an export, those of all transport protocols. A copy from an earlier release has only the service's TCP ports.
pub(super) fn exported_ports(export: Option<&Export>, ports: &[ServicePort]) -> Vec<ExportedPort> {
    match export {
        Some(export) if !export.ports.is_empty() => export.ports.to_vec(),
        _ => {
            let port = |port: &ServicePort| ExportedPort {
                name: port.name.clone(),
                port: port.port,
                protocol: "TCP".into(),
                app_protocol: "".into(),
            };
            ports.iter().map(port).collect()
        }
    }
}

fn shown(ports: &[ExportedPort]) -> String {
    let one = |port: &ExportedPort| {
        let ExportedPort { name, port, protocol, app_protocol } = port;
        let (before, of) = if app_protocol.is_empty() { ("", "") } else { (" of ", &**app_protocol) };
        format!("{name:.NAME_SHOWN$} {protocol} {port}{before}{of:.NAME_SHOWN$}")
    };
    let mut all: Vec<String> = ports.iter().take(PORTS_SHOWN).map(one).collect();
    match ports.len().saturating_sub(PORTS_SHOWN) {
        0 => {}
        more => all.push(format!("{more} more")),
    }
    all.join(", ")
}

#[cfg(test)]
mod tests;
