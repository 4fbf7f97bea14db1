//! Processes whose wall clock is wrong and whose monotonic clock is right.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use super::skip;

/// The path of the library that shifts the wall clock, or the reason why it could not be compiled.
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
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        skip(&format!("{test}: no wall clock can be shifted on this architecture"));
        return None;
    }
    match &*LIBRARY {
        Ok(library) => {
            Some([("LD_PRELOAD", library.display().to_string()), ("ISTHMUS_TEST_CLOCK", seconds.to_string())])
        }
        Err(why) => {
            skip(&format!("{test}: {why}"));
            None
        }
    }
}
