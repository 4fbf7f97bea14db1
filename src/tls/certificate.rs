//! A workload's certificate (X.509-SVID) with its key, read from PEM or DER and checked once.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::prelude::{BASE64_STANDARD, Engine as _};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use isthmus_model::identity::{Identity, IdentityError};
use isthmus_telemetry::clock::rfc3339;

/// The number of characters in a line of PEM (RFC 7468 §2).
const PEM_LINE: usize = 64;

/// A certificate of this gateway, with its key.
#[derive(Debug)]
pub struct Certificate {
    /// The SPIFFE ID in the certificate's URI.
    pub identity: Identity,
    /// The time span in which the certificate is valid.
    pub validity: Validity,
    /// The serial number in hexadecimal digits.
    pub serial: String,
    /// The chain, leaf first, and the key.
    pub key: Arc<CertifiedKey>,
}

impl Certificate {
    /// Returns an error text if `expected` is another identity.
    pub(super) fn is_not_of(&self, expected: Option<&Identity>) -> Option<String> {
        let expected = expected.filter(|expected| **expected != self.identity)?;
        Some(format!(
            "the identity of the certificate is {}, but node and mesh.trustDomain require {expected}",
            self.identity
        ))
    }
}

/// The validity of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The certificate is valid from this time.
    pub not_before: SystemTime,
    /// The certificate is valid until this time.
    pub not_after: SystemTime,
}

impl Validity {
    /// Returns true if less than a third of the lifetime is left. Every source renews earlier, so a true
    /// result means that renewal fails.
    pub fn is_near_its_end(&self, now: SystemTime) -> bool {
        let life = self.not_after.duration_since(self.not_before).unwrap_or_default();
        self.not_after.duration_since(now).is_ok_and(|left| left < life / 3)
    }

    /// Returns true if the certificate has expired.
    pub fn is_over(&self, now: SystemTime) -> bool {
        self.not_after <= now
    }

    /// Returns true if the certificate is not valid yet.
    pub fn is_early(&self, now: SystemTime) -> bool {
        self.not_before > now
    }

    /// Returns why the certificate is not valid at this time, as a clause that follows "the certificate"; `None` if it is
    /// valid.
    pub fn fault(&self, now: SystemTime) -> Option<String> {
        if self.is_over(now) {
            Some(format!("expired at {}", rfc3339(self.not_after)))
        } else {
            self.is_early(now).then(|| format!("is not valid before {}", rfc3339(self.not_before)))
        }
    }
}

/// The reason why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateFault {
    /// The text is not PEM.
    #[error("found no valid PEM with certificates: {0}")]
    Pem(rustls::pki_types::pem::Error),
    /// The chain has no certificate.
    #[error("found no certificate")]
    Empty,
    /// The text has certificates that the reader skips, because they do not begin as RFC 7468 asks for.
    #[error(
        "found {begun} certificates, of which only {read} can be read: in line {line}, other text stands before \
         \"-----BEGIN CERTIFICATE-----\", such as spaces, the end of another file or a byte order mark, or the label is another \
         one, such as TRUSTED CERTIFICATE"
    )]
    Skipped {
        /// The number of certificates that begin.
        begun: usize,
        /// The number of certificates that were read.
        read: usize,
        /// The first line with a certificate that begins otherwise.
        line: usize,
    },
    /// The key is malformed or of an unknown kind.
    #[error("found no valid PEM with one private key: {0}")]
    Key(rustls::pki_types::pem::Error),
    /// The key is encrypted.
    #[error("the private key is encrypted; give a key without a passphrase")]
    EncryptedKey,
    /// The text that should be a key is a certificate.
    #[error("found a certificate, expected a private key")]
    NotAKey,
    /// The key does not belong to the certificate.
    #[error("the key does not match the certificate, or is not usable: {0}")]
    Pair(rustls::Error),
    /// The certificate is malformed.
    #[error("the certificate cannot be read")]
    Malformed,
    /// A later certificate of the chain has the identity.
    #[error(
        "the chain is in the wrong order: put the certificate with the SPIFFE identity first, and each issuer after what it has \
         signed"
    )]
    Order,
    /// The certificate does not name one SPIFFE ID.
    #[error("the certificate {0}")]
    Identity(#[from] IdentityFault),
}

/// The reason why a certificate names no identity (X.509-SVID §2: exactly one URI, a SPIFFE ID; X.509-SVID §4.3:
/// a key for signatures).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityFault {
    /// The certificate is malformed.
    #[error("cannot be read")]
    Malformed,
    /// The certificate has no URI.
    #[error("has no URI among its names, so it has no SPIFFE identity")]
    None,
    /// The key usage does not allow signatures.
    #[error("has a key usage without digitalSignature")]
    NoSignature,
    /// The certificate has more than one URI.
    #[error("has several URIs among its names, so its identity is ambiguous")]
    Several,
    /// The URI is not a SPIFFE ID.
    #[error("has a URI that is not a SPIFFE identity: {0}")]
    Illegal(IdentityError),
}

