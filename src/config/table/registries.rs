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
        optional("file", Kind::Object(&REGISTRY_PATH), "none", "The file that is the registry."),
        optional("etcd", Kind::Object(&REGISTRY_ETCD), "none", "The etcd that holds the registry."),
        optional(
            "allow",
            Kind::Object(&ALLOW),
            "any service, its own network",
            "What it may speak of; the rest is dropped and shown.",
        ),
    ],
};

pub(in crate::config) static REGISTRY_PATH: Object = Object {
    name: "registryPath",
    doc: "A registry kept in a file with a `services` list.",
    one_of: &[],
    fields: &[
        required("path", Kind::Text(&scalar::PATH), "The file, or a directory of them."),
        required("cluster", TEXT, "The cluster it speaks for."),
        optional("network", TEXT, "unknown", "The network of endpoints that say none."),
    ],
};

pub(in crate::config) static REGISTRY_ETCD: Object = Object {
    name: "registryEtcd",
    doc: "A registry kept in etcd (API v3). Each service has a key `<prefix><namespace>/<hostname>`, whose value is one item of \
          a `services` list, as YAML or JSON; `isthmus registry` writes them. A key with mistakes keeps its last good value.",
    one_of: &[],
    fields: &[
        required(
            "endpoints",
            some(&Kind::Text(&scalar::ETCD)),
            "The members of one cluster; each is asked when the one before it does not answer.",
        ),
        default(
            "prefix",
            Kind::Text(&scalar::ETCD_PREFIX),
            PREFIX,
            "What all keys of the registry begin with.",
        ),
        required("cluster", TEXT, "The cluster it speaks for."),
        optional("network", TEXT, "unknown", "The network of endpoints that say none."),
        optional(
            "tls",
            Kind::Object(&ETCD_TLS),
            "none",
            "How members with `https://` are verified; they need it.",
        ),
        optional("user", TEXT, "none", "The user of etcd to log in as, with `passwordFile`."),
        optional("passwordFile", PATH, "none", "File of the user's password, read for each connection."),
    ],
};

pub(in crate::config) static ETCD_TLS: Object = Object {
    name: "etcdTls",
    doc: "TLS to etcd. The files are read for each connection.",
    one_of: &[],
    fields: &[
        required("roots", PATH, "PEM file of the roots that etcd's own certificates chain to."),
        optional("certificate", PATH, "none", "PEM file of the certificate to show, leaf first, with `key`."),
        optional("key", PATH, "none", "PEM file of its private key."),
    ],
};

pub(in crate::config) static ALLOW: Object = Object {
    name: "allow",
    doc: "What a registry may speak of.",
    one_of: &[],
    fields: &[
        optional("services", some(&PATTERN), "any", "Names of services."),
        optional("networks", some(&TEXT), "its own", "Networks its endpoints may be on."),
        optional(
            "addresses",
            some(&CIDR),
            "all but loopback and link-local",
            "Blocks that the addresses of its endpoints must be in, also those that their names resolve to. Loopback and \
             link-local addresses only by a block inside of theirs (`127.0.0.0/8`, not `0.0.0.0/0`); unspecified and \
             multicast addresses never.",
        ),
    ],
};
