//! `isthmus validate`: checks config files as `isthmus run` does.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::offline::{Names, Offline, offline};
use isthmus_console::failure::Failure;

/// The text below the options.
pub(super) const EXAMPLES: &str = "Examples:
  isthmus validate isthmus.yaml               a config with its registries and certificates
  isthmus validate --strict conf.d            a directory; warnings fail too
  isthmus validate --for-start isthmus.yaml   before a start: fails only if `run` would not start
  cat isthmus.yaml | isthmus validate -       the standard input

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
}

/// The result for one file; the worst of all files decides.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Fine,
    /// `run` would start, but something that the file names cannot be used.
    Impaired,
    Wrong,
}

/// Runs `isthmus validate`.
pub(super) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let names = if arguments.offline { Names::Leave } else { Names::LookUp };
    let mut worst = Verdict::Fine;
    for file in arguments.files.iter().chain(&arguments.config) {
        let verdict = match offline(file, names) {
            Ok(world) => {
                let (verdict, text) = verdict(&world, arguments);
                let notes = world.notes.iter().map(|note| format!("note: {note}"));
                let warnings = world.warnings.iter().map(|warning| format!("warning: {warning}"));
                for line in notes.chain(warnings).chain(world.faults) {
                    writeln!(out, "{line}")?;
                }
                writeln!(out, "{}: {text}", file.display())?;
                verdict
            }
            Err(problems) => {
                for problem in problems {
                    writeln!(out, "{problem}")?;
                }
                Verdict::Wrong
            }
        };
        worst = worst.max(verdict);
    }
    match worst {
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
