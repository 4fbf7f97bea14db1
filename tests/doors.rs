//! The doors of the program: the crates that read bytes of others, and the fuzz targets of each (`tests/fuzz`).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::{File, Sources, made_up, sources, test_modules};

/// The bytes of others that a crate reads.
enum Door {
    /// Bytes that these fuzz targets try.
    Fuzzed(&'static [&'static str]),
    /// Bytes that no target tries, for this reason.
    Unfuzzed(&'static str),
    /// No bytes: the code has none of [`READERS`].
    Closed,
}

use Door::{Closed, Fuzzed, Unfuzzed};

/// Each crate with its door.
const DOORS: &[(&str, Door)] = &[
    ("admin", Fuzzed(&["drains"])),
    ("ads", Fuzzed(&["xds", "wds"])),
    ("aggregator", Fuzzed(&["etcd", "drains"])),
    ("api", Closed),
    ("app", Unfuzzed("it reads whether another process of the gateway has its address")),
    ("balance", Closed),
    ("cli", Unfuzzed("it reads files of its user, and answers of this program's admin API")),
    ("config", Fuzzed(&["config"])),
    ("console", Unfuzzed("it reads answers of this program's admin API")),
    ("convert", Fuzzed(&["convert"])),
    ("dataplane", Fuzzed(&["hello", "proxy", "meters", "connect"])),
    ("demo", Unfuzzed("it reads what its own processes write")),
    ("dns", Fuzzed(&["dns"])),
    ("document", Fuzzed(&["config", "etcd", "drains"])),
    ("files", Unfuzzed("it passes the content of files on; its lists are written by the program itself")),
    ("istiod", Fuzzed(&["istiod"])),
    ("kubernetes", Fuzzed(&["gateway_api"])),
    ("model", Fuzzed(&["names"])),
    (
        "net",
        Unfuzzed(
            "it passes bytes on; HTTP/2, HTTP and netlink messages are read by libraries or come from the kernel",
        ),
    ),
    ("peer", Fuzzed(&["enrolment"])),
    ("proto", Closed),
    ("settings", Closed),
    ("registry", Closed),
    ("snapshot", Closed),
    ("decisions", Closed),
    ("tasks", Closed),
    ("telemetry", Unfuzzed("it reads what the program itself has written")),
    ("tls", Fuzzed(&["enrolment"])),
    ("upgrade", Fuzzed(&["upgrade"])),
    ("wds", Fuzzed(&["wds"])),
    ("wire", Fuzzed(&["hello", "proxy", "meters", "connect"])),
    ("world", Closed),
    ("xds", Fuzzed(&["xds"])),
];

/// Paths, as consecutive segments, by which code reads bytes. The first segment `*` stands for any type.
const READERS: &[&[&str]] = &[
    &["serde_json", "from_slice"],
    &["serde_json", "from_str"],
    &["serde_json", "from_reader"],
    &["Message", "from_vec"],
    &["*", "decode"],
    &["AsyncReadExt"],
    &["io", "Read"],
];

#[test]
fn each_crate_with_a_door_has_fuzz_targets() {
    assert_eq!(faults(&sources(), DOORS), "");
}

#[test]
fn each_door_has_its_targets_and_each_target_a_door() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = |folder: &str| -> BTreeSet<String> {
        let files = fs::read_dir(root.join(folder)).expect("a folder");
        let names = files.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"));
        names.map(|name| name.trim_end_matches(".rs").to_owned()).filter(|name| name != "mod").collect()
    };
    let targets = names("tests/fuzz/targets");
    let fuzzed = DOORS.iter().flat_map(|(_, door)| match door {
        Fuzzed(targets) => *targets,
        Unfuzzed(reason) => {
            assert!(!reason.is_empty());
            &[]
        }
        Closed => &[],
    });
    assert_eq!(fuzzed.map(ToString::to_string).collect::<BTreeSet<_>>(), targets);
    assert_eq!(names("tests/fuzz/fuzz_targets"), targets, "those of libFuzzer");
    assert_eq!(names("tests/fuzz/corpus"), targets, "those with a corpus");
    let manifest = fs::read_to_string(root.join("tests/fuzz/Cargo.toml")).expect("a manifest");
    let binaries = manifest.split("[[bin]]\nname = \"").skip(1).filter_map(|rest| rest.split('"').next());
    assert_eq!(binaries.map(str::to_owned).collect::<BTreeSet<_>>(), targets);
}

#[test]
fn a_crate_without_a_row_and_a_door_that_is_not_closed_are_reported() {
    let reads = "//! x\nfn f(bytes: &[u8]) { serde_json::from_slice::<u8>(bytes); }\n";
    let tests = format!("//! x\n#[cfg(test)]\nmod tests {{\n{}}}\n", &reads[6..]);
    let sources = made_up(&[("src/a/x.rs", reads), ("src/b/x.rs", &tests), ("src/c/x.rs", reads)]);
    let doors = [("a", Closed), ("b", Closed), ("d", Fuzzed(&[]))];
    assert_eq!(
        faults(&sources, &doors),
        "a reads bytes (src/a/x.rs:2): name its fuzz target\nc has no row\nd is no crate"
    );
    assert_eq!(faults(&sources, &[("a", Unfuzzed("x")), ("b", Closed), ("c", Fuzzed(&["x"]))]), "");
}

/// Returns what is wrong with the rows, a line each.
fn faults(sources: &Sources, doors: &[(&str, Door)]) -> String {
    let files: Vec<File> = sources.iter().map(|(path, text)| File::read(path, text)).collect();
    let test_only = test_modules(&files);
    let crates: BTreeSet<&str> = files.iter().map(File::owner).filter(|owner| !owner.is_empty()).collect();
    let mut faults = BTreeSet::new();
    let rows: BTreeSet<&str> = doors.iter().map(|(name, _)| *name).collect();
    faults.extend(crates.difference(&rows).map(|name| format!("{name} has no row")));
    faults.extend(rows.difference(&crates).map(|name| format!("{name} is no crate")));
    let closed: BTreeSet<&str> =
        doors.iter().filter(|(_, door)| matches!(door, Closed)).map(|(name, _)| *name).collect();
    for file in files.iter().filter(|file| closed.contains(file.owner()) && !file.is_below(&test_only)) {
        let read = file.paths.iter().find(|path| READERS.iter().any(|reader| reads(&path.segments, reader)));
        faults.extend(read.map(|path| {
            format!("{} reads bytes ({}:{}): name its fuzz target", file.owner(), file.path, path.line)
        }));
    }
    faults.into_iter().collect::<Vec<_>>().join("\n")
}

/// Returns true if a path has these segments in a row.
fn reads(path: &[String], reader: &[&str]) -> bool {
    let is_same = |(found, wanted): (&String, &&str)| *wanted == "*" || found == wanted;
    path.windows(reader.len()).any(|window| window.iter().zip(reader).all(is_same))
}
