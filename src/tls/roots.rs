//! All known roots by source, and the one place that makes the trust bundles from them. The sources are files, the source of
//! this gateway's certificate, and the announcements of peers over their links.
//!
//! For a peer, the announced roots are in use if the peer's file has not changed since the announcement, otherwise the roots of
//! the file. A root belongs to one bundle only. A peer's bundle that contains a root of another bundle, or a root that cannot
//! be used, is not applied, and the peer's last good bundle stays in use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::{limits_uris, pem};
use super::pinned::{Hash, sha256};
use super::server::provider;
use super::status::{IN_USE, SourceStatus, trust_of};
use super::trust::{Bundle, CrlList, Owner, TrustBundles};
use isthmus_model::identity::TrustDomain;
use isthmus_tasks::latest::{Latest, LatestWriter};
use isthmus_telemetry::clock::rfc3339;

/// The largest number of roots that a peer may announce.
pub const ANNOUNCED_MAX: usize = 16;
/// The largest size of the roots that a peer may announce together, in bytes.
pub const ANNOUNCED_BYTES_MAX: usize = 64 * 1024;

/// The roots of one trust domain.
pub(super) type RootList = Vec<CertificateDer<'static>>;

/// The trust domain of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTrust {
    /// The peer.
    pub peer: Arc<str>,
    /// The alias: our name for the peer's trust domain, under which this mesh knows the peer's identities.
    pub alias: TrustDomain,
    /// The trust domain that the peer's certificates name.
    pub trust_domain: TrustDomain,
    /// The PEM file of the peer's roots; `None`: only announced roots are used.
    pub roots: Option<PathBuf>,
    /// True if the file is that of an enrolment, in the state folder.
    pub is_enrolled: bool,
}

/// All roots, by the source that they come from.
#[derive(Clone, Debug, Default)]
pub(super) struct Roots {
    /// Roots from files, for this mesh's trust domains.
    pub(super) configured: BTreeMap<TrustDomain, RootList>,
    /// The revocation lists of this mesh's trust domains that have a file of them; `None`: it could not be read yet, so that the roots
    /// of the domain are not used.
    pub(super) crls: BTreeMap<TrustDomain, Option<CrlList>>,
    /// Roots that the source of the certificate has provided.
    pub(super) supplied: BTreeMap<TrustDomain, RootList>,
    /// The peers, in the order of the config.
    pub(super) peers: Vec<PeerTrust>,
    /// Roots from files, for peers, by alias.
    pub(super) of_peers: BTreeMap<TrustDomain, RootList>,
    /// Roots that peers have announced, by alias.
    announced: BTreeMap<TrustDomain, Announced>,
    /// The number of times that the sources were configured. Contents that a former source provides late are not applied.
    pub(super) configurations: u64,
}

/// The roots that a peer has announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) roots: RootList,
    /// The hash of the roots in the peer's file at the time of the announcement. If the hash of the file differs, the operator
    /// has replaced the file later, and the file takes precedence.
    pub(super) base: Hash,
    /// True if there has been no link with the peer for so long that it may have withdrawn the roots.
    pub(super) is_unconfirmed: bool,
}

/// Keeps the roots and publishes the trust bundles.
#[derive(Clone, Debug)]
pub struct RootStore {
    pub(super) roots: watch::Sender<Roots>,
    pub(super) status: watch::Sender<SourceStatus>,
    pub(super) provider: Arc<CryptoProvider>,
    trust: LatestWriter<TrustBundles>,
    /// The lock that a thread holds while it makes and publishes bundles. Without the lock, bundles with older roots could be
    /// published last.
    publishing: Arc<Mutex<()>>,
}

impl Default for RootStore {
    fn default() -> Self {
        Self {
            roots: watch::Sender::new(Roots::default()),
            status: watch::Sender::new(SourceStatus::default()),
            provider: provider(),
            trust: LatestWriter::default(),
            publishing: Arc::default(),
        }
    }
}

impl RootStore {
    /// Returns a store with these roots of this mesh.
    #[cfg(any(test, feature = "testing"))]
    pub fn of(configured: BTreeMap<TrustDomain, RootList>) -> Self {
        let store = Self::default();
        store.roots.send_modify(|roots| roots.configured = configured);
        store.publish();
        store
    }

    /// Returns a reader of the trust bundles.
    pub fn reader(&self) -> Latest<TrustBundles> {
        self.trust.reader()
    }

