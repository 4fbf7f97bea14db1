//! `isthmus convert`: HAProxy, nginx or sniproxy accepts each input, `validate` accepts each output, and both send the same names to
//! the same backends.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustls::pki_types::ServerName;

use crate::support::backend::Backend;
use crate::support::balancer::{Balancer, free};
use crate::support::client::{connect, hello};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;
use crate::support::skip;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/haproxy")
}

fn convert(file: &Path, more: &[&str]) -> Output {
    Command::new(BINARY).arg("convert").arg(file).args(more).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// Returns the verdict of the real HAProxy on a file (true if it accepts it) and its output; `None` if HAProxy is not
/// installed.
fn haproxy_takes(file: &Path) -> Option<(bool, String)> {
    let program = Path::new("/usr/sbin/haproxy");
    if !program.exists() {
        skip("convert: there is no haproxy (Debian's package of this name)");
        return None;
    }
    let output = Command::new(program).arg("-c").arg("-f").arg(file).output().expect("it runs");
    Some((output.status.success(), text(&output.stderr)))
}

fn validates(folder: &Path, config: &str) {
    let path = folder.join("converted.yaml");
    std::fs::write(&path, config).expect("written");
    let output = Command::new(BINARY).arg("validate").arg(&path).output().expect("it runs");
    assert!(output.status.success(), "{}{}\n{config}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn what_cannot_be_converted_is_listed_with_its_line() {
    let file = corpus().join("everything.cfg");
    if let Some((takes, said)) = haproxy_takes(&file) {
        assert!(takes, "{said}");
    }
    let output = convert(&file, &["--partial"]);
    let (config, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{told}");
    let folder = tempfile::tempdir().expect("a folder");
    validates(folder.path(), &config);
    let source = std::fs::read_to_string(&file).expect("the file");
    let line = |of: &str| {
        1 + source.lines().position(|line| line.trim() == of).unwrap_or_else(|| panic!("no line {of}"))
    };
    for (of, fate, why) in [
        ("acl legacy req.ssl_sni -i -m reg ^old[0-9]+", "not converted", "a regular expression"),
        ("use_backend old if legacy", "not converted", "a regular expression"),
        ("use_backend %[req.ssl_sni,lower,field(1,.)]", "not converted", "computed"),
        ("use_backend case if { req.ssl_sni Case.example.com }", "differs", "case"),
        ("bind 127.0.0.1:7443 accept-proxy", "differs", "proxyProtocol.from"),
        ("maxconn 5000", "not converted", "limits.connections"),
        ("frontend plain", "not converted", "mode http"),
        ("server a2 10.0.3.2:443 check inter 5s send-proxy-v2 maxconn 100", "differs", "queues"),
        ("server s4 10.0.4.3:443 ssl verify none", "not converted", "encrypts the connection"),
        ("server s5 10.0.4.4:443 disabled", "not converted", "disabled"),
        ("balance first", "not converted", "the config has roundRobin"),
        ("stick on src", "not converted", "no counterpart"),
        ("backend internal", "not converted", "no converted rule"),
        ("resolvers dns", "not converted", "the section resolvers"),
    ] {
        let begins = format!("{}:{}: {fate}: ", file.display(), line(of));
        let found = told.lines().any(|told| told.starts_with(&begins) && told.contains(why));
        assert!(found, "{begins}{why} is not told:\n{told}");
        // The converted config has the same message as a comment.
        assert!(config.contains(&format!("#   line {}: ", line(of))), "{of}: {config}");
    }
    for wanted in [
        "bind: \"0.0.0.0:8443\"",
        "bind: \"[::1]:9443\"",
        "proxyProtocol: {mode: require",
        "hello: {timeout: 5s}",
        "\"api2.example.com\":",
        "\"*.shop.example.com\":",
        "weight: 3",
        "maxConnections: 100",
        "backup: true",
        "protocol: tcp",
        "health: {interval: 5s, timeout: 2s, unhealthyAfter: 3, healthyAfter: 2}",
        "sendProxyProtocol: v2",
        "loadBalancing: {policy: sourceHash",
        "connectTimeout: 1500ms",
        "limits: {connections: 20000}",
        "timeouts: {connect: 5s, idle: 120s, halfClose: 10s}",
        "drain: {timeout: 30s}",
    ] {
        assert!(config.contains(wanted), "no {wanted}:\n{config}");
    }
    assert!(!config.contains("www.shop.example.com\":"), "a rule that HAProxy never reaches: {config}");
    // `--all` also lists lines that need no counterpart; without `--partial`, the command fails if lines cannot be converted.
    let all = text(&convert(&file, &["--all"]).stderr);
    for of in [
        "option tcplog",
        "option tcp-check",
        "server s2 10.0.4.2 weight 0",
        "daemon",
        "retries 3",
        "use_backend shop if { req.ssl_sni -i www.shop.example.com }",
        "use_backend internal if api office",
        "bind [::1]:9443 name six",
        "tcp-request connection reject if { src 192.0.2.0/24 }",
    ] {
        assert!(all.contains(&format!(":{}: not needed: ", line(of))), "{of}: {all}");
    }
    let failed = convert(&file, &[]);
    assert_eq!((failed.status.code(), text(&failed.stdout) == config), (Some(1), true));
    assert!(text(&failed.stderr).contains("add `--partial`"), "{}", text(&failed.stderr));
}

#[test]
fn a_file_is_not_overwritten_and_one_without_a_tcp_section_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, out) = (folder.path().join("haproxy.cfg"), folder.path().join("isthmus.yaml"));
    std::fs::write(
        &input,
        "frontend f\n bind :1443\n default_backend b\nbackend b\n server s 10.0.0.1:443\n",
    )
    .expect("written");
    let to = ["--out", out.to_str().expect("text")];
    assert!(convert(&input, &to).status.success());
    let first = std::fs::read_to_string(&out).expect("written");
    assert!(first.contains("\"10.0.0.1:443\""), "{first}");
    let second = convert(&input, &to);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("cannot write"), "{second:?}");
    std::fs::write(&input, "defaults\n mode http\nfrontend f\n bind :80\n").expect("written");
    let refused = convert(&input, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("no section of mode tcp"), "{refused:?}");
    for hostile in [
        "",
        "frontend",
        "bind",
        "frontend f\nuse_backend\nacl\nbind\nserver",
        "backend b\nserver a\n",
        "\u{0}\"",
        "frontend f\n bind :1 ssl\n use_backend b if {\n",
    ] {
        std::fs::write(&input, hostile).expect("written");
        assert_eq!(convert(&input, &[]).status.code(), Some(1), "{hostile:?}");
    }
}

