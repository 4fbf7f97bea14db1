//! `isthmus certs`: writes a development CA and workload certificates, which `tls::development` creates, to files. An existing
//! CA is reused and never overwritten.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use isthmus_model::identity::TrustDomain;
use isthmus_tls::development::{Authority, DevelopmentError};

const AUTHORITY_CERTIFICATE: &str = "ca.pem";
const AUTHORITY_KEY: &str = "ca-key.pem";

/// Makes a development CA and SPIFFE workload certificates.
///
/// Writes `ca.pem` and `ca-key.pem`, and for each workload `NAMESPACE_SERVICEACCOUNT.pem` and
/// `NAMESPACE_SERVICEACCOUNT-key.pem`. A CA that exists in the directory is reused; workload certificates are
/// always made again. For development and tests only: the CA's key is a plain file.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Directory to write to; created if it does not exist
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Trust domain of the CA and of every identity
    #[arg(long, value_name = "NAME", default_value = "cluster.local", value_parser = trust_domain)]
    pub trust_domain: TrustDomain,
    /// A workload, and the DNS names or IP addresses it serves; may be given several times
    #[arg(long = "workload", value_name = "NAMESPACE/SERVICEACCOUNT[=NAME,…]", value_parser = workload)]
    pub workloads: Vec<Workload>,
    /// A DNS name or IP address for the certificates of all workloads; may be given several times
    #[arg(long = "dns", value_name = "NAME")]
    pub names: Vec<String>,
    /// Days for which the workload certificates are valid
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=825))]
    pub days: u32,
}

/// The value of one `--workload`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The namespace.
    pub namespace: String,
    /// The service account.
    pub service_account: String,
    /// Further subject names: DNS names and IP addresses.
    pub names: Vec<String>,
}

impl Workload {
    /// Returns the stem of the workload's file names. Neither part can contain `_`, so no two workloads share
    /// a stem.
    fn stem(&self) -> String {
        format!("{}_{}", self.namespace, self.service_account)
    }
}

/// The reason why certificates could not be written.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    /// Only one of the two files of the CA exists.
    #[error(
        "{} exists but {} does not: restore the missing file of this CA, or remove the existing one to create a \
         new CA",
        .present.display(), .absent.display()
    )]
    HalfAuthority {
        /// The file that exists.
        present: PathBuf,
        /// The file that is missing.
        absent: PathBuf,
    },
    /// The workload is given twice.
    #[error("--workload {0} is given twice")]
    Twice(String),
    /// The CA cannot be made or restored.
    #[error("cannot use the CA in {}: {error}", .dir.display())]
    Authority {
        /// The folder of the CA.
        dir: PathBuf,
        /// The cause.
        error: DevelopmentError,
    },
    /// A certificate cannot be issued.
    #[error("cannot make a certificate for {workload}: {error}")]
    Issue {
        /// The workload.
        workload: String,
        /// The cause.
        error: DevelopmentError,
    },
    /// A file cannot be read or written.
    #[error("cannot {what} {}: {error}", .path.display())]
    File {
        /// The verb of the message, such as `write`.
        what: &'static str,
        /// The file that cannot be read or written.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write the report: {0}")]
    Report(#[from] io::Error),
}

/// Creates and writes the certificates that `args` asks for, and reports the written files on `out`.
pub fn run(args: &Args, out: &mut impl Write) -> Result<(), CertsError> {
    let mut stems = BTreeSet::new();
    for workload in &args.workloads {
        if !stems.insert(workload.stem()) {
            let spelled = format!("{}/{}", workload.namespace, workload.service_account);
            return Err(CertsError::Twice(spelled));
        }
    }
    fs::create_dir_all(&args.dir).map_err(file_error("make the folder", &args.dir))?;
    let authority = authority(args, out)?;
    for workload in &args.workloads {
        issue(args, &authority, workload, out)?;
    }
    Ok(())
}

fn authority(args: &Args, out: &mut impl Write) -> Result<Authority, CertsError> {
    let certificate_path = args.dir.join(AUTHORITY_CERTIFICATE);
    let key_path = args.dir.join(AUTHORITY_KEY);
    let fault = |error| CertsError::Authority { dir: args.dir.clone(), error };
    let certificate = read_if_there(&certificate_path)?;
    let key = read_if_there(&key_path)?;
    match (certificate, key) {
        (Some(certificate), Some(key)) => {
            let authority =
                Authority::from_pem(args.trust_domain.clone(), &certificate, &key).map_err(fault)?;
            writeln!(
                out,
                "using   {}  CA of trust domain {}",
                certificate_path.display(),
                args.trust_domain
            )?;
            Ok(authority)
        }
        (Some(_), None) => Err(CertsError::HalfAuthority { present: certificate_path, absent: key_path }),
        (None, Some(_)) => Err(CertsError::HalfAuthority { present: key_path, absent: certificate_path }),
        (None, None) => {
            let authority = Authority::new(args.trust_domain.clone()).map_err(fault)?;
            write(&key_path, &authority.key_pem(), Secrecy::Private, Existing::Refuse)?;
            write(&certificate_path, authority.certificate_pem(), Secrecy::Public, Existing::Refuse)?;
            writeln!(
                out,
                "wrote   {}  CA of trust domain {}",
                certificate_path.display(),
                args.trust_domain
            )?;
            writeln!(out, "wrote   {}  its key", key_path.display())?;
            Ok(authority)
        }
    }
}

fn issue(
    args: &Args,
    authority: &Authority,
    workload: &Workload,
    out: &mut impl Write,
) -> Result<(), CertsError> {
    let Workload { namespace, service_account, names } = workload;
    let fault = |error| CertsError::Issue { workload: format!("{namespace}/{service_account}"), error };
    let identity = authority.identity(namespace, service_account).map_err(|error| fault(error.into()))?;
    let names: Vec<&str> = names.iter().chain(&args.names).map(String::as_str).collect();
    let issued = authority.issue(&identity, &names, args.days).map_err(fault)?;
    let certificate_path = args.dir.join(format!("{}.pem", workload.stem()));
    let key_path = args.dir.join(format!("{}-key.pem", workload.stem()));
    write(&key_path, &issued.key_pem, Secrecy::Private, Existing::Replace)?;
    write(&certificate_path, &issued.certificate_pem, Secrecy::Public, Existing::Replace)?;
    let also = if names.is_empty() { String::new() } else { format!(", {}", names.join(", ")) };
    writeln!(out, "wrote   {}  {identity}{also}, {} days", certificate_path.display(), args.days)?;
    writeln!(out, "wrote   {}  its key", key_path.display())?;
    Ok(())
}

fn read_if_there(path: &Path) -> Result<Option<String>, CertsError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("read", path)(error)),
    }
}

