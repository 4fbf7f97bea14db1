//! Probes the gateways of a peer by a TCP connect to each, at a fixed interval. The probes show whether a lost link means that
//! the gateways are dead too.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use crate::model::address::Host;
use crate::snapshot::change::GatewayKey;
use crate::snapshot::policy::{AddressScope, Gateway};

/// The interval at which each gateway is probed.
pub(super) const EVERY: Duration = Duration::from_secs(1);
/// How long a gateway may take to accept the connection.
const WITHIN: Duration = Duration::from_secs(1);
/// The number of failed probes in a row after which a gateway counts as dead.
const FAILED: u32 = 2;
/// The largest number of gateways that are probed; the others count as alive.
const PROBED_MAX: usize = 64;

/// The results of the probes of one peer's gateways.
#[derive(Debug, Default)]
pub(super) struct Probes {
    failed: BTreeMap<GatewayKey, u32>,
}

impl Probes {
    /// Returns true if the gateway has failed at least [`FAILED`] probes in a row.
    pub(super) fn is_dead(&self, key: &GatewayKey) -> bool {
        self.failed.get(key).is_some_and(|failed| *failed >= FAILED)
    }

    /// Records the results of a round of probes; returns the gateways that have died or have come back.
    pub(super) fn note(&mut self, round: Vec<(GatewayKey, bool)>) -> Vec<GatewayKey> {
        let mut changed = Vec::new();
        let mut failed = BTreeMap::new();
        for (key, answers) in round {
            let was_dead = self.is_dead(&key);
            let count =
                if answers { 0 } else { self.failed.get(&key).copied().unwrap_or(0).saturating_add(1) };
            if was_dead != (count >= FAILED) {
                changed.push(key.clone());
            }
            failed.insert(key, count);
        }
        self.failed = failed;
        changed
    }
}

/// Probes the first [`PROBED_MAX`] gateways once, at addresses that the scope allows.
pub(super) async fn round(
    gateways: Vec<(GatewayKey, Gateway)>,
    scope: AddressScope,
) -> Vec<(GatewayKey, bool)> {
    let all: FuturesUnordered<_> = gateways
        .into_iter()
        .take(PROBED_MAX)
        .map(|(key, gateway)| {
            let scope = &scope;
            async move {
                let answers = timeout(WITHIN, answers(&gateway, scope)).await.unwrap_or(false);
                (key, answers)
            }
        })
        .collect();
    all.collect().await
}

async fn answers(gateway: &Gateway, scope: &AddressScope) -> bool {
    let Some(port) = gateway.sni_port.or(gateway.hbone_port) else { return false };
    let addresses: Vec<SocketAddr> = match &gateway.host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, port)],
        Host::Ips(ips) => ips.iter().map(|ip| SocketAddr::new(*ip, port)).collect(),
        Host::Name(name) => match lookup_host((name.as_str(), port)).await {
            Ok(found) => found.collect(),
            Err(_) => return false,
        },
    };
    for address in addresses.into_iter().filter(|address| scope.allows(address.ip())) {
        if TcpStream::connect(address).await.is_ok() {
            return true;
        }
    }
    false
}
