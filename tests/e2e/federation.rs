//! Federation: two organisations, each with its own gateway, CA and trust domain, exchange services over a link.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::problems::{has_problem, run};
use crate::support::backend::Backend;
use crate::support::client::{connect, tls_with};
use crate::support::clock;
use crate::support::dns::{Answer, NameServer};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client, hello};
use crate::support::organisation::{Organisation, free_port, start};
use crate::support::pki::Pki;
use crate::support::{Stop, eventually};

const RATINGS: &str = "ratings.pay.west.global";

/// Two organisations: west exports the services of namespace `pay`, and east imports them.
pub(crate) struct Pair {
    pub(crate) west: Organisation,
    pub(crate) east: Organisation,
    pub(crate) west_port: u16,
    pub(crate) east_port: u16,
}

impl Pair {
    pub(crate) fn new() -> Self {
        Self {
            west: Organisation::new("west", "west.example"),
            east: Organisation::new("east", "east.example"),
            west_port: free_port(),
            east_port: free_port(),
        }
    }

    /// Returns west's config with these services.
    pub(crate) fn west_config(&self, services: &str) -> String {
        let rules = "    from: [127.0.0.0/8]\n    export:\n      - {services: [\"*.pay.svc.cluster.local\"], except: \
                     [secret.pay.svc.cluster.local], as: \"{service}.{namespace}.west.global\"}\n";
        let peer = self.east.as_peer("accept: true", rules);
        let port = self.west_port;
        format!(
            "{}networks: {{net-west: {{gateways: [{{address: 127.0.0.1, sniPort: {port}, hbonePort: {port}, locality: eu/west}}]}}}}\n\
             peers:\n{peer}{services}",
            self.west.base(port)
        )
    }

    pub(crate) fn east_config(&self, more: &str) -> String {
        let rules = "    import:\n      - {services: [\"*.pay.west.global\"]}\n    staleAfter: 1s\n    expireAfter: 3s\n";
        let peer = self.west.as_peer(&format!("dial: \"127.0.0.1:{}\"", self.west_port), rules);
        format!("{}peers:\n{peer}{more}", self.east.base(self.east_port))
    }

    pub(crate) fn start_west(&self, services: &str) -> Gateway {
        start(self.west.folder(&[&self.east]), &self.west_config(services))
    }

    pub(crate) fn start_east(&self) -> Gateway {
        start(self.east.folder(&[&self.west]), &self.east_config(""))
    }
}

/// Returns a service in the namespace pay whose two endpoints are in different zones and have these weights.
fn service(name: &str, weights: [u32; 2]) -> String {
    format!(
        "  - hostname: {name}.pay.svc.cluster.local\n    namespace: pay\n    ports: [{{name: http, port: 80, targetPort: 8080}}]\n    \
         endpoints:\n      - {{address: 10.2.0.1, locality: eu/west/a, weight: {}, identity: \
         \"spiffe://west.example/ns/pay/sa/{name}\"}}\n      - {{address: 10.2.0.2, locality: eu/west/b, weight: {}, identity: \
         \"spiffe://west.example/ns/pay/sa/{name}\"}}\n      - {{address: 10.2.0.3, health: unhealthy, weight: 100}}\n",
        weights[0], weights[1]
    )
}

fn services(all: &[String]) -> String {
    format!("services:\n{}", all.concat())
}

/// Returns the entries of a service that east's clients receive; `None` while east does not know the service.
fn entries(gateway: &Gateway, service: &str) -> Option<Vec<Value>> {
    let (status, body) =
        gateway.get(&format!("/api/v1/horizon?network=net-east&cluster=east&service={service}"));
    let value: Value = serde_json::from_str(&body).ok()?;
    (status == 200).then(|| value["entries"].as_array().cloned().unwrap_or_default())
}

/// Waits until the entries of a service at east have this total weight (`standsFor`).
#[track_caller]
pub(crate) fn weighs(gateway: &Gateway, service: &str, weight: f64) {
    eventually(&format!("{service} to weigh {weight}"), || {
        let entries = entries(gateway, service)?;
        let sum: f64 = entries.iter().filter_map(|entry| entry["standsFor"].as_f64()).sum();
        ((sum - weight).abs() < 1e-9).then_some(())
    });
}

