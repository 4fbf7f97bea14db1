//! A library for `LD_PRELOAD` that shifts the wall clock by `ISTHMUS_TEST_CLOCK` seconds, and the monotonic clock by the number of
//! seconds in the file that `ISTHMUS_TEST_MONOTONIC` names, which may grow while the process runs. `clock.rs` beside this file
//! compiles it.

#![no_std]

use core::ffi::{c_char, c_int, c_long, c_void};

const CLOCK_REALTIME: c_int = 0;
const CLOCK_MONOTONIC: c_int = 1;
const O_RDONLY_CLOEXEC: c_int = 0o2_000_000;
#[cfg(target_arch = "x86_64")]
const SYS_CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const SYS_CLOCK_GETTIME: c_long = 113;

#[repr(C)]
pub struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

#[link(name = "c")]
unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn getenv(name: *const c_char) -> *const c_char;
    fn atoll(text: *const c_char) -> i64;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn read(file: c_int, into: *mut c_void, most: usize) -> isize;
    fn close(file: c_int) -> c_int;
}

/// Returns the number in the file that the environment names; 0 if there is none.
fn monotonic_shift() -> i64 {
    let mut text = [0_u8; 24];
    // SAFETY: the texts end with zero, and at most 23 bytes are written to the 24 of `text`.
    unsafe {
        let path = getenv(c"ISTHMUS_TEST_MONOTONIC".as_ptr());
        if path.is_null() {
            return 0;
        }
        let file = open(path, O_RDONLY_CLOEXEC);
        if file < 0 {
            return 0;
        }
        read(file, text.as_mut_ptr().cast(), text.len() - 1);
        close(file);
        atoll(text.as_ptr().cast())
    }
}

/// Replaces `clock_gettime` of the C library.
///
/// # Safety
/// `time` points to a `timespec`, as the C library's function requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int {
    // SAFETY: the caller's pointer is passed on, and written only after the kernel has accepted it; the texts end with zero.
    unsafe {
        let result = syscall(SYS_CLOCK_GETTIME, clock, time);
        let shift = getenv(c"ISTHMUS_TEST_CLOCK".as_ptr());
        if result == 0 && clock == CLOCK_REALTIME && !shift.is_null() {
            (*time).seconds += atoll(shift);
        }
        if result == 0 && clock == CLOCK_MONOTONIC {
            (*time).seconds += monotonic_shift();
        }
        // The result is 0 or -1.
        result as c_int
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
