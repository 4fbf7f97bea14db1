//! Probes the gateways of a peer by a TCP connect to each, at a fixed interval. The probes show which gateways can be used, and
//! whether a lost link means that the gateways are dead too.

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

/// The reason why a probe has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// No address of the gateway accepts a connection in time.
    Silent,
    /// The gateway's host name has no address.
    Unresolved,
    /// No address of the gateway is allowed, so none was dialled.
    NotAllowed,
}

impl Fault {
    /// Returns the fault as the end of a sentence about a gateway.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Silent => "does not answer",
            Self::Unresolved => "has a host name that does not resolve",
            Self::NotAllowed => "has only addresses that `peers[].addresses` does not allow",
        }
    }
}

/// The results of the probes of one peer's gateways.
#[derive(Debug, Default)]
pub(super) struct Probes {
    /// The number of failed probes in a row, and the fault of the last one. Only gateways whose last probe failed.
    failed: BTreeMap<GatewayKey, (u32, Fault)>,
}

impl Probes {
    /// Returns the fault of a gateway that has failed at least [`FAILED`] probes in a row.
    pub(super) fn fault(&self, key: &GatewayKey) -> Option<Fault> {
        self.failed.get(key).filter(|(count, _)| *count >= FAILED).map(|(_, fault)| *fault)
    }

    /// Records the results of a round of probes; returns the gateways whose fault has changed.
    pub(super) fn note(&mut self, round: Vec<(GatewayKey, Result<(), Fault>)>) -> Vec<GatewayKey> {
        let mut before = std::mem::take(&mut self.failed);
        let mut changed = Vec::new();
        for (key, result) in round {
            let (count, last) = before.remove(&key).unzip();
            let count = count.unwrap_or(0);
            let was = last.filter(|_| count >= FAILED);
            if let Err(fault) = result {
                self.failed.insert(key.clone(), (count.saturating_add(1), fault));
            }
            if was != self.fault(&key) {
                changed.push(key);
            }
        }
        changed
    }
}

/// Probes the first [`PROBED_MAX`] gateways once, at addresses that the scope allows.
pub(super) async fn round(
    gateways: Vec<(GatewayKey, Gateway)>,
    scope: AddressScope,
) -> Vec<(GatewayKey, Result<(), Fault>)> {
    let all: FuturesUnordered<_> = gateways
        .into_iter()
        .take(PROBED_MAX)
        .map(|(key, gateway)| {
            let scope = &scope;
            async move {
                let result = timeout(WITHIN, probe(&gateway, scope)).await.unwrap_or(Err(Fault::Silent));
                (key, result)
            }
        })
        .collect();
    all.collect().await
}

async fn probe(gateway: &Gateway, scope: &AddressScope) -> Result<(), Fault> {
    let Some(port) = gateway.sni_port.or(gateway.hbone_port) else { return Err(Fault::Silent) };
    let addresses: Vec<SocketAddr> = match &gateway.host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, port)],
        Host::Ips(ips) => ips.iter().map(|ip| SocketAddr::new(*ip, port)).collect(),
        Host::Name(name) => {
            lookup_host((name.as_str(), port)).await.map_err(|_| Fault::Unresolved)?.collect()
        }
    };
    let mut fault = Fault::NotAllowed;
    for address in addresses.into_iter().filter(|address| scope.allows(address.ip())) {
        fault = Fault::Silent;
        if TcpStream::connect(address).await.is_ok() {
            return Ok(());
        }
    }
    Err(fault)
}
