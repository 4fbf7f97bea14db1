//! The steps of the demo, in their order: what each is called, and what it shows.

/// One thing that is shown.
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
    pub(super) const ALL: [Self; 21] = [
        Self::MeshName,
        Self::HostName,
        Self::Alias,
        Self::Zones,
        Self::OtherWay,
        Self::MutualTls,
        Self::Hbone,
        Self::DoubleHbone,
        Self::SplitHorizon,
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

    /// What is shown, and why it matters.
    pub(super) fn story(self) -> &'static str {
        match self {
            Self::MeshName => {
                "By mesh name, as Istio's sidecars ask: east calls checkout in the west, whose endpoints weigh 1, 1 and 2."
            }
            Self::HostName => {
                "By host name, as any TLS client asks: the same service, with no mesh software at all."
            }
            Self::Alias => "By a name of your own: the route checkout.global leads to the same service.",
            Self::Zones => {
                "By a wildcard: *.shop.example has an endpoint in the gateway's own zone, which gets the calls, and one elsewhere."
            }
            Self::OtherWay => "The other way: west calls reviews in the east, by mesh name and by host name.",
            Self::MutualTls => {
                "Mutual TLS from end to end: payments asks for a certificate; the gateway holds no key and is not part of it."
            }
            Self::Hbone => {
                "HBONE calls beside SNI calls: on the mesh's port, one connection of web carries streams to echo, while others come by server name."
            }
            Self::DoubleHbone => {
                "A tunnel in the tunnel: ledger takes HBONE itself, so its caller's mutual TLS ends there, and the gateway passes on what it cannot read."
            }
            Self::SplitHorizon => {
                "catalog runs in three clusters, one of them in three zones: each side is given its own endpoints, and the rest as one gateway."
            }
            Self::DeadEndpoint => {
                "checkout-3 dies. Its calls go to the others, and soon nobody tries it any more."
            }
            Self::Recovery => "checkout-3 is back, and after a while gets its share again.",
            Self::NotExported => {
                "A service that no export rule names cannot be reached; a refused client reads a TLS alert, you read why."
            }
            Self::UnknownName => {
                "A name with a typing error: the client reads the same alert; you read what may have been meant."
            }
            Self::WrongProtocol => {
                "The mesh's listener takes clients of the mesh alone: one without its protocol (ALPN) is refused."
            }
            Self::NoName => "A client that sends no server name has no route here.",
            Self::NotTls => "What is not TLS is closed at once.",
            Self::IdentityDenied => {
                "vault is for callers of the namespace bank: web is told 403 over HBONE, and explain says why, as the gateway itself decides."
            }
            Self::Bulk => {
                "256 MiB down one connection: bulk stays in the kernel (splice), whatever its size."
            }
            Self::Reload => "The config gets one more route. Connections that are open go on.",
            Self::BadReload => {
                "A broken config changes nothing, and the gateway says what is wrong with it, and where."
            }
            Self::Drain => {
                "SIGTERM in the middle of a call: the call is finished, new ones are not taken, the exit code is 0."
            }
        }
    }
}
