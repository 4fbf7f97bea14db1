//! All known roots by their source, and the one place that makes the trust bundles of them: files, the source of this gateway's
//! certificate, and what peers announce over their links.
//!
//! The roots of a peer in use are those that it has announced since its file changed, if there are any, else those of its file.
//! A root is of one bundle only: a bundle of a peer with a root of another bundle, or with one that cannot be used, is not
//! applied, and the last good one of that peer stays.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::pem;
use super::pinned::{Hash, sha256};
use super::server::provider;
use super::status::{SourceStatus, trust_of};
use super::trust::{Bundle, Owner, TrustBundles};
use crate::model::identity::TrustDomain;
use crate::net::latest::{Latest, LatestWriter};
use crate::telemetry::clock::rfc3339;

/// The largest number of roots that a peer may announce.
pub const ANNOUNCED_MAX: usize = 16;
/// The largest size of the roots that a peer may announce together, in bytes.
pub const ANNOUNCED_BYTES_MAX: usize = 64 * 1024;

type RootList = Vec<CertificateDer<'static>>;

/// The trust domain of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTrust {
    /// The peer.
    pub peer: Arc<str>,
    /// Our name for its trust domain: its identities are known under it.
    pub alias: TrustDomain,
    /// The trust domain that its certificates name.
    pub trust_domain: TrustDomain,
    /// A PEM file of its roots; `None`: it has only those that it announces.
    pub roots: Option<PathBuf>,
}

/// All known roots by source.
#[derive(Clone, Debug, Default)]
pub(super) struct Roots {
    /// Those of files for this mesh's trust domains.
    pub(super) configured: BTreeMap<TrustDomain, RootList>,
    /// Those that the certificate's source has given.
    pub(super) supplied: BTreeMap<TrustDomain, RootList>,
    /// The peers, in the order of the file.
    pub(super) peers: Vec<PeerTrust>,
    /// Those of files for peers, by alias.
    pub(super) of_peers: BTreeMap<TrustDomain, RootList>,
    /// Those that peers have announced, by alias.
    announced: BTreeMap<TrustDomain, Announced>,
}

/// The roots that a peer has announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) roots: RootList,
    /// The hash of the roots of its file at that time. A file with other roots counts more: the operator has replaced it since.
    pub(super) base: Hash,
}

/// Keeps the roots and publishes the trust bundles.
#[derive(Clone, Debug)]
pub struct RootStore {
    pub(super) roots: watch::Sender<Roots>,
    pub(super) status: watch::Sender<SourceStatus>,
    pub(super) provider: Arc<CryptoProvider>,
    trust: LatestWriter<TrustBundles>,
    /// Held while bundles are made, so that the last to be published are of the newest roots.
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
    #[cfg(test)]
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

    /// Sets the roots that a peer has announced, in place of those that it announced before: during a rotation the old and the
    /// new one, then the new one alone. Without a root, those of its file are in use again. Connections of callers whom the
    /// roots vouch for no longer end. An error says what is wrong with the roots; nothing changes then.
    pub fn announce(&self, alias: &TrustDomain, roots: RootList) -> Result<(), String> {
        if self.take(alias, roots, None)? {
            tracing::info!(%alias, "the peer's roots have changed over its link");
        }
        self.solved(&kept_text(alias));
        Ok(())
    }

    /// Sets the roots that a peer has announced to an earlier process, unless its file has changed since. An error says what is
    /// wrong with them.
    pub(super) fn restore(&self, alias: &TrustDomain, announced: Announced) -> Result<(), String> {
        self.take(alias, announced.roots, Some(announced.base)).map(drop)
    }

    /// Sets announced roots; those of an earlier process count only with the file of that time. Returns true if they changed.
    fn take(&self, alias: &TrustDomain, roots: RootList, of_base: Option<Hash>) -> Result<bool, String> {
        let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.roots.borrow().clone();
        let Some(peer) = known.peers.iter().find(|peer| peer.alias == *alias) else {
            return Err(format!("no peer has the trust domain {alias}"));
        };
        self.check(alias, &roots)?;
        if !roots.is_empty() {
            let owner = Owner::Peer { named: peer.trust_domain.clone() };
            Bundle::new(alias, owner, roots.clone(), &self.provider).map_err(|fault| fault.to_string())?;
        }
        let base = base(known.of_peers.get(alias));
        if of_base.is_some_and(|of_base| of_base != base) {
            return Ok(false);
        }
        let next = (!roots.is_empty()).then_some(Announced { roots, base });
        let changed = self.roots.send_if_modified(|known| {
            let before = known.announced.remove(alias);
            let changed = before != next;
            known.announced.extend(next.map(|next| (alias.clone(), next)));
            changed
        });
        if changed {
            self.make();
        }
        Ok(changed)
    }

