//! A client's node: the network and cluster that it claims, and the rules for the claims.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use prost_types::value::Kind as ValueKind;

use super::incoming::Caller;
use isthmus_decisions::view::{ClientKind, Families, Tunnel, Viewer};
use isthmus_model::address::canonical_ip;
use isthmus_model::identity::IdentityPattern;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_proto::envoy::config::core::v3::Node;
use isthmus_settings::scope::admits;

/// The metadata key of the networks that a client asks to see.
const VIEW: &str = "REQUESTED_NETWORK_VIEW";
/// The metadata key of clients that accept listeners on virtual addresses.
const LISTENERS: &str = "ISTHMUS_LISTENERS";
/// The largest length of a text of a node, in bytes.
const TEXT_BYTES_MAX: usize = 512;
/// The largest number of networks in `REQUESTED_NETWORK_VIEW`.
const SEES_MAX: usize = 64;

/// The parts of a client's node that the server keeps. Envoy also sends hundreds of extensions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// The id of the node.
    pub id: String,
    /// The user agent and its version.
    pub user_agent: String,
    /// The viewer that the node describes.
    pub viewer: Viewer,
    /// True if the client accepts listeners on virtual addresses.
    pub takes_listeners: bool,
}

/// A rule for the networks and clusters that some clients may claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// The identities of the clients that the rule applies to, as in their certificates; empty: any client, also one without a
    /// certificate.
    pub identities: Vec<IdentityPattern>,
    /// The source addresses of the clients that the rule applies to; empty: any.
    pub cidrs: Vec<IpNet>,
    /// Networks that these clients may claim; `None`: any.
    pub networks: Option<Vec<Network>>,
    /// Clusters that these clients may claim; `None`: any.
    pub clusters: Option<Vec<ClusterId>>,
}

impl ClientRule {
    /// Returns true if the rule lets the client claim the network and the cluster of this viewer.
    fn allows(&self, caller: &Caller, viewer: &Viewer) -> bool {
        let is_one = |own| self.identities.iter().any(|pattern| pattern.matches(own));
        (self.identities.is_empty() || caller.identity.as_ref().is_some_and(is_one))
            && admits(&self.cidrs, caller.peer.ip())
            && self.networks.as_ref().is_none_or(|networks| networks.contains(&viewer.network))
            && self.clusters.as_ref().is_none_or(|clusters| clusters.contains(&viewer.cluster))
    }
}

/// A claim that no rule allows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{who} may not claim network {network:?} and cluster {cluster:?}: no rule of {rules} allows it")]
pub struct Denied {
    /// The client's identity, or its address.
    pub who: String,
    /// The network that the client claims.
    pub network: String,
    /// The cluster that the client claims.
    pub cluster: String,
    /// The config key of the rules.
    pub rules: &'static str,
}

/// The reason why a node is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeFault {
    /// A text is too long.
    #[error("the {0} of the node has more than {TEXT_BYTES_MAX} bytes")]
    TooLong(&'static str),
    /// The list of networks is too long. Without its end, the client would miss endpoints.
    #[error("the {VIEW} of the node has more than {SEES_MAX} networks")]
    TooManyNetworks,
}

impl NodeInfo {
    /// Parses a node.
    pub fn of(node: &Node) -> Result<Self, NodeFault> {
        for key in ["NETWORK", "CLUSTER_ID"] {
            if metadata_text(node, key).len() > TEXT_BYTES_MAX {
                return Err(NodeFault::TooLong(key));
            }
        }
        if metadata_text(node, VIEW).split(',').any(|network| network.len() > TEXT_BYTES_MAX) {
            return Err(NodeFault::TooLong(VIEW));
        }
        let text = |key| metadata_text(node, key);
        let list = |key| text(key).split(',').map(str::trim).filter(|item| !item.is_empty());
        let sees: BTreeSet<&str> = list(VIEW).collect();
        if sees.len() > SEES_MAX {
            return Err(NodeFault::TooManyNetworks);
        }
        let client =
            if node.user_agent_name.starts_with("gRPC") { ClientKind::Grpc } else { ClientKind::Envoy };
        Ok(Self {
            id: beginning_of(&node.id, TEXT_BYTES_MAX),
            user_agent: beginning_of(&node.user_agent_name, TEXT_BYTES_MAX),
            takes_listeners: client == ClientKind::Envoy && is_set(node, LISTENERS),
            viewer: Viewer {
                tunnel: Tunnel::Sni,
                network: Network::new(text("NETWORK")),
                cluster: ClusterId::new(text("CLUSTER_ID")),
                families: families(list("INSTANCE_IPS").filter_map(|ip| ip.parse().ok())),
                client,
                sees: sees.into_iter().map(Network::new).collect(),
                zone: zone(node),
            },
        })
    }

