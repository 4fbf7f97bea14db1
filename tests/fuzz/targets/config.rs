//! Config files: every error has a position within the file, and the policy of an accepted config is unchanged after the config
//! is printed as `/api/v1/config` prints it and parsed again.

use std::cell::OnceCell;
use std::fs;
use std::path::Path;

use isthmus::config::{Config, effective, load};
use isthmus::document::problem::Problem;

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
            Err(problems) => {
                assert!(!problems.is_empty(), "refused without a reason");
                // In YAML, a carriage return alone ends a line, too.
                let lines = text.matches(['\n', '\r']).count() + 2;
                for problem in &problems {
                    assert!(problem.line as usize <= lines, "line {} of {lines}: {problem}", problem.line);
                    assert!(!problem.message.is_empty() && problem.message.len() < 4_096, "{problem}");
                    assert!(!problem.to_string().contains(['\0', '\x1b', '\n']), "{:?}", problem.to_string());
                }
            }
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
