//! A Kubernetes cluster without nodes: a real API server with its etcd and the controllers that fill EndpointSlices and the
//! tokens of service accounts (`tests/kube`). Pods are objects that a test writes as a kubelet would.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::etcd::{encoded, free_ports};
use super::gateway::raw_http;
use super::kube_client::{Client, at, becomes};
use super::pki::{Issued, Pki};
use super::{has_stopped, skip, within};

/// Returns the path of the program that `tests/kube/build` builds: `ISTHMUS_KUBE_RIG`, or the path at which `tests/run` builds
/// it. Returns `None`, after reporting a skip, if there is none.
pub fn installed() -> Option<PathBuf> {
    let found = find("ISTHMUS_KUBE_RIG", "target/kube/isthmus-kube-rig");
    if found.is_none() {
        skip("no Kubernetes API server is built (tests/kube/build builds one)");
    }
    found
}

/// Returns the path of kubectl. Returns `None`, after reporting a skip, if there is none.
pub fn kubectl() -> Option<PathBuf> {
    tool("ISTHMUS_KUBECTL", "kubectl")
}

/// Returns the path of helm. Returns `None`, after reporting a skip, if there is none.
pub fn helm() -> Option<PathBuf> {
    tool("ISTHMUS_HELM", "helm")
}

fn tool(variable: &str, name: &str) -> Option<PathBuf> {
    let found = find(variable, &format!("target/interop/kube/{name}"));
    if found.is_none() {
        skip(&format!("{name} is not installed (tests/run installs it)"));
    }
    found
}

fn find(variable: &str, usual: &str) -> Option<PathBuf> {
    let usual = || Path::new(env!("CARGO_MANIFEST_DIR")).join(usual);
    Some(std::env::var_os(variable).map_or_else(usual, PathBuf::from)).filter(|path| path.exists())
}

/// The setup of a network namespace (`namespace::inside`) in which a test can bind and reach every address of a pod.
pub const PODS: &str =
    "ip link set lo up; ip route add local 10.244.0.0/16 dev lo; ip -6 route add local fd00:244::/32 dev lo";

/// The time limit for the start of an API server.
const START: Duration = Duration::from_secs(90);

/// The token of a user that is allowed everything.
const ADMIN: &str = "the-tests-admin";

/// The settings of a cluster.
pub struct Options<'a> {
    /// The address that the API server listens on.
    pub address: Ipv4Addr,
    /// Flags of kube-apiserver, such as `--feature-gates=WatchList=false`.
    pub flags: &'a [&'a str],
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, flags: &[] }
    }
}

/// A running cluster. Its processes are killed when it is dropped, and when the test's process ends in any way.
pub struct Cluster {
    pub name: String,
    program: PathBuf,
    address: SocketAddr,
    etcd_address: SocketAddr,
    arguments: Vec<String>,
    pki: Pki,
    admin: Client,
    // Fields are dropped, and their processes killed, in this order.
    _controllers: Process,
    api: Process,
    _etcd: Process,
    folder: TempDir,
}

