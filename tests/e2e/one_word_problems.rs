//! Faults of the gateway as a whole: its config, registries, names, endpoints, limits, logs and certificates.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use crate::endpoints::{gives_up, waiting};
use crate::hbone::{BASE, OWN, folder};
use crate::one_word::Table;
use crate::one_word_connections::halting;
use crate::problems::run;
use crate::support::backend::{Backend, refusing};
use crate::support::client::{connect, hello, tls};
use crate::support::clock;
use crate::support::dns::{Answer, NameServer};
use crate::support::etcd::{self, Etcd};
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway, with_common};
use crate::support::organisation::write;
use crate::support::pki::{PKI, Pki};

// Config and registries.

/// Returns the `services` of a registry: this number of services, which all have one endpoint.
fn services(count: usize, endpoint: &str) -> String {
    let one = |number: usize| {
        format!(
            "  - hostname: s{number}.shop.mesh\n    namespace: shop\n    ports: [{{name: https, port: 443, protocol: TLS}}]\n    \
             endpoints: [{{address: {endpoint}}}]\n"
        )
    };
    format!("services:\n{}", (0..count).map(one).collect::<String>())
}

/// Waits until the registry of this index has the state.
#[track_caller]
fn is_in(gateway: &Gateway, registry: usize, state: &str) {
    eventually(state, || (gateway.json("/api/v1/registries")[registry]["state"] == state).then_some(()));
}

#[test]
fn every_fault_of_the_config_and_the_registries_has_one_word_in_all_places() {
    let mut table = Table::default();
    of_the_config(&mut table);
    of_registries(&mut table);
    of_what_registries_say(&mut table);
    table.is_section("Config and registries");
}

fn of_the_config(table: &mut Table) {
    let config = |listen: SocketAddr, more: &str| {
        format!(
            "listen: \"{listen}\"\nroutes: {{a.test: \"127.0.0.1:9\"}}\nexports: [{{services: [\"*.mesh\"]}}]\n{more}"
        )
    };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let gateway = Gateway::start(&config(any, ""));
    table.problem(&gateway, "The config file has a mistake at a reload", "config_rejected", || {
        gateway.write_config(&config(any, "rotues: {}\n"));
        run(&gateway, &["reload"])
    });
    gateway.reload(&config(any, ""));
    table.problem(&gateway, "The config file is emptied", "config_rejected", || {
        fs::write(gateway.folder().join("isthmus.yaml"), "").expect("written");
    });
    gateway.reload(&config(any, ""));
    table.problem(&gateway, "The config file is deleted", "config_rejected", || {
        fs::remove_file(gateway.folder().join("isthmus.yaml")).expect("removed");
    });
    gateway.reload(&config(any, ""));
    let holder = TcpListener::bind("127.0.0.1:0").expect("a port");
    table.problem(&gateway, "An address of the new config is in use", "config_rejected", || {
        gateway.write_config(&config(holder.local_addr().expect("bound"), ""));
        run(&gateway, &["reload"])
    });
    gateway.reload(&config(any, ""));
    table.problem(&gateway, "A change of the config needs a restart", "needs_restart", || {
        gateway.reload(&config(any, "workers: 3\n"));
    });
    gateway.reload(&config(any, ""));
    table.problem(&gateway, "An export names a service that no registry has", "export_absent", || {
        gateway.reload(&config(any, "").replace("*.mesh", "gone.mesh"));
    });
    gateway.reload(&config(any, ""));
    table.problem(&gateway, "An operator has started a planned drain", "drain_active", || {
        run(&gateway, &["drain", "network", "west", "--over", "0s", "--force"])
    });
    let held = Backend::start(|mut stream| while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {});
    gateway.reload(&config(any, "drain: {timeout: 30s}\n").replace("127.0.0.1:9", &held.address.to_string()));
    table.problem(&gateway, "The gateway stops", "draining", || {
        let mut client = connect(gateway.listener("default"));
        client.write_all(&hello("a.test")).expect("sent");
        eventually("it is passed on", || (held.accepted() == 1).then_some(()));
        gateway.signal("TERM");
        client
    });
}