    /// Replaces the roots that a peer has announced. During a rotation a peer announces the old and the new root, and later the
    /// new root alone. With an empty list, the roots of the peer's file are in use again. Connections end if the new roots do
    /// not verify their certificates. An error says what is wrong with the roots; nothing changes then.
    pub fn announce(&self, alias: &TrustDomain, roots: RootList) -> Result<(), String> {
        if self.take(alias, roots, None)? {
            tracing::info!(%alias, "the peer announced other roots over its link");
        }
        self.solved(&kept_text(alias));
        Ok(())
    }

    /// Marks the roots that a peer has announced as out of date, until the peer announces roots again. Connections of the peer's
    /// callers end. Roots of the peer's file stay in use if nothing was announced.
    pub fn suspend(&self, alias: &TrustDomain) {
        let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let suspended = self.roots.send_if_modified(|known| match known.announced.get_mut(alias) {
            Some(announced) => !std::mem::replace(&mut announced.is_unconfirmed, true),
            None => false,
        });
        if suspended {
            tracing::warn!(%alias, "there was no link with the peer for expireAfter, so its HBONE callers are refused");
            self.make();
        }
    }

    /// Sets the roots that a peer announced to an earlier process, unless the peer's file has changed since then. An error says
    /// what is wrong with the roots.
    pub(super) fn restore(&self, alias: &TrustDomain, announced: Announced) -> Result<(), String> {
        self.take(alias, announced.roots, Some(announced.base)).map(drop)
    }

    /// Sets announced roots. With `of_base`, they are set only if the peer's file has that hash. Returns true if they
    /// differ from the roots in use, which are those of the peer's file if the peer has announced none.
    fn take(&self, alias: &TrustDomain, roots: RootList, of_base: Option<Hash>) -> Result<bool, String> {
        let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.roots.borrow().clone();
        let Some(peer) = known.peers.iter().find(|peer| peer.alias == *alias) else {
            return Err(format!("no peer has the trust domain {alias}"));
        };
        self.check(alias, None, &roots)?;
        if !roots.is_empty() {
            let owner = Owner::Peer { named: peer.trust_domain.clone() };
            Bundle::new(alias, owner, roots.clone(), CrlList::new(), &self.provider)
                .map_err(|fault| fault.to_string())?;
        }
        let base = base(known.of_peers.get(alias));
        if of_base.is_some_and(|of_base| of_base != base) {
            return Ok(false);
        }
        let next = (!roots.is_empty()).then_some(Announced { roots, base, is_unconfirmed: false });
        let of_file = known.of_peers.get(alias);
        let used = known.announced.get(alias).map(|announced| &announced.roots).or(of_file);
        let differs = used.map(ders) != next.as_ref().map(|announced| &announced.roots).or(of_file).map(ders);
        let changed = self.roots.send_if_modified(|known| {
            let before = known.announced.remove(alias);
            let changed = before != next;
            known.announced.extend(next.map(|next| (alias.clone(), next)));
            changed
        });
        if changed {
            self.make();
        }
        Ok(differs)
    }

