//! Floods of HTTP/2 frames that carry nothing, on each connection of the control plane that terminates HTTP/2: the gateway closes
//! the connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;

use crate::enrolment::{invite, sides};
use crate::federation::Pair;
use crate::hbone::{caller, folder};
use crate::support::PATIENCE;
use crate::support::frames::{ACK, Frames, PING, PRIORITY, SETTINGS, WINDOW_UPDATE, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::client;
use crate::support::organisation::{Organisation, start};
use crate::xds_tls;

/// The processor time that an attack may cost the gateway.
const COST_MAX: Duration = Duration::from_secs(1);

/// West's gateway, whose peer east is the test.
pub(crate) fn west() -> (Pair, Gateway) {
    let pair = Pair::new();
    let rules =
        "    import:\n      - {services: [\"*.east.global\"]}\n    staleAfter: 1s\n    expireAfter: 3s\n";
    let peer = pair.east.as_peer("accept: true", rules);
    let config = format!("{}peers:\n{peer}", pair.west.base(pair.west_port));
    let west = start(pair.west.folder(&[&pair.east]), &config);
    (pair, west)
}

/// Returns the TLS config of an organisation's gateway for this protocol.
pub(crate) fn of_gateway(organisation: &Organisation, alpn: &str) -> Arc<ClientConfig> {
    client(Some(organisation.pki.issue(&[], Some(&organisation.identity()))), &[alpn])
}

/// Sends frames without end until the gateway closes the connection.
#[track_caller]
fn flood(
    what: &str,
    gateway: &Gateway,
    door: SocketAddr,
    config: Arc<ClientConfig>,
    kind: u8,
    frames: &[u8],
) {
    let before = gateway.processor_time();
    let mut attacker = Frames::connect(door, config).expect("let in");
    let many = frames.repeat(1_000);
    let begun = Instant::now();
    while attacker.send(&many).is_ok() {
        assert!(begun.elapsed() < PATIENCE, "{what}: frames of the type {kind} are taken without end");
    }
    let cost = gateway.processor_time() - before;
    assert!(cost < COST_MAX, "{what}, frames of the type {kind}: {cost:?} of processor time");
}

#[test]
fn frames_that_carry_nothing_end_the_connection_that_sends_them() {
    let (pair, at_west) = west();
    let (east, stranger) = sides();
    let at_east = east.start();
    invite(&at_east, "west", &[]);
    let xds = Gateway::start_in(folder(), xds_tls::CONFIG, &[]);
    let doors = [
        ("a link", &at_west, at_west.listener("mesh"), of_gateway(&pair.east, "isthmus-peer/1")),
        (
            "an enrolment",
            &at_east,
            at_east.listener("mesh"),
            of_gateway(&stranger.organisation, "isthmus-enrol/1"),
        ),
        ("xDS", &xds, xds.listener("xds"), caller()),
    ];
    for (what, gateway, door, config) in doors {
        for (kind, flags, stream, payload) in [
            (PING, 0, 0, 8),
            (SETTINGS, 0, 0, 6),
            (SETTINGS, ACK, 0, 0),
            (WINDOW_UPDATE, 0, 0, 4),
            (PRIORITY, 0, 1, 5),
        ] {
            let mut bytes = vec![0; payload];
            // An increment of 1, and a setting of a type that nobody knows.
            match kind {
                WINDOW_UPDATE => bytes[3] = 1,
                SETTINGS if flags == 0 => bytes[1] = 0xff,
                PRIORITY => bytes[3] = 3,
                _ => {}
            }
            flood(what, gateway, door, config.clone(), kind, &frame(kind, flags, stream, &bytes));
        }
        assert_eq!(gateway.get("/readyz").0, 200, "{what}");
    }
}
