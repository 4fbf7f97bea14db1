//! Tests of the screen as text, for invented overviews.

use std::time::Duration;

use super::*;
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::{Calls, Endpoint};
use isthmus_api::listed::Part;
use isthmus_api::network::{Distance, Gateway, Network};
use isthmus_api::overview::Services;
use isthmus_api::status::Problem;
use isthmus_api::text::is_deceptive;

fn text(lines: &[Line]) -> Vec<String> {
    lines.iter().map(|line| line.iter().map(|(_, part)| part.as_str()).collect()).collect()
}

fn overview(names: &[&str], opened: u64) -> Box<Overview> {
    let service = |name: &&str| Service {
        name: (*name).to_owned(),
        state: states::OK.to_owned(),
        endpoints: 1,
        ready: 1,
        opened,
        bytes_up: opened * 1024,
        ..Service::default()
    };
    let shown: Vec<Service> = names.iter().map(service).collect();
    let services = Services { total: names.len(), pages: 3, page: 1, shown, ..Services::default() };
    let mut overview = Overview { services, ..Overview::default() };
    overview.status.ready = true;
    overview.traffic.opened = opened;
    Box::new(overview)
}

#[test]
fn each_view_fits_the_screen_and_the_keys_are_on_it() {
    let mut top = Top::new("unix:/a".to_owned());
    assert!(text(&top.lines((80, 24)))[0].contains("connecting to unix:/a"));
    top.received(Ok(overview(&["a.test"; 90], 7)), Instant::now());
    for size in [(80, 24), (40, 10), (200, 60), (1, 1), (5, 3)] {
        for view in ['1', '2', '3', '4', '5', '6'] {
            assert_eq!(top.pressed(Key::Character(view)), Action::None);
            let lines = text(&top.lines(size));
            assert_eq!(lines.len(), size.1, "{size:?}");
            assert!(lines.iter().all(|line| line.chars().count() <= size.0), "{size:?}: {lines:?}");
        }
    }
    let lines = text(&top.lines((120, 24)));
    assert!(lines[0].contains("ready, no problems") && lines[23].starts_with("q quit"), "{lines:?}");
}

#[test]
fn a_narrow_screen_has_all_columns_and_marks_what_is_cut() {
    let mut top = Top::new("unix:/a".to_owned());
    let mut long = overview(&["checkout.a-namespace-with-a-long-name.svc.cluster.local", "b.test"], 7);
    long.services.shown[0].past.opened = vec![1; 60];
    let problem = |text: &str| Problem {
        code: "endpoint_failing".to_owned(),
        text: text.to_owned(),
        ..Problem::default()
    };
    long.status.problems = vec![problem(&"a text of many words ".repeat(9))];
    top.received(Ok(long), Instant::now());
    let lines = text(&top.lines((80, 24)));
    let row = lines.iter().find(|line| line.starts_with("checkout")).expect("a row");
    let heading = lines.iter().find(|line| line.contains("HEALTH")).expect("a heading");
    assert!(row.contains('…') && heading.contains("FAILED") && heading.contains("15 MIN"), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("endpoint_failing") && line.ends_with('…')), "{lines:?}");
    assert!(
        lines.iter().any(|line| line.contains(" 6 problems ")) && lines[23].ends_with("esc back"),
        "{lines:?}"
    );
}

#[test]
fn networks_have_distance_ring_gateways_up_and_share() {
    let distance = Distance {
        ring: 2,
        round_trip_ms: Some(12.5),
        source: "measured here".to_owned(),
        age_seconds: Some(1),
    };
    let network = Network {
        name: "net-west".to_owned(),
        access: "gateway".to_owned(),
        gateways: 2,
        gateways_up: 1,
        distance: Some(distance),
        share: Some(0.3125),
        ..Network::default()
    };
    let dead = Gateway {
        network: "net-west".to_owned(),
        address: "192.0.2.1".to_owned(),
        sni_port: Some(15443),
        usable: true,
        state: "unreachable".to_owned(),
        ..Gateway::default()
    };
    let mut overview = overview(&[], 0);
    (overview.networks.shown, overview.gateways.shown) = (vec![network], vec![dead]);
    let mut top = Top::new(String::new());
    top.received(Ok(overview), Instant::now());
    top.pressed(Key::Character('3'));
    let lines = text(&top.lines((140, 24)));
    let words = |at: usize| lines[at].split_whitespace().collect::<Vec<_>>().join(" ");
    let shown: Vec<String> = (3..6).map(words).collect();
    assert_eq!(
        shown,
        [
            "NETWORK AND GATEWAYS ACCESS OR STATE DISTANCE RING UP SHARE ENDPOINTS",
            "net-west gateway 12.5 ms (measured here) 2 1 of 2 31.2 % 0 endpoints, ready weight 0",
            "192.0.2.1 sni 15443 unreachable",
        ]
    );
}

