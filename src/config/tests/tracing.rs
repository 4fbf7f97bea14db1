//! Tests of `telemetry.tracing`.

use super::bad::refused_with;
use super::*;
use isthmus_model::trace::Sampling;

#[test]
fn it_is_off_unless_there_is_a_collector() {
    let of = |text: &str| loaded(&format!("listen: ':15443'\n{text}\n")).tracing;
    assert_eq!(
        (of(""), of("telemetry: {tracing: off}"), of("telemetry: {tracing: false}")),
        (None, None, None)
    );
    for (sample, share) in [("", 0.01), (", sample: 0", 0.0), (", sample: 0.5", 0.5), (", sample: 1", 1.0)] {
        let options = of(&format!("telemetry: {{tracing: {{otlp: 'http://[::1]:4317'{sample}}}}}"));
        let wanted = TracingOptions { otlp: "http://[::1]:4317".to_owned(), sample: Sampling::of(share) };
        assert_eq!(options, Some(wanted), "{sample}");
    }
}

#[test]
fn what_is_wrong_with_it_is_told() {
    refused_with(
        "telemetry: {tracing: on}",
        &[":2:22: telemetry.tracing: found \"on\", expected a map with the keys otlp, sample, or off"],
    );
    refused_with("telemetry: {tracing: {}}", &[":2:22: telemetry.tracing: the key otlp is missing"]);
    let at = |found: &str, why: &str| {
        let text = format!("telemetry: {{tracing: {{otlp: {found}}}}}");
        let told = load_text(&format!("listen: ':15443'\n{text}\n")).expect_err("bad").join("\n");
        assert!(
            told.contains(&format!("c.yaml:2:29: telemetry.tracing.otlp: found \"{found}\": {why}")),
            "{told}"
        );
    };
    at(
        "collector:4317",
        "it does not begin with http://; expected the address of a collector that accepts OTLP over gRPC, such as http://collector:4317",
    );
    at("collector", "it does not begin with http://");
    at("https://c:4317", "it asks for TLS, but spans are sent without TLS");
    at("http://c:4317/v1/traces", "it has a path");
    at("http://c", "it has no port");
    at("http://:4317", "it has no address");
    let hint = |found: &str| {
        let text = format!("listen: ':15443'\ntelemetry: {{tracing: {{otlp: '{found}'}}}}\n");
        load_text(&text).expect_err("bad").join("\n")
    };
    for (found, meant) in [
        ("collector", "http://collector:4317"),
        ("c:55", "http://c:55"),
        ("https://c:4317", "http://c:4317"),
        ("http://c:4318/v1/traces", "http://c:4318"),
        ("http://10.0.0.1", "http://10.0.0.1:4317"),
    ] {
        let told = hint(found);
        assert!(told.contains(&format!("(did you mean {meant:?}?)")), "{told}");
    }
    for (found, why) in [
        ("1.1", "found the number 1.1: it is more than 1; expected a number from 0 to 1"),
        ("-1", "found the number -1; expected a number from 0 to 1"),
        ("1%", "found \"1%\": it is in percent; expected a number from 0 to 1 (did you mean \"0.01\"?)"),
        ("all", "found \"all\"; expected a number from 0 to 1"),
        (
            "'0.5'",
            "found \"0.5\": the quotes make the value a text; remove them; expected a number from 0 to 1",
        ),
        ("1e-3", "expected a number from 0 to 1"),
        (".inf", "expected a number from 0 to 1"),
    ] {
        let text =
            format!("listen: ':15443'\ntelemetry: {{tracing: {{otlp: 'http://c:1', sample: {found}}}}}\n");
        let told = load_text(&text).expect_err("bad").join("\n");
        assert!(told.contains("telemetry.tracing.sample: found ") && told.contains(why), "{told}");
    }
}
