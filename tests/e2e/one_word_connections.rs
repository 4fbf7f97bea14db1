//! Faults of connections: hellos and names, endpoints, open connections, and callers by HBONE. The gateway's own certificate is
//! among them, because callers see it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use http::Request;

use crate::endpoints::{closing, gives_up, waiting};
use crate::hbone::{BASE, CALLER, OWN, caller, folder, service};
use crate::hbone_hostile::old_client;
use crate::one_word::Table;
use crate::problems::run;
use crate::support::backend::{Backend, Silent, refusing, reset};
use crate::support::client::{connect, tls, tls_with};
use crate::support::dns::{Answer, NameServer};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::{PKI, Pki};
use crate::support::raw;

#[test]
fn every_fault_of_a_connection_has_one_word_in_all_places() {
    let mut table = Table::default();
    of_hellos_and_names(&mut table);
    of_endpoints(&mut table);
    of_open_connections(&mut table);
    of_connections_that_stand_still(&mut table);
    of_callers_by_hbone(&mut table);
    of_the_own_certificate(&mut table);
    table.is_section("Connections");
}

/// Sends bytes, and reads until the gateway closes the connection.
fn send(address: SocketAddr, bytes: &[u8]) {
    let mut stream = connect(address);
    stream.write_all(bytes).expect("sent");
    let _ = stream.read_to_end(&mut Vec::new());
}

fn refused(address: SocketAddr, name: &str) {
    tls(address, name).expect_err("refused");
}

/// Opens a connection whose hello an endpoint echoes. Retries, because an earlier connection may still count against a limit.
fn echoed(address: SocketAddr, name: &str) -> TcpStream {
    let hello = raw::hello(name.as_bytes());
    eventually("a place", || {
        let mut stream = connect(address);
        stream.write_all(&hello).ok()?;
        stream.read_exact(&mut vec![0; hello.len()]).ok()?;
        Some(stream)
    })
}

