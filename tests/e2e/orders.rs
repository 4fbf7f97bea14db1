//! Orders of operators: signals, reload, drain, log level. They are obeyed in every state, or refused with a reason.

use crate::support::backend::Backend;
use crate::support::eventually;
use crate::support::gateway::Gateway;

fn config(more: &str) -> String {
    format!("listen: \"127.0.0.1:0\"\nroutes: {{live.test: \"127.0.0.1:9\"}}\n{more}")
}

/// Reads the file again, which has to go well, and returns the answer.
#[track_caller]
fn reload(gateway: &Gateway, text: &str) -> String {
    gateway.write_config(text);
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 200, "{body}");
    body
}

fn needs_restart(gateway: &Gateway) -> Vec<String> {
    let list = gateway.json("/api/v1/status")["config"]["needs_restart"].clone();
    serde_json::from_value(list).expect("a list of keys")
}

#[test]
fn a_log_level_with_a_typing_error_is_refused_and_changes_nothing() {
    let gateway = Gateway::start(&config(""));
    for level in ["debugg", "", "info,isthmus"] {
        let (status, body) = gateway.post(&format!("/api/v1/log-level?level={level}"));
        assert_eq!(status, 400, "{level}: {body}");
    }
    let (_, body) = gateway.post("/api/v1/log-level?level=debugg");
    assert!(body.contains("did you mean \\\"debug\\\"?"), "{body}");
    // The log goes on.
    gateway.reload(&config("timeouts: {idle: 1h}\n"));
    gateway.told("config taken into use");
    assert_eq!(gateway.post("/api/v1/log-level?level=error").0, 200);
}

#[test]
fn needs_restart_compares_the_file_with_the_process() {
    let gateway = Gateway::start(&config(""));
    let (other, same) = (config("workers: 1\n"), config(""));
    assert!(reload(&gateway, &other).contains("applied, but for workers, which needs a restart"));
    assert_eq!(needs_restart(&gateway), ["workers"]);
    // Another reload of the same file does not make the process another.
    let again = config("workers: 1\ntimeouts: {idle: 1h}\n");
    assert!(reload(&gateway, &again).contains("but for workers"));
    assert_eq!(needs_restart(&gateway), ["workers"]);
    // A file that is rejected does neither.
    gateway.write_config("nonsense: 1\n");
    assert_eq!(gateway.post("/api/v1/reload").0, 400);
    assert_eq!(needs_restart(&gateway), ["workers"]);
    // The value that the process runs with needs none.
    assert!(reload(&gateway, &same).contains("\"applied\""));
    assert!(needs_restart(&gateway).is_empty());
}

#[test]
fn a_control_plane_without_listeners_becomes_ready() {
    let gateway = Gateway::start("xds: {bind: \"127.0.0.1:0\"}\n");
    let (status, body) = gateway.get("/readyz?verbose");
    assert_eq!(status, 200, "{body}");
    // A listener may come later.
    let backend = Backend::echo();
    let listening = format!(
        "xds: {{bind: \"127.0.0.1:0\"}}\nlisten: \"127.0.0.1:0\"\nroutes: {{\"-\": \"{}\"}}\n",
        backend.address
    );
    gateway.reload(&listening);
    eventually("it listens", || std::net::TcpStream::connect(gateway.listener("default")).ok());
}
