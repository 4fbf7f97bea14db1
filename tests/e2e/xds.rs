//! The xDS server against peers that share none of its code: the official messages over grpcio, gRPC's own xDS client, and
//! hostile clients. The scripts are in `tests/interop`; this file starts the servers for them.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use crate::support::gateway::Gateway;
use crate::support::{python, skip};

/// Both scripts run at the same time, because they wait for changes of files most of the time.
#[test]
fn both_forms_keep_to_the_protocol() {
    let Some(python) = python() else {
        return;
    };
    let form = |form| {
        let gateway = server();
        let replica = replica_of(&gateway);
        let address = replica.listener("xds").to_string();
        run(&python, "xds_conformance.py", gateway, &["--form", form, "--replica", &address]);
    };
    thread::scope(|scope| {
        scope.spawn(|| form("delta"));
        form("sotw");
    });
}

#[test]
fn grpc_clients_are_led_to_their_servers() {
    let Some(python) = python() else {
        return;
    };
    let gateway = server();
    run(&python, "xds_grpc.py", gateway, &[]);
}

#[test]
fn clients_that_misbehave_harm_nobody_else() {
    let Some(python) = python() else {
        return;
    };
    let gateway = server();
    let process = gateway.process().to_string();
    run(&python, "xds_hostile.py", gateway, &["--pid", &process]);
}

/// The script compares the memory of this server with the memory of a second server. The second server has the same number of
/// clients, which subscribe to nothing.
#[test]
fn clients_that_do_not_read_cost_next_to_nothing() {
    let Some(python) = python() else {
        return;
    };
    let gateway = server();
    let idle = replica_of(&gateway);
    let (xds, admin) = (idle.listener("xds").to_string(), idle.admin().to_string());
    let processes = [gateway.process().to_string(), idle.process().to_string()];
    let more = ["--pid", &processes[0], "--idle", &xds, &admin, &processes[1]];
    run(&python, "xds_hostile.py", gateway, &more);
}

pub(crate) fn python() -> Option<OsString> {
    let python = python::installed();
    if python.is_none() {
        skip("interop: there is no Python with gRPC and the official xDS messages (tests/run installs them)");
    }
    python
}

/// Starts a gateway with the registries `east` and `west` in its folder, where the script writes them.
fn server() -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    for registry in ["east", "west"] {
        std::fs::write(folder.path().join(format!("{registry}.yaml")), "services: []\n").expect("written");
    }
    let config = config(folder.path());
    Gateway::start_in(folder, &config, &MEMORY)
}

/// Starts another server with the same registries.
fn replica_of(gateway: &Gateway) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    Gateway::start_in(folder, &config(gateway.folder()), &MEMORY)
}

/// Makes the allocator return unused memory to the kernel at once, so that the figures show what is in use.
const MEMORY: [(&str, &str); 1] = [("MIMALLOC_PURGE_DELAY", "0")];

fn config(registries: &Path) -> String {
    let path = registries.display();
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: east}}\nregistries:\n\
         - file: {{path: {path}/east.yaml, cluster: east, network: east}}\n\
         - file: {{path: {path}/west.yaml, cluster: west, network: west}}\n\
         networks:\n  east: {{gateways: [{{address: 192.0.2.1, sniPort: 15443}}]}}\n  \
         west: {{gateways: [{{address: 192.0.2.2, sniPort: 15443}}]}}\n\
         exports: [{{services: [\"*.mesh\"]}}]\n\
         xds: {{bind: \"127.0.0.1:0\", clients: [{{networks: [east, west], clusters: [east, west]}}]}}\n"
    )
}

/// Runs a script to its end and prints its output; the gateway must still run afterwards.
#[track_caller]
pub(crate) fn run(python: &OsString, script: &str, mut gateway: Gateway, more: &[&str]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
    let mut command = Command::new(python);
    command.arg(path).arg("--folder").arg(gateway.folder());
    command.args(["--xds", &gateway.listener("xds").to_string(), "--admin", &gateway.admin().to_string()]);
    let output = command.args(more).env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).output();
    let output = output.expect("Python starts");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    eprint!("{said}");
    if !gateway.is_running() {
        panic!("{script}: the gateway has ended with {}: {said}", gateway.ended());
    }
    assert!(output.status.success(), "{script}: {said}");
}
