//! The test of the layers. It reads every file of `src/`, determines its imports (`use`, re-exports, paths in code, `super::`
//! resolved), and compares the imports between top-level modules with [`LAYERS`]. The files of one module must not import each
//! other in a circle. Comments and strings never count; items under `#[cfg(test)]` may import anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, ItemFn, ItemMod, ItemUse, Meta, UseTree};

/// A top-level module, and the modules that it may import. A row may import only from rows above it.
struct Layer {
    module: &'static str,
    purity: Purity,
    imports: Imports,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purity {
    /// The module only computes from its arguments: no runtime, sockets, clocks, randomness, files or environment.
    Pure,
    Effects,
}

enum Imports {
    These(&'static [&'static str]),
    /// The module may import everything from the named modules. From the other modules in rows above it, it may import only
    /// types whose names end with `Options`, and the paths in [`OPTIONS`].
    AndOptions(&'static [&'static str]),
    AllAbove,
    /// All rows above, below and beside: the composition root.
    All,
}

use Imports::{All, AllAbove, AndOptions, These};
use Purity::{Effects, Pure};

const fn layer(module: &'static str, purity: Purity, imports: Imports) -> Layer {
    Layer { module, purity, imports }
}

const LAYERS: &[Layer] = &[
    layer("model", Pure, These(&[])),
    // `wire` imports `model` for the values that it parses and for the reasons that become alerts.
    layer("wire", Pure, These(&["model"])),
    // `api` defines the JSON of the admin API. The server writes this JSON, and the clients read it. `api` does not depend on
    // the modules whose values it shows.
    layer("api", Pure, These(&[])),
    layer("proto", Effects, These(&[])),
    layer("snapshot", Pure, These(&["model"])),
    // `telemetry` imports `api`, because a connection has the same members in the access log as in the API.
    layer("telemetry", Effects, These(&["model", "api"])),
    layer("balance", Pure, These(&["model", "snapshot"])),
    layer("world", Effects, These(&["model", "snapshot"])),
    layer("document", Effects, These(&["model", "snapshot"])),
    layer("net", Effects, These(&["model", "telemetry"])),
    layer("tls", Effects, These(&["model", "telemetry", "net", "proto"])),
    layer(
        "dataplane",
        Effects,
        These(&["model", "wire", "snapshot", "balance", "world", "telemetry", "net", "tls"]),
    ),
    layer(
        "aggregator",
        Effects,
        These(&["model", "snapshot", "world", "document", "telemetry", "net", "tls", "proto"]),
    ),
    layer(
        "discovery",
        Effects,
        These(&["model", "wire", "snapshot", "world", "telemetry", "net", "tls", "proto"]),
    ),
    layer("config", Effects, AndOptions(&["model", "snapshot", "document", "net"])),
    layer("admin", Effects, AllAbove),
    layer("app", Effects, All),
    layer("cli", Effects, All),
    layer("main", Effects, All),
];

/// Paths below the crate's root that count as `Options` although they have other names.
const OPTIONS: &[&str] = &[
    "aggregator::spec::RegistryKind",
    "aggregator::spec::RegistrySpec",
    "aggregator::etcd::spec::EtcdSpec",
    "aggregator::etcd::spec::Login",
    "aggregator::etcd::spec::PREFIX",
    "aggregator::kubernetes::spec",
    "aggregator::peer::spec::PeerSpec",
    "discovery::ClientRule",
    "discovery::peer::enrolled::Dialling",
    "discovery::peer::enrolled::EnrolledLink",
    "discovery::peer::options::LinkOptions",
    "discovery::peer::options::Stored",
    "telemetry::access_log::AccessLog",
    "telemetry::access_log::Format",
    "telemetry::access_log::Sink",
    "tls::client::CertificateFiles",
    "tls::client::Files",
    "tls::roots::PeerTrust",
    "tls::source::IstioCa",
    "tls::source::Source",
    "tls::source::TrustFile",
];

/// Imports between files of one module that close a circle and are tolerated. The test fails if an entry is not needed, so the
/// list can only become shorter.
const KNOWN_CIRCLES: &[(&str, &str)] = &[];

