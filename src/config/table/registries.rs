//! The keys of `registries`: where services come from, and what each source may speak of.

use crate::aggregator::etcd::spec::PREFIX;
use crate::document::scalar;
use crate::document::table::{Kind, Object, default, optional, required, some};

use super::{CIDR, PATTERN, TEXT};

const PATH: Kind = Kind::Text(&scalar::PATH);

pub(in crate::config) static REGISTRY: Object = Object {
    name: "registry",
    doc: "A source of services.",
    one_of: &["file", "etcd"],
    fields: &[
        optional("file", Kind::Object(&REGISTRY_PATH), "none", "A registry in a file."),
        optional("etcd", Kind::Object(&REGISTRY_ETCD), "none", "A registry in etcd."),
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
