//! Tests in a network namespace of their own, where they may have any address and port.

use std::process::Command;

use super::skip;

/// Set inside of the namespace.
const INSIDE: &str = "ISTHMUS_TEST_NAMESPACE";

/// Returns true inside of a network namespace that was set up by these commands (of a shell). Outside of it, runs the test of
/// this name once more in such a namespace, fails as it fails, and returns false; where none can be made, the test is skipped.
#[track_caller]
pub fn inside(test: &str, setup: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        let done = Command::new("sh").args(["-ec", setup]).status().expect("a shell");
        assert!(done.success(), "the namespace cannot be set up");
        return true;
    }
    let can = Command::new("unshare").args(["-n", "ip", "link", "set", "lo", "up"]).output();
    if !can.is_ok_and(|can| can.status.success()) {
        skip(&format!("{test}: no network namespace can be made here (unshare -n, ip)"));
        return false;
    }
    let own = std::env::current_exe().expect("this test");
    let run = Command::new("unshare")
        .arg("-n")
        .arg(own)
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output();
    let run = run.expect("it starts");
    let text = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && text.contains("1 passed"), "{text}");
    eprintln!("{text}");
    false
}
