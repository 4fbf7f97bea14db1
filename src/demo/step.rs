//! The steps of the demo, in order: the name of each, and what it demonstrates.

/// A step of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    MeshName,
    HostName,
    Alias,
    Zones,
    OtherWay,
    MutualTls,
    Hbone,
    DoubleHbone,
    SplitHorizon,
    Federation,
    Kubernetes,
    DeadEndpoint,
    Recovery,
    NotExported,
    UnknownName,
    WrongProtocol,
    NoName,
    NotTls,
    IdentityDenied,
    Bulk,
    Reload,
    BadReload,
    Drain,
}

impl Step {
    pub(super) const ALL: [Self; 23] = [
        Self::MeshName,
        Self::HostName,
        Self::Alias,
        Self::Zones,
        Self::OtherWay,
        Self::MutualTls,
        Self::Hbone,
        Self::DoubleHbone,
        Self::SplitHorizon,
        Self::Federation,
        Self::Kubernetes,
        Self::DeadEndpoint,
        Self::Recovery,
        Self::NotExported,
        Self::UnknownName,
        Self::WrongProtocol,
        Self::NoName,
        Self::NotTls,
        Self::IdentityDenied,
        Self::Bulk,
        Self::Reload,
        Self::BadReload,
        Self::Drain,
    ];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::MeshName => "mesh name, by weight",
            Self::HostName => "host name",
            Self::Alias => "route to a service",
            Self::Zones => "wildcard, nearest zone",
            Self::OtherWay => "west to east",
            Self::MutualTls => "mutual TLS",
            Self::Hbone => "HBONE beside SNI",
            Self::DoubleHbone => "double HBONE",
            Self::SplitHorizon => "split horizon",
            Self::Federation => "two organisations",
            Self::Kubernetes => "two Kubernetes clusters",
            Self::DeadEndpoint => "dead endpoint",
            Self::Recovery => "endpoint is back",
            Self::NotExported => "not exported",
            Self::UnknownName => "unknown name",
            Self::WrongProtocol => "wrong protocol",
            Self::NoName => "no name",
            Self::NotTls => "not TLS",
            Self::IdentityDenied => "identity denied",
            Self::Bulk => "bulk",
            Self::Reload => "reload",
            Self::BadReload => "broken config",
            Self::Drain => "drain",
        }
    }

    /// Returns a description of the step and of its purpose.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::MeshName => {
                "Mesh names, as Istio sidecars send them: clients on net-east call checkout on net-west, whose \
                 three endpoints have the weights 1, 1 and 2."
            }
            Self::HostName => {
                "Host names, as any TLS client sends them: the same service, without any mesh software."
            }
            Self::Alias => "A route: the name checkout.global leads to the same service.",
            Self::Zones => {
                "A wildcard route: *.shop.example has one endpoint in the gateway's own zone, which gets all \
                 calls, and one in another zone."
            }
            Self::OtherWay => {
                "The other direction: clients on net-west call reviews on net-east, by mesh name \
                 and by host name."
            }
            Self::MutualTls => {
                "End-to-end mutual TLS: payments requires a client certificate. The gateway has no key and takes \
                 no part in the handshake."
            }
            Self::Hbone => {
                "HBONE and SNI on one port: one HBONE connection of web carries streams to echo while other \
                 clients connect by server name."
            }
            Self::DoubleHbone => {
                "Double HBONE: ledger accepts HBONE itself, so the inner mutual TLS ends at ledger, and the \
                 gateway passes through bytes that it cannot read."
            }
            Self::SplitHorizon => {
                "Split horizon: catalog runs in three clusters. Each network gets its own endpoints by address \
                 and the endpoints of the other network as one gateway."
            }
            Self::Federation => {
                "Two organisations, each with an authority of its own, are linked by one command on each side. North calls a service of \
                 south; then south is killed, and comes back."
            }
            Self::Kubernetes => {
                "Two real Kubernetes clusters, each on a network of its own: pods become ready and unready, and the other network \
                 sees the sum behind the gateway that a Service names."
            }
            Self::DeadEndpoint => {
                "checkout-3 dies. Its calls go to the other endpoints, and after a few failures it is ejected."
            }
            Self::Recovery => "checkout-3 is back, and gets its share again when the ejection ends.",
            Self::NotExported => {
                "A service that no export rule names cannot be reached. The client gets a TLS alert; `isthmus \
                 explain` gives the operator the reason."
            }
            Self::UnknownName => {
                "A misspelt name: the client gets the same alert, and `isthmus explain` suggests similar names."
            }
            Self::WrongProtocol => {
                "The mesh listener accepts only clients of the mesh: a client without the mesh's ALPN protocol is \
                 refused."
            }
            Self::NoName => "A client that sends no server name has no route here.",
            Self::NotTls => "A client that does not speak TLS is disconnected at once.",
            Self::IdentityDenied => {
                "vault is exported only to callers of the namespace bank: web gets the status 403, and `isthmus \
                 explain` shows why."
            }
            Self::Bulk => "A download of 256 MiB: the bytes stay in the kernel (splice).",
            Self::Reload => "A reload adds a route. Open connections continue.",
            Self::BadReload => {
                "A reload of a broken config changes nothing, and the gateway names the mistake with line and \
                 column."
            }
            Self::Drain => {
                "SIGTERM during a call: the call finishes, new connections are refused, and the exit code is 0."
            }
        }
    }
}