impl Certificate {
    /// Parses a certificate chain, leaf first, and its key from two PEM texts.
    pub fn from_pem(chain: &[u8], key: &[u8], provider: &CryptoProvider) -> Result<Self, CertificateFault> {
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| key_fault(key, error))?;
        Self::from_der(certificates(chain)?, key, provider)
    }

    /// Checks a chain, leaf first, and its key.
    pub fn from_der(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        provider: &CryptoProvider,
    ) -> Result<Self, CertificateFault> {
        let leaf = chain.first().ok_or(CertificateFault::Empty)?;
        let identity = identity_of(leaf).map_err(|fault| {
            let is_later = chain[1..].iter().any(|other| identity_of(other).is_ok());
            if is_later { CertificateFault::Order } else { fault.into() }
        })?;
        let (_, parsed) = X509Certificate::from_der(leaf).map_err(|_| CertificateFault::Malformed)?;
        let serial = parsed.raw_serial().iter().fold(String::new(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        });
        let validity = validity(&parsed);
        let key = CertifiedKey::from_der(chain, key, provider).map_err(CertificateFault::Pair)?;
        Ok(Self { identity, validity, serial, key: Arc::new(key) })
    }
}

/// Returns why a PEM text has no usable private key.
fn key_fault(pem: &[u8], error: rustls::pki_types::pem::Error) -> CertificateFault {
    let text = String::from_utf8_lossy(pem);
    // The two forms of an encrypted key: PKCS #8 (RFC 5958), and the header of a traditional key (RFC 1421).
    if text.contains("-----BEGIN ENCRYPTED PRIVATE KEY-----") || text.contains("Proc-Type: 4,ENCRYPTED") {
        CertificateFault::EncryptedKey
    } else if text.contains(BEGIN) && !text.contains("PRIVATE KEY-----") {
        CertificateFault::NotAKey
    } else {
        CertificateFault::Key(error)
    }
}

/// The line that begins a certificate (RFC 7468 §5).
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
/// The labels of certificates. The reader knows the first one; OpenSSL writes the others too.
const LABELS: [&str; 3] = [BEGIN, "-----BEGIN TRUSTED CERTIFICATE-----", "-----BEGIN X509 CERTIFICATE-----"];

/// Parses all certificates of a PEM text; there must be at least one. If any certificate of the text cannot be read, none is
/// returned: a bundle without one of its roots would refuse callers, and a chain without an intermediate would be refused.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateFault> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(CertificateFault::Pem)?;
    let text = String::from_utf8_lossy(pem);
    let begun = LABELS.iter().map(|label| text.matches(label).count()).sum();
    if begun != all.len() {
        let is_skipped =
            |line: &str| LABELS.iter().any(|label| line.contains(label)) && line.trim_ascii_end() != BEGIN;
        let line = text.lines().position(is_skipped).map_or(1, |at| at + 1);
        return Err(CertificateFault::Skipped { begun, read: all.len(), line });
    }
    if all.is_empty() { Err(CertificateFault::Empty) } else { Ok(all) }
}

