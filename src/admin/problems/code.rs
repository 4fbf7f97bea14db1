//! The codes of problems, with their meanings and what an operator checks next. `docs/reasons.md` is made from this list.

/// The severity of a problem, which decides whether `isthmus check` fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Some callers are not served because of it, now or soon.
    Failed,
    /// Anything else.
    Warning,
}

/// Defines the codes. Each row has the word, the severity and the area of `isthmus check`, the meaning, and what an operator checks
/// next.
macro_rules! codes {
    ($($variant:ident = $text:literal, $severity:ident in $area:literal, $meaning:literal, $look_at:literal;)*) => {
        /// The kind of a problem of the gateway. The failure of a single connection is no problem of this kind.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Code {
            $(#[doc = $meaning] $variant,)*
        }

        impl Code {
            /// All codes, in the order in which the documentation lists them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the code as `status`, the metric's label and the log write it.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// Returns whether `isthmus check` fails because of it.
            pub const fn severity(self) -> Severity {
                match self {
                    $(Self::$variant => Severity::$severity,)*
                }
            }

            /// Returns the area of `isthmus check` that it belongs to.
            pub const fn area(self) -> &'static str {
                match self {
                    $(Self::$variant => $area,)*
                }
            }

            /// Returns the meaning of the code.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => $meaning,)*
                }
            }

            /// Returns the command, key or document that the operator checks next.
            pub const fn look_at(self) -> &'static str {
                match self {
                    $(Self::$variant => $look_at,)*
                }
            }
        }
    };
}

