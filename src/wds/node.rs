//! A client's node: the network, cluster and node that it claims, and the rules for the claims.

use std::sync::Arc;

use isthmus_ads::incoming::Caller;
use isthmus_ads::node::{ClientRule, Denied, NodeFault, NodeInfo, metadata_text};
use isthmus_decisions::view::{Tunnel, Viewer};
use isthmus_model::place::{ClusterId, Network};
use isthmus_proto::envoy::config::core::v3::Node;
use isthmus_snapshot::Snapshot;

use super::render::node_key;
use super::tokens::Owner;

/// The longest name of a node, in bytes.
const NODE_BYTES_MAX: usize = 253;

/// The claims of a client about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    /// The node, as operators see it.
    pub info: NodeInfo,
    /// The name of the Kubernetes node; empty if the client names none.
    pub node: String,
}

/// The reason why the claims of a client are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimFault {
    /// A text of the node is too long.
    #[error(transparent)]
    Node(#[from] NodeFault),
    /// The name of the node is too long.
    #[error("the NODE_NAME of the node has more than {NODE_BYTES_MAX} bytes")]
    LongNode,
    /// The metadata and the header name different clusters.
    #[error("the client claims cluster {0:?} in its metadata, but {1:?} in the header clusterid")]
    TwoClusters(String, String),
    /// The token is of another node.
    #[error("the client claims node {0:?}, but its token is of node {1:?}")]
    OtherNode(String, String),
    /// No rule allows the claims.
    #[error(transparent)]
    Denied(#[from] Denied),
}

impl Claims {
    /// Parses the node of a client that claims `cluster` in its header. A client that names no network is on that of its cluster.
    pub fn of(node: &Node, cluster: &ClusterId, snapshot: &Snapshot) -> Result<Self, ClaimFault> {
        let mut info = NodeInfo::of(node)?;
        let name = metadata_text(node, "NODE_NAME");
        if name.len() > NODE_BYTES_MAX {
            return Err(ClaimFault::LongNode);
        }
        let claimed = &info.viewer.cluster;
        if !claimed.as_str().is_empty() && claimed != cluster {
            return Err(ClaimFault::TwoClusters(claimed.to_string(), cluster.to_string()));
        }
        let network = match info.viewer.network.is_unknown() {
            true => network_of(cluster, snapshot),
            false => info.viewer.network.clone(),
        };
        info.viewer = Viewer {
            network,
            cluster: cluster.clone(),
            families: info.viewer.families,
            tunnel: Tunnel::Hbone,
            ..Viewer::default()
        };
        if info.user_agent.is_empty() {
            "ztunnel".clone_into(&mut info.user_agent);
        }
        Ok(Self { info, node: name.to_owned() })
    }

    /// Returns an error unless a rule lets the client claim this, and the token is of its node. `caller` has the identity of the
    /// token's owner.
    pub fn check(&self, owner: &Owner, caller: &Caller, rules: &[ClientRule]) -> Result<(), ClaimFault> {
        if let Some(node) = owner.node.as_ref().filter(|node| **node != self.node) {
            return Err(ClaimFault::OtherNode(self.node.clone(), node.clone()));
        }
        Ok(self.info.check(caller, rules, "xds.wds.clients")?)
    }

    /// Returns the key of the client's node.
    pub fn key(&self) -> Arc<str> {
        node_key(&self.info.viewer.cluster, &self.node)
    }
}

/// Returns the network of a cluster's registry; unknown if there is none.
fn network_of(cluster: &ClusterId, snapshot: &Snapshot) -> Network {
    snapshot.facts_of(cluster).map(|facts| facts.network.clone()).unwrap_or_default()
}