/// Paths, as consecutive segments, that a pure layer must not use.
const FORBIDDEN_PATHS: &[&[&str]] = &[
    &["tokio"],
    &["mio"],
    &["socket2"],
    &["rustix"],
    &["hyper"],
    &["rand"],
    &["getrandom"],
    &["fastrand"],
    &["Instant", "now"],
    &["SystemTime", "now"],
    &["std", "fs"],
    &["std", "env"],
    &["std", "process"],
    &["std", "thread"],
    &["std", "os"],
];

/// Types that a pure layer must not use, however they are imported. Types of addresses are allowed.
const FORBIDDEN_TYPES: &[&str] = &[
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "UnixStream",
    "UnixListener",
    "UnixDatagram",
    "ToSocketAddrs",
    "RandomState",
];

/// Module names that say nothing and invite cycles.
const FORBIDDEN_MODULES: &[&str] =
    &["util", "utils", "common", "types", "manager", "managers", "helper", "helpers", "misc"];

#[test]
fn every_import_follows_the_layers() {
    let report = judge(&sources());
    assert!(report.violations.is_empty(), "\n{}", lines(&report.violations));
}

#[test]
fn no_import_cycle_exists_among_the_modules() {
    let edges = judge(&sources()).edges;
    assert_eq!(cycle(&edges), None);
    assert!(edges.contains(&edge("snapshot", "model")), "the reader sees no edges: {edges:?}");
}

#[test]
fn no_import_cycle_exists_among_the_files_of_a_module() {
    let mut edges = judge(&sources()).file_edges;
    for (from, to) in KNOWN_CIRCLES {
        assert!(edges.remove(&edge(from, to)), "{from} does not import {to}: strike it off the list");
    }
    assert_eq!(cycle(&edges), None);
    assert!(
        edges.contains(&edge("dataplane::relay", "dataplane::core")),
        "the reader sees no edges: {edges:?}"
    );
}

#[test]
fn the_table_itself_points_only_upwards() {
    for (at, row) in LAYERS.iter().enumerate() {
        let (These(imports) | AndOptions(imports)) = row.imports else { continue };
        for import in imports {
            let above = LAYERS[..at].iter().any(|layer| layer.module == *import);
            assert!(above, "{} may import {import}, which is not above it", row.module);
        }
    }
}

#[test]
fn upward_imports_are_reported_at_their_line() {
    let upward = |path: &str, text: &str| {
        let report = judge(&made_up(&[(path, text)]));
        lines(&report.violations)
    };
    for (path, text) in [
        ("src/model/name.rs", "//! x\nuse std::fmt;\nuse crate::snapshot::Policy;\n"),
        ("src/model/name.rs", "//! x\n\nuse crate::{model::place, snapshot::Policy};\n"),
        ("src/model/name.rs", "//! x\nuse crate::{\n    snapshot::Policy,\n};\n"),
        ("src/model/name.rs", "//! x\n\nuse super::super::snapshot::Policy;\n"),
        ("src/model/mod.rs", "//! x\n\nuse super::snapshot;\n"),
        ("src/model.rs", "//! x\nmod inner {\n    use super::super::{snapshot::*};\n}\n"),
        ("src/model/mod.rs", "//! x\n\npub use crate::snapshot::Policy;\n"),
        ("src/model/mod.rs", "//! x\n/* \" */\npub(crate) use self::super::snapshot::Policy as P;\n"),
        ("src/model/name.rs", "//! x\nconst C: char = '\"';\nfn f(p: &crate::snapshot::Policy) {}\n"),
        ("src/model/name.rs", "//! x\nconst S: &str = r#\"\"\"#;\nfn f() { super::super::snapshot::f() }\n"),
        ("src/model/name.rs", "//! x\nmacro_rules! m { () => {\n$crate::snapshot::f() } }\n"),
    ] {
        let found = upward(path, text);
        assert!(
            found.starts_with(&format!("{path}:3: `model` may not import `snapshot`")),
            "{text}: {found:?}"
        );
    }
    for text in [
        "//! x\n\nuse crate::*;\n",
        "//! x\n\nuse crate as root;\n",
        "//! x\n\nuse crate::{self as root};\n",
        "//! x\n\nuse super::super::Policy;\n",
    ] {
        let found = upward("src/model/name.rs", text);
        assert!(found.starts_with("src/model/name.rs:3: "), "{text}: {found:?}");
    }
}

