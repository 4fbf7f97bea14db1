//! HAProxy, nginx and sniproxy as Debian packages them; the test gives the config of each.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::etcd::free_ports;
use super::{eventually, skip};

/// The nginx module that forwards TCP connections.
const STREAM: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

/// A running balancer; killed when dropped.
pub struct Balancer {
    /// The address at which the balancer accepts connections.
    pub address: SocketAddr,
    child: Child,
    folder: TempDir,
}

/// Returns an address on which no process listens at the moment.
pub fn free() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_ports(1)[0]))
}

fn command(name: &str, test: &str) -> Option<Command> {
    let folders = ["/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin"];
    let found = folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.exists());
    if found.is_none() {
        skip(&format!("{test}: there is no {name} (Debian's package of this name)"));
    }
    found.map(Command::new)
}

impl Balancer {
    /// Starts HAProxy with these config sections. Returns `None`, after reporting a skip, if HAProxy is not installed.
    /// [`log`](Self::log) returns its log lines.
    pub fn haproxy(test: &str, address: SocketAddr, sections: &str) -> Option<Self> {
        let config = format!(
            "global\n  log stdout format raw local0\ndefaults\n  mode tcp\n  log global\n  timeout connect 5s\n  \
             timeout client 30s\n  timeout server 30s\n{sections}"
        );
        Self::haproxy_of(test, address, &config)
    }

    /// Starts HAProxy with this config.
    pub fn haproxy_of(test: &str, address: SocketAddr, config: &str) -> Option<Self> {
        let mut command = command("haproxy", test)?;
        command.args(["-db", "-f", "balancer.conf"]);
        Some(Self::start(command, address, config))
    }

    /// Starts nginx with these directives in its `stream` block. Returns `None`, after reporting a skip, if nginx or its stream
    /// module is not installed. With the directive `access_log log FORMAT;`, [`log`](Self::log) returns the access log.
    pub fn nginx(test: &str, address: SocketAddr, directives: &str) -> Option<Self> {
        let mut command = command("nginx", test)?;
        if !Path::new(STREAM).exists() {
            skip(&format!("{test}: nginx has no stream module (Debian's libnginx-mod-stream)"));
            return None;
        }
        // A single process, so that killing it at the end of the test leaves no nginx process behind.
        let config = format!(
            "load_module {STREAM};\ndaemon off;\nmaster_process off;\npid nginx.pid;\nerror_log stderr;\n\
             events {{}}\nstream {{\n{directives}\n}}\n"
        );
        command.args(["-p", ".", "-c", "balancer.conf"]);
        Some(Self::start(command, address, &config))
    }

    /// Starts sniproxy with this config. Returns `None`, after reporting a skip, if sniproxy is not installed.
    pub fn sniproxy(test: &str, address: SocketAddr, config: &str) -> Option<Self> {
        let mut command = command("sniproxy", test)?;
        command.args(["-f", "-c", "balancer.conf"]);
        Some(Self::start(command, address, config))
    }

    fn start(mut command: Command, address: SocketAddr, config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("balancer.conf"), config).expect("written");
        let log = File::create(folder.path().join("log")).expect("created");
        let errors = File::create(folder.path().join("errors")).expect("created");
        command.current_dir(folder.path()).stdin(Stdio::null()).stdout(log).stderr(errors);
        let mut child = command.spawn().expect("it starts");
        eventually("the balancer", || {
            if let Ok(Some(status)) = child.try_wait() {
                let errors = std::fs::read_to_string(folder.path().join("errors"));
                panic!("it ended with {status}: {}", errors.unwrap_or_default());
            }
            TcpStream::connect(address).ok()
        });
        Self { address, child, folder }
    }

    /// Returns the lines that the balancer has logged.
    pub fn log(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.path().join("log")).expect("a log");
        log.lines().map(str::to_owned).collect()
    }

    /// Waits for a line of the balancer's log that begins with `begin`.
    #[track_caller]
    pub fn logged(&self, begin: &str) -> String {
        eventually(begin, || self.log().into_iter().find(|line| line.starts_with(begin)))
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of the balancer\n{}", self.log().join("\n"));
            eprintln!("{}", std::fs::read_to_string(self.folder.path().join("errors")).unwrap_or_default());
        }
    }
}
