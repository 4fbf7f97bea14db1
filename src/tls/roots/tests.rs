//! The trust in peers: the roots in use, and the identities that these roots verify.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, UnixTime};
use rustls::{ClientConnection, ServerConnection};

use super::*;
use crate::certificate::{Certificate, certificates};
use crate::development::Authority;
use crate::proof::Proof;
use crate::trust::{Shower, describe};
use crate::{client, server};
use isthmus_model::identity::Identity;

fn domain(name: &str) -> TrustDomain {
    TrustDomain::parse(name).expect("legal")
}

fn authority(name: &str) -> Authority {
    Authority::new(domain(name)).expect("a CA")
}

fn root(authority: &Authority) -> RootList {
    certificates(authority.certificate_pem().as_bytes()).expect("PEM")
}

fn certificate(authority: &Authority, identity: &str) -> Certificate {
    let issued = authority.sign(&Identity::parse(identity).expect("legal"), &[], 1).expect("issued");
    let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).expect("a key");
    Certificate::from_der(certificates(issued.certificate_pem.as_bytes()).expect("PEM"), key, &provider())
        .expect("usable")
}

/// Returns the store of a mesh with this trust domain and root, and with peers, each given by its alias, trust domain and root.
fn store(ours: (&str, &Authority), peers: &[(&str, &str, &Authority)]) -> RootStore {
    let store = RootStore::default();
    let trusts: Vec<PeerTrust> = peers
        .iter()
        .map(|(alias, named, _)| PeerTrust {
            peer: (*alias).into(),
            alias: domain(alias),
            trust_domain: domain(named),
            roots: None,
            is_enrolled: false,
        })
        .collect();
    store.roots.send_modify(|roots| {
        roots.set_peers(&trusts);
        roots.configured = [(domain(ours.0), root(ours.1))].into();
        roots.of_peers = peers.iter().map(|(alias, _, of)| (domain(alias), root(of))).collect();
    });
    store.publish();
    store
}

/// Returns the identity that the store's bundles verify in the certificate of a client, or the text of the error.
fn verified(store: &RootStore, certificate: &Certificate) -> String {
    verified_as(Shower::Client, store, certificate)
}

fn verified_as(shower: Shower, store: &RootStore, certificate: &Certificate) -> String {
    let bundles = store.reader().newest().expect("published");
    let [leaf, rest @ ..] = certificate.key.cert.as_slice() else { panic!("a leaf") };
    match bundles.verify_of(shower, leaf, rest, UnixTime::now()) {
        Ok(identity) => identity.to_string(),
        Err(error) => describe(&error),
    }
}

#[test]
fn the_roots_decide_whose_an_identity_is_where_trust_domains_have_one_name() {
    let (ours, west, south, stranger) =
        (authority("cluster.local"), authority("cluster.local"), authority("cluster.local"), authority("x"));
    let store = store(
        ("cluster.local", &ours),
        &[("west", "cluster.local", &west), ("south", "cluster.local", &south)],
    );
    let cart = "spiffe://cluster.local/ns/shop/sa/cart";
    assert_eq!(verified(&store, &certificate(&ours, cart)), cart);
    assert_eq!(verified(&store, &certificate(&west, cart)), "spiffe://west/ns/shop/sa/cart");
    assert_eq!(verified(&store, &certificate(&south, cart)), "spiffe://south/ns/shop/sa/cart");
    assert!(verified(&store, &certificate(&stranger, cart)).contains("UnknownIssuer"));
    // The alias is only our name for the domain: a certificate that names the alias is not trusted.
    let named = verified(&store, &certificate(&west, "spiffe://west/ns/shop/sa/cart"));
    assert!(named.contains("has no roots for the trust domain"), "{named}");
}

#[test]
fn a_peer_speaks_for_its_own_trust_domain_alone() {
    let (ours, west, south) = (authority("east"), authority("west"), authority("south"));
    let store =
        store(("east", &ours), &[("west", "west.example", &west), ("south", "south.example", &south)]);
    assert_eq!(verified(&store, &certificate(&west, "spiffe://west.example/a")), "spiffe://west/a");
    for forged in ["spiffe://east/a", "spiffe://south.example/a"] {
        let refused = verified(&store, &certificate(&west, forged));
        assert!(refused.contains("UnknownIssuer"), "{forged}: {refused}");
    }
    let bundles = store.reader().newest().expect("published");
    let is_of_peer = |text: &str| bundles.is_of_peer(&Identity::parse(text).expect("legal"));
    assert!(is_of_peer("spiffe://west/a") && !is_of_peer("spiffe://east/a") && !is_of_peer("spiffe://x/a"));
}

