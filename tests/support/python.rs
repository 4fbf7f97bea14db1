//! A Python that has the official messages of xDS.

use std::ffi::OsString;
use std::path::Path;

/// Where it is: `ISTHMUS_PYTHON`, or where `tests/run` has put it.
pub fn installed() -> Option<OsString> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop/venv");
    // The interpreter is there without the packages too; the stamp says that they are.
    let usual = || venv.join("xds.txt.installed").exists().then(|| venv.join("bin/python").into_os_string());
    std::env::var_os("ISTHMUS_PYTHON").or_else(usual)
}
