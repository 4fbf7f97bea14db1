//! `defaults`, `policies`, and the same keys of a route: how endpoints are chosen and dialled.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use isthmus_document::problem::{Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_model::name::NamePattern;
use isthmus_settings::limits::Timeouts;
use isthmus_settings::tuning::{Ejection, HealthCheck, ServiceTuning, Tuning};

use super::steering;
use super::table::Root;
use super::table::routes as keys;

/// Reads the tuning of a map. If the map omits a key that has no default, the value of `base` applies.
pub(super) fn tuning(fields: &Fields<'_>, base: Tuning) -> Tuning {
    let balancing = fields.map(&keys::LOAD_BALANCING);
    Tuning {
        policy: balancing.get(&keys::LoadBalancing::POLICY),
        locality: balancing.get(&keys::LoadBalancing::LOCALITY).unwrap_or(base.locality),
        health: (fields.at(&keys::HEALTH).is_some() && !fields.is_off(&keys::HEALTH))
            .then(|| health(&fields.map(&keys::HEALTH))),
        ejection: (!fields.is_off(&keys::EJECTION)).then(|| ejection(&fields.map(&keys::EJECTION))),
        connect_timeout: fields.get(&keys::CONNECT_TIMEOUT).unwrap_or(base.connect_timeout),
        panic: fields.get(&keys::PANIC),
        send_proxy: fields.get(&keys::SEND_PROXY_PROTOCOL),
        max_connection_age: fields.get(&keys::MAX_CONNECTION_AGE),
        steering: base.steering,
    }
}

fn health(fields: &Fields<'_>) -> HealthCheck {
    HealthCheck {
        interval: fields.get(&keys::HealthCheck::INTERVAL),
        timeout: fields.get(&keys::HealthCheck::TIMEOUT),
        unhealthy_after: fields.get(&keys::HealthCheck::UNHEALTHY_AFTER),
        healthy_after: fields.get(&keys::HealthCheck::HEALTHY_AFTER),
        tls: fields.get(&keys::HealthCheck::TLS),
    }
}

fn ejection(fields: &Fields<'_>) -> Ejection {
    Ejection {
        failures: fields.get(&keys::Ejection::FAILURES),
        time: fields.get(&keys::Ejection::TIME),
        share_max_percent: fields.get(&keys::Ejection::MAX_SHARE),
    }
}

/// Reads the tuning of the mesh's services; policies are sorted so that the first match is the most specific.
pub(super) fn services(root: &Fields<'_>, timeouts: &Timeouts, problems: &mut Problems) -> ServiceTuning {
    let base = Tuning { steering: steering::default(root), ..Tuning::for_services(timeouts) };
    let mut places: HashMap<NamePattern, Position> = HashMap::new();
    let mut policies = Vec::new();
    for (index, fields, _) in root.maps(&Root::POLICIES) {
        let path = Path::Root.key(Root::POLICIES.name());
        let steering = steering::of_policy(&fields, &base.steering, &path.index(index), problems);
        let own = Arc::new(Tuning { steering, ..tuning(&fields, base.clone()) });
        for (at, pattern, node) in fields.values(&keys::Policy::SERVICES) {
            if let Some(first) = places.get(&pattern) {
                let first = problems.place(*first);
                let list = Path::Root.key(Root::POLICIES.name());
                let path = list.index(index);
                let fault = format!("{node} is in two policies; first at {first}");
                problems.error(node.position, &path.key(keys::Policy::SERVICES.name()).index(at), fault);
                continue;
            }
            places.insert(pattern.clone(), node.position);
            policies.push((pattern, own.clone()));
        }
    }
    policies.sort_by_key(|(pattern, _)| match pattern {
        NamePattern::Exact(_) => (0, Reverse(0)),
        NamePattern::Suffix(suffix) => (1, Reverse(suffix.as_str().len())),
        NamePattern::Any => (2, Reverse(0)),
    });
    let default = tuning(&root.map(&Root::DEFAULTS), base);
    ServiceTuning { default: Arc::new(default), policies }
}
