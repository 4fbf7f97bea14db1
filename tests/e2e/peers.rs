//! Peers as operators see them: `isthmus peers`, `status`, `check`, metrics and the dashboard, at both ends of a link.

use std::time::Duration;

use serde_json::Value;

use crate::federation::{Pair, weighs};
use crate::problems::{has_problem, run};
use crate::support::gateway::Gateway;
use crate::support::{eventually, within};

pub(crate) const SERVICES: &str = "services:\n  - {hostname: ratings.pay.svc.cluster.local, namespace: pay, ports: [{name: http, port: 80}], \
                        endpoints: [{address: 10.2.0.1}]}\n  - {hostname: fees.pay.svc.cluster.local, namespace: pay, ports: [{name: \
                        http, port: 80}], endpoints: [{address: 10.2.0.2}]}\n";

/// Waits until a gateway's only peer fulfils a condition, and returns the peer.
fn peer(gateway: &Gateway, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually(what, || {
        let peer = gateway.json("/api/v1/peers")[0].clone();
        holds(&peer).then_some(peer)
    })
}

fn metric(gateway: &Gateway, line: &str) -> Option<f64> {
    let (_, text) = gateway.get("/metrics");
    text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
}

#[test]
fn both_sides_show_the_link_what_is_exchanged_and_what_is_left_out() {
    let pair = Pair::new();
    let mut west = pair.start_west(SERVICES);
    // East imports at most one service, so it refuses the other.
    let config =
        pair.east_config("").replace("[\"*.pay.west.global\"]}", "[\"*.pay.west.global\"], limit: 1}");
    assert!(config.contains("limit: 1"), "{config}");
    let east = crate::support::organisation::start(pair.east.folder(&[&pair.west]), &config);
    let of_east = peer(&east, "east to take one of two", |peer| {
        peer["state"] == "live" && peer["imported"] == 1 && peer["links"][0]["round_trip_ms"].is_number()
    });
    let link = &of_east["links"][0];
    assert_eq!(
        (&of_east["name"], &link["dialled"], &link["state"]),
        (&"west".into(), &true.into(), &"live".into())
    );
    assert_eq!(link["address"], format!("127.0.0.1:{}", pair.west_port));
    assert!(link["software"].as_str().is_some_and(|software| software.starts_with("isthmus ")), "{link}");
    assert!(link["clock_skew_ms"].as_i64().is_some_and(|skew| skew.abs() < 5_000), "{link}");
    assert_eq!(of_east["gateways"][0]["address"], "127.0.0.1", "{of_east:#}");
    let left_out = &of_east["left_out"][0];
    assert!(
        left_out.as_str().is_some_and(|line| line.contains("peers[0].import[0] has reached its limit of 1")),
        "{of_east:#}"
    );
    let of_west = peer(&west, "west to hear the refusal", |peer| peer["left_out"][0].is_string());
    assert_eq!(
        (&of_west["state"], &of_west["exported"], &of_west["links"][0]["dialled"]),
        (&"live".into(), &2.into(), &false.into())
    );
    let refused = of_west["left_out"][0].as_str().unwrap_or_default();
    assert!(refused.starts_with("the peer east does not take "), "{refused}");
    // The tables for operators show the same.
    let table = run(&east, &["peers"]);
    for wanted in ["west  live", "isthmus 0.", "west, left out:"] {
        assert!(table.contains(wanted), "{wanted}: {table}");
    }
    assert!(
        has_problem(&east, "peer_left_out")["text"]
            .as_str()
            .is_some_and(|text| text.contains("has reached its limit of 1"))
    );
    let check = run(&east, &["check"]);
    assert!(check.contains("warning  peers") && !check.contains("peer_not_live"), "{check}");
    assert!(east.get("/").1.contains("id=\"peers\""), "the dashboard has them");
    let metrics =
        || ["up", "rtt_seconds"].map(|name| metric(&east, &format!("isthmus_peer_{name}{{peer=\"west\"}}")));
    let [up, rtt] = metrics();
    assert_eq!(up, Some(1.0));
    assert!(rtt.is_some_and(|rtt| rtt > 0.0 && rtt < 5.0), "{rtt:?}");
    assert_eq!(metric(&east, "isthmus_peer_services{peer=\"west\",direction=\"in\"}"), Some(1.0));
    assert_eq!(metric(&west, "isthmus_peer_services{peer=\"east\",direction=\"out\"}"), Some(2.0));
    // West's gateway does not run for a while. East says why the link is suspect.
    west.signal("STOP");
    let suspect = within(Duration::from_secs(40), "the link to be suspect", || {
        let peer = east.json("/api/v1/peers")[0].clone();
        (peer["state"] == "suspect").then_some(peer)
    });
    let problem = suspect["problem"].as_str().unwrap_or_default();
    assert!(problem.ends_with(" heartbeats were not answered"), "{suspect:#}");
    west.signal("CONT");
    peer(&east, "the link to be live", |peer| peer["state"] == "live" && peer["problem"].is_null());
    // West's gateway is killed. East uses west's services for a while, and reports the problem of the link.
    west.kill();
    let lost =
        peer(&east, "the peer to be lost", |peer| peer["state"] != "live" && peer["problem"].is_string());
    assert!(
        ["suspect", "stale", "demoted", "expired"].iter().any(|state| lost["state"] == *state),
        "{lost:#}"
    );
    let problem = has_problem(&east, "peer_not_live");
    assert!(problem["text"].as_str().is_some_and(|text| text.starts_with("the peer west is ")), "{problem}");
    assert!(problem["look_at"].as_str().is_some_and(|next| next.contains("isthmus peers")), "{problem}");
    eventually("the peer to be down", || (metrics() == [Some(0.0), None]).then_some(()));
    peer(&east, "the peer to expire", |peer| peer["state"] == "expired");
    assert!(run(&east, &["check"]).contains("failed   peers"), "a lost peer is a failure");
}

