//! Runs the commands of the documentation as a reader would: the `sh run` blocks of a page, in one shell, in a folder with the
//! page's `yaml file=NAME` blocks. The output must contain each line of a `text` block that follows.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::gateway::BINARY;
use crate::support::markdown::{Block, split};
use crate::support::skip;

/// A page, and the setup that its commands need.
struct Page {
    path: &'static str,
    /// Commands that run before those of the page.
    before: &'static str,
    /// Texts of the page and their replacements: the page calls a site on the internet.
    replaced: &'static [(&'static str, &'static str)],
}

const PAGES: [Page; 6] = [
    Page {
        path: "README.md",
        before: "isthmus certs --dir certs --workload web/example=example.com\n\
                 openssl s_server -accept 127.0.0.1:8443 -cert certs/web_example.pem \
                 -key certs/web_example-key.pem -www -quiet &\n",
        replaced: &[("example.com:443", "127.0.0.1:8443"), ("curl ", "curl --cacert certs/ca.pem ")],
    },
    Page { path: "docs/install.md", before: "", replaced: &[] },
    Page { path: "docs/standalone.md", before: "", replaced: &[] },
    Page { path: "docs/split-horizon.md", before: "", replaced: &[] },
    Page { path: "docs/registries.md", before: "", replaced: &[] },
    Page { path: "docs/operate-and-debug.md", before: "", replaced: &[] },
];

/// Shell functions that run the commands of a page. Somebody who follows the page waits until a program has started, so these
/// functions wait too: for gateways until they are ready, for other programs until they listen.
const SETTING: &str = r#"
set -euo pipefail
exec 2>&1
ip link set lo up
started() {
    local words; mapfile -d '' -t words < "/proc/$1/cmdline" || return 0
    if [[ ${words[0]:-} == *isthmus ]]; then
        local address; address=$(sed -n 's/^admin: *{bind: "\(.*\)"}.*/\1/p' "${words[3]}")
        command isthmus healthcheck --admin "http://${address:-127.0.0.1:15000}" > /dev/null 2>&1
    else
        ss -Hltnp | grep -q "pid=$1,"
    fi
}
settle() {
    local process attempt
    for process in $(jobs -p); do
        for attempt in $(seq 400); do started "$process" && break; sleep 0.05; done
        started "$process" || { echo "process $process does not listen"; exit 9; }
    done
}
isthmus() { if [[ $1 == run ]]; then exec isthmus "$@"; fi; settle; command isthmus "$@"; }
openssl() { exec openssl "$@"; }
curl() { settle; command curl "$@"; }
"#;

/// A line between the outputs of two blocks.
const MARK: &str = "=== end of block ";

fn script(page: &Page, blocks: &[Block]) -> String {
    let mut script = format!("{SETTING}\n{}", page.before);
    for (number, block) in blocks.iter().enumerate() {
        if block.language() == "sh" && block.marks().any(|mark| mark == "run") {
            let _ = writeln!(script, "{}", block.text);
        }
        let _ = writeln!(script, "echo '{MARK}{number}'");
    }
    script + "kill $(jobs -p) 2> /dev/null || true\n"
}

/// Runs a script in its own network and process namespace, so that no process survives it.
fn run(script: &str, folder: &Path) -> (bool, String) {
    fs::write(folder.join("script.sh"), script).expect("written");
    let programs = Path::new(BINARY).parent().expect("a folder").display().to_string();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("unshare")
        .args(["--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "script.sh"])
        .current_dir(folder)
        .env("PATH", path)
        .env("NO_COLOR", "1")
        .output()
        .expect("unshare starts");
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// Returns true if a line of the output contains all pieces of `wanted` in order; `…` separates the pieces.
fn printed(output: &str, wanted: &str) -> bool {
    output.lines().any(|line| {
        let mut rest = line;
        wanted.split('…').map(str::trim).all(|piece| match rest.find(piece) {
            Some(at) => {
                rest = &rest[at + piece.len()..];
                true
            }
            None => false,
        })
    })
}

fn play(page: &Page) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(page.path);
    let mut text = fs::read_to_string(path).expect("a page");
    for (before, after) in page.replaced {
        assert!(text.contains(before), "{}: no {before:?}", page.path);
        text = text.replace(before, after);
    }
    let (blocks, _) = split(&text);
    let folder = tempfile::tempdir().expect("a folder");
    for block in &blocks {
        if let Some(name) = block.file() {
            fs::write(folder.path().join(name), &block.text).expect("written");
        }
    }
    let (went_well, output) = run(&script(page, &blocks), folder.path());
    assert!(went_well, "{}:\n{output}", page.path);
    let mut before = "";
    for (number, block) in blocks.iter().enumerate() {
        let until = output.find(&format!("{MARK}{number}\n")).expect("each block ends");
        if block.language() == "text" && blocks[..number].last().is_some_and(|last| last.info == "sh run") {
            for line in block.text.lines().filter(|line| !line.trim().is_empty()) {
                assert!(printed(before, line), "{}:{}: no {line:?} in:\n{before}", page.path, block.line);
            }
        }
        let begins = output[..until].rfind(MARK).map_or(0, |at| at);
        before = &output[begins..until];
    }
}

#[test]
fn the_commands_of_the_pages_do_what_the_pages_say() {
    for tool in [
        &["unshare", "--net", "--pid", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"][..],
        &["ss", "-V"],
        &["openssl", "version"],
        &["curl", "--version"],
    ] {
        let ran = Command::new(tool[0]).args(&tool[1..]).output();
        if !ran.is_ok_and(|output| output.status.success()) {
            return skip(&format!("documents: {} cannot be run here", tool.join(" ")));
        }
    }
    for page in &PAGES {
        play(page);
    }
}