    /// Checks roots that a peer gives for the trust domain that is known as `alias`. An error says what is wrong with them.
    pub fn check(&self, alias: &TrustDomain, roots: &[CertificateDer<'static>]) -> Result<(), String> {
        let keys = check_announced(roots, &self.provider)?;
        let known = self.roots.borrow();
        let taken = known.others(alias).find_map(|(other, theirs)| {
            let theirs = keys_of(theirs);
            keys.iter().position(|key| theirs.contains(key)).map(|at| (at + 1, other))
        });
        match taken {
            Some((at, other)) => Err(format!(
                "root {at} is a root of the trust domain {other} too; a root is of one trust domain"
            )),
            None => Ok(()),
        }
    }

    /// Returns the roots that a peer announced last; empty if it has announced none.
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

    /// Applies all known roots; if some of this mesh's own cannot be used, the bundles in use stay.
    pub(super) fn publish(&self) {
        let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        self.make();
    }

    /// Makes the bundles. The caller holds `publishing`.
    fn make(&self) {
        let roots = self.roots.borrow().clone();
        let aliases: BTreeSet<&TrustDomain> = roots.peers.iter().map(|peer| &peer.alias).collect();
        let mut domains = roots.supplied.clone();
        domains.extend(roots.configured.clone());
        domains.retain(|domain, _| !aliases.contains(domain));
        let mut taken: BTreeMap<Vec<u8>, TrustDomain> = BTreeMap::new();
        for (domain, list) in &domains {
            taken.extend(keys_of(list).into_iter().map(|key| (key, domain.clone())));
        }
        let mut bundles = match TrustBundles::new(domains, &self.provider) {
            Ok(bundles) => bundles,
            Err(fault) => return self.problem("trust", fault.to_string()),
        };
        self.solved("trust");
        let before = self.trust.newest();
        for peer in &roots.peers {
            let last = before.as_ref().and_then(|before| before.bundle(&peer.alias)).cloned();
            self.add_peer(peer, &roots, last, &mut taken, &mut bundles);
        }
        self.trust.set(Arc::new(bundles));
    }

    /// Adds the bundle of a peer, or the last good one if the roots cannot be used.
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
        let Some(list) = roots.of_peer(alias) else { return self.solved(&of) };
        let free = |list: &[CertificateDer<'static>]| {
            let other = keys_of(list).iter().find_map(|key| taken.get(key).cloned());
            other
                .map_or(Ok(()), |other| Err(format!("one of them is a root of the trust domain {other} too")))
        };
        let made = free(list).and_then(|()| {
            // Bundles that did not change are shared, so that readers can tell.
            if let Some(same) = last.as_ref().filter(|last| last.roots == *list && last.owner == owner) {
                return Ok(same.clone());
            }
            Bundle::new(alias, owner.clone(), list.clone(), &self.provider)
                .map(Arc::new)
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

/// Returns the key of a problem with announced roots of a peer that were kept.
pub(super) fn kept_text(alias: &TrustDomain) -> String {
    format!("{} kept from its link", trust_of(alias))
}

/// Returns the hash of the roots of a peer's file.
fn base(roots: Option<&RootList>) -> Hash {
    sha256(pem(roots.map(Vec::as_slice).unwrap_or_default()).as_bytes())
}

/// Returns the key of a problem with the roots of a peer that were read.
fn roots_text(alias: &TrustDomain) -> String {
    format!("{} in use", trust_of(alias))
}

impl Roots {
    /// Changes the peers; what others announced is forgotten.
    pub(super) fn set_peers(&mut self, peers: &[PeerTrust]) {
        let has = |alias: &TrustDomain| peers.iter().any(|peer| peer.alias == *alias);
        self.of_peers.retain(|alias, _| has(alias));
        self.announced.retain(|alias, _| has(alias));
        self.peers = peers.to_vec();
    }

    /// Returns what each peer has announced, by its name; `None` for nothing.
    pub(super) fn announced_by(&self) -> impl Iterator<Item = (&PeerTrust, Option<&Announced>)> {
        self.peers.iter().map(|peer| (peer, self.announced.get(&peer.alias)))
    }

    /// Returns the roots of a peer that are to be used.
    fn of_peer(&self, alias: &TrustDomain) -> Option<&RootList> {
        let of_file = self.of_peers.get(alias);
        let announced = self.announced.get(alias).filter(|announced| announced.base == base(of_file));
        announced.map(|announced| &announced.roots).or(of_file)
    }

    /// Returns all roots of other trust domains, in use or not.
    fn others(&self, alias: &TrustDomain) -> impl Iterator<Item = (&TrustDomain, &RootList)> {
        let files = [&self.configured, &self.supplied, &self.of_peers].into_iter().flatten();
        let announced = self.announced.iter().map(|(domain, announced)| (domain, &announced.roots));
        files.chain(announced).filter(move |(domain, _)| *domain != alias)
    }
}

/// Returns a text for each root of a file that a file of another trust domain has too.
pub(super) fn shared<'a>(
    files: impl Iterator<Item = (&'a TrustDomain, &'a RootList)>,
) -> Vec<(TrustDomain, String)> {
    let mut taken: BTreeMap<Vec<u8>, &TrustDomain> = BTreeMap::new();
    let mut problems = Vec::new();
    for (domain, list) in files {
        for (at, key) in keys_of(list).into_iter().enumerate() {
            match taken.get(&key) {
                Some(other) if *other != domain => {
                    let text = format!("root {} is a root of the trust domain {other} too", at + 1);
                    problems.push((domain.clone(), text));
                }
                Some(_) | None => drop(taken.insert(key, domain)),
            }
        }
    }
    problems
}

/// Returns what is wrong with the roots of a peer that a file has, if they verify nothing, or if one of them never can: a
/// certificate of a gateway in their place is the likeliest mistake. A root that has expired beside one that is valid is none.
pub(super) fn useless(roots: &[CertificateDer<'static>], now: SystemTime) -> Option<String> {
    let mut expired = None;
    let mut has_valid = false;
    for (at, root) in roots.iter().enumerate() {
        let number = at + 1;
        let Ok((_, parsed)) = X509Certificate::from_der(root) else {
            return Some(format!("certificate {number} cannot be read"));
        };
        if !parsed.is_ca() {
            return Some(format!(
                "certificate {number} ({}) is not of an authority, so it verifies no other; expected the roots of the peer",
                parsed.subject()
            ));
        }
        let until =
            UNIX_EPOCH + Duration::from_secs(parsed.validity().not_after.timestamp().try_into().unwrap_or(0));
        if until > now {
            has_valid = true;
        } else {
            expired = expired.max(Some(until));
        }
    }
    expired
        .filter(|_| !has_valid)
        .map(|until| format!("no root of it is valid; the last expired at {}", rfc3339(until)))
}

/// Returns the public keys of roots: two certificates of one key are one authority. A root that cannot be read counts by its
/// bytes.
fn keys_of(roots: &[CertificateDer<'static>]) -> Vec<Vec<u8>> {
    let key = |root: &CertificateDer<'static>| match X509Certificate::from_der(root) {
        Ok((_, parsed)) => parsed.public_key().raw.to_vec(),
        Err(_) => root.to_vec(),
    };
    roots.iter().map(key).collect()
}

/// Returns the public keys of the roots that a peer announces, or what is wrong with them. Each must have signed itself, which
/// proves that whoever made it has its key: the peer's authority, and not that of somebody else below another name.
fn check_announced(
    roots: &[CertificateDer<'static>],
    provider: &CryptoProvider,
) -> Result<Vec<Vec<u8>>, String> {
    let bytes: usize = roots.iter().map(|root| root.len()).sum();
    if roots.len() > ANNOUNCED_MAX || bytes > ANNOUNCED_BYTES_MAX {
        return Err(format!(
            "there are {} roots of {bytes} bytes; the most are {ANNOUNCED_MAX} roots of {ANNOUNCED_BYTES_MAX} bytes",
            roots.len()
        ));
    }
    for (at, root) in roots.iter().enumerate() {
        let number = at + 1;
        let (rest, parsed) =
            X509Certificate::from_der(root).map_err(|_| format!("root {number} cannot be read"))?;
        if !rest.is_empty() {
            return Err(format!("root {number} has bytes behind its end"));
        }
        if !parsed.is_ca() || parsed.subject() != parsed.issuer() || !has_signed_itself(&parsed, provider) {
            return Err(format!("root {number} is not an authority that has signed itself"));
        }
    }
    Ok(keys_of(roots))
}

fn has_signed_itself(certificate: &X509Certificate<'_>, provider: &CryptoProvider) -> bool {
    let key = &certificate.public_key().subject_public_key.data;
    let (message, signature) = (certificate.tbs_certificate.as_ref(), &certificate.signature_value.data);
    // A key of another kind than the algorithm's is refused by it, so the right one need not be looked up.
    let mut all = provider.signature_verification_algorithms.all.iter();
    all.any(|algorithm| algorithm.verify_signature(key, message, signature).is_ok())
}

#[cfg(test)]
mod tests;