fn of_hellos_and_names(table: &mut Table) {
    let echo = Backend::echo();
    let gateway = Gateway::start(&format!(
        "node: {{cluster: east, network: net-east}}\nlisteners:\n  - {{name: open, bind: \"127.0.0.1:0\"}}\n  \
         - {{name: impatient, bind: \"127.0.0.2:0\", hello: {{timeout: 300ms}}}}\n  \
         - {{name: mesh, bind: \"127.0.0.3:0\", alpn: [istio]}}\n  \
         - {{name: closed, bind: \"127.0.0.4:0\", from: [10.0.0.0/8]}}\n  \
         - {{name: balanced, bind: \"127.0.0.5:0\", proxyProtocol: {{mode: require, from: [127.0.0.0/8]}}}}\n\
         routes:\n  checkout.test: \"{0}\"\n\
         services:\n  - hostname: hidden.shop.mesh\n    namespace: shop\n    ports: [{{name: https, port: 443, protocol: TLS}}]\n    \
         endpoints: [{{address: 10.1.0.1}}]\n  - hostname: far.shop.mesh\n    namespace: shop\n    \
         ports: [{{name: https, port: 443, protocol: TLS}}]\n    endpoints: [{{address: 10.2.0.1, network: net-west}}]\n\
         exports: [{{services: [far.shop.mesh]}}]\n\
         registries: [{{file: {{path: absent.yaml, cluster: north, network: net-north}}, allow: {{services: [\"*.north.mesh\"]}}}}]\n\
         aggregator: {{startTimeout: 1s}}\n",
        echo.address
    ));
    let open = gateway.listener("open");
    let (impatient, mesh) = (gateway.listener("impatient"), gateway.listener("mesh"));
    let (closed, balanced) = (gateway.listener("closed"), gateway.listener("balanced"));
    let asks = ["", "--listener", "impatient"];
    table.connection(&gateway, "A client connects and sends nothing", "hello_timeout", &asks, || {
        send(impatient, b"")
    });
    // The hello is a handshake record without content.
    let empty = [22, 3, 1, 0, 0];
    table.connection(&gateway, "A client sends a malformed ClientHello", "bad_hello", &[""], || {
        send(open, &empty)
    });
    let http = b"GET / HTTP/1.1\r\n\r\n";
    table.connection(&gateway, "A client speaks HTTP without TLS", "not_tls", &[""], || send(open, http));
    table.connection(&gateway, "A client connects to an address, not to a name", "no_sni", &[""], || {
        send(open, &raw::hello(b"10.0.0.1"));
    });
    let asks = ["two..dots"];
    table.connection(&gateway, "A client sends a name that is no host name", "sni_invalid", &asks, || {
        send(open, &raw::hello(b"two..dots"));
    });
    table.connection(
        &gateway,
        "A ClientHello is larger than `hello.maxBytes`",
        "hello_too_large",
        &[""],
        || {
            send(open, &raw::hello_of(b"checkout.test", 64 * 1024 + 1));
        },
    );
    table.connection(
        &gateway,
        "A ClientHello spans more records than `hello.maxRecords`",
        "hello_fragments",
        &[""],
        || {
            // Each record has one byte of the message.
            let message = raw::hello(b"checkout.test").split_off(5);
            send(open, &message.iter().flat_map(|byte| [22, 3, 1, 0, 1, *byte]).collect::<Vec<_>>());
        },
    );
    table.connection(&gateway, "A client leaves before its hello is complete", "client_gone", &[""], || {
        let mut client = connect(open);
        client.write_all(&raw::hello(b"checkout.test")[..20]).expect("sent");
    });
    let asks = ["chekout.test"];
    table.connection(&gateway, "A name is misspelt", "sni_unknown", &asks, || refused(open, "chekout.test"));
    let asks = ["hidden.shop.mesh"];
    table.connection(&gateway, "No export rule names a service", "not_exported", &asks, || {
        refused(open, asks[0])
    });
    let asks = ["checkout.test", "--listener", "mesh"];
    table.connection(
        &gateway,
        "A client outside the mesh calls a mesh listener",
        "alpn_refused",
        &asks,
        || {
            tls_with(PKI.client(&["h2"]), mesh, asks[0]).expect_err("refused");
        },
    );
    let asks = ["checkout.test", "--listener", "closed", "--from", "127.0.0.1"];
    table.connection(&gateway, "A client's address is outside `from`", "source_denied", &asks, || {
        refused(closed, asks[0])
    });
    let asks = ["checkout.test", "--listener", "balanced"];
    table.connection(&gateway, "The load balancer sends no PROXY header", "proxy_protocol", &asks, || {
        refused(balanced, asks[0]);
    });
    let asks = ["far.shop.mesh"];
    table.connection(&gateway, "A service is on another network only", "no_endpoints", &asks, || {
        refused(open, asks[0])
    });
    let explained = run(&gateway, &["explain", asks[0]]);
    assert!(explained.contains("1 other network (net-"), "{explained}");
    let asks = ["db.north.mesh"];
    table.connection(
        &gateway,
        "A registry cannot be read since the start",
        "registry_missing",
        &asks,
        || {
            refused(open, asks[0]);
        },
    );
}

/// The first bytes of the record of a ServerHello.
pub(crate) const HALF: &[u8] = &[22, 3, 3, 0, 122, 2, 0, 0, 118, 3, 3];

/// Returns an endpoint that sends a part of its ServerHello, and then nothing until its client goes.
pub(crate) fn halting() -> Backend {
    Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(HALF);
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    })
}

