//! A Kubernetes cluster of the demo: an API server, its etcd, and the controllers that fill EndpointSlices, all of them run by
//! the program `isthmus-kube-rig`. The cluster has no nodes: pods are objects, written in the way a kubelet writes them.

use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::DemoError;
use super::certificates::Certificates;
use super::stage::Folder;

/// The program that runs the parts of a cluster; `tests/kube/build` builds it.
const PROGRAM: &str = "isthmus-kube-rig";
/// The time within which the API server and its controllers must start.
const START: Duration = Duration::from_secs(60);
/// The time within which the API server must answer.
const ANSWER: Duration = Duration::from_secs(10);
/// The interval at which the demo checks whether the cluster has started.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Ports outside of the kernel's ephemeral range, and the number of them that are tried.
const PORTS: std::ops::Range<u64> = 10_000..32_000;
const PORTS_TRIED: usize = 100;
/// The size of the largest answer that is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// The number of log lines that an error shows.
const LINES_SHOWN: usize = 5;
/// The token of the user with all permissions.
const TOKEN: &str = "demo-admin";

/// A running cluster; its processes are killed when it is dropped.
pub(super) struct Cluster {
    pub(super) name: &'static str,
    address: SocketAddr,
    /// The name in the API server's certificate.
    server: String,
    tls: Arc<ClientConfig>,
    folder: PathBuf,
    authority: String,
    // The fields are declared in the order in which the processes must end.
    controllers: Option<Process>,
    api: Option<Process>,
    _etcd: Process,
}

/// A process of the cluster; killed when dropped. It also ends by itself when this process ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of `isthmus-kube-rig` if it is on the `PATH`.
pub(super) fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

