//! The steps and warnings of `explain` about the limits of connections in all, per source, per service and per peer: the limits, and
//! how much of them is used.

use std::net::IpAddr;

use isthmus_decisions::decision::RouteMatch;
use isthmus_model::reason::Reason;
use isthmus_net::admission::Admission;
use isthmus_net::admission::bandwidth::{Bandwidths, Owner};
use isthmus_net::admission::services::Services;
use isthmus_net::admission::sources::Usage;
use isthmus_settings::limits::Limits;
use isthmus_settings::policy::Policy;

/// The counters of current use that are compared with the limits.
#[derive(Clone, Copy)]
pub struct Counters<'a> {
    /// The current numbers of connections per source, which the limits per source refer to.
    pub admission: &'a Admission,
    /// The current numbers of connections and streams per service, which the limit per service refers to.
    pub services: &'a Services,
    /// The current use of the limits of bandwidth.
    pub bandwidths: &'a Bandwidths,
}

/// A step of an explanation with its warnings.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// The limits and their use; `None` if there are no limits.
    pub(super) step: Option<String>,
    /// One warning for each limit that is used to four fifths or more.
    pub(super) warnings: Vec<String>,
}

/// Returns a warning if a gateway runs and uses the limit of all connections to four fifths or more.
pub(super) fn of_gateway(counters: Option<Counters<'_>>) -> Option<String> {
    let Counters { admission, .. } = counters?;
    let (used, limit) = (number(admission.used()), number(admission.limit()));
    warning(Reason::LimitGlobal, "the gateway", used, limit, "connections", "limits.connections")
}

/// Describes the limits that apply to the caller's source. The description says how much of each limit is used if the source is
/// known and a gateway runs.
pub(super) fn of_source(limits: &Limits, source: Option<IpAddr>, counters: Option<Counters<'_>>) -> Said {
    let usage = source.and_then(|source| Some(counters?.admission.usage(source)));
    let of = &limits.per_source;
    let who = match (&usage, source) {
        (Some(usage), _) => usage.source.clone(),
        (None, Some(source)) => of.prefix.text(source),
        (None, None) => "each source".to_owned(),
    };
    let used = |of: fn(&Usage) -> u64| usage.as_ref().map(of);
    let numbers = [
        (of.connections.map(number), used(|usage| number(usage.connections)), "connections", "connections"),
        (
            of.new_per_second.map(u64::from),
            used(|usage| usage.new_connections),
            "new connections per second",
            "newPerSecond",
        ),
        (
            of.pending_hellos.map(number),
            used(|usage| number(usage.pending_hellos)),
            "incomplete hellos",
            "pendingHellos",
        ),
    ];
    let mut said = Said::default();
    let mut parts = Vec::new();
    for (limit, used, what, key) in numbers {
        let Some(limit) = limit else { continue };
        parts.push(part(limit, used, what));
        let key = format!("limits.perSource.{key}");
        said.warnings
            .extend(used.and_then(|used| warning(Reason::LimitSource, &who, used, limit, what, &key)));
    }
    if !parts.is_empty() {
        said.step = Some(format!("limits of {who} (limits.perSource): {}", parts.join(", ")));
    }
    said
}

/// Describes the limits of the service or route that a name means.
pub(super) fn of_service(limits: &Limits, matched: &RouteMatch, counters: Option<Counters<'_>>) -> Said {
    let Some(key) = matched.limit_key() else { return Said::default() };
    let who = key.to_string();
    let mut said = Said::default();
    let mut parts = Vec::new();
    if let Some(limit) = limits.per_service.map(number) {
        let used = counters.map(|counters| number(counters.services.used(&key)));
        let what = "connections";
        parts.push(part(limit, used, what));
        said.warnings.extend(used.and_then(|used| {
            warning(Reason::LimitService, &who, used, limit, what, "limits.perService.connections")
        }));
    }
    parts.extend(limits.bytes_per_second.map(|limit| bandwidth(limit, &Owner::Service(key), counters)));
    said.step =
        (!parts.is_empty()).then(|| format!("limits of {who} (limits.perService): {}", parts.join(", ")));
    said
}

/// Describes the limit of bandwidth of the caller's peer.
pub(super) fn of_peer(policy: &Policy, matched: &RouteMatch, counters: Option<Counters<'_>>) -> Said {
    let peer = matched.peer.as_ref().and_then(|name| policy.peers.iter().find(|peer| peer.name == *name));
    let step = peer.and_then(|peer| {
        let owner = Owner::Peer(peer.name.clone());
        let part = bandwidth(peer.limits.bytes_per_second?, &owner, counters);
        Some(format!("limits of {owner} (peers[].limits): {part}"))
    });
    Said { step, warnings: Vec::new() }
}

