//! The step with two organisations that share only a token: each has its own authority, trust domain and gateway.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use super::DemoError;
use super::certificates::{Certificates, ClientAuth};
use super::client::Caller;
use super::endpoint::{Endpoint, EndpointSpec};
use super::gateway::Gateway;
use super::report::Outcome;
use super::stage::{Folder, Stage, service};
use isthmus_api::requests;
use isthmus_console::client::ClientError;
use isthmus_console::output::cell;
use isthmus_tasks::scope::Scope;

/// The service of the organisation south, and its name in north.
const RATINGS: &str = "ratings.shop.svc.cluster.local";
const EXPORTED: &str = "ratings.shop.south.global";
/// The service of the organisation north.
const REVIEWS: &str = "reviews.shop.svc.cluster.local";
/// The number of calls of each kind.
const CALLS: usize = 20;

/// An organisation: its gateway, its one service, and its authority.
struct Organisation {
    name: &'static str,
    /// The second byte of the organisation's addresses.
    network: u8,
    place: PathBuf,
    certificates: Certificates,
    gateway: Gateway,
    config: String,
    _endpoint: Endpoint,
}

impl Organisation {
    /// Starts an organisation with one service. All that it knows about the other organisation is in `peer`.
    async fn start(
        folder: &Folder,
        who: (&'static str, &'static str, u8),
        of: (&'static str, &str, &str),
        peer: &str,
        scope: &Scope,
    ) -> Result<Self, DemoError> {
        let ((name, gateway, network), (endpoint, hostname, called)) = (who, of);
        let domain = format!("{name}.example");
        let mut certificates = Certificates::of(&domain)?;
        certificates.issue_in("isthmus", gateway, "gateway", &[])?;
        certificates.issue(endpoint, "service", &[called])?;
        let place = folder.path(name);
        std::fs::create_dir(&place)
            .map_err(|error| DemoError::Io { what: format!("make the folder {}", place.display()), error })?;
        let held = certificates.held_by(gateway)?;
        folder.write(&format!("{name}/cert.pem"), &held.certificate_pem)?;
        folder.write(&format!("{name}/key.pem"), &held.key_pem)?;
        folder.write(&format!("{name}/roots.pem"), certificates.authority_pem())?;
        let spec = EndpointSpec { name: endpoint, address: address(network, 1), locality: "demo", weight: 1 };
        let endpoint = Endpoint::start(spec, certificates.server(endpoint, ClientAuth::None)?, scope).await?;
        let services = service(
            hostname,
            "{name: https, port: 443, protocol: TLS}",
            "own",
            std::slice::from_ref(&endpoint),
        );
        let config = format!(
            "# Written by `isthmus demo`.\n\
             node: {{name: {gateway}, namespace: isthmus, serviceAccount: gateway, cluster: {name}, network: net-{name}}}\n\
             mesh: {{trustDomain: {domain}}}\n\
             listeners: [{{name: mesh, bind: \"127.{network}.0.1:0\", protocol: auto}}]\n\
             identity: {{files: {{certificate: cert.pem, key: key.pem}}}}\n\
             trust: [{{trustDomain: {domain}, roots: roots.pem}}]\n\
             state: {{dir: state}}\n\
             admin: {{bind: \"127.0.0.1:0\"}}\n\
             telemetry: {{log: {{format: json}}}}\n\
             workers: 1\n\
             exports: [{{services: [{hostname}]}}]\n\
             peers:\n{peer}\
             services:\n{services}"
        );
        let started = Gateway::start_with(gateway, place.join("isthmus.yaml"), &config, &["mesh"]).await?;
        Ok(Self { name, network, place, certificates, gateway: started, config, _endpoint: endpoint })
    }

    /// Adds to the gateway's config the address and port at which other organisations reach the gateway, and reloads the
    /// config.
    async fn announce_itself(&mut self) -> Result<(), DemoError> {
        let (name, own) = (self.name, self.gateway.listener("mesh")?);
        let (ip, port) = (own.ip(), own.port());
        self.config.push_str(&format!(
            "networks: {{net-{name}: {{gateways: [{{address: {ip}, sniPort: {port}, hbonePort: {port}}}]}}}}\n"
        ));
        let answer = self.gateway.reload(&self.config).await?;
        if answer.status == 200 { Ok(()) } else { Err(ClientError::Refused(answer.body).into()) }
    }

    /// Starts the gateway again, on the port that it had before.
    async fn restart(&mut self) -> Result<(), DemoError> {
        let own = self.gateway.listener("mesh")?;
        let config =
            self.config.replace(&format!("\"{}:0\", protocol", own.ip()), &format!("\"{own}\", protocol"));
        let place = self.place.join("isthmus.yaml");
        self.gateway = Gateway::start_with(self.gateway.name, place, &config, &["mesh"]).await?;
        Ok(())
    }

    /// Runs a command of this binary against the gateway, with this standard input; returns its output.
    async fn command(&self, arguments: &[&str], input: &str) -> Result<String, DemoError> {
        let all: Vec<String> =
            arguments.iter().copied().chain(["--admin", &self.gateway.admin]).map(str::to_owned).collect();
        let cannot = |error| DemoError::Io { what: format!("run isthmus {}", arguments.join(" ")), error };
        let program = std::env::current_exe().map_err(cannot)?;
        let input = input.to_owned();
        let run = move || {
            let mut command = Command::new(program);
            command.args(all).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn()?;
            // The input is closed when it is dropped. A command that reads none may have ended.
            let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
            child.wait_with_output()
        };
        let running = tokio::task::spawn_blocking(run);
        let output = running.await.map_err(|error| cannot(std::io::Error::other(error)))?.map_err(cannot)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(self.gateway.fault(format!("refuses isthmus {}: {said}", arguments[..2].join(" "))))
    }

    /// Returns a client in `from` that calls a service of this organisation by TLS, through this organisation's gateway.
    fn caller(&self, from: &Self, gateway: &str, name: &str) -> Result<Caller, DemoError> {
        let gateway =
            gateway.parse().map_err(|_| self.gateway.fault(format!("has the address {gateway:?}")))?;
        let tls = self.certificates.client(name, &[], None)?;
        Ok(Caller { source: address(from.network, 9), gateway, name: name.to_owned(), tls })
    }

    async fn peer_is(&mut self, state: &str) -> Result<(), DemoError> {
        let wanted = async |gateway: &Gateway| {
            let peers = gateway.json(requests::PEERS.path).await?;
            Ok((peers[0]["state"] == state).then_some(()))
        };
        self.gateway.until(&format!("did not see its peer as {state}"), wanted).await
    }
}

/// Links two organisations with two commands, makes calls between them, and stops one of them for a while.
pub(super) async fn two_organisations(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let scope = Scope::default();
    let of_south = "  - name: north\n    from: [127.4.0.0/16]\n    export: [{services: [\"*.shop.svc.cluster.local\"], as: \
                    \"{service}.{namespace}.south.global\"}]\n";
    let of_north =
        "  - name: south\n    addresses: [127.0.0.0/8]\n    import: [{services: [\"*.south.global\"]}]\n";
    let (south, north) = tokio::join!(
        Box::pin(Organisation::start(
            &stage.folder,
            ("south", "gateway-south", 3),
            ("ratings-1", RATINGS, EXPORTED),
            of_south,
            &scope
        )),
        Box::pin(Organisation::start(
            &stage.folder,
            ("north", "gateway-north", 4),
            ("reviews-9", REVIEWS, REVIEWS),
            of_north,
            &scope
        )),
    );
    let (mut south, mut north) = (south?, north?);
    south.announce_itself().await?;
    enrol(&south, &mut north, outcome).await?;
    // Clients of north must get the gateway of south as endpoint.
    let path =
        requests::HORIZON.with(&[("network", "net-north"), ("cluster", "north"), ("service", EXPORTED)]);
    let entry = async |gateway: &Gateway| {
        let entries = gateway.json(&path).await?;
        Ok(entries["entries"][0]["address"].as_str().map(str::to_owned))
    };
    let gateway =
        north.gateway.until("gives its clients no endpoints of the service of south", entry).await?;
    outcome.note(format!("clients in north are given {gateway} for {EXPORTED}"));
    let abroad = south.caller(&north, &gateway, EXPORTED)?;
    let of_north = north.gateway.listener("mesh")?.to_string();
    let at_home = north.caller(&north, &of_north, REVIEWS)?;
    all_answer(&abroad, "ratings-1", &south.certificates, outcome).await;
    let unnamed = Caller { name: RATINGS.to_owned(), ..abroad.clone() };
    match unnamed.call("/").await {
        Err(_) => outcome.refused(),
        Ok(_) => outcome
            .check(false, || format!("south answers north for {RATINGS}, a name that only south may use")),
    }
    // South crashes, so it cannot close the link.
    let gone = Instant::now();
    south.gateway.kill();
    let lost = async |gateway: &Gateway| {
        let peers = gateway.json(requests::PEERS.path).await?;
        Ok((peers[0]["state"] != "live").then_some(()))
    };
    north.gateway.until("did not notice that south is gone", lost).await?;
    let noticed = gone.elapsed();
    let answered = all_answer(&at_home, "reviews-9", &north.certificates, outcome).await;
    match abroad.call("/").await {
        Err(_) => outcome.refused(),
        Ok(_) => outcome.check(false, || "the gateway of south answered, although it was killed".to_owned()),
    }
    let known = north.gateway.json(&requests::SERVICE.at(EXPORTED)).await;
    outcome.check(known.is_ok(), || format!("north has forgotten {EXPORTED}"));
    let knows = if known.is_ok() { "still knows" } else { "has forgotten" };
    outcome.note(format!(
        "south killed: noticed after {} ms; {answered} of {CALLS} calls within north are answered, and north {knows} \
         {EXPORTED}",
        noticed.as_millis()
    ));
    // South restarts, and the gateways must open the link again without a command.
    let back = Instant::now();
    south.restart().await?;
    north.peer_is("live").await?;
    let relinked = back.elapsed();
    all_answer(&abroad, "ratings-1", &south.certificates, outcome).await;
    outcome.note(format!("south started again: linked after {} ms, without a command", relinked.as_millis()));
    Ok(())
}

/// Links both organisations with a token, and checks that north has the roots of south.
async fn enrol(
    south: &Organisation,
    north: &mut Organisation,
    outcome: &mut Outcome,
) -> Result<(), DemoError> {
    let state = async |gateway: &Gateway| {
        Ok::<Value, DemoError>(gateway.json(requests::PEERS.path).await?[0]["state"].clone())
    };
    let before = state(&north.gateway).await?;
    outcome.check(before == "not enrolled", || format!("before, north sees south as {}", cell(&before)));
    let begun = Instant::now();
    let token = south.command(&["peer", "invite", "--name", "north"], "").await?;
    let join = ["peer", "join", "-", "--name", "south"];
    north.command(&join, &token).await?;
    let listed = async |gateway: &Gateway| {
        let services = gateway.json(requests::SERVICES.path).await?;
        let names = services.as_array().into_iter().flatten();
        Ok(names.map(|service| cell(&service["hostname"])).any(|name| name == EXPORTED).then_some(()))
    };
    north.gateway.until("did not list the service of south", listed).await?;
    let took = begun.elapsed();
    let stored = north.place.join("state/peers/south.pem");
    let roots = std::fs::read_to_string(&stored)
        .map_err(|error| DemoError::Io { what: format!("read {}", stored.display()), error })?;
    let has_root = certificate_lines(&roots) == certificate_lines(south.certificates.authority_pem());
    outcome.check(has_root, || format!("{} does not have the root of south", stored.display()));
    let again = north.command(&join, &token).await;
    outcome.check(again.is_err(), || "the token could be used twice".to_owned());
    outcome.note("in south: isthmus peer invite --name north; in north: isthmus peer join - --name south");
    outcome.proof(format!("{EXPORTED} is listed in north {} ms after the first command", took.as_millis()));
    Ok(())
}

/// Makes calls that this endpoint must answer with its own certificate; returns the number of answers.
async fn all_answer(
    caller: &Caller,
    endpoint: &str,
    certificates: &Certificates,
    outcome: &mut Outcome,
) -> usize {
    let mut answered = 0;
    for result in caller.calls(CALLS).await {
        match result {
            Ok(answer) => {
                let holder = certificates.holder(&answer.certificate).map(|held| held.holder);
                outcome.check(answer.endpoint == endpoint && holder == Some(endpoint), || {
                    format!(
                        "{} answered with the certificate of {}",
                        answer.endpoint,
                        holder.unwrap_or("nobody")
                    )
                });
                outcome.answered(&answer);
                answered += 1;
            }
            Err(error) => outcome.lost(&error),
        }
    }
    answered
}

/// Returns the base64 lines of the certificates in a PEM text.
fn certificate_lines(pem: &str) -> String {
    let from = pem.find("-----BEGIN").unwrap_or_default();
    pem[from..].lines().map(str::trim).filter(|line| !line.starts_with("-----")).collect()
}

/// Returns a loopback address of an organisation.
fn address(network: u8, last: u8) -> IpAddr {
    Ipv4Addr::new(127, network, 1, last).into()
}