fn of_endpoints(table: &mut Table) {
    let (dead, sick, silent) = (refusing(), refusing(), Silent::new());
    let (resetting, closing) = (Backend::resetting(), closing());
    let says = |answer: &'static [u8]| {
        Backend::start(move |mut stream| {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
        })
    };
    let (plain, ssh) = (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), says(b"SSH-2.0-OpenSSH\r\n"));
    let alerts = [&[21, 3, 3, 0, 2, 2, 112], &[21, 3, 3, 0, 2, 2, 80], &[21, 3, 3, 0, 2, 2, 120]];
    let [rejecting, failing, choosing] = alerts.map(|alert| says(alert));
    let (waiting, halting, cut) = (waiting(), halting(), says(HALF));
    let late = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        thread::park_timeout(Duration::from_secs(2));
    });
    let accepting = Backend::start(|stream| reset(&stream));
    let names = NameServer::start();
    names.answer("mute.names.test", Answer::Silence);
    names.points("dead.names.test", dead.ip());
    names.answer("refused.names.test", Answer::Refusal);
    names.answer("cut.names.test", Answer::Truncated);
    names.points("any.names.test", [0, 0, 0, 0].into());
    let addresses = (1..=60).map(|host| [127, 9, 9, host].into()).collect();
    names.answer("many.names.test", Answer::Addresses { addresses, ttl: 60 });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  dead.test: {{endpoints: [\"{dead}\"], ejection: off}}\n  \
         slow.test: {{endpoints: [\"{}\"], connectTimeout: 200ms}}\n  reset.test: \"{}\"\n  lost.test: \"no-such-name.invalid:443\"\n  \
         unsaid.test: \"mute.names.test:443\"\n  moved.test: {{endpoints: [\"dead.names.test:{}\"], ejection: off}}\n  accept.test: \"{}\"\n  \
         mute.test: \"{}\"\n  plain.test: \"{}\"\n  ssh.test: \"{}\"\n  rejects.test: \"{}\"\n  fails.test: \"{}\"\n  waits.test: \"{}\"\n  nowhere.test: \"[fe80::1]:1\"\n  \
         alpn.test: \"{}\"\n  half.test: \"{}\"\n  cut.test: \"{}\"\n  late.test: \"{}\"\n  \
         refusedname.test: \"refused.names.test:443\"\n  cutname.test: \"cut.names.test:443\"\n  anyname.test: \"any.names.test:443\"\n  \
         manynames.test: {{endpoints: [\"many.names.test:{}\"], ejection: off}}\n  \
         sick.test: {{endpoints: [\"{sick}\"], panic: false, health: {{interval: 100ms, timeout: 100ms, unhealthyAfter: 2}}}}\n\
         dns: {{servers: [\"{}\"]}}\naggregator: {{startTimeout: 1s}}\n",
        silent.address,
        resetting.address,
        dead.port(),
        accepting.address,
        closing.address,
        plain.address,
        ssh.address,
        rejecting.address,
        failing.address,
        waiting.address,
        choosing.address,
        halting.address,
        cut.address,
        late.address,
        dead.port(),
        names.address
    ));
    let address = gateway.listener("default");
    eventually("the verdict of the checks", || {
        let all = gateway.json("/api/v1/endpoints");
        let sick = all.as_array()?.iter().find(|one| one["route"] == "sick.test")?.clone();
        (sick["state"] == "unhealthy").then_some(())
    });
    let asks = ["sick.test"];
    table.connection(&gateway, "The health checks of all endpoints fail", "all_unhealthy", &asks, || {
        refused(address, asks[0]);
    });
    let asks = ["dead.test"];
    table.connection(&gateway, "An endpoint's process is down", "endpoint_refused", &asks, || {
        refused(address, asks[0])
    });
    let asks = ["slow.test"];
    table.connection(&gateway, "An endpoint does not accept", "endpoint_timeout", &asks, || {
        refused(address, asks[0])
    });
    let asks = ["reset.test"];
    table.connection(&gateway, "An endpoint resets connections", "endpoint_reset", &asks, || {
        refused(address, asks[0])
    });
    let asks = ["accept.test"];
    table.connection(
        &gateway,
        "An endpoint resets connections when it accepts them",
        "endpoint_reset",
        &asks,
        || {
            refused(address, asks[0]);
        },
    );
    let asks = ["mute.test"];
    table.connection(
        &gateway,
        "An endpoint ends connections without an answer",
        "endpoint_closed",
        &asks,
        || {
            refused(address, asks[0]);
        },
    );
    let asks = ["plain.test"];
    table.connection(&gateway, "An endpoint answers without TLS", "endpoint_not_tls", &asks, || {
        send(address, &raw::hello(b"plain.test"));
    });
    let asks = ["ssh.test"];
    table.connection(
        &gateway,
        "An endpoint answers with the banner of SSH",
        "endpoint_not_tls",
        &asks,
        || {
            send(address, &raw::hello(b"ssh.test"));
        },
    );
    for (fault, name) in [
        ("An endpoint refuses the name by a TLS alert", "rejects.test"),
        ("An endpoint refuses each hello by the alert `internal_error`", "fails.test"),
        ("An endpoint knows none of the client's protocols (ALPN)", "alpn.test"),
    ] {
        table.connection(&gateway, fault, "endpoint_alert", &[name], || {
            send(address, &raw::hello(name.as_bytes()));
        });
    }
    let asks = ["waits.test"];
    table.connection(
        &gateway,
        "A client leaves before an endpoint answers",
        "endpoint_silent",
        &asks,
        || {
            gives_up(address, asks[0], Duration::from_millis(300));
        },
    );
    for (fault, name) in [
        ("An endpoint ends connections 2 s after the hello", "late.test"),
        ("An endpoint ends connections in the middle of its ServerHello", "cut.test"),
    ] {
        table.connection(&gateway, fault, "endpoint_closed", &[name], || {
            send(address, &raw::hello(name.as_bytes()));
        });
    }
    table.connection(
        &gateway,
        "A client leaves after a part of a ServerHello",
        "endpoint_silent",
        &["half.test"],
        || {
            let mut client = connect(address);
            client.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
            client.write_all(&raw::hello(b"half.test")).expect("sent");
            client.read_exact(&mut [0; HALF.len()]).expect("the part");
            client.read(&mut [0]).expect_err("nothing more comes");
        },
    );
    let asks = ["nowhere.test"];
    table.connection(
        &gateway,
        "An endpoint's address cannot be reached",
        "endpoint_unreachable",
        &asks,
        || {
            refused(address, asks[0]);
        },
    );
    let asks = ["lost.test"];
    table.connection(&gateway, "An endpoint's host name does not resolve", "name_unresolved", &asks, || {
        refused(address, asks[0]);
    });
    let asks = ["unsaid.test"];
    table.connection(
        &gateway,
        "The name server of an endpoint's name does not answer",
        "name_unresolved",
        &asks,
        || {
            refused(address, asks[0]);
        },
    );
    for (fault, name) in [
        ("The name server refuses to answer for an endpoint's name (REFUSED)", "refusedname.test"),
        ("The answer for an endpoint's name is cut off", "cutname.test"),
        ("The name server has the address 0.0.0.0 for an endpoint", "anyname.test"),
    ] {
        table.connection(&gateway, fault, "name_unresolved", &[name], || refused(address, name));
    }
    let asks = ["manynames.test"];
    table.connection(&gateway, "All 60 addresses of a name are down", "endpoint_refused", &asks, || {
        refused(address, asks[0]);
    });
    let asks = ["moved.test"];
    table.connection(
        &gateway,
        "The name server has the address of a host that is down",
        "endpoint_refused",
        &asks,
        || {
            refused(address, asks[0]);
        },
    );
}

