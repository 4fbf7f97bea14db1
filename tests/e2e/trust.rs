//! Reloads that remove trust: after the reload, no connection is admitted by the removed trust, however far its handshake or
//! request had come.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::connect;
use crate::support::eventually;
use crate::support::frames::{HEADERS, SETTINGS, connect as ask, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::{PKI, Pki};

const PARTNER: &str = "spiffe://partner/ns/a/sa/b";
const AUTHORITY: &str = "echo.shop.mesh:80";

/// An HBONE caller that stops after a given number of sent bytes, at any point of its connection, and sends the rest later.
struct Paced {
    tls: ClientConnection,
    socket: TcpStream,
    /// Bytes of TLS records that are not sent yet.
    unsent: Vec<u8>,
    sent: usize,
    asked: bool,
}

impl Paced {
    fn new(address: SocketAddr, config: &Arc<ClientConfig>) -> Self {
        let tls = ClientConnection::new(config.clone(), address.ip().into()).expect("a client");
        Self { tls, socket: connect(address), unsent: Vec::new(), sent: 0, asked: false }
    }

    /// Continues the TLS handshake and the CONNECT request until `bytes` bytes in total, or the whole request, have been sent.
    fn send_until(&mut self, bytes: usize) -> io::Result<()> {
        loop {
            let now = self.unsent.len().min(bytes - self.sent);
            self.socket.write_all(&self.unsent[..now])?;
            self.unsent.drain(..now);
            self.sent += now;
            if self.sent == bytes {
                return Ok(());
            }
            if self.tls.wants_write() {
                self.tls.write_tls(&mut self.unsent)?;
            } else if self.tls.is_handshaking() {
                self.receive()?;
            } else if self.asked {
                return Ok(());
            } else {
                self.asked = true;
                let settings = frame(SETTINGS, 0, 0, &[]);
                let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
                self.tls.writer().write_all(&[&preface[..], &settings, &ask(1, AUTHORITY)].concat())?;
            }
        }
    }

    fn receive(&mut self) -> io::Result<usize> {
        let count = self.tls.read_tls(&mut self.socket)?;
        self.tls.process_new_packets().map_err(io::Error::other)?;
        if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(count) }
    }

    /// Sends the rest and reads to the end; returns true if the stream got a response.
    fn answered(mut self) -> bool {
        let mut frames = Vec::new();
        let mut alive = self.send_until(usize::MAX).is_ok();
        while alive {
            alive = self.receive().is_ok();
            let _ = self.tls.reader().read_to_end(&mut frames);
        }
        let mut rest = &frames[..];
        while let [a, b, c, kind, _, _, _, _, _, more @ ..] = rest {
            if *kind == HEADERS {
                return true;
            }
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            rest = more.get(length..).unwrap_or_default();
        }
        false
    }
}

/// Returns a random number below `below`, from a seed.
fn random(seed: &mut u64, below: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize % below
}

