//! Which services the callers of another organisation can reach in a federation. Each organisation has its own certificate
//! authority.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use rustls::{ClientConfig, ClientConnection, StreamOwned};
use tempfile::TempDir;

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{call, hello, read_alert};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::{PKI, Pki};
use crate::support::raw::connect_from;
use crate::support::{Stop, eventually};

/// The identity of all callers, also of callers in other organisations. Several organisations may have the same trust domain,
/// because each chooses its own.
const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";
/// The source address of west's clients. South has none.
pub(crate) const WEST: [u8; 4] = [127, 0, 0, 77];

/// The authorities of two other organisations.
pub(crate) struct Organisations {
    pub(crate) west: Pki,
    south: Pki,
}

impl Organisations {
    pub(crate) fn new() -> Self {
        Self { west: Pki::new("the CA of west"), south: Pki::new("the CA of south") }
    }

    /// Returns a folder with the gateway's own files and the roots of both organisations.
    pub(crate) fn folder(&self) -> TempDir {
        let folder = folder();
        for (name, authority) in [("west.pem", &self.west), ("south.pem", &self.south)] {
            std::fs::write(folder.path().join(name), authority.ca_pem()).expect("written");
        }
        folder
    }
}

/// Returns the config of a gateway that exports `echo` to west alone and `pay` to south alone; `west` is further keys of west's
/// entry.
pub(crate) fn config(echo: &Backend, pay: &Backend, west: &str) -> String {
    let gateway = "spiffe://cluster.local/ns/isthmus/sa/gateway";
    let tls = |text: String| text.replace("targetPort", "protocol: TLS, targetPort");
    format!(
        "{}aggregator: {{startTimeout: 1s}}\npeers:\n  - {{name: west, accept: true, identity: \"{gateway}\", trustAlias: west, trust: west.pem, from: [127.0.0.77/32]{west}}}\n  \
         - {{name: south, accept: true, identity: \"{gateway}\", trustAlias: south, trust: south.pem, \
         export: [{{services: [pay.shop.mesh], as: \"{{service}}.{{namespace}}.east.global\"}}]}}\nservices:\n{}{}",
        BASE.replace("protocol: hbone", "protocol: auto"),
        tls(service("echo.shop.mesh", 80, echo, "")),
        tls(service("pay.shop.mesh", 80, pay, "")),
    )
}

const EXPORTED: &str = ", export: [{services: [echo.shop.mesh], as: \"{service}.{namespace}.east.global\"}]";

pub(crate) fn cart(authority: &Pki) -> Arc<ClientConfig> {
    client(Some(authority.issue(&[], Some(CART))), &["h2"])
}

#[test]
fn f6_callers_of_a_peer_reach_what_is_exported_to_their_peer_and_nothing_else() {
    let (echo, pay, organisations) = (Backend::echo(), Backend::echo(), Organisations::new());
    let config = config(&echo, &pay, EXPORTED);
    let gateway = Gateway::start_in(organisations.folder(), &config, &[]);
    let address = gateway.listener("hbone");
    let of = |config| Hbone::connect(address, config).expect("let in");
    let (west, south) = (of(cart(&organisations.west)), of(cart(&organisations.south)));
    let ours = of(caller());

    let mut stream = west.open("echo.shop.east.global:80").expect("exported");
    assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
    assert_eq!(south.open("pay.shop.east.global:80").expect("exported").echo("pay"), Ok("pay".to_owned()));
    assert_eq!(ours.open("echo.shop.mesh:80").expect("our own").echo("own"), Ok("own".to_owned()));
    drop(stream);
    let line = gateway.logged("the call from west", |line| line["authority"] == "echo.shop.east.global:80");
    assert_eq!(
        (&line["peer"], &line["source_identity"], &line["service"]),
        (&"west".into(), &"spiffe://west/ns/shop/sa/cart".into(), &"echo.shop.mesh".into())
    );

    // On the wire, the refusals of unknown names and of names that are not exported are equal; only the log differs.
    let unknown = west.open("nothing.shop.mesh:80").err().expect("refused");
    for (who, hbone, authority) in [
        ("west", &west, "echo.shop.mesh:80"),
        ("west", &west, "pay.shop.mesh:80"),
        ("west", &west, "pay.shop.east.global:80"),
        ("south", &south, "echo.shop.east.global:80"),
        ("", &ours, "echo.shop.east.global:80"),
    ] {
        assert_eq!(hbone.open(authority).err().as_ref(), Some(&unknown), "{who} {authority}");
        let line = gateway.logged(authority, |line| {
            line["authority"] == authority
                && line["reason"] == "not_exported"
                && line["peer"].as_str().unwrap_or("") == who
        });
        assert!(line["endpoint"].is_null(), "nothing was dialled: {line}");
    }
    let address_of_pay = pay.address.to_string();
    assert_eq!(west.open(&address_of_pay).err(), Some(unknown));
    let counted = |peer: &str, reason: &str| {
        gateway.metric(
            "isthmus_peer_connections_total",
            &[&format!("peer=\"{peer}\""), &format!("reason=\"{reason}\"")],
        )
    };
    eventually("the refusals", || (counted("west", "not_exported") >= 3.0).then_some(()));
    assert_eq!(counted("south", "not_exported"), 1.0);
    assert_eq!(counted("west", "authority_unknown"), 1.0);

    let exposed = gateway.json("/api/v1/exposed").to_string();
    for text in ["echo.shop.east.global:80", "outbound_.80_._.echo.shop.east.global", "spiffe://south/*"] {
        assert!(exposed.contains(text), "{text} in {exposed}");
    }
    assert!(!exposed.contains("outbound_.80_._.pay.shop.east.global"), "south has no SNI callers: {exposed}");

    // A reload that removes an export cuts the connections that the export admitted, and no others.
    let mut cut = west.open("echo.shop.east.global:80").expect("exported");
    assert_eq!(cut.echo("still"), Ok("still".to_owned()));
    let mut kept = south.open("pay.shop.east.global:80").expect("exported");
    gateway.reload(&config.replace(EXPORTED, ""));
    // The reload is applied when each worker has the order to cut; a busy machine may let a worker carry it out later.
    eventually("the end of the stream", || cut.echo("more").is_err().then_some(()));
    assert_eq!(kept.echo("more"), Ok("more".to_owned()));
    gateway.logged("the connection that was cut", |line| {
        line["reason"] == "config_removed" && line["peer"] == "west"
    });
    assert!(west.open("echo.shop.east.global:80").is_err());
}

