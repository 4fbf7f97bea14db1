//! Readiness: named gates. The gateway is ready if all of them are open.

use isthmus_aggregator::status::{RegistryState, Status};
use isthmus_model::place::ClusterId;

use super::ProgramStatus;

/// A condition of readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gate {
    /// The name, such as `registry files (live)`.
    pub name: String,
    /// The reason why the gate is closed; `None` if it is open.
    pub closed: Option<String>,
}

/// The states behind the readiness gates that only some configs have.
#[derive(Clone, Debug, Default)]
pub struct Further {
    /// The gate of the gateway's certificate, if the config names a certificate source.
    pub identity: Option<Gate>,
    /// The gate of the trusted roots, if some are needed.
    pub trust: Option<Gate>,
    /// True if the DNS server answers queries; `None` if there is no DNS server.
    pub names: Option<bool>,
}

/// Returns all readiness gates. Only registries of the gateway's own cluster have gates.
pub fn gates(
    program: &ProgramStatus,
    aggregator: &Status,
    own_cluster: &ClusterId,
    further: Further,
) -> Vec<Gate> {
    let gate = |name: &str, open: bool, why: &str| Gate {
        name: name.to_owned(),
        closed: (!open).then(|| why.to_owned()),
    };
    let mut gates = vec![
        gate("listeners", program.serving, "the listeners are not open yet"),
        gate("serving", !program.draining, "draining"),
    ];
    gates.extend(further.identity);
    gates.extend(further.trust);
    gates.extend(
        further
            .names
            .map(|answers| gate("dns server", answers, "the DNS server does not answer queries yet")),
    );
    for registry in aggregator.registries.iter().filter(|registry| registry.cluster == *own_cluster) {
        let heard = registry.state != RegistryState::Missing;
        let why = registry.problems.first().map_or("the registry was not read yet", String::as_str);
        let name = match registry.state {
            RegistryState::Missing | RegistryState::Live => format!("registry {}", registry.name),
            // The gate is open, but its name shows the registry's state.
            state => format!("registry {} ({})", registry.name, state.text()),
        };
        gates.push(gate(&name, heard, why));
    }
    gates
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use isthmus_aggregator::status::RegistryStatus;

    #[test]
    fn only_registries_of_the_own_cluster_hold_readiness() {
        let program = ProgramStatus {
            serving: true,
            listening: vec![("l".into(), ([127, 0, 0, 1], 1).into())],
            ..ProgramStatus::new(Path::new(""), 1)
        };
        let registry = |cluster: &str, state| RegistryStatus {
            problems: vec!["no such file".to_owned()],
            ..RegistryStatus::of(cluster, state)
        };
        let closed = |states: [RegistryState; 2]| {
            let [own, other] = states;
            let registries = vec![registry("east", own), registry("west", other)];
            let status = Status { registries, ..Status::default() };
            let gates = gates(&program, &status, &ClusterId::new("east"), Further::default());
            gates.into_iter().filter_map(|gate| gate.closed).collect::<Vec<_>>()
        };
        assert_eq!(closed([RegistryState::Stale, RegistryState::Missing]), Vec::<String>::new());
        assert_eq!(closed([RegistryState::Missing, RegistryState::Live]), ["no such file"]);
    }
}
