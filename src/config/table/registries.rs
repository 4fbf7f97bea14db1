//! The keys of `registries`: the sources of services, and the items that each may give.

use std::sync::Arc;

use isthmus_aggregator::spec::etcd::PREFIX;
use isthmus_aggregator::spec::kubernetes::{GATEWAY_CONTROLLER, SYSTEM_NAMESPACE, ServiceImports};
use isthmus_document::form::{self, text_forms};
use isthmus_document::key::{Defaulted, Key, keys};
use isthmus_document::problem::InvalidValue;
use isthmus_model::name::HostName;
use isthmus_settings::listener::RefusalMode;

text_forms! {
    /// The name of a controller of the Gateway API.
    pub(crate) ControllerName: Arc<str> = controller_name, "controllerName", "^[a-z0-9.-]+/[A-Za-z0-9/._~%!$&'()*+,;=:-]+$",
        "a domain and a path, such as example.com/gateways";
}

/// Reads a `GatewayController`: a host name and a path of RFC 3986, together up to 253 characters.
fn controller_name(text: &str) -> Result<Arc<str>, InvalidValue> {
    let (domain, path) = text.split_once('/').ok_or("")?;
    let is_of_path = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~%!$&'()*+,;=:".contains(&byte);
    let is_domain = HostName::parse(domain).is_ok_and(|name| name.as_str() == domain);
    let is_legal = is_domain && !path.is_empty() && path.bytes().all(is_of_path) && text.len() <= 253;
    if is_legal { Ok(text.into()) } else { Err("".into()) }
}

// The keys that `kubernetes` and `kubernetesClusters` share.
pub(crate) const TRUST_DOMAIN: Key<form::TrustDomain> =
    Key::optional("trustDomain", "`mesh.trustDomain`", "Trust domain of the pods' identities.");
pub(crate) const MESH_CONFIG: Defaulted<form::Boolean> = Defaulted::new(
    "meshConfig",
    || false,
    "`true`: the trust domain and `clusterLocal` in the ConfigMap `istio` of the system namespace apply, if there is one.",
);
pub(crate) const SYSTEM: Defaulted<form::Text> =
    Defaulted::new("systemNamespace", || SYSTEM_NAMESPACE.into(), "Namespace of the mesh's control plane.");
pub(crate) const NAMESPACES: Key<Namespaces> =
    Key::optional("namespaces", "all", "Namespaces that are read.");
pub(crate) const MANUAL_ENDPOINTS: Defaulted<form::Boolean> = Defaulted::new(
    "manualEndpoints",
    || false,
    "`true`: endpoints without a pod are used as well. Such endpoints have no identity.",
);
pub(crate) const DESTINATION_RULES: Defaulted<form::Boolean> = Defaulted::new(
    "destinationRules",
    || false,
    "`true`: the subsets of DestinationRules (`networking.istio.io/v1`) become subsets of the services, and a port counts as \
     outside the mesh where a DestinationRule or a PeerAuthentication (`security.istio.io`) turns mTLS off.",
);
pub(crate) const SERVICE_ENTRIES: Defaulted<form::Boolean> = Defaulted::new(
    "serviceEntries",
    || false,
    "`true`: ServiceEntries and WorkloadEntries (`networking.istio.io/v1`) are read. Their endpoints have no pod that proves an address, \
     so whoever may write them chooses where a service of the same namespace leads, within `allow.addresses` and outside of other \
     namespaces' pods and Services.",
);
pub(crate) const REPLICAS: Defaulted<form::Boolean> = Defaulted::new(
    "replicas",
    || false,
    "`true`: Deployments and StatefulSets (`apps/v1`) are read. Steering then takes the number of their replicas for the demand of \
     their services, so that pods which are lost do not take it with them, and a scale-down counts at once.",
);
pub(crate) const GATEWAYS: Key<form::OrOff<GatewayNamespaces>> = Key::optional(
    "gateways",
    "the system namespace",
    "Namespaces in which the registry looks for gateways of networks.",
);

