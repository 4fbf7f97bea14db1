//! `isthmus horizon`: the endpoints that a viewer gets, from the running gateway or from a config file.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use super::arguments::Reading;
use super::offline::{Names, offline};
use isthmus_admin::horizon::{Answer, HorizonError, HorizonRequest, horizon};
use isthmus_aggregator::liveness::Distances;
use isthmus_api::horizon::{Entry, Group, Horizon as View, Missing, Viewer};
use isthmus_api::requests;
use isthmus_api::table::{Column, list, text};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Format, columns, structured};

#[derive(Debug, Args)]
pub(super) struct Horizon {
    /// Host name of the service, with a port if it has several [default: all services]
    #[arg(value_name = "SERVICE[:PORT]", value_parser = service)]
    service: Option<String>,
    /// Network of the client; "" for an unknown network
    #[arg(long, value_name = "N")]
    network: String,
    /// Cluster of the client
    #[arg(long, value_name = "C")]
    cluster: Option<String>,
    /// Region and zone of the client, for steered services
    #[arg(long, value_name = "R/Z", value_parser = parameter("zone"))]
    zone: Option<String>,
    /// Subset of the service
    #[arg(long, value_name = "NAME")]
    subset: Option<String>,
    /// How the client connects to gateways: sni or hbone [default: sni]
    #[arg(long, value_name = "T", value_parser = parameter("tunnel"))]
    tunnel: Option<String>,
    /// Address families that the client can connect to [default: 4,6]
    #[arg(long, value_name = "4,6", value_parser = parameter("families"))]
    families: Option<String>,
    /// Kind of the client: envoy or grpc [default: envoy]
    #[arg(long, value_name = "KIND", value_parser = parameter("client"))]
    client: Option<String>,
    /// Networks that the client asks for (`REQUESTED_NETWORK_VIEW`) [default: all]
    #[arg(long, value_name = "N,N")]
    sees: Option<String>,
    /// Show why each network gets its share of the client's calls
    #[arg(long)]
    why: bool,
    /// Answer from this config file instead of the running gateway
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
}

