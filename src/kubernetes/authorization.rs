//! Converts the policies of a mesh to those of ztunnels (`istio.security.Authorization`), as Istio's control plane does.
//!
//! A ztunnel knows no HTTP, so that a rule with such a condition cannot hold: of an ALLOW policy it is left out, of a DENY policy the
//! condition is. Both admit less than the policy does. The same is done with every condition that is not known here, or cannot
//! be read, so that no mistake admits more.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use prost::Message;

use super::objects::{Meta, Texts, is_true, objects};
use isthmus_proto::istio::security as proto;
use isthmus_proto::istio::security::string_match::MatchType;

/// The name of the policy that refuses connections without mutual TLS. A name of Kubernetes has no underscore.
pub(super) const STATIC_STRICT: &str = "istio_converted_static_strict";
/// The annotation of a policy that is not enforced; a ztunnel only counts what it would refuse.
const DRY_RUN: &str = "istio.io/dry-run";
/// The beginning of the name of a policy that is made from a PeerAuthentication.
pub(super) const OF_PEER_AUTHENTICATION: &str = "converted_peer_authentication_";

objects! {
    /// The labels of workloads.
    Selector { match_labels: Texts, }
    PolicySpec {
        selector: Option<Selector>,
        target_ref: Option<serde::de::IgnoredAny>,
        target_refs: Vec<serde::de::IgnoredAny>,
        rules: Vec<PolicyRule>,
        action: String,
    }
    PolicyRule { from: Vec<From>, to: Vec<To>, when: Vec<Condition>, }
    From { source: Conditions, }
    To { operation: Conditions, }
    Condition { key: String, values: Vec<String>, not_values: Vec<String>, }
}

/// Lists of values by the name of a condition.
type Conditions = BTreeMap<String, Vec<String>>;

/// A condition that ztunnels cannot judge.
struct Unjudged;

/// Returns the encoded policy; `None` if it is not for ztunnels: it has a target, which is a waypoint, or an action that ztunnels do
/// not have.
pub(super) fn converted(spec: &PolicySpec, metadata: &Meta, root: &str) -> Option<Vec<u8>> {
    let Meta { name, namespace, annotations, .. } = metadata;
    if spec.target_ref.is_some() || !spec.target_refs.is_empty() {
        return None;
    }
    let action = match spec.action.as_str() {
        "" | "ALLOW" => proto::Action::Allow,
        "DENY" => proto::Action::Deny,
        _ => return None,
    };
    let scope = match &spec.selector {
        Some(_) => proto::Scope::WorkloadSelector,
        None if namespace == root => proto::Scope::Global,
        None => proto::Scope::Namespace,
    };
    let rules = spec.rules.iter().filter_map(|rule| {
        let (rule, unjudged) = rule_of(rule, namespace);
        (action == proto::Action::Deny || !unjudged).then_some(rule)
    });
    let message = proto::Authorization {
        name: name.clone(),
        namespace: namespace.clone(),
        scope: scope.into(),
        action: action.into(),
        rules: rules.collect(),
        dry_run: annotations.get(DRY_RUN).is_some_and(|text| is_true(text)),
    };
    Some(message.encode_to_vec())
}

/// Returns a rule without the conditions that ztunnels cannot judge, and true if there are such.
fn rule_of(rule: &PolicyRule, namespace: &str) -> (proto::Rule, bool) {
    let mut unjudged = false;
    let mut clauses = Vec::new();
    let mut add = |matches: Vec<proto::Match>| {
        if !matches.is_empty() {
            clauses.push(proto::Clause { matches });
        }
    };
    let mut all = |conditions: &Conditions| {
        let mut found = proto::Match::default();
        for (name, values) in conditions.iter().filter(|(_, values)| !values.is_empty()) {
            unjudged |= put(&mut found, name, values, namespace).is_err();
        }
        found
    };
    let to = rule.to.iter().map(|to| all(&to.operation)).collect();
    let from = rule.from.iter().map(|from| all(&from.source)).collect();
    add(to);
    add(from);
    for condition in &rule.when {
        let positive = match condition.key.as_str() {
            "source.namespace" => ("namespaces", "notNamespaces"),
            "source.principal" => ("principals", "notPrincipals"),
            "source.ip" => ("ipBlocks", "notIpBlocks"),
            "destination.port" => ("ports", "notPorts"),
            "destination.ip" => ("destinationIps", "notDestinationIps"),
            _ => ("", ""),
        };
        let mut conditions = Conditions::new();
        conditions.insert(positive.0.to_owned(), condition.values.clone());
        if !positive.1.is_empty() {
            conditions.insert(positive.1.to_owned(), condition.not_values.clone());
        } else if condition.values.is_empty() {
            conditions.insert(String::new(), condition.not_values.clone());
        }
        add(vec![all(&conditions)]);
    }
    (proto::Rule { clauses }, unjudged)
}