#[test]
fn f6_sni_callers_of_a_peer_come_from_its_addresses_and_reach_what_is_exported_to_it() {
    let (organisations, pay) = (Organisations::new(), Backend::echo());
    let echo = Backend::tls_echo(PKI.server("echo.shop.east.global"), "east");
    let gateway = Gateway::start_in(organisations.folder(), &config(&echo, &pay, EXPORTED), &[]);
    let address = gateway.listener("hbone");
    let config = PKI.client(&[]);
    let name = "echo.shop.east.global".try_into().expect("a name");
    let socket = connect_from(WEST, address);
    let session = ClientConnection::new(config, name).expect("a client");
    let mut tls = StreamOwned::new(session, socket);
    assert!(call(&mut tls, "hello").expect("answered").contains("hello"));
    drop(tls);
    let line = gateway.logged("the call", |line| line["sni"] == "echo.shop.east.global");
    assert_eq!((&line["peer"], &line["reason"]), (&"west".into(), &"ok".into()));

    const UNRECOGNIZED_NAME: u8 = 112;
    let ours = [127, 0, 0, 1];
    for (from, name, reason, peer) in [
        (WEST, "outbound_.80_._.echo.shop.mesh", "not_exported", "west"),
        (WEST, "outbound_.80_._.pay.shop.mesh", "not_exported", "west"),
        (WEST, "outbound_.80_._.pay.shop.east.global", "identity_required", "west"),
        (WEST, "outbound_.81_._.echo.shop.east.global", "sni_unknown", "west"),
        (WEST, "nothing.east.global", "sni_unknown", "west"),
        (ours, "outbound_.80_._.echo.shop.east.global", "not_exported", ""),
        (ours, "outbound_.80_._.pay.shop.east.global", "identity_required", ""),
    ] {
        let mut client = connect_from(from, address);
        std::io::Write::write_all(&mut client, &hello(name)).expect("sent");
        assert_eq!(read_alert(&mut client).0, Some(UNRECOGNIZED_NAME), "{name}");
        gateway.logged(name, |line| {
            line["sni"] == name && line["reason"] == reason && line["peer"].as_str().unwrap_or("") == peer
        });
        // `explain` gives the same reason as the data path.
        let source = std::net::Ipv4Addr::from(from);
        let explained = gateway.json(&format!("/api/v1/explain?sni={name}&from={source}"));
        assert_eq!(explained["reason"], reason, "{explained}");
    }
    assert_eq!(echo.accepted(), 1);
}

