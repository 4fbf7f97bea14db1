//! The dashboard of a real gateway: its headers, names that contain markup, a large mesh, slow readers, and a real browser.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::problems::run;
use crate::support::backend::Backend;
use crate::support::client::{call, connect, tls};
use crate::support::gateway::{Gateway, raw_http};
use crate::support::pki::PKI;
use crate::support::raw::{hello, read_out};
use crate::support::stall::Stopwatch;
use crate::support::{eventually, python, skip, within};

/// The config of a gateway that has everything that the dashboard shows, some of it with faults.
const CONFIG: &str = "node: {name: eastwest-0, cluster: east, network: net-east}\nlisteners: [{name: mesh-sni, bind: \"127.0.0.1:0\"}]\n\
    routes: {api.example.com: 127.0.0.9:1, \"*.billing.mesh\": 127.0.0.9:2}\nservices:\n  - hostname: checkout.shop.mesh\n    \
    namespace: shop\n    ports: [{name: https, port: 443, protocol: TLS}]\n    endpoints: [{address: 10.2.0.1, network: net-west}]\n\
    registries: [{file: {path: absent.yaml, cluster: north, network: net-north}}]\nexports: [{services: [\"*.shop.mesh\"]}]\n\
    networks: {net-west: {gateways: [{address: 192.0.2.10, sniPort: 15443}]}, net-north: {gateways: [{address: gw.invalid, sniPort: \
    15443}]}}\naggregator: {startTimeout: 1s}\n";

/// A server name that would open a dialog if it became markup.
const SCRIPT: &[u8] = b"\"><script>alert(1)</script><img src=x onerror=alert(1)>";
/// A name without a route that is similar to a name with one.
const UNKNOWN: &str = "chekout.shop.mesh";

fn gateway() -> Gateway {
    let gateway = Gateway::start(CONFIG);
    let listener = gateway.listener("mesh-sni");
    tls(listener, UNKNOWN).expect_err("refused");
    for _ in 0..3 {
        tls(listener, "api.example.com").expect_err("no endpoint");
    }
    let mut client = connect(listener);
    client.write_all(&hello(SCRIPT)).expect("sent");
    read_out(&mut client);
    gateway.logged("the hostile name", |line| line["reason"] == "sni_invalid");
    gateway
}

