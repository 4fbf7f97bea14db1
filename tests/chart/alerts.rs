//! Each fault raises its alerts, or none for a stated reason. The table has the alerts of every reason, every problem and every
//! fault of `docs/reasons.md`; `promtool` fires the chart's rules with the series of each, beside gateways without a fault and
//! exporters of other programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use crate::support::helm::chart;
use crate::support::promtool::Promtool;

/// The labels that Prometheus gives to two gateways without Kubernetes, and to one in a pod.
const GATEWAYS: [&str; 3] = [
    r#"job="edge",instance="192.0.2.1:15020""#,
    r#"job="edge",instance="192.0.2.2:15020""#,
    r#"job="mesh/east",namespace="mesh",pod="east-0",instance="10.0.0.7:15020""#,
];
/// Gateways without a fault, of the same jobs.
const QUIET: [&str; 2] = [
    r#"job="edge",instance="192.0.2.3:15020""#,
    r#"job="mesh/east",namespace="mesh",pod="east-1",instance="10.0.0.8:15020""#,
];

/// The series of a gateway without a fault: of one service each call arrives, 100 each second. Gateways probe the listener, clients
/// leave, and a scanner calls it. The values are 30 s apart.
const HEALTHY: [(&str, &str); 15] = [
    ("up{}", "1x50"),
    (r#"isthmus_build_info{version="1"}"#, "1x50"),
    (r#"isthmus_connections_total{listener="east",service="other",reason="ok"}"#, "0+3000x50"),
    (r#"isthmus_connections_total{listener="east",service="_unknown",reason="client_gone"}"#, "0+30x50"),
    (r#"isthmus_connections_total{listener="east",service="_unknown",reason="sni_unknown"}"#, "0+15x50"),
    (r#"isthmus_probes_total{listener="east"}"#, "0+60x50"),
    (r#"isthmus_connections_active{listener="east"}"#, "100x50"),
    (r#"isthmus_limit{limit="connections"}"#, "10000x50"),
    (r#"isthmus_problems{code="config_rejected"}"#, "0x50"),
    (r#"isthmus_endpoint_ejected{service="other"}"#, "0x50"),
    (r#"isthmus_endpoint_healthy{service="other"}"#, "1x50"),
    (r#"isthmus_peer_up{peer="west"}"#, "1x50"),
    (r#"isthmus_dns_queries_total{rcode="NOERROR"}"#, "0+300x50"),
    ("process_open_fds{}", "100x50"),
    ("process_max_fds{}", "1000x50"),
];
/// The series of other programs: one with few descriptors left, and one that is down.
const FOREIGN: [(&str, &str); 4] = [
    (r#"up{job="mysql",instance="192.0.2.1:9104"}"#, "1x50"),
    (r#"process_open_fds{job="mysql",instance="192.0.2.1:9104"}"#, "950x50"),
    (r#"process_max_fds{job="mysql",instance="192.0.2.1:9104"}"#, "1000x50"),
    (r#"up{job="node",instance="192.0.2.1:9100"}"#, "0x50"),
];

/// The values of a counter with one call every 2 s, and of one with 20 calls every second.
const FEW: &str = "0+15x50";
const MANY: &str = "0+600x50";

/// The alerts of a fault.
enum Outcome {
    /// These alerts fire, with these labels beside those of the gateway.
    Raises(&'static [&'static str]),
    /// No alert fires, for this reason.
    Silent(&'static str),
}
use Outcome::{Raises, Silent};

/// A row of the table.
struct Row {
    /// The reasons and problems that the row is about; or, for what has no word, descriptions.
    faults: &'static [&'static str],
    /// The service that the connections with the reason are counted for, and their number.
    calls: (&'static str, &'static str),
    /// The further series of the fault, in place of those of a gateway without it. `WORD` is the word.
    series: &'static [(&'static str, &'static str)],
    outcome: Outcome,
}

/// Returns the row of problems, or of reasons with which every call of a service ends, one every 2 s.
fn of(faults: &'static [&'static str], outcome: Outcome) -> Row {
    Row { faults, calls: ("shop", FEW), series: &[], outcome }
}

/// Returns the row of reasons with which connections end before their service is known.
fn unnamed(faults: &'static [&'static str], outcome: Outcome) -> Row {
    Row { calls: ("_unknown", MANY), ..of(faults, outcome) }
}

impl Row {
    fn with(self, series: &'static [(&'static str, &'static str)]) -> Self {
        Self { series, ..self }
    }
}

/// The alerts that someone must see at once; the others are warnings.
const CRITICAL: [&str; 6] = [
    "IsthmusDown",
    "IsthmusServiceDown",
    "IsthmusServiceUnhealthy",
    "IsthmusPeerDown",
    "IsthmusCertificateExpired",
    "IsthmusMemoryShort",
];

const SHOP_DOWN: &str = r#"IsthmusServiceDown{service="shop"}"#;
const SHOP_FAILS: &str = r#"IsthmusServiceFails{service="shop",reason="WORD"}"#;
const REFUSES: &str = r#"IsthmusRefusesConnections{reason="WORD"}"#;
const ENDPOINT: &str = r#"IsthmusEndpointProblem{code="WORD"}"#;
const FAILING: &str = r#"IsthmusEndpointProblem{code="endpoint_failing"}"#;
const CERTIFICATE: &str = r#"IsthmusCertificateExpired{code="WORD"}"#;
const PROBLEM: &str = r#"IsthmusProblem{code="WORD"}"#;

/// The table.
fn table() -> Vec<Row> {
    vec![
        // The service or its endpoints.
        of(
            &["no_endpoints", "endpoint_vanished", "limit_service", "carrier_none", "carrier_lost"],
            Raises(&[SHOP_DOWN, SHOP_FAILS]),
        ),
        of(
            &[
                "endpoint_refused",
                "endpoint_timeout",
                "endpoint_unreachable",
                "endpoint_reset",
                "endpoint_closed",
                "endpoint_alert",
            ],
            Raises(&[SHOP_DOWN, SHOP_FAILS, FAILING]),
        )
        .with(&[(r#"isthmus_problems{code="endpoint_failing"}"#, "0 1x49")]),
        // These are reasons and problems.
        of(&["endpoint_not_tls", "endpoint_silent"], Raises(&[SHOP_DOWN, SHOP_FAILS, ENDPOINT]))
            .with(&[(r#"isthmus_connections_total{listener="east",service="shop",reason="WORD"}"#, FEW)]),
        of(
            &["all_unhealthy"],
            Raises(&[SHOP_DOWN, SHOP_FAILS, r#"IsthmusServiceUnhealthy{service="shop"}"#]),
        )
        .with(&[
            (r#"isthmus_endpoint_healthy{service="shop"}"#, "1 0x49"),
            (r#"isthmus_problems{code="endpoint_unhealthy"}"#, "0 2x49"),
        ]),
        of(&["endpoint_unhealthy"], Raises(&[r#"IsthmusEndpointsUnhealthy{service="shop"}"#]))
            .with(&[(r#"isthmus_endpoint_healthy{service="shop"}"#, "1 0.5x49")]),
        of(&["endpoint_ejected"], Raises(&[r#"IsthmusEndpointsEjected{service="shop"}"#]))
            .with(&[(r#"isthmus_endpoint_ejected{service="shop"}"#, "0 1x49")]),
        of(&["endpoint_failing", "endpoint_slow"], Raises(&[ENDPOINT])),
        of(&["stalled"], Raises(&[SHOP_FAILS])),
        of(&["internal"], Raises(&[SHOP_DOWN, SHOP_FAILS, REFUSES])).with(&[(
            r#"isthmus_connections_total{listener="east",service="shop",reason="internal"}"#,
            MANY,
        )]),
        // The gateway and its callers.
        unnamed(
            &["limit_global", "limit_source", "proxy_protocol", "identity_expired", "identity_untrusted"],
            Raises(&[REFUSES]),
        ),
        of(
            &["certificate_missing", "certificate_expired", "certificate_not_yet_valid", "roots_expired"],
            Raises(&[CERTIFICATE]),
        ),
        of(&["memory_short"], Raises(&["IsthmusMemoryShort{}"])),
        of(&["peer_not_live"], Raises(&[r#"IsthmusPeerDown{peer="west"}"#]))
            .with(&[(r#"isthmus_peer_up{peer="west"}"#, "1 0x49")]),
        of(
            &["registry_stale"],
            Raises(&[PROBLEM, r#"IsthmusRegistryErrors{registry="north",error="unavailable"}"#]),
        )
        .with(&[(r#"isthmus_registry_errors_total{registry="north",error="unavailable"}"#, FEW)]),
        of(
            &[
                "config_rejected",
                "needs_restart",
                "registry_missing",
                "registry_held",
                "registry_flawed",
                "registry_impaired",
                "registry_left_out",
                "policies_unknown",
                "waypoint_ignored",
                "cluster_claimed_twice",
                "gateway_unreachable",
                "endpoint_claimed",
                "state_not_kept",
                "address_not_allowed",
                "service_conflict",
                "export_absent",
                "export_narrowed",
                "name_unresolved",
                "name_stale",
                "virtual_addresses_full",
                "virtual_addresses_not_kept",
                "certificate_expiring",
                "certificate_source",
                "limit_reached",
                "checks_late",
                "access_log_lost",
                "spans_lost",
                "peer_not_enrolled",
                "peer_unreachable",
                "peer_root_not_in_file",
                "peer_clock",
                "peer_left_out",
                "xds_client_refused",
            ],
            Raises(&[PROBLEM]),
        ),
        // Silent.
        unnamed(
            &[
                "hello_timeout",
                "client_gone",
                "hello_too_large",
                "hello_fragments",
                "bad_hello",
                "not_tls",
                "no_sni",
                "sni_invalid",
                "sni_unknown",
                "authority_unknown",
                "bad_request",
                "alpn_refused",
                "tls_failed",
                "identity_required",
            ],
            Silent("scanners and mistaken clients cause it at any time on a listener that they reach"),
        ),
        of(
            &["not_exported", "source_denied", "identity_denied", "hop_limit"],
            Silent("the gateway refuses what its config forbids"),
        ),
        of(
            &["client_reset", "client_vanished"],
            Silent("the client, or the path to it, ends the connection; every network has such clients"),
        ),
        of(
            &["idle_timeout", "half_close_timeout"],
            Silent("the connection was quiet, and clients that keep quiet connections cause it at any time"),
        ),
        of(
            &["drained", "draining", "config_removed", "killed", "drain_active", "endpoint_withdrawn"],
            Silent("an operator has ordered it"),
        ),
        of(
            &["objects_ignored"],
            Silent("objects without effect may be meant for other programs that read them"),
        ),
        // Faults without a word.
        of(&["The gateway hangs", "The gateway's process is down"], Raises(&["IsthmusDown{}"]))
            .with(&[("up{}", "1x20 0x29"), (r#"isthmus_build_info{version="1"}"#, "1x20 stale")]),
        of(
            &["An endpoint's certificate is for another name", "An endpoint's certificate has expired"],
            Silent("TLS encrypts certificates; `isthmus explain NAME --probe` shows them"),
        ),
        of(&["The application answers with an error inside TLS"], Silent("the gateway does not decrypt it")),
        // States before a fault.
        of(&["No fault"], Silent("there is none")),
        of(&["Most connections of the limit are in use"], Raises(&["IsthmusNearLimit{}"]))
            .with(&[(r#"isthmus_connections_active{listener="east"}"#, "9000x50")]),
        of(&["Most descriptors are in use"], Raises(&["IsthmusDescriptorsShort{}"]))
            .with(&[("process_open_fds{}", "950x50")]),
        of(&["Lines of the program's own log are lost"], Raises(&["IsthmusLogLost{}"]))
            .with(&[("isthmus_log_dropped_total{}", FEW)]),
        of(&["The DNS server fails for names of its zones"], Raises(&["IsthmusDnsFails{}"]))
            .with(&[(r#"isthmus_dns_queries_total{rcode="SERVFAIL"}"#, "0+30x50")]),
        of(&["The upstream name servers do not answer"], Raises(&["IsthmusDnsFails{}"])).with(&[
            (r#"isthmus_dns_queries_total{rcode="SERVFAIL"}"#, "0+30x50"),
            (r#"isthmus_dns_forwarded_total{result="timeout"}"#, "0+30x50"),
        ]),
        // Shares, and faults that come and go.
        of(
            &["Every call of a gateway fails, one every 2 s"],
            Raises(&[SHOP_DOWN, r#"IsthmusServiceFails{service="shop",reason="endpoint_refused"}"#]),
        )
        .with(&[
            (r#"isthmus_connections_total{listener="east",service="other",reason="ok"}"#, "0x50"),
            (r#"isthmus_connections_total{listener="east",service="shop",reason="endpoint_refused"}"#, FEW),
        ]),
        of(
            &["A tenth of the calls of a service fails"],
            Raises(&[r#"IsthmusServiceFails{service="shop",reason="endpoint_reset"}"#]),
        )
        .with(&[
            (r#"isthmus_connections_total{listener="east",service="shop",reason="ok"}"#, "0+135x50"),
            (r#"isthmus_connections_total{listener="east",service="shop",reason="endpoint_reset"}"#, FEW),
        ]),
        of(
            &["Half of the calls of a service fail with each of two reasons, and many clients are forbidden"],
            Raises(&[
                SHOP_DOWN,
                r#"IsthmusServiceFails{service="shop",reason="endpoint_refused"}"#,
                r#"IsthmusServiceFails{service="shop",reason="endpoint_timeout"}"#,
            ]),
        )
        .with(&[
            (r#"isthmus_connections_total{listener="east",service="shop",reason="source_denied"}"#, MANY),
            (r#"isthmus_connections_total{listener="east",service="shop",reason="endpoint_refused"}"#, FEW),
            (r#"isthmus_connections_total{listener="east",service="shop",reason="endpoint_timeout"}"#, FEW),
        ]),
        of(
            &["One call of a service fails, and no other is made"],
            Silent("a single call does not say that a service is down"),
        )
        .with(&[(
            r#"isthmus_connections_total{listener="east",service="shop",reason="endpoint_refused"}"#,
            "7x20 8x29",
        )]),
        of(&["A hundredth of the calls of a service fails"], Silent("the share of failures in any network"))
            .with(&[
                (r#"isthmus_connections_total{listener="east",service="shop",reason="ok"}"#, "0+1485x50"),
                (r#"isthmus_connections_total{listener="east",service="shop",reason="endpoint_reset"}"#, FEW),
            ]),
        of(
            &["A problem lasts for a minute"],
            Silent("restarts of endpoints and registries cause such problems"),
        )
        .with(&[
            (r#"isthmus_problems{code="endpoint_failing"}"#, "0x20 1 1 0x27"),
            (r#"isthmus_problems{code="registry_stale"}"#, "0x20 1 1 0x27"),
        ]),
        of(
            &["An endpoint is silent, and only one look in three sees it"],
            Raises(&[r#"IsthmusEndpointProblem{code="endpoint_silent"}"#]),
        )
        .with(&[(
            r#"isthmus_problems{code="endpoint_silent"}"#,
            "0 0 1 0 0 1 0 0 1 0 0 1 0 0 1 0 0 1 0 0 1 0 0",
        )]),
    ]
}

/// Returns the lines of a section of `docs/reasons.md`, split into the cells of their table.
fn cells(section: &str) -> Vec<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reasons.md");
    let text = std::fs::read_to_string(path).expect("docs/reasons.md");
    let (_, section) = text.split_once(&format!("\n## {section}\n")).expect("a section");
    let section = section.split("\n## ").next().expect("text");
    let rows = section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| fault"));
    let rows =
        rows.map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect());
    rows.collect()
}

/// Returns the words in the first column of a section.
fn words(section: &str) -> BTreeSet<String> {
    let word = |cells: Vec<String>| Some(cells[0].strip_prefix('`')?.strip_suffix('`')?.to_owned());
    cells(section).into_iter().filter_map(word).collect()
}

/// Returns the faults of the document: what happens, and its word; a fault without a word has its description in both.
fn faults() -> Vec<(String, String)> {
    let fault = |cells: Vec<String>| {
        let word = match &cells[..] {
            [fault, _] => fault.clone(),
            _ => cells[1].trim_matches('`').to_owned(),
        };
        (cells[0].clone(), word)
    };
    cells("Faults").into_iter().map(fault).collect()
}

/// Returns the series of a gateway, with those of a fault in place of its own.
fn series(gateway: &str, fault: &[(String, String)]) -> Vec<(String, String)> {
    let mut all: BTreeMap<String, String> =
        HEALTHY.iter().map(|(series, values)| ((*series).to_owned(), (*values).to_owned())).collect();
    all.extend(fault.iter().cloned());
    all.into_iter().map(|(series, values)| (labelled(&series, gateway), values)).collect()
}

/// Returns a series or an alert with further labels.
fn labelled(series: &str, further: &str) -> String {
    let (name, labels) = series.split_once('{').expect("braces");
    let labels = labels.trim_end_matches('}');
    let comma = if labels.is_empty() { "" } else { "," };
    format!("{name}{{{labels}{comma}{further}}}")
}

impl Row {
    /// Returns the series of the fault with this word.
    fn series_of(
        &self,
        word: &str,
        reasons: &BTreeSet<String>,
        codes: &BTreeSet<String>,
    ) -> Vec<(String, String)> {
        let mut all = Vec::new();
        let (service, calls) = self.calls;
        if reasons.contains(word) {
            let labels = format!("listener=\"east\",service=\"{service}\",reason=\"{word}\"");
            all.push((format!("isthmus_connections_total{{{labels}}}"), calls.to_owned()));
        }
        if codes.contains(word) {
            all.push((format!("isthmus_problems{{code=\"{word}\"}}"), "0 1x49".to_owned()));
        }
        let further = self.series.iter();
        all.extend(further.map(|(series, values)| (series.replace("WORD", word), (*values).to_owned())));
        all
    }

    /// Returns the test of a fault as `promtool` reads it. All alerts that have fired at any time are compared.
    fn test(&self, fault: &str, series_of_fault: &[(String, String)], word: &str) -> String {
        let mut text = "- interval: 30s\n  input_series:\n".to_owned();
        let faulty = GATEWAYS.iter().flat_map(|gateway| series(gateway, series_of_fault));
        let quiet = QUIET.iter().flat_map(|gateway| series(gateway, &[]));
        let foreign = FOREIGN.iter().map(|(series, values)| ((*series).to_owned(), (*values).to_owned()));
        for (series, values) in faulty.chain(quiet).chain(foreign) {
            let _ = writeln!(text, "  - {{series: '{series}', values: '{values}'}}");
        }
        let fired = "max without (alertstate) (max_over_time(ALERTS{alertstate=\"firing\"}[1h]))";
        // The tool prints the expression of a test that fails, and a comment in it names the fault.
        let _ = writeln!(text, "  promql_expr_test:\n  - expr: '{fired} # {}'", fault.replace('\'', "''"));
        text += "    eval_time: 24m\n    exp_samples:\n";
        let Raises(alerts) = self.outcome else { return text };
        for (alert, gateway) in alerts.iter().flat_map(|alert| GATEWAYS.map(|gateway| (alert, gateway))) {
            let (name, labels) = alert.split_once('{').expect("braces");
            let severity = if CRITICAL.contains(&name) { "critical" } else { "warning" };
            let labels = labels.replace("WORD", word);
            let sample = format!("{{alertname=\"{name}\",severity=\"{severity}\",{labels}");
            let sample = labelled(&sample.replace(",}", "}"), gateway);
            let _ = writeln!(text, "    - {{labels: '{sample}', value: 1}}");
        }
        text
    }
}

/// Runs tests of the chart's rules.
fn fire(tool: &Promtool, tests: &str) -> (bool, String) {
    let rules = chart().join("files/alerts.yaml");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tests.yaml");
    let head = format!("rule_files: ['{}']\nevaluation_interval: 30s\ntests:\n", rules.display());
    std::fs::write(&path, head + tests).expect("written");
    tool.run(&["test", "rules", &path.display().to_string()], "")
}

#[test]
fn each_reason_problem_and_fault_is_in_the_table_of_alerts_once() {
    let table = table();
    let (mut reasons, codes) = (words("Reasons"), words("Problems"));
    assert!(reasons.len() > 40 && codes.len() > 40 && faults().len() > 100, "the document is read");
    reasons.remove("ok");
    let mut known = &reasons | &codes;
    known.extend(faults().into_iter().map(|(_, word)| word));
    let rows = |word: &str| table.iter().filter(|row| row.faults.contains(&word)).count();
    let wrong: Vec<&String> = known.iter().filter(|word| rows(word) != 1).collect();
    assert!(
        wrong.is_empty(),
        "tests/chart/alerts.rs must have one row that alerts or says why not: {wrong:?}"
    );
    for row in &table {
        assert!(!matches!(row.outcome, Silent("") | Raises([])), "{:?}", row.faults);
        let is_known = row.faults.iter().any(|word| known.contains(*word));
        let has_no_word = row.faults.iter().all(|fault| fault.contains(' '));
        assert!(is_known || has_no_word, "docs/reasons.md has none of {:?}", row.faults);
    }
}

#[test]
fn each_fault_raises_its_alerts_at_its_gateway_and_no_others() {
    let Some(tool) = Promtool::installed() else { return };
    let (table, reasons, codes) = (table(), words("Reasons"), words("Problems"));
    let faults = faults();
    let mut tests = String::new();
    for row in &table {
        let is_served =
            |word: &&&str| word.contains(' ') || reasons.contains(**word) || codes.contains(**word);
        for word in row.faults.iter().filter(is_served) {
            let of_word = faults.iter().filter(|(_, other)| other == word).map(|(fault, _)| &**fault);
            let name: Vec<&str> = std::iter::once(*word).chain(of_word).collect();
            tests += &row.test(&name.join("; "), &row.series_of(word, &reasons, &codes), word);
        }
    }
    let (succeeded, said) = fire(&tool, &tests);
    assert!(succeeded, "{said}");
}

#[test]
fn each_alert_is_in_the_table_and_of_one_gateway() {
    let text = std::fs::read_to_string(chart().join("files/alerts.yaml")).expect("alerts");
    let raised: BTreeSet<&str> = table()
        .iter()
        .filter_map(|row| if let Raises(alerts) = row.outcome { Some(alerts) } else { None })
        .flat_map(|alerts| alerts.iter().filter_map(|alert| Some(alert.split_once('{')?.0)))
        .collect();
    let alerts: BTreeSet<&str> =
        text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert_eq!(raised, alerts);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics-and-logs.md");
    let page = std::fs::read_to_string(page).expect("docs/metrics-and-logs.md");
    let critical = page.split_once("- Critical: ").expect("a list").1.split("\n- ").next().expect("its end");
    assert!(CRITICAL.iter().all(|alert| critical.contains(&format!("`{alert}`"))), "{critical}");
    for word in [" by (", " on ("] {
        for labels in text.split(word).skip(1) {
            assert!(labels.starts_with("job, namespace, pod, instance"), "{word}{labels}");
        }
    }
}

#[test]
fn alerts_fire_within_minutes_of_a_fault() {
    let Some(tool) = Promtool::installed() else { return };
    let gateway = GATEWAYS[0];
    // From the tenth minute on, all calls of a service fail, and an endpoint has a problem.
    let fault = [
        (r#"isthmus_connections_total{service="shop",reason="ok"}"#, "0+15x20 300x29"),
        (r#"isthmus_connections_total{service="shop",reason="endpoint_closed"}"#, "0x20 0+15x29"),
        (r#"isthmus_problems{code="endpoint_failing"}"#, "0x20 1x29"),
    ];
    let fault = fault.map(|(series, values)| (series.to_owned(), values.to_owned()));
    let mut test = "- interval: 30s\n  input_series:\n".to_owned();
    for (series, values) in series(gateway, &fault) {
        let _ = writeln!(test, "  - {{series: '{series}', values: '{values}'}}");
    }
    test += "  promql_expr_test:\n";
    let cases = [
        ("14m", "IsthmusEndpointProblem", 0),
        ("16m", "IsthmusEndpointProblem", 1),
        ("14m", "IsthmusServiceDown", 0),
        ("19m", "IsthmusServiceDown", 1),
    ];
    for (time, alert, count) in cases {
        let _ = writeln!(
            test,
            "  - expr: 'count(ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}}) or vector(0)'\n    eval_time: \
             {time}\n    exp_samples: [{{labels: '{{}}', value: {count}}}]"
        );
    }
    let (succeeded, said) = fire(&tool, &test);
    assert!(succeeded, "{said}");
}

#[test]
fn the_text_of_an_alert_names_the_pod_or_the_address() {
    let Some(tool) = Promtool::installed() else { return };
    let problem = [(r#"isthmus_problems{code="config_rejected"}"#.to_owned(), "1x50".to_owned())];
    let mut test = "- interval: 30s\n  input_series:\n".to_owned();
    for (series, values) in GATEWAYS.iter().flat_map(|gateway| series(gateway, &problem)) {
        let _ = writeln!(test, "  - {{series: '{series}', values: '{values}'}}");
    }
    test += "  alert_rule_test:\n  - eval_time: 20m\n    alertname: IsthmusProblem\n    exp_alerts:\n";
    let description =
        "`isthmus status` on the gateway begins with what is wrong; docs/reasons.md says what to look at.";
    for (gateway, name) in GATEWAYS.iter().zip(["192.0.2.1:15020", "192.0.2.2:15020", "east-0"]) {
        let labels = gateway.replace('=', ": ").replace(',', ", ");
        let _ = writeln!(
            test,
            "    - exp_labels: {{severity: warning, code: config_rejected, {labels}}}\n      exp_annotations: \
             {{summary: '{name} has the problem config_rejected.', description: '{description}'}}"
        );
    }
    let (succeeded, said) = fire(&tool, &test);
    assert!(succeeded, "{said}");
}
