//! Tests in a network namespace of their own, where they can have any address and port.

use std::fs::File;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{eventually, skip};

/// Set inside the namespace.
const INSIDE: &str = "ISTHMUS_TEST_NAMESPACE";

/// Returns true inside a network namespace that was set up by these shell commands. Outside, runs the test of
/// this name in such a namespace, fails as it fails, and returns false; if no namespace can be made, the test
/// is skipped.
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

/// A second host: another network namespace at the other end of a virtual cable. Used inside a test's own
/// namespace.
pub struct Host {
    /// The process that keeps the namespace alive; ends with its input.
    keeper: Child,
    input: Option<ChildStdin>,
}

/// The addresses of this end of the cable, and of the other host.
pub const NEAR: &str = "10.88.0.1";
pub const FAR: &str = "10.88.0.2";
const HARDWARE: &str = "02:00:00:00:00:02";

impl Host {
    /// Connects a host. Packets to it are sent to its interface's hardware address even when the host does
    /// not answer.
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

    /// Runs shell commands on it.
    pub fn run(&self, commands: &str) {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.keeper.id().to_string(), "-n", "sh", "-ec", commands]);
        assert!(command.status().expect("nsenter").success(), "{commands}");
    }

    /// Runs `act` in a thread of this process on that host: sockets made there stay there.
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

    /// Makes the host vanish: the link stays up, and packets to it are dropped without an answer.
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

/// Runs shell commands in the test's own namespace.
pub fn shell(commands: &str) {
    let done = Command::new("sh").args(["-ec", commands]).status().expect("a shell");
    assert!(done.success(), "{commands}");
}