impl Cluster {
    /// Starts a cluster with a node `node`, and waits until its controllers work.
    #[track_caller]
    pub fn start(program: &Path, name: &str, options: &Options<'_>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let pki = Pki::new(&format!("the CA of cluster {name}"));
        let ports = free_ports(2);
        let address = SocketAddr::from((options.address, ports[0]));
        let etcd_address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports[1]));
        write_files(folder.path(), &pki, address);

        let etcd_arguments = ["--data", "data", "--listen", &etcd_address.to_string()].map(String::from);
        let etcd = Process::spawn(program, folder.path(), "etcd", &etcd_arguments);
        let arguments = api_arguments(address, etcd_address, options.flags);
        let mut api = Process::spawn(program, folder.path(), "apiserver", &arguments);
        let admin = Client::new(address, pki.client(&[]), ADMIN);
        wait_until_ready(&mut api, &admin);

        let kubeconfig = kubeconfig(name, address, &pki, &format!("{{token: {ADMIN}}}"));
        std::fs::write(folder.path().join("kubeconfig"), kubeconfig).expect("written");
        let files = ["--kubeconfig", "kubeconfig", "--service-account-private-key-file", "accounts.key"];
        let controllers = Process::spawn(program, folder.path(), "controllers", &files.map(String::from));
        let (name, program) = (name.to_owned(), program.to_owned());
        let cluster = Self {
            name,
            program,
            address,
            etcd_address,
            arguments,
            pki,
            admin,
            _controllers: controllers,
            api,
            _etcd: etcd,
            folder,
        };
        cluster.node("node", &json!({}));
        // The controllers exit if a test stops the API server before they run. So this waits for the account `default`, which
        // the controllers create when they run.
        within(START, "the service account default", || {
            let account = cluster.admin.get(&at("v1", "serviceaccounts", "default/default"));
            (account.status == 200).then_some(())
        });
        cluster
    }

    /// Returns the URL of the API server.
    pub fn server(&self) -> String {
        format!("https://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the CA that issued the API server's certificate; the API server accepts client certificates of this CA.
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    pub fn ca_pem(&self) -> String {
        self.pki.ca_pem()
    }

    pub fn admin_token(&self) -> &'static str {
        ADMIN
    }

    /// Returns the client of a user that is allowed everything.
    pub fn admin(&self) -> &Client {
        &self.admin
    }

    /// Returns a client with another user's token. With an empty token, the client is anonymous.
    pub fn client(&self, token: &str) -> Client {
        Client::new(self.address, self.pki.client(&[]), token)
    }

    /// Returns a client with a client certificate.
    pub fn client_with(&self, issued: Issued) -> Client {
        Client::new(self.address, self.pki.client_with(issued, &[]), "")
    }

    /// Returns a kubeconfig with a token, as istioctl writes it into a remote secret.
    pub fn kubeconfig(&self, token: &str) -> String {
        self.kubeconfig_of(&format!("{{token: {token}}}"))
    }

    /// Returns a kubeconfig whose user is this YAML: `{token: …}`, or `client-certificate-data` and `client-key-data` of
    /// [`Pki::issue_to`].
    pub fn kubeconfig_of(&self, user: &str) -> String {
        kubeconfig(&self.name, self.address, &self.pki, user)
    }

    /// Runs a program (kubectl, helm) with the rights of an administrator, and returns its output and exit status.
    #[track_caller]
    pub fn run(&self, program: &Path, arguments: &[&str]) -> Output {
        let folder = self.folder.path();
        let mut command = Command::new(program);
        command.args(arguments).env("KUBECONFIG", folder.join("kubeconfig")).env("HOME", folder);
        command.stdin(Stdio::null()).output().expect("it starts")
    }

    /// Kills the API server. Etcd and the controllers keep running.
    pub fn kill(&mut self) {
        self.api.kill();
    }

    /// Starts the API server again with the same address, certificate and objects, and waits until it is ready.
    #[track_caller]
    pub fn restart(&mut self) {
        self.api = Process::spawn(&self.program, self.folder.path(), "apiserver", &self.arguments);
        wait_until_ready(&mut self.api, &self.admin);
    }

    /// Stops the API server's process (SIGSTOP): its connections stay open and silent.
    pub fn pause(&self) {
        self.api.signal("STOP");
        has_stopped(self.api.child.id());
    }

    /// Continues the API server's process (SIGCONT).
    pub fn resume(&self) {
        self.api.signal("CONT");
    }

    /// Removes all versions but the current one from etcd. The API server keeps some old versions in memory, so requests for
    /// further pages of an old list still succeed. They fail with 410 after the API server was restarted.
    #[track_caller]
    pub fn compact(&self) {
        let answer = self.etcd("/v3/kv/range", &json!({"key": encoded(b"a")}));
        let revision = answer["header"]["revision"].as_str().expect("a revision");
        self.etcd("/v3/kv/compaction", &json!({"revision": revision, "physical": true}));
    }

    /// Writes objects directly into etcd, many per request; through the API server, thousands of pods would take minutes. The
    /// keys are those below `/registry/`. The API server reads JSON there as well as its own encoding.
    #[track_caller]
    pub fn store(&self, objects: &[(String, Value)]) {
        for some in objects.chunks(100) {
            let puts = some.iter().map(|(key, object)| {
                let (key, value) = (format!("/registry/{key}"), object.to_string());
                json!({"requestPut": {"key": encoded(key.as_bytes()), "value": encoded(value.as_bytes())}})
            });
            let answer = self.etcd("/v3/kv/txn", &json!({"success": puts.collect::<Vec<_>>()}));
            assert_eq!(answer["succeeded"], true, "{answer}");
        }
    }

    #[track_caller]
    fn etcd(&self, path: &str, request: &Value) -> Value {
        let body = request.to_string();
        let head = format!("POST {path} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n", body.len());
        let (status, answer) = raw_http(self.etcd_address, &(head + &body));
        assert_eq!(status, 200, "{path}: {answer}");
        serde_json::from_str(&answer).expect("JSON")
    }

    /// Returns the folder with the CRDs of the Multi-Cluster Services API and of the Gateway API.
    pub fn crds(&self) -> PathBuf {
        self.program.with_file_name("crds")
    }

    /// Installs the CRDs of the Multi-Cluster Services API and of the Gateway API, and waits until they are served.
    #[track_caller]
    pub fn install_crds(&self) {
        let mut files: Vec<PathBuf> = std::fs::read_dir(self.crds())
            .expect("CRDs")
            .map(|entry| entry.expect("a file").path())
            .collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(file).expect("a CRD");
            let crd = self.admin.post_yaml(&at(CRD, "customresourcedefinitions", ""), &text);
            let spec = &crd["spec"];
            let text = |value: &Value| value.as_str().expect("a text").to_owned();
            let versions = spec["versions"].as_array().expect("versions");
            for version in versions.iter().filter(|version| version["served"] == true) {
                let group = format!("{}/{}", text(&spec["group"]), text(&version["name"]));
                becomes(&self.admin, &at(&group, &text(&spec["names"]["plural"]), ""), |_| true);
            }
        }
    }

    /// Removes the CRD of this name (`gateways.gateway.networking.k8s.io`) with all its objects.
    #[track_caller]
    pub fn remove_crd(&self, name: &str) {
        self.admin.delete(&at(CRD, "customresourcedefinitions", name));
    }

    #[track_caller]
    pub fn namespace(&self, name: &str, labels: &Value) {
        self.admin.apply(
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}),
        );
    }

    #[track_caller]
    pub fn node(&self, name: &str, labels: &Value) {
        self.admin.apply(
            &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}),
        );
    }

    /// Creates a pod, and writes its status as the kubelet does.
    #[track_caller]
    pub fn pod(&self, pod: &Pod<'_>) {
        let (namespace, name) = split(pod.key);
        let container = json!({"name": "main", "image": "none", "ports": pod.ports});
        let mut spec = json!({"containers": [container], "serviceAccountName": pod.account});
        if !pod.node.is_empty() {
            spec["nodeName"] = pod.node.into();
        }
        self.admin.create(&json!({
            "apiVersion": "v1", "kind": "Pod", "spec": spec,
            "metadata":
                {"namespace": namespace, "name": name, "labels": pod.labels, "annotations": pod.annotations}
        }));
        let addresses: Vec<Value> = pod.addresses.iter().map(|address| json!({"ip": address})).collect();
        self.admin.patch_status(
            &at("v1", "pods", pod.key),
            &json!({
                "phase": "Running", "podIP": pod.addresses.first(), "podIPs": addresses,
                "conditions": [ready_condition(if pod.ready { "True" } else { "False" })]
            }),
        );
    }

    /// Sets a pod's Ready condition to `True` or `False`.
    #[track_caller]
    pub fn set_ready(&self, key: &str, ready: &str) {
        self.admin.patch_status(&at("v1", "pods", key), &json!({"conditions": [ready_condition(ready)]}));
    }

    /// Sets a pod's deletionTimestamp. The pod exists until [`Self::delete_pod`] is called, as a pod on a node exists until the
    /// kubelet has stopped it.
    #[track_caller]
    pub fn terminate_pod(&self, key: &str) {
        let path = at("v1", "pods", key);
        let answer = self.admin.call("DELETE", &path, ("application/json", r#"{"gracePeriodSeconds": 600}"#));
        assert_eq!(answer.status, 200, "{answer:?}");
    }

    #[track_caller]
    pub fn delete_pod(&self, key: &str) {
        self.admin.delete(&at("v1", "pods", key));
    }

    /// Creates a service, or changes it. Its selector is `app: NAME`; the keys of `spec` (`ports` at least) are added.
    #[track_caller]
    pub fn service(&self, key: &str, labels: &Value, spec: &Value) {
        let (namespace, name) = split(key);
        let mut whole = json!({"selector": {"app": name}});
        for (key, value) in spec.as_object().expect("a spec") {
            whole[key] = value.clone();
        }
        self.admin.apply(&json!({
            "apiVersion": "v1", "kind": "Service", "spec": whole,
            "metadata": {"namespace": namespace, "name": name, "labels": labels}
        }));
    }

    /// Writes the addresses of a load balancer into the status of a service.
    #[track_caller]
    pub fn balance(&self, key: &str, ingress: &Value) {
        self.admin.patch_status(&at("v1", "services", key), &json!({"loadBalancer": {"ingress": ingress}}));
    }

    /// Gives a service this number of ready pods, `NAME-0` and so on, with addresses `NETWORK.0`, `NETWORK.1` and so on:
    /// `scale("shop/web", 3, "10.244.7")`.
    #[track_caller]
    pub fn scale(&self, key: &str, pods: usize, network: &str) {
        let (namespace, name) = split(key);
        let path = format!("{}?labelSelector=app%3D{name}", at("v1", "pods", &format!("{namespace}/")));
        let there = self.admin.read(&path)["items"].as_array().expect("a list").len();
        for number in there..pods {
            let (key, address) = (format!("{key}-{number}"), format!("{network}.{number}"));
            let mut pod = Pod::new(&key, &address);
            pod.labels = json!({"app": name});
            self.pod(&pod);
        }
        (pods..there).for_each(|number| self.delete_pod(&format!("{key}-{number}")));
    }

    /// Returns the EndpointSlices of a service.
    #[track_caller]
    pub fn slices(&self, key: &str) -> Vec<Value> {
        let (namespace, name) = split(key);
        let list = at("discovery.k8s.io/v1", "endpointslices", &format!("{namespace}/"));
        let path = format!("{list}?labelSelector=kubernetes.io%2Fservice-name%3D{name}");
        self.admin.read(&path)["items"].as_array().expect("a list").clone()
    }

    /// Creates a service account, and returns a token of an hour (TokenRequest).
    #[track_caller]
    pub fn account(&self, key: &str) -> String {
        self.create_account(key);
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let path = format!("{}/token", at("v1", "serviceaccounts", key));
        self.admin.post(&path, &request)["status"]["token"].as_str().expect("a token").to_owned()
    }

    /// Creates a service account and a Secret of the same name, and returns the token that the controller writes into the
    /// Secret. The token does not expire.
    #[track_caller]
    pub fn account_with_secret(&self, key: &str) -> String {
        self.create_account(key);
        let (namespace, name) = split(key);
        let annotations = json!({"kubernetes.io/service-account.name": name});
        self.admin.create(&json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
            "metadata": {"namespace": namespace, "name": name, "annotations": annotations}
        }));
        let filled = |secret: &Value| secret["data"]["token"].is_string();
        let secret = becomes(&self.admin, &at("v1", "secrets", key), filled);
        let token = decoded(secret["data"]["token"].as_str().expect("base64"));
        String::from_utf8(token).expect("text")
    }

    fn create_account(&self, key: &str) {
        let (namespace, name) = split(key);
        self.admin.create(&json!({
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": namespace, "name": name}
        }));
    }

    /// Grants a service account rights in the whole cluster: the rules of a ClusterRole with the account's name.
    #[track_caller]
    pub fn allow(&self, account: &str, rules: &Value) {
        let (namespace, name) = split(account);
        self.admin.apply(&json!({
            "apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules
        }));
        self.admin.apply(&json!({
            "apiVersion": RBAC, "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": name}]
        }));
    }

    /// Removes the permissions that [`Self::allow`] granted.
    #[track_caller]
    pub fn forbid(&self, account: &str) {
        self.admin.delete(&at(RBAC, "clusterrolebindings", split(account).1));
    }
}

