//! A converted config refuses each connection that HAProxy, nginx or sniproxy refuses: each rule is served by its own program and,
//! converted, by Isthmus, and both are asked for the same names from the same sources.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;

use socket2::{Domain, Socket, Type};

use crate::support::backend::Backend;
use crate::support::balancer::Balancer;
use crate::support::client::hello;
use crate::support::etcd::free_ports;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::{PATIENCE, eventually};

const SOURCES: [&str; 4] = ["127.0.0.1", "127.0.1.5", "127.0.1.77", "127.0.2.5"];
/// An IP address stands for a hello without a name.
const NAMES: [&str; 6] = ["adm.test", "a.test", "x.a.test", "xa.test", "evil.test", "127.0.0.1"];

/// Rules of frontends, whose lines come after those of the address. `listen` begins a section of that kind.
const OF_HAPROXY: [(&str, &str); 27] = [
    (
        "inside alone, by connection",
        "tcp-request connection accept if { src 127.0.1.0/24 }; tcp-request connection reject; default_backend a",
    ),
    (
        "inside alone, by content",
        "tcp-request content accept if { src 127.0.1.0/24 }; tcp-request content reject; use_backend a if { req.ssl_sni -i a.test }",
    ),
    ("all but some sources", "tcp-request connection reject if { src 127.0.1.0/24 }; default_backend a"),
    (
        "one name from inside",
        "acl adm req.ssl_sni -i adm.test; acl office src 127.0.1.0/24; tcp-request content reject if adm !office; use_backend a if adm; default_backend a",
    ),
    (
        "names of a file",
        "tcp-request content reject unless { req.ssl_sni -i -f names.lst }; default_backend a",
    ),
    (
        "names of a file that is gone",
        "tcp-request content reject unless { req.ssl_sni -i -f gone.lst }; use_backend a if { req.ssl_sni -i evil.test adm.test }",
    ),
    (
        "no names of a file",
        "tcp-request content reject if { req.ssl_sni -i -f names.lst }; use_backend a if { req.ssl_sni -i a.test evil.test }",
    ),
    (
        "no names of a file that is gone",
        "tcp-request content reject if { req.ssl_sni -i -f gone.lst }; use_backend a if { req.ssl_sni -i a.test evil.test }",
    ),
    (
        "sources of a file",
        "tcp-request connection reject if { src -f sources.lst }; use_backend a if { req.ssl_sni -i adm.test }",
    ),
    (
        "sources of a file that is gone",
        "tcp-request connection reject if { src -f gone-sources.lst }; use_backend a if { req.ssl_sni -i adm.test }",
    ),
    (
        "a regular expression",
        "tcp-request content reject if { req.ssl_sni -m reg -i ^adm }; use_backend a if { req.ssl_sni -i adm.test a.test }",
    ),
    (
        "an exact name",
        "tcp-request content reject if { req.ssl_sni -i adm.test }; use_backend a if { req.ssl_sni -i adm.test a.test }",
    ),
    ("a backend that rejects", "use_backend gate if { req.ssl_sni -i adm.test }; default_backend a"),
    ("a backend without servers", "use_backend none if { req.ssl_sni -i adm.test }; default_backend a"),
    (
        "silent-drop",
        "tcp-request content silent-drop if { src 127.0.2.0/24 } { req.ssl_sni -i adm.test }; default_backend a",
    ),
    (
        "a name from some sources",
        "tcp-request content reject if { src 127.0.2.0/24 } { req.ssl_sni -i a.test }; default_backend a",
    ),
    (
        "an acl below its rule's lines",
        "acl ok src 127.0.1.5; tcp-request content reject unless ok; acl ok src 127.0.2.5; use_backend a if { req.ssl_sni -i a.test }",
    ),
    (
        "unless one of two",
        "acl in src 127.0.1.0/24; tcp-request content reject unless in || { req.ssl_sni -i a.test }; default_backend a",
    ),
    (
        "two negations",
        "tcp-request content reject if !{ src 127.0.1.0/24 } !{ req.ssl_sni -i a.test }; default_backend a",
    ),
    (
        "a session rule",
        "tcp-request session reject if { src 127.0.1.64/26 }; use_backend a if { req.ssl_sni -i a.test }",
    ),
    (
        "the start of a name",
        "tcp-request content reject if { req.ssl_sni -i -m beg adm }; use_backend a if { req.ssl_sni -i adm.test a.test }",
    ),
    (
        "a part of a name",
        "tcp-request content reject if { req.ssl_sni -i -m sub vil }; use_backend a if { req.ssl_sni -i -m end .test }",
    ),
    (
        "the end of a name",
        "tcp-request content reject if { req.ssl_sni -i -m end a.test }; default_backend a",
    ),
    ("a name in a map", "use_backend %[req.ssl_sni,lower,map_end(ends.map,a)]"),
    (
        "a computed backend",
        "use_backend %[req.ssl_sni,lower,field(1,.)] if { req.ssl_sni -m found }; default_backend shut",
    ),
    (
        "another port",
        "tcp-request content reject if { dst_port gt 1 } { src 127.0.2.5 }; use_backend a if { req.ssl_sni -i a.test }",
    ),
    (
        "a listen section",
        "listen; tcp-request connection reject if { src 127.0.2.0/24 } || { src 127.0.0.1 }",
    ),
];

