//! The objects that the chart renders: golden files, similarity to Istio's own chart, the config, permissions and hardening.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::gateway::BINARY;
use crate::support::helm::{Helm, NAMESPACE, RELEASE, chart, object, of_kind, path, said, sets};
use crate::support::pki::PKI;
use crate::support::yaml;

/// Arguments with which Helm renders the objects for the Prometheus operator.
const OPERATOR: [&str; 2] = ["--api-versions", "monitoring.coreos.com/v1"];
/// Arguments that set an image, which every release needs.
const IMAGE: [&str; 2] = ["--set", "image.repository=registry.example/isthmus"];

fn set(name: &str) -> std::path::PathBuf {
    let (_, file) = sets().into_iter().find(|(set, _)| set == name).expect("a set");
    file
}

#[test]
fn the_linter_finds_nothing() {
    let Some(helm) = Helm::installed() else { return };
    let chart = chart();
    helm.run(&["lint", "--strict", path(&chart)]).expect("without values");
    for (name, file) in sets() {
        let linted = helm.run(&["lint", "--strict", path(&chart), "--values", path(&file)]);
        linted.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// With `ISTHMUS_BLESS=1`, this test rewrites the golden files.
#[test]
fn every_set_of_values_renders_its_golden_file() {
    let Some(helm) = Helm::installed() else { return };
    assert_eq!(sets().len(), 8);
    for (name, file) in sets() {
        let rendered =
            helm.template(Some(&file), &OPERATOR).unwrap_or_else(|error| panic!("{name}: {error}"));
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chart/golden").join(format!("{name}.yaml"));
        if std::env::var_os("ISTHMUS_BLESS").is_some() {
            std::fs::write(&golden, &rendered).expect("written");
        }
        let wanted = std::fs::read_to_string(&golden).expect("a golden file; ISTHMUS_BLESS=1 writes it");
        if let Some((at, (is, was))) =
            rendered.lines().zip(wanted.lines()).enumerate().find(|(_, (is, was))| is != was)
        {
            panic!("{name}: line {}: {is:?}, golden: {was:?}; ISTHMUS_BLESS=1 takes it", at + 1);
        }
        assert_eq!(rendered.len(), wanted.len(), "{name}: one is the beginning of the other");
    }
}

/// Clouds, istiods and dashboards recognise the gateway by its names, labels, ports and the order of its ports.
#[test]
fn a_network_gateway_is_called_as_that_of_istios_chart() {
    let Some(helm) = Helm::installed() else { return };
    let objects = helm.objects(Some(&set("1-drop-in")), &[]);
    let service = object(&objects, "Service", RELEASE);
    assert_eq!(service["metadata"]["namespace"], NAMESPACE);
    let labels = &service["metadata"]["labels"];
    assert_eq!(labels["app"], "istio-eastwestgateway");
    assert_eq!(labels["istio"], "eastwestgateway");
    assert_eq!(labels["istio.io/dataplane-mode"], "none");
    assert_eq!(labels["topology.istio.io/network"], "net-east");
    assert_eq!(service["spec"]["type"], "LoadBalancer");
    let port =
        |name: &str, port: u16| json!({"name": name, "port": port, "targetPort": port, "protocol": "TCP"});
    let ports = [
        port("status-port", 15021),
        port("tls", 15443),
        port("tls-istiod", 15012),
        port("tls-webhook", 15017),
    ];
    assert_eq!(service["spec"]["ports"], json!(ports));
    assert_eq!(
        service["spec"]["selector"],
        json!({"app": "istio-eastwestgateway", "istio": "eastwestgateway"})
    );

    let deployment = object(&objects, "Deployment", RELEASE);
    assert_eq!(deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]);
    let pod = &deployment["spec"]["template"];
    let labels = &pod["metadata"]["labels"];
    assert_eq!(
        (&labels["app"], &labels["istio"]),
        (&json!("istio-eastwestgateway"), &json!("eastwestgateway"))
    );
    assert_eq!(labels["topology.istio.io/network"], "net-east");
    assert_eq!(labels["sidecar.istio.io/inject"], "false");
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations["prometheus.io/port"], "15020");
    assert_eq!(annotations["prometheus.io/path"], "/stats/prometheus");
    assert_eq!(annotations["prometheus.io/scrape"], "true");

    // Without the label on its Service, istiods do not see the gateway, but it is on its network all the same.
    let objects = helm.objects(Some(&set("1-drop-in")), &["--set", "service.advertise=false"]);
    assert!(
        object(&objects, "Service", RELEASE)["metadata"]["labels"]["topology.istio.io/network"].is_null()
    );
    assert_eq!(config_of(&objects, RELEASE)["node"]["network"], "${ISTIO_META_NETWORK:-net-east}");

    // HBONE comes last, so that the order of the other ports stays.
    let ambient = [&IMAGE[..], &["--set", "networkGateway=n,hbone.enabled=true"]].concat();
    let objects = helm.objects(None, &ambient);
    let ports = object(&objects, "Service", RELEASE)["spec"]["ports"].as_array().expect("ports").clone();
    assert_eq!(ports.len(), 5);
    assert_eq!(ports[4], port("mesh", 15008));
}

