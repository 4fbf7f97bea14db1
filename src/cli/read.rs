//! The commands that read: they print the answers of the admin API (or of a config file) as tables, JSON or
//! YAML.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::output::{Colour, Format, cell, paint, structured, table};
use super::{Explain, Failure, Filter, Reading, What, client};
use crate::admin::explain::{ExplainRequest, Explanation, explain as explain_name};
use crate::aggregator::offline::{self, OfflineError, names_in};
use crate::aggregator::spec::RegistrySpec;
use crate::model::address::canonical_ip;
use crate::model::name::HostName;
use crate::model::place::ClusterId;
use crate::snapshot::Snapshot;
use crate::snapshot::build::all;
use crate::snapshot::inputs::Inputs;
use crate::snapshot::routes::Resolved;
use crate::snapshot::service_view::network_of;
use crate::telemetry::clock::rfc3339;
use crate::tls::files;
use crate::tls::source::{CERTIFICATE, trust_of};

/// The interval of a command that watches.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// A config file and its registries, read offline.
pub(super) struct Offline {
    pub(super) snapshot: Snapshot,
    /// Registries that only a running gateway reads; no fault of the config.
    pub(super) notes: Vec<String>,
    pub(super) warnings: Vec<String>,
    /// Errors with which `run` would start but could not serve all callers: certificates and roots.
    pub(super) errors: Vec<String>,
}

