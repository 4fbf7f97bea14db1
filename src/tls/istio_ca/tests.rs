//! The requests to Istio's authority, and the responses that are accepted.

use rcgen::{BasicConstraints, CertifiedIssuer, IsCa, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, ParsedExtension, X509CertificationRequest};

use super::*;
use crate::server::provider;

fn identity() -> Identity {
    Identity::parse("spiffe://td/ns/istio-system/sa/eastwest").expect("legal")
}

/// Returns a CA with a self-signed certificate.
fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA")
}

/// Returns a certificate of `key`, in PEM.
fn certified(key: &KeyPair, authority: &CertifiedIssuer<'static, KeyPair>, years: (i32, i32)) -> String {
    let mut params = CertificateParams::default();
    params.subject_alt_names.push(SanType::URI(identity().as_str().try_into().expect("ASCII")));
    params.not_before = date_time_ymd(years.0, 1, 1);
    params.not_after = date_time_ymd(years.1, 1, 1);
    params.signed_by(key, authority).expect("signed").pem()
}

fn answer(items: &[String], key: &KeyPair) -> Result<Issued, AnswerFault> {
    read_answer(items, key, SystemTime::now(), &provider())
}

#[test]
fn the_request_has_no_subject_one_uri_and_a_p256_key() {
    let (key, pem) = request(&identity()).expect("a request");
    let pem = pem.as_bytes();
    let der = rustls::pki_types::CertificateSigningRequestDer::from_pem_slice(pem).expect("PEM");
    let (rest, csr) = X509CertificationRequest::from_der(&der).expect("PKCS #10");
    assert!(rest.is_empty());
    let info = &csr.certification_request_info;
    assert_eq!(info.subject.iter().count(), 0);
    let curve = info.subject_pki.algorithm.parameters.as_ref().and_then(|curve| curve.as_oid().ok());
    assert_eq!(curve.map(|curve| curve.to_id_string()).as_deref(), Some("1.2.840.10045.3.1.7"));
    assert_eq!(info.subject_pki.raw, rcgen::PublicKeyData::subject_public_key_info(&key));
    let names: Vec<_> = csr
        .requested_extensions()
        .expect("extensions")
        .map(|extension| match extension {
            ParsedExtension::SubjectAlternativeName(names) => names.general_names.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(names, [[GeneralName::URI(identity().as_str())]]);
    let (other, _) = request(&identity()).expect("a request");
    assert_ne!(key.serialize_der(), other.serialize_der());
}

#[test]
fn an_answer_is_a_chain_and_behind_it_one_root_or_several() {
    let (one, other) = (authority(), authority());
    let key = KeyPair::generate().expect("a key");
    let leaf = certified(&key, &one, (2020, 4000));
    let count = |items: &[String]| {
        answer(items, &key).map(|issued| (issued.certificate.key.cert.len(), issued.roots.len()))
    };
    assert_eq!(count(&[leaf.clone(), one.pem()]), Ok((1, 1)));
    assert_eq!(count(&[leaf.clone(), one.pem(), one.pem() + &other.pem()]), Ok((2, 2)));
    // One item may hold the whole chain.
    assert_eq!(count(&[leaf.clone() + &other.pem(), one.pem()]), Ok((2, 1)));
    assert_eq!(count(&[]), Err(AnswerFault::NoRoot(0)));
    assert_eq!(count(&[leaf.clone() + &one.pem()]), Err(AnswerFault::NoRoot(1)));
    let issued = answer(&[leaf, one.pem()], &key).expect("issued");
    assert_eq!(issued.certificate.identity, identity());
    assert_eq!(&issued.roots, &[one.der().clone()]);
}

#[test]
fn answers_that_are_of_no_use_are_refused() {
    let root = authority();
    let key = KeyPair::generate().expect("a key");
    let leaf = certified(&key, &root, (2020, 4000));
    let refused = |items: &[String]| answer(items, &key).expect_err("refused").to_string();
    let cases = [
        (vec![String::new(), root.pem()], "certificate 1: found no certificate"),
        (vec![leaf.clone(), "none".to_owned()], "certificate 2: found no certificate"),
        (
            vec![leaf.clone(), leaf.clone(), "-----BEGIN CERTIFICATE-----\n!".to_owned()],
            "certificate 3: found no valid PEM",
        ),
        (vec![leaf.replacen("MII", "MIA", 1), root.pem()], "cannot be read"),
        (
            vec![certified(&key, &root, (2020, 2021)), root.pem()],
            "the certificate expired at 2021-01-01T00:00",
        ),
        (vec![leaf.clone(), root.pem().repeat(ROOTS_MAX + 1)], "more than 16 certificates and 256 roots"),
        (vec![leaf.repeat(CHAIN_MAX + 1), root.pem()], "more than 16"),
        (vec![leaf.clone(); CHAIN_MAX + 2], "more than 16"),
        (vec![root.pem(), root.pem()], "has no URI among its names"),
    ];
    for (items, expected) in cases {
        let found = refused(&items);
        assert!(found.contains(expected), "no {expected:?} in {found:?}");
    }
    // The certificate has another key than the request.
    let other = certified(&KeyPair::generate().expect("a key"), &root, (2020, 4000));
    assert!(refused(&[other, root.pem()]).contains("the key does not match the certificate"));
}

#[test]
fn half_of_the_life_is_between_its_ends() {
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    assert_eq!(middle(Validity { not_before: at(100), not_after: at(300) }), at(200));
    // A validity that ends before it begins is over at once.
    assert_eq!(middle(Validity { not_before: at(300), not_after: at(100) }), at(300));
}