#[test]
fn pods_keep_to_the_restricted_profile() {
    let Some(helm) = Helm::installed() else { return };
    for (name, file) in sets() {
        let objects = helm.objects(Some(&file), &OPERATOR);
        let pods = objects.iter().filter_map(pod_of);
        for spec in pods {
            let context = &spec["securityContext"];
            assert_eq!(context["runAsNonRoot"], true, "{name}");
            assert_eq!(
                (&context["runAsUser"], &context["runAsGroup"]),
                (&json!(65532), &json!(65532)),
                "{name}"
            );
            assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault", "{name}");
            assert_eq!(spec["enableServiceLinks"], false, "{name}");
            let containers = ["containers", "initContainers"];
            for container in containers.iter().filter_map(|key| spec[*key].as_array()).flatten() {
                let context = &container["securityContext"];
                let wanted = json!({
                    "allowPrivilegeEscalation": false,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": true,
                });
                assert_eq!(*context, wanted, "{name}");
                assert!(container["resources"]["limits"]["memory"].is_string(), "{name}");
                assert!(container["resources"]["limits"]["cpu"].is_null(), "{name}");
            }
        }
    }
    // The pod sets a sysctl only if a port below 1024 is requested. The restricted security profile allows this sysctl.
    let low = "service.extraPorts[0].name=https,service.extraPorts[0].port=443";
    let objects = helm.objects(None, &[&IMAGE[..], &["--set", low]].concat());
    let spec = pod_of(object(&objects, "Deployment", RELEASE)).expect("a pod");
    assert_eq!(
        spec["securityContext"]["sysctls"],
        json!([{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}])
    );
    let high = format!("{low},service.extraPorts[0].targetPort=15443");
    let objects = helm.objects(None, &[&IMAGE[..], &["--set", &high]].concat());
    assert!(
        pod_of(object(&objects, "Deployment", RELEASE)).expect("a pod")["securityContext"]["sysctls"]
            .is_null()
    );
}

fn pod_of(object: &Value) -> Option<&Value> {
    match object["kind"].as_str()? {
        "Deployment" | "DaemonSet" => Some(&object["spec"]["template"]["spec"]),
        "Pod" => Some(&object["spec"]),
        _ => None,
    }
}

#[test]
fn a_pod_is_given_the_time_that_draining_takes() {
    let Some(helm) = Helm::installed() else { return };
    let render = |more: &[&str]| helm.objects(None, &[&IMAGE[..], more].concat());
    for (more, wanted) in
        [(vec![], (15, 30)), (vec!["--set", "drain.delaySeconds=0,drain.timeoutSeconds=600"], (0, 600))]
    {
        let objects = render(&more);
        let (delay, timeout) = wanted;
        let spec = pod_of(object(&objects, "Deployment", RELEASE)).expect("a pod");
        assert_eq!(spec["terminationGracePeriodSeconds"], delay + timeout + 5);
        let config = config_of(&objects, RELEASE);
        assert_eq!(config["drain"], json!({"delay": format!("{delay}s"), "timeout": format!("{timeout}s")}));
    }
}