fn of_open_connections(table: &mut Table) {
    let echo = Backend::echo();
    let config =
        |more: &str| format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{0}\"{1}}}\n", echo.address, more);
    let limited = |limits: &str| format!("{}limits: {{{limits}}}\n", config(""));
    let gone = config(&format!(", gone.test: \"{}\"", echo.address));
    let gateway = Gateway::start(&gone);
    let address = gateway.listener("default");
    let asks = ["a.test"];
    table.connection(&gateway, "A client resets its connection", "client_reset", &asks, || {
        reset(&echoed(address, "a.test"));
    });
    table.connection(&gateway, "An operator closes a connection", "killed", &asks, || {
        let _open = echoed(address, "a.test");
        let id = eventually("the connection", || {
            gateway.json("/api/v1/connections").as_array()?.iter().find_map(|one| one["id"].as_u64())
        });
        assert!(run(&gateway, &["close", &id.to_string()]).contains("closed"));
        eventually("its end", || {
            gateway.access_log().iter().any(|line| line["reason"] == "killed").then_some(())
        });
    });
    table.connection(
        &gateway,
        "A route is taken out of the config",
        "config_removed",
        &["gone.test"],
        || {
            let _open = echoed(address, "gone.test");
            gateway.reload(&config(""));
            eventually("its end", || {
                gateway.access_log().iter().any(|line| line["reason"] == "config_removed").then_some(())
            });
        },
    );
    gateway.reload(&limited("perSource: {connections: 1}"));
    table.connection(
        &gateway,
        "A source has reached its limit of connections",
        "limit_source",
        &asks,
        || {
            let _open = echoed(address, "a.test");
            send(address, &raw::hello(b"a.test"));
        },
    );
    gateway.reload(&limited("perService: {connections: 1}"));
    table.connection(
        &gateway,
        "A service has reached its limit of connections",
        "limit_service",
        &asks,
        || {
            let _open = echoed(address, "a.test");
            send(address, &raw::hello(b"a.test"));
        },
    );
    gateway.reload(&limited("connections: 1"));
    table.connection(
        &gateway,
        "All connections together have reached their limit",
        "limit_global",
        &asks,
        || {
            let _open = echoed(address, "a.test");
            send(address, &raw::hello(b"a.test"));
        },
    );
    gateway.reload(&format!("{}timeouts: {{idle: 1s}}\n", config("")));
    table.connection(&gateway, "A connection is silent for `timeouts.idle`", "idle_timeout", &asks, || {
        let mut open = echoed(address, "a.test");
        let _ = open.read_to_end(&mut Vec::new());
    });
}

