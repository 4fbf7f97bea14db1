//! Listening sockets that the service manager has opened and passed to this process: socket activation by sd_listen_fds(3).
//! They stay open while no process serves them, so that a restart refuses nobody.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;

use socket2::{SockRef, Type};

/// The most sockets that are taken.
const SOCKETS_MAX: u32 = 1024;

/// The first descriptor that is passed.
const FIRST: u32 = 3;

/// The sockets that were passed, by the name that `FileDescriptorName=` gives them.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: BTreeMap<String, Vec<OwnedFd>>,
}

impl Inherited {
    /// Takes the sockets that were passed to this process; none if it was started in another way. Call it once, before any
    /// other descriptor is opened. Fails if what was passed is no listening TCP socket, or too many of them.
    pub fn take() -> Result<Self, String> {
        let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
        if number("LISTEN_PID") == Some(std::process::id()) {
            let count = number("LISTEN_FDS").unwrap_or_default();
            if count > SOCKETS_MAX {
                return Err(format!("LISTEN_FDS: more than {SOCKETS_MAX} sockets are passed"));
            }
            // The number of a descriptor that is not open could be another file's later.
            let is_open = |descriptor: u32| Path::new(&format!("/proc/self/fd/{descriptor}")).exists();
            if let Some(closed) = (FIRST..FIRST + count).find(|descriptor| !is_open(*descriptor)) {
                return Err(format!("LISTEN_FDS is {count}, but descriptor {closed} is not open"));
            }
        }
        let passed = sd_listen_fds::get().map_err(|error| format!("LISTEN_PID or LISTEN_FDS: {error}"))?;
        let mut all = Self::default();
        for (name, socket) in passed {
            let name = name.unwrap_or_default();
            let socket = socket.into_std();
            check(&socket).map_err(|problem| format!("the socket {name:?} that was passed {problem}"))?;
            all.sockets.entry(name).or_default().push(socket);
        }
        Ok(all)
    }

    /// The sockets of this name.
    pub fn named(&self, name: &str) -> Option<&[OwnedFd]> {
        self.sockets.get(name).map(Vec::as_slice)
    }

    /// The names of all sockets.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sockets.keys().map(String::as_str)
    }
}

fn check(socket: &OwnedFd) -> Result<(), String> {
    let socket = SockRef::from(socket);
    let is_listener = socket.is_listener().map_err(|error| format!("is not open: {error}"))?;
    let kind = socket.r#type().map_err(|error| error.to_string())?;
    if !is_listener || kind != Type::STREAM {
        return Err("is not a listening stream socket (ListenStream=, Accept=no)".to_owned());
    }
    address(&socket).map(drop)
}

/// The TCP address that a socket listens on.
pub(super) fn address(socket: &SockRef<'_>) -> Result<SocketAddr, String> {
    let address = socket.local_addr().map_err(|error| error.to_string())?;
    address.as_socket().ok_or_else(|| "is no TCP socket".to_owned())
}
