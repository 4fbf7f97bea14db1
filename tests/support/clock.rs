//! Processes whose wall clock is wrong, or whose monotonic clock a test sets ahead.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use tempfile::TempDir;

use super::organisation::write;
use super::skip;

/// The path of the library that shifts clocks, or the reason why it could not be compiled.
static LIBRARY: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/shifted_clock.rs");
    let library =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shifted-clock-{}.so", std::process::id()));
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler)
        .args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "-Copt-level=1", "-o"])
        .arg(&library)
        .arg(source)
        .output();
    match output {
        Err(error) => Err(format!("rustc does not start: {error}")),
        Ok(output) if !output.status.success() => {
            panic!("the library does not compile: {}", String::from_utf8_lossy(&output.stderr))
        }
        Ok(_) => Ok(library),
    }
});

/// Returns environment variables that set a process's wall clock ahead by `seconds`. Returns `None`, after reporting a skip, if
/// there is no compiler, or if the library does not support this architecture.
pub fn ahead_by(test: &str, seconds: i64) -> Option<[(&'static str, String); 2]> {
    Some([("LD_PRELOAD", library(test)?), ("ISTHMUS_TEST_CLOCK", seconds.to_string())])
}

/// A monotonic clock that a test sets ahead while the process runs, so that its timers fire early. A process notices the new time
/// at its next timer, which for a gateway is within a second.
pub struct Monotonic {
    folder: TempDir,
    library: String,
}

impl Monotonic {
    /// Makes a clock that is right. Returns `None`, after reporting a skip, where [`ahead_by`] does.
    pub fn new(test: &str) -> Option<Self> {
        let clock = Self { folder: tempfile::tempdir().expect("a folder"), library: library(test)? };
        clock.set_ahead(Duration::ZERO);
        Some(clock)
    }

    /// Returns the environment variables of the process.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let file = self.folder.path().join(AHEAD).display().to_string();
        [("LD_PRELOAD", self.library.clone()), ("ISTHMUS_TEST_MONOTONIC", file)]
    }

    /// Sets the clock ahead of the right one by this time.
    pub fn set_ahead(&self, time: Duration) {
        write(self.folder.path(), AHEAD, &time.as_secs().to_string());
    }
}

/// The name of the file with the seconds.
const AHEAD: &str = "ahead";

/// Returns the path of the library, or `None` after reporting a skip.
fn library(test: &str) -> Option<String> {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        skip(&format!("{test}: no clock can be shifted on this architecture"));
        return None;
    }
    match &*LIBRARY {
        Ok(library) => Some(library.display().to_string()),
        Err(why) => {
            skip(&format!("{test}: {why}"));
            None
        }
    }
}
