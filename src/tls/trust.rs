//! The trusted roots of each trust domain. A certificate is verified against the roots of the domain in its
//! own SPIFFE ID only, so that one domain's authority cannot certify another domain's workloads.
//!
//! This mesh knows the trust domain of a peer under an alias, because two organisations may have given their trust domains the
//! same name. If several bundles belong to the domain that a certificate names, the bundle whose roots verify the certificate
//! decides.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::client::danger::ServerCertVerifier;
use rustls::client::{WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{AlertDescription, CertificateError, Error, OtherError, RootCertStore};

use super::certificate::{IdentityFault, identity_of, limits_uris, validity_of};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_telemetry::clock::rfc3339;

/// The certificate revocation lists of one trust domain.
pub(super) type CrlList = Vec<CertificateRevocationListDer<'static>>;

/// The roots of all trust domains.
#[derive(Debug, Default)]
pub struct TrustBundles {
    /// The bundles by trust domain. The key of this mesh's own trust domain is its name; the key of a peer's trust domain is
    /// our alias for it.
    domains: BTreeMap<TrustDomain, Arc<Bundle>>,
    /// For each trust domain that certificates name, the matching keys of `domains`. The key of our own trust domain comes
    /// before those of peers.
    named: BTreeMap<TrustDomain, Vec<TrustDomain>>,
}

/// The owner of a trust domain: this mesh or a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This mesh. The name in the certificates is also the name that this gateway uses for the trust domain.
    Ours,
    /// A peer.
    Peer {
        /// The trust domain that the peer's certificates name.
        named: TrustDomain,
    },
}

/// The role of the party that presents a certificate in a handshake. The certificate's extended key usage must allow the role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shower {
    /// The client: a workload that calls, or an xDS client.
    Client,
    /// The client of a link: a gateway of a peer. Roots that may be out of date verify it, because only a link renews them.
    Gateway,
    /// The server.
    Server,
}

/// The roots of one trust domain.
#[derive(Debug)]
pub struct Bundle {
    /// The owner of the trust domain.
    pub owner: Owner,
    /// The root certificates.
    pub roots: Vec<CertificateDer<'static>>,
    /// True if the peer announced these roots over a link, and has had no link for so long that it may have withdrawn them.
    /// They do not verify clients then.
    pub is_unconfirmed: bool,
    /// The time at which the last of the roots expires; `None` if no validity can be read.
    pub not_after: Option<SystemTime>,
    verifier: Arc<dyn ClientCertVerifier>,
    /// The verifier of servers where certificates may be revoked; without lists, the anchors are enough.
    servers: Option<Arc<WebPkiServerVerifier>>,
    anchors: Arc<RootCertStore>,
    algorithms: WebPkiSupportedAlgorithms,
}

/// The reason why roots cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustFault {
    /// A root is malformed; roots are counted from 1.
    #[error("root certificate {0} of the trust domain {1} cannot be used: {2}")]
    Root(usize, TrustDomain, Error),
    /// No verifier can be made from the roots.
    #[error("the roots of the trust domain {0} cannot be used: {1}")]
    Roots(TrustDomain, rustls::server::VerifierBuilderError),
}

/// The reason why the certificate of the other party is not accepted. The text goes into the log.
#[derive(Clone, Debug, thiserror::Error)]
enum Distrust {
    #[error("the certificate {0}")]
    Identity(IdentityFault),
    #[error("this gateway has no roots for the trust domain of {0}")]
    Domain(Identity),
    #[error(
        "the peer of {0} announced its roots over a link, and has had no link for expireAfter, so it may have withdrawn them"
    )]
    Unconfirmed(Identity),
    #[error("the roots of several peers verify the certificate of {0}, so its owner is ambiguous")]
    Ambiguous(Identity),
    #[error(
        "an authority of the certificate of {0} has name constraints for URIs, which are not supported, so the certificate is \
         refused"
    )]
    UriConstraints(Identity),
}

/// The text of webpki's error for a name that the name constraints of an authority do not permit.
const NAME_CONSTRAINTS: &str = "NameConstraintViolation";

impl From<Distrust> for Error {
    fn from(distrust: Distrust) -> Self {
        Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(distrust))))
    }
}