    /// Returns an error unless a rule allows the claims of the client. `key` is the config key of the rules.
    pub fn check(&self, caller: &Caller, rules: &[ClientRule], key: &'static str) -> Result<(), Denied> {
        let viewer = &self.viewer;
        if rules.iter().any(|rule| rule.allows(caller, viewer)) {
            return Ok(());
        }
        let (network, cluster) = (viewer.network.to_string(), viewer.cluster.to_string());
        Err(Denied { who: caller.name(), network, cluster, rules: key })
    }
}

/// Returns the region and the zone of a node; nothing if they are too long.
fn zone(node: &Node) -> Locality {
    let Some(locality) = &node.locality else { return Locality::default() };
    let text = format!("{}/{}", locality.region, locality.zone);
    let is_short = text.len() <= TEXT_BYTES_MAX;
    Some(text).filter(|_| is_short).and_then(|text| Locality::parse(&text)).unwrap_or_default()
}

/// Returns the beginning of a text, at most `bytes_max` bytes.
pub fn beginning_of(text: &str, bytes_max: usize) -> String {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Returns a text of the metadata; empty if there is none.
pub fn metadata_text<'a>(node: &'a Node, key: &str) -> &'a str {
    let value = node.metadata.as_ref().and_then(|metadata| metadata.fields.get(key));
    match value.and_then(|value| value.kind.as_ref()) {
        Some(ValueKind::StringValue(text)) => text,
        _ => "",
    }
}

/// Returns true if a value of the metadata is the bool `true` or the text `"true"`.
fn is_set(node: &Node, key: &str) -> bool {
    let value = node.metadata.as_ref().and_then(|metadata| metadata.fields.get(key));
    match value.and_then(|value| value.kind.as_ref()) {
        Some(ValueKind::BoolValue(is_set)) => *is_set,
        Some(ValueKind::StringValue(text)) => text == "true",
        _ => false,
    }
}

