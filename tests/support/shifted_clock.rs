//! A library for `LD_PRELOAD` that shifts the wall clock by `ISTHMUS_TEST_CLOCK` seconds. All other clocks stay right.
//! `clock.rs` beside this file compiles it.

#![no_std]

use core::ffi::{c_char, c_int, c_long};

const CLOCK_REALTIME: c_int = 0;
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
        // The result is 0 or -1.
        result as c_int
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
