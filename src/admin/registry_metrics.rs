//! The metrics of registries (`docs/registries.md, "When a registry cannot be read"`), computed from their status at each scrape,
//! so that a removed registry leaves no metrics.

use isthmus_aggregator::status::{RegistryError, RegistryState, RegistryStatus};
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The names and descriptions of the metrics.
pub const DESCRIPTIONS: [(&str, &str); 5] = [
    ("isthmus_registry_state", "1 for the current state of a registry, 0 for its other states."),
    ("isthmus_registry_items", "Items in use from a registry, by kind."),
    ("isthmus_registry_changes_total", "Changes received from a registry."),
    ("isthmus_registry_errors_total", "Errors of a registry, by kind of error."),
    (
        "isthmus_registry_objects_ignored",
        "Objects of a registry that are read and have no effect, by kind of object; absent if there are none.",
    ),
];

/// Adds the metrics of registries to those of a scrape.
pub(super) fn expose(registries: &[RegistryStatus], exposition: &mut Exposition) {
    let [state, items, changes, errors, ignored] = DESCRIPTIONS;
    let mut add = |(name, help), kind, labels: &[(&'static str, &str)], value: u64| {
        exposition.family(name, kind, help).add(labels.iter().copied(), value);
    };
    for registry in registries {
        let of = ("registry", &*registry.name);
        for one in RegistryState::ALL {
            let is_in = u64::from(registry.state == one);
            add(state, Kind::Gauge, &[of, ("state", one.text())], is_in);
        }
        let counts = registry.items;
        let kinds = [
            ("services", counts.services),
            ("endpoints", counts.endpoints),
            ("gateways", counts.gateways),
            ("marks", counts.marks),
        ];
        for (kind, count) in kinds {
            add(items, Kind::Gauge, &[of, ("kind", kind)], count as u64);
        }
        add(changes, Kind::Counter, &[of], registry.changes);
        for error in RegistryError::ALL {
            let count = registry.errors.get(&error).copied().unwrap_or_default();
            add(errors, Kind::Counter, &[of, ("error", error.text())], count);
        }
        for of_kind in registry.report.iter().flat_map(|report| &report.ignored) {
            add(ignored, Kind::Gauge, &[of, ("kind", of_kind.kind)], of_kind.count as u64);
        }
    }
}
