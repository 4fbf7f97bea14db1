//! Runs the commands of the documentation as a reader would: all `sh` blocks of a page in one shell, in a folder with the page's
//! blocks that are files (`yaml file=NAME`), or with the files of the example. The output must contain each line of a `text`
//! block that follows directly. Left out are blocks with the mark `by-hand`, and those for Kubernetes, which `tests/chart` runs.
//!
//! A script in `tests/e2e/pages` prepares what a reader of the page already has. Its lines `# replace: TEXT => OTHER` change the
//! page's commands, for instance an address on the internet; `# needs: PROGRAM` names a program that may be absent.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::markdown::{Block, split};
use crate::support::{envoy, etcd, gateway, skip};

/// Shell functions that run the commands of a page. Somebody who follows the page waits until a program has started, so these
/// functions wait too: for gateways and Envoys until they are ready, for other programs until they listen. A gateway that would
/// occupy the terminal runs in the background.
const SETTING: &str = r#"
set -euo pipefail
exec 2>&1
ip link set lo up
started() {
    local words; mapfile -d '' -t words < "/proc/$1/cmdline" || return 0
    case ${words[0]:-} in
    *isthmus)
        local address; address=$(sed -n 's/^admin: *{bind: "\(.*\)"}.*/\1/p' "/proc/$1/cwd/${words[3]:-isthmus.yaml}")
        command isthmus healthcheck --admin "http://${address:-127.0.0.1:15000}" > /dev/null 2>&1 ;;
    *etcd) command curl -sf http://127.0.0.1:2379/health > /dev/null ;;
    *envoy) command curl -s 127.1.0.9:9901/ready | grep -q LIVE ;;
    *) ss -Hltnp | grep -q "pid=$1," ;;
    esac
}
settle() {
    local process attempt
    for process in $(jobs -p); do
        for attempt in $(seq 400); do started "$process" && break; sleep 0.05; done
        started "$process" || { echo "process $process does not listen"; exit 9; }
    done
}
isthmus() {
    if [[ $1 != run ]]; then
        settle
        # A failure is listed some moments after the client knows of it.
        if [[ $1 == failures ]]; then
            for attempt in $(seq 100); do [[ $(command isthmus "$@" | wc -l) -gt 1 ]] && break; sleep 0.05; done
        fi
        # The exit code 1 of `explain` is an answer: the name is refused.
        command isthmus "$@" || [[ $? == 1 && $1 == explain ]]
    elif [[ $BASHPID == "$$" ]]; then
        command isthmus "$@" &
        settle
    else
        exec isthmus "$@"
    fi
}
openssl() { if [[ $1 == s_server ]]; then exec openssl "$@"; fi; settle; command openssl "$@"; }
envoy() { exec envoy "$@"; }
etcd() { exec etcd "$@"; }
python3() { exec python3 "$@"; }
curl() { settle; command curl "$@"; }
dig() { settle; command dig "$@"; }
sudo() { "$@"; }
"#;

/// A line between the outputs of two blocks.
const MARK: &str = "=== end of block ";

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Returns the paths of all pages that a reader follows.
fn pages() -> Vec<String> {
    let examples = files_in("examples").into_iter().map(|example| format!("{example}/README.md"));
    let docs = files_in("docs").into_iter().filter(|path| path.ends_with(".md"));
    let examples = examples.filter(|path| root(path).exists());
    ["README.md".to_owned()].into_iter().chain(docs).chain(examples).collect()
}

/// Returns the path of the script that may prepare a page.
fn script_of(page: &str) -> String {
    format!("tests/e2e/pages/{}.sh", page.trim_end_matches(".md").replace('/', "-"))
}

/// A page with commands.
struct Page {
    /// The path in the repository.
    path: String,
    blocks: Vec<Block>,
    /// The script of `tests/e2e/pages`; empty if the page needs none.
    before: String,
}

impl Page {
    /// Reads a page. Returns `None` if it has no commands.
    fn read(path: String) -> Option<Self> {
        let mut text = fs::read_to_string(root(&path)).expect("a page");
        let before = fs::read_to_string(root(&script_of(&path))).unwrap_or_default();
        for line in before.lines().filter_map(|line| line.strip_prefix("# replace: ")) {
            let (this, other) = line.split_once(" => ").expect("TEXT => OTHER");
            assert!(text.contains(this), "{path} has no {this:?}");
            text = text.replace(this, other);
        }
        let blocks = split(&text).0;
        let any = blocks.iter().any(|block| block.is_run() && !block.needs_cluster());
        any.then_some(Self { path, blocks, before })
    }

