//! The status of the gateway, and its config in use.

use super::clients::refused;
use super::limit_metrics::LIMITS_MAX;
use super::listeners::listeners;
use super::problems::code::Code;
use super::problems::{Problem, listed, problems};
use super::registries::registries;
use super::routes::Routes;
use super::{Sources, TakenOver};
use isthmus_aggregator::status::Status as AggregatorStatus;
use isthmus_api as api;
use isthmus_api::requests;
use isthmus_api::status::Status;
use isthmus_api::text::texts;
use isthmus_dns::server::Server as DnsServer;
use isthmus_net::admission::bandwidth::Usage;
use isthmus_net::memory::Judgement;
use isthmus_telemetry::clock::rfc3339;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .value(&requests::STATUS, status)
        .value(&requests::CONFIG, |sources| (sources.program.load().in_use.0)())
}

/// Returns the status of the gateway.
pub(crate) fn status(sources: &Sources) -> Status {
    let snapshot = sources.reader.latest();
    let program = sources.program.load();
    let aggregator = sources.aggregator.status.borrow().clone();
    let gates = sources.gates(&snapshot.policy.node.cluster);
    let problems = problems(sources);
    let conflicts = problems.iter().filter(|problem| problem.code == Code::ServiceConflict);
    let node = &snapshot.policy.node;
    let limits = &program.limits;
    Status {
        conflicts: conflicts.map(|problem| problem.text.clone()).collect(),
        problems: listed(&problems).iter().map(Problem::view).collect(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: api::status::Node {
            name: node.name.to_string(),
            cluster: node.cluster.to_string(),
            network: node.network.to_string(),
            locality: node.locality.to_string(),
        },
        uptime_seconds: sources.started.elapsed().as_secs(),
        ready: gates.iter().all(|gate| gate.closed.is_none()),
        not_ready: gates
            .iter()
            .filter_map(|gate| gate.closed.as_ref().map(|why| format!("{}: {why}", gate.name)))
            .collect(),
        draining: program.draining,
        taken_over: program.taken_over.as_ref().map(taken_over),
        generation: snapshot.generation,
        config: api::status::Config {
            path: program.config.display().to_string(),
            since: rfc3339(program.config_since),
            generation: snapshot.policy_generation,
            file_is_running: program.rejected.is_empty(),
            rejected: program.rejected.clone(),
            warnings: program.warnings.clone(),
            needs_restart: program.restart.clone(),
        },
        listeners: listeners(sources),
        limits: api::status::Limits {
            descriptors: limits.descriptors,
            connections: limits.connections,
            pending_hellos: limits.pending_hellos,
            per_source: api::status::PerSource {
                connections: limits.per_source.connections,
                new_per_second: limits.per_source.new_per_second,
                pending_hellos: limits.per_source.pending_hellos,
            },
            per_service: api::status::PerService {
                connections: limits.per_service,
                bytes_per_second: limits.bytes_per_second,
            },
            bandwidth: sources.dataplane.bandwidths().usage(LIMITS_MAX).into_iter().map(bandwidth).collect(),
            health_checks: limits.health_checks,
            memory: memory(&sources.dataplane.memory()),
        },
        workers: program.workers,
        connections: sources.dataplane.connections_active(),
        services: snapshot.service_count(),
        routes: snapshot.policy.routes.len() + snapshot.gateway_api.len(),
        peers: snapshot.policy.peers.len(),
        identity: sources.identities.source(),
        registries: registries(&aggregator),
        held_back: held_back(sources, &aggregator),
        xds: api::status::Xds { clients: sources.clients.count(), refused: refused(&sources.clients) },
        dns: sources.names.as_ref().map(|server| dns(server, &aggregator)),
        unresolved: aggregator.unresolved.iter().map(|(name, _)| name.to_string()).collect(),
    }
}

fn memory(state: &Judgement) -> api::status::Memory {
    let Judgement { budget, used, level, .. } = *state;
    api::status::Memory { budget, used, level: level.text().to_owned() }
}

fn bandwidth(usage: Usage) -> api::status::Bandwidth {
    let ([bytes_up, bytes_down], [busy_up, busy_down]) = (usage.moved, usage.busy);
    let [sources_up, sources_down] = usage.busy_sources;
    let (of, limit) = (usage.owner.to_string(), usage.limit);
    api::status::Bandwidth { of, limit, bytes_up, bytes_down, sources_up, sources_down, busy_up, busy_down }
}

fn taken_over(is: &TakenOver) -> api::status::TakenOver {
    api::status::TakenOver {
        since: rfc3339(is.since),
        process: is.process,
        version: is.version.clone(),
        moved: is.moved,
        left: is.left,
        has_ended: is.has_ended,
    }
}

/// Returns the state of the DNS server with that of the virtual addresses.
fn dns(server: &DnsServer, aggregator: &AggregatorStatus) -> api::status::Dns {
    let of_services = aggregator.virtual_addresses.as_ref().map(|status| api::status::VirtualAddresses {
        ranges: texts(&status.ranges.list()),
        in_use: status.counts.in_use,
        reserved: status.counts.reserved,
        without: status.counts.without,
    });
    api::status::Dns {
        address: server.address().to_string(),
        zones: server.zones(),
        services: server.services(),
        virtual_addresses: of_services.unwrap_or_default(),
    }
}

/// Returns the registries that have never been read. Reconnected xDS clients keep resources that these registries may have. The
/// numbers of such clients, and of the names of such resources, are returned too.
fn held_back(sources: &Sources, aggregator: &AggregatorStatus) -> api::status::HeldBack {
    let held_back = sources.clients.held_back();
    api::status::HeldBack {
        registries: texts(&aggregator.unread),
        clients: held_back.clients,
        names: held_back.names,
    }
}
