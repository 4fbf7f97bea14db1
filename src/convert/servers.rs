//! The parameters of `server` and `default-server` lines of HAProxy.

use std::collections::BTreeSet;

use super::draft::{Draft, Fate, Health};
use super::values::{milliseconds, time};
use super::words::Line;

/// The parameters of a `server` line that have a value and are not converted.
const VALUED: [&str; 36] = [
    "addr",
    "agent-addr",
    "agent-inter",
    "agent-port",
    "agent-send",
    "alpn",
    "ca-file",
    "ciphers",
    "ciphersuites",
    "cookie",
    "crl-file",
    "crt",
    "curves",
    "downinter",
    "error-limit",
    "fastinter",
    "id",
    "init-state",
    "maxqueue",
    "minconn",
    "namespace",
    "npn",
    "observe",
    "on-error",
    "on-marked-down",
    "on-marked-up",
    "pool-max-conn",
    "port",
    "proto",
    "proxy-v2-options",
    "redir",
    "slowstart",
    "sni",
    "source",
    "track",
    "verify",
];

/// Returns the parameter of a `server` line with this name, if it has no value and `no-` before it undoes it.
fn switch(word: &str) -> Option<&'static str> {
    const SWITCHES: [&str; 7] =
        ["check", "check-ssl", "send-proxy", "send-proxy-v2", "ssl", "disabled", "backup"];
    SWITCHES.into_iter().find(|switch| *switch == word)
}

/// The parameters of a `server` line.
#[derive(Clone, Debug)]
pub(super) struct ServerSettings {
    /// The parameters without a value that are on.
    switches: BTreeSet<&'static str>,
    pub(super) health: Health,
    pub(super) weight: u32,
    /// The value of `maxconn`; `None`: there is no limit.
    pub(super) connections_max: Option<u32>,
}

impl ServerSettings {
    /// Reads the parameters of a `server` or `default-server` line, on top of those read before.
    pub(super) fn read(&mut self, line: &Line, words: &[&str], draft: &mut Draft) {
        let mut rest = words;
        while let Some((word, after)) = rest.split_first() {
            rest = after;
            let value = after.first().copied().unwrap_or_default();
            let number = value.parse::<u32>().ok();
            let count = number.map(|number| number.clamp(1, 1_000_000));
            let takes_value = match *word {
                "inter" => {
                    self.health.interval = time(value);
                    if self.health.interval.as_deref().is_some_and(|time| milliseconds(time) < 100) {
                        let text = format!("`inter {value}`: the shortest interval of checks is 100ms");
                        draft.remark(line.number, Fate::Differs, text);
                        self.health.interval = Some("100ms".to_owned());
                    }
                    true
                }
                "fall" => {
                    self.health.unhealthy_after = count;
                    true
                }
                "rise" => {
                    self.health.healthy_after = count;
                    true
                }
                "check-sni" => {
                    self.health.tls = Some(value.to_owned());
                    true
                }
                "weight" => {
                    self.weight = number.unwrap_or(1);
                    true
                }
                "maxconn" => {
                    // 0 is as if the parameter were missing.
                    self.connections_max = count.filter(|_| number != Some(0));
                    true
                }
                "enabled" => {
                    self.switches.remove("disabled");
                    false
                }
                word if switch(word).is_some() => {
                    self.switches.extend(switch(word));
                    false
                }
                word if word.strip_prefix("no-").and_then(switch).is_some() => {
                    self.switches.remove(word.trim_start_matches("no-"));
                    false
                }
                "resolvers" | "init-addr" | "resolve-prefer" => {
                    let text = format!("`{word} {value}`: a name is looked up again when its TTL has passed");
                    draft.remark(line.number, Fate::NotNeeded, text);
                    true
                }
                word => {
                    let takes = VALUED.contains(&word);
                    let value = if takes { format!(" {value}") } else { String::new() };
                    let text = format!("the parameter `{word}{value}` of a server has no counterpart");
                    draft.remark(line.number, Fate::NotConverted, text);
                    takes
                }
            };
            if takes_value {
                rest = rest.get(1..).unwrap_or_default();
            }
        }
    }

    pub(super) fn is(&self, switch: &str) -> bool {
        self.switches.contains(switch)
    }

    /// Returns the settings of checks, with the timeout of the backend; `None`: there are none. `check-sni` needs `check-ssl`.
    pub(super) fn health(&self, timeout: Option<&String>) -> Option<Health> {
        let tls = self.health.tls.clone().filter(|_| self.is("check-ssl"));
        let is_nameless = tls.is_none() && (self.health.is_nameless || self.is("check-ssl"));
        self.is("check").then(|| Health {
            timeout: timeout.cloned(),
            tls,
            is_nameless,
            ..self.health.clone()
        })
    }

    /// Returns the value of `sendProxyProtocol`. With both parameters, HAProxy sends version 2.
    pub(super) fn send_proxy(&self) -> Option<&'static str> {
        if self.is("send-proxy-v2") { Some("v2") } else { self.is("send-proxy").then_some("v1") }
    }

    /// Returns the reason why the server cannot be an endpoint.
    pub(super) fn left_out(&self) -> Option<&'static str> {
        let reasons = [
            ("disabled", "the server is disabled"),
            ("ssl", "`ssl` encrypts the connection to the server, which isthmus does not do"),
        ];
        reasons.into_iter().find(|(switch, _)| self.is(switch)).map(|(_, reason)| reason)
    }
}

impl Default for ServerSettings {
    fn default() -> Self {
        // These are the defaults of HAProxy, which differ from those of isthmus.
        let health = Health {
            interval: Some("2s".to_owned()),
            timeout: None,
            unhealthy_after: Some(3),
            healthy_after: Some(2),
            ..Health::default()
        };
        Self { switches: BTreeSet::new(), health, weight: 1, connections_max: None }
    }
}
