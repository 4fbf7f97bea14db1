//! `exports`: the rules that make services of the mesh reachable.

use std::sync::Arc;

use isthmus_document::nearest::nearest;
use isthmus_document::problem::{InvalidValue, Path, Problems};
use isthmus_document::reader::Fields;
use isthmus_model::place::ClusterId;
use isthmus_settings::export::{ExportRule, ExportScope, MarkCondition};

use super::listeners::Listeners;
use super::table as keys;

/// Reads the rules in the order of the file. `clusters` are the clusters of the registries.
pub(super) fn read(
    root: &Fields<'_>,
    listeners: &Listeners,
    clusters: &[ClusterId],
    problems: &mut Problems,
) -> Vec<Arc<ExportRule>> {
    let list = Path::Root.key(keys::Root::EXPORTS.name());
    let mut rules = Vec::new();
    for (index, fields, _) in root.maps(&keys::Root::EXPORTS) {
        let path = list.index(index);
        let scope = fields.map(&keys::Export::TO);
        rules.push(Arc::new(ExportRule {
            name: path.to_string().into(),
            services: fields.get(&keys::Export::SERVICES).unwrap_or_default(),
            except: fields.get(&keys::Export::EXCEPT).unwrap_or_default(),
            ports: fields.get(&keys::Export::PORTS).unwrap_or_default(),
            clusters: known_clusters(&fields, &path, clusters, problems),
            marked: marked(&fields, &path, problems),
            listeners: listeners.references(&fields, &keys::Export::LISTENERS, &path, problems),
            to: ExportScope {
                cidrs: scope.get(&keys::Scope::CIDRS).unwrap_or_default(),
                identities: scope.get(&keys::Scope::IDENTITIES).unwrap_or_default(),
            },
            tls: fields.get(&keys::Export::TLS),
        }));
    }
    rules
}

fn marked(fields: &Fields<'_>, path: &Path<'_>, problems: &mut Problems) -> Option<MarkCondition> {
    fields.at(&keys::Export::MARKED)?;
    let marked = fields.map(&keys::Export::MARKED);
    if let Some(labels) = marked.get(&keys::Marked::LABELS) {
        return Some(MarkCondition::Labels(labels.into()));
    }
    if let Some(labels) = marked.get(&keys::Marked::NAMESPACE_LABELS) {
        return Some(MarkCondition::NamespaceLabels(labels.into()));
    }
    if let Some((false, node)) = marked.found(&keys::Marked::SERVICE_EXPORT) {
        let fault = "found false, which requires no mark; write true, or remove `marked`";
        let path = path.key(keys::Export::MARKED.name());
        problems.error(node.position, &path.key(keys::Marked::SERVICE_EXPORT.name()), fault);
    }
    Some(MarkCondition::ServiceExport)
}

/// Returns the clusters of a rule. An unknown cluster is only a warning, as its registry may be added later.
fn known_clusters(
    fields: &Fields<'_>,
    path: &Path<'_>,
    known: &[ClusterId],
    problems: &mut Problems,
) -> Vec<ClusterId> {
    let list = path.key(keys::Export::CLUSTERS.name());
    let mut clusters = Vec::new();
    for (at, cluster, node) in fields.values(&keys::Export::CLUSTERS) {
        if !known.contains(&cluster) {
            let fault = InvalidValue::new(format!("found {node}, but no registry has this cluster"));
            let fault = fault.hint(nearest(cluster.as_str(), known.iter().map(ClusterId::as_str)));
            problems.warn(node.position, &list.index(at), fault);
        }
        clusters.push(cluster);
    }
    clusters
}
