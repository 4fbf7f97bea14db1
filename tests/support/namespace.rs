//! Tests in their own network namespace, in which they can bind any address and port.

use std::fs::File;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{eventually, skip};

/// The environment variable that is set inside the namespace.
const INSIDE: &str = "ISTHMUS_TEST_NAMESPACE";

/// Returns true inside a network namespace, after setting it up with these shell commands. Outside, it runs the test of this
/// name again in a new namespace, fails if that run fails, and returns false. If this host allows no namespace, it reports a
/// skip and returns false.
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

/// A second host: another network namespace at the other end of a virtual cable (veth). For tests in their own namespace.
pub struct Host {
    /// The process that keeps the namespace alive; it exits when its input is closed.
    keeper: Child,
    input: Option<ChildStdin>,
}

/// The address of the test at this end of the cable.
pub const NEAR: &str = "10.88.0.1";
/// The address of the [`Host`] at the other end of the cable.
pub const FAR: &str = "10.88.0.2";
const HARDWARE: &str = "02:00:00:00:00:02";

impl Host {
    /// Creates the host and the cable to it. Packets to the host are sent to a fixed hardware address, also when the host does
    /// not answer ARP.
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

    /// Runs shell commands on the host.
    pub fn run(&self, commands: &str) {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.keeper.id().to_string(), "-n", "sh", "-ec", commands]);
        assert!(command.status().expect("nsenter").success(), "{commands}");
    }

    /// Runs `act` in a thread of this process inside the host's namespace; the sockets that `act` creates belong to that
    /// namespace.
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

    /// Makes the host vanish: the link stays up, but the host drops all packets to its address without an answer.
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