/// Describes a failed handshake for the operator.
pub fn describe(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(distrust))) => distrust.to_string(),
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            let ago = time.as_secs().saturating_sub(not_after.as_secs());
            format!("the certificate expired at {}, {ago} s ago", at(*not_after))
        }
        Error::InvalidCertificate(CertificateError::NotValidYetContext { not_before, .. }) => {
            format!("the certificate is not valid before {}", at(*not_before))
        }
        Error::InvalidCertificate(CertificateError::Revoked) => {
            "the certificate, or one of its authorities, is revoked by a list of trust[].crl".to_owned()
        }
        Error::InvalidCertificate(error) => format!("the certificate is not trusted: {error}"),
        Error::AlertReceived(alert) if REFUSALS.contains(alert) => {
            format!("the other side does {REFUSED} (alert {alert:?})")
        }
        error => error.to_string(),
    }
}

/// The words by which problems say that the other side refuses this gateway's certificate.
pub const REFUSED: &str = "not accept this gateway's certificate";

/// The alerts by which the other side refuses a certificate (RFC 8446, section 6.2). A server of TLS 1.3 sends them after the client
/// has completed the handshake.
const REFUSALS: [AlertDescription; 8] = [
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::UnknownCA,
    AlertDescription::DecryptError,
    AlertDescription::AccessDenied,
];

/// Describes the fault of a connection whose TLS error is known by its text alone.
pub fn describe_text(fault: String) -> String {
    let alert = REFUSALS.into_iter().map(Error::AlertReceived).find(|alert| alert.to_string() == fault);
    alert.map_or(fault, |alert| describe(&alert))
}

fn at(time: UnixTime) -> String {
    rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(time.as_secs()))
}

/// Returns true if a certificate was refused only because it is not valid at this time.
pub fn is_expired(error: &Error) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(
        error,
        Error::InvalidCertificate(Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
    )
}

