//! The leases of virtual addresses on disk: a list in the state folder, a lease per line.
//!
//! ```text
//! ratings.pay.west.global 1700000000 240.250.3.7 fd69:7374:686d::3:7 used west
//! ```
//!
//! The fields are the name, the time of export, the IPv4 and the IPv6 address (`-`: none), the state of the lease (`used`,
//! `awaited=SECONDS` or `freed=SECONDS`), and the peer.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use isthmus_files::line_file::{LineFault, LineFile};
use isthmus_model::name::HostName;
use isthmus_snapshot::virtual_addresses::{LEASES_MAX, Lease, LeaseState, Leases};

/// The name of the list in the state folder.
const FILE: &str = "virtual-addresses";
/// The limits of the file. A line has a host name and a peer's name, of at most 253 bytes each.
const LIST: LineFile = LineFile { name: "virtual addresses", lines_max: LEASES_MAX, line_bytes_max: 1_024 };

/// Returns the path of the list in a state folder.
pub(super) fn path(state: &Path) -> PathBuf {
    state.join(FILE)
}

/// Replaces the file. Blocks.
pub(super) fn store(state: &Path, leases: &Leases) -> io::Result<()> {
    LIST.store(&path(state), leases.sorted().into_iter().map(|(name, lease)| Line(name, lease)))
}

/// Reads the file; without one there are no leases. Blocks.
pub(super) fn load(state: &Path) -> Result<Vec<(HostName, Lease)>, LineFault> {
    LIST.load(&path(state), lease)
}

/// A line of the list of leases.
struct Line<'a>(&'a HostName, &'a Lease);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(name, lease) = self;
        write!(f, "{name} {} ", lease.exported_at)?;
        let addresses = [lease.ipv4.map(|ip| ip.to_string()), lease.ipv6.map(|ip| ip.to_string())];
        for address in addresses {
            write!(f, "{} ", address.as_deref().unwrap_or("-"))?;
        }
        match lease.state {
            LeaseState::InUse => f.write_str("used")?,
            LeaseState::Awaited(since) => write!(f, "awaited={since}")?,
            LeaseState::Freed(since) => write!(f, "freed={since}")?,
        }
        write!(f, " {}", lease.peer)
    }
}

fn lease(line: &str) -> Option<(HostName, Lease)> {
    fn address<T: FromStr>(text: &str) -> Option<Option<T>> {
        if text == "-" { Some(None) } else { text.parse().ok().map(Some) }
    }
    let mut fields = line.splitn(6, ' ');
    let name = HostName::parse(fields.next()?).ok()?;
    let exported_at = fields.next()?.parse().ok()?;
    let (ipv4, ipv6) = (address(fields.next()?)?, address(fields.next()?)?);
    let state = match fields.next()?.split_once('=') {
        None => LeaseState::InUse,
        Some(("awaited", since)) => LeaseState::Awaited(since.parse().ok()?),
        Some(("freed", since)) => LeaseState::Freed(since.parse().ok()?),
        Some(_) => return None,
    };
    let peer: Arc<str> = fields.next()?.into();
    Some((name, Lease { peer, exported_at, ipv4, ipv6, state }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leases() -> Leases {
        let lease = |ipv4: &str, ipv6: &str, state, peer: &str| {
            let lease = Lease {
                peer: peer.into(),
                exported_at: 1_700_000_000,
                ipv4: ipv4.parse().ok(),
                ipv6: ipv6.parse().ok(),
                state,
            };
            Arc::new(lease)
        };
        let name = |text: &str| HostName::parse(text).expect("legal");
        [
            (name("a.west.global"), lease("240.250.3.7", "fd69:7374:686d::7", LeaseState::InUse, "west")),
            (name("b.west.global"), lease("240.250.3.8", "-", LeaseState::Freed(7), "the west, =1")),
            (name("c.west.global"), lease("-", "fd69:7374:686d::8", LeaseState::Awaited(8), "")),
        ]
        .into_iter()
        .collect()
    }

    fn listed(leases: &Leases) -> Vec<(HostName, Lease)> {
        leases.sorted().into_iter().map(|(name, lease)| (name.clone(), (**lease).clone())).collect()
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let temporary = tempfile::tempdir().expect("a folder");
        let state = temporary.path().join("state");
        assert!(load(&state).expect("nothing yet").is_empty());
        for leases in [Leases::default(), leases()] {
            store(&state, &leases).expect("stored");
            assert_eq!(load(&state).expect("readable"), listed(&leases));
        }
        let text = std::fs::read_to_string(path(&state)).expect("text");
        assert_eq!(
            text.lines().nth(1),
            Some("a.west.global 1700000000 240.250.3.7 fd69:7374:686d::7 used west")
        );
    }
}
