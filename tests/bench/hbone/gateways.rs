//! The two gateways that are compared, with the same certificate, limits and endpoints, one worker each, and no access log.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::Result;
use crate::backends::KINDS;
use crate::processor::measured;
use crate::support::envoy::Envoy;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;

/// The port in `:authority`.
const PORT: u16 = 80;

/// Returns the `:authority` of the endpoint of this kind.
pub(crate) fn authority(kind: &str) -> String {
    format!("{kind}.bench.mesh:{PORT}")
}

/// The process of the endpoints; killed when dropped.
pub(crate) struct Backends {
    child: Child,
    addresses: Vec<SocketAddr>,
}

impl Backends {
    pub(crate) fn start() -> Result<Self> {
        let mut child = again("backends").stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().ok_or("no stdout")?).lines();
        let addresses: Result<Vec<_>> = lines.take(KINDS.len()).map(|line| Ok(line?.parse()?)).collect();
        Ok(Self { child, addresses: addresses? })
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command that starts this program in another role.
pub(crate) fn again(role: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.env(crate::ROLE, role).stdin(Stdio::piped());
    command
}

/// Returns a folder with the files that a gateway or a caller needs.
pub(crate) fn folder() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let own = PKI.issue(&[], Some("spiffe://cluster.local/ns/istio-system/sa/eastwest"));
    let caller = PKI.issue(&[], Some("spiffe://cluster.local/ns/shop/sa/cart"));
    for (name, text) in [
        ("cert.pem", own.certificate_pem),
        ("key.pem", own.key_pem),
        ("roots.pem", PKI.ca_pem()),
        ("caller.pem", caller.certificate_pem),
        ("caller.key", caller.key_pem),
    ] {
        std::fs::write(folder.path().join(name), text)?;
    }
    Ok(folder)
}

/// The program of a gateway.
pub(crate) enum Kind {
    Isthmus,
    /// Another build of Isthmus.
    Other(OsString),
    Envoy(OsString),
}

impl Kind {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Isthmus => "isthmus",
            Self::Other(_) => "other isthmus",
            Self::Envoy(_) => "Envoy",
        }
    }

    pub(crate) fn version(&self) -> String {
        let program: &OsStr = match self {
            Self::Isthmus => BINARY.as_ref(),
            Self::Other(program) | Self::Envoy(program) => program,
        };
        let told = Command::new(program).arg("--version").output().map(|output| output.stdout);
        let told = String::from_utf8_lossy(&told.unwrap_or_default()).trim().to_owned();
        let told = told.rsplit_once("version: ").map_or(told.as_str(), |(_, version)| version);
        format!("{}: {told}", self.name())
    }
}

enum Running {
    Isthmus(Gateway),
    Envoy(Envoy),
}

/// The flow-control windows that a gateway offers its callers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Windows {
    /// The windows of Istio's gateways, 256 KiB per stream; Isthmus has its own default.
    Istio,
    /// The default windows of each program.
    Default,
}

/// A running gateway, on the first processor if there are two.
pub(crate) struct Side {
    running: Running,
    pub(crate) address: SocketAddr,
}

impl Side {
    pub(crate) fn start(kind: &Kind, backends: &Backends, windows: Windows) -> Result<Self> {
        let folder = folder()?;
        let running = measured(|| match kind {
            Kind::Isthmus => Running::Isthmus(Gateway::start_in(folder, &isthmus(backends), &[])),
            Kind::Other(program) => {
                std::fs::write(folder.path().join("isthmus.yaml"), isthmus(backends)).expect("written");
                let mut command = Command::new(program);
                command.args(["run", "-c", "isthmus.yaml"]).current_dir(folder.path());
                Running::Isthmus(Gateway::spawn(command, folder))
            }
            Kind::Envoy(program) => {
                Running::Envoy(Envoy::start(program, folder, &envoy_yaml(backends, windows)))
            }
        });
        let address = match &running {
            Running::Isthmus(gateway) => gateway.listener("hbone"),
            Running::Envoy(envoy) => envoy.listener("hbone"),
        };
        Ok(Self { running, address })
    }