    /// Checks the roots that a peer sends for its trust domain, whose alias is `alias`. They may be roots of `replaced`, the
    /// alias of the peer's earlier trust domain. An error says what is wrong with the roots.
    pub fn check(
        &self,
        alias: &TrustDomain,
        replaced: Option<&TrustDomain>,
        roots: &[CertificateDer<'static>],
    ) -> Result<(), String> {
        let keys = check_announced(roots, &self.provider)?;
        let known = self.roots.borrow();
        let taken = known.others(alias, replaced).find_map(|(other, theirs)| {
            let theirs = keys_of(theirs);
            keys.iter().position(|key| theirs.contains(key)).map(|at| (at + 1, other))
        });
        match taken {
            Some((at, other)) => Err(format!(
                "root {at} is also a root of the trust domain {other}; a root can belong to one trust domain only"
            )),
            None => Ok(()),
        }
    }

    /// Returns the roots that a peer announced last; empty if it has announced no roots.
    pub fn announced(&self, alias: &TrustDomain) -> RootList {
        self.roots.borrow().announced.get(alias).map(|announced| announced.roots.clone()).unwrap_or_default()
    }

    pub(super) fn problem(&self, of: &str, problem: String) {
        tracing::warn!(of, "cannot renew this gateway's certificate or roots: {problem}");
        self.status.send_modify(|status| drop(status.problems.insert(of.to_owned(), problem)));
    }

    pub(super) fn solved(&self, of: &str) {
        self.status.send_if_modified(|status| status.problems.remove(of).is_some());
    }

    /// Returns true if bundles were published.
    pub(super) fn is_published(&self) -> bool {
        self.trust.newest().is_some()
    }

    /// Applies all known roots. If a root of this mesh cannot be used, the bundles in use stay.
    pub(super) fn publish(&self) {
        let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        self.make();
    }

    /// Makes and publishes the bundles. The caller holds `publishing`.
    fn make(&self) {
        let roots = self.roots.borrow().clone();
        let aliases: BTreeSet<&TrustDomain> = roots.peers.iter().map(|peer| &peer.alias).collect();
        let mut domains = roots.supplied.clone();
        domains.extend(roots.configured.clone());
        domains.retain(|domain, _| !aliases.contains(domain) && roots.crls.get(domain) != Some(&None));
        let mut taken: BTreeMap<Vec<u8>, TrustDomain> = BTreeMap::new();
        for (domain, list) in &domains {
            taken.extend(keys_of(list).into_iter().map(|key| (key, domain.clone())));
        }
        let crls = |domain: &TrustDomain| roots.crls.get(domain).cloned().flatten().unwrap_or_default();
        let mut bundles = match TrustBundles::with_crls(domains, crls, &self.provider) {
            Ok(bundles) => bundles,
            Err(fault) => return self.problem("trust", fault.to_string()),
        };
        self.solved("trust");
        let before = self.trust.newest();
        for peer in &roots.peers {
            let last = before.as_ref().and_then(|before| before.bundle(&peer.alias)).cloned();
            self.add_peer(peer, &roots, last, &mut taken, &mut bundles);
        }
        let unfiled = roots.unfiled();
        self.status.send_if_modified(|status| {
            let before = std::mem::replace(&mut status.unfiled, unfiled);
            before != status.unfiled
        });
        self.trust.set(Arc::new(bundles));
    }

    /// Adds the bundle of a peer, or its last good bundle if the roots cannot be used.
    fn add_peer(
        &self,
        peer: &PeerTrust,
        roots: &Roots,
        last: Option<Arc<Bundle>>,
        taken: &mut BTreeMap<Vec<u8>, TrustDomain>,
        bundles: &mut TrustBundles,
    ) {
        let (alias, of) = (&peer.alias, roots_text(&peer.alias));
        let owner = Owner::Peer { named: peer.trust_domain.clone() };
        let Some((list, is_unconfirmed)) = roots.of_peer(alias) else { return self.solved(&of) };
        let free = |list: &[CertificateDer<'static>]| {
            let other = keys_of(list).iter().find_map(|key| taken.get(key).cloned());
            other.map_or(Ok(()), |other| {
                Err(format!("one of these roots is also a root of the trust domain {other}"))
            })
        };
        let made = free(list).and_then(|()| {
            // An unchanged bundle is shared, so that readers can tell that it is unchanged.
            let is_same = |last: &&Arc<Bundle>| {
                last.roots == *list && last.owner == owner && last.is_unconfirmed == is_unconfirmed
            };
            if let Some(same) = last.as_ref().filter(is_same) {
                return Ok(same.clone());
            }
            Bundle::new(alias, owner.clone(), list.clone(), CrlList::new(), &self.provider)
                .map(|bundle| Arc::new(bundle.unconfirmed(is_unconfirmed)))
                .map_err(|fault| fault.to_string())
        });
        let bundle = match made {
            Ok(bundle) => {
                self.solved(&of);
                bundle
            }
            Err(fault) => {
                self.problem(&of, format!("the roots of the peer {} cannot be used: {fault}", peer.peer));
                let usable = |last: &Arc<Bundle>| last.owner == owner && free(&last.roots).is_ok();
                let Some(last) = last.filter(usable) else { return };
                last
            }
        };
        taken.extend(keys_of(&bundle.roots).into_iter().map(|key| (key, alias.clone())));
        bundles.add_peer(alias, bundle);
    }
}

/// Returns the key in [`SourceStatus::problems`] of a problem with the roots that a peer announced to an earlier process.
pub(super) fn kept_text(alias: &TrustDomain) -> String {
    format!("{} (stored roots)", trust_of(alias))
}

/// Returns the hash of the roots of a peer's file.
fn base(roots: Option<&RootList>) -> Hash {
    sha256(pem(roots.map(Vec::as_slice).unwrap_or_default()).as_bytes())
}

/// Returns the key under which a problem with the roots in use of a peer is reported.
fn roots_text(alias: &TrustDomain) -> String {
    format!("{}{IN_USE}", trust_of(alias))
}

impl Roots {
    /// Replaces the peers. Roots of peers that are not in the list are removed.
    pub(super) fn set_peers(&mut self, peers: &[PeerTrust]) {
        let has = |alias: &TrustDomain| peers.iter().any(|peer| peer.alias == *alias);
        self.of_peers.retain(|alias, _| has(alias));
        self.announced.retain(|alias, _| has(alias));
        self.peers = peers.to_vec();
    }

