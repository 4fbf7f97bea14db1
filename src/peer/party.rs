//! The identity, roots and clock that a gateway sends about itself in an enrolment. The receiving gateway checks them against
//! the certificate that the sender has presented, and then creates the link from these values.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::{CertificateDer, UnixTime};

use super::enrolled::{Dialling, EnrolledLink};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_tls::roots::RootStore;
use isthmus_tls::server::provider;
use isthmus_tls::trust::{Shower, TrustBundles, describe, is_expired};

/// The difference between two clocks above which the difference is named as a likely cause of an expired certificate.
const SKEW: Duration = Duration::from_secs(60);

/// The certificates that the other gateway has presented, leaf first.
pub struct Shown<'a> {
    /// The side of the handshake, client or server, that presented the certificates.
    pub shower: Shower,
    /// The certificates.
    pub chain: &'a [CertificateDer<'static>],
}

/// The settings of the config that a new peer must match, and the trust domains that it must not use.
pub struct Expected<'a> {
    /// This mesh's trust domain.
    pub own: &'a TrustDomain,
    /// The trust domains that are in use: those of other peers (by our names for them), and those whose roots are configured
    /// for this mesh.
    pub taken: &'a [TrustDomain],
    /// The trust domain that the peer must have; `None`: any.
    pub trust_domain: Option<&'a TrustDomain>,
    /// Our name for the peer's trust domain; `None`: the peer's own name for it.
    pub alias: Option<&'a TrustDomain>,
    /// Our name for the peer's earlier trust domain, if the new link replaces one. The peer may send roots of that trust
    /// domain.
    pub replaced: Option<&'a TrustDomain>,
    /// The roots of all trust domains. A new peer must not send roots of another trust domain in this store, except those of
    /// `replaced`.
    pub roots: &'a RootStore,
}

/// Checks the [`proto::Party`] message and the certificate of the other gateway; returns the link to store.
pub fn check(
    party: &proto::Party,
    shown: &Shown<'_>,
    dialling: Dialling,
    expected: &Expected<'_>,
) -> Result<EnrolledLink, String> {
    let identity = Identity::parse(&party.identity)
        .map_err(|error| format!("the identity of the other gateway is malformed: {error}"))?;
    let announced = party.roots.clone().unwrap_or_default();
    let trust_domain = TrustDomain::parse(&announced.trust_domain)
        .map_err(|error| format!("the trust domain of the other gateway is malformed: {error}"))?;
    if identity.trust_domain() != trust_domain.as_str() {
        return Err(format!(
            "the identity of the other gateway, {identity}, is not in its trust domain {trust_domain}"
        ));
    }
    expected.check_domain(&trust_domain)?;
    if announced.certificates.is_empty() {
        return Err("the other gateway sent no root certificate".to_owned());
    }
    let roots: Vec<CertificateDer<'static>> =
        announced.certificates.into_iter().map(CertificateDer::from).collect();
    let alias = expected.alias.unwrap_or(&trust_domain);
    let known = expected.roots.check(alias, expected.replaced, &roots);
    known.map_err(|fault| format!("the roots of the other gateway cannot be used: {fault}"))?;
    let (leaf, rest) = shown.chain.split_first().ok_or("the other gateway sent no certificate")?;
    let bundles = TrustBundles::new([(trust_domain, roots.clone())], &provider())
        .map_err(|fault| format!("the roots of the other gateway cannot be used: {fault}"))?;
    let verified = bundles.verify_of(shown.shower, leaf, rest, UnixTime::now()).map_err(|error| {
        let clocks =
            if is_expired(&error) { clocks(party.time_ms, SystemTime::now()) } else { String::new() };
        format!("the roots of the other gateway do not verify its certificate: {}{clocks}", describe(&error))
    })?;
    if verified != identity {
        return Err(format!(
            "the other gateway claims the identity {identity}, but its certificate has the identity {verified}"
        ));
    }
    Ok(EnrolledLink { identity, roots, dialling })
}

impl Expected<'_> {
    fn check_domain(&self, trust_domain: &TrustDomain) -> Result<(), String> {
        if let Some(wanted) = self.trust_domain.filter(|wanted| *wanted != trust_domain) {
            return Err(format!(
                "the other gateway has the trust domain {trust_domain}, but the config expects {wanted}"
            ));
        }
        let known_as = self.alias.unwrap_or(trust_domain);
        let whose = if known_as == self.own {
            "the trust domain of the gateway that checks it"
        } else if self.taken.contains(known_as) {
            "already in use there, by a peer or under trust"
        } else {
            return Ok(());
        };
        Err(format!(
            "the trust domain {known_as} is {whose}; give the trust domain of the new peer another name there, with trustAlias \
             under peers"
        ))
    }
}