#[test]
fn threads_follow_the_cpu_request() {
    let Some(helm) = Helm::installed() else { return };
    let cases = [("100m", "1"), ("1", "1"), ("1500m", "2"), ("2.5", "3"), ("4", "4")];
    for (cpu, wanted) in cases {
        let request = format!("resources.requests.cpu={cpu}");
        let objects = helm.objects(None, &[&IMAGE[..], &["--set-string", &request]].concat());
        assert_eq!(config_of(&objects, RELEASE)["workers"].to_string(), wanted, "{cpu}");
    }
    for (workers, wanted) in [("auto", json!("auto")), ("7", json!(7))] {
        let objects = helm.objects(None, &[&IMAGE[..], &["--set", &format!("workers={workers}")]].concat());
        assert_eq!(config_of(&objects, RELEASE)["workers"], wanted);
    }
}

/// A change that a running gateway can apply does not restart its pods; any other change does.
#[test]
fn only_keys_that_need_a_restart_change_the_pods() {
    let Some(helm) = Helm::installed() else { return };
    let pods = |more: &str| {
        let objects = helm.objects(None, &[&IMAGE[..], &["--set-json", more]].concat());
        object(&objects, "Deployment", RELEASE)["spec"]["template"].clone()
    };
    let before = pods("config={}");
    assert_eq!(pods(r#"exports=[{"services":["*.local"]}]"#), before);
    assert_eq!(pods(r#"config={"telemetry":{"log":{"level":"debug"}}}"#), before);
    assert_ne!(pods(r#"config={"telemetry":{"log":{"format":"json"}}}"#), before);
    assert_ne!(pods(r#"config={"admin":"off"}"#), before);
    assert_ne!(pods("workers=3"), before);
}

fn sorted(mut rules: Vec<String>) -> Vec<String> {
    rules.sort();
    rules
}

/// Returns the rules of a Role or ClusterRole, each as `group/resource verbs` and the names of its objects.
fn rules(role: &Value) -> Vec<String> {
    let texts = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    let mut all = Vec::new();
    for rule in role["rules"].as_array().expect("rules") {
        let names = texts(&rule["resourceNames"]).join(",");
        let names = if names.is_empty() { names } else { format!(" {names}") };
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                all.push(format!("{group}/{resource} {}{names}", texts(&rule["verbs"]).join(",")));
            }
        }
    }
    sorted(all)
}

#[test]
fn a_spread_without_a_selector_counts_the_pods_of_the_release() {
    let Some(helm) = Helm::installed() else { return };
    let spread = r#"topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"ScheduleAnyway"}]"#;
    let objects = helm.objects(None, &[&IMAGE[..], &["--set-json", spread]].concat());
    let deployment = object(&objects, "Deployment", RELEASE);
    let pod = pod_of(deployment).expect("a pod");
    let selector = &pod["topologySpreadConstraints"][0]["labelSelector"];
    assert!(selector["matchLabels"].is_object(), "{selector}");
    assert_eq!(*selector, deployment["spec"]["selector"]);
}

#[test]
fn each_right_comes_with_its_feature_alone() {
    let Some(helm) = Helm::installed() else { return };
    const READ: &str = "list,watch";
    let read = |resource: &str| format!("{resource} {READ}");
    let mcs = ["serviceexports", "serviceimports"].map(|kind| read(&format!("multicluster.x-k8s.io/{kind}")));
    let services = ["/pods", "/services", "discovery.k8s.io/endpointslices"].map(read);
    let base = sorted([&["/namespaces", "/nodes"].map(read)[..], &services, &mcs].concat());
    let render = |more: &[&str]| helm.objects(None, &[&IMAGE[..], more].concat());
    let cluster_role = format!("{RELEASE}-{NAMESPACE}");
    // Without Kubernetes there are no permissions, and no token is mounted.
    let objects = render(&["--set", "kubernetes.enabled=false"]);
    for kind in ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"] {
        assert!(of_kind(&objects, kind).is_empty(), "{kind}");
    }
    let pod = pod_of(object(&objects, "Deployment", RELEASE)).expect("a pod");
    assert_eq!(pod["automountServiceAccountToken"], false);
    // The smallest registry needs only these rules.
    let none = "kubernetes.gateways.enabled=false";
    let objects = render(&["--set", none]);
    assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), base);
    assert!(of_kind(&objects, "Role").is_empty());
    // Each feature adds its own rules.
    let features: [(&str, &[&str], &[&str], &str); 5] = [
        ("kubernetes.gateways.enabled=true", &["gateway.networking.k8s.io/gateways"], &[], ""),
        (
            "kubernetes.destinationRules=true",
            &[
                "networking.istio.io/destinationrules",
                "networking.istio.io/serviceentries",
                "networking.istio.io/workloadentries",
                "security.istio.io/peerauthentications",
            ],
            &[],
            "",
        ),
        (
            "kubernetes.serviceEntries=true",
            &["networking.istio.io/serviceentries", "networking.istio.io/workloadentries"],
            &[],
            "",
        ),
        ("kubernetes.meshConfig=true", &[], &["/configmaps get,list,watch istio"], "istio-system"),
        (
            "remoteClusters.watch.enabled=true,remoteClusters.watch.namespace=far",
            &[],
            &["/secrets list,watch"],
            "far",
        ),
    ];
    for (feature, added, role, namespace) in features {
        let objects = render(&["--set", &format!("{none},{feature}")]);
        let added: Vec<String> = added.iter().map(|kind| read(kind)).collect();
        let wanted = sorted([&base[..], &added].concat());
        assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), wanted, "{feature}");
        let roles = of_kind(&objects, "Role");
        assert_eq!(roles.iter().flat_map(|role| rules(role)).collect::<Vec<_>>(), role, "{feature}");
        assert!(roles.iter().all(|role| role["metadata"]["namespace"] == namespace), "{feature}");
    }
    // Writing the conditions of ServiceExports needs rules for their status, and for the Lease of the replica that writes them.
    let objects = render(&["--set", &format!("{none},kubernetes.serviceExports.conditions=true")]);
    let status = ["multicluster.x-k8s.io/serviceexports/status patch".to_owned()];
    assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), sorted([&base[..], &status].concat()));
    let leases = [
        "coordination.k8s.io/leases create",
        "coordination.k8s.io/leases get,update isthmus-service-exports",
    ];
    assert_eq!(rules(object(&objects, "Role", &format!("{RELEASE}-leader"))), leases);
    // The WDS server has the tokens of ztunnels reviewed, and reads all policies, waypoints and pods.
    let wds = r#"config.xds={"bind":"127.0.0.1:15010","wds":{"bind":"0.0.0.0:15012"}}"#;
    let mut of_wds = ["authorizationpolicies", "peerauthentications"]
        .map(|kind| read(&format!("security.istio.io/{kind}")))
        .to_vec();
    of_wds.extend(
        ["gatewayclasses", "gateways"].map(|kind| read(&format!("gateway.networking.k8s.io/{kind}"))),
    );
    of_wds.push("authentication.k8s.io/tokenreviews create".to_owned());
    let objects = render(&["--set", none, "--set-json", wds]);
    assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), sorted([&base[..], &of_wds].concat()));
    let objects = helm.objects(Some(&set("8-namespaced")), &["--set-json", wds]);
    let whole = ["/namespaces", "/nodes", "/pods"].map(read);
    assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), sorted([&whole[..], &of_wds].concat()));
    // So does writing ServiceImports, which also needs rules for the imports themselves.
    let objects = render(&["--set", &format!("{none},kubernetes.serviceImports.write=true")]);
    let imports = ["serviceimports get,create,patch,delete", "serviceimports/status patch"]
        .map(|rule| format!("multicluster.x-k8s.io/{rule}"));
    assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), sorted([&base[..], &imports].concat()));
    assert_eq!(
        rules(object(&objects, "Role", &format!("{RELEASE}-leader")))[1],
        "coordination.k8s.io/leases get,update isthmus-service-imports"
    );
    // EndpointSlices of these imports need a rule of their own.
    let both = "kubernetes.serviceImports.write=true,kubernetes.serviceImports.slices=true";
    let objects = render(&["--set", &format!("{none},{both}")]);
    let slices = ["discovery.k8s.io/endpointslices get,create,patch,delete".to_owned()];
    assert_eq!(
        rules(object(&objects, "ClusterRole", &cluster_role)),
        sorted([&base[..], &imports, &slices].concat())
    );
    // Derived Services need rules for Services and for their EndpointSlices.
    let both = "kubernetes.serviceImports.write=true,kubernetes.serviceImports.derivedServices=true";
    let objects = render(&["--set", &format!("{none},{both}")]);
    let derived = ["/services get,create,patch,delete".to_owned()];
    assert_eq!(
        rules(object(&objects, "ClusterRole", &cluster_role)),
        sorted([&base[..], &imports, &slices, &derived].concat())
    );
    // A GatewayClass needs rules for its objects and their status, and for the Lease of the replica that writes it.
    let objects = render(&["--set", &format!("{none},kubernetes.gatewayApi.class=isthmus")]);
    let group = "gateway.networking.k8s.io";
    let kinds = ["gatewayclasses", "gateways", "listenersets", "tlsroutes", "tcproutes"];
    let mut of_class: Vec<_> = kinds.iter().map(|kind| format!("{group}/{kind} get")).collect();
    of_class.extend(kinds.iter().map(|kind| read(&format!("{group}/{kind}"))));
    of_class.extend(kinds.iter().map(|kind| format!("{group}/{kind}/status patch")));
    of_class.push(read("gateway.networking.k8s.io/referencegrants"));
    of_class.push("/events create,patch".to_owned());
    assert_eq!(
        rules(object(&objects, "ClusterRole", &cluster_role)),
        sorted([&base[..], &of_class].concat())
    );
    assert_eq!(
        rules(object(&objects, "Role", &format!("{RELEASE}-leader")))[1],
        "coordination.k8s.io/leases get,update isthmus-gateway-api-isthmus"
    );
    assert_eq!(
        object(&objects, "GatewayClass", "isthmus")["spec"]["controllerName"],
        "isthmus.io/gateway-controller"
    );
    // If the values name the namespaces, Roles replace the ClusterRole: they permit reading the objects of these namespaces
    // alone, and Gateways in those that the values search for gateways; with an HBONE listener in all, as waypoints.
    let without =
        helm.objects(Some(&set("8-namespaced")), &["--set", "hbone.enabled=false,identity.source=none"]);
    assert_eq!(rules(object(&without, "ClusterRole", &cluster_role)), ["/namespaces", "/nodes"].map(read));
    let objects = helm.objects(Some(&set("8-namespaced")), &[]);
    let of_gateways = ["gatewayclasses", "gateways"].map(|kind| read(&format!("{group}/{kind}")));
    let of_cluster = [&["/namespaces", "/nodes"].map(read)[..], &of_gateways].concat();
    assert_eq!(rules(object(&objects, "ClusterRole", &cluster_role)), of_cluster);
    let roles = |objects: &[Value]| -> Vec<_> {
        let roles = of_kind(objects, "Role");
        let namespace =
            |role: &Value| role["metadata"]["namespace"].as_str().expect("a namespace").to_owned();
        roles.iter().map(|role| (namespace(role), rules(role))).collect()
    };
    let of = |part: Vec<String>, whole: Vec<String>| {
        let (part, whole) = (sorted(part), sorted(whole));
        [(NAMESPACE.to_owned(), part), ("pay".to_owned(), whole.clone()), ("shop".to_owned(), whole)]
    };
    let gateways = ["gateway.networking.k8s.io/gateways"].map(read);
    let part = [&services[..], &gateways].concat();
    assert_eq!(roles(&without), of(part.clone(), [&part[..], &mcs].concat()));
    assert_eq!(roles(&objects), of(services.to_vec(), [&services[..], &mcs].concat()));
    // The account for other clusters can read neither Secrets nor ConfigMaps.
    let objects = helm.objects(Some(&set("6-reader")), &[]);
    let reader = rules(object(&objects, "ClusterRole", &format!("isthmus-reader-{NAMESPACE}")));
    assert!(reader.iter().all(|rule| rule.ends_with(READ)), "{reader:?}");
    assert!(
        !reader.iter().any(|rule| rule.contains("/secrets") || rule.contains("/configmaps")),
        "{reader:?}"
    );
    assert!(base.iter().all(|rule| reader.contains(rule)), "{reader:?}");
    assert!(of_kind(&objects, "Deployment").is_empty());
}