const CRD: &str = "apiextensions.k8s.io/v1";
const RBAC: &str = "rbac.authorization.k8s.io/v1";

/// Returns the rules of a ClusterRole with read access to every kind that a registry watches.
pub fn reader() -> Value {
    let verbs = json!(["list", "watch"]);
    let rule =
        |group: &str, kinds: &[&str]| json!({"apiGroups": [group], "resources": kinds, "verbs": verbs});
    json!([
        rule("", &["namespaces", "services", "pods", "nodes"]),
        rule("discovery.k8s.io", &["endpointslices"]),
        rule("gateway.networking.k8s.io", &["gateways"]),
        rule("multicluster.x-k8s.io", &["serviceexports", "serviceimports"]),
    ])
}

/// Writes the kubeconfigs of clusters into a gateway's folder, and returns the section `registries` of its config. `more` is
/// added to each registry: a comma, and further keys.
pub fn registries(folder: &Path, clusters: &[&Cluster], more: &str) -> String {
    let registry = |cluster: &&Cluster| {
        let (name, file) = (&cluster.name, format!("{}.kubeconfig", cluster.name));
        std::fs::write(folder.join(&file), cluster.kubeconfig(ADMIN)).expect("written");
        format!("  - kubernetes: {{cluster: {name}, kubeconfig: {file}{more}}}\n")
    };
    format!("registries:\n{}", clusters.iter().map(registry).collect::<String>())
}