    /// Returns each peer with its announced roots; `None`: it has announced no roots.
    pub(super) fn announced_by(&self) -> impl Iterator<Item = (&PeerTrust, Option<&Announced>)> {
        self.peers.iter().map(|peer| (peer, self.announced.get(&peer.alias)))
    }

    /// Returns the roots in use for a peer: the announced roots, or the roots of the peer's file if nothing was announced or if
    /// the file has changed since the announcement; and whether they are announced and out of date.
    fn of_peer(&self, alias: &TrustDomain) -> Option<(&RootList, bool)> {
        let of_file = self.of_peers.get(alias);
        let announced = self.announced.get(alias).filter(|announced| announced.base == base(of_file));
        let announced = announced.map(|announced| (&announced.roots, announced.is_unconfirmed));
        announced.or_else(|| of_file.map(|roots| (roots, false)))
    }

    /// Returns the peers that have announced a root which the operator's file does not have, each with this file.
    fn unfiled(&self) -> BTreeMap<Arc<str>, PathBuf> {
        let one = |peer: &PeerTrust| {
            let file = peer.roots.clone().filter(|_| !peer.is_enrolled)?;
            let (used, _) = self.of_peer(&peer.alias)?;
            let filed = self.of_peers.get(&peer.alias)?;
            used.iter().any(|root| !filed.contains(root)).then(|| (peer.peer.clone(), file))
        };
        self.peers.iter().filter_map(one).collect()
    }

    /// Returns the roots of all trust domains except `alias` and `replaced`, whether the roots are in use or not. `replaced` is
    /// the alias of a peer.
    fn others(
        &self,
        alias: &TrustDomain,
        replaced: Option<&TrustDomain>,
    ) -> impl Iterator<Item = (&TrustDomain, &RootList)> {
        let own = [&self.configured, &self.supplied].into_iter().flatten();
        let announced = self.announced.iter().map(|(domain, announced)| (domain, &announced.roots));
        let of_peers =
            self.of_peers.iter().chain(announced).filter(move |(domain, _)| Some(*domain) != replaced);
        own.chain(of_peers).filter(move |(domain, _)| *domain != alias)
    }
}

/// Returns a problem for each root in a file that is also in a file of another trust domain.
pub(super) fn shared<'a>(
    files: impl Iterator<Item = (&'a TrustDomain, &'a RootList)>,
) -> Vec<(TrustDomain, String)> {
    let mut taken: BTreeMap<Vec<u8>, &TrustDomain> = BTreeMap::new();
    let mut problems = Vec::new();
    for (domain, list) in files {
        for (at, key) in keys_of(list).into_iter().enumerate() {
            match taken.get(&key) {
                Some(other) if *other != domain => {
                    let text = format!("root {} is also a root of the trust domain {other}", at + 1);
                    problems.push((domain.clone(), text));
                }
                Some(_) | None => drop(taken.insert(key, domain)),
            }
        }
    }
    problems
}