/// Returns the config of a role, as the chart writes it into the ConfigMap.
fn config_of(objects: &[Value], name: &str) -> Value {
    yaml::document(object(objects, "ConfigMap", name)["data"]["isthmus.yaml"].as_str().expect("a text"))
}

#[test]
fn the_gateway_takes_every_config_that_the_chart_writes() {
    let Some(helm) = Helm::installed() else { return };
    let mut configs = 0;
    for (name, file) in sets() {
        let objects = helm.objects(Some(&file), &OPERATOR);
        for map in
            of_kind(&objects, "ConfigMap").into_iter().filter(|map| map["data"]["isthmus.yaml"].is_string())
        {
            validate(&map["data"]).unwrap_or_else(|error| panic!("{name}: {error}"));
            configs += 1;
        }
    }
    // There are as many configs as sets of values: one set has two roles, and one has none.
    assert_eq!(configs, 8);
}

/// Validates a config in a folder that has the same files as a pod.
pub(crate) fn validate(data: &Value) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = PKI.issue(&[], Some("spiffe://cluster.local/ns/istio-system/sa/istio-eastwestgateway"));
    let files = [
        ("istio/root-cert.pem", PKI.ca_pem()),
        ("tokens/istio-token", "token".to_owned()),
        ("isthmus/identity/tls.crt", issued.certificate_pem),
        ("isthmus/identity/tls.key", issued.key_pem),
        ("isthmus/identity/ca.crt", PKI.ca_pem()),
    ];
    for (name, text) in files {
        let file = folder.path().join(name);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        std::fs::write(file, text).expect("written");
    }
    for (name, text) in data.as_object().expect("files") {
        let text = text.as_str().expect("a text").replace("/var/run/secrets", path(folder.path()));
        std::fs::write(folder.path().join(name), known(&text)).expect("written");
    }
    let mut command = Command::new(BINARY);
    command.args(["validate", "isthmus.yaml"]).current_dir(folder.path()).env("LEVEL", "info");
    let output = command.output().expect("the binary runs");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    said(output).map_err(|error| format!("{stdout}{error}"))?;
    // Warnings about what only a cluster knows are expected: registries that are not read offline, and names.
    let known = ["does not read Kubernetes", " does not resolve"];
    let is_other =
        |line: &&str| line.starts_with("warning") && !known.iter().any(|known| line.contains(known));
    stdout.lines().find(is_other).map_or(Ok(()), |warning| Err(warning.to_owned()))
}

