//! Each fault has one word. The tests inject every row of `docs/reasons.md`, and compare the word in all places that can show it;
//! no place may show another word. Each test keeps one section of the document: this file has the table and the places, the
//! files `one_word_*` have the faults.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use isthmus::model::reason::Reason;
use serde_json::Value;

use crate::problems::run;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::{skip, within};
use crate::top::Terminal;

/// The time within which all places must show the word of a fault, also on a busy machine. Each timer has a test of its own on a paused
/// clock.
const PATIENCE: Duration = Duration::from_secs(60);

/// The subject of a fault, which decides the places that show its word.
enum Subject {
    /// A connection; the arguments of `isthmus explain` for its name.
    Connection { explain: String },
    /// The gateway as a whole.
    Gateway,
    /// A fault that the gateway cannot see or say; the command or the program that shows it.
    Elsewhere { shown_by: &'static str },
}

/// Returns the documented time that passes before the gateway can know of a fault with this word; most faults have none.
fn timer(fault: &str, word: &str) -> &'static str {
    match word {
        "registry_stale" if matches!(fault, "The API server fails" | "The etcd of a registry is down") => {
            "3 s"
        }
        "hello_timeout" => "`hello.timeout`",
        "endpoint_timeout" => "`connectTimeout`",
        "idle_timeout" => "`timeouts.idle`",
        "half_close_timeout" => "`timeouts.halfClose`",
        "stalled" => "`timeouts.stalled`",
        "client_vanished" | "endpoint_vanished" => "two minutes without an acknowledgement",
        "all_unhealthy" | "endpoint_unhealthy" => "`health.interval` × `unhealthyAfter`",
        "name_stale" => "the TTL of the last answer",
        "endpoint_silent" if fault.contains("leaves") => "–",
        "endpoint_silent" => "5 s",
        "registry_impaired" => "5 s",
        "gateway_unreachable" => "two probes, one each second",
        "peer_not_live" => "two heartbeats, one each 5 s, if nothing refuses",
        "state_not_kept" => "1 s",
        _ => "–",
    }
}

/// A row of a table.
struct Row {
    fault: &'static str,
    word: &'static str,
    subject: Subject,
}

impl Row {
    /// Returns the name of the metric that counts the fault, and the label whose value is the word.
    fn metric(&self) -> (&'static str, &'static str) {
        let is_reason = Reason::ALL.iter().any(|reason| reason.text() == self.word);
        match matches!(self.subject, Subject::Connection { .. }) && is_reason {
            true => ("isthmus_connections_total", "reason"),
            false => ("isthmus_problems", "code"),
        }
    }

    /// Returns true if the metric counts the word.
    fn is_counted(&self, gateway: &Gateway) -> bool {
        let (metric, label) = self.metric();
        gateway.metric(metric, &[&format!("{label}=\"{}\"", self.word)]) >= 1.0
    }

    /// Returns the row of the document.
    fn text(&self) -> String {
        let (fault, word) = (self.fault, self.word);
        if let Subject::Elsewhere { shown_by } = self.subject {
            return format!("| {fault} | {shown_by} |");
        }
        let timer = timer(fault, word);
        let explained = match &self.subject {
            Subject::Connection { explain } => format!("explain {explain}"),
            Subject::Gateway | Subject::Elsewhere { .. } => "status".to_owned(),
        };
        format!("| {fault} | `{word}` | {timer} | `isthmus {explained}` |")
    }
}

/// Returns true if the word is the reason of a connection's end, or if the detail begins with it.
fn says(connection: &Value, word: &str) -> bool {
    let detail = connection["detail"].as_str().unwrap_or_default();
    connection["reason"] == word || detail.starts_with(&format!("{word}: "))
}

/// Returns the codes of the gateway's problems.
fn codes(gateway: &Gateway) -> BTreeSet<String> {
    let status = gateway.json("/api/v1/status");
    let problems = status["problems"].as_array().cloned().unwrap_or_default();
    problems.iter().filter_map(|problem| problem["code"].as_str().map(str::to_owned)).collect()
}

