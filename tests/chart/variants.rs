//! Every way to use the chart, at a real API server: a table of values, of each of which the server checks all objects, and the program
//! the config.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::rendered::validate;
use crate::support::helm::{Helm, NAMESPACE, RELEASE, of_kind, path, sets};
use crate::support::kube::{self, Cluster, Options};
use crate::support::yaml;

/// The values that every variant has.
const BASE: &str = "image: {repository: registry.example/isthmus}\nnetworkGateway: net-east\ncluster: east\n\
                    exports: [{services: [\"*.shop.svc.cluster.local\"]}]\n";

/// The variants: what each is for, and its values beside [`BASE`].
const VARIANTS: [(&str, &str); 36] = [
    ("the defaults", ""),
    (
        "a DaemonSet that is replaced node by node",
        "kind: DaemonSet\nupdateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1, maxSurge: 0}}",
    ),
    ("a Deployment that is replaced at once", "updateStrategy: {type: Recreate}\nreplicaCount: 1"),
    (
        "a Deployment that surges",
        "updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 0, maxSurge: \"50%\"}}",
    ),
    ("a disruption budget by share", "replicaCount: 4\npodDisruptionBudget: {maxUnavailable: \"25%\"}"),
    ("no disruption budget", "podDisruptionBudget: {enabled: false}"),
    (
        "autoscaling",
        "autoscaling: {enabled: true, minReplicas: 2, maxReplicas: 6, targetCPUUtilizationPercentage: 60}",
    ),
    ("OpenShift", "podSecurityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}"),
    (
        "a user of one's own",
        "podSecurityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}",
    ),
    (
        "a claim for the state",
        "kind: Deployment\nreplicaCount: 1\nstate: {volume: {persistentVolumeClaim: {claimName: state}}}",
    ),
    (
        "a folder of the host for the state",
        "kind: DaemonSet\nstate: {volume: {hostPath: {path: /var/lib/isthmus, type: DirectoryOrCreate}}}",
    ),
    ("state in memory", "state: {volume: {emptyDir: {medium: Memory, sizeLimit: 64Mi}}}"),
    (
        "SPIRE over a folder of the host",
        "hbone: {enabled: true}\nidentity: {source: workloadApi, workloadApi: {volume: {hostPath: {path: /run/spire/sockets, type: Directory}}}}",
    ),
    ("SPIRE over its CSI driver", "hbone: {enabled: true}\nidentity: {source: workloadApi}"),
    (
        "a certificate of a Secret",
        "hbone: {enabled: true}\nidentity: {source: secret, secret: {name: gateway-tls}}",
    ),
    (
        "a certificate of istiod",
        "hbone: {enabled: true}\nidentity: {source: istioCa, istioCa: {address: \"https://istiod-canary.istio-system.svc:15012\", expirationSeconds: 3600}}",
    ),
    (
        "both listeners for some sources",
        "sni: {containerPort: 15444, alpn: [], from: [10.0.0.0/8]}\nhbone: {enabled: true, containerPort: 15018, from: [\"fd00::/8\"]}",
    ),
    (
        "HBONE alone with a Gateway for istiods",
        "sni: {enabled: false}\nhbone: {enabled: true}\ngatewayObject: {enabled: true, className: istio-remote, address: gw.example.com}",
    ),
    (
        "Gateways of the Gateway API",
        "kubernetes: {gatewayApi: {class: isthmus, ports: [443, 8443], addresses: [gw.example.com]}}",
    ),
    (
        "a pool of addresses for Gateways",
        "hostNetwork: true\nkubernetes: {gatewayApi: {class: internal, controllerName: example.com/internal, ports: [8443], pool: [192.0.2.0/28], requestable: [192.0.2.16/28]}}",
    ),
    (
        "Gateways of some namespaces that are reset",
        "kubernetes: {gatewayApi: {class: isthmus, gatewaysFrom: {namespaces: [shop], labels: {edge: \"true\"}}, refusal: reset}}",
    ),
    (
        "a second release",
        "name: edge-internal\nlabels: {app: edge-internal, istio: edge-internal}\nkubernetes: {gatewayApi: {class: edge-internal}}\nservice: {advertise: false}",
    ),
    (
        "ServiceEntries",
        "kubernetes: {serviceEntries: true, allow: {networks: [net-east, net-vm], addresses: [10.0.0.0/8]}}",
    ),
    (
        "all that Istio has",
        "kubernetes: {destinationRules: true, serviceEntries: true, meshConfig: true}\nistiod: {passthrough: true, service: istiod-1-30.istio-system.svc, from: [10.0.0.0/8]}",
    ),
    (
        "exports by mark",
        "kubernetes: {serviceExports: {conditions: true}}\nexports: [{services: [\"*.local\"], tls: own, marked: {serviceExport: true}}]",
    ),
    ("ServiceImports", "kubernetes: {serviceImports: {write: true}}"),
    (
        "ServiceImports with slices and Services",
        "kubernetes: {serviceImports: {write: true, slices: true, derivedServices: true}}",
    ),
    (
        "ServiceImports in some namespaces",
        "kubernetes: {network: net-east, namespaces: {only: [shop, pay]}, serviceImports: {write: true, derivedServices: true}}",
    ),
    (
        "namespaces by label, and exceptions",
        "kubernetes: {namespaces: {except: [kube-system], labels: {mesh: \"on\"}}, manualEndpoints: true, gateways: {enabled: false}}",
    ),
    (
        "a load balancer with all its settings",
        "service: {annotations: {a.example/type: nlb}, loadBalancerIP: 192.0.2.1, loadBalancerClass: example.com/lb, loadBalancerSourceRanges: [10.0.0.0/8], externalTrafficPolicy: Cluster, externalIPs: [192.0.2.7]}",
    ),
    ("node ports", "service: {type: NodePort, nodePorts: {tls: 31443, status-port: 31021}}"),
    (
        "an additional low port",
        "service: {extraPorts: [{name: https, port: 443, targetPort: 443}]}\nsni: {alpn: []}\nconfig: {listeners: [{name: https, bind: \":443\", protocol: sni}]}",
    ),
    (
        "no Kubernetes, no RBAC, no Service",
        "kubernetes: {enabled: false}\nrbac: {create: false}\nservice: {type: None}\nserviceAccount: {create: false, name: default}\ntests: {enabled: false}\nexports: []\nconfig: {routes: {api.example.com: [\"10.0.3.1:443\"]}}",
    ),
    (
        "remote clusters",
        "remoteClusters: {secrets: [west], watch: {enabled: true, namespace: far}}\nvalidateConfig: true",
    ),
    (
        "both roles behind network policies",
        "roles: {gateway: true, aggregator: true}\naggregator: {replicaCount: 3, workers: 2, xds: {address: \"[::]\", clients: [{identities: [\"spiffe://cluster.local/*\"], networks: [net-east]}]}, service: {type: NodePort}}\nnetworkPolicy: {enabled: true, xdsFrom: [{podSelector: {}}], egressCIDRs: [10.0.0.0/8], apiServer: {cidrs: [192.0.2.1/32]}}\nmonitoring: {dashboard: {enabled: true}}",
    ),
    (
        "pods with further volumes, variables and places",
        "volumes: [{name: routes, configMap: {name: routes, optional: true}}]\nvolumeMounts: [{name: routes, mountPath: /etc/routes, readOnly: true}]\nenv: {REGION: east}\nnodeSelector: {pool: edge}\ntolerations: [{key: edge, operator: Exists}]\naffinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 1, preference: {matchExpressions: [{key: a, operator: Exists}]}}]}}\ntopologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]\npodLabels: {team: mesh}\nprobes: {startup: {failureThreshold: 300}}\nextraObjects: [{apiVersion: v1, kind: ConfigMap, metadata: {name: extra, namespace: istio-system}, data: {a: b}}]",
    ),
];

