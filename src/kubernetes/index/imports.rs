//! The ServiceImports and namespaces of a cluster, for the task that writes imports.

use std::sync::Arc;

use super::super::import_objects::Imports;
use super::super::imports::ImportWriter;
use super::super::kinds::Kind;
use super::super::kinds::namespace::NamespaceRecord;
use super::super::kinds::service_import::Ready;
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
        Some(Imports {
            is_known: self.imports_are_known(),
            namespaces: namespaces.collect(),
            objects: objects.map(|(key, import)| (key.clone(), import.own.clone())).collect(),
            slices: slices.map(|(key, slice)| (key.clone(), Some(slice.clone()))).collect(),
            services: services().map(|(key, found)| (key.clone(), Some(found.content.clone()))).collect(),
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