#[test]
fn a_re_export_at_the_root_opens_no_way_around() {
    let report = judge(&made_up(&[
        ("src/lib.rs", "//! x\npub mod model;\npub mod net;\npub use net::Thing;\n"),
        ("src/net/mod.rs", "//! x\npub struct Thing;\n"),
        ("src/model/mod.rs", "//! x\nuse crate::Thing;\n"),
    ]));
    assert_eq!(lines(&report.violations), "src/model/mod.rs:2: `crate::Thing` is no module of the table\n");
}

#[test]
fn what_is_allowed_is_not_reported() {
    let report = judge(&made_up(&[
        ("src/lib.rs", "//! x\npub mod model;\n"),
        (
            "src/model/name.rs",
            "//! `crate::snapshot` in a comment.\n\
             // use crate::snapshot::Policy;\n\
             /* crate::net /* nested */ crate::net */\n\
             use std::net::{IpAddr, SocketAddr};\n\
             use std::time::{Duration, Instant};\n\
             const TEXT: &str = \"crate::snapshot tokio::spawn unsafe\";\n\
             const BYTES: &[u8] = br##\"crate::net \"# \"##;\n\
             fn rand<'a>(tokio: &'a str, at: Instant) -> char { '\\'' }\n\
             pub(crate) fn f() { super::place::g(); self::h::<u8>() }\n\
             #[cfg(test)]\nmod tests {\n    use crate::snapshot::Policy;\n    use tokio::net::TcpStream;\n}\n",
        ),
        ("src/model/mod.rs", "//! x\nmod name;\n#[cfg(test)]\nmod tests;\n"),
        ("src/model/tests.rs", "//! x\nuse crate::dataplane::peek;\nuse std::fs;\n"),
        (
            "src/config/mod.rs",
            "//! x\nuse crate::{model::name, dataplane::Options, telemetry::access_log::Format::Json};\n\
             use crate::telemetry::access_log::Writer;\n",
        ),
        ("src/main.rs", "//! x\nfn main() { isthmus::cli::run() }\n"),
    ]));
    assert_eq!(
        lines(&report.violations),
        "src/config/mod.rs:3: `config` may not import `telemetry` (crate::telemetry::access_log::Writer)\n"
    );
    assert!(report.edges.contains(&edge("main", "cli")));
}

#[test]
fn forbidden_words_are_reported_at_their_line_in_pure_layers_only() {
    for (line, found) in [
        ("use tokio::sync::mpsc;", "`tokio`"),
        ("use std::net::{IpAddr, TcpStream};", "`TcpStream`"),
        ("use std::{fmt, net::UdpSocket};", "`UdpSocket`"),
        ("fn f(l: std::net::TcpListener) {}", "`TcpListener`"),
        ("fn f() { let t = Instant::now(); }", "`Instant::now`"),
        ("fn f() { let t = ::std::time::SystemTime::now(); }", "`SystemTime::now`"),
        ("use rand::Rng;", "`rand`"),
        ("use rand;", "`rand`"),
        ("fn f() -> u8 { rand::random::<u8>() }", "`rand`"),
        ("use std::{env, fmt};", "`std::env`"),
        ("fn f() { std::fs::read(\"x\"); }", "`std::fs`"),
    ] {
        let text = format!("//! x\n\n\n{line}\n");
        for module in ["model", "wire", "snapshot", "balance"] {
            let path = format!("src/{module}/x.rs");
            let violations = lines(&judge(&made_up(&[(&path, &text)])).violations);
            let expected = format!("{path}:4: {found} has no place in `{module}`");
            assert!(violations.starts_with(&expected), "{line}: {violations:?}");
        }
        let violations = judge(&made_up(&[("src/net/x.rs", &text)])).violations;
        assert!(violations.is_empty(), "{}", lines(&violations));
    }
}

