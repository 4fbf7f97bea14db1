//! `isthmus peers`: other organisations, the links with them, and the services exchanged with them.

use std::io::Write;

use clap::Args;

use super::arguments::{Admin, Reading};
use isthmus_api::peer::{Link, Peer, PeerDetail};
use isthmus_api::requests;
use isthmus_api::table::{Column, optional, text};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Colour, Format, columns, paint, structured};
use isthmus_settings::peer::Carry;

const PEERS: [Column<Peer>; 10] = [
    ("PEER", |peer| text(&peer.name)),
    ("STATE", |peer| text(&peer.state)),
    ("SINCE", |peer| optional(peer.since.as_ref())),
    ("LAST CHANGE", |peer| optional(peer.changed.as_ref())),
    ("LINKS", |peer| peer.links.iter().filter(|link| link.state != "down").count().to_string()),
    ("GATEWAYS", |peer| match peer.gateways.len() {
        0 => "-".to_owned(),
        all => format!("{} of {all}", peer.gateways.iter().filter(|gateway| gateway.usable).count()),
    }),
    ("CARRIERS", |peer| match peer.carriers.is_empty() {
        true => "-".to_owned(),
        false => {
            let (open, calls) =
                peer.carriers.iter().fold((0, 0), |(open, calls), of| (open + of.open, calls + of.calls));
            format!("{open}, {calls} calls")
        }
    }),
    ("OUT", |peer| peer.exported.to_string()),
    ("IN", |peer| peer.imported.to_string()),
    ("LEFT OUT", |peer| peer.left_out_count.to_string()),
];

/// The text below the options of `roots`.
pub(super) const ROOTS_EXAMPLES: &str = "Examples:
  isthmus peer roots west > west-roots.pem   the file of peers[].trust, after the peer has changed its certificate authority";

#[derive(Debug, Args)]
pub(super) struct Roots {
    /// Name of the other organisation, as under `peers` of the config
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    admin: Admin,
}

/// A link, and the name of its peer.
struct Row<'a> {
    peer: &'a str,
    link: &'a Link,
}

/// Runs `isthmus peers`.
pub(super) fn run(reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), requests::PEERS.path)?.json()?;
    if reading.output != Format::Table {
        return Ok(structured(out, &value, reading.output)?);
    }
    print(&client::typed::<Vec<Peer>>(value)?, out)
}

fn print(peers: &[Peer], out: &mut impl Write) -> Result<(), Failure> {
    columns(out, &PEERS, peers)?;
    let shown: [Column<Row<'_>>; 11] = [
        ("PEER", |row| text(row.peer)),
        ("INSTANCE", |row| text(&row.link.instance)),
        ("ADDRESS", |row| text(&row.link.address)),
        ("DIALLED BY", |row| if row.link.dialled { "us" } else { "the peer" }.to_owned()),
        ("STATE", |row| text(&row.link.state)),
        ("SOFTWARE", |row| text(&row.link.software)),
        ("ROUND TRIP", |row| {
            row.link.round_trip_ms.map_or_else(|| "-".to_owned(), |time| format!("{time} ms"))
        }),
        ("CLOCK", |row| row.link.clock_skew_ms.map_or_else(|| "-".to_owned(), |skew| format!("{skew:+} ms"))),
        ("GIVEN", |row| row.link.given.to_string()),
        ("TAKEN", |row| row.link.taken.to_string()),
        ("OUR ROOTS", |row| match row.link.state.as_str() {
            "down" => "-".to_owned(),
            _ => text(&row.link.own_roots),
        }),
    ];
    let rows = peers.iter().flat_map(|peer| peer.links.iter().map(|link| Row { peer: &peer.name, link }));
    let rows: Vec<Row<'_>> = rows.collect();
    if !rows.is_empty() {
        writeln!(out)?;
        columns(out, &shown, &rows)?;
    }
    for peer in peers {
        // The problem of a peer that is not live is that of one of its links.
        for (address, problem) in faults(peer) {
            writeln!(
                out,
                "\n{} {address}: {problem}",
                paint(&format!("{}:", text(&peer.name)), Colour::Yellow)
            )?;
        }
        if let Some(problem) = &peer.problem {
            let heading = paint(&format!("{} is {}:", text(&peer.name), text(&peer.state)), Colour::Red);
            writeln!(out, "\n{heading} {}", text(problem))?;
        }
        for problem in peer.carriers.iter().flat_map(|of| &of.problems) {
            let heading = paint(&format!("{}, a carrier is not open:", text(&peer.name)), Colour::Yellow);
            writeln!(out, "\n{heading} {}", text(problem))?;
        }
        if !peer.left_out.is_empty() {
            writeln!(out, "\n{}", paint(&format!("{}, left out:", text(&peer.name)), Colour::Yellow))?;
        }
        for line in &peer.left_out {
            writeln!(out, "  {}", text(line))?;
        }
        let more = peer.left_out_count.saturating_sub(peer.left_out.len());
        if more > 0 {
            writeln!(out, "  and {more} more")?;
        }
    }
    Ok(())
}