/// Returns the arguments of a command as a shell takes them.
fn quoted(arguments: &[&str]) -> String {
    let words = arguments.iter().map(|word| if word.is_empty() { "\"\"" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

/// A place, whether it shows the word, and its content.
type Place = (&'static str, bool, String);

/// The rows of one section of the document.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
    /// True if some faults of the section cannot be injected on this host.
    is_partial: bool,
}

impl Table {
    /// Injects a fault of a connection, and waits until all places show the word. `asks` are the arguments of `isthmus explain`.
    pub(crate) fn connection(
        &mut self,
        gateway: &Gateway,
        fault: &'static str,
        word: &'static str,
        asks: &[&str],
        inject: impl FnOnce(),
    ) {
        let lines = gateway.access_log().len();
        inject();
        self.row(Row { fault, word, subject: Subject::Connection { explain: quoted(asks) } }, |row| {
            places_of_connection(row, gateway, asks, lines)
        });
        // No connection ends with another reason.
        let others = gateway.access_log().into_iter().skip(lines).filter(|line| !says(line, word));
        let others: Vec<Value> = others.filter(|line| line["reason"] != "ok").collect();
        assert!(others.is_empty(), "{fault}: other words than {word}: {others:?}");
    }

    /// Injects a fault of the gateway, and waits until all places show the word. The value that `inject` returns lives as long
    /// as the fault must last.
    pub(crate) fn problem<T>(
        &mut self,
        gateway: &Gateway,
        fault: &'static str,
        word: &'static str,
        inject: impl FnOnce() -> T,
    ) {
        let before = codes(gateway);
        let terminal = Terminal::open(
            &format!("{BINARY} top --admin http://{}", gateway.admin()),
            ["-x", "160", "-y", "90"],
        );
        let held = inject();
        self.row(Row { fault, word, subject: Subject::Gateway }, |row| {
            places_of_problem(row, gateway, terminal.as_ref())
        });
        // A gateway of a peer that was never probed yet counts as one that does not answer, for about a second.
        let known = &before | &BTreeSet::from([word.to_owned()]);
        within(PATIENCE, &format!("{fault}: no other word than {word}"), || {
            codes(gateway).is_subset(&known).then_some(())
        });
        drop(held);
    }

    /// Adds a fault that the gateway cannot see or say. `shows` returns what `shown_by` shows, and whether it is the fault.
    pub(crate) fn elsewhere(
        &mut self,
        fault: &'static str,
        shown_by: &'static str,
        shows: impl Fn() -> (bool, String),
    ) {
        self.row(Row { fault, word: "", subject: Subject::Elsewhere { shown_by } }, |_| {
            let (shown, text) = shows();
            vec![(shown_by, shown, text)]
        });
    }

    /// Adds the rows of another table.
    pub(crate) fn append(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.is_partial |= other.is_partial;
    }

    /// Reports that some faults of the section cannot be injected on this host.
    pub(crate) fn lacks(&mut self, reason: &str) {
        skip(reason);
        self.is_partial = true;
    }

    /// Waits until all places show the word of the row.
    fn row(&mut self, row: Row, places: impl Fn(&Row) -> Vec<Place>) {
        let (fault, word) = (row.fault, row.word);
        let begun = Instant::now();
        let silent = loop {
            // The time is taken before the places are read, because reading them takes long on a busy machine.
            let took = begun.elapsed();
            let silent: Vec<Place> = places(&row).into_iter().filter(|(_, said, _)| !said).collect();
            if silent.is_empty() || took >= PATIENCE {
                break silent;
            }
        };
        let silent: Vec<String> =
            silent.into_iter().map(|(place, _, text)| format!("{place}: {text}")).collect();
        assert!(silent.is_empty(), "{fault}: these do not say {word}: {}", silent.join("\n"));
        eprintln!("{fault:<60} {word:<22} {:>5} ms", begun.elapsed().as_millis());
        self.rows.push(row);
    }

    /// Checks that a section of the document has these rows; with `ISTHMUS_BLESS=1`, writes the section.
    pub(crate) fn is_section(&self, title: &str) {
        /// The sections are written one at a time.
        static WRITES: Mutex<()> = Mutex::new(());
        let faults: BTreeSet<&str> = self.rows.iter().map(|row| row.fault).collect();
        assert_eq!(faults.len(), self.rows.len(), "no fault is injected twice");
        let _writes = WRITES.lock();
        let (path, text) = document();
        let head = format!("\n### {title}\n");
        let begin = text.find(&head).unwrap_or_else(|| panic!("docs/reasons.md has a section {title}"));
        // The rows are all lines after the line under the head of the table.
        let rows = begin + text[begin..].find("|---|").expect("a table");
        let rows = rows + text[rows..].find('\n').expect("an end") + 1;
        let end = text[rows..].find("\n### ").map_or(text.len(), |end| rows + end);
        let made: Vec<String> = self.rows.iter().map(|row| row.text() + "\n").collect();
        let kept = &text[rows..end];
        if self.is_partial {
            made.iter().for_each(|row| assert!(kept.contains(row), "docs/reasons.md lacks {row}"));
        } else if std::env::var_os("ISTHMUS_BLESS").is_some() {
            std::fs::write(&path, [&text[..rows], &made.concat(), &text[end..]].concat()).expect("written");
        } else {
            let made = made.concat();
            assert!(
                kept == made,
                "docs/reasons.md is not what the test does; run it with ISTHMUS_BLESS=1\n{made}"
            );
        }
    }
}

/// Returns the path and the text of the document.
pub(crate) fn document() -> (std::path::PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reasons.md");
    let text = std::fs::read_to_string(&path).expect("docs/reasons.md");
    (path, text)
}

/// Returns the dashboard, and whether it shows the word.
fn dashboard(row: &Row, gateway: &Gateway) -> Place {
    let page = gateway.get("/").1;
    ("dashboard", page.contains(&format!(">{}<", row.word)), page)
}

fn json(gateway: &Gateway, arguments: &[&str]) -> Value {
    let text = run(gateway, &[arguments, &["-o", "json"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

/// Returns `isthmus check`, and whether the text of a line begins with the word. The gateway itself is a line too, which says
/// that it is draining.
fn check(row: &Row, gateway: &Gateway) -> Place {
    let checks = json(gateway, &["check"]);
    let says = |one: &Value| {
        let text = one["text"].as_str().unwrap_or_default();
        text.starts_with(&format!("{}: ", row.word)) || text.contains(&format!("is {}", row.word))
    };
    ("check", checks.as_array().is_some_and(|list| list.iter().any(says)), checks.to_string())
}

fn places_of_connection(row: &Row, gateway: &Gateway, asks: &[&str], lines: usize) -> Vec<Place> {
    let word = row.word;
    let has = |list: &Value| list.as_array().is_some_and(|list| list.iter().any(|one| says(one, word)));
    let begins = |text: &Value| text.as_str().is_some_and(|text| text.starts_with(&format!("{word}: ")));
    let explained = json(gateway, &[&["explain"], asks].concat());
    let warns = explained["warnings"].as_array().is_some_and(|list| list.iter().any(begins));
    let failures = json(gateway, &["failures"]);
    let log = Value::from(gateway.access_log().into_iter().skip(lines).collect::<Vec<_>>());
    vec![
        check(row, gateway),
        ("explain", explained["reason"] == word || has(&explained["recent"]) || warns, explained.to_string()),
        ("failures", has(&failures), failures.to_string()),
        ("access log", has(&log), log.to_string()),
        ("metric", row.is_counted(gateway), "it is 0".to_owned()),
        dashboard(row, gateway),
        overview(row, gateway),
    ]
}

/// Returns the data that `isthmus top` and the dashboard show, and whether a failure in it has the word.
fn overview(row: &Row, gateway: &Gateway) -> Place {
    let overview = gateway.json("/api/v1/overview");
    let has = overview["failures"].as_array().is_some_and(|list| list.iter().any(|one| says(one, row.word)));
    ("overview", has, overview["failures"].to_string())
}

/// The problems that are no line of the log: an operator has ordered the one, and the other one is found by a search of all
/// services, which only a question is worth.
const NOT_LOGGED: [&str; 2] = ["endpoint_withdrawn", "service_conflict"];

fn places_of_problem(row: &Row, gateway: &Gateway, terminal: Option<&Terminal>) -> Vec<Place> {
    let word = row.word;
    let status = run(gateway, &["status"]);
    let log = gateway.log().join("\n");
    let logged =
        log.contains(&format!("\"code\":\"{word}\"")) || log.contains(&format!("\"message\":\"{word}"));
    let screen = terminal.map(Terminal::screen);
    vec![
        ("status", status.contains(&format!("  {word}: ")), status),
        check(row, gateway),
        ("log", logged || NOT_LOGGED.contains(&word), log),
        ("metric", row.is_counted(gateway), "it is 0".to_owned()),
        dashboard(row, gateway),
        ("top", screen.as_ref().is_none_or(|screen| screen.contains(word)), screen.unwrap_or_default()),
    ]
}

#[test]
fn the_document_has_sixty_faults() {
    let text = document().1;
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| fault |"));
    let faults: BTreeSet<&str> = rows.filter_map(|row| row.split(" | ").next()).collect();
    assert!(faults.len() >= 60, "{}: {faults:?}", faults.len());
}
