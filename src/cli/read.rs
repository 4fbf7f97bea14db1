//! The commands that only read: they print the answers of the admin API, or of a config file, as tables, JSON or YAML.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::arguments::{Explain, Filter, Reading};
use super::offline::{Names, offline};
use super::watch::Contact;
use isthmus_admin::explain::{ExplainRequest, Explanation, explain as explain_name};
use isthmus_api::connection::Connection;
use isthmus_api::explanation::{Candidate, Explanation as ExplanationView};
use isthmus_api::listener::{Exposed, Listener};
use isthmus_api::registry::Registry;
use isthmus_api::requests::{self, Row};
use isthmus_api::status::{Bandwidth, Memory, Status};
use isthmus_api::table::{Listed, Table, list, text};
use isthmus_api::text::{clean, counted};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Colour, Format, columns, one_of_many, paint, structured, tabular};
use isthmus_telemetry::clock::rfc3339;

/// The interval between two requests of a command with `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Runs `isthmus explain`.
pub(super) fn explain(args: &Explain, out: &mut impl Write) -> Result<(), Failure> {
    let value = match &args.config {
        Some(path) => serde_json::to_value(explain_offline(args, path)?.view())
            .map_err(|error| Failure::Wrong(error.to_string()))?,
        None => explain_live(args)?,
    };
    let view: ExplanationView = client::typed(value.clone())?;
    match args.reading.output {
        Format::Table => print_explanation(&view, out)?,
        format => structured(out, &value, format)?,
    }
    if view.is_reachable() { Ok(()) } else { Err(Failure::Reported) }
}

fn explain_offline(args: &Explain, path: &Path) -> Result<Explanation, Failure> {
    let offline = offline(path, Names::LookUp).map_err(|problems| Failure::Wrong(problems.join("\n")))?;
    let inquiry = ExplainRequest {
        name: args.name.clone().filter(|name| !name.is_empty()),
        authority: args.authority,
        is_not_tls: args.no_tls,
        identity: args.identity.clone(),
        listener: args.listener.clone(),
        source: args.from.map(|source| source.to_canonical()),
        alpn: args.alpn.clone().map(|names| names.into_iter().filter(|name| !name.is_empty()).collect()),
        local: args.to.map(|local| local.to_canonical()),
    };
    let mut explanation = explain_name(&offline.snapshot, &inquiry, None).map_err(Failure::Wrong)?;
    if args.probe {
        probe(&mut explanation)?;
    }
    Ok(explanation)
}

fn explain_live(args: &Explain) -> Result<Value, Failure> {
    let from = args.from.map(|source| source.to_string());
    let to = args.to.map(|local| local.to_string());
    let alpn = args.alpn.as_ref().map(|names| names.join(","));
    let mut parameters =
        vec![(if args.authority { "authority" } else { "sni" }, args.name.as_deref().unwrap_or_default())];
    if args.no_tls {
        parameters = vec![("tls", "false")];
    }
    parameters.extend(args.identity.as_ref().map(|identity| ("identity", identity.as_str())));
    parameters.extend(from.as_deref().map(|source| ("from", source)));
    parameters.extend(to.as_deref().map(|local| ("to", local)));
    parameters.extend(alpn.as_deref().map(|names| ("alpn", names)));
    parameters.extend(args.listener.as_deref().map(|name| ("listener", name)));
    let path = requests::EXPLAIN.with(&parameters);
    let answer = match args.probe {
        true => client::post(&args.reading.admin.url(), &path)?,
        false => client::get(&args.reading.admin.url(), &path)?,
    };
    Ok(answer.json()?)
}

/// Dials the candidates from the host on which the command runs.
fn probe(explanation: &mut Explanation) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::Wrong(error.to_string()))?.block_on(explanation.probe());
    Ok(())
}

