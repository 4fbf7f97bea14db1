//! The processor time and the memory of a process, as the kernel reports them.

use std::io;
use std::process::Child;
use std::time::Duration;

fn no_field() -> io::Error {
    io::Error::other("the kernel does not tell")
}

/// Returns the user and system time of all threads of a process.
pub(crate) fn processor_time(process: &Child) -> io::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id()))?;
    let (_, fields) = stat.rsplit_once(") ").ok_or_else(no_field)?;
    let ticks: u64 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    // A tick of `/proc` is 10 ms on every Linux.
    Ok(Duration::from_millis(ticks * 10))
}

/// Returns a memory field of a process's status (`VmRSS`, `VmHWM`), in bytes.
pub(crate) fn memory(process: &Child, line: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
    let found = status.lines().find(|found| found.starts_with(line)).ok_or_else(no_field)?;
    let kilobytes = found.split_whitespace().nth(1).and_then(|text| text.parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(no_field)
}
