//! Socket options that no safe crate sets. This is the only file of the program with `unsafe` code.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Sets an option of the level `SOL_SOCKET`, whose value is a number of `N` bytes.
#[expect(unsafe_code, reason = "no safe crate has these options")]
pub(super) fn set_option<const N: usize>(
    socket: &impl AsFd,
    name: libc::c_int,
    value: &[u8; N],
) -> io::Result<()> {
    let socket = socket.as_fd();
    let size = libc::socklen_t::try_from(N).unwrap_or_default();
    // SAFETY: `socket` is borrowed, so the descriptor stays open during the call. The kernel reads `size` bytes at the pointer, which
    // is that of `value`, an array of exactly this size that is borrowed for the call; it keeps no pointer.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, value.as_ptr().cast(), size) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
