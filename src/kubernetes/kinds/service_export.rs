//! ServiceExports: the marks of services, and the conditions that other programs and this one write on them.

use std::sync::Arc;

use super::{Facts, Reading, Tables, Watched};
use crate::interner::Interner;
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;
use isthmus_net::channel::cut;

/// The largest number of conditions of one ServiceExport that are read.
const CONDITIONS_MAX: usize = 16;
/// The largest numbers of exported labels and of exported annotations of one ServiceExport that are read, and of the characters of
/// each.
const EXPORTED_MAX: usize = 64;

objects! {
    /// `ServiceExport` of `multicluster.x-k8s.io`.
    ServiceExport { metadata: Meta, spec: ExportSpec, status: ExportStatus, }
    ExportSpec { exported_labels: Texts, exported_annotations: Texts, }
    ExportStatus { conditions: Vec<Condition>, }
    Condition {
        #[serde(rename = "type")]
        kind: String,
        status: String,
        reason: String,
        message: String,
        last_transition_time: String,
    }
}

impl Watched for ServiceExport {
    const FACTS: Facts = Facts {
        plural: "serviceexports",
        versions: &["apis/multicluster.x-k8s.io/v1beta1", "apis/multicluster.x-k8s.io/v1alpha1"],
        is_custom: true,
        is_required: |spec| spec.export_writer.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, ExportRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<ExportRecord> {
        let texts = &mut *reading.texts;
        let condition = |found: &Condition| ExportCondition {
            kind: texts.text(&found.kind),
            status: texts.text(&found.status),
            reason: texts.text(&found.reason),
            message: texts.text(&found.message),
            since: texts.text(&found.last_transition_time),
        };
        let conditions = self.status.conditions.iter().take(CONDITIONS_MAX).map(condition).collect();
        let created = texts.text(self.metadata.created());
        Some(ExportRecord {
            created,
            generation: self.metadata.generation,
            labels: exported(&self.spec.exported_labels, texts),
            annotations: exported(&self.spec.exported_annotations, texts),
            conditions,
        })
    }

    fn touch(touched: Touched<ObjectKey, ExportRecord>, tables: &mut Tables) {
        // A route may have the exported service as its backend.
        if touched.before.is_some() != tables.exports.get(&touched.key).is_some() {
            tables.mark_backend(&touched.key);
        }
        tables.dirty.services.insert(touched.key);
    }
}

/// A ServiceExport.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExportRecord {
    /// The time of creation as RFC 3339; empty if the API server gives no such time.
    pub(crate) created: Arc<str>,
    pub(crate) generation: i64,
    /// The labels and annotations of the imported service.
    pub(crate) labels: Labels,
    pub(crate) annotations: Labels,
    pub(crate) conditions: Vec<ExportCondition>,
}

/// Returns exported labels or annotations, the first ones, and the first characters of each.
fn exported(given: &Texts, texts: &mut Interner) -> Labels {
    let first = given.iter().take(EXPORTED_MAX);
    first.map(|(name, value)| (texts.text(&cut(name)), texts.text(&cut(value)))).collect()
}

/// A condition of a ServiceExport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExportCondition {
    pub(crate) kind: Arc<str>,
    /// `True`, `False` or `Unknown`.
    pub(crate) status: Arc<str>,
    pub(crate) reason: Arc<str>,
    pub(crate) message: Arc<str>,
    /// `lastTransitionTime`; empty in a condition that is yet to be written.
    pub(crate) since: Arc<str>,
}
