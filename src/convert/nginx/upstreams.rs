//! Upstreams: their servers become endpoints.

use super::Conversion;
use crate::blocks::Directive;
use crate::draft::{Endpoint, Fate, Target};
use crate::rules::Rule;
use crate::values::server_address;

/// An `upstream` block.
pub(super) struct Upstream<'a> {
    pub(super) directive: &'a Directive,
    /// True once something leads to it.
    pub(super) is_used: bool,
}

impl Conversion<'_> {
    /// Returns the endpoints of an upstream, and the rules that stand for directives that are not understood; `None` if there is no
    /// upstream of this name.
    pub(super) fn upstream(&mut self, name: &str) -> Option<(Target, Vec<Rule>)> {
        let upstream = self.upstreams.get_mut(name)?;
        upstream.is_used = true;
        let directive = upstream.directive;
        let mut target = Target { backend: name.to_owned(), policy: Some("roundRobin"), ..Target::default() };
        let mut unread = Vec::new();
        for directive in directive.inner() {
            match (directive.name(), &directive.values()[..]) {
                ("server", [address, parameters @ ..]) => {
                    target.endpoints.extend(self.endpoint(directive, address, parameters));
                }
                ("least_conn", _) => target.policy = Some("leastRequest"),
                ("random", ["two", "least_conn", ..]) => target.policy = Some("leastRequest"),
                ("random", _) => target.policy = Some("random"),
                ("hash", [key, ..]) if key.contains("remote_addr") => target.policy = Some("sourceHash"),
                ("zone" | "resolver" | "state", _) => {
                    let text = format!("{} has no effect on where connections go", directive.quoted());
                    self.draft.remark(directive.line, Fate::NotNeeded, text);
                }
                // A directive that chooses a server refuses no client.
                ("hash" | "least_time" | "ip_hash" | "keepalive", _) => {
                    self.not_converted(directive.line, format!("{} has no counterpart", directive.quoted()));
                }
                _ => {
                    if self.other(directive) {
                        unread.push(Rule::could_refuse(directive.line));
                    }
                }
            }
        }
        Some((target, unread))
    }

    fn endpoint(&mut self, directive: &Directive, text: &str, parameters: &[&str]) -> Option<Endpoint> {
        let line = directive.line;
        let Some(address) = server_address(text, None) else {
            self.not_converted(
                line,
                format!("the server {text:?} is left out: it is not the address and port of one host"),
            );
            return None;
        };
        let mut endpoint = Endpoint {
            line,
            name: text.to_owned(),
            address,
            weight: 1,
            backup: false,
            connections_max: None,
        };
        for parameter in parameters {
            let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let number = value.parse::<u32>().ok();
            match (key, number) {
                ("weight", Some(weight)) if weight > 0 => endpoint.weight = weight,
                ("backup", _) => endpoint.backup = true,
                ("max_conns", Some(0)) => {}
                ("max_conns", Some(count)) => endpoint.connections_max = Some(count.min(1_000_000)),
                ("down", _) => {
                    self.not_converted(line, format!("the server {text} is left out: it is `down`"));
                    return None;
                }
                ("max_fails" | "fail_timeout", _) => {
                    let text = format!(
                        "`{parameter}`: `ejection` of the route is on by default, after 5 failures for 30s"
                    );
                    self.draft.remark(line, Fate::Differs, text);
                }
                ("resolve", _) => {
                    self.draft.remark(
                        line,
                        Fate::NotNeeded,
                        "host names are always resolved again when their TTL has passed",
                    );
                }
                _ => self.not_converted(
                    line,
                    format!("the parameter `{parameter}` of a server has no counterpart"),
                ),
            }
        }
        Some(endpoint)
    }
}
