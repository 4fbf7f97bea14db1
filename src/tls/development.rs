//! A development CA that issues SPIFFE workload certificates (X.509-SVID), for `isthmus certs`, `isthmus demo` and tests. Input
//! and output are values and PEM texts; `cli::certs` owns the files. The CA is not for production, because its key is in a
//! plain file.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, date_time_ymd,
};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use isthmus_model::identity::{Identity, IdentityError, TrustDomain};
use isthmus_model::name::{NamePattern, PatternError};

/// The validity of a CA in days.
const AUTHORITY_DAYS: u32 = 3650;
/// How long before the issue of a certificate its validity begins, so that gateways whose clocks are behind accept a new
/// certificate.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);
const SECONDS_PER_DAY: u64 = 86_400;

/// The reason why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DevelopmentError {
    /// The namespace or service account does not fit into a SPIFFE ID.
    #[error("the identity is illegal: {0}")]
    Identity(#[from] IdentityError),
    /// The identity is of another trust domain than the CA.
    #[error("{0} is not in the trust domain {1}")]
    TrustDomain(Identity, TrustDomain),
    /// A further subject name is malformed.
    #[error("'{0}' is not a DNS name: {1}")]
    Name(String, #[source] PatternError),
    /// The key of the CA is malformed.
    #[error("the CA's key is not a private key in PEM")]
    Key(#[source] rcgen::Error),
    /// The certificate of the CA is malformed.
    #[error("the CA's certificate is not a certificate in PEM")]
    Certificate,
    /// The CA's key does not belong to its certificate.
    #[error("the CA's certificate does not belong to the CA's key")]
    Pair,
    /// The CA is of another trust domain, or was not made by this program.
    #[error("the CA was not made by isthmus for the trust domain {0}")]
    Foreign(TrustDomain),
    /// Signing failed.
    #[error("signing failed")]
    Sign(#[source] rcgen::Error),
}

/// A CA of one trust domain, with its key.
pub struct Authority {
    trust_domain: TrustDomain,
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A workload's certificate, without the certificate of its CA, and its key.
pub struct Issued {
    /// The certificate in PEM.
    pub certificate_pem: String,
    /// The private key in PEM.
    pub key_pem: String,
}

impl Authority {
    /// Makes a new CA, valid for ten years.
    pub fn new(trust_domain: TrustDomain) -> Result<Self, DevelopmentError> {
        let key = KeyPair::generate().map_err(DevelopmentError::Sign)?;
        let params = authority_params(&trust_domain)?;
        let certificate_pem = params.self_signed(&key).map_err(DevelopmentError::Sign)?.pem();
        Ok(Self { trust_domain, certificate_pem, issuer: Issuer::new(params, key) })
    }

    /// Restores a CA that [`Authority::new`] made, from its two PEM texts.
    pub fn from_pem(
        trust_domain: TrustDomain,
        certificate: &str,
        key: &str,
    ) -> Result<Self, DevelopmentError> {
        let key = KeyPair::from_pem(key).map_err(DevelopmentError::Key)?;
        let found = anchor(certificate).ok_or(DevelopmentError::Certificate)?;
        let params = authority_params(&trust_domain)?;
        // The certificate is made again from the key and the trust domain. If the certificate in the file was made from the
        // same two, both certificates have the same public key and subject.
        let again = params.self_signed(&key).map_err(DevelopmentError::Sign)?.pem();
        let again = anchor(&again).ok_or(DevelopmentError::Certificate)?;
        if found.public_key != again.public_key {
            return Err(DevelopmentError::Pair);
        }
        if found.subject != again.subject {
            return Err(DevelopmentError::Foreign(trust_domain));
        }
        Ok(Self { trust_domain, certificate_pem: certificate.to_owned(), issuer: Issuer::new(params, key) })
    }

    /// Returns the certificate in PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Returns the private key in PEM.
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Returns the identity of a Kubernetes workload in this trust domain.
    pub fn identity(&self, namespace: &str, service_account: &str) -> Result<Identity, IdentityError> {
        Identity::parse(&format!("spiffe://{}/ns/{namespace}/sa/{service_account}", self.trust_domain))
    }

    /// Issues a certificate for server and client use whose one URI is `identity`. `names` are further
    /// subject names: DNS names (`*.suffix` too) and IP addresses.
    pub fn issue(&self, identity: &Identity, names: &[&str], days: u32) -> Result<Issued, DevelopmentError> {
        if identity.trust_domain() != self.trust_domain.as_str() {
            return Err(DevelopmentError::TrustDomain(identity.clone(), self.trust_domain.clone()));
        }
        self.sign(identity, names, days)
    }

    /// Issues a certificate for any identity, even outside the CA's trust domain, as a dishonest authority would.
    pub(super) fn sign(
        &self,
        identity: &Identity,
        names: &[&str],
        days: u32,
    ) -> Result<Issued, DevelopmentError> {
        let mut params = params(days);
        params.distinguished_name.push(DnType::OrganizationName, "isthmus development workload");
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.subject_alt_names.push(uri(identity.as_str())?);
        for name in names {
            params.subject_alt_names.push(subject_name(name)?);
        }
        let key = KeyPair::generate().map_err(DevelopmentError::Sign)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(DevelopmentError::Sign)?;
        Ok(Issued { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
    }
}

fn authority_params(trust_domain: &TrustDomain) -> Result<CertificateParams, DevelopmentError> {
    let mut params = params(AUTHORITY_DAYS);
    params.distinguished_name.push(DnType::OrganizationName, "isthmus development CA");
    params.distinguished_name.push(DnType::CommonName, trust_domain.as_str());
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.subject_alt_names.push(uri(&format!("spiffe://{trust_domain}"))?);
    Ok(params)
}

/// Returns certificate parameters that have only the validity set.
fn params(days: u32) -> CertificateParams {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = epoch + now.saturating_sub(CLOCK_SKEW);
    params.not_after = epoch + now + Duration::from_secs(u64::from(days) * SECONDS_PER_DAY);
    params
}

fn uri(text: &str) -> Result<SanType, DevelopmentError> {
    text.try_into().map(SanType::URI).map_err(DevelopmentError::Sign)
}

fn subject_name(text: &str) -> Result<SanType, DevelopmentError> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(SanType::IpAddress(address));
    }
    let fault = |fault| DevelopmentError::Name(text.to_owned(), fault);
    let name = match NamePattern::parse(text).map_err(fault)? {
        NamePattern::Any => return Err(fault(PatternError::Star)),
        pattern => pattern.to_string(),
    };
    name.try_into().map(SanType::DnsName).map_err(DevelopmentError::Sign)
}

/// The fields by which two CA certificates are compared.
struct Anchor {
    subject: Vec<u8>,
    public_key: Vec<u8>,
}

fn anchor(certificate_pem: &str) -> Option<Anchor> {
    let certificate = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).ok()?;
    let mut store = RootCertStore::empty();
    store.add(certificate).ok()?;
    let root = store.roots.first()?;
    Some(Anchor { subject: root.subject.to_vec(), public_key: root.subject_public_key_info.to_vec() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use rustls::server::WebPkiClientVerifier;
    use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

    use super::*;

    fn authority() -> Authority {
        Authority::new(TrustDomain::parse("cluster.local").expect("legal")).expect("a CA")
    }

    fn roots(authority: &Authority) -> Arc<RootCertStore> {
        let mut store = RootCertStore::empty();
        let certificate =
            CertificateDer::from_pem_slice(authority.certificate_pem().as_bytes()).expect("PEM");
        store.add(certificate).expect("a trust anchor");
        Arc::new(store)
    }

    fn pair(issued: &Issued) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = CertificateDer::pem_slice_iter(issued.certificate_pem.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).expect("a key");
        (chain.collect::<Result<_, _>>().expect("a chain"), key)
    }

    fn handshake(
        trusted: &Authority,
        server: &Issued,
        client: &Issued,
        name: &str,
    ) -> Result<(), rustls::Error> {
        let verifier = WebPkiClientVerifier::builder(roots(trusted)).build().expect("a verifier");
        let (chain, key) = pair(server);
        let server =
            ServerConfig::builder().with_client_cert_verifier(verifier).with_single_cert(chain, key)?;
        let (chain, key) = pair(client);
        let client = ClientConfig::builder()
            .with_root_certificates(roots(trusted))
            .with_client_auth_cert(chain, key)?;
        let name = ServerName::try_from(name.to_owned()).expect("a server name");
        let mut client = ClientConnection::new(Arc::new(client), name)?;
        let mut server = ServerConnection::new(Arc::new(server))?;
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).expect("memory takes all");
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                server.read_tls(&mut rest).expect("memory gives all");
                server.process_new_packets()?;
            }
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).expect("memory takes all");
            }
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                client.read_tls(&mut rest).expect("memory gives all");
                client.process_new_packets()?;
            }
        }
        Ok(())
    }

    #[test]
    fn two_workloads_of_one_authority_shake_hands() {
        let authority = authority();
        let cart = authority.identity("shop", "cart").expect("legal");
        let server =
            authority.issue(&cart, &["cart.example.com", "*.cart.mesh", "127.0.0.1"], 1).expect("issued");
        let web = authority.identity("shop", "web").expect("legal");
        let client = authority.issue(&web, &[], 1).expect("issued");
        for name in ["cart.example.com", "v1.cart.mesh", "127.0.0.1"] {
            handshake(&authority, &server, &client, name).expect(name);
        }
        handshake(&authority, &server, &client, "other.example.com").expect_err("not in the certificate");
        handshake(&self::authority(), &server, &client, "cart.example.com").expect_err("another CA");
    }

    #[test]
    fn the_identity_is_the_only_uri_of_a_certificate() {
        let authority = authority();
        let cart = authority.identity("shop", "cart").expect("legal");
        let issued = authority.issue(&cart, &["a.example.com"], 1).expect("issued");
        let der = pair(&issued).0.remove(0);
        let text = String::from_utf8_lossy(&der).into_owned();
        assert_eq!(text.matches("spiffe://").count(), 1);
        assert!(text.contains("spiffe://cluster.local/ns/shop/sa/cart"));
    }

    #[test]
    fn an_authority_read_back_issues_what_the_first_one_vouches_for() {
        let first = authority();
        let domain = || TrustDomain::parse("cluster.local").expect("legal");
        let again =
            Authority::from_pem(domain(), first.certificate_pem(), &first.key_pem()).expect("the same");
        let cart = again.identity("shop", "cart").expect("legal");
        let issued = again.issue(&cart, &["cart.example.com"], 1).expect("issued");
        handshake(&first, &issued, &issued, "cart.example.com").expect("trusted");
    }

    #[test]
    fn an_authority_that_does_not_fit_is_refused() {
        let (first, second) = (authority(), authority());
        let domain = |name| TrustDomain::parse(name).expect("legal");
        let read =
            |name, certificate: &str, key: &str| Authority::from_pem(domain(name), certificate, key).err();
        let (certificate, key) = (first.certificate_pem(), first.key_pem());
        assert!(matches!(read("cluster.local", "nonsense", &key), Some(DevelopmentError::Certificate)));
        assert!(matches!(read("cluster.local", certificate, "nonsense"), Some(DevelopmentError::Key(_))));
        assert!(matches!(
            read("cluster.local", certificate, &second.key_pem()),
            Some(DevelopmentError::Pair)
        ));
        assert!(matches!(read("other.example", certificate, &key), Some(DevelopmentError::Foreign(_))));
    }

    #[test]
    fn names_and_identities_that_do_not_fit_are_refused() {
        let authority = authority();
        let cart = authority.identity("shop", "cart").expect("legal");
        for name in ["*", "a b", "", "a.*.b", "é.fr"] {
            let refused = authority.issue(&cart, &[name], 1).err();
            assert!(matches!(refused, Some(DevelopmentError::Name(..))), "{name}");
        }
        let stranger = Identity::parse("spiffe://other.example/ns/shop/sa/cart").expect("legal");
        assert!(matches!(authority.issue(&stranger, &[], 1).err(), Some(DevelopmentError::TrustDomain(..))));
    }
}