fn of_connections_that_stand_still(table: &mut Table) {
    // It answers the hello, and then keeps its direction open without reading.
    let still = Backend::start(|mut stream| {
        let mut hello = vec![0; raw::hello(b"a.test").len()];
        let _ = stream.read_exact(&mut hello).and_then(|()| stream.write_all(&hello));
        thread::park_timeout(Duration::from_secs(60));
    });
    let broken = Backend::start(|mut stream| {
        let mut hello = vec![0; raw::hello(b"b.test").len()];
        let _ = stream.read_exact(&mut hello).and_then(|()| stream.write_all(&hello));
        let _ = stream.read(&mut [0; 16]);
        reset(&stream);
    });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\", b.test: \"{}\"}}\ntimeouts: {{halfClose: 1s, stalled: 1s}}\n",
        still.address, broken.address
    ));
    let address = gateway.listener("default");
    let asks = ["a.test"];
    table.connection(
        &gateway,
        "An endpoint keeps its direction open after the client has ended",
        "half_close_timeout",
        &asks,
        || {
            let mut open = echoed(address, "a.test");
            open.shutdown(Shutdown::Write).expect("shut");
            let _ = open.read_to_end(&mut Vec::new());
        },
    );
    table.connection(&gateway, "An endpoint reads nothing of an upload", "stalled", &asks, || {
        let mut open = echoed(address, "a.test");
        while open.write_all(&[0; 1 << 16]).is_ok() {}
    });
    let asks = ["b.test"];
    table.connection(
        &gateway,
        "An endpoint resets a connection in a transfer",
        "endpoint_reset",
        &asks,
        || {
            let mut open = echoed(address, "b.test");
            open.write_all(b"more").expect("sent");
            let _ = open.read_to_end(&mut Vec::new());
        },
    );
}

