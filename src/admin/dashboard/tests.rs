//! Tests of the page for invented states: escaping, and the size of the page if everything is as large as possible.

use super::*;
use isthmus_api::client::Client;
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::{self, Endpoint, LastFailure};
use isthmus_api::explanation::Candidate;
use isthmus_api::listed::{Part, Past, Service};
use isthmus_api::network::{Calls, Gateway, Network};
use isthmus_api::overview::{Refusal, Services};
use isthmus_api::peer::Peer;
use isthmus_api::registry::Registry;
use isthmus_api::selection::{Placed, Selection};
use isthmus_api::status::Problem;

/// A name that runs a script if a single place does not escape it.
const HOSTILE: &str = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u{202e}";

/// Returns an overview in which all texts are `text` and all lists have this length.
fn overview(text: &str, count: usize) -> Overview {
    let own = || text.to_owned();
    let mut overview = Overview::default();
    let status = &mut overview.status;
    status.node.name = own();
    status.node.network = own();
    status.node.cluster = own();
    status.not_ready = vec![own()];
    let problem = Problem { code: own(), about: own(), text: own(), look_at: format!("`{text}` {text}") };
    status.problems = vec![problem; count];
    status.config.path = own();
    status.config.rejected = vec![own(); count.min(21)];
    status.config.warnings = vec![own(); count.min(21)];
    status.config.needs_restart = vec![own()];
    let registry =
        Registry { name: own(), state: own(), problems: vec![own(); 3], since: own(), ..Registry::default() };
    status.registries = vec![registry; count.min(100)];
    overview.time = own();
    let past = Past { opened: vec![u64::MAX; 60], failed: vec![1; 60], ..Past::default() };
    overview.past = past.clone();
    let service = Service { name: own(), kind: own(), state: own(), past, ..Service::default() };
    overview.services = Services {
        query: own(),
        pages: 9,
        page: 2,
        shown: vec![service; count.min(50)],
        ..Services::default()
    };
    let refusal =
        Refusal { reason: own(), meaning: own(), last_name: Some(own()), recent: 3, ..Refusal::default() };
    overview.refusals = vec![refusal; count.min(38)];
    let failure = Connection {
        sni: Some(own()),
        reason: Some(own()),
        source: own(),
        time: own(),
        detail: Some(own()),
        ..Connection::default()
    };
    overview.failures = vec![failure; count.min(20)];
    let calls = Some(Calls { failed: 1, ..Calls::default() });
    let network =
        |index: usize| Network { name: format!("{text}{index}"), access: own(), calls, ..Network::default() };
    overview.networks = Part { total: count, shown: (0..count.min(40)).map(network).collect() };
    let peer = Peer {
        name: own(),
        state: own(),
        since: Some(own()),
        identity: Some(own()),
        problem: Some(own()),
        left_out_count: 1,
        left_out: vec![own()],
        ..Peer::default()
    };
    overview.peers = Part { total: count, shown: vec![peer; count.min(50)] };
    let gateway = |index: usize| Gateway {
        network: format!("{text}{}", index % 10),
        address: own(),
        locality: own(),
        why: Some(own()),
        ..Gateway::default()
    };
    overview.gateways = Part { total: count, shown: (0..count.min(100)).map(gateway).collect() };
    let client = Client {
        node: own(),
        peer: own(),
        network: own(),
        last_nack: Some(own()),
        subscriptions: vec![own()],
        ..Client::default()
    };
    overview.clients = Part { total: count, shown: vec![client; count.min(50)] };
    overview
}