#[test]
fn house_rules_on_names_headers_and_unsafe_are_reported() {
    let report = judge(&made_up(&[
        ("src/net/utils.rs", "//! x\n"),
        ("src/net/helpers/mod.rs", "//! x\n"),
        ("src/net/dial.rs", "//! x\nmod common {\n}\n"),
        ("src/net/bare.rs", "use std::fmt;\n"),
        ("src/net/sharp.rs", "//! x\n#[cfg(test)]\nmod tests {\n    fn f() { unsafe { g() } }\n}\n"),
        ("src/net/moved.rs", "//! x\n#[path = \"elsewhere.rs\"]\nmod elsewhere;\n"),
        ("src/attic/mod.rs", "//! x\n"),
    ]));
    assert_eq!(
        lines(&report.violations),
        "src/attic/mod.rs:1: module `attic` is not in the table of layers\n\
         src/net/bare.rs:1: the file does not open with `//!`\n\
         src/net/dial.rs:2: a module named `common` says nothing of what it owns\n\
         src/net/helpers/mod.rs:1: a module named `helpers` says nothing of what it owns\n\
         src/net/moved.rs:2: `#[path]` hides where a module is\n\
         src/net/sharp.rs:4: `unsafe` appears\n\
         src/net/utils.rs:1: a module named `utils` says nothing of what it owns\n"
    );
}

#[test]
fn a_cycle_between_modules_is_found() {
    let report = judge(&made_up(&[
        ("src/app/mod.rs", "//! x\nuse crate::cli::Command;\n"),
        ("src/cli/mod.rs", "//! x\nfn f() { crate::admin::g(); crate::app::run() }\n"),
        ("src/admin/mod.rs", "//! x\nuse crate::model::name;\n"),
    ]));
    assert!(report.violations.is_empty(), "{}", lines(&report.violations));
    assert_eq!(cycle(&report.edges).as_deref(), Some("app → cli → app"));
}

#[test]
fn a_cycle_between_files_of_one_module_is_found() {
    let one = ("src/net/one.rs", "//! x\nuse super::two::parts::Part;\n");
    let two = ("src/net/two/mod.rs", "//! x\nmod parts;\nfn f() { parts::g() }\n");
    let back = ("src/net/two/parts.rs", "//! x\nuse super::Whole;\nfn g() { vec![crate::net::one::h()]; }\n");
    let planted = judge(&made_up(&[one, two, back]));
    assert_eq!(
        cycle(&planted.file_edges).as_deref(),
        Some("net::one → net::two::parts → net::one"),
        "{:?}",
        planted.file_edges
    );
    // A nested file may use the file that contains it.
    let apart = judge(&made_up(&[two, ("src/net/two/parts.rs", "//! x\nuse super::Whole;\n")]));
    assert_eq!(cycle(&apart.file_edges), None);
    assert!(apart.file_edges.contains(&edge("net::two", "net::two::parts")));
}

// --- judging -------------------------------------------------------------------------------------

type Edges = BTreeSet<(String, String)>;

#[derive(Default)]
struct Report {
    violations: BTreeSet<Violation>,
    /// Pairs of an importing and an imported module.
    edges: Edges,
    /// Pairs of an importing and an imported file of the same module. The use of an enclosing file by a nested one does not
    /// count, because both are parts of one thing.
    file_edges: Edges,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Violation {
    file: String,
    line: usize,
    text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.text)
    }
}

/// The text of each file by its path, relative to the repository.
type Sources = BTreeMap<String, String>;

fn judge(sources: &Sources) -> Report {
    let mut report = Report::default();
    let files: Vec<File> = sources.iter().map(|(path, text)| File::read(path, text)).collect();
    let modules: BTreeSet<&[String]> = files.iter().map(|file| &file.module[..]).collect();
    let test_only: BTreeSet<&Vec<String>> = files.iter().flat_map(|file| &file.test_modules).collect();
    for file in &files {
        judge_house_rules(file, &mut report);
        let is_test = (1..=file.module.len()).any(|n| test_only.contains(&file.module[..n].to_vec()));
        if is_test {
            continue;
        }
        for line in &file.path_attributes {
            report.add(file, *line, "`#[path]` hides where a module is".to_owned());
        }
        if file.owner() == "lib" {
            continue;
        }
        let Some(at) = LAYERS.iter().position(|layer| layer.module == file.owner()) else {
            report.add(file, 1, format!("module `{}` is not in the table of layers", file.owner()));
            continue;
        };
        for path in &file.paths {
            judge_path(file, at, path, &mut report);
            report.file_edges.extend(file_edge(file, path, &modules));
        }
    }
    report
}

