//! The examples below the help of commands whose modules contain several commands. A test parses all examples.

pub(super) const RUN: &str = "Examples:
  isthmus run                         with isthmus.yaml, or /etc/isthmus/isthmus.yaml
  isthmus run -c gateway.yaml         with this file
  isthmus run -c conf.d               with all files of a directory

SIGTERM stops gracefully, and a second SIGTERM at once. SIGHUP reloads the config. SIGUSR1 reopens the log files.
SIGUSR2 replaces the process by a new one, as `isthmus upgrade` does.";

pub(super) const VERSION: &str = "Examples:
  isthmus version                     of this program; `isthmus status` has that of the gateway";

pub(super) const SCHEMA: &str = "Examples:
  isthmus schema > isthmus.schema.json        for editors, and for checks in a pipeline
  isthmus schema --reference                  every key, its values and its default";

pub(super) const EXPLAIN: &str = "Examples:
  isthmus explain checkout.shop.mesh                              the decision, the endpoints, and what failed lately
  isthmus explain checkout.shop.mesh --from 10.0.0.7              with the rules and limits for this source
  isthmus explain checkout.shop.mesh --probe                      also dial the endpoints
  isthmus explain \"\"                                              a client that sends no server name
  isthmus explain reviews.shop.mesh:9080 --authority --identity spiffe://cluster.local/ns/shop/sa/web   an HBONE caller
  isthmus explain checkout.shop.mesh -c isthmus.yaml              from a file, without a gateway

The exit code is 1 if the name is refused.";

pub(super) const HORIZON: &str = "Examples:
  isthmus horizon --network net-east                              all services, as a client on net-east gets them
  isthmus horizon --network net-east reviews.shop.mesh:9080       one service, with the endpoints behind each weight
  isthmus horizon --network net-east --tunnel hbone -c isthmus.yaml   from a file, for a client that speaks HBONE";

pub(super) const STATUS: &str = "Examples:
  isthmus status                      problems first, then config, listeners and registries
  isthmus status -o json              for programs
  isthmus status --admin unix:/run/isthmus/admin.sock     of the gateway with this admin socket";

pub(super) const TOP: &str = "Examples:
  isthmus top                         the keys are on its last line
  isthmus top --admin http://127.0.0.1:15000";

pub(super) const EXPOSED: &str = "Examples:
  isthmus exposed                     every name that can be reached, and by which rule
  isthmus exposed -o json             for programs";

pub(super) const FAILURES: &str = "Examples:
  isthmus failures                                    the last 1,000, newest first
  isthmus failures --reason sni_unknown --since 5m    for one reason
  isthmus failures --name shop --watch                for names that contain shop, as they happen";

pub(super) const GET: &str = "Examples:
  isthmus get endpoints               all endpoints with their state and last failure
  isthmus get listeners               where clients connect, and which sources may
  isthmus get connections -o json     what is open now, with the fields of the access log
  isthmus get config                  the config in use, with its defaults";

pub(super) const RELOAD: &str = "Examples:
  isthmus reload                      prints `applied`, or the mistakes of the file

If the file has mistakes, the config in use does not change, and the exit code is 1.";

pub(super) const STOP: &str = "Examples:
  isthmus stop                        the gateway exits when its connections have ended, or after drain.timeout

A second signal ends the gateway at once, but not the first SIGTERM of a service manager after this command.";

pub(super) const UPGRADE: &str = "Examples:
  isthmus upgrade                     starts the program file of the gateway again, and waits until connections have moved
  isthmus upgrade --wait              the same, also if the earlier process of the last upgrade has not ended yet

The exit code is 1 if the new process cannot serve; then the old one goes on. SIGUSR2 does the same as this command.";

pub(super) const ENDPOINT: &str = "Examples:
  isthmus endpoint drain 10.0.0.1:8443        no new connections; open ones continue
  isthmus endpoint disable 10.0.0.1           all ports; open connections are closed
  isthmus endpoint enable 10.0.0.1:8443       new connections again";

pub(super) const ENDPOINT_DRAIN: &str = "Examples:
  isthmus endpoint drain 10.0.0.1:8443                            for all services and routes that use it
  isthmus endpoint drain 10.0.0.1 --service checkout.shop.mesh    all its ports, for one service";

pub(super) const ENDPOINT_DISABLE: &str = "Examples:
  isthmus endpoint disable 10.0.0.1:8443                          open connections end with the reason `killed`
  isthmus endpoint disable [fd00::1]:8443 --service a.example     for one route";

pub(super) const ENDPOINT_ENABLE: &str = "Examples:
  isthmus endpoint enable 10.0.0.1:8443
  isthmus endpoint enable 10.0.0.1 --service checkout.shop.mesh";

pub(super) const CLOSE: &str = "Examples:
  isthmus get connections             lists the ids in the column ID
  isthmus close 17                    closes this connection, with the reason `killed`";

pub(super) const LOG_LEVEL: &str = "Examples:
  isthmus log-level debug             until the next restart
  isthmus log-level info,isthmus::aggregator=debug    debug lines of one module only";

pub(super) const PEERS: &str = "Examples:
  isthmus peers                       state, round trip, services in and out, and what is left out
  isthmus peers -o yaml               with each link and gateway";

pub(super) const PEER: &str = "Examples:
  isthmus peer invite --name west     a token for the operator of the other side
  isthmus peer join - --name east     at the other gateway; asks for the token
  isthmus peer plan -c new.yaml       what a change would make reachable, before it is applied";

pub(super) const REGISTRY: &str = "Examples:
  isthmus registry put services.yaml --etcd http://127.0.0.1:2379     write services
  isthmus registry list --etcd http://127.0.0.1:2379                  read them
  isthmus registry delete shop/checkout.shop.mesh --etcd http://127.0.0.1:2379
  isthmus registry accept etcd-west                                   apply what the gateway holds back";

pub(super) const CERTS: &str = "Examples:
  isthmus certs --dir tls --workload istio-system/eastwest            a CA, and the gateway's certificate
  isthmus certs --dir tls --workload shop/web=web.test,127.0.0.1      a certificate with DNS names and addresses
  isthmus certs --dir tls --trust-domain east.example --days 7 --workload shop/web";

#[cfg(feature = "demo")]
pub(super) const DEMO: &str = "Examples:
  isthmus demo                        runs all steps, then cleans up
  isthmus demo --keep                 leaves the gateways running, to try commands";

pub(super) const HEALTHCHECK: &str = "Examples:
  isthmus healthcheck                 exit code 0 if the gateway is ready
  isthmus healthcheck --admin http://127.0.0.1:15021      by the health listener";

pub(super) const MAN: &str = "Examples:
  isthmus man /usr/local/share/man/man1       then: man isthmus-explain";

pub(super) const COMPLETION: &str = "Examples:
  isthmus completion bash > /etc/bash_completion.d/isthmus
  isthmus completion zsh > ~/.zfunc/_isthmus";