/// Returns what a reader has opened; all texts are `text`, and all lists have this length.
fn opened(text: &str, count: usize, service: Option<&str>, endpoint: Option<&str>) -> Overview {
    let own = || text.to_owned();
    let mut overview = overview(text, 1);
    let last = LastFailure { reason: own(), detail: Some(own()), time: own(), in_a_row: 1, by: own() };
    let one = Endpoint {
        address: own(),
        network: own(),
        cluster: own(),
        locality: own(),
        state: own(),
        identity: Some(own()),
        ports: Some([(own(), 1)].into_iter().collect()),
        last_failure: Some(last),
        calls: Some(endpoint::Calls { failed: 1, ..endpoint::Calls::default() }),
        ..Endpoint::default()
    };
    let connection = Connection {
        source: own(),
        time: own(),
        sni: Some(own()),
        endpoint: Some(own()),
        source_identity: Some(own()),
        detail: Some(own()),
        reason: Some(own()),
        ..Connection::default()
    };
    let placed = Placed { name: own(), endpoints: 2, ready: 1 };
    fn part<T: Clone>(one: &T, count: usize) -> Part<T> {
        Part { total: count, shown: vec![one.clone(); count.min(50)] }
    }
    overview.selection = Some(Selection {
        network: Some(own()),
        service: service.map(str::to_owned),
        endpoint: endpoint.map(str::to_owned),
        exists: true,
        about_network: overview.networks.shown.first().cloned(),
        about_service: overview.services.shown.first().cloned(),
        gateways: part(&overview.gateways.shown[0], count),
        services: part(&placed, count),
        endpoints: part(&one, count),
        connections: part(&connection, count),
        failures: part(&connection, count),
    });
    overview
}

/// Returns the pages of a network, a service and an endpoint.
fn opened_pages(text: &str, count: usize) -> [String; 3] {
    let chosen = [(None, None), (Some(text), None), (Some(text), Some(text))];
    chosen.map(|(service, endpoint)| page(&opened(text, count, service, endpoint), &Explained::default()))
}

#[test]
fn no_text_becomes_markup_on_the_pages_of_networks_services_and_endpoints() {
    // With a slash, as a route's name has, for which the same commands are offered.
    for (hostile, harmless) in opened_pages(HOSTILE, 3).iter().zip(&opened_pages("x/x", 3)) {
        assert!(hostile.contains("&lt;script&gt;alert(1)"), "the names are on the page");
        for bad in ["<script>", "<img", "\u{202e}", "style=", "javascript:", "href=\"http"] {
            assert!(!hostile.contains(bad), "{bad}");
        }
        assert_eq!(hostile.matches('<').count(), harmless.matches('<').count());
        assert_eq!(hostile.matches('"').count(), harmless.matches('"').count());
    }
}

#[test]
fn the_pages_of_networks_services_and_endpoints_are_bounded_and_say_how_much_is_left_out() {
    for page in opened_pages(&"x".repeat(40), 10_000) {
        assert!(page.len() < 128 << 10, "{}", page.len());
        assert!(page.contains("and 9950 more"), "{page}");
        assert!(page.contains("<a href=\"/\">all</a>"), "{page}");
    }
    let [network, service, endpoint] = opened_pages("x", 1);
    assert!(network.contains("href=\"/?network=x&amp;service=x\""), "{network}");
    assert!(service.contains("href=\"/?network=x&amp;service=x&amp;endpoint=x\""), "{service}");
    assert!(endpoint.contains("<code class=\"copy\">isthmus close 0</code>"), "{endpoint}");
}

#[test]
fn the_lines_of_the_map_have_the_calls_of_networks() {
    let calls = Calls { per_second: 12.34, failed: 2, ..Calls::default() };
    let network = |name: &str, calls| Network { name: name.to_owned(), calls, ..Network::default() };
    let mut overview = Overview::default();
    overview.status.node.network = "own".to_owned();
    overview.networks.shown = vec![network("own", None), network("west", Some(calls)), network("far", None)];
    let page = page(&overview, &Explained::default());
    let [wide, narrow] = ["map wide", "map narrow"]
        .map(|form| page.split(form).nth(1).and_then(|rest| rest.split("</svg>").next()).expect("a map"));
    for map in [wide, narrow] {
        assert_eq!(map.matches("calls from it: 12.3/s, 2 failed").count(), 1, "{map}");
        assert!(map.contains("<a href=\"/?network=west\">"), "{map}");
    }
    assert!(wide.contains("class=\"warn end\""), "{wide}");
}