#[test]
fn a_rotation_takes_both_roots_and_then_the_new_one_alone() {
    let (ours, old, new, south) = (authority("east"), authority("w"), authority("w"), authority("s"));
    let store = store(("east", &ours), &[("west", "w", &old), ("south", "s", &south)]);
    let [by_old, by_new] = [&old, &new].map(|authority| certificate(authority, "spiffe://w/a"));
    let trusted = || [&by_old, &by_new].map(|certificate| verified(&store, certificate) == "spiffe://west/a");
    assert_eq!(trusted(), [true, false]);
    let of_south = || store.reader().newest().expect("published").bundle(&domain("south")).cloned();
    let before = of_south().expect("there");
    store.announce(&domain("west"), [root(&old), root(&new)].concat()).expect("good");
    assert_eq!(trusted(), [true, true]);
    store.announce(&domain("west"), root(&new)).expect("good");
    assert_eq!(trusted(), [false, true]);
    assert_eq!(store.announced(&domain("west")), root(&new));
    assert!(Arc::ptr_eq(&before, &of_south().expect("there")), "other peers are not touched");
    store.announce(&domain("west"), Vec::new()).expect("good");
    assert_eq!(trusted(), [true, false], "the file's roots are in use again");
}

#[test]
fn announced_roots_that_may_have_been_withdrawn_verify_links_and_servers_alone() {
    let (ours, old, new) = (authority("east"), authority("w"), authority("w"));
    let store = store(("east", &ours), &[("west", "w", &old)]);
    let [by_old, by_new] = [&old, &new].map(|authority| certificate(authority, "spiffe://w/a"));
    let known = "spiffe://west/a";
    store.suspend(&domain("west"));
    assert_eq!(verified(&store, &by_old), known, "nothing was announced");
    store.announce(&domain("west"), [root(&old), root(&new)].concat()).expect("good");
    let mut reader = store.reader();
    reader.see();
    store.suspend(&domain("west"));
    assert!(reader.unseen().is_some(), "connections are verified again");
    for of in [&by_old, &by_new] {
        let refused = verified(&store, of);
        assert!(refused.contains("has had no link for expireAfter"), "{refused}");
        assert_eq!(verified_as(Shower::Gateway, &store, of), known);
        let server = verified_as(Shower::Server, &store, of);
        assert_eq!(server, known);
    }
    assert_eq!(verified(&store, &certificate(&ours, "spiffe://east/a")), "spiffe://east/a");
    store.announce(&domain("west"), root(&new)).expect("good");
    assert_eq!(verified(&store, &by_new), known);
    assert_ne!(verified(&store, &by_old), known, "it was withdrawn");
    // The operator replaces the file while the announced roots are suspended.
    store.suspend(&domain("west"));
    store.roots.send_modify(|roots| drop(roots.of_peers.insert(domain("west"), root(&new))));
    store.publish();
    assert_eq!(verified(&store, &by_new), known);
}

#[test]
fn a_file_that_is_replaced_counts_more_than_what_was_announced_before() {
    let (ours, old, new, next) = (authority("east"), authority("w"), authority("w"), authority("w"));
    let store = store(("east", &ours), &[("west", "w", &old)]);
    let by = [&old, &new, &next].map(|authority| certificate(authority, "spiffe://w/a"));
    let trusted = || by.each_ref().map(|certificate| verified(&store, certificate) == "spiffe://west/a");
    store.announce(&domain("west"), root(&new)).expect("good");
    assert_eq!(trusted(), [false, true, false]);
    store.roots.send_modify(|roots| drop(roots.of_peers.insert(domain("west"), root(&next))));
    store.publish();
    assert_eq!(trusted(), [false, false, true], "the peer was enrolled again with another authority");
    store.announce(&domain("west"), root(&new)).expect("good");
    assert_eq!(trusted(), [false, true, false], "what it announces from then on counts again");
}

