//! Enrolment: the gateways of two organisations, each with its own authority and without knowledge of the other, are linked by
//! a token, with one command at each gateway.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::frames::{DATA, END_HEADERS, Frames, HEADERS, block, frame};
use crate::support::gateway::{BINARY, Gateway, http};
use crate::support::hbone::client;
use crate::support::namespace::{self, NEAR};
use crate::support::organisation::{Organisation, free_port, start};
use crate::support::pki::Pki;

const RATINGS: &str = "services:\n  - {hostname: ratings.pay.svc.cluster.local, namespace: pay, ports: [{name: http, port: 80}], endpoints: \
                       [{address: 10.2.0.1}]}\n";

/// One party of an enrolment: an organisation, and the config of its gateway with a peer that is not enrolled.
pub(crate) struct Side {
    pub(crate) organisation: Organisation,
    peer: &'static str,
    config: String,
}

impl Side {
    fn new(name: &'static str, domain: &str, peer: &'static str) -> Self {
        let organisation = Organisation::new(name, domain);
        let config = config(&organisation, peer, "");
        Self { organisation, peer, config }
    }

    pub(crate) fn start(&self) -> Gateway {
        start(self.organisation.folder(&[]), &self.config)
    }

    /// Puts the state into a folder that outlives the gateway.
    fn keep_state(&mut self, folder: &tempfile::TempDir) {
        self.config = self.config.replace("dir: state", &format!("dir: {}", folder.path().display()));
    }
}

fn config(organisation: &Organisation, peer: &str, more: &str) -> String {
    let name = organisation.name;
    format!(
        "{}state: {{dir: state}}\npeers:\n  - name: {peer}\n    addresses: [127.0.0.0/8]\n    export: [{{services: [\"*\"], as: \
         \"{{service}}.{name}.global\"}}]\n    import: [{{services: [\"*\"]}}]\n{more}",
        organisation.base(free_port())
    )
}

/// Returns east, which exports a service and invites, and west, which joins.
pub(crate) fn sides() -> (Side, Side) {
    let mut east = Side::new("east", "east.example", "west");
    east.config.push_str(RATINGS);
    (east, Side::new("west", "west.example", "east"))
}

fn isthmus(gateway: &Gateway, arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(arguments).args(["--admin", &format!("http://{}", gateway.admin())]);
    command
}

fn run(gateway: &Gateway, arguments: &[&str]) -> Output {
    isthmus(gateway, arguments).output().expect("the binary runs")
}

/// Runs a command with this standard input.
fn fed(gateway: &Gateway, arguments: &[&str], input: &str) -> Output {
    start_fed(gateway, arguments, input).wait_with_output().expect("its output")
}

