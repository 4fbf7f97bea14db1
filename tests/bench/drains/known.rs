//! The beliefs that a gateway must keep over each upgrade: the address of a host name whose server is silent,
//! since when a gateway is dead, an endpoint that is ejected, the end of the hold on a registry, and what a drain has left that was amended
//! since.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};

use serde_json::Value;
use socket2::SockRef;
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
/// The drain, which leaves nothing, and the document that amends it: what is left may not rise.
const DRAIN: &str = "drains: [{network: west}]";
const AMENDED: &str = "drains: [{network: west, to: 99%}]";
/// The largest difference between two ends of a hold, in milliseconds: they are times on two clocks.
const SAME_WITHIN: u64 = 1_000;

pub(crate) struct Known {
    servers: NameServer,
    echo: SocketAddr,
    /// The address of an endpoint, where nobody listens.
    dead: SocketAddr,
    /// The socket of a gateway that answers, and then dies.
    dies: TcpListener,
    lives: Backend,
    registry: TempDir,
    /// The time at which the gateway died, and the end of the hold.
    learnt: Option<(Value, u64)>,
}

impl Known {
    /// `echo` is the address of the endpoint of all routes.
    pub(crate) fn new(echo: SocketAddr) -> Self {
        let registry = tempfile::tempdir().expect("a folder");
        let (servers, lives) = (NameServer::start(), Backend::echo());
        servers.points("db.test", echo.ip());
        // Nobody else gets the port of the gateway that dies.
        let dies = TcpListener::bind(refusing()).expect("a port");
        Backend::serve(dies.try_clone().expect("a handle"), |mut stream| {
            let _ = io::copy(&mut stream.try_clone().expect("a handle"), &mut stream);
        });
        let known = Self { servers, echo, dead: refusing(), dies, lives, registry, learnt: None };
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
        let gateways = [self.dies(), self.lives.address]
            .map(|at| format!("{{address: {}, sniPort: {}}}", at.ip(), at.port()));
        format!(
            "node: {{network: east, cluster: east}}\nxds: {{bind: \"127.0.0.1:0\"}}\n\
             networks: {{west: {{gateways: [{}]}}}}\ndns: {{servers: [\"{}\"]}}\naggregator: {{withdrawalHold: 2h}}\n\
             registries: [{{file: {{path: {}/west.yaml, cluster: west, network: west}}}}]\n\
             {DRAIN}\n",
            gateways.join(", "),
            self.servers.address,
            self.registry.path().display(),
        )
    }

    fn dies(&self) -> SocketAddr {
        self.dies.local_addr().expect("bound")
    }

    /// Has the gateway learn all: silences the name server, ends the other gateway, empties the registry, and amends the drain. `call` calls
    /// a route.
    pub(crate) fn teach(&mut self, gateway: &Gateway, call: impl Fn(&str)) {
        eventually("the address", || {
            let problems = gateway.json("/api/v1/status")["problems"].to_string();
            (!problems.contains("db.test")).then_some(())
        });
        self.servers.answer("db.test", Answer::Silence);
        eventually("the registry", || (state_of(gateway) == "live").then_some(()));
        eventually("the gateway", || (self.probe(gateway)["state"] == "answers").then_some(()));
        SockRef::from(&self.dies).shutdown(Shutdown::Both).expect("it has listened");
        self.put(0);
        let mut lacking = Vec::new();
        for _ in 0..200 {
            call(EJECTED);
            lacking = self.forgotten(gateway);
            if lacking.is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        assert!(lacking.is_empty(), "it has not learnt {lacking:?}");
        let ends = eventually("the hold to be kept", || end_of_hold(gateway));
        self.learnt = Some((self.probe(gateway)["probes"][0]["since"].clone(), ends));
        let config = std::fs::read_to_string(gateway.config_path()).expect("a config");
        std::fs::write(gateway.config_path(), config.replace(DRAIN, AMENDED)).expect("written");
        assert_eq!(gateway.post("/api/v1/reload").0, 200);
    }

    /// Returns the gateway that dies.
    fn probe(&self, gateway: &Gateway) -> Value {
        let address = self.dies().to_string();
        one_of(&gateway.json("/api/v1/gateways"), |one| one["probes"][0]["address"] == *address)
    }

    /// Returns what the gateway does not know any more. The end of the hold is the one that the earlier process has written.
    pub(crate) fn forgotten(&self, gateway: &Gateway) -> Vec<String> {
        let mut forgotten = Vec::new();
        let mut expect = |what: &str, holds: bool, seen: &Value| {
            if !holds {
                forgotten.push(format!("{what}: {seen}"));
            }
        };
        let dead = self.probe(gateway);
        let is_since = self.learnt.as_ref().is_none_or(|(since, _)| dead["probes"][0]["since"] == *since);
        expect("the dead gateway", dead["usable"] == false && is_since, &dead);
        let explained = gateway.json(&format!("/api/v1/explain?sni={EJECTED}"));
        let ejected = one_of(&explained["candidates"], |one| one["address"] == self.dead.to_string());
        expect("the ejected endpoint", ejected["state"] == "ejected", &ejected);
        let registry = &gateway.json("/api/v1/registries")[0];
        let is_held = registry["state"] == "held" && registry["services"] == SERVICES;
        expect("the registry that is held", is_held, registry);
        let ends = end_of_hold(gateway);
        let is_same =
            |(_, first): &(Value, u64)| ends.is_some_and(|ends| ends.abs_diff(*first) < SAME_WITHIN);
        expect("the end of the hold", self.learnt.as_ref().is_none_or(is_same), &ends.into());
        let drain = &gateway.json("/api/v1/drains")[0];
        expect("what the drain has left", drain["left_percent"] == 0, drain);
        forgotten
    }
}

/// Returns the end of the hold in the file of beliefs, in milliseconds since 1970.
fn end_of_hold(gateway: &Gateway) -> Option<u64> {
    let beliefs = std::fs::read_to_string(gateway.folder().join("state/beliefs")).ok()?;
    let mut beliefs = beliefs.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    beliefs.find_map(|belief| belief["hold"]["until"].as_u64())
}

fn state_of(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/registries")[0]["state"].clone()
}

fn one_of(all: &Value, is_it: impl Fn(&&Value) -> bool) -> Value {
    all.as_array().and_then(|all| all.iter().find(is_it)).cloned().unwrap_or_default()
}