/// Returns certificates in PEM.
pub fn pem(certificates: &[CertificateDer<'_>]) -> String {
    let mut text = String::new();
    for certificate in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        let encoded = BASE64_STANDARD.encode(certificate);
        let mut rest = encoded.as_str();
        while !rest.is_empty() {
            let (line, more) = rest.split_at(rest.len().min(PEM_LINE));
            text.push_str(line);
            text.push('\n');
            rest = more;
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

thread_local! {
    /// The last certificate that this thread has read the identity of, and that identity. A handshake asks twice, when it
    /// verifies the certificate and when it is complete, and the next connection often has the same caller.
    static LAST: RefCell<Option<(CertificateDer<'static>, Identity)>> = const { RefCell::new(None) };
}

/// Returns the SPIFFE ID of a certificate.
pub fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, IdentityFault> {
    LAST.with_borrow_mut(|last| match last {
        Some((known, identity)) if **known == **certificate => Ok(identity.clone()),
        _ => {
            let identity = read_identity(certificate)?;
            *last = Some((certificate.clone().into_owned(), identity.clone()));
            Ok(identity)
        }
    })
}

fn read_identity(certificate: &CertificateDer<'_>) -> Result<Identity, IdentityFault> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| IdentityFault::Malformed)?;
    let usage = parsed.key_usage().map_err(|_| IdentityFault::Malformed)?;
    if usage.is_some_and(|usage| !usage.value.digital_signature()) {
        return Err(IdentityFault::NoSignature);
    }
    let names = parsed.subject_alternative_name().map_err(|_| IdentityFault::Malformed)?;
    let mut uris = names.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
        GeneralName::URI(uri) => Some(Ok(*uri)),
        // A URI with illegal characters counts too: if it were skipped, a second URI would pass as the only one.
        GeneralName::Invalid(_, _) => Some(Err(IdentityFault::Malformed)),
        _ => None,
    });
    let uri = uris.next().ok_or(IdentityFault::None)??;
    if uris.next().is_some() {
        return Err(IdentityFault::Several);
    }
    Identity::parse(uri).map_err(IdentityFault::Illegal)
}

/// Returns true if a certificate is that of an authority with name constraints for URIs (RFC 5280, section 4.2.1.10).
pub(super) fn limits_uris(certificate: &CertificateDer<'_>) -> bool {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else { return false };
    let Ok(Some(constraints)) = parsed.name_constraints() else { return false };
    let subtrees = [&constraints.value.permitted_subtrees, &constraints.value.excluded_subtrees];
    let mut subtrees = subtrees.into_iter().flatten().flatten();
    subtrees.any(|subtree| matches!(subtree.base, GeneralName::URI(_)))
}

/// Returns the validity of a certificate; `None` if the certificate is malformed.
pub fn validity_of(certificate: &CertificateDer<'_>) -> Option<Validity> {
    X509Certificate::from_der(certificate).ok().map(|(_, parsed)| validity(&parsed))
}

/// Returns the validity of a parsed certificate.
pub(super) fn validity(certificate: &X509Certificate<'_>) -> Validity {
    let validity = certificate.validity();
    let time = |seconds: i64| match u64::try_from(seconds) {
        Ok(seconds) => UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(UNIX_EPOCH),
        // The time is before 1970: the epoch is early enough.
        Err(_) => UNIX_EPOCH,
    };
    Validity {
        not_before: time(validity.not_before.timestamp()),
        not_after: time(validity.not_after.timestamp()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_that_the_reader_skips_are_told_so() {
        let one = pem(&[CertificateDer::from(vec![1; 90])]);
        let joined = format!("{}{one}", one.trim_end());
        let fault = |text: &str| match certificates(text.as_bytes()) {
            Ok(read) => panic!("read {}", read.len()),
            Err(fault) => fault.to_string(),
        };
        let lines = one.lines().count();
        assert!(
            fault(&joined).contains(&format!("only 1 can be read: in line {lines},")),
            "{}",
            fault(&joined)
        );
        let marked = format!("\u{feff}{one}{one}");
        assert!(fault(&marked).starts_with("found 2 certificates, of which only 1"), "{}", fault(&marked));
        assert!(fault(&format!("\u{feff}{one}")).starts_with("found 1 certificates, of which only 0"));
        // Spaces and the labels of OpenSSL are faults too, also beside a certificate that can be read.
        let indented = format!("{one}  {one}");
        assert!(
            fault(&indented).contains(&format!("only 1 can be read: in line {},", lines + 1)),
            "{}",
            fault(&indented)
        );
        for label in ["TRUSTED CERTIFICATE", "X509 CERTIFICATE"] {
            let other = format!("{one}{}", one.replace("CERTIFICATE", label));
            assert!(fault(&other).starts_with("found 2 certificates, of which only 1"), "{}", fault(&other));
        }
        // Comments between certificates are no fault.
        assert_eq!(certificates(format!("# one\n{one}\r\n# two\n{one}").as_bytes()).expect("both").len(), 2);
    }

    #[test]
    fn a_key_that_is_encrypted_or_a_certificate_is_told_so() {
        let fault = |key: &str| {
            let read = Certificate::from_pem(b"", key.as_bytes(), &crate::server::provider());
            read.expect_err("no key").to_string()
        };
        let encrypted = "the private key is encrypted; give a key without a passphrase";
        assert_eq!(
            fault("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"),
            encrypted
        );
        let old = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\nAAAA\n\
                   -----END RSA PRIVATE KEY-----\n";
        assert_eq!(fault(old), encrypted);
        let certificate = pem(&[CertificateDer::from(vec![7; 50])]);
        assert_eq!(fault(&certificate), "found a certificate, expected a private key");
        assert!(fault("").starts_with("found no valid PEM with one private key: "), "{}", fault(""));
    }

    #[test]
    fn pem_is_read_as_it_was_written() {
        for length in [1, 47, 48, 49, 1_000] {
            let all = [CertificateDer::from(vec![7; length]), CertificateDer::from(vec![9; 5])];
            assert_eq!(certificates(pem(&all).as_bytes()).expect("PEM"), all);
        }
    }
}