impl TrustBundles {
    /// Makes the bundles of this mesh's own trust domains.
    pub fn new(
        domains: impl IntoIterator<Item = (TrustDomain, Vec<CertificateDer<'static>>)>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, TrustFault> {
        Self::with_crls(domains, |_| CrlList::new(), provider)
    }

    /// Makes the bundles of this mesh's own trust domains, whose revocation lists `crls` returns.
    pub(super) fn with_crls(
        domains: impl IntoIterator<Item = (TrustDomain, Vec<CertificateDer<'static>>)>,
        crls: impl Fn(&TrustDomain) -> CrlList,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, TrustFault> {
        let bundles = domains.into_iter().map(|(domain, roots)| {
            let bundle = Bundle::new(&domain, Owner::Ours, roots, crls(&domain), provider)?;
            Ok((domain, Arc::new(bundle)))
        });
        let domains: BTreeMap<_, _> = bundles.collect::<Result<_, _>>()?;
        let named = domains.keys().map(|domain| (domain.clone(), vec![domain.clone()])).collect();
        Ok(Self { domains, named })
    }

    /// Adds the bundle of a peer, whose identities are known under `alias`.
    pub(super) fn add_peer(&mut self, alias: &TrustDomain, bundle: Arc<Bundle>) {
        let Owner::Peer { named } = &bundle.owner else { return };
        self.named.entry(named.clone()).or_default().push(alias.clone());
        self.domains.insert(alias.clone(), bundle);
    }

    /// Returns the bundles, each with its trust domain, and sorted by trust domain. For a peer, the trust domain is our alias.
    pub fn domains(&self) -> impl Iterator<Item = (&TrustDomain, &Arc<Bundle>)> {
        self.domains.iter()
    }

    /// Returns the bundle of a trust domain. For the trust domain of a peer, `domain` is our alias.
    pub fn bundle(&self, domain: &TrustDomain) -> Option<&Arc<Bundle>> {
        self.domains.get(domain)
    }

    /// Returns the roots of a trust domain. For the trust domain of a peer, `domain` is our alias.
    pub fn roots_of(&self, domain: &TrustDomain) -> Option<&[CertificateDer<'static>]> {
        self.domains.get(domain).map(|bundle| bundle.roots.as_slice())
    }

    /// Returns true if a verified identity belongs to a peer.
    pub fn is_of_peer(&self, identity: &Identity) -> bool {
        let domain = TrustDomain::parse(identity.trust_domain()).ok();
        let bundle = domain.and_then(|domain| self.domains.get(&domain));
        bundle.is_some_and(|bundle| bundle.owner != Owner::Ours)
    }

    /// Verifies a certificate against the roots of the trust domain that it names. Returns the identity under which this mesh
    /// knows its holder.
    pub fn verify_of(
        &self,
        shower: Shower,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<Identity, Error> {
        let (identity, candidates) = self.candidates(leaf)?;
        let mut verified = None;
        let mut fault = None;
        for (domain, bundle) in candidates {
            let verified_by = bundle.verify(shower, leaf, intermediates, now);
            let verified_by = verified_by.map_err(|error| bundle.with_cause(error, &identity, intermediates));
            match verified_by.and_then(|()| bundle.accepts(shower, &identity)) {
                // A certificate that our own roots verify is ours, whatever roots peers announce.
                Ok(()) if bundle.owner == Owner::Ours => return Ok(identity.in_domain(domain)),
                Ok(()) if verified.is_some() => return Err(Distrust::Ambiguous(identity).into()),
                Ok(()) => verified = Some(domain),
                // A bundle of another owner with the same domain name reports an unknown issuer. Therefore an error other than
                // that is the true cause.
                Err(error) if fault.is_none() || error != CertificateError::UnknownIssuer.into() => {
                    fault = Some(error);
                }
                Err(_) => {}
            }
        }
        match (verified, fault) {
            (Some(domain), _) => Ok(identity.in_domain(domain)),
            (None, Some(fault)) => Err(fault),
            (None, None) => Err(Distrust::Domain(identity).into()),
        }
    }

    /// Returns the identity of a certificate that these bundles have verified. Verifies the certificate again only if several
    /// bundles belong to the domain that the certificate names.
    pub(super) fn identity_of_verified(
        &self,
        shower: Shower,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<Identity, Error> {
        let (identity, mut candidates) = self.candidates(leaf)?;
        match (candidates.next(), candidates.next()) {
            (Some((domain, bundle)), None) => {
                bundle.accepts(shower, &identity)?;
                Ok(identity.in_domain(domain))
            }
            _ => self.verify_of(shower, leaf, intermediates, now),
        }
    }

    /// Returns the identity that a certificate names, and the bundles of its trust domain.
    fn candidates(
        &self,
        leaf: &CertificateDer<'_>,
    ) -> Result<(Identity, impl Iterator<Item = (&TrustDomain, &Bundle)>), Error> {
        let identity = identity_of(leaf).map_err(Distrust::Identity)?;
        let named = TrustDomain::parse(identity.trust_domain()).ok();
        let known = named.and_then(|domain| self.named.get(&domain));
        let bundles = known.into_iter().flatten();
        Ok((identity, bundles.filter_map(|domain| Some((domain, &**self.domains.get(domain)?)))))
    }
}

impl Bundle {
    /// Makes the bundle of the trust domain known as `domain`. An error names the root that cannot be used.
    pub(super) fn new(
        domain: &TrustDomain,
        owner: Owner,
        roots: Vec<CertificateDer<'static>>,
        crls: CrlList,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, TrustFault> {
        let store = anchors(&roots).map_err(|(at, error)| TrustFault::Root(at, domain.clone(), error))?;
        let anchors = Arc::new(store);
        let unusable = |error| TrustFault::Roots(domain.clone(), error);
        // Every certificate of a chain is checked. As for ztunnels, one whose authority has no list is not revoked.
        let builder = WebPkiClientVerifier::builder_with_provider(anchors.clone(), provider.clone());
        let builder = builder.with_crls(crls.clone()).allow_unknown_revocation_status();
        let verifier = builder.build().map_err(unusable)?;
        let servers = match crls.is_empty() {
            true => None,
            false => {
                let builder = WebPkiServerVerifier::builder_with_provider(anchors.clone(), provider.clone());
                let builder = builder.with_crls(crls).allow_unknown_revocation_status();
                Some(builder.build().map_err(unusable)?)
            }
        };
        let not_after = roots.iter().filter_map(validity_of).map(|validity| validity.not_after).max();
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self { owner, roots, is_unconfirmed: false, not_after, verifier, servers, anchors, algorithms })
    }

    /// Sets [`Self::is_unconfirmed`].
    pub(super) fn unconfirmed(mut self, is_unconfirmed: bool) -> Self {
        self.is_unconfirmed = is_unconfirmed;
        self
    }

    /// Returns an error if a certificate that the roots verify must not be accepted in this role.
    fn accepts(&self, shower: Shower, identity: &Identity) -> Result<(), Error> {
        match shower {
            Shower::Client if self.is_unconfirmed => Err(Distrust::Unconfirmed(identity.clone()).into()),
            Shower::Client | Shower::Gateway | Shower::Server => Ok(()),
        }
    }

    /// Replaces the error for a violation of name constraints by one that says so, if an authority has constraints for URIs
    /// (RFC 5280, section 4.2.1.10). webpki does not evaluate them, and refuses every URI below such an authority.
    fn with_cause(&self, error: Error, identity: &Identity, intermediates: &[CertificateDer<'_>]) -> Error {
        let is_violation = match &error {
            Error::InvalidCertificate(CertificateError::Other(cause)) => {
                cause.to_string() == NAME_CONSTRAINTS
            }
            _ => false,
        };
        match is_violation && intermediates.iter().chain(&self.roots).any(limits_uris) {
            true => Distrust::UriConstraints(identity.clone()).into(),
            false => error,
        }
    }

    fn verify(
        &self,
        shower: Shower,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        match shower {
            Shower::Client | Shower::Gateway => {
                self.verifier.verify_client_cert(leaf, intermediates, now).map(drop)
            }
            Shower::Server if let Some(servers) = &self.servers => {
                // rustls looks for revoked certificates only together with a name. The name is checked last, and is the identity's
                // matter here.
                let nobody = ServerName::IpAddress(IpAddr::from(Ipv4Addr::UNSPECIFIED).into());
                match servers.verify_server_cert(leaf, intermediates, &nobody, &[], now) {
                    Err(Error::InvalidCertificate(
                        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                    )) => Ok(()),
                    verified => verified.map(drop),
                }
            }
            Shower::Server => {
                let leaf = ParsedCertificate::try_from(leaf)?;
                let all = self.algorithms.all;
                verify_server_cert_signed_by_trust_anchor(&leaf, &self.anchors, intermediates, now, all)
            }
        }
    }
}

/// Parses roots. The error has the number, counted from 1, of the root that cannot be used.
pub(super) fn anchors(roots: &[CertificateDer<'static>]) -> Result<RootCertStore, (usize, Error)> {
    let mut store = RootCertStore::empty();
    for (index, root) in roots.iter().enumerate() {
        store.add(root.clone()).map_err(|error| (index + 1, error))?;
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject;

    use super::*;
    use crate::development::Authority;
    use crate::server::provider;

    impl TrustBundles {
        fn verify(
            &self,
            leaf: &CertificateDer<'_>,
            intermediates: &[CertificateDer<'_>],
            now: UnixTime,
        ) -> Result<Identity, Error> {
            self.verify_of(Shower::Client, leaf, intermediates, now)
        }
    }

    fn authority(domain: &str) -> Authority {
        Authority::new(TrustDomain::parse(domain).expect("legal")).expect("a CA")
    }

    fn certificate(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM")
    }

    fn leaf(authority: &Authority) -> CertificateDer<'static> {
        let identity = authority.identity("shop", "cart").expect("legal");
        certificate(&authority.issue(&identity, &[], 1).expect("issued").certificate_pem)
    }

    fn bundles(domains: &[(&str, &Authority)]) -> TrustBundles {
        let domains = domains.iter().map(|(domain, authority)| {
            (TrustDomain::parse(domain).expect("legal"), vec![certificate(authority.certificate_pem())])
        });
        TrustBundles::new(domains, &provider()).expect("usable")
    }

    fn text(result: Result<Identity, Error>) -> String {
        match result {
            Ok(identity) => identity.to_string(),
            Err(error) => describe(&error),
        }
    }

    #[test]
    fn an_authority_speaks_for_its_own_trust_domain_alone() {
        let (east, west) = (authority("east"), authority("west"));
        let trust = bundles(&[("east", &east), ("west", &west)]);
        let now = UnixTime::now();
        assert_eq!(text(trust.verify(&leaf(&east), &[], now)), "spiffe://east/ns/shop/sa/cart");
        assert_eq!(text(trust.verify(&leaf(&west), &[], now)), "spiffe://west/ns/shop/sa/cart");
        // The certificate of each domain is verified against the roots of the other domain.
        let swapped = bundles(&[("east", &west), ("west", &east)]);
        for own in [&east, &west] {
            let error = text(swapped.verify(&leaf(own), &[], now));
            assert!(error.contains("UnknownIssuer") || error.contains("BadSignature"), "{error}");
        }
        let error = text(bundles(&[("east", &east)]).verify(&leaf(&west), &[], now));
        assert!(error.contains("has no roots for the trust domain"), "{error}");
    }

    #[test]
    fn a_certificate_is_of_its_time() {
        let east = authority("east");
        let trust = bundles(&[("east", &east)]);
        let at = |days: i64| {
            let now = UnixTime::now().as_secs().saturating_add_signed(days * 86_400);
            text(trust.verify(&leaf(&east), &[], UnixTime::since_unix_epoch(Duration::from_secs(now))))
        };
        assert!(at(2).contains("expired"), "{}", at(2));
        assert!(at(-2).contains("not valid before"), "{}", at(-2));
    }

    #[test]
    fn a_certificate_without_one_spiffe_id_is_of_nobody() {
        let authority_key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::default();
        let issuer = rcgen::Issuer::new(params, authority_key);
        let with = |uris: &[&str]| {
            let mut params = rcgen::CertificateParams::default();
            for uri in uris {
                params.subject_alt_names.push(rcgen::SanType::URI((*uri).try_into().expect("ASCII")));
            }
            let key = rcgen::KeyPair::generate().expect("a key");
            identity_of(params.signed_by(&key, &issuer).expect("signed").der())
        };
        assert_eq!(with(&[]), Err(IdentityFault::None));
        assert_eq!(with(&["spiffe://a/b", "spiffe://a/c"]), Err(IdentityFault::Several));
        assert!(matches!(with(&["https://a/b"]), Err(IdentityFault::Illegal(_))));
        assert!(with(&["spiffe://a/b"]).is_ok());
    }

    /// webpki refuses every URI under such an authority, whether the constraints permit the URI or not.
    #[test]
    fn the_refusal_of_a_certificate_under_uri_constraints_names_them() {
        use rcgen::{BasicConstraints, CertificateParams, CustomExtension, IsCa, KeyPair};
        // The tags of names in a certificate.
        const DNS: u8 = 0x82;
        const URI: u8 = 0x86;
        // An authority that permits one name: a sequence, [0] of subtrees, each a sequence of a name.
        let ca = |name: &str, permitted: Option<(u8, &str)>| {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            let extension = permitted.map(|(tag, name)| {
                let der =
                    [(0x30, 6), (0xa0, 4), (0x30, 2), (tag, 0)].map(|(tag, more)| [tag, more + 4]).concat();
                CustomExtension::from_oid_content(&[2, 5, 29, 30], [&der, name.as_bytes()].concat())
            });
            params.custom_extensions.extend(extension);
            (params, KeyPair::generate().expect("a key"))
        };
        let verify = |of_root: Option<(u8, &str)>, of_intermediate: Option<(u8, &str)>| {
            let (params, key) = ca("root", of_root);
            let root = rcgen::CertifiedIssuer::self_signed(params, key).expect("a CA");
            let (params, key) = ca("intermediate", of_intermediate);
            let intermediate = rcgen::CertifiedIssuer::signed_by(params, key, &root).expect("a CA");
            let mut params = CertificateParams::new(vec!["cart.east".to_owned()]).expect("parameters");
            params.subject_alt_names.push(rcgen::SanType::URI("spiffe://east/a".try_into().expect("ASCII")));
            let key = KeyPair::generate().expect("a key");
            let leaf = params.signed_by(&key, &intermediate).expect("signed");
            let trust = [(TrustDomain::parse("east").expect("legal"), vec![root.der().clone()])];
            let trust = TrustBundles::new(trust, &provider()).expect("usable");
            text(trust.verify(leaf.der(), &[intermediate.der().clone()], UnixTime::now()))
        };
        let uri = Some((URI, "east"));
        assert_eq!(verify(None, None), "spiffe://east/a");
        assert_eq!(verify(None, Some((DNS, "east"))), "spiffe://east/a");
        for refused in [verify(None, uri), verify(uri, None)] {
            assert!(refused.contains("of spiffe://east/a has name constraints for URIs"), "{refused}");
        }
        let refused = verify(None, Some((DNS, "west")));
        assert!(refused.contains(NAME_CONSTRAINTS), "{refused}");
    }

    #[test]
    fn a_revoked_certificate_is_refused_in_every_role_and_so_is_one_below_a_revoked_authority() {
        use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
        const BELOW: u64 = 3;
        let params = |serial: u64, name: &str| {
            let mut params = CertificateParams::default();
            params.serial_number = Some(serial.into());
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            params
        };
        let ca = |serial, name| {
            let mut params = params(serial, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params
        };
        let key = || KeyPair::generate().expect("a key");
        let root = CertifiedIssuer::self_signed(ca(1, "root"), key()).expect("a CA");
        let below = CertifiedIssuer::signed_by(ca(BELOW, "below"), key(), &root).expect("a CA");
        let leaf = |serial, issuer: &CertifiedIssuer<'_, KeyPair>| {
            let mut params = params(serial, "leaf");
            params.subject_alt_names.push(rcgen::SanType::URI("spiffe://east/a".try_into().expect("ASCII")));
            params.signed_by(&key(), issuer).expect("signed").der().clone()
        };
        let crl = |revoked: &[u64]| {
            let time = rcgen::date_time_ymd(2025, 1, 1);
            let revoked = revoked.iter().map(|serial| rcgen::RevokedCertParams {
                serial_number: (*serial).into(),
                revocation_time: time,
                reason_code: None,
                invalidity_date: None,
            });
            let params = rcgen::CertificateRevocationListParams {
                this_update: time,
                next_update: rcgen::date_time_ymd(2100, 1, 1),
                crl_number: 1_u64.into(),
                issuing_distribution_point: None,
                revoked_certs: revoked.collect(),
                key_identifier_method: rcgen::KeyIdMethod::Sha256,
            };
            vec![CertificateRevocationListDer::from(params.signed_by(&root).expect("signed").der().to_vec())]
        };
        let verified = |leaf: &CertificateDer<'_>, shower, lists: CrlList| {
            let east = TrustDomain::parse("east").expect("legal");
            let domains = [(east, vec![root.der().clone()])];
            let trust = TrustBundles::with_crls(domains, |_| lists.clone(), &provider()).expect("usable");
            text(trust.verify_of(shower, leaf, &[below.der().clone()], UnixTime::now()))
        };
        let (own, of_below) = (leaf(7, &root), leaf(8, &below));
        for shower in [Shower::Client, Shower::Gateway, Shower::Server] {
            for (leaf, lists, is_good) in [
                (&own, CrlList::new(), true),
                (&own, crl(&[8]), true),
                (&own, crl(&[7]), false),
                // The list is the root's, so it revokes nothing that another authority has certified.
                (&of_below, crl(&[8]), true),
                (&of_below, crl(&[BELOW]), false),
            ] {
                let expected = match is_good {
                    true => "spiffe://east/a",
                    false => {
                        "the certificate, or one of its authorities, is revoked by a list of trust[].crl"
                    }
                };
                assert_eq!(verified(leaf, shower, lists), expected, "{shower:?}");
            }
        }
    }

    /// Returns the identity of a certificate with changed parameters.
    fn identity_with(change: impl FnOnce(&mut rcgen::CertificateParams)) -> Result<Identity, IdentityFault> {
        let (of_issuer, of_leaf) = (rcgen::KeyPair::generate(), rcgen::KeyPair::generate());
        let issuer = rcgen::Issuer::new(rcgen::CertificateParams::default(), of_issuer.expect("a key"));
        let mut params = rcgen::CertificateParams::default();
        change(&mut params);
        identity_of(params.signed_by(&of_leaf.expect("a key"), &issuer).expect("signed").der())
    }

    #[test]
    fn a_second_uri_counts_also_where_it_is_no_text() {
        let names = |uris: &[&[u8]]| {
            let one = |uri: &&[u8]| [&[0x86, u8::try_from(uri.len()).expect("short")][..], uri].concat();
            let names: Vec<u8> = uris.iter().flat_map(one).collect();
            [&[0x30, u8::try_from(names.len()).expect("short")][..], &names].concat()
        };
        let with = |uris: &[&[u8]]| {
            identity_with(|params| {
                let names = rcgen::CustomExtension::from_oid_content(&[2, 5, 29, 17], names(uris));
                params.custom_extensions.push(names);
            })
        };
        assert!(with(&[b"spiffe://a/b"]).is_ok());
        for uris in [[&b"spiffe://a/b"[..], b"\xff\xfe"], [b"\xff\xfe", b"spiffe://a/b"]] {
            assert!(with(&uris).is_err(), "{uris:?}");
        }
    }

    #[test]
    fn a_key_that_may_not_sign_speaks_for_nobody() {
        let with = |usages: Vec<rcgen::KeyUsagePurpose>| {
            identity_with(|params| {
                params.subject_alt_names.push(rcgen::SanType::URI("spiffe://a/b".try_into().expect("ASCII")));
                params.key_usages = usages;
            })
        };
        use rcgen::KeyUsagePurpose::{DigitalSignature, KeyEncipherment};
        assert!(with(vec![]).is_ok(), "nothing is said of it");
        assert!(with(vec![DigitalSignature, KeyEncipherment]).is_ok());
        assert_eq!(with(vec![KeyEncipherment]), Err(IdentityFault::NoSignature));
    }
}
