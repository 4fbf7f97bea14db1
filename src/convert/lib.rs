//! `isthmus convert`: converts the config of another program. The result is a draft: lines that could not be converted are
//! listed with their numbers and never dropped silently.
//!
//! - `haproxy`: the sections of HAProxy's configuration. `rules`: its conditions. `servers`: its servers. `values`, `words`: its syntax.
//! - `draft`: the config that results.

mod draft;
mod haproxy;
mod rules;
mod servers;
mod values;
mod words;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use draft::Fate;
use isthmus_api::text::clean;
use isthmus_console::failure::Failure;

/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The examples in the help of the command.
pub const EXAMPLES: &str = "Examples:
  isthmus convert /etc/haproxy/haproxy.cfg > isthmus.yaml     the config; what is not converted goes to standard error
  isthmus convert haproxy.cfg --out isthmus.yaml --strict     exit code 1 if a line could not be converted
  isthmus convert haproxy.cfg --all                           also list lines that need no counterpart";

#[expect(missing_docs, reason = "a comment would become a help text")]
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The configuration of HAProxy; `-` for the standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write the config to this file, which must not exist [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Fail if a line could not be converted
    #[arg(long)]
    strict: bool,
    /// Also list lines that need no counterpart
    #[arg(long)]
    all: bool,
}

/// Runs `isthmus convert`.
pub fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let file = arguments.file.display().to_string();
    let text =
        read(&arguments.file).map_err(|error| Failure::Wrong(format!("cannot read {file}: {error}")))?;
    let draft = haproxy::convert(&text);
    let name =
        arguments.file.file_name().map_or_else(|| file.clone(), |name| name.to_string_lossy().into_owned());
    let yaml = draft.yaml(&name);
    match &arguments.out {
        None => write!(out, "{yaml}")?,
        Some(path) => {
            let created =
                std::fs::File::create_new(path).and_then(|mut file| file.write_all(yaml.as_bytes()));
            created.map_err(|error| Failure::Wrong(format!("cannot write {}: {error}", path.display())))?;
        }
    }
    let mut told = std::io::stderr().lock();
    let listed = draft.remarks.iter().filter(|remark| arguments.all || remark.fate != Fate::NotNeeded);
    for remark in listed {
        // If stderr is closed, the list is still in the comments of the config.
        let _ = writeln!(told, "{file}:{}: {}: {}", remark.line, remark.fate.text(), clean(&remark.text));
    }
    if draft.listeners.is_empty() {
        return Err(Failure::Wrong(format!(
            "{file}: no section of mode tcp has an address that can be converted"
        )));
    }
    let is_whole = draft.remarks.iter().all(|remark| remark.fate != Fate::NotConverted);
    if arguments.strict && !is_whole { Err(Failure::Reported) } else { Ok(()) }
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    let length = match path == Path::new("-") {
        true => std::io::stdin().lock().take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?,
        false => std::fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?,
    };
    match u64::try_from(length).is_ok_and(|length| length <= FILE_BYTES_MAX) {
        // HAProxy accepts any bytes, such as Latin-1 in a comment. `words` reports lines where they matter.
        true => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        false => Err(std::io::Error::other(format!("it is larger than {} MiB", FILE_BYTES_MAX >> 20))),
    }
}
