//! What a gateway has learnt before it is upgraded, and must know after each upgrade: the address of a host name whose server is silent,
//! a gateway that is dead, an endpoint that is ejected, a registry that is held, and what a drain has left.

use std::net::SocketAddr;
use std::time::SystemTime;

use isthmus::model::time::{rfc3339_seconds, unix_seconds};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::backend::{Backend, refusing};
use crate::support::dns::{Answer, NameServer};
use crate::support::eventually;
use crate::support::gateway::Gateway;

/// The names of the routes whose endpoint has a host name, and of which one endpoint is ejected.
pub(crate) const NAMED: &str = "named.test";
pub(crate) const EJECTED: &str = "ejected.test";
/// The number of services of the registry, which is then emptied.
const SERVICES: usize = 30;

pub(crate) struct Known {
    servers: NameServer,
    echo: SocketAddr,
    /// The address of a gateway and of an endpoint, where nobody listens.
    dead: SocketAddr,
    lives: Backend,
    registry: TempDir,
    /// The percentage that the drain left at the last look.
    left: f64,
}

impl Known {
    /// `echo` is the address of the endpoint of all routes.
    pub(crate) fn new(echo: SocketAddr) -> Self {
        let registry = tempfile::tempdir().expect("a folder");
        let (servers, lives) = (NameServer::start(), Backend::echo());
        servers.points("db.test", echo.ip());
        let known = Self { servers, echo, dead: refusing(), lives, registry, left: 100.0 };
        known.put(SERVICES);
        known
    }

    fn put(&self, services: usize) {
        let one = |number: usize| {
            format!(
                "  - {{hostname: s{number}.test, namespace: n, ports: [{{name: p, port: 443}}], endpoints: [{{address: 10.0.0.{number}}}]}}\n"
            )
        };
        let all = if services == 0 { "  []\n".to_owned() } else { (1..=services).map(one).collect() };
        let next = self.registry.path().join(".next");
        std::fs::write(&next, format!("services:\n{all}")).expect("written");
        std::fs::rename(next, self.registry.path().join("west.yaml")).expect("renamed");
    }

    /// Returns the routes, as a part of the config's `routes`.
    pub(crate) fn routes(&self) -> String {
        let Self { echo, dead, .. } = self;
        format!(
            "  {NAMED}: \"db.test:{}\"\n  {EJECTED}:\n    endpoints: [\"{dead}\", \"{echo}\"]\n    \
             ejection: {{failures: 2, time: 2h, maxShare: 50%}}\n",
            echo.port()
        )
    }

    /// Returns the other sections of the config.
    pub(crate) fn sections(&self) -> String {
        let gateways = [self.dead, self.lives.address]
            .map(|at| format!("{{address: {}, sniPort: {}}}", at.ip(), at.port()));
        format!(
            "node: {{network: east, cluster: east}}\nxds: {{bind: \"127.0.0.1:0\"}}\n\
             networks: {{west: {{gateways: [{}]}}}}\ndns: {{servers: [\"{}\"]}}\naggregator: {{withdrawalHold: 2h}}\n\
             registries: [{{file: {{path: {}/west.yaml, cluster: west, network: west}}}}]\n\
             drains: [{{network: west, since: {}, over: 30m}}]\n",
            gateways.join(", "),
            self.servers.address,
            self.registry.path().display(),
            // Some steps of the ramp are over.
            rfc3339_seconds(unix_seconds(SystemTime::now()) - 300),
        )
    }

    /// Has the gateway learn all, and then silences the name server and empties the registry. `call` calls a route.
    pub(crate) fn teach(&mut self, gateway: &Gateway, call: impl Fn(&str)) {
        eventually("the address", || {
            let problems = gateway.json("/api/v1/status")["problems"].to_string();
            (!problems.contains("db.test")).then_some(())
        });
        self.servers.answer("db.test", Answer::Silence);
        eventually("the registry", || (state_of(gateway) == "live").then_some(()));
        self.put(0);
        let mut lacking = Vec::new();
        for _ in 0..200 {
            call(EJECTED);
            lacking = self.forgotten(gateway);
            if lacking.is_empty() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("it has not learnt {lacking:?}");
    }

    /// Returns what the gateway does not know any more. What the drain leaves may only fall.
    pub(crate) fn forgotten(&mut self, gateway: &Gateway) -> Vec<String> {
        let mut forgotten = Vec::new();
        let mut expect = |what: &str, holds: bool, seen: &Value| {
            if !holds {
                forgotten.push(format!("{what}: {seen}"));
            }
        };
        let gateways = gateway.json("/api/v1/gateways");
        let dead = self.dead.to_string();
        let dead = one_of(&gateways, |one| one["probes"][0]["address"] == *dead);
        expect("the dead gateway", dead["usable"] == false, &dead);
        let explained = gateway.json(&format!("/api/v1/explain?sni={EJECTED}"));
        let ejected = one_of(&explained["candidates"], |one| one["address"] == self.dead.to_string());
        expect("the ejected endpoint", ejected["state"] == "ejected", &ejected);
        let registry = &gateway.json("/api/v1/registries")[0];
        let is_held = registry["state"] == "held" && registry["services"] == SERVICES;
        expect("the registry that is held", is_held, registry);
        let drain = &gateway.json("/api/v1/drains")[0];
        let left = drain["left_percent"].as_f64().unwrap_or(f64::MAX);
        expect("what the drain has left", left <= self.left && left < 100.0, drain);
        self.left = left.min(self.left);
        forgotten
    }

    /// Returns the percentage that the drain has left.
    pub(crate) fn left(&self) -> f64 {
        self.left
    }
}

fn state_of(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/registries")[0]["state"].clone()
}

fn one_of(all: &Value, is_it: impl Fn(&&Value) -> bool) -> Value {
    all.as_array().and_then(|all| all.iter().find(is_it)).cloned().unwrap_or_default()
}