/// Returns the fault of a file that contains a peer's roots: a certificate in the file is not that of an authority (often it is
/// that of a gateway), or has name constraints for URIs, or all roots in the file have expired. An expired root beside a valid
/// one is no fault.
pub(super) fn useless(roots: &[CertificateDer<'static>], now: SystemTime) -> Option<String> {
    let mut expired = None;
    let mut has_valid = false;
    for (at, root) in roots.iter().enumerate() {
        let number = at + 1;
        let Ok((_, parsed)) = X509Certificate::from_der(root) else {
            return Some(format!("certificate {number} cannot be read"));
        };
        if !parsed.is_ca() {
            return Some(no_authority(number, &parsed, "peer"));
        }
        if limits_uris(root) {
            return Some(constrained(number, &parsed));
        }
        let until =
            UNIX_EPOCH + Duration::from_secs(parsed.validity().not_after.timestamp().try_into().unwrap_or(0));
        if until > now {
            has_valid = true;
        } else {
            expired = expired.max(Some(until));
        }
    }
    expired.filter(|_| !has_valid).map(|until| {
        format!("all root certificates in the file have expired, the last one at {}", rfc3339(until))
    })
}

/// Returns the fault of a file that contains roots of this mesh: a certificate in the file has name constraints for URIs, or was
/// issued by an authority and is not that of an authority itself. Roots are not asked for the CA bit when a certificate is
/// verified (webpki takes the name and key of any certificate as a trust anchor), so a self-signed certificate without it
/// verifies at least itself.
pub(super) fn unfit(roots: &[CertificateDer<'static>]) -> Option<String> {
    roots.iter().enumerate().find_map(|(at, root)| {
        let number = at + 1;
        let Ok((_, parsed)) = X509Certificate::from_der(root) else {
            return Some(format!("certificate {number} cannot be read"));
        };
        if limits_uris(root) {
            return Some(constrained(number, &parsed));
        }
        let is_root = parsed.is_ca() || parsed.subject() == parsed.issuer();
        (!is_root).then(|| no_authority(number, &parsed, "trust domain"))
    })
}

fn constrained(number: usize, certificate: &X509Certificate<'_>) -> String {
    format!(
        "certificate {number} ({}) has name constraints for URIs, which are not supported, so it cannot verify a SPIFFE ID",
        certificate.subject()
    )
}

fn no_authority(number: usize, certificate: &X509Certificate<'_>, of: &str) -> String {
    format!(
        "certificate {number} ({}) is not a CA certificate, so it cannot verify others; expected the root certificates of the {of}",
        certificate.subject()
    )
}

/// Returns the certificates as a set, whatever their order.
fn ders(roots: &RootList) -> BTreeSet<&[u8]> {
    roots.iter().map(|root| root.as_ref()).collect()
}

/// Returns the public keys of roots, because two certificates with one key are one authority. For a root that cannot be parsed,
/// returns the bytes of the whole certificate.
fn keys_of(roots: &[CertificateDer<'static>]) -> Vec<Vec<u8>> {
    let key = |root: &CertificateDer<'static>| match X509Certificate::from_der(root) {
        Ok((_, parsed)) => parsed.public_key().raw.to_vec(),
        Err(_) => root.to_vec(),
    };
    roots.iter().map(key).collect()
}

/// Returns the public keys of the roots that a peer announces, or what is wrong with the roots. Each root must be self-signed,
/// which proves that its issuer has the key. Otherwise a peer could announce the key of another authority under a different
/// name.
fn check_announced(
    roots: &[CertificateDer<'static>],
    provider: &CryptoProvider,
) -> Result<Vec<Vec<u8>>, String> {
    let bytes: usize = roots.iter().map(|root| root.len()).sum();
    if roots.len() > ANNOUNCED_MAX || bytes > ANNOUNCED_BYTES_MAX {
        return Err(format!(
            "there are {} roots of {bytes} bytes, but at most {ANNOUNCED_MAX} roots of {ANNOUNCED_BYTES_MAX} bytes are allowed",
            roots.len()
        ));
    }
    for (at, root) in roots.iter().enumerate() {
        let number = at + 1;
        let (rest, parsed) =
            X509Certificate::from_der(root).map_err(|_| format!("root {number} cannot be read"))?;
        if !rest.is_empty() {
            return Err(format!("root {number} has bytes after its end"));
        }
        if !parsed.is_ca() || parsed.subject() != parsed.issuer() || !has_signed_itself(&parsed, provider) {
            return Err(format!("root {number} is not a self-signed CA certificate"));
        }
    }
    Ok(keys_of(roots))
}

fn has_signed_itself(certificate: &X509Certificate<'_>, provider: &CryptoProvider) -> bool {
    let key = &certificate.public_key().subject_public_key.data;
    let (message, signature) = (certificate.tbs_certificate.as_ref(), &certificate.signature_value.data);
    // Each algorithm refuses keys of other kinds, so that the matching algorithm need not be looked up.
    let mut all = provider.signature_verification_algorithms.all.iter();
    all.any(|algorithm| algorithm.verify_signature(key, message, signature).is_ok())
}

#[cfg(test)]
mod tests;
