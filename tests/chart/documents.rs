//! Runs the commands of the documents about Kubernetes against two real API servers. What needs a node is replaced: a command
//! in a pod runs without a gateway, and instead of waiting for pods the test checks their Deployment.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;

use crate::cluster::ISTIO;
use crate::support::etcd::encoded;
use crate::support::gateway::BINARY;
use crate::support::helm::{Helm, NAMESPACE, path, said};
use crate::support::kube::{self, Cluster, Options};
use crate::support::markdown::{Block, split};

/// A wrapper of kubectl. A command in a pod must exit with 3, because there is no gateway here; a wrong argument would make it
/// exit with 2.
const KUBECTL: &str = r#"#!/bin/sh
case " $* " in
*" exec "*)
    while [ "$1" != -- ]; do shift; done
    [ "$2" = /usr/bin/isthmus ] || exit 9
    shift 2
    isthmus "$@"
    [ $? = 3 ] ;;
*" rollout status "*) exec "$REAL_KUBECTL" $(echo "$*" | sed 's/ rollout status / get /') ;;
*) exec "$REAL_KUBECTL" "$@" ;;
esac
"#;

/// A wrapper of helm. It replaces `helm test`, because the test's pod would never end here.
const HELM: &str = r#"#!/bin/sh
case " $* " in
*" test "*) exec "$REAL_HELM" $(echo "$*" | sed 's/ test / status /') ;;
*) exec "$REAL_HELM" "$@" ;;
esac
"#;

/// Returns the code blocks of a document, after replacing texts in it.
fn blocks(document: &str, replaced: &[(&str, &str)]) -> Vec<Block> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(document);
    let mut text = std::fs::read_to_string(file).expect("a document");
    for (this, other) in replaced {
        assert!(text.contains(this), "{document} has no {this:?}");
        text = text.replace(this, other);
    }
    split(&text).0
}

/// Two clusters with a context each in one kubeconfig, and a folder in which commands run.
struct Desk {
    clusters: [Cluster; 2],
    folder: tempfile::TempDir,
    kubectl: PathBuf,
    helm: PathBuf,
}

impl Desk {
    fn new() -> Option<Self> {
        let (rig, kubectl, helm) = (kube::installed()?, kube::kubectl()?, kube::helm()?);
        let clusters = ["east", "west"].map(|name| Cluster::start(&rig, name, &Options::default()));
        clusters.iter().for_each(Cluster::install_crds);
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        write("kubeconfig", &kubeconfig(&clusters));
        std::fs::create_dir(folder.path().join("bin")).expect("made");
        write("bin/kubectl", KUBECTL);
        write("bin/helm", HELM);
        let link = |target: &Path, name: &str| {
            std::os::unix::fs::symlink(target, folder.path().join(name)).expect("a link");
        };
        link(Path::new(BINARY), "bin/isthmus");
        link(&Path::new(env!("CARGO_MANIFEST_DIR")).join("charts"), "charts");
        let mut chmod = Command::new("chmod");
        chmod.args(["+x", "bin/kubectl", "bin/helm"]).current_dir(folder.path());
        assert!(chmod.status().expect("chmod").success());
        Some(Self { clusters, folder, kubectl, helm })
    }

    /// Runs commands as a reader would type them, and returns their output.
    #[track_caller]
    fn run(&self, commands: &str) -> String {
        let folder = self.folder.path();
        let paths = format!("{}:{}", path(&folder.join("bin")), std::env::var("PATH").expect("a path"));
        let mut command = Command::new("sh");
        command.args(["-euc", commands]).current_dir(folder).stdin(Stdio::null()).env("PATH", paths);
        command.env("REAL_KUBECTL", &self.kubectl).env("REAL_HELM", &self.helm).env("HOME", folder);
        command.env("KUBECONFIG", folder.join("kubeconfig")).env("ISTHMUS_ADMIN", "http://127.0.0.1:1");
        let done = said(command.output().expect("a shell"));
        done.unwrap_or_else(|error| panic!("{commands}\n{error}"))
    }

    /// Runs all commands of a document that need a cluster, after replacing texts in it. Before the first block under a given
    /// heading, it also runs the preparation for it.
    #[track_caller]
    fn follow(&self, document: &str, replaced: &[(&str, &str)], before: (&str, &dyn Fn())) {
        let mut prepared = false;
        for block in blocks(document, replaced).iter().filter(|block| block.is_run() && block.needs_cluster())
        {
            if block.heading == before.0 && !std::mem::replace(&mut prepared, true) {
                before.1();
            }
            self.run(&block.text);
        }
        assert!(prepared || before.0.is_empty(), "{document} has no heading {:?}", before.0);
        for name in ["east", "west"] {
            self.run(&format!(
                "helm --kube-context {name} list -n {NAMESPACE} -q | xargs -r -n1 helm --kube-context {name} uninstall -n {NAMESPACE}"
            ));
        }
    }