/// A pod that a test creates.
pub struct Pod<'a> {
    /// The pod's namespace and name: `shop/web-0`.
    pub key: &'a str,
    pub addresses: Vec<&'a str>,
    pub labels: Value,
    pub annotations: Value,
    pub account: &'a str,
    /// The pod's node. No slice names the pod before the node exists. A pod without a node (`""`) disappears as soon as it is
    /// deleted.
    pub node: &'a str,
    /// The container's ports, for services whose targetPort is a name.
    pub ports: Value,
    pub ready: bool,
}

impl<'a> Pod<'a> {
    /// Returns a ready pod with one address, on the node `node`.
    pub fn new(key: &'a str, address: &'a str) -> Self {
        Self {
            key,
            addresses: vec![address],
            labels: json!({}),
            annotations: json!({}),
            account: "default",
            node: "node",
            ports: json!([]),
            ready: true,
        }
    }
}

fn ready_condition(status: &str) -> Value {
    json!({"type": "Ready", "status": status})
}

fn split(key: &str) -> (&str, &str) {
    key.split_once('/').expect("namespace/name")
}

fn write_files(folder: &Path, pki: &Pki, address: SocketAddr) {
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
    let server = pki.issue(&[&address.ip().to_string()], None);
    write("ca.pem", &pki.ca_pem());
    write("server.pem", &server.certificate_pem);
    write("server.key", &server.key_pem);
    // The API server reads the public key of service accounts from this certificate.
    let accounts = pki.issue(&["accounts"], None);
    write("accounts.pem", &accounts.certificate_pem);
    write("accounts.key", &accounts.key_pem);
    write("tokens.csv", &format!("{ADMIN},admin,admin,system:masters\n"));
}

