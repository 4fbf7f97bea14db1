//! The conditions that the ServiceExports of a cluster should have.

use super::super::exports::{Exports, WantedConditions};
use super::super::kinds::service::ServiceClass;
use super::super::kinds::service_export::ExportCondition;
use super::super::table::ObjectKey;
use super::Index;
use isthmus_net::channel::cut;

impl Index {
    /// Returns the present and the wanted conditions of the cluster's ServiceExports, if either have changed since the last
    /// call.
    pub(crate) fn new_conditions(&mut self) -> Option<Exports> {
        std::mem::take(&mut self.wanted_is_new).then(|| self.wanted.clone())
    }

    /// Updates the conditions that a ServiceExport should have, if this registry writes conditions.
    pub(super) fn renew_conditions(&mut self, key: &ObjectKey) {
        if self.tables.spec.export_writer.is_none() {
            return;
        }
        let wanted = self.wanted_of(key);
        if self.wanted.get(key) == wanted.as_ref() {
            return;
        }
        match wanted {
            Some(wanted) => drop(self.wanted.insert(key.clone(), wanted)),
            None => drop(self.wanted.remove(key)),
        }
        self.wanted_is_new = true;
    }

    /// Returns the conditions that a ServiceExport has and should have; `None` if there is no ServiceExport, or its namespace
    /// is not read.
    fn wanted_of(&self, key: &ObjectKey) -> Option<WantedConditions> {
        let export = self.tables.exports.get(key).filter(|_| self.is_read(key))?;
        let (generation, has) = (export.generation, export.conditions.clone());
        Some(WantedConditions { generation, has, wanted: self.conditions_of(key) })
    }

    /// Returns a sentence about the ServiceExports whose Service does not exist or cannot be exported; `None` if there are
    /// none.
    pub(crate) fn unusable_exports(&self) -> Option<String> {
        let exports = self.tables.exports.iter().map(|(key, _)| key);
        let mut faults = exports.filter(|key| self.is_read(key)).filter_map(|key| {
            let why = match self.tables.services.get(key).map(|service| service.class) {
                None => "does not exist",
                Some(ServiceClass::ExternalName) => "is of type ExternalName",
                Some(ServiceClass::ClusterIp | ServiceClass::Headless) => return None,
            };
            Some(format!("the Service {} {why}", cut(key)))
        });
        let first = faults.next()?;
        Some(match faults.count() {
            0 => format!("a ServiceExport has no effect: {first}"),
            more => format!("{} ServiceExports have no effect; the first one: {first}", more + 1),
        })
    }

    /// Returns true if the registry reads the namespace of an object.
    pub(super) fn is_read(&self, key: &ObjectKey) -> bool {
        self.tables.spec.namespaces.takes(&key.namespace, self.tables.labels_of(&key.namespace))
    }

    fn conditions_of(&self, key: &ObjectKey) -> Vec<ExportCondition> {
        let condition = |kind: &str, is_true: bool, reason: &str, message: String| ExportCondition {
            kind: kind.into(),
            status: if is_true { "True" } else { "False" }.into(),
            reason: reason.into(),
            message: message.into(),
            since: "".into(),
        };
        let not_ready = |message: &str| condition("Ready", false, "Pending", message.to_owned());
        let Some(service) = self.tables.services.get(key) else {
            let message = format!("the Service {key} does not exist");
            return vec![
                condition("Valid", false, "NoService", message),
                not_ready("there is no Service to export"),
            ];
        };
        if service.class == ServiceClass::ExternalName {
            let message = format!("the Service {key} is of type ExternalName");
            return vec![
                condition("Valid", false, "InvalidServiceType", message),
                not_ready("there is no Service to export"),
            ];
        }
        let valid = condition("Valid", true, "Valid", format!("the Service {key} can be exported"));
        let ready = match &service.unmarkable {
            Some(why) => condition("Ready", false, "Failed", format!("the Service is not exported: {why}")),
            None => condition(
                "Ready",
                true,
                "Exported",
                format!("the Service is marked for export from cluster {}", self.cluster),
            ),
        };
        vec![valid, ready]
    }
}
