//! The memory of the process as the kernel reports it: the limits of its cgroups (version 1 and 2, also both mounted), their working
//! set, and the memory of the host. All files are below a root folder, which is `/` except in tests.

use std::fs;
use std::path::{Path, PathBuf};

use super::Measured;

/// The smallest value that means no limit: version 1 writes the largest number of pages.
const NO_LIMIT: u64 = 1 << 62;

/// Measures the memory of this process.
#[derive(Clone, Debug)]
pub struct Meter {
    root: PathBuf,
    /// `None`: no cgroup counts the memory of the process.
    cgroup: Option<Cgroup>,
}

/// The cgroup of the process in the hierarchy that counts memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cgroup {
    version: Version,
    /// The folder of the cgroup, and those of its parents that this process can see.
    folders: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Meter {
    /// Finds the cgroup of this process. A process that is moved to another cgroup later keeps the meter of this one.
    pub fn find(root: &Path) -> Self {
        Self { root: root.to_owned(), cgroup: Cgroup::find(root) }
    }

    /// Reads the limits and the use; `None` if the kernel does not report them.
    pub fn measure(&self) -> Option<Measured> {
        let host = fs::read_to_string(self.root.join("proc/meminfo")).ok()?;
        let of_host = |name: &str| field(&host, name).map(|kilobytes| kilobytes.saturating_mul(1024));
        let (total, left) = (of_host("MemTotal:")?, of_host("MemAvailable:").unwrap_or(u64::MAX));
        let limited = self.cgroup.as_ref().and_then(|cgroup| {
            let (available, folder) = cgroup.limit().filter(|(limit, _)| *limit < total)?;
            let used = cgroup.version.working_set(folder).or_else(|| self.resident())?;
            Some(Measured { available, used, left })
        });
        limited.or_else(|| Some(Measured { available: total, used: self.resident()?, left }))
    }

    fn resident(&self) -> Option<u64> {
        let statm = fs::read_to_string(self.root.join("proc/self/statm")).ok()?;
        let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
        Some(pages * u64::try_from(rustix::param::page_size()).ok()?)
    }
}

impl Cgroup {
    fn find(root: &Path) -> Option<Self> {
        let read = |name: &str| fs::read_to_string(root.join("proc/self").join(name)).ok();
        let (mounts, cgroups) = (read("mountinfo")?, read("cgroup")?);
        // Where both versions are mounted, memory is counted in version 1, or its hierarchy is not there.
        [Version::One, Version::Two].into_iter().find_map(|version| {
            let path = version.path(&cgroups)?;
            let (mount_root, mount) = version.mount(&mounts)?;
            let mount = root.join(mount.trim_start_matches('/'));
            // A path that is not below the root of the mount is one of another namespace: the mount itself is the nearest folder.
            let below = Path::new(path).strip_prefix(&mount_root).ok();
            let below = below.filter(|below| !below.starts_with("..")).unwrap_or_else(|| Path::new(""));
            let own = mount.join(below);
            let folders = own.ancestors().take_while(|folder| folder.starts_with(&mount));
            Some(Self { version, folders: folders.map(Path::to_owned).collect() })
        })
    }

    /// Returns the smallest limit in bytes, and the folder of the cgroup that has it.
    fn limit(&self) -> Option<(u64, &Path)> {
        let own = self.folders.first()?;
        let parents = self.folders.iter().skip(1).take_while(|folder| self.version.counts_children(folder));
        let limits = [own].into_iter().chain(parents).flat_map(|folder| {
            let files = self.version.limits().iter();
            files.filter_map(move |file| Some((number(&folder.join(file))?, folder.as_path())))
        });
        // If a parent and its child have the same limit, the parent reaches it first. Version 1 also reports the limit of parents
        // that this process cannot see.
        let smallest = limits.min_by_key(|(limit, folder)| (*limit, folder.as_os_str().len()));
        let hidden = stat(own, "hierarchical_memory_limit").map(|limit| (limit, own.as_path()));
        smallest
            .into_iter()
            .chain(hidden)
            .filter(|(limit, _)| *limit < NO_LIMIT)
            .min_by_key(|(limit, _)| *limit)
    }
}

