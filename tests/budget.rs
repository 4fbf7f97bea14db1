//! The budget of size: the lines of code of each crate and of each feature, the public items of each crate, the largest file and the
//! largest function, all without tests. `tests/budget.txt` has the figures that nothing may exceed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Block, ImplItemFn, Item, ItemFn, Signature, Visibility};

use super::{File, Sources, has_word, is_test, made_up, sources, test_modules};

/// The files of each feature, by the beginning of their paths below `src/`. The longest beginning decides, so a line can name the
/// exceptions of another.
const FEATURES: &[(&str, &str)] = &[
    (
        "admin API",
        "api/ admin/lib admin/left_out admin/limits admin/limit_metrics admin/readiness admin/recent admin/registries \
        admin/connections admin/exposed admin/listeners admin/orders admin/response admin/routes admin/scraped admin/services \
        admin/status admin/server admin/networks admin/certificates console/ cli/read \
        cli/lib cli/arguments cli/config_file cli/documents cli/examples cli/orders cli/offline cli/registry lib main",
    ),
    ("aggregator", "aggregator/ app/registries world/"),
    (
        "checks, ejection, probes",
        "admin/endpoints admin/time_metrics aggregator/liveness \
        aggregator/round_trip dataplane/checks dataplane/endpoint_state dataplane/times dataplane/upstreams model/probe",
    ),
    ("config", "config/ document/ app/loading app/fixed"),
    ("convert", "convert/"),
    (
        "dashboard, top, problems",
        "admin/dashboard admin/overview admin/past admin/problems admin/selection cli/top cli/watch",
    ),
    ("data plane", "dataplane/ net/ files/ tasks/ wire/"),
    ("demo", "demo/"),
    ("DNS", "dns/ app/dns config/dns config/table/dns snapshot/virtual_addresses aggregator/owner/addresses"),
    (
        "drains",
        "admin/drains admin/maintenance aggregator/drain_orders aggregator/drains_left api/drain cli/drains config/drains \
        dataplane/retire dataplane/withdrawals document/drains model/drain snapshot/drain_scope snapshot/drains \
        aggregator/withdrawal kubernetes/notes",
    ),
    ("etcd", "aggregator/etcd aggregator/spec/etcd aggregator/leases"),
    (
        "explain, horizon, call, check",
        "admin/explain admin/horizon admin/probe admin/server/explanations api/explanation \
        api/horizon cli/call cli/check cli/horizon cli/validate decisions/dialled decisions/missing decisions/near decisions/omitted",
    ),
    (
        "federation",
        "admin/enrolment admin/imported admin/peer_metrics admin/peers api/peer app/peers aggregator/spec/peer \
        cli/enrol cli/peers cli/plan config/peers config/table/peers dataplane/carriers dataplane/onward decisions/admit/carried decisions/admit/egress \
        decisions/view/onward model/import \
        model/link model/set_hash peer/ settings/peer snapshot/exported tls/announced tls/pinned tls/root_file",
    ),
    (
        "Gateway API",
        "kubernetes/gateway_api kubernetes/kinds/class_gateway kubernetes/kinds/gateway_ kubernetes/kinds/listener_set \
        kubernetes/kinds/reference_grant settings/backend registry/gateway_api snapshot/gateway_ registry/shard/gateway_objects dataplane/listener snapshot/listener_routes",
    ),
    ("HBONE", "dataplane/hbone wire/connect wire/frames"),
    ("istiod", "istiod/ aggregator/spec/istiod tls/istiod"),
    (
        "Kubernetes",
        "kubernetes/ aggregator/spec/kubernetes aggregator/token_review app/registries/kubernetes cli/kubeconfig",
    ),
    (
        "MCS",
        "kubernetes/exports kubernetes/import kubernetes/index/imports kubernetes/kinds/derived_service kubernetes/kinds/imported_slice \
        kubernetes/kinds/service_export kubernetes/kinds/service_import kubernetes/own_objects snapshot/clusterset admin/marks",
    ),
    ("program", "app/"),
    ("snapshot and decisions", "settings/ registry/ snapshot/ decisions/ model/ balance/"),
    (
        "steering",
        "admin/share_log admin/steering config/steering config/table/steering settings/steering decisions/steering \
        decisions/view/capacity decisions/view/steered dataplane/shares model/demand snapshot/demand snapshot/remembered snapshot/service_view/seen \
        aggregator/owner/demands kubernetes/demand kubernetes/kinds/workload.",
    ),
    (
        "telemetry",
        "telemetry/ admin/traces api/trace app/otlp app/log cli/traces config/telemetry config/table/telemetry model/trace",
    ),
    ("TLS", "tls/ cli/certs config/identity config/table/identity"),
    (
        "upgrade",
        "app/upgrade app/beliefs dataplane/handover dataplane/parcel dataplane/relay/park net/handed net/inherited upgrade/",
    ),
    (
        "WDS",
        "wds/ app/wds app/registries/reviews kubernetes/authorization kubernetes/index/ambient \
        kubernetes/index/waypoints decisions/admit/waypoint kubernetes/kinds/authorization_policy kubernetes/kinds/peer_authentication kubernetes/kinds/waypoint kubernetes/reviews \
        model/ambient snapshot/ambient",
    ),
    ("xDS", "ads/ xds/ app/xds admin/clients api/client proto/"),
];