/// Returns the config without registries of a kind that this binary does not know.
fn known(text: &str) -> String {
    let schema = Command::new(BINARY).arg("schema").output().expect("the binary runs");
    let unknown = "kubernetesClusters";
    if String::from_utf8_lossy(&schema.stdout).contains(unknown) || !text.contains(unknown) {
        return text.to_owned();
    }
    crate::support::skip("chart: this binary has no `kubernetesClusters`; their config is not checked");
    let mut config = yaml::document(text);
    let registries = config.get_mut("registries").and_then(Value::as_array_mut).expect("registries");
    registries.retain(|registry| registry.get(unknown).is_none());
    config.to_string()
}

#[test]
fn notes_say_what_to_do_next() {
    let Some(helm) = Helm::installed() else { return };
    let chart = chart();
    let notes = |more: &[&str]| {
        let install = ["install", RELEASE, path(&chart), "--namespace", NAMESPACE, "--dry-run=client"];
        let told = helm.run(&[&install[..], more].concat()).expect("rendered");
        told.split_once("NOTES:").expect("notes").1.to_owned()
    };
    let told = notes(&IMAGE);
    for next in
        ["rollout status deployment/istio-eastwestgateway", "-- /usr/bin/isthmus status", "get service"]
    {
        assert!(told.contains(&format!("kubectl -n {NAMESPACE} ")) && told.contains(next), "{told}");
    }
    assert!(told.contains("Nothing can be reached through the gateway yet"), "{told}");
    assert!(told.contains("networkGateway is empty"), "{told}");
    let told = notes(&["--values", path(&set("7-everything"))]);
    assert!(
        !told.contains("Nothing can be reached") && told.contains("has no kinds of the Prometheus operator"),
        "{told}"
    );
    assert!(
        told.contains("deployment/istio-eastwestgateway-aggregator -- /usr/bin/isthmus get clients"),
        "{told}"
    );
}