#[test]
fn a_reload_that_withdraws_trust_admits_nobody_who_was_half_way() {
    const ROUNDS: usize = 4;
    const HALF_WAY: usize = 40;
    let (echo, partner) = (Backend::echo(), Pki::new("the partner's CA"));
    let folder = folder();
    std::fs::write(folder.path().join("partner.pem"), partner.ca_pem()).expect("written");
    std::fs::write(folder.path().join("other.pem"), Pki::new("another CA").ca_pem()).expect("written");
    let services = format!("services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let with = |trusted: &str| {
        BASE.replace("roots: roots.pem}]", &format!("roots: roots.pem}}{trusted}]")) + &services
    };
    let trusting = with(", {trustDomain: partner, roots: partner.pem}");
    let gateway = Gateway::start_in(folder, &trusting, &[]);
    let address = gateway.listener("hbone");
    let config = client(Some(partner.issue(&[], Some(PARTNER))), &["h2"]);
    let own = Hbone::connect(address, caller()).expect("let in");
    let mut own_stream = own.open(AUTHORITY).expect("admitted");

    let mut whole = Paced::new(address, &config);
    whole.send_until(usize::MAX).expect("sent");
    eventually("its stream", || (echo.accepted() == 2).then_some(()));
    // The length varies, because a signature's length differs by a byte or two between handshakes.
    let length = whole.sent - 4;
    drop(whole);
    let mut seed: u64 =
        std::env::var("PROPTEST_RNG_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for round in 0..ROUNDS {
        let by_others = with(", {trustDomain: partner, roots: other.pem}");
        let narrowed = [with(""), by_others][round % 2].clone();
        let accepted = echo.accepted();
        eventually("calm", || (gateway.metric("isthmus_connections_active", &[]) == 2.0).then_some(()));
        let mut half_way = Vec::new();
        // The connections have sent nothing, everything except the end of the request, or a random part.
        for sent in [0, length].into_iter().chain((0..HALF_WAY).map(|_| random(&mut seed, length))) {
            let mut paced = Paced::new(address, &config);
            paced.send_until(sent).expect("sent");
            half_way.push((sent, paced));
        }
        // These connections have no stream.
        let idle: Vec<Hbone> =
            (0..4).map(|_| Hbone::connect(address, config.clone()).expect("let in")).collect();
        gateway.reload(&narrowed);
        for hbone in &idle {
            // The stream is refused (403), or its connection has ended (599).
            let refusal = hbone.open(AUTHORITY).err().expect("a connection that was there already");
            assert!([403, 599].contains(&refusal.0.as_u16()), "{refusal:?}");
        }
        for (sent, paced) in half_way {
            assert!(!paced.answered(), "seed {seed}: {sent} of {length} bytes sent before");
        }
        assert_eq!(echo.accepted(), accepted, "an endpoint was dialled for one of them");
        assert_eq!(own_stream.echo("still"), Ok("still".to_owned()));
        gateway.reload(&trusting);
        let again = Hbone::connect(address, config.clone()).expect("let in again");
        assert!(again.open(AUTHORITY).is_ok());
        // The endpoint may count a connection later than the gateway.
        eventually("its connection", || (echo.accepted() > accepted).then_some(()));
    }
    let reasons: std::collections::BTreeMap<String, usize> =
        gateway.access_log().iter().fold(Default::default(), |mut count, line| {
            *count.entry(line["reason"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
            count
        });
    eprintln!("{reasons:?}");
}

/// The files of certificates and roots are read apart from the config. A reload is applied although they cannot be used, and its
/// answer says so with the words of `isthmus validate`.
#[test]
fn a_reload_names_files_of_certificates_and_roots_that_validate_refuses() {
    let folder = folder();
    let files = folder.path().to_owned();
    let gateway = Gateway::start_in(folder, BASE, &[]);
    let (status, body) = gateway.post("/api/v1/reload");
    assert!(status == 200 && body.contains("\"applied\""), "{body}");
    let other = Pki::new("another CA").issue(&[], Some("spiffe://cluster.local/ns/istio-system/sa/eastwest"));
    std::fs::write(files.join("key.pem"), &other.key_pem).expect("written");
    std::fs::write(files.join("roots.pem"), "no PEM\n").expect("written");
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 200, "{body}");
    for part in ["applied; warning: ", "identity.files: ", "does not match", "trust[0].roots: "] {
        assert!(body.contains(part), "{part}: {body}");
    }
}

#[test]
fn a_gateway_without_usable_roots_is_not_ready_and_says_why() {
    let folder = folder();
    let roots = folder.path().join("roots.pem");
    let usable = std::fs::read_to_string(&roots).expect("a file");
    std::fs::write(&roots, "no PEM\n").expect("written");
    let gateway = Gateway::start_unready(folder, BASE);
    let closed = |text: &str| text.lines().find(|line| line.starts_with("[-] trust: ")).map(str::to_owned);
    let why = eventually("the gate", || {
        let (status, text) = gateway.get("/readyz");
        closed(&text).filter(|_| status == 503 && !text.contains("[-] listeners"))
    });
    assert!(why.contains("trust of cluster.local: ") && why.contains("roots.pem"), "{why}");
    std::fs::write(&roots, usable).expect("written");
    gateway.ready();
    // The last good roots stay in use.
    std::fs::write(&roots, "no PEM\n").expect("written");
    eventually("the problem", || {
        gateway.json("/api/v1/status")["problems"].to_string().contains("certificate_source").then_some(())
    });
    assert_eq!(gateway.get("/readyz").0, 200);
}

#[test]
fn the_log_names_name_constraints_for_uris_as_the_cause() {
    let folder = folder();
    let limited = Pki::limited_to_uris_of("cluster.local");
    let roots = folder.path().join("roots.pem");
    let both = [std::fs::read_to_string(&roots).expect("a file"), limited.ca_pem()].concat();
    std::fs::write(&roots, both).expect("written");
    let gateway = Gateway::start_in(folder, BASE, &[]);
    let identity = "spiffe://cluster.local/ns/a/sa/b";
    let _ =
        Hbone::connect(gateway.listener("hbone"), client(Some(limited.issue(&[], Some(identity))), &["h2"]));
    let line = gateway.logged("the refusal", |line| line["reason"] == "identity_untrusted");
    let detail = line["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("has name constraints for URIs, which are not supported"), "{detail}");
    let (_, body) = gateway.post("/api/v1/reload");
    assert!(body.contains("has name constraints for URIs"), "{body}");
}

const GOOD: &str = "spiffe://cluster.local/ns/shop/sa/good";
const BAD: &str = "spiffe://cluster.local/ns/shop/sa/bad";

#[test]
fn revoked_certificates_are_refused_and_their_open_connections_end() {
    let folder = folder();
    let crl = folder.path().join("ca-crl.pem");
    let (bad, good) = (PKI.issue_numbered(7, BAD), PKI.issue_numbered(8, GOOD));
    let [certificate, key] = ["bad.pem", "bad.key"].map(|name| folder.path().join(name));
    std::fs::write(&certificate, &bad.certificate_pem).expect("written");
    std::fs::write(&key, &bad.key_pem).expect("written");
    std::fs::write(&crl, PKI.crl(&[], 2100)).expect("written");
    let echo = Backend::echo();
    let config = BASE.replace("roots: roots.pem", "roots: roots.pem, crl: ca-crl.pem");
    let services = service("echo.shop.mesh", 80, &echo, "");
    let gateway = Gateway::start_in(folder, &format!("{config}services:\n{services}"), &[]);
    let address = gateway.listener("hbone");
    let open = |issued| Hbone::connect(address, client(Some(issued), &["h2"])).expect("let in");
    let (of_bad, of_good) = (open(bad), open(good));
    let mut streams = [&of_bad, &of_good].map(|hbone| hbone.open(AUTHORITY).expect("admitted"));
    streams.iter_mut().for_each(|stream| assert_eq!(stream.echo("on"), Ok("on".to_owned())));

    std::fs::write(&crl, PKI.crl(&[7], 2100)).expect("written");
    eventually("the revoked connection to end", || of_bad.ended());
    let line = gateway.logged("its end", |line| line["reason"] == "config_removed");
    let detail = line["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("is revoked by a list of trust[].crl"), "{line}");
    assert_eq!(streams[1].echo("still on"), Ok("still on".to_owned()));
    // A client that is none of ours: OpenSSL.
    let mut command = std::process::Command::new("openssl");
    command.args(["s_client", "-connect", &address.to_string(), "-alpn", "h2", "-tls1_3", "-cert"]);
    command.arg(&certificate).arg("-key").arg(&key);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    match command.spawn() {
        Err(error) => crate::support::skip(&format!("a revoked certificate of OpenSSL: {error}")),
        Ok(mut asking) => {
            // It ends at the alert, however long its input stays open.
            let input = asking.stdin.take();
            let said = asking.wait_with_output().expect("it ends");
            drop(input);
            let said = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(said.contains("certificate revoked"), "{said}");
            let line = gateway.logged("its refusal", |line| line["reason"] == "identity_untrusted");
            assert!(line["detail"].as_str().is_some_and(|detail| detail.contains("is revoked")), "{line}");
        }
    }

    // A file that cannot be read changes nothing; one that lists nothing lets the caller in again.
    std::fs::write(&crl, "no PEM\n").expect("written");
    eventually("the problem", || {
        gateway.json("/api/v1/status")["problems"].to_string().contains("cluster.local (crl)").then_some(())
    });
    let again = || Hbone::connect(address, client(Some(PKI.issue_numbered(7, BAD)), &["h2"]));
    assert!(again().is_err(), "the last good list stays in use");
    let (_, body) = gateway.post("/api/v1/reload");
    assert!(body.contains("trust[0].crl: "), "{body}");
    std::fs::write(&crl, PKI.crl(&[], 2025)).expect("written");
    eventually("the caller to be let in again", || again().ok());
    let (_, body) = gateway.post("/api/v1/reload");
    assert!(body.contains("should have been replaced at 2025-01-01T00:00:00"), "{body}");
}

#[test]
fn nobody_is_let_in_before_the_revoked_certificates_are_known() {
    let folder = folder();
    let crl = folder.path().join("ca-crl.pem");
    let config = BASE.replace("roots: roots.pem", "roots: roots.pem, crl: ca-crl.pem");
    let gateway = Gateway::start_unready(folder, &config);
    eventually("the gate", || {
        let (status, text) = gateway.get("/readyz");
        (status == 503 && text.contains("[-] trust: trust of cluster.local (crl): ")).then_some(())
    });
    let open =
        || Hbone::connect(gateway.listener("hbone"), client(Some(PKI.issue_numbered(9, GOOD)), &["h2"]));
    assert!(open().is_err());
    std::fs::write(&crl, PKI.crl(&[], 2100)).expect("written");
    gateway.ready();
    assert!(open().is_ok());
}