    /// Installs a stand-in for Istio's gateway.
    fn install_istio(&self) {
        let folder = self.folder.path().join("gateway");
        std::fs::create_dir_all(folder.join("templates")).expect("made");
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
        write("Chart.yaml", "{apiVersion: v2, name: gateway, version: 1.30.0}\n");
        write("templates/all.yaml", ISTIO);
        self.run(&format!("helm --kube-context east install istio-eastwestgateway gateway -n {NAMESPACE}"));
    }
}

fn kubeconfig(clusters: &[Cluster; 2]) -> String {
    let list = |entry: &dyn Fn(&Cluster) -> serde_json::Value| clusters.iter().map(entry).collect::<Vec<_>>();
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "east",
        "clusters": list(&|cluster| json!({"name": cluster.name, "cluster": {
            "server": cluster.server(), "certificate-authority-data": encoded(cluster.ca_pem().as_bytes()),
        }})),
        "users": list(&|cluster| json!({"name": cluster.name, "user": {"token": cluster.admin_token()}})),
        "contexts": list(&|cluster| json!({
            "name": cluster.name, "context": {"cluster": cluster.name, "user": cluster.name},
        })),
    });
    config.to_string()
}

#[test]
fn the_documents_commands_do_what_they_say() {
    let Some(desk) = Desk::new() else { return };
    desk.follow("kubernetes.md", &[], ("Changes", &|| {
        // The kubeconfig from the document's commands is passed to isthmus in the other cluster.
        let secret = desk.run("kubectl --context east -n istio-system get secret isthmus-cluster-west -o jsonpath={.data.west}");
        assert!(!secret.is_empty());
        let objects = desk.run("kubectl --context east -n istio-system get deployments -o name");
        assert!(objects.contains("istio-eastwestgateway") && objects.contains("isthmus-aggregator"), "{objects}");
    }));
    desk.install_istio();
    desk.follow(
        "replace-istio-gateway.md",
        &[],
        ("Where the address must stay", &|| {
            desk.run("helm --kube-context east uninstall isthmus-eastwestgateway -n istio-system");
            desk.install_istio();
        }),
    );
    desk.follow("ambient.md", &[], ("", &|| ()));
    desk.run(
        "kubectl create namespace shop && kubectl create service clusterip reviews -n shop --tcp=443:8443",
    );
    desk.follow("drains.md", &[], ("", &|| ()));
    let crds = desk.clusters[0].crds();
    // Nobody answers at the load balancer's address here; the tests of `tests/e2e/gateway_api.rs` call a Gateway.
    let replaced = [
        (
            "https://github.com/kubernetes-sigs/gateway-api/releases/download/v1.6.3/standard-install.yaml",
            path(&crds),
        ),
        ("openssl s_client", ": openssl s_client"),
    ];
    let install = || {
        desk.run("helm install isthmus charts/isthmus -n istio-system --set image.repository=r/isthmus");
    };
    desk.follow("gateway-api.md", &replaced, ("Five commands", &install));
    let route = desk.run("kubectl get tlsroute web -n shop -o jsonpath={.spec.hostnames[0]}");
    assert_eq!(route, "web.example.com");
}

/// The YAML blocks of the documents are valid values of the chart.
#[test]
fn the_documents_values_are_values_of_the_chart() {
    let Some(helm) = Helm::installed() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut checked = 0;
    for document in ["kubernetes.md", "replace-istio-gateway.md", "ambient.md"] {
        // A block that begins with `# isthmus.yaml` is a config, not values of the chart.
        let is_values =
            |block: &&Block| block.language() == "yaml" && !block.text.starts_with("# isthmus.yaml\n");
        for block in blocks(document, &[]).iter().filter(is_values) {
            let file = folder.path().join("values.yaml");
            std::fs::write(&file, &block.text).expect("written");
            let image = ["--set", "image.repository=r/isthmus"];
            helm.template(Some(&file), &image)
                .unwrap_or_else(|error| panic!("{document}: {}{error}", block.text));
            checked += 1;
        }
    }
    assert!(checked > 0);
}
