//! Where a registry in etcd is, and how it is read.

use std::path::PathBuf;
use std::sync::Arc;

use crate::model::address::Url;
use crate::tls::client::Files;

/// Where keys begin if nothing else is said.
pub const PREFIX: &str = "/isthmus/services/";

/// A registry in etcd: one key per service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSpec {
    /// Members of one cluster, each asked when the one before it does not answer.
    pub endpoints: Vec<Url>,
    /// The beginning of all keys of the registry; it ends with a slash.
    pub prefix: Arc<str>,
    /// Needed by members that are spoken to by TLS, and by no others.
    pub tls: Option<Files>,
    pub login: Option<Login>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    pub user: String,
    /// Read for each connection; a line end behind the password is no part of it.
    pub password: PathBuf,
}
