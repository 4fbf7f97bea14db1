//! The keys of other networks: their gateways, the aggregator, and the xDS server.

use std::time::Duration;

use isthmus_aggregator::options::Options;
use isthmus_document::form::{self, Form, Written};
use isthmus_document::key::keys;
use isthmus_document::table::{Kind, Union};
use isthmus_document::tree::Node;
use isthmus_model::endpoint::Weight;
use isthmus_settings::network::{Access, Egress, GatewayProbes};

use super::steering::CostPerGib;

keys! {
    /// One network, and how other networks reach it.
    pub(crate) Network "network" {
        /// How other networks reach the endpoints: `gateway`: only through the network's gateways; `direct`: by the
        /// endpoints' own addresses.
        ACCESS "access": form::Choice<Access> = Access::default();
        /// How clients on the network call services of other networks and of peers. `direct`: through the gateways of the other
        /// network; `gateway`: through the gateways of their own network, which pass the calls on, so that clients need no route to
        /// other networks. Only callers whose addresses are in `cidrs`, and callers by HBONE of this mesh, are passed on.
        EGRESS "egress": form::Choice<Egress> = Egress::default();
        /// Address blocks of the network. They determine the network of a client's address, and of an endpoint
        /// whose registry sets no network.
        CIDRS "cidrs": form::List<form::Cidr> => "none";
        /// Gateways through which other networks reach the network.
        GATEWAYS "gateways": form::List<Gateway> => "none";
        /// If on, this replica connects to each gateway once a second, and sends every other time a ClientHello with the name
        /// `outbound_.1_._.isthmus-probe.invalid`; `tcp`: it only connects. Clients do not get a gateway that has ceased to answer
        /// while another gateway of the network answers. A gateway of Istio closes and logs each hello.
        PROBE "probe": Probing = GatewayProbes::default();
        /// Round-trip time from clients on each of these networks. It wins over measured times.
        DISTANCE "distance": form::MapOf<form::NetworkName, form::Timeout> => "measured by this replica or a peer, or else by locality";
        /// Cost per GiB of traffic from clients on each of these networks, in any currency. `steering.costWeight` makes it a
        /// distance.
        COST "cost": form::MapOf<form::NetworkName, CostPerGib> => "0";
        /// The part of the ready endpoints of a steered service that calls of other networks may use: `100%` for a standby without
        /// clients of its own; `0%`: none while another network has a ready endpoint.
        ROOM "room": form::Percent => "1.4 × ready, less what the network's own calls need";
    }

    /// One gateway of a network. At least one of the two ports is required.
    pub(crate) Gateway "gateway" {
        /// Address of the gateway. A host name is resolved and stands for all of its addresses.
        ADDRESS "address": form::Host => required;
        /// Port for TLS connections routed by SNI.
        SNI_PORT "sniPort": form::Port => "no SNI traffic";
        /// Port for HBONE.
        HBONE_PORT "hbonePort": form::Port => "no HBONE traffic";
        /// Cluster of the gateway. If a cluster has gateways of its own, its endpoints are reached only through
        /// these.
        CLUSTER "cluster": form::ClusterName => "none";
        /// Region, zone and subzone of the gateway.
        LOCALITY "locality": form::Locality => "unknown";
        /// Share of the network's traffic, relative to the other gateways. The weights of gateways with the same
        /// address and port are added.
        WEIGHT "weight": form::Weight = Weight::ONE;
        /// SPIFFE ID of the gateway.
        IDENTITY "identity": form::Identity => "none";
    }

    /// Start-up wait, staleness, and protection against mass removal of services. While a registry cannot be read,
    /// its last good state stays in use.
    pub(crate) Aggregator "aggregator" {
        /// After a registry has been unreadable for this time, its endpoints are used only for service ports
        /// without a ready endpoint from another registry.
        STALE_AFTER "staleAfter": form::Timeout = Options::default().stale_after;
        /// After a registry has been unreadable for this time, its endpoints are removed.
        EXPIRE_AFTER "expireAfter": Expiry = Options::default().expire_after;
        /// An update that removes the last ready endpoint of more than 10 services and of more than 30 % of the
        /// registry's services is applied only after this time; `0s`: at once.
        WITHDRAWAL_HOLD "withdrawalHold": form::Period = Options::default().withdrawal_hold;
        /// Time that a start waits for registries, and for verdicts on gateways, before the listeners open without them.
        START_TIMEOUT "startTimeout": form::Period = Options::default().start_timeout;
    }

    /// DNS resolution of the host names of endpoints and gateways, also of the gateways of peers (`dial`).
    pub(crate) Dns "dns" {
        /// DNS servers, which the gateway asks over UDP and TCP.
        SERVERS "servers": form::List<form::NameServer> => "the system's";
        /// Shortest time for which an answer is used, whatever its TTL.
        MIN_TTL "minTtl": form::Timeout = Options::default().dns.ttl_min;
        /// Longest time for which an answer is used, whatever its TTL.
        MAX_TTL "maxTtl": form::Timeout = Options::default().dns.ttl_max;
        /// How long a name keeps its last addresses when it does not exist any more, or has no address. 0s: not at all. While
        /// look-ups fail, the last addresses stay without this limit.
        HOLD_MISSING "holdMissing": form::Period = Options::default().dns.hold_missing;
    }

    /// Files that a restart uses.
    pub(crate) State "state" {
        /// Directory for the last good copy of each registry, which a start uses if the registry cannot be read, and
        /// for the data of peers: enrolled links, announced roots, and the times of exports.
        DIR "dir": form::Path => required;
    }

    /// The xDS server. It gives each client the endpoints as seen from the client's network.
    pub(crate) Xds "xds" {
        /// Address of the xDS server. An address other than loopback requires `tls` and `clients`.
        BIND "bind": form::BindAddress => required;
        /// Mutual TLS 1.3. The server uses this gateway's own `identity` and verifies clients against `trust`.
        TLS "tls": XdsTls => "none";
        /// Rules that say which network and cluster a client may claim. A client is refused unless one rule allows
        /// it.
        CLIENTS "clients": form::NonEmpty<XdsClient> => "any client may claim anything";
        /// The WDS server for ztunnels.
        WDS "wds": Wds => "off";
    }

    /// The WDS server, at an address of its own. ztunnels of Istio's ambient mode get workloads, services and authorization
    /// policies from it, as seen from their networks (docs/ambient.md).
    pub(crate) Wds "wds" {
        /// Address of the WDS server.
        BIND "bind": form::BindAddress => required;
        /// The certificate of the server. ztunnels verify its DNS name or address, and show no certificate.
        TLS "tls": WdsTls => required;
        /// The way to learn a client's identity from its bearer token.
        TOKENS "tokens": WdsTokens => required;
        /// Rules that say which clients are served. A client is refused unless one rule names its identity.
        CLIENTS "clients": form::NonEmpty<WdsClient> => required;
        /// Clusters that have no authorization policies. Without this, a cluster is served only if a registry in Kubernetes reads
        /// its policies: ztunnels that do not get the policies would admit what they deny.
        WITHOUT_POLICIES "withoutPolicies": form::NonEmpty<form::ClusterName> => "none";
    }

    /// The certificate of the WDS server.
    pub(crate) WdsTls "wdsTls" {
        /// PEM file of the certificate chain, leaf first; read again when it changes.
        CERTIFICATE "certificate": form::Path => required;
        /// PEM file of the private key of the leaf certificate.
        KEY "key": form::Path => required;
    }

    /// The way to learn a client's identity from its bearer token.
    pub(crate) WdsTokens "wdsTokens" one of [KUBERNETES, FILE] {
        /// TokenReview by the API server of the client's cluster, which must be a registry in Kubernetes. The identity is
        /// `spiffe://TRUST_DOMAIN/ns/NAMESPACE/sa/ACCOUNT` of the service account, with the trust domain of that registry.
        KUBERNETES "kubernetes": WdsTokenReview => "none";
        /// File with a token, a SPIFFE ID and, if the token is of one node, the name of the node on each line; read for each
        /// stream.
        FILE "file": form::Path => "none";
    }

    /// The review of tokens.
    pub(crate) WdsTokenReview "wdsTokenReview" {
        /// Audience that a token must have.
        AUDIENCE "audience": form::Text => "istio-ca";
    }

    /// The networks and clusters that some ztunnels may claim.
    pub(crate) WdsClient "wdsClient" {
        /// SPIFFE IDs of the clients, from their tokens; `/*` at the end matches one or more further path segments.
        IDENTITIES "identities": form::NonEmpty<form::IdentityPattern> => required;
        /// Networks that the clients may claim.
        NETWORKS "networks": form::NonEmpty<form::NetworkName> => "any";
        /// Clusters that the clients may claim.
        CLUSTERS "clusters": form::NonEmpty<form::ClusterName> => "any";
    }

    /// TLS for xDS clients. It has no keys; write `tls: {}`.
    pub(crate) XdsTls "xdsTls" {

    }

    /// The networks and clusters that some clients may claim.
    pub(crate) XdsClient "xdsClient" {
        /// SPIFFE IDs of the clients, from their certificates; `/*` at the end matches one or more further path
        /// segments.
        IDENTITIES "identities": form::NonEmpty<form::IdentityPattern> => "any client, with or without identity";
        /// Source addresses of the clients.
        CIDRS "cidrs": form::List<form::Cidr> => "any";
        /// Networks that the clients may claim.
        NETWORKS "networks": form::NonEmpty<form::NetworkName> => "any";
        /// Clusters that the clients may claim.
        CLUSTERS "clusters": form::NonEmpty<form::ClusterName> => "any";
    }
}