/// Returns the edge to another file of the same module, if the path leads to a file that does not enclose `file`.
fn file_edge(file: &File, path: &PathUse, modules: &BTreeSet<&[String]>) -> Option<(String, String)> {
    let inside = path.inside_crate(file)?;
    let target = (1..=inside.len()).rev().map(|n| &inside[..n]).find(|target| modules.contains(target))?;
    let is_elsewhere = target[0] == file.owner() && !file.module.starts_with(target);
    is_elsewhere.then(|| edge(&file.module.join("::"), &target.join("::")))
}

fn judge_house_rules(file: &File, report: &mut Report) {
    if !file.has_header {
        report.add(file, 1, "the file does not open with `//!`".to_owned());
    }
    let empty = |name: &str| format!("a module named `{name}` says nothing of what it owns");
    if let Some(name) = file.module.iter().find(|name| FORBIDDEN_MODULES.contains(&name.as_str())) {
        report.add(file, 1, empty(name));
    }
    for (line, name) in &file.inline_modules {
        if FORBIDDEN_MODULES.contains(&name.as_str()) {
            report.add(file, *line, empty(name));
        }
    }
    for line in &file.unsafe_lines {
        report.add(file, *line, "`unsafe` appears".to_owned());
    }
}

fn judge_path(file: &File, at: usize, path: &PathUse, report: &mut Report) {
    let layer = &LAYERS[at];
    let owner = layer.module;
    let Some(inside) = path.inside_crate(file) else {
        if layer.purity == Pure
            && let Some(word) = path.forbidden()
        {
            report.add(file, path.line, format!("{word} has no place in `{owner}`"));
        }
        return;
    };
    let target = inside.first().map_or("*", String::as_str);
    if matches!(target, "*" | "self") {
        let text = "the crate's root is imported whole, which hides what is used".to_owned();
        return report.add(file, path.line, text);
    }
    if target == owner {
        return;
    }
    let spelled = format!("crate::{}", inside.join("::"));
    let Some(target_at) = LAYERS.iter().position(|layer| layer.module == target) else {
        return report.add(file, path.line, format!("`{spelled}` is no module of the table"));
    };
    let above = target_at < at;
    let allowed = match layer.imports {
        These(modules) => modules.contains(&target),
        AndOptions(modules) => {
            let spelled = inside.join("::");
            let listed = |option: &&str| spelled == **option || spelled.starts_with(&format!("{option}::"));
            let options = inside.iter().any(|name| name.ends_with("Options")) || OPTIONS.iter().any(listed);
            modules.contains(&target) || (above && options)
        }
        AllAbove => above,
        All => true,
    };
    report.edges.insert(edge(owner, target));
    if !allowed {
        report.add(file, path.line, format!("`{owner}` may not import `{target}` ({spelled})"));
    }
}

impl Report {
    fn add(&mut self, file: &File, line: usize, text: String) {
        self.violations.insert(Violation { file: file.path.clone(), line, text });
    }
}

