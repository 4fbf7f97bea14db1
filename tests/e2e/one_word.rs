//! Each fault has one word. The test injects every row of `docs/faults.md`; within five seconds, `isthmus check`, `isthmus
//! explain`, `isthmus failures`, the access log, the metric and the dashboard show the row's word and no other.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use isthmus::admin::problems::code::Code;
use isthmus::model::reason::Reason;
use serde_json::Value;

use crate::endpoints::closing;
use crate::hbone::{BASE, CALLER, OWN, caller, folder, service};
use crate::hbone_hostile::old_client;
use crate::problems::run;
use crate::support::backend::{Backend, Silent, refusing, reset};
use crate::support::client::{connect, tls, tls_with};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::{PKI, Pki};
use crate::support::raw;

/// The time within which the commands, the log, the metric and the dashboard must show the word of a fault.
const SOON: Duration = Duration::from_secs(5);

/// A row of the table.
struct Row {
    fault: &'static str,
    word: &'static str,
    explain: String,
}

impl Row {
    /// Returns the name of the metric that counts the fault, and the label whose value is the word.
    fn metric(&self) -> (&'static str, &'static str) {
        match Reason::ALL.iter().any(|reason| reason.text() == self.word) {
            true => ("isthmus_connections_total", "reason"),
            false => ("isthmus_problems", "code"),
        }
    }

    /// Returns the advice on what to look at next, which `check` prints too.
    fn look_at(&self) -> &'static str {
        let reason =
            Reason::ALL.iter().find(|reason| reason.text() == self.word).map(|reason| reason.look_at());
        let code = || Code::ALL.iter().find(|code| code.text() == self.word).map(|code| code.look_at());
        reason.or_else(code).expect("a word of the closed lists")
    }
}

/// Returns true if the word is the reason of a connection's end, or if the detail begins with it.
fn says(connection: &Value, word: &str) -> bool {
    let detail = connection["detail"].as_str().unwrap_or_default();
    connection["reason"] == word || detail.starts_with(&format!("{word}: "))
}

#[derive(Default)]
struct Table(Vec<Row>);

impl Table {
    /// Injects a fault, and waits until all places show the word. `asks` are the arguments of `isthmus explain`.
    fn row(
        &mut self,
        gateway: &Gateway,
        fault: &'static str,
        word: &'static str,
        asks: &[&str],
        inject: impl FnOnce(),
    ) {
        let quoted: Vec<&str> = asks.iter().map(|word| if word.is_empty() { "\"\"" } else { word }).collect();
        let row = Row { fault, word, explain: quoted.join(" ") };
        let lines = gateway.access_log().len();
        inject();
        let begun = Instant::now();
        let mut silent = row.silent(gateway, asks, lines);
        while !silent.is_empty() && begun.elapsed() < SOON {
            silent = row.silent(gateway, asks, lines);
        }
        assert!(silent.is_empty(), "{fault}: after {SOON:?} these do not say {word}: {}", silent.join("\n"));
        eprintln!("{fault:<48} {word:<22} {:>5} ms", begun.elapsed().as_millis());
        // No connection ends with another reason.
        let others = gateway.access_log().into_iter().skip(lines).filter(|line| !says(line, word));
        let others: Vec<Value> = others.filter(|line| line["reason"] != "ok").collect();
        assert!(others.is_empty(), "{fault}: other words than {word}: {others:?}");
        self.0.push(row);
    }

    /// Returns the text of the document, with the table.
    fn document(&self) -> String {
        let mut text = "# Faults\n\n\
            A fault has one word: a [reason](reasons.md), or the code of a [problem](problems.md). `isthmus check`, `isthmus explain`, \
            `isthmus failures`, the access log, the metric and the [dashboard](operate-and-debug.md#dashboard) say this word within five \
            seconds. If the word is the code of a problem, the reason of the connection is another one, and `detail` in `isthmus failures` and \
            in the access log begins with the code. A test injects each of these faults, compares all six places, and writes this page; the \
            names and listeners are those of the test.\n\n\
            | fault | word | explained by | counted by | look at |\n|---|---|---|---|---|\n"
            .to_owned();
        for row in &self.0 {
            let (metric, label) = row.metric();
            let (fault, word, explain, look_at) = (row.fault, row.word, &row.explain, row.look_at());
            let _ = writeln!(
                text,
                "| {fault} | `{word}` | `isthmus explain {explain}` | `{metric}{{{label}=\"{word}\"}}` | {look_at} |"
            );
        }
        text
    }
}

