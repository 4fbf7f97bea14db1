//! What one side of an enrolment says of itself, and the link that is made of it once it is checked against the certificate that
//! the side has shown.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::{CertificateDer, UnixTime};

use super::enrolled::{Dialling, EnrolledLink};
use crate::model::identity::{Identity, TrustDomain};
use crate::proto::isthmus::peer::v1 as proto;
use crate::tls::roots::RootStore;
use crate::tls::server::provider;
use crate::tls::trust::{Shower, TrustBundles, describe, is_expired};

/// The difference of clocks above which a certificate that is not valid at this time is put down to it.
const SKEW: Duration = Duration::from_secs(60);

/// The certificates that the other side has shown, leaf first.
pub(super) struct Shown<'a> {
    pub(super) shower: Shower,
    pub(super) chain: &'a [CertificateDer<'static>],
}

/// What the config says of a new peer, and what is taken by others.
pub(super) struct Expected<'a> {
    /// This mesh's trust domain.
    pub(super) own: &'a TrustDomain,
    /// The trust domains of other peers by our names for them, and those whose roots are configured for this mesh.
    pub(super) taken: &'a [TrustDomain],
    /// The trust domain that the peer must have; `None`: any.
    pub(super) trust_domain: Option<&'a TrustDomain>,
    /// Our name for the peer's trust domain; `None`: its own name.
    pub(super) alias: Option<&'a TrustDomain>,
    /// All known roots.
    pub(super) roots: &'a RootStore,
}

/// Checks what the other side says of itself.
pub(super) fn check(
    party: &proto::Party,
    shown: &Shown<'_>,
    dialling: Dialling,
    expected: &Expected<'_>,
) -> Result<EnrolledLink, String> {
    let identity = Identity::parse(&party.identity)
        .map_err(|error| format!("the other side's identity cannot be read: {error}"))?;
    let announced = party.roots.clone().unwrap_or_default();
    let trust_domain = TrustDomain::parse(&announced.trust_domain)
        .map_err(|error| format!("the other side's trust domain cannot be read: {error}"))?;
    if identity.trust_domain() != trust_domain.as_str() {
        return Err(format!("the other side is {identity}, which is not of its trust domain {trust_domain}"));
    }
    expected.check_domain(&trust_domain)?;
    if announced.certificates.is_empty() {
        return Err("the other side gives no root certificate".to_owned());
    }
    let roots: Vec<CertificateDer<'static>> =
        announced.certificates.into_iter().map(CertificateDer::from).collect();
    let alias = expected.alias.unwrap_or(&trust_domain);
    expected.roots.check(alias, &roots).map_err(|fault| format!("the other side's roots: {fault}"))?;
    let (leaf, rest) = shown.chain.split_first().ok_or("the other side showed no certificate")?;
    let bundles = TrustBundles::new([(trust_domain, roots.clone())], &provider())
        .map_err(|fault| format!("the other side's roots cannot be used: {fault}"))?;
    let verified = bundles.verify_of(shown.shower, leaf, rest, UnixTime::now()).map_err(|error| {
        let clocks =
            if is_expired(&error) { clocks(party.time_ms, SystemTime::now()) } else { String::new() };
        format!("the other side's roots do not verify its certificate: {}{clocks}", describe(&error))
    })?;
    if verified != identity {
        return Err(format!(
            "the other side says that it is {identity}, but its certificate is that of {verified}"
        ));
    }
    Ok(EnrolledLink { identity, roots, dialling })
}

impl Expected<'_> {
    fn check_domain(&self, trust_domain: &TrustDomain) -> Result<(), String> {
        if let Some(wanted) = self.trust_domain.filter(|wanted| *wanted != trust_domain) {
            return Err(format!(
                "the other side is of the trust domain {trust_domain}, and the config expects {wanted}"
            ));
        }
        let known_as = self.alias.unwrap_or(trust_domain);
        let whose = if known_as == self.own {
            "that of the gateway that checks it"
        } else if self.taken.contains(known_as) {
            "taken there already, by a peer or under trust"
        } else {
            return Ok(());
        };
        Err(format!(
            "the trust domain {known_as} is {whose}; give the new peer's another name there, with trustAlias under peers"
        ))
    }
}