/// Returns the modules on a cycle, if there is one.
fn cycle(edges: &Edges) -> Option<String> {
    fn visit(
        node: &str,
        edges: &Edges,
        trail: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<String> {
        if let Some(start) = trail.iter().position(|earlier| earlier == node) {
            return Some(format!("{} → {node}", trail[start..].join(" → ")));
        }
        if !done.insert(node.to_owned()) {
            return None;
        }
        trail.push(node.to_owned());
        let found =
            edges.iter().filter(|(from, _)| from == node).find_map(|(_, to)| visit(to, edges, trail, done));
        trail.pop();
        found
    }
    let mut done = BTreeSet::new();
    edges.iter().find_map(|(from, _)| visit(from, edges, &mut Vec::new(), &mut done))
}

// --- reading -------------------------------------------------------------------------------------

/// The declarations, imports and attributes of one source file.
struct File {
    path: String,
    /// The module path of the file in the crate: `src/a/b.rs` is `[a, b]`, `src/lib.rs` is `[]`.
    module: Vec<String>,
    has_header: bool,
    paths: Vec<PathUse>,
    inline_modules: Vec<(usize, String)>,
    /// The modules declared here that have files of their own.
    children: BTreeSet<String>,
    /// The full paths of modules declared here under `#[cfg(test)]` that have files of their own.
    test_modules: Vec<Vec<String>>,
    unsafe_lines: Vec<usize>,
    path_attributes: Vec<usize>,
}

/// A path in a `use` or in code; a group counts as one path per member.
struct PathUse {
    line: usize,
    segments: Vec<String>,
    /// The inline modules, below the file's own module, that contain the path.
    inline: Vec<String>,
}

impl PathUse {
    /// Returns the path below the crate's root, or `None` if it leads elsewhere.
    fn inside_crate(&self, file: &File) -> Option<Vec<String>> {
        let mut at: Vec<String> = file.module.iter().chain(&self.inline).cloned().collect();
        let first = self.segments[0].as_str();
        let rest = match first {
            "crate" => &self.segments[1..],
            "isthmus" if file.owner() == "main" => &self.segments[1..],
            "self" | "super" => &self.segments[..],
            child if self.inline.is_empty() && file.children.contains(child) => &self.segments[..],
            _ => return None,
        };
        if rest.len() < self.segments.len() {
            at.clear();
        }
        for (depth, segment) in rest.iter().enumerate() {
            match segment.as_str() {
                "super" => drop(at.pop()),
                "self" if depth == 0 && first == "self" => {}
                name => at.push(name.to_owned()),
            }
        }
        Some(at)
    }

    fn forbidden(&self) -> Option<String> {
        let segments: Vec<&str> = self.segments.iter().map(String::as_str).collect();
        let named =
            FORBIDDEN_TYPES.iter().find(|name| segments.contains(name)).map(|name| format!("`{name}`"));
        named.or_else(|| {
            let has = |path: &&&[&str]| segments.windows(path.len()).any(|window| window == **path);
            FORBIDDEN_PATHS.iter().find(has).map(|path| format!("`{}`", path.join("::")))
        })
    }
}

impl File {
    /// Returns the name of the file's row in the table of layers.
    fn owner(&self) -> &str {
        match self.path.as_str() {
            "src/lib.rs" => "lib",
            "src/main.rs" => "main",
            _ => self.module.first().map_or("lib", String::as_str),
        }
    }

    fn read(path: &str, text: &str) -> Self {
        let mut file = Self {
            path: path.to_owned(),
            module: module_of(path),
            has_header: text.starts_with("//!"),
            paths: Vec::new(),
            inline_modules: Vec::new(),
            children: BTreeSet::new(),
            test_modules: Vec::new(),
            unsafe_lines: Vec::new(),
            path_attributes: Vec::new(),
        };
        let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{path}: {error}"));
        note_unsafe(tokens.clone(), &mut file.unsafe_lines);
        let syntax: syn::File = syn::parse2(tokens).unwrap_or_else(|error| panic!("{path}: {error}"));
        Reader { file: &mut file, inline: Vec::new() }.visit_file(&syntax);
        file
    }
}

/// Walks through one file, without items under `#[cfg(test)]`.
struct Reader<'a> {
    file: &'a mut File,
    /// The inline modules around the current item.
    inline: Vec<String>,
}