#[test]
fn f_1_and_f_2_a_gateway_weighs_what_is_ready_behind_it_in_all_zones() {
    let pair = Pair::new();
    let west = pair.start_west(&services(&[service("ratings", [3, 4]), service("secret", [1, 1])]));
    let folder = pair.east.folder(&[&pair.west]);
    let east = start(folder, &pair.east_config(""));
    weighs(&east, RATINGS, 7.0);
    let found = entries(&east, RATINGS).expect("known");
    assert_eq!(found.len(), 1, "one address, whatever the zones behind it: {found:?}");
    assert_eq!(found[0]["address"], format!("127.0.0.1:{}", pair.west_port));
    assert_eq!(
        (&found[0]["kind"], &found[0]["locality"]),
        (&"gateway".into(), &"eu/west".into()),
        "{found:?}"
    );
    assert_eq!(entries(&east, "secret.pay.west.global"), None, "it is not exported");
    assert_eq!(
        entries(&east, "ratings.pay.svc.cluster.local"),
        None,
        "the exporter's own name is not known here"
    );
    // One endpoint's weight changes, a service is added, and one is removed.
    west.reload(&pair.west_config(&services(&[service("ratings", [3, 1]), service("fees", [5, 5])])));
    weighs(&east, RATINGS, 4.0);
    weighs(&east, "fees.pay.west.global", 10.0);
    west.reload(&pair.west_config(&services(&[service("fees", [5, 5])])));
    eventually("the service to be gone", || entries(&east, RATINGS).is_none().then_some(()));
}

#[test]
fn f_4_a_lost_link_keeps_what_works_and_dead_gateways_are_taken_out() {
    let pair = Pair::new();
    let config = services(&[service("ratings", [3, 4])]);
    let mut west = pair.start_west(&config);
    let longer = pair.east_config("").replace("expireAfter: 3s", "expireAfter: 10s");
    let east = start(pair.east.folder(&[&pair.west]), &longer);
    weighs(&east, RATINGS, 7.0);
    let state = |east: &Gateway| east.json("/api/v1/registries")[0]["state"].clone();
    // West's gateway is dead, and the link with it. East keeps west's endpoints until they expire. The name of the service
    // stays after that, without endpoints.
    west.kill();
    eventually("the peer to be stale", || (state(&east) != "live").then_some(()));
    weighs(&east, RATINGS, 7.0);
    eventually("the peer to expire", || (state(&east) == "expired").then_some(()));
    assert_eq!(entries(&east, RATINGS), Some(Vec::new()), "the name stays, and has no endpoint");
    // The link and west's gateway are back.
    let _west = pair.start_west(&config);
    weighs(&east, RATINGS, 7.0);
    eventually("the peer to be live", || (state(&east) == "live").then_some(()));
}

#[test]
fn f_8_a_gateway_that_starts_while_the_peer_is_down_serves_what_it_had() {
    let pair = Pair::new();
    let mut west = pair.start_west(&services(&[service("ratings", [3, 4])]));
    let state = tempfile::tempdir().expect("a folder");
    let config = pair.east_config(&format!("state: {{dir: {}}}\n", state.path().display()));
    // The expiry is long, because east cannot reach the peer when it starts again.
    let config = config.replace("expireAfter: 3s", "expireAfter: 5m");
    // `startTimeout` is longer than the time limit of this test, so that the test fails if the start waits for the peer.
    let config = format!("aggregator: {{startTimeout: 10m}}\n{config}");
    let mut east = start(pair.east.folder(&[&pair.west]), &config);
    weighs(&east, RATINGS, 7.0);
    east.signal("TERM");
    east.ended();
    west.kill();
    let east = start(pair.east.folder(&[&pair.west]), &config);
    weighs(&east, RATINGS, 7.0);
    assert_ne!(east.json("/api/v1/peers")[0]["state"], "live", "the peer is down");
}

#[test]
fn f_8_a_peer_without_a_link_is_served_after_a_restart_and_a_reload_for_as_long_as_its_gateway_answers() {
    let pair = Pair::new();
    let mut west = pair.start_west(&services(&[service("ratings", [3, 4])]));
    let folder = tempfile::tempdir().expect("a folder");
    let config = pair.east_config(&format!("state: {{dir: {}}}\n", folder.path().display()));
    let config = config.replace("expireAfter: 3s", "expireAfter: 8s");
    let mut east = start(pair.east.folder(&[&pair.west]), &config);
    weighs(&east, RATINGS, 7.0);
    east.signal("TERM");
    east.ended();
    west.kill();
    // West's gateway accepts connections, and refuses each link.
    let answer = || {
        let listener = eventually("the port", || TcpListener::bind(("127.0.0.1", pair.west_port)).ok());
        Backend::serve(listener.try_clone().expect("a descriptor"), drop);
        listener
    };
    let answering = answer();
    let east = start(pair.east.folder(&[&pair.west]), &config);
    let keeps_serving = || {
        eventually("the peer to be demoted", || (state(&east) == "demoted").then_some(()));
        // Twice the time after which the peer expires if its gateway does not answer.
        let until = Instant::now() + Duration::from_secs(16);
        while Instant::now() < until {
            assert_eq!(state(&east), "demoted");
            std::thread::sleep(Duration::from_millis(100));
        }
        weighs(&east, RATINGS, 7.0);
    };
    keeps_serving();
    east.told("so its endpoints are used only where no other registry has a ready endpoint");
    east.reload(&config.replace("staleAfter: 1s", "staleAfter: 2s"));
    keeps_serving();
    socket2::SockRef::from(&answering).shutdown(Shutdown::Both).expect("shut");
    eventually("the peer to expire", || (state(&east) == "expired").then_some(()));
    assert_eq!(entries(&east, RATINGS), Some(Vec::new()));
    east.told("so its endpoints are removed (expired)");
    drop(answering);
    let _answering = answer();
    weighs(&east, RATINGS, 7.0);
    east.told("but its endpoints are used again where no other registry has a ready endpoint");
}

