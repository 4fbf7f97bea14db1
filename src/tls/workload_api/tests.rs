//! The contents of Workload API messages, and the messages that are refused.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType, date_time_ymd};

use super::*;
use crate::server::provider;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA")
}

fn identity(text: &str) -> Identity {
    Identity::parse(text).expect("legal")
}

fn svid(id: &str, authority: &Authority, until: i32) -> X509svid {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.subject_alt_names.push(SanType::URI(id.try_into().expect("ASCII")));
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(until, 1, 1);
    X509svid {
        spiffe_id: id.to_owned(),
        x509_svid: params.signed_by(&key, authority).expect("signed").der().to_vec(),
        x509_svid_key: key.serialize_der(),
        bundle: authority.der().to_vec(),
    }
}

fn read(message: &X509svidResponse, expected: Option<&str>) -> Result<Update, AnswerFault> {
    read_answer(message, expected.map(identity).as_ref(), SystemTime::now(), &provider())
}

fn of(svids: Vec<X509svid>) -> X509svidResponse {
    X509svidResponse { svids, ..X509svidResponse::default() }
}

#[test]
fn certificates_one_behind_another_are_told_apart() {
    let (one, two) = (authority().der().clone(), authority().der().clone());
    let both = [one.as_ref(), two.as_ref()].concat();
    assert_eq!(concatenated(&both, 2), Ok(vec![one.clone(), two]));
    assert_eq!(concatenated(&both, 1), Err(DerFault::TooMany(1)));
    assert_eq!(concatenated(&[], 1), Err(DerFault::Empty));
    for cut in [1, one.len() - 1, one.len() + 1, both.len() - 1] {
        let at = 1 + usize::from(cut > one.len());
        assert_eq!(concatenated(&both[..cut], 9), Err(DerFault::Malformed(at)), "{cut}");
    }
    assert_eq!(concatenated(&[&both[..], b"more"].concat(), 9), Err(DerFault::Malformed(3)));
    // The length announces more bytes than there are.
    assert_eq!(concatenated(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff, 0], 9), Err(DerFault::Malformed(1)));
}

#[test]
fn the_expected_identity_is_chosen_or_else_the_default() {
    let root = authority();
    let message = of(vec![svid("spiffe://td/a", &root, 4000), svid("spiffe://td/b", &root, 4000)]);
    let chosen = |expected| read(&message, expected).expect("given").certificate.identity.to_string();
    assert_eq!(chosen(None), "spiffe://td/a");
    assert_eq!(chosen(Some("spiffe://td/b")), "spiffe://td/b");
    // The sink decides whether another identity is acceptable.
    assert_eq!(chosen(Some("spiffe://td/c")), "spiffe://td/a");
}

#[test]
fn bundles_are_by_trust_domain_and_our_own_is_not_for_others_to_say() {
    let (own, other) = (authority(), authority());
    let mut message = of(vec![svid("spiffe://td/a", &own, 4000)]);
    let bundles = [("spiffe://td", &other), ("spiffe://west", &other), ("east", &other)];
    message.federated_bundles =
        bundles.into_iter().map(|(name, root)| (name.to_owned(), root.der().to_vec())).collect();
    message.federated_bundles.insert("spiffe://nobody".to_owned(), Vec::new());
    let given = read(&message, None).expect("given");
    let found: Vec<_> = given.bundles.iter().map(|(domain, roots)| (domain.as_str(), &roots[0])).collect();
    assert_eq!(found, [("east", other.der()), ("td", own.der()), ("west", other.der())]);
    assert!(given.problems.is_empty());
}

#[test]
fn a_bundle_of_another_domain_that_is_bad_stops_nothing_else() {
    let own = authority();
    let mut message = of(vec![svid("spiffe://td/a", &own, 4000)]);
    for (name, der) in [("spiffe://west", b"no".to_vec()), ("spiffe://EAST", own.der().to_vec())] {
        message.federated_bundles.insert(name.to_owned(), der);
    }
    let given = read(&message, None).expect("given");
    assert_eq!(given.bundles.len(), 1);
    assert!(given.problems["west"].contains("the bundle of west: certificate 1 cannot be read"));
    assert!(given.problems["EAST"].contains("the trust domain of a bundle is invalid"));
}