/// Reads a config and its registries; the errors are a line each.
pub(super) fn offline(path: &Path) -> Result<Offline, Vec<String>> {
    let config =
        super::load(path).map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    let mut warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    let of_files = files::problems(&config.identity).into_iter();
    let places = &config.identity_places;
    let place = |of: String| {
        let trust = places.trust.iter().find(|(domain, _)| trust_of(domain) == of).map(|(_, place)| place);
        let own = places.certificate.as_ref().filter(|_| of == CERTIFICATE);
        own.or(trust).cloned().unwrap_or(of)
    };
    let errors = of_files.map(|(of, problem)| format!("{}: {problem}", place(of))).collect();
    warnings.extend(config.access_log.problem());
    let mut problems = Vec::new();
    let mut notes = Vec::new();
    let mut shards = vec![Arc::new(offline::own(config.services.clone()))];
    for registry in &config.registries {
        match offline::read(registry) {
            Ok(shard) => {
                let counts = shard.counts();
                if counts.denied_items + counts.denied_endpoints > 0 {
                    warnings.push(format!(
                        "registry {}: {} services are left out by `allow.services`, {} endpoints by `allow.networks`",
                        registry.name, counts.denied_items, counts.denied_endpoints
                    ));
                }
                if counts.denied_addresses > 0 {
                    warnings.push(format!(
                        "registry {}: {} endpoints are left out by `allow.addresses` (without that key, loopback \
                         and link-local addresses are left out)",
                        registry.name, counts.denied_addresses
                    ));
                }
                shards.push(Arc::new(shard));
            }
            // Files of another machine may be absent here; those that exist must be correct.
            Err(OfflineError::Absent(found)) => warnings.extend(found),
            Err(OfflineError::LiveOnly(note)) => notes.push(note),
            Err(OfflineError::Wrong(found)) => problems.extend(found),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let names = names_in(&config.policy, shards.iter().map(|shard| &**shard));
    let resolved = resolve(&names);
    let lost = names.iter().filter(|name| resolved.get(name.as_str()).is_none_or(|found| found.is_empty()));
    warnings.extend(lost.map(|name| {
        format!(
            "{name} does not resolve, so the endpoints and gateways with this \
             name have no address"
        )
    }));
    let inputs =
        Inputs { policy: &config.policy, policy_generation: 1, shards: &shards, resolved: &resolved };
    let snapshot = all(inputs, 1);
    warnings.extend(snapshot.services().into_iter().flat_map(|service| service.conflicts.clone()));
    warnings.extend(off_network(&snapshot, &config.registries));
    Ok(Offline { snapshot, notes, warnings, errors })
}

/// Warns of registries whose endpoints this gateway can never choose, because their network or its own is not
/// set: the most likely mistake in a first config with several networks.
fn off_network(snapshot: &Snapshot, registries: &[RegistrySpec]) -> Vec<String> {
    let node = &snapshot.policy.node;
    let is_gateway = !snapshot.policy.listeners.is_empty() && !snapshot.policy.exports.is_empty();
    if !is_gateway {
        return Vec::new();
    }
    // By cluster: endpoints on no network, endpoints on a network, all endpoints.
    let mut counts: BTreeMap<&ClusterId, (usize, usize, usize)> = BTreeMap::new();
    for part in snapshot.services().into_iter().flat_map(|service| &service.parts) {
        let (none, some, all) = counts.entry(&part.origin.cluster).or_default();
        for endpoint in part.service.endpoints.iter() {
            let unknown = network_of(endpoint, &part.origin, snapshot.networks()).is_unknown();
            *none += usize::from(unknown && part.origin.cluster != node.cluster);
            *some += usize::from(!unknown);
            *all += 1;
        }
    }
    let called = |cluster: &ClusterId| {
        let registry = registries.iter().find(|registry| registry.cluster == *cluster);
        registry.map_or_else(|| "services".to_owned(), |registry| format!("registry {}", registry.name))
    };
    let warning = |(cluster, (none, some, all)): (&ClusterId, (usize, usize, usize))| {
        let called = called(cluster);
        match (node.network.is_unknown(), none, some) {
            (false, 1.., _) => Some(format!(
                "{called}: {none} of {all} endpoints have no network, but node.network is {}, so none of these \
                 endpoints can be used; set `network`, or `networks.<name>.cidrs`",
                node.network
            )),
            (true, _, 1..) => Some(format!(
                "{called}: {some} of {all} endpoints have a network, but node.network is not set, so none of \
                 these endpoints can be used; set `node.network`"
            )),
            _ => None,
        }
    };
    counts.into_iter().filter_map(warning).collect()
}

/// Resolves names by the system's resolver; an unknown name has no addresses, as on the data path.
fn resolve(names: &BTreeSet<HostName>) -> Resolved {
    let look_up = |name: &HostName| {
        let found = (name.as_str(), 0).to_socket_addrs().ok()?;
        let mut addresses: Vec<IpAddr> = found.map(|address| canonical_ip(address.ip())).collect();
        addresses.sort_unstable();
        addresses.dedup();
        Some((name.clone(), addresses.into()))
    };
    names.iter().filter_map(look_up).collect()
}

/// Runs `isthmus explain`.
pub(super) fn explain(args: &Explain, out: &mut impl Write) -> Result<(), Failure> {
    let value = match &args.config {
        Some(path) => explain_offline(args, path)?.to_json(),
        None => explain_live(args)?,
    };
    match args.reading.output {
        Format::Table => print_explanation(&value, out)?,
        format => structured(out, &value, format)?,
    }
    if value["verdict"] == "admitted" { Ok(()) } else { Err(Failure::Reported) }
}

fn explain_offline(args: &Explain, path: &Path) -> Result<Explanation, Failure> {
    let offline = offline(path).map_err(|problems| Failure::Wrong(problems.join("\n")))?;
    let inquiry = ExplainRequest {
        name: (!args.name.is_empty()).then(|| args.name.clone()),
        authority: args.authority,
        identity: args.identity.clone(),
        listener: args.listener.clone(),
        source: args.from.map(|source| source.to_canonical()),
        alpn: args.alpn.clone().map(|names| names.into_iter().filter(|name| !name.is_empty()).collect()),
    };
    let mut explanation = explain_name(&offline.snapshot, &inquiry, None).map_err(Failure::Wrong)?;
    if args.probe {
        probe(&mut explanation)?;
    }
    Ok(explanation)
}

fn explain_live(args: &Explain) -> Result<Value, Failure> {
    let from = args.from.map(|source| source.to_string());
    let alpn = args.alpn.as_ref().map(|names| names.join(","));
    let mut parameters = vec![(if args.authority { "authority" } else { "sni" }, args.name.as_str())];
    parameters.extend(args.identity.as_ref().map(|identity| ("identity", identity.as_str())));
    parameters.extend(from.as_deref().map(|source| ("from", source)));
    parameters.extend(alpn.as_deref().map(|names| ("alpn", names)));
    parameters.extend(args.listener.as_deref().map(|name| ("listener", name)));
    let path = format!("/api/v1/explain?{}", client::query(&parameters));
    let answer = match args.probe {
        true => client::post(&args.reading.admin.url(), &path)?,
        false => client::get(&args.reading.admin.url(), &path)?,
    };
    Ok(answer.json()?)
}

/// Dials the candidates from this host.
fn probe(explanation: &mut Explanation) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::Wrong(error.to_string()))?.block_on(explanation.probe());
    Ok(())
}

