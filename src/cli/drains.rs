//! `isthmus drain`, `drains` and `undrain`: orders that move calls away from a part of the mesh.

use std::io::Write;
use std::time::{Duration, SystemTime};

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde_json::{Map, Value, json};

use super::arguments::{Admin, Reading};
use super::orders;
use isthmus_api::drain::{Drain, Ordered, Planned, Share};
use isthmus_api::requests;
use isthmus_api::text::{bytes, lasting};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Format, structured, table};
use isthmus_document::form::{Period, TextForm, Written};
use isthmus_document::scalar;
use isthmus_model::drain::DrainTarget;
use isthmus_model::time::{parse_rfc3339, rfc3339_seconds, unix_seconds};

pub(super) const DRAIN_EXAMPLES: &str = "Examples:
  isthmus drain network west --over 10m                        fewer and fewer calls go to west, and none after 10 minutes
  isthmus drain gateway 203.0.113.2 --to 50% --until 2h        half of its weight, for two hours
  isthmus drain cluster c1 --plan                              only show where calls would go

No process stops: calls move away from the target in steps of 1/32, and the target stays the last choice. An order for a target that
is drained goes on from what is left. `isthmus drains` shows the progress, and `isthmus undrain` ends a drain.";

pub(super) const DRAINS_EXAMPLES: &str = "Examples:
  isthmus drains
  isthmus drains -o json";

pub(super) const UNDRAIN_EXAMPLES: &str = "Examples:
  isthmus undrain network west
  isthmus undrain endpoint 10.0.0.1:8443";

/// The time over which a drain without `--over` takes effect.
const OVER: &str = "1m";
/// The time that the gateway has for a plan, or for writing to etcd.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(super) struct Order {
    /// Kind of the target
    #[arg(value_parser = kinds(), requires = "name")]
    kind: Option<String>,
    /// Name of the target: a host name, an address with or without a port, a network, a cluster or a peer
    name: Option<String>,
    /// Time over which the weight of the target falls [default: 1m]
    #[arg(long, value_name = "TIME", value_parser = period, requires = "name")]
    over: Option<String>,
    /// Part of its weight that the target keeps [default: 0%]
    #[arg(long, value_name = "PERCENT", value_parser = percent, requires = "name")]
    to: Option<String>,
    /// Time or duration after which the drain ends by itself, such as 2h or 2026-01-31T18:30:00Z [default: `isthmus undrain`]
    #[arg(long, value_name = "TIME", value_parser = until, requires = "name")]
    until: Option<String>,
    /// Time after which existing connections are closed, oldest first, each in a pause [default: they are left alone]
    #[arg(long, value_name = "TIME", value_parser = period, requires = "name")]
    close_after: Option<String>,
    /// Reason, shown beside the drain
    #[arg(long, value_name = "TEXT", requires = "name")]
    reason: Option<String>,
    /// Only show where the calls of each service would go
    #[arg(long, requires = "name", conflicts_with = "force")]
    plan: bool,
    /// Drain even if a service would be left with nothing but what is drained
    #[arg(long, requires = "name")]
    force: bool,
    /// Give the target more of its weight than a drain of it has left; without this, an order goes on from what is left
    #[arg(long, requires = "name", conflicts_with = "plan")]
    raise: bool,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Debug, Args)]
pub(super) struct Undrain {
    /// Kind of the target
    #[arg(value_parser = kinds())]
    kind: String,
    /// Name of the target, as `isthmus drains` shows it
    name: String,
    #[command(flatten)]
    admin: Admin,
}

fn kinds() -> PossibleValuesParser {
    PossibleValuesParser::new(DrainTarget::KINDS)
}

fn period(text: &str) -> Result<String, String> {
    Period::parse(text).map(|time| Period::write(&time)).map_err(|fault| fault.message)
}

fn percent(text: &str) -> Result<String, String> {
    scalar::percent(text).map(|_| text.to_owned()).map_err(|fault| fault.message)
}

/// Parses a duration from now, or a time.
fn until(text: &str) -> Result<String, String> {
    let from_now = Period::parse(text).map(|time| unix_seconds(SystemTime::now() + time));
    let time = from_now.ok().or_else(|| parse_rfc3339(text));
    time.map(rfc3339_seconds).ok_or_else(|| {
        "it is neither a duration such as 2h nor a time such as 2026-01-31T18:30:00Z".to_owned()
    })
}