impl Row {
    /// Returns the outputs that do not show the word, each with its content.
    fn silent(&self, gateway: &Gateway, asks: &[&str], lines: usize) -> Vec<String> {
        let word = self.word;
        let json = |arguments: &[&str]| -> Value {
            let text = run(gateway, &[arguments, &["-o", "json"]].concat());
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
        };
        let has = |list: &Value| list.as_array().is_some_and(|list| list.iter().any(|one| says(one, word)));
        let begins = |text: &Value| text.as_str().is_some_and(|text| text.starts_with(&format!("{word}: ")));
        let checks = json(&["check"]);
        let explained = json(&[&["explain"], asks].concat());
        let failures = json(&["failures"]);
        let (metric, label) = self.metric();
        let page = gateway.get("/").1;
        let log = Value::from(gateway.access_log().into_iter().skip(lines).collect::<Vec<_>>());
        let of_check = |list: &Vec<Value>| list.iter().any(|one| begins(&one["text"]));
        let warns = explained["warnings"].as_array().is_some_and(|list| list.iter().any(begins));
        let places = [
            ("check", checks.as_array().is_some_and(of_check), checks.to_string()),
            (
                "explain",
                explained["reason"] == word || has(&explained["recent"]) || warns,
                explained.to_string(),
            ),
            ("failures", has(&failures), failures.to_string()),
            ("access log", has(&log), log.to_string()),
            (
                "metric",
                gateway.metric(metric, &[&format!("{label}=\"{word}\"")]) >= 1.0,
                format!("{metric}{{{label}=\"{word}\"}} is 0"),
            ),
            ("dashboard", page.contains(&format!(">{word}<")), page.clone()),
        ];
        let silent = places.into_iter().filter(|(_, said, _)| !said);
        silent.map(|(place, _, text)| format!("{place}: {text}")).collect()
    }
}

#[test]
fn every_fault_has_one_word_in_all_places() {
    let mut table = Table::default();
    of_hellos_and_names(&mut table);
    of_endpoints(&mut table);
    of_open_connections(&mut table);
    of_callers_by_hbone(&mut table);
    of_the_own_certificate(&mut table);
    let words: std::collections::BTreeSet<&str> = table.0.iter().map(|row| row.word).collect();
    assert_eq!(words.len(), table.0.len(), "each row has a word of its own");
    assert!(words.len() >= 35, "{words:?}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/faults.md");
    let text = table.document();
    if std::env::var_os("ISTHMUS_BLESS").is_some() {
        std::fs::write(&path, &text).expect("written");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == text, "docs/faults.md is not what the test does; run it with ISTHMUS_BLESS=1\n{text}");
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
    table.row(&gateway, "A client connects and sends nothing", "hello_timeout", &asks, || {
        send(impatient, b"")
    });
    // The hello is a handshake record without content.
    let empty = [22, 3, 1, 0, 0];
    table.row(&gateway, "A client sends a malformed ClientHello", "bad_hello", &[""], || send(open, &empty));
    let http = b"GET / HTTP/1.1\r\n\r\n";
    table.row(&gateway, "A client speaks HTTP without TLS", "not_tls", &[""], || send(open, http));
    table.row(&gateway, "A client connects to an address, not to a name", "no_sni", &[""], || {
        send(open, &raw::hello(b"10.0.0.1"));
    });
    let asks = ["two..dots"];
    table.row(&gateway, "A client sends a name that is no host name", "sni_invalid", &asks, || {
        send(open, &raw::hello(b"two..dots"));
    });
    table.row(&gateway, "A ClientHello is larger than `hello.maxBytes`", "hello_too_large", &[""], || {
        send(open, &raw::hello_of(b"checkout.test", 64 * 1024 + 1));
    });
    let asks = ["chekout.test"];
    table.row(&gateway, "A name is misspelt", "sni_unknown", &asks, || refused(open, "chekout.test"));
    let asks = ["hidden.shop.mesh"];
    table.row(&gateway, "No export rule names a service", "not_exported", &asks, || refused(open, asks[0]));
    let asks = ["checkout.test", "--listener", "mesh"];
    table.row(&gateway, "A client outside the mesh calls a mesh listener", "alpn_refused", &asks, || {
        tls_with(PKI.client(&["h2"]), mesh, asks[0]).expect_err("refused");
    });
    let asks = ["checkout.test", "--listener", "closed", "--from", "127.0.0.1"];
    table.row(&gateway, "A client's address is outside `from`", "source_denied", &asks, || {
        refused(closed, asks[0])
    });
    let asks = ["checkout.test", "--listener", "balanced"];
    table.row(&gateway, "The load balancer sends no PROXY header", "proxy_protocol", &asks, || {
        refused(balanced, asks[0]);
    });
    let asks = ["far.shop.mesh"];
    table.row(&gateway, "A service is on another network only", "no_endpoints", &asks, || {
        refused(open, asks[0])
    });
    let asks = ["db.north.mesh"];
    table.row(&gateway, "A registry cannot be read since the start", "registry_missing", &asks, || {
        refused(open, asks[0]);
    });
}