/// Rules of servers of nginx, with what their variables need.
const OF_NGINX: [(&str, &str, &str); 11] = [
    ("deny, then all", "", "deny 127.0.1.0/24; allow all; proxy_pass {a};"),
    ("deny alone", "", "deny 127.0.1.0/24; proxy_pass {a};"),
    ("deny within allow", "", "deny 127.0.1.64/26; allow 127.0.1.0/24; deny all; proxy_pass {a};"),
    (
        "deny of names",
        "map $ssl_preread_server_name $N { hostnames; .test {a}; }",
        "deny 127.0.0.0/24; allow 127.0.0.0/8; deny all; proxy_pass $N;",
    ),
    ("in place of what is above", "", "allow 127.0.2.0/24; deny all; proxy_pass {a};"),
    (
        "a name that leads nowhere",
        "map $ssl_preread_server_name $N { adm.test nowhere; default {a}; }",
        "proxy_pass $N;",
    ),
    (
        "an expression that leads nowhere",
        "map $ssl_preread_server_name $N { ~^(adm|ev) nowhere; a.test {a}; default {a}; }",
        "proxy_pass $N;",
    ),
    (
        "a source within a block",
        "geo $gN { default 0; 127.0.1.0/24 1; 127.0.1.64/26 0; } map \"$gN:$ssl_preread_server_name\" $N { \"1:adm.test\" {a}; }",
        "proxy_pass $N;",
    ),
    (
        "sources that lead somewhere",
        "geo $gN { default nowhere; 127.0.1.0/24 {a}; 127.0.1.77 nowhere; }",
        "proxy_pass $gN;",
    ),
    ("a file of rules", "", "include deny.conf; proxy_pass {a};"),
    (
        "names within sources",
        "geo $gN { default 0; 127.0.2.0/24 1; } map $ssl_preread_server_name $nN { a.test {a}; } map $gN $N { 1 $nN; default nowhere; }",
        "allow all; proxy_pass $N;",
    ),
];

/// Tables of sniproxy.
const OF_SNIPROXY: [(&str, &str); 3] = [
    ("names", "^a\\\\.test$ {a}"),
    ("names below", ".*\\\\.a\\\\.test$ {a}"),
    ("a pattern without ends", "a\\\\.test {a}"),
];

/// Returns true if a backend answers.
fn is_admitted(source: &str, address: SocketAddr, name: &str) -> bool {
    let source: IpAddr = source.parse().expect("an address");
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::new(source, 0).into()).expect("a source address");
    // A listener that is left out refuses everyone.
    if socket.connect_timeout(&address.into(), PATIENCE).is_err() {
        return false;
    }
    let mut stream = TcpStream::from(socket);
    // `silent-drop` leaves the client without an answer.
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    let _ = stream.write_all(&hello(name));
    let mut answer = [0; 8];
    matches!(stream.read(&mut answer), Ok(count) if answer[..count].starts_with(b"served"))
}

