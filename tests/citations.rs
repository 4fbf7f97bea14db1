//! The documents that comments cite. A rule that users rely on stands on a page, and the code cites the page and its heading:
//! `docs/split-horizon.md, "The rules"`. Each cited page and heading exists, and a section sign follows the name of a document
//! that everyone can read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The words before the section signs of published documents; a number may stand between (`RFC 9113 §8.5`).
const PUBLISHED: &[&str] = &[
    "RFC",
    "Context",
    "Baggage",
    "SPIFFE",
    "SPIFFE-ID",
    "X.509-SVID",
    "YAML",
    "OTLP",
    "ECMA-48",
    "manual",
    "doc/proxy-protocol.txt",
];

#[test]
fn each_citation_leads_to_a_page_and_a_heading() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = BTreeMap::new();
    for folder in ["src", "tests"] {
        read_into(&mut files, root, &root.join(folder));
    }
    let (mut count, mut wrong) = (0, Vec::new());
    for (file, text) in &files {
        let head = head(text);
        for (line, comment) in comments(text) {
            count += citations(&comment).filter(|(_, heading)| heading.is_some()).count();
            let faults = faults(&comment, &head, |page| headings(root, Path::new(file), page));
            wrong.extend(faults.into_iter().map(|fault| format!("{file}:{line}: {fault}")));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(count > 30, "only {count} citations were found");
}

#[test]
fn a_missing_page_a_missing_heading_and_an_unpublished_document_are_reported() {
    let text = "//! The rules (`docs/x.md,\n//! \"The rules\"`), and RFC 9113 §8.5.\n\nfn f() {\n    // The rest: docs/x.md.\n}\n";
    let found = comments(text);
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 5]);
    let heads = |page: &str| (page == "docs/x.md").then(|| BTreeSet::from(["The rules".to_owned()]));
    for (_, comment) in found {
        assert_eq!(faults(&comment, "", heads).join("\n"), "", "{comment}");
    }
    let frames = head("//! The frames of\n//! HTTP/2 (RFC 9113).\n\n/// A frame (§6.1).\n");
    assert_eq!(frames, "The frames of HTTP/2 (RFC 9113).");
    assert_eq!(faults("A frame (§6.1).", &frames, heads).join("\n"), "");
    for (comment, fault) in [
        ("A frame (§6.1).", "§6.1 is of no published document"),
        ("see docs/y.md", "there is no docs/y.md"),
        ("`docs/x.md, \"Rules\"`", "docs/x.md has no heading \"Rules\""),
        ("(SPEC §9)", "§9 is of no published document"),
        ("§7).", "§7 is of no published document"),
    ] {
        assert_eq!(faults(comment, "The frames of a protocol.", heads), [fault]);
    }
}

#[test]
fn a_line_of_code_on_a_page_is_no_heading() {
    let page = "# Page\n\n```sh\n# a comment\n```\n\n## Part\n";
    assert_eq!(headings_of(page), BTreeSet::from(["Page".to_owned(), "Part".to_owned()]));
}

/// Returns what is wrong with the citations in a comment. `head` are the first lines of the file; `headings` has those of a page, if there
/// is one.
fn faults(comment: &str, head: &str, headings: impl Fn(&str) -> Option<BTreeSet<String>>) -> Vec<String> {
    let mut faults = Vec::new();
    for (page, heading) in citations(comment) {
        match (headings(page), heading) {
            (None, _) => faults.push(format!("there is no {page}")),
            (Some(headings), Some(heading)) if !headings.contains(heading) => {
                faults.push(format!("{page} has no heading \"{heading}\""));
            }
            (Some(_), _) => {}
        }
    }
    let sections = comment.match_indices('§').filter(|(at, _)| !is_published(&comment[..*at], head));
    faults.extend(sections.map(|(at, _)| {
        let number: String = comment[at..].chars().take_while(|sign| !") ,:".contains(*sign)).collect();
        format!("{} is of no published document", number.trim_end_matches('.'))
    }));
    faults
}

/// Returns true if the words before a section sign end with the name of a published document. A sign behind a parenthesis is of the one
/// that the file's first lines name.
fn is_published(before: &str, head: &str) -> bool {
    let is_number = |word: &&str| word.starts_with(|sign: char| sign.is_ascii_digit());
    let is_name = |word: &str| PUBLISHED.contains(&word.trim_matches(['(', '`', ',', '.', ')']));
    if before.ends_with('(') {
        return head.split(' ').any(is_name);
    }
    before.split(' ').rev().find(|word| !word.is_empty() && !is_number(word)).is_some_and(is_name)
}

/// Returns the first lines of a file, which describe it, as one line.
fn head(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("//!"));
    lines.map(str::trim).collect::<Vec<_>>().join(" ")
}

/// Returns the pages that a comment names, each with the heading behind it.
fn citations(comment: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
    comment.match_indices(".md").filter_map(|(at, end)| {
        let is_path = |sign: char| sign.is_ascii_alphanumeric() || "/._-".contains(sign);
        let before = &comment[..at];
        let page = &comment[before.rfind(|sign| !is_path(sign)).map_or(0, |sign| sign + 1)..at + end.len()];
        let heading = comment[at + end.len()..].strip_prefix(", \"").and_then(|rest| rest.split_once('"'));
        (page != ".md").then_some((page, heading.map(|(heading, _)| heading)))
    })
}

/// Returns the comments of a file, each as one line, with the number of its first line.
fn comments(text: &str) -> Vec<(usize, String)> {
    let mut comments: Vec<(usize, String)> = Vec::new();
    let mut last = 0;
    for (number, line) in text.lines().enumerate().map(|(index, line)| (index + 1, line.trim_start())) {
        let Some(words) = line.strip_prefix("//") else { continue };
        let words = words.trim_start_matches(['/', '!']).trim();
        match comments.last_mut() {
            Some((_, comment)) if last + 1 == number => {
                comment.push(' ');
                comment.push_str(words);
            }
            _ => comments.push((number, words.to_owned())),
        }
        last = number;
    }
    comments
}

/// Returns the headings of a page, whose path begins at the root of the repository or at the folder of the file that names it.
fn headings(root: &Path, file: &Path, page: &str) -> Option<BTreeSet<String>> {
    let beside = root.join(file).with_file_name(page);
    let text = fs::read_to_string(root.join(page)).or_else(|_| fs::read_to_string(beside)).ok()?;
    Some(headings_of(&text))
}

fn headings_of(page: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let lines = page.lines().filter(|line| {
        is_code ^= line.trim_start().starts_with("```");
        !is_code && line.starts_with('#')
    });
    lines.map(|line| line.trim_start_matches('#').trim().to_owned()).collect()
}

/// Reads all Rust files of a folder, by their paths below the root.
fn read_into(files: &mut BTreeMap<String, String>, root: &Path, folder: &Path) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_into(files, root, &path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let name = path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
            files.insert(name, fs::read_to_string(&path).expect("a file"));
        }
    }
}
