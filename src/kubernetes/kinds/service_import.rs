//! ServiceImports: the addresses of services that several clusters export.

use std::net::IpAddr;

use super::{Facts, Reading, Tables, Watched};
use crate::objects::{Meta, ip, objects};
use crate::table::{ObjectKey, Table, Touched};

objects! {
    /// `ServiceImport` of `multicluster.x-k8s.io`.
    ServiceImport { metadata: Meta, spec: ImportSpec, }
    ImportSpec { ips: Vec<String>, }
}

impl Watched for ServiceImport {
    const FACTS: Facts = Facts {
        plural: "serviceimports",
        versions: &["apis/multicluster.x-k8s.io/v1beta1", "apis/multicluster.x-k8s.io/v1alpha1"],
        is_custom: true,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, Vec<IpAddr>>;

    fn record(&self, _: &mut Reading<'_>) -> Option<Vec<IpAddr>> {
        Some(self.spec.ips.iter().filter_map(|text| ip(text)).collect())
    }

    fn touch(touched: Touched<ObjectKey, Vec<IpAddr>>, tables: &mut Tables) {
        tables.mark_backend(&touched.key);
        tables.dirty.services.insert(touched.key);
    }
}