#[derive(Clone, Copy)]
enum Secrecy {
    Public,
    Private,
}

#[derive(Clone, Copy)]
enum Existing {
    Refuse,
    Replace,
}

/// Writes a file completely or not at all. The text goes to a temporary file in the same folder, which is created with the
/// final permissions. When it is complete, it replaces the file.
fn write(path: &Path, text: &str, secrecy: Secrecy, existing: Existing) -> Result<(), CertsError> {
    let mode = match secrecy {
        Secrecy::Public => 0o644,
        Secrecy::Private => 0o600,
    };
    let new = path.with_extension("pem.new");
    let fault = || file_error("write", path);
    // An interrupted run may have left a temporary file with other permissions, so it is removed first.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fault()(error)),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new).map_err(fault())?;
    file.write_all(text.as_bytes()).map_err(fault())?;
    match existing {
        Existing::Replace => fs::rename(&new, path).map_err(fault()),
        // Creating a link fails if the file has been created meanwhile; a rename would replace that file.
        Existing::Refuse => {
            let linked = fs::hard_link(&new, path).map_err(fault());
            fs::remove_file(&new).map_err(fault())?;
            linked
        }
    }
}

fn file_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CertsError {
    let path = path.to_owned();
    move |error| CertsError::File { what, path, error }
}

fn trust_domain(text: &str) -> Result<TrustDomain, String> {
    TrustDomain::parse(text).map_err(|error| error.to_string())
}

