//! Enrolment: two gateways of organisations with an authority each, which know nothing of each other, are linked by a token,
//! with one command on each side.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::frames::{DATA, END_HEADERS, Frames, HEADERS, block, frame};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::client;
use crate::support::organisation::{Organisation, free_port, start};

const RATINGS: &str = "services:\n  - {hostname: ratings.pay.svc.cluster.local, namespace: pay, ports: [{name: http, port: 80}], endpoints: \
                       [{address: 10.2.0.1}]}\n";

/// One side of an enrolment: an organisation, and the config of its gateway with a peer that is not enrolled.
struct Side {
    organisation: Organisation,
    peer: &'static str,
    config: String,
}

impl Side {
    fn new(name: &'static str, domain: &str, peer: &'static str) -> Self {
        let organisation = Organisation::new(name, domain);
        let config = config(&organisation, peer, "");
        Self { organisation, peer, config }
    }

    fn start(&self) -> Gateway {
        start(self.organisation.folder(&[]), &self.config)
    }

    /// Keeps the state in a folder that outlives the gateway.
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

/// East, which offers a service and invites, and west, which joins.
fn sides() -> (Side, Side) {
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

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Makes a token of a gateway.
#[track_caller]
fn invite(gateway: &Gateway, peer: &str, more: &[&str]) -> String {
    let output = run(gateway, &[&["peer", "invite", "--name", peer], more].concat());
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

fn join(gateway: &Gateway, peer: &str, token: &str) -> Output {
    run(gateway, &["peer", "join", token, "--name", peer])
}

#[track_caller]
fn is_joined(output: &Output) {
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

/// Waits until the service of east is known in west.
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
    let begun = Instant::now();
    let token = invite(&at_east, "west", &[]);
    is_joined(&join(&at_west, "east", &token));
    is_listed(&at_west);
    let took = begun.elapsed();
    println!("enrolled, linked and exchanged after {took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    is_live(&at_east);
    assert!(text(&run(&at_east, &["peers"])).contains("west  live"));
    // The token does not work again, and there are two files that only their owner reads.
    is_refused(&join(&at_west, "east", &token), "was used already");
    let stored = of_west.path().join("peers/east.pem");
    for path in [&stored, &of_east.path().join("peers/west.pem")] {
        assert_eq!(path.metadata().expect("stored").permissions().mode() & 0o777, 0o600);
    }
    // Both restart, the other side first.
    at_east.kill();
    at_west.kill();
    let at_east = east.start();
    let mut at_west = west.start();
    is_live(&at_west);
    is_live(&at_east);
    is_listed(&at_west);
    // A file that is damaged is named, and everything else goes on.
    at_west.kill();
    let whole = std::fs::read_to_string(&stored).expect("text");
    std::fs::write(&stored, whole.replacen("spiffe://east", "spiffe://easu", 1)).expect("written");
    let at_west = west.start();
    assert_eq!(state(&at_west), "not enrolled");
    let warnings = at_west.json("/api/v1/status")["config"]["warnings"].to_string();
    assert!(
        warnings.contains("east.pem: it is damaged") && warnings.contains("enrol the peer again"),
        "{warnings}"
    );
    // Which is the way out of it.
    is_joined(&join(&at_west, "east", &invite(&at_east, "west", &[])));
    is_listed(&at_west);
}

#[test]
fn tokens_that_are_expired_foreign_void_or_damaged_are_refused() {
    let (east, west) = sides();
    let south = Side::new("south", "south.example", "west");
    let (east, west, south) = (east.start(), west.start(), south.start());
    // Expired.
    let token = invite(&east, "west", &["--valid", "1ms"]);
    let is_over = || (east.json("/api/v1/peers/west/invite")["state"] == "expired").then_some(());
    eventually("the end of the invitation", is_over);
    is_refused(&join(&west, "east", &token), "the token has expired");
    // Of a gateway that has another key, as one between the two would have.
    invite(&south, "west", &[]);
    let token = invite(&east, "west", &["--address", &south.listener("mesh").to_string()]);
    is_refused(&join(&west, "east", &token), "its key is not the one that the token names");
    // Made by the gateway itself.
    let own = invite(&west, "east", &[]);
    is_refused(&join(&west, "east", &own), "made by this gateway itself");
    // Void, because another was made since; damaged; no token at all; of a peer that the config does not have.
    let void = invite(&east, "west", &[]);
    let token = invite(&east, "west", &[]);
    is_refused(&join(&west, "east", &void), "is not one of this gateway");
    is_refused(&join(&west, "east", &token[..token.len() - 3]), "the token is damaged");
    is_refused(&join(&west, "east", "hello"), "no token of `isthmus peer invite`");
    let unknown = join(&west, "north", &token);
    is_refused(&unknown, "the config has no peer \"north\"");
    is_refused(&unknown, "the token suggests the name \"east\"");
    is_refused(&run(&east, &["peer", "invite", "--name", "north"]), "the config has no peer \"north\"");
    is_refused(&run(&east, &["peer", "invite", "--name", "west", "--valid", "25h"]), "at most 24 h");
    is_refused(&run(&east, &["peer", "invite", "--name", "west", "--address", "gw"]), "expected host:port");
    // Nothing of all this has used the token or left anything behind.
    assert_eq!(
        (state(&west), west.folder().join("state/peers").exists()),
        ("not enrolled".to_owned(), false)
    );
    is_joined(&join(&west, "east", &token));
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
    is_refused(&join(&at_west, "east", &token), "the config itself says who west is");
    let stored = |gateway: &Gateway| gateway.folder().join("state/peers").exists();
    assert!(!stored(&at_east) && !stored(&at_west));
}

#[test]
fn of_two_joins_at_the_same_instant_one_succeeds() {
    let (east, west) = sides();
    let south = Side::new("south", "south.example", "east");
    let (east, west, south) = (east.start(), west.start(), south.start());
    let token = invite(&east, "west", &[]);
    let joins = [&west, &south].map(|gateway| {
        let mut command = isthmus(gateway, &["peer", "join", &token, "--name", "east"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs")
    });
    let outputs = joins.map(|child| child.wait_with_output().expect("its output"));
    let [first, second] = &outputs;
    let (joined, refused) = if first.status.success() { (first, second) } else { (second, first) };
    is_joined(joined);
    is_refused(refused, "the token was used already");
    let states = [state(&west), state(&south)];
    assert!(states.contains(&"live".to_owned()) && states.contains(&"not enrolled".to_owned()), "{states:?}");
}

#[test]
fn a_peer_does_not_get_the_trust_domain_or_roots_of_another() {
    let (east, mut west) = sides();
    let at_east = east.start();
    // East has a second peer.
    let with_south = |more: &str| {
        let export = "    export: [{services: [\"*\"]}]\n";
        east.config.replacen("\nservices:", &format!("\n  - name: south\n{export}{more}services:"), 1)
    };
    // The trust domain of a peer that is not enrolled yet, claimed with the token of another.
    at_east.reload(&with_south("    trustDomain: south.example\n"));
    let claiming = Side::new("thief", "south.example", "east").start();
    is_refused(&join(&claiming, "east", &invite(&at_east, "west", &[])), "taken there already");
    at_east.reload(&with_south(""));
    is_joined(&join(&west.start(), "east", &invite(&at_east, "west", &[])));
    // West's authority, under another trust domain: its roots are west's.
    west.organisation.trust_domain = "south.example".to_owned();
    let impostor = start(west.organisation.folder(&[]), &config(&west.organisation, "east", ""));
    let token = invite(&at_east, "south", &[]);
    let told = "root 1 is a root of the trust domain west.example too";
    is_refused(&join(&impostor, "east", &token), told);
    // West's trust domain, with another authority; and ours.
    for (domain, wanted) in [("west.example", "taken there already"), ("east.example", "trustAlias")] {
        let other = Side::new("south", domain, "east").start();
        is_refused(&join(&other, "east", &token), wanted);
        assert_eq!(state(&other), "not enrolled", "it has stored nothing either");
    }
    // A trust domain that is not the expected one.
    at_east.reload(&with_south("    trustDomain: north.example\n"));
    let south = Side::new("south", "south.example", "east");
    let at_south = south.start();
    is_refused(&join(&at_south, "east", &token), "of the trust domain south.example, and the config expects");
    // The token is as good as before.
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
        "refuses: the trust domain cluster.local is that of the gateway",
    );
    at_east.reload(&aliased(&east, "west.alias"));
    is_refused(&join(&at_west, "east", &token), "the trust domain cluster.local is that of the gateway");
    assert_eq!(state(&at_east), "not enrolled", "the other side has refused, so neither keeps it");
    at_west.reload(&aliased(&west, "east.alias"));
    is_joined(&join(&at_west, "east", &token));
    is_live(&at_east);
}

#[test]
fn what_is_printed_is_a_config_of_both_sides() {
    let (east, west) = sides();
    // Without a state folder.
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
    // Who the config says cannot be enrolled over it.
    is_refused(
        &run(&at_east, &["peer", "invite", "--name", "west", "--print"]),
        "the config itself says who west is",
    );
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
    // A message that says that it is longer than any is refused at once.
    let begun = Instant::now();
    let mut long = begin(&[0, 0xff, 0xff, 0xff, 0xff]);
    long.until(HEADERS).expect("an answer");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    drop(long);
    // One that never ends is cut off, and so are connections that say nothing at all; more than 16 of a source are not taken.
    let mut slow = begin(&[0, 0, 0, 0xff, 0xff]);
    let mut silent: Vec<Frames> = Vec::new();
    while let Ok(frames) = Frames::connect(address, stranger()) {
        silent.push(frames);
        assert!(silent.len() < 20, "one source takes all places");
    }
    // The log says it, once in a second.
    eventually("the refusal in the log", || {
        drop(Frames::connect(address, stranger()));
        let told = "too many connections whose other end is not known yet";
        at_east.log().iter().any(|line| line.contains(told)).then_some(())
    });
    is_refused(&join(&at_west, "east", &token), "until it restarts");
    while slow.next().is_ok() {}
    let waited = begun.elapsed();
    assert!(waited > Duration::from_secs(5) && waited < Duration::from_secs(20), "{waited:?}");
    drop(silent);
    // All places are free again.
    eventually("the link", || join(&at_west, "east", &token).status.success().then_some(()));
    // The link's own protocol opens no enrolment, and an enrolment opens no link.
    assert_eq!(state(&at_east), "live");
}
