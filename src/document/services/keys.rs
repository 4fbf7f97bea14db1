//! The keys of the `services:` list.

use crate::form;
use crate::key::keys;
use isthmus_model::endpoint::{Encapsulation, HBONE_PORT, Health, TlsMode, Weight};
use isthmus_model::service::PortProtocol;

keys! {
    /// The services of one registry.
    pub RegistryFile "registryFile" {
        /// The services and their endpoints.
        SERVICES "services": form::List<Service> => required;
    }

    /// A service of the mesh.
    pub Service "service" {
        /// Host name that clients use.
        HOSTNAME "hostname": form::HostName => required;
        /// Namespace of the service. Two registries that give the same namespace and host name give the same
        /// service.
        NAMESPACE "namespace": form::Namespace => required;
        /// Virtual addresses of the service.
        ADDRESSES "addresses": form::List<form::Ip> => "none";
        /// Ports of the service.
        PORTS "ports": form::NonEmpty<ServicePort> => required;
        /// Named subsets of the endpoints. A subset holds the endpoints that have all of its labels.
        SUBSETS "subsets": form::MapOf<form::Subset, form::Labels> => "none";
        /// Waypoint proxy: HBONE callers are connected to it and not to the endpoints.
        WAYPOINT "waypoint": Waypoint => "none";
        /// Instances of the service.
        ENDPOINTS "endpoints": form::List<Endpoint> => "none";
    }

    /// Waypoint proxy of a service. It is skipped if the caller is the waypoint itself, or says in the header `x-istio-source` that it
    /// is a waypoint or an ingress gateway.
    pub Waypoint "waypoint" {
        /// Address of the waypoint.
        ADDRESS "address": form::Ip => required;
        /// HBONE port of the waypoint.
        PORT "port": form::Port = HBONE_PORT;
        /// SPIFFE ID of the waypoint. A caller with this identity is connected to the endpoints.
        IDENTITY "identity": form::Identity => "none";
    }

    /// One port of a service.
    pub ServicePort "servicePort" {
        /// Name of the port, unique in the service.
        NAME "name": form::Text => required;
        /// Port number that clients use, unique in the service.
        PORT "port": form::Port => required;
        /// Port on which endpoints listen, except those that set their own port.
        TARGET_PORT "targetPort": form::Port => "the value of `port`";
        /// Protocol of the port. `TLS` and `HTTPS` mean the application's own TLS, so clients may use the plain
        /// host name as SNI.
        PROTOCOL "protocol": form::Choice<PortProtocol> = PortProtocol::default();
    }

    /// One instance of a service.
    pub Endpoint "endpoint" one of [ADDRESS, ADDRESSES] {
        /// Address of the endpoint. A host name is resolved.
        ADDRESS "address": form::Host => "`addresses`";
        /// Addresses of an instance that has several, for example one IPv4 and one IPv6 address. The instance
        /// counts once; its addresses are tried in this order, beginning with the last one that worked.
        ADDRESSES "addresses": form::NonEmpty<form::Ip> => "`address`";
        /// Ports on which this endpoint listens, by the name of the service port.
        PORTS "ports": form::MapOf<form::Text, form::Port> => "the port's `targetPort`";
        /// Labels of the endpoint. Subsets select endpoints by them.
        LABELS "labels": form::Labels => "none";
        /// Region, zone and subzone of the endpoint.
        LOCALITY "locality": form::Locality => "unknown";
        /// Share of new connections, relative to the weights of the other endpoints.
        WEIGHT "weight": form::Weight = Weight::ONE;
        /// An `unhealthy` endpoint is used only if no healthy one is left and `panic` is on. A `draining` endpoint
        /// gets no new connections.
        HEALTH "health": form::Choice<Health> = Health::default();
        /// TLS that the endpoint speaks: `mesh` is mutual TLS with mesh identities, `own` is the application's own
        /// TLS, `none` is no TLS.
        TLS "tls": form::Choice<TlsMode> => "`own` on ports of protocol TLS or HTTPS, else `mesh`";
        /// `hbone`: the endpoint's node accepts HBONE on port 15008, and the gateway passes the streams of HBONE
        /// callers to that port unchanged.
        TUNNEL "tunnel": form::Choice<Encapsulation> = Encapsulation::default();
        /// SPIFFE ID of the endpoint.
        IDENTITY "identity": form::Identity => "none";
        /// Network of the endpoint.
        NETWORK "network": form::NetworkName => "the registry's network";
    }
}
