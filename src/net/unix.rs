//! Listening unix sockets: files of mode 0600 that replace the sockets of dead processes, and that are removed when the
//! socket is closed.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

use super::incoming::Accept;

/// The mode of the file: only root and the gateway's user may connect.
const MODE: u32 = 0o600;
/// The length of the kernel's accept queue.
const BACKLOG: i32 = 128;
/// The interval and the number of attempts to lock the folder, while another process opens its socket there.
const LOCK_EVERY: Duration = Duration::from_millis(20);
const LOCK_TRIES: usize = 50;
/// The source address of all clients of a unix socket. The clients share one address, because all users who may connect have
/// the same rights.
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
    /// True once another process uses the file.
    left: Arc<AtomicBool>,
    /// The device and inode of the file.
    identity: (u64, u64),
}

impl UnixFile {
    /// Removes the file, unless the path leads to another file. Must be called before the socket is closed: after that, another
    /// process would consider this one dead, and could replace the file between the check and the removal.
    pub fn remove(&self) {
        if self.left.load(Ordering::Relaxed) {
            return;
        }
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| identity(&found) == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }

    fn at(path: &Path) -> io::Result<Self> {
        let identity = identity(&fs::symlink_metadata(path)?);
        Ok(Self { path: path.to_owned(), left: Arc::default(), identity })
    }

    /// Leaves the file to another process, which has the same socket.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
    }
}

impl UnixSocket {
    /// Takes a listening socket of another process, whose file is at this path.
    pub fn of(socket: OwnedFd, path: &Path) -> io::Result<Self> {
        let listener = UnixListener::from_std(socket.into())?;
        Ok(Self { listener, file: UnixFile::at(path)? })
    }

    /// Returns another descriptor of the socket.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Opens a socket at this path, and replaces the socket of a process that has ended. Returns the error `AddrInUse` if a
    /// running process listens at the path.
    pub async fn listen(path: &Path) -> io::Result<Self> {
        // Without the lock, two processes that start together could each take the other's new socket for that of a dead
        // process.
        let _lock = lock_folder_of(path).await?;
        remove_stale(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.bind(&SockAddr::unix(path)?)?;
        // The mode applies to all clients, because nobody can connect before `listen`.
        fs::set_permissions(path, Permissions::from_mode(MODE))?;
        let file = UnixFile::at(path)?;
        socket.listen(BACKLOG)?;
        let listener = UnixListener::from_std(OwnedFd::from(socket).into())?;
        Ok(Self { listener, file })
    }

    /// Returns the reason why no socket can be opened at this path, unless a running process listens there; `None` if one can.
    pub fn problem(path: &Path) -> Option<io::Error> {
        let found = match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => Err(no_socket()),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => folder_of(path).map(drop),
            Err(error) => Err(error),
        };
        found.err()
    }

    /// Returns the file, so that a process can remove it when it exits without dropping the socket.
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

    fn reached(_: &UnixStream) -> Option<SocketAddr> {
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

/// Locks the folder of a path against other processes that open sockets in it. If another process keeps the lock, continues
/// without it: every user who may read the folder can hold the lock, but must not prevent the gateway from starting.
async fn lock_folder_of(path: &Path) -> io::Result<File> {
    let folder = folder_of(path)?;
    for _ in 0..LOCK_TRIES {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => tokio::time::sleep(LOCK_EVERY).await,
            // Some file systems do not support locks. The gateway starts without the lock then, because the lock only matters
            // for processes that start together.
            Ok(()) | Err(_) => break,
        }
    }
    Ok(folder)
}

fn folder_of(path: &Path) -> io::Result<File> {
    let folder =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    File::open(folder).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot open its folder {}: {error}", folder.display()))
    })
}

fn no_socket() -> io::Error {
    let why = "the path exists and is not a socket, so the gateway does not replace it; remove it or choose another path";
    io::Error::new(io::ErrorKind::AlreadyExists, why)
}

/// Removes a socket that no process listens on.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        return Err(no_socket());
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
        // A full accept queue, whose error is `WouldBlock`, also means that a process listens.
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
            // A process that was killed leaves its file behind.
            drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
            assert!(path.exists());
            let socket = UnixSocket::listen(&path).await.expect("the dead one is replaced");
            let mode = fs::metadata(&path).expect("a file").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            let error = UnixSocket::listen(&path).await.expect_err("a live one is not");
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
            let mut client = UnixStream::connect(&path).await.expect("it still listens");
            // The refused `listen` made the first connection, to find out whether a process listens.
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
            assert!(error.to_string().contains("exists and is not a socket"), "{error}");
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
                        // The socket stays open until the other processes have tried.
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
