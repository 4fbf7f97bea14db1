//! Tests of `registries` in etcd and Kubernetes.

use super::bad::refused_with;
use super::*;
use isthmus_aggregator::spec::etcd::{EtcdSpec, PREFIX};
use isthmus_aggregator::spec::kubernetes::Knows;
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_model::endpoint::Labels;
use isthmus_tls::client::CertificateFiles;

fn etcd(registry: &RegistrySpec) -> &EtcdSpec {
    match &registry.kind {
        RegistryKind::Etcd(etcd) => etcd,
        other => panic!("{other:?}"),
    }
}

fn registries(lines: &str) -> Vec<RegistrySpec> {
    loaded(&format!("listen: ':15443'\n{lines}\n")).registries
}

#[test]
fn a_registry_in_etcd_has_members_files_and_a_user() {
    let all = registries(
        "registries:\n- etcd:\n    endpoints: ['https://etcd-0.example:2379', 'https://[fd00::1]:2380']\n    prefix: /p/\n    \
         cluster: west\n    network: net-west\n    tls: {roots: ca.pem, certificate: a.pem, key: /k.pem}\n    user: isthmus\n    \
         passwordFile: secret\n  allow: {services: ['*.mesh']}\n- etcd: {endpoints: ['http://localhost:2379'], cluster: east}\n\
         - etcd: {endpoints: ['http://localhost:2379'], prefix: other/, cluster: east}\n",
    );
    let [first, second, third] = all.as_slice() else { panic!("three") };
    assert_eq!((&*first.name, first.cluster.as_str()), ("https://etcd-0.example:2379/p/", "west"));
    assert_eq!((first.network.as_str(), first.scope.services.len()), ("net-west", 1));
    let spec = etcd(first);
    let urls: Vec<String> = spec.endpoints.iter().map(ToString::to_string).collect();
    assert_eq!(urls, ["https://etcd-0.example:2379", "https://[fd00::1]:2380"]);
    let tls = spec.tls.as_ref().expect("files");
    assert!(tls.roots.is_absolute() && tls.roots.ends_with("ca.pem"));
    let Some(CertificateFiles { chain, key }) = &tls.certificate else { panic!("a certificate") };
    assert!(chain.is_absolute() && chain.ends_with("a.pem") && key == Path::new("/k.pem"));
    let login = spec.login.as_ref().expect("a user");
    assert!(login.user == "isthmus" && login.password.is_absolute() && login.password.ends_with("secret"));
    assert_eq!((&*second.name, &*etcd(second).prefix), ("http://localhost:2379/isthmus/services/", PREFIX));
    assert_eq!((etcd(second).tls.is_none(), etcd(second).login.is_none()), (true, true));
    assert_eq!(&*third.name, "http://localhost:2379/other/");
}

#[test]
fn bad_registries_in_etcd() {
    let bad = |keys: &str, wanted: &[&str]| {
        refused_with(&format!("registries: [{{etcd: {{cluster: c, {keys}}}}}]"), wanted)
    };
    bad("user: a, passwordFile: b", &[":2:21: registries[0].etcd: the key endpoints is missing"]);
    bad("endpoints: []", &[":2:45: registries[0].etcd.endpoints: found an empty list"]);
    bad(
        "endpoints: ['http://etcd-0.example:2379']",
        &[
            ":2:46: registries[0].etcd.endpoints[0]: found \"http://etcd-0.example:2379\": plain TCP to another host…(did you mean \
             \"https://etcd-0.example:2379\"?)",
        ],
    );
    bad(
        "endpoints: ['127.0.0.1:2379']",
        &[
            ":2:46: registries[0].etcd.endpoints[0]: found \"127.0.0.1:2379\": it does not begin with https:// or http://",
        ],
    );
    bad(
        "endpoints: ['http://127.0.0.1']",
        &[
            ":2:46: registries[0].etcd.endpoints[0]: found…it has no port…(did you mean \"http://127.0.0.1:2379\"?)",
        ],
    );
    bad(
        "endpoints: ['http://127.0.0.1:2379/']",
        &[
            ":2:46: registries[0].etcd.endpoints[0]: found…a slash at its end…(did you mean \"http://127.0.0.1:2379\"?)",
        ],
    );
    bad(
        "endpoints: ['https://etcd-0.example:2379']",
        &[":2:46: registries[0].etcd.endpoints[0]: found \"https://etcd-0.example:2379\", but no tls"],
    );
    bad(
        "endpoints: ['http://[::1]:2379'], tls: {roots: r}",
        &[":2:73: registries[0].etcd.tls: found tls, but all endpoints have http:// URLs"],
    );
    bad(
        "endpoints: ['https://a.test:1', 'http://[::1]:1'], tls: {roots: r}",
        &[":2:66: registries[0].etcd.endpoints[1]: found \"http://[::1]:1\", but other members use https://"],
    );
    bad(
        "endpoints: ['https://a.test:1'], tls: {roots: r, key: k}",
        &[":2:88: registries[0].etcd.tls.key: found key, but no certificate; expected both or neither"],
    );
    bad(
        "endpoints: ['http://[::1]:1'], user: a",
        &[":2:71: registries[0].etcd.user: found user, but no passwordFile"],
    );
    bad(
        "endpoints: ['http://[::1]:1'], prefix: /a",
        &[
            ":2:73: registries[0].etcd.prefix: found \"/a\": it has no slash at its end…(did you mean \"/a/\"?)",
        ],
    );
    bad(
        "endpoint: ['http://[::1]:1']",
        &[
            ":2:21: registries[0].etcd: the key endpoints is missing",
            ":2:34: registries[0].etcd.endpoint: found the unknown key…(did you mean \"endpoints\"?)",
        ],
    );
    refused_with("registries: [{}]", &[":2:14: registries[0]: found none of the keys file, etcd"]);
    refused_with(
        "registries: [{file: {path: a, cluster: c}, etcd: {endpoints: ['http://[::1]:1'], cluster: c}}]",
        &[":2:14: registries[0]: found more than one of the keys file, etcd"],
    );
    refused_with(
        "registries:\n- etcd: {endpoints: ['http://[::1]:1'], cluster: c}\n- etcd: {endpoints: ['http://[::1]:1'], cluster: d}\n",
        &[
            ":4:21: registries[1].etcd.endpoints: two registries have the name http://[::1]:1/isthmus/services/; first at c.yaml:3:21",
        ],
    );
}