pub(super) fn order(order: &Order, out: &mut impl Write) -> Result<(), Failure> {
    let (Some(kind), Some(name)) = (&order.kind, &order.name) else {
        // Scripts that stop a gateway by this command have one release to change.
        let warning = "warning: `isthmus drain` without a target will be refused by the next release: `isthmus stop` stops the gateway";
        let _ = writeln!(std::io::stderr(), "{warning}");
        return orders::stop(&order.admin, out);
    };
    let target = DrainTarget::parse(kind, name).map_err(Failure::Wrong)?;
    let mut document = Map::new();
    let mut put = |key: &str, value: &str| drop(document.insert(key.to_owned(), json!(value)));
    put(target.kind(), &target.name());
    put("over", order.over.as_deref().unwrap_or(OVER));
    let further = [
        ("to", &order.to),
        ("until", &order.until),
        ("closeAfter", &order.close_after),
        ("reason", &order.reason),
    ];
    for (key, value) in further {
        if let Some(value) = value {
            put(key, value);
        }
    }
    let switches = [("force", order.force), ("raise", order.raise)];
    let switches = switches.iter().filter(|(_, is_on)| *is_on).map(|(name, _)| *name).collect::<Vec<_>>();
    let path = match order.plan {
        true => requests::PLAN_DRAIN.path.to_owned(),
        false => format!("{}?{}", requests::ORDER_DRAIN.path, switches.join("&")),
    };
    let document = Value::Object(document).to_string();
    let value = client::post_text(&order.admin.url(), &path, &document, ANSWERED_WITHIN)?.json()?;
    let ordered: Ordered = client::typed(value)?;
    if order.plan {
        return Ok(planned(&ordered, out)?);
    }
    Ok(writeln!(out, "{}", ordered.result)?)
}

/// Prints a plan.
fn planned(ordered: &Ordered, out: &mut impl Write) -> std::io::Result<()> {
    let Ordered { left_percent: left, to_percent: to, .. } = ordered;
    let note = if to > left { "; such an order needs --raise" } else { "" };
    writeln!(out, "now {left} % → {to} % of its weight{note}")?;
    if ordered.changes.is_empty() {
        return writeln!(
            out,
            "nothing would move away: no service has an endpoint or a gateway there, or it is drained already"
        );
    }
    let shares = |all: &[Share]| -> String {
        let text = |share: &Share| {
            let network = if share.network.is_empty() { "(unknown)" } else { &share.network };
            format!("{network} {} %", share.percent)
        };
        all.iter().map(text).collect::<Vec<_>>().join(", ")
    };
    let row = |change: &Planned| {
        let from = if change.network.is_empty() { "(unknown)" } else { &change.network };
        let after = if change.is_emptied { "nothing but what is drained" } else { &*shares(&change.after) };
        vec![
            change.service.clone(),
            change.port.to_string(),
            from.to_owned(),
            shares(&change.before),
            after.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = ordered.changes.iter().map(row).collect();
    table(out, &["SERVICE", "PORT", "CALLERS ON", "BEFORE", "AFTER"], &rows)?;
    if ordered.further > 0 {
        writeln!(out, "and {} more", ordered.further)?;
    }
    if !ordered.emptied.is_empty() {
        let names = ordered.emptied.join(", ");
        writeln!(out, "left with nothing but what is drained: {names}; such a drain needs --force")?;
    }
    Ok(())
}

pub(super) fn list(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), requests::DRAINS.path)?.json()?;
    if reading.output != Format::Table {
        return Ok(structured(out, &value, reading.output)?);
    }
    let drains: Vec<Drain> = client::typed(value)?;
    if drains.is_empty() {
        return Ok(writeln!(out, "no drain is in force")?);
    }
    let row = |drain: &Drain| {
        let ramp = match drain.ramp_left_s {
            0 => "done".to_owned(),
            left => lasting(left),
        };
        let connections = match drain.connections_percent {
            Some(percent) => format!("{} ({percent} %)", drain.connections),
            None => drain.connections.to_string(),
        };
        vec![
            format!("{} {}", drain.kind, drain.name),
            format!("{} %", drain.left_percent),
            ramp,
            drain.services.to_string(),
            connections,
            bytes(drain.bytes as f64),
            drain.sources.join(", "),
            drain.until.clone().unwrap_or_else(|| "-".to_owned()),
            drain.source.clone(),
            drain.reason.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = drains.iter().map(row).collect();
    let heading = [
        "TARGET",
        "LEFT",
        "RAMP",
        "SERVICES",
        "CONNECTIONS",
        "BYTES",
        "STILL COME",
        "UNTIL",
        "ORDERED BY",
        "REASON",
    ];
    Ok(table(out, &heading, &rows)?)
}

pub(super) fn undrain(undrain: &Undrain, out: &mut impl Write) -> Result<(), Failure> {
    let path = requests::END_DRAIN.with(&[("kind", &undrain.kind), ("name", &undrain.name)]);
    orders::print_response(client::post(&undrain.admin.url(), &path)?, out)
}
