//! TLSRoutes and TCPRoutes of the Gateway API, which differ only in their host names.

use std::sync::Arc;

use super::gateway_status::{Condition, Conditions, Digest, Stamp};
use super::{Facts, Reading, Tables, Watched};
use crate::interner::Interner;
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};

/// The largest numbers of parents, host names and backends of a route that are read: as many as the API allows.
const PARENTS_MAX: usize = 32;
const HOSTNAMES_MAX: usize = 1_024;
const BACKENDS_MAX: usize = 16;

objects! {
    /// `TLSRoute` of `gateway.networking.k8s.io`.
    TlsRoute { metadata: Meta, spec: RouteSpec, status: RouteStatus, }
    /// `TCPRoute` of `gateway.networking.k8s.io/v1`.
    TcpRoute { metadata: Meta, spec: RouteSpec, status: RouteStatus, }
    RouteSpec { parent_refs: Vec<ParentRef>, hostnames: Vec<String>, rules: Vec<RouteRule>, }
    ParentRef {
        group: Option<String>,
        kind: Option<String>,
        namespace: Option<String>,
        name: String,
        section_name: Option<String>,
        port: Option<i64>,
    }
    RouteRule { backend_refs: Vec<BackendRef>, }
    BackendRef {
        group: Option<String>,
        kind: Option<String>,
        namespace: Option<String>,
        name: String,
        port: Option<i64>,
        weight: Option<i64>,
    }
    RouteStatus { parents: Vec<ParentStatus>, }
    ParentStatus { parent_ref: ParentRef, controller_name: String, conditions: Conditions, }
}

/// The kind of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum RouteKind {
    Tls,
    Tcp,
}

impl RouteKind {
    /// Returns the name of the kind.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Tls => "TLSRoute",
            Self::Tcp => "TCPRoute",
        }
    }
}

/// The kind, namespace and name of a route.
pub(crate) type RouteId = (RouteKind, ObjectKey);

impl Watched for TlsRoute {
    const FACTS: Facts = Facts {
        plural: "tlsroutes",
        versions: &["apis/gateway.networking.k8s.io/v1", "apis/gateway.networking.k8s.io/v1alpha3"],
        is_custom: true,
        is_wanted: |spec| spec.gateway_api.is_some(),
        is_required: |spec| spec.gateway_api.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, Box<RouteRecord>>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<Box<RouteRecord>> {
        Some(Box::new(RouteRecord::read((&self.metadata, &self.spec, &self.status), reading)))
    }

    fn touch(touched: Touched<ObjectKey, Box<RouteRecord>>, tables: &mut Tables) {
        tables.dirty.gateway_api.routes.insert((RouteKind::Tls, touched.key));
    }
}

impl Watched for TcpRoute {
    const FACTS: Facts = Facts {
        plural: "tcproutes",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_required: |_| false,
        ..TlsRoute::FACTS
    };

    type Rows = Table<ObjectKey, Box<RouteRecord>>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<Box<RouteRecord>> {
        Some(Box::new(RouteRecord::read((&self.metadata, &self.spec, &self.status), reading)))
    }

    fn touch(touched: Touched<ObjectKey, Box<RouteRecord>>, tables: &mut Tables) {
        tables.dirty.gateway_api.routes.insert((RouteKind::Tcp, touched.key));
    }
}

/// A route.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RouteRecord {
    pub(crate) created: Arc<str>,
    pub(crate) parents: Box<[ParentRecord]>,
    pub(crate) hostnames: Box<[Arc<str>]>,
    /// The backends of the first rule.
    pub(crate) backends: Box<[BackendRecord]>,
    /// The number of rules.
    pub(crate) rules: usize,
    /// True if the status has entries of other controllers, or of Isthmus.
    pub(crate) has_status: bool,
    /// The entries of Isthmus in the status.
    pub(crate) own: Box<[OwnEntry]>,
    /// The version of the object. Its digest is that of no status.
    stamp: Stamp,
}

/// An entry of a route's status that a release of Isthmus has written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OwnEntry {
    pub(crate) parent: ParentRecord,
    digest: u64,
}