impl Version {
    /// Returns the path of the process in the hierarchy that counts memory, of the lines `number:controllers:path`.
    fn path(self, cgroups: &str) -> Option<&str> {
        cgroups.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let counts = match self {
                Self::One => controllers.split(',').any(|controller| controller == "memory"),
                Self::Two => controllers.is_empty(),
            };
            counts.then_some(path)
        })
    }

    /// Returns the root of the mount within the hierarchy, and its path (proc(5), `/proc/pid/mountinfo`).
    fn mount(self, mounts: &str) -> Option<(String, String)> {
        mounts.lines().find_map(|line| {
            let (place, source) = line.split_once(" - ")?;
            let (mut place, mut source) = (place.split(' ').skip(3), source.split(' '));
            let (kind, options) = (source.next()?, source.nth(1)?);
            let counts = match self {
                Self::One => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
                Self::Two => kind == "cgroup2",
            };
            let text = |field: &str| field.replace("\\040", " ").replace("\\134", "\\");
            counts.then(|| Some((text(place.next()?), text(place.next()?))))?
        })
    }

    fn limits(self) -> &'static [&'static str] {
        match self {
            Self::One => &["memory.limit_in_bytes"],
            Self::Two => &["memory.max", "memory.high"],
        }
    }

    /// Returns true if the limit of a cgroup holds for its children too.
    fn counts_children(self, folder: &Path) -> bool {
        match self {
            Self::One => number(&folder.join("memory.use_hierarchy")) != Some(0),
            Self::Two => true,
        }
    }

    /// Returns the used bytes of a cgroup without those of files that the kernel drops first.
    fn working_set(self, folder: &Path) -> Option<u64> {
        let (usage, inactive) = match self {
            Self::One => ("memory.usage_in_bytes", "total_inactive_file"),
            Self::Two => ("memory.current", "inactive_file"),
        };
        Some(number(&folder.join(usage))?.saturating_sub(stat(folder, inactive).unwrap_or(0)))
    }
}

/// Returns the number in a file; `None` if there is none, or if it means no limit.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok().filter(|number| *number < NO_LIMIT)
}

fn stat(folder: &Path, name: &str) -> Option<u64> {
    field(&fs::read_to_string(folder.join("memory.stat")).ok()?, name)
}

