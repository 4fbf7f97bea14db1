//! The cost of a large Kubernetes cluster: `cargo bench --bench kubernetes` (`ISTHMUS_BENCH_SMALL=1` for a tenth).
//!
//! A real API server (`tests/kube`; `ISTHMUS_KUBE_RIG` is the path of the program, which `tests/run` builds) has 10,000
//! services with ten ready pods each, and the real binary watches it. The benchmark prints the processor time and the wall time
//! until the registry is live, the memory, the processor time while nothing changes, and the time from the event of a changed
//! EndpointSlice until an xDS client has the change. It fails only if an endpoint or a change does not arrive.
//! `ISTHMUS_BENCH_BINARY`, the path of another build, and `ISTHMUS_ISTIOD`, the path of `pilot-discovery`, are measured after it
//! in the same cluster; of istiod, the part until it is ready, and the time while nothing changes.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "registries/client.rs"]
mod client;
#[path = "xds/frames.rs"]
mod frames;
#[path = "gateway.rs"]
mod gateway;
#[path = "process.rs"]
mod process;
#[path = "../support/mod.rs"]
mod support;
#[path = "watching.rs"]
mod watching;

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gateway::BINARY;
use process::{memory, processor_time};
use serde_json::{Value, json};
use support::kube::{self, Cluster};
use support::kube_client::at;
use support::organisation::free_port;
use watching::Watching;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The number of pods per service.
const PODS: usize = 10;
/// The number of changes that are timed.
const CHANGES: usize = 500;
/// The pause after each change.
const PAUSE: Duration = Duration::from_millis(20);
/// The time during which nothing changes.
const QUIET: Duration = Duration::from_secs(20);
const SLICES: &str = "discovery.k8s.io/v1";

fn main() -> Result<()> {
    let Some(program) = kube::installed() else {
        println!("SKIPPED: no Kubernetes API server is built; tests/kube/build builds one");
        return Ok(());
    };
    let services = if std::env::var_os("ISTHMUS_BENCH_SMALL").is_some() { 1_000 } else { 10_000 };
    let cluster = Cluster::start(&program, "east", &kube::Options::default());
    cluster.namespace("bench", &json!({}));
    let objects: Vec<(String, Value)> = (0..services).flat_map(objects_of).collect();
    let bytes: usize = objects.iter().map(|(_, object)| object.to_string().len()).sum();
    cluster.store(&objects);
    // The API server's cache must have all objects before the gateway lists them: the objects of one request to etcd have the
    // same revision, and a list that ends between them would seem to include all of them.
    let last = services - 1;
    for path in [
        at("v1", "pods", &format!("bench/s{last}-7d9c5b6f8-{}", PODS - 1)),
        at("v1", "services", &format!("bench/s{last}")),
        at(SLICES, "endpointslices", &format!("bench/s{last}-1")),
    ] {
        support::within(Duration::from_secs(120), &path, || {
            (cluster.admin().get(&format!("{path}?resourceVersion=0")).status == 200).then_some(())
        });
    }
    println!("{services} services, {} pods, {} MiB of objects", services * PODS, bytes >> 20);

    isthmus(Path::new(BINARY), &cluster, services)?;
    if let Some(other) = std::env::var_os("ISTHMUS_BENCH_BINARY") {
        println!("{}:", other.display());
        isthmus(Path::new(&other), &cluster, services)?;
    }
    if let Some(istiod) = std::env::var_os("ISTHMUS_ISTIOD") {
        println!("{}:", istiod.display());
        self::istiod(Path::new(&istiod), &cluster)?;
    }
    Ok(())
}

fn isthmus(binary: &Path, cluster: &Cluster, services: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("kubeconfig"), cluster.kubeconfig(cluster.admin_token()))?;
    let config = "node: {cluster: west, network: net-west}\nxds: {bind: \"127.0.0.1:0\"}\nregistries:\n- kubernetes: {cluster: \
                  east, network: net-west, kubeconfig: kubeconfig}\n";
    let mut gateway = Watching::start_with(binary, folder, config)?;
    gateway.wait_for(|status| status["state"] == "live" && status["endpoints"] == json!(services * PODS))?;
    at_rest(gateway.child(), gateway.started.elapsed())?;
    changes(cluster, &gateway, services / 2)?;
    gateway.end()
}

