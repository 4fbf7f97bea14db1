//! `defaults`, `policies`, and the same keys of a route: how endpoints are chosen and dialled.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use crate::document::problem::{Path, Position, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::model::name::NamePattern;
use crate::snapshot::policy::{Ejection, LoadBalancing, LocalityMode, ServiceTuning, Timeouts, Tuning};

use super::table::routes::{DEFAULTS, EJECTION, LOAD_BALANCING_OBJECT, POLICY};

/// Reads the tuning of a map; keys that it omits are those of `base`.
pub(super) fn tuning(fields: &Fields<'_>, base: Tuning) -> Tuning {
    let balancing = fields.fields("loadBalancing", &LOAD_BALANCING_OBJECT);
    let modes = [LocalityMode::Prefer, LocalityMode::Ignore];
    let mode_text = |mode| match mode {
        LocalityMode::Prefer => "prefer",
        LocalityMode::Ignore => "ignore",
    };
    Tuning {
        policy: balancing.choice("policy", &LoadBalancing::ALL, LoadBalancing::text).unwrap_or(base.policy),
        locality: balancing.choice("locality", &modes, mode_text).unwrap_or(base.locality),
        ejection: match fields.is_off("ejection") {
            true => None,
            false => Some(ejection(&fields.fields("ejection", &EJECTION))),
        },
        connect_timeout: fields.read("connectTimeout", scalar::duration).unwrap_or(base.connect_timeout),
        panic: fields.flag("panic").unwrap_or(base.panic),
    }
}

fn ejection(fields: &Fields<'_>) -> Ejection {
    let default = Ejection::default();
    Ejection {
        failures: fields.number("failures").unwrap_or(default.failures),
        time: fields.read("time", scalar::duration).unwrap_or(default.time),
        share_max_percent: fields.read("maxShare", scalar::percent).unwrap_or(default.share_max_percent),
    }
}

/// Reads the tuning of the mesh's services; policies are sorted so that the first match is the most specific.
pub(super) fn services(root: &Fields<'_>, timeouts: &Timeouts, problems: &mut Problems) -> ServiceTuning {
    let base = Tuning::for_services(timeouts);
    let mut places: HashMap<NamePattern, Position> = HashMap::new();
    let mut policies = Vec::new();
    for (index, node) in root.items("policies").iter().enumerate() {
        let fields = Fields::new(Some(node), &POLICY);
        let own = Arc::new(tuning(&fields, base.clone()));
        for (at, node) in fields.items("services").iter().enumerate() {
            let Some(Ok(pattern)) = node.text().map(scalar::pattern) else { continue };
            if let Some(first) = places.get(&pattern) {
                let first = problems.place(*first);
                let list = Path::Root.key("policies");
                let path = list.index(index);
                let fault = format!("{node} is in two policies; first at {first}");
                problems.error(node.position, &path.key("services").index(at), fault);
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
    let default = tuning(&root.fields("defaults", &DEFAULTS), base);
    ServiceTuning { default: Arc::new(default), policies }
}
