//! `isthmus top` in a real terminal (tmux), over a unix socket; and the README's picture of it.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::admin_socket::{Process, isthmus};
use crate::dashboard::scene;
use crate::support::client::{call, tls};
use crate::support::gateway::BINARY;
use crate::support::{eventually, skip};

/// The size of the window, as arguments of tmux.
const SIZE: [&str; 4] = ["-x", "110", "-y", "30"];

/// A tmux server with one window; killed when dropped.
pub(crate) struct Terminal {
    folder: TempDir,
}

impl Terminal {
    /// Opens a window of this size in which a shell runs this command. Returns `None` if tmux is not installed.
    pub(crate) fn open(shell: &str, size: [&str; 4]) -> Option<Self> {
        let terminal = Self { folder: tempfile::tempdir().expect("a folder") };
        let start = [&["-f", "/dev/null", "new-session", "-d"], &size[..], &[shell]].concat();
        let ran = terminal.tmux(&start);
        ran.is_some().then_some(terminal)
    }

    fn tmux(&self, arguments: &[&str]) -> Option<String> {
        let output = Command::new("tmux")
            .arg("-S")
            .arg(self.folder.path().join("tmux"))
            .args(arguments)
            .env_remove("TMUX")
            .output()
            .ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"]).unwrap_or_default()
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]).expect("the window is there");
    }

    #[track_caller]
    fn shows(&self, text: &str) -> String {
        eventually(&format!("{text:?} on the screen"), || {
            Some(self.screen()).filter(|all| all.contains(text))
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

/// Returns a shell command that runs `isthmus top`, prints its exit code, and stores the terminal modes from before and after
/// it in files.
fn shell(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "stty -a > {folder}/before; {BINARY} top --admin unix:{folder}/admin.sock; echo ended $?; stty -a > {folder}/after; \
         exec sleep 1000"
    )
}

fn is_restored(folder: &Path) {
    // The first line contains the size, which the test changes.
    let modes = |name: &str| {
        let text = std::fs::read_to_string(folder.join(name)).expect("written");
        text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    eventually("the modes", || folder.join("after").exists().then_some(()));
    eventually("the same modes", || (modes("before") == modes("after")).then_some(()));
}

#[test]
fn it_shows_the_gateway_follows_the_keys_and_leaves_the_terminal_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut gateway = Process::start(folder.path());
    let Some(terminal) = Terminal::open(&shell(folder.path()), SIZE) else {
        return skip("top: no tmux");
    };
    let first = terminal.shows("a.test");
    assert!(first.contains("1 service or route") && first.contains("q quit"), "{first}");
    terminal.press("2");
    terminal.shows("REASON");
    terminal.press("Right");
    terminal.shows("NETWORK AND GATEWAYS");
    terminal.shows("DISTANCE");
    for key in ["/", "z", "z", "Enter"] {
        terminal.press(key);
    }
    terminal.shows("0 of 1 contain \"zz\"");
    terminal.press("Escape");
    terminal.shows("1 service or route");
    // After a change of size, the screen is redrawn.
    terminal.tmux(&["resize-window", "-x", "60", "-y", "12"]).expect("resized");
    terminal.shows("q quit  1-6, tab view  enter open");
    // The gateway ends, and another one starts.
    gateway.child.kill().expect("killed");
    gateway.ended();
    let away = terminal.shows("no answer from unix:");
    assert!(away.contains("a.test"), "the last state stays: {away}");
    let _second = Process::start(folder.path());
    eventually("the new gateway", || {
        let screen = terminal.screen();
        (!screen.contains("no answer") && screen.contains("a.test")).then_some(())
    });
    terminal.press("q");
    let after = terminal.shows("ended 0");
    assert!(!after.contains("q quit") && !after.contains("a.test"), "the screen is the one before: {after}");
    is_restored(folder.path());
}

#[test]
fn signals_restore_the_terminal_too() {
    for (signal, by_key) in [("TERM", false), ("HUP", false), ("INT", true)] {
        let folder = tempfile::tempdir().expect("a folder");
        // No gateway answers; `top` must still end on request.
        let Some(terminal) = Terminal::open(&shell(folder.path()), SIZE) else {
            return skip("top: no tmux");
        };
        terminal.shows("no answer from unix:");
        if by_key {
            terminal.press("C-c");
        } else {
            let pane = terminal.tmux(&["list-panes", "-F", "#{pane_pid}"]).expect("a window");
            let children = Command::new("pgrep").arg("-P").arg(pane.trim()).output().expect("pgrep").stdout;
            let child = String::from_utf8_lossy(&children).trim().to_owned();
            let sent = Command::new("kill").args(["-s", signal, &child]).status().expect("kill");
            assert!(sent.success(), "{child}");
        }
        let after = terminal.shows("ended 0");
        assert!(!after.contains("no answer"), "{after}");
        is_restored(folder.path());
    }
}

#[test]
fn without_a_terminal_it_says_what_to_use() {
    let output = isthmus(&["top", "--admin", "unix:/nowhere"], None);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("needs a terminal") && told.contains("isthmus status"), "{told}");
}

/// The width of a character and the height of a line of the picture, in its units.
const CELL: (f64, usize) = (8.4, 18);
/// The number of columns and lines of the picture.
const PICTURE: (usize, usize) = (118, 14);

/// Draws lines with escape sequences for styles (SGR, ECMA-48 §8.3.117) as an SVG picture.
fn drawn(screen: &str) -> String {
    let (width, height) = ((PICTURE.0 + 2) as f64 * CELL.0, (PICTURE.1 + 1) * CELL.1);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height}\" role=\"img\" aria-labelledby=\"t\">\n\
         <title id=\"t\">isthmus top: the gateway, its problems, and its services with calls, refusals and times</title>\n\
         <style>\ntext {{ font: 14px monospace; white-space: pre; fill: #e6edf3; }}\nrect {{ fill: #0d1117; }}\n\
         .s1 {{ font-weight: bold; }} .s2 {{ opacity: 0.65; }} .s31 {{ fill: #ff7b72; }} .s32 {{ fill: #7ee787; }}\n\
         .s33 {{ fill: #e3b341; }} .s7 {{ text-decoration: underline; font-weight: bold; }}\n</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\"/>\n"
    );
    for (number, line) in screen.lines().enumerate() {
        let (mut styles, mut column, y) = (Vec::new(), 0, (number + 1) * CELL.1);
        for (index, part) in line.split("\x1b[").enumerate() {
            let text = if index == 0 {
                part
            } else {
                let (codes, text) = part.split_once('m').expect("a sequence for styles");
                for code in codes.split(';') {
                    match code {
                        "" | "0" => styles.clear(),
                        // The colour of plain text again.
                        "39" => styles.retain(|style: &String| !style.starts_with("s3")),
                        code => styles.push(format!("s{code}")),
                    }
                }
                text
            };
            if !text.trim().is_empty() {
                let x = (column + 1) as f64 * CELL.0;
                let text = text.replace('&', "&amp;").replace('<', "&lt;");
                let _ = writeln!(
                    svg,
                    "<text x=\"{x:.1}\" y=\"{y}\" class=\"{}\">{}</text>",
                    styles.join(" "),
                    text.trim_end()
                );
            }
            column += text.chars().count();
        }
    }
    svg + "</svg>\n"
}