/// Returns what to do about a peer of which no gateway has ever answered this one; `None` if one has, or `carry`, the directions in
/// which calls may cross on carriers, has the one to the peer.
pub(super) fn proposal(peer: &Peer, carry: &[String]) -> Option<String> {
    let is_silent =
        !peer.gateways.is_empty() && peer.gateways.iter().all(|gateway| gateway.state == "never_answered");
    (is_silent && !carry.iter().any(|direction| direction == Carry::ToPeer.text())).then(|| {
        format!(
            "no gateway of the peer {} has ever answered this one; if the peer takes no connections, let its gateways open carriers: \
             `carry: [toPeer]` at the peer here, `carry: [fromPeer]` there",
            text(&peer.name)
        )
    })
}

/// Returns the addresses of a live peer's links that have a fault, each with the fault.
fn faults(peer: &Peer) -> impl Iterator<Item = (String, String)> {
    let links = peer.links.iter().filter(|_| peer.state == "live");
    links.filter_map(|link| Some((text(&link.address), text(link.problem.as_ref()?))))
}

/// Runs `isthmus peer roots`.
pub(super) fn roots(arguments: &Roots, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&arguments.admin.url(), &requests::PEER.at(&arguments.name))?.json()?;
    let detail: PeerDetail = client::typed(value)?;
    if detail.roots.is_empty() {
        return Err(Failure::Wrong(format!(
            "the gateway has no roots of {}; see isthmus peers",
            arguments.name
        )));
    }
    Ok(write!(out, "{}", detail.roots)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_api::network::Gateway;
    use isthmus_api::peer::Carriers;

    #[test]
    fn the_tables_have_state_links_and_what_is_left_out() {
        let link = Link {
            instance: "gw-1".to_owned(),
            address: "192.0.2.1:15443".to_owned(),
            dialled: true,
            state: "live".to_owned(),
            software: "isthmus 0.1.0".to_owned(),
            round_trip_ms: Some(1.25),
            clock_skew_ms: Some(-12),
            given: 3,
            taken: 2,
            own_roots: "taken".to_owned(),
            ..Link::default()
        };
        let west = Peer {
            name: "west".to_owned(),
            state: "live".to_owned(),
            since: Some("2026-01-01T00:00:00.000Z".to_owned()),
            exported: 3,
            imported: 2,
            links: vec![link],
            carriers: vec![Carriers { open: 4, calls: 37, ..Carriers::default() }],
            gateways: vec![Gateway { usable: true, ..Gateway::default() }, Gateway::default()],
            left_out_count: 3,
            left_out: vec![
                "the peer west does not take a.global: no import rule matches the service".to_owned(),
            ],
            ..Peer::default()
        };
        let south = Peer {
            name: "south".to_owned(),
            state: "not enrolled".to_owned(),
            problem: Some("no identity\u{1b}".to_owned()),
            ..Peer::default()
        };
        let mut out = Vec::new();
        print(&[west, south], &mut out).expect("memory takes it");
        let lines = [
            "PEER   STATE         SINCE                     LAST CHANGE  LINKS  GATEWAYS  CARRIERS     OUT  IN  LEFT OUT",
            "west   live          2026-01-01T00:00:00.000Z  -            1      1 of 2    4, 37 calls  3    2   3",
            "south  not enrolled  -                         -            0      -         -            0    0   0",
            "",
            "PEER  INSTANCE  ADDRESS          DIALLED BY  STATE  SOFTWARE       ROUND TRIP  CLOCK   GIVEN  TAKEN  OUR ROOTS",
            "west  gw-1      192.0.2.1:15443  us          live   isthmus 0.1.0  1.25 ms     -12 ms  3      2      taken",
            "",
            "west, left out:",
            "  the peer west does not take a.global: no import rule matches the service",
            "  and 2 more",
            "",
            "south is not enrolled: no identity\\u{1b}\n",
        ];
        assert_eq!(String::from_utf8(out).expect("text"), lines.join("\n"));
    }
}