/// Prints the steps, the candidates and the verdict.
pub(super) fn print_explanation(view: &ExplanationView, out: &mut impl Write) -> Result<(), Failure> {
    for (number, step) in view.steps.iter().enumerate() {
        writeln!(out, "{:>2}. {step}", number + 1)?;
    }
    if !view.candidates.is_empty() {
        writeln!(out)?;
        let probed = view.candidates.iter().any(|candidate| candidate.probe.is_some());
        let shown = &Candidate::COLUMNS[..Candidate::COLUMNS.len() - usize::from(!probed)];
        columns(out, shown, &view.candidates)?;
    }
    for warning in &view.warnings {
        writeln!(out, "\n{} {warning}", paint("warning:", Colour::Yellow))?;
    }
    if !view.near.is_empty() {
        writeln!(out, "\nDid you mean {}?", view.near.join(", or "))?;
    }
    if !view.recent.is_empty() {
        writeln!(out, "\n{}", paint("Failed recently:", Colour::Bold))?;
        for failure in &view.recent {
            writeln!(out, "  {}: {}", paint(&failure.reason, Colour::Yellow), clean(&failure.text()))?;
        }
    }
    let colour = if view.is_reachable() { Colour::Green } else { Colour::Red };
    writeln!(out, "\n{}", paint(&clean(&view.verdict_line()), colour))?;
    Ok(())
}

/// Runs `isthmus exposed`.
pub(super) fn exposed(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), requests::EXPOSED.path)?.json()?;
    if reading.output != Format::Table {
        return Ok(structured(out, &value, reading.output)?);
    }
    Ok(columns(out, Exposed::COLUMNS, &client::typed::<Vec<Exposed>>(value)?)?)
}

/// A connection as received from the API, as JSON for output and deserialised for the filter.
struct Received {
    value: Value,
    connection: Connection,
}

impl Received {
    /// Prints the connection as one of a list that never ends: as a row, a line of JSON or a document of YAML.
    fn print(&self, format: Format, out: &mut impl Write) -> Result<(), Failure> {
        match format {
            Format::Table => {
                for row in Table::of(Connection::FAILED, std::slice::from_ref(&self.connection)).rows {
                    writeln!(out, "{}", row.join("  "))?;
                }
            }
            format => one_of_many(out, &self.value, format)?,
        }
        Ok(())
    }
}

/// Requests failed connections and applies the filter.
fn failed(reading: &Reading, filter: &Filter) -> Result<Vec<Received>, Failure> {
    let value = client::get(&reading.admin.url(), requests::FAILURES.path)?.json()?;
    let since = filter.since.map(|since| rfc3339(SystemTime::now() - since));
    let is_wanted = |connection: &Connection| {
        let name = filter.name.as_deref();
        filter.reason.as_ref().is_none_or(|reason| connection.reason.as_ref() == Some(reason))
            && since.as_ref().is_none_or(|since| connection.time >= *since)
            && name.is_none_or(|part| connection.name().is_some_and(|name| name.contains(part)))
    };
    let values: Vec<Value> = client::typed(value)?;
    let mut kept = Vec::new();
    for value in values {
        let connection = client::typed(value.clone())?;
        if is_wanted(&connection) {
            kept.push(Received { value, connection });
        }
    }
    Ok(kept)
}

/// Runs `isthmus failures`.
pub(super) fn failures(reading: &Reading, filter: &Filter, out: &mut impl Write) -> Result<(), Failure> {
    let mut received = failed(reading, filter)?;
    match reading.output {
        Format::Table => {
            let all: Vec<Connection> = received.iter().map(|one| one.connection.clone()).collect();
            columns(out, Connection::FAILED, &all)?;
        }
        _ if filter.watch => received.iter().rev().try_for_each(|one| one.print(reading.output, out))?,
        format => structured(out, &received.iter().map(|one| one.value.clone()).collect(), format)?,
    }
    if !filter.watch {
        return Ok(());
    }
    let key = |one: &Received| (one.connection.time.clone(), one.connection.id);
    let mut contact = Contact::default();
    loop {
        let shown: BTreeSet<(String, u64)> = received.iter().map(key).collect();
        out.flush()?;
        std::thread::sleep(WATCH_EVERY);
        let Some(now) = contact.after(failed(reading, filter))? else { continue };
        // The newest connection comes last, as in a log.
        for one in now.iter().rev().filter(|one| !shown.contains(&key(one))) {
            one.print(reading.output, out)?;
        }
        received = now;
    }
}