type Answers = BTreeMap<(usize, &'static str, &'static str), bool>;

fn answers(addresses: &[SocketAddr]) -> Answers {
    std::thread::scope(|scope| {
        let ask = |at: usize, address: SocketAddr| {
            let each = SOURCES.iter().flat_map(move |source| NAMES.iter().map(move |name| (*source, *name)));
            each.map(move |(source, name)| ((at, source, name), is_admitted(source, address, name)))
                .collect::<Vec<_>>()
        };
        let asking: Vec<_> = addresses
            .iter()
            .enumerate()
            .map(|(at, address)| scope.spawn(move || ask(at, *address)))
            .collect();
        asking.into_iter().flat_map(|one| one.join().expect("answers")).collect()
    })
}

/// Compares an original that is running with its conversion. `cases` are the rules, one for each address.
fn compare(
    program: &str,
    cases: &[&str],
    addresses: &[SocketAddr],
    folder: &Path,
    original: Balancer,
    text: &str,
) {
    for address in addresses {
        eventually("the original listens everywhere", || TcpStream::connect(address).ok());
    }
    let of_original = answers(addresses);
    drop(original);
    for gone in ["gone.lst", "gone-sources.lst"] {
        let _ = std::fs::remove_file(folder.join(gone));
    }
    let input = folder.join("input");
    std::fs::write(&input, text).expect("written");
    let convert = |more: &[&str]| Command::new(BINARY).arg("convert").arg(&input).args(more).output();
    let output = convert(&["--partial"]).expect("it runs");
    let (yaml, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}");
    let gateway = Gateway::start(&yaml);
    let of_isthmus = answers(addresses);
    drop(gateway);
    let (mut wrong, mut kept, mut admitted) = (Vec::new(), 0, 0);
    for ((at, source, name), is_admitted) in &of_isthmus {
        let was_admitted = of_original[&(*at, *source, *name)];
        (admitted, kept) =
            (admitted + usize::from(was_admitted), kept + usize::from(was_admitted && *is_admitted));
        if *is_admitted && !was_admitted {
            wrong.push(format!("{}: {name} from {source}", cases[*at]));
        }
    }
    eprintln!("{program}: {} rules, {kept} of {admitted} admitted connections are kept", cases.len());
    assert!(wrong.is_empty(), "admitted, and refused by {program}:\n{}\n{text}\n{yaml}", wrong.join("\n"));
    for (at, case) in cases.iter().enumerate() {
        let of_case =
            || of_original.iter().filter(move |((of, ..), _)| *of == at).map(|(_, admitted)| *admitted);
        assert!(of_case().any(|admitted| admitted), "{program} admits nobody: {case}");
        assert!(of_case().any(|admitted| !admitted), "{program} refuses nobody: {case}");
    }
}

fn served() -> Backend {
    Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"served");
    })
}

fn addresses(count: usize) -> Vec<SocketAddr> {
    free_ports(count).into_iter().map(|port| SocketAddr::from(([127, 0, 0, 1], port))).collect()
}