/// Replaces an organisation's authority: announces its new root in `roots.pem` beside the old root. The gateway's certificate
/// stays.
fn replace_authority(organisation: &mut Organisation, folder: &Path) {
    let old = organisation.pki.ca_pem();
    organisation.pki = Pki::new(&format!("the next CA of {}", organisation.name));
    // Peers learn of the new root while the old root is still valid.
    std::fs::write(folder.join("roots.pem"), format!("{old}{}", organisation.pki.ca_pem())).expect("written");
}

#[test]
fn roots_that_a_peer_announced_are_used_after_a_restart() {
    let mut pair = Pair::new();
    let west_config = pair.west_config(&services(&[service("ratings", [3, 4])]));
    let west = start(pair.west.folder(&[&pair.east]), &west_config);
    let state = tempfile::tempdir().expect("a folder");
    let east_config = pair.east_config(&format!("state: {{dir: {}}}\n", state.path().display()));
    // East's file with west's root is the same at each start.
    let start_east = |pair: &Pair, file: &str| {
        let folder = pair.east.folder(&[]);
        std::fs::write(folder.path().join("west.pem"), file).expect("written");
        start(folder, &east_config)
    };
    let file = pair.west.pki.ca_pem();
    let mut east = start_east(&pair, &file);
    weighs(&east, RATINGS, 7.0);
    replace_authority(&mut pair.west, west.folder());
    let kept = state.path().join("peers/west.roots.pem");
    let has = |roots: &str| std::fs::read_to_string(&kept).is_ok_and(|text| text.contains(roots));
    let of_next = pair.west.pki.ca_pem().replace("\r\n", "\n");
    eventually("the announced roots to be kept", || has(of_next.trim()).then_some(()));
    // From here on, only the new root verifies the certificate of west's gateway.
    pair.west.certify(west.folder());
    std::fs::write(west.folder().join("roots.pem"), pair.west.pki.ca_pem()).expect("written");
    eventually("the new root alone", || (!has(file.replace("\r\n", "\n").trim())).then_some(()));
    east.kill();
    let mut east = start_east(&pair, &file);
    let is_live = |east: &Gateway| east.json("/api/v1/peers")[0]["state"] == "live";
    eventually("the link with the new root", || is_live(&east).then_some(()));
    // Without the kept roots, east has only the file, which does not verify the peer.
    east.kill();
    std::fs::write(&kept, "damaged").expect("written");
    let east = start_east(&pair, &file);
    eventually("the problem", || {
        let status = east.json("/api/v1/status")["identity"].to_string();
        status.contains("west.roots.pem").then_some(())
    });
    assert!(!is_live(&east) && state.path().join("peers/west.roots.pem.damaged").exists());
    drop(west);
}

#[test]
fn times_of_export_are_those_of_the_first_export_also_after_a_restart() {
    let pair = Pair::new();
    let state = tempfile::tempdir().expect("a folder");
    let at_west = |more: &str| {
        let config = pair.west_config(&services(&[service("ratings", [3, 4])]));
        start(
            pair.west.folder(&[&pair.east]),
            &format!("{config}state: {{dir: {}}}\n{more}", state.path().display()),
        )
    };
    let mut west = at_west("");
    let east = pair.start_east();
    weighs(&east, RATINGS, 7.0);
    let file = state.path().join("export-times");
    let text = || std::fs::read_to_string(&file).unwrap_or_default();
    let line = || text().lines().find(|line| line.contains(RATINGS)).map(str::to_owned);
    let first = eventually("the time in the file", line);
    let (before, time) = first.rsplit_once(' ').expect("a time");
    assert_eq!(before, format!("east {RATINGS}"));
    let time: u64 = time.parse().expect("seconds");
    west.kill();
    // The file is rewritten as if the service had been exported 1,000 s earlier.
    let (old, mut list) = (time - 1_000, Vec::new());
    list.extend(format!("isthmus export times 1\n{before} {old}\n").into_bytes());
    let sum = twox_hash::XxHash3_64::oneshot(&list);
    list.extend(format!("end 1 {sum:016x}\n").into_bytes());
    std::fs::write(&file, list).expect("written");
    let _west = at_west("");
    drop(east);
    let leases = tempfile::tempdir().expect("a folder");
    let names = format!(
        "state: {{dir: {}}}\ndnsServer: {{bind: \"127.0.0.1:0\", zones: [global], vips: [\"240.250.0.0/16\"]}}\n",
        leases.path().display()
    );
    let _east = start(pair.east.folder(&[&pair.west]), &pair.east_config(&names));
    eventually("the time on the other side", || {
        let text = std::fs::read_to_string(leases.path().join("virtual-addresses")).ok()?;
        text.contains(&format!("{RATINGS} {old} ")).then_some(())
    });
}

