//! Listening sockets that the service manager has opened and passed to this process: socket activation by sd_listen_fds(3).
//! They stay open while no process serves them, so that no client is refused during a restart.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;

use socket2::{SockRef, Type};

/// The largest number of passed sockets. If there are more, none is used.
const SOCKETS_MAX: u32 = 1024;

/// The number of the first passed descriptor.
const FIRST: u32 = 3;

/// The passed sockets, by the name that `FileDescriptorName=` assigns.
#[derive(Debug, Default)]
pub struct Inherited {
    sockets: BTreeMap<String, Vec<OwnedFd>>,
}

impl Inherited {
    /// Takes the sockets that the service manager has passed to this process; none if the process was started in another way.
    /// Must be called once, before any other descriptor is opened. Returns an error if a passed descriptor is not a listening
    /// TCP socket, or if there are too many descriptors.
    pub fn take() -> Result<Self, String> {
        let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
        if number("LISTEN_PID") == Some(std::process::id()) {
            let count = number("LISTEN_FDS").unwrap_or_default();
            if count > SOCKETS_MAX {
                return Err(format!(
                    "LISTEN_FDS is {count}, but at most {SOCKETS_MAX} sockets can be passed"
                ));
            }
            // A descriptor that is not open must be refused, because a file opened later could get its number.
            let is_open = |descriptor: u32| Path::new(&format!("/proc/self/fd/{descriptor}")).exists();
            if let Some(closed) = (FIRST..FIRST + count).find(|descriptor| !is_open(*descriptor)) {
                return Err(format!("LISTEN_FDS is {count}, but descriptor {closed} is not open"));
            }
        }
        let passed =
            sd_listen_fds::get().map_err(|error| format!("cannot use LISTEN_PID and LISTEN_FDS: {error}"))?;
        let mut all = Self::default();
        for (name, socket) in passed {
            let name = name.unwrap_or_default();
            let socket = socket.into_std();
            check(&socket)
                .map_err(|problem| format!("the socket {name:?} from the service manager {problem}"))?;
            all.sockets.entry(name).or_default().push(socket);
        }
        Ok(all)
    }

    /// Adds a socket that the service manager has passed to an earlier process.
    pub fn add(&mut self, name: &str, socket: OwnedFd) -> Result<(), String> {
        check(&socket).map_err(|problem| format!("the socket {name:?} of the earlier process {problem}"))?;
        self.sockets.entry(name.to_owned()).or_default().push(socket);
        Ok(())
    }

    /// Returns the passed sockets by name.
    pub fn all(&self) -> impl Iterator<Item = (&str, &OwnedFd)> {
        self.sockets.iter().flat_map(|(name, sockets)| sockets.iter().map(move |socket| (&**name, socket)))
    }

    /// Returns the passed sockets of this name.
    pub fn named(&self, name: &str) -> Option<&[OwnedFd]> {
        self.sockets.get(name).map(Vec::as_slice)
    }

    /// Returns the names of all passed sockets.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sockets.keys().map(String::as_str)
    }
}

fn check(socket: &OwnedFd) -> Result<(), String> {
    let socket = SockRef::from(socket);
    let is_listener = socket.is_listener().map_err(|error| format!("is not open: {error}"))?;
    let kind = socket.r#type().map_err(|error| error.to_string())?;
    if !is_listener || kind != Type::STREAM {
        return Err("is not a listening stream socket; its unit needs ListenStream= and Accept=no".to_owned());
    }
    address(&socket).map(drop)
}

/// Returns the TCP address that a socket listens on.
pub(super) fn address(socket: &SockRef<'_>) -> Result<SocketAddr, String> {
    let address = socket.local_addr().map_err(|error| error.to_string())?;
    address.as_socket().ok_or_else(|| "is not a TCP socket".to_owned())
}
