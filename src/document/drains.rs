//! Reads and writes planned drains: an entry of the config's `drains`, a value in etcd, an annotation, and the file in which a
//! gateway keeps its operators' orders.

use std::path;
use std::time::Duration;

use super::form;
use super::key::keys;
use super::problem::{Path, Problem, Problems};
use super::reader::{Fields, check};
use super::table::AnyKey;
use super::tree::{Node, Source, parse};
use crate::form::{Form, Written};
use isthmus_model::drain::{Drain, DrainTarget};
use isthmus_model::time::rfc3339_seconds;

keys! {
    /// A planned drain: an order that moves calls away from a part of the mesh, step by step.
    pub PlannedDrain "plannedDrain" one of [SERVICE, ENDPOINT, GATEWAY, NETWORK, CLUSTER, PEER] {
        /// Host name of the service whose endpoints are emptied.
        SERVICE "service": form::HostName => "another target";
        /// IP address of the endpoints that are emptied, with or without a port.
        ENDPOINT "endpoint": form::Text => "another target";
        /// IP address or host name of the gateways that are emptied, with or without a port.
        GATEWAY "gateway": form::Text => "another target";
        /// Network whose endpoints are emptied.
        NETWORK "network": form::NetworkName => "another target";
        /// Cluster whose endpoints are emptied.
        CLUSTER "cluster": form::ClusterName => "another target";
        /// Peer whose endpoints are emptied.
        PEER "peer": form::Text => "another target";
        /// Time at which the drain begins.
        SINCE "since": form::Time => "the drain is at its end from the start; required with `over` and `closeAfter`";
        /// Time over which the weight falls, in steps of 1/32, from all of it to `to`.
        OVER "over": form::Period = Duration::ZERO;
        /// Part of its weight that the target keeps at the end. A target that keeps nothing is used only where there is nothing
        /// else.
        TO "to": form::Percent = 0;
        /// Whether this order may give the target more than an earlier order in its place has left, up to `to`. Without it, what is left
        /// never rises while the target is drained.
        RAISE "raise": form::Boolean = false;
        /// Time at which the drain ends by itself, and the target has its whole weight again.
        UNTIL "until": form::Time => "when the order is withdrawn";
        /// Time from `since` after which existing connections are closed, oldest first, each in a pause.
        CLOSE_AFTER "closeAfter": form::Period => "existing connections are left alone";
        /// Reason of the operator, shown beside the drain.
        REASON "reason": form::Text => "none";
    }
}

/// The largest part of its weight, in percent, that a target keeps at the end.
const TO_MAX: u8 = 99;

/// The keys of the targets, of which a drain has exactly one.
const TARGETS: [&dyn AnyKey; 6] = [
    &PlannedDrain::SERVICE,
    &PlannedDrain::ENDPOINT,
    &PlannedDrain::GATEWAY,
    &PlannedDrain::NETWORK,
    &PlannedDrain::CLUSTER,
    &PlannedDrain::PEER,
];

/// Reads a drain from a map that has passed the check.
pub fn of(node: &Node, path: &Path<'_>, problems: &mut Problems) -> Option<Drain> {
    let fields = Fields::of::<PlannedDrain>(Some(node));
    let (name, at) = TARGETS.iter().find_map(|key| Some((key.name(), fields.at(*key)?)))?;
    let target = at.text().map(|text| DrainTarget::parse(name, text));
    let target = match target? {
        Ok(target) => target,
        Err(fault) => {
            problems.error(at.position, &path.key(name), fault);
            return None;
        }
    };
    let over = fields.get(&PlannedDrain::OVER);
    let close_after = fields.get(&PlannedDrain::CLOSE_AFTER);
    let (since, until) = (fields.get(&PlannedDrain::SINCE), fields.get(&PlannedDrain::UNTIL));
    if since.is_none() && (over > Duration::ZERO || close_after.is_some()) {
        let fault = "`over` and `closeAfter` are counted from `since`, which is missing; without it each replica and each \
                     restart would begin anew";
        problems.error(node.position, path, fault);
        return None;
    }
    if let (Some(until), Some(node)) = (until, fields.at(&PlannedDrain::UNTIL))
        && since.is_some_and(|since| until <= since)
    {
        problems.error(
            node.position,
            &path.key(PlannedDrain::UNTIL.name()),
            "the drain would end before it begins",
        );
        return None;
    }
    let to_percent = fields.get(&PlannedDrain::TO);
    if let Some(node) = fields.at(&PlannedDrain::TO).filter(|_| to_percent > TO_MAX) {
        let fault = format!("a target that is drained keeps at most {TO_MAX}%");
        problems.error(node.position, &path.key(PlannedDrain::TO.name()), fault);
        return None;
    }
    let reason = fields.get(&PlannedDrain::REASON).unwrap_or_default();
    let raises = fields.get(&PlannedDrain::RAISE);
    Some(Drain { target, since: since.unwrap_or(0), over, to_percent, raises, until, close_after, reason })
}

/// Parses a document that is one drain. `name` names it in problems.
pub fn read(name: &path::Path, text: &str) -> Result<Drain, Vec<Problem>> {
    let mut problems = Problems::new();
    let file = problems.add_file(name);
    let node = file.and_then(|file| parse(Source { file, text, environment: None }, None, &mut problems));
    let drain = node.and_then(|node| {
        check(&node, &PlannedDrain::KIND, &Path::Root, &mut problems);
        of(&node, &Path::Root, &mut problems)
    });
    match drain {
        Some(drain) if problems.is_empty() => Ok(drain),
        _ => Err(problems.finish().0),
    }
}

/// Returns the keys and values of the document of a drain, which [`read`] accepts.
pub fn written(drain: &Drain) -> Vec<(&'static str, String)> {
    let mut document = Vec::new();
    let mut put = |key: &dyn AnyKey, value: String| document.push((key.name(), value));
    for key in TARGETS.iter().filter(|key| key.name() == drain.target.kind()) {
        put(*key, drain.target.name());
    }
    if drain.since > 0 {
        put(&PlannedDrain::SINCE, rfc3339_seconds(drain.since));
    }
    if !drain.over.is_zero() {
        put(&PlannedDrain::OVER, form::Period::write(&drain.over));
    }
    put(&PlannedDrain::TO, form::Percent::write(&drain.to_percent));
    if drain.raises {
        // Accepted as a text, too, unlike `true`.
        put(&PlannedDrain::RAISE, "on".to_owned());
    }
    if let Some(until) = drain.until {
        put(&PlannedDrain::UNTIL, rfc3339_seconds(until));
    }
    if let Some(after) = drain.close_after {
        put(&PlannedDrain::CLOSE_AFTER, form::Period::write(&after));
    }
    if !drain.reason.is_empty() {
        put(&PlannedDrain::REASON, drain.reason.to_string());
    }
    document
}