fn api_arguments(address: SocketAddr, etcd: SocketAddr, more: &[&str]) -> Vec<String> {
    let (ip, port) = (address.ip(), address.port());
    let text = format!(
        "--etcd-servers=http://{etcd} --bind-address={ip} --secure-port={port} --client-ca-file=ca.pem --cert-dir=certificates \
         --tls-cert-file=server.pem --tls-private-key-file=server.key --token-auth-file=tokens.csv \
         --service-cluster-ip-range=10.96.0.0/16,fd00:96::/108 --service-account-issuer=https://kubernetes.default.svc \
         --service-account-signing-key-file=accounts.key --service-account-key-file=accounts.pem \
         --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount --endpoint-reconciler-type=none \
         --advertise-address=192.0.2.1"
    );
    text.split_whitespace().chain(more.iter().copied()).map(str::to_owned).collect()
}

fn kubeconfig(name: &str, address: SocketAddr, pki: &Pki, user: &str) -> String {
    let ca = encoded(pki.ca_pem().as_bytes());
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: {name}\n\
         clusters:\n- name: {name}\n  cluster:\n    certificate-authority-data: {ca}\n    server: https://{address}\n\
         contexts:\n- name: {name}\n  context: {{cluster: {name}, user: {name}}}\n\
         users:\n- name: {name}\n  user: {user}\n"
    )
}

