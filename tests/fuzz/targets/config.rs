//! Config files: every error has a position within the file, and the policy of an accepted config is unchanged after the config
//! is printed as `/api/v1/config` prints it and parsed again.

use std::cell::OnceCell;
use std::fs;
use std::path::Path;

use isthmus::config::{Config, effective, load};
use isthmus::document::problem::Problem;

use super::check_problems;

/// Inputs with this word, or with an escape that could spell it, are skipped: an include could read any file of this machine.
const INCLUDE: &str = "include";

pub(super) fn run(data: &[u8]) {
    thread_local!(static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() });
    let text = String::from_utf8_lossy(data);
    if text.contains(INCLUDE) || text.contains("\\x") || text.contains("\\u") || text.contains("\\U") {
        return;
    }
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| tempfile::tempdir().expect("a folder")).path();
        match read(folder, data) {
            Ok(config) => {
                let shown = effective(&config).to_string();
                let again = read(folder, shown.as_bytes());
                let again =
                    again.unwrap_or_else(|problems| panic!("{shown}\nis refused: {}", listed(&problems)));
                assert_eq!(format!("{:?}", again.policy), format!("{:?}", config.policy), "{shown}");
            }
            Err(problems) => check_problems(&problems, &text),
        }
    });
}

fn read(folder: &Path, text: &[u8]) -> Result<Config, Vec<Problem>> {
    let file = folder.join("isthmus.yaml");
    fs::write(&file, text).expect("written");
    let environment = |name: &str| (name == "NAME").then(|| "value".into());
    load(&file, &environment, &mut |_| {})
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}
