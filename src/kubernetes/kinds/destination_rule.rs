//! DestinationRules: the subsets of services.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;

objects! {
    /// `DestinationRule` of `networking.istio.io/v1`.
    DestinationRule { metadata: Meta, spec: DestinationSpec, }
    DestinationSpec { host: String, subsets: Vec<Subset>, }
    Subset { name: String, labels: Texts, }
}

impl Watched for DestinationRule {
    const FACTS: Facts = Facts {
        plural: "destinationrules",
        versions: &["apis/networking.istio.io/v1"],
        is_custom: true,
        is_wanted: |spec| spec.destination_rules,
        is_required: |spec| spec.destination_rules,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, RuleRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<RuleRecord> {
        let texts = &mut *reading.texts;
        let subsets = self.spec.subsets.iter();
        let subsets =
            subsets.map(|subset| (texts.text(&subset.name), texts.labels(&subset.labels))).collect();
        let created = texts.text(&self.metadata.creation_timestamp);
        Some(RuleRecord { host: texts.text(&self.spec.host), created, subsets })
    }

    fn touch(_: Touched<ObjectKey, RuleRecord>, tables: &mut Tables) {
        tables.dirty.is_all = true;
    }
}

/// The subsets of a DestinationRule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RuleRecord {
    pub(crate) host: Arc<str>,
    pub(crate) created: Arc<str>,
    pub(crate) subsets: BTreeMap<Arc<str>, Labels>,
}
