//! Generates Rust types from `proto/`, and the descriptors that a test compares with the official ones.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

use protox::Compiler;

/// The folder of the `.proto` files, from the folder of this crate.
const PROTO: &str = "../../proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={PROTO}");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo names no OUT_DIR")?);
    let mut files = Vec::new();
    find(Path::new(PROTO), &mut files)?;
    files.sort();

    let mut compiler = Compiler::new([PROTO])?;
    // The source info holds the comments, which become the documentation of the types.
    compiler.include_imports(true).include_source_info(true).open_files(&files)?;
    prost_build::Config::new()
        .include_file("proto.rs")
        // Encoding must be deterministic: clients must not see a change if there is none.
        .btree_map(["."])
        .out_dir(&out)
        .compile_fds(compiler.file_descriptor_set())?;

    compiler.include_source_info(false);
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;
    Ok(())
}

/// Collects the `.proto` files of a folder and of those below it.
fn find(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            found.push(path);
        }
    }
    Ok(())
}
