//! The faults that operators meet between clients and endpoints, and on the gateway's own host: 55 that a review has injected, and more of
//! the same kinds. Each is a row of `docs/reasons.md`, which a test injects ([`crate::one_word`]), or is injected by another test.

use std::collections::BTreeSet;
use std::path::Path;

use super::one_word::document;

/// The place where a fault is injected and its word is compared.
enum Injected {
    /// A row of `docs/reasons.md`.
    Row(&'static str),
    /// A function of a file: a test with this name.
    By(&'static str, &'static str),
}
use Injected::{By, Row};

const FAULTS: &[(&str, Injected)] = &[
    // Endpoints that take connections and do not serve them.
    ("HTTP in place of TLS", Row("An endpoint answers without TLS")),
    ("an SSH server", Row("An endpoint answers with the banner of SSH")),
    ("closes after the hello", Row("An endpoint ends connections without an answer")),
    ("closes 2 s after the hello", Row("An endpoint ends connections 2 s after the hello")),
    ("closes in its ServerHello", Row("An endpoint ends connections in the middle of its ServerHello")),
    ("resets after the hello", Row("An endpoint resets connections")),
    ("resets when it accepts", Row("An endpoint resets connections when it accepts them")),
    ("silent, the client waits", Row("An endpoint accepts connections and never answers")),
    ("silent, the client leaves", Row("A client leaves before an endpoint answers")),
    ("half a ServerHello, the client waits", Row("An endpoint stops in the middle of its ServerHello")),
    ("half a ServerHello, the client leaves", Row("A client leaves after a part of a ServerHello")),
    ("reads nothing", Row("An endpoint reads nothing of an upload")),
    ("alert unrecognized_name", Row("An endpoint refuses the name by a TLS alert")),
    ("alert internal_error", Row("An endpoint refuses each hello by the alert `internal_error`")),
    ("alert no_application_protocol", Row("An endpoint knows none of the client's protocols (ALPN)")),
    ("only warns", By("tests/e2e/endpoints.rs", "an_endpoint_that_only_warns_takes_the_connection")),
    ("one of three is slow", Row("One of several endpoints answers late")),
    ("one of two is not TLS", Row("One of several endpoints does not speak TLS")),
    (
        "one of two sends alerts",
        By("tests/e2e/endpoints.rs", "an_endpoint_that_refuses_hellos_loses_no_call"),
    ),
    (
        "one of two is silent",
        By("tests/e2e/endpoints.rs", "a_silent_endpoint_costs_two_impatient_clients_a_call"),
    ),
    ("one of two is down", Row("One of several endpoints is down")),
    (
        "each refuses in its own way",
        By("tests/e2e/endpoints.rs", "a_hello_that_every_endpoint_refuses_in_its_own_way_ejects_none"),
    ),
    (
        "one of two routes has found it",
        By("tests/e2e/endpoints.rs", "an_endpoint_that_refuses_one_route_is_passed_by_by_the_others"),
    ),
    ("certificate of another name", Row("An endpoint's certificate is for another name")),
    ("certificate has expired", Row("An endpoint's certificate has expired")),
    ("an intermediate has expired", By("src/tls/probe.rs", "what_every_client_refuses_has_a_word")),
    // Endpoints that take no connections.
    ("process is down", Row("An endpoint's process is down")),
    ("the only one is down", Row("The only endpoint of a service fails again and again")),
    ("full backlog", Row("An endpoint does not accept")),
    ("IPv6 on a host without it", Row("An endpoint's address cannot be reached")),
    ("checks of all fail", Row("The health checks of all endpoints fail")),
    ("checks of one fail", Row("The health checks of one of several endpoints fail")),
    ("taken out by hand", Row("An operator takes an endpoint out of service")),
    (
        "first family is a hole",
        By("tests/e2e/endpoints.rs", "the_next_address_of_an_endpoint_is_dialled_beside_one_that_is_gone"),
    ),
    // Paths.
    ("SYNs dropped", Row("The packets to an endpoint are dropped")),
    ("no route", Row("There is no route to an endpoint")),
    ("prohibited", Row("A rule of the network forbids the path to an endpoint")),
    ("MTU at the client", Row("The hello of a client is too large for the path (MTU)")),
    ("MTU at the endpoint", Row("The hello is too large for the path to an endpoint (MTU)")),
    ("flow lost while idle", Row("An endpoint's host has disappeared when a client sends a request")),
    ("flow lost in a transfer", Row("An endpoint's host disappears in a transfer")),
    ("client lost", Row("A client's host disappears in a transfer")),
    ("half-open peer", Row("An endpoint keeps its direction open after the client has ended")),
    // Names.
    ("SERVFAIL", Row("The name server of a known name fails (SERVFAIL)")),
    ("REFUSED", Row("The name server refuses to answer for an endpoint's name (REFUSED)")),
    ("NXDOMAIN at the start", Row("An endpoint's host name does not resolve")),
    ("NXDOMAIN flaps", Row("A known name ceases to exist (NXDOMAIN)")),
    ("NXDOMAIN for good", Row("A name has ceased to exist for longer than `dns.holdMissing`")),
    ("silent name server", Row("The name server of an endpoint's name does not answer")),
    ("truncated answer", Row("The answer for an endpoint's name is cut off")),
    ("0.0.0.0", Row("The name server has the address 0.0.0.0 for an endpoint")),
    ("a dead address", Row("The name server has the address of a host that is down")),
    ("60 dead addresses", Row("All 60 addresses of a name are down")),
    (
        "one family fails",
        By(
            "tests/e2e/names.rs",
            "a_family_without_addresses_does_not_take_those_of_a_family_that_cannot_be_asked",
        ),
    ),
    ("a name is misspelt", Row("A name is misspelt")),
    ("SNI OK.TEST.", By("src/model/name.rs", "names_are_lower_cased_and_lose_one_trailing_dot")),
    // Limits and the host.
    ("connection limit", Row("The gateway has as many connections as `limits.connections`")),
    ("service limit", Row("A service has as many connections as `limits.perService`")),
    ("full endpoints", Row("Each endpoint of a route has as many connections as `maxConnections`")),
    ("hello limit", Row("As many hellos are incomplete as `limits.pendingHellos`")),
    ("descriptors", Row("The process has no descriptors left")),
    ("memory", Row("The gateway uses most of `limits.memory`")),
    ("clock ahead", Row("The clock of the gateway's host is far ahead")),
    (
        "clock behind",
        By(
            "src/admin/certificates.rs",
            "a_certificate_that_is_not_valid_yet_is_a_problem_and_the_gateway_is_not_ready",
        ),
    ),
    ("SIGSTOP", Row("The gateway hangs")),
    ("a port in use at the start", By("tests/e2e/standalone.rs", "a_port_in_use_is_told_and_ends_the_start")),
    ("a port in use at a reload", Row("An address of the new config is in use")),
    ("access log: disk full", Row("The disk of the access log is full")),
    (
        "own log: disk full",
        By("src/telemetry/outlet.rs", "lines_that_a_full_disk_does_not_take_are_counted_with_the_reason"),
    ),
    (
        "log reader stuck",
        By(
            "src/telemetry/outlet.rs",
            "a_pipe_that_nobody_reads_holds_up_nobody_and_gets_all_that_fits_later",
        ),
    ),
    ("state folder", Row("The copy of a registry cannot be written")),
    // Config, registries, gateways.
    ("config emptied", Row("The config file is emptied")),
    ("config deleted", Row("The config file is deleted")),
    ("config wrong", Row("The config file has a mistake at a reload")),
    (
        "config cut, legal",
        By(
            "src/files/watch.rs",
            "a_watch_that_waits_for_writers_reports_no_change_of_a_file_that_is_not_closed",
        ),
    ),
    ("registry half written", Row("The file of a registry is cut in the middle")),
    ("registry emptied", Row("A registry loses most of its services at once")),
    (
        "upgrade to a broken config",
        By("tests/e2e/upgrade_faults.rs", "a_new_process_that_cannot_start_leaves_the_old_one_as_it_was"),
    ),
    ("upgrade without a folder", By("tests/e2e/upgrade_faults.rs", "an_upgrade_needs_a_folder_of_its_own")),
    ("a gateway ceases", Row("A gateway of another network is down")),
    (
        "a gateway never answered",
        By(
            "tests/e2e/gateway_liveness.rs",
            "the_last_gateway_of_a_network_stays_and_one_that_never_answered_is_not_judged",
        ),
    ),
    (
        "a gateway hangs",
        By(
            "tests/e2e/gateway_liveness.rs",
            "a_gateway_that_hangs_is_taken_out_by_hellos_that_it_does_not_answer",
        ),
    ),
];

#[test]
fn every_fault_is_injected_by_a_test() {
    let (_, text) = document();
    let faults: BTreeSet<&str> = FAULTS.iter().map(|(fault, _)| *fault).collect();
    assert!(faults.len() == FAULTS.len() && faults.len() >= 75, "{} of {}", faults.len(), FAULTS.len());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (fault, injected) in FAULTS {
        let is_injected = match injected {
            Row(row) => text.contains(&format!("\n| {row} | ")),
            By(file, test) => std::fs::read_to_string(root.join(file))
                .is_ok_and(|code| code.contains(&format!("fn {test}()"))),
        };
        assert!(is_injected, "{fault}: no test injects it where the table says");
    }
}