/// The path of the table, and the rounding of the figures that a test writes to it: small changes stay within.
const TABLE: &str = "tests/budget.txt";
const LINES_ROUND: usize = 50;
const PUBLIC_ROUND: usize = 5;

/// The measured sizes, by their lines in the table: `crate NAME lines`, `crate NAME public`, `feature NAME`, `largest file`,
/// `largest function`.
type Figures = BTreeMap<String, usize>;

/// The size of one file without its tests.
struct Size {
    lines: usize,
    public: usize,
    largest_function: usize,
}

#[test]
fn no_crate_feature_file_or_function_exceeds_its_budget() {
    let measured = figures(&sources());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
    if env::var_os("ISTHMUS_BLESS").is_some() {
        fs::write(&path, table(&measured)).expect("written");
    }
    let allowed = read(&fs::read_to_string(&path).expect("the table"));
    let mut wrong = String::new();
    for (name, figure) in &measured {
        let most = allowed.get(name).copied().unwrap_or_default();
        println!("{name:<48}{figure:>7} of {most:>7}");
        if *figure > most {
            let _ = writeln!(wrong, "{name}: {figure}, at most {most}");
        }
    }
    wrong.extend(
        allowed
            .keys()
            .filter(|name| !measured.contains_key(*name))
            .map(|name| format!("{name}: not there\n")),
    );
    assert!(
        wrong.is_empty(),
        "{wrong}make it smaller, or raise the line in {TABLE} and say why in the commit (ISTHMUS_BLESS=1 writes all lines)"
    );
}

#[test]
fn lines_without_code_and_tests_are_not_counted() {
    let text = "//! x\n\
                /// A function\n\
                /// of two lines.\n\
                pub fn f(\n\
                ) -> &'static str {\n\
                    // a comment\n\
                \n\
                    \"one\n\
                two\"\n\
                }\n\
                #[cfg(test)]\n\
                use std::fmt::{Debug,\n\
                Display};\n\
                #[derive(Debug)]\n\
                pub struct S;\n\
                impl S {\n\
                    #[cfg(any(test, feature = \"testing\"))]\n\
                    pub fn for_tests() {\n\
                    }\n\
                    pub fn method() {}\n\
                }\n\
                #[cfg(test)]\n\
                mod tests {\n\
                    fn g() {}\n\
                }\n";
    let size = size(&File::read("src/net/one.rs", text), text);
    assert_eq!((size.lines, size.public, size.largest_function), (5 + 2 + 3, 2, 5));
}

#[test]
fn a_file_that_belongs_to_no_feature_is_named() {
    assert_eq!(feature_of("src/dataplane/hbone/mod.rs"), Some("HBONE"));
    assert_eq!(feature_of("src/dataplane/entry.rs"), Some("data plane"));
    assert_eq!(feature_of("src/lib.rs"), Some("admin API"));
    assert_eq!(feature_of("src/carrier/lib.rs"), None);
}

#[test]
fn test_only_files_are_not_counted() {
    let figures = figures(&made_up(&[
        ("src/net/lib.rs", "//! x\n#[cfg(test)]\nmod tests;\nfn f() {}\n"),
        ("src/net/tests.rs", "//! x\nfn f() {}\n"),
    ]));
    assert_eq!(figures["crate net lines"], 1);
}

/// Returns all figures of a tree.
fn figures(sources: &Sources) -> Figures {
    let mut figures = Figures::new();
    let files: Vec<File> = sources.iter().map(|(path, text)| File::read(path, text)).collect();
    let tests = test_modules(&files);
    for file in files.iter().filter(|file| !file.is_below(&tests)) {
        let size = size(file, &sources[&file.path]);
        let krate = file.path.split('/').nth(1).filter(|name| !name.ends_with(".rs")).unwrap_or("isthmus");
        let feature =
            feature_of(&file.path).unwrap_or_else(|| panic!("{}: no feature has this file", file.path));
        *figures.entry(format!("crate {krate} lines")).or_default() += size.lines;
        *figures.entry(format!("crate {krate} public")).or_default() += size.public;
        *figures.entry(format!("feature {feature}")).or_default() += size.lines;
        *figures.entry("all lines".to_owned()).or_default() += size.lines;
        for (name, figure) in [("largest file", size.lines), ("largest function", size.largest_function)] {
            let largest = figures.entry(name.to_owned()).or_default();
            *largest = figure.max(*largest);
        }
    }
    figures
}