impl Reader<'_> {
    /// Records a path. A single name counts only as a forbidden type, never as an import.
    fn note(&mut self, line: usize, segments: Vec<String>) {
        if segments.len() > 1 || segments.iter().any(|name| FORBIDDEN_TYPES.contains(&name.as_str())) {
            self.file.paths.push(PathUse { line, segments, inline: self.inline.clone() });
        }
    }

    /// Records each leaf in the tree of a `use`.
    fn note_tree(&mut self, prefix: &[String], tree: &UseTree) {
        let leaf = |name: &Ident| [prefix, &[name.to_string()]].concat();
        let (line, segments) = match tree {
            UseTree::Path(path) => return self.note_tree(&leaf(&path.ident), &path.tree),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.note_tree(prefix, tree));
            }
            UseTree::Name(name) => (line(&name.ident), leaf(&name.ident)),
            UseTree::Rename(rename) => (line(&rename.ident), leaf(&rename.ident)),
            UseTree::Glob(glob) => {
                (glob.star_token.spans[0].start().line, [prefix, &["*".to_owned()]].concat())
            }
        };
        self.file.paths.push(PathUse { line, segments, inline: self.inline.clone() });
    }

    /// Records the paths in the body of a macro, which is parsed as tokens only.
    fn note_tokens(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Vec::new(), 0);
        for token in tokens {
            if matches!(&token, TokenTree::Punct(punct) if punct.as_char() == ':') {
                colons += 1;
                continue;
            }
            if colons != 2 || !matches!(token, TokenTree::Ident(_)) {
                self.note_idents(&std::mem::take(&mut path));
            }
            colons = 0;
            match token {
                TokenTree::Ident(ident) => path.push(ident),
                TokenTree::Group(group) => self.note_tokens(group.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
        self.note_idents(&path);
    }

    fn note_idents(&mut self, path: &[Ident]) {
        if let Some(first) = path.first() {
            self.note(line(first), path.iter().map(ToString::to_string).collect());
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        module.attrs.iter().for_each(|attribute| self.visit_attribute(attribute));
        let name = module.ident.to_string();
        match &module.content {
            None if is_test(&module.attrs) => {
                let path = self.file.module.iter().chain(&self.inline).cloned().chain([name]).collect();
                self.file.test_modules.push(path);
            }
            None => drop(self.file.children.insert(name)),
            Some(_) if is_test(&module.attrs) => {}
            Some((_, items)) => {
                self.file.inline_modules.push((line(&module.ident), name.clone()));
                self.inline.push(name);
                items.iter().for_each(|item| self.visit_item(item));
                self.inline.pop();
            }
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if !is_test(&item.attrs) {
            self.note_tree(&[], &item.tree);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.note_idents(&path.segments.iter().map(|segment| segment.ident.clone()).collect::<Vec<_>>());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.note_tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if matches!(&attribute.meta, Meta::NameValue(pair) if pair.path.is_ident("path")) {
            self.file.path_attributes.push(attribute.pound_token.spans[0].start().line);
        }
    }
}

/// Returns true if one of the attributes is `#[cfg(test)]`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    })
}

fn note_unsafe(tokens: TokenStream, lines: &mut Vec<usize>) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) if ident == "unsafe" => lines.push(line(&ident)),
            TokenTree::Group(group) => note_unsafe(group.stream(), lines),
            _ => {}
        }
    }
}

fn line(ident: &Ident) -> usize {
    ident.span().start().line
}

fn module_of(path: &str) -> Vec<String> {
    let inner = path.strip_prefix("src/").unwrap_or(path);
    let inner = inner.strip_suffix(".rs").unwrap_or(inner);
    let inner = inner.strip_suffix("/mod").unwrap_or(inner);
    match inner {
        "lib" | "main" => Vec::new(),
        _ => inner.split('/').map(str::to_owned).collect(),
    }
}

// --- inputs --------------------------------------------------------------------------------------

fn sources() -> Sources {
    fn walk(root: &Path, folder: &Path, found: &mut Sources) {
        for entry in fs::read_dir(folder).expect("a readable folder") {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() {
                walk(root, &path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
                found.insert(name, fs::read_to_string(&path).expect("a readable source"));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Sources::new();
    walk(root, &root.join("src"), &mut found);
    assert!(found.contains_key("src/lib.rs") && found.len() > 10, "the sources are not where they were");
    found
}

fn made_up(files: &[(&str, &str)]) -> Sources {
    files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}

fn edge(from: &str, to: &str) -> (String, String) {
    (from.to_owned(), to.to_owned())
}

fn lines(violations: &BTreeSet<Violation>) -> String {
    violations.iter().map(|violation| format!("{violation}\n")).collect()
}