/// Starts a real istiod without clients, and waits until it is ready, which it is once it has read the cluster.
fn istiod(program: &Path, cluster: &Cluster) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(&kubeconfig, cluster.kubeconfig(cluster.admin_token()))?;
    cluster.namespace("istio-system", &json!({}));
    let [http, monitoring] = [(); 2].map(|()| free_port());
    let mut istiod = Command::new(program);
    istiod.args(["discovery", "--registries=Kubernetes", "--grpcAddr=", "--secureGRPCAddr=", "--httpsAddr="]);
    istiod
        .arg(format!("--httpAddr=127.0.0.1:{http}"))
        .arg(format!("--monitoringAddr=127.0.0.1:{monitoring}"));
    istiod.arg(format!("--kubeconfig={}", kubeconfig.display())).env("POD_NAMESPACE", "istio-system");
    istiod.current_dir(&folder).stdout(Stdio::null()).stderr(File::create(folder.path().join("log"))?);
    let started = Instant::now();
    let mut istiod = istiod.spawn()?;
    let is_ready = || {
        let mut stream = TcpStream::connect(("127.0.0.1", http)).ok()?;
        write!(stream, "GET /ready HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.contains(" 200 ").then_some(())
    };
    support::within(Duration::from_secs(300), "a ready istiod", is_ready);
    at_rest(&istiod, started.elapsed())?;
    istiod.kill()?;
    istiod.wait()?;
    Ok(())
}

/// Prints what a program has spent until it knew the cluster, and what it needs while nothing changes.
fn at_rest(program: &Child, took: Duration) -> Result<()> {
    let spent = processor_time(program)?;
    println!("live after {:.2} s, {:.2} s of CPU", took.as_secs_f64(), spent.as_secs_f64());
    sleep(Duration::from_secs(3));
    let of = |line| Ok::<_, Box<dyn Error + Send + Sync>>(memory(program, line)? >> 20);
    println!(
        "resident: {} MiB, of it anonymous {} MiB; at most {} MiB",
        of("VmRSS")?,
        of("RssAnon")?,
        of("VmHWM")?
    );
    let before = processor_time(program)?;
    sleep(QUIET);
    let idle = processor_time(program)? - before;
    println!("while nothing changes: {:.2} % of a core", idle.as_secs_f64() * 100.0 / QUIET.as_secs_f64());
    Ok(())
}

/// Returns a service, its pods, and the slice that names them, each with its key.
fn objects_of(service: usize) -> Vec<(String, Value)> {
    let name = format!("s{service}");
    let mut objects: Vec<(String, Value)> = (0..PODS).map(|pod| pod_of(service, pod)).collect();
    objects.push((
        format!("services/specs/bench/{name}"),
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"namespace": "bench", "name": name, "uid": uid(3, service), "labels": {"app": name}},
            "spec": {
                "type": "ClusterIP", "clusterIP": "None", "clusterIPs": ["None"], "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
                "ports": [{"name": "https", "port": 443, "targetPort": 8443, "protocol": "TCP"}]
            }
        }),
    ));
    objects.push((format!("endpointslices/bench/{name}-1"), slice_of(service, &[true; PODS])));
    objects
}

fn uid(kind: usize, number: usize) -> String {
    format!("{kind:08}-0000-4000-8000-{number:012}")
}

fn address(service: usize, pod: usize) -> String {
    let number = service * PODS + pod;
    format!("10.{}.{}.{}", 64 + (number >> 16), number >> 8 & 255, number & 255)
}

/// Returns a pod of about the size that pods of a Deployment have.
fn pod_of(service: usize, pod: usize) -> (String, Value) {
    let (app, name) = (format!("s{service}"), format!("s{service}-7d9c5b6f8-{pod}"));
    let number = service * PODS + pod;
    let owner = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{app}-7d9c5b6f8"), "uid": uid(4, service),
        "controller": true, "blockOwnerDeletion": true
    });
    let variable =
        |at: usize| json!({"name": format!("SETTING_{at}"), "value": format!("the value of setting {at}")});
    let container = json!({
        "name": "main", "image": "registry.example.com/shop/main:1.27.3", "imagePullPolicy": "IfNotPresent",
        "env": (0..12).map(variable).collect::<Vec<_>>(), "ports": [{"containerPort": 8443, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"
    });
    let condition =
        |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": "2026-11-22T10:00:00Z"});
    let conditions = ["PodScheduled", "Initialized", "ContainersReady", "Ready"].map(condition);
    let fields: Vec<(String, Value)> = (0..12)
        .map(|at| (format!("k:{{\"name\":\"SETTING_{at}\"}}"), json!({".": {}, "f:name": {}, "f:value": {}})))
        .collect();
    let fields: serde_json::Map<String, Value> = fields.into_iter().collect();
    let managed = json!({
        "manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "time": "2026-11-22T10:00:00Z",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:containers": {"k:{\"name\":\"main\"}": {"f:env": fields}}}}
    });
    let object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": "bench", "name": name, "uid": uid(1, number), "creationTimestamp": "2026-11-22T10:00:00Z",
            "labels": {"app": app, "pod-template-hash": "7d9c5b6f8", "version": "v1"},
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "9090"},
            "ownerReferences": [owner], "managedFields": [managed]
        },
        "spec": {
            "containers": [container], "nodeName": format!("node-{}", number % 100), "serviceAccountName": app,
            "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler"
        },
        "status": {
            "phase": "Running", "podIP": address(service, pod), "podIPs": [{"ip": address(service, pod)}],
            "hostIP": "192.0.2.1", "qosClass": "Burstable", "startTime": "2026-11-22T10:00:00Z",
            "conditions": conditions
        }
    });
    (format!("pods/bench/{name}"), object)
}

