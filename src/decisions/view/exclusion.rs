//! The reasons why a view leaves out endpoints.

use isthmus_model::endpoint::MeshTlsOff;
use isthmus_model::service::Withheld;

/// The reason why endpoints are excluded from a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExclusionReason {
    /// The viewer wants to see only other networks.
    NotVisible,
    /// The policy lets calls go only to other networks.
    NotAllowed,
    /// The endpoints are unhealthy or draining. This excludes them if they are behind a gateway, or if the viewer's kind of
    /// client cannot use such endpoints.
    Unready,
    /// The endpoint is on the viewer's network, but has no address to which the viewer can connect.
    NoAddress,
    /// The cluster of the endpoints keeps the service to its own callers, and no export rule names it.
    ClusterLocal,
    /// No export rule admits callers of the viewer's protocol to the endpoints.
    NotExported,
    /// Nobody has written the TLS mode of the endpoints, and no export rule with `tls: own` admits callers of the viewer's protocol
    /// to them.
    OutsideMesh,
    /// An object turns the mesh's mutual TLS off on the port of the endpoints, and no export rule with `tls: own` admits callers of
    /// the viewer's protocol to them.
    MeshTlsOff(MeshTlsOff),
    /// The endpoints do not accept HBONE.
    NoTunnel,
    /// The endpoints speak no TLS, so that only HBONE callers reach them.
    NoTls,
    /// The endpoints do not speak the TLS mode that the gateway chooses for this port.
    OtherTls,
    /// This kind of client calls gateways only by host name, and the gateway does not route the host name to this port.
    NoHostRoute,
    /// The network of the endpoints has no gateway that the viewer can use.
    NoUsableGateway,
    /// The endpoints are those of another organisation, and joined with the name. The viewer's kind of client has one set of roots for
    /// all endpoints, or the endpoints do not speak the mesh's mutual TLS, so the client could not verify them by the roots of that
    /// organisation alone.
    NotVerifiable,
    /// The addresses of the gateways are also addresses of another organisation's endpoints or gateways, which have the name too.
    OtherOrganisation,
    /// The registry of the endpoints has the port under another number, name or protocol than an earlier registry.
    PortConflict,
    /// The registry of the endpoints could not be read for so long that its endpoints are used only for ports without ready
    /// endpoints of other registries.
    Demoted,
    /// The registry of the endpoints could not be read for so long that its endpoints are not used.
    Expired,
    /// The registry itself withholds the endpoints.
    Withheld(Withheld),
}

impl ExclusionReason {
    /// Returns the value as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::NotVisible => "not visible",
            Self::NotAllowed => "not allowed",
            Self::Unready => "unready",
            Self::NoAddress => "no address",
            Self::ClusterLocal => "cluster-local",
            Self::NotExported => "not exported",
            Self::OutsideMesh => "outside the mesh",
            Self::MeshTlsOff(by) => by.text(),
            Self::NoTunnel => "no tunnel",
            Self::NoTls => "no TLS",
            Self::OtherTls => "other TLS mode",
            Self::NoHostRoute => "no route by host name",
            Self::NoUsableGateway => "no usable gateway",
            Self::NotVerifiable => "not verifiable",
            Self::OtherOrganisation => "address of another organisation",
            Self::PortConflict => "port conflict",
            Self::Demoted => "registry demoted",
            Self::Expired => "registry expired",
            Self::Withheld(why) => why.text(),
        }
    }
}