/// Adds a condition to a match. Values that cannot be read are left out.
fn put(to: &mut proto::Match, name: &str, values: &[String], namespace: &str) -> Result<(), Unjudged> {
    let texts = || values.iter().map(|text| string_match(text));
    let accounts = || values.iter().map(|text| account(text, namespace));
    let mut is_whole = true;
    let mut ips = |into: &mut Vec<proto::Address>| {
        into.extend(values.iter().filter_map(|text| address(text)));
        is_whole = into.len() == values.len();
    };
    match name {
        "principals" => to.principals.extend(texts()),
        "notPrincipals" => to.not_principals.extend(texts()),
        "namespaces" => to.namespaces.extend(texts()),
        "notNamespaces" => to.not_namespaces.extend(texts()),
        "serviceAccounts" => to.service_accounts.extend(accounts()),
        "notServiceAccounts" => to.not_service_accounts.extend(accounts()),
        "ipBlocks" => ips(&mut to.source_ips),
        "notIpBlocks" => ips(&mut to.not_source_ips),
        "destinationIps" => ips(&mut to.destination_ips),
        "notDestinationIps" => ips(&mut to.not_destination_ips),
        "ports" | "notPorts" => {
            let into =
                if name == "ports" { &mut to.destination_ports } else { &mut to.not_destination_ports };
            into.extend(values.iter().filter_map(|text| text.parse::<u16>().ok()).map(u32::from));
            is_whole = into.len() == values.len();
        }
        _ => return Err(Unjudged),
    }
    if is_whole { Ok(()) } else { Err(Unjudged) }
}

fn string_match(text: &str) -> proto::StringMatch {
    let kind = match (text, text.strip_prefix('*'), text.strip_suffix('*')) {
        ("*", ..) => MatchType::Presence(()),
        (_, Some(suffix), _) => MatchType::Suffix(suffix.to_owned()),
        (_, None, Some(prefix)) => MatchType::Prefix(prefix.to_owned()),
        (_, None, None) => MatchType::Exact(text.to_owned()),
    };
    proto::StringMatch { match_type: Some(kind) }
}

fn account(text: &str, namespace: &str) -> proto::ServiceAccountMatch {
    let (namespace, account) = text.split_once('/').unwrap_or((namespace, text));
    proto::ServiceAccountMatch { namespace: namespace.to_owned(), service_account: account.to_owned() }
}

fn address(text: &str) -> Option<proto::Address> {
    let block = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
    let address = match block.addr() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    Some(proto::Address { address, length: block.prefix_len().into() })
}

/// The acceptance of connections without mutual TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum MutualTls {
    /// The mode of the namespace, or else of the mesh, applies.
    #[default]
    Unset,
    /// They are accepted, as well as those with it.
    Permissive,
    /// They are accepted, and mutual TLS is not.
    Disable,
    /// They are refused.
    Strict,
}

impl MutualTls {
    /// Reads a mode. A mode that is not known refuses connections, rather than to accept what it may refuse.
    pub(super) fn read(text: &str) -> Self {
        match text {
            "" | "UNSET" => Self::Unset,
            "PERMISSIVE" => Self::Permissive,
            "DISABLE" => Self::Disable,
            _ => Self::Strict,
        }
    }

    /// Returns this mode, or `other` if it is not set.
    pub(super) fn or(self, other: Self) -> Self {
        if self == Self::Unset { other } else { self }
    }
}

/// Returns the encoded policy that refuses all connections without mutual TLS.
pub(super) fn static_strict(root: &str) -> Vec<u8> {
    let without_identity =
        proto::Match { not_principals: vec![string_match("*")], ..proto::Match::default() };
    denying(STATIC_STRICT.to_owned(), root, vec![rule(vec![without_identity])])
}

/// Returns the encoded policy of a workload whose ports differ in their modes; `None` if no port differs from `mode`.
pub(super) fn of_ports(
    name: &str,
    namespace: &str,
    mode: MutualTls,
    ports: &BTreeMap<u16, MutualTls>,
) -> Option<Vec<u8>> {
    let is_strict = mode == MutualTls::Strict;
    let differs = |of: &MutualTls| (of.or(mode) == MutualTls::Strict) != is_strict;
    let others = ports.iter().filter(|(_, of)| differs(of)).map(|(port, _)| u32::from(*port));
    let others: Vec<u32> = others.collect();
    if others.is_empty() {
        return None;
    }
    let without_identity = || vec![string_match("*")];
    let one = if is_strict {
        // Without mutual TLS, and to none of these ports.
        proto::Match {
            not_principals: without_identity(),
            not_destination_ports: others,
            ..proto::Match::default()
        }
    } else {
        proto::Match {
            not_principals: without_identity(),
            destination_ports: others,
            ..proto::Match::default()
        }
    };
    let name = format!("{OF_PEER_AUTHENTICATION}{name}");
    Some(denying(name, namespace, vec![rule(vec![one])]))
}

fn rule(matches: Vec<proto::Match>) -> proto::Rule {
    proto::Rule { clauses: vec![proto::Clause { matches }] }
}

fn denying(name: String, namespace: &str, rules: Vec<proto::Rule>) -> Vec<u8> {
    let message = proto::Authorization {
        name,
        namespace: namespace.to_owned(),
        scope: proto::Scope::WorkloadSelector.into(),
        action: proto::Action::Deny.into(),
        rules,
        dry_run: false,
    };
    message.encode_to_vec()
}

#[cfg(test)]
mod tests;