fn of_registries(table: &mut Table) {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "west.yaml", &services(30, "10.9.0.1"));
    let gateway = Gateway::start_in(
        folder,
        "node: {cluster: east, network: net-east}\nlisten: \"127.0.0.1:0\"\nexports: [{services: [\"*\"]}]\n\
         registries: [{file: {path: west.yaml, cluster: west, network: net-west}}]\naggregator: {withdrawalHold: 1h}\n",
        &[],
    );
    let whole = || {
        write(gateway.folder(), "west.yaml", &services(30, "10.9.0.1"));
        is_in(&gateway, 0, "live");
    };
    table.problem(&gateway, "The file of a registry has a mistake", "registry_stale", || {
        write(gateway.folder(), "west.yaml", "services: [{hostname: 5}]\n");
    });
    whole();
    table.problem(&gateway, "The file of a registry is cut in the middle", "registry_stale", || {
        let all = services(30, "10.9.0.1");
        write(gateway.folder(), "west.yaml", &all[..all.rfind("protocol").expect("a port")]);
    });
    whole();
    table.problem(&gateway, "The file of a registry is deleted", "registry_stale", || {
        fs::remove_file(gateway.folder().join("west.yaml")).expect("removed");
    });
    whole();
    table.problem(&gateway, "A registry loses most of its services at once", "registry_held", || {
        write(gateway.folder(), "west.yaml", &services(2, "10.9.0.1"));
    });
    of_etcd(table);
}

fn of_etcd(table: &mut Table) {
    let Some(binary) = etcd::installed() else {
        return table.lacks("one_word: etcd is not installed (tests/run installs it)");
    };
    let mut member = Etcd::start(&binary, &[]);
    let service = "hostname: s0.mesh\nnamespace: shop\nports: [{name: https, port: 443, protocol: TLS}]\nendpoints: [{address: 10.9.0.1}]\n";
    member.put("shop/s0.mesh", service);
    let gateway = Gateway::start(&format!(
        "node: {{cluster: east, network: net-east}}\nlisten: \"127.0.0.1:0\"\nexports: [{{services: [\"*\"]}}]\n\
         registries: [{{etcd: {{endpoints: [\"{}\"], cluster: west, network: net-west}}}}]\n",
        member.url()
    ));
    is_in(&gateway, 0, "live");
    table.problem(&gateway, "A key of etcd has a mistake", "registry_flawed", || {
        member.put("shop/s0.mesh", "damaged")
    });
    table.problem(&gateway, "The etcd of a registry is down", "registry_stale", || member.kill());
}

fn of_what_registries_say(table: &mut Table) {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["west.yaml", "south.yaml"] {
        write(folder.path(), name, &services(1, "10.9.0.1"));
    }
    let config = "node: {cluster: east, network: net-east}\nlisten: \"127.0.0.1:0\"\nexports: [{services: [\"*\"]}]\nregistries:\n  \
                  - {file: {path: west.yaml, cluster: west, network: net-west}, allow: {services: [\"*.shop.mesh\"]}}\n  \
                  - {file: {path: south.yaml, cluster: south, network: net-south}}\n";
    let gateway = Gateway::start_in(folder, &format!("{config}state: {{dir: state}}\n"), &[]);
    let says = |name: &str, text: &str| write(gateway.folder(), name, text);
    table.problem(
        &gateway,
        "A registry has a service that its `allow` does not permit",
        "registry_left_out",
        || {
            says("west.yaml", &services(1, "10.9.0.1").replace("s0.shop.mesh", "s0.bank.mesh"));
        },
    );
    says("west.yaml", &services(1, "10.9.0.1"));
    table.problem(
        &gateway,
        "A registry has an endpoint at an address that is not permitted",
        "address_not_allowed",
        || {
            says("west.yaml", &services(1, "169.254.169.254"));
        },
    );
    says("west.yaml", &services(1, "10.9.0.1"));
    table.problem(&gateway, "Two registries disagree about a service", "service_conflict", || {
        says("south.yaml", &services(1, "10.9.0.2").replace("port: 443", "port: 8443"));
    });
    says("south.yaml", &services(1, "10.9.0.1"));
    table.problem(&gateway, "The copy of a registry cannot be written", "state_not_kept", || {
        // A file has the name of the folder.
        fs::write(gateway.folder().join("other"), "").expect("written");
        gateway.reload(&format!("{config}state: {{dir: other/state}}\n"));
    });
}

