//! Probes the gateways of a peer by a TCP connect to each of their ports, at a fixed interval. The probes show which ports can be
//! used, and whether a lost link means that the gateways are dead too.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use isthmus_aggregator::resolver;
use isthmus_model::address::Host;
use isthmus_model::name::HostName;
use isthmus_net::lookup::{Lookup, Resolution};
use isthmus_snapshot::change::{GatewayKey, RegistryGateway};
use isthmus_snapshot::policy::{AddressScope, Gateway};

/// The interval at which each gateway is probed.
pub(super) const EVERY: Duration = Duration::from_secs(1);
/// How long a gateway may take to accept the connection.
const WITHIN: Duration = Duration::from_secs(1);
/// How long a probe waits for the look-up of a gateway's host name before it uses the addresses of the look-up before.
const LOOKUP_WITHIN: Duration = Duration::from_secs(2);
/// The number of failed probes in a row after which a port counts as dead.
const FAILED: u32 = 2;
/// The largest number of gateways that are probed; the others count as alive.
const PROBED_MAX: usize = 64;

/// A port of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Port {
    Sni(u16),
    Hbone(u16),
}

impl Port {
    /// Returns the ports of a gateway.
    pub(super) fn of(gateway: &Gateway) -> impl Iterator<Item = Self> + use<> {
        gateway.sni_port.map(Self::Sni).into_iter().chain(gateway.hbone_port.map(Self::Hbone))
    }

    pub(super) fn number(self) -> u16 {
        match self {
            Self::Sni(number) | Self::Hbone(number) => number,
        }
    }
}

/// One port of one gateway.
pub(super) type Probed = (GatewayKey, Port);

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

/// The result of one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Answers,
    Fails(Fault),
    /// No address of the gateway is known, because the look-up of its name has failed. The port is as it was.
    Unknown,
}

/// The results of the probes of one peer's gateways.
#[derive(Debug, Default)]
pub(super) struct Probes {
    /// The number of failed probes in a row, and the fault of the last one. Only ports whose last probe failed.
    failed: BTreeMap<Probed, (u32, Fault)>,
}

impl Probes {
    /// Returns the fault of a port that has failed at least [`FAILED`] probes in a row.
    pub(super) fn fault(&self, probed: &Probed) -> Option<Fault> {
        self.failed.get(probed).filter(|(count, _)| *count >= FAILED).map(|(_, fault)| *fault)
    }

    /// Returns the gateway with those of its ports that can be used; `None` if none can be used.
    pub(super) fn usable(&self, gateway: &RegistryGateway) -> Option<RegistryGateway> {
        let mut usable = gateway.clone();
        for port in
            Port::of(&gateway.gateway).filter(|port| self.fault(&(gateway.key.clone(), *port)).is_some())
        {
            match port {
                Port::Sni(_) => usable.gateway.sni_port = None,
                Port::Hbone(_) => usable.gateway.hbone_port = None,
            }
        }
        Port::of(&usable.gateway).next().is_some().then_some(usable)
    }

    /// Records the results of a round of probes; returns the ports whose fault has changed.
    pub(super) fn note(&mut self, round: Vec<(Probed, Verdict)>) -> Vec<Probed> {
        let mut before = std::mem::take(&mut self.failed);
        let mut changed = Vec::new();
        for (probed, verdict) in round {
            let last = before.remove(&probed);
            let was = last.filter(|(count, _)| *count >= FAILED).map(|(_, fault)| fault);
            let count = last.map_or(0, |(count, _)| count);
            let next = match verdict {
                Verdict::Answers => None,
                Verdict::Fails(fault) => Some((count.saturating_add(1), fault)),
                Verdict::Unknown => last,
            };
            if let Some(next) = next {
                self.failed.insert(probed.clone(), next);
            }
            if was != self.fault(&probed) {
                changed.push(probed);
            }
        }
        changed
    }
}

/// The addresses of the gateways' host names. A look-up that fails does not change them: during an outage of the name servers the
/// gateways may work.
#[derive(Default)]
pub(super) struct Names {
    options: resolver::Options,
    /// `None` until the first look-up.
    lookup: Option<Arc<Lookup>>,
    /// The addresses of each name, and the time of its next look-up.
    known: BTreeMap<HostName, (Arc<[IpAddr]>, Instant)>,
}