keys! {
    /// A source of services.
    pub(crate) Registry "registry" one of [FILE, ETCD, ISTIOD, KUBERNETES, KUBERNETES_CLUSTERS] {
        /// A registry in a file.
        FILE "file": RegistryPath => "none";
        /// A registry in etcd.
        ETCD "etcd": RegistryEtcd => "none";
        /// An istiod as registry.
        ISTIOD "istiod": RegistryIstiod => "none";
        /// A Kubernetes cluster as registry.
        KUBERNETES "kubernetes": Kubernetes => "none";
        /// Kubernetes clusters that are found while the gateway runs, each a registry of its own.
        KUBERNETES_CLUSTERS "kubernetesClusters": KubernetesClusters => "none";
        /// Services, networks and addresses that the registry may provide. Everything else is left out, and counted
        /// in `isthmus status`.
        ALLOW "allow": Allow => "any service, its own network";
    }

    /// A registry kept in a file with a `services` list.
    pub(crate) RegistryPath "registryPath" {
        /// File, or directory of files.
        PATH "path": form::Path => required;
        /// Cluster of the registry's endpoints. The name must not begin with `peer/`.
        CLUSTER "cluster": form::ClusterName => required;
        /// Network of the registry's endpoints, except those that set their own.
        NETWORK "network": form::NetworkName => "unknown";
    }

    /// A registry kept in etcd (API v3). Each service has one key, `<prefix><namespace>/<hostname>`, whose value is
    /// one item of a `services` list as YAML or JSON. `isthmus registry` writes these keys. While a value has
    /// mistakes, the last good value of its key stays in use.
    pub(crate) RegistryEtcd "registryEtcd" {
        /// Members of one etcd cluster. The next member is asked if the one before it does not answer.
        ENDPOINTS "endpoints": form::NonEmpty<form::Etcd> => required;
        /// Prefix of the registry's keys.
        PREFIX "prefix": form::EtcdPrefix = PREFIX.into();
        /// Cluster of the registry's endpoints. The name must not begin with `peer/`.
        CLUSTER "cluster": form::ClusterName => required;
        /// Network of the registry's endpoints, except those that set their own.
        NETWORK "network": form::NetworkName => "unknown";
        /// TLS settings, required for members with `https://`.
        TLS "tls": EtcdTls => "none";
        /// etcd user to log in as; requires `passwordFile`.
        USER "user": form::Text => "none";
        /// File with the user's password, read for each connection.
        PASSWORD_FILE "passwordFile": form::Path => "none";
    }

    /// TLS to etcd. The files are read for each connection.
    pub(crate) EtcdTls "etcdTls" {
        /// PEM file of the roots that verify the etcd servers' certificates.
        ROOTS "roots": form::Path => required;
        /// PEM file of the client certificate chain, leaf first; requires `key`.
        CERTIFICATE "certificate": form::Path => "none";
        /// PEM file of the client certificate's private key.
        KEY "key": form::Path => "none";
    }

    /// An istiod, asked like a ztunnel asks it (WDS), without access to the API server of its cluster. Its services become
    /// services, its workloads endpoints, and the gateways of other networks gateways. What stands behind such a gateway is
    /// taken only if `allow.networks` names the network. Networks and clusters that other registries read, as their `network`
    /// and `cluster` say, are left out. WDS has no labels, subsets, names of ports and marks for exports.
    pub(crate) RegistryIstiod "registryIstiod" {
        /// Address of istiod: `https://host:port`. The usual port is 15012.
        ADDRESS "address": form::Https => required;
        /// Cluster of the registry's endpoints: the one in which istiod runs. The name must not begin with `peer/`.
        CLUSTER "cluster": form::ClusterName => required;
        /// Network of the cluster, as istiod knows it: the one of its neighbours.
        NETWORK "network": form::NetworkName => "unknown";
        /// File of the token that authenticates the gateway to istiod, read for each connection. A service account's token needs
        /// the audience `istio-ca`.
        TOKEN "token": form::Path => required;
        /// PEM file of the roots that verify istiod's certificate, read for each connection.
        ROOTS "roots": form::Path => required;
    }

    /// A Kubernetes cluster. Its Services become services, and the pods in their EndpointSlices become endpoints.
    /// An endpoint is used only if its pod exists with the same UID, namespace and address.
    pub(crate) Kubernetes "registryKubernetes" {
        /// Cluster of the registry's endpoints. The name must not begin with `peer/`.
        CLUSTER "cluster": form::ClusterName => required;
        /// Kubeconfig file, read again when it changes. A kubeconfig that would start a program or read other files
        /// is refused.
        KUBECONFIG "kubeconfig": form::Path => "the pod's own service account";
        /// Context of the kubeconfig.
        CONTEXT "context": form::Text => "the current context";
        /// File with the bearer token, read again when it changes. Use it where a sidecar renews the token.
        TOKEN_FILE "tokenFile": form::Path => "the token in the kubeconfig";
        /// Network of endpoints whose pods have no network label.
        NETWORK "network": form::NetworkName => "the label `topology.istio.io/network` of the system namespace";
        /// Gateways and routes of the Gateway API that this process serves. Only one registry may have this key.
        GATEWAY_API "gatewayApi": form::OrOff<GatewayApi> => "off";
        /// `write`: the registry writes a ServiceImport (`multicluster.x-k8s.io`) for each service of the cluster set, in the
        /// namespace of its name. Only objects with the label `app.kubernetes.io/managed-by: isthmus` are
        /// changed and removed. One replica at a time writes; it holds a Lease.
        SERVICE_IMPORTS "serviceImports": form::Choice<ServiceImports> = ServiceImports::default();
        /// With `true`, the registry also writes EndpointSlices for these ServiceImports; requires `serviceImports: write`. They have
        /// the endpoints of each exporting cluster that are on the network of the registry, up to 1,000 per cluster and address
        /// family, and the label `endpointslice.kubernetes.io/managed-by: isthmus.io`. Those that were written stay when it is turned off.
        SLICES "slices": form::Boolean = false;
        /// With `true`, the registry also writes a Service with a cluster IP for each of these ServiceImports whose service the
        /// cluster does not export, so that pods outside the mesh reach the service
        /// (docs/kubernetes.md). Those that were written stay when it is turned off. Requires `serviceImports: write`, and
        /// cannot be used with `serviceEntries`.
        DERIVED_SERVICES "derivedServices": form::Boolean = false;
    } + TRUST_DOMAIN + MESH_CONFIG + SYSTEM + NAMESPACES + MANUAL_ENDPOINTS + DESTINATION_RULES + SERVICE_ENTRIES + REPLICAS + GATEWAYS

    /// Kubernetes clusters whose kubeconfigs are found while the gateway runs. A cluster that goes away is
    /// withdrawn at once; changed credentials are tried beside those in use. The node's own cluster is left out.
    pub(crate) KubernetesClusters "registryKubernetesClusters" one of [FOLDER, SECRETS] {
        /// Folder with one kubeconfig per cluster. The name of the cluster is the name of the file without its
        /// extension (the part from the last dot on).
        FOLDER "folder": form::Path => "none";
        /// Secrets of the cluster that this pod runs in, as `istioctl create-remote-secret` makes them.
        SECRETS "secrets": ClusterSecrets => "none";
    } + TRUST_DOMAIN + MESH_CONFIG + SYSTEM + NAMESPACES + MANUAL_ENDPOINTS + DESTINATION_RULES + SERVICE_ENTRIES + REPLICAS + GATEWAYS

    /// Secrets with the label `istio/multiCluster=true`: each key of their data is the name of a cluster, and its value
    /// is the kubeconfig of that cluster.
    pub(crate) ClusterSecrets "clusterSecrets" {
        /// Namespace of the Secrets.
        NAMESPACE "namespace": form::Text => required;
    }

    /// Gateways of the Gateway API that this process serves: those of one GatewayClass, with their ListenerSets, TLSRoutes and
    /// TCPRoutes (`gateway.networking.k8s.io/v1`). All replicas serve them, and one of them writes their status.
    pub(crate) GatewayApi "gatewayApi" {
        /// Name of the GatewayClass.
        CLASS "class": form::Text => required;
        /// The `controllerName` of the GatewayClass. The status of a class with another one is not written.
        CONTROLLER "controllerName": ControllerName = Arc::from(GATEWAY_CONTROLLER);
        /// Ports that Gateways may listen on. The gateway opens them on all addresses, as listeners with the names
        /// `gateway-PORT`; no other listener may have one of them. On these ports, routes of Gateways apply, and those of
        /// `routes` that name no other listener; of two equal names, that of `routes` wins. Exports do not apply.
        PORTS "ports": form::NonEmpty<form::Port> => required;
        /// Addresses or host names at which clients reach this process, such as those of a load balancer. They are the
        /// addresses in the status of a Gateway that requests none. A Gateway may request one of them, which is the same
        /// as none.
        ADDRESSES "addresses": form::NonEmpty<form::Host> => "none";
        /// Name of this process's own Service, in the namespace `node.namespace` (else the system namespace), which must be one that
        /// is read. The addresses of its load balancer and its `externalIPs` are further `addresses`.
        SERVICE "service": form::Text => "none";
        /// Addresses of the host, of which each Gateway that requests none has one for itself, as if it had requested that address.
        /// A Gateway keeps its address while it exists. If none is free, the condition `Programmed` is false
        /// (`AddressNotAssigned`).
        POOL "pool": form::NonEmpty<form::Cidr> => "none; these Gateways share all addresses";
        /// Addresses of the host that a Gateway may request, as it may those of `pool`. It has the connections to that address
        /// alone. An address belongs to the Gateway whose status shows it, then to the oldest one that requests it; one by
        /// which the host or pod itself is reached belongs to none.
        REQUESTABLE "requestable": form::NonEmpty<form::Cidr> => "none";
        /// Namespaces whose Gateways are served. The Gateways of others are not accepted (`NotAllowed`).
        GATEWAYS_FROM "gatewaysFrom": GatewaysFrom => "every namespace";
        /// Routes of one namespace that are accepted, the oldest first.
        ROUTES_PER_NAMESPACE "routesPerNamespace": form::Integer<usize, 1, 100_000> = 1_000;
        /// How a TLS client of these ports learns that it is refused, as `refusal` of a listener.
        REFUSAL "refusal": form::Choice<RefusalMode> = RefusalMode::default();
    }

    /// Namespaces whose Gateways are served. A namespace must match all keys that are set.
    pub(crate) GatewaysFrom "gatewaysFrom" {
        /// Names of namespaces.
        NAMESPACES "namespaces": form::NonEmpty<form::Text> => "all";
        /// Labels that a namespace must have.
        LABELS "labels": form::Labels => "any";
    }

    /// Namespaces of a Kubernetes cluster. A namespace must match all keys that are set.
    pub(crate) Namespaces "namespaces" {
        /// Names of namespaces. Up to 20 namespaces are watched individually, which needs fewer permissions.
        ONLY "only": form::NonEmpty<form::Text> => "all";
        /// Names of namespaces to leave out.
        EXCEPT "except": form::List<form::Text> => "none";
        /// Labels that a namespace must have.
        LABELS "labels": form::Labels => "any";
    }

    /// Namespaces in which a Service or Gateway object with the label `topology.istio.io/network` becomes a gateway
    /// of that network. The label is ignored in other namespaces, because anyone who may edit Services there could
    /// redirect a network's traffic.
    pub(crate) GatewayNamespaces "gatewayNamespaces" {
        /// Names of namespaces.
        NAMESPACES "namespaces": form::NonEmpty<form::Text> => required;
    }

    /// Services, networks and addresses that a registry may provide.
    pub(crate) Allow "allow" {
        /// Host names of services. An allowed service is also allowed under the names derived from it: its name in the
        /// cluster set and the host names of its pods.
        SERVICES "services": form::NonEmpty<form::Pattern> => "any";
        /// Networks of endpoints.
        NETWORKS "networks": form::NonEmpty<form::NetworkName> => "the network of the registry";
        /// Address blocks of endpoints, including addresses that host names resolve to. A loopback or link-local
        /// address is allowed only by a block within the loopback or link-local range (`127.0.0.0/8`, not
        /// `0.0.0.0/0`). Unspecified and multicast addresses are never allowed.
        ADDRESSES "addresses": form::NonEmpty<form::Cidr> => "all but loopback and link-local";
    }
}