// Endpoints, names and limits.

#[test]
fn every_fault_of_endpoints_names_limits_and_logs_has_one_word_in_all_places() {
    let mut table = Table::default();
    of_endpoints(&mut table);
    of_a_slow_endpoint(&mut table);
    of_names(&mut table);
    of_limits(&mut table);
    of_logs_and_spans(&mut table);
    table.is_section("Endpoints, names, limits and logs");
}

fn of_endpoints(table: &mut Table) {
    let good = Backend::tls_echo(PKI.server("two.test"), "");
    let (dead, sick, failing) = (refusing(), refusing(), refusing());
    let (silent, halting) = (waiting(), halting());
    let plain = Backend::start(|mut stream| drop(stream.write_all(b"SSH-2.0-OpenSSH\r\n")));
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  only.test: {{endpoints: [\"{failing}\"], ejection: off}}\n  \
         two.test: {{endpoints: [\"{0}\", \"{dead}\"], ejection: {{failures: 1, time: 60s}}, loadBalancing: {{policy: roundRobin}}}}\n  \
         silent.test: \"{1}\"\n  kept.test: {{endpoints: [\"{0}\", \"127.0.0.1:9\"]}}\n  well.test: \"{0}\"\n  half.test: \"{2}\"\n  \
         pair.test: {{endpoints: [\"{0}\", \"{3}\"], loadBalancing: {{policy: roundRobin}}}}\n",
        good.address, silent.address, halting.address, plain.address
    ));
    let address = gateway.listener("default");
    table.problem(
        &gateway,
        "The only endpoint of a service fails again and again",
        "endpoint_failing",
        || {
            (0..3).for_each(|_| drop(tls(address, "only.test").expect_err("refused")));
        },
    );
    table.problem(&gateway, "One of several endpoints is down", "endpoint_ejected", || {
        (0..2).for_each(|_| drop(tls(address, "two.test").expect("the other one answers")));
    });
    table.problem(&gateway, "An endpoint accepts connections and never answers", "endpoint_silent", || {
        let mut client = connect(address);
        client.write_all(&hello("silent.test")).expect("sent");
        client
    });
    table.problem(&gateway, "An endpoint stops in the middle of its ServerHello", "endpoint_silent", || {
        let mut client = connect(address);
        client.write_all(&hello("half.test")).expect("sent");
        client
    });
    table.problem(&gateway, "One of several endpoints does not speak TLS", "endpoint_not_tls", || {
        for _ in 0..2 {
            gives_up(address, "pair.test", Duration::from_secs(5));
        }
    });
    table.problem(&gateway, "An operator takes an endpoint out of service", "endpoint_withdrawn", || {
        run(&gateway, &["endpoint", "disable", "127.0.0.1:9"])
    });
    let checked = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{two.test: {{endpoints: [\"{}\", \"{sick}\"], health: {{interval: 200ms, timeout: 100ms, \
         unhealthyAfter: 2}}}}}}\n",
        good.address
    ));
    table.problem(
        &checked,
        "The health checks of one of several endpoints fail",
        "endpoint_unhealthy",
        || {},
    );
}

/// Three endpoints answer, one of them after more than a second.
fn of_a_slow_endpoint(table: &mut Table) {
    let answering = |after: Duration| {
        let server = PKI.server("slow.test");
        Backend::start(move |stream| {
            let mut tls = rustls::StreamOwned::new(
                rustls::ServerConnection::new(server.clone()).expect("a server"),
                stream,
            );
            // One answer to one request, as of a web server. The tickets of TLS 1.3 are sent before it.
            if let Ok(1..) = tls.read(&mut [0; 64]) {
                thread::sleep(after);
                let _ = tls.write_all(&[b'x'; 200]);
                tls.conn.send_close_notify();
                let _ = tls.flush();
            }
        })
    };
    let endpoints = [0, 0, 3_000].map(|after| answering(Duration::from_millis(after)));
    let [one, two, slow] = endpoints.each_ref().map(|endpoint| endpoint.address);
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{slow.test: {{endpoints: [\"{one}\", \"{two}\", \"{slow}\"], loadBalancing: {{policy: \
         roundRobin}}}}}}\n"
    ));
    let address = gateway.listener("default");
    table.problem(&gateway, "One of several endpoints answers late", "endpoint_slow", || {
        thread::scope(|scope| {
            for _ in 0..9 {
                scope.spawn(|| {
                    let mut client = tls(address, "slow.test").expect("a handshake");
                    client.write_all(b"x").expect("sent");
                    client.read_exact(&mut [0; 200]).expect("an answer");
                });
            }
        });
    });
}

fn of_names(table: &mut Table) {
    const NAME: &str = "db.test";
    let names = NameServer::start();
    let known = || names.points(NAME, [127, 0, 0, 1].into());
    known();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{{NAME}: \"{NAME}:9\"}}\ndns: {{servers: [\"{}\"], holdMissing: 60s}}\n",
        names.address
    ));
    let is_well = || {
        known();
        eventually("no problem", || {
            (gateway.json("/api/v1/status")["problems"] == serde_json::json!([])).then_some(())
        });
    };
    is_well();
    table.problem(&gateway, "The name server of a known name fails (SERVFAIL)", "name_stale", || {
        names.answer(NAME, Answer::Failure);
    });
    is_well();
    table.problem(&gateway, "A known name ceases to exist (NXDOMAIN)", "name_stale", || {
        names.answer(NAME, Answer::Unknown);
    });
    gateway.reload(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{{NAME}: \"{NAME}:9\"}}\ndns: {{servers: [\"{}\"], holdMissing: 0s}}\n",
        names.address
    ));
    table.problem(
        &gateway,
        "A name has ceased to exist for longer than `dns.holdMissing`",
        "name_unresolved",
        || {},
    );
}

fn of_limits(table: &mut Table) {
    let echo = Backend::echo();
    let config = |limits: &str| {
        format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\nlimits: {{{limits}}}\n", echo.address)
    };
    let route = format!("{{endpoints: [{{address: \"{}\", maxConnections: 1}}]}}", echo.address);
    let full = format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: {route}}}\n");
    let open = |address: SocketAddr| {
        let mut client = connect(address);
        client.write_all(&hello("a.test")).expect("sent");
        client
    };
    for (fault, config) in [
        ("The gateway has as many connections as `limits.connections`", config("connections: 1")),
        ("A service has as many connections as `limits.perService`", config("perService: {connections: 1}")),
        ("Each endpoint of a route has as many connections as `maxConnections`", full),
    ] {
        let gateway = Gateway::start(&config);
        let address = gateway.listener("default");
        table.problem(&gateway, fault, "limit_reached", || [open(address), open(address)]);
    }
    let gateway = Gateway::start(&format!("workers: 1\n{}", config("pendingHellos: 1")));
    let address = gateway.listener("default");
    table.problem(
        &gateway,
        "As many hellos are incomplete as `limits.pendingHellos`",
        "limit_reached",
        || {
            [(); 2].map(|()| {
                let mut client = connect(address);
                client.write_all(&hello("a.test")[..10]).expect("sent");
                client
            })
        },
    );
    let gateway = Gateway::start(&config(""));
    table.problem(&gateway, "The gateway uses most of `limits.memory`", "memory_short", || {
        gateway.reload(&config("memory: 32MiB"));
    });
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("isthmus.yaml"), with_common(&config(""))).expect("written");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$0\" run -c isthmus.yaml", BINARY]).current_dir(folder.path());
    let gateway = Gateway::spawn(command, folder);
    let address = gateway.listener("default");
    table.problem(&gateway, "The process has no descriptors left", "limit_reached", || {
        (0..256).map(|_| open(address)).collect::<Vec<_>>()
    });
}