/// Requests a page; returns the head of the response in lower case, and the body.
fn page(gateway: &Gateway, path: &str) -> (String, String) {
    let mut client = connect(gateway.admin());
    let request = format!("GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n", gateway.admin());
    client.write_all(request.as_bytes()).expect("sent");
    let text = String::from_utf8(read_out(&mut client).0).expect("text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.to_lowercase(), body.to_owned())
}

#[test]
fn the_page_is_complete_without_scripts_and_no_name_becomes_markup() {
    let gateway = gateway();
    for path in ["/", "/dashboard.css", "/dashboard.js"] {
        let (head, _) = page(&gateway, path);
        assert!(head.starts_with("http/1.0 200"), "{path}: {head}");
        assert!(head.contains("content-security-policy: default-src 'none';"), "{head}");
        assert!(!head.contains("unsafe-inline"), "{head}");
        for wanted in ["x-content-type-options: nosniff", "x-frame-options: deny", "cache-control: no-store"]
        {
            assert!(head.contains(wanted), "{path}: no {wanted}: {head}");
        }
    }
    let (_, body) = page(&gateway, "/");
    for wanted in [
        "eastwest-0",
        "registry_missing",
        "sni_unknown",
        UNKNOWN,
        "api.example.com",
        "down, 0 of 1 ready",
        "192.0.2.10 sni 15443",
        "<svg",
        "absent.yaml",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
    ] {
        assert!(body.contains(wanted), "no {wanted}: {body}");
    }
    // The name arrives in a hello, in a link of the page, and in the address that a user enters in the browser.
    let query = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E";
    for path in [
        "/".to_owned(),
        format!("/?explain={query}"),
        format!("/?explain={query}&authority=1&from={query}"),
        format!("/?q={query}&page={query}"),
        format!("/?network={query}"),
        format!("/?network={query}&service={query}&endpoint={query}"),
    ] {
        let (head, body) = page(&gateway, &path);
        assert!(head.starts_with("http/1.0 200"), "{path}: {head}");
        assert_eq!(body.matches("<script").count(), 1, "{path}: {body}");
        assert!(!body.contains("<img") && !body.contains("onerror=alert(1)>\""), "{path}: {body}");
    }
    let (_, body) = page(&gateway, &format!("/?explain={UNKNOWN}&from=10.0.0.1"));
    assert!(body.contains("sni_unknown") && body.contains("Did you mean"), "{body}");
    let (_, body) = page(&gateway, "/?explain=a.test&from=nonsense");
    assert!(body.contains("is not an IP address"), "{body}");
    let (_, body) = page(&gateway, "/?q=BILLING");
    let services = body.split("id=\"services\"").nth(1).and_then(|rest| rest.split("</section>").next());
    let services = services.expect("the section");
    assert!(services.contains("*.billing.mesh") && !services.contains("api.example.com"), "{services}");
}

#[test]
fn the_page_leads_from_a_network_to_a_connection_and_the_command_that_closes_it() {
    let backend = Backend::tls_echo(PKI.server("a.billing.mesh"), "");
    let address = backend.address.to_string();
    let config = CONFIG
        .replace("127.0.0.9:2", &address)
        .replace("networks: {", "networks: {net-east: {cidrs: [\"127.0.0.0/8\"]}, ");
    let gateway = Gateway::start(&config);
    let mut client = tls(gateway.listener("mesh-sni"), "a.billing.mesh").expect("a handshake");
    call(&mut client, "hello").expect("an answer");
    let shows = |path: &str, wanted: &[&str]| {
        let (head, body) = page(&gateway, path);
        assert!(head.starts_with("http/1.0 200"), "{path}: {head}");
        wanted.iter().for_each(|wanted| assert!(body.contains(wanted), "{path}: no {wanted}: {body}"));
        body
    };
    let to_west = "/?network=net-west&amp;service=checkout.shop.mesh";
    shows("/", &["href=\"/?network=net-west\"", "href=\"/?service=%2A.billing.mesh\""]);
    shows("/?network=net-west", &[to_west, "192.0.2.10 sni 15443", "isthmus drain network net-west --plan"]);
    shows(
        "/?network=net-west&service=checkout.shop.mesh",
        &["10.2.0.1", "isthmus explain checkout.shop.mesh"],
    );
    let to_endpoint = format!("/?service=%2A.billing.mesh&amp;endpoint={}", address.replace(':', "%3A"));
    shows("/?service=%2A.billing.mesh", &[&to_endpoint, "1<span class=\"meaning\">1</span>"]);
    let drain = format!("isthmus endpoint drain {address} --service &#39;*.billing.mesh&#39;");
    let body = shows(&to_endpoint.replace("&amp;", "&"), &[&drain, "1 (max 1)"]);
    let (_, rest) = body.split_once("isthmus close ").expect("the command");
    let (id, _) = rest.split_once('<').expect("an element");
    run(&gateway, &["close", id]);
    call(&mut client, "again").expect_err("closed");
    let ended = "isthmus_network_connections_total{network=\"net-east\",reason=\"killed\"} 1\n";
    eventually("the connection is counted for its network", || {
        gateway.get("/metrics").1.contains(ended).then_some(())
    });
    shows("/?service=nothing.test", &["knows no such network, service or endpoint"]);
}

/// Half of the own endpoints are ready, so that other networks take calls: both, until the gateway of one is dead.
#[test]
fn the_map_shows_distances_shares_and_dead_gateways() {
    let listen = || TcpListener::bind("127.0.0.1:0").expect("a port");
    let (west, south) = (listen(), listen());
    let port = |listener: &TcpListener| listener.local_addr().expect("bound").port();
    let config = format!(
        "node: {{name: gw, cluster: east, network: net-east}}\nlisten: \"127.0.0.1:0\"\nsteering: {{mode: nearest}}\nnetworks:\n  \
         net-west: {{gateways: [{{address: 127.0.0.1, sniPort: {}}}]}}\n  net-south: {{gateways: [{{address: 127.0.0.1, sniPort: \
         {}}}]}}\nexports: [{{services: [\"*.mesh\"]}}]\nservices:\n  - hostname: cart.mesh\n    namespace: shop\n    ports: [{{name: \
         https, port: 443, protocol: TLS}}]\n    endpoints: [{{address: 10.2.0.1, network: net-east}}, {{address: 10.2.0.2, network: \
         net-east, health: unhealthy}}, {{address: 10.2.0.3, network: net-west}}, {{address: 10.2.0.4, network: net-south}}]\n",
        port(&west),
        port(&south)
    );
    let gateway = Gateway::start(&config);
    let shows = |wanted: &[&str]| {
        let (_, body) = page(&gateway, "/");
        wanted.iter().all(|wanted| body.contains(wanted)).then_some(body)
    };
    let measured = ["(measured here), ring 1<", " % of calls<", " % of its calls stay<"];
    let body = within(Duration::from_secs(40), "the distances", || shows(&measured));
    assert!(!body.contains("does not answer"), "{body}");
    let table = run(&gateway, &["get", "networks"]);
    assert!(table.contains("ms (measured here)"), "{table}");
    drop(south);
    let dead = [", does not answer<", ">unreachable<", ">0 of 1<"];
    eventually("the dead gateway", || shows(&dead));
}

#[test]
fn what_a_hostile_client_sends_to_the_page_costs_little_and_stops_nobody() {
    let gateway = gateway();
    let (admin, own) = (gateway.admin(), format!("Host: {}\r\n", gateway.admin()));
    for (request, headers, expected) in [
        ("GET /", "Host: evil.example\r\n", 403),
        ("GET /dashboard.js", "Host: evil.example\r\n", 403),
        ("GET /api/v1/overview", "Host: evil.example\r\n", 403),
        ("POST /", &own, 405),
        ("GET /dashboard", &own, 404),
        ("GET //", &own, 404),
        ("GET /?page=18446744073709551616&q=%00", &own, 200),
        ("GET /?explain=%ff%fe", &own, 200),
    ] {
        let (status, body) = raw_http(admin, &format!("{request} HTTP/1.0\r\n{headers}\r\n"));
        assert_eq!(status, expected, "{request}: {body}");
    }
    // This client sends a body of 10 MiB for a page that accepts no body.
    let mut large = connect(admin);
    let head = format!("GET / HTTP/1.1\r\n{own}Content-Length: {}\r\nConnection: close\r\n\r\n", 10 << 20);
    large.write_all(head.as_bytes()).expect("sent");
    // The write may fail, because the gateway need not read the body.
    let _ = large.write_all(&vec![b'x'; 10 << 20]);
    drop(large);
    // These clients send many requests and read no response.
    let request = format!("GET / HTTP/1.1\r\n{own}\r\n").repeat(50);
    let unread: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut client = connect(admin);
            client.set_write_timeout(Some(Duration::from_millis(200))).expect("set");
            let _ = client.write_all(request.as_bytes());
            client
        })
        .collect();
    let (status, body) = gateway.get("/");
    assert_eq!(status, 200, "{body}");
    drop(unread);
}

