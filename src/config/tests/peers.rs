//! Tests of `peers`.

use super::bad::{refused, refused_with};
use super::*;
use isthmus_aggregator::spec::RegistryKind;
use isthmus_settings::peer::PeerLimits;

/// The other keys that a config with `peers` needs.
const GATEWAY: &str = "listeners: [{name: l, bind: ':15443', protocol: auto}]\n\
                       identity: {files: {certificate: c.pem, key: k.pem}}\ntrust: [{trustDomain: cluster.local, roots: r.pem}, {trustDomain: other.mesh, roots: o.pem}]\n";

#[test]
fn a_peer_has_rules_limits_and_a_registry_of_its_own() {
    let config = loaded(&format!(
        "{GATEWAY}peers:\n- name: west\n  accept: true\n  identity: spiffe://west.example/ns/isthmus/sa/gateway\n  trust: w.pem\n  \
         from: [203.0.113.0/24]\n  export: [{{services: ['*.shop.mesh'], except: [a.shop.mesh], as: '{{service}}.{{namespace}}.east.global'}}]\n  \
         import: [{{services: ['*.pay.west.global'], as: '{{service}}.pay.here', limit: 10}}]\n  staleAfter: 1m\n  \
         limits: {{connections: 7}}\n- name: north\n  dial: ['gw.north.example:15443', '10.0.0.2:443']\n"
    ));
    let [west, north] = config.policy.peers.as_slice() else { panic!("two") };
    let who = west.who.as_ref().expect("an identity");
    assert_eq!((who.trust_domain.as_str(), who.alias.as_str()), ("west.example", "west.example"));
    assert_eq!(west.limits, PeerLimits { connections: 7, ..PeerLimits::default() });
    let is_exported = |name: &str| {
        let name = isthmus_model::name::HostName::parse(name).expect("legal");
        west.export_of(&name, None).is_some()
    };
    assert!(is_exported("b.shop.mesh") && !is_exported("a.shop.mesh"));
    assert_eq!(west.import_of("x.pay.west.global").and_then(|rule| rule.limit), Some(10));
    assert_eq!((north.who.is_none(), north.limits), (true, PeerLimits::default()));
    let [of_west, of_north] = config.links.as_slice() else { panic!("two") };
    assert!(
        of_west.accept
            && of_west.dial.is_empty()
            && of_west.trust.as_ref().is_some_and(|path| path.is_absolute())
    );
    let dialled: Vec<String> = of_north.dial.iter().map(ToString::to_string).collect();
    assert_eq!(dialled, ["gw.north.example:15443", "10.0.0.2:443"]);
    let [trust] = config.identity.peers.as_slice() else { panic!("one") };
    assert_eq!(
        (&*trust.peer, trust.alias.as_str(), trust.roots == of_west.trust),
        ("west", "west.example", true)
    );
    let registries: Vec<&str> = config.registries.iter().map(|registry| &*registry.name).collect();
    assert_eq!(registries, ["peer/west", "peer/north"]);
    let RegistryKind::Peer(spec) = &config.registries[0].kind else { panic!("a peer") };
    assert_eq!((spec.stale_after.as_secs(), spec.expire_after.as_secs()), (60, 900));
}

#[test]
fn a_rule_joins_names_only_if_it_says_so_and_never_on_carriers() {
    let peer = |more: &str| {
        format!(
            "{GATEWAY}peers: [{{name: west, accept: true, import: [{{services: [a.west]}}, {{services: ['*'], merge: true}}]{more}}}]\n"
        )
    };
    let config = loaded(&peer(", carry: [fromPeer]"));
    let [west] = config.policy.peers.as_slice() else { panic!("one") };
    assert_eq!((west.joins("a.west"), west.joins("b.west")), (false, true));
    refused(
        &peer(", carry: [toPeer]"),
        &[
            ":4:…peers[0].import[1].merge: found true, but carry has toPeer, and a name on carriers has one owner",
        ],
    );
}

#[test]
fn offers_that_no_peer_can_call_are_warned_of() {
    let warned = |rest: &str| {
        let peers = "peers: [{name: west, accept: true, export: [{services: ['a.test']}]}, {name: north, accept: true}, \
                     {name: south, accept: true, from: [192.0.2.0/24], export: [{services: ['b.test']}]}]";
        let config = loaded(&format!("{GATEWAY}{peers}\n{rest}"));
        let told = config.warnings.iter().map(ToString::to_string);
        told.filter(|line| line.contains("the peer cannot call the services that it is offered"))
            .collect::<Vec<_>>()
    };
    let [told, of_south] = &warned("")[..] else { panic!("two warnings") };
    assert!(told.contains(": peers[0].export: "), "{told}");
    assert!(of_south.contains(": peers[2].export: "), "{of_south}");
    assert_eq!(warned("networks: {here: {cidrs: [10.0.0.0/8]}}").len(), 2);
    let told = warned("networks: {here: {gateways: [{address: 192.0.2.1, sniPort: 15443}]}}");
    assert!(
        told.len() == 1 && told[0].contains("list the addresses of the peer's callers in from"),
        "{told:?}"
    );
    assert_eq!(warned("networks: {here: {gateways: [{address: 192.0.2.1, hbonePort: 15008}]}}").len(), 0);
    assert_eq!(warned("registries: [{file: {path: r.yaml, cluster: c}}]").len(), 2);
    assert_eq!(warned("registries: [{kubernetes: {cluster: c, kubeconfig: k}}]").len(), 0);
}