/// Returns the words of a picture that no measurement changes: column heads, and names of views, services and problems.
fn lasting(svg: &str) -> Vec<&str> {
    let texts = svg.split("</text>").filter_map(|text| text.rsplit_once('>')).map(|(_, text)| text);
    let words = texts.flat_map(str::split_whitespace);
    let mut words: Vec<&str> = words.filter(|word| word.contains(['.', '_']) || is_head(word)).collect();
    words.retain(|word| !word.contains(char::is_numeric));
    words.sort_unstable();
    words.dedup();
    words
}

fn is_head(word: &str) -> bool {
    word.len() > 2 && word.chars().all(char::is_uppercase)
}

/// With `ISTHMUS_BLESS=1`, the picture becomes that of the README.
#[test]
fn the_picture_of_the_readme_is_taken_of_this_screen() {
    let (gateway, _backend) = scene();
    let (columns, lines) = (PICTURE.0.to_string(), PICTURE.1.to_string());
    let shell = format!("{BINARY} top --admin http://{}; exec sleep 1000", gateway.admin());
    let Some(terminal) = Terminal::open(&shell, ["-x", &columns, "-y", &lines]) else {
        return skip("top: no tmux");
    };
    let listener = gateway.listener("mesh-sni");
    let client = || tls(listener, "cart.billing.mesh").expect("a handshake");
    let _open = [client(), client(), client()];
    let text = "x".repeat(20_000);
    let made = eventually("a call on the screen", || {
        call(&mut client(), &text).expect("an answer");
        let screen = terminal.screen();
        let line = screen.lines().find(|line| line.contains("*.billing.mesh"))?;
        let is_busy = line.contains("KiB/s") || line.contains("MiB/s");
        is_busy.then(|| drawn(&terminal.tmux(&["capture-pane", "-p", "-e"]).expect("the window is there")))
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pictures/top.svg");
    if std::env::var_os("ISTHMUS_BLESS").is_some() {
        return std::fs::write(path, made).expect("written");
    }
    let kept = std::fs::read_to_string(path).expect("the picture");
    assert_eq!(lasting(&kept), lasting(&made), "run it with ISTHMUS_BLESS=1");
}