/// `true`, `false`, `on` or `off`, or `tcp`.
#[derive(Debug)]
pub(crate) struct Probing;

impl Form for Probing {
    type Value = GatewayProbes;
    const KIND: Kind = Kind::Union(&Union {
        name: "probing",
        expects: "true, false or tcp",
        kinds: &[Kind::Boolean, Kind::Choice(&["tcp"])],
    });

    fn read(node: &Node) -> Option<GatewayProbes> {
        match node.switch() {
            Some(true) => Some(GatewayProbes::Hello),
            Some(false) => Some(GatewayProbes::Off),
            None => (node.text()? == "tcp").then_some(GatewayProbes::Connect),
        }
    }
}

impl Written for Probing {
    fn write(value: &GatewayProbes) -> String {
        let word = match value {
            GatewayProbes::Off => "false",
            GatewayProbes::Connect => "tcp",
            GatewayProbes::Hello => "true",
        };
        word.to_owned()
    }
}

/// A duration above 0, or `never`, which is read as `None`.
#[derive(Debug)]
pub(crate) struct Expiry;

impl Form for Expiry {
    type Value = Option<Duration>;
    const KIND: Kind = Kind::Union(&Union {
        name: "expiry",
        expects: "never, or a whole number above 0 with its unit, such as 250ms, 10s, 5m or 1h",
        kinds: &[Kind::Choice(&["never"]), form::Timeout::KIND],
    });

    fn read(node: &Node) -> Option<Option<Duration>> {
        if node.text()? == "never" { Some(None) } else { form::Timeout::read(node).map(Some) }
    }
}

impl Written for Expiry {
    fn write(value: &Option<Duration>) -> String {
        value.as_ref().map_or_else(|| "never".to_owned(), form::Timeout::write)
    }
}
