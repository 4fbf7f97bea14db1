//! A cluster with objects of the Gateway API, for tests: objects as the API server sends them in, items of the registry out.

use std::sync::Arc;

use serde::Deserialize;

use super::gateway_api::writer::Wanted;
use super::gateway_api::{GatewayApi, Known};
use super::interner::Interner;
use super::kinds::{Kind, Object, Reading, Tables};
use isthmus_aggregator::spec::kubernetes::{
    GATEWAY_CONTROLLER, GatewayApiSpec, Knows, KubernetesSpec, LeaseSpec, NamespaceChoice,
};
use isthmus_model::address::Host;
use isthmus_registry::change::Change;

/// The objects that every cluster has, a JSON text each: the class, the namespaces, and a Service in two of them.
const OBJECTS: [&str; 6] = [
    r#"{"kind": "GatewayClass", "metadata": {"name": "isthmus", "generation": 4}, "spec": {"controllerName": "isthmus.io/gateway-controller"}}"#,
    r#"{"kind": "Namespace", "metadata": {"name": "infra", "labels": {"team": "core"}}}"#,
    r#"{"kind": "Namespace", "metadata": {"name": "shop", "labels": {"team": "shop"}}}"#,
    r#"{"kind": "Namespace", "metadata": {"name": "other", "labels": {"team": "other"}}}"#,
    r#"{"kind": "Service", "metadata": {"namespace": "shop", "name": "web"}, "spec": {"ports": [{"port": 443}]}}"#,
    r#"{"kind": "Service", "metadata": {"namespace": "other", "name": "web"}, "spec": {"ports": [{"port": 443}]}}"#,
];

/// The objects of a cluster, and their evaluation.
pub struct World {
    pub(crate) tables: Tables,
    texts: Interner,
    pub(crate) api: GatewayApi,
    pub(crate) spec: GatewayApiSpec,
}

/// The kind of an object.
#[derive(Deserialize)]
struct Typed {
    kind: String,
}

impl Default for World {
    fn default() -> Self {
        Self::of_class("isthmus")
    }
}

/// Returns a spec for the Gateways of a class.
pub(crate) fn spec_of(class: &str) -> GatewayApiSpec {
    GatewayApiSpec {
        controller: GATEWAY_CONTROLLER.into(),
        class: class.into(),
        ports: vec![443, 8443],
        addresses: Host::parse("192.0.2.1").into_iter().collect(),
        service: None,
        pool: Vec::new(),
        requestable: "127.0.0.0/16".parse().into_iter().collect(),
        from: NamespaceChoice::default(),
        routes_per_namespace: 1_000,
        writer: LeaseSpec { namespace: "n".into(), holder: "h".into(), knows: Knows::OwnCluster },
    }
}

impl World {
    /// Returns a world with the objects that every cluster has, which serves the Gateways of this class.
    pub fn of_class(class: &str) -> Self {
        let spec = spec_of(class);
        let cluster = KubernetesSpec { gateway_api: Some(spec.clone()), ..KubernetesSpec::plain() };
        let tables = Tables::new(Arc::new(cluster));
        let mut world = Self { tables, texts: Interner::default(), api: GatewayApi::default(), spec };
        for object in OBJECTS {
            let stored = world.apply(object);
            debug_assert!(stored.is_some(), "{object}");
        }
        world
    }

    /// Stores an object, a JSON text. Returns its kind and name; `None` if it cannot be read.
    pub fn apply(&mut self, object: &str) -> Option<String> {
        let (kind, object) = read(object)?;
        let spec = self.tables.spec.clone();
        let mut reading = Reading { trust_domain: &spec.trust_domain, spec: &spec, texts: &mut self.texts };
        let name = name(kind, &object);
        self.tables.put(&object, 1, &mut reading).then_some(name)
    }

    /// Removes the object with the kind and name of this one. Returns both; `None` if the text cannot be read.
    pub fn delete(&mut self, object: &str) -> Option<String> {
        let (kind, object) = read(object)?;
        self.tables.remove(kind, object.meta(), &mut self.texts);
        Some(name(kind, &object))
    }

    /// Evaluates what has changed, and returns the changes of items.
    pub fn renew(&mut self) -> Vec<Change> {
        let dirty = std::mem::take(&mut self.tables.dirty.gateway_api);
        let mut changes = Vec::new();
        self.api.renew(&self.spec, dirty, (&self.tables, Known::All), &mut changes);
        changes
    }

    /// Returns the reasons and messages of the conditions that may have to be written, if they have changed since the last call.
    pub fn conditions(&mut self) -> Vec<(&'static str, String)> {
        let due = self.api.new_due().unwrap_or_default();
        let mut all = Vec::new();
        for Wanted { status, .. } in due.values().map(|wanted| &**wanted) {
            let listeners = status.listeners.iter().map(|listener| &listener.conditions);
            let parents = status.parents.iter().map(|parent| &parent.conditions);
            let verdicts = listeners.chain(parents).chain([&status.conditions]).flatten();
            all.extend(verdicts.map(|(_, verdict)| (verdict.reason, verdict.message.clone())));
        }
        all
    }
}

fn read(object: &str) -> Option<(Kind, Object)> {
    let kind = match &*serde_json::from_str::<Typed>(object).ok()?.kind {
        "GatewayClass" => Kind::GatewayClass,
        "Gateway" => Kind::ClassGateway,
        "ListenerSet" => Kind::ListenerSet,
        "TLSRoute" => Kind::TlsRoute,
        "TCPRoute" => Kind::TcpRoute,
        "ReferenceGrant" => Kind::ReferenceGrant,
        "Namespace" => Kind::Namespace,
        "Pod" => Kind::Pod,
        "Service" => Kind::Service,
        "EndpointSlice" => Kind::EndpointSlice,
        "ServiceImport" => Kind::ServiceImport,
        _ => return None,
    };
    Some((kind, kind.read(object).ok()?))
}

/// Returns the kind and name of an object; two objects with the same kind and name are one.
fn name(kind: Kind, object: &Object) -> String {
    let meta = object.meta();
    let namespace = match kind {
        Kind::GatewayClass | Kind::Namespace => "",
        _ => &meta.namespace,
    };
    format!("{kind:?} {namespace}/{}", meta.name)
}
