//! The config file of a command: where it is found, and how it is loaded.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use isthmus_config as config;
use isthmus_console::failure::Failure;
use isthmus_document::problem::Problem;

/// The time after which a command says that it waits for a pipe.
const SLOW: Duration = Duration::from_secs(2);
/// The default paths of the config, in the order in which they are tried.
const CONFIG_PATHS: [&str; 2] = ["isthmus.yaml", "/etc/isthmus/isthmus.yaml"];

pub(super) fn config_path(given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let found = CONFIG_PATHS.iter().map(PathBuf::from).find(|path| path.exists());
    found.ok_or_else(|| {
        Failure::Wrong(format!(
            "no config file found; give one with -c FILE, or put it at {}",
            CONFIG_PATHS.join(" or ")
        ))
    })
}

/// Loads a config as `run` does, but also from a pipe or a terminal, which this waits for.
pub(super) fn load(path: &Path) -> Result<config::Config, Vec<Problem>> {
    let path = if path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    let say = move |name: String| {
        // If stderr is closed, the message cannot be shown.
        let _ = writeln!(io::stderr(), "waiting for the end of {name}, which is not a regular file");
    };
    let read = || config::load_named(path, &|name| std::env::var_os(name));
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() && !found.is_dir() => {
            let name = path.display().to_string();
            or_say_when_slow(read, SLOW, move || say(name))
        }
        _ => read(),
    }
}

/// Does the work, and calls `say` if that takes longer than `slow`.
fn or_say_when_slow<T>(work: impl FnOnce() -> T, slow: Duration, say: impl FnOnce() + Send + 'static) -> T {
    let (working, ended) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if ended.recv_timeout(slow) == Err(mpsc::RecvTimeoutError::Timeout) {
            say();
        }
    });
    let done = work();
    drop(working);
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_says_what_it_waits_for() {
        let (said, heard) = mpsc::channel();
        let work = move || heard.recv_timeout(Duration::from_secs(10)).is_ok();
        assert!(or_say_when_slow(work, Duration::ZERO, move || said.send(()).expect("heard")));
        or_say_when_slow(|| (), Duration::from_secs(10), || panic!("it was fast"));
    }
}
