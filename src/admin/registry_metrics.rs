//! The metrics of registries (SPEC §15), made from their status at each scrape, so that a removed registry
//! leaves no metrics.

use std::fmt::Write as _;

use crate::aggregator::status::{RegistryError, RegistryState, RegistryStatus};
use crate::telemetry::recorder::escaped;

/// Names and descriptions of the metrics.
pub const DESCRIPTIONS: [(&str, &str); 4] = [
    ("isthmus_registry_state", "1 for the current state of a registry, 0 for its other states."),
    ("isthmus_registry_items", "Items of a registry in use, by kind."),
    ("isthmus_registry_changes_total", "Changes received from a registry."),
    ("isthmus_registry_errors_total", "Errors of a registry, by kind of error."),
];

/// Returns the metrics in the Prometheus text format.
pub(super) fn text(registries: &[RegistryStatus]) -> String {
    let [state, items, changes, errors] = DESCRIPTIONS;
    let mut text = String::new();
    head(&mut text, state, "gauge");
    for registry in registries {
        for one in RegistryState::ALL {
            let is_in = u8::from(registry.state == one);
            line(&mut text, state.0, registry, Some(("state", one.text())), is_in);
        }
    }
    head(&mut text, items, "gauge");
    for registry in registries {
        let counts = registry.items;
        let kinds = [
            ("services", counts.services),
            ("endpoints", counts.endpoints),
            ("gateways", counts.gateways),
            ("marks", counts.marks),
        ];
        for (kind, count) in kinds {
            line(&mut text, items.0, registry, Some(("kind", kind)), count);
        }
    }
    head(&mut text, changes, "counter");
    for registry in registries {
        line(&mut text, changes.0, registry, None, registry.changes);
    }
    head(&mut text, errors, "counter");
    for registry in registries {
        for error in RegistryError::ALL {
            let count = registry.errors.get(&error).copied().unwrap_or_default();
            line(&mut text, errors.0, registry, Some(("error", error.text())), count);
        }
    }
    text
}

fn head(text: &mut String, (name, help): (&str, &str), kind: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn line(
    text: &mut String,
    name: &str,
    registry: &RegistryStatus,
    label: Option<(&str, &str)>,
    value: impl std::fmt::Display,
) {
    let registry = escaped(&registry.name);
    let label = label.map(|(key, value)| format!(",{key}=\"{value}\"")).unwrap_or_default();
    let _ = writeln!(text, "{name}{{registry=\"{registry}\"{label}}} {value}");
}
