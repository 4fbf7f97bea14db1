//! The settings by which endpoints are chosen, checked, ejected and dialled.

use std::sync::Arc;
use std::time::Duration;

use super::limits::Timeouts;
use super::steering::ServiceSteering;
use isthmus_model::endpoint::{Encapsulation, ProxyVersion};
use isthmus_model::name::{HostName, NamePattern};

isthmus_model::words!(LoadBalancing, LocalityMode);

/// The settings by which endpoints are chosen and dialled.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// The algorithm that chooses an endpoint, such as round robin.
    pub policy: LoadBalancing,
    /// The preference for nearer endpoints.
    pub locality: LocalityMode,
    /// The conditions under which a failing endpoint is ejected; `None`: it is never ejected.
    pub ejection: Option<Ejection>,
    /// The active checks of the endpoints; `None`: there are none.
    pub health: Option<HealthCheck>,
    /// Timeout of one attempt to connect.
    pub connect_timeout: Duration,
    /// True if endpoints that are not healthy are chosen when none is healthy.
    pub panic: bool,
    /// The version of the PROXY header that is sent to endpoints before the client's first byte. Endpoints with `tunnel: hbone`
    /// get none.
    pub send_proxy: Option<ProxyVersion>,
    /// The age at which a connection is ended gently; `None`: at none.
    pub max_connection_age: Option<Duration>,
    /// How the calls of xDS clients are divided among networks; of no effect for routes.
    pub steering: ServiceSteering,
}

impl Tuning {
    /// Returns the default settings for the endpoints of routes.
    pub fn for_routes(timeouts: &Timeouts) -> Self {
        Self {
            policy: LoadBalancing::LeastRequest,
            locality: LocalityMode::Prefer,
            ejection: Some(Ejection::default()),
            health: None,
            connect_timeout: timeouts.connect,
            panic: true,
            send_proxy: None,
            max_connection_age: None,
            steering: ServiceSteering::default(),
        }
    }

    /// Returns the version of the PROXY header to send to an endpoint. An endpoint with a tunnel gets no header: the tunnel
    /// begins with TLS, and the gateway does not alter the bytes inside it.
    pub fn header_for(&self, encapsulation: Encapsulation) -> Option<ProxyVersion> {
        self.send_proxy.filter(|_| encapsulation == Encapsulation::None)
    }

    /// Returns the default settings for the endpoints of services.
    pub fn for_services(timeouts: &Timeouts) -> Self {
        Self { locality: LocalityMode::Ignore, ..Self::for_routes(timeouts) }
    }
}

/// The method by which an endpoint is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadBalancing {
    /// Weighted power of two choices by the number of connections in flight.
    LeastRequest,
    /// Each endpoint in turn, by weight.
    RoundRobin,
    /// At random, by weight.
    Random,
    /// By a hash of the source address, so that a source keeps its endpoint.
    SourceHash,
}

impl LoadBalancing {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 4] = [Self::LeastRequest, Self::RoundRobin, Self::Random, Self::SourceHash];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::LeastRequest => "leastRequest",
            Self::RoundRobin => "roundRobin",
            Self::Random => "random",
            Self::SourceHash => "sourceHash",
        }
    }
}

/// A preference for nearer endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalityMode {
    /// Endpoints are chosen first at the nearest distance that has a healthy endpoint.
    Prefer,
    /// Distances are ignored.
    Ignore,
}

impl LocalityMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Prefer, Self::Ignore];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Prefer => "prefer",
            Self::Ignore => "ignore",
        }
    }
}

/// The conditions under which a failing endpoint is ejected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ejection {
    /// Consecutive failures after which an endpoint is ejected.
    pub failures: u32,
    /// The time for which an endpoint stays ejected.
    pub time: Duration,
    /// The largest share of a service's endpoints that may be ejected, in percent (0 to 100).
    pub share_max_percent: u8,
}

/// The active check of endpoints by a TCP connect, and by a ClientHello if there is a name for it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HealthCheck {
    /// The time from one check of an endpoint to the next.
    pub interval: Duration,
    /// The time within which an endpoint must accept the connection of a check, and answer the ClientHello.
    pub timeout: Duration,
    /// Failed checks in a row after which an endpoint is unhealthy.
    pub unhealthy_after: u32,
    /// Passed checks in a row after which an unhealthy endpoint is healthy again.
    pub healthy_after: u32,
    /// The server name of the ClientHello that a check sends; `None`: a check only connects.
    pub tls: Option<HostName>,
}

impl HealthCheck {
    /// Returns the health check for an endpoint that belongs to two services: the stricter value of each field. Of two server
    /// names, the first in order applies.
    pub fn strictest(self, other: Self) -> Self {
        Self {
            interval: self.interval.min(other.interval),
            timeout: self.timeout.min(other.timeout),
            unhealthy_after: self.unhealthy_after.min(other.unhealthy_after),
            healthy_after: self.healthy_after.max(other.healthy_after),
            tls: [self.tls, other.tls].into_iter().flatten().min(),
        }
    }
}

impl Default for HealthCheck {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(1),
            unhealthy_after: 3,
            healthy_after: 2,
            tls: None,
        }
    }
}

impl Default for Ejection {
    fn default() -> Self {
        Self { failures: 5, time: Duration::from_secs(30), share_max_percent: 50 }
    }
}

/// Tuning of the mesh's services by name pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceTuning {
    /// Tuning of services that no pattern matches.
    pub default: Arc<Tuning>,
    /// Tuning of services whose host names match a pattern; only the most specific pattern applies.
    pub policies: Vec<(NamePattern, Arc<Tuning>)>,
}

impl ServiceTuning {
    /// Returns the tuning of a service: the whole tuning of the most specific pattern that matches.
    pub fn of(&self, hostname: &str) -> &Arc<Tuning> {
        let specificity = |pattern: &NamePattern| match pattern {
            NamePattern::Exact(_) => usize::MAX,
            NamePattern::Suffix(suffix) => suffix.as_str().len(),
            NamePattern::Any => 0,
        };
        self.policies
            .iter()
            .filter(|(pattern, _)| pattern.matches(hostname))
            .max_by_key(|(pattern, _)| specificity(pattern))
            .map_or(&self.default, |(_, tuning)| tuning)
    }
}