fn workload(text: &str) -> Result<Workload, String> {
    let (id, names) = text.split_once('=').unwrap_or((text, ""));
    let (namespace, service_account) = id
        .split_once('/')
        .ok_or("a workload is written as NAMESPACE/SERVICEACCOUNT, for example shop/cart")?;
    for (what, part) in [("namespace", namespace), ("service account", service_account)] {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
        if part.is_empty() || part.starts_with('.') || !part.bytes().all(legal) {
            return Err(format!("the {what} '{part}' must consist of letters, digits, '-' and '.'"));
        }
    }
    let names = names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    Ok(Workload { namespace: namespace.to_owned(), service_account: service_account.to_owned(), names })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn args(dir: &Path, more: &[&str]) -> Result<Args, clap::Error> {
        let dir = dir.to_str().expect("a UTF-8 path");
        Command::try_parse_from(["certs", "--dir", dir].iter().chain(more)).map(|command| command.args)
    }

    fn certs(dir: &Path, more: &[&str]) -> Result<String, CertsError> {
        let mut out = Vec::new();
        run(&args(dir, more).expect("legal arguments"), &mut out)?;
        Ok(String::from_utf8(out).expect("text"))
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("a file").permissions().mode() & 0o777
    }

    #[test]
    fn an_empty_folder_gets_a_ca_and_the_workloads_keys_that_only_the_owner_reads() {
        let temporary = tempfile::tempdir().expect("a folder");
        let dir = temporary.path().join("new/folder");
        let output =
            certs(&dir, &["--workload", "shop/cart=cart.example.com,10.0.0.1", "--workload", "shop/web"]);
        let output = output.expect("written");
        let mut names: Vec<_> =
            fs::read_dir(&dir).expect("a folder").map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        let expected = [
            "ca-key.pem",
            "ca.pem",
            "shop_cart-key.pem",
            "shop_cart.pem",
            "shop_web-key.pem",
            "shop_web.pem",
        ];
        assert_eq!(names, expected);
        for name in expected {
            assert_eq!(mode(&dir.join(name)), if name.contains("-key") { 0o600 } else { 0o644 }, "{name}");
            assert!(output.contains(&format!("{}  ", dir.join(name).display())), "{output}");
        }
        assert!(
            output.contains("spiffe://cluster.local/ns/shop/sa/cart, cart.example.com, 10.0.0.1, 30 days")
        );
    }

    #[test]
    fn a_second_run_keeps_the_ca_and_renews_the_workloads() {
        let dir = tempfile::tempdir().expect("a folder");
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).expect("a file");
        certs(dir.path(), &["--workload", "shop/cart"]).expect("written");
        let (authority, cart) = (read("ca.pem"), read("shop_cart.pem"));
        let output = certs(dir.path(), &["--workload", "shop/cart", "--dns", "a.example"]).expect("written");
        assert!(output.starts_with("using   "), "{output}");
        assert_eq!(read("ca.pem"), authority);
        assert_ne!(read("shop_cart.pem"), cart);
    }

    #[test]
    fn half_a_ca_is_refused_and_left_alone() {
        for (gone, kept) in [("ca.pem", "ca-key.pem"), ("ca-key.pem", "ca.pem")] {
            let dir = tempfile::tempdir().expect("a folder");
            certs(dir.path(), &[]).expect("written");
            fs::remove_file(dir.path().join(gone)).expect("removed");
            let before = fs::read(dir.path().join(kept)).expect("a file");
            let refusal = certs(dir.path(), &["--workload", "a/b"]).expect_err("refused").to_string();
            assert!(refusal.contains(&format!("{kept} exists but")), "{refusal}");
            assert!(refusal.contains(&format!("{gone} does not")), "{refusal}");
            assert_eq!(fs::read(dir.path().join(kept)).expect("a file"), before);
            assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 1);
        }
    }

    #[test]
    fn a_ca_of_another_trust_domain_or_a_strange_file_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        certs(dir.path(), &[]).expect("written");
        let refusal = certs(dir.path(), &["--trust-domain", "other.example"]).expect_err("refused");
        assert!(
            refusal.to_string().contains("not made by isthmus for the trust domain other.example"),
            "{refusal}"
        );
        fs::write(dir.path().join("ca.pem"), "nonsense").expect("written");
        let refusal = certs(dir.path(), &[]).expect_err("refused");
        assert!(
            refusal.to_string().ends_with("the CA's certificate is not a certificate in PEM"),
            "{refusal}"
        );
    }

    #[test]
    fn arguments_that_make_no_sense_are_usage_errors() {
        let dir = Path::new("unused");
        for wrong in [
            &["--workload", "cart"][..],
            &["--workload", "/cart"],
            &["--workload", "shop/"],
            &["--workload", "shop/../../etc"],
            &["--workload", "../cart"],
            &["--workload", "a_b/c"],
            &["--trust-domain", "Upper.Case"],
            &["--days", "0"],
            &["--days", "10000"],
        ] {
            assert!(args(dir, wrong).is_err(), "{wrong:?}");
        }
        let temporary = tempfile::tempdir().expect("a folder");
        let twice = certs(temporary.path(), &["--workload", "a/b=x.y", "--workload", "a/b"]);
        assert_eq!(twice.expect_err("refused").to_string(), "--workload a/b is given twice");
        let star =
            certs(temporary.path(), &["--workload", "a/b", "--dns", "*"]).expect_err("refused").to_string();
        assert!(star.starts_with("cannot make a certificate for a/b: '*' is not a DNS name: "), "{star}");
    }
}
