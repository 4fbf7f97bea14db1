//! The measured programs. Proxies that route by server name run with one worker and without logs, configured as their
//! documentation advises. The floors are minimal relays ([`crate::floors`]), which show the cost that no proxy can avoid.

use std::cell::Cell;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::ends::{Addresses, BACKENDS, Backend, Ends, NAMES, name};
use crate::installed::{ENVOY_ARGUMENTS, HAPROXY_ARGUMENTS, find};
use crate::processor::measured;
use crate::{ROLE, Result};

/// The time limit of a start; a proxy with many routes may be slow.
const STARTED: Duration = Duration::from_secs(120);

/// The kind of a measured program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// This isthmus or another build of it.
    Isthmus,
    /// HAProxy, with or without `option splice-request` and `splice-response`.
    Haproxy { splice: bool },
    /// nginx with `ssl_preread`.
    Nginx,
    /// sniproxy.
    Sniproxy,
    /// Envoy with its `sni_cluster` filter, as Istio's east-west gateway uses it.
    Envoy,
    /// A relay of [`crate::floors`], with the name of its role.
    Floor(&'static str),
}

/// A program that can be measured.
pub(crate) struct Subject {
    /// The title of the program's column.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    program: PathBuf,
}

/// The number and the form of the routes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Routes {
    /// The routes of all backends, as an operator would write them.
    Few,
    /// This number of routes to the answering backend, in the leanest form that the program has for one address per name.
    Many(usize),
}

impl Subject {
    /// Returns the isthmus at this path.
    pub(crate) fn isthmus(name: &str, program: &Path) -> Self {
        Self { name: name.to_owned(), kind: Kind::Isthmus, program: program.to_owned() }
    }

    /// Returns the installed peers and the floors, and a message for each peer that is not installed.
    pub(crate) fn others() -> Result<(Vec<Self>, Vec<String>)> {
        let envoy = env::var_os("ISTHMUS_ENVOY").map(PathBuf::from).or_else(|| find("envoy"));
        let own = env::current_exe()?;
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        let all = [
            ("HAProxy", Kind::Haproxy { splice: false }, find("haproxy"), "haproxy"),
            ("HAProxy splice", Kind::Haproxy { splice: true }, find("haproxy"), "haproxy"),
            ("nginx", Kind::Nginx, find("nginx"), "nginx with libnginx-mod-stream"),
            ("sniproxy", Kind::Sniproxy, find("sniproxy"), "sniproxy"),
            ("Envoy", Kind::Envoy, envoy, "Envoy (ISTHMUS_ENVOY)"),
            ("epoll floor", Kind::Floor("epoll"), Some(own.clone()), ""),
            ("tokio floor", Kind::Floor("tokio"), Some(own), ""),
        ];
        for (name, kind, program, what) in all {
            match program {
                Some(program) => found.push(Self { name: name.to_owned(), kind, program }),
                None => missing.push(format!("{name}: {what} is not installed")),
            }
        }
        // A second HAProxy, which the distribution does not have.
        if let Some(program) = env::var_os("ISTHMUS_HAPROXY").map(PathBuf::from) {
            for (name, splice) in [("HAProxy new", false), ("HAProxy new splice", true)] {
                let (name, kind) = (name.to_owned(), Kind::Haproxy { splice });
                found.push(Self { name, kind, program: program.clone() });
            }
        }
        Ok((found, missing))
    }

    /// Returns true if the program reads the hello; the floors do not.
    pub(crate) fn reads_hello(&self) -> bool {
        !matches!(self.kind, Kind::Floor(_))
    }

    /// The largest number of routes with which the program is measured. Envoy needs seconds and hundreds of megabytes for a few
    /// thousand.
    pub(crate) fn routes_max(&self) -> usize {
        if self.kind == Kind::Envoy { 5_000 } else { usize::MAX }
    }

    /// Returns the version that the program prints.
    pub(crate) fn version(&self) -> String {
        let option = match self.kind {
            Kind::Isthmus | Kind::Envoy => "--version",
            Kind::Haproxy { .. } | Kind::Nginx => "-v",
            Kind::Sniproxy => "-V",
            Kind::Floor(_) => return "tests/bench/peers/floors.rs".to_owned(),
        };
        let told = Command::new(&self.program).arg(option).output();
        let told = told.map(|told| [told.stdout, told.stderr].concat()).unwrap_or_default();
        let told = String::from_utf8_lossy(&told);
        let line = told.lines().find(|line| !line.trim().is_empty()).unwrap_or("unknown").trim();
        // Envoy prints its commit before the version and its libraries after it; HAProxy prints its state and address after the
        // version.
        match self.kind {
            Kind::Envoy => {
                let version = line.rsplit_once("version: ").map_or(line, |(_, version)| version);
                version.split('/').nth(1).unwrap_or(line).to_owned()
            }
            Kind::Haproxy { .. } => line.split_whitespace().nth(2).unwrap_or(line).to_owned(),
            Kind::Nginx => line.rsplit('/').next().unwrap_or(line).to_owned(),
            _ => line.rsplit(' ').next().unwrap_or(line).to_owned(),
        }
    }