fn print_explanation(value: &Value, out: &mut impl Write) -> Result<(), Failure> {
    for (number, step) in value["steps"].as_array().into_iter().flatten().enumerate() {
        writeln!(out, "{:>2}. {}", number + 1, cell(step))?;
    }
    let candidates = value["candidates"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !candidates.is_empty() {
        writeln!(out)?;
        let probed = candidates.iter().any(|candidate| !candidate["probe"].is_null());
        let keys = ["address", "cluster", "locality", "weight", "state"];
        let rows: Vec<Vec<String>> = candidates
            .iter()
            .map(|candidate| {
                let odds = format!("{:.1} %", candidate["odds"].as_f64().unwrap_or_default() * 100.0);
                let probe = probed.then(|| cell(&candidate["probe"]["reason"]));
                let cells = keys.iter().map(|key| cell(&candidate[*key])).chain([odds, failure(candidate)]);
                cells.chain(probe).collect()
            })
            .collect();
        let heading = ["ENDPOINT", "CLUSTER", "LOCALITY", "WEIGHT", "STATE", "ODDS", "LAST FAILURE", "PROBE"];
        table(out, &heading[..heading.len() - usize::from(!probed)], &rows)?;
    }
    for warning in value["warnings"].as_array().into_iter().flatten() {
        writeln!(out, "\n{} {}", paint("warning:", Colour::Yellow), cell(warning))?;
    }
    let near = value["near"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !near.is_empty() {
        writeln!(out, "\nDid you mean {}?", near.iter().map(cell).collect::<Vec<_>>().join(", or "))?;
    }
    let colour = if value["verdict"] == "admitted" { Colour::Green } else { Colour::Red };
    let verdict = paint(&cell(&value["verdict"]), colour);
    writeln!(out, "\n{verdict}: {}", cell(&value["reason"]))?;
    Ok(())
}

/// Returns the last failure of an endpoint as a cell: `endpoint_refused, 8 in a row, at 2026-…`.
fn failure(endpoint: &Value) -> String {
    let last = &endpoint["last_failure"];
    match last["reason"].as_str() {
        Some(reason) => format!("{reason}, {} in a row, at {}", cell(&last["in_a_row"]), cell(&last["time"])),
        None => "-".to_owned(),
    }
}

/// Requests a list and prints it.
fn list(
    reading: &Reading,
    path: &str,
    columns: &[(&str, &str)],
    out: &mut impl Write,
) -> Result<(), Failure> {
    show(reading, &client::get(&reading.admin.url(), path)?.json()?, columns, out)
}

/// Prints a list as a table of these columns, or unchanged.
fn show(
    reading: &Reading,
    value: &Value,
    columns: &[(&str, &str)],
    out: &mut impl Write,
) -> Result<(), Failure> {
    if reading.output != Format::Table {
        return Ok(structured(out, value, reading.output)?);
    }
    let rows = rows(value, columns);
    if rows.is_empty() {
        return Ok(writeln!(out, "none")?);
    }
    let heading: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
    Ok(table(out, &heading, &rows)?)
}

fn rows(value: &Value, columns: &[(&str, &str)]) -> Vec<Vec<String>> {
    let items = value.as_array().into_iter().flatten();
    items.map(|item| columns.iter().map(|(_, key)| cell(&item[*key])).collect()).collect()
}

/// Runs `isthmus exposed`.
pub(super) fn exposed(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let columns = [
        ("NAME", "name"),
        ("LISTENER", "listener"),
        ("BY", "by"),
        ("LEADS TO", "leads_to"),
        ("SOURCES", "sources"),
        ("IDENTITIES", "identities"),
    ];
    list(reading, "/api/v1/exposed", &columns, out)
}

/// `name` is the server name or the authority.
const CONNECTION_COLUMNS: [(&str, &str); 10] = [
    ("TIME", "time"),
    ("REASON", "reason"),
    ("LISTENER", "listener"),
    ("SOURCE", "source"),
    ("CALLER", "source_identity"),
    ("NAME", "name"),
    ("ROUTE", "route"),
    ("ENDPOINT", "endpoint"),
    ("MS", "duration_ms"),
    ("DETAIL", "detail"),
];

const REGISTRY_COLUMNS: [(&str, &str); 9] = [
    ("REGISTRY", "name"),
    ("CLUSTER", "cluster"),
    ("NETWORK", "network"),
    ("STATE", "state"),
    ("SINCE", "since"),
    ("SERVICES", "services"),
    ("ENDPOINTS", "endpoints"),
    ("DENIED", "denied_endpoints"),
    ("PROBLEMS", "problems"),
];

const GATEWAY_COLUMNS: [(&str, &str); 10] = [
    ("NETWORK", "network"),
    ("ADDRESS", "address"),
    ("STANDS FOR", "addresses"),
    ("SNI", "sni_port"),
    ("HBONE", "hbone_port"),
    ("CLUSTER", "cluster"),
    ("LOCALITY", "locality"),
    ("WEIGHT", "weight"),
    ("USABLE", "usable"),
    ("WHY NOT", "why"),
];

const CLIENT_COLUMNS: [(&str, &str); 11] = [
    ("NODE", "node"),
    ("PEER", "peer"),
    ("CLIENT", "client"),
    ("PROTOCOL", "protocol"),
    ("NETWORK", "network"),
    ("CLUSTER", "cluster"),
    ("SUBSCRIPTIONS", "subscriptions"),
    ("HELD BACK", "held_back"),
    ("LAST ACK", "last_ack"),
    ("NACKS", "nacks"),
    ("LAST NACK", "last_nack"),
];

/// Requests connections, adds to each the name that it asked for, and applies the filter.
fn connections(reading: &Reading, path: &str, filter: &Filter) -> Result<Value, Failure> {
    let value = client::get(&reading.admin.url(), path)?.json()?;
    let since = filter.since.map(|since| rfc3339(SystemTime::now() - since));
    let mut kept = Vec::new();
    for mut item in value.as_array().cloned().unwrap_or_default() {
        let name = [&item["sni"], &item["authority"]].into_iter().find_map(Value::as_str).map(str::to_owned);
        let wanted = |wanted: &Option<String>, found: Option<&str>| {
            wanted.as_deref().is_none_or(|wanted| found.is_some_and(|found| found.contains(wanted)))
        };
        let lately =
            since.as_deref().is_none_or(|since| item["time"].as_str().is_some_and(|time| time >= since));
        let reason = filter.reason.as_deref().is_none_or(|reason| item["reason"] == reason);
        if reason && lately && wanted(&filter.name, name.as_deref()) {
            if reading.output == Format::Table {
                item["name"] = name.into();
            }
            kept.push(item);
        }
    }
    Ok(kept.into())
}

/// Runs `isthmus failures`.
pub(super) fn failures(reading: &Reading, filter: &Filter, out: &mut impl Write) -> Result<(), Failure> {
    let path = "/api/v1/failures";
    let mut value = connections(reading, path, filter)?;
    show(reading, &value, &CONNECTION_COLUMNS, out)?;
    if !filter.watch {
        return Ok(());
    }
    let mut shown: BTreeSet<String> = BTreeSet::new();
    let key = |item: &Value| format!("{} {}", item["time"], item["id"]);
    loop {
        let before = std::mem::take(&mut shown);
        shown.extend(value.as_array().into_iter().flatten().map(key));
        shown.extend(before);
        std::thread::sleep(WATCH_EVERY);
        value = connections(reading, path, filter)?;
        let items = value.as_array().into_iter().flatten();
        // Newest last, as in a log.
        let new: Vec<Value> = items.rev().filter(|item| !shown.contains(&key(item))).cloned().collect();
        let new = Value::from(new);
        match reading.output {
            Format::Table => {
                for row in rows(&new, &CONNECTION_COLUMNS) {
                    writeln!(out, "{}", row.join("  "))?;
                }
            }
            format => {
                for item in new.as_array().into_iter().flatten() {
                    structured(out, item, format)?;
                }
            }
        }
        out.flush()?;
    }
}

/// Runs `isthmus get`.
pub(super) fn get(what: What, reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    match what {
        What::Services => services(reading, out),
        What::Endpoints => endpoints(reading, out),
        What::Config => {
            let value = client::get(&reading.admin.url(), "/api/v1/config")?.json()?;
            // The config is a tree, which has no table.
            let format = if reading.output == Format::Table { Format::Yaml } else { reading.output };
            Ok(structured(out, &value, format)?)
        }
        What::Registries => list(reading, "/api/v1/registries", &REGISTRY_COLUMNS, out),
        What::Routes => {
            let columns = [
                ("NAME", "name"),
                ("LISTENERS", "listeners"),
                ("LEADS TO", "leads_to"),
                ("ENDPOINTS", "endpoints"),
            ];
            list(reading, "/api/v1/routes", &columns, out)
        }
        What::Clients => list(reading, "/api/v1/clients", &CLIENT_COLUMNS, out),
        What::Gateways => list(reading, "/api/v1/gateways", &GATEWAY_COLUMNS, out),
        What::Networks => {
            let columns = [
                ("NAME", "name"),
                ("ACCESS", "access"),
                ("CIDRS", "cidrs"),
                ("GATEWAYS", "gateways"),
                ("ENDPOINTS", "endpoints"),
                ("READY WEIGHT", "ready_weight"),
            ];
            list(reading, "/api/v1/networks", &columns, out)
        }
        What::Connections => {
            let mut columns = CONNECTION_COLUMNS.to_vec();
            columns.retain(|(heading, _)| !matches!(*heading, "REASON" | "DETAIL"));
            columns.extend([("UP", "bytes_up"), ("DOWN", "bytes_down")]);
            show(reading, &connections(reading, "/api/v1/connections", &Filter::default())?, &columns, out)
        }
        What::Certificates => {
            let columns = [
                ("KIND", "kind"),
                ("TRUST DOMAIN", "trust_domain"),
                ("IDENTITY", "identity"),
                ("STATE", "state"),
                ("NOT AFTER", "not_after"),
                ("SERIAL", "serial"),
            ];
            list(reading, "/api/v1/certificates", &columns, out)
        }
        What::Listeners => {
            let columns = [
                ("NAME", "name"),
                ("ADDRESS", "address"),
                ("PROTOCOL", "protocol"),
                ("FROM", "from"),
                ("ALPN", "alpn"),
            ];
            list(reading, "/api/v1/listeners", &columns, out)
        }
    }
}

/// Prints the endpoints of all services on all networks, and of routes.
fn endpoints(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let mut value = client::get(&reading.admin.url(), "/api/v1/endpoints")?.json()?;
    if reading.output == Format::Table {
        for endpoint in value.as_array_mut().into_iter().flatten() {
            let (of, failure) = (cell(&endpoint["service"]), failure(endpoint));
            endpoint["of"] = if of == "-" { endpoint["route"].clone() } else { of.into() };
            endpoint["failure"] = failure.into();
        }
    }
    let columns = [
        ("SERVICE OR ROUTE", "of"),
        ("ADDRESS", "address"),
        ("CLUSTER", "cluster"),
        ("NETWORK", "network"),
        ("LOCALITY", "locality"),
        ("WEIGHT", "weight"),
        ("STATE", "state"),
        ("STANDING", "standing"),
        ("LAST FAILURE", "failure"),
    ];
    show(reading, &value, &columns, out)
}

fn services(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), "/api/v1/services")?.json()?;
    if reading.output != Format::Table {
        return Ok(structured(out, &value, reading.output)?);
    }
    let mut rows = Vec::new();
    for service in value.as_array().into_iter().flatten() {
        for port in service["ports"].as_array().into_iter().flatten() {
            let port_text = format!("{}/{}", cell(&port["port"]), cell(&port["protocol"]));
            rows.push(vec![
                cell(&service["hostname"]),
                cell(&service["namespace"]),
                port_text,
                cell(&service["clusters"]),
                cell(&port["endpoints_here"]),
                cell(&port["exported_by"]),
            ]);
        }
    }
    Ok(table(out, &["HOSTNAME", "NAMESPACE", "PORT", "CLUSTERS", "ENDPOINTS HERE", "EXPORTED BY"], &rows)?)
}