/// Waits until the API server is ready and has created the namespace `default`.
#[track_caller]
fn wait_until_ready(api: &mut Process, admin: &Client) {
    let mut answers = |path: &str| {
        within(START, path, || {
            api.check();
            let answer = admin.try_call("GET", path, ("application/json", "")).ok()?;
            (answer.status == 200).then_some(())
        });
    };
    answers("/readyz");
    answers("/api/v1/namespaces/default");
}

/// Decodes base64 (RFC 4648 §4).
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("not base64: {text}"),
    };
    let digits: Vec<u8> = text.trim_end_matches('=').bytes().map(digit).collect();
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for chunk in digits.chunks(4) {
        let word =
            chunk.iter().fold(0_u32, |word, digit| word << 6 | u32::from(*digit)) << (6 * (4 - chunk.len()));
        bytes.extend(&word.to_be_bytes()[1..chunk.len()]);
    }
    bytes
}

/// A process of the test cluster; killed when dropped.
struct Process {
    /// The child process. Its standard input is a pipe that stays open. The pipe is closed when the test's process ends in any
    /// way, and the child then exits.
    child: Child,
    log: PathBuf,
}

impl Process {
    fn spawn(program: &Path, folder: &Path, part: &str, arguments: &[String]) -> Self {
        let log = folder.join(format!("{part}.log"));
        let file = std::fs::File::options().create(true).append(true).open(&log).expect("a log");
        let mut command = Command::new(program);
        command.args(["--attached", part]).args(arguments).current_dir(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(file);
        Self { child: command.spawn().expect("the rig starts"), log }
    }

    /// Fails the test if the process has ended.
    #[track_caller]
    fn check(&mut self) {
        if let Some(status) = self.child.try_wait().expect("a child") {
            panic!("a process of the cluster ended with {status}");
        }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args(["-s", signal, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill").success());
    }

    fn kill(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it ends");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let last: Vec<&str> = log.lines().rev().take(10).collect();
            eprintln!("--- the end of {}", self.log.display());
            last.iter().rev().for_each(|line| eprintln!("{line}"));
        }
    }
}
