//! A Python that has the official messages of xDS, and of those who certify us.

use std::ffi::OsString;
use std::path::Path;

/// The one with the messages of xDS: `ISTHMUS_PYTHON`, or where `tests/run` has put it.
pub fn installed() -> Option<OsString> {
    with(&["xds.txt"])
}

/// The same with all that a server needs that says who we are.
pub fn with_authorities() -> Option<OsString> {
    with(&["xds.txt", "identity.txt"])
}

fn with(lists: &[&str]) -> Option<OsString> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop/venv");
    // The interpreter is there without the packages too; the stamps say that they are.
    let stamped = lists.iter().all(|list| venv.join(format!("{list}.installed")).exists());
    std::env::var_os("ISTHMUS_PYTHON").or_else(|| stamped.then(|| venv.join("bin/python").into_os_string()))
}
