//! The process of the clients: raw HTTP/2 with gRPC frames, one connection per client. Of the server's code, it uses only the
//! protobuf messages.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use bytes::BytesMut;
use prost::Message;
use prost_types::value::Kind;
use prost_types::{Struct, Value};

use isthmus::proto::envoy::config::core::v3::Node;
use isthmus::proto::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};

use super::frames::{frame, take_frame};
use super::{CLUSTERS, HOT, Result, now};

const EDS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// The number of clients per source address.
const SOURCE: usize = 500;

/// One xDS client of this process.
struct Client {
    xds: SocketAddr,
    number: usize,
    /// True if the client never reads its stream.
    stuck: bool,
    names: Vec<String>,
    /// True if the client reports every change of the changing service. Otherwise it reports only the acknowledgement after
    /// which it has the resources of all its names.
    hot: bool,
}

/// Runs clients until the process is killed. The arguments: an address, the number of the first client, the number of clients,
/// the number of clients that are stuck, the number of names per client, the number of services, and 1 if the clients subscribe
/// to the changing service.
pub(super) fn run(arguments: &[String]) -> Result<()> {
    let xds: SocketAddr = arguments[0].parse()?;
    let numbers = arguments[1..].iter().map(|text| text.parse());
    let numbers: Vec<usize> = numbers.collect::<std::result::Result<_, _>>()?;
    let &[first, count, stuck, names, services, hot] = &numbers[..] else { return Err("six numbers".into()) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async move {
        #[expect(clippy::disallowed_methods, reason = "a program of its own, without a stop")]
        let tasks: Vec<_> = (first..first + count)
            .map(|number| {
                let client = Client {
                    xds,
                    number,
                    stuck: number < first + stuck,
                    names: wanted(number, names, services).chain((hot == 1).then(hot_name)).collect(),
                    hot: hot == 1,
                };
                tokio::task::spawn_local(async move {
                    if let Err(error) = client.run().await {
                        println!("client {number} failed: {error}");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await?;
        }
        Ok(())
    })
}

/// Returns the names of a client: different ones for each client, spread over all services.
fn wanted(number: usize, names: usize, services: usize) -> impl Iterator<Item = String> {
    let service = move |at: usize| (number * 37 + at * 13) % services;
    let name = |service| format!("outbound|80||s{service}.ns{}.svc.cluster.local", service % 100);
    (0..names).map(service).map(name)
}

fn hot_name() -> String {
    format!("outbound|80||{HOT}")
}

impl Client {
    async fn run(self) -> Result<()> {
        let Self { xds, number, stuck, names, hot } = self;
        let hot = hot.then(hot_name);
        // Clients use several source addresses, because the server limits the connections of one source.
        let source = [127, 0, 0, u8::try_from(2 + number / SOURCE % 100)?];
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        let socket = socket.connect(xds).await?;
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
        let mut missing: BTreeSet<String> = names.iter().cloned().collect();
        let first = DeltaDiscoveryRequest {
            node: Some(node(number)),
            type_url: EDS.to_owned(),
            resource_names_subscribe: names,
            ..DeltaDiscoveryRequest::default()
        };
        stream.send_data(frame(&first), false)?;
        let mut body = response.await?.into_body();
        if stuck {
            std::future::pending::<()>().await;
        }
        let mut buffer = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data?;
            body.flow_control().release_capacity(data.len())?;
            buffer.extend_from_slice(&data);
            while let Some(message) = take_frame(&mut buffer) {
                let response = DeltaDiscoveryResponse::decode(message)?;
                let ack = DeltaDiscoveryRequest {
                    type_url: response.type_url,
                    response_nonce: response.nonce,
                    ..DeltaDiscoveryRequest::default()
                };
                stream.send_data(frame(&ack), false)?;
                let had_all = missing.is_empty();
                response.resources.iter().for_each(|resource| _ = missing.remove(&resource.name));
                let has_all_now = missing.is_empty() && !had_all;
                let tells = match &hot {
                    Some(name) => response.resources.iter().any(|resource| resource.name == *name),
                    None => has_all_now,
                };
                if tells {
                    println!("{number} {:.6}", now());
                }
            }
        }
        Ok(())
    }
}

fn node(number: usize) -> Node {
    let text = |text: String| Value { kind: Some(Kind::StringValue(text)) };
    let place = number % CLUSTERS;
    let fields = [
        ("NETWORK".to_owned(), text(format!("n{place:02}"))),
        ("CLUSTER_ID".to_owned(), text(format!("c{place:02}"))),
    ];
    Node {
        id: format!("client-{number}"),
        user_agent_name: "envoy".to_owned(),
        metadata: Some(Struct { fields: fields.into() }),
        ..Node::default()
    }
}