fn of_logs_and_spans(table: &mut Table) {
    let config = |telemetry: &str| {
        format!(
            "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"127.0.0.1:9\"}}\ntelemetry: {{log: {{format: json}}, {telemetry}}}\n"
        )
    };
    let collector = refusing();
    for (fault, word, telemetry) in [
        ("The disk of the access log is full", "access_log_lost", "accessLog: {path: /dev/full}".to_owned()),
        (
            "The collector of spans is down",
            "spans_lost",
            format!("tracing: {{otlp: \"http://{collector}\", sample: 1}}"),
        ),
    ] {
        let gateway = Gateway::start(&config(&telemetry));
        table.problem(&gateway, fault, word, || {
            tls(gateway.listener("default"), "nobody.test").expect_err("unknown");
        });
    }
}

// Certificates.

#[test]
fn every_fault_of_a_certificate_has_one_word_in_all_places() {
    let mut table = Table::default();
    of_certificates(&mut table);
    of_the_clock(&mut table);
    table.is_section("Certificates and clocks");
}

/// Writes the certificate of the gateway, which is valid in these years.
fn certify(folder: &Path, from: i32, until: i32) {
    let own = PKI.issue_for(&[OWN], from, until);
    write(folder, "key.pem", &own.key_pem);
    write(folder, "cert.pem", &own.certificate_pem);
}

