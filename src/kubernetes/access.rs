//! Reads the address and the credentials of an API server. They are read repeatedly, because tokens and kubeconfigs are renewed
//! while the process runs.

use std::env;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::credentials::{Access, Identification, Server};
use super::kubeconfig;
use isthmus_aggregator::spec::kubernetes::AccessSpec;
use isthmus_files::file;
use isthmus_files::reading::{ReadError, Readings};
use isthmus_model::address::{Host, Scheme, Url};
use isthmus_tls::files::{READ_WITHIN, read_roots};

/// The folder in which a pod finds its service account's token and CA.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The largest size of a token file, in bytes.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// Credentials that were read, and a digest by which two readings are compared.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) access: Access,
    pub(super) digest: u64,
}

/// Reads the credentials; the errors are a line each.
pub(super) async fn find(spec: &AccessSpec, readings: &Readings) -> Result<Found, Vec<String>> {
    let spec = spec.clone();
    let unread =
        |unread: ReadError| Err(vec![format!("the credentials for the API server cannot be read: {unread}")]);
    readings.read(READ_WITHIN, move || read(&spec)).await.unwrap_or_else(unread)
}

fn read(spec: &AccessSpec) -> Result<Found, Vec<String>> {
    match spec {
        AccessSpec::ServiceAccount => {
            of_service_account(Path::new(SERVICE_ACCOUNT)).map_err(|fault| vec![fault])
        }
        AccessSpec::Kubeconfig { path, context, token_file } => {
            of_kubeconfig(path, context.as_deref(), token_file.as_ref())
        }
        AccessSpec::Found(found) => {
            let text = found.text();
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            let access = kubeconfig::read(Path::new(&*found.name), &text, None, false)?;
            Ok(Found { access, digest: hasher.finish() })
        }
        AccessSpec::Unknown => {
            let fault = "the cluster is known only from its last good copy, because the source of its kubeconfig was not read \
                         since the start; the warnings of `isthmus status` name the cause";
            Err(vec![fault.to_owned()])
        }
    }
}

fn of_kubeconfig(
    path: &Path,
    context: Option<&str>,
    token_file: Option<&PathBuf>,
) -> Result<Found, Vec<String>> {
    let fault = |fault: &dyn std::fmt::Display| vec![format!("kubeconfig {}: {fault}", path.display())];
    let bytes = file::read(path, kubeconfig::BYTES_MAX).map_err(|error| fault(&error))?;
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let text = String::from_utf8(bytes).map_err(|_| fault(&"the file is not UTF-8"))?;
    let with_token = token_file.map(|path| token(path)).transpose().map_err(|fault| vec![fault])?;
    with_token.hash(&mut hasher);
    let mut access = kubeconfig::read(path, &text, context, with_token.is_some())?;
    if with_token.is_some() {
        access.identification.token = with_token;
    }
    Ok(Found { access, digest: hasher.finish() })
}

fn of_service_account(folder: &Path) -> Result<Found, String> {
    let variable = |name: &str| {
        env::var(name).map_err(|_| {
            format!("{name} is not set, because this process does not run in a pod; set `kubeconfig`")
        })
    };
    let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
    let host = Host::parse(&host).map_err(|error| format!("KUBERNETES_SERVICE_HOST is {host:?}: {error}"))?;
    let port =
        port.parse().map_err(|_| format!("KUBERNETES_SERVICE_PORT is {port:?}, which is not a port"))?;
    let token = token(&folder.join("token"))?;
    let roots = read_roots(&folder.join("ca.crt"))?;
    let mut hasher = DefaultHasher::new();
    token.hash(&mut hasher);
    roots.iter().for_each(|root| root.as_ref().hash(&mut hasher));
    let server = Server { address: Url { scheme: Scheme::Https, host, port }, path: String::new() };
    server.hash(&mut hasher);
    let identification = Identification { token: Some(token), own: None, impersonation: Vec::new() };
    Ok(Found { access: Access { server, roots, server_name: None, identification }, digest: hasher.finish() })
}

/// Returns the token in a file, without the white space at its end.
fn token(path: &Path) -> Result<String, String> {
    let named = |fault: &dyn std::fmt::Display| format!("token {}: {fault}", path.display());
    let bytes = file::read(path, TOKEN_BYTES_MAX).map_err(|fault| named(&fault))?;
    let text = String::from_utf8(bytes).map_err(|_| named(&"the file is not UTF-8"))?;
    let text = text.trim_end();
    if text.is_empty() { Err(named(&"the file is empty")) } else { Ok(text.to_owned()) }
}
