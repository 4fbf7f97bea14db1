//! Divides the descriptors of the process among its uses, computes the memory limit for stalled connections, and forbids core
//! files.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::memory::share;

const XDS_CONNECTIONS_MAX: usize = 20_000;
/// The largest number of connections of DNS clients, and also the largest number of simultaneous queries to other DNS servers.
const DNS_CONNECTIONS_MAX: usize = 512;
/// The largest number of simultaneous health checks: enough for 10,000 checks per second of endpoints that answer within
/// 100 ms.
const CHECKS_MAX: usize = 1_000;
/// The largest number of descriptors that are reserved.
const RESERVED: usize = 256;
/// The result of [`stalled_memory`] in bytes, if the kernel does not report its own limits.
const STALLED_MEMORY: u64 = 256 << 20;

/// Raises the soft descriptor limit to the hard one, and returns the limit that then holds.
pub fn raise_descriptor_limit() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    let soft = limit.current;
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the descriptor limit");
        limit.current = soft;
    }
    limit.current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Prevents core files, which would have the keys of the process. The limit is one byte, less than any core file has: with a
/// limit of 0, which a hard limit of 0 leaves, the kernel still pipes a core to the program in `core_pattern` (core(5)). The hard
/// limit stays, so that an operator can allow core files of the running process (prlimit(1)).
///
/// The process stays dumpable otherwise (`PR_SET_DUMPABLE`): without this, its own user could neither read its `/proc/PID/fd` nor
/// trace it with strace, perf or gdb.
pub fn forbid_core_files() {
    let limit = getrlimit(Resource::Core);
    let current = Some(limit.maximum.map_or(1, |maximum| maximum.min(1)));
    // A limit can always be lowered.
    let _ = setrlimit(Resource::Core, Rlimit { current, ..limit });
}

/// Returns the number of descriptors reserved for listeners, logs, the admin API, registries and pipes.
fn reserved(descriptors: usize) -> usize {
    RESERVED.min(descriptors / 4)
}

/// Returns the limit of kernel memory, in bytes, for all connections of the process whose peers do not read: a quarter of the memory
/// at which the kernel begins to reduce all TCP buffers of the host, and at most a quarter of the memory budget.
pub fn stalled_memory() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    let of_host = *BYTES.get_or_init(|| {
        // The values are in pages: minimum, pressure, maximum (tcp(7)).
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_mem").unwrap_or_default();
        let pressure = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
        pressure.map_or(STALLED_MEMORY, |pages| pages * rustix::param::page_size() as u64 / 4)
    });
    of_host.min(share(4))
}

/// Returns the largest number of bytes that a registry may send at once, of which at most `most` are useful: a quarter of the memory
/// budget, since what is read from them needs memory too.
pub fn registry_bytes(most: usize) -> usize {
    usize::try_from(share(4)).map_or(most, |share| most.min(share))
}

/// Returns the number of data-plane connections of `each` descriptors that a number of descriptors allows, besides `others` descriptors
/// for xDS clients, DNS and health checks.
pub fn connections_for(descriptors: usize, others: usize, each: usize) -> usize {
    descriptors.saturating_sub(reserved(descriptors)).saturating_sub(others) / each
}

/// Returns the number of connections that each HTTP listener (admin, metrics, health) may have. Together they leave a part
/// of the reserved descriptors free.
pub fn http_connections_for(descriptors: usize) -> usize {
    (reserved(descriptors) / 4).max(1)
}

/// Returns the number of health checks that may run at the same time.
pub fn checks_for(descriptors: usize) -> usize {
    (descriptors / 32).clamp(1, CHECKS_MAX)
}

/// Returns the number of connections that xDS clients may have.
pub fn xds_connections_for(descriptors: usize) -> usize {
    (descriptors / 4).clamp(1, XDS_CONNECTIONS_MAX)
}

/// Returns the number of connections that DNS clients may have. As many questions to other DNS servers may be open at the
/// same time.
pub fn dns_connections_for(descriptors: usize) -> usize {
    (descriptors / 32).clamp(1, DNS_CONNECTIONS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_writes_no_core_file_until_an_operator_allows_it() {
        let before = getrlimit(Resource::Core).maximum;
        forbid_core_files();
        let after = getrlimit(Resource::Core);
        assert!(after.current.is_some_and(|bytes| bytes <= 1), "{after:?}");
        assert_eq!(after.maximum, before);
    }

    #[test]
    fn descriptors_are_kept_in_reserve() {
        assert_eq!(connections_for(20_256, 0, 2), 10_000);
        assert_eq!(connections_for(20_256, 5_000, 2), 7_500);
        assert_eq!(connections_for(20_256, 5_000, 3), 5_000);
        assert_eq!(connections_for(100, 0, 2), 37);
        assert_eq!((http_connections_for(20_256), http_connections_for(100)), (64, 6));
        assert_eq!((checks_for(1_000_000), checks_for(1_024), checks_for(10)), (1_000, 32, 1));
        assert_eq!((dns_connections_for(1_000_000), dns_connections_for(1_024)), (512, 32));
        assert_eq!((xds_connections_for(1_000_000), xds_connections_for(1_024)), (20_000, 256));
    }
}