#[test]
fn roots_that_a_peer_announces_are_other_ones_only_if_they_differ_from_those_in_use() {
    let (ours, old, new) = (authority("east"), authority("w"), authority("w"));
    let store = store(("east", &ours), &[("west", "w", &old)]);
    store.roots.send_modify(|roots| drop(roots.of_peers.insert(domain("west"), root(&old))));
    let differ = |roots: RootList| store.take(&domain("west"), roots, None).expect("good");
    let both = || [root(&old), root(&new)].concat();
    assert!(!differ(root(&old)), "they are those of the file");
    assert!(differ(both()) && !differ(both().into_iter().rev().collect()));
    assert!(differ(Vec::new()), "those of the file count again");
    assert!(!differ(root(&old)));
}

#[test]
fn announced_roots_of_others_are_refused() {
    let (ours, west, south) = (authority("east"), authority("w"), authority("s"));
    let store = store(("east", &ours), &[("west", "w", &west), ("south", "s", &south)]);
    let announce = |roots: RootList| store.announce(&domain("west"), roots);
    for (other, name) in [(&ours, "east"), (&south, "south")] {
        let refused = announce([root(&west), root(other)].concat()).expect_err("a root of another");
        assert_eq!(
            refused,
            format!(
                "root 2 is also a root of the trust domain {name}; a root can belong to one trust domain only"
            )
        );
    }
    let refused = store.announce(&domain("north"), root(&west)).expect_err("nobody");
    assert_eq!(refused, "no peer has the trust domain north");
    assert!(announce(root(&authority("w"))).is_ok(), "its own is taken");
    assert_eq!(verified(&store, &certificate(&ours, "spiffe://east/a")), "spiffe://east/a");
}

#[test]
fn a_peer_with_a_new_trust_domain_may_bring_the_roots_of_the_old_one_along_and_no_others() {
    let (ours, west, south) = (authority("east"), authority("w"), authority("s"));
    let store = store(("east", &ours), &[("old", "old.example", &west), ("south", "s", &south)]);
    store.announce(&domain("old"), root(&west)).expect("good");
    let check = |replaced: Option<&str>, of: &Authority| {
        store.check(&domain("new"), replaced.map(domain).as_ref(), &root(of))
    };
    let is_taken = |checked: Result<(), String>, by: &str| {
        checked.is_err_and(|fault| fault.contains(&format!("also a root of the trust domain {by}")))
    };
    assert!(is_taken(check(None, &west), "old"));
    assert_eq!(check(Some("old"), &west), Ok(()));
    assert!(is_taken(check(Some("old"), &south), "south"));
    assert!(is_taken(check(Some("east"), &ours), "east"), "those of this mesh are not a peer's to take");
}

#[test]
fn an_announced_root_has_signed_itself() {
    let (ours, west) = (authority("east"), authority("w"));
    let store = store(("east", &ours), &[("west", "w", &west)]);
    let refuses = |der: Vec<u8>| store.announce(&domain("west"), vec![der.into()]).expect_err("refused");
    // The stranger has signed both certificates of `key`. In the second one, issuer and subject have the same name.
    let (key, stranger) =
        (rcgen::KeyPair::generate().expect("a key"), rcgen::KeyPair::generate().expect("a key"));
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let mut named = params.clone();
    named.distinguished_name.push(rcgen::DnType::CommonName, "issuer");
    for issuer in [named, params.clone()] {
        let issuer = rcgen::Issuer::new(issuer, &stranger);
        let forged = params.signed_by(&key, &issuer).expect("signed").der().to_vec();
        assert_eq!(refuses(forged), "root 1 is not a self-signed CA certificate");
    }
    let leaf = rcgen::CertificateParams::default().self_signed(&key).expect("signed").der().to_vec();
    assert_eq!(refuses(leaf), "root 1 is not a self-signed CA certificate");
    let good = params.self_signed(&key).expect("signed").der().to_vec();
    assert_eq!(refuses([good.clone(), vec![0]].concat()), "root 1 has bytes after its end");
    assert_eq!(refuses(b"x".to_vec()), "root 1 cannot be read");
    let many =
        store.announce(&domain("west"), vec![good.clone().into(); ANNOUNCED_MAX + 1]).expect_err("many");
    assert!(many.starts_with("there are 17 roots of"), "{many}");
    let large =
        store.announce(&domain("west"), vec![vec![0; ANNOUNCED_BYTES_MAX + 1].into()]).expect_err("large");
    assert!(large.starts_with("there are 1 roots of 65537 bytes"), "{large}");
    assert!(store.announce(&domain("west"), vec![good.into()]).is_ok());
}

