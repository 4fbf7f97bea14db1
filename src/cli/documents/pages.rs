//! Checks the pages that people write: each config on them is valid, `isthmus` accepts each command line, each link leads to a
//! file and a heading that exist, and the pages stay short. `tests/e2e/documents.rs` and `tests/chart` run the commands.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use super::super::Cli;
use super::markdown::{Block, split};
use isthmus_config as config;

/// A complete config has at least one of these keys.
const OPENERS: [&str; 3] = ["listen:", "listeners:", "xds:"];
/// Pages that also show Kubernetes manifests and chart values: there, a block is a config if it has one of [`CONFIG_KEYS`].
const MIXED: [&str; 3] = ["kubernetes.md", "replace-istio-gateway.md", "ambient.md"];
const CONFIG_KEYS: [&str; 5] = ["listen:", "listeners:", "routes:", "registries:", "exports:"];

/// Returns the folder of the repository.
pub(super) fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).expect("the folder of src").to_owned()
}

fn markdown_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// Returns all pages, each with its text.
fn pages() -> Vec<(PathBuf, String)> {
    let mut paths = markdown_in(&root());
    for folder in ["docs", "config"] {
        paths.extend(markdown_in(&root().join(folder)));
    }
    for example in fs::read_dir(root().join("examples")).expect("examples").flatten() {
        paths.extend(markdown_in(&example.path()));
    }
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).expect("a page"))).collect()
}

fn has_key(block: &Block, keys: &[&str]) -> bool {
    block.text.lines().any(|line| keys.iter().any(|key| line.starts_with(key)))
}

fn is_config(page: &Path, block: &Block) -> bool {
    let mixed = MIXED.iter().any(|name| page.ends_with(name));
    let plain = block.language() == "yaml" && block.marks().all(|mark| mark.starts_with("file="));
    plain && !has_key(block, &["apiVersion:"]) && (!mixed || has_key(block, &CONFIG_KEYS))
}

/// Returns the mistakes in a block that is a whole config or the beginning of one.
fn mistakes(block: &Block, folder: &Path) -> Vec<String> {
    let listen = if has_key(block, &OPENERS) { "" } else { "listen: \"127.0.0.1:15443\"\n" };
    let path = folder.join("page.yaml");
    fs::write(&path, format!("{listen}{}", block.text)).expect("written");
    let read = config::load_named(&path, &|_| None);
    read.err().into_iter().flatten().map(|problem| problem.to_string()).collect()
}

#[test]
fn every_config_on_a_page_is_valid() {
    let (mut configs, mut wrong) = (0, Vec::new());
    for (page, text) in pages() {
        let folder = tempfile::tempdir().expect("a folder");
        let blocks: Vec<Block> = split(&text).0.into_iter().filter(|block| is_config(&page, block)).collect();
        for block in &blocks {
            let at = format!("{}:{}", page.display(), block.line);
            wrong
                .extend(mistakes(block, folder.path()).into_iter().map(|mistake| format!("{at}: {mistake}")));
        }
        configs += blocks.len();
    }
    assert!(
        wrong.is_empty(),
        "(a block that is no config says what it is: ```yaml helm)\n{}",
        wrong.join("\n")
    );
    assert!(configs > 20, "only {configs} configs were found");
}

/// Returns the words of each `isthmus` command in a shell script.
fn commands(script: &str) -> Vec<Vec<String>> {
    let script = script.replace("\\\n", " ");
    let mut all = Vec::new();
    for line in script.lines() {
        let (mut command, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for sign in line.chars().chain(['\n']) {
            match (quote, sign) {
                (Some(open), _) if open == sign => quote = None,
                (Some(_), _) => word.get_or_insert_default().push(sign),
                (None, '"' | '\'') => {
                    quote = Some(sign);
                    word.get_or_insert_default();
                }
                (None, ' ' | '\n') => command.extend(word.take()),
                (None, '|' | '&' | ';' | '<' | '>' | '#' | '(' | ')') => {
                    command.extend(word.take());
                    all.push(std::mem::take(&mut command));
                }
                (None, _) => word.get_or_insert_default().push(sign),
            }
        }
        all.push(command);
    }
    let begins = |command: &Vec<String>| {
        command.iter().position(|word| !["sudo", "$", "do", "then", "until", "while", "!"].contains(&&**word))
    };
    let own = all.into_iter().filter_map(|command| {
        let first = begins(&command)?;
        (command[first] == "isthmus").then(|| command[first..].to_vec())
    });
    own.collect()
}

/// Returns the reason why `isthmus` refuses a command; `None` if it accepts it. A command in running text may leave out
/// arguments.
fn refusal(command: &[String], may_be_short: bool) -> Option<String> {
    let filled = command.iter().map(|word| match word.as_str() {
        "ID" => "spiffe://cluster.local/ns/shop/sa/web",
        "IP" | "ADDRESS" => "10.0.0.1",
        "TRACE" => "4bf92f3577b34da6a3ce929d0e0e4736",
        "WHAT" => "services",
        word => word,
    });
    let error = Cli::try_parse_from(filled).err()?;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            if may_be_short =>
        {
            None
        }
        _ => Some(error.to_string()),
    }
}

/// Returns the commands that the text mentions as `isthmus …` between backticks.
fn mentioned(prose: &str) -> Vec<Vec<String>> {
    let spans = prose.split('`').skip(1).step_by(2);
    let own = spans.filter(|span| span.starts_with("isthmus ") && !span.contains(['\\', '…']));
    // A word in capitals means any of several commands, so it is skipped.
    let own =
        own.filter(|span| span.split(' ').nth(1).is_some_and(|word| word.starts_with(char::is_lowercase)));
    own.flat_map(commands).collect()
}

