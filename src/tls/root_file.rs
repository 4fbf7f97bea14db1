//! Root certificates with some fields before them, in a file of the state folder. The file is replaced atomically, and it is a
//! legal PEM file of roots.
//!
//! ```text
//! isthmus peer link 1
//! identity: spiffe://west.example/ns/isthmus/sa/gateway
//! sum: 0123456789abcdef
//!
//! -----BEGIN CERTIFICATE-----
//! ```
//!
//! The first line names the kind of file and the version. `sum` is the XXH3 hash of all bytes except its own line.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustls::pki_types::CertificateDer;
use twox_hash::XxHash3_64;

use super::certificate::{certificates, pem};
use isthmus_files::file;
use isthmus_files::whole_file::write_whole;

/// The subfolder of the state folder with the files about peers.
pub const FOLDER: &str = "peers";
/// The largest file in bytes: 64 KiB of roots are less than 128 KiB as PEM.
const BYTES_MAX: u64 = 256 << 10;
const DAMAGED: &str = "the file is damaged, or was not written by this version of isthmus";

/// Roots, and the fields before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootFile {
    /// The fields in their order: name and value, without line breaks.
    pub fields: Vec<(String, String)>,
    /// The roots.
    pub roots: Vec<CertificateDer<'static>>,
}

impl RootFile {
    /// Reads a file of this kind; `None` if there is no file. An error names the file and the cause. Blocks.
    pub fn load(path: &Path, kind: &str) -> Result<Option<Self>, String> {
        let named = |fault: &dyn fmt::Display| format!("{}: {fault}", path.display());
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(named(&error)),
            Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o002 != 0 => {
                let fault = "any user may write this file, so its contents cannot be trusted; check the contents, then run \
                             chmod 600 on the file";
                return Err(named(&fault));
            }
            Ok(_) => {}
        }
        let bytes = file::read(path, BYTES_MAX).map_err(|fault| named(&fault))?;
        let text = std::str::from_utf8(&bytes).map_err(|_| named(&DAMAGED))?;
        Self::parse(text, kind).map(Some).ok_or_else(|| named(&DAMAGED))
    }

    /// Replaces the file at `path` by one with these fields and roots. Blocks.
    pub fn store(&self, path: &Path, kind: &str) -> io::Result<()> {
        write_whole(path, |mut file| {
            file.write_all(self.text(kind).as_bytes())?;
            Ok(file)
        })
    }

    /// Returns the value of a field.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn text(&self, kind: &str) -> String {
        let fields: String = self.fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        let (head, roots) = (format!("{}{fields}", head(kind)), format!("\n{}", pem(&self.roots)));
        format!("{head}sum: {:016x}\n{roots}", sum(&head, &roots))
    }

    fn parse(text: &str, kind: &str) -> Option<Self> {
        let (before, rest) = text.split_once("\nsum: ")?;
        let (written, roots) = rest.split_once('\n')?;
        let fields = format!("{before}\n");
        if written != format!("{:016x}", sum(&fields, roots)) {
            return None;
        }
        let fields = fields.strip_prefix(&head(kind))?.lines();
        let field =
            |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned()));
        Some(Self {
            fields: fields.map(field).collect::<Option<_>>()?,
            roots: certificates(roots.as_bytes()).ok()?,
        })
    }
}

fn head(kind: &str) -> String {
    format!("isthmus {kind} 1\n")
}

fn sum(head: &str, roots: &str) -> u64 {
    XxHash3_64::oneshot([head, roots].concat().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> RootFile {
        RootFile {
            fields: vec![
                ("identity".to_owned(), "spiffe://west/x".to_owned()),
                ("dial".to_owned(), "a:1".to_owned()),
            ],
            roots: vec![CertificateDer::from(vec![7; 400]), CertificateDer::from(vec![8; 3])],
        }
    }

    #[test]
    fn what_is_stored_is_loaded_and_only_its_owner_reads_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("peers/west.pem");
        assert_eq!(RootFile::load(&path, "test"), Ok(None));
        file().store(&path, "test").expect("stored");
        assert_eq!(RootFile::load(&path, "test"), Ok(Some(file())));
        assert_eq!((file().field("dial"), file().field("accept")), (Some("a:1"), None));
        let bytes = fs::read(&path).expect("written");
        assert_eq!(certificates(&bytes).expect("a file of roots"), file().roots);
        assert_eq!(path.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        assert!(
            RootFile::load(&path, "other")
                .is_err_and(|fault| fault.contains("west.pem: the file is damaged"))
        );
        fs::set_permissions(&path, fs::Permissions::from_mode(0o606)).expect("set");
        let refused = RootFile::load(&path, "test").expect_err("others may have written it");
        assert!(refused.contains("west.pem") && refused.contains("chmod 600"), "{refused}");
    }

    #[test]
    fn a_file_that_differs_in_one_bit_or_is_cut_is_refused() {
        let whole = file().text("test");
        for at in 0..whole.len() {
            assert_eq!(RootFile::parse(&whole[..at], "test"), None, "cut");
            let mut other = whole.clone().into_bytes();
            other[at] ^= 1;
            let other = String::from_utf8(other).expect("ASCII");
            assert_eq!(RootFile::parse(&other, "test"), None, "{other}");
        }
        assert_eq!(RootFile::parse(&format!("{whole}x"), "test"), None, "longer");
    }
}