#[test]
fn f_7_of_two_peers_that_claim_one_name_the_first_has_it_and_the_other_is_shown() {
    let pair = Pair::new();
    let north = Organisation::new("north", "north.example");
    let north_port = free_port();
    let rules = "    from: [127.0.0.0/8]\n    export:\n      - {services: [\"*.pay.svc.cluster.local\"], as: \
                 \"{service}.{namespace}.west.global\"}\n";
    let of_north = format!(
        "{}networks: {{net-north: {{gateways: [{{address: 127.0.0.1, sniPort: {north_port}}}]}}}}\npeers:\n{}{}",
        north.base(north_port),
        pair.east.as_peer("accept: true", rules),
        services(&[service("ratings", [50, 50]), service("other", [1, 1])]).replace("west.example", "north.example")
    )
    .replace("10.2.", "10.3.");
    let north_gateway = start(north.folder(&[&pair.east]), &of_north);
    let west = pair.start_west(&services(&[service("ratings", [3, 4])]));
    let import = "    import:\n      - {services: [\"*.pay.west.global\"]}\n";
    let config = pair.east_config(&north.as_peer(&format!("dial: \"127.0.0.1:{north_port}\""), import));
    let east = start(pair.east.folder(&[&pair.west, &north]), &config);
    weighs(&east, RATINGS, 7.0);
    weighs(&east, "other.pay.west.global", 2.0);
    weighs(&east, RATINGS, 7.0);
    let shown = eventually("the conflict", || {
        let shown = east.json(&format!("/api/v1/services/{RATINGS}"));
        shown["conflicts"].as_array().is_some_and(|conflicts| !conflicts.is_empty()).then_some(shown)
    });
    assert!(shown.to_string().contains("north/pay"), "{shown}");
    drop((west, north_gateway));
}

#[test]
fn only_the_gateway_of_a_peer_opens_a_link() {
    let pair = Pair::new();
    let west = pair.start_west(&services(&[service("ratings", [3, 4])]));
    let stranger = Pki::new("the CA of a stranger");
    let gateway_of_east = pair.east.identity();
    let open = |authority: &Pki, identity: &str| {
        let issued = authority.issue(&[], Some(identity));
        let config = client(Some(issued), &["isthmus-peer/1"]);
        let mut stream = match tls_with(config, west.listener("mesh"), "unused.example") {
            Ok(stream) => stream,
            Err(error) => return error.to_string(),
        };
        // The HTTP/2 preface and SETTINGS; the server answers them if it accepts the client.
        let asked = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
        match asked.and_then(|()| stream.read(&mut [0; 64])) {
            Ok(0) => "closed".to_owned(),
            Ok(_) => "served".to_owned(),
            Err(error) => error.to_string(),
        }
    };
    assert_eq!(open(&pair.east.pki, &gateway_of_east), "served", "the test asks as a gateway does");
    for (authority, identity) in [
        (&stranger, &*gateway_of_east),
        (&pair.east.pki, "spiffe://east.example/ns/front/sa/web"),
        (&pair.east.pki, "spiffe://west.example/ns/isthmus/sa/gateway"),
        (&pair.west.pki, "spiffe://west.example/ns/isthmus/sa/gateway"),
    ] {
        let answer = open(authority, identity);
        assert_ne!(answer, "served", "{identity}");
    }
    // Silent connections do not keep a peer from opening its link.
    let silent: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = connect(west.listener("mesh"));
            stream.write_all(&hello(&["isthmus-peer/1"])).expect("sent");
            stream
        })
        .collect();
    let east = pair.start_east();
    drop(silent);
    weighs(&east, RATINGS, 7.0);
}

