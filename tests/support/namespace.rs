//! Tests in a network namespace of their own, where they may have any address and port.

use std::fs::File;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{eventually, skip};

/// Set inside of the namespace.
const INSIDE: &str = "ISTHMUS_TEST_NAMESPACE";

/// Returns true inside of a network namespace that was set up by these commands (of a shell). Outside of it, runs the test of
/// this name once more in such a namespace, fails as it fails, and returns false; where none can be made, the test is skipped.
#[track_caller]
pub fn inside(test: &str, setup: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        shell(setup);
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

/// Another host: a second network namespace, at the other end of a cable. Used inside of a namespace of the test's own.
pub struct Host {
    /// Keeps the namespace; ends with its input.
    keeper: Child,
    input: Option<ChildStdin>,
}

/// The addresses of this side of the cable, and of the other host.
pub const NEAR: &str = "10.88.0.1";
pub const FAR: &str = "10.88.0.2";
const HARDWARE: &str = "02:00:00:00:00:02";

impl Host {
    /// Connects one. What is sent to it goes to its interface's address even when nobody answers for that any more.
    pub fn connect() -> Self {
        let mut command = Command::new("unshare");
        command.args(["-n", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut keeper = command.spawn().expect("unshare");
        let input = keeper.stdin.take();
        let host = Self { keeper, input };
        let own = File::open("/proc/self/ns/net").and_then(|own| own.metadata()).expect("a namespace");
        let inode = std::os::unix::fs::MetadataExt::ino(&own);
        eventually("another namespace", || {
            let other = std::fs::metadata(host.namespace()).ok()?;
            (std::os::unix::fs::MetadataExt::ino(&other) != inode).then_some(())
        });
        shell(&format!(
            "ip link set lo up
             ip link add near0 type veth peer name far0 address {HARDWARE}
             ip link set far0 netns {}
             ip addr add {NEAR}/24 dev near0
             ip link set near0 up",
            host.keeper.id()
        ));
        host.run(&format!("ip link set lo up; ip addr add {FAR}/24 dev far0; ip link set far0 up"));
        shell(&format!("ip neigh replace {FAR} lladdr {HARDWARE} dev near0 nud permanent"));
        host
    }

    fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.keeper.id())
    }

    /// Runs commands (of a shell) on it.
    pub fn run(&self, commands: &str) {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.keeper.id().to_string(), "-n", "sh", "-ec", commands]);
        assert!(command.status().expect("nsenter").success(), "{commands}");
    }

    /// Has a thread of this process do something on it: sockets that it makes stay there.
    pub fn enter<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(self.namespace()).expect("its namespace");
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(
                    std::os::fd::AsFd::as_fd(&namespace),
                    Some(LinkNameSpaceType::Network),
                )
                .expect("let in");
                act()
            });
            thread.join().expect("it ends")
        })
    }

    /// Has it vanish: the link stays up, and whatever is sent to it is dropped without an answer.
    pub fn vanish(&self) {
        self.run(&format!("ip addr del {FAR}/24 dev far0"));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.keeper.wait();
    }
}

/// Runs commands (of a shell) in the test's own namespace.
pub fn shell(commands: &str) {
    let done = Command::new("sh").args(["-ec", commands]).status().expect("a shell");
    assert!(done.success(), "{commands}");
}
