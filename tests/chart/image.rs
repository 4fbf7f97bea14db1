//! The container image as a pod runs it, with the config from the chart: it serves, applies a changed ConfigMap, and drains.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::helm::{Helm, RELEASE, object, sets};
use crate::support::image::{Image, static_binary};
use crate::support::namespace::inside;
use crate::support::pki::PKI;

#[test]
fn the_image_is_one_file_and_runs_as_nobody() {
    let Some(image) = Image::build("the_image_is_one_file_and_runs_as_nobody") else { return };
    let process = &image.config["process"];
    assert_eq!((&process["user"]["uid"], &process["user"]["gid"]), (&65532.into(), &65532.into()));
    let args = ["/usr/bin/isthmus", "run", "-c", "/etc/isthmus/isthmus.yaml"];
    assert_eq!(process["args"], serde_json::json!(args));
    let annotations = &image.config["annotations"];
    assert_eq!(annotations["org.opencontainers.image.title"], "isthmus");
    assert_eq!(annotations["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(files(&image.root()), ["usr/bin/isthmus"]);
}

/// Returns the paths of all files below a folder.
fn files(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => {
                    let path = entry.path();
                    found.push(path.strip_prefix(root).expect("below").to_string_lossy().into_owned());
                }
            }
        }
    }
    found.sort();
    found
}

/// A ConfigMap as the kubelet mounts it: its files are links into `..data`, which is itself a link to the folder of one
/// version.
struct Mounted {
    folder: TempDir,
    version: usize,
}

impl Mounted {
    fn new(data: &Value) -> Self {
        let mut mounted = Self { folder: tempfile::tempdir().expect("a folder"), version: 0 };
        // The pod's user must be able to read the folder.
        Command::new("chmod").arg("755").arg(mounted.folder.path()).status().expect("chmod");
        mounted.write(data);
        for name in data.as_object().expect("files").keys() {
            let link = mounted.folder.path().join(name);
            std::os::unix::fs::symlink(Path::new("..data").join(name), link).expect("a link");
        }
        mounted
    }

    /// Replaces the ConfigMap's files in one step, as the kubelet does: `..data` becomes a link to the folder of a new version.
    fn write(&mut self, data: &Value) {
        self.version += 1;
        let name = format!("..{}", self.version);
        let folder = self.folder.path().join(&name);
        fs::create_dir(&folder).expect("made");
        for (name, text) in data.as_object().expect("files") {
            fs::write(folder.join(name), text.as_str().expect("a text")).expect("written");
        }
        let next = self.folder.path().join("..data_tmp");
        std::os::unix::fs::symlink(name, &next).expect("a link");
        fs::rename(next, self.folder.path().join("..data")).expect("renamed");
    }
}

/// Returns the files of the ConfigMap that the chart makes for a gateway without Kubernetes.
fn config(helm: &Helm, more: &[&str]) -> Value {
    let (_, values) = sets().into_iter().find(|(name, _)| name == "2-no-kubernetes").expect("a set");
    let objects = helm
        .objects(Some(&values), &[&["--set", "drain.delaySeconds=2,drain.timeoutSeconds=5"], more].concat());
    object(&objects, "ConfigMap", RELEASE)["data"].clone()
}

#[test]
fn the_image_serves_reloads_and_drains_as_the_chart_runs_it() {
    const TEST: &str = "the_image_serves_reloads_and_drains_as_the_chart_runs_it";
    let (Some(helm), Some(image)) = (Helm::installed(), Image::build(TEST)) else { return };
    // The endpoints in this set of values are in 10.0.0.0/8.
    if !inside(&format!("image::{TEST}"), "ip link set lo up; ip route add local 10.0.0.0/8 dev lo") {
        return;
    }
    let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let reviews = "reviews.shop.svc.cluster.local";
    let server = PKI.server(reviews);
    let _backend = Backend::start_at(at("10.1.0.4:8443"), move |stream| {
        crate::support::backend::tls_echo(stream, server.clone(), "");
    });
    let mut mounted = Mounted::new(&config(&helm, &[]));
    let mut command = image.command(&["run", "-c", "/etc/isthmus/isthmus.yaml"], mounted.folder.path());
    command.env("POD_NAME", "gateway-0").env("POD_NAMESPACE", "istio-system");
    let mut gateway = Gateway::spawn(command, tempfile::tempdir().expect("a folder"));
    runs_without_rights(gateway.process());
    assert_eq!(gateway.json("/api/v1/config")["node"]["name"], "gateway-0");

    // The gateway serves, and the chart's probes and test succeed.
    let listener = at("127.0.0.1:15443");
    let mut stream = tls(listener, reviews).expect("let in");
    assert_eq!(call(&mut stream, "hello").expect("an answer"), "hello");
    let health = |path: &str| crate::support::gateway::http(at("127.0.0.1:15021"), "GET", path).0;
    assert_eq!((health("/readyz"), health("/livez")), (200, 200));
    let healthcheck = || {
        let binary = static_binary().expect("there is one");
        Command::new(binary)
            .args(["healthcheck", "--admin", "http://127.0.0.1:15021"])
            .output()
            .expect("it runs")
    };
    assert!(healthcheck().status.success());
    let metrics = crate::support::gateway::http(at("127.0.0.1:15020"), "GET", "/stats/prometheus").1;
    assert!(metrics.contains("isthmus_build_info"), "{metrics}");

    // The gateway applies a changed ConfigMap, and the connection stays.
    tls(listener, "new.example.com").expect_err("unknown");
    mounted.write(&config(&helm, &["--set-json", r#"config.routes={"new.example.com":"10.1.0.4:8443"}"#]));
    eventually("the new route", || {
        let routes = gateway.json("/api/v1/config");
        routes["routes"].get("new.example.com").map(|_| ())
    });
    assert_eq!(call(&mut stream, "still").expect("an answer"), "still");

    // The gateway drains: it is not ready, accepts connections for a while, and ends when the last connection does.
    gateway.signal("TERM");
    eventually("it is not ready", || (health("/readyz") == 503).then_some(()));
    assert_eq!(health("/livez"), 200);
    assert!(!healthcheck().status.success());
    let mut late = tls(listener, reviews).expect("load balancers have not noticed yet");
    assert_eq!(call(&mut late, "late").expect("an answer"), "late");
    drop((stream, late));
    assert!(gateway.ended().success());
}

/// Checks that the process runs as an unprivileged user, has no capability and cannot gain one, and that its root is read-only.
#[track_caller]
fn runs_without_rights(process: u32) {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("its status");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
        line.trim_start_matches(':').split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("Uid"), "65532 65532 65532 65532");
    assert_eq!(field("Gid"), "65532 65532 65532 65532");
    assert_eq!(field("Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!(field("NoNewPrivs"), "1");
    let mounts = fs::read_to_string(format!("/proc/{process}/mountinfo")).expect("its mounts");
    let options = |point: &str| -> Vec<String> {
        let lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mounts = lines.filter(|fields| fields[4] == point).map(|fields| fields[5].to_owned());
        mounts.collect()
    };
    assert!(options("/").iter().all(|options| options.starts_with("ro")), "{mounts}");
    assert!(options("/etc/isthmus").iter().all(|options| options.starts_with("ro")), "{mounts}");
    assert!(options("/var/lib/isthmus").iter().all(|options| options.starts_with("rw")), "{mounts}");
}
