//! The keys of `registries`: the sources of services, and the items that each may give.

use crate::aggregator::etcd::spec::PREFIX;
use crate::aggregator::kubernetes::spec::SYSTEM_NAMESPACE;
use crate::document::scalar;
use crate::document::table::{Kind, Object, default, list, optional, required, some};

use super::{CIDR, PATTERN, TEXT};

const PATH: Kind = Kind::Text(&scalar::PATH);

pub(in crate::config) static REGISTRY: Object = Object {
    name: "registry",
    doc: "A source of services.",
    one_of: &["file", "etcd", "kubernetes", "kubernetesClusters"],
    fields: &[
        optional("file", Kind::Object(&REGISTRY_PATH), "none", "A registry in a file."),
        optional("etcd", Kind::Object(&REGISTRY_ETCD), "none", "A registry in etcd."),
        optional("kubernetes", Kind::Object(&KUBERNETES), "none", "A Kubernetes cluster as registry."),
        optional(
            "kubernetesClusters",
            Kind::Object(&KUBERNETES_CLUSTERS),
            "none",
            "Kubernetes clusters that are found while the gateway runs, each a registry of its own.",
        ),
        optional(
            "allow",
            Kind::Object(&ALLOW),
            "any service, its own network",
            "Services, networks and addresses that the registry may provide. Everything else is left out, and \
             counted in `isthmus status`.",
        ),
    ],
};

pub(in crate::config) static REGISTRY_PATH: Object = Object {
    name: "registryPath",
    doc: "A registry kept in a file with a `services` list.",
    one_of: &[],
    fields: &[
        required("path", Kind::Text(&scalar::PATH), "File, or directory of files."),
        required("cluster", TEXT, "Cluster of the registry's endpoints."),
        optional(
            "network",
            TEXT,
            "unknown",
            "Network of the registry's endpoints, except those that set their \
             own.",
        ),
    ],
};

pub(in crate::config) static REGISTRY_ETCD: Object = Object {
    name: "registryEtcd",
    doc: "A registry kept in etcd (API v3). Each service has one key, `<prefix><namespace>/<hostname>`, whose \
          value is one item of a `services` list as YAML or JSON. `isthmus registry` writes these keys. While a \
          value has mistakes, the last good value of its key stays in use.",
    one_of: &[],
    fields: &[
        required(
            "endpoints",
            some(&Kind::Text(&scalar::ETCD)),
            "Members of one etcd cluster. The next member is asked if the one before it does not answer.",
        ),
        default("prefix", Kind::Text(&scalar::ETCD_PREFIX), PREFIX, "Prefix of the registry's keys."),
        required("cluster", TEXT, "Cluster of the registry's endpoints."),
        optional(
            "network",
            TEXT,
            "unknown",
            "Network of the registry's endpoints, except those that set their \
             own.",
        ),
        optional(
            "tls",
            Kind::Object(&ETCD_TLS),
            "none",
            "TLS settings, required for members with `https://`.",
        ),
        optional("user", TEXT, "none", "etcd user to log in as; requires `passwordFile`."),
        optional("passwordFile", PATH, "none", "File with the user's password, read for each connection."),
    ],
};

pub(in crate::config) static ETCD_TLS: Object = Object {
    name: "etcdTls",
    doc: "TLS to etcd. The files are read for each connection.",
    one_of: &[],
    fields: &[
        required("roots", PATH, "PEM file of the roots that verify the etcd servers' certificates."),
        optional(
            "certificate",
            PATH,
            "none",
            "PEM file of the client certificate chain, leaf first; requires \
             `key`.",
        ),
        optional("key", PATH, "none", "PEM file of the client certificate's private key."),
    ],
};

pub(in crate::config) static KUBERNETES: Object = Object {
    name: "registryKubernetes",
    doc: "A Kubernetes cluster. Its Services become services, and the pods in their EndpointSlices become \
          endpoints. An endpoint is used only if its pod exists with the same UID, namespace and address.",
    one_of: &[],
    fields: &[
        required("cluster", TEXT, "Cluster of the registry's endpoints."),
        optional(
            "kubeconfig",
            PATH,
            "the pod's own service account",
            "Kubeconfig file, read again when it changes. A kubeconfig that would start a program or read other \
             files is refused.",
        ),
        optional("context", TEXT, "the current one", "Context of the kubeconfig."),
        optional(
            "tokenFile",
            PATH,
            "the kubeconfig's own",
            "File with the bearer token, read again when it changes. Use it where a sidecar renews the token.",
        ),
        optional(
            "network",
            TEXT,
            "the label `topology.istio.io/network` of the system namespace",
            "Network of endpoints whose pods have no network label.",
        ),
        optional(
            "trustDomain",
            Kind::Text(&scalar::TRUST_DOMAIN),
            "`mesh.trustDomain`",
            "Trust domain of the pods' identities.",
        ),
        default(
            "meshConfig",
            Kind::Boolean,
            "false",
            "`true`: the trust domain in the ConfigMap `istio` of the system namespace applies, if there is one.",
        ),
        default("systemNamespace", TEXT, SYSTEM_NAMESPACE, "Namespace of the mesh's control plane."),
        optional("namespaces", Kind::Object(&NAMESPACES), "all", "Namespaces that are read."),
        default(
            "manualEndpoints",
            Kind::Boolean,
            "false",
            "`true`: endpoints without a pod are used as well. Such endpoints have no identity.",
        ),
        default(
            "destinationRules",
            Kind::Boolean,
            "false",
            "`true`: the subsets of DestinationRules (`networking.istio.io/v1`) become subsets of the services.",
        ),
        optional(
            "gateways",
            Kind::OrOff(&Kind::Object(&GATEWAY_NAMESPACES)),
            "the system namespace",
            "Namespaces in which the registry looks for gateways of networks.",
        ),
    ],
};