#[test]
fn f_11_clocks_an_hour_apart_change_nothing_and_check_names_the_side_that_is_ahead() {
    const HOUR: i64 = 3600;
    for (of_west, west_is) in [(HOUR, "ahead of"), (-HOUR, "behind")] {
        let Some(environment) = clock::ahead_by("f_11_clocks_an_hour_apart", of_west) else { return };
        let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
        let pair = Pair::new();
        let config = pair.west_config(&services(&[service("ratings", [3, 4])]));
        let mut west = Gateway::start_in(pair.west.folder(&[&pair.east]), &config, &environment);
        let folder = pair.east.folder(&[&pair.west]);
        let east = start(folder, &pair.east_config(""));
        weighs(&east, RATINGS, 7.0);
        // Heartbeats are answered. Their round-trip time is measured with the monotonic clock, which the test does not shift.
        let link = eventually("a heartbeat", || {
            let link = east.json("/api/v1/peers")[0]["links"][0].clone();
            link["round_trip_ms"].is_number().then_some(link)
        });
        assert!(link["round_trip_ms"].as_f64().is_some_and(|time| (0.0..5_000.0).contains(&time)), "{link}");
        assert_eq!(link["state"], "live", "{link}");
        let skew = link["clock_skew_ms"].as_i64().expect("a number");
        assert!((skew - of_west * 1_000).abs() < 60_000, "{skew}");
        west.reload(&pair.west_config(&services(&[service("ratings", [3, 1])])));
        weighs(&east, RATINGS, 4.0);
        // Each gateway reports the other's clock: by how much it is ahead or behind.
        let east_is = if of_west > 0 { "behind" } else { "ahead of" };
        for (gateway, peer, way) in [(&east, "west", west_is), (&west, "east", east_is)] {
            let text = run(gateway, &["check"]);
            let line =
                text.lines().find(|line| line.contains("peer_clock")).unwrap_or_else(|| panic!("{text}"));
            let shown = |amount: &str| {
                line.contains(&format!(
                    "the clock of the peer {peer} is {amount} {way} the clock of this gateway"
                ))
            };
            assert!(shown("1 h 0 min") || shown("59 min") || shown("1 h 1 min"), "{line}");
        }
        // A lost peer becomes stale and expires after the same time as with clocks that agree.
        west.kill();
        let lost = Instant::now();
        eventually("the peer to expire", || {
            (east.json("/api/v1/registries")[0]["state"] == "expired").then_some(())
        });
        assert!(lost.elapsed() >= Duration::from_secs(2), "expired after {:?}", lost.elapsed());
    }
}

#[test]
fn f_11_a_restart_with_a_clock_an_hour_back_or_ahead_moves_no_virtual_address() {
    let pair = Pair::new();
    let west = pair.start_west(&services(&[service("ratings", [3, 4]), service("fees", [1, 1])]));
    let state = tempfile::tempdir().expect("a folder");
    let more = format!(
        "state: {{dir: {}}}\ndnsServer: {{bind: \"127.0.0.1:0\", zones: [global]}}\n",
        state.path().display()
    );
    let config = pair.east_config(&more);
    let addresses = |gateway: &Gateway, name: &str| {
        let found = eventually("addresses", || {
            let service: Value =
                serde_json::from_str(&gateway.get(&format!("/api/v1/services/{name}")).1).ok()?;
            service["addresses"].as_array().filter(|all| !all.is_empty()).cloned()
        });
        Value::from(found).to_string()
    };
    let mut before = None;
    for seconds in [0, -3600, 3600] {
        let Some(environment) = clock::ahead_by("f_11_a_restart", seconds) else { return };
        let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
        let mut east = Gateway::start_in(pair.east.folder(&[&pair.west]), &config, &environment);
        weighs(&east, RATINGS, 7.0);
        let found = [RATINGS, "fees.pay.west.global"].map(|name| addresses(&east, name));
        assert_eq!(*before.get_or_insert_with(|| found.clone()), found, "with a clock off by {seconds} s");
        // `explain` and the dashboard show the virtual addresses too.
        let shown: Vec<String> = serde_json::from_str(&found[0]).expect("a list");
        let answer =
            east.json(&format!("/api/v1/explain?sni=outbound_.80_._.{RATINGS}"))["steps"].to_string();
        let page = east.get(&format!("/?explain={RATINGS}")).1;
        let wanted = format!("the virtual addresses of the service are {}", shown.join(" and "));
        assert!(
            answer.contains("a service of the peer west") && answer.contains(&wanted),
            "{wanted}: {answer}"
        );
        assert!(page.contains(&wanted), "{wanted} on the dashboard");
        east.signal("TERM");
        east.ended();
    }
    drop(west);
}

/// Returns the services section with twenty services, each of weight 7.
fn twenty() -> String {
    let all: Vec<String> = (0..20).map(|number| service(&format!("s{number}"), [3, 4])).collect();
    services(&all)
}

/// Fails unless each of the twenty services weighs 7.
#[track_caller]
fn all_twenty_weigh(gateway: &Gateway) {
    for number in 0..20 {
        let name = format!("s{number}.pay.west.global");
        let sum: f64 = entries(gateway, &name)
            .unwrap_or_else(|| panic!("{name} is unknown"))
            .iter()
            .filter_map(|entry| entry["standsFor"].as_f64())
            .sum();
        assert!((sum - 7.0).abs() < 1e-9, "{name} weighs {sum}");
    }
}

