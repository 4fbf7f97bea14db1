//! The chart at a real API server: which objects the server accepts, what a release leaves behind, and the permissions of a
//! pod's own token.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::helm::{NAMESPACE, RELEASE, chart, path, said, sets};
use crate::support::kube::{self, Cluster, Options};

/// A cluster, with the tools and files for installing the chart in it.
struct Place {
    cluster: Cluster,
    kubectl: PathBuf,
    helm: PathBuf,
    files: tempfile::TempDir,
}

impl Place {
    /// Starts a cluster. Returns `None`, after reporting a skip, if the API server or a tool is not installed.
    fn start() -> Option<Self> {
        let (rig, kubectl, helm) = (kube::installed()?, kube::kubectl()?, kube::helm()?);
        let cluster = Cluster::start(&rig, "east", &Options::default());
        cluster.install_crds();
        for namespace in [NAMESPACE, "shop", "pay", "far"] {
            cluster.namespace(namespace, &json!({}));
        }
        Some(Self { cluster, kubectl, helm, files: tempfile::tempdir().expect("a folder") })
    }

    /// Runs kubectl and returns its output; the error is its error output.
    fn kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        said(self.cluster.run(&self.kubectl, arguments))
    }

    /// Runs a helm command on the release in its namespace, and returns its output.
    #[track_caller]
    fn helm(&self, command: &str, more: &[&str]) -> String {
        let arguments = [&[command, RELEASE], more, &["--namespace", NAMESPACE]].concat();
        let done = said(self.cluster.run(&self.helm, &arguments));
        done.unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    /// Writes a file for a command, and returns its path.
    fn file(&self, name: &str, text: &str) -> String {
        let file = self.files.path().join(name);
        std::fs::write(&file, text).expect("written");
        path(&file).to_owned()
    }

    /// Returns an existing object.
    #[track_caller]
    fn get(&self, kind: &str, name: &str) -> Value {
        let text = self.kubectl(&["get", kind, name, "--namespace", NAMESPACE, "-o", "json"]);
        serde_json::from_str(&text.unwrap_or_else(|error| panic!("{error}"))).expect("JSON")
    }
}

fn set(name: &str) -> String {
    let (_, file) = sets().into_iter().find(|(set, _)| set == name).expect("a set");
    path(&file).to_owned()
}

#[test]
fn a_release_is_installed_changed_taken_back_and_removed() {
    let Some(place) = Place::start() else { return };
    let (chart, drop_in) = (chart(), set("1-drop-in"));
    let chart = path(&chart);
    let told = place.helm("install", &[chart, "--values", &drop_in]);
    assert!(told.contains("/usr/bin/isthmus status"), "{told}");
    let installed = place.get("deployment", RELEASE);
    // A change of the exports restarts no pod.
    let narrow = r#"exports=[{"services":["*.shop.svc.cluster.local"]}]"#;
    place.helm("upgrade", &[chart, "--values", &drop_in, "--set-json", narrow]);
    let config = |place: &Place| place.get("configmap", RELEASE)["data"]["isthmus.yaml"].to_string();
    assert!(config(&place).contains("*.shop.svc.cluster.local"));
    assert_eq!(
        place.get("deployment", RELEASE)["metadata"]["generation"],
        installed["metadata"]["generation"]
    );
    place.helm("rollback", &["1"]);
    assert!(!config(&place).contains("*.shop.svc.cluster.local"));
    // The release is upgraded to both roles, and back.
    let more = ["--set", "roles.aggregator=true,reader.create=true"];
    let clients = r#"aggregator.xds.clients=[{"networks":["net-east"]}]"#;
    place.helm("upgrade", &[&[chart, "--values", &drop_in], &more[..], &["--set-json", clients]].concat());
    assert_eq!(place.get("deployment", "istio-eastwestgateway-aggregator")["spec"]["replicas"], 2);
    place.helm("upgrade", &[chart, "--values", &drop_in]);
    // After an uninstall, nothing of the release is left.
    place.helm("uninstall", &["--wait"]);
    let kinds = "all,configmap,secret,serviceaccount,role,rolebinding,clusterrole,clusterrolebinding,pdb,hpa,netpol,gateway,lease";
    let label = format!("app.kubernetes.io/instance={RELEASE}");
    let left = place
        .kubectl(&["get", kinds, "--all-namespaces", "--selector", &label, "-o", "name"])
        .expect("a list");
    assert_eq!(left, "");
}