impl Cluster {
    /// Starts a cluster, and waits until its API server answers and its controllers run.
    pub(super) async fn start(
        program: &Path,
        name: &'static str,
        stage: &Folder,
        certificates: &Certificates,
    ) -> Result<Self, DemoError> {
        let held = certificates.held_by(name)?;
        let server = server_name(name);
        let folder = stage.path(name);
        let cannot = |what: &str, error| DemoError::Io { what: format!("{what} of cluster {name}"), error };
        std::fs::create_dir(&folder).map_err(|error| cannot("make the folder", error))?;
        let ports = free_ports().map_err(|error| cannot("find ports", error))?;
        let [address, etcd] = ports.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let file = |file: &str, text: &str| stage.write(&format!("{name}/{file}"), text);
        file("server.pem", &held.certificate_pem)?;
        file("server.key", &held.key_pem)?;
        file("tokens.csv", &format!("{TOKEN},admin,admin,system:masters\n"))?;
        let start = |part: &str, arguments: &str| {
            let log = std::fs::File::create(folder.join(format!("{part}.log")));
            let started = log.and_then(|log| {
                let mut command = Command::new(program);
                command.args(["--attached", part]).args(arguments.split_whitespace()).current_dir(&folder);
                command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).spawn()
            });
            started.map(Process).map_err(|error| cannot(&format!("start {part}"), error))
        };
        let etcd_process = start("etcd", &format!("--data data --listen {etcd}"))?;
        let arguments = format!(
            "--etcd-servers=http://{etcd} --bind-address={ip} --secure-port={port} --cert-dir=certificates \
             --tls-cert-file=server.pem --tls-private-key-file=server.key --token-auth-file=tokens.csv \
             --service-cluster-ip-range=10.96.0.0/16 --service-account-issuer=https://kubernetes.default.svc \
             --service-account-signing-key-file=server.key --service-account-key-file=server.pem \
             --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount --endpoint-reconciler-type=none \
             --advertise-address=192.0.2.1",
            ip = address.ip(),
            port = address.port()
        );
        let api = start("apiserver", &arguments)?;
        let tls = certificates.client(&server, &[], None)?;
        let authority = certificates.authority_pem().to_owned();
        let mut cluster = Self {
            name,
            address,
            server,
            tls,
            folder: folder.clone(),
            authority,
            controllers: None,
            api: Some(api),
            _etcd: etcd_process,
        };
        file("kubeconfig", &cluster.kubeconfig())?;
        cluster.answers("/readyz").await?;
        let files = "--kubeconfig kubeconfig --service-account-private-key-file server.key";
        cluster.controllers = Some(start("controllers", files)?);
        // The controllers create this account first, so its existence shows that they run.
        cluster.answers("/api/v1/namespaces/default/serviceaccounts/default").await?;
        Ok(cluster)
    }

    /// Returns a kubeconfig for the user with all permissions.
    pub(super) fn kubeconfig(&self) -> String {
        let name = self.name;
        let ca = BASE64_STANDARD.encode(&self.authority);
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": name,
            "clusters": [{"name": name, "cluster": {
                "server": format!("https://{}", self.address), "tls-server-name": self.server,
                "certificate-authority-data": ca,
            }}],
            "users": [{"name": name, "user": {"token": TOKEN}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        })
        .to_string()
    }

    /// Creates an object; `path` is the path of its list.
    pub(super) async fn create(&self, path: &str, object: &Value) -> Result<(), DemoError> {
        self.change("POST", path, "application/json", object).await
    }

    /// Changes the fields of an object, or of its status.
    pub(super) async fn patch(&self, path: &str, fields: &Value) -> Result<(), DemoError> {
        self.change("PATCH", path, "application/merge-patch+json", fields).await
    }

    /// Kills the API server, without a graceful end. Etcd keeps its objects.
    pub(super) fn end_api(&mut self) {
        self.api = None;
    }

    async fn change(&self, method: &str, path: &str, kind: &str, body: &Value) -> Result<(), DemoError> {
        let (status, text) = self
            .ask(method, path, kind, &body.to_string())
            .await
            .map_err(|error| self.fault("apiserver", &error))?;
        match status {
            200 | 201 => Ok(()),
            _ => Err(self.fault("apiserver", &format!("answered {method} {path} with {status}: {text}"))),
        }
    }

    /// Waits until a request for a path is answered with 200.
    async fn answers(&mut self, path: &str) -> Result<(), DemoError> {
        let deadline = Instant::now() + START;
        loop {
            if self.ask("GET", path, "application/json", "").await.is_ok_and(|(status, _)| status == 200) {
                return Ok(());
            }
            let ended = |process: &mut Option<Process>| process.as_mut()?.0.try_wait().ok()?;
            for (part, status) in
                [("apiserver", ended(&mut self.api)), ("controllers", ended(&mut self.controllers))]
            {
                if let Some(status) = status {
                    return Err(self.fault(part, &format!("ended with {status}")));
                }
            }
            if Instant::now() > deadline {
                return Err(self.fault("apiserver", &format!("does not answer {path}")));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Sends a request on its own connection; returns the status and the body.
    async fn ask(&self, method: &str, path: &str, kind: &str, body: &str) -> Result<(u16, String), String> {
        let exchange = async {
            let stream = TcpStream::connect(self.address).await?;
            let name = ServerName::try_from(self.server.clone()).map_err(std::io::Error::other)?;
            let mut tls = TlsConnector::from(self.tls.clone()).connect(name, stream).await?;
            let head = format!(
                "{method} {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\nconnection: close\r\n\
                 content-type: {kind}\r\ncontent-length: {}\r\n\r\n",
                self.server,
                body.len()
            );
            tls.write_all(head.as_bytes()).await?;
            tls.write_all(body.as_bytes()).await?;
            tls.flush().await?;
            let mut answer = Vec::new();
            tls.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
        };
        let answer = tokio::time::timeout(ANSWER, exchange).await;
        let answer = answer.map_err(|_| format!("does not answer within {} s", ANSWER.as_secs()))?;
        let answer = answer.map_err(|error| error.to_string())?;
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        let text = answer.split_once("\r\n\r\n").map_or("", |(_, text)| text);
        Ok((status.ok_or_else(|| "sent an answer that is not HTTP".to_owned())?, text.to_owned()))
    }

    fn fault(&self, part: &str, what: &str) -> DemoError {
        let log = std::fs::read_to_string(self.folder.join(format!("{part}.log"))).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let log = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n");
        DemoError::Cluster { cluster: self.name, part: part.to_owned(), what: what.to_owned(), log }
    }
}

/// Returns the name in the certificate of a cluster's API server.
pub(super) fn server_name(cluster: &str) -> String {
    format!("{cluster}.demo")
}

/// Returns two ports on which no process listens at the moment.
fn free_ports() -> std::io::Result<[u16; 2]> {
    let bind = || {
        let chance = RandomState::new().hash_one(()) % (PORTS.end - PORTS.start);
        let port = u16::try_from(PORTS.start + chance).map_err(std::io::Error::other)?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port))
    };
    let free = || (0..PORTS_TRIED).find_map(|_| bind().ok()).map_or_else(bind, Ok);
    let (one, other) = (free()?, free()?);
    Ok([one.local_addr()?.port(), other.local_addr()?.port()])
}
