//! Certificates and roots in PEM files. A file is read again after each change, whether it was replaced or written in place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;

use super::certificate::{Certificate, certificates};
use super::roots::{RootList, shared, unfit, useless};
use super::server::provider;
use super::source::{Options, Sink, Source};
use super::status::{CERTIFICATE, trust_of};
use isthmus_files::file;
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
use isthmus_model::identity::TrustDomain;

/// The size limit of a PEM file in bytes.
const BYTES_MAX: u64 = 4 << 20;

/// Returns the paths that the options name.
pub(super) fn paths(options: &Options) -> Vec<PathBuf> {
    let of_peers = options.peers.iter().filter_map(|peer| peer.roots.clone());
    let mut paths: Vec<PathBuf> =
        options.trust.iter().map(|trust| trust.roots.clone()).chain(of_peers).collect();
    if let Some(Source::Files { certificate, key }) = &options.source {
        paths.extend([certificate.clone(), key.clone()]);
    }
    paths
}

/// The time limit for reading the files.
pub const READ_WITHIN: Duration = Duration::from_secs(10);
/// The largest number of reads of one source that may hang at the same time.
const READINGS: usize = 3;

/// Reads the files of one source. A read that hangs is abandoned after [`READ_WITHIN`].
#[derive(Clone)]
pub(super) struct Reader {
    options: Options,
    sink: Sink,
    readings: Readings,
}

impl Reader {
    pub(super) fn new(options: Options, sink: Sink) -> Self {
        Self { options, sink, readings: Readings::new(READINGS) }
    }

    /// Reads the files again whenever they change.
    pub(super) async fn run(self, mut watch: FileWatch) {
        loop {
            watch.changed().await;
            self.read().await;
        }
    }

    /// Reads the files and applies them. If a file cannot be read, its last contents stay in use.
    pub(super) async fn read(&self) {
        let (options, sink) = (self.options.clone(), self.sink.clone());
        if let Err(unread) = self.readings.read(READ_WITHIN, move || take_all(&options, &sink)).await {
            self.sink.failed(format!("cannot read the files of the certificate and the roots: {unread}"));
        }
    }
}

/// Applies the present contents of the files. If a file cannot be read, its last contents stay in use. Applies nothing if other
/// sources are configured meanwhile. Blocks.
pub(super) fn take_all(options: &Options, sink: &Sink) {
    let pair = match &options.source {
        Some(Source::Files { certificate, key }) => Some(read_pair(certificate, key, sink.provider())),
        Some(Source::IstioCa(_) | Source::WorkloadApi { .. }) | None => None,
    };
    let (own, peers) = (read_files(files_of(options)), read_files(files_of_peers(options)));
    if !sink.is_configured() {
        return;
    }
    match pair {
        Some(Ok(certificate)) => drop(sink.offer(certificate)),
        Some(Err(problem)) => sink.failed(problem),
        None => {}
    }
    let last = sink.store.roots.borrow().clone();
    let configured = take_roots(own, &last.configured, sink);
    let of_peers = take_roots(peers, &last.of_peers, sink);
    let published = sink.change_roots(|known| {
        let changed = known.configured != configured || known.of_peers != of_peers;
        known.configured = configured;
        known.of_peers = of_peers;
        changed
    });
    if !published && !sink.store.is_published() {
        sink.store.publish();
    }
}

fn files_of(options: &Options) -> impl Iterator<Item = (&TrustDomain, &Path)> {
    options.trust.iter().map(|file| (&file.trust_domain, file.roots.as_path()))
}

fn files_of_peers(options: &Options) -> impl Iterator<Item = (&TrustDomain, &Path)> {
    options.peers.iter().filter_map(|peer| Some((&peer.alias, peer.roots.as_deref()?)))
}

/// Reads files of roots.
fn read_files<'a>(
    files: impl Iterator<Item = (&'a TrustDomain, &'a Path)>,
) -> Vec<(&'a TrustDomain, Result<RootList, String>)> {
    files.map(|(domain, path)| (domain, read_roots(path))).collect()
}