codes! {
    ConfigRejected = "config_rejected", Failed in "config",
        "The config file on disk has mistakes, or an address in it is in use. The gateway keeps running with the config that it read \
         before.",
        "mistakes: `isthmus validate FILE`; an address in use: the process that listens on it; then `isthmus reload`";
    NeedsRestart = "needs_restart", Warning in "config",
        "The config file on disk has a change that takes effect only after a restart.",
        "the change in the file; restart the gateway, or undo the change";
    Draining = "draining", Failed in "gateway",
        "The gateway is stopping. It is not ready, and exits when its connections have ended.",
        "`isthmus get connections`, `drain.timeout`";
    RegistryMissing = "registry_missing", Failed in "registries",
        "A registry has not been read since the start of the gateway and has no saved copy, so its services are unknown.",
        "`isthmus get registries`; path and permissions of the file, address and user of etcd, address, token and roots of istiod, \
         or address, credentials and RBAC of the API server";
    RegistryStale = "registry_stale", Failed in "registries",
        "A registry cannot be read. Its last good state is in use (stale), is used only for ports without a ready \
         endpoint elsewhere (demoted), or has been removed (expired).",
        "`isthmus get registries`; for a file `isthmus validate FILE`, otherwise whether etcd, istiod, the API server or the peer can \
         be reached";
    RegistryHeld = "registry_held", Failed in "registries",
        "An update of a registry would leave many services without a ready endpoint. The update is held back, and \
         the state before it stays in use.",
        "the source of the registry; `aggregator.withdrawalHold`";
    RegistryFlawed = "registry_flawed", Failed in "registries",
        "Objects of a registry have mistakes. The last good state of these objects is in use.",
        "`isthmus get registries -o yaml`; the objects named there";
    RegistryImpaired = "registry_impaired", Warning in "registries",
        "A registry is read, but for at least five seconds not all of it has been right: the API server forbids a kind of \
         object, new credentials cannot be used, a gateway has no address, the network of the cluster is unknown, a \
         ServiceExport has no Service, or the clock of the API server differs from that of this host by more than 30 s.",
        "`report` of `isthmus get registries -o yaml`";
    PoliciesUnknown = "policies_unknown", Failed in "registries",
        "The authorization policies of a cluster, or its waypoints, are not known, because one of them cannot be read, or because their \
         kinds cannot be listed. ztunnels of the cluster get nothing new from the WDS server, and those that start do not become \
         ready: without a policy they would admit what it denies.",
        "the policy that the text names, or the right to list and watch `authorizationpolicies` and `peerauthentications` of \
         `security.istio.io`, and `gateways` of `gateway.networking.k8s.io`; `xds.wds.withoutPolicies` for a cluster without policies";
    WaypointIgnored = "waypoint_ignored", Warning in "registries",
        "A service has labels that name a waypoint (`istio.io/use-waypoint`) or a canary of it, which cannot be used. If its Gateway is \
         not there, has no address, or is not for the service, calls pass it by, as inside the cluster; if it may be there but \
         cannot be read, HBONE callers of the service are refused.",
        "the Gateway and the labels that the text names; the right to list and watch `gateways` of `gateway.networking.k8s.io`";
    ClusterClaimedTwice = "cluster_claimed_twice", Warning in "registries",
        "Two kubeconfigs have the same cluster. Of two Secrets, the older one is in use; of two files, the first by name. The other one \
         is ignored.",
        "the Secrets with the label `istio/multiCluster`, or the files in the folder; rename the cluster, or delete one of them";
    DrainActive = "drain_active", Warning in "gateways",
        "A planned drain is in force: calls are moved away from a service, endpoint, gateway, network, cluster or peer.",
        "`isthmus drains`; `isthmus undrain` ends a drain of an operator";
    GatewayUnreachable = "gateway_unreachable", Failed in "gateways",
        "A gateway of a network has ceased to answer: two connects in a row, one each second, have failed, or the link \
         with a peer's gateway has lost its heartbeats. Clients do not get it while another gateway of its network answers; three good \
         connects bring it back, more of them if it flaps. If no gateway of any other network answers, nothing changes, because this \
         host may be cut off.",
        "`isthmus get gateways`; the gateway and the path to it; `networks.*.probe`";
    EndpointClaimed = "endpoint_claimed", Warning in "registries",
        "EndpointSlices of a Kubernetes registry name pods with another UID, namespace or address for their endpoints, or ServiceEntries \
         and WorkloadEntries have addresses of other namespaces' pods or Services. These endpoints are not used: otherwise, anyone who \
         may write such objects could direct a service to them.",
        "`left_out` of `isthmus get registries -o yaml`; the EndpointSlices and entries of the services that `isthmus explain` names";
    StateNotKept = "state_not_kept", Warning in "registries",
        "The last good copy of a registry, or the times at which services were first exported to peers, cannot be written to \
         `state.dir`, or those of the last run could not be read. After a restart, services of a registry that cannot be read are \
         unknown or out of date, and new peers may assign other virtual addresses.",
        "permissions of `state.dir`, and the free space on the disk; `isthmus get registries`";
    RegistryLeftOut = "registry_left_out", Warning in "registries",
        "A registry has services or endpoints that its `allow` does not permit. They are left out.",
        "`isthmus get registries`; `registries[].allow`";
    AddressNotAllowed = "address_not_allowed", Warning in "registries",
        "A registry has endpoints at addresses that its `allow.addresses` does not permit. Loopback and \
         link-local addresses need a block of their own there. These endpoints are left out.",
        "`isthmus get registries`; `registries[].allow.addresses`";
    ObjectsIgnored = "objects_ignored", Warning in "registries",
        "A registry in Kubernetes has objects that it can read and that have no effect: ServiceEntries and WorkloadEntries with \
         `serviceEntries: false`, or those of a form that is not used. The text has the number of each kind, its first object, and why.",
        "the object that the text names; `serviceEntries` of the registry; `isthmus_registry_objects_ignored`";
    ServiceConflict = "service_conflict", Warning in "registries",
        "Registries disagree about a service. The earlier registry applies.",
        "`conflicts` of `isthmus status -o json`";
    ExportAbsent = "export_absent", Warning in "names",
        "An export rule or a route names a service that no registry has, so the rule or route makes nothing reachable. \
         Services that may belong to a registry that was not read yet are not reported.",
        "the name under `exports` or `routes`; `isthmus get services`";
    ExportNarrowed = "export_narrowed", Warning in "names",
        "A rule of `exports` or of `peers[].export` without `tls` leads to less than it names: endpoints of Kubernetes or istiod without \
         mTLS of the mesh, and plain host names, need `tls: own`.",
        "`isthmus exposed`; `tls: own` in the rule to reach them, or `tls: mesh` to keep them shut, which ends the problem";
    NameUnresolved = "name_unresolved", Failed in "names",
        "The host name of an endpoint or of a gateway does not resolve.",
        "`isthmus get endpoints`, `isthmus get gateways`; `dns.servers`";
    NameStale = "name_stale", Warning in "names",
        "The last look-up of a host name of an endpoint or of a gateway failed, or found no address although an earlier one did. The \
         last addresses stay in use: while look-ups fail, or for `dns.holdMissing` if the name does not exist any more.",
        "`dns.servers`, and their records of the name; `dns.holdMissing`";
    VirtualAddressesFull = "virtual_addresses_full", Failed in "names",
        "Imported services have no virtual address, because their range is full. Addresses of services that are gone stay reserved \
         for 24 h.",
        "`isthmus get services`; a larger range in `dnsServer.vips`, the same for all replicas";
    VirtualAddressesNotKept = "virtual_addresses_not_kept", Warning in "names",
        "The virtual addresses in use cannot be written to `state.dir`, or those of the last run could not be read. A restart \
         without that file changes few addresses: only those of services whose preferred address was reserved for a service \
         that is gone.",
        "the file `virtual-addresses` in `state.dir`: its permissions, and the free space on the disk";
    CertificateMissing = "certificate_missing", Failed in "certificates",
        "The gateway has no certificate yet and is not ready. HBONE callers are refused (`tls_failed`).",
        "`isthmus get certificates`; `identity`";
    CertificateExpiring = "certificate_expiring", Warning in "certificates",
        "The gateway's own certificate has less than a third of its lifetime left and has not been renewed.",
        "`isthmus get certificates`; `identity` of `isthmus status -o json`";
    CertificateExpired = "certificate_expired", Failed in "certificates",
        "The gateway's own certificate has expired, so HBONE callers refuse it. The gateway is not ready.",
        "the clock of this host; `isthmus get certificates`; `identity` of `isthmus status -o json`";
    CertificateNotYetValid = "certificate_not_yet_valid", Failed in "certificates",
        "The gateway's own certificate is not valid yet, so HBONE callers refuse it. The gateway is not ready until it is.",
        "the clock of this host; `isthmus get certificates`";
    CertificateSource = "certificate_source", Failed in "certificates",
        "A certificate, or the roots of a trust domain, cannot be read or renewed, a new certificate is not valid yet, or roots that \
         a peer has announced cannot be stored. The last good certificate or roots stay in use. A certificate that is not valid \
         yet is used as soon as it is valid.",
        "`identity` of `isthmus status -o json`";
    RootsExpired = "roots_expired", Failed in "certificates",
        "All root certificates of a trust domain have expired, so callers of that domain are refused.",
        "`isthmus get certificates`; the key `trust` of this gateway's config";
    LimitReached = "limit_reached", Failed in "limits",
        "Within the last minute, the gateway refused or closed connections (`limit_global`, `limit_service`) at the limit that the \
         problem names: of all connections, incomplete hellos, file descriptors, one service, or each endpoint of a route. The limit of \
         all connections follows from `limits.connections` and the descriptor limit of the process.",
        "`isthmus status`: connections and limits; `ulimit -n`; `limits` of the config";
    MemoryShort = "memory_short", Failed in "limits",
        "More than 90 % of the memory budget are used, or in the last ten minutes a CONNECT stream was ended for that reason: each second \
         the one that holds most (`stalled`).",
        "`isthmus status`: memory; `limits.memory`, and the memory limit of the container; `isthmus failures --reason stalled`";
    EndpointEjected = "endpoint_ejected", Failed in "endpoints",
        "An endpoint failed several times in a row, so the gateway sends it no connections for a while (`ejection.time`).",
        "`isthmus get endpoints`; the endpoint itself";
    EndpointUnhealthy = "endpoint_unhealthy", Failed in "endpoints",
        "The health checks of an endpoint fail, so it gets no connections while another endpoint is healthy.",
        "`isthmus get endpoints`, `isthmus explain NAME --probe`; the endpoint itself; `health`";
    ChecksLate = "checks_late", Warning in "endpoints",
        "Health checks are delayed, because as many are running as the descriptor limit allows. The health of endpoints is \
         noticed later.",
        "endpoints that do not answer: `isthmus get endpoints`; `health.interval`, `health.timeout`; `ulimit -n`";
    EndpointWithdrawn = "endpoint_withdrawn", Warning in "endpoints",
        "An operator has drained or disabled an endpoint of this gateway. A restart makes the endpoint available again.",
        "`isthmus endpoint enable ADDRESS`";
    EndpointFailing = "endpoint_failing", Failed in "endpoints",
        "At least the last three connection attempts to an endpoint failed. The endpoint is not ejected and still \
         gets connections.",
        "`isthmus get endpoints`, `isthmus explain NAME --probe`; the endpoint itself";
    EndpointNotTls = "endpoint_not_tls", Failed in "endpoints",
        "An endpoint answers a ClientHello with bytes that are not TLS.",
        "the port of the endpoint: `isthmus get endpoints`";
    EndpointSilent = "endpoint_silent", Failed in "endpoints",
        "An endpoint has been sent a ClientHello, and has not answered it for 5 s, or only by a part of a record; or it has acknowledged \
         no byte of a connection for 5 s. The problem lasts until the endpoint answers, or no connection waits for it.",
        "the endpoint itself; a firewall or a smaller MTU on the way: `isthmus explain NAME --probe`";
    EndpointSlow = "endpoint_slow", Warning in "endpoints",
        "The median of the longest waits of connections for a byte of an endpoint is above 1 s, and five times that of the other \
         endpoints of the service. It still gets connections.",
        "ANSWER of `isthmus get endpoints`; the endpoint itself";
    AccessLogLost = "access_log_lost", Warning in "logs",
        "Lines of the access log were lost in the last ten minutes because the queue was full or the file could \
         not be written.",
        "`telemetry.accessLog.path`, the disk, the program that reads the log; `isthmus_access_log_dropped_total`";
    SpansLost = "spans_lost", Warning in "logs",
        "Spans were lost in the last ten minutes because the collector could not be reached or did not keep up.",
        "`telemetry.tracing.otlp`; `isthmus_spans_dropped_total`";
    PeerNotEnrolled = "peer_not_enrolled", Warning in "peers",
        "The config names a peer without `identity` and `trust`, and the peer is not enrolled. The gateway exchanges no \
         services with this peer.",
        "`isthmus peer invite` on one side and `isthmus peer join` on the other; or `peers[].identity` and `peers[].trust`";
    PeerNotLive = "peer_not_live", Failed in "peers",
        "There is no live link with a peer. The services of the peer stay in use for a while (stale), then are used only where \
         no other registry has a ready endpoint (demoted), then have no endpoints (expired).",
        "`isthmus peers` on both sides; `peers[].dial` or `peers[].accept`; the network between the gateways";
    PeerUnreachable = "peer_unreachable", Failed in "peers",
        "Services that are exchanged with a peer cannot be called, because no gateway leads to them: the peer has sent none, none \
         of them answers, or `peers[].addresses` does not allow their addresses; or this gateway knows no gateway of its own mesh \
         that it could send to the peer.",
        "`isthmus peers -o yaml`, `isthmus get registries -o yaml` on both sides; `networks[].gateways`, `peers[].addresses`";
    PeerRootNotInFile = "peer_root_not_in_file", Warning in "peers",
        "A peer has announced a root that its file of `peers[].trust` does not have, as in a change of its certificate authority. This \
         process verifies the peer by it, and keeps it in `state.dir`; a replica that starts without it refuses the peer.",
        "`isthmus peer roots NAME` prints the roots in use: write them into the file, on each replica";
    PeerClock = "peer_clock", Warning in "peers",
        "The clock of a peer differs from this gateway's by more than five minutes, so certificates may seem expired or not valid yet.",
        "`isthmus peers`; the time synchronisation of both hosts";
    PeerLeftOut = "peer_left_out", Warning in "peers",
        "Services that match the rules of a peer are not exchanged, because one side refuses them, a limit is reached, or \
         another service has the same name.",
        "`isthmus peers -o yaml`; `peers[].export`, `peers[].import`, `peers[].limits`";
    XdsClientRefused = "xds_client_refused", Failed in "xds",
        "An xDS client was refused in the last ten minutes because no rule of `xds.clients` allows the network or \
         cluster that it claims, because a request has too many items, or because its TLS handshake failed, for example without a certificate of a trusted authority.",
        "the log of the gateway, `xds.refused` of `isthmus status -o json`; `xds.clients`, `trust`; `isthmus_xds_refused_total`";
}