/// Returns the address families of the client's addresses; both families if there are no usable addresses.
fn families(ips: impl Iterator<Item = IpAddr>) -> Families {
    let (mut v4, mut v6) = (false, false);
    for ip in ips.map(canonical_ip) {
        match ip {
            IpAddr::V4(_) => v4 = true,
            // A link-local address cannot reach a gateway.
            IpAddr::V6(ip) => v6 |= !ip.is_unicast_link_local(),
        }
    }
    match (v4, v6) {
        (true, false) => Families::V4,
        (false, true) => Families::V6,
        _ => Families::Both,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::SocketAddr;

    use prost_types::{Struct, Value};

    use super::*;
    use isthmus_model::identity::Identity;

    fn node(metadata: &[(&str, &str)]) -> Node {
        let fields = metadata.iter().map(|(key, value)| {
            let kind = Some(ValueKind::StringValue((*value).to_owned()));
            ((*key).to_owned(), Value { kind })
        });
        let metadata = Some(Struct { fields: fields.collect::<BTreeMap<_, _>>() });
        Node { id: "n".into(), user_agent_name: "envoy".into(), metadata, ..Node::default() }
    }

    #[test]
    fn metadata_says_who_asks() {
        let said = NodeInfo::of(&node(&[
            ("NETWORK", "east"),
            ("CLUSTER_ID", "c1"),
            ("REQUESTED_NETWORK_VIEW", "west, east,"),
            ("INSTANCE_IPS", "10.0.0.1,fe80::1"),
        ]))
        .expect("short");
        let expected = Viewer {
            tunnel: Tunnel::Sni,
            network: Network::new("east"),
            cluster: ClusterId::new("c1"),
            families: Families::V4,
            client: ClientKind::Envoy,
            sees: [Network::new("east"), Network::new("west")].into(),
            zone: Locality::default(),
        };
        assert_eq!(said.viewer, expected);
        let grpc =
            Node { user_agent_name: "gRPC C-core linux Python".into(), ..node(&[("INSTANCE_IPS", "::1,x")]) };
        let said = NodeInfo::of(&grpc).expect("short");
        assert_eq!((said.viewer.client, said.viewer.families), (ClientKind::Grpc, Families::V6));
        assert_eq!(NodeInfo::of(&Node::default()).expect("short").viewer, Viewer::default());
    }

    #[test]
    fn an_envoy_may_take_listeners_and_a_grpc_client_may_not() {
        let takes = |node: &Node| NodeInfo::of(node).expect("short").takes_listeners;
        assert!(takes(&node(&[("ISTHMUS_LISTENERS", "true")])));
        assert!(!takes(&node(&[("ISTHMUS_LISTENERS", "false")])) && !takes(&node(&[])));
        let set = Value { kind: Some(ValueKind::BoolValue(true)) };
        let fields = [("ISTHMUS_LISTENERS".to_owned(), set)].into();
        let typed = Node { metadata: Some(Struct { fields }), ..node(&[]) };
        assert!(takes(&typed));
        assert!(!takes(&Node { user_agent_name: "gRPC C++".into(), ..typed }));
    }

    #[test]
    fn long_texts_are_cut_or_refused() {
        let long = "ü".repeat(TEXT_BYTES_MAX);
        let of = |key| NodeInfo::of(&node(&[(key, &long)])).map(|said| said.viewer);
        assert_eq!(
            (of("NETWORK"), of(VIEW)),
            (Err(NodeFault::TooLong("NETWORK")), Err(NodeFault::TooLong(VIEW)))
        );
        let said =
            NodeInfo::of(&Node { id: format!("x{long}"), ..node(&[("OTHER", &long)]) }).expect("short");
        assert_eq!(said.id.len(), TEXT_BYTES_MAX - 1);
    }

    #[test]
    fn a_view_of_more_networks_than_the_limit_is_refused() {
        let networks =
            |count: usize| (0..count).map(|number| format!("n{number}")).collect::<Vec<_>>().join(",");
        let sees = |text: &str| NodeInfo::of(&node(&[(VIEW, text)])).map(|said| said.viewer.sees.len());
        assert_eq!(sees(&networks(SEES_MAX)), Ok(SEES_MAX));
        assert_eq!(sees(&networks(SEES_MAX + 1)), Err(NodeFault::TooManyNetworks));
        assert_eq!(sees(&"n,".repeat(SEES_MAX + 1)), Ok(1), "a network counts once");
    }

    #[test]
    fn a_client_may_claim_what_a_rule_lets_it() {
        let rule = ClientRule {
            identities: Vec::new(),
            cidrs: vec!["127.0.0.0/8".parse().expect("legal")],
            networks: Some(vec![Network::new("east")]),
            clusters: None,
        };
        let ask = |network: &str, from: &str, rules: &[ClientRule]| {
            let peer = SocketAddr::new(from.parse().expect("legal"), 1);
            let caller =
                Caller { peer, identity: Some(Identity::parse("spiffe://td/ns/a/sa/b").expect("legal")) };
            let node_info = NodeInfo::of(&node(&[("NETWORK", network)])).expect("short");
            node_info.check(&caller, rules, "xds.clients")
        };
        let rules = [rule];
        assert_eq!(ask("east", "127.0.0.1", &rules), Ok(()));
        for (network, from) in [("west", "127.0.0.1"), ("", "127.0.0.1"), ("east", "10.0.0.1")] {
            assert!(ask(network, from, &rules).is_err(), "{network} {from}");
        }
        let of = |pattern: &str| {
            let identities = vec![IdentityPattern::parse(pattern).expect("legal")];
            [ClientRule { identities, cidrs: Vec::new(), networks: None, clusters: None }]
        };
        assert_eq!(ask("west", "10.0.0.1", &of("spiffe://td/ns/a/*")), Ok(()));
        let denied = ask("west", "10.0.0.1", &of("spiffe://td/ns/b/*")).expect_err("not one of them");
        assert!(denied.to_string().starts_with("spiffe://td/ns/a/sa/b may not claim"), "{denied}");
        assert!(ask("east", "127.0.0.1", &[]).is_err());
    }
}