    /// Returns true if the program is an isthmus.
    pub(crate) fn is_isthmus(&self) -> bool {
        self.kind == Kind::Isthmus
    }

    /// Starts the program; it can be used once [`Running::ready`] has returned.
    pub(crate) fn start(&self, routes: Routes, ends: &Ends) -> Result<Running> {
        self.start_under(&[], routes, ends)
    }

    /// Starts the program as the last arguments of another command, which must execute it in its own process.
    pub(crate) fn start_under(&self, wrapper: &[String], routes: Routes, ends: &Ends) -> Result<Running> {
        let folder = tempfile::tempdir()?;
        let port = next_port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut addresses = [address; 4];
        let list: Vec<(String, SocketAddr)> = match routes {
            Routes::Few => {
                let answers = (0..NAMES).map(|index| (name(index), ends.backends[0]));
                answers.chain(BACKENDS.map(Backend::name).into_iter().zip(ends.backends).skip(1)).collect()
            }
            Routes::Many(count) => (0..count).map(|index| (name(index), ends.backends[0])).collect(),
        };
        let mut command = match wrapper {
            [] => Command::new(&self.program),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(&self.program);
                command
            }
        };
        command.current_dir(&folder);
        match self.kind {
            Kind::Isthmus => {
                fs::write(folder.path().join("isthmus.yaml"), isthmus(address, &list)?)?;
                command.args(["run", "-c", "isthmus.yaml"]);
            }
            Kind::Haproxy { splice } => {
                let map: Vec<_> =
                    list.iter().enumerate().map(|(index, (name, _))| format!("{name} b{index}")).collect();
                fs::write(folder.path().join("backends.map"), map.join("\n") + "\n")?;
                let of = |what: fn(&SocketAddr) -> String| -> String {
                    list.iter().map(|(name, to)| format!("{name} {}\n", what(to))).collect()
                };
                fs::write(folder.path().join("addresses.map"), of(|to| to.ip().to_string()))?;
                fs::write(folder.path().join("ports.map"), of(|to| to.port().to_string()))?;
                let by_map = matches!(routes, Routes::Many(_));
                fs::write(folder.path().join("haproxy.cfg"), haproxy(address, &list, splice, by_map)?)?;
                command.args(HAPROXY_ARGUMENTS);
            }
            Kind::Nginx => {
                fs::write(folder.path().join("nginx.conf"), nginx(address, &list)?)?;
                command.args(["-p", ".", "-e", "stderr", "-c", "nginx.conf"]);
            }
            Kind::Sniproxy => {
                fs::write(folder.path().join("sniproxy.conf"), sniproxy(address, &list, folder.path())?)?;
                command.args(["-f", "-c", "sniproxy.conf"]);
            }
            Kind::Envoy => {
                fs::write(folder.path().join("envoy.yaml"), envoy(address, &list)?)?;
                command.args(ENVOY_ARGUMENTS);
            }
            Kind::Floor(role) => {
                command.env(ROLE, role);
                for (at, to) in addresses.iter_mut().zip(ends.backends) {
                    *at = SocketAddr::from(([127, 0, 0, 1], next_port()));
                    command.arg(at.to_string()).arg(to.to_string());
                }
            }
        }
        let log = fs::File::create(folder.path().join("output"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = measured(|| command.spawn())?;
        Ok(Running { child, folder, addresses, processes: Vec::new(), begun: Instant::now() })
    }
}

/// Returns a port below the kernel's ephemeral ports, another one each time, because an earlier listener may linger.
fn next_port() -> u16 {
    thread_local!(static NEXT: Cell<u16> = const { Cell::new(2_000) });
    NEXT.set(NEXT.get() + 1);
    NEXT.get()
}

/// A started proxy; killed when dropped.
pub(crate) struct Running {
    child: Child,
    folder: tempfile::TempDir,
    pub(crate) addresses: Addresses,
    /// The IDs of the process and its descendants.
    processes: Vec<u32>,
    begun: Instant,
}

impl Running {
    /// Waits until a connection to the route of this name is answered; returns the time since the start.
    pub(crate) async fn ready(&mut self, ends: &Ends, name: &str) -> Result<Duration> {
        loop {
            match tokio::time::timeout(Duration::from_secs(5), ends.open_name(self.addresses[0], name)).await
            {
                Ok(Ok(())) => break,
                Ok(Err(error)) => self.not_yet(&error.to_string())?,
                Err(_) => self.not_yet("no answer")?,
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let took = self.begun.elapsed();
        self.processes = descendants(self.child.id())?;
        Ok(took)
    }

    fn not_yet(&mut self, why: &str) -> Result<()> {
        if self.child.try_wait()?.is_none() && self.begun.elapsed() < STARTED {
            return Ok(());
        }
        let said = fs::read_to_string(self.folder.path().join("output")).unwrap_or_default();
        let lines: Vec<_> = said.lines().rev().take(5).collect();
        Err(format!("it does not serve: {why}; it said: {lines:?}").into())
    }

    /// Returns the process that serves: the only child, or the process itself.
    pub(crate) fn worker_process(&self) -> u32 {
        self.processes.last().copied().unwrap_or_else(|| self.child.id())
    }

    /// Returns the thread that has used the processor most.
    pub(crate) fn busiest_thread(&self) -> Result<u32> {
        let mut found = (0, 0);
        for process in &self.processes {
            for task in fs::read_dir(format!("/proc/{process}/task"))? {
                let task = task?;
                let text = fs::read_to_string(task.path().join("schedstat"))?;
                let used = text.split(' ').next().ok_or("no schedstat")?.parse::<u64>()?;
                found = found.max((used, task.file_name().to_string_lossy().parse()?));
            }
        }
        Ok(found.1)
    }

    /// Returns the processor time of all threads, as the scheduler counts it.
    pub(crate) fn processor_time(&self) -> Result<Duration> {
        let mut nanoseconds = 0;
        for process in &self.processes {
            for task in fs::read_dir(format!("/proc/{process}/task"))? {
                // A thread may end after it was listed.
                let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
                nanoseconds += text.split(' ').next().ok_or("no schedstat")?.parse::<u64>()?;
            }
        }
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Returns the resident memory of all processes in bytes.
    pub(crate) fn memory(&self) -> Result<f64> {
        let mut kilobytes = 0;
        for process in &self.processes {
            let status = fs::read_to_string(format!("/proc/{process}/status"))?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
            kilobytes += line.trim().trim_end_matches(" kB").parse::<u64>()?;
        }
        Ok(kilobytes as f64 * 1024.0)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Descendants are killed first, because they would run on without their parent.
        for process in self.processes.iter().rev() {
            if let Some(process) = i32::try_from(*process).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a process and all its descendants.
fn descendants(root: u32) -> Result<Vec<u32>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Ok(process) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else { continue };
        let fields =
            stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ').nth(1).map(str::parse::<u32>));
        if let Some(Some(Ok(parent))) = fields {
            parents.push((process, parent));
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(process, _)| *process));
        next += 1;
    }
    Ok(found)
}

/// Returns the number of descriptors that a process may have, at most 65,536.
fn descriptors() -> u64 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current.unwrap_or(1 << 16).min(1 << 16)
}

fn isthmus(at: SocketAddr, routes: &[(String, SocketAddr)]) -> Result<String> {
    let mut text =
        format!("listen: \"{at}\"\nworkers: 1\nadmin: off\ntelemetry: {{accessLog: off}}\nroutes:\n");
    for (name, to) in routes {
        writeln!(text, "  {name}: {to}")?;
    }
    Ok(text)
}

/// Returns HAProxy's config: with a backend for each route, or with one backend for all and the addresses in maps.
fn haproxy(at: SocketAddr, routes: &[(String, SocketAddr)], splice: bool, by_map: bool) -> Result<String> {
    // HAProxy needs two descriptors per connection, two per pipe, and some for itself.
    let most = descriptors().saturating_sub(3_000) / 2;
    let splice = if splice { "\n  option splice-request\n  option splice-response" } else { "" };
    let mut text = format!(
        "global\n  nbthread 1\n  maxconn {most}\n  maxpipes 1000\n  tune.pipesize 262144\n\
         defaults\n  mode tcp\n  maxconn {most}\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  \
         option tcp-smart-connect{splice}\n\
         frontend tls\n  bind {at}\n  tcp-request inspect-delay 10s\n"
    );
    let hello = "if { req.ssl_hello_type 1 }";
    if by_map {
        write!(
            text,
            "  tcp-request content set-dst req.ssl_sni,lower,map_str_ip(addresses.map) {hello}\n  \
             tcp-request content set-dst-port req.ssl_sni,lower,map_str_int(ports.map) {hello}\n  \
             tcp-request content accept {hello}\n  default_backend all\nbackend all\n  server s 0.0.0.0:0\n"
        )?;
        return Ok(text);
    }
    write!(
        text,
        "  tcp-request content accept {hello}\n  use_backend %[req.ssl_sni,lower,map_str(backends.map)]\n"
    )?;
    for (index, (_, to)) in routes.iter().enumerate() {
        writeln!(text, "backend b{index}\n  server s {to}")?;
    }
    Ok(text)
}

/// Returns nginx's config. Its map leads from names to addresses, not to named upstreams: nginx would compare the name of an
/// upstream with the names of all upstreams.
fn nginx(at: SocketAddr, routes: &[(String, SocketAddr)]) -> Result<String> {
    let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
    let module = if Path::new(module).exists() { format!("load_module {module};\n") } else { String::new() };
    let hash = (routes.len() * 2).next_power_of_two().max(2_048);
    let mut text = format!(
        "{module}daemon off;\nworker_processes 1;\nuser root;\npid nginx.pid;\nerror_log stderr crit;\n\
         events {{ worker_connections {}; }}\nstream {{\n  \
         map_hash_max_size {hash};\n  map_hash_bucket_size 128;\n  map $ssl_preread_server_name $backend {{\n",
        descriptors()
    );
    for (name, to) in routes {
        writeln!(text, "    {name} {to};")?;
    }
    write!(
        text,
        "  }}\n  server {{\n    listen {at} reuseport backlog=4096;\n    ssl_preread on;\n    proxy_pass $backend;\n    \
         proxy_buffer_size 64k;\n    proxy_half_close on;\n    proxy_timeout 1h;\n    preread_timeout 10s;\n  }}\n}}\n"
    )?;
    Ok(text)
}

fn sniproxy(at: SocketAddr, routes: &[(String, SocketAddr)], folder: &Path) -> Result<String> {
    let folder = folder.display();
    let mut text = format!(
        "user root\npidfile {folder}/sniproxy.pid\nerror_log {{\n  filename {folder}/sniproxy.log\n  priority error\n}}\n\
         listener {at} {{\n  proto tls\n  table all\n}}\ntable all {{\n"
    );
    for (name, to) in routes {
        writeln!(text, "  ^{}$ {to}", name.replace('.', "\\\\."))?;
    }
    text.push_str("}\n");
    Ok(text)
}

fn envoy(at: SocketAddr, routes: &[(String, SocketAddr)]) -> Result<String> {
    let address = |address: SocketAddr| {
        format!("{{socket_address: {{address: {}, port_value: {}}}}}", address.ip(), address.port())
    };
    let typed = |kind: &str, more: &str| {
        format!("{{\"@type\": type.googleapis.com/envoy.extensions.filters.{kind}{more}}}")
    };
    let inspector = typed("listener.tls_inspector.v3.TlsInspector", "");
    let sni = typed("network.sni_cluster.v3.SniCluster", "");
    let tcp = typed("network.tcp_proxy.v3.TcpProxy", ", stat_prefix: tls, cluster: none, idle_timeout: 0s");
    let mut text = format!(
        "static_resources:\n  listeners:\n  - name: tls\n    address: {}\n    listener_filters:\n    \
         - {{name: envoy.filters.listener.tls_inspector, typed_config: {inspector}}}\n    \
         filter_chains:\n    - filters:\n      - {{name: envoy.filters.network.sni_cluster, typed_config: {sni}}}\n      \
         - {{name: envoy.filters.network.tcp_proxy, typed_config: {tcp}}}\n  clusters:\n",
        address(at)
    );
    for (name, to) in routes {
        let limits = "{thresholds: [{max_connections: 1000000, max_pending_requests: 1000000}]}";
        let endpoints = format!("[{{endpoint: {{address: {}}}}}]", address(*to));
        writeln!(
            text,
            "  - {{name: {name}, type: STATIC, connect_timeout: 5s, circuit_breakers: {limits}, \
             load_assignment: {{cluster_name: {name}, endpoints: [{{lb_endpoints: {endpoints}}}]}}}}"
        )?;
    }
    Ok(text)
}