#[test]
fn a_mesh_of_a_hundred_thousand_services_has_a_small_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut services = String::from("services:\n");
    for number in 0..100_000 {
        services.push_str(&format!(
            "- {{hostname: s{number}.big.mesh, namespace: big, ports: [{{name: a, port: 443, protocol: TLS}}]}}\n"
        ));
    }
    std::fs::write(folder.path().join("big.yaml"), services).expect("written");
    let config = "node: {cluster: east, network: net-east}\nlisten: \"127.0.0.1:0\"\nexports: [{services: [\"*\"]}]\n\
                  registries: [{file: {path: big.yaml, cluster: east, network: net-east}}]\naggregator: {startTimeout: 100s}\n";
    let gateway = Gateway::start_unready(folder, config);
    within(Duration::from_secs(120), "the mesh is read", || {
        (gateway.json("/api/v1/status")["services"] == 100_000).then_some(())
    });
    let begun = Instant::now();
    let (_, body) = page(&gateway, "/");
    let first = begun.elapsed();
    assert!(body.contains("page 1</span>") || body.contains("page 1 of 2000"), "{body}");
    assert!(body.len() < 200_000, "{} bytes", body.len());
    let (_, last) = page(&gateway, "/?page=999999");
    assert!(last.contains("page 2000 of 2000"), "{last}");
    let (_, found) = page(&gateway, "/?q=s99999.big");
    assert!(found.contains("s99999.big.mesh") && found.len() < 100_000, "{found}");
    // The list is built once for all clients that ask at the same time; meanwhile the gateway answers other requests.
    let clients: Vec<_> = (0..30)
        .map(|_| {
            let mut client = connect(gateway.admin());
            let request = format!("GET / HTTP/1.0\r\nHost: {}\r\n\r\n", gateway.admin());
            client.write_all(request.as_bytes()).expect("sent");
            client
        })
        .collect();
    let (begun, watch) = (Instant::now(), Stopwatch::start());
    assert_eq!(gateway.get("/livez").0, 200);
    let probe = watch.elapsed();
    for mut client in clients {
        let mut text = String::new();
        client.read_to_string(&mut text).expect("an answer");
        assert!(text.starts_with("HTTP/1.0 200"), "{text}");
    }
    eprintln!(
        "100,000 services: {} bytes, first page {first:?}, a probe beside 30 pages {probe:?}, all 30 {:?}",
        body.len(),
        begun.elapsed()
    );
    assert!(probe < Duration::from_secs(2), "{probe:?}");
    assert!(run(&gateway, &["status"]).contains("100000 services"));
}