#[test]
fn a_late_answer_turns_no_page_back() {
    let mut top = Top::new(String::new());
    top.received(Ok(overview(&["a.test"], 1)), Instant::now());
    assert_eq!(top.pressed(Key::Character('n')), Action::Ask);
    assert!(top.path().contains("page=2"), "{}", top.path());
    // This answer was under way when the key was pressed.
    top.received(Ok(overview(&["a.test"], 2)), Instant::now());
    assert_eq!(top.pressed(Key::Character('n')), Action::Ask);
    assert!(top.path().contains("page=3"), "{}", top.path());
}

#[test]
fn rates_are_those_since_the_answer_before() {
    let (mut top, begun) = (Top::new(String::new()), Instant::now());
    top.received(Ok(overview(&["a.test"], 100)), begun);
    top.received(Ok(overview(&["a.test"], 120)), begun + Duration::from_secs(2));
    let lines = text(&top.lines((120, 24))).join("\n");
    assert!(
        lines.contains("10 new/s") && lines.contains("10.0  ") && lines.contains("10.0 KiB/s"),
        "{lines}"
    );
    // A restarted gateway counts from 0 again.
    top.received(Ok(overview(&["a.test"], 1)), begun + Duration::from_secs(3));
    assert!(text(&top.lines((120, 24))).join("\n").contains("0 new/s"));
}

#[test]
fn a_gateway_that_is_away_is_said_to_be_and_comes_back() {
    let mut top = Top::new("unix:/a".to_owned());
    top.received(Ok(overview(&["a.test"], 1)), Instant::now());
    top.received(Err("refused".to_owned()), Instant::now());
    let lines = text(&top.lines((80, 24)));
    assert!(lines[0].starts_with("no answer from unix:/a: refused") && lines[1].contains("old"), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("a.test")));
    top.received(Ok(overview(&["a.test"], 1)), Instant::now());
    assert!(!text(&top.lines((80, 24))).join("").contains("no answer"));
}

#[test]
fn keys_search_turn_pages_and_quit() {
    let mut top = Top::new(String::new());
    top.received(Ok(overview(&["a.test"], 1)), Instant::now());
    assert_eq!(top.pressed(Key::Character('n')), Action::Ask);
    assert_eq!(top.path(), "/api/v1/overview?q=&page=2");
    for key in "/aq&".chars() {
        assert_eq!(top.pressed(Key::Character(key)), Action::None, "a letter of the search is no order");
    }
    assert!(text(&top.lines((80, 24)))[23].contains("name contains: aq&_"));
    assert_eq!(top.pressed(Key::Enter), Action::Ask);
    assert_eq!(top.path(), "/api/v1/overview?q=aq%26&page=1");
    assert_eq!(top.pressed(Key::Escape), Action::Ask);
    assert_eq!(top.path(), "/api/v1/overview?q=&page=1");
    assert_eq!((top.pressed(Key::Character('q')), top.pressed(Key::Quit)), (Action::Quit, Action::Quit));
}

#[test]
fn keys_come_from_bytes_however_they_are_cut() {
    let all = b"a\x1b[A\x1b[1;5B\x1bOC\x7f\r\x1b[200~\xff\x03";
    let expected =
        [Key::Character('a'), Key::Up, Key::Down, Key::Right, Key::Backspace, Key::Enter, Key::Quit];
    assert_eq!(Key::take(&mut all.to_vec()), expected);
    let (mut begun, mut keys) = (Vec::new(), Vec::new());
    for byte in all {
        begun.push(*byte);
        keys.extend(Key::take(&mut begun));
    }
    assert_eq!(keys, expected);
    let mut endless = [b"\x1b[".to_vec(), vec![b'1'; 1000]].concat();
    assert!(Key::take(&mut endless).is_empty() && endless.is_empty());
}

#[test]
fn no_name_commands_the_terminal() {
    let hostile = "\x1b[2J\x1b]0;x\x07\u{202e}\u{9b}31m";
    let mut overview = overview(&[hostile], 1);
    overview.status.node.name = hostile.to_owned();
    overview.status.problems =
        vec![Problem { code: hostile.to_owned(), text: hostile.to_owned(), ..Problem::default() }];
    overview.failures = vec![Connection { authority: Some(hostile.to_owned()), ..Connection::default() }];
    let mut top = Top::new(hostile.to_owned());
    top.received(Ok(overview), Instant::now());
    top.received(Err(hostile.to_owned()), Instant::now());
    for view in ['1', '2', '3', '4', '5'] {
        top.pressed(Key::Character(view));
        let shown = text(&top.lines((200, 40))).join("");
        assert!(!shown.chars().any(is_deceptive), "{shown:?}");
        assert!(shown.contains("\\u{1b}[2J"), "{shown}");
    }
}

#[test]
fn problems_are_whole_and_traffic_has_a_past() {
    let problem = Problem {
        code: "endpoint_failing".to_owned(),
        text: "the only endpoint of checkout.shop fails again and again".to_owned(),
        look_at: "`isthmus get endpoints`".to_owned(),
        ..Problem::default()
    };
    let mut overview = overview(&["a.test"], 7);
    overview.status.problems = vec![problem];
    overview.services.shown[0].past.opened = vec![0, 0, 0, 1, 1, 2, 8, 0, 0];
    let mut top = Top::new(String::new());
    top.received(Ok(overview), Instant::now());
    assert!(text(&top.lines((120, 24))).join("\n").contains(" \u{2584}\u{2588}  "));
    top.pressed(Key::Character('6'));
    let lines = text(&top.lines((36, 24)));
    let whole = [
        "1 PROBLEMS",
        "endpoint_failing",
        "  the only endpoint of checkout.shop",
        "  fails again and again",
        "  see `isthmus get endpoints`",
    ];
    assert!(lines.windows(whole.len()).any(|some| some == whole), "{lines:?}");
}