/// Runs `isthmus get`.
pub(super) fn get(what: &str, reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let words = |row: &&Row| row.shown.is_some_and(|shown| shown.words.contains(&what));
    let row = requests::ALL.iter().find(words);
    let Some((path, shown)) = row.and_then(|row| Some((row.path, row.shown?))) else { return Ok(()) };
    let value = client::get(&reading.admin.url(), path)?.json()?;
    match (reading.output, shown.table) {
        (Format::Table, Some(table)) => Ok(tabular(out, &table(value).map_err(client::mismatch)?)?),
        // A tree cannot be shown as a table.
        (Format::Table, None) => Ok(structured(out, &value, Format::Yaml)?),
        (format, _) => Ok(structured(out, &value, format)?),
    }
}

/// The number of limits of bandwidth that `isthmus status` shows.
const BANDWIDTH_MAX: usize = 10;

/// Runs `isthmus status`.
pub(super) fn status(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), requests::STATUS.path)?.json()?;
    if reading.output != Format::Table {
        return Ok(structured(out, &value, reading.output)?);
    }
    let status: Status = client::typed(value)?;
    if !status.problems.is_empty() {
        writeln!(out, "{}", paint("PROBLEMS", Colour::Red))?;
        for problem in &status.problems {
            writeln!(out, "  {}: {}", paint(&problem.code, Colour::Yellow), problem.text)?;
            writeln!(out, "    see {}", problem.look_at)?;
        }
        writeln!(out)?;
    }
    let ready = match status.ready {
        true => "ready".to_owned(),
        false => format!("not ready ({})", list(&status.not_ready)),
    };
    let config = &status.config;
    let running = if config.file_is_running { "" } else { ", but the file on disk was rejected" };
    writeln!(out, "isthmus {}, {ready}, up {} s", status.version, status.uptime_seconds)?;
    if let Some(earlier) = &status.taken_over {
        let state = match earlier.has_ended {
            true => "has ended".to_owned(),
            false => format!("connections that end there: {}", earlier.left),
        };
        writeln!(
            out,
            "took over from process {} (version {}) at {}; connections moved: {}; the earlier process: {state}",
            earlier.process, earlier.version, earlier.since, earlier.moved
        )?;
    }
    writeln!(out, "config {} in use since {}{running}", config.path, config.since)?;
    for (heading, lines) in [("rejected", &config.rejected), ("warning", &config.warnings)] {
        for line in lines {
            writeln!(out, "  {heading}: {line}")?;
        }
    }
    let node = &status.node;
    writeln!(
        out,
        "node {}, cluster {}, network {}, locality {}",
        text(&node.name),
        text(&node.cluster),
        text(&node.network),
        text(&node.locality)
    )?;
    writeln!(
        out,
        "{} of at most {} connections, {}, {}, {}, generation {}",
        status.connections,
        status.limits.connections,
        counted(status.workers, "worker"),
        counted(status.routes, "route"),
        counted(status.services, "service"),
        status.generation
    )?;
    let Memory { budget, used, level } = &status.limits.memory;
    writeln!(out, "memory {level}: {} MiB used of a budget of {} MiB", used >> 20, budget >> 20)?;
    if !status.listeners.is_empty() {
        writeln!(out)?;
        columns(out, &Listener::IN_SHORT, &status.listeners)?;
    }
    if !status.limits.bandwidth.is_empty() {
        writeln!(out)?;
        let shown = status.limits.bandwidth.len().min(BANDWIDTH_MAX);
        columns(out, Bandwidth::COLUMNS, &status.limits.bandwidth[..shown])?;
    }
    if !status.registries.is_empty() {
        writeln!(out)?;
        columns(out, Registry::COLUMNS, &status.registries)?;
    }
    Ok(())
}
