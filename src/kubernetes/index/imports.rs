//! The ServiceImports and namespaces of a cluster, for the task that writes imports.

use std::sync::Arc;

use super::super::import_objects::Imports;
use super::super::imports::ImportWriter;
use super::super::kinds::Kind;
use super::super::kinds::derived_service::is_name_of_derived;
use super::super::kinds::namespace::NamespaceRecord;
use super::super::kinds::service_import::Ready;
use super::super::table::ObjectKey;
use super::super::writer::Turns;
use super::Index;
use isthmus_net::channel::cut;
use isthmus_registry::change::Report;

impl Index {
    /// Returns the imports and namespaces, if they may have changed since the last call and this registry writes imports.
    pub(crate) fn new_imports(&mut self) -> Option<Imports> {
        let is_writer = self.tables.spec.import_writer.is_some();
        if !std::mem::take(&mut self.tables.dirty.imports) || !is_writer {
            return None;
        }
        let tables = &self.tables;
        let is_read =
            |(name, found): &(&Arc<str>, &NamespaceRecord)| tables.spec.namespaces.takes(name, &found.labels);
        let namespaces = tables.namespaces.iter().filter(is_read).map(|(name, _)| name.clone());
        let objects = tables.imports.iter().filter(|(key, _)| self.is_read(key));
        let slices = tables.imported_slices.iter().filter(|(key, _)| self.is_read(key));
        let services = || tables.derived_services.iter().filter(|(key, _)| self.is_read(key));
        let is_taken =
            |key: &ObjectKey| tables.spec.import_extras.derived_services && is_name_of_derived(&key.name);
        let of_others = tables.services.iter().filter(|(key, _)| is_taken(key) && self.is_read(key));
        Some(Imports {
            is_known: self.imports_are_known(),
            namespaces: namespaces.collect(),
            objects: objects.map(|(key, import)| (key.clone(), import.own.clone())).collect(),
            slices: slices.map(|(key, slice)| (key.clone(), Some(slice.clone()))).collect(),
            services: services()
                .map(|(key, found)| (key.clone(), Some(found.content.clone())))
                .chain(of_others.map(|(key, _)| (key.clone(), None)))
                .collect(),
            addresses: services().map(|(key, found)| (key.clone(), found.ips.clone())).collect(),
            network: tables.network(),
        })
    }

    /// Adds the reasons why imports are not written to the report.
    pub(crate) fn describe_imports(&self, report: &mut Report) {
        if self.tables.spec.import_writer.is_none() {
            return;
        }
        let watches = || self.watches.all.iter().filter(|watch| watch.kind == Kind::ServiceImport);
        if watches().any(|watch| watch.absent.is_some()) {
            let why = "not written: the cluster does not have the CRD serviceimports.multicluster.x-k8s.io";
            report.facts.push((ImportWriter::DUTY.subject, why.to_owned()));
        }
        let unreached = self.tables.imports.iter().filter_map(|(key, import)| {
            let ready = import.own.as_ref()?.ready.as_ref().filter(|ready| ready.reason != Ready::ALL)?;
            Some(format!("{key}: {}", cut(&ready.message)))
        });
        let mut unreached = unreached.peekable();
        if let Some(first) = unreached.peek().cloned() {
            let count = unreached.count();
            report.facts.push((
                "ServiceImports with ports that pods outside the mesh do not reach",
                format!("{count} (first: {first})"),
            ));
        }
        let theirs = self.tables.imports.iter().filter(|(_, import)| import.own.is_none()).count();
        if theirs > 0 {
            report.facts.push(("ServiceImports of other programs", theirs.to_string()));
        }
    }

    /// Returns true if the cluster has the kind, and all imports and their slices were listed.
    fn imports_are_known(&self) -> bool {
        let is_of_imports =
            |kind| matches!(kind, Kind::ServiceImport | Kind::ImportedSlice | Kind::DerivedService);
        let mut watches = self.watches.all.iter().filter(|watch| is_of_imports(watch.kind));
        watches.all(|watch| watch.is_synced && watch.absent.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::kinds::derived_service::derived_key;
    use super::super::super::watch::{Event, What};
    use super::*;
    use isthmus_aggregator::spec::kubernetes::{ImportExtras, Knows, KubernetesSpec, LeaseSpec};
    use isthmus_model::place::ClusterId;

    #[test]
    fn a_service_that_another_program_has_by_the_name_of_a_derived_one_is_told_from_it() {
        let import = ObjectKey { namespace: "shop".into(), name: "web".into() };
        let key = derived_key(&import);
        let lease = LeaseSpec { namespace: "n".into(), holder: "h".into(), knows: Knows::OwnCluster };
        let spec = KubernetesSpec {
            import_writer: Some(lease),
            import_extras: ImportExtras { slices: false, derived_services: true },
            ..KubernetesSpec::plain()
        };
        let domain = spec.trust_domain.clone();
        let kinds = [Kind::Namespace, Kind::Service, Kind::DerivedService];
        let watches = kinds.map(|kind| (kind, None)).to_vec();
        let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches);
        // The watches of both kinds name a Service with the labels.
        let mut of_service = |labels: &str, owners: &str| {
            let metadata = format!(
                r#""namespace":"shop","name":"{}","labels":{{{labels}}},"ownerReferences":[{owners}]"#,
                key.name
            );
            let object = format!(r#"{{"metadata":{{{metadata}}},"spec":{{"ports":[{{"port":1}}]}}}}"#);
            for (watch, text) in [r#"{"metadata":{"name":"shop"}}"#, &object, &object].into_iter().enumerate()
            {
                let object = kinds[watch].read(text).expect("legal");
                index.apply(Event { watch, kind: kinds[watch], what: What::Put(object) });
            }
            let is_of_registry = index.tables.services.get(&key).is_some();
            let imports = index.new_imports().expect("a Service of this name has changed");
            (imports.services.get(&key).map(Option::is_some), is_of_registry)
        };
        let labels =
            r#""app.kubernetes.io/managed-by":"isthmus","multicluster.kubernetes.io/service-name":"web""#;
        let owner = r#"{"kind":"ServiceImport","name":"web"}"#;
        assert_eq!(of_service(labels, owner), (Some(true), false));
        assert_eq!(of_service("", ""), (Some(false), true));
        assert_eq!(of_service(labels, r#"{"kind":"ServiceImport","name":"other"}"#), (Some(false), true));
        assert_eq!(of_service(labels, owner), (Some(true), false));
    }
}
