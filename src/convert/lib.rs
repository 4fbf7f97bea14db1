//! `isthmus convert`: converts the config of another program. The result is a draft: lines that could not be converted are
//! listed with their numbers and never dropped silently.
//!
//! - `haproxy`: the sections of HAProxy's configuration. `servers`: its servers. `values`, `words`: its syntax.
//! - `nginx`: the `stream` block of nginx. `sniproxy`: the tables of sniproxy. `blocks`: their syntax.
//! - `rules`: what each of them does with a connection. `names`, `sources`: sets of clients. `expressions`: regular expressions that mean
//!   names. `site`: listeners and routes of the rules.
//! - `files`: the files that a config names. `draft`: the config that results. `others`: programs whose configs have no conversion.

mod blocks;
mod draft;
mod expressions;
mod files;
mod haproxy;
mod names;
mod nginx;
mod others;
mod rules;
mod servers;
mod site;
mod sniproxy;
mod sources;
mod values;
mod words;

use std::io::Write;
use std::path::PathBuf;

use blocks::{End, parse};
use draft::{Draft, Fate};
use files::Files;
use isthmus_api::text::clean;
use isthmus_console::failure::Failure;

/// Reads a file that the config names; `None` if it cannot be read.
type Read<'r> = &'r dyn Fn(&str) -> Option<String>;

/// The examples in the help of the command.
pub const EXAMPLES: &str = "Examples:
  isthmus convert /etc/haproxy/haproxy.cfg > isthmus.yaml     the config; what is not converted goes to standard error
  isthmus convert /etc/nginx/nginx.conf                       the stream block of nginx, or a configuration of sniproxy
  isthmus convert haproxy.cfg --out isthmus.yaml --partial    exit code 0 also if something was left out
  isthmus convert haproxy.cfg --all                           also list lines that need no counterpart";

#[expect(missing_docs, reason = "a comment would become a help text")]
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The configuration of HAProxy, nginx or sniproxy, which the command tells apart; `-` for the standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write the config to this file, which must not exist [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Succeed although lines were not converted, or clients that they could have refused were left out
    #[arg(long)]
    partial: bool,
    /// Also list lines that need no counterpart
    #[arg(long)]
    all: bool,
}

/// Runs `isthmus convert`.
pub fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let file = arguments.file.display().to_string();
    let text = files::config(&arguments.file)
        .map_err(|error| Failure::Wrong(format!("cannot read {file}: {error}")))?;
    if let Some(other) = others::of(&text).filter(|_| !is_readable(&text)) {
        return Err(Failure::Wrong(format!("{file}: this looks like {other}")));
    }
    let files = Files::new(&arguments.file, program_of(&text));
    let mut draft = converted(&text, &|named| files.read(named));
    tell_files(&text, files, &mut draft);
    draft.settle();
    let name =
        arguments.file.file_name().map_or_else(|| file.clone(), |name| name.to_string_lossy().into_owned());
    let yaml = draft.yaml(&name);
    let mut told = std::io::stderr().lock();
    let listed = draft.remarks.iter().filter(|remark| arguments.all || remark.fate != Fate::NotNeeded);
    for remark in listed {
        // If stderr is closed, the list is still in the comments of the config.
        let _ = writeln!(told, "{file}:{}: {}: {}", remark.line, remark.fate.text(), clean(&remark.text));
    }
    if draft.listeners.is_empty() {
        return Err(Failure::Wrong(format!(
            "{file}: no section of mode tcp, no server of a `stream` block and no listener of sniproxy can be converted"
        )));
    }
    if !draft.reaches_something() {
        return Err(Failure::Wrong(format!(
            "{file}: no client can reach anything by this config, {}",
            why_nothing(&draft)
        )));
    }
    match &arguments.out {
        None => write!(out, "{yaml}")?,
        Some(path) => {
            let created =
                std::fs::File::create_new(path).and_then(|mut file| file.write_all(yaml.as_bytes()));
            created.map_err(|error| Failure::Wrong(format!("cannot write {}: {error}", path.display())))?;
        }
    }
    let is_whole = draft.remarks.iter().all(|remark| remark.fate != Fate::NotConverted);
    if is_whole || arguments.partial {
        return Ok(());
    }
    let _ = writeln!(
        told,
        "{file}: the config has less than the original; it admits nothing that the original refuses. Read the lines above, and add \
         `--partial` to accept this"
    );
    Err(Failure::Reported)
}