/// A reference to a Gateway or ListenerSet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ParentRecord {
    /// The fields as the object has them; the status repeats them.
    pub(crate) group: Option<Arc<str>>,
    pub(crate) kind: Option<Arc<str>>,
    pub(crate) namespace: Option<Arc<str>>,
    pub(crate) name: Arc<str>,
    pub(crate) section: Option<Arc<str>>,
    pub(crate) port: Option<i64>,
}

/// A reference to a service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BackendRecord {
    /// The group; empty: the core API group.
    pub(crate) group: Arc<str>,
    pub(crate) kind: Arc<str>,
    pub(crate) target: ObjectKey,
    pub(crate) port: Option<u16>,
    pub(crate) weight: u32,
}

impl RouteRecord {
    fn read((metadata, spec, status): (&Meta, &RouteSpec, &RouteStatus), reading: &mut Reading<'_>) -> Self {
        let Reading { spec: of, texts, .. } = reading;
        let controller = of.gateway_api.as_ref().map(|served| &*served.controller);
        let first = spec.rules.first().map(|rule| rule.backend_refs.as_slice()).unwrap_or_default();
        let mut backend = |found: &BackendRef| BackendRecord {
            group: texts.text(found.group.as_deref().unwrap_or_default()),
            kind: texts.text(found.kind.as_deref().unwrap_or("Service")),
            target: ObjectKey {
                namespace: texts.text(found.namespace.as_ref().unwrap_or(&metadata.namespace)),
                name: texts.text(&found.name),
            },
            port: found.port.and_then(crate::objects::port),
            // The API allows weights from 0 to 1,000,000; the default is 1.
            weight: u32::try_from(found.weight.unwrap_or(1)).unwrap_or(0).min(1_000_000),
        };
        let backends = first.iter().take(BACKENDS_MAX).map(&mut backend).collect();
        let parents = spec.parent_refs.iter().take(PARENTS_MAX).map(|found| ParentRecord::read(found, texts));
        Self {
            parents: parents.collect(),
            created: texts.text(metadata.created()),
            hostnames: spec.hostnames.iter().take(HOSTNAMES_MAX).map(|name| texts.text(name)).collect(),
            backends,
            rules: spec.rules.len(),
            has_status: !status.parents.is_empty(),
            own: {
                let own = status.parents.iter().filter(|parent| Some(&*parent.controller_name) == controller);
                let own = own.map(|entry| {
                    let parent = ParentRecord::read(&entry.parent_ref, texts);
                    let digest = parent.digest(&entry.conditions);
                    OwnEntry { parent, digest }
                });
                own.collect()
            },
            stamp: Stamp::of(metadata, |_| ()),
        }
    }

    /// Returns the version of the object, with the digest of the entries of Isthmus in its status, but for those of these parents.
    pub(crate) fn stamp_without(&self, kept: &[ParentRecord]) -> Stamp {
        let mut digest = Digest::default();
        let own = self.own.iter().filter(|entry| !kept.contains(&entry.parent));
        own.for_each(|entry| digest.entry(entry.digest));
        Stamp { digest: digest.finish(), ..self.stamp.clone() }
    }

    pub(crate) fn generation(&self) -> i64 {
        self.stamp.generation
    }
}

impl ParentRecord {
    fn read(found: &ParentRef, texts: &mut Interner) -> Self {
        let mut optional = |text: &Option<String>| text.as_deref().map(|text| texts.text(text));
        Self {
            group: optional(&found.group),
            kind: optional(&found.kind),
            namespace: optional(&found.namespace),
            section: optional(&found.section_name),
            name: texts.text(&found.name),
            port: found.port,
        }
    }

    /// Returns the digest of an entry of the status for this parent.
    pub(crate) fn digest(&self, conditions: &[Condition]) -> u64 {
        let place = format!(
            "{:?} {:?} {:?} {:?} {:?} {:?}",
            self.group, self.kind, self.namespace, self.name, self.section, self.port
        );
        let mut digest = Digest::default();
        digest.part(&["parent", &place]);
        digest.conditions(&place, conditions);
        digest.finish()
    }
}
