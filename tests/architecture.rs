//! The layers, kept by a test: reads every file of `src/`, works out what it imports (`use`, re-exports,
//! paths in code, `super::` resolved) and compares the edges between top-level modules with [`LAYERS`].
//! It works on tokens, so comments and strings never count; `#[cfg(test)]` items may look anywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

/// One top-level module, and the modules it may import. Rows may import only from rows above them.
struct Layer {
    module: &'static str,
    purity: Purity,
    imports: Imports,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purity {
    /// A function of its arguments: no runtime, sockets, clocks, randomness, files or environment.
    Pure,
    Effects,
}

enum Imports {
    These(&'static [&'static str]),
    /// `These`, and from every row above only the `Options` of its components.
    AndOptions(&'static [&'static str]),
    AllAbove,
    /// The composition root: rows above, below and beside it.
    All,
}

use Imports::{All, AllAbove, AndOptions, These};
use Purity::{Effects, Pure};

const fn layer(module: &'static str, purity: Purity, imports: Imports) -> Layer {
    Layer { module, purity, imports }
}

const LAYERS: &[Layer] = &[
    layer("model", Pure, These(&[])),
    // For the values that it reads into and the reasons that become alerts.
    layer("wire", Pure, These(&["model"])),
    layer("proto", Effects, These(&[])),
    layer("snapshot", Pure, These(&["model"])),
    layer("telemetry", Effects, These(&["model"])),
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

/// What counts as `Options` though it has another name, below the crate's root.
const OPTIONS: &[&str] = &[
    "aggregator::spec::RegistryKind",
    "aggregator::spec::RegistrySpec",
    "aggregator::etcd::spec::EtcdSpec",
    "aggregator::etcd::spec::Login",
    "aggregator::etcd::spec::PREFIX",
    "discovery::ClientRule",
    "telemetry::access_log::AccessLog",
    "telemetry::access_log::Format",
    "telemetry::access_log::Sink",
    "tls::client::CertificateFiles",
    "tls::client::Files",
    "tls::source::IstioCa",
    "tls::source::Source",
    "tls::source::TrustFile",
];

/// Paths, as consecutive segments, that a pure layer may not name.
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

/// Types that a pure layer may not name, however they were imported. Address types are fine.
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

/// Names that say nothing, and under which cycles begin.
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

// --- judging -------------------------------------------------------------------------------------

type Edges = BTreeSet<(String, String)>;

#[derive(Default)]
struct Report {
    violations: BTreeSet<Violation>,
    /// Importing module, imported module.
    edges: Edges,
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

/// Path relative to the repository, and text.
type Sources = BTreeMap<String, String>;

fn judge(sources: &Sources) -> Report {
    let mut report = Report::default();
    let files: Vec<File> = sources.iter().map(|(path, text)| File::read(path, text)).collect();
    let test_only: BTreeSet<&Vec<String>> = files.iter().flat_map(|file| &file.test_modules).collect();
    for file in &files {
        judge_house_rules(file, &mut report);
        let is_test = (1..=file.module.len()).any(|n| test_only.contains(&file.module[..n].to_vec()));
        if is_test || file.owner() == "lib" {
            continue;
        }
        let Some(at) = LAYERS.iter().position(|layer| layer.module == file.owner()) else {
            report.add(file, 1, format!("module `{}` is not in the table of layers", file.owner()));
            continue;
        };
        for path in &file.paths {
            judge_path(file, at, path, &mut report);
        }
    }
    report
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
    for line in &file.path_attributes {
        report.add(file, *line, "`#[path]` hides where a module is".to_owned());
    }
}

fn judge_path(file: &File, at: usize, path: &PathUse, report: &mut Report) {
    let layer = &LAYERS[at];
    let owner = layer.module;
    let Some(inside) = path.inside_crate(&file.module, owner == "main") else {
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

/// The modules on a cycle, if there is one.
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

/// What one source file says about modules.
struct File {
    path: String,
    /// Where the file is in the crate: `src/a/b.rs` is `[a, b]`, `src/lib.rs` is `[]`.
    module: Vec<String>,
    has_header: bool,
    paths: Vec<PathUse>,
    inline_modules: Vec<(usize, String)>,
    /// Full paths of modules declared under `#[cfg(test)]` in files of their own.
    test_modules: Vec<Vec<String>>,
    unsafe_lines: Vec<usize>,
    path_attributes: Vec<usize>,
}

/// A path in a `use` or in code, groups written out.
struct PathUse {
    line: usize,
    segments: Vec<String>,
    /// Module of the place where it stands, below the file's own.
    inline: Vec<String>,
}

impl PathUse {
    /// The path below the crate's root, or `None` if it leads elsewhere.
    fn inside_crate(&self, file_module: &[String], is_main: bool) -> Option<Vec<String>> {
        let mut at: Vec<String> = file_module.iter().chain(&self.inline).cloned().collect();
        let mut rest = self.segments.iter();
        match self.segments[0].as_str() {
            "crate" => at.clear(),
            "isthmus" if is_main => at.clear(),
            "self" => {}
            "super" => {
                at.pop();
            }
            _ => return None,
        }
        rest.next();
        for segment in rest {
            if segment == "super" {
                at.pop();
            } else {
                at.push(segment.clone());
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
    /// The row of the table that the file belongs to.
    fn owner(&self) -> &str {
        match self.path.as_str() {
            "src/lib.rs" => "lib",
            "src/main.rs" => "main",
            _ => self.module.first().map_or("lib", String::as_str),
        }
    }

    fn read(path: &str, text: &str) -> Self {
        let tokens = tokens(text);
        let mut file = Self {
            path: path.to_owned(),
            module: module_of(path),
            has_header: text.starts_with("//!"),
            paths: Vec::new(),
            inline_modules: Vec::new(),
            test_modules: Vec::new(),
            unsafe_lines: Vec::new(),
            path_attributes: Vec::new(),
        };
        for (at, token) in tokens.iter().enumerate() {
            if token.text == "unsafe" {
                file.unsafe_lines.push(token.line);
            }
            if is_sequence(&tokens[at..], &["#", "[", "path", "="]) {
                file.path_attributes.push(token.line);
            }
        }
        Reader { tokens: &tokens, at: 0, file: &mut file }.read();
        file
    }
}

struct Reader<'a> {
    tokens: &'a [Token],
    at: usize,
    file: &'a mut File,
}

impl Reader<'_> {
    fn read(mut self) {
        let mut depth = 0;
        // Inline modules around the current token, each with the depth inside its braces.
        let mut inline: Vec<(usize, String)> = Vec::new();
        while let Some(token) = self.tokens.get(self.at) {
            let names = || inline.iter().map(|(_, name)| name.clone()).collect::<Vec<_>>();
            match token.text.as_str() {
                "#" if is_sequence(&self.tokens[self.at..], &["#", "[", "cfg", "(", "test", ")", "]"]) => {
                    self.skip_test_item(&names());
                    continue;
                }
                "mod" => {
                    if let Some(name) = self.text(1).map(str::to_owned)
                        && self.text(2) == Some("{")
                    {
                        self.file.inline_modules.push((token.line, name.clone()));
                        depth += 1;
                        inline.push((depth, name));
                        self.at += 3;
                        continue;
                    }
                    self.at += 1;
                }
                "use" => {
                    self.at += 1;
                    let inline = names();
                    self.tree(&[], &inline);
                }
                "{" => {
                    depth += 1;
                    self.at += 1;
                }
                "}" => {
                    if inline.last().is_some_and(|(inside, _)| *inside == depth) {
                        inline.pop();
                    }
                    depth -= 1;
                    self.at += 1;
                }
                _ if token.is_word() => {
                    let inline = names();
                    self.path(&inline);
                }
                _ => self.at += 1,
            }
        }
    }

    fn text(&self, ahead: usize) -> Option<&str> {
        self.tokens.get(self.at + ahead).map(|token| token.text.as_str())
    }

    /// A path in code. A single word counts only as a forbidden type, never as an import.
    fn path(&mut self, inline: &[String]) {
        let line = self.tokens[self.at].line;
        let mut segments = vec![self.tokens[self.at].text.clone()];
        self.at += 1;
        while self.text(0) == Some("::") && self.tokens.get(self.at + 1).is_some_and(Token::is_word) {
            segments.push(self.tokens[self.at + 1].text.clone());
            self.at += 2;
        }
        if segments.len() > 1 || FORBIDDEN_TYPES.contains(&segments[0].as_str()) {
            self.file.paths.push(PathUse { line, segments, inline: inline.to_vec() });
        }
    }

    /// The tree of a `use`, from behind its keyword; each leaf is a path.
    fn tree(&mut self, prefix: &[String], inline: &[String]) {
        let mut segments = prefix.to_vec();
        let mut line = self.tokens.get(self.at).map_or(0, |token| token.line);
        while let Some(token) = self.tokens.get(self.at) {
            match token.text.as_str() {
                "::" => self.at += 1,
                "{" => {
                    self.at += 1;
                    while let Some(text) = self.text(0) {
                        match text {
                            "}" => break,
                            "," => self.at += 1,
                            _ => self.tree(&segments, inline),
                        }
                    }
                    self.at += 1;
                    return;
                }
                "as" => self.at += 2,
                _ if token.is_word() || token.text == "*" => {
                    line = token.line;
                    segments.push(token.text.clone());
                    self.at += 1;
                }
                ";" | "," | "}" => break,
                // Not a `use` after all (`impl Trait + use<'a>`): the caller goes on from here.
                _ => {
                    self.at += 1;
                    return;
                }
            }
        }
        if !segments.is_empty() {
            self.file.paths.push(PathUse { line, segments, inline: inline.to_vec() });
        }
    }

    /// From `#[cfg(test)]` to the end of the item it stands on.
    fn skip_test_item(&mut self, inline: &[String]) {
        self.at += 7;
        let start = self.at;
        let mut depth = 0;
        while let Some(text) = self.text(0) {
            match text {
                "{" | "[" | "(" => depth += 1,
                "}" | "]" | ")" => depth -= 1,
                _ => {}
            }
            let ends = depth == 0 && matches!(text, "}" | ";" | ",");
            self.at += 1;
            if ends {
                break;
            }
        }
        let item = &self.tokens[start..self.at];
        if let [.., keyword, name, end] = item
            && keyword.text == "mod"
            && end.text == ";"
        {
            let own = std::iter::once(name.text.clone());
            let module = self.file.module.iter().chain(inline).cloned().chain(own).collect();
            self.file.test_modules.push(module);
        }
    }
}

fn is_sequence(tokens: &[Token], texts: &[&str]) -> bool {
    tokens.len() >= texts.len() && tokens.iter().zip(texts).all(|(token, text)| token.text == *text)
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

/// A word, a number, `::`, or one other character.
struct Token {
    line: usize,
    text: String,
}

impl Token {
    fn is_word(&self) -> bool {
        self.text.starts_with(|first: char| first.is_alphabetic() || first == '_')
    }
}

/// The tokens of a source: comments, strings, character literals and lifetimes are left out.
fn tokens(text: &str) -> Vec<Token> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let length = match rest[0] {
            b'/' if rest.starts_with(b"//") => line_comment(rest),
            b'/' if rest.starts_with(b"/*") => block_comment(rest),
            b'"' => string(rest, 0),
            b'\'' => character_or_lifetime(rest),
            first if first.is_ascii_alphanumeric() || first == b'_' || first >= 0x80 => {
                let word = rest.iter().take_while(|byte| is_word_byte(**byte)).count();
                match prefixed_literal(&rest[..word], &rest[word..]) {
                    Some(literal) => word + literal,
                    None => {
                        tokens
                            .push(Token { line, text: String::from_utf8_lossy(&rest[..word]).into_owned() });
                        word
                    }
                }
            }
            b':' if rest.starts_with(b"::") => {
                tokens.push(Token { line, text: "::".to_owned() });
                2
            }
            first if first.is_ascii_whitespace() => 1,
            first => {
                tokens.push(Token { line, text: char::from(first).to_string() });
                1
            }
        };
        line += rest[..length].iter().filter(|byte| **byte == b'\n').count();
        at += length;
    }
    tokens
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn line_comment(rest: &[u8]) -> usize {
    rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len())
}

fn block_comment(rest: &[u8]) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// The literal behind a prefix (`b"…"`, `r#"…"#`, `c"…"`, `b'…'`), or `None` if the word is only a word.
fn prefixed_literal(word: &[u8], rest: &[u8]) -> Option<usize> {
    let raw = matches!(word, b"r" | b"br" | b"cr");
    let hashes = rest.iter().take_while(|byte| **byte == b'#').count();
    match rest.get(hashes) {
        Some(b'"') if raw => Some(raw_string(rest, hashes)),
        Some(b'"') if hashes == 0 && matches!(word, b"b" | b"c") => Some(string(rest, 0)),
        Some(b'\'') if hashes == 0 && word == b"b" => Some(character_or_lifetime(rest)),
        _ => None,
    }
}

fn raw_string(rest: &[u8], hashes: usize) -> usize {
    let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let body = &rest[hashes + 1..];
    let found = body.windows(end.len()).position(|window| window == end);
    found.map_or(rest.len(), |at| hashes + 1 + at + end.len())
}

/// A literal in the quote that `rest[start]` is, with escapes.
fn string(rest: &[u8], start: usize) -> usize {
    let quote = rest[start];
    let mut at = start + 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn character_or_lifetime(rest: &[u8]) -> usize {
    let name = rest[1..].iter().take_while(|byte| is_word_byte(**byte)).count();
    // `'a'` is a character, `'a` a lifetime; a character is one `char` of up to four bytes.
    if name > 0 && rest.get(1 + name) != Some(&b'\'') { 1 + name } else { string(rest, 0) }
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