/// Looks at the page in a real browser. Returns false, after reporting a skip, if there is none.
fn look(gateway: &Gateway, further: &[&str]) -> bool {
    let Some(python) = python::with_browser() else {
        skip("dashboard: no driver of browsers (playwright of PyPI)");
        return false;
    };
    let found = std::env::var_os("ISTHMUS_BROWSER").map(std::path::PathBuf::from);
    let usual = || Some(Path::new("/usr/bin/chromium").to_owned()).filter(|path| path.exists());
    let Some(browser) = found.or_else(usual) else {
        skip("dashboard: no chromium");
        return false;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(python)
        .arg(root.join("tests/interop/dashboard_browser.py"))
        .arg(browser)
        .arg(format!("http://{}", gateway.admin()))
        .arg(root.join("target/dashboard"))
        .arg(UNKNOWN)
        .args(further)
        .output()
        .expect("Python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    true
}

#[test]
fn the_page_works_in_a_real_browser() {
    let gateway = gateway();
    eventually("the endpoint's failure", || {
        let text = gateway.json("/api/v1/overview")["status"]["problems"].to_string();
        text.contains("registry_missing").then_some(())
    });
    look(&gateway, &[]);
}

/// Starts the gateway of the README's pictures: some calls have succeeded, some were refused, and an endpoint fails.
pub(crate) fn scene() -> (Gateway, Backend) {
    let backend = Backend::tls_echo(PKI.server("cart.billing.mesh"), "");
    let gateway = Gateway::start(&CONFIG.replace("127.0.0.9:2", &backend.address.to_string()));
    let listener = gateway.listener("mesh-sni");
    for _ in 0..20 {
        let mut client = tls(listener, "cart.billing.mesh").expect("a handshake");
        call(&mut client, "hello").expect("an answer");
    }
    for name in [UNKNOWN, "api.example.com", "api.example.com", "api.example.com"] {
        tls(listener, name).expect_err("refused");
    }
    eventually("the endpoint's failure", || {
        let text = gateway.json("/api/v1/overview")["status"]["problems"].to_string();
        text.contains("endpoint_failing").then_some(())
    });
    (gateway, backend)
}

/// With `ISTHMUS_BLESS=1`, the picture becomes that of the README.
#[test]
fn the_picture_of_the_readme_is_taken_of_this_page() {
    let (gateway, _backend) = scene();
    if !look(&gateway, &["picture"]) {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (taken, shown) =
        (root.join("target/dashboard/picture.png"), root.join("docs/pictures/dashboard.png"));
    if std::env::var_os("ISTHMUS_BLESS").is_some() {
        std::fs::copy(taken, shown).expect("copied");
        return;
    }
    // Width and height are in the first chunk (PNG, section 11.2.2).
    let size = |path: &Path| std::fs::read(path).expect("a picture")[16..24].to_vec();
    assert_eq!(size(&taken), size(&shown));
}
