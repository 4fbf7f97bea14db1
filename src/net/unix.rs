//! Listening unix sockets: files of mode 0600, which replace the sockets of dead processes and are removed when
//! they close.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use super::incoming::Accept;

/// Only the user of the gateway, and root, may connect.
const MODE: u32 = 0o600;
/// The length of the kernel's accept queue.
const BACKLOG: i32 = 128;
/// How often and how many times the lock of the folder is tried, while another process opens its socket there.
const LOCK_EVERY: Duration = Duration::from_millis(20);
const LOCK_TRIES: usize = 50;
/// The source that all clients of a unix socket count as: those who may connect may do all that any of them may.
const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// A listening unix socket; its file is removed when this is dropped.
#[derive(Debug)]
pub struct UnixSocket {
    listener: UnixListener,
    file: UnixFile,
}

/// The file of a unix socket of this process.
#[derive(Clone, Debug)]
pub struct UnixFile {
    path: PathBuf,
    /// The device and inode of the file.
    identity: (u64, u64),
}

impl UnixFile {
    /// Removes the file, unless another one is at its path. The socket must listen still, so that no other process can have taken
    /// the file for that of a dead one in between.
    pub fn remove(&self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| identity(&found) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl UnixSocket {
    /// Opens a socket at this path. Replaces the socket of a process that has ended. The error is `AddrInUse` if a
    /// process still listens on it.
    pub async fn listen(path: &Path) -> io::Result<Self> {
        // Two processes that start together would each take the other's new socket for a dead one.
        let _lock = lock_folder_of(path).await?;
        remove_stale(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&SockAddr::unix(path)?)?;
        // Nobody can connect before `listen`, so that the mode is in force for all clients.
        fs::set_permissions(path, Permissions::from_mode(MODE))?;
        let file = UnixFile { path: path.to_owned(), identity: identity(&fs::symlink_metadata(path)?) };
        socket.listen(BACKLOG)?;
        let listener = UnixListener::from_std(OwnedFd::from(socket).into())?;
        Ok(Self { listener, file })
    }

    /// Returns the file, for a process that exits without dropping the socket.
    pub fn file(&self) -> UnixFile {
        self.file.clone()
    }
}

impl Accept for UnixSocket {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, SocketAddr)> {
        self.listener.accept().await.map(|(stream, _)| (stream, CLIENT))
    }

    fn address(&self) -> Option<SocketAddr> {
        None
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        self.file.remove();
    }
}

fn identity(file: &Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// Locks the folder of a path against other processes that open sockets in it. Goes on without the lock if it stays
/// taken: every user who may read the folder can hold it, and must not keep the gateway from starting.
async fn lock_folder_of(path: &Path) -> io::Result<File> {
    let folder =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let folder = File::open(folder)
        .map_err(|error| io::Error::new(error.kind(), format!("its folder {}: {error}", folder.display())))?;
    for _ in 0..LOCK_TRIES {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => tokio::time::sleep(LOCK_EVERY).await,
            // Some file systems have no locks; the lock only matters for processes that start together.
            Ok(()) | Err(_) => break,
        }
    }
    Ok(folder)
}

/// Removes a socket that no process listens on.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        let why = "a file that is no socket is there; it is not replaced";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
        // Also with a full accept queue, whose error is `WouldBlock`.
        Ok(()) | Err(_) => {
            let why = "a running process listens on this socket";
            Err(io::Error::new(io::ErrorKind::AddrInUse, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
    }

    #[test]
    fn the_file_is_private_replaces_a_dead_one_and_goes_with_the_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        runtime().block_on(async {
            // A process that was killed leaves its file.
            drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
            assert!(path.exists());
            let socket = UnixSocket::listen(&path).await.expect("the dead one is replaced");
            let mode = fs::metadata(&path).expect("a file").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            let error = UnixSocket::listen(&path).await.expect_err("a live one is not");
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
            let mut client = UnixStream::connect(&path).await.expect("it still listens");
            // The first connection is that of the refused `listen`.
            for _ in 0..2 {
                drop(socket.accept().await.expect("accepted"));
            }
            assert_eq!(client.read(&mut [0]).await.expect("the end"), 0);
            drop(socket);
            assert!(!path.exists());
        });
    }

    #[test]
    fn a_successors_file_stays_and_other_files_are_never_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        runtime().block_on(async {
            let first = UnixSocket::listen(&path).await.expect("opened");
            fs::remove_file(&path).expect("an operator removes it");
            let second = UnixSocket::listen(&path).await.expect("opened");
            drop(first);
            assert!(path.exists(), "the file belongs to the second");
            drop(second);
            fs::write(&path, "notes").expect("written");
            let error = UnixSocket::listen(&path).await.expect_err("no socket");
            assert!(error.to_string().contains("no socket"), "{error}");
            assert_eq!(fs::read_to_string(&path).expect("it is there"), "notes");
            let nowhere = folder.path().join("absent/admin.sock");
            let error = UnixSocket::listen(&nowhere).await.expect_err("no folder");
            assert!(error.to_string().contains("its folder"), "{error}");
        });
    }

    #[test]
    fn a_lock_that_somebody_holds_does_not_keep_the_gateway_from_starting() {
        let folder = tempfile::tempdir().expect("a folder");
        let held = File::open(folder.path()).expect("opened");
        flock(&held, FlockOperation::LockExclusive).expect("locked");
        runtime().block_on(async {
            UnixSocket::listen(&folder.path().join("admin.sock")).await.expect("opened without the lock");
        });
    }

    #[test]
    fn processes_that_start_together_do_not_remove_each_others_sockets() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
        let starts: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || {
                    let runtime = runtime();
                    let opened = runtime.block_on(UnixSocket::listen(&path));
                    opened.is_ok_and(|socket| {
                        // Held until the others have tried.
                        std::mem::forget((socket, runtime));
                        true
                    })
                })
            })
            .collect();
        let opened = starts.into_iter().map(|start| start.join().expect("no panic")).filter(|opened| *opened);
        assert_eq!(opened.count(), 1);
    }
}
