//! Export rules by service: the rules that cover a service port, and whether they admit a caller. [`grant`], called by `admit`,
//! is the only place that applies the sources, identities, clusters and marks of a rule.

use std::net::IpAddr;
use std::sync::Arc;

use super::port_endpoint::PortEndpoint;
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::{Identity, IdentityPattern};
use isthmus_model::name::NamePattern;
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_registry::change::{Mark, MarkKind};
use isthmus_registry::name_index::PatternMap;
use isthmus_settings::export::{ExportRule, MarkCondition};
use isthmus_settings::export_tls::{AskedBy, ExportTls, Guard};
use isthmus_settings::scope::admits;

/// The export rules, with an index by name pattern.
#[derive(Clone, Debug, Default)]
pub struct ExportIndex {
    rules: Vec<Arc<ExportRule>>,
    by_name: PatternMap<Arc<[usize]>>,
}

/// The result of export rules that admit a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The first rule that admits the caller.
    pub rule: Arc<ExportRule>,
    /// The endpoints that the admitting rules offer together.
    pub offer: Offer,
}

/// The endpoints that rules offer to a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The clusters whose endpoints are offered.
    pub clusters: OfferedClusters,
    /// The part of these clusters that rules with `tls: own` offer.
    pub own: OfferedClusters,
}

/// A set of clusters; `None`: all.
pub type OfferedClusters = Option<Arc<[ClusterId]>>;

impl Offer {
    /// Returns the offer of a single rule, with these clusters.
    pub fn of(clusters: OfferedClusters, tls: ExportTls) -> Self {
        let own = match tls {
            ExportTls::Mesh => Some(Arc::default()),
            ExportTls::Own => clusters.clone(),
        };
        Self { clusters, own }
    }

    /// Returns the widest [`ExportTls`] of the rules.
    pub fn tls(&self) -> ExportTls {
        if self.own.as_ref().is_some_and(|own| own.is_empty()) { ExportTls::Mesh } else { ExportTls::Own }
    }

    /// Returns true if rules with `tls: own` offer all of the clusters.
    pub fn is_own(&self) -> bool {
        match (&self.clusters, &self.own) {
            (_, None) => true,
            (None, Some(_)) => false,
            (Some(clusters), Some(own)) => {
                clusters.iter().all(|cluster| own.contains(cluster)) && !own.is_empty()
            }
        }
    }

    /// Returns true if an endpoint is offered to callers by this kind of name.
    pub fn has(&self, endpoint: &PortEndpoint<'_>, asked: AskedBy) -> bool {
        let clusters = if endpoint.needs_own(asked) { &self.own } else { &self.clusters };
        is_among(clusters, &endpoint.origin.cluster)
    }
}

/// Returns true if a set of clusters has this one.
pub fn is_among(clusters: &OfferedClusters, cluster: &ClusterId) -> bool {
    clusters.as_ref().is_none_or(|clusters| clusters.contains(cluster))
}

/// A service as one registry marks it.
#[derive(Clone, Copy, Debug)]
pub struct Marked<'a> {
    /// The cluster of the registry.
    pub cluster: &'a ClusterId,
    /// The marks of the service.
    pub marks: &'a [Mark],
    /// The least that a rule must name to offer the service; `None`: nothing more than the service.
    pub guard: Option<Guard<'a>>,
}

impl ExportIndex {
    /// Indexes the rules of a policy.
    pub fn new(rules: &[Arc<ExportRule>]) -> Self {
        let mut by_name: PatternMap<Vec<usize>> = PatternMap::default();
        let mut patterns: Vec<&NamePattern> = Vec::new();
        for (index, rule) in rules.iter().enumerate() {
            for pattern in &rule.services {
                let mut indices = by_name.get(pattern).cloned().unwrap_or_default();
                if indices.is_empty() {
                    patterns.push(pattern);
                }
                if indices.last() != Some(&index) {
                    indices.push(index);
                }
                by_name.insert(pattern.clone(), indices);
            }
        }
        let mut frozen = PatternMap::default();
        for pattern in patterns {
            if let Some(indices) = by_name.get(pattern) {
                frozen.insert(pattern.clone(), indices.as_slice().into());
            }
        }
        Self { rules: rules.to_vec(), by_name: frozen }
    }

