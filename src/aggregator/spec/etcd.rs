//! The location of a registry in etcd, and the credentials for reading it.

use std::path::PathBuf;
use std::sync::Arc;

use isthmus_model::address::Url;
use isthmus_tls::client::Files;

/// The default prefix of keys.
pub const PREFIX: &str = "/isthmus/services/";

/// A registry in etcd: one key per service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSpec {
    /// The members of one cluster, which are tried in turn.
    pub endpoints: Vec<Url>,
    /// The prefix of all keys of the registry; it ends with a slash.
    pub prefix: Arc<str>,
    /// The TLS files, for members with `https` URLs.
    pub tls: Option<Files>,
    /// The etcd user; `None` without authentication.
    pub login: Option<Login>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    /// The name of the user.
    pub user: String,
    /// The password file, read for each connection; a newline at its end is ignored.
    pub password: PathBuf,
}
