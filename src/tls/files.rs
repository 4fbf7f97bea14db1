//! Certificates and roots in PEM files. A file is read again after each change, whether it was replaced or written in place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{CertificateRevocationList, FromDer};

use super::certificate::{Certificate, certificates};
use super::roots::{shared, unfit, useless};
use super::server::provider;
use super::source::{Options, Sink, Source};
use super::status::{CERTIFICATE, crl_of, trust_of};
use super::trust::CrlList;
use isthmus_files::file;
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
use isthmus_model::identity::TrustDomain;
use isthmus_telemetry::clock::rfc3339;

/// The size limit of a PEM file in bytes.
const BYTES_MAX: u64 = 4 << 20;

/// Returns the paths that the options name.
pub(super) fn paths(options: &Options) -> Vec<PathBuf> {
    let of_peers = options.peers.iter().filter_map(|peer| peer.roots.clone());
    let own = options.trust.iter().flat_map(|trust| trust.roots.iter().chain(&trust.crl)).cloned();
    let mut paths: Vec<PathBuf> = own.chain(of_peers).collect();
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
    let (own, peers) =
        (read_files(files_of(options), read_roots), read_files(files_of_peers(options), read_roots));
    let lists = read_files(crls_of(options), read_crls);
    if !sink.is_configured() {
        return;
    }
    match pair {
        Some(Ok(certificate)) => drop(sink.offer(certificate)),
        Some(Err(problem)) => sink.failed(problem),
        None => {}
    }
    let last = sink.store.roots.borrow().clone();
    let configured = take_files(own, |domain| last.configured.get(domain), trust_of, sink);
    let of_peers = take_files(peers, |domain| last.of_peers.get(domain), trust_of, sink);
    let read = take_files(lists, |domain| last.crls.get(domain)?.as_ref(), crl_of, sink);
    let crls: BTreeMap<_, _> =
        crls_of(options).map(|(domain, _)| (domain.clone(), read.get(domain).cloned())).collect();
    let published = sink.change_roots(|known| {
        let changed = known.configured != configured || known.of_peers != of_peers || known.crls != crls;
        known.configured = configured;
        known.of_peers = of_peers;
        known.crls = crls;
        changed
    });
    if !published && !sink.store.is_published() {
        sink.store.publish();
    }
}

/// Returns the files of the roots of this mesh.
pub(super) fn files_of(options: &Options) -> impl Iterator<Item = (&TrustDomain, &Path)> {
    options.trust.iter().filter_map(|file| Some((&file.trust_domain, file.roots.as_deref()?)))
}

fn crls_of(options: &Options) -> impl Iterator<Item = (&TrustDomain, &Path)> {
    options.trust.iter().filter_map(|file| Some((&file.trust_domain, file.crl.as_deref()?)))
}

fn files_of_peers(options: &Options) -> impl Iterator<Item = (&TrustDomain, &Path)> {
    options.peers.iter().filter_map(|peer| Some((&peer.alias, peer.roots.as_deref()?)))
}

/// Reads the files of trust domains.
fn read_files<'a, T>(
    files: impl Iterator<Item = (&'a TrustDomain, &'a Path)>,
    read: impl Fn(&Path) -> Result<T, String>,
) -> Vec<(&'a TrustDomain, Result<T, String>)> {
    files.map(|(domain, path)| (domain, read(path))).collect()
}

/// Returns the contents that were read. If a file could not be read, its last contents are returned, and the problem is reported under
/// the key `of`.
fn take_files<'l, T: Clone + 'l>(
    files: Vec<(&TrustDomain, Result<T, String>)>,
    last: impl Fn(&TrustDomain) -> Option<&'l T>,
    of: impl Fn(&TrustDomain) -> String,
    sink: &Sink,
) -> BTreeMap<TrustDomain, T> {
    let mut taken = BTreeMap::new();
    for (domain, read) in files {
        match read {
            Ok(contents) => {
                sink.store.solved(&of(domain));
                taken.insert(domain.clone(), contents);
            }
            Err(problem) => {
                if let Some(last) = last(domain) {
                    taken.insert(domain.clone(), last.clone());
                }
                sink.store.problem(&of(domain), problem);
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
    for (domain, path) in crls_of(options) {
        let fault = match read_crls(path) {
            Ok(lists) => {
                outdated(&lists, SystemTime::now()).map(|fault| format!("{}: {fault}", path.display()))
            }
            Err(fault) => Some(fault),
        };
        problems.extend(fault.map(|fault| (crl_of(domain), fault)));
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

/// Reads the revocation lists of a file of at most 4 MiB, in PEM or, for a single one, in DER; an error names the file and what is wrong
/// with it. Blocks.
fn read_crls(path: &Path) -> Result<CrlList, String> {
    let bytes = read(path)?;
    let at = |fault: String| format!("{}: {fault}", path.display());
    let lists: CrlList = if bytes.first() == Some(&DER_SEQUENCE) {
        vec![bytes.into()]
    } else {
        let lists = CertificateRevocationListDer::pem_slice_iter(&bytes).collect::<Result<_, _>>();
        lists.map_err(|error| at(format!("the PEM is malformed: {error}")))?
    };
    if lists.is_empty() {
        return Err(at("it has no certificate revocation list (X509 CRL)".to_owned()));
    }
    for (index, list) in lists.iter().enumerate() {
        let parsed = CertificateRevocationList::from_der(list);
        if !parsed.is_ok_and(|(rest, _)| rest.is_empty()) {
            return Err(at(format!("certificate revocation list {} cannot be read", index + 1)));
        }
    }
    Ok(lists)
}

/// The first byte of a structure in DER.
const DER_SEQUENCE: u8 = 0x30;

/// Returns the fault that a list should have been replaced by a newer one. It stays in use.
fn outdated(lists: &CrlList, now: SystemTime) -> Option<String> {
    lists.iter().enumerate().find_map(|(at, list)| {
        let (_, parsed) = CertificateRevocationList::from_der(list).ok()?;
        let next = UNIX_EPOCH + Duration::from_secs(parsed.next_update()?.timestamp().try_into().unwrap_or(0));
        let text = format!(
            "certificate revocation list {} should have been replaced at {}, so it may lack revoked certificates",
            at + 1,
            rfc3339(next)
        );
        (next <= now).then_some(text)
    })
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
        let options = Options {
            trust: vec![TrustFile { trust_domain, roots: Some(roots.clone()), crl: None }],
            ..Options::default()
        };
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
