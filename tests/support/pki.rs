//! Certificates for tests, made with rcgen directly.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, CustomExtension,
    DnType, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// A CA.
pub struct Pki {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The CA that all tests of a process share, because generating keys is slow.
pub static PKI: LazyLock<Pki> = LazyLock::new(|| Pki::new("the tests' CA"));

/// A certificate and its key.
pub struct Issued {
    pub certificate: CertificateDer<'static>,
    pub key: PrivateKeyDer<'static>,
    pub certificate_pem: String,
    pub key_pem: String,
}

impl Issued {
    /// Reads a certificate and its key from PEM files.
    pub fn read(certificate: &Path, key: &Path) -> Self {
        let text = |path| std::fs::read_to_string(path).expect("a file");
        Self {
            certificate: CertificateDer::from_pem_file(certificate).expect("a certificate"),
            key: PrivateKeyDer::from_pem_file(key).expect("a key"),
            certificate_pem: text(certificate),
            key_pem: text(key),
        }
    }
}

impl Pki {
    /// Creates another CA. No peer trusts it unless the test says so.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // OpenSSL regards a certificate as self-signed if the certificate's issuer equals its subject. So the CA has a name
        // that none of its certificates has as subject.
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("a CA") }
    }

    /// Creates a CA that may certify only URIs of one host (RFC 5280, section 4.2.1.10).
    pub fn limited_to_uris_of(host: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "a CA with name constraints");
        let length = u8::try_from(host.len()).expect("a short name");
        // NameConstraints, permittedSubtrees, GeneralSubtree, and the base, a uniformResourceIdentifier.
        let head = [0x30, length + 6, 0xa0, length + 4, 0x30, length + 2, 0x86, length];
        let constraints = [&head, host.as_bytes()].concat();
        params.custom_extensions.push(CustomExtension::from_oid_content(&[2, 5, 29, 30], constraints));
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("a CA") }
    }

    /// Creates a CA that is valid from 1 January of one year to 1 January of another.
    pub fn of_years(name: &str, from: i32, until: i32) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(from, 1, 1), rcgen::date_time_ymd(until, 1, 1));
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("a CA") }
    }

    pub fn ca_pem(&self) -> String {
        self.issuer.pem()
    }

    pub fn ca_der(&self) -> CertificateDer<'static> {
        self.issuer.der().clone()
    }

    /// Issues a certificate for DNS names, with a SPIFFE URI if one is given.
    pub fn issue(&self, names: &[&str], uri: Option<&str>) -> Issued {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).expect("parameters");
        if let Some(uri) = uri {
            params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a URI")));
            // X.509-SVID §4.3. Envoy's SPIFFE validator refuses a certificate without key usages.
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        }
        self.sign(params)
    }

    /// Issues a client certificate to a user in a group, as Kubernetes reads its subject (CN and O).
    pub fn issue_to(&self, user: &str, group: &str) -> Issued {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Issued {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        Issued {
            certificate: certificate.der().clone(),
            key: PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
        }
    }

    /// Issues a certificate with this serial number and URI.
    pub fn issue_numbered(&self, serial: u64, uri: &str) -> Issued {
        let mut params = CertificateParams::default();
        params.serial_number = Some(serial.into());
        params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a URI")));
        self.sign(params)
    }

    /// Returns a list that revokes the certificates with these serial numbers, in PEM. It should have been replaced on 1 January of
    /// this year.
    pub fn crl(&self, revoked: &[u64], until: i32) -> String {
        let since = rcgen::date_time_ymd(2024, 1, 1);
        let revoked = revoked.iter().map(|serial| RevokedCertParams {
            serial_number: (*serial).into(),
            revocation_time: since,
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: since,
            next_update: rcgen::date_time_ymd(until, 1, 1),
            crl_number: 1_u64.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).expect("signed").pem().expect("PEM")
    }

    /// Issues a certificate with these URIs, valid from 1 January of one year to 1 January of another.
    pub fn issue_for(&self, uris: &[&str], from: i32, until: i32) -> Issued {
        let mut params = CertificateParams::default();
        let day = |year| rcgen::date_time_ymd(year, 1, 1);
        (params.not_before, params.not_after) = (day(from), day(until));
        params
            .subject_alt_names
            .extend(uris.iter().map(|uri| SanType::URI((*uri).try_into().expect("a URI"))));
        self.sign(params)
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca_der()).expect("a root");
        roots
    }

    /// Returns a server config as [`Pki::server`] does, whose certificate was valid in 2001.
    pub fn expired_server(&self, name: &str) -> Arc<ServerConfig> {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
        (params.not_before, params.not_after) =
            (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
        Self::serving(self.sign(params))
    }

    /// Returns a server config that has a certificate for a name, and that requires no client certificate.
    pub fn server(&self, name: &str) -> Arc<ServerConfig> {
        Self::serving(self.issue(&[name], None))
    }

    fn serving(issued: Issued) -> Arc<ServerConfig> {
        let config = ServerConfig::builder().with_no_client_auth();
        Arc::new(config.with_single_cert(vec![issued.certificate], issued.key).expect("a server"))
    }

    /// Returns a server config that has a certificate for a name and a URI, and that requires a client certificate of this CA.
    pub fn mutual_server(&self, name: &str, uri: &str) -> Arc<ServerConfig> {
        let issued = self.issue(&[name], Some(uri));
        let verifier = WebPkiClientVerifier::builder(Arc::new(self.roots())).build().expect("a verifier");
        let config = ServerConfig::builder().with_client_cert_verifier(verifier);
        Arc::new(config.with_single_cert(vec![issued.certificate], issued.key).expect("a server"))
    }

    /// Returns a client config that trusts only this CA and offers these ALPN protocols.
    pub fn client(&self, alpn: &[&str]) -> Arc<ClientConfig> {
        let mut config = ClientConfig::builder().with_root_certificates(self.roots()).with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }

    /// Returns a client config like [`Pki::client`] with a client certificate, from any CA.
    pub fn client_with(&self, issued: Issued, alpn: &[&str]) -> Arc<ClientConfig> {
        let config = ClientConfig::builder().with_root_certificates(self.roots());
        let config = config.with_client_auth_cert(vec![issued.certificate], issued.key);
        let mut config = config.expect("a client");
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}
