//! `isthmus validate`: checks config files as `isthmus run` does.

use std::io::Write;
use std::path::PathBuf;

use super::read;
use isthmus_console::failure::Failure;

/// The effect of warnings on the exit code of `validate`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Warnings {
    Pass,
    Fail,
}

pub(super) fn validate(files: &[PathBuf], warnings: Warnings, out: &mut impl Write) -> Result<(), Failure> {
    let mut failed = false;
    for file in files {
        match read::offline(file) {
            Ok(world) => {
                for note in &world.notes {
                    writeln!(out, "note: {note}")?;
                }
                for warning in &world.warnings {
                    writeln!(out, "warning: {warning}")?;
                }
                for error in &world.errors {
                    writeln!(out, "{error}")?;
                }
                failed |=
                    warnings == Warnings::Fail && !world.warnings.is_empty() || !world.errors.is_empty();
                let verdict = match (world.errors.is_empty(), world.warnings.is_empty()) {
                    (true, true) => "fine",
                    (true, false) if warnings == Warnings::Fail => {
                        "`isthmus run` would start, but --strict fails on warnings"
                    }
                    (true, false) => "fine, with warnings",
                    (false, _) => {
                        "`isthmus run` would start, but the certificate or the roots cannot be used"
                    }
                };
                writeln!(out, "{}: {verdict}", file.display())?;
            }
            Err(problems) => {
                failed = true;
                for problem in problems {
                    writeln!(out, "{problem}")?;
                }
            }
        }
    }
    if failed { Err(Failure::Reported) } else { Ok(()) }
}
