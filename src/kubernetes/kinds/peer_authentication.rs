//! PeerAuthentications: whether workloads accept connections with and without mutual TLS. How they become policies is in
//! `authorization`, and which one applies in `mutual_tls`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::authorization::{MutualTls, Selector};
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;

objects! {
    /// `PeerAuthentication` of `security.istio.io`.
    PeerAuthentication { metadata: Meta, spec: PeerSpec, }
    PeerSpec { selector: Selector, mtls: Mode, port_level_mtls: BTreeMap<u16, Mode>, }
    Mode { mode: String, }
}

impl Watched for PeerAuthentication {
    const FACTS: Facts = Facts {
        plural: "peerauthentications",
        versions: &["apis/security.istio.io/v1", "apis/security.istio.io/v1beta1"],
        is_custom: true,
        namespaces: Namespaces::OfServicesAndSystem,
        is_wanted: |spec| spec.ambient || spec.destination_rules,
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, PeerRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<PeerRecord> {
        let PeerSpec { selector, mtls, port_level_mtls } = &self.spec;
        Some(PeerRecord {
            created: reading.texts.text(&self.metadata.creation_timestamp),
            selector: reading.texts.labels(&selector.match_labels),
            mode: MutualTls::read(&mtls.mode),
            ports: port_level_mtls.iter().map(|(port, mode)| (*port, MutualTls::read(&mode.mode))).collect(),
        })
    }

    /// Marks what is made for ztunnels, and the services whose pods the PeerAuthentication may select.
    fn touch(touched: Touched<ObjectKey, PeerRecord>, tables: &mut Tables) {
        tables.dirty.mark_ambient();
        if !tables.spec.destination_rules {
            return;
        }
        let namespace = &touched.key.namespace;
        tables.dirty.is_all |= *namespace == tables.spec.system_namespace;
        tables.dirty.services.extend(tables.services.inside(namespace).map(|(key, _)| key.clone()));
        tables.mark_entries_of(namespace);
    }
}

/// The modes of a PeerAuthentication.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PeerRecord {
    pub(crate) created: Arc<str>,
    /// The labels of the workloads; none: all of the namespace, or of the mesh.
    pub(crate) selector: Labels,
    pub(crate) mode: MutualTls,
    /// The modes of single ports.
    pub(crate) ports: BTreeMap<u16, MutualTls>,
}