#[test]
fn f12_an_authority_speaks_for_its_own_organisation_alone() {
    let (echo, pay, organisations) = (Backend::echo(), Backend::echo(), Organisations::new());
    let config = config(&echo, &pay, EXPORTED);
    let gateway = Gateway::start_in(organisations.folder(), &config, &[]);
    let address = gateway.listener("hbone");
    // A certificate of west's authority is refused if its identity is under west's alias (a name that only this gateway uses)
    // or under another trust domain.
    for forged in
        ["spiffe://west/ns/shop/sa/cart", "spiffe://south/ns/shop/sa/cart", "spiffe://other/ns/shop/sa/cart"]
    {
        let made = organisations.west.issue(&[], Some(forged));
        assert!(Hbone::connect(address, client(Some(made), &["h2"])).is_err(), "{forged}");
        gateway.logged(forged, |line| {
            line["reason"] == "identity_untrusted"
                && line["detail"].as_str().is_some_and(|text| text.contains(forged))
        });
    }
    // A client whose certificate was issued by west's authority is a caller of west. That also holds if the identity in the
    // certificate is the identity of one of this gateway's own callers.
    let ours = Hbone::connect(address, caller()).expect("let in");
    assert!(ours.open("echo.shop.mesh:80").is_ok());
    let minted = organisations.west.issue(&[], Some(crate::hbone::CALLER));
    let west = Hbone::connect(address, client(Some(minted), &["h2"])).expect("let in as west's");
    assert_eq!(west.open("echo.shop.mesh:80").err().map(|(status, _)| status.as_u16()), Some(404));
    gateway.logged("the forger", |line| {
        line["peer"] == "west"
            && line["source_identity"].as_str().is_some_and(|text| text.starts_with("spiffe://west/"))
    });
}

#[test]
fn f12_a_peer_changes_its_root_under_load_and_nothing_fails_until_the_old_one_is_gone() {
    let (echo, pay, organisations) = (Backend::echo(), Backend::echo(), Organisations::new());
    let config = config(&echo, &pay, EXPORTED);
    let gateway = Gateway::start_in(organisations.folder(), &config, &[]);
    let (address, roots) = (gateway.listener("hbone"), gateway.folder().join("west.pem"));
    let next = Pki::new("the next CA of west");
    let by_old = cart(&organisations.west);
    let by_new = cart(&next);
    let (stop, calls, failures) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let begins = |config: &Arc<ClientConfig>| {
        let called = Hbone::connect(address, config.clone()).ok();
        called.and_then(|hbone| hbone.open("echo.shop.east.global:80").ok()?.echo("x").ok()).is_some()
    };
    let issued = RwLock::new(by_old.clone());
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // No call that is under way has the certificate of before.
                    let config = issued.read().expect("whole");
                    calls.fetch_add(1, Ordering::Relaxed);
                    failures.fetch_add(usize::from(!begins(&config)), Ordering::Relaxed);
                }
            });
        }
        let called = |more: usize| {
            let until = calls.load(Ordering::Relaxed) + more;
            eventually("calls", || (calls.load(Ordering::Relaxed) >= until).then_some(()));
        };
        called(20);
        std::fs::write(&roots, organisations.west.ca_pem() + &next.ca_pem()).expect("written");
        eventually("the new root", || begins(&by_new).then_some(()));
        called(20);
        *issued.write().expect("whole") = by_new.clone();
        called(20);
        let mut of_old = Hbone::connect(address, by_old.clone()).expect("let in");
        let mut stream = of_old.open("echo.shop.east.global:80").expect("exported");
        assert_eq!(stream.echo("still"), Ok("still".to_owned()));
        std::fs::write(&roots, next.ca_pem()).expect("written");
        eventually("the end of the old root", || {
            Hbone::connect(address, by_old.clone()).is_err().then_some(())
        });
        called(20);
        eventually("a caller of the old root to be cut", || stream.echo("more").is_err().then_some(()));
        let _ = &mut of_old;
    });
    assert_eq!(failures.into_inner(), 0, "of {} calls", calls.load(Ordering::Relaxed));
    assert!(begins(&by_new));
}

#[test]
fn a_peer_at_its_limits_is_told_so_and_costs_another_nothing() {
    let (echo, pay, organisations) = (Backend::echo(), Backend::echo(), Organisations::new());
    let config = config(&echo, &pay, &format!("{EXPORTED}, limits: {{connections: 2}}"));
    let gateway = Gateway::start_in(organisations.folder(), &config, &[]);
    let of = |config| Hbone::connect(gateway.listener("hbone"), config).expect("let in");
    let (west, south) = (of(cart(&organisations.west)), of(cart(&organisations.south)));
    let name = "echo.shop.east.global:80";
    let first = west.open(name).expect("below the limit");
    let second = west.open(name).expect("below the limit");
    let refused = west.open(name).err().expect("above it");
    assert_eq!(refused, (503.try_into().expect("a status"), "limit_source".to_owned()), "{refused:?}");
    let line = gateway.logged("the refusal", |line| line["reason"] == "limit_source");
    assert_eq!(line["peer"], "west");
    assert!(
        line["detail"]
            .as_str()
            .is_some_and(|text| text.contains("the callers of the peer west already have 2 connections")),
        "{line}"
    );
    assert_eq!(
        south.open("pay.shop.east.global:80").expect("another peer").echo("pay"),
        Ok("pay".to_owned())
    );
    drop(first);
    eventually("the place to be free", || west.open(name).ok().map(drop));
    drop(second);
}
