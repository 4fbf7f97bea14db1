//! The endpoints that operators have withdrawn: drained or disabled until they are enabled again or the gateway restarts.
//!
//! A withdrawal names an address, not an endpoint of the snapshot, so it also applies to endpoints that get this address
//! later. The data path checks it at each choice of an endpoint, so that no connection goes to a withdrawn endpoint; while
//! nothing is withdrawn, the check is one atomic load.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;

use isthmus_balance::Availability;
use isthmus_model::address::canonical_ip;
use isthmus_snapshot::candidates::{EndpointKey, service_of};

/// The largest number of orders in force; further ones are refused.
pub const WITHDRAWALS_MAX: usize = 1_000;

/// The kind of a withdrawal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Withdrawal {
    /// The endpoint gets no new connections; open ones continue.
    Drained,
    /// The endpoint gets no new connections; open ones were closed.
    Disabled,
}

impl Withdrawal {
    /// Returns the availability of an endpoint with this withdrawal.
    pub fn availability(self) -> Availability {
        match self {
            Self::Drained => Availability::Draining,
            Self::Disabled => Availability::Disabled,
        }
    }

    /// Returns the past participle of the operator's order.
    pub fn text(self) -> &'static str {
        match self {
            Self::Drained => "drained",
            Self::Disabled => "disabled",
        }
    }
}

/// The endpoints that an operator's order applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Which {
    /// The address of the endpoints.
    pub ip: IpAddr,
    /// The port of the endpoints; `None` means all ports.
    pub port: Option<u16>,
    /// The host name of the endpoints' service, or the key of their route, in lower case; `None` means all services and routes.
    pub service: Option<Arc<str>>,
}

impl Which {
    /// Parses `address` or `address:port`; an IPv6 address with a port must be in brackets.
    pub fn parse(address: &str, service: Option<&str>) -> Result<Self, String> {
        let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
        let (ip, port) = match (address.parse::<SocketAddr>(), bare.parse::<IpAddr>()) {
            (Ok(address), _) => (address.ip(), Some(address.port())),
            (_, Ok(ip)) => (ip, None),
            _ => {
                return Err(format!(
                    "{address:?} is not an IP address with or without a port, such as 10.0.0.1, 10.0.0.1:8443 or \
                     [fd00::1]:8443; `isthmus explain NAME` shows the addresses of an endpoint given by its host name"
                ));
            }
        };
        if port == Some(0) {
            return Err(format!(
                "{address:?} has the port 0, which no endpoint has; leave the port out for all ports"
            ));
        }
        let service = service.map(|service| service.to_ascii_lowercase().into());
        Ok(Self { ip: canonical_ip(ip), port, service })
    }

    /// Returns true if the order applies to an endpoint of this service or route at this address.
    pub fn covers(&self, service: &str, address: SocketAddr) -> bool {
        canonical_ip(address.ip()) == self.ip
            && self.port.is_none_or(|port| port == address.port())
            && self.service.as_deref().is_none_or(|wanted| wanted == service)
    }

    /// Returns true if the order covers every endpoint that `other` covers.
    fn includes(&self, other: &Self) -> bool {
        self.ip == other.ip
            && (self.port.is_none() || self.port == other.port)
            && (self.service.is_none() || self.service == other.service)
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}", SocketAddr::new(self.ip, port))?,
            None => write!(f, "{}", self.ip)?,
        }
        self.service.as_ref().map_or(Ok(()), |service| write!(f, " of {service}"))
    }
}

/// An operator's order that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The endpoints that the order names.
    pub which: Which,
    /// The kind of the withdrawal.
    pub withdrawal: Withdrawal,
    /// The time of the order.
    pub since: SystemTime,
}

