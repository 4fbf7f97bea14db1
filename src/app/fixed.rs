//! The values that stay as they were at the start of the process, whatever a reload brings.

use std::sync::Arc;

use isthmus_config::{Config, LogFormat, Workers};
use isthmus_dataplane::handle::{DescriptorUses, EffectiveLimits};
use isthmus_model::address::{AdminBind, Bind};
use isthmus_settings::limits::Limits;
use isthmus_settings::peer::Carry;

/// The values that a reload does not change.
pub(super) struct Fixed {
    /// The number of file descriptors that the process may have open.
    descriptors: usize,
    workers: Workers,
    admin: Option<AdminBind>,
    metrics: Option<Bind>,
    health: Option<Bind>,
    xds: Option<isthmus_xds::options::Options>,
    wds: Option<Arc<isthmus_wds::options::Options>>,
    dns_server: Option<isthmus_dns::Options>,
    log: LogFormat,
}

impl Fixed {
    /// Takes the values from the config with which the process starts.
    pub(super) fn of(config: &Config, descriptors: usize) -> Self {
        Self {
            descriptors,
            workers: config.workers,
            admin: config.admin.clone(),
            metrics: config.metrics,
            health: config.health,
            xds: config.xds.clone(),
            wds: config.wds.clone(),
            dns_server: config.dns_server.clone(),
            log: config.log.format,
        }
    }

    /// Returns the number of data-plane threads.
    pub(super) fn workers(&self) -> usize {
        match self.workers {
            Workers::Count(count) => count.get(),
            // The standard library considers the CPU quota of the cgroup and the affinity of the process.
            Workers::Auto => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        }
    }

    /// Returns the limits of a config, reduced to what the file descriptors of the process allow.
    pub(super) fn limits(&self, config: &Config) -> EffectiveLimits {
        EffectiveLimits::new(&config.policy.limits, self.descriptors, self.uses(config))
    }

    /// Returns the number of file descriptors of the process, and of connections that they suffice for, whatever the config allows.
    pub(super) fn connections_max(&self, config: &Config) -> (usize, usize) {
        let limits = Limits { connections: usize::MAX, ..config.policy.limits };
        (self.descriptors, EffectiveLimits::new(&limits, self.descriptors, self.uses(config)).connections)
    }

    fn uses(&self, config: &Config) -> DescriptorUses {
        DescriptorUses {
            xds: self.xds.is_some(),
            dns: self.dns_server.is_some(),
            health_checks: config.policy.has_checks(),
            passes_on: config.policy.passes_on()
                || config.policy.peers.iter().any(|peer| peer.carries(Carry::ToPeer)),
        }
    }

    /// Returns the keys of a config whose values take effect only after a restart, because they differ from those in use.
    pub(super) fn changed(&self, config: &Config) -> Vec<&'static str> {
        let changed = [
            ("workers", self.workers != config.workers),
            ("admin.bind", self.admin != config.admin),
            ("telemetry.metrics.bind", self.metrics != config.metrics),
            ("telemetry.health.bind", self.health != config.health),
            ("xds", self.xds != config.xds || self.wds != config.wds),
            ("dnsServer", self.dns_server != config.dns_server),
            ("telemetry.log.format", self.log != config.log.format),
        ];
        changed.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name).collect()
    }
}