fn explained(text: &str) -> Explained {
    let own = || text.to_owned();
    let candidate =
        Candidate { address: own(), state: own(), cluster: own(), locality: own(), ..Candidate::default() };
    let answer = Explanation {
        reason: own(),
        verdict: own(),
        steps: vec![own()],
        warnings: vec![own()],
        near: vec![own()],
        candidates: vec![candidate],
        ..Explanation::default()
    };
    Explained { name: own(), authority: false, from: own(), answer: Some(Ok(answer)) }
}

#[test]
fn no_text_becomes_markup_wherever_it_stands() {
    let faulty = Explained { answer: Some(Err(HOSTILE.to_owned())), ..explained(HOSTILE) };
    for explained in [explained(HOSTILE), faulty] {
        let page = page(&overview(HOSTILE, 12), &explained);
        assert!(page.contains("&lt;script&gt;alert(1)"), "the names are on the page");
        for bad in ["<script>", "<img", "\u{202e}", "style=", "javascript:"] {
            assert!(!page.contains(bad), "{bad}");
        }
        // If escaping is complete, the page has as many elements and quotes as a page of harmless names.
        let harmless = super::page(&overview("x", 12), &self::explained("x"));
        if !matches!(explained.answer, Some(Err(_))) {
            assert_eq!(page.matches('<').count(), harmless.matches('<').count());
            assert_eq!(page.matches('"').count(), harmless.matches('"').count());
        }
    }
}

#[test]
fn the_page_names_nothing_of_other_hosts_and_no_inline_code() {
    let page = page(&overview("x", 3), &explained("x"));
    for bad in ["http:", "https:", "//cdn", " on", "<style", "@import"] {
        let inside = page.match_indices(bad).find(|(at, _)| page[..*at].rfind('<') > page[..*at].rfind('>'));
        assert_eq!(inside, None, "{bad} in a tag");
    }
    assert_eq!(page.matches("<script").count(), 1, "the one script is a file");
    for text in [STYLE, SCRIPT] {
        assert!(!text.contains("http:") && !text.contains("https:") && !text.contains("url("), "{text}");
    }
    assert!(POLICY.starts_with("default-src 'none';") && !POLICY.contains("unsafe"));
}

#[test]
fn the_largest_page_is_small() {
    // The texts are longer than any name may be.
    let page = page(&overview(&"<".repeat(300), 100_000), &explained("x"));
    assert!(page.len() < 3 << 20, "{}", page.len());
    let usual = super::page(&overview(&"x".repeat(40), 50), &explained("x"));
    assert!(usual.len() < 256 << 10, "{}", usual.len());
}

#[test]
fn a_gateway_without_trouble_says_so_first() {
    let mut well = Overview::default();
    well.status.ready = true;
    well.status.config.file_is_running = true;
    let page = page(&well, &Explained::default());
    assert!(page.contains("Ready, no problems") && page.contains("\u{2713}"), "{page}");
    assert!(!page.contains("wrong\"") && !page.contains("id=\"answer\""));
}

#[test]
fn idle_services_are_folded_and_lines_end_at_the_right() {
    let service = |index: usize, opened: Vec<u64>| Service {
        name: format!("s{index}.test"),
        state: "ok".to_owned(),
        past: Past { opened, ..Past::default() },
        ..Service::default()
    };
    let mut overview = Overview::default();
    overview.services.shown = (1..=9).map(|index| service(index, Vec::new())).collect();
    overview.services.shown.insert(0, service(0, vec![0, 4]));
    let page = page(&overview, &Explained::default());
    let (busy, idle) = page.split_once("<details id=\"idle\"").expect("folded");
    assert!(busy.contains("s0.test") && !busy.contains("s1.test") && idle.contains("s9.test"), "{page}");
    assert!(busy.contains("points=\"0,15 1,1\""), "{page}");
    overview.services.shown.pop();
    let page = super::page(&overview, &Explained::default());
    assert!(!page.contains("id=\"idle\""), "few are not folded");
}