#[test]
fn a_registry_that_writes_imports_knows_whether_it_reads_other_clusters() {
    let writers = |registries: &str| -> Vec<Option<(String, Knows)>> {
        let config = loaded(&format!(
            "listen: ':1'\nnode: {{name: a, namespace: gateways}}\nregistries: [{registries}]"
        ));
        let writer = |registry: &RegistrySpec| match &registry.kind {
            RegistryKind::Kubernetes(spec) => spec
                .import_writer
                .as_ref()
                .map(|writer| (format!("{}/{}", writer.namespace, writer.holder), writer.knows)),
            _ => None,
        };
        config.registries.iter().map(writer).collect()
    };
    let east = "{kubernetes: {cluster: east, kubeconfig: k, serviceImports: write}}";
    let is_written = |knows| Some(("gateways/a".to_owned(), knows));
    assert_eq!(writers(east), [is_written(Knows::OwnCluster)]);
    assert_eq!(
        writers(&format!("{east}, {{kubernetes: {{cluster: west, kubeconfig: k, serviceImports: off}}}}")),
        [is_written(Knows::OtherClusters), None]
    );
    assert_eq!(
        writers(&format!("{east}, {{kubernetesClusters: {{folder: f}}}}"))[0],
        is_written(Knows::OtherClusters)
    );
    for (column, key) in [(66, "slices"), (75, "derivedServices")] {
        refused_with(
            &format!("registries: [{{kubernetes: {{cluster: east, kubeconfig: k, {key}: true}}}}]"),
            &[&format!(
                ":2:{column}: registries[0].kubernetes.{key}: found true, which requires serviceImports: write"
            )],
        );
    }
    refused_with(
        "registries: [{kubernetes: {cluster: east, kubeconfig: k, serviceEntries: true, serviceImports: write, derivedServices: true}}]",
        &[
            ":2:120: registries[0].kubernetes.derivedServices: found true, which cannot be used with serviceEntries: a ServiceEntry of any \
           namespace could have the cluster IP of a derived Service",
        ],
    );
    let why = "serviceEntries: found true, which cannot be used with namespaces.only: whose an address is is known only if all \
               namespaces are read";
    for (at, kind, keys) in
        [(99, "kubernetes", "cluster: east, kubeconfig: k"), (88, "kubernetesClusters", "folder: f")]
    {
        refused_with(
            &format!("registries: [{{{kind}: {{{keys}, namespaces: {{only: [a]}}, serviceEntries: true}}}}]"),
            &[&format!(":2:{at}: registries[0].{kind}.{why}")],
        );
    }
}

#[test]
fn gateways_may_request_no_address_and_come_from_every_namespace_unless_the_config_says_so() {
    let read = |more: &str| {
        let text = format!(
            "registries: [{{kubernetes: {{cluster: a, gatewayApi: {{class: c, ports: [443]{more}}}}}}}]"
        );
        match &loaded(&text).registries[0].kind {
            RegistryKind::Kubernetes(spec) => spec.gateway_api.clone().expect("it is set"),
            other => panic!("{other:?}"),
        }
    };
    let plain = read("");
    assert!(plain.requestable.is_empty() && plain.from.takes("any", &Labels::default()));
    assert_eq!(plain.routes_per_namespace, 1_000);
    let set = read(
        ", requestable: [10.0.0.0/30], gatewaysFrom: {namespaces: [infra], labels: {team: core}}, routesPerNamespace: 5",
    );
    assert_eq!(set.requestable, ["10.0.0.0/30".parse().expect("a network")]);
    let core = Labels::from_iter([("team".into(), "core".into())]);
    assert!(set.from.takes("infra", &core) && !set.from.takes("shop", &core));
    assert!(!set.from.takes("infra", &Labels::default()));
    assert_eq!(set.routes_per_namespace, 5);
}