/// Returns the number that follows a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix([' ', '\t']))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const HOST: &str = "MemTotal:       16777216 kB\nMemFree:         1 kB\nMemAvailable:    8388608 kB\n";

    /// Measures a made-up host with these files.
    fn measured(files: &[(&str, &str)]) -> Option<Measured> {
        let root = tempfile::tempdir().expect("a folder");
        let common = [("proc/meminfo", HOST), ("proc/self/statm", "5000 1000 500 1 0 1 0\n")];
        for (path, text) in common.iter().chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        }
        Meter::find(root.path()).measure()
    }

    /// Returns the limit in MiB, and the used MiB.
    #[track_caller]
    fn sizes(files: &[(&str, &str)]) -> (u64, u64) {
        let Measured { available, used, left } = measured(files).expect("measured");
        assert_eq!(left, 8192 * MIB);
        (available / MIB, used / MIB)
    }

    const TWO: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const ONE: &str = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                       35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n";
    const NONE: &str = "9223372036854771712\n";

    #[test]
    fn a_process_without_a_limited_cgroup_can_have_the_memory_of_the_host() {
        let resident = 1_000 * u64::try_from(rustix::param::page_size()).expect("small") / MIB;
        let host = (16_384, resident);
        assert_eq!(sizes(&[]), host);
        let two = [("proc/self/mountinfo", TWO), ("proc/self/cgroup", "0::/a.service\n")];
        assert_eq!(sizes(&two), host);
        let unlimited = [
            ("sys/fs/cgroup/a.service/memory.max", "max\n"),
            ("sys/fs/cgroup/a.service/memory.high", "max\n"),
        ];
        assert_eq!(sizes(&[&two[..], &unlimited].concat()), host);
        let huge = [("sys/fs/cgroup/a.service/memory.max", "99999999999999\n")];
        assert_eq!(sizes(&[&two[..], &huge].concat()), host, "a limit above the memory of the host");
        let one = [
            ("proc/self/mountinfo", ONE),
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", NONE),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", NONE),
            (
                "sys/fs/cgroup/memory/a/memory.stat",
                "cache 1\nhierarchical_memory_limit 9223372036854771712\n",
            ),
        ];
        assert_eq!(sizes(&one), host);
    }

    #[test]
    fn the_smallest_limit_up_the_tree_counts_with_the_working_set_of_its_cgroup() {
        let nested = |own: &'static str, high: &'static str, slice: &'static str| {
            sizes(&[
                ("proc/self/mountinfo", TWO),
                ("proc/self/cgroup", "0::/pods.slice/pod/app\n"),
                ("sys/fs/cgroup/pods.slice/pod/app/memory.max", own),
                ("sys/fs/cgroup/pods.slice/pod/app/memory.high", high),
                ("sys/fs/cgroup/pods.slice/pod/app/memory.current", "104857600\n"),
                (
                    "sys/fs/cgroup/pods.slice/pod/app/memory.stat",
                    "anon 1\ninactive_file 20971520\nactive_file 7\n",
                ),
                ("sys/fs/cgroup/pods.slice/memory.max", slice),
                ("sys/fs/cgroup/pods.slice/memory.current", "209715200\n"),
                ("sys/fs/cgroup/pods.slice/memory.stat", "inactive_file 10485760\n"),
            ])
        };
        assert_eq!(nested("1073741824\n", "max\n", "max\n"), (1024, 80));
        assert_eq!(nested("1073741824\n", "536870912\n", "max\n"), (512, 80), "memory.high");
        assert_eq!(nested("1073741824\n", "max\n", "536870912\n"), (512, 190), "a parent");
        assert_eq!(nested("max\n", "max\n", "536870912\n"), (512, 190));
    }

    #[test]
    fn a_container_finds_its_own_limit() {
        let limit = |mounts: &'static str, cgroups: &'static str| {
            sizes(&[
                ("proc/self/mountinfo", mounts),
                ("proc/self/cgroup", cgroups),
                ("sys/fs/cgroup/memory.max", "536870912\n"),
                ("sys/fs/cgroup/memory.current", "52428800\n"),
            ])
        };
        assert_eq!(limit(TWO, "0::/\n"), (512, 50), "in a cgroup namespace");
        assert_eq!(limit(TWO, "0::/../../other\n"), (512, 50), "moved out of its namespace");
        let bound = "30 23 0:26 /docker/4f /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(limit(bound, "0::/docker/4f\n"), (512, 50), "without a namespace");
        assert_eq!(limit(bound, "0::/init.scope\n"), (512, 50), "a path that is not below the mount");
        let escaped = r"30 23 0:26 /a\134x2db\040c /sys/fs/cgroup ro - cgroup2 cgroup rw";
        let sizes = sizes(&[
            ("proc/self/mountinfo", escaped),
            ("proc/self/cgroup", "0::/a\\x2db c/app\n"),
            ("sys/fs/cgroup/app/memory.max", "536870912\n"),
            ("sys/fs/cgroup/app/memory.current", "52428800\n"),
        ]);
        assert_eq!(sizes, (512, 50));
    }

    #[test]
    fn a_limit_holds_though_the_use_of_its_cgroup_cannot_be_read() {
        let resident = 1_000 * u64::try_from(rustix::param::page_size()).expect("small") / MIB;
        let found = sizes(&[
            ("proc/self/mountinfo", TWO),
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "536870912\n"),
        ]);
        assert_eq!(found, (512, resident));
    }

    #[test]
    fn version_1_counts_parents_that_count_their_children() {
        let files = |hierarchy: &'static str, hierarchical: &'static str| {
            [
                ("proc/self/mountinfo", ONE),
                ("proc/self/cgroup", "9:cpu:/other\n4:hugetlb,memory:/docker/4f\n0::/\n"),
                ("sys/fs/cgroup/memory/docker/4f/memory.limit_in_bytes", "1073741824\n"),
                ("sys/fs/cgroup/memory/docker/4f/memory.usage_in_bytes", "104857600\n"),
                ("sys/fs/cgroup/memory/docker/4f/memory.stat", hierarchical),
                ("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "536870912\n"),
                ("sys/fs/cgroup/memory/docker/memory.use_hierarchy", hierarchy),
                ("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "157286400\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", NONE),
            ]
        };
        let reported = "inactive_file 1\nhierarchical_memory_limit 536870912\ntotal_inactive_file 20971520\n";
        assert_eq!(sizes(&files("1\n", reported)), (512, 150));
        let alone = "hierarchical_memory_limit 1073741824\ntotal_inactive_file 20971520\n";
        assert_eq!(sizes(&files("0\n", alone)), (1024, 80));
        let hidden = "hierarchical_memory_limit 268435456\ntotal_inactive_file 20971520\n";
        assert_eq!(sizes(&files("0\n", hidden)), (256, 80), "of a parent that the process cannot see");
    }

    #[test]
    fn both_versions_may_be_mounted() {
        let both = format!("{ONE}41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
        let of_one = [
            ("proc/self/mountinfo", &*both),
            ("proc/self/cgroup", "4:memory:/a b\n0::/x\n"),
            ("sys/fs/cgroup/memory/a b/memory.limit_in_bytes", "536870912\n"),
            ("sys/fs/cgroup/memory/a b/memory.usage_in_bytes", "52428800\n"),
        ];
        assert_eq!(sizes(&of_one), (512, 50));
        let of_two = [
            ("proc/self/mountinfo", &*both),
            ("proc/self/cgroup", "1:name=systemd:/x\n0::/x\n"),
            ("sys/fs/cgroup/unified/x/memory.max", "268435456\n"),
            ("sys/fs/cgroup/unified/x/memory.current", "52428800\n"),
        ];
        assert_eq!(sizes(&of_two), (256, 50));
    }

    #[test]
    fn this_host_is_measured() {
        let measured = Meter::find(Path::new("/")).measure().expect("measured");
        assert!(measured.used > 0 && measured.used < measured.available, "{measured:?}");
    }
}