fn bandwidth(limit: u64, owner: &Owner, counters: Option<Counters<'_>>) -> String {
    let used = counters.map(|counters| {
        let used = counters.bandwidths.usage_of(owner).map(|usage| (usage.moved, usage.busy_sources));
        let ([up, down], [sources_up, sources_down]) = used.unwrap_or_default();
        format!(" ({up} up and {down} down in use, by {sources_up} and {sources_down} busy sources)")
    });
    format!("{limit} bytes per second in each direction{}", used.unwrap_or_default())
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn part(limit: u64, used: Option<u64>, what: &str) -> String {
    match used {
        Some(used) => format!("{used} of {limit} {what} in use"),
        None => format!("{limit} {what}"),
    }
}

fn warning(reason: Reason, who: &str, used: u64, limit: u64, what: &str, key: &str) -> Option<String> {
    if used >= limit {
        return Some(format!(
            "{reason}: {who} has reached the limit of {limit} {what} ({key}); the gateway refuses more"
        ));
    }
    let near = used.saturating_mul(5) >= limit.saturating_mul(4);
    near.then(|| {
        format!("{who} uses {used} of {limit} {what} ({key}); at the limit the gateway refuses more with the reason {reason}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::limits::{ServiceLimitKey, SourceLimits};
    use isthmus_net::admission::services::Handles;
    use isthmus_net::admission::{Holder, Verdict};

    #[test]
    fn the_use_of_each_limit_is_in_a_step_and_near_the_limit_in_a_warning() {
        let per_source = SourceLimits {
            connections: Some(2),
            new_per_second: Some(1_000),
            pending_hellos: Some(5),
            ..SourceLimits::default()
        };
        let limits = Limits { per_source, per_service: Some(5), ..Limits::default() };
        let source = IpAddr::from([10, 0, 0, 1]);
        let offline = of_source(&limits, None, None);
        assert_eq!(
            offline.step.as_deref(),
            Some(
                "limits of each source (limits.perSource): 2 connections, 1000 new connections per second, 5 incomplete hellos"
            )
        );
        assert!(offline.warnings.is_empty());
        let (admission, services, handles) = (Admission::new(100), Services::default(), Handles::default());
        admission.set_source_limits(&per_source);
        services.set_limit(limits.per_service);
        let bandwidths = Bandwidths::default();
        let counters = Some(Counters { admission: &admission, services: &services, bandwidths: &bandwidths });
        for _ in 0..2 {
            assert_eq!(admission.admit(&admission.source(source)), Verdict::Admit);
        }
        assert_eq!(of_gateway(counters), None);
        let full = Admission::new(2);
        for _ in 0..2 {
            assert_eq!(full.admit(&full.source(source)), Verdict::Admit);
        }
        assert_eq!(
            of_gateway(Some(Counters { admission: &full, services: &services, bandwidths: &bandwidths }))
                .as_deref(),
            Some(
                "limit_global: the gateway has reached the limit of 2 connections (limits.connections); the gateway refuses more"
            )
        );
        assert_eq!(of_gateway(None), None);
        let said = of_source(&limits, Some(source), counters);
        assert!(
            said.step.is_some_and(
                |step| step.contains("limits of 10.0.0.1 ") && step.contains("2 of 2 connections")
            )
        );
        assert_eq!(
            said.warnings,
            [
                "limit_source: 10.0.0.1 has reached the limit of 2 connections (limits.perSource.connections); the gateway \
                 refuses more"
            ]
        );
        let matched = RouteMatch { rule: Some("a.test".into()), ..RouteMatch::default() };
        let _places: Vec<_> =
            (0..4).map(|_| handles.admit(&services, &ServiceLimitKey::Route("a.test".into()))).collect();
        let said = of_service(&limits, &matched, counters);
        assert_eq!(
            said.step.as_deref(),
            Some("limits of the route \"a.test\" (limits.perService): 4 of 5 connections in use")
        );
        assert_eq!(said.warnings.len(), 1, "{said:?}");
        let owner = Owner::Service(ServiceLimitKey::Route("a.test".into()));
        let member = bandwidths.join(owner, 9_000, Holder::Unannounced);
        member.measure(0, 0, false);
        member.measure(1, 700, false);
        let limits = Limits { per_service: None, bytes_per_second: Some(9_000), ..limits };
        assert_eq!(
            of_service(&limits, &matched, counters).step.as_deref(),
            Some(
                "limits of the route \"a.test\" (limits.perService): 9000 bytes per second in each direction (0 up and 700 down in use, by 0 and 1 busy sources)"
            )
        );
        assert!(of_source(&Limits::default(), Some(source), counters).step.is_none());
        assert!(of_service(&limits, &RouteMatch::default(), counters).step.is_none());
    }
}