#[test]
fn sources_that_belong_to_two_peers_are_warned_of() {
    let warned = |north: &str| {
        let peers = format!(
            "peers: [{{name: west, accept: true, from: [192.0.2.16/28]}}, {{name: north, accept: true, from: [{north}]}}]"
        );
        let config = loaded(&format!("{GATEWAY}{peers}\n"));
        let told = config.warnings.iter().map(ToString::to_string);
        told.filter(|line| line.contains("overlaps with `from` of the peer west")).collect::<Vec<_>>()
    };
    let told = warned("198.51.100.1/32, 192.0.2.24/29");
    assert!(told.len() == 1 && told[0].contains(": peers[1].from[1]: 192.0.2.24/29 overlaps"), "{told:?}");
    assert_eq!(warned("192.0.2.32/28"), Vec::<String>::new());
}

#[test]
fn no_registry_of_this_mesh_has_the_name_of_a_peer() {
    let config = loaded(&format!(
        "{GATEWAY}peers: [{{name: north, accept: true}}]\nregistries:\n- file: {{path: peer/north, cluster: c}}\n\
         - kubernetes: {{cluster: k, kubeconfig: k}}\n- file: {{path: kubernetes/k, cluster: d}}"
    ));
    let names: Vec<&str> = config.registries.iter().map(|registry| &*registry.name).collect();
    assert_eq!(names, ["./peer/north", "kubernetes/k", "./kubernetes/k", "peer/north"]);
    let bad = |registry: &str, wanted: &str| {
        let told =
            load_text(&format!("{GATEWAY}registries: [{registry}]")).err().unwrap_or_default().join("\n");
        assert!(told.contains(wanted), "{registry}\ngave\n{told}");
    };
    bad(
        "{file: {path: a.yaml, cluster: peer/north}}",
        "registries[0].file.cluster: found \"peer/north\", but names that begin with peer/ belong to peers",
    );
    bad("{file: {path: a.yaml, cluster: c, network: peer/north/n}}", "registries[0].file.network: found");
    bad(
        "{etcd: {endpoints: ['http://127.0.0.1:1'], prefix: /p/, cluster: peer/n}}",
        "registries[0].etcd.cluster: found",
    );
    bad("{kubernetes: {cluster: peer/n}}", "registries[0].kubernetes.cluster: found");
}

#[test]
fn bad_peers() {
    let bad = |peers: &str, wanted: &str| {
        let told = load_text(&format!("{GATEWAY}peers: [{peers}]")).err().unwrap_or_default().join("\n");
        assert!(told.contains(wanted), "{peers}\ngave\n{told}");
    };
    bad("{name: West}", "peers[0].name: found \"West\"");
    bad("{name: a}, {name: a}", "peers[1].name: two peers have the name a; first at");
    bad("{name: a, identity: 'spiffe://d/x', accept: true}", "peers[0]: found identity, but no trust");
    bad("{name: a, identity: 'spiffe://d/x', trust: t}", "peers[0]: found neither accept: true nor dial");
    bad(
        "{name: a, identity: 'spiffe://d/x', trustDomain: e, trust: t, accept: true}",
        "peers[0].identity: found \"spiffe://d/x\", which is not in the trustDomain e",
    );
    bad(
        "{name: a, identity: 'spiffe://cluster.local/x', trust: t, accept: true}",
        "peers[0].trustAlias: the trust domain cluster.local is that of this mesh",
    );
    bad(
        "{name: a, identity: 'spiffe://d/x', trust: t, accept: true}, {name: b, identity: 'spiffe://d/y', trust: t, accept: true}",
        "peers[1].trustAlias: two peers have the trust domain d",
    );
    bad(
        "{name: a, identity: 'spiffe://d/x', trustAlias: other.mesh, trust: t, accept: true}",
        "peers[0].trustAlias: the trust domain other.mesh also has roots in trust",
    );
    bad("{name: a, export: [{services: ['*'], as: '{name}.x'}]}", "peers[0].export[0].as: found");
    let names: Vec<String> = (0..=1_024).map(|number| format!("s{number}.west.global")).collect();
    bad(
        &format!(
            "{{name: a, import: [{{services: ['*.x.global']}}, {{services: [{}]}}]}}",
            names[1..].join(", ")
        ),
        "peers[0].import: found 1025 services in all rules, and a link takes at most 1024; use patterns such as \"*.west.global\"",
    );
    refused_with(
        "peers: [{name: a, accept: true}]",
        &[
            ":2:8: peers: found peers, but no identity",
            ":2:8: peers: found accept: true, but peers can connect only to a listener of protocol auto or hbone",
        ],
    );
}