fn of_callers_by_hbone(table: &mut Table) {
    let backend = Backend::echo();
    let config = BASE.replace(
        "exports: [{services: [\"*\"]}]",
        "exports: [{services: [vault.shop.mesh], to: {identities: [\"spiffe://cluster.local/ns/bank/*\"]}}]",
    );
    let services = service("vault.shop.mesh", 80, &backend, "");
    let gateway = Gateway::start_in(folder(), &format!("{config}services:\n{services}"), &[]);
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let vault = ["vault.shop.mesh:80", "--authority", "--identity", CALLER];
    table.connection(
        &gateway,
        "A rule does not name the caller's identity",
        "identity_denied",
        &vault,
        || {
            hbone.open("vault.shop.mesh:80").err().expect("refused");
        },
    );
    let asks = ["valut.shop.mesh:80", "--authority", "--identity", CALLER];
    table.connection(&gateway, "The authority of a CONNECT is misspelt", "authority_unknown", &asks, || {
        hbone.open("valut.shop.mesh:80").err().expect("refused");
    });
    let asks = ["", "--authority", "--identity", CALLER];
    table.connection(&gateway, "A caller sends another method than CONNECT", "bad_request", &asks, || {
        hbone
            .ask(Request::get("https://vault.shop.mesh:80/").body(()).expect("a request"))
            .err()
            .expect("refused");
    });
    let asks = ["vault.shop.mesh:80", "--authority"];
    table.connection(&gateway, "A caller's certificate has expired", "identity_expired", &asks, || {
        let expired = client(Some(PKI.issue_for(&[CALLER], 2001, 2002)), &["h2"]);
        assert!(Hbone::connect(address, expired).is_err());
    });
    table.connection(&gateway, "A caller's authority is unknown", "identity_untrusted", &asks, || {
        let stranger = client(Some(Pki::new("a stranger's CA").issue(&[], Some(CALLER))), &["h2"]);
        assert!(Hbone::connect(address, stranger).is_err());
    });
    table.connection(
        &gateway,
        "A caller's trust domain has no roots here",
        "identity_untrusted",
        &asks,
        || {
            let id = "spiffe://elsewhere/ns/shop/sa/cart";
            let foreign = client(Some(Pki::new("another domain's CA").issue(&[], Some(id))), &["h2"]);
            assert!(Hbone::connect(address, foreign).is_err());
        },
    );
    table.connection(&gateway, "A caller's TLS is older than 1.3", "tls_failed", &asks, || {
        assert!(Hbone::connect(address, old_client()).is_err());
    });
    table.connection(&gateway, "A caller shows no certificate", "identity_required", &asks, || {
        assert!(Hbone::connect(address, client(None, &["h2"])).is_err());
    });
}

fn of_the_own_certificate(table: &mut Table) {
    let folder = folder();
    let own = PKI.issue_for(&[OWN], 2001, 2002);
    std::fs::write(folder.path().join("cert.pem"), &own.certificate_pem).expect("written");
    std::fs::write(folder.path().join("key.pem"), &own.key_pem).expect("written");
    let services = service("vault.shop.mesh", 80, &Backend::echo(), "");
    let gateway = Gateway::start_unready(folder, &format!("{BASE}services:\n{services}"));
    let address = gateway.listener("hbone");
    let asks = ["vault.shop.mesh:80", "--authority"];
    table.connection(
        &gateway,
        "The gateway's own certificate has expired",
        "certificate_expired",
        &asks,
        || {
            // This client checks the validity period of the certificate, as a workload of the mesh does.
            let config = PKI.client_with(PKI.issue(&[], Some(CALLER)), &["h2"]);
            tls_with(config, address, "vault.test").expect_err("expired");
        },
    );
}