/// Says how far the clocks are apart, behind a fault that it may explain.
fn clocks(their_ms: u64, now: SystemTime) -> String {
    let theirs = UNIX_EPOCH.checked_add(Duration::from_millis(their_ms)).unwrap_or(now);
    let (apart, way) = match theirs.duration_since(now) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(behind) => (behind.duration(), "behind"),
    };
    match apart > SKEW && their_ms > 0 {
        true => format!(
            "; the other side's clock is {} s {way} this gateway's, so set the clocks right first",
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
    use crate::tls::development::Authority;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).expect("legal")
    }

    fn certificate(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM")
    }

    /// The party of an authority's gateway, and the gateway's certificate.
    fn party(authority: &Authority) -> (proto::Party, CertificateDer<'static>) {
        let identity = authority.identity("isthmus", "gateway").expect("legal");
        let leaf = certificate(&authority.issue(&identity, &[], 1).expect("issued").certificate_pem);
        let roots = proto::Roots {
            trust_domain: identity.trust_domain().to_owned(),
            certificates: vec![certificate(authority.certificate_pem()).to_vec()],
        };
        (proto::Party { identity: identity.to_string(), roots: Some(roots), ..proto::Party::default() }, leaf)
    }

    fn authority(name: &str) -> Authority {
        Authority::new(domain(name)).expect("a CA")
    }

    /// Checks a party as a gateway of the trust domain `east` does, which has a peer of the domain `south`.
    struct Check {
        roots: RootStore,
        trust_domain: Option<TrustDomain>,
        alias: Option<TrustDomain>,
    }

    impl Check {
        fn new(own: &Authority) -> Self {
            let own = vec![certificate(own.certificate_pem())];
            let roots = RootStore::of(BTreeMap::from([(domain("east"), own)]));
            Self { roots, trust_domain: None, alias: None }
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
            "its certificate is that of",
        );
        refused(
            &|party| party.identity = "spiffe://north/ns/isthmus/sa/gateway".to_owned(),
            "not of its trust domain",
        );
        refused(&|party| party.identity = "x".to_owned(), "cannot be read");
        refused(&|party| party.roots = None, "cannot be read");
        refused(&|party| roots(party, &[]), "no root certificate");
        refused(&|party| roots(party, &vec![vec![1]; 17]), "there are 17 roots");
        refused(&|party| roots(party, &[vec![1; 65 << 10]]), "the most are 16 roots of 65536 bytes");
        let of = |authority: &Authority| certificate(authority.certificate_pem()).to_vec();
        refused(&|party| roots(party, &[of(&authority("west"))]), "do not verify its certificate");
        refused(&|party| roots(party, &[leaf.to_vec()]), "is not an authority that has signed itself");
        refused(
            &|party| roots(party, &[of(&west), of(&east)]),
            "root 2 is a root of the trust domain east too",
        );
        checks.trust_domain = Some(domain("west.example"));
        let fault = checks.check(&good, &leaf).expect_err("another is expected");
        assert!(fault.contains("the config expects west.example"), "{fault}");
    }

    #[test]
    fn a_party_with_a_trust_domain_that_is_taken_needs_an_alias() {
        let east = authority("east");
        for (name, wanted) in [("east", "that of the gateway"), ("south", "taken there already")] {
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
        assert!(clocks(1_003_600_000, now).contains("3600 s ahead of this gateway's"));
        assert!(clocks(996_400_000, now).contains("3600 s behind this gateway's"));
        assert!(clocks(u64::MAX, now).contains("ahead of"));
    }
}
