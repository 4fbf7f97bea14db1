//! What the compiler cannot check about the layout of `src/`: that the pure crates have no clock, socket or randomness, that the
//! files of a crate do not import each other in a circle, rules on names and headers, and that the map in `src/lib.rs` is true.
//! `budget`: the size of crates and features. `doors`: the fuzz targets of crates that read bytes of others. `citations`: the pages
//! that comments cite.
//!
//! The test reads every file of `src/` and determines its imports (`use`, re-exports, paths in code, `super::` resolved). Comments
//! and strings never count; items under `#[cfg(test)]` may import anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, ItemFn, ItemMod, ItemUse, Meta, MetaList, UseTree};

mod budget;
mod citations;
mod doors;

/// The crates that only compute from their arguments: no runtime, sockets, clocks, randomness, files or environment.
const PURE: &[&str] = &["model", "wire", "api", "settings", "registry", "snapshot", "decisions", "balance"];

/// Imports between files of one crate that close a circle and are tolerated. The test fails if an entry is not needed, so the
/// list can only become shorter.
const KNOWN_CIRCLES: &[(&str, &str)] = &[];

/// Paths, as consecutive segments, that a pure crate must not use.
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

/// Types that a pure crate must not use, however they are imported. Types of addresses are allowed.
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

/// The one file with `unsafe` code. SECURITY.md names it.
const UNSAFE_FILE: &str = "src/net/option.rs";

/// Module names that say nothing and invite cycles.
const FORBIDDEN_MODULES: &[&str] =
    &["util", "utils", "common", "types", "manager", "managers", "helper", "helpers", "misc"];

#[test]
fn every_file_follows_the_rules() {
    let report = judge(&sources());
    assert!(report.violations.is_empty(), "\n{}", lines(&report.violations));
}

#[test]
fn no_import_cycle_exists_among_the_files_of_a_crate() {
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

/// Each crate has a row in the map; the row names only crates above it, which the manifest depends on; and what the manifest
/// depends on is named in the row or in the rows of what it names.
#[test]
fn the_map_shows_the_arrows_of_the_manifests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let map = fs::read_to_string(root.join("lib.rs")).expect("the map");
    let mut reachable: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in map.lines().filter(|line| line.starts_with("//! | [`") || line.starts_with("//! | `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = cells[1].trim_matches(['[', ']', '`']).to_owned();
        let depends = dependencies(&root.join(&name));
        let named: BTreeSet<String> = match cells[3] {
            "all above" => reachable.keys().cloned().collect(),
            other => other.split(", ").filter(|name| *name != "–").map(str::to_owned).collect(),
        };
        let mut all = named.clone();
        for import in &named {
            let above = reachable.get(import).unwrap_or_else(|| panic!("{name}: {import} is not above it"));
            assert!(
                cells[3] == "all above" || depends.contains(import),
                "{name} does not depend on {import}"
            );
            all.extend(above.iter().cloned());
        }
        let unnamed: Vec<_> = depends.difference(&all).collect();
        assert!(unnamed.is_empty(), "{name} depends on {unnamed:?}, which its row does not lead to");
        reachable.insert(name, all);
    }
    let folders = fs::read_dir(&root).expect("a folder").map(|entry| entry.expect("an entry").path());
    let crates = folders.filter(|path| path.is_dir()).map(|path| path.file_name().map(ToOwned::to_owned));
    let crates: BTreeSet<_> =
        crates.map(|name| name.expect("a name").into_string().expect("UTF-8")).collect();
    assert_eq!(reachable.into_keys().collect::<BTreeSet<_>>(), crates);
}

#[test]
fn each_crate_says_what_its_files_are() {
    let mut unnamed = Vec::new();
    for (path, text) in sources().iter().filter(|(path, _)| path.matches('/').count() == 2) {
        let head: String = text.lines().take_while(|line| line.starts_with("//!")).collect();
        let module = |line: &str| {
            let name = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?;
            name.strip_suffix(';').filter(|name| *name != "tests").map(str::to_owned)
        };
        let names = text.lines().filter(|_| path.ends_with("/lib.rs")).filter_map(module);
        unnamed.extend(
            names.filter(|name| !head.contains(&format!("`{name}`"))).map(|name| format!("{path}: {name}")),
        );
    }
    assert!(unnamed.is_empty(), "the first lines do not name these files:\n{}", unnamed.join("\n"));
}

/// The walks of `docs/contributing.md` name a file and its functions in each row.
#[test]
fn the_walks_lead_through_files_and_functions_that_exist() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/contributing.md");
    let (page, sources) = (fs::read_to_string(page).expect("the page"), sources());
    let stays = stays(&page);
    assert!(stays.len() > 15, "only {stays:?}");
    let is_there = |(file, function): &&(&str, &str)| {
        let begins = ["(", "<"].map(|open| format!("fn {function}{open}"));
        sources.get(*file).is_some_and(|text| begins.iter().any(|begin| text.contains(begin)))
    };
    let missing: Vec<_> = stays.iter().filter(|stay| !is_there(stay)).collect();
    assert!(missing.is_empty(), "docs/contributing.md names functions that do not exist: {missing:?}");
}

