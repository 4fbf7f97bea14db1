//! Secrets with kubeconfigs, which `clusters` follows. An index keeps none.

use super::selector::{Label, Selector};
use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};

objects! {
    Secret { metadata: Meta, data: Texts, }
}

impl Watched for Secret {
    const FACTS: Facts = Facts {
        plural: "secrets",
        labels: Selector(&[Label::Is("istio/multiCluster", "true")]),
        is_wanted: |_| false,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, ()>;

    fn record(&self, _: &mut Reading<'_>) -> Option<()> {
        None
    }

    fn touch(_: Touched<ObjectKey, ()>, _: &mut Tables) {}
}
