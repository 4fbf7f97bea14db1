//! `exports`: the rules that make services of the mesh reachable.

use std::sync::Arc;

use crate::document::nearest::nearest;
use crate::document::problem::{InvalidValue, Path, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::model::endpoint::Labels;
use crate::model::place::ClusterId;
use crate::snapshot::policy::{ExportRule, ExportScope, MarkCondition};

use super::listeners::Listeners;
use super::table::{EXPORT, MARKED, SCOPE};

/// Reads the rules in the order of the file. `clusters` are the clusters of the registries.
pub(super) fn read(
    root: &Fields<'_>,
    listeners: &Listeners,
    clusters: &[ClusterId],
    problems: &mut Problems,
) -> Vec<Arc<ExportRule>> {
    let list = Path::Root.key("exports");
    let mut rules = Vec::new();
    for (index, node) in root.items("exports").iter().enumerate() {
        let fields = Fields::new(Some(node), &EXPORT);
        let path = list.index(index);
        let scope = fields.fields("to", &SCOPE);
        let ports = fields.items("ports").iter();
        rules.push(Arc::new(ExportRule {
            name: path.to_string().into(),
            services: fields.read_all("services", scalar::pattern),
            except: fields.read_all("except", scalar::pattern),
            ports: ports.filter_map(|port| port.text()?.parse().ok()).collect(),
            clusters: known_clusters(&fields, &path, clusters, problems),
            marked: marked(&fields, &path, problems),
            listeners: listeners.references(&fields, &path, problems),
            to: ExportScope {
                cidrs: scope.read_all("cidrs", scalar::cidr),
                identities: scope.read_all("identities", scalar::identity_pattern),
            },
        }));
    }
    rules
}

fn marked(fields: &Fields<'_>, path: &Path<'_>, problems: &mut Problems) -> Option<MarkCondition> {
    fields.node("marked")?;
    let marked = fields.fields("marked", &MARKED);
    if marked.node("labels").is_some() {
        Some(MarkCondition::Labels(labels(&marked, "labels")))
    } else if marked.node("namespaceLabels").is_some() {
        Some(MarkCondition::NamespaceLabels(labels(&marked, "namespaceLabels")))
    } else {
        if let Some(node) =
            marked.node("serviceExport").filter(|_| marked.flag("serviceExport") == Some(false))
        {
            let fault = "found false, which asks for nothing; expected true, or no `marked`";
            problems.error(node.position, &path.key("marked").key("serviceExport"), fault);
        }
        Some(MarkCondition::ServiceExport)
    }
}

/// Returns the labels under a key.
pub(super) fn labels(fields: &Fields<'_>, key: &str) -> Labels {
    let pairs = fields.entries(key).iter();
    pairs.filter_map(|(name, value)| Some((Arc::from(&*name.text), value.text()?.into()))).collect()
}

/// Returns the clusters of a rule. An unknown one is only a warning, as its registry may be added later.
fn known_clusters(
    fields: &Fields<'_>,
    path: &Path<'_>,
    known: &[ClusterId],
    problems: &mut Problems,
) -> Vec<ClusterId> {
    let list = path.key("clusters");
    let mut clusters = Vec::new();
    for (at, node) in fields.items("clusters").iter().enumerate() {
        let Some(Ok(text)) = node.text().map(scalar::text) else { continue };
        let cluster = ClusterId::new(text);
        if !known.contains(&cluster) {
            let fault = InvalidValue::new(format!("found {node}, which is the cluster of no registry"));
            let fault = fault.hint(nearest(text, known.iter().map(ClusterId::as_str)));
            problems.warn(node.position, &list.index(at), fault);
        }
        clusters.push(cluster);
    }
    clusters
}