    /// Returns the programs that the page needs and this host may not have.
    fn needs(&self) -> impl Iterator<Item = &str> {
        self.before.lines().filter_map(|line| line.strip_prefix("# needs: "))
    }

    /// Writes the files of the page into a folder.
    fn write_files(&self, folder: &Path) {
        if let Some(example) = self.path.strip_suffix("/README.md") {
            for file in fs::read_dir(root(example)).expect("an example").flatten() {
                fs::copy(file.path(), folder.join(file.file_name())).expect("copied");
            }
        }
        for block in &self.blocks {
            if let Some(name) = block.file() {
                fs::write(folder.join(name), &block.text).expect("written");
            }
        }
    }

    fn script(&self) -> String {
        let mut script = format!("{SETTING}\n{}\n", self.before);
        for (number, block) in self.blocks.iter().enumerate() {
            if block.is_run() && !block.needs_cluster() {
                let _ = writeln!(script, "settle\n{}", block.text);
            }
            let _ = writeln!(script, "echo '{MARK}{number}'");
        }
        script + "kill $(jobs -p) 2> /dev/null || true\n"
    }

    /// Runs the commands, and compares their output with that on the page.
    fn play(&self, programs: &Path) {
        let folder = tempfile::tempdir().expect("a folder");
        self.write_files(folder.path());
        fs::write(folder.path().join("script.sh"), self.script()).expect("written");
        let (went_well, output) = run(folder.path(), programs);
        assert!(went_well, "{}:\n{output}", self.path);
        let mut before = "";
        for (number, block) in self.blocks.iter().enumerate() {
            let until = output.find(&format!("{MARK}{number}\n")).expect("each block ends");
            let last = self.blocks[..number].last();
            if block.language() == "text"
                && last.is_some_and(|last| last.is_run() && last.is_followed_by(block))
            {
                for line in block.text.lines().filter(|line| !line.trim().is_empty()) {
                    assert!(printed(before, line), "{}:{}: no {line:?} in:\n{before}", self.path, block.line);
                }
            }
            let begins = output[..until].rfind(MARK).map_or(0, |at| at);
            before = &output[begins..until];
        }
    }
}

/// Runs the script of a folder in namespaces of its own for network, processes and mounts, so that nothing of it survives.
fn run(folder: &Path, programs: &Path) -> (bool, String) {
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("unshare")
        .args(["--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "bash", "script.sh"])
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

/// Returns the paths of the files in a folder of the repository.
fn files_in(folder: &str) -> Vec<String> {
    let files = fs::read_dir(root(folder)).expect("a folder").flatten();
    let mut paths: Vec<String> =
        files.map(|file| format!("{folder}/{}", file.file_name().to_str().expect("a name"))).collect();
    paths.sort();
    paths
}

/// Runs the commands of these pages.
fn play(pages: impl Iterator<Item = String>) {
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
    let programs = tempfile::tempdir().expect("a folder");
    let others =
        [("envoy", envoy::installed().map(PathBuf::from)), ("etcd", etcd::installed().map(PathBuf::from))];
    let own = ("isthmus", Some(PathBuf::from(gateway::BINARY)));
    for (name, path) in others.into_iter().chain([own]) {
        if let Some(path) = path {
            std::os::unix::fs::symlink(path, programs.path().join(name)).expect("a link");
        }
    }
    let is_there = |program: &str| {
        let own = programs.path().to_owned();
        let paths = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&paths).chain([own]).any(|folder| folder.join(program).exists())
    };
    let mut count = 0;
    for page in pages.filter_map(Page::read) {
        match page.needs().find(|program| !is_there(program)) {
            Some(program) => skip(&format!("documents: {} needs {program}", page.path)),
            None => page.play(programs.path()),
        }
        count += 1;
    }
    assert!(count > 3, "only {count} pages have commands");
}

#[test]
fn the_commands_of_the_pages_do_what_the_pages_say() {
    play(pages().into_iter().filter(|page| page.starts_with("docs/")));
}

#[test]
fn the_commands_of_the_readme_and_of_the_examples_do_what_they_say() {
    play(pages().into_iter().filter(|page| !page.starts_with("docs/")));
}

#[test]
fn every_script_belongs_to_a_page() {
    let scripts: Vec<String> = pages().iter().map(|page| script_of(page)).collect();
    for script in files_in("tests/e2e/pages") {
        assert!(scripts.contains(&script), "no page has the script {script}");
    }
}