#[test]
fn what_haproxy_refuses_is_refused_after_conversion() {
    const NAME: &str = "what_haproxy_refuses_is_refused_after_conversion";
    let folder = tempfile::tempdir().expect("a folder");
    let served = served();
    for (file, text) in [
        ("names.lst", "# names\na.test\nadm.test\n"),
        ("gone.lst", "a.test\nadm.test\n"),
        ("sources.lst", "127.0.1.0/24\n"),
        ("gone-sources.lst", "127.0.1.0/24\n"),
        ("ends.map", "adm.test none\nevil.test shut\n"),
    ] {
        std::fs::write(folder.path().join(file), text).expect("written");
    }
    let addresses = addresses(OF_HAPROXY.len());
    let mut text =
        "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n".to_owned();
    for (number, ((_, lines), address)) in OF_HAPROXY.iter().zip(&addresses).enumerate() {
        let (kind, lines) =
            lines.strip_prefix("listen; ").map_or(("frontend", *lines), |lines| ("listen", lines));
        let _ = writeln!(text, "{kind} f{number}\n  bind {address}");
        match kind {
            "listen" => _ = writeln!(text, "  server s {}", served.address),
            // The second line makes HAProxy wait for the hello.
            _ => text.push_str(
                "  tcp-request inspect-delay 20s\n  tcp-request content reject if !{ req.ssl_hello_type 1 }\n",
            ),
        }
        lines.split("; ").for_each(|line| _ = writeln!(text, "  {line}"));
    }
    let _ = writeln!(
        text,
        "backend a\n  server s {0}\nbackend adm\n  server s {0}\nbackend gate\n  tcp-request content reject if !{{ src 127.0.1.0/24 \
         }}\n  server s {0}\nbackend none\nbackend shut\n  tcp-request content reject\n  server s {0}",
        served.address
    );
    for file in ["names.lst", "gone.lst", "sources.lst", "gone-sources.lst", "ends.map"] {
        text = text.replace(&format!(" {file}"), &format!(" {}", folder.path().join(file).display()));
        text = text.replace(&format!("({file}"), &format!("({}", folder.path().join(file).display()));
    }
    let Some(original) = Balancer::haproxy_of(NAME, addresses[0], &text) else { return };
    compare("haproxy", &OF_HAPROXY.map(|(case, _)| case), &addresses, folder.path(), original, &text);
}

#[test]
fn what_nginx_refuses_is_refused_after_conversion() {
    const NAME: &str = "what_nginx_refuses_is_refused_after_conversion";
    let folder = tempfile::tempdir().expect("a folder");
    let served = served();
    let deny = folder.path().join("deny.conf");
    std::fs::write(&deny, "deny 127.0.1.0/24;\n").expect("written");
    let addresses = addresses(OF_NGINX.len());
    let mut text = "deny 127.0.2.0/24;\n".to_owned();
    for (number, ((_, above, lines), address)) in OF_NGINX.iter().zip(&addresses).enumerate() {
        let numbered = |text: &str| {
            let text = text.replace("{a}", &served.address.to_string()).replace("gN", &format!("g{number}"));
            let text = text.replace("nN", &format!("n{number}")).replace("$N", &format!("$v{number}"));
            text.replace("deny.conf", &deny.display().to_string())
        };
        let _ = writeln!(
            text,
            "{}\nserver {{ listen {address}; ssl_preread on; {} }}",
            numbered(above),
            numbered(lines)
        );
    }
    let Some(original) = Balancer::nginx(NAME, addresses[0], &text) else { return };
    let whole = format!("stream {{\n{text}\n}}\n");
    compare("nginx", &OF_NGINX.map(|(case, ..)| case), &addresses, folder.path(), original, &whole);
}

#[test]
fn what_sniproxy_refuses_is_refused_after_conversion() {
    const NAME: &str = "what_sniproxy_refuses_is_refused_after_conversion";
    let folder = tempfile::tempdir().expect("a folder");
    let served = served();
    let addresses = addresses(OF_SNIPROXY.len());
    let mut text = String::new();
    for (number, ((_, lines), address)) in OF_SNIPROXY.iter().zip(&addresses).enumerate() {
        let lines = lines.replace("{a}", &served.address.to_string());
        let _ = writeln!(
            text,
            "listener {address} {{\n  proto tls\n  table t{number}\n}}\ntable t{number} {{\n  {lines}\n}}"
        );
    }
    let Some(original) = Balancer::sniproxy(NAME, addresses[0], &text) else { return };
    compare("sniproxy", &OF_SNIPROXY.map(|(case, _)| case), &addresses, folder.path(), original, &text);
}
