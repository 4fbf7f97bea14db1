//! An xDS client: raw HTTP/2 with gRPC frames. Of the server's code, it uses only the protobuf messages.

use std::net::SocketAddr;
use std::sync::mpsc::Sender;

use bytes::BytesMut;
use isthmus::proto::envoy::config::core::v3::Node;
use isthmus::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use prost_types::value::Kind;
use prost_types::{Struct, Value};

use super::Result;
use super::frames::{frame, take_frame};

const EDS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// Subscribes to one assignment, and sends a notification for each response with it, until the server is gone.
pub(super) fn follow(xds: SocketAddr, name: &str, told: &Sender<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime
        .map_err(Into::into)
        .and_then(|runtime| tokio::task::LocalSet::new().block_on(&runtime, respond(xds, name, told)));
    if let Err(error) = done {
        println!("the xDS client has ended: {error}");
    }
}

async fn respond(xds: SocketAddr, name: &str, told: &Sender<()>) -> Result<()> {
    let socket = tokio::net::TcpStream::connect(xds).await?;
    socket.set_nodelay(true)?;
    let (mut requests, connection) = h2::client::handshake(socket).await?;
    #[expect(clippy::disallowed_methods, reason = "a program of its own, without a stop")]
    tokio::task::spawn_local(async move {
        let _ = connection.await;
    });
    let path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
    let request = http::Request::post(format!("http://{xds}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    let (response, mut stream) = requests.send_request(request, false)?;
    let network = Value { kind: Some(Kind::StringValue("net-west".into())) };
    let metadata = Struct { fields: [("NETWORK".to_owned(), network)].into() };
    let first = DeltaDiscoveryRequest {
        node: Some(Node { id: "bench".into(), metadata: Some(metadata), ..Node::default() }),
        type_url: EDS.to_owned(),
        resource_names_subscribe: vec![name.to_owned()],
        ..DeltaDiscoveryRequest::default()
    };
    stream.send_data(frame(&first), false)?;
    let mut body = response.await?.into_body();
    let mut buffer = BytesMut::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        buffer.extend_from_slice(&data);
        while let Some(message) = take_frame(&mut buffer) {
            let response = DeltaDiscoveryResponse::decode(message)?;
            if response.resources.iter().any(|resource| resource.name == name) {
                told.send(())?;
            }
            let acknowledgement = DeltaDiscoveryRequest {
                type_url: response.type_url,
                response_nonce: response.nonce,
                ..DeltaDiscoveryRequest::default()
            };
            stream.send_data(frame(&acknowledgement), false)?;
        }
    }
    Ok(())
}