#[test]
fn a_config_that_reaches_nothing_and_one_of_another_program_are_refused_with_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let input = folder.path().join("input");
    for (config, wanted) in [
        (
            "frontend f\n bind 127.0.0.1:1443\n tcp-request inspect-delay 5s\n use_backend b if { req.ssl_sni -i a.test }\n\
             backend b\n server s unix@/run/s.sock\n",
            "no client can reach anything by this config, because all that leads somewhere was left out; begin with line 4",
        ),
        (
            "[tcp.routers.a]\nrule = \"HostSNI(`a.test`)\"\n",
            "this looks like a config of Traefik, which has no conversion",
        ),
        ("a.test {\n\treverse_proxy 10.0.0.1:80\n}\n", "this looks like a config of Caddy"),
        ("static_resources:\n  listeners: []\n", "this looks like a config of Envoy"),
        (
            "apiVersion: networking.istio.io/v1\nkind: Gateway\n",
            "this looks like objects of Istio, which has no conversion; docs/replace-istio-gateway.md",
        ),
    ] {
        std::fs::write(&input, config).expect("written");
        let output = convert(&input, &["--partial"]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{config}: {told}");
        assert!(told.lines().last().is_some_and(|last| last.contains(wanted)), "{config}: {told}");
    }
}

/// Sends a hello, and returns the mark of the backend that answers; empty if no backend answers.
fn ask(address: SocketAddr, name: &str) -> String {
    let mut client: TcpStream = connect(address);
    client.write_all(&hello(name)).expect("sent");
    let mut answer = Vec::new();
    let _ = client.read_to_end(&mut answer);
    // A client that is refused receives an alert record (type 21).
    if answer.first() == Some(&21) { String::new() } else { String::from_utf8_lossy(&answer).into_owned() }
}

fn marked(mark: &'static str) -> Backend {
    Backend::start(move |mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(mark.as_bytes());
    })
}

/// Names that the files of the corpus route, and names that they do not. An IP address stands for a hello without a name.
const NAMES: [&str; 13] = [
    "api.example.com",
    "API.Example.com",
    "v2.api.example.com",
    "shop.example.com",
    "www.shop.example.com",
    "a.b.shop.example.com",
    "x.deep.example.com",
    "deep.example.com",
    "example.com",
    "xapi.example.com",
    "other.test",
    "nobody.test",
    "127.0.0.1",
];

/// Returns a hello with these protocols.
fn offering(name: &str, protocol: &str) -> Vec<u8> {
    let config = PKI.client(&[protocol]);
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut connection = rustls::ClientConnection::new(config, name).expect("a client");
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).expect("memory takes it");
    bytes
}

/// Sends bytes, and returns the mark of the backend that answers.
fn send(address: SocketAddr, bytes: &[u8]) -> String {
    let mut client: TcpStream = connect(address);
    let _ = client.write_all(bytes);
    let mut answer = Vec::new();
    let _ = client.read_to_end(&mut answer);
    if answer.first() == Some(&21) { String::new() } else { String::from_utf8_lossy(&answer).into_owned() }
}

