//! `isthmus validate`: checks config files as `isthmus run` does.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::offline::{Names, Offline, offline};
use isthmus_console::failure::Failure;

/// The text below the options.
pub(super) const EXAMPLES: &str = "Examples:
  isthmus validate isthmus.yaml               a config with its registries and certificates
  isthmus validate --strict conf.d            a directory; warnings fail too
  isthmus validate --for-start isthmus.yaml   before a start: fails only if `run` would not start
  cat isthmus.yaml | isthmus validate -       the standard input
  isthmus validate --json isthmus.yaml        a JSON list with an object for each file

Exit codes: 0 fine; 1 a file is wrong, and `run` would not start; 4 `run` would start, but something that the file names is
missing or expired.";

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Config files, or directories of them; `-` for the standard input; also pipes, which `run` refuses
    #[arg(required_unless_present = "config", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A config file, as with the other commands
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
    /// Succeed wherever `run` would start
    #[arg(long, conflicts_with = "strict")]
    for_start: bool,
    /// Look up no host names. Without this, look-ups take at most 2 s
    #[arg(long)]
    offline: bool,
    /// Print a JSON list with an object for each file: `file`, `verdict` (fine, impaired, wrong), `text`, `errors`, `faults`,
    /// `warnings`, `notes`
    #[arg(long)]
    json: bool,
}

/// The result for one file; the worst of all files decides.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Fine,
    /// `run` would start, but something that the file names cannot be used.
    Impaired,
    Wrong,
}

/// The report on one file.
#[derive(Serialize)]
struct Report {
    file: String,
    verdict: Verdict,
    text: &'static str,
    /// The problems for which `run` would not start.
    errors: Vec<String>,
    /// The things that the file names and that cannot be used.
    faults: Vec<String>,
    warnings: Vec<String>,
    notes: Vec<String>,
}

impl Report {
    fn of(file: &Path, arguments: &Arguments) -> Self {
        let names = if arguments.offline { Names::Leave } else { Names::LookUp };
        let (world, errors) = match offline(file, names) {
            Ok(world) => (Some(world), Vec::new()),
            Err(errors) => (None, errors),
        };
        let (verdict, text) = world
            .as_ref()
            .map_or((Verdict::Wrong, "`isthmus run` would not start"), |world| verdict(world, arguments));
        let (faults, warnings, notes) =
            world.map_or_else(<_>::default, |world| (world.faults, world.warnings, world.notes));
        Self { file: file.display().to_string(), verdict, text, errors, faults, warnings, notes }
    }

    fn print(&self, out: &mut impl Write) -> Result<(), Failure> {
        let notes = self.notes.iter().map(|note| format!("note: {note}"));
        let warnings = self.warnings.iter().map(|warning| format!("warning: {warning}"));
        let faults = self.faults.iter().chain(&self.errors).cloned();
        for line in notes.chain(warnings).chain(faults) {
            writeln!(out, "{line}")?;
        }
        if self.errors.is_empty() {
            writeln!(out, "{}: {}", self.file, self.text)?;
        }
        Ok(())
    }
}

/// Runs `isthmus validate`.
pub(super) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let mut reports = Vec::new();
    for file in arguments.files.iter().chain(&arguments.config) {
        let report = Report::of(file, arguments);
        if !arguments.json {
            report.print(out)?;
        }
        reports.push(report);
    }
    if arguments.json {
        writeln!(out, "{:#}", serde_json::json!(reports))?;
    }
    match reports.iter().map(|report| report.verdict).max().unwrap_or(Verdict::Fine) {
        Verdict::Fine => Ok(()),
        Verdict::Impaired => Err(Failure::ReportedImpaired),
        Verdict::Wrong => Err(Failure::Reported),
    }
}

/// Returns the verdict on a file that can be read, and its text.
fn verdict(world: &Offline, arguments: &Arguments) -> (Verdict, &'static str) {
    match (world.faults.is_empty(), world.warnings.is_empty()) {
        (_, false) if arguments.strict => {
            (Verdict::Wrong, "`isthmus run` would start, but --strict fails on warnings")
        }
        (false, _) => {
            let text =
                "`isthmus run` would start, but something that the file names is missing or cannot be used";
            (if arguments.for_start { Verdict::Fine } else { Verdict::Impaired }, text)
        }
        (true, true) => (Verdict::Fine, "fine"),
        (true, false) => (Verdict::Fine, "fine, with warnings"),
    }
}