#[test]
fn a_file_with_a_root_of_ours_is_a_problem_and_the_last_good_one_stays() {
    let (ours, west) = (authority("east"), authority("w"));
    let store = store(("east", &ours), &[("west", "w", &west)]);
    store.roots.send_modify(|roots| drop(roots.of_peers.insert(domain("west"), root(&ours))));
    store.publish();
    assert_eq!(verified(&store, &certificate(&west, "spiffe://w/a")), "spiffe://west/a");
    let refused = verified(&store, &certificate(&ours, "spiffe://w/a"));
    assert!(refused.contains("UnknownIssuer"), "{refused}");
    let problem = store.status.borrow().problems["trust of west (roots in use)"].clone();
    assert!(problem.contains("one of these roots is also a root of the trust domain east"), "{problem}");
    store.roots.send_modify(|roots| drop(roots.of_peers.insert(domain("west"), root(&west))));
    store.publish();
    assert!(store.status.borrow().problems.is_empty());
    let (ours, west) = (root(&ours), root(&west));
    let files = [(domain("east"), ours.clone()), (domain("west"), [west, ours].concat())];
    let found = shared(files.iter().map(|(domain, roots)| (domain, roots)));
    assert_eq!(found, [(domain("west"), "root 2 is also a root of the trust domain east".to_owned())]);
}

/// Exchanges the bytes of a handshake until both parties have finished, or one of them refuses the other.
fn handshake(client: &mut ClientConnection, server: &mut ServerConnection) -> Result<(), rustls::Error> {
    for _ in 0..4 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).expect("memory");
        }
        let mut bytes = bytes.as_slice();
        while !bytes.is_empty() {
            server.read_tls(&mut bytes).expect("memory");
            server.process_new_packets()?;
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).expect("memory");
        }
        let mut bytes = bytes.as_slice();
        while !bytes.is_empty() {
            client.read_tls(&mut bytes).expect("memory");
            client.process_new_packets()?;
        }
    }
    Ok(())
}

#[test]
fn both_sides_of_a_link_know_each_other_by_their_aliases() {
    let (east, west) = (authority("cluster.local"), authority("cluster.local"));
    let at_east = store(("cluster.local", &east), &[("west", "cluster.local", &west)]);
    let at_west = store(("cluster.local", &west), &[("east", "cluster.local", &east)]);
    let shown = |authority: &Authority| {
        let writer = LatestWriter::default();
        writer.set(Arc::new(certificate(authority, "spiffe://cluster.local/ns/isthmus/sa/gateway")));
        writer.reader()
    };
    let accepts = server::mutual(shown(&west), at_west.reader(), Shower::Gateway, &[b"isthmus-peer/1"])
        .expect("usable");
    let dials = |alias: &str, at: &RootStore| {
        let made =
            client::mutual(shown(&east), at.reader(), domain(alias), &[b"isthmus-peer/1"]).expect("usable");
        ClientConnection::new(Arc::new(made), std::net::IpAddr::from([127, 0, 0, 1]).into())
            .expect("a client")
    };
    let accepts = Arc::new(accepts);
    let (mut client, mut server) =
        (dials("west", &at_east), ServerConnection::new(accepts.clone()).expect("a server"));
    let (mut seen_by_east, mut seen_by_west) = (at_east.reader(), at_west.reader());
    seen_by_east.see();
    seen_by_west.see();
    handshake(&mut client, &mut server).expect("agreed");
    let gateway = Proof::of_server(&client, &mut seen_by_east).expect("proven");
    assert_eq!(gateway.identity.as_str(), "spiffe://west/ns/isthmus/sa/gateway");
    let caller = Proof::of(Shower::Gateway, &server, &mut seen_by_west).expect("proven");
    assert_eq!(caller.identity.as_str(), "spiffe://east/ns/isthmus/sa/gateway");
    assert!(gateway.is_of_peer && caller.is_of_peer);
    // Roots that give the certificate another identity end the connection.
    let elsewhere = store(("cluster.local", &east), &[("south", "cluster.local", &west)]);
    let bundles = elsewhere.reader().newest().expect("published");
    assert!(gateway.verify_against(&bundles).is_err());
    // A gateway of another trust domain is not accepted as a gateway of this peer.
    let (mut client, mut server) =
        (dials("south", &at_east), ServerConnection::new(accepts).expect("a server"));
    assert!(handshake(&mut client, &mut server).is_err());
}