/// This chart replaces a release of Istio's chart in place, so that the Service keeps its load balancer.
#[test]
fn a_release_of_istios_chart_is_replaced_in_place() {
    let Some(place) = Place::start() else { return };
    let folder = place.files.path().join("gateway");
    std::fs::create_dir_all(folder.join("templates")).expect("made");
    std::fs::write(folder.join("Chart.yaml"), "{apiVersion: v2, name: gateway, version: 1.30.0}\n")
        .expect("written");
    std::fs::write(folder.join("templates/all.yaml"), ISTIO).expect("written");
    place.helm("install", &[path(&folder)]);
    let (service, deployment) = (place.get("service", RELEASE), place.get("deployment", RELEASE));
    let drop_in = set("1-drop-in");
    place.helm("upgrade", &[path(&chart()), "--values", &drop_in, "--reset-values"]);
    let containers = |deployment: &Value| {
        let containers = deployment["spec"]["template"]["spec"]["containers"].as_array().expect("containers");
        containers.iter().map(|container| container["name"].clone()).collect::<Vec<_>>()
    };
    let (now, new) = (place.get("service", RELEASE), place.get("deployment", RELEASE));
    for key in ["uid", "name"] {
        assert_eq!(now["metadata"][key], service["metadata"][key]);
        assert_eq!(new["metadata"][key], deployment["metadata"][key]);
    }
    assert_eq!(now["spec"]["clusterIP"], service["spec"]["clusterIP"]);
    assert_eq!(now["spec"]["ports"], service["spec"]["ports"], "node ports too");
    assert_eq!(containers(&new), ["isthmus"]);
    place.helm("rollback", &[]);
    assert_eq!(containers(&place.get("deployment", RELEASE)), ["istio-proxy"]);
    assert_eq!(place.get("service", RELEASE)["spec"]["ports"], service["spec"]["ports"]);
}

/// The objects that Istio's chart makes for `networkGateway: net-east` and this chart makes too.
pub(crate) const ISTIO: &str = r#"
apiVersion: v1
kind: Service
metadata:
  name: istio-eastwestgateway
  labels: {app: istio-eastwestgateway, istio: eastwestgateway, topology.istio.io/network: net-east}
spec:
  type: LoadBalancer
  ports:
    - {name: status-port, port: 15021, targetPort: 15021}
    - {name: tls, port: 15443, targetPort: 15443}
    - {name: tls-istiod, port: 15012, targetPort: 15012}
    - {name: tls-webhook, port: 15017, targetPort: 15017}
  selector: {app: istio-eastwestgateway, istio: eastwestgateway}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: istio-eastwestgateway}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: istio-eastwestgateway}
spec:
  selector: {matchLabels: {app: istio-eastwestgateway, istio: eastwestgateway}}
  template:
    metadata:
      labels: {app: istio-eastwestgateway, istio: eastwestgateway, sidecar.istio.io/inject: "true"}
      annotations: {inject.istio.io/templates: gateway}
    spec:
      serviceAccountName: istio-eastwestgateway
      securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: "0"}]}
      containers:
        - name: istio-proxy
          image: auto
          env: [{name: ISTIO_META_REQUESTED_NETWORK_VIEW, value: net-east}]
          ports: [{containerPort: 15090, name: http-envoy-prom}]
"#;

