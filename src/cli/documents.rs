//! The documents that are made from the code: tables of reasons, problem codes, fields of the access log and metrics.
//! `ISTHMUS_BLESS=1 cargo test --lib documents` writes them anew.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::admin::{problems, registry_metrics};
use crate::model::reason::Reason;
use crate::snapshot::omitted::OmissionReason;
use crate::telemetry::access_log::FIELDS;
use crate::telemetry::{control, process};
use crate::wire::alert::Alert;
use crate::wire::connect::status_of;

/// Reasons that the answer to a CONNECT can have.
const ANSWERED: [Reason; 17] = [
    Reason::Ok,
    Reason::AuthorityUnknown,
    Reason::NotExported,
    Reason::SourceDenied,
    Reason::IdentityUntrusted,
    Reason::IdentityDenied,
    Reason::NoEndpoints,
    Reason::AllUnhealthy,
    Reason::EndpointRefused,
    Reason::EndpointTimeout,
    Reason::EndpointUnreachable,
    Reason::EndpointReset,
    Reason::LimitSource,
    Reason::LimitService,
    Reason::LimitGlobal,
    Reason::Draining,
    Reason::Internal,
];

fn reasons() -> String {
    let mut text = "# Reasons\n\n\
        Why a connection ended or was refused: one word of this list, the same in the access log (`reason`), in \
        `isthmus_connections_total{reason}`, in `isthmus failures`, in `isthmus explain`, and for callers by HBONE in the header \
        `isthmus-reason`. A client by server name reads a TLS alert, a caller by HBONE a status; `–` where there is nobody to tell, \
        or the connection had begun. What is wrong with the gateway, and not with one connection, is in \
        [problems](problems.md). This page is made from the code.\n\n\
        | reason | alert | status | meaning | look at |\n|---|---|---|---|---|\n"
        .to_owned();
    for reason in Reason::ALL {
        let alert = Alert::of(*reason).map_or("–", Alert::text);
        let status = match reason {
            Reason::BadRequest => "400, 405".to_owned(),
            reason if ANSWERED.contains(reason) => status_of(*reason).0.as_u16().to_string(),
            _ => "–".to_owned(),
        };
        let _ = writeln!(
            text,
            "| `{reason}` | {alert} | {status} | {} | {} |",
            reason.meaning(),
            reason.look_at()
        );
    }
    text.push_str(
        "\n## Endpoints that are left out\n\n\
         `explain` counts under `omitted` the endpoints that a name has and that this gateway cannot choose:\n\n\
         | why | meaning |\n|---|---|\n",
    );
    for why in OmissionReason::ALL {
        let _ = writeln!(text, "| `{}` | {} |", why.text(), why.meaning());
    }
    text
}

fn problem_codes() -> String {
    let mut text = "# Problems\n\n\
        What is wrong with a running gateway now: one word of this list, the same at the beginning of `isthmus status` (`problems` of \
        `/api/v1/status`), in the metric `isthmus_problems{code}`, and in the lines `problem` and `problem solved` of the log. Why one \
        connection was refused is in [reasons](reasons.md). This page is made from the code.\n\n\
        | code | meaning | look at |\n|---|---|---|\n"
        .to_owned();
    for code in problems::Code::ALL {
        let _ = writeln!(text, "| `{}` | {} | {} |", code.text(), code.meaning(), code.look_at());
    }
    text
}

fn access_log() -> String {
    let mut text = "# Access log\n\n\
        One line per connection by server name, and one per CONNECT stream, at its end: JSON, or `key=value` with `format: text`. What \
        is not known is left out. `isthmus failures`, `isthmus get connections` and their API have the same names. A load balancer's \
        probe (gone before its first byte) is counted and not logged. Spans have the same fields as attributes, with `isthmus.` before \
        them. This page is made from the code.\n\n\
        | field | meaning |\n|---|---|\n"
        .to_owned();
    for (field, meaning) in FIELDS {
        let _ = writeln!(text, "| `{field}` | {meaning} |");
    }
    text
}

fn metrics() -> String {
    let mut text = "# Metrics\n\n\
        On the admin listener and on `telemetry.metrics.bind`, at `/metrics`, in the Prometheus text format. Names that no rule knows never \
        become labels: they are counted as `_unknown`. Alert on `isthmus_problems > 0`, by [code](problems.md), and on \
        `rate(isthmus_connections_total{reason!=\"ok\"}[5m])`, by [reason](reasons.md). This page is made from the code.\n\n\
        | metric | meaning |\n|---|---|\n"
        .to_owned();
    let problems = [(problems::METRIC, problems::METRIC_HELP)];
    let of_registries = &registry_metrics::DESCRIPTIONS;
    let mut all: Vec<_> = control::DESCRIPTIONS
        .iter()
        .chain(&problems)
        .chain(of_registries)
        .chain(process::DESCRIPTIONS)
        .collect();
    all.sort();
    for (metric, meaning) in all {
        let _ = writeln!(text, "| `{metric}` | {meaning} |");
    }
    text
}

#[test]
fn documents_are_what_the_code_says() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs");
    for (name, text) in [
        ("reasons.md", reasons()),
        ("problems.md", problem_codes()),
        ("access-log.md", access_log()),
        ("metrics.md", metrics()),
    ] {
        let path = folder.join(name);
        if std::env::var_os("ISTHMUS_BLESS").is_some() {
            std::fs::write(&path, &text).expect("written");
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == text, "docs/{name} is not what the code says; run the test with ISTHMUS_BLESS=1");
    }
}
