//! The step that shows one service in three clusters from both networks: the endpoints that each network gets, and, if Envoy is
//! installed, the endpoints that its calls reach.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::DemoError;
use super::calls::{SHARE_TOLERANCE, SHARED_CALLS, settled};
use super::client::CallError;
use super::endpoint::{CLIENT_HEADER, ENDPOINT_HEADER};
use super::envoy::{self, Envoy};
use super::report::Outcome;
use super::stage::{CATALOG, Network, Stage};
use isthmus_api::requests;
use isthmus_console::output::cell;
use isthmus_tasks::scope::Scope;

/// The number of concurrent calls of a batch.
const AT_ONCE: usize = 4;

pub(super) async fn split(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    for (own, other) in [(&stage.east, &stage.west), (&stage.west, &stage.east)] {
        seen_from(own, other, outcome).await?;
    }
    outcome.proof("isthmus horizon, from both sides");
    match envoy::installed() {
        Some(program) => called_by_envoy(&Envoy::start(program, stage).await?, stage, outcome).await?,
        None => outcome.partly_left_out(
            "left out, because no envoy is on the PATH: the check that a client splits its calls by these weights",
        ),
    }
    Ok(())
}

/// Compares the endpoints that a viewer on `own` gets with the endpoints that run there and on the `other` network.
async fn seen_from(own: &Network, other: &Network, outcome: &mut Outcome) -> Result<(), DemoError> {
    let path = requests::HORIZON.with(&[("network", own.name), ("service", CATALOG)]);
    let horizon = own.gateway.json(&path).await?;
    let mut assigned = BTreeMap::new();
    let mut words = Vec::new();
    for entry in horizon["entries"].as_array().into_iter().flatten() {
        let (address, weight) = (cell(&entry["address"]), entry["weight"].as_u64().unwrap_or_default());
        words.push(match own.endpoint_at(&address) {
            Some(endpoint) => format!("{} {weight}", endpoint.name),
            None => format!("the {} of {} {weight}", cell(&entry["kind"]), cell(&entry["network"])),
        });
        assigned.insert(address, weight);
    }
    let near = own
        .running(CATALOG_PREFIX)
        .map(|endpoint| (endpoint.address.to_string(), u64::from(endpoint.weight)));
    let behind = other.running(CATALOG_PREFIX).map(|endpoint| u64::from(endpoint.weight)).sum();
    let gateway = (other.gateway.listener("mesh")?.to_string(), behind);
    let expected: BTreeMap<String, u64> = near.chain([gateway]).collect();
    outcome.check(assigned == expected, || format!("{} gets {assigned:?} instead of {expected:?}", own.name));
    outcome.note(format!("seen from {}, by weight: {}", own.name, words.join(", ")));
    Ok(())
}

/// The prefix of the names of the service's endpoints.
const CATALOG_PREFIX: &str = "catalog-";

/// Makes calls through Envoy, and compares the share of each endpoint with the weights.
async fn called_by_envoy(envoy: &Envoy, stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let before = stage.west.gateway.ended_well(CATALOG).await?;
    let mut shares: BTreeMap<String, usize> = BTreeMap::new();
    for call in calls(envoy.listener).await {
        match call {
            Ok(call) => {
                outcome.answered_in(call.took, call.bytes);
                outcome.check(call.client_verified, || {
                    format!("{} received no certificate from Envoy", call.endpoint)
                });
                *shares.entry(call.endpoint).or_default() += 1;
            }
            Err(error) => outcome.lost(&error),
        }
    }
    let counts: Vec<String> = shares.iter().map(|(endpoint, count)| format!("{endpoint} {count}")).collect();
    outcome.note(format!("Envoy on net-east, mutual TLS from end to end: {}", counts.join(", ")));
    let (east, west) = (stage.east.running(CATALOG_PREFIX), stage.west.running(CATALOG_PREFIX));
    let names: Vec<&str> = west.map(|endpoint| endpoint.name).collect();
    let all = east.count() + names.len();
    outcome.check(shares.len() == all, || format!("{} of {all} endpoints were called", shares.len()));
    let through = names.iter().filter_map(|name| shares.get(*name)).sum::<usize>();
    // All endpoints have weight 1, so the expected share is the share of the endpoints.
    let (share, expected) = (through as f64 / SHARED_CALLS as f64, names.len() as f64 / all as f64);
    outcome.check((share - expected).abs() <= SHARE_TOLERANCE, || {
        format!("{:.1} % of the calls went west instead of {:.1} %", share * 100.0, expected * 100.0)
    });
    let counted = async || Ok(stage.west.gateway.ended_well(CATALOG).await? - before);
    let counted = settled(through as f64, counted).await?;
    outcome.check(counted == through as f64, || {
        format!("the gateway of net-west counts {counted} calls instead of {through}")
    });
    outcome.proof(format!("Envoy: {:.1} % went west, by weight {:.1} %", share * 100.0, expected * 100.0));
    Ok(())
}

/// The result of a call.
struct Called {
    endpoint: String,
    client_verified: bool,
    took: std::time::Duration,
    bytes: u64,
}

/// Makes calls over plain TCP, each in its own connection, because Envoy chooses an endpoint per connection.
async fn calls(envoy: SocketAddr) -> Vec<Result<Called, CallError>> {
    let scope = Scope::default();
    let lanes: Vec<_> = (0..AT_ONCE)
        .map(|lane| {
            scope.spawn(async move {
                let mut answers = Vec::new();
                for _ in (lane..SHARED_CALLS).step_by(AT_ONCE) {
                    answers.push(call(envoy).await);
                }
                answers
            })
        })
        .collect();
    let mut all = Vec::with_capacity(SHARED_CALLS);
    for lane in lanes {
        all.extend(lane.await.unwrap_or_default());
    }
    all
}

async fn call(envoy: SocketAddr) -> Result<Called, CallError> {
    let began = Instant::now();
    let mut stream = TcpStream::connect(envoy).await?;
    stream.set_nodelay(true)?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: demo\r\n\r\n").await?;
    // The endpoint answers requests until the client closes its direction of the connection.
    stream.shutdown().await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(CallError::CallResult)?;
    let field = |name: &str| {
        let mut lines = head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    Ok(Called {
        endpoint: field(ENDPOINT_HEADER).ok_or(CallError::CallResult)?.to_owned(),
        client_verified: field(CLIENT_HEADER) == Some("verified"),
        took: began.elapsed(),
        bytes: body.len() as u64,
    })
}
