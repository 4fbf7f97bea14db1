//! Configs of HAProxy, nginx and sniproxy: what they are converted to is the same each time, and is a config that is accepted, unless
//! the original leads to one of its own listeners.

use std::cell::OnceCell;
use std::fs;

use isthmus::config::load;
use isthmus::convert::config_of;

/// The part of a problem that says that an endpoint is a listener.
const OWN: &str = "an address on which this gateway listens";

pub(super) fn run(data: &[u8]) {
    thread_local!(static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() });
    let text = String::from_utf8_lossy(data);
    let Some(config) = config_of(&text) else { return };
    assert_eq!(config_of(&text).as_ref(), Some(&config), "converted otherwise the second time");
    assert!(!config.contains(['\0', '\x1b', '\r']), "{config:?}");
    FOLDER.with(|folder| {
        let file = folder.get_or_init(|| tempfile::tempdir().expect("a folder")).path().join("isthmus.yaml");
        fs::write(&file, &config).expect("written");
        let problems = load(&file, &|_| None, &mut |_| {}).err().unwrap_or_default();
        let of_other = problems.iter().find(|problem| !problem.message.contains(OWN));
        assert_eq!(of_other, None, "{config}");
    });
}
