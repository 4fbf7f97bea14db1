//! One stream of istiod's xDS server, on which a client asks for workloads, services and policies like a ztunnel.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message as _;
use tokio::time::timeout;

use isthmus_ads::kind::ResourceKind;
use isthmus_ads::ztunnel::{Kind, METHOD};
use isthmus_aggregator::spec::istiod::IstiodSpec;
use isthmus_files::reading::Readings;
use isthmus_net::budget::registry_bytes;
use isthmus_net::channel::{CallFault, Limits, TwoWay};
use isthmus_proto::envoy::config::core::v3::Node;
use isthmus_proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use isthmus_proto::google::rpc::Status;
use isthmus_tasks::scope::Scope;
use isthmus_tls::istiod::IstiodFault;
use isthmus_tls::server::provider;
use prost_types::value::Kind as ValueKind;
use prost_types::{Struct, Value};
use tonic::Code;

/// The time limit of connecting, from the look-up of the name to the first answer of the call.
const CONNECT: Duration = Duration::from_secs(10);
/// The time limit of the first response. An istiod that has just started answers once it has read its cluster.
const FIRST: Duration = Duration::from_secs(60);
/// The time without received data after which a PING is sent. istiod closes connections that send PINGs more often than every 15 s.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// The largest response in bytes: what a ztunnel accepts.
const MESSAGE_BYTES_MAX: usize = 200 << 20;
/// The largest number of items of a response: twice the resources that a registry keeps.
const ITEMS_MAX: usize = 2_000_000;
/// The largest request in bytes: istiod accepts 4 MiB.
const REQUEST_BYTES_MAX: usize = 3 << 20;

/// The reason why the stream ended, or never began.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamFault {
    #[error(transparent)]
    Istiod(#[from] IstiodFault),
    #[error("{0}")]
    Call(#[from] CallFault),
    #[error("there was no answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("istiod ended the stream")]
    Ended,
    #[error("istiod sent the type {0:?}, which was not asked for")]
    Type(String),
}

/// An open stream.
pub(crate) struct Stream {
    call: TwoWay<DeltaDiscoveryRequest, DeltaDiscoveryResponse>,
    has_answered: bool,
    /// True if the stream begins with what differs from the versions that were sent, instead of with all resources.
    pub(crate) is_resumed: bool,
}

impl Stream {
    /// Connects and asks for all resources, or for those that differ from `versions` if these fit into a request.
    pub(crate) async fn open(
        spec: &IstiodSpec,
        versions: BTreeMap<String, String>,
        readings: &Readings,
        scope: &Scope,
    ) -> Result<Self, StreamFault> {
        let open = async {
            let limits = Limits {
                message_bytes_max: registry_bytes(MESSAGE_BYTES_MAX),
                items_max: ITEMS_MAX,
                ping_interval: Some(PING_INTERVAL),
            };
            let mut connection = spec.istiod.connect(readings, &provider(), scope, limits).await?;
            let account = connection.account.clone();
            let node = node(spec, account.as_ref().map_or(&*spec.namespace, |(namespace, _)| namespace));
            let policies = DeltaDiscoveryRequest {
                node: Some(node.clone()),
                type_url: Kind::Authorization.type_url().into(),
                ..DeltaDiscoveryRequest::default()
            };
            let mut addresses = DeltaDiscoveryRequest {
                node: Some(node),
                type_url: Kind::Address.type_url().into(),
                initial_resource_versions: versions,
                ..DeltaDiscoveryRequest::default()
            };
            if addresses.encoded_len() > REQUEST_BYTES_MAX {
                addresses.initial_resource_versions.clear();
            }
            let is_resumed = !addresses.initial_resource_versions.is_empty();
            // istiod answers in order, so the policies are known before the workloads that name them.
            let (first, second) = if spec.ambient { (policies, Some(addresses)) } else { (addresses, None) };
            let request = connection.request(first);
            let call = connection.channel.two_way(METHOD, request, second.into_iter().collect()).await?;
            Ok(Self { call, has_answered: false, is_resumed })
        };
        timeout(CONNECT, open).await.unwrap_or(Err(StreamFault::Late(CONNECT)))
    }

    /// Waits for the next response. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<(Kind, DeltaDiscoveryResponse), StreamFault> {
        let answer = async { self.call.answers.message().await.map_err(CallFault::from) };
        let answer = match self.has_answered {
            true => answer.await?,
            false => timeout(FIRST, answer).await.map_err(|_| StreamFault::Late(FIRST))??,
        };
        self.has_answered = true;
        let answer = answer.ok_or(StreamFault::Ended)?;
        let kind = Kind::of_type_url(&answer.type_url);
        Ok((kind.ok_or_else(|| StreamFault::Type(answer.type_url.chars().take(200).collect()))?, answer))
    }

    /// Accepts a response. If `refused` is not empty, it says which resources could not be used, and why.
    pub(crate) async fn answer(
        &self,
        kind: Kind,
        nonce: String,
        refused: &[String],
    ) -> Result<(), StreamFault> {
        let error_detail = (!refused.is_empty()).then(|| Status {
            code: Code::InvalidArgument as i32,
            message: refused.join("; "),
            ..Status::default()
        });
        self.send(DeltaDiscoveryRequest {
            type_url: kind.type_url().into(),
            response_nonce: nonce,
            error_detail,
            ..DeltaDiscoveryRequest::default()
        })
        .await
    }

    async fn send(&self, request: DeltaDiscoveryRequest) -> Result<(), StreamFault> {
        self.call.requests.send(request).await.map_err(|_| StreamFault::Ended)
    }
}

/// Returns the node as which the gateway asks. istiod gives WDS to nodes of the type `ztunnel`, and compares the namespace with that
/// of the token.
fn node(spec: &IstiodSpec, namespace: &str) -> Node {
    let text = |text: &str| Value { kind: Some(ValueKind::StringValue(text.to_owned())) };
    let fields = [
        ("NAME", text(&spec.name)),
        ("NAMESPACE", text(namespace)),
        ("CLUSTER_ID", text(spec.istiod.cluster.as_str())),
    ];
    let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Node {
        id: format!("ztunnel~1.1.1.1~{}.{namespace}~{namespace}.svc.cluster.local", spec.name),
        metadata: Some(Struct { fields }),
        ..Node::default()
    }
}
