//! Prometheus' own tool, `promtool` of Debian's package `prometheus`, or `ISTHMUS_PROMTOOL`.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::skip;

/// The program.
pub struct Promtool(PathBuf);

impl Promtool {
    /// Returns the tool; if there is none, reports that the test is skipped.
    pub fn installed() -> Option<Self> {
        let named = std::env::var_os("ISTHMUS_PROMTOOL").map(PathBuf::from);
        let usual = || Some(PathBuf::from("/usr/bin/promtool")).filter(|path| path.exists());
        let found = named.or_else(usual).map(Self);
        if found.is_none() {
            skip("monitoring: no promtool (Debian package prometheus)");
        }
        found
    }

    /// Runs the tool with this input; returns true if it succeeded, and its output.
    pub fn run(&self, arguments: &[&str], input: &str) -> (bool, String) {
        let mut child = Command::new(&self.0)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut stdin = child.stdin.take().expect("piped");
        let input = input.to_owned();
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().expect("it ends");
        let _ = writer.join().expect("no panic");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }
}