impl Names {
    pub(super) fn new(options: resolver::Options) -> Self {
        Self { options, ..Self::default() }
    }

    /// Looks up the host names of these gateways whose addresses are not known or too old, and forgets all others.
    async fn renew(&mut self, gateways: &[(GatewayKey, Gateway)]) {
        let names = gateways.iter().filter_map(|(_, gateway)| gateway.host.name().cloned());
        let mut before = std::mem::take(&mut self.known);
        let mut due = Vec::new();
        for name in names {
            match before.remove_entry(&name) {
                Some((name, known)) if known.1 > Instant::now() => drop(self.known.insert(name, known)),
                Some((name, known)) => {
                    self.known.insert(name.clone(), known);
                    due.push(name);
                }
                None if self.known.contains_key(&name) || due.contains(&name) => {}
                None => due.push(name),
            }
        }
        if due.is_empty() {
            return;
        }
        // This fails only if the system's name servers cannot be read; the aggregator's own look-ups report it.
        let lookup = self.lookup.take().or_else(|| Lookup::at(&self.options.servers).ok().map(Arc::new));
        let Some(lookup) = lookup else { return };
        let all: FuturesUnordered<_> = due
            .into_iter()
            .map(|name| {
                let lookup = lookup.clone();
                async move { (timeout(LOOKUP_WITHIN, lookup.addresses(&name)).await.ok(), name) }
            })
            .collect();
        let answers: Vec<_> = all.collect().await;
        self.lookup = Some(lookup);
        for (answer, name) in answers {
            if let Some((Resolution::Addresses(addresses), ttl)) = answer {
                let ttl = ttl.unwrap_or_default().clamp(self.options.ttl_min, self.options.ttl_max);
                self.known.insert(name, (addresses, Instant::now() + ttl));
            }
        }
    }

    /// Returns the addresses of a host; `None` if they are not known.
    fn of(&self, host: &Host) -> Option<Vec<IpAddr>> {
        match host {
            Host::Ip(ip) => Some(vec![*ip]),
            Host::Ips(ips) => Some(ips.to_vec()),
            Host::Name(name) => self.known.get(name).map(|(addresses, _)| addresses.to_vec()),
        }
    }
}

/// Probes all ports of the first [`PROBED_MAX`] gateways once, at addresses that the scope allows. Returns the names, too.
pub(super) async fn round(
    mut gateways: Vec<(GatewayKey, Gateway)>,
    scope: AddressScope,
    mut names: Names,
) -> (Vec<(Probed, Verdict)>, Names) {
    gateways.truncate(PROBED_MAX);
    names.renew(&gateways).await;
    let ports = gateways.into_iter().flat_map(|(key, gateway)| {
        Port::of(&gateway).map(|port| ((key.clone(), port), gateway.host.clone())).collect::<Vec<_>>()
    });
    let all: FuturesUnordered<_> = ports
        .map(|(probed, host)| {
            let (addresses, port, scope) = (names.of(&host), probed.1.number(), &scope);
            async move { (probed, probe(addresses, port, scope).await) }
        })
        .collect();
    let results = all.collect().await;
    (results, names)
}

/// Connects to the first address that accepts.
async fn probe(addresses: Option<Vec<IpAddr>>, port: u16, scope: &AddressScope) -> Verdict {
    let Some(addresses) = addresses else { return Verdict::Unknown };
    if addresses.is_empty() {
        return Verdict::Fails(Fault::Unresolved);
    }
    let allowed: Vec<IpAddr> = addresses.into_iter().filter(|address| scope.allows(*address)).collect();
    if allowed.is_empty() {
        return Verdict::Fails(Fault::NotAllowed);
    }
    let connecting = async {
        for address in allowed {
            if TcpStream::connect(SocketAddr::new(address, port)).await.is_ok() {
                return Verdict::Answers;
            }
        }
        Verdict::Fails(Fault::Silent)
    };
    timeout(WITHIN, connecting).await.unwrap_or(Verdict::Fails(Fault::Silent))
}

#[cfg(test)]
mod tests;