impl Horizon {
    /// Returns the parameters in the form of the API, so that one function parses both.
    fn parameters(&self) -> Vec<(&'static str, &str)> {
        let (service, port) = self.service.as_deref().map(split).unzip();
        let port = port.flatten();
        let all = [
            ("network", Some(self.network.as_str())),
            ("cluster", self.cluster.as_deref()),
            ("zone", self.zone.as_deref()),
            ("service", service),
            ("port", port),
            ("subset", self.subset.as_deref()),
            ("tunnel", self.tunnel.as_deref()),
            ("families", self.families.as_deref()),
            ("client", self.client.as_deref()),
            ("sees", self.sees.as_deref()),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }
}

/// Splits `service:port`.
fn split(text: &str) -> (&str, Option<&str>) {
    text.rsplit_once(':').map_or((text, None), |(name, port)| (name, Some(port)))
}

/// Checks a service with or without a port as the API does.
fn service(text: &str) -> Result<String, String> {
    let (name, port) = split(text);
    let port = port.map(|port| ("port".to_owned(), port.to_owned()));
    let parameters = [("service".to_owned(), name.to_owned())].into_iter().chain(port);
    HorizonRequest::from_parameters(parameters).map(|_| text.to_owned())
}

/// Returns a function that checks the value of a parameter as the API does.
fn parameter(key: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| {
        let parameters = [(key.to_owned(), text.to_owned())];
        HorizonRequest::from_parameters(parameters).map(|_| text.to_owned())
    }
}

/// Runs `isthmus horizon`; the exit code is 1 if the viewer gets no endpoint of the service.
pub(super) fn run(args: &Horizon, out: &mut impl Write) -> Result<(), Failure> {
    let value = match &args.config {
        Some(path) => of_file(args, path)?,
        None => {
            client::get(&args.reading.admin.url(), &requests::HORIZON.with(&args.parameters()))?.json()?
        }
    };
    // Without a service the answer is a list, which may be empty.
    let (is_one, views) = match &value {
        Value::Array(_) => (false, client::typed::<Vec<View>>(value.clone())?),
        one => (true, vec![client::typed::<View>(one.clone())?]),
    };
    match args.reading.output {
        Format::Table => print(&views, if args.why { print_reasons } else { print_view }, out)?,
        format => structured(out, &value, format)?,
    }
    if is_one && views.iter().all(|view| view.entries.is_empty()) { Err(Failure::Reported) } else { Ok(()) }
}

fn of_file(args: &Horizon, path: &Path) -> Result<Value, Failure> {
    let offline = offline(path, Names::LookUp).map_err(|problems| Failure::Wrong(problems.join("\n")))?;
    let parameters = args.parameters().into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
    let inquiry = HorizonRequest::from_parameters(parameters).map_err(Failure::Wrong)?;
    let answer =
        horizon(&offline.snapshot, &Distances::default(), &inquiry).map_err(|problem| match problem {
            HorizonError::Invalid(text) | HorizonError::Unknown(text) => Failure::Wrong(text),
        })?;
    let value = match &answer {
        Answer::One(one) => serde_json::to_value(one),
        Answer::All(all) => serde_json::to_value(all),
    };
    value.map_err(|error| Failure::Wrong(error.to_string()))
}

fn print<W: Write>(
    views: &[View],
    print_one: impl Fn(&View, &mut W) -> Result<(), Failure>,
    out: &mut W,
) -> Result<(), Failure> {
    if views.is_empty() {
        writeln!(out, "no service has that port and subset")?;
    }
    for (number, view) in views.iter().enumerate() {
        if number == 0 {
            print_viewer(&view.viewer, out)?;
        }
        writeln!(out)?;
        print_one(view, out)?;
    }
    Ok(())
}

fn print_viewer(viewer: &Viewer, out: &mut impl Write) -> Result<(), Failure> {
    let families = viewer.families.iter().map(|family| format!("IPv{family}"));
    let mut parts = vec![
        format!("network {}", text(&viewer.network)),
        format!("cluster {}", text(&viewer.cluster)),
        format!("by {}", text(&viewer.tunnel)),
        families.collect::<Vec<_>>().join(" and "),
    ];
    parts.extend(viewer.zone.as_ref().map(|zone| format!("zone {zone}")));
    parts.extend(viewer.client.clone());
    parts.extend(viewer.sees.as_ref().map(|sees| format!("sees only {}", list(sees))));
    Ok(writeln!(out, "viewer: {}", parts.join(", "))?)
}

const REASONS: [Column<Group>; 9] = [
    ("NETWORK", |group| text(&group.network)),
    ("RING", |group| if group.ring == 0 { "own".to_owned() } else { group.ring.to_string() }),
    ("ROUND TRIP", |group| match (group.round_trip_ms, group.age_seconds) {
        (None, _) => text(&group.source),
        (Some(time), None) => format!("{time} ms ({})", group.source),
        (Some(time), Some(age)) => format!("{time} ms ({}, {age} s ago)", group.source),
    }),
    ("COST", |group| text(group.cost.as_deref().unwrap_or_default())),
    ("READY", |group| group.ready.to_string()),
    ("NOT READY", |group| group.not_ready.to_string()),
    ("SHARE", |group| format!("{:.1} %", group.share * 100.0)),
    ("PRIORITY", |group| group.priority.map_or_else(|| text(""), |priority| priority.to_string())),
    ("WHY", |group| text(&group.why)),
];

/// Prints why each network has its share.
fn print_reasons(view: &View, out: &mut impl Write) -> Result<(), Failure> {
    print_name(view, out)?;
    match (view.groups.is_empty(), view.entries.is_empty()) {
        (true, true) => Ok(writeln!(out, "the viewer gets no endpoints")?),
        (true, false) => Ok(writeln!(
            out,
            "steering is off for this service: calls are divided in proportion to ready endpoints, see `isthmus horizon` without --why"
        )?),
        (false, _) => Ok(columns(out, &REASONS, &view.groups)?),
    }
}

fn print_name(view: &View, out: &mut impl Write) -> Result<(), Failure> {
    let subset = if view.subset.is_empty() { String::new() } else { format!(", subset {}", view.subset) };
    Ok(writeln!(out, "{}:{}{subset}", text(&view.service), view.port)?)
}

const MISSING: [Column<Missing>; 4] = [
    ("NETWORK", |missing| text(&missing.network)),
    ("CLUSTER", |missing| text(&missing.cluster)),
    ("WEIGHT", |missing| missing.weight.to_string()),
    ("WHY", |missing| text(&missing.why)),
];

fn print_view(view: &View, out: &mut impl Write) -> Result<(), Failure> {
    print_name(view, out)?;
    if view.entries.is_empty() {
        writeln!(out, "the viewer gets no endpoints")?;
    } else {
        print_entries(&view.entries, out)?;
    }
    if view.missing.is_empty() {
        return Ok(());
    }
    writeln!(out, "missing:")?;
    Ok(columns(out, &MISSING, &view.missing)?)
}

/// An entry, and the summed weight of the entries of the first priority.
struct Row<'a> {
    entry: &'a Entry,
    total: u64,
}

