//! Services.

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;

use super::response::{error, json_response};
use super::routes::Routes;
use super::{Sources, endpoints};
use isthmus_api as api;
use isthmus_api::requests;
use isthmus_api::text::texts;
use isthmus_dataplane::upstreams::Upstreams;
use isthmus_model::name::HostName;
use isthmus_model::place::ClusterId;
use isthmus_settings::export_tls::AskedBy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::service_view::{PortView, ServiceView};

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .value(&requests::SERVICES, |sources| services(&sources.reader.latest()))
        .with(&requests::SERVICE, one)
}

async fn one(State(sources): State<Sources>, Path(hostname): Path<String>) -> Response {
    let name = HostName::parse(&hostname).ok();
    let upstreams = sources.dataplane.upstreams();
    match name.and_then(|name| service(&sources.reader.latest(), name.as_str(), upstreams)) {
        Some(service) => json_response(&service),
        None => error(StatusCode::NOT_FOUND, "no such service is known"),
    }
}

/// Returns one object per service.
fn services(snapshot: &Snapshot) -> Vec<api::service::Service> {
    snapshot.services().into_iter().map(|service| listed_service(service)).collect()
}

/// Returns a service in the form of the list of services.
fn listed_service(service: &ServiceView) -> api::service::Service {
    api::service::Service {
        hostname: service.name.to_string(),
        namespace: service.namespace.to_string(),
        addresses: texts(&service.addresses),
        ports: service.ports.iter().map(port).collect(),
        clusters: clusters(service),
        conflicts: texts(&service.conflicts),
    }
}

fn port(port: &PortView) -> api::service::Port {
    let here = port.candidates("", AskedBy::MeshName).map_or(0, |candidates| candidates.endpoints().len());
    api::service::Port {
        name: port.name.to_string(),
        port: port.port,
        protocol: port.protocol.text().to_owned(),
        exported_by: port.rules.iter().map(|rule| rule.name.to_string()).collect(),
        endpoints_here: here,
        target_port: None,
    }
}

fn clusters(service: &ServiceView) -> Vec<String> {
    let mut clusters: Vec<&ClusterId> = service.all_parts().map(|part| &part.origin.cluster).collect();
    clusters.sort();
    clusters.dedup();
    clusters.into_iter().map(ToString::to_string).collect()
}

/// Returns one service with all its endpoints; `None` if it does not exist.
fn service(
    snapshot: &Snapshot,
    hostname: &str,
    upstreams: &Upstreams,
) -> Option<api::service::ServiceDetail> {
    let service = snapshot.service(hostname)?;
    let port_of = |view| api::service::Port { target_port: service.target_port(view), ..port(view) };
    Some(api::service::ServiceDetail {
        hostname: service.name.to_string(),
        namespace: service.namespace.to_string(),
        addresses: texts(&service.addresses),
        ports: service.ports.iter().map(port_of).collect(),
        subsets: service.subsets.keys().map(ToString::to_string).collect(),
        clusters: clusters(service),
        conflicts: texts(&service.conflicts),
        endpoints: endpoints::of_service(snapshot, service, upstreams),
    })
}