/// Returns an overview in which a service, or an endpoint of it, is opened.
fn opened(service: &str, endpoint: Option<&str>) -> Box<Overview> {
    let one = |address: &str, state: &str| Endpoint {
        address: address.to_owned(),
        network: "east".to_owned(),
        state: state.to_owned(),
        calls: Some(Calls {
            active: 3,
            active_max: 9,
            per_second: 0.25,
            per_second_max: 2.0,
            dialled: 7,
            failed: 1,
        }),
        ..Endpoint::default()
    };
    let connection =
        Connection { id: 17, source: "10.9.9.9:1234".to_owned(), bytes_up: 2048, ..Connection::default() };
    let mut overview = overview(&["a.test", "b.test"], 7);
    overview.status.node.network = "east".to_owned();
    let shown = match endpoint {
        None => vec![one("10.0.0.1", "failing"), one("10.0.0.2", "healthy")],
        Some(address) => vec![one(address, "healthy")],
    };
    overview.selection = Some(Selection {
        service: Some(service.to_owned()),
        endpoint: endpoint.map(str::to_owned),
        exists: true,
        endpoints: Part { total: shown.len(), shown },
        connections: Part { total: 1, shown: vec![connection] },
        ..Selection::default()
    });
    overview
}

#[test]
fn enter_leads_from_a_service_to_its_endpoints_and_connections_and_escape_back() {
    let mut top = Top::new(String::new());
    let receive = |top: &mut Top, overview| top.received(Ok(overview), Instant::now());
    let screen = |top: &mut Top| text(&top.lines((120, 24))).join("\n");
    receive(&mut top, overview(&["a.test", "b.test"], 7));
    assert_eq!(top.pressed(Key::Down), Action::None);
    // The chosen service stays chosen when its row moves.
    receive(&mut top, overview(&["b.test", "a.test"], 7));
    assert_eq!(top.pressed(Key::Enter), Action::Ask);
    assert_eq!(top.path(), "/api/v1/overview?q=&page=1&service=b.test");
    assert!(screen(&mut top).contains("b.test: asking the gateway"));
    receive(&mut top, opened("b.test", None));
    let shown = screen(&mut top);
    for wanted in ["endpoints of b.test", "OPEN/MAX", "3/9", "0.2/s 2.0/s", "isthmus explain b.test"] {
        assert!(shown.contains(wanted), "{wanted}: {shown}");
    }
    let chosen = |top: &mut Top| -> Vec<String> {
        let lines = top.lines((120, 24)).into_iter().flatten();
        lines.filter(|(style, _)| *style == Style::Chosen).map(|(_, text)| text.trim().to_owned()).collect()
    };
    assert_eq!(chosen(&mut top), ["1 services", "10.0.0.1"]);
    (0..5).for_each(|_| assert_eq!(top.pressed(Key::Down), Action::None));
    assert_eq!(chosen(&mut top)[1], "10.0.0.2");
    assert_eq!(top.pressed(Key::Enter), Action::Ask);
    assert!(top.path().ends_with("&service=b.test&endpoint=10.0.0.2"), "{}", top.path());
    receive(&mut top, opened("b.test", Some("10.0.0.2")));
    let shown = screen(&mut top);
    for wanted in ["1 open connection to 10.0.0.2", "isthmus close 17", "isthmus endpoint drain 10.0.0.2"] {
        assert!(shown.contains(wanted), "{wanted}: {shown}");
    }
    assert_eq!(top.pressed(Key::Enter), Action::None, "nothing is below a connection");
    assert_eq!(top.pressed(Key::Escape), Action::Ask);
    assert!(top.path().ends_with("&service=b.test"), "{}", top.path());
    assert_eq!((top.pressed(Key::Escape), top.path().as_str()), (Action::Ask, "/api/v1/overview?q=&page=1"));
    receive(&mut top, overview(&["b.test", "a.test"], 7));
    assert_eq!(chosen(&mut top)[1], "b.test", "the row from which the way began");
}

#[test]
fn the_chosen_row_stays_on_the_screen() {
    let names: Vec<String> = (0..50).map(|index| format!("s{index:02}.test")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut top = Top::new(String::new());
    top.received(Ok(overview(&names, 7)), Instant::now());
    (0..30).for_each(|_| assert_eq!(top.pressed(Key::Down), Action::None));
    for size in [(80, 24), (80, 6)] {
        let lines = top.lines(size);
        let chosen = lines
            .iter()
            .flatten()
            .filter(|(style, text)| *style == Style::Chosen && text.contains("s30.test"));
        assert_eq!(chosen.count(), 1, "{size:?}: {:?}", text(&lines));
    }
}