fn of_endpoints(table: &mut Table) {
    let (dead, sick, silent) = (refusing(), refusing(), Silent::new());
    let (resetting, closing) = (Backend::resetting(), closing());
    let plain = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  dead.test: {{endpoints: [\"{dead}\"], ejection: off}}\n  \
         slow.test: {{endpoints: [\"{}\"], connectTimeout: 200ms}}\n  reset.test: \"{}\"\n  lost.test: \"no-such-name.invalid:443\"\n  \
         mute.test: \"{}\"\n  plain.test: \"{}\"\n  nowhere.test: \"[fe80::1]:1\"\n  \
         sick.test: {{endpoints: [\"{sick}\"], panic: false, health: {{interval: 100ms, timeout: 100ms, unhealthyAfter: 2}}}}\n",
        silent.address, resetting.address, closing.address, plain.address
    ));
    let address = gateway.listener("default");
    eventually("the verdict of the checks", || {
        let all = gateway.json("/api/v1/endpoints");
        let sick = all.as_array()?.iter().find(|one| one["route"] == "sick.test")?.clone();
        (sick["state"] == "unhealthy").then_some(())
    });
    let asks = ["sick.test"];
    table.row(&gateway, "The health checks of all endpoints fail", "all_unhealthy", &asks, || {
        refused(address, asks[0]);
    });
    let asks = ["dead.test"];
    table.row(&gateway, "An endpoint's process is down", "endpoint_refused", &asks, || {
        refused(address, asks[0])
    });
    let asks = ["slow.test"];
    table.row(&gateway, "An endpoint does not accept", "endpoint_timeout", &asks, || {
        refused(address, asks[0])
    });
    let asks = ["reset.test"];
    table.row(&gateway, "An endpoint resets connections", "endpoint_reset", &asks, || {
        refused(address, asks[0])
    });
    let asks = ["mute.test"];
    table.row(&gateway, "An endpoint ends connections without an answer", "endpoint_closed", &asks, || {
        refused(address, asks[0]);
    });
    let asks = ["plain.test"];
    table.row(&gateway, "An endpoint answers without TLS", "endpoint_not_tls", &asks, || {
        send(address, &raw::hello(b"plain.test"));
    });
    let asks = ["nowhere.test"];
    table.row(&gateway, "An endpoint's address cannot be reached", "endpoint_unreachable", &asks, || {
        refused(address, asks[0]);
    });
    let asks = ["lost.test"];
    table.row(&gateway, "An endpoint's host name does not resolve", "name_unresolved", &asks, || {
        refused(address, asks[0]);
    });
}

fn of_open_connections(table: &mut Table) {
    let echo = Backend::echo();
    let config =
        |more: &str| format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{0}\"{1}}}\n", echo.address, more);
    let limited = |limits: &str| format!("{}limits: {{{limits}}}\ntimeouts: {{idle: 1s}}\n", config(""));
    let gone = config(&format!(", gone.test: \"{}\"", echo.address));
    let gateway = Gateway::start(&gone);
    let address = gateway.listener("default");
    let asks = ["a.test"];
    table.row(&gateway, "A client resets its connection", "client_reset", &asks, || {
        reset(&echoed(address, "a.test"));
    });
    table.row(&gateway, "An operator closes a connection", "killed", &asks, || {
        let _open = echoed(address, "a.test");
        let id = eventually("the connection", || {
            gateway.json("/api/v1/connections").as_array()?.iter().find_map(|one| one["id"].as_u64())
        });
        assert!(run(&gateway, &["close", &id.to_string()]).contains("closed"));
        eventually("its end", || {
            gateway.access_log().iter().any(|line| line["reason"] == "killed").then_some(())
        });
    });
    table.row(&gateway, "A route is taken out of the config", "config_removed", &["gone.test"], || {
        let _open = echoed(address, "gone.test");
        gateway.reload(&config(""));
        eventually("its end", || {
            gateway.access_log().iter().any(|line| line["reason"] == "config_removed").then_some(())
        });
    });
    gateway.reload(&limited("perSource: {connections: 1}"));
    table.row(&gateway, "A source has reached its limit of connections", "limit_source", &asks, || {
        let _open = echoed(address, "a.test");
        send(address, &raw::hello(b"a.test"));
    });
    gateway.reload(&limited("perService: {connections: 1}"));
    table.row(&gateway, "A service has reached its limit of connections", "limit_service", &asks, || {
        let _open = echoed(address, "a.test");
        send(address, &raw::hello(b"a.test"));
    });
    gateway.reload(&limited("connections: 1"));
    table.row(&gateway, "All connections together have reached their limit", "limit_global", &asks, || {
        let _open = echoed(address, "a.test");
        send(address, &raw::hello(b"a.test"));
    });
    gateway.reload(&limited(""));
    table.row(&gateway, "A connection is silent for `timeouts.idle`", "idle_timeout", &asks, || {
        let mut open = echoed(address, "a.test");
        let _ = open.read_to_end(&mut Vec::new());
    });
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
    table.row(&gateway, "A rule does not name the caller's identity", "identity_denied", &vault, || {
        hbone.open("vault.shop.mesh:80").err().expect("refused");
    });
    let asks = ["valut.shop.mesh:80", "--authority", "--identity", CALLER];
    table.row(&gateway, "The authority of a CONNECT is misspelt", "authority_unknown", &asks, || {
        hbone.open("valut.shop.mesh:80").err().expect("refused");
    });
    let asks = ["vault.shop.mesh:80", "--authority"];
    table.row(&gateway, "A caller's certificate has expired", "identity_expired", &asks, || {
        let expired = client(Some(PKI.issue_for(&[CALLER], 2001, 2002)), &["h2"]);
        assert!(Hbone::connect(address, expired).is_err());
    });
    table.row(&gateway, "A caller's authority is unknown", "identity_untrusted", &asks, || {
        let stranger = client(Some(Pki::new("a stranger's CA").issue(&[], Some(CALLER))), &["h2"]);
        assert!(Hbone::connect(address, stranger).is_err());
    });
    table.row(&gateway, "A caller's TLS is older than 1.3", "tls_failed", &asks, || {
        assert!(Hbone::connect(address, old_client()).is_err());
    });
    table.row(&gateway, "A caller shows no certificate", "identity_required", &asks, || {
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
    table.row(&gateway, "The gateway's own certificate has expired", "certificate_expired", &asks, || {
        // This client checks the validity period of the certificate, as a workload of the mesh does.
        let config = PKI.client_with(PKI.issue(&[], Some(CALLER)), &["h2"]);
        tls_with(config, address, "vault.test").expect_err("expired");
    });
}