/// Returns why a draft leads nowhere.
fn why_nothing(draft: &Draft) -> String {
    let lost = draft.remarks.iter().filter(|remark| remark.fate == Fate::NotConverted);
    match lost.map(|remark| remark.line).next() {
        Some(line) => {
            format!("because all that leads somewhere was left out; begin with line {line} in the list above")
        }
        None => "because no rule of the original leads to a server".to_owned(),
    }
}

/// Returns the config that a text is converted to, without the files that it names; `None` if it has no listener.
pub fn config_of(text: &str) -> Option<String> {
    let mut draft = converted(text, &|_| None);
    draft.settle();
    (!draft.listeners.is_empty()).then(|| draft.yaml("text"))
}

/// The program whose configuration a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    HaProxy,
    Nginx,
    SniProxy,
}

/// Returns the program whose configuration a text is, by its directives.
fn program_of(text: &str) -> Program {
    let of_nginx = ["stream", "http", "events", "upstream", "server", "map"];
    let has_block = |end, names: &[&str]| {
        let (all, _) = parse(text, end);
        all.iter().any(|one| one.block.is_some() && names.contains(&one.name()))
    };
    let is_terminated = text.lines().any(|line| line.split('#').next().unwrap_or_default().contains(';'));
    if is_terminated && has_block(End::Semicolon, &of_nginx) {
        Program::Nginx
    } else if has_block(End::Line, &["listen", "listener", "table"]) {
        Program::SniProxy
    } else {
        Program::HaProxy
    }
}

/// Returns true if a text has sections or blocks of a program that is converted.
fn is_readable(text: &str) -> bool {
    program_of(text) != Program::HaProxy || !words::sections(text).0.is_empty()
}

/// Converts a text, except that the draft is not settled. `read` returns the content of a file that the text names.
fn converted(text: &str, read: Read<'_>) -> Draft {
    match program_of(text) {
        Program::HaProxy => haproxy::convert_with(text, read),
        Program::Nginx => nginx::convert_with(text, read),
        Program::SniProxy => sniproxy::convert(text),
    }
}

/// Adds a remark on each file that was read at another place than the config names, and on files that are too large.
fn tell_files(text: &str, files: Files<'_>, draft: &mut Draft) {
    let line_of = |named: &str| text.lines().position(|line| line.contains(named)).map_or(1, |at| at + 1);
    if files.are_too_large() {
        let text = "the files that the config names are too large: further ones are not read";
        draft.remark(1, Fate::NotConverted, text);
    }
    for (named, path) in files.replaced() {
        let text = format!("{named} cannot be read; the config has what {} has", path.display());
        draft.remark(line_of(&named), Fate::Differs, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_told_by_the_directives() {
        for (text, wanted) in [
            ("global\n maxconn 5\nfrontend a\n bind :1\n", Program::HaProxy),
            ("user nginx;\nstream {\n server { listen 1; proxy_pass a:1; }\n}\n", Program::Nginx),
            ("upstream a {\n server a:1;\n}\n", Program::Nginx),
            ("server { listen 1; proxy_pass a:1; }\n", Program::Nginx),
            ("listener :443 {\n proto tls\n}\ntable {\n a b\n}\n", Program::SniProxy),
            ("", Program::HaProxy),
        ] {
            assert_eq!(program_of(text), wanted, "{text}");
        }
    }
}
