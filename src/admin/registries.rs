//! Registries: their list, the order to apply an update that is held back, and their metrics (`docs/registries.md, "When a registry
//! cannot be read"`), which are computed from their status at each scrape, so that a removed registry leaves no metrics.

use axum::extract::{Query, State};
use axum::response::Response;
use serde_json::json;

use super::Sources;
use super::response::{Refused, answered};
use super::routes::{Parameters, Routes};
use super::scraped::Scraped;
use isthmus_aggregator::owner::NotAccepted;
use isthmus_aggregator::status::{RegistryError, RegistryState, RegistryStatus, Status};
use isthmus_api as api;
use isthmus_api::requests;
use isthmus_registry::change::Report;
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::exposition::{Exposition, Kind};

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .value(&requests::REGISTRIES, |sources| registries(&sources.aggregator.status.borrow()))
        .with(&requests::ACCEPT_REGISTRY, accept)
}

/// Returns one object per registry, in order of precedence.
pub(crate) fn registries(aggregator: &Status) -> Vec<api::registry::Registry> {
    let view = |registry: &RegistryStatus| {
        let flaws = registry.flaws.iter().flat_map(|lines| lines.iter());
        api::registry::Registry {
            name: registry.name.to_string(),
            cluster: registry.cluster.to_string(),
            network: registry.network.to_string(),
            state: registry.state.text().to_owned(),
            changes: registry.changes,
            flawed: registry.flaws.len(),
            problems: registry.problems.iter().chain(&registry.copy_problem).chain(flaws).cloned().collect(),
            services: registry.items.services,
            endpoints: registry.items.endpoints,
            gateways: registry.items.gateways,
            marks: registry.items.marks,
            denied_services: registry.items.denied_items,
            denied_endpoints: registry.items.denied_endpoints,
            denied_addresses: registry.items.denied_addresses,
            since: rfc3339(registry.since),
            read: registry.read.map(rfc3339),
            report: registry.report.as_deref().map(report),
        }
    };
    aggregator.registries.iter().map(view).collect()
}

/// Returns a registry's report on how it is read, in the form of the API.
fn report(report: &Report) -> api::registry::Report {
    let counts = |list: &[(&'static str, usize)]| {
        list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    };
    api::registry::Report {
        server: report.server.clone(),
        version: report.version.clone(),
        facts: report.facts.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect(),
        objects: counts(&report.objects),
        left_out: counts(&report.left_out),
        problems: report.problems.clone(),
    }
}

async fn accept(State(sources): State<Sources>, Query(query): Parameters) -> Response {
    let (Some(name), 1) = (query.get("name"), query.len()) else {
        let text = "give the name of the registry, and nothing else: ?name=etcd-west";
        return answered::<()>(Err(Refused::Parameters(text.to_owned())));
    };
    let accepted = sources.aggregator.accept(name).await;
    let refused = |why: NotAccepted| match why {
        NotAccepted::Unknown => Refused::Unknown(why.to_string()),
        NotAccepted::NothingHeld | NotAccepted::Ended => Refused::Conflict(why.to_string()),
    };
    let result = accepted.map_err(refused);
    answered(result.map(|()| json!({ "result": "the update that was held back is applied" })))
}

/// The names and descriptions of the metrics.
const DESCRIPTIONS: [(&str, &str); 5] = [
    ("isthmus_registry_state", "1 for the current state of a registry, 0 for its other states."),
    ("isthmus_registry_items", "Items in use from a registry, by kind."),
    ("isthmus_registry_changes_total", "Changes received from a registry."),
    ("isthmus_registry_errors_total", "Errors of a registry, by kind of error."),
    (
        "isthmus_registry_objects_ignored",
        "Objects of a registry that are read and have no effect, by kind of object; absent if there are none.",
    ),
];

/// The states, items, changes and errors of registries.
pub(super) const METRICS: Scraped = Scraped {
    descriptions: &DESCRIPTIONS,
    expose: |sources, exposition| expose(&sources.aggregator.status.borrow().registries, exposition),
};

fn expose(registries: &[RegistryStatus], exposition: &mut Exposition) {
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
