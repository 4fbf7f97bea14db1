//! Documents that are generated from the code: tables of reasons, problem codes, access log fields, metrics and requests.
//! `ISTHMUS_BLESS=1 cargo test -p isthmus-cli documents` writes them.

#[allow(dead_code, unreachable_pub, reason = "the end-to-end tests use the same file")]
#[path = "../../tests/support/markdown.rs"]
mod markdown;
mod pages;

use std::fmt::Write as _;

use isthmus_admin::problems;
use isthmus_admin::server::SCRAPED;
use isthmus_api::connection::FIELDS;
use isthmus_api::requests::{self, Members};
use isthmus_decisions::omitted::OmissionReason;
use isthmus_model::alert::Alert;
use isthmus_model::reason::Reason;
use isthmus_telemetry::{control, process};

/// Returns the page of reasons and problems up to its section of faults, whose tables `tests/e2e/one_word.rs` writes.
fn reasons_and_problems() -> String {
    let mut text = "# Reasons, problems and faults\n\n\
        Isthmus says one word for one fault: a **reason** if it ended or refused a connection, the code of a **problem** if it\n\
        concerns the gateway as a whole. This page is generated from the code.\n\n\
        ## Reasons\n\n\
        The access log (`reason`), the metric `isthmus_connections_total{reason}`, `isthmus failures` and `isthmus explain` show\n\
        the reason. A refused SNI client also gets a TLS alert; a refused HBONE caller gets an HTTP status and the reason in the\n\
        header `isthmus-reason`, but `authority_unknown` in place of `not_exported` and `hop_limit`. `–` means that the client gets\n\
        neither, for example because the connection was already established.\n\n\
        | reason | alert | status | meaning | look at |\n|---|---|---|---|---|\n"
        .to_owned();
    for reason in Reason::ALL {
        let alert = reason.alert().map_or("–", Alert::text);
        let status = match reason {
            Reason::BadRequest => "400, 405".to_owned(),
            reason => reason.status().map_or_else(|| "–".to_owned(), |status| status.to_string()),
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
         `isthmus explain` lists the endpoints of a name that this gateway cannot use, by cause (`omitted` in the API):\n\n\
         | why | meaning |\n|---|---|\n",
    );
    for why in OmissionReason::ALL {
        let _ = writeln!(text, "| `{}` | {} |", why.text(), why.meaning());
    }
    text.push_str(
        "\n## Problems\n\n\
         A problem is something that is wrong with a running gateway at the moment. `isthmus status` begins with the problems\n\
         (`problems` of `/api/v1/status`); the metric `isthmus_problems{code}` and the log lines `problem` and `problem solved`\n\
         show their codes.\n\n\
         | code | meaning | look at |\n|---|---|---|\n",
    );
    for code in problems::code::Code::ALL {
        let _ = writeln!(text, "| `{}` | {} | {} |", code.text(), code.meaning(), code.look_at());
    }
    text
}

fn access_log() -> String {
    let mut text = "# Access log\n\n\
        The gateway writes one line when an SNI connection or a CONNECT stream ends: JSON, or `key=value` with `format: text`. A\n\
        field without a value is left out. `isthmus failures`, `isthmus get connections` and their API use the same names. A client\n\
        that closes before it sends a byte, as load balancer probes do, is counted but not logged. Spans have the same fields as\n\
        attributes, with the prefix `isthmus.`. This page is generated from the code.\n\n\
        | field | meaning |\n|---|---|\n"
        .to_owned();
    for (field, meaning) in FIELDS {
        let _ = writeln!(text, "| `{field}` | {meaning} |");
    }
    text
}

fn metrics() -> String {
    let mut text = "# Metrics\n\n\
        The admin listener and `telemetry.metrics.bind` serve these metrics at `/metrics` in the Prometheus text format. Server names\n\
        that match no route or service are counted under the label `_unknown`. [Alerts](metrics-and-logs.md#metrics) come with the\n\
        chart. This page is generated from the code.\n\n\
        | metric | meaning |\n|---|---|\n"
        .to_owned();
    let scraped = SCRAPED.iter().flat_map(|scraped| scraped.descriptions);
    let mut all: Vec<_> = control::DESCRIPTIONS.iter().chain(scraped).chain(process::DESCRIPTIONS).collect();
    all.sort();
    for (metric, meaning) in all {
        let _ = writeln!(text, "| `{metric}` | {meaning} |");
    }
    text
}

/// Returns the table of `docs/api.md`.
fn requests() -> String {
    let mut text = "| request | answer | members |\n|---|---|---|\n".to_owned();
    for row in requests::ALL {
        let members = match row.members {
            Members::Golden(name) => format!("[{name}](../tests/golden/api/{name}.json)"),
            Members::Text(text) => text.to_owned(),
        };
        let line =
            format!("| `{} {}{}` | {} | {members} |", row.method.text(), row.path, row.query, row.answer);
        let _ = writeln!(text, "{}", line.replace("  |", " |"));
    }
    text
}

/// Returns the page of the API with its table replaced.
fn with_rest_of(kept: &str, table: &str) -> String {
    let begin = kept.find("\n| request |").expect("docs/api.md has a table of requests") + 1;
    let end = kept[begin..].find("\n\n").expect("text follows the table") + begin + 1;
    format!("{}{table}{}", &kept[..begin], &kept[end..])
}

/// Returns the page of reasons with the part before its faults replaced.
fn with_faults_of(kept: &str, text: &str) -> String {
    let faults = kept.find("\n## Faults\n").expect("docs/reasons.md has a section Faults");
    format!("{text}{}", &kept[faults..])
}

/// Returns the names and the texts of the generated pages of `docs`.
fn generated() -> [(&'static str, String); 4] {
    [
        ("reasons.md", reasons_and_problems()),
        ("access-log.md", access_log()),
        ("metrics.md", metrics()),
        ("api.md", requests()),
    ]
}

#[test]
fn documents_are_what_the_code_says() {
    let folder = pages::root().join("docs");
    for (name, text) in generated() {
        let path = folder.join(name);
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        let text = match name {
            "reasons.md" => with_faults_of(&kept, &text),
            "api.md" => with_rest_of(&kept, &text),
            _ => text,
        };
        if std::env::var_os("ISTHMUS_BLESS").is_some() {
            std::fs::write(&path, &text).expect("written");
        } else {
            assert!(kept == text, "docs/{name} is not what the code says; run the test with ISTHMUS_BLESS=1");
        }
    }
}