#[test]
fn only_what_builds_or_changes_the_host_is_left_to_be_run_by_hand() {
    let (mut by_hand, mut wrong) = (0, Vec::new());
    for (page, text) in pages() {
        let is_played = page.starts_with(root().join("docs")) || page.ends_with("README.md");
        for block in split(&text).0.iter().filter(|block| block.language() == "sh") {
            by_hand += usize::from(!block.is_run());
            if block.is_run() && !is_played || !block.is_run() && !commands(&block.text).is_empty() {
                wrong.push(format!("{}:{}", page.display(), block.line));
            }
        }
    }
    assert!(wrong.is_empty(), "no test runs these commands:\n{}", wrong.join("\n"));
    assert!(by_hand < 16, "{by_hand} blocks are run by hand");
}

#[test]
fn every_command_line_on_a_page_is_one_that_isthmus_takes() {
    let (mut count, mut wrong) = (0, Vec::new());
    for (page, text) in pages() {
        if page.ends_with("CHANGELOG.md") {
            continue;
        }
        let (blocks, prose) = split(&text);
        for block in blocks.iter().filter(|block| ["sh", "console", ""].contains(&block.language())) {
            for command in commands(&block.text) {
                count += 1;
                let at = format!("{}:{}", page.display(), block.line);
                wrong.extend(
                    refusal(&command, false).map(|why| format!("{at}: {}: {why}", command.join(" "))),
                );
            }
        }
        for command in mentioned(&prose) {
            count += 1;
            let why = refusal(&command, true);
            wrong.extend(why.map(|why| format!("{}: {}: {why}", page.display(), command.join(" "))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} commands were found");
}

/// Returns the anchors of a page's headings, as GitHub makes them.
fn anchors(prose: &str) -> BTreeSet<String> {
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let slug = |line: &str| {
        let text = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        text.chars().filter(|sign| sign.is_alphanumeric() || ['-', '_'].contains(sign)).collect()
    };
    headings.map(slug).collect()
}

/// Returns the targets of a page's links.
fn links(prose: &str) -> impl Iterator<Item = &str> {
    prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

#[test]
fn every_link_on_a_page_leads_somewhere() {
    let mut dead = Vec::new();
    for (page, text) in pages() {
        for target in links(&split(&text).1).filter(|target| !target.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let to = if path.is_empty() { page.clone() } else { page.with_file_name("").join(path) };
            let leads = anchor.is_empty()
                || fs::read_to_string(&to).is_ok_and(|text| anchors(&split(&text).1).contains(anchor));
            if !to.exists() || !leads {
                dead.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

/// The largest number of words that people write on the README and the pages of `docs`.
const WORDS_MAX: usize = 26_950;
/// The largest number of characters in a line that is no row of a table.
const LINE_MAX: usize = 140;
/// The smallest number of pictures on the pages.
const PICTURES_MIN: usize = 8;

/// Returns what people write of a page: the text without the tables that a program writes into it.
fn written(text: &str) -> String {
    let Some((before, rest)) = text.split_once("<!-- begin: written by") else { return text.to_owned() };
    let (_, after) = rest.split_once("<!-- end -->").expect("the end of the tables");
    [before, after].concat()
}

#[test]
fn the_pages_stay_short_and_have_pictures() {
    let (readme, docs) = (root().join("README.md"), root().join("docs"));
    let generated = super::generated().map(|(name, _)| docs.join(name));
    let (mut words, mut long, mut pictures) = (0, Vec::new(), BTreeSet::new());
    for (page, text) in pages().into_iter().filter(|(page, _)| *page == readme || page.starts_with(&docs)) {
        if !generated.contains(&page) {
            words += written(&text).split_whitespace().count();
        }
        let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('|'));
        let lines = lines.filter(|(_, line)| line.chars().count() > LINE_MAX);
        long.extend(lines.map(|(index, _)| format!("{}:{}", page.display(), index + 1)));
        let shown = links(&text).filter(|target| target.ends_with(".svg"));
        pictures.extend(shown.map(|target| page.with_file_name("").join(target)));
    }
    assert!(words <= WORDS_MAX, "README.md and docs have {words} words, at most {WORDS_MAX} are allowed");
    assert!(long.is_empty(), "longer than {LINE_MAX} characters:\n{}", long.join("\n"));
    assert!(pictures.len() >= PICTURES_MIN, "only {pictures:?}");
}

/// Collects all commands below a command, each with the words that call it and its help text.
fn commands_below(command: &clap::Command, called: &str, found: &mut Vec<(String, String)>) {
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        let called = format!("{called} {}", below.get_name());
        let help = below.get_after_help().map(ToString::to_string).unwrap_or_default();
        found.push((called.clone(), help));
        commands_below(below, &called, found);
    }
}

#[test]
fn every_help_has_examples_that_isthmus_takes() {
    let mut all = Vec::new();
    commands_below(&Cli::command(), "isthmus", &mut all);
    assert!(all.len() > 30, "{all:?}");
    let mut count = 0;
    for (called, help) in &all {
        assert!(help.starts_with("Examples:\n"), "{called} has no examples: {help:?}");
        let examples = help.lines().skip(1).take_while(|line| line.starts_with("  "));
        let mut is_own = false;
        for example in examples {
            // At least two spaces separate the command from its explanation.
            let line = example.trim_start().split("  ").next().expect("a first part");
            let own = commands(line);
            assert!(!own.is_empty(), "{called}: no command of isthmus in {line:?}");
            for command in own {
                count += 1;
                is_own |= command.join(" ").starts_with(called);
                assert_eq!(refusal(&command, false), None, "{called}: {line}");
            }
        }
        assert!(is_own, "{called} is in none of its examples");
    }
    assert!(count > 70, "only {count} examples were found");
}