    /// Returns the rules that cover a service port, for any caller, in the order of the file.
    pub fn covering(&self, hostname: &str, port: u16) -> Vec<Arc<ExportRule>> {
        let mut indices: Vec<usize> =
            self.by_name.matching(hostname).flat_map(|indices| indices.iter().copied()).collect();
        indices.sort_unstable();
        indices.dedup();
        indices
            .into_iter()
            .map(|index| &self.rules[index])
            .filter(|rule| rule.ports.is_empty() || rule.ports.contains(&port))
            .filter(|rule| !rule.except.iter().any(|pattern| pattern.matches(hostname)))
            .cloned()
            .collect()
    }

    /// Returns the rules that apply to a service port, in the order of the file. `marked` is the service in each cluster. A rule is
    /// limited to the clusters that do not hide the service, that have the mark which the rule requires, and whose guard the rule names; without such a cluster it does not apply.
    pub fn applying(&self, name: &str, port: u16, marked: &[Marked<'_>]) -> Vec<Arc<ExportRule>> {
        self.covering(name, port).into_iter().filter_map(|rule| narrowed(rule, name, marked)).collect()
    }

    /// Returns the rules that cover a service port but do not apply, because each cluster lacks the mark that they require, hides
    /// the service, or guards it by what they do not name.
    pub fn not_applying(&self, name: &str, port: u16, applying: &[Arc<ExportRule>]) -> Vec<Arc<ExportRule>> {
        let applies = |rule: &ExportRule| applying.iter().any(|applied| applied.name == rule.name);
        self.covering(name, port).into_iter().filter(|rule| !applies(rule)).collect()
    }

    /// Returns true if there are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

/// Returns the host name in the setting that keeps the service to its own cluster, if one of the marks has it.
pub(super) fn cluster_local(marks: &[Mark]) -> Option<&str> {
    marks.iter().find(|mark| mark.kind == MarkKind::ClusterLocal).map(|mark| &*mark.key.object)
}

/// Returns true if one of the marks hides the service from the gateway.
pub(super) fn is_hidden(marks: &[Mark]) -> bool {
    marks.iter().any(|mark| mark.kind == MarkKind::Hidden)
}

/// Returns true if one of the marks satisfies the condition.
pub fn is_met_by(condition: &MarkCondition, marks: &[Mark]) -> bool {
    let has = |mark: &Mark, kind, wanted: &Labels| mark.kind == kind && mark.labels.has_all(wanted);
    marks.iter().any(|mark| match condition {
        MarkCondition::ServiceExport => mark.kind == MarkKind::ServiceExport,
        MarkCondition::Labels(wanted) => has(mark, MarkKind::Service, wanted),
        MarkCondition::NamespaceLabels(wanted) => has(mark, MarkKind::Namespace, wanted),
    })
}

/// Limits a rule to those of its clusters that do not hide the service, in which the service has the mark that the rule
/// requires, and whose guard the rule names; `None` if there is no such cluster. Returns a rule that
/// requires no mark unchanged if no cluster hides or guards the service.
fn narrowed(rule: Arc<ExportRule>, hostname: &str, marked: &[Marked<'_>]) -> Option<Arc<ExportRule>> {
    let is_shut = |one: &Marked<'_>| {
        is_hidden(one.marks) || one.guard.is_some_and(|guard| !guard.is_named(&rule.services, hostname))
    };
    if rule.marked.is_none() && !marked.iter().any(is_shut) {
        return Some(rule);
    }
    let is_met = |marks: &[Mark]| rule.marked.as_ref().is_none_or(|condition| is_met_by(condition, marks));
    let offered = marked.iter().filter(|one| !is_shut(one) && is_met(one.marks));
    let mut clusters: Vec<ClusterId> = offered.map(|one| one.cluster.clone()).collect();
    clusters.retain(|cluster| rule.has_cluster(cluster));
    clusters.sort_unstable();
    clusters.dedup();
    (!clusters.is_empty()).then(|| Arc::new(ExportRule { clusters, ..(*rule).clone() }))
}

/// The caller to which export rules are applied.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The listener that accepted the connection.
    pub listener: &'a str,
    /// The caller's address; `None` only in `explain`.
    pub source: Option<IpAddr>,
    /// The caller's verified identity.
    pub identity: Option<&'a Identity>,
    /// True if the caller belongs to no peer. A caller of a peer can be admitted only by rules that name identities, since all
    /// other rules are meant for this mesh.
    pub is_ours: bool,
}

/// Applies the rules that cover a service port to a caller. Returns the reason if none of them admits the caller.
pub fn grant(covering: &[Arc<ExportRule>], caller: Caller<'_>) -> Result<Grant, Reason> {
    let Caller { listener, source, identity, is_ours } = caller;
    let mut refusal = Reason::NotExported;
    let mut first = None;
    let (mut clusters, mut own) = (Some(Vec::new()), Some(Vec::new()));
    let is_meant = |rule: &&Arc<ExportRule>| is_ours || !rule.to.identities.is_empty();
    for rule in covering.iter().filter(|rule| rule.on_listener(listener)).filter(is_meant) {
        // Without a source, which happens only in `explain`, rules about sources are shown, not applied.
        if source.is_some_and(|source| !admits(&rule.to.cidrs, source)) {
            continue;
        }
        if !rule.to.identities.is_empty() {
            let Some(identity) = identity else {
                refusal = Reason::IdentityRequired;
                continue;
            };
            if !rule.to.identities.iter().any(|pattern| pattern.matches(identity)) {
                // Only callers of a trust domain that a rule names learn that the service exists; other callers cannot probe
                // for it.
                let mut domains = rule.to.identities.iter().map(IdentityPattern::trust_domain);
                if domains.any(|domain| domain == identity.trust_domain()) {
                    refusal = Reason::IdentityDenied;
                }
                continue;
            }
        }
        first.get_or_insert(rule);
        add(&mut clusters, rule);
        if rule.tls() == ExportTls::Own {
            add(&mut own, rule);
        }
    }
    let Some(rule) = first else {
        return Err(refusal);
    };
    let offer = Offer { clusters: clusters.map(Into::into), own: own.map(Into::into) };
    Ok(Grant { rule: rule.clone(), offer })
}

/// Adds the clusters of a rule to a set; `None`: all clusters.
fn add(clusters: &mut Option<Vec<ClusterId>>, rule: &ExportRule) {
    match clusters {
        Some(all) if !rule.clusters.is_empty() => all.extend(rule.clusters.iter().cloned()),
        _ => *clusters = None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::host_name;
    use isthmus_model::service::ServiceKey;
    use isthmus_registry::change::MarkKey;
    use isthmus_settings::export::ExportScope;

    fn rule(services: &[&str]) -> ExportRule {
        ExportRule {
            name: "exports[0]".into(),
            services: services.iter().map(|text| NamePattern::parse(text).expect("legal")).collect(),
            except: Vec::new(),
            ports: Vec::new(),
            clusters: Vec::new(),
            marked: None,
            listeners: Vec::new(),
            to: ExportScope::default(),
            tls: None,
        }
    }

    #[test]
    fn rules_cover_by_name_port_and_exception() {
        let narrow = ExportRule { ports: vec![443], ..rule(&["*.shop.mesh", "a.shop.mesh"]) };
        let except =
            ExportRule { except: vec![NamePattern::parse("b.shop.mesh").expect("legal")], ..rule(&["*"]) };
        let index = ExportIndex::new(&[narrow.clone().into(), except.clone().into()]);
        assert_eq!(index.covering("a.shop.mesh", 443), [narrow.clone().into(), except.clone().into()]);
        assert_eq!(index.covering("a.shop.mesh", 80), [except.into()]);
        assert_eq!(index.covering("b.shop.mesh", 443), [narrow.into()]);
        assert_eq!(index.covering("b.shop.mesh", 80), []);
    }

    #[test]
    fn a_rule_does_not_apply_in_clusters_that_hide_the_service() {
        let mark = |kind, object: &str| Mark {
            key: MarkKey {
                service: ServiceKey { namespace: "shop".into(), hostname: host_name("a.shop.mesh") },
                object: object.into(),
            },
            kind,
            labels: Labels::default(),
            export: None,
        };
        let hidden = [mark(MarkKind::Hidden, "exportTo")];
        let exported = [mark(MarkKind::ServiceExport, "ServiceExport shop/a")];
        let (east, west) = (ClusterId::new("east"), ClusterId::new("west"));
        let marked = ExportRule { marked: Some(MarkCondition::ServiceExport), ..rule(&["*"]) };
        let clusters = |rule: &ExportRule, marks: &[(&ClusterId, &[Mark])]| {
            let marked = marks.iter().map(|(cluster, marks)| Marked { cluster, marks, guard: None });
            let marked: Vec<Marked<'_>> = marked.collect();
            let applying = ExportIndex::new(&[rule.clone().into()]).applying("a.shop.mesh", 80, &marked);
            let names = |rule: &Arc<ExportRule>| rule.clusters.iter().map(ToString::to_string).collect();
            applying.first().map(names)
        };
        let names = |all: &[&str]| Some(all.iter().map(ToString::to_string).collect::<Vec<String>>());
        for rule in [&rule(&["*"]), &marked] {
            assert_eq!(clusters(rule, &[(&east, &hidden), (&west, &exported)]), names(&["west"]));
            assert_eq!(clusters(rule, &[(&east, &hidden)]), None);
        }
        assert_eq!(clusters(&rule(&["*"]), &[(&east, &exported), (&west, &[])]), names(&[]), "all clusters");
        let both = [hidden[0].clone(), exported[0].clone()];
        assert_eq!(clusters(&marked, &[(&east, &both)]), None, "no mark outweighs it");
    }

    #[test]
    fn clusters_are_the_union_of_the_rules_that_let_in() {
        let of = |cluster: &str, cidr: &str| {
            let to = ExportScope { cidrs: vec![cidr.parse().expect("legal")], identities: Vec::new() };
            Arc::new(ExportRule { clusters: vec![ClusterId::new(cluster)], to, ..rule(&["*"]) })
        };
        let rules = [of("west", "10.0.0.0/8"), of("east", "10.1.0.0/16"), of("north", "192.168.0.0/16")];
        let clusters = |source: &str| {
            let source = Some(source.parse().expect("legal"));
            let granted = grant(&rules, Caller { listener: "l", source, identity: None, is_ours: true })?;
            Ok(granted
                .offer
                .clusters
                .expect("restricted")
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>())
        };
        assert_eq!(clusters("10.1.2.3"), Ok(vec!["west".to_owned(), "east".to_owned()]));
        assert_eq!(clusters("10.2.2.3"), Ok(vec!["west".to_owned()]));
        assert_eq!(clusters("172.16.0.1"), Err(Reason::NotExported));
    }

    #[test]
    fn a_rule_with_identities_says_so_to_those_who_have_none() {
        let pattern = IdentityPattern::parse("spiffe://td/ns/shop/*").expect("legal");
        let to = ExportScope { cidrs: Vec::new(), identities: vec![pattern] };
        let rules = [Arc::new(ExportRule { to, ..rule(&["*"]) })];
        let ask = |identity: Option<&str>| {
            let identity = identity.map(|text| Identity::parse(text).expect("legal"));
            let caller = Caller { listener: "l", source: None, identity: identity.as_ref(), is_ours: true };
            grant(&rules, caller).map(|_| ())
        };
        assert_eq!(ask(None), Err(Reason::IdentityRequired));
        assert_eq!(ask(Some("spiffe://td/ns/other/sa/a")), Err(Reason::IdentityDenied));
        assert_eq!(ask(Some("spiffe://other/ns/shop/sa/a")), Err(Reason::NotExported));
        assert_eq!(ask(Some("spiffe://td/ns/shop/sa/a")), Ok(()));
    }

    #[test]
    fn a_rule_admits_callers_of_peers_only_by_their_identity() {
        let pattern = IdentityPattern::parse("spiffe://west/ns/shop/*").expect("legal");
        let named = ExportScope { cidrs: Vec::new(), identities: vec![pattern] };
        let everybody = [Arc::new(rule(&["*"]))];
        let west = [Arc::new(ExportRule { to: named, ..rule(&["*"]) })];
        let ask = |rules: &[Arc<ExportRule>], is_ours| {
            let identity = Identity::parse("spiffe://west/ns/shop/sa/a").expect("legal");
            grant(rules, Caller { listener: "l", source: None, identity: Some(&identity), is_ours })
                .map(|_| ())
        };
        assert_eq!((ask(&everybody, true), ask(&everybody, false)), (Ok(()), Err(Reason::NotExported)));
        assert_eq!(ask(&west, false), Ok(()));
    }
}