/// Returns each function of the walks on a page, with its file.
fn stays(page: &str) -> Vec<(&str, &str)> {
    fn quoted(cell: &str) -> impl Iterator<Item = &str> {
        cell.split('`').skip(1).step_by(2)
    }
    let rows = page.lines().map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    let rows = rows.filter(|cells| cells.len() == 6 && cells[2].starts_with("`src/"));
    rows.flat_map(|cells| quoted(cells[3]).map(move |function| (cells[2].trim_matches('`'), function)))
        .collect()
}

/// Returns the crates of ours that a crate depends on, but for its tests.
fn dependencies(folder: &Path) -> BTreeSet<String> {
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("a manifest");
    let section = manifest.split("\n[").find_map(|section| section.strip_prefix("dependencies]"));
    let names = section.unwrap_or_default().lines().filter_map(|line| line.strip_prefix("isthmus-"));
    names.map(|rest| rest.split(['.', ' ']).next().unwrap_or_default().to_owned()).collect()
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
        ("src/model/lib.rs", "//! x\nmod name;\n#[cfg(test)]\nmod tests;\n"),
        ("src/model/tests.rs", "//! x\nuse isthmus_dataplane::peek;\nuse std::fs;\n"),
        ("src/main.rs", "//! x\nfn main() { isthmus_cli::main() }\n"),
    ]));
    assert_eq!(lines(&report.violations), "");
}

#[test]
fn forbidden_words_are_reported_at_their_line_in_pure_crates_only() {
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
        for owner in PURE {
            let path = format!("src/{owner}/x.rs");
            let violations = lines(&judge(&made_up(&[(&path, &text)])).violations);
            let expected = format!("{path}:4: {found} has no place in `{owner}`");
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
        (UNSAFE_FILE, "//! x\nfn f() { unsafe { g() } }\n"),
        ("src/net/sharp.rs", "//! x\n#[cfg(test)]\nmod tests {\n    fn f() { unsafe { g() } }\n}\n"),
        ("src/net/moved.rs", "//! x\n#[path = \"elsewhere.rs\"]\nmod elsewhere;\n"),
    ]));
    assert_eq!(
        lines(&report.violations),
        "src/net/bare.rs:1: the file does not open with `//!`\n\
         src/net/dial.rs:2: a module named `common` says nothing of what it owns\n\
         src/net/helpers/mod.rs:1: a module named `helpers` says nothing of what it owns\n\
         src/net/moved.rs:2: `#[path]` hides where a module is\n\
         src/net/sharp.rs:4: `unsafe` appears\n\
         src/net/utils.rs:1: a module named `utils` says nothing of what it owns\n"
    );
}

