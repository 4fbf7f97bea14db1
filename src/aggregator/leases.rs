//! The leases of virtual addresses on disk: one file in the state folder, a lease per line, written whole and renamed.
//!
//! ```text
//! isthmus virtual addresses 1
//! ratings.pay.west.global 1700000000 240.250.3.7 fd69:7374:686d::3:7 used west
//! end 1 0123456789abcdef
//! ```
//!
//! The fields are the name, the time of export, the two addresses (`-`: none), whether the service is there (`used`,
//! `awaited=SECONDS` or `freed=SECONDS`), and the peer. The last line has the number of leases and the hash of all bytes before it.

use std::fmt::Write as _;
use std::fs::File;
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use crate::model::name::HostName;
use crate::net::whole_file::write_whole;
use crate::snapshot::virtual_addresses::{LEASES_MAX, Lease, LeaseState, Leases};

/// The name of the file.
const FILE: &str = "virtual-addresses";
const HEAD: &str = "isthmus virtual addresses 1\n";
/// The longest line in bytes: a name and a peer's name have at most 253 bytes each.
const LINE_BYTES_MAX: u64 = 1_024;

/// The reason why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum LeaseFault {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the file is not a list of virtual addresses written by this version of isthmus")]
    Head,
    #[error("the file is damaged at line {0}")]
    Line(usize),
    #[error("the file is damaged: its end is missing")]
    Truncated,
    #[error("the file is damaged: the checksum does not match")]
    Checksum,
}

/// Returns the path of the file in a state folder.
pub(super) fn path(state: &Path) -> PathBuf {
    state.join(FILE)
}

/// Replaces the file. Blocks.
pub(super) fn store(state: &Path, leases: &Leases) -> io::Result<()> {
    write_whole(&path(state), |file| {
        let mut file = BufWriter::new(file);
        write(leases, &mut file)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)
    })
}

/// Reads the file; without one there are no leases. Blocks.
pub(super) fn load(state: &Path) -> Result<Vec<(HostName, Lease)>, LeaseFault> {
    match File::open(path(state)) {
        Ok(file) => read(BufReader::new(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

fn write(leases: &Leases, to: &mut impl Write) -> io::Result<()> {
    let mut hasher = XxHash3_64::new();
    let mut line = String::from(HEAD);
    for (name, lease) in leases.sorted() {
        hasher.write(line.as_bytes());
        to.write_all(line.as_bytes())?;
        line.clear();
        let written = writeln!(
            line,
            "{name} {} {} {} {} {}",
            lease.exported_at,
            lease.ipv4.map_or_else(|| "-".to_owned(), |ip| ip.to_string()),
            lease.ipv6.map_or_else(|| "-".to_owned(), |ip| ip.to_string()),
            match lease.state {
                LeaseState::InUse => "used".to_owned(),
                LeaseState::Awaited(since) => format!("awaited={since}"),
                LeaseState::Freed(since) => format!("freed={since}"),
            },
            lease.peer
        );
        written.map_err(io::Error::other)?;
    }
    hasher.write(line.as_bytes());
    to.write_all(line.as_bytes())?;
    writeln!(to, "end {} {:016x}", leases.len(), hasher.finish())?;
    to.flush()
}

fn read(mut from: impl BufRead) -> Result<Vec<(HostName, Lease)>, LeaseFault> {
    let mut hasher = XxHash3_64::new();
    let (mut leases, mut line) = (Vec::new(), Vec::new());
    for number in 1.. {
        line.clear();
        (&mut from).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(if number == 1 { LeaseFault::Head } else { LeaseFault::Truncated });
        }
        let text = std::str::from_utf8(&line).ok();
        if number == 1 {
            text.filter(|text| *text == HEAD).ok_or(LeaseFault::Head)?;
        } else if let Some(end) = text.and_then(|text| text.strip_prefix("end ")) {
            if end != format!("{} {:016x}\n", leases.len(), hasher.finish()) {
                return Err(LeaseFault::Checksum);
            }
            return if from.read(&mut [0])? == 0 { Ok(leases) } else { Err(LeaseFault::Line(number + 1)) };
        } else {
            let lease = text.and_then(|text| text.strip_suffix('\n')).and_then(lease);
            leases.push(lease.filter(|_| leases.len() < LEASES_MAX).ok_or(LeaseFault::Line(number))?);
        }
        hasher.write(&line);
    }
    Err(LeaseFault::Truncated)
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

    #[test]
    fn a_file_that_is_not_whole_is_refused() {
        let mut whole = Vec::new();
        write(&leases(), &mut whole).expect("written");
        assert_eq!(read(&*whole).expect("whole"), listed(&leases()));
        for length in 0..whole.len() {
            read(&whole[..length]).expect_err("truncated");
        }
        for at in 0..whole.len() {
            let mut other = whole.clone();
            other[at] ^= 1;
            read(&*other).expect_err("one bit differs");
        }
        read(&*[&*whole, b"x"].concat()).expect_err("something follows the end");
        read(&*[HEAD.as_bytes(), &[b'x'; 1 << 20]].concat()).expect_err("a line without end");
    }
}