/// The reason why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WithdrawalError {
    /// There are too many orders in force.
    #[error(
        "{WITHDRAWALS_MAX} endpoints are drained or disabled, which is the limit; enable one of them first"
    )]
    TooMany,
    /// No order in force applies to any of the named endpoints.
    #[error("{0} is neither drained, disabled nor ejected")]
    NotWithdrawn(Which),
    /// A wider order is in force, which covers the named endpoints and more.
    #[error("{0} was {1} together with all of {2}; enable {2} instead")]
    PartOf(Which, &'static str, Which),
}

/// The operators' orders that are in force.
#[derive(Debug, Default)]
pub struct Withdrawals {
    /// The operators' orders in force, by the address of the endpoints.
    standing: ArcSwap<BTreeMap<IpAddr, Vec<Standing>>>,
    /// The number of orders.
    count: AtomicUsize,
    /// The number of changes to the orders so far.
    changes: AtomicU64,
    /// Locked while the orders change, so that `count` matches the newest list.
    changing: Mutex<()>,
}

impl Withdrawals {
    /// Returns true if no order is in force.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Returns a count that increases with each change to the orders.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the withdrawal of an endpoint; if several orders apply to it, the strictest.
    pub fn of(&self, key: &EndpointKey) -> Option<Withdrawal> {
        if self.is_empty() {
            return None;
        }
        let standing = self.standing.load();
        let at = standing.get(&canonical_ip(key.address.ip()))?;
        let covering = at.iter().filter(|one| one.which.covers(service_of(&key.group), key.address));
        covering.map(|one| one.withdrawal).max()
    }

    /// Returns all orders in force, in order of address.
    pub fn list(&self) -> Vec<Standing> {
        self.standing.load().values().flatten().cloned().collect()
    }

    /// Withdraws endpoints from now on. Replaces an earlier order for the same endpoints.
    pub fn withdraw(&self, which: Which, withdrawal: Withdrawal) -> Result<(), WithdrawalError> {
        self.apply(Standing { which, withdrawal, since: SystemTime::now() })
    }

    /// Applies an order, also one that was given to another process. Replaces an earlier order for the same endpoints.
    pub fn apply(&self, order: Standing) -> Result<(), WithdrawalError> {
        self.change(|standing| {
            let all: usize = standing.values().map(Vec::len).sum();
            let at = standing.entry(order.which.ip).or_default();
            match at.iter_mut().find(|one| one.which == order.which) {
                Some(known) => *known = order,
                None if all >= WITHDRAWALS_MAX => return Err(WithdrawalError::TooMany),
                None => at.push(order),
            }
            Ok(())
        })
    }

    /// Ends the orders whose endpoints are all in `which`. Returns an error, and changes nothing, if there is no such order or if a
    /// wider order would keep the endpoints withdrawn.
    pub fn enable(&self, which: &Which) -> Result<(), WithdrawalError> {
        self.change(|standing| {
            let at = standing.entry(which.ip).or_default();
            let wider = at.iter().find(|one| one.which != *which && one.which.includes(which));
            if let Some(wider) = wider.cloned() {
                return Err(WithdrawalError::PartOf(which.clone(), wider.withdrawal.text(), wider.which));
            }
            let before = at.len();
            at.retain(|one| !which.includes(&one.which));
            if at.len() < before { Ok(()) } else { Err(WithdrawalError::NotWithdrawn(which.clone())) }
        })
    }

