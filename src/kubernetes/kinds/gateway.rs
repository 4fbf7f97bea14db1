//! Gateway objects of the Gateway API that are gateways of networks.

use super::selector::{Label, Selector};
use super::{Facts, NETWORK_LABEL, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, TypedAddress, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::address::Host;
use isthmus_model::identity::Identity;
use isthmus_model::place::Network;

/// The port on which Istio's gateways route TLS by SNI.
const SNI_PORT: u16 = 15_443;

objects! {
    /// `Gateway` of `gateway.networking.k8s.io/v1`.
    Gateway { metadata: Meta, spec: GatewaySpec, status: GatewayStatus, }
    GatewaySpec { gateway_class_name: String, addresses: Vec<TypedAddress>, listeners: Vec<GatewayListener>, }
    GatewayStatus { addresses: Vec<TypedAddress>, }
    GatewayListener { name: String, port: i64, protocol: String, tls: GatewayTls, }
    GatewayTls { mode: String, options: Texts, }
}

impl Watched for Gateway {
    const FACTS: Facts = Facts {
        plural: "gateways",
        versions: &["apis/gateway.networking.k8s.io/v1"],
        is_custom: true,
        namespaces: Namespaces::OfServicesAndGateways,
        labels: Selector(&[Label::Present(NETWORK_LABEL)]),
        is_wanted: |spec| spec.gateways.is_some(),
        ..Facts::CORE
    };

    type Rows = Table<ObjectKey, GatewayRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<GatewayRecord> {
        Some(GatewayRecord::read(self, reading.trust_domain.as_str()))
    }

    fn touch(_: Touched<ObjectKey, GatewayRecord>, tables: &mut Tables) {
        tables.dirty.gateways = true;
    }
}

/// A Gateway object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GatewayRecord {
    pub(crate) network: Network,
    pub(crate) hosts: Vec<Host>,
    pub(crate) sni_port: Option<u16>,
    pub(crate) hbone_port: Option<u16>,
    pub(crate) identity: Option<Identity>,
}

impl GatewayRecord {
    fn read(object: &Gateway, trust_domain: &str) -> Self {
        let Gateway { metadata, spec, status } = object;
        let network = metadata.labels.get(NETWORK_LABEL).map(String::as_str).unwrap_or_default();
        let is_usable = |found: &&TypedAddress| matches!(found.kind.as_str(), "" | "IPAddress" | "Hostname");
        // Istio's own gateways have their Service's name in `spec.addresses`, which other clusters cannot reach.
        let is_of_istio = spec.gateway_class_name == "istio-east-west";
        let given =
            if is_of_istio || spec.addresses.is_empty() { &status.addresses } else { &spec.addresses };
        let hosts =
            given.iter().filter(is_usable).filter_map(|found| Host::parse(&found.value).ok()).collect();
        let label = metadata.labels.get("networking.istio.io/gatewayPort").and_then(|text| text.parse().ok());
        let label: i64 = label.unwrap_or_else(|| SNI_PORT.into());
        let passes = |listener: &&GatewayListener| {
            let option = listener.tls.options.get("gateway.istio.io/listener-protocol");
            let is_auto = listener.protocol == "TLS"
                && (option.is_some_and(|value| value == "auto-passthrough") || listener.port == label);
            is_auto && listener.tls.mode != "Terminate"
        };
        let number = |listener: &GatewayListener| u16::try_from(listener.port).ok().filter(|port| *port > 0);
        let hbone = spec.listeners.iter().find(|listener| listener.protocol == "HBONE");
        let account = metadata.annotations.get("gateway.istio.io/service-account").cloned();
        let account = account.unwrap_or_else(|| match spec.gateway_class_name.as_str() {
            "istio-remote" => format!("{}-istio-remote", metadata.name),
            _ => metadata.name.clone(),
        });
        let identity = format!("spiffe://{trust_domain}/ns/{}/sa/{account}", metadata.namespace);
        Self {
            network: Network::new(network),
            hosts,
            sni_port: spec.listeners.iter().find(passes).and_then(number),
            hbone_port: hbone.and_then(number),
            identity: Identity::parse(&identity).ok().filter(|_| hbone.is_some()),
        }
    }
}
