//! The resource types, and the syntax of their names.

use std::fmt;

use isthmus_ads::kind::ResourceKind;
use isthmus_model::mesh_name::{self, Dialect, MeshName};
use isthmus_model::name::HostName;

/// A resource type, in the order in which the xDS protocol wants changes sent: CDS, EDS, LDS, RDS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `Cluster` (CDS).
    Cluster,
    /// `ClusterLoadAssignment` (EDS).
    Assignment,
    /// `Listener` (LDS).
    Listener,
    /// `RouteConfiguration` (RDS).
    Route,
}

impl ResourceKind for Kind {
    const ALL: &'static [Self] = &[Self::Cluster, Self::Assignment, Self::Listener, Self::Route];

    fn type_url(self) -> &'static str {
        match self {
            Self::Cluster => "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            Self::Assignment => "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            Self::Listener => "type.googleapis.com/envoy.config.listener.v3.Listener",
            Self::Route => "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Cluster => "cds",
            Self::Assignment => "eds",
            Self::Listener => "lds",
            Self::Route => "rds",
        }
    }
}

impl Kind {
    /// Returns true if a client can subscribe to all resources of the type (LDS and CDS).
    pub fn has_wildcard(self) -> bool {
        matches!(self, Self::Cluster | Self::Listener)
    }

    /// Parses a name of this type.
    pub fn read(self, name: &str) -> Option<Target> {
        match self {
            Self::Cluster | Self::Assignment => Target::of_cluster(name),
            Self::Listener | Self::Route => Target::of_authority(name),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The service port and subset of a resource.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The host name of the service.
    pub hostname: HostName,
    /// The service port.
    pub port: u16,
    /// The subset in lower case; empty for all endpoints.
    pub subset: String,
}

impl Target {
    /// Parses `outbound|<port>|<subset>|<hostname>` or `outbound_.<port>_.<subset>_.<hostname>`.
    fn of_cluster(name: &str) -> Option<Self> {
        let mesh_name = match name.strip_prefix("outbound|") {
            Some(rest) => {
                let mut parts = rest.splitn(3, '|');
                let (port, subset, hostname) = (parts.next()?, parts.next()?, parts.next()?);
                MeshName { port: port_number(port)?, subset, hostname }
            }
            None => match mesh_name::read(name) {
                Dialect::Mesh(mesh_name) => mesh_name,
                Dialect::Plain | Dialect::Malformed => return None,
            },
        };
        Some(Self {
            hostname: HostName::parse(mesh_name.hostname).ok()?,
            port: mesh_name.port,
            subset: mesh_name.subset.to_ascii_lowercase(),
        })
    }

    /// Parses `hostname:port`, the part of a gRPC target behind `xds:///`.
    fn of_authority(name: &str) -> Option<Self> {
        let (hostname, port) = name.rsplit_once(':')?;
        Some(Self {
            hostname: HostName::parse(hostname).ok()?,
            port: port_number(port)?,
            subset: String::new(),
        })
    }
}

/// Returns the name of a cluster and of its assignment.
pub fn cluster_name(port: u16, subset: &str, hostname: &str) -> String {
    format!("outbound|{port}|{subset}|{hostname}")
}

fn port_number(text: &str) -> Option<u16> {
    let decimal = !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| decimal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_all_their_forms() {
        let target = |hostname: &str, port, subset: &str| {
            let hostname = HostName::parse(hostname).expect("legal");
            Some(Target { hostname, port, subset: subset.to_owned() })
        };
        for kind in [Kind::Cluster, Kind::Assignment] {
            assert_eq!(kind.read("outbound|443|v1|a.mesh"), target("a.mesh", 443, "v1"));
            assert_eq!(kind.read("outbound_.443_.V1_.A.mesh"), target("a.mesh", 443, "v1"));
            assert_eq!(kind.read(&cluster_name(80, "", "a.mesh")), target("a.mesh", 80, ""));
            for other in [
                "",
                "a.mesh:443",
                "outbound|443|a.mesh",
                "outbound|0||a",
                "outbound|65536||a",
                "inbound|1||a",
            ] {
                assert_eq!(kind.read(other), None, "{other}");
            }
        }
        for kind in [Kind::Listener, Kind::Route] {
            assert_eq!(kind.read("a.mesh:443"), target("a.mesh", 443, ""));
            for other in ["", "a.mesh", "a.mesh:", "a.mesh:0", "a.mesh:x", "outbound|443||a.mesh"] {
                assert_eq!(kind.read(other), None, "{other}");
            }
        }
        assert!(Kind::ALL.iter().all(|&kind| Kind::of_type_url(kind.type_url()) == Some(kind)));
    }
}