/// Returns the difference between the clocks, as a hint to append to an error about the validity of a certificate; empty if the
/// difference is small.
fn clocks(their_ms: u64, now: SystemTime) -> String {
    let theirs = UNIX_EPOCH.checked_add(Duration::from_millis(their_ms)).unwrap_or(now);
    let (apart, way) = match theirs.duration_since(now) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    match apart > SKEW && their_ms > 0 {
        true => format!(
            "; the clock of the other gateway is {} s {way} the clock of this gateway; set the clocks first",
            apart.as_secs()
        ),
        false => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rustls::pki_types::pem::PemObject;

    use super::*;
    use isthmus_tls::development::Authority;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).expect("legal")
    }

    fn certificate(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM")
    }

    /// Returns the [`proto::Party`] message of a gateway that the authority certifies, and the gateway's certificate.
    fn party(authority: &Authority) -> (proto::Party, CertificateDer<'static>) {
        let identity = authority.identity("isthmus", "gateway").expect("legal");
        let leaf = certificate(&authority.issue(&identity, &[], 1).expect("issued").certificate_pem);
        let roots = proto::Roots {
            trust_domain: identity.trust_domain().to_owned(),
            certificates: vec![certificate(authority.certificate_pem()).to_vec()],
            valid_for: 0,
        };
        (proto::Party { identity: identity.to_string(), roots: Some(roots), ..proto::Party::default() }, leaf)
    }

    fn authority(name: &str) -> Authority {
        Authority::new(domain(name)).expect("a CA")
    }

    /// The inputs of a check by a gateway of the trust domain `east`, which has a peer of the domain `south`.
    struct Check {
        roots: RootStore,
        trust_domain: Option<TrustDomain>,
        alias: Option<TrustDomain>,
        replaced: Option<TrustDomain>,
    }

    impl Check {
        fn new(own: &Authority) -> Self {
            let own = vec![certificate(own.certificate_pem())];
            let roots = RootStore::of(BTreeMap::from([(domain("east"), own)]));
            Self { roots, trust_domain: None, alias: None, replaced: None }
        }

        fn check(
            &self,
            party: &proto::Party,
            leaf: &CertificateDer<'static>,
        ) -> Result<EnrolledLink, String> {
            let expected = Expected {
                own: &domain("east"),
                taken: &[domain("south")],
                trust_domain: self.trust_domain.as_ref(),
                alias: self.alias.as_ref(),
                replaced: self.replaced.as_ref(),
                roots: &self.roots,
            };
            let shown = Shown { shower: Shower::Client, chain: std::slice::from_ref(leaf) };
            check(party, &shown, Dialling::Theirs, &expected)
        }
    }

    #[test]
    fn a_party_is_who_its_certificate_says() {
        let (east, west) = (authority("east"), authority("west"));
        let (good, leaf) = party(&west);
        let mut checks = Check::new(&east);
        let link = checks.check(&good, &leaf).expect("taken");
        assert_eq!(link.identity.to_string(), "spiffe://west/ns/isthmus/sa/gateway");
        assert_eq!(link.roots, [certificate(west.certificate_pem())]);
        let refused = |change: &dyn Fn(&mut proto::Party), wanted: &str| {
            let mut party = good.clone();
            change(&mut party);
            let fault = checks.check(&party, &leaf).expect_err(wanted);
            assert!(fault.contains(wanted), "{fault}");
        };
        let roots = |party: &mut proto::Party, all: &[Vec<u8>]| {
            party.roots.as_mut().expect("roots").certificates = all.to_vec();
        };
        refused(
            &|party| party.identity = "spiffe://west/ns/isthmus/sa/other".to_owned(),
            "its certificate has the identity",
        );
        refused(
            &|party| party.identity = "spiffe://north/ns/isthmus/sa/gateway".to_owned(),
            "is not in its trust domain",
        );
        refused(&|party| party.identity = "x".to_owned(), "is malformed");
        refused(&|party| party.roots = None, "is malformed");
        refused(&|party| roots(party, &[]), "no root certificate");
        refused(&|party| roots(party, &vec![vec![1]; 17]), "there are 17 roots");
        refused(&|party| roots(party, &[vec![1; 65 << 10]]), "at most 16 roots of 65536 bytes are allowed");
        let of = |authority: &Authority| certificate(authority.certificate_pem()).to_vec();
        refused(&|party| roots(party, &[of(&authority("west"))]), "do not verify its certificate");
        refused(&|party| roots(party, &[leaf.to_vec()]), "is not a self-signed CA certificate");
        refused(
            &|party| roots(party, &[of(&west), of(&east)]),
            "root 2 is also a root of the trust domain east",
        );
        checks.trust_domain = Some(domain("west.example"));
        let fault = checks.check(&good, &leaf).expect_err("another is expected");
        assert!(fault.contains("the config expects west.example"), "{fault}");
    }

    #[test]
    fn a_party_with_a_trust_domain_that_is_taken_needs_an_alias() {
        let east = authority("east");
        for (name, wanted) in [("east", "the trust domain of the gateway"), ("south", "already in use there")]
        {
            let (party, leaf) = party(&authority(name));
            let mut checks = Check::new(&east);
            let fault = checks.check(&party, &leaf).expect_err("taken");
            assert!(fault.contains(wanted) && fault.contains("trustAlias"), "{fault}");
            checks.alias = Some(domain("west"));
            assert!(checks.check(&party, &leaf).is_ok(), "{name}");
            checks.alias = Some(domain("south"));
            assert!(checks.check(&party, &leaf).is_err(), "the alias is taken too");
        }
    }

    #[test]
    fn clocks_that_are_apart_are_named() {
        let now = UNIX_EPOCH + Duration::from_secs(1_000_000);
        assert_eq!(clocks(1_000_030_000, now), "", "as good as the same");
        assert_eq!(clocks(0, now), "", "nothing is said of the clock");
        assert!(clocks(1_003_600_000, now).contains("3600 s ahead of the clock of this gateway"));
        assert!(clocks(996_400_000, now).contains("3600 s behind the clock of this gateway"));
        assert!(clocks(u64::MAX, now).contains("ahead of"));
    }
}
