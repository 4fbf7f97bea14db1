//! The demand of a Service: the replicas of the Deployments and StatefulSets whose pods it selects, whatever has become of the pods. A
//! workload that wants none says nothing: its pods may have another owner, such as an Argo Rollout, which leaves the Deployment at zero.

use std::collections::BTreeMap;

use super::kinds::Tables;
use super::kinds::service::ServiceRecord;
use super::table::ObjectKey;
use isthmus_model::demand::OwnersDemand;
use isthmus_model::place::Network;

/// Returns the demand of a Service by network; none if no workload is known whose pods it selects.
pub(super) fn of(tables: &Tables, key: &ObjectKey, service: &ServiceRecord) -> Box<[OwnersDemand]> {
    let Some(selector) = &service.pods else { return Box::default() };
    let deployments = tables.deployments.inside(&key.namespace);
    let all = deployments.chain(tables.stateful_sets.inside(&key.namespace));
    let mut demands: BTreeMap<Network, u32> = BTreeMap::new();
    for (_, workload) in all.filter(|(_, one)| one.replicas > 0 && one.labels.has_all(selector)) {
        let own = tables.network();
        let network = workload.network().map_or_else(|| own.clone(), Network::new);
        // As with pods, a label leads only to networks that the registry may name.
        if network == own || tables.spec.networks.contains(&network) {
            let sum = demands.entry(network).or_default();
            *sum = sum.saturating_add(workload.replicas);
        }
    }
    let demand = |(network, weight)| OwnersDemand { network: Some(network), weight };
    demands.into_iter().map(demand).collect()
}

#[cfg(test)]
mod tests;