    pub(crate) fn folder(&self) -> PathBuf {
        match &self.running {
            Running::Isthmus(gateway) => gateway.folder().to_owned(),
            Running::Envoy(envoy) => envoy.folder().to_owned(),
        }
    }

    fn process(&self) -> u32 {
        match &self.running {
            Running::Isthmus(gateway) => gateway.process(),
            Running::Envoy(envoy) => envoy.process(),
        }
    }

    /// Returns the processor time of all threads of the gateway, as the scheduler counts it.
    pub(crate) fn processor_time(&self) -> Result<Duration> {
        let mut total = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.process()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            total += text.split(' ').next().ok_or("no time")?.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(total))
    }

    /// Returns the resident memory in bytes.
    pub(crate) fn memory(&self) -> Result<f64> {
        let status =
            std::fs::read_to_string(Path::new("/proc").join(self.process().to_string()).join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
    }

    /// Returns the number of connections and streams that the gateway reports.
    pub(crate) fn live(&self) -> u64 {
        match &self.running {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
            Running::Isthmus(gateway) => gateway.metric("isthmus_connections_active", &[]) as u64,
            Running::Envoy(envoy) => {
                envoy.stat("http.hbone.downstream_rq_active") + envoy.stat("http.hbone.downstream_cx_active")
            }
        }
    }
}

fn isthmus(backends: &Backends) -> String {
    let services: String = KINDS
        .iter()
        .zip(&backends.addresses)
        .map(|(kind, address)| {
            format!(
                "  - hostname: {kind}.bench.mesh\n    namespace: shop\n    \
                 ports: [{{name: p, port: {PORT}, targetPort: {}}}]\n    endpoints: [{{address: {}}}]\n",
                address.port(),
                address.ip()
            )
        })
        .collect();
    format!(
        "workers: 1\nadmin: {{bind: \"127.0.0.1:0\"}}\n\
         telemetry: {{accessLog: off, log: {{format: json}}}}\n\
         node: {{namespace: istio-system, serviceAccount: eastwest, network: east, cluster: c1}}\n\
         listeners: [{{name: hbone, bind: \"127.0.0.1:0\", protocol: hbone}}]\n\
         identity: {{files: {{certificate: cert.pem, key: key.pem}}}}\n\
         trust: [{{trustDomain: cluster.local, roots: roots.pem}}]\n\
         exports: [{{services: [\"*\"]}}]\n\
         services:\n{services}"
    )
}

fn envoy_yaml(backends: &Backends, windows: Windows) -> String {
    let hosts: String = KINDS
        .iter()
        .map(|kind| {
            format!(
                "                    - name: {kind}\n                      domains: [\"{}\"]\n                      \
                 routes:\n                        - match: {{connect_matcher: {{}}}}\n                          \
                 route: {{cluster: {kind}, timeout: 0s, upgrade_configs: [{{upgrade_type: CONNECT, connect_config: {{}}}}]}}\n",
                authority(kind)
            )
        })
        .collect();
    let clusters: String = KINDS
        .iter()
        .zip(&backends.addresses)
        .map(|(kind, address)| {
            let many = "max_connections: 1000000, max_pending_requests: 1000000, max_requests: 1000000";
            format!(
                "    - name: {kind}\n      type: STATIC\n      connect_timeout: 5s\n      \
                 circuit_breakers: {{thresholds: [{{{many}}}]}}\n      \
                 load_assignment:\n        cluster_name: {kind}\n        endpoints:\n          - lb_endpoints:\n              \
                 - endpoint: {{address: {{socket_address: {{address: {}, port_value: {}}}}}}}\n",
                address.ip(),
                address.port()
            )
        })
        .collect();
    let whole = include_str!("envoy.yaml").replace("{HOSTS}\n", &hosts).replace("{CLUSTERS}\n", &clusters);
    let is_kept = |line: &&str| windows == Windows::Istio || !line.contains("_window_size:");
    whole.lines().filter(is_kept).map(|line| format!("{line}\n")).collect()
}
