//! `isthmus top` in a real terminal (tmux), over a unix socket.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::admin_socket::{Process, isthmus};
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
    assert!(first.contains("1 services and routes") && first.contains("q quit"), "{first}");
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
    terminal.shows("1 services and routes");
    // After a change of size, the screen is redrawn.
    terminal.tmux(&["resize-window", "-x", "60", "-y", "12"]).expect("resized");
    terminal.shows("q quit  1-6 or tab view  up/down scroll");
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