/// Returns the roots that were read. If a file could not be read, its last contents are returned, and the problem is reported.
fn take_roots(
    files: Vec<(&TrustDomain, Result<RootList, String>)>,
    last: &BTreeMap<TrustDomain, RootList>,
    sink: &Sink,
) -> BTreeMap<TrustDomain, RootList> {
    let mut taken = BTreeMap::new();
    for (domain, read) in files {
        let of = trust_of(domain);
        match read {
            Ok(roots) => {
                sink.store.solved(&of);
                taken.insert(domain.clone(), roots);
            }
            Err(problem) => {
                if let Some(last) = last.get(domain) {
                    taken.insert(domain.clone(), last.clone());
                }
                sink.store.problem(&of, problem);
            }
        }
    }
    taken
}

/// Returns the problems of the files, each with its subject: the certificate, or the roots of a trust domain.
pub fn problems(options: &Options) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    if let Some(Source::Files { certificate, key }) = &options.source {
        let problem = match read_pair(certificate, key, &provider()) {
            Ok(found) => found.is_not_of(options.expected.as_ref()).or_else(|| {
                let fault = found.validity.fault(SystemTime::now())?;
                Some(format!("{}: the certificate {fault}", certificate.display()))
            }),
            Err(problem) => Some(problem),
        };
        problems.extend(problem.map(|problem| (CERTIFICATE.to_owned(), problem)));
    }
    let is_of_peer = |domain: &TrustDomain| options.peers.iter().any(|peer| peer.alias == *domain);
    let mut read: Vec<(&TrustDomain, Vec<CertificateDer<'static>>)> = Vec::new();
    for (domain, path) in files_of(options).chain(files_of_peers(options)) {
        match read_roots(path) {
            Ok(roots) => {
                let fault = match is_of_peer(domain) {
                    true => useless(&roots, SystemTime::now()),
                    false => unfit(&roots),
                };
                problems
                    .extend(fault.map(|fault| (trust_of(domain), format!("{}: {fault}", path.display()))));
                read.push((domain, roots));
            }
            Err(problem) => problems.push((trust_of(domain), problem)),
        }
    }
    // Only shared roots of peers are a problem. Trust domains of this mesh may share roots, for example while a new trust
    // domain replaces an old one.
    let found = shared(read.iter().map(|(domain, roots)| (*domain, roots)));
    let found = found.into_iter().filter(|(domain, _)| is_of_peer(domain));
    problems.extend(found.map(|(domain, problem)| (trust_of(&domain), problem)));
    problems
}

fn read_pair(certificate: &Path, key: &Path, provider: &Arc<CryptoProvider>) -> Result<Certificate, String> {
    let (chain, secret) = (read(certificate)?, read(key)?);
    Certificate::from_pem(&chain, &secret, provider)
        .map_err(|fault| format!("{} with {}: {fault}", certificate.display(), key.display()))
}

/// Reads the roots of a PEM file of at most 4 MiB; an error names the file and what is wrong with it. Blocks.
pub fn read_roots(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    certificates(&read(path)?).map_err(|fault| format!("{}: {fault}", path.display()))
}

/// Reads a file of at most [`BYTES_MAX`] bytes.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    file::read(path, BYTES_MAX).map_err(|fault| format!("{}: {fault}", path.display()))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use crate::development::Authority;
    use crate::source::TrustFile;

    #[test]
    fn a_certificate_that_an_authority_issued_is_no_root() {
        let folder = tempfile::tempdir().expect("a folder");
        let roots = folder.path().join("roots.pem");
        let trust_domain = TrustDomain::parse("td").expect("legal");
        let authority = Authority::new(trust_domain.clone()).expect("a CA");
        let identity = authority.identity("shop", "cart").expect("legal");
        let issued = authority.issue(&identity, &[], 1).expect("issued").certificate_pem;
        let key = KeyPair::generate().expect("a key");
        let alone =
            CertificateParams::new(Vec::new()).and_then(|of| of.self_signed(&key)).expect("signed").pem();
        let options =
            Options { trust: vec![TrustFile { trust_domain, roots: roots.clone() }], ..Options::default() };
        let found = |pem: &str| {
            std::fs::write(&roots, pem).expect("written");
            problems(&options)
        };
        assert_eq!(found(authority.certificate_pem()), []);
        assert_eq!(found(&alone), [], "a self-signed certificate can be the root of itself");
        let both = [authority.certificate_pem(), &issued].concat();
        let [(subject, problem)] = &found(&both)[..] else { panic!("one problem") };
        assert_eq!(subject, "trust of td");
        assert!(
            problem.contains("certificate 2 (") && problem.contains("is not a CA certificate"),
            "{problem}"
        );
    }
}