pub(in crate::config) static KUBERNETES_CLUSTERS: Object = Object {
    name: "registryKubernetesClusters",
    doc: "Kubernetes clusters whose kubeconfigs are found while the gateway runs. A cluster that goes away is withdrawn at once; \
          changed credentials are tried beside those in use. The node's own cluster is left out.",
    one_of: &["folder", "secrets"],
    fields: &[
        optional(
            "folder",
            PATH,
            "none",
            "Folder with one kubeconfig a cluster; the file's name, without what is behind its last dot, is the cluster.",
        ),
        optional(
            "secrets",
            Kind::Object(&CLUSTER_SECRETS),
            "none",
            "Secrets of the cluster that this pod runs in, as `istioctl create-remote-secret` makes them.",
        ),
        optional(
            "trustDomain",
            Kind::Text(&scalar::TRUST_DOMAIN),
            "`mesh.trustDomain`",
            "The trust domain of its pods' identities.",
        ),
        default(
            "meshConfig",
            Kind::Boolean,
            "false",
            "Whether the trust domain is read from the ConfigMap `istio` of the system namespace, where it has one.",
        ),
        default("systemNamespace", TEXT, SYSTEM_NAMESPACE, "The namespace of the mesh's control plane."),
        optional("namespaces", Kind::Object(&NAMESPACES), "all", "The namespaces that are read."),
        default(
            "manualEndpoints",
            Kind::Boolean,
            "false",
            "Whether endpoints without a pod are taken. They have no identity.",
        ),
        default(
            "destinationRules",
            Kind::Boolean,
            "false",
            "Whether the subsets of DestinationRules (`networking.istio.io/v1`) are read.",
        ),
        optional(
            "gateways",
            Kind::OrOff(&Kind::Object(&GATEWAY_NAMESPACES)),
            "the system namespace",
            "Where gateways of networks are looked for.",
        ),
    ],
};

pub(in crate::config) static CLUSTER_SECRETS: Object = Object {
    name: "clusterSecrets",
    doc: "Secrets with the label `istio/multiCluster=true`: each key of their data is a cluster, each value its kubeconfig.",
    one_of: &[],
    fields: &[required("namespace", TEXT, "Their namespace.")],
};

pub(in crate::config) static NAMESPACES: Object = Object {
    name: "namespaces",
    doc: "Namespaces of a Kubernetes cluster. A namespace must match all keys that are set.",
    one_of: &[],
    fields: &[
        optional(
            "only",
            some(&TEXT),
            "all",
            "Names of namespaces. Up to 20 namespaces are watched individually, which needs fewer permissions.",
        ),
        optional("except", list(&TEXT), "none", "Names of namespaces to leave out."),
        optional("labels", LABELS, "any", "Labels that a namespace must have."),
    ],
};

pub(in crate::config) static GATEWAY_NAMESPACES: Object = Object {
    name: "gatewayNamespaces",
    doc: "Namespaces in which a Service or Gateway object with the label `topology.istio.io/network` becomes a \
          gateway of that network. The label is ignored in other namespaces, because anyone who may edit Services \
          there could redirect a network's traffic.",
    one_of: &[],
    fields: &[required("namespaces", some(&TEXT), "Names of namespaces.")],
};

pub(in crate::config) const LABELS: Kind =
    Kind::Map { key: &scalar::TEXT, of: &Kind::Text(&scalar::LABEL_VALUE) };

pub(in crate::config) static ALLOW: Object = Object {
    name: "allow",
    doc: "Services, networks and addresses that a registry may provide.",
    one_of: &[],
    fields: &[
        optional("services", some(&PATTERN), "any", "Host names of services."),
        optional("networks", some(&TEXT), "its own", "Networks of endpoints."),
        optional(
            "addresses",
            some(&CIDR),
            "all but loopback and link-local",
            "Address blocks of endpoints, including addresses that host names resolve to. A loopback or \
             link-local address is allowed only by a block within the loopback or link-local range \
             (`127.0.0.0/8`, not `0.0.0.0/0`). Unspecified and multicast addresses are never allowed.",
        ),
    ],
};
