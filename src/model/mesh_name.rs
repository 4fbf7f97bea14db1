//! The SNI dialect of Istio's meshes: `outbound_.<service port>_.<subset>_.<hostname>`. If no route has exactly the requested
//! name, admission looks up the service, port and subset that the name contains.

/// The name in the hellos by which gateways probe each other. No service can have it, as `.invalid` never exists (RFC 6761 §6.4), and no
/// wildcard route takes it.
pub const PROBE_NAME: &str = "outbound_.1_._.isthmus-probe.invalid";

/// The parts of a mesh name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshName<'a> {
    /// The service port.
    pub port: u16,
    /// The subset; empty for all endpoints.
    pub subset: &'a str,
    /// The host name of the service, as in the SNI.
    pub hostname: &'a str,
}

/// The form of a canonical name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect<'a> {
    /// The name does not belong to the dialect.
    Plain,
    /// The name is a mesh name with these parts.
    Mesh(MeshName<'a>),
    /// The name begins like a mesh name but is not one, or the name is of the inbound kind, which is never routed.
    Malformed,
}

/// Parses a canonical name by its structure: four parts, separated by `_.`.
pub fn read(name: &str) -> Dialect<'_> {
    if name.starts_with("inbound_.") {
        return Dialect::Malformed;
    }
    let Some(rest) = name.strip_prefix("outbound_.") else {
        return Dialect::Plain;
    };
    let mut parts = rest.split("_.");
    let (Some(port), Some(subset), Some(hostname), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Dialect::Malformed;
    };
    let decimal =
        !port.is_empty() && !port.starts_with('0') && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(port) if decimal && !hostname.is_empty() => Dialect::Mesh(MeshName { port, subset, hostname }),
        _ => Dialect::Malformed,
    }
}

impl MeshName<'_> {
    /// Returns the name as a client sends it.
    pub fn text(&self) -> String {
        format!("outbound_.{}_.{}_.{}", self.port, self.subset, self.hostname)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mesh_names_have_four_parts() {
        let name = MeshName { port: 443, subset: "v1", hostname: "a.shop.svc" };
        assert_eq!(read(&name.text()), Dialect::Mesh(name));
        let name = MeshName { port: 65535, subset: "", hostname: "a_b" };
        assert_eq!(read(&name.text()), Dialect::Mesh(name));
        assert_eq!(read("api.example.com"), Dialect::Plain);
        for malformed in [
            "outbound_.443_.v1",
            "outbound_.0_._.a",
            "outbound_.65536_._.a",
            "outbound_.+1_._.a",
            "outbound_.0443_._.a",
            "outbound_._.v1_.a",
            "outbound_.443_.v1_.a_.b",
            "outbound_.443_.v1_.",
            "inbound_.443_.v1_.a",
        ] {
            assert_eq!(read(malformed), Dialect::Malformed, "{malformed}");
        }
    }
}