/// Runs each config of a folder of the corpus with its own program and, converted, with Isthmus, and sends both the same hellos.
/// `names` are those of the hellos; `start` starts the program; `whole` makes the file that `convert` reads. Returns the number of configs.
fn serve_alike(
    folder: &str,
    names: &[&'static str],
    start: impl Fn(SocketAddr, &str) -> Option<Balancer>,
    whole: fn(String) -> String,
) -> usize {
    let backends = ["a", "b", "c"].map(marked);
    let folder = corpus().with_file_name(folder);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    files.retain(|path| {
        path.file_stem().is_some_and(|name| name != "everything")
            && path.extension().is_some_and(|of| of != "map")
    });
    files.sort();
    for file in &files {
        let (address, second) = (free(), free());
        let mut config = std::fs::read_to_string(file).expect("a file");
        config = config.replace("{bind}", &address.to_string()).replace("{bind2}", &second.to_string());
        config = config.replace("{folder}", folder.to_str().expect("text"));
        let has_second = config.contains(&second.to_string());
        for (name, backend) in ["{a}", "{b}", "{c}"].iter().zip(&backends) {
            config = config.replace(name, &backend.address.to_string());
        }
        let answers = || -> BTreeMap<(SocketAddr, &str), String> {
            let addresses = [Some(address), has_second.then_some(second)].into_iter().flatten();
            let asked = addresses.flat_map(|address| {
                let named =
                    names.iter().map(|name| ((address, *name), ask(address, name))).collect::<Vec<_>>();
                let acme = send(address, &offering("api.example.com", "acme-tls/1"));
                let ssh = send(address, b"SSH-2.0-test\r\n");
                named.into_iter().chain([((address, "acme-tls/1"), acme), ((address, "SSH"), ssh)])
            });
            asked.collect()
        };
        let Some(balancer) = start(address, &config) else { return 0 };
        let of_original = answers();
        drop(balancer);
        let converts = tempfile::tempdir().expect("a folder");
        let input = converts.path().join("input");
        std::fs::write(&input, whole(config)).expect("written");
        let output = convert(&input, &[]);
        let converted = text(&output.stdout);
        let file = file.display();
        assert!(output.status.success(), "{file}: {}\n{converted}", text(&output.stderr));
        validates(converts.path(), &converted);
        let gateway = Gateway::start(&converted);
        let of_isthmus = answers();
        assert_eq!(of_isthmus, of_original, "{file}:\n{converted}");
        assert!(of_original.values().any(|answer| !answer.is_empty()), "{file}: {of_original:?}");
        drop(gateway);
    }
    files.len()
}

#[test]
fn converted_configs_send_each_name_where_haproxy_does() {
    const NAME: &str = "converted_configs_send_each_name_where_haproxy_does";
    let start = |address: SocketAddr, config: &str| Balancer::haproxy_of(NAME, address, config);
    let count = serve_alike("haproxy", &NAMES, start, |config| config);
    assert!(count == 0 || count >= 20, "{count} configs");
}

#[test]
fn converted_configs_send_each_name_where_nginx_does() {
    const NAME: &str = "converted_configs_send_each_name_where_nginx_does";
    let start = |address: SocketAddr, config: &str| Balancer::nginx(NAME, address, config);
    let count = serve_alike("nginx", &NAMES, start, |config| format!("stream {{\n{config}\n}}\n"));
    assert!(count == 0 || count >= 15, "{count} configs");
}

#[test]
fn converted_configs_send_each_name_where_sniproxy_does() {
    const NAME: &str = "converted_configs_send_each_name_where_sniproxy_does";
    let start = |address: SocketAddr, config: &str| Balancer::sniproxy(NAME, address, config);
    // sniproxy compares names by case, against RFC 4343.
    let names: Vec<&str> = NAMES.into_iter().filter(|name| name.to_ascii_lowercase() == *name).collect();
    let count = serve_alike("sniproxy", &names, start, |config| config);
    assert!(count == 0 || count >= 7, "{count} configs");
}

#[test]
fn configs_of_nginx_and_sniproxy_are_recognised_and_what_is_left_out_is_said() {
    let file = corpus().with_file_name("nginx").join("everything.conf");
    let output = convert(&file, &["--partial"]);
    let (config, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{told}");
    let folder = tempfile::tempdir().expect("a folder");
    validates(folder.path(), &config);
    for wanted in [
        "\"api.example.com\":",
        "\"*.shop.example.com\":",
        "\"*.blog.example.com\":",
        "\"acme-tls/1\":  # backend 127.0.0.1:10443",
        "maxConnections: 100",
        "backup: true",
        "fallback: \"127.0.0.1:10022\"",
        "protocol: tcp",
        "from: [\"10.0.0.0/8\"]",
        "perSource: {connections: 100}",
        "weight: 2000",
    ] {
        assert!(config.contains(wanted), "no {wanted}:\n{config}");
    }
    for why in [
        "regular expression",
        "unix socket",
        "slow_start",
        "proxy_bind",
        "no UDP",
        "`http`",
        "$remote_port",
        "`down`",
    ] {
        assert!(told.contains(why), "{why} is not told:\n{told}");
    }
    let file = corpus().with_file_name("sniproxy").join("everything.conf");
    let output = convert(&file, &["--partial"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    validates(folder.path(), &text(&output.stdout));
    assert!(text(&output.stderr).contains("open relay"), "{}", text(&output.stderr));
}