fn this_year() -> i32 {
    let since_1970 = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs();
    1970 + i32::try_from(since_1970 / 31_556_952).expect("a year")
}

fn of_certificates(table: &mut Table) {
    let usual = |folder: &Path| certify(folder, 2001, this_year() + 100);
    let files = folder();
    usual(files.path());
    let gateway = Gateway::start_in(files, BASE, &[]);
    let is_well = || {
        usual(gateway.folder());
        write(gateway.folder(), "roots.pem", &PKI.ca_pem());
        eventually("no problem", || {
            (gateway.json("/api/v1/status")["problems"] == serde_json::json!([])).then_some(())
        });
    };
    table.problem(
        &gateway,
        "The gateway's certificate was not renewed in time",
        "certificate_expiring",
        || {
            certify(gateway.folder(), 2001, this_year() + 1);
        },
    );
    is_well();
    table.problem(&gateway, "The gateway's certificate was never renewed", "certificate_expired", || {
        certify(gateway.folder(), 2001, 2002);
    });
    is_well();
    table.problem(&gateway, "The file of the gateway's certificate is damaged", "certificate_source", || {
        write(gateway.folder(), "cert.pem", "-----BEGIN CERTIFICATE-----\n");
    });
    is_well();
    table.problem(&gateway, "The file of the roots is damaged", "certificate_source", || {
        write(gateway.folder(), "roots.pem", "no PEM\n");
    });
    is_well();
    table.problem(&gateway, "All roots of a trust domain have expired", "roots_expired", || {
        write(gateway.folder(), "roots.pem", &Pki::of_years("an old CA", 2001, 2002).ca_pem());
    });
    let missing = folder();
    fs::remove_file(missing.path().join("cert.pem")).expect("removed");
    let gateway = Gateway::start_unready(missing, BASE);
    table.problem(&gateway, "The gateway has no certificate", "certificate_missing", || {});
}

fn of_the_clock(table: &mut Table) {
    const YEARS: i64 = 3 * 31_556_952;
    let Some(environment) = clock::ahead_by("one_word: a clock that is wrong", YEARS) else {
        return table.lacks("one_word: the clock of a process cannot be shifted here");
    };
    let files = folder();
    certify(files.path(), 2001, this_year() + 2);
    fs::write(files.path().join("isthmus.yaml"), with_common(BASE)).expect("written");
    let mut command = Command::new(BINARY);
    command.args(["run", "-c", "isthmus.yaml"]).current_dir(files.path()).envs(environment);
    let gateway = Gateway::launch(command, files);
    table.problem(&gateway, "The clock of the gateway's host is far ahead", "certificate_expired", || {});
}
