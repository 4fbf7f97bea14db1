//! An enrolment. The first byte chooses what the other bytes are: the text of a token, the message in a token, or the request
//! of a gateway that redeems a token. The request is checked against the certificate that the gateway shows. The word `root` in
//! place of a root certificate means the root of that certificate.

use std::cell::OnceCell;

use isthmus::model::identity::{Identity, TrustDomain};
use isthmus::peer::enrolled::{Dialling, GatewayAddress};
use isthmus::peer::party::{Expected, Shown, check};
use isthmus::peer::token::{ADDRESSES_MAX, Token, sealed};
use isthmus::proto::isthmus::peer::v1::EnrolRequest;
use isthmus::tls::certificate::certificates;
use isthmus::tls::development::Authority;
use isthmus::tls::roots::RootStore;
use isthmus::tls::trust::Shower;
use prost::Message as _;

const ROOT: &[u8] = b"root";
/// The longest message about a refusal in bytes.
const REFUSAL_BYTES_MAX: usize = 4_096;

pub(super) fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    match first % 3 {
        0 => token(&String::from_utf8_lossy(rest)),
        1 => token(&sealed(rest)),
        _ => request(rest),
    }
}

fn token(text: &str) {
    let Ok(token) = Token::parse(text) else { return };
    assert!((1..=ADDRESSES_MAX).contains(&token.addresses.len()), "{token:?}");
    for address in &token.addresses {
        assert_eq!(GatewayAddress::parse(&address.to_string()).as_ref(), Ok(address));
    }
    assert_eq!(Token::parse(&token.text()).as_ref(), Ok(&token), "{text}");
}

/// A gateway that shows its certificate, and the roots that the other side knows.
struct World {
    /// The root certificate of the gateway's authority, in PEM.
    root: String,
    /// The certificate of the gateway, in PEM.
    leaf: String,
    identity: Identity,
    own: TrustDomain,
    taken: [TrustDomain; 1],
    roots: RootStore,
}

impl World {
    fn new() -> Self {
        let domain = |name: &str| TrustDomain::parse(name).expect("legal");
        let authority = Authority::new(domain("west.example")).expect("a CA");
        let identity = authority.identity("isthmus", "gateway").expect("legal");
        let leaf = authority.issue(&identity, &[], 1).expect("issued").certificate_pem;
        let root = authority.certificate_pem().to_owned();
        let (own, taken) = (domain("east.example"), [domain("south.example")]);
        Self { root, leaf, identity, own, taken, roots: RootStore::default() }
    }
}

fn request(message: &[u8]) {
    thread_local!(static WORLD: OnceCell<World> = const { OnceCell::new() });
    let Ok(request) = EnrolRequest::decode(message) else { return };
    let mut party = request.party.unwrap_or_default();
    WORLD.with(|world| {
        let World { root, leaf, identity, own, taken, roots } = world.get_or_init(World::new);
        let root = certificates(root.as_bytes()).expect("PEM").remove(0);
        for certificate in party.roots.iter_mut().flat_map(|roots| &mut roots.certificates) {
            if certificate == ROOT {
                *certificate = root.to_vec();
            }
        }
        let chain = certificates(leaf.as_bytes()).expect("PEM");
        let shown = Shown { shower: Shower::Client, chain: &chain };
        let expected = Expected { own, taken, trust_domain: None, alias: None, replaced: None, roots };
        match check(&party, &shown, Dialling::Theirs, &expected) {
            Ok(link) => {
                assert_eq!(link.identity, *identity, "another than the certificate says");
                assert!((1..=16).contains(&link.roots.len()) && link.roots.contains(&root));
                assert!(certificates(link.pem().as_bytes()).is_ok_and(|again| again == link.roots));
            }
            Err(refusal) => {
                assert!((1..=REFUSAL_BYTES_MAX).contains(&refusal.len()), "{refusal}");
                assert!(!refusal.contains(['\0', '\x1b', '\n']), "{refusal:?}");
            }
        }
    });
}