fn start_fed(gateway: &Gateway, arguments: &[&str], input: &str) -> Child {
    let mut command = isthmus(gateway, arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    writeln!(child.stdin.take().expect("piped"), "{input}").expect("written");
    child
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Creates a token at a gateway.
#[track_caller]
pub(crate) fn invite(gateway: &Gateway, peer: &str, more: &[&str]) -> String {
    let output = run(gateway, &[&["peer", "invite", "--name", peer], more].concat());
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

pub(crate) fn join(gateway: &Gateway, peer: &str, token: &str) -> Output {
    fed(gateway, &["peer", "join", "-", "--name", peer], token)
}

/// Joins with `--replace`: the new link replaces the one that the peer has.
fn replace(gateway: &Gateway, peer: &str, token: &str) -> Output {
    fed(gateway, &["peer", "join", "-", "--name", peer, "--replace"], token)
}

#[track_caller]
pub(crate) fn is_joined(output: &Output) {
    let told = text(output);
    assert!(output.status.success() && told.contains("the link is live"), "{told}");
}

#[track_caller]
fn is_refused(output: &Output, wanted: &str) {
    let told = text(output);
    assert!(!output.status.success() && told.contains(wanted), "{wanted}: {told}");
}

fn state(gateway: &Gateway) -> String {
    gateway.json("/api/v1/peers")[0]["state"].as_str().unwrap_or_default().to_owned()
}

#[track_caller]
fn is_live(gateway: &Gateway) {
    eventually("the link", || (state(gateway) == "live").then_some(()));
}

/// Waits until west knows the service of east.
#[track_caller]
fn is_listed(west: &Gateway) {
    eventually("the service to be known", || {
        (west.get("/api/v1/services/ratings.east.global").0 == 200).then_some(())
    });
}

#[test]
fn two_commands_link_two_gateways_and_restarts_keep_the_link() {
    let (mut east, mut west) = sides();
    let (of_east, of_west) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    east.keep_state(&of_east);
    west.keep_state(&of_west);
    let (mut at_east, mut at_west) = (east.start(), west.start());
    assert_eq!(state(&at_west), "not enrolled");
    let shown = text(&run(&at_west, &["peers"]));
    assert!(shown.contains("isthmus peer invite --name east"), "{shown}");
    let token = invite(&at_east, "west", &[]);
    is_joined(&join(&at_west, "east", &token));
    is_listed(&at_west);
    is_live(&at_east);
    assert!(text(&run(&at_east, &["peers"])).contains("west  live"));
    // The joining side closes its connection right after the answer, which is no failure.
    let log = at_east.log().join("\n");
    assert!(!log.contains("the enrolment failed"), "{log}");
    // The token does not work a second time. Each gateway has stored a file that only its owner may read.
    is_refused(&replace(&at_west, "east", &token), "was already used");
    let stored = of_west.path().join("peers/east.pem");
    for path in [&stored, &of_east.path().join("peers/west.pem")] {
        assert_eq!(path.metadata().expect("stored").permissions().mode() & 0o777, 0o600);
    }
    // Both gateways restart, east first.
    at_east.kill();
    at_west.kill();
    let at_east = east.start();
    let mut at_west = west.start();
    is_live(&at_west);
    is_live(&at_east);
    is_listed(&at_west);
    // The gateway names a damaged file, and works otherwise.
    at_west.kill();
    let whole = std::fs::read_to_string(&stored).expect("text");
    std::fs::write(&stored, whole.replacen("spiffe://east", "spiffe://easu", 1)).expect("written");
    let at_west = west.start();
    assert_eq!(state(&at_west), "not enrolled");
    let warnings = at_west.json("/api/v1/status")["config"]["warnings"].to_string();
    assert!(
        warnings.contains("east.pem: the file is damaged") && warnings.contains("enrol the peer again"),
        "{warnings}"
    );
    let problem = crate::problems::has_problem(&at_west, "peer_not_enrolled")["text"].to_string();
    assert!(problem.contains("east.pem: the file is damaged") && problem.contains("--replace"), "{problem}");
    // The warning recommends a new enrolment, which repairs the peer.
    let token = invite(&at_east, "west", &["--replace"]);
    is_refused(&join(&at_west, "east", &token), "the peer east is already enrolled");
    is_joined(&replace(&at_west, "east", &token));
    is_listed(&at_west);
}

#[test]
fn a_peer_that_has_a_link_is_replaced_only_by_order() {
    let (east, west) = sides();
    let (at_east, at_west) = (east.start(), west.start());
    let thief = Side::new("thief", "thief.example", "east");
    let at_thief = thief.start();
    // This token was made before the peer had a link.
    let early = invite(&at_east, "west", &[]);
    is_joined(&join(&at_east, "west", &invite(&at_west, "east", &[])));
    let stored = || std::fs::read(at_east.folder().join("state/peers/west.pem")).expect("stored");
    let before = stored();
    let refusal = "the peer west is already enrolled; to replace its link, add `replace`";
    is_refused(&join(&at_thief, "east", &early), refusal);
    is_refused(&run(&at_east, &["peer", "invite", "--name", "west"]), refusal);
    is_refused(&run(&at_east, &["peer", "invite", "--name", "west", "--print"]), refusal);
    let api = |query: &str| at_east.post(&format!("/api/v1/peers/west/invite{query}"));
    for (query, wanted) in [("", "add `replace`"), ("?replace=no", "neither 1 nor true")] {
        let (status, body) = api(query);
        assert!(status == 409 && body.contains(wanted), "{status} {body}");
    }
    let of_thief = invite(&at_thief, "east", &[]);
    is_refused(&join(&at_west, "east", &of_thief), "the peer east is already enrolled");
    assert_eq!((stored(), state(&at_east), state(&at_west)), (before, "live".to_owned(), "live".to_owned()));
    // With `--replace`, another gateway takes the place of the enrolled one.
    let token = invite(&at_east, "west", &["--replace"]);
    is_joined(&join(&at_thief, "east", &token));
    let identity = || at_east.json("/api/v1/peers")[0]["identity"].as_str().map(str::to_owned);
    eventually("the other peer", || {
        (identity().as_deref() == Some("spiffe://thief.example/ns/isthmus/sa/gateway")).then_some(())
    });
    eventually("the end of the first link", || (state(&at_west) != "live").then_some(()));
}

#[test]
fn a_peer_that_is_enrolled_again_loses_what_it_announced_and_may_have_renamed_its_trust_domain() {
    let (mut east, mut west) = sides();
    let kept = tempfile::tempdir().expect("a folder");
    east.keep_state(&kept);
    let (at_east, mut at_west) = (east.start(), west.start());
    is_joined(&join(&at_west, "east", &invite(&at_east, "west", &[])));
    // West announces a further root, as somebody who has stolen the key of west's gateway could.
    let further = Pki::new("a further CA").ca_pem().replace("\r\n", "\n");
    let roots = west.organisation.pki.ca_pem() + &further;
    std::fs::write(at_west.folder().join("roots.pem"), roots).expect("written");
    let announced = kept.path().join("peers/west.roots.pem");
    let has_announced =
        || std::fs::read_to_string(&announced).is_ok_and(|text| text.contains(further.trim()));
    eventually("the announced root", || has_announced().then_some(()));
    // With `--print`, the enrolment opens no link, so that no roots are announced over a link.
    at_west.kill();
    let mut at_west = west.start();
    let token = invite(&at_east, "west", &["--replace"]);
    let joined = fed(&at_west, &["peer", "join", "-", "--name", "east", "--print"], &token);
    assert!(joined.status.success(), "{}", text(&joined));
    eventually("the end of what was announced", || (!announced.exists()).then_some(()));
    // West keeps its authority, but renames its trust domain.
    at_west.kill();
    west.organisation.trust_domain = "renamed.example".to_owned();
    west.config = config(&west.organisation, "east", "");
    let at_west = west.start();
    is_refused(&run(&at_east, &["peer", "invite", "--name", "west"]), "is already enrolled");
    is_joined(&join(&at_west, "east", &invite(&at_east, "west", &["--replace"])));
    is_listed(&at_west);
    is_live(&at_east);
    let identity = at_east.json("/api/v1/peers")[0]["identity"].clone();
    assert_eq!(identity, "spiffe://renamed.example/ns/isthmus/sa/gateway");
    assert_eq!(at_east.metric("isthmus_peer_enrolments_total", &["result=\"replaced\""]), 2.0);
    let log = at_east.log().join("\n");
    assert!(
        log.contains("its new link replaces the stored one") && log.contains("spiffe://west.example/"),
        "{log}"
    );
}

#[test]
fn a_peer_that_was_removed_begins_without_a_link_when_it_is_added_again() {
    let (mut east, west) = sides();
    let kept = tempfile::tempdir().expect("a folder");
    east.keep_state(&kept);
    let (mut at_east, at_west) = (east.start(), west.start());
    is_joined(&join(&at_west, "east", &invite(&at_east, "west", &[])));
    let stored = kept.path().join("peers/west.pem");
    let aside = kept.path().join("peers/west.pem.removed");
    let is_aside = || !stored.exists() && aside.exists();
    // The peer is removed while the gateway runs.
    let without = east.config.replace("name: west", "name: other");
    at_east.reload(&without);
    assert!(is_aside());
    let told = "remove .removed from the name of the file, and reload";
    eventually("the log", || at_east.log().iter().any(|line| line.contains(told)).then_some(()));
    at_east.reload(&east.config);
    assert_eq!(state(&at_east), "not enrolled");
    // The file is renamed back, as the log advises.
    std::fs::rename(&aside, &stored).expect("renamed");
    at_east.reload(&east.config);
    is_live(&at_east);
    // The peer is removed while the gateway does not run.
    at_east.kill();
    let mut at_east = start(east.organisation.folder(&[]), &without);
    assert!(is_aside());
    at_east.kill();
    assert_eq!(state(&east.start()), "not enrolled");
}

#[test]
fn peers_are_invited_and_joined_from_the_gateways_own_host_alone() {
    let name = "enrolment::peers_are_invited_and_joined_from_the_gateways_own_host_alone";
    if !namespace::inside(name, "ip link set lo up") {
        return;
    }
    let host = namespace::Host::connect();
    let (mut east, _) = sides();
    east.config.push_str("admin: {bind: \"0.0.0.0:15000\"}\n");
    let at_east = east.start();
    let near = format!("{NEAR}:15000").parse().expect("an address");
    for path in ["invite", "join"] {
        let path = format!("/api/v1/peers/west/{path}");
        for (status, body) in [host.enter(|| http(near, "POST", &path)), http(near, "POST", &path)] {
            assert!(status == 403 && body.contains("only from its own host"), "{status} {body}");
        }
    }
    assert_eq!(host.enter(|| http(near, "GET", "/api/v1/peers")).0, 200, "the rest is served");
    let (status, body) =
        http("127.0.0.1:15000".parse().expect("an address"), "POST", "/api/v1/peers/west/invite");
    assert!(status == 200 && body.contains("isthmus1."), "{status} {body}");
    drop(at_east);
}

#[test]
fn tokens_that_are_expired_foreign_void_or_damaged_are_refused() {
    let (east, west) = sides();
    let south = Side::new("south", "south.example", "west");
    let (east, west, south) = (east.start(), west.start(), south.start());
    // This token has expired.
    let token = invite(&east, "west", &["--valid", "1ms"]);
    let is_over = || (east.json("/api/v1/peers/west/invite")["state"] == "expired").then_some(());
    eventually("the end of the invitation", is_over);
    is_refused(&join(&west, "east", &token), "the token has expired");
    // The address of this token leads to a gateway with another key, as a man in the middle would have.
    invite(&south, "west", &[]);
    let token = invite(&east, "west", &["--address", &south.listener("mesh").to_string()]);
    is_refused(&join(&west, "east", &token), "the key of the gateway does not match the token");
    // This token was made by the joining gateway itself.
    let own = invite(&west, "east", &[]);
    is_refused(&join(&west, "east", &own), "made by this gateway; run");
    // The joining gateway reports an error for each of these tokens: a token that a newer token has replaced, a damaged token,
    // a text that is no token, and a token that is used for a peer that the config does not have.
    let void = invite(&east, "west", &[]);
    let token = invite(&east, "west", &[]);
    is_refused(&join(&west, "east", &void), "this gateway does not know the token");
    is_refused(&join(&west, "east", &token[..token.len() - 3]), "the token is damaged");
    is_refused(&join(&west, "east", "hello"), "not a token of `isthmus peer invite`");
    let unknown = join(&west, "north", &token);
    is_refused(&unknown, "the config has no peer \"north\"");
    is_refused(&unknown, "the name in the token is \"east\"");
    is_refused(&run(&east, &["peer", "invite", "--name", "north"]), "the config has no peer \"north\"");
    is_refused(&run(&east, &["peer", "invite", "--name", "west", "--valid", "25h"]), "at most 24 h");
    is_refused(&run(&east, &["peer", "invite", "--name", "west", "--address", "gw"]), "expected host:port");
    let counted = |gateway: &Gateway, result: &str| {
        gateway.metric("isthmus_peer_enrolments_total", &[&format!("result=\"{result}\"")])
    };
    let at_east = |result| counted(&east, result);
    assert_eq!((at_east("token_expired"), at_east("token_unknown")), (1.0, 1.0));
    // Five joins were refused: with the expired token, with the joining gateway's own token, with the damaged token, with the
    // text that is no token, and for the unknown peer. Two joins are counted as unreachable: the join whose token leads to a
    // gateway with another key, and the join with the voided token, which the gateway at its address does not know.
    assert_eq!((counted(&west, "refused"), counted(&west, "unreachable")), (5.0, 2.0));
    // None of the refusals has used up the token or stored anything.
    assert_eq!(
        (state(&west), west.folder().join("state/peers").exists()),
        ("not enrolled".to_owned(), false)
    );
    is_joined(&join(&west, "east", &token));
    is_refused(&join(&west, "east", &token), "is already enrolled");
    is_refused(&replace(&west, "east", &token), "was already used");
    assert_eq!((at_east("enrolled"), counted(&west, "enrolled")), (1.0, 1.0));
    assert_eq!((at_east("token_used"), at_east("replaced")), (1.0, 0.0));
}

#[test]
fn addresses_that_do_not_answer_delay_a_join_little_and_are_named_with_what_happened() {
    let (east, west) = sides();
    let (at_east, at_west) = (east.start(), west.start());
    // These addresses accept connections and never answer.
    let silent: Vec<TcpListener> =
        (0..16).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect();
    let dead: Vec<String> =
        silent.iter().map(|socket| socket.local_addr().expect("bound").to_string()).collect();
    let joined = |addresses: &[String]| {
        let parameters: Vec<&str> =
            addresses.iter().flat_map(|address| ["--address", address.as_str()]).collect();
        let token = invite(&at_east, "west", &parameters);
        join(&at_west, "east", &token)
    };
    // Tried one after another, the 16 addresses would take 80 s, and a join has 60 s: the last ones would not be tried.
    let refused = joined(&dead);
    for address in &dead {
        is_refused(&refused, &format!("{address}: the gateway does not answer the TLS handshake"));
    }
    let last = [&dead[..15], &[at_east.listener("mesh").to_string()]].concat();
    is_joined(&joined(&last));
}

#[test]
fn a_token_is_void_once_the_config_says_who_the_peer_is() {
    let (east, west) = sides();
    let at_east = start(east.organisation.folder(&[&west.organisation]), &east.config);
    let at_west = west.start();
    let token = invite(&at_east, "west", &[]);
    let identity = west.organisation.identity();
    let keys = format!("    accept: true\n    identity: {identity}\n    trust: west.pem\n    export:");
    at_east.reload(&east.config.replace("    export:", &keys));
    is_refused(
        &join(&at_west, "east", &token),
        "the config already has the identity or trust of the peer west",
    );
    let stored = |gateway: &Gateway| gateway.folder().join("state/peers").exists();
    assert!(!stored(&at_east) && !stored(&at_west));
}

#[test]
fn of_two_joins_at_the_same_instant_one_succeeds() {
    let (east, west) = sides();
    let south = Side::new("south", "south.example", "east");
    let (east, west, south) = (east.start(), west.start(), south.start());
    let token = invite(&east, "west", &[]);
    let joins =
        [&west, &south].map(|gateway| start_fed(gateway, &["peer", "join", "-", "--name", "east"], &token));
    let outputs = joins.map(|child| child.wait_with_output().expect("its output"));
    let [first, second] = &outputs;
    let (joined, refused) = if first.status.success() { (first, second) } else { (second, first) };
    is_joined(joined);
    is_refused(refused, "the token was already used");
    let states = [state(&west), state(&south)];
    assert!(states.contains(&"live".to_owned()) && states.contains(&"not enrolled".to_owned()), "{states:?}");
}

#[test]
fn a_peer_does_not_get_the_trust_domain_or_roots_of_another() {
    let (east, mut west) = sides();
    let at_east = east.start();
    // Adds a second peer, south, to east's config.
    let with_south = |more: &str| {
        let export = "    export: [{services: [\"*\"]}]\n";
        east.config.replacen("\nservices:", &format!("\n  - name: south\n{export}{more}services:"), 1)
    };
    // The joining gateway has the trust domain of another peer, which is not enrolled yet.
    at_east.reload(&with_south("    trustDomain: south.example\n"));
    let claiming = Side::new("thief", "south.example", "east").start();
    is_refused(&join(&claiming, "east", &invite(&at_east, "west", &[])), "already in use there");
    at_east.reload(&with_south(""));
    is_joined(&join(&west.start(), "east", &invite(&at_east, "west", &[])));
    // The joining gateway has west's authority under another trust domain, so its root is already a root of west.
    west.organisation.trust_domain = "south.example".to_owned();
    let impostor = start(west.organisation.folder(&[]), &config(&west.organisation, "east", ""));
    let token = invite(&at_east, "south", &[]);
    let told = "root 1 is also a root of the trust domain west.example";
    is_refused(&join(&impostor, "east", &token), told);
    // The joining gateways have another authority, and the trust domain of west or of east itself.
    for (domain, wanted) in [("west.example", "already in use there"), ("east.example", "trustAlias")] {
        let other = Side::new("south", domain, "east").start();
        is_refused(&join(&other, "east", &token), wanted);
        assert_eq!(state(&other), "not enrolled", "it has stored nothing either");
    }
    // The joining gateway has another trust domain than the config expects.
    at_east.reload(&with_south("    trustDomain: north.example\n"));
    let south = Side::new("south", "south.example", "east");
    let at_south = south.start();
    is_refused(&join(&at_south, "east", &token), "the trust domain south.example, but the config expects");
    // The refusals have not used up the token.
    at_east.reload(&with_south("    trustDomain: south.example\n"));
    is_joined(&join(&at_south, "east", &token));
}

#[test]
fn a_peer_with_our_trust_domain_needs_an_alias_on_both_sides() {
    let east = Side::new("east", "cluster.local", "west");
    let west = Side::new("west", "cluster.local", "east");
    let (at_east, at_west) = (east.start(), west.start());
    let token = invite(&at_east, "west", &[]);
    let aliased = |side: &Side, alias: &str| {
        side.config.replace("    export:", &format!("    trustAlias: {alias}\n    export:"))
    };
    is_refused(
        &join(&at_west, "east", &token),
        "refused the enrolment: the trust domain cluster.local is the trust domain of the gateway",
    );
    at_east.reload(&aliased(&east, "west.alias"));
    is_refused(
        &join(&at_west, "east", &token),
        "the trust domain cluster.local is the trust domain of the gateway",
    );
    assert_eq!(state(&at_east), "not enrolled", "the other side has refused, so neither keeps it");
    at_west.reload(&aliased(&west, "east.alias"));
    is_joined(&join(&at_west, "east", &token));
    is_live(&at_east);
}

#[test]
fn what_is_printed_is_a_config_of_both_sides() {
    let (east, west) = sides();
    // The gateways have no `state.dir`.
    let without = |side: &Side| side.config.replace("state: {dir: state}\n", "");
    let at_east = start(east.organisation.folder(&[]), &without(&east));
    let at_west = start(west.organisation.folder(&[]), &without(&west));
    is_refused(&run(&at_east, &["peer", "invite", "--name", "west"]), "no state.dir");
    let mut inviting = isthmus(&at_east, &["peer", "invite", "--name", "west", "--print"]);
    let mut inviting =
        inviting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut told = BufReader::new(inviting.stderr.take().expect("piped"));
    let mut line = String::new();
    told.read_line(&mut line).expect("the token");
    let token = line.trim().strip_prefix("token: ").expect("the token");
    is_refused(&join(&at_west, "east", token), "no state.dir");
    let joined = run(&at_west, &["peer", "join", token, "--name", "east", "--print"]);
    assert!(joined.status.success(), "{}", text(&joined));
    assert!(String::from_utf8_lossy(&joined.stderr).contains("warning: other users of this host"));
    let invited = inviting.wait_with_output().expect("it ends");
    assert!(invited.status.success());
    assert_eq!((state(&at_east), state(&at_west)), ("not enrolled".to_owned(), "not enrolled".to_owned()));
    for (gateway, side, output) in [(&at_east, &east, invited), (&at_west, &west, joined)] {
        let printed = String::from_utf8(output.stdout).expect("text");
        let (keys, roots) = printed.split_once("# Save this as ").expect("two parts");
        let (file, roots) = roots.split_once(" beside the config.\n").expect("a file");
        assert_eq!(file, format!("{}.pem", side.peer));
        std::fs::write(gateway.folder().join(file), roots).expect("written");
        let (_, keys) = keys.split_once(&format!("- name: {}\n", side.peer)).expect("the entry");
        gateway.reload(&without(side).replace("    export:", &format!("{keys}    export:")));
    }
    is_live(&at_west);
    is_live(&at_east);
    is_listed(&at_west);
    // A peer whose identity and trust are in the config cannot be enrolled.
    is_refused(
        &run(&at_east, &["peer", "invite", "--name", "west", "--print"]),
        "the config already has the identity or trust of the peer west",
    );
    // With `--replace`, an invitation prints a new link, which the operator can write into the config in place of the old one.
    let printing = ["peer", "invite", "--name", "west", "--print", "--replace", "--valid", "1ms"];
    is_refused(&run(&at_east, &printing), "there is no link with west, because the invitation is expired");
}

#[test]
fn who_redeems_no_token_gets_nothing_and_keeps_nothing() {
    let (east, west) = sides();
    let (at_east, at_west) = (east.start(), west.start());
    let address = at_east.listener("mesh");
    let stranger = || {
        let issued = west.organisation.pki.issue(&[], Some("spiffe://west.example/ns/isthmus/sa/gateway"));
        client(Some(issued), &["isthmus-enrol/1"])
    };
    assert!(Frames::connect(address, stranger()).is_err(), "nobody was invited, so nobody is served");
    let token = invite(&at_east, "west", &[]);
    let headers = block(&[
        (":method", "POST"),
        (":scheme", "https"),
        (":path", "/isthmus.peer.v1.Peer/Enrol"),
        (":authority", "peer"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]);
    let begin = |first: &[u8]| {
        let mut frames = Frames::connect(address, stranger()).expect("served");
        let asked = [frame(HEADERS, END_HEADERS, 1, &headers), frame(DATA, 0, 1, first)].concat();
        frames.send(&asked).expect("sent");
        frames
    };
    // A message whose length field exceeds the limit is refused; one that takes too long gets no answer.
    let mut long = begin(&[0, 0xff, 0xff, 0xff, 0xff]);
    long.until(HEADERS).expect("an answer");
    drop(long);
    // One source has at most 16 of these connections: a further one replaces the oldest, whose message never ends.
    let mut slow = begin(&[0, 0, 0, 0xff, 0xff]);
    let broken = || at_east.metric("isthmus_peer_enrolments_total", &["result=\"broken\""]);
    assert_eq!(broken(), 1.0, "the one before there was a token");
    let silence = Instant::now();
    let mut silent: Vec<Frames> =
        (0..16).map(|_| Frames::connect(address, stranger()).expect("in place of the oldest")).collect();
    while slow.next().is_ok() {}
    assert!(at_east.metric("isthmus_control_connections_refused_total", &["made_room"]) >= 1.0);
    // They keep no gateway of the same source out, and are closed in time.
    is_joined(&join(&at_west, "east", &token));
    let last = silent.last_mut().expect("sixteen");
    while last.next().is_ok() {}
    assert!(silence.elapsed() > Duration::from_secs(5), "{:?}", silence.elapsed());
    drop(silent);
    eventually("the silent ones to be counted", || (broken() > 1.0).then_some(()));
    // The connections by the wrong protocol did no harm: a connection for links cannot enrol, and one for enrolment cannot
    // link.
    is_live(&at_east);
}