fn feature_of(path: &str) -> Option<&'static str> {
    let inner = path.strip_prefix("src/")?;
    let all =
        FEATURES.iter().flat_map(|(name, files)| files.split_whitespace().map(move |begin| (begin, *name)));
    all.filter(|(begin, _)| inner.starts_with(begin))
        .max_by_key(|(begin, _)| begin.len())
        .map(|(_, name)| name)
}

fn table(figures: &Figures) -> String {
    let mut text = "# The largest sizes that tests/budget.rs allows, without tests. A commit that raises one says why.\n".to_owned();
    for (name, figure) in figures {
        let round = match name.as_str() {
            "largest file" | "largest function" => 1,
            name if name.ends_with("public") => PUBLIC_ROUND,
            _ => LINES_ROUND,
        };
        let _ = writeln!(text, "{name:<48}{:>7}", figure.next_multiple_of(round));
    }
    text
}

fn read(table: &str) -> Figures {
    let rows = table.lines().filter(|line| !line.starts_with('#'));
    rows.map(|row| {
        let (name, figure) = row.rsplit_once(' ').expect("a name and a figure");
        (name.trim().to_owned(), figure.parse().expect("a figure"))
    })
    .collect()
}

/// Measures the code of a file.
fn size(file: &File, text: &str) -> Size {
    let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.path));
    let mut lines = BTreeSet::new();
    note_lines(tokens, &mut lines);
    let mut items = Items { lines: &lines, public: 0, largest_function: 0 };
    items.visit_file(&syn::parse_file(text).expect("parsed before"));
    Size { public: items.public, largest_function: items.largest_function, lines: lines.len() }
}

/// Notes the lines that have code: no comments, no items of tests.
fn note_lines(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let TokenTree::Punct(punct) = &token else {
            note_token(token, lines);
            continue;
        };
        if punct.as_char() != '#' {
            note_token(token, lines);
            continue;
        }
        let inner = tokens.next_if(|next| matches!(next, TokenTree::Punct(punct) if punct.as_char() == '!'));
        let Some(TokenTree::Group(attribute)) = tokens.next_if(
            |next| matches!(next, TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket),
        ) else {
            note_token(token, lines);
            continue;
        };
        let first = attribute.stream().into_iter().next().map(|first| first.to_string());
        match first.as_deref() {
            Some("doc") => {}
            Some("cfg") if inner.is_none() && has_word(attribute.stream(), "test") => skip_item(&mut tokens),
            _ => {
                note_token(token, lines);
                note_token(attribute.into(), lines);
            }
        }
    }
}

/// Skips the rest of an item: up to its body or its semicolon.
fn skip_item(tokens: &mut std::iter::Peekable<proc_macro2::token_stream::IntoIter>) {
    for token in tokens.by_ref() {
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
            TokenTree::Punct(punct) if punct.as_char() == ';' => return,
            _ => {}
        }
    }
    tokens.next_if(|next| matches!(next, TokenTree::Punct(punct) if punct.as_char() == ';'));
}

fn note_token(token: TokenTree, lines: &mut BTreeSet<usize>) {
    let mut note = |span: Span| lines.extend(span.start().line..=span.end().line);
    match token {
        TokenTree::Group(group) => {
            note(group.span_open());
            note(group.span_close());
            note_lines(group.stream(), lines);
        }
        other => note(other.span()),
    }
}

/// Counts the public items of a file, and finds its largest function.
struct Items<'a> {
    lines: &'a BTreeSet<usize>,
    public: usize,
    largest_function: usize,
}

impl Items<'_> {
    fn function(&mut self, signature: &Signature, body: &Block) {
        let (first, last) = (signature.fn_token.span.start().line, body.brace_token.span.close().end().line);
        let lines = self.lines.range(first..=last).count();
        self.largest_function = self.largest_function.max(lines);
    }
}

impl<'ast> Visit<'ast> for Items<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, visibility) = match item {
            Item::Const(item) => (&item.attrs, &item.vis),
            Item::Enum(item) => (&item.attrs, &item.vis),
            Item::Fn(item) => (&item.attrs, &item.vis),
            Item::Static(item) => (&item.attrs, &item.vis),
            Item::Struct(item) => (&item.attrs, &item.vis),
            Item::Trait(item) => (&item.attrs, &item.vis),
            Item::Type(item) => (&item.attrs, &item.vis),
            Item::Mod(item) => (&item.attrs, &Visibility::Inherited),
            Item::Impl(item) => (&item.attrs, &Visibility::Inherited),
            _ => return,
        };
        if is_test(attributes) {
            return;
        }
        self.public += usize::from(matches!(visibility, Visibility::Public(_)));
        visit::visit_item(self, item);
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        self.function(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_test(&function.attrs) {
            self.function(&function.sig, &function.block);
        }
    }
}