#[test]
fn a_service_that_was_refused_gets_the_place_of_one_that_goes() {
    let pair = Pair::new();
    let west = pair.start_west(SERVICES);
    let config =
        pair.east_config("").replace("[\"*.pay.west.global\"]}", "[\"*.pay.west.global\"], limit: 1}");
    let east = crate::support::organisation::start(pair.east.folder(&[&pair.west]), &config);
    peer(&east, "east to refuse one of two", |peer| peer["imported"] == 1 && peer["left_out"][0].is_string());
    peer(&west, "west to hear the refusal", |peer| peer["left_out"][0].is_string());
    weighs(&east, "fees.pay.west.global", 1.0);
    // West sends only the removal of the one service, not the other service again.
    let ratings = SERVICES.split("  - {hostname: fees").next().expect("the first one");
    west.reload(&pair.west_config(ratings));
    weighs(&east, "ratings.pay.west.global", 1.0);
    peer(&east, "nothing to be refused", |peer| peer["imported"] == 1 && peer["left_out"][0].is_null());
    peer(&west, "west to hear that nothing is refused", |peer| peer["left_out"][0].is_null());
}

#[test]
fn a_peer_with_a_live_link_and_no_usable_gateway_is_a_failure_on_the_side_that_can_mend_it() {
    let pair = Pair::new();
    let good = pair.west_config(SERVICES);
    let ports = format!("sniPort: {0}, hbonePort: {0}", pair.west_port);
    let silent = good.replace(&ports, &format!("sniPort: {}", crate::support::organisation::free_port()));
    let not_allowed = good.replace("address: 127.0.0.1, ", "address: 169.254.1.1, ");
    let networks = good.lines().find(|line| line.starts_with("networks:")).expect("networks");
    let without = good.replace(networks, "networks: {net-west: {}}");
    assert!([&silent, &not_allowed, &without].iter().all(|config| **config != good), "{good}");
    let west = crate::support::organisation::start(pair.west.folder(&[&pair.east]), &silent);
    let east = pair.start_east();
    let shows = |wanted: &str| {
        let what = format!("the problem {wanted:?}");
        let found = peer(&east, &what, |peer| peer["problem"].as_str().is_some_and(|it| it.contains(wanted)));
        assert_eq!(found["state"], "live", "{found:#}");
        let problem = has_problem(&east, "peer_unreachable")["text"].to_string();
        assert!(problem.contains(wanted) && problem.contains("2 services"), "{problem}");
        let check = run(&east, &["check"]);
        assert!(check.contains("failed   peers"), "{check}");
        assert!(run(&east, &["peers"]).contains("west is live: 2 services"));
    };
    shows("has never answered this one");
    west.reload(&good);
    peer(&east, "the gateway to be used", |peer| peer["problem"].is_null());
    west.reload(&not_allowed);
    shows("cannot be called, because no gateway leads to them");
    let refused = peer(&west, "west to hear why", |peer| peer["left_out"][0].is_string());
    let why = refused["left_out"][0].to_string();
    assert!(why.contains("`peers[].addresses` does not allow the gateway's address, 169.254.1.1"), "{why}");
    west.reload(&without);
    let here = "because this gateway knows no gateway of its own networks";
    peer(&west, "west to say it", |peer| peer["problem"].as_str().is_some_and(|it| it.contains(here)));
    assert!(has_problem(&west, "peer_unreachable")["look_at"].to_string().contains("networks[].gateways"));
    west.reload(&good);
    for gateway in [&east, &west] {
        peer(gateway, "everything to be well again", |peer| peer["problem"].is_null());
    }
}

#[test]
fn two_sides_that_both_dial_keep_their_links() {
    let pair = Pair::new();
    let west = pair.west_config(SERVICES).replace(
        "    accept: true\n",
        &format!("    accept: true\n    dial: \"127.0.0.1:{}\"\n", pair.east_port),
    );
    let dial = format!("    dial: \"127.0.0.1:{}\"\n", pair.west_port);
    let east = pair.east_config("").replace(&dial, &format!("{dial}    accept: true\n"));
    let west = crate::support::organisation::start(pair.west.folder(&[&pair.east]), &west);
    let east = crate::support::organisation::start(pair.east.folder(&[&pair.west]), &east);
    let directions = |peer: &Value| {
        let links = peer["links"].as_array().cloned().unwrap_or_default();
        let mut all: Vec<_> =
            links.iter().filter(|link| link["state"] == "live").map(|link| link["dialled"] == true).collect();
        all.sort_unstable();
        all
    };
    let both = [&west, &east]
        .map(|gateway| peer(gateway, "a link in each direction", |peer| directions(peer) == [false, true]));
    weighs(&east, "ratings.pay.west.global", 1.0);
    // A link that were replaced would be a new one, with another time.
    std::thread::sleep(Duration::from_secs(3));
    let since = |peer: &Value| {
        let links = peer["links"].as_array().cloned().unwrap_or_default();
        let live = links.iter().filter(|link| link["state"] == "live");
        live.map(|link| link["since"].to_string()).collect::<Vec<_>>()
    };
    for (gateway, before) in [&west, &east].into_iter().zip(&both) {
        assert_eq!(since(&gateway.json("/api/v1/peers")[0]), since(before), "{before:#}");
    }
}