fn state(gateway: &Gateway) -> String {
    gateway.json("/api/v1/registries")[0]["state"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_peer_that_restarts_before_a_registry_of_it_can_be_read_withdraws_nothing() {
    let pair = Pair::new();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("fees.yaml");
    let listed = |all: &[String]| std::fs::write(&file, services(all)).expect("written");
    let config = |weights| {
        let more = services(&[service("ratings", weights), service("ratingz", [1, 1])]);
        format!(
            "aggregator: {{startTimeout: 1s}}\nregistries: [{{file: {{path: {}, cluster: other, network: net-west}}}}]\n{}",
            file.display(),
            pair.west_config(&more)
        )
    };
    let (fees, cart) = ("fees.pay.west.global", "cart.pay.west.global");
    listed(&[service("fees", [2, 3]), service("cart", [1, 1])]);
    let mut west = start(pair.west.folder(&[&pair.east]), &config([3, 4]));
    let east = pair.start_east();
    weighs(&east, fees, 5.0);
    weighs(&east, cart, 2.0);
    let explained = east.json(&format!("/api/v1/explain?sni={RATINGS}"));
    assert_eq!(explained["near"], serde_json::json!([]), "the name exists: {explained}");
    west.signal("TERM");
    west.ended();
    std::fs::remove_file(&file).expect("removed");
    let west = start(pair.west.folder(&[&pair.east]), &config([1, 1]));
    // The listing of the new process has arrived.
    weighs(&east, RATINGS, 2.0);
    weighs(&east, fees, 5.0);
    east.told("the peer has not read all its registries yet");
    listed(&[service("fees", [2, 2])]);
    weighs(&east, fees, 4.0);
    eventually("the service to be gone that the registry does not have", || {
        entries(&east, cart).is_none().then_some(())
    });
    drop(west);
}

#[test]
fn a_peer_with_host_names_is_found_by_the_servers_of_the_config_and_outlasts_their_outage() {
    const NAME: &str = "gw.west.test";
    let servers = NameServer::start();
    servers.points(NAME, [127, 0, 0, 1].into());
    let pair = Pair::new();
    let west = pair.west_config(&services(&[service("ratings", [3, 4])]));
    let west = west.replace("address: 127.0.0.1,", &format!("address: {NAME},"));
    let _west = start(pair.west.folder(&[&pair.east]), &west);
    let east = pair
        .east_config(&format!("dns: {{servers: [\"{}\"], maxTtl: 1s, holdMissing: 1s}}\n", servers.address));
    let east = east.replace("dial: \"127.0.0.1:", &format!("dial: \"{NAME}:"));
    let east = start(pair.east.folder(&[&pair.west]), &east);
    weighs(&east, RATINGS, 7.0);
    // The gateway is probed each second, and two probes in a row decide.
    servers.answer(NAME, Answer::Failure);
    let asked = servers.asked(NAME);
    eventually("several look-ups to fail", || (servers.asked(NAME) > asked + 12).then_some(()));
    weighs(&east, RATINGS, 7.0);
    let peer = east.json("/api/v1/peers")[0].clone();
    assert_eq!((&peer["state"], &peer["problem"]), (&"live".into(), &Value::Null), "{peer}");
    servers.answer(NAME, Answer::Unknown);
    eventually("the gateway without an address to be left out", || {
        let peer = east.json("/api/v1/peers")[0].clone();
        peer["problem"].as_str().is_some_and(|text| text.contains("does not resolve")).then_some(())
    });
}

#[test]
fn f_3_a_peer_that_restarts_empty_withdraws_nothing_within_the_guard() {
    let pair = Pair::new();
    let mut west = pair.start_west(&twenty());
    let config =
        pair.east_config("aggregator: {withdrawalHold: 60s}\n").replace("expireAfter: 3s", "expireAfter: 5m");
    let east = start(pair.east.folder(&[&pair.west]), &config);
    weighs(&east, "s19.pay.west.global", 7.0);
    eventually("all services", || (east.json("/api/v1/peers")[0]["imported"] == 20).then_some(()));
    west.signal("TERM");
    west.ended();
    let west = pair.start_west("");
    eventually("the withdrawal to be held", || {
        all_twenty_weigh(&east);
        (state(&east) == "held").then_some(())
    });
    assert!(
        has_problem(&east, "registry_held")["text"].as_str().is_some_and(|text| text.contains("20 of 20")),
        "the operator is told"
    );
    // The peer's services come back before anything was withdrawn.
    west.reload(&pair.west_config(&twenty()));
    eventually("the peer to be live again", || {
        all_twenty_weigh(&east);
        (state(&east) == "live").then_some(())
    });
    // If the peer stays empty, its services are withdrawn after `withdrawalHold`.
    let east_config = config.replace("withdrawalHold: 60s", "withdrawalHold: 1s");
    east.reload(&east_config);
    eventually("the services after the reload", || {
        (state(&east) == "live" && entries(&east, "s7.pay.west.global").is_some_and(|all| !all.is_empty()))
            .then_some(())
    });
    west.reload(&pair.west_config(""));
    eventually("the services to be gone", || entries(&east, "s7.pay.west.global").is_none().then_some(()));
}

#[test]
fn a_peer_whose_operator_removes_us_is_forgotten_at_once_also_on_disk_and_not_twice_in_a_row() {
    let pair = Pair::new();
    let west = pair.start_west(&twenty());
    let folder = tempfile::tempdir().expect("a folder");
    let more = format!("aggregator: {{withdrawalHold: 5m}}\nstate: {{dir: {}}}\n", folder.path().display());
    let config = pair.east_config(&more).replace("expireAfter: 3s", "expireAfter: 5m");
    let mut east = start(pair.east.folder(&[&pair.west]), &config);
    weighs(&east, "s19.pay.west.global", 7.0);
    let whole = pair.west_config(&twenty());
    let (head, rest) = whole.split_once("peers:\n").expect("peers");
    let without = format!("{head}{}", &rest[rest.find("services:\n").expect("services")..]);
    west.reload(&without);
    // The guard, which waits for five minutes, does not hold it back.
    eventually("the services to be forgotten", || {
        entries(&east, "s7.pay.west.global").is_none().then_some(())
    });
    let peer = eventually("the peer to be down", || {
        let peer = east.json("/api/v1/peers")[0].clone();
        (peer["state"] == "down").then_some(peer)
    });
    assert_eq!(peer["imported"], 0, "{peer:#}");
    east.told("so its services are removed: the peer was removed from the config");
    // Later refusals do not hide why the link ended.
    eventually("the refusal of a later connection", || {
        let problem = east.json("/api/v1/peers")[0]["problem"].to_string();
        problem
            .contains("the peer ended the last link: the peer was removed from the config; now: ")
            .then_some(())
    });
    // A restart does not bring the services back from the disk.
    east.signal("TERM");
    east.ended();
    let east = start(pair.east.folder(&[&pair.west]), &config);
    assert_eq!(entries(&east, "s7.pay.west.global"), None);
    // The operator of west adds the peer again and removes it again, twice. The second removal within a short time is not
    // applied at once.
    west.reload(&whole);
    weighs(&east, "s19.pay.west.global", 7.0);
    west.reload(&without);
    eventually("the services to be forgotten", || {
        entries(&east, "s7.pay.west.global").is_none().then_some(())
    });
    west.reload(&whole);
    weighs(&east, "s19.pay.west.global", 7.0);
    west.reload(&without);
    east.told("for the second time within");
    all_twenty_weigh(&east);
}

#[test]
fn a_peer_that_dials_and_only_exports_misses_nothing_and_its_services_go_with_it() {
    let pair = Pair::new();
    let dial = |port: u16| format!("dial: \"127.0.0.1:{port}\"");
    let config = pair
        .east_config("aggregator: {withdrawalHold: 5m}\n")
        .replace("expireAfter: 3s", "expireAfter: 5m")
        .replace(&dial(pair.west_port), "accept: true");
    let east = start(pair.east.folder(&[&pair.west]), &config);
    let whole = pair.west_config(&twenty()).replace("accept: true", &dial(pair.east_port));
    let west = start(pair.west.folder(&[&pair.east]), &whole);
    let registry = |gateway: &Gateway| {
        let all = gateway.json("/api/v1/registries");
        let found = all.as_array().and_then(|all| all.iter().find(|one| one["name"] == "peer/east"));
        found.map(|one| one["state"].clone())
    };
    // West imports nothing, so nothing of the peer can be missing, whether there is a link or not.
    eventually("a complete registry", || (registry(&west) == Some("live".into())).then_some(()));
    weighs(&east, "s19.pay.west.global", 7.0);
    let (head, rest) = whole.split_once("peers:\n").expect("peers");
    west.reload(&format!("{head}{}", &rest[rest.find("services:\n").expect("services")..]));
    eventually("the services to be forgotten", || {
        entries(&east, "s7.pay.west.global").is_none().then_some(())
    });
    east.told("so its services are removed: the peer was removed from the config");
}

#[test]
fn a_peer_changes_its_authority_under_load_by_what_it_announces_and_no_file_of_ours_changes() {
    let (pair, backend) = (Pair::new(), Backend::echo());
    let mut west = pair.start_west(&format!(
        "services:\n  - {{hostname: echo.pay.svc.cluster.local, namespace: pay, ports: [{{name: p, port: 80, targetPort: {}}}], \
         endpoints: [{{address: 127.0.0.1}}]}}\n",
        backend.address.port()
    ));
    let east = pair.start_east();
    let linked = || {
        eventually("a live link", || {
            let link = west.json("/api/v1/peers")[0]["links"][0].clone();
            (link["state"] == "live").then(|| link["since"].to_string())
        })
    };
    let first_link = linked();
    let next = Pki::new("the next CA of east");
    let web = |authority: &Pki| {
        client(Some(authority.issue(&[], Some("spiffe://east.example/ns/front/sa/web"))), &["h2"])
    };
    let (by_old, by_new) = (web(&pair.east.pki), web(&next));
    let address = west.listener("mesh");
    let answers = |config: &Arc<rustls::ClientConfig>| {
        let called = Hbone::connect(address, config.clone()).ok();
        called.and_then(|hbone| hbone.open("echo.pay.west.global:80").ok()?.echo("x").ok()).is_some()
    };
    assert!(answers(&by_old) && !answers(&by_new), "the new authority is unknown");
    let (stop, calls, failures) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let issued = RwLock::new(by_old.clone());
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // No call that is under way has the certificate of before.
                    let config = issued.read().expect("whole");
                    calls.fetch_add(1, Ordering::Relaxed);
                    failures.fetch_add(usize::from(!answers(&config)), Ordering::Relaxed);
                }
            });
        }
        let called = |more: usize| {
            let until = calls.load(Ordering::Relaxed) + more;
            eventually("calls", || (calls.load(Ordering::Relaxed) >= until).then_some(()));
        };
        called(20);
        // East first gets a file with both roots, then certificates of the new authority, then a file with the new root alone.
        write(&east, "roots.pem", &(pair.east.pki.ca_pem() + &next.ca_pem()));
        eventually("the new root", || answers(&by_new).then_some(()));
        called(20);
        let own = next.issue(&[], Some(&pair.east.identity()));
        write(&east, "key.pem", &own.key_pem);
        write(&east, "cert.pem", &own.certificate_pem);
        *issued.write().expect("whole") = by_new.clone();
        called(20);
        write(&east, "roots.pem", &next.ca_pem());
        eventually("the end of the old root", || {
            Hbone::connect(address, by_old.clone()).is_err().then_some(())
        });
        called(20);
    });
    assert_eq!(failures.into_inner(), 0, "of {} calls", calls.load(Ordering::Relaxed));
    assert!(answers(&by_new) && !answers(&by_old));
    // The link that the old authority certified has ended; the gateways have opened one with the new certificate.
    eventually("a link of the new authority", || (linked() != first_link).then_some(()));
    let file = std::fs::read_to_string(west.folder().join("east.pem")).expect("west's file");
    assert_eq!(file, pair.east.pki.ca_pem(), "nobody has changed west's file");
    // Only this process knows the new root, and its operator is told what to do before a replica starts without it.
    let problem = has_problem(&west, "peer_root_not_in_file");
    assert!(problem["text"].to_string().contains("isthmus peer roots east"), "{problem}");
    let printed = run(&west, &["peer", "roots", "east"]);
    assert_eq!(printed.replace("\r\n", "\n").trim(), next.ca_pem().replace("\r\n", "\n").trim());
    // A replica that starts with the file alone refuses the peer, and both sides say why.
    west.kill();
    let west = pair.start_west("services: []\n");
    let fault = |gateway: &Gateway, words: &str| {
        let peer = gateway.json("/api/v1/peers")[0].clone();
        let links = peer["links"].as_array().cloned().unwrap_or_default();
        links.iter().any(|link| link["problem"].to_string().contains(words)).then_some(peer)
    };
    let peer = eventually("the refusal in the table of links", || {
        fault(
            &west,
            "refused a connection that names the identity of the peer: the certificate is not trusted",
        )
    });
    assert!(peer["problem"].to_string().contains("refused a connection"), "{peer:#}");
    eventually("the refusal on the other side", || fault(&east, "not accept this gateway's certificate"));
    write(&west, "east.pem", &printed);
    eventually("a live link", || (west.json("/api/v1/peers")[0]["state"] == "live").then_some(()));
}