#[test]
fn a_pods_own_token_may_do_what_its_features_need_and_no_more() {
    let Some(place) = Place::start() else { return };
    let chart = chart();
    let read =
        |kinds: &[&str]| -> Vec<String> { kinds.iter().map(|kind| format!("{kind} [list watch]")).collect() };
    let places = read(&["namespaces", "nodes"]);
    let services = read(&["endpointslices.discovery.k8s.io", "pods", "services"]);
    let marks = read(&["serviceexports.multicluster.x-k8s.io", "serviceimports.multicluster.x-k8s.io"]);
    let gateways = read(&["gateways.gateway.networking.k8s.io"]);
    let base = [&places[..], &services, &marks].concat();
    let conditions = [
        "serviceexports.multicluster.x-k8s.io/status [patch]",
        "leases.coordination.k8s.io [create]",
        "leases.coordination.k8s.io [isthmus-service-exports] [get update]",
    ]
    .map(str::to_owned);
    // Each case has the values, and the permissions of the token in the release's namespace and in the namespace `far`.
    let cases: [(&str, Vec<String>, Vec<String>); 5] = [
        ("kubernetes.enabled=false", vec![], vec![]),
        ("kubernetes.gateways.enabled=false", base.clone(), base.clone()),
        (
            "kubernetes.serviceExports.conditions=true",
            [&base[..], &gateways, &conditions].concat(),
            [&base[..], &gateways, &conditions[..1]].concat(),
        ),
        (
            "remoteClusters.watch.enabled=true,remoteClusters.watch.namespace=far",
            [&base[..], &gateways].concat(),
            [&base[..], &gateways, &read(&["secrets"])].concat(),
        ),
        (
            "kubernetes.namespaces.only={far}",
            [&places[..], &services, &gateways].concat(),
            [&base[..], &gateways].concat(),
        ),
    ];
    let mut installed = false;
    for (feature, here, far) in cases {
        let command = if installed { "upgrade" } else { "install" };
        installed = true;
        place.helm(command, &[path(&chart), "--set", "image.repository=r/isthmus", "--set", feature]);
        let token = place.kubectl(&["create", "token", RELEASE, "--namespace", NAMESPACE]).expect("a token");
        let kubeconfig = place.file("pod.kubeconfig", &place.cluster.kubeconfig(token.trim()));
        let may = |namespace: &str| rights(&place, &kubeconfig, namespace);
        assert_eq!(may(NAMESPACE), sorted(here), "{feature}");
        assert_eq!(may("far"), sorted(far), "{feature}");
    }
}

fn sorted(mut rights: Vec<String>) -> Vec<String> {
    rights.sort();
    rights
}

/// Returns a user's permissions on the objects of a namespace, each as `RESOURCE [names] [verbs]`. Permissions that every user
/// has are left out.
#[track_caller]
fn rights(place: &Place, kubeconfig: &str, namespace: &str) -> Vec<String> {
    let list =
        ["auth", "can-i", "--list", "--no-headers", "--namespace", namespace, "--kubeconfig", kubeconfig];
    let text = place.kubectl(&list).unwrap_or_else(|error| panic!("{error}"));
    let lines = text.lines().filter(|line| !line.starts_with(' ') && !line.starts_with("self"));
    let rights = lines.map(|line| {
        // The columns are resource, URLs, names and verbs; all but the first are lists in brackets.
        let (resource, rest) = line.split_once(char::is_whitespace).expect("columns");
        let lists: Vec<&str> =
            rest.split('[').skip(1).filter_map(|part| Some(part.split_once(']')?.0)).collect();
        let names = if lists[1].is_empty() { String::new() } else { format!(" [{}]", lists[1]) };
        format!("{resource}{names} [{}]", lists[2])
    });
    sorted(rights.collect())
}

/// The service account for gateways of other clusters: its token, which is in a Secret, permits reading what a registry reads.
#[test]
fn the_reader_reads_and_sees_no_secrets() {
    let Some(place) = Place::start() else { return };
    place.helm("install", &[path(&chart()), "--values", &set("6-reader")]);
    let token = crate::support::eventually("the token", || {
        let template = "go-template={{with .data}}{{.token | base64decode}}{{end}}";
        let get = ["get", "secret", "isthmus-reader-token", "--namespace", NAMESPACE, "-o", template];
        place.kubectl(&get).ok().filter(|token| !token.is_empty())
    });
    let kubeconfig = place.file("reader.kubeconfig", &place.cluster.kubeconfig(&token));
    let can = |arguments: &[&str]| place.kubectl(&[&["--kubeconfig", &kubeconfig], arguments].concat());
    for kind in
        ["namespaces", "nodes", "pods", "services", "endpointslices", "gateways.gateway.networking.k8s.io"]
    {
        can(&["get", kind, "--all-namespaces"]).unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
    for kind in ["secrets", "configmaps"] {
        let error = can(&["get", kind, "--all-namespaces"]).expect_err(kind);
        assert!(error.contains("forbidden"), "{error}");
    }
}