/// Returns the name of every set of values, those of the chart's folder `ci` and the variants, with its files.
fn all_sets(folder: &Path) -> Vec<(String, Vec<PathBuf>)> {
    let written = |name: &str, text: &str| {
        let file = folder.join(name);
        std::fs::write(&file, text).expect("written");
        file
    };
    let base = written("base.yaml", BASE);
    let variants = VARIANTS.iter().enumerate().map(|(at, (name, values))| {
        ((*name).to_owned(), vec![base.clone(), written(&format!("{at}.yaml"), values)])
    });
    sets().into_iter().map(|(name, file)| (name, vec![file])).chain(variants).collect()
}

#[test]
fn the_api_server_takes_every_set_of_values() {
    let (Some(helm), Some(rig)) = (Helm::installed(), kube::installed()) else { return };
    let cluster = Cluster::start(&rig, "east", &Options::default());
    cluster.install_crds();
    for namespace in [NAMESPACE, "shop", "pay", "far"] {
        cluster.namespace(namespace, &json!({}));
    }
    cluster.namespace("restricted", &json!({"pod-security.kubernetes.io/enforce": "restricted"}));
    let server = cluster.admin();
    let files = tempfile::tempdir().expect("a folder");
    for (name, values) in all_sets(files.path()) {
        let mut objects = render(&helm, &name, &values);
        for object in &mut objects {
            // Objects of the user's own may leave their namespace to Helm.
            if object["kind"] == "ConfigMap" && object["metadata"]["namespace"].is_null() {
                object["metadata"]["namespace"] = NAMESPACE.into();
            }
            server.judge(object).unwrap_or_else(|error| panic!("{name}: {object}: {error}"));
            keeps_to_the_restricted_profile(&cluster, &name, object);
        }
        let maps = of_kind(&objects, "ConfigMap").into_iter();
        let configs: Vec<&Value> =
            maps.map(|map| &map["data"]).filter(|data| data["isthmus.yaml"].is_string()).collect();
        let workloads = of_kind(&objects, "Deployment").len() + of_kind(&objects, "DaemonSet").len();
        assert_eq!(configs.len(), workloads, "{name}: each workload has a config");
        for config in configs {
            validate(config).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

/// Returns the objects of a set of values.
fn render(helm: &Helm, name: &str, values: &[PathBuf]) -> Vec<Value> {
    let values: Vec<&str> = values.iter().flat_map(|file| ["--values", path(file)]).collect();
    let rendered = helm.template(None, &values).unwrap_or_else(|error| panic!("{name}: {error}"));
    let objects = yaml::documents(&rendered);
    assert!(!objects.is_empty(), "{name}");
    objects
}

#[test]
fn no_account_has_a_right_twice() {
    let Some(helm) = Helm::installed() else { return };
    let files = tempfile::tempdir().expect("a folder");
    for (name, values) in all_sets(files.path()) {
        let objects = render(&helm, &name, &values);
        let bindings = [of_kind(&objects, "ClusterRoleBinding"), of_kind(&objects, "RoleBinding")].concat();
        // Those of the whole cluster come first. They hold in every namespace.
        let mut of_accounts = BTreeSet::new();
        for binding in bindings {
            let (role, account) = (&binding["roleRef"], binding["subjects"][0]["name"].to_string());
            let namespace = &binding["metadata"]["namespace"];
            let bound = of_kind(&objects, role["kind"].as_str().expect("a kind")).into_iter().find(|found| {
                found["metadata"]["name"] == role["name"] && found["metadata"]["namespace"] == *namespace
            });
            for right in rights(bound.expect("the role")) {
                let everywhere = (account.clone(), Value::Null.to_string(), right.clone());
                assert!(
                    !of_accounts.contains(&everywhere),
                    "{name}: {account} has {right} in the ClusterRole"
                );
                let is_new = of_accounts.insert((account.clone(), namespace.to_string(), right.clone()));
                assert!(is_new, "{name}: {account} has {right} twice in {namespace}");
            }
        }
    }
}

/// Returns the rights of a Role or ClusterRole, each with one verb.
fn rights(role: &Value) -> Vec<String> {
    let texts = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let mut all = Vec::new();
    for rule in role["rules"].as_array().expect("rules") {
        let names = rule["resourceNames"].to_string();
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                let verbs = texts(&rule["verbs"]);
                all.extend(verbs.iter().map(|verb| format!("{verb} {group}/{resource} {names}")));
            }
        }
    }
    all
}

/// Checks that Pod Security admission takes a pod of an object's template. It rejects pods, not Deployments.
fn keeps_to_the_restricted_profile(cluster: &Cluster, name: &str, object: &Value) {
    let spec = &object["spec"]["template"]["spec"];
    let volumes = spec["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
    // The profile has neither the host's network nor its folders, which only their own values ask for.
    let is_of_host =
        spec["hostNetwork"] == true || volumes.iter().any(|volume| volume["hostPath"].is_object());
    if spec["containers"].is_null() || is_of_host {
        return;
    }
    let metadata = json!({"name": RELEASE, "namespace": "restricted"});
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    // The values may name a priority class that this cluster does not have.
    pod["spec"].as_object_mut().expect("a spec").remove("priorityClassName");
    cluster.admin().judge(&pod).unwrap_or_else(|error| panic!("{name}: {error}"));
    pod["spec"]["hostPID"] = true.into();
    let refused = cluster.admin().judge(&pod).expect_err("the profile is enforced");
    assert!(refused.contains("violates PodSecurity"), "{refused}");
}
