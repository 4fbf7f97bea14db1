//! The rules by which objects of the Gateway API may refer to one another across namespaces: `allowedRoutes`, `allowedListeners`
//! and ReferenceGrants.

use super::super::kinds::class_gateway::{AllowedNamespaces, Expression, LabelSelector};
use super::super::kinds::reference_grant::GrantRecord;
use super::super::table::{ObjectKey, Table};
use isthmus_model::endpoint::Labels;

/// The group of the objects of the Gateway API.
pub(crate) const GROUP: &str = "gateway.networking.k8s.io";

/// Returns true if objects of `namespace`, which has these labels, may be attached to an object of the namespace `own`. `default` is
/// the rule without `from`.
pub(crate) fn allows(
    rule: &AllowedNamespaces,
    default: &str,
    own: &str,
    namespace: &str,
    labels: &Labels,
) -> bool {
    let from = if rule.from.is_empty() { default } else { &rule.from };
    match from {
        "All" => true,
        "Same" => namespace == own,
        "Selector" => selects(&rule.selector, labels),
        _ => false,
    }
}

/// Returns true if the selector matches the labels. An unknown operator matches nothing.
fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    let value = |key: &str| labels.get(key).map(|value| &**value);
    let by_label = selector.match_labels.iter().all(|(key, wanted)| value(key) == Some(wanted));
    by_label
        && selector.match_expressions.iter().all(|Expression { key, operator, values }| {
            let found = value(key);
            let is_listed = found.is_some_and(|found| values.iter().any(|value| value == found));
            match operator.as_str() {
                "In" => is_listed,
                "NotIn" => !is_listed,
                "Exists" => found.is_some(),
                "DoesNotExist" => found.is_none(),
                _ => false,
            }
        })
}

/// Returns true if an object of this kind and namespace may refer to the target: it is in the same namespace, or a ReferenceGrant
/// there permits it.
pub(crate) fn is_granted(
    grants: &Table<ObjectKey, GrantRecord>,
    (kind, namespace): (&str, &str),
    (target_group, target_kind): (&str, &str),
    target: &ObjectKey,
) -> bool {
    if *target.namespace == *namespace {
        return true;
    }
    let mut all = grants.inside(&target.namespace).map(|(_, grant)| grant);
    all.any(|grant| {
        let is_from = grant
            .from
            .iter()
            .any(|from| from.group == GROUP && from.kind == kind && from.namespace == namespace);
        let is_to = grant.to.iter().any(|to| {
            to.group == target_group
                && to.kind == target_kind
                && (to.name.is_empty() || *to.name == *target.name)
        });
        is_from && is_to
    })
}