/// Replaces a file of a gateway in one step.
fn write(gateway: &Gateway, name: &str, text: &str) {
    let next = gateway.folder().join(format!(".{name}"));
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, gateway.folder().join(name)).expect("renamed");
}

#[test]
fn an_imported_service_is_explained_by_the_gateways_that_its_callers_get() {
    let pair = Pair::new();
    let plain = "  - {hostname: raw.pay.svc.cluster.local, namespace: pay, ports: [{name: p, port: 80}], endpoints: [{address: \
                 10.2.0.9, tls: none}]}\n";
    let _west = pair.start_west(&services(&[service("ratings", [3, 4]), plain.to_owned()]));
    let east = pair.start_east();
    weighs(&east, RATINGS, 7.0);
    let admin = format!("http://{}", east.admin());
    let explain = |name: &str| {
        let output = std::process::Command::new(crate::support::gateway::BINARY)
            .args(["explain", name, "--admin", &admin])
            .output()
            .expect("the binary runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, text) = explain(RATINGS);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("imported: not_exported") && text.contains("Envoy by SNI: 1 gateway"), "{text}");
    let raw = eventually("the plain-text service", || {
        let (_, text) = explain("raw.pay.west.global");
        text.contains("is a service of the peer west").then_some(text)
    });
    assert!(raw.contains("Envoy by SNI: none, no TLS"), "{raw}");
}