/// Returns the slice of a service, given whether each pod is ready.
fn slice_of(service: usize, ready: &[bool; PODS]) -> Value {
    let endpoint = |(pod, ready): (usize, &bool)| {
        json!({
            "addresses": [address(service, pod)],
            "conditions": {"ready": ready, "serving": ready, "terminating": false},
            "nodeName": format!("node-{}", (service * PODS + pod) % 100),
            "targetRef": {
                "kind": "Pod", "namespace": "bench", "name": format!("s{service}-7d9c5b6f8-{pod}"),
                "uid": uid(1, service * PODS + pod)
            }
        })
    };
    json!({
        "apiVersion": SLICES, "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "namespace": "bench", "name": format!("s{service}-1"), "uid": uid(2, service),
            "labels": {"kubernetes.io/service-name": format!("s{service}")}
        },
        "ports": [{"name": "https", "port": 8443, "protocol": "TCP"}],
        "endpoints": ready.iter().enumerate().map(endpoint).collect::<Vec<_>>()
    })
}

/// Measures the time from the event of a changed slice until an xDS client has the change.
fn changes(cluster: &Cluster, gateway: &Watching, service: usize) -> Result<()> {
    let (told, tells) = mpsc::channel();
    let (xds, name) = (gateway.xds(), format!("outbound|443||s{service}.bench.svc.cluster.local"));
    std::thread::spawn(move || client::follow(xds, &name, &told));
    tells.recv_timeout(Duration::from_secs(10))?;
    let slice = format!("s{service}-1");
    let (seen, sees) = mpsc::channel();
    let slices = at(SLICES, "endpointslices", "bench/");
    let mut events =
        cluster.admin().watch(&format!("{slices}?watch=1&fieldSelector=metadata.name%3D{slice}"));
    std::thread::spawn(move || {
        while events.next().is_some() {
            if seen.send(Instant::now()).is_err() {
                return;
            }
        }
    });
    // The first event is the slice as it exists.
    sees.recv_timeout(Duration::from_secs(10))?;
    let path = at(SLICES, "endpointslices", &format!("bench/{slice}"));
    let built = gateway.buildings()?.len();
    let (mut times, mut spent) = (Vec::new(), Ok(()));
    let cost = gateway.spent_in(|| {
        for change in 0..CHANGES {
            let mut ready = [true; PODS];
            ready[0] = change % 2 == 1;
            cluster.admin().patch(&path, &json!({"endpoints": slice_of(service, &ready)["endpoints"]}));
            let event = sees.recv_timeout(Duration::from_secs(10));
            let arrived = tells.recv_timeout(Duration::from_secs(10)).map(|()| Instant::now());
            match (event, arrived) {
                (Ok(event), Ok(arrived)) => {
                    times.push(arrived.saturating_duration_since(event).as_secs_f64() * 1e3)
                }
                (event, arrived) => {
                    spent = Err(format!("change {change}: event {event:?}, arrived {arrived:?}"));
                    return;
                }
            }
            sleep(PAUSE);
        }
    })?;
    spent?;
    // The watching thread ends with the next event.
    drop(sees);
    for ready in [[false; PODS], [true; PODS]] {
        cluster.admin().patch(&path, &json!({"endpoints": slice_of(service, &ready)["endpoints"]}));
    }
    times.sort_by(f64::total_cmp);
    let mut buildings = gateway.buildings()?.split_off(built);
    buildings.sort_by(f64::total_cmp);
    let median = buildings.get(buildings.len() / 2).copied().unwrap_or(f64::NAN);
    println!("a snapshot is built in {median:.0} µs (median)");
    println!(
        "a slice's event -> an xDS client has the change: p50 {:.1} ms, p99 {:.1} ms; {:.0} µs of CPU a change",
        times[CHANGES / 2],
        times[CHANGES * 99 / 100],
        cost * 1e6 / CHANGES as f64
    );
    Ok(())
}