#[test]
fn a_cycle_between_files_of_one_crate_is_found() {
    let one = ("src/net/one.rs", "//! x\nuse super::two::parts::Part;\n");
    let two = ("src/net/two/mod.rs", "//! x\nmod parts;\nfn f() { parts::g() }\n");
    let back = ("src/net/two/parts.rs", "//! x\nuse super::Whole;\nfn g() { vec![crate::one::h()]; }\n");
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
    /// Pairs of an importing and an imported file of the same crate. The use of an enclosing file by a nested one does not
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
    let test_only = test_modules(&files);
    for file in &files {
        judge_house_rules(file, &mut report);
        if file.is_below(&test_only) {
            continue;
        }
        for line in &file.path_attributes {
            report.add(file, *line, "`#[path]` hides where a module is".to_owned());
        }
        if file.module.is_empty() {
            continue;
        }
        for path in &file.paths {
            judge_path(file, path, &mut report);
            report.file_edges.extend(file_edge(file, path, &modules));
        }
    }
    report
}

/// Returns the paths of all modules that are compiled for tests only.
fn test_modules(files: &[File]) -> BTreeSet<&[String]> {
    files.iter().flat_map(|file| &file.test_modules).map(Vec::as_slice).collect()
}

/// Returns the edge to another file of the same crate, if the path leads to a file that does not enclose `file`.
fn file_edge(file: &File, path: &PathUse, modules: &BTreeSet<&[String]>) -> Option<(String, String)> {
    let inside = path.inside_crate(file)?;
    let target = (1..=inside.len()).rev().map(|n| &inside[..n]).find(|target| modules.contains(target))?;
    let is_elsewhere = !file.module.starts_with(target);
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
        if file.path != UNSAFE_FILE {
            report.add(file, *line, "`unsafe` appears".to_owned());
        }
    }
}

fn judge_path(file: &File, path: &PathUse, report: &mut Report) {
    let owner = file.owner();
    match path.inside_crate(file) {
        Some(inside) if inside.get(1).is_none_or(|name| matches!(name.as_str(), "*" | "self")) => {
            report.add(
                file,
                path.line,
                "the crate's root is imported whole, which hides what is used".to_owned(),
            );
        }
        None if PURE.contains(&owner) => {
            if let Some(word) = path.forbidden() {
                report.add(file, path.line, format!("{word} has no place in `{owner}`"));
            }
        }
        _ => {}
    }
}

impl Report {
    fn add(&mut self, file: &File, line: usize, text: String) {
        self.violations.insert(Violation { file: file.path.clone(), line, text });
    }
}

/// Returns the files on a cycle, if there is one.
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
    /// The crate and the module of the file: `src/a/b.rs` is `[a, b]`, `src/a/lib.rs` is `[a]`, `src/lib.rs` is `[]`.
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
    /// Returns the crate and the path below its root, or `None` if it leads elsewhere.
    fn inside_crate(&self, file: &File) -> Option<Vec<String>> {
        let mut at: Vec<String> = file.module.iter().chain(&self.inline).cloned().collect();
        let first = self.segments[0].as_str();
        let rest = match first {
            "crate" => &self.segments[1..],
            "self" | "super" => &self.segments[..],
            child if self.inline.is_empty() && file.children.contains(child) => &self.segments[..],
            _ => return None,
        };
        if rest.len() < self.segments.len() {
            at.truncate(1);
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
    /// Returns the name of the file's crate; `""` for the crate of the program.
    fn owner(&self) -> &str {
        self.module.first().map_or("", String::as_str)
    }

    /// Returns true if the file is one of these modules, or inside one.
    fn is_below(&self, modules: &BTreeSet<&[String]>) -> bool {
        (1..=self.module.len()).any(|n| modules.contains(&self.module[..n]))
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

/// Returns true if one of the attributes is `#[cfg(test)]`, alone or as one of the alternatives.
fn is_test(attributes: &[Attribute]) -> bool {
    let names_test = |list: &MetaList| has_word(list.tokens.clone(), "test");
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg") && attribute.meta.require_list().is_ok_and(names_test)
    })
}

fn has_word(tokens: TokenStream, word: &str) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == word,
        TokenTree::Group(group) => has_word(group.stream(), word),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
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
    let inner = inner.strip_suffix("/mod").or_else(|| inner.strip_suffix("/lib")).unwrap_or(inner);
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