#[test]
fn a_bundle_that_cannot_be_read_stays_as_it_was_and_one_that_is_not_there_goes() {
    let (own, west) = (authority(), authority());
    let sink = Sink::alone(None, &[]);
    let mut message = of(vec![svid("spiffe://td/a", &own, 4000)]);
    let mut tell = |west: Option<Vec<u8>>| {
        // A malformed bundle for the gateway's own domain has no effect.
        message.federated_bundles = west.into_iter().map(|der| ("spiffe://west".to_owned(), der)).collect();
        message.federated_bundles.insert("spiffe://td".to_owned(), b"no".to_vec());
        take(&message, &sink).expect("taken");
        let trust = sink.store.reader().newest().expect("roots");
        let domains = trust.domains().map(|(domain, bundle)| (domain.to_string(), bundle.roots[0].clone()));
        let problem = sink.status.borrow().problems.get(FEDERATION).cloned().unwrap_or_default();
        (domains.collect::<Vec<_>>(), problem)
    };
    let both = [("td".to_owned(), own.der().clone()), ("west".to_owned(), west.der().clone())];
    assert_eq!(tell(Some(west.der().to_vec())).0, both);
    let (domains, problem) = tell(Some(b"no".to_vec()));
    assert_eq!(domains, both);
    assert!(
        problem.starts_with("2 trust bundles cannot be used; the first one, \"td\": the bundle of td"),
        "{problem}"
    );
    let (domains, problem) = tell(None);
    assert_eq!(domains, both[..1]);
    assert!(problem.starts_with("1 trust bundles cannot be used"), "{problem}");
    message.federated_bundles.clear();
    take(&message, &sink).expect("taken");
    assert!(sink.status.borrow().problems.is_empty());
}

#[test]
fn answers_that_are_of_no_use_are_refused() {
    let root = authority();
    let good = || svid("spiffe://td/a", &root, 4000);
    let refused = |message: &X509svidResponse| read(message, None).expect_err("refused").to_string();
    let with = |change: fn(&mut X509svid)| {
        let mut svid = good();
        change(&mut svid);
        refused(&of(vec![svid]))
    };
    let cases = [
        (refused(&of(Vec::new())), "the answer has no identity"),
        (with(|svid| svid.x509_svid.clear()), "the certificate of spiffe://td/a: found no certificate"),
        (with(|svid| svid.x509_svid.truncate(9)), "certificate 1 cannot be read"),
        (with(|svid| svid.x509_svid_key.truncate(9)), "is not usable"),
        (with(|svid| svid.spiffe_id = "spiffe://td/b".to_owned()), "has the identity spiffe://td/a"),
        (with(|svid| svid.bundle.clear()), "the bundle of td: found no certificate"),
        (
            with(|svid| svid.x509_svid = svid.x509_svid.repeat(CHAIN_MAX + 1)),
            "found more than 16 certificates",
        ),
        (refused(&of(vec![svid("spiffe://td/a", &root, 2021)])), "expired at 2021-01-01T00:00"),
        (refused(&of(vec![svid("https://td/a", &root, 4000)])), "a URI that is not a SPIFFE identity"),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "no {expected:?} in {found:?}");
    }
    let mut many = of(vec![good()]);
    many.federated_bundles = (0..=DOMAINS_MAX).map(|at| (format!("d{at}"), Vec::new())).collect();
    assert_eq!(read(&many, None).expect_err("refused"), AnswerFault::TooMany);
}

#[test]
fn it_is_asked_again_when_a_quarter_of_the_life_is_left() {
    // Returns a time in whole seconds, far in the future.
    let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(40_000_000_000 + seconds);
    assert_eq!(last_quarter(Validity { not_before: at(0), not_after: at(400) }), at(300));
    // The last quarter has begun, so the end of the validity is returned.
    let now = SystemTime::now();
    let (not_before, not_after) = (now - Duration::from_secs(900), now + Duration::from_secs(100));
    assert_eq!(last_quarter(Validity { not_before, not_after }), not_after);
}