/// Runs `isthmus status`.
pub(super) fn status(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), "/api/v1/status")?.json()?;
    if reading.output != Format::Table {
        return Ok(structured(out, &value, reading.output)?);
    }
    let problems = value["problems"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !problems.is_empty() {
        writeln!(out, "{}", paint("PROBLEMS", Colour::Red))?;
        for problem in problems {
            writeln!(
                out,
                "  {}: {}",
                paint(&cell(&problem["code"]), Colour::Yellow),
                cell(&problem["text"])
            )?;
            writeln!(out, "    see {}", cell(&problem["look_at"]))?;
        }
        writeln!(out)?;
    }
    let ready = if value["ready"] == true {
        "ready".to_owned()
    } else {
        format!("not ready ({})", cell(&value["not_ready"]))
    };
    let config = &value["config"];
    let running = if config["file_is_running"] == true { "" } else { ", but the file on disk was rejected" };
    writeln!(out, "isthmus {}, {ready}, up {} s", cell(&value["version"]), cell(&value["uptime_seconds"]))?;
    writeln!(out, "config {} in use since {}{running}", cell(&config["path"]), cell(&config["since"]))?;
    for (heading, key) in [("rejected", "rejected"), ("warning", "warnings")] {
        for line in config[key].as_array().into_iter().flatten() {
            writeln!(out, "  {heading}: {}", cell(line))?;
        }
    }
    let node = &value["node"];
    writeln!(
        out,
        "node {}, cluster {}, network {}, locality {}",
        cell(&node["name"]),
        cell(&node["cluster"]),
        cell(&node["network"]),
        cell(&node["locality"])
    )?;
    let limits = &value["limits"];
    writeln!(
        out,
        "{} connections of {} at most, {} workers, {} routes, {} services, generation {}",
        cell(&value["connections"]),
        cell(&limits["connections"]),
        cell(&value["workers"]),
        cell(&value["routes"]),
        cell(&value["services"]),
        cell(&value["generation"])
    )?;
    let part = |out: &mut dyn Write, key: &str, columns: &[(&str, &str)]| -> Result<(), Failure> {
        let items = value[key].as_array().map(Vec::as_slice).unwrap_or_default();
        if items.is_empty() {
            return Ok(());
        }
        writeln!(out)?;
        let rows: Vec<Vec<String>> =
            items.iter().map(|item| columns.iter().map(|(_, key)| cell(&item[*key])).collect()).collect();
        let heading: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
        Ok(table(&mut &mut *out, &heading, &rows)?)
    };
    part(out, "listeners", &[("LISTENER", "name"), ("ADDRESS", "address"), ("PROTOCOL", "protocol")])?;
    part(out, "registries", &REGISTRY_COLUMNS)?;
    Ok(())
}
