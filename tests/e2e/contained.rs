//! If the data of one registry triggers a bug in the program, the other registries are not affected. The bug is a panic that
//! `ISTHMUS_TEST_PANIC` causes in a debug build.

use std::path::Path;

use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;

const NAMES: [&str; 2] = ["west.mesh", "east.mesh"];

/// Returns a registry with one service whose endpoint is `backend`, and further services without endpoints.
fn registry(name: &str, backend: &Backend, others: &[&str]) -> String {
    let service = |name: &str, endpoints: &str| {
        format!(
            "- {{hostname: {name}, namespace: n, ports: [{{name: tls, port: 443, protocol: TLS}}], endpoints: [{endpoints}]}}\n"
        )
    };
    let address = backend.address;
    let endpoint = format!("{{address: {}, ports: {{tls: {}}}}}", address.ip(), address.port());
    let others = others.iter().map(|other| service(other, ""));
    format!("services:\n{}{}", service(name, &endpoint), others.collect::<String>())
}

fn write(folder: &Path, file: &str, text: &str) {
    let next = folder.join(format!(".{file}.next"));
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(file)).expect("renamed");
}

const CONFIG: &str = "listen: \"127.0.0.1:0\"\nnode: {cluster: own, network: net}\nexports: [{services: [\"*.mesh\"]}]\n\
    state: {dir: state}\naggregator: {startTimeout: 1s}\nregistries:\n\
    - file: {path: west.yaml, cluster: west, network: net}\n\
    - file: {path: east.yaml, cluster: east, network: net}\n";

fn backends() -> [Backend; 2] {
    NAMES.map(|name| Backend::tls_echo(PKI.server(name), name))
}

fn registry_problem(gateway: &Gateway, at: usize) -> (String, String) {
    let registry = gateway.json("/api/v1/registries")[at].clone();
    let problem = registry["problems"][0].as_str().unwrap_or_default().to_owned();
    (registry["state"].as_str().unwrap_or_default().to_owned(), problem)
}

#[track_caller]
fn serves(gateway: &Gateway, name: &str) {
    let listener = gateway.listener("default");
    eventually(name, || {
        let mut stream = tls(listener, name).ok()?;
        call(&mut stream, "hello").ok().filter(|answer| answer.contains(name))
    });
}

#[test]
fn a_panic_while_a_snapshot_is_built_stays_with_the_registry_that_caused_it() {
    let [west, east] = backends();
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "west.yaml", &registry(NAMES[0], &west, &[]));
    write(folder.path(), "east.yaml", &registry(NAMES[1], &east, &[]));
    let environment = [("ISTHMUS_TEST_PANIC", "build=poison.mesh")];
    let mut gateway = Gateway::start_in(folder, CONFIG, &environment);
    NAMES.iter().for_each(|name| serves(&gateway, name));
    let copies = gateway.folder().join("state/registries");
    eventually("two copies", || (std::fs::read_dir(&copies).ok()?.count() == 2).then_some(()));

    write(gateway.folder(), "east.yaml", &registry(NAMES[1], &east, &["poison.mesh"]));
    let is_contained = |gateway: &Gateway| {
        let (state, problem) = registry_problem(gateway, 1);
        (state == "stale" && problem.contains("internal: a test asked")).then_some(())
    };
    eventually("the registry at fault", || is_contained(&gateway));
    assert_eq!(registry_problem(&gateway, 0).0, "live");
    assert!(gateway.metric("isthmus_registry_errors_total", &["east.yaml", "internal"]) >= 1.0);
    assert_eq!(gateway.metric("isthmus_registry_state", &["east.yaml", "\"stale\""]), 1.0);
    gateway.told("internal error while applying a change of the registry");
    // Traffic and the other registry are not affected.
    NAMES.iter().for_each(|name| serves(&gateway, name));
    write(gateway.folder(), "west.yaml", &registry(NAMES[0], &west, &["more.mesh"]));
    eventually("the other registry's change", || {
        (gateway.get("/api/v1/services/more.mesh").0 == 200).then_some(())
    });
    assert_eq!(gateway.get("/api/v1/services/poison.mesh").0, 404);

    // The next process reads the same object, and the last good copy.
    gateway.kill();
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["west.yaml", "east.yaml"] {
        std::fs::copy(gateway.folder().join(file), folder.path().join(file)).expect("copied");
    }
    let state = folder.path().join("state/registries");
    std::fs::create_dir_all(&state).expect("made");
    for entry in std::fs::read_dir(&copies).expect("listed") {
        let entry = entry.expect("listed");
        std::fs::copy(entry.path(), state.join(entry.file_name())).expect("copied");
    }
    let next = Gateway::start_in(folder, CONFIG, &environment);
    eventually("the registry at fault after a restart", || is_contained(&next));
    NAMES.iter().for_each(|name| serves(&next, name));

    // Without the object, the registry is live again.
    write(next.folder(), "east.yaml", &registry(NAMES[1], &east, &[]));
    eventually("the registry without the object", || (registry_problem(&next, 1).0 == "live").then_some(()));
}

#[test]
fn a_reload_that_cannot_be_published_does_not_say_applied() {
    let [west, east] = backends();
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "west.yaml", &registry(NAMES[0], &west, &[]));
    write(folder.path(), "east.yaml", &registry(NAMES[1], &east, &[]));
    let gateway = Gateway::start_in(folder, CONFIG, &[("ISTHMUS_TEST_PANIC", "build=poison.mesh")]);
    let poison = registry("poison.mesh", &west, &[]);
    gateway.write_config(&format!("{CONFIG}{poison}"));
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 400, "{body}");
    assert!(body.contains("internal error while building the snapshot"), "{body}");
    assert_eq!(gateway.get("/api/v1/services/poison.mesh").0, 404);
    NAMES.iter().for_each(|name| serves(&gateway, name));
    gateway.reload(CONFIG);
}

#[test]
fn when_the_aggregator_ends_the_process_drains_and_ends_with_70() {
    let [west, east] = backends();
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "west.yaml", &registry(NAMES[0], &west, &[]));
    write(folder.path(), "east.yaml", &registry(NAMES[1], &east, &[]));
    let mut gateway = Gateway::start_in(folder, CONFIG, &[("ISTHMUS_TEST_PANIC", "owner=poison.mesh")]);
    NAMES.iter().for_each(|name| serves(&gateway, name));
    let poison = registry(NAMES[1], &east, &["poison.mesh"]);
    write(gateway.folder(), "east.yaml", &poison);
    let ended = gateway.ended();
    assert_eq!(ended.code(), Some(70), "{ended}");
    gateway.told(
        "the aggregator has ended because of an internal error; the gateway drains and exits with code 70",
    );
}