    fn change(
        &self,
        change: impl FnOnce(&mut BTreeMap<IpAddr, Vec<Standing>>) -> Result<(), WithdrawalError>,
    ) -> Result<(), WithdrawalError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = BTreeMap::clone(&self.standing.load());
        change(&mut next)?;
        next.retain(|_, at| !at.is_empty());
        let count = next.values().map(Vec::len).sum();
        self.standing.store(Arc::new(next));
        // Readers look at the list only if `count` is not 0, and repeat their choice when `changes` increases. So `changes` is
        // increased last.
        self.count.store(count, Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn which(address: &str, service: Option<&str>) -> Which {
        Which::parse(address, service).expect("legal")
    }

    fn key(group: &str, address: &str) -> EndpointKey {
        EndpointKey { group: group.into(), address: address.parse().expect("an address") }
    }

    #[test]
    fn an_order_speaks_of_the_endpoints_that_it_names() {
        let all = Withdrawals::default();
        let a = key("a.test:443", "10.0.0.1:8443");
        assert!(all.is_empty() && all.of(&a).is_none());
        all.withdraw(which("10.0.0.1", Some("A.test")), Withdrawal::Drained).expect("withdrawn");
        assert_eq!(all.of(&a), Some(Withdrawal::Drained));
        assert_eq!(all.of(&key("b.test:443", "10.0.0.1:8443")), None);
        assert_eq!(all.of(&key("a.test:443", "[::ffff:10.0.0.1]:1")), Some(Withdrawal::Drained));
        assert_eq!(all.of(&key("a.test:443", "10.0.0.2:8443")), None);
        all.withdraw(which("10.0.0.1:8443", None), Withdrawal::Disabled).expect("withdrawn");
        assert_eq!(all.of(&a), Some(Withdrawal::Disabled), "the strictest order");
        assert_eq!(all.of(&key("*.b.test", "10.0.0.1:8443")), Some(Withdrawal::Disabled));
        assert_eq!(all.of(&key("b.test:443", "10.0.0.1:9443")), None);
        assert_eq!(all.list().len(), 2);
    }

    #[test]
    fn enable_ends_the_orders_within_what_it_names_and_no_wider_one() {
        let all = Withdrawals::default();
        let (whole, port, service) =
            (which("fd00::1", None), which("[fd00::1]:1", None), which("[fd00::1]:1", Some("a")));
        assert_eq!(all.enable(&whole), Err(WithdrawalError::NotWithdrawn(whole.clone())));
        all.withdraw(whole.clone(), Withdrawal::Drained).expect("withdrawn");
        let refused = all.enable(&service).expect_err("a wider order stands");
        assert_eq!(
            refused.to_string(),
            "[fd00::1]:1 of a was drained together with all of fd00::1; enable fd00::1 instead"
        );
        all.withdraw(port.clone(), Withdrawal::Drained).expect("withdrawn");
        all.withdraw(service.clone(), Withdrawal::Disabled).expect("withdrawn");
        // Enabled endpoints are not withdrawn: while a wider order is in force, its own orders stay as well.
        assert!(all.enable(&port).is_err() && all.enable(&service).is_err());
        assert_eq!(all.list().len(), 3);
        let before = all.changes();
        all.enable(&whole).expect("enabled");
        assert!(all.is_empty() && all.changes() > before);
    }

    #[test]
    fn the_number_of_orders_is_bounded_and_a_repeated_one_counts_once() {
        let all = Withdrawals::default();
        for index in 0..WITHDRAWALS_MAX {
            let [.., high, low] = index.to_be_bytes();
            let address = format!("10.0.{high}.{low}");
            all.withdraw(which(&address, None), Withdrawal::Drained).expect("withdrawn");
        }
        assert_eq!(all.withdraw(which("10.1.0.0", None), Withdrawal::Drained), Err(WithdrawalError::TooMany));
        all.withdraw(which("10.0.0.0", None), Withdrawal::Disabled).expect("replaced");
        assert_eq!(all.of(&key("a", "10.0.0.0:1")), Some(Withdrawal::Disabled));
        assert_eq!(all.list().len(), WITHDRAWALS_MAX);
    }

    #[test]
    fn an_address_that_is_none_is_refused_with_what_to_write() {
        for wrong in ["", "db.internal:443", "10.0.0.1:0", "10.0.0.1:65536", "[fd00::1", "10.0.0.0/8"] {
            assert!(Which::parse(wrong, None).is_err(), "{wrong}");
        }
        assert_eq!(which("[fd00::1]", None), which("fd00::1", None));
        assert_eq!(which("::ffff:10.0.0.1", None).to_string(), "10.0.0.1");
    }
}
