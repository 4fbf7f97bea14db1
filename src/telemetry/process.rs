//! The metrics of this process, read from `/proc` on request.

use std::fs;

use super::exposition::{Exposition, Kind};

/// The names and descriptions of these metrics, in the order of [`expose`].
pub const DESCRIPTIONS: &[(&str, &str)] = &[
    ("process_cpu_seconds_total", "CPU time that this process has used, in seconds."),
    ("process_resident_memory_bytes", "Resident memory of this process, in bytes."),
    ("process_open_fds", "Number of open file descriptors of this process."),
    ("process_max_fds", "Largest number of open file descriptors that this process may have."),
];

/// Adds CPU time, memory and descriptors to the metrics of a scrape. Values that cannot be read are left out.
pub fn expose(exposition: &mut Exposition) {
    let values = [
        (Kind::Counter, cpu_seconds()),
        (Kind::Gauge, resident_bytes().map(|bytes| bytes as f64)),
        (Kind::Gauge, open_descriptors().map(|count| count as f64)),
        (Kind::Gauge, descriptor_limit().map(|count| count as f64)),
    ];
    for ((name, help), (kind, value)) in DESCRIPTIONS.iter().zip(values) {
        if let Some(value) = value {
            exposition.family(name, kind, help).add([], value);
        }
    }
}

/// Returns the CPU time of all threads in seconds, as counted by the scheduler.
fn cpu_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the command may contain spaces and brackets; the fields begin after its last bracket.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / rustix::param::clock_ticks_per_second() as f64)
}

fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * u64::try_from(rustix::param::page_size()).ok()?)
}

fn open_descriptors() -> Option<usize> {
    // One of the entries is the descriptor of this directory itself.
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1))
}

fn descriptor_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}