fn print_entries(entries: &[Entry], out: &mut impl Write) -> Result<(), Failure> {
    let all: [Column<Row<'_>>; 9] = [
        ("ADDRESS", |row| text(&row.entry.address)),
        ("KIND", |row| match &row.entry.carrier_of {
            Some(peer) => text(&format!("own {}, carrier of {peer}", row.entry.kind)),
            None if row.entry.passes_on => text(&format!("own {}, passes on", row.entry.kind)),
            None => text(&row.entry.kind),
        }),
        ("NETWORK", |row| text(&row.entry.network)),
        ("CLUSTER", |row| text(&row.entry.cluster)),
        ("LOCALITY", |row| text(&row.entry.locality)),
        ("WEIGHT", |row| row.entry.weight.to_string()),
        ("SHARE", |row| match row.entry.priority {
            None => format!("{:.1} %", f64::from(row.entry.weight) / row.total as f64 * 100.0),
            Some(priority) => format!("spare ({priority})"),
        }),
        ("STANDS FOR", |row| row.entry.stands_for.to_string()),
        ("HEALTH", |row| row.entry.health.clone().unwrap_or_else(|| "healthy".to_owned())),
    ];
    let first = || entries.iter().filter(|entry| entry.priority.is_none());
    let total: u64 = first().map(|entry| u64::from(entry.weight)).sum();
    let rows: Vec<Row<'_>> = entries.iter().map(|entry| Row { entry, total }).collect();
    columns(out, &all, &rows)?;
    let stands_for: f64 = first().filter_map(|entry| entry.stands_for.as_f64()).sum();
    // Fractions are rounded to billionths. Rounding the sum hides their errors.
    let stands_for = (stands_for * 1e6).round() / 1e6;
    Ok(writeln!(out, "total weight {total}, which stands for {stands_for}")?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        horizon: Horizon,
    }

    #[test]
    fn the_question_is_the_one_of_the_api() {
        let line = |line: &str| Line::try_parse_from(line.split(' ')).map(|line| line.horizon);
        let asked = line("x --network n1 --families 4 a.test:443").expect("legal");
        assert_eq!(
            asked.parameters(),
            [("network", "n1"), ("service", "a.test"), ("port", "443"), ("families", "4")]
        );
        let asked = line("x --network n1 --cluster c a.test").expect("legal");
        assert_eq!(asked.parameters(), [("network", "n1"), ("cluster", "c"), ("service", "a.test")]);
        line("x a.test").expect_err("the network is what it is about");
        for wrong in ["--tunnel foo", "--families 5", "--client foo", "s.x:x", "s.x:0"] {
            let error = line(&format!("x --network n1 {wrong}")).expect_err(wrong);
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }

    #[test]
    fn tables_have_entries_sums_and_what_is_missing() {
        let entry = |address: &str, kind: &str, weight: u32, stands_for: f64| {
            json!({
                "address": address, "kind": kind, "network": "n", "cluster": "", "locality": "r/1", "weight": weight,
                "standsFor": stands_for
            })
        };
        let mut sick = entry("10.1.0.1:1", "endpoint", 1, 1.0);
        sick["health"] = "draining".into();
        let mut spare = entry("192.0.2.2:2", "gateway", 9, 9.0);
        spare["priority"] = 1.into();
        let value = json!({
            "viewer": {"network": "n", "cluster": "", "tunnel": "sni", "families": [4, 6], "client": "grpc"},
            "service": "a.test", "port": 443, "subset": "v1",
            "entries": [sick, entry("192.0.2.1:2", "gateway", 3, 3.0), spare],
            "missing": [{"network": "w", "cluster": "c", "weight": 4, "why": "unready"}]
        });
        let view: View = serde_json::from_value(value).expect("a view");
        let mut out = Vec::new();
        print(&[view], print_view, &mut out).expect("memory takes it");
        let lines = [
            "viewer: network n, cluster -, by sni, IPv4 and IPv6, grpc",
            "",
            "a.test:443, subset v1",
            "ADDRESS      KIND      NETWORK  CLUSTER  LOCALITY  WEIGHT  SHARE      STANDS FOR  HEALTH",
            "10.1.0.1:1   endpoint  n        -        r/1       1       25.0 %     1.0         draining",
            "192.0.2.1:2  gateway   n        -        r/1       3       75.0 %     3.0         healthy",
            "192.0.2.2:2  gateway   n        -        r/1       9       spare (1)  9.0         healthy",
            "total weight 4, which stands for 4",
            "missing:",
            "NETWORK  CLUSTER  WEIGHT  WHY",
            "w        c        4       unready\n",
        ];
        assert_eq!(String::from_utf8(out).expect("text"), lines.join("\n"));
    }
}
