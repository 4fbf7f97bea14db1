//! Registries that vanish, break, shrink and come back: their last good state stays in use until the configured times have
//! passed.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::backend::Backend;
use crate::support::client::{Tls, call, tls};
use crate::support::gateway::Gateway;
use crate::support::hang::Hang;
use crate::support::pki::PKI;
use crate::support::{Stop, eventually};

const NAME: &str = "s0.mesh";

fn backend(mark: &'static str) -> Backend {
    Backend::tls_echo(PKI.server(NAME), mark)
}

/// Returns a service with one endpoint, as one line.
fn service(name: &str, backend: &Backend) -> String {
    format!(
        "{{hostname: {name}, namespace: shop, ports: [{{name: https, port: 443, targetPort: {}, protocol: TLS}}], endpoints: \
         [{{address: {}}}]}}",
        backend.address.port(),
        backend.address.ip()
    )
}

fn registry(services: &[String]) -> String {
    format!("services: [{}]\n", services.join(", "))
}

/// Returns a registry with `count` services, the first of which is [`NAME`].
fn many(count: usize, backend: &Backend) -> String {
    registry(&(0..count).map(|index| service(&format!("s{index}.mesh"), backend)).collect::<Vec<_>>())
}

/// Returns the config of a gateway in cluster `own`, with registries in files of its folder, each with a cluster of its own.
fn config(registries: &[&str], more: &str) -> String {
    let list: Vec<String> = registries
        .iter()
        .map(|name| format!("{{file: {{path: {name}.yaml, cluster: {name}, network: net}}}}"))
        .collect();
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: own, network: net}}\nexports: [{{services: [\"*.mesh\"]}}]\nregistries: \
         [{}]\n{more}\n",
        list.join(", ")
    )
}

fn start(registries: &[(&str, String)], more: &str) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in registries {
        write(folder.path(), name, text);
    }
    let names: Vec<&str> = registries.iter().map(|(name, _)| *name).collect();
    Gateway::start_in(folder, &config(&names, more), &[])
}

/// Writes a registry's file in one step.
fn write(folder: &Path, name: &str, text: &str) {
    let next = folder.join(format!(".{name}.next"));
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(format!("{name}.yaml"))).expect("renamed");
}

fn remove(gateway: &Gateway, name: &str) {
    std::fs::remove_file(gateway.folder().join(format!("{name}.yaml"))).expect("removed");
}

fn status(gateway: &Gateway, registry: usize) -> Value {
    gateway.json("/api/v1/status")["registries"][registry].clone()
}

#[track_caller]
fn becomes(gateway: &Gateway, registry: usize, state: &str) -> Value {
    eventually(state, || {
        let status = status(gateway, registry);
        (status["state"] == state).then_some(status)
    })
}

/// Returns the reason for which a name is refused, or `ok`.
fn verdict(gateway: &Gateway, name: &str) -> String {
    let explained = gateway.json(&format!("/api/v1/explain?sni={name}"));
    if explained["verdict"] == "admitted" {
        "ok".into()
    } else {
        explained["reason"].as_str().expect("a word").into()
    }
}

/// Returns the clusters of the endpoints to which a name leads.
fn clusters(gateway: &Gateway, name: &str) -> Vec<String> {
    let explained = gateway.json(&format!("/api/v1/explain?sni={name}"));
    let candidates = explained["candidates"].as_array().cloned().unwrap_or_default();
    let mut clusters: Vec<String> =
        candidates.iter().map(|one| one["cluster"].as_str().expect("a name").to_owned()).collect();
    clusters.sort();
    clusters
}

fn open(gateway: &Gateway) -> Tls {
    tls(gateway.listener("default"), NAME).expect("a handshake")
}

#[test]
fn a_registry_that_vanishes_is_demoted_in_favour_of_others_and_comes_back() {
    let (one, other) = (backend("one "), backend("other "));
    let first = registry(&[service(NAME, &one), service("only.mesh", &one)]);
    let registries = [("first", first.clone()), ("second", registry(&[service(NAME, &other)]))];
    let gateway = start(&registries, "aggregator: {staleAfter: 4s}");
    assert_eq!(clusters(&gateway, NAME), ["first", "second"]);
    let mut standing = eventually("a connection to the first", || {
        let mut stream = open(&gateway);
        (call(&mut stream, "x").expect("an answer") == "one x").then_some(stream)
    });
    remove(&gateway, "first");
    let stale = becomes(&gateway, 0, "stale");
    assert!(stale["problems"][0].as_str().is_some_and(|text| text.contains("cannot be read")), "{stale}");
    assert!(stale["since"].as_str() > stale["read"].as_str(), "{stale}");
    let demoted = becomes(&gateway, 0, "demoted");
    assert_eq!((&demoted["services"], &demoted["endpoints"]), (&2.into(), &2.into()));
    assert_eq!(clusters(&gateway, NAME), ["second"]);
    for _ in 0..10 {
        assert_eq!(call(&mut open(&gateway), "x").expect("an answer"), "other x");
    }
    // The endpoints of the demoted registry are still used for a service that no other registry has. No connection is cut.
    assert_eq!(clusters(&gateway, "only.mesh"), ["first"]);
    assert_eq!(call(&mut standing, "x").expect("an answer"), "one x");
    // If the other registry has only an unhealthy endpoint, the endpoints of the demoted registry are used again.
    write(
        gateway.folder(),
        "second",
        &registries[1].1.replace("[{address:", "[{health: unhealthy, address:"),
    );
    eventually("it counts", || (clusters(&gateway, NAME) == ["first", "second"]).then_some(()));
    write(gateway.folder(), "second", &registries[1].1);
    eventually("it does not", || (clusters(&gateway, NAME) == ["second"]).then_some(()));
    write(gateway.folder(), "first", &first);
    becomes(&gateway, 0, "live");
    assert_eq!(clusters(&gateway, NAME), ["first", "second"]);
    assert_eq!(call(&mut standing, "x").expect("an answer"), "one x");
}

#[test]
fn the_endpoints_of_an_expired_registry_are_withdrawn_and_its_services_are_not() {
    let one = backend("");
    let text = many(2, &one);
    let gateway = start(&[("west", text.clone())], "aggregator: {staleAfter: 1s, expireAfter: 2s}");
    let mut standing = open(&gateway);
    remove(&gateway, "west");
    becomes(&gateway, 0, "expired");
    assert_eq!(verdict(&gateway, NAME), "no_endpoints");
    let service = gateway.json(&format!("/api/v1/services/{NAME}"));
    assert_eq!(service["ports"][0]["port"], 443, "{service}");
    assert_eq!(service["endpoints"][0]["standing"], "expired", "{service}");
    assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    write(gateway.folder(), "west", &text);
    eventually("it is back", || (verdict(&gateway, NAME) == "ok").then_some(()));
    becomes(&gateway, 0, "live");
}

#[test]
fn the_times_may_change_with_a_reload() {
    let one = backend("");
    let gateway = start(&[("west", many(1, &one))], "aggregator: {expireAfter: 1h}");
    remove(&gateway, "west");
    becomes(&gateway, 0, "stale");
    gateway.reload(&config(&["west"], "aggregator: {expireAfter: 1s}"));
    becomes(&gateway, 0, "expired");
    gateway.reload(&config(&["west"], ""));
    becomes(&gateway, 0, "stale");
    assert_eq!(verdict(&gateway, NAME), "ok");
}

#[test]
fn a_start_goes_on_from_the_last_good_copy() {
    let one = backend("");
    let kept = tempfile::tempdir().expect("a folder");
    let state = kept.path().join("state");
    let more = format!("state: {{dir: {}}}", state.display());
    let own = |gateway: &Gateway| gateway.get("/readyz?verbose").1;
    let text = many(20, &one);
    let gateway = start(&[("own", text)], &more);
    let copies = state.join("registries");
    let copy = || {
        let entry = std::fs::read_dir(&copies).ok()?.find_map(Result::ok)?;
        std::fs::read(entry.path()).ok().filter(|bytes| bytes.starts_with(b"isthmus registry copy"))
    };
    let first = eventually("a copy", copy);
    // A state that is held or broken does not replace the last good copy.
    write(gateway.folder(), "own", &many(1, &one));
    becomes(&gateway, 0, "held");
    write(gateway.folder(), "own", "services: [");
    becomes(&gateway, 0, "stale");
    assert!(copy().as_ref() == Some(&first), "the same copy");
    drop(gateway);
    // The registry's file is missing. The gateway becomes ready with the copy from the state folder, and reports the registry
    // as stale.
    let folder = tempfile::tempdir().expect("a folder");
    let gateway = Gateway::start_in(folder, &config(&["own"], &more), &[]);
    assert!(own(&gateway).contains("[+] registry own.yaml (stale)"), "{}", own(&gateway));
    let status = status(&gateway, 0);
    assert_eq!((&status["state"], &status["services"]), (&"stale".into(), &20.into()), "{status}");
    assert_eq!(call(&mut open(&gateway), "x").expect("an answer"), "x");
    write(gateway.folder(), "own", &many(19, &one));
    becomes(&gateway, 0, "live");
    assert!(!own(&gateway).contains("stale"), "{}", own(&gateway));
    eventually("another copy", || copy().filter(|now| *now != first));
    // The copy is deleted when the registry leaves the config.
    gateway.reload(&config(&[], &more));
    eventually("no copy", || (std::fs::read_dir(&copies).ok()?.count() == 0).then_some(()));
}

#[test]
fn copies_that_cannot_be_written_are_a_problem_and_no_more() {
    let one = backend("");
    let gateway = start(&[("west", many(1, &one))], "state: {dir: west.yaml/state}");
    let problem =
        eventually("the problem", || status(&gateway, 0)["problems"][0].as_str().map(str::to_owned));
    assert!(problem.starts_with("the registry's last good copy cannot be written: "), "{problem}");
    let problems = gateway.json("/api/v1/status")["problems"].clone();
    let is_kept = |one: &Value| one["code"] == "state_not_kept";
    assert!(problems.as_array().is_some_and(|all| all.iter().any(is_kept)), "{problems}");
    assert_eq!(status(&gateway, 0)["state"], "live");
    assert_eq!(call(&mut open(&gateway), "x").expect("an answer"), "x");
    // After a reload with a usable folder, the current state is written at once.
    gateway.reload(&config(&["west"], "state: {dir: state}"));
    eventually("a copy", || {
        let mut copies = std::fs::read_dir(gateway.folder().join("state/registries")).ok()?;
        copies.next().is_some().then_some(())
    });
    eventually("no problem", || (status(&gateway, 0)["problems"] == serde_json::json!([])).then_some(()));
}

#[test]
fn a_mass_withdrawal_is_applied_when_it_persists() {
    let one = backend("");
    let gateway = start(&[("west", many(20, &one))], "aggregator: {withdrawalHold: 4s}");
    let began = Instant::now();
    write(gateway.folder(), "west", &many(10, &one));
    // Half of the services is more than 30 %, but ten services are not more than 10.
    eventually("it is applied", || (verdict(&gateway, "s19.mesh") == "sni_unknown").then_some(()));
    write(gateway.folder(), "west", &many(20, &one));
    eventually("it is back", || (verdict(&gateway, "s19.mesh") == "ok").then_some(()));
    let before = began.elapsed();
    write(gateway.folder(), "west", &many(9, &one));
    let held = becomes(&gateway, 0, "held");
    assert!(
        held["problems"][0].as_str().is_some_and(|text| text.contains("it would leave 11 of 20 services")),
        "{held}"
    );
    assert_eq!(verdict(&gateway, "s19.mesh"), "ok");
    becomes(&gateway, 0, "live");
    assert!(began.elapsed() >= before + Duration::from_secs(4));
    assert_eq!((verdict(&gateway, "s19.mesh"), verdict(&gateway, NAME)), ("sni_unknown".into(), "ok".into()));
}

#[test]
fn a_folder_may_lose_files_be_cut_short_and_vanish() {
    let one = backend("");
    let folder = tempfile::tempdir().expect("a folder");
    let west = folder.path().join("west.yaml");
    std::fs::create_dir(&west).expect("made");
    let file = |index: usize| registry(&[service(&format!("s{index}.mesh"), &one)]);
    let put = |index: usize, text: &str| write(&west, &format!("f{index:02}"), text);
    (0..30).for_each(|index| put(index, &file(index)));
    let gateway = Gateway::start_in(folder, &config(&["west"], ""), &[]);
    assert_eq!(status(&gateway, 0)["services"], 30);
    // When a file is deleted, its services are withdrawn.
    std::fs::remove_file(west.join("f29.yaml")).expect("removed");
    eventually("one service less", || (verdict(&gateway, "s29.mesh") == "sni_unknown").then_some(()));
    assert_eq!(status(&gateway, 0)["state"], "live");
    // Half of a file is invalid: the last good state of the whole folder stays.
    put(28, &file(28)[..40]);
    becomes(&gateway, 0, "stale");
    put(28, &file(28));
    becomes(&gateway, 0, "live");
    // Another folder with half of the files takes its place, and then that folder goes.
    let fewer = gateway.folder().join("fewer");
    std::fs::create_dir(&fewer).expect("made");
    (0..14).for_each(|index| write(&fewer, &format!("f{index:02}"), &file(index)));
    std::fs::rename(&west, gateway.folder().join("before")).expect("renamed");
    std::fs::rename(&fewer, &west).expect("renamed");
    becomes(&gateway, 0, "held");
    let all_there =
        || (0..29).for_each(|index| assert_eq!(verdict(&gateway, &format!("s{index}.mesh")), "ok"));
    all_there();
    std::fs::remove_dir_all(&west).expect("removed");
    becomes(&gateway, 0, "stale");
    all_there();
    assert_eq!(call(&mut open(&gateway), "x").expect("an answer"), "x");
    std::fs::create_dir(&west).expect("made");
    (0..29).for_each(|index| put(index, &file(index)));
    becomes(&gateway, 0, "live");
}

#[test]
fn ten_flapping_registries_lose_no_connection() {
    const REGISTRIES: usize = 10;
    let one = backend("");
    let names: Vec<String> = (0..REGISTRIES).map(|index| format!("r{index}")).collect();
    // Each registry has the service that clients call and one of its own.
    let text = |index: usize| registry(&[service(NAME, &one), service(&format!("own{index}.mesh"), &one)]);
    let registries: Vec<(&str, String)> =
        names.iter().enumerate().map(|(index, name)| (name.as_str(), text(index))).collect();
    let gateway = start(&registries, "aggregator: {staleAfter: 1s, expireAfter: 2s, withdrawalHold: 1s}");
    let (stop, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut standing = open(&gateway);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    assert_eq!(call(&mut open(&gateway), "again").expect("an answer"), "again");
                    calls.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // The first registry stays as it is, so that the service keeps an endpoint. The others break in turn in different ways.
        let until = Instant::now() + Duration::from_secs(5);
        let mut round = 0;
        while Instant::now() < until {
            for (index, name) in names.iter().enumerate().skip(1) {
                let path = gateway.folder().join(format!("r{index}.yaml"));
                match (round + index) % 4 {
                    0 => drop(std::fs::remove_file(&path)),
                    1 => std::fs::write(&path, &text(index)[..50]).expect("written"),
                    2 => write(gateway.folder(), name, "services: []\n"),
                    _ => write(gateway.folder(), name, &text(index)),
                }
            }
            let seen = calls.load(Ordering::SeqCst);
            eventually("calls", || (calls.load(Ordering::SeqCst) > seen + 20).then_some(()));
            round += 1;
        }
        assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    });
    for (index, name) in names.iter().enumerate() {
        write(gateway.folder(), name, &text(index));
    }
    for index in 0..REGISTRIES {
        becomes(&gateway, index, "live");
        // A registry may be live with the file from before the last write.
        let own = format!("own{index}.mesh");
        eventually(&own, || (verdict(&gateway, &own) == "ok").then_some(()));
    }
    drop(standing);
    let lines = eventually("all connections logged", || {
        let lines = gateway.access_log();
        (lines.len() == calls.load(Ordering::SeqCst) + 1).then_some(lines)
    });
    assert!(lines.iter().all(|line| line["reason"] == "ok"));
}

#[test]
fn bad_services_are_told_of_with_their_place_and_good_ones_taken() {
    let one = backend("");
    let twice = many(1, &one).replace("ports: [{name: https", "ports: [{name: https, port: 1}, {name: https");
    let nothing = many(1, &one).replace("{address:", "{weight: 0, address:");
    let most = many(1, &one).replace("{address:", "{weight: 4294967295, address:");
    let registries = [("twice", twice), ("nothing", nothing), ("most", most)];
    let gateway = start(&registries, "aggregator: {startTimeout: 1s}");
    for (registry, fragment) in [
        (0, "ports[1].name: \"https\" is listed twice in this service"),
        (1, "endpoints[0].weight: found the number 0"),
    ] {
        let problem = eventually("the problem", || {
            let status = status(&gateway, registry);
            assert_eq!(status["state"], "missing", "{status}");
            status["problems"][0].as_str().map(str::to_owned)
        });
        assert!(problem.contains(".yaml:1:") && problem.contains(fragment), "{problem}");
    }
    becomes(&gateway, 2, "live");
    let candidate = gateway.json(&format!("/api/v1/explain?sni={NAME}"))["candidates"][0].clone();
    assert_eq!((&candidate["weight"], &candidate["cluster"]), (&4_294_967_295_u32.into(), &"most".into()));
}

#[test]
fn endpoints_on_networks_a_registry_may_not_speak_of_are_dropped_and_shown() {
    let one = backend("");
    let more =
        |text: &str| text.replace("[{address:", "[{address: 192.0.2.1, network: undeclared}, {address:");
    let gateway = start(&[("west", more(&many(1, &one)))], "");
    let west = status(&gateway, 0);
    assert_eq!((&west["endpoints"], &west["denied_endpoints"]), (&1.into(), &1.into()), "{west}");
    assert_eq!(call(&mut open(&gateway), "x").expect("an answer"), "x");
}

/// Writes a registry whose file hangs: reading it neither succeeds nor fails, as on a hung mount.
fn hung(folder: &Path, name: &str, text: &str) -> Option<Hang> {
    write(folder, name, text);
    Hang::of(&folder.join(format!("{name}.yaml")))
}

#[test]
fn a_config_that_changes_during_the_start_is_read_again() {
    let one = backend("");
    let folder = tempfile::tempdir().expect("a folder");
    let Some(_hang) = hung(folder.path(), "hung", "services: []") else { return };
    let text = config(&["hung"], "aggregator: {startTimeout: 5s}");
    let gateway = Gateway::start_unready(folder, &text);
    assert_eq!(gateway.get("/readyz").0, 503);
    gateway.write_config(&format!("{text}services: [{}]\n", service("new.mesh", &one)));
    eventually("it is taken in", || (verdict(&gateway, "new.mesh") == "ok").then_some(()));
}

#[test]
fn included_files_are_watched_that_are_new_or_have_made_the_config_a_bad_one() {
    let one = backend("");
    let text = config(&[], "");
    let gateway = Gateway::start(&text);
    let write = |name: &str, text: &str| std::fs::write(gateway.folder().join(name), text).expect("written");
    write("more.yaml", "services: bad");
    gateway.write_config(&format!("{text}include: [more.yaml, \"part-*.yaml\"]\n"));
    eventually("it is rejected", || {
        (!gateway.json("/api/v1/status")["config"]["rejected"].as_array()?.is_empty()).then_some(())
    });
    write("more.yaml", &registry(&[service("mended.mesh", &one)]));
    eventually("it is mended", || (verdict(&gateway, "mended.mesh") == "ok").then_some(()));
    write("part-1.yaml", &registry(&[service("new.mesh", &one)]));
    eventually("it is found", || (verdict(&gateway, "new.mesh") == "ok").then_some(()));
}

#[test]
fn a_registry_that_does_not_answer_is_waited_for_so_long() {
    let one = backend("");
    let folder = tempfile::tempdir().expect("a folder");
    let late = registry(&[service("late.mesh", &one)]);
    let Some(hang) = hung(folder.path(), "hung", &late) else { return };
    write(folder.path(), "west", &many(1, &one));
    let began = Instant::now();
    let gateway =
        Gateway::start_in(folder, &config(&["hung", "west"], "aggregator: {startTimeout: 1s}"), &[]);
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(status(&gateway, 0)["state"], "missing");
    becomes(&gateway, 1, "live");
    assert_eq!(call(&mut open(&gateway), "x").expect("an answer"), "x");
    gateway.told("some registries were not read within aggregator.startTimeout");
    // When the registry can be read, it is applied.
    drop(hang);
    eventually("it is taken in", || (verdict(&gateway, "late.mesh") == "ok").then_some(()));
}

#[test]
fn registries_that_hang_freeze_no_other_and_are_stale() {
    let one = backend("");
    let folder = tempfile::tempdir().expect("a folder");
    for (name, count) in [("a", 1), ("b", 2), ("c", 3)] {
        write(folder.path(), name, &many(count, &one));
    }
    let gateway = Gateway::start_in(folder, &config(&["a", "b", "c"], ""), &[]);
    let path = |name: &str| gateway.folder().join(format!("{name}.yaml"));
    let (Some(mut a), Some(mut b)) = (Hang::of(&path("a")), Hang::of(&path("b"))) else { return };
    let began = Instant::now();
    [&mut a, &mut b].into_iter().for_each(|hang| hang.append("# more"));
    // The gateway begins to read both files at its next periodic check, if no file event makes it read them earlier. The reads
    // hang. Meanwhile the gateway applies the changes of `c`.
    for round in 0..3 {
        let new = format!("new{round}.mesh");
        write(gateway.folder(), "c", &registry(&[service(NAME, &one), service(&new, &one)]));
        eventually(&new, || (verdict(&gateway, &new) == "ok").then_some(()));
    }
    for registry in [0, 1] {
        let stale = becomes(&gateway, registry, "stale");
        let problem = stale["problems"][0].as_str().expect("a problem");
        assert!(problem.contains("no result within 10s; the file system hangs"), "{problem}");
    }
    eprintln!("stale after {:?}", began.elapsed());
    drop((a, b));
    becomes(&gateway, 0, "live");
    becomes(&gateway, 1, "live");
}

#[test]
fn a_registry_of_special_or_endless_files_is_refused_and_a_link_is_followed() {
    let one = backend("");
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let made = std::process::Command::new("mkfifo").arg(at("pipe.yaml")).status().expect("mkfifo");
    assert!(made.success());
    std::fs::create_dir(at("zero.yaml")).expect("made");
    std::os::unix::fs::symlink("/dev/zero", at("zero.yaml/a.yaml")).expect("linked");
    std::fs::write(at("west.data"), many(1, &one)).expect("written");
    std::os::unix::fs::symlink("west.data", at("west.yaml")).expect("linked");
    let more = "aggregator: {startTimeout: 1s}";
    let gateway = Gateway::start_in(folder, &config(&["pipe", "zero", "west"], more), &[]);
    becomes(&gateway, 2, "live");
    for (registry, what) in [(0, "pipe.yaml: cannot be read: it is a pipe"), (1, "it is a device")] {
        let problem = becomes(&gateway, registry, "missing")["problems"][0].clone();
        assert!(problem.as_str().is_some_and(|text| text.contains(what)), "{problem}");
    }
}

#[test]
fn a_registry_is_read_within_its_share_of_the_memory_budget() {
    let one = backend("");
    let large = many(1, &one) + &"# A comment of many bytes.\n".repeat(400_000);
    let registries = [("west", many(1, &one)), ("east", large.clone())];
    let gateway = start(&registries, "limits: {memory: 32MiB}\naggregator: {startTimeout: 1s}");
    let told = |registry, state| becomes(&gateway, registry, state)["problems"][0].to_string();
    let problem = told(1, "missing");
    assert!(problem.contains("8 MiB"), "before the first judgement: {problem}");
    becomes(&gateway, 0, "live");
    write(gateway.folder(), "west", &large);
    let problem = told(0, "stale");
    assert!(problem.contains("8 MiB"), "{problem}");
    assert_eq!(verdict(&gateway, NAME), "ok", "the last good state is in use");
}

#[test]
fn a_folder_that_changes_without_pause_is_read_all_the_time() {
    const FILES: usize = 100;
    let one = backend("");
    let folder = tempfile::tempdir().expect("a folder");
    let west = folder.path().join("west.yaml");
    std::fs::create_dir(&west).expect("made");
    let file = |index: usize, round: usize| {
        let text = registry(&[service(&format!("s{index}.mesh"), &one)]);
        text.replace("[{address:", &format!("[{{weight: {}, address:", round + 1))
    };
    // The file is written in place, so the gateway may read half of it.
    let put = |index: usize, round: usize| {
        std::fs::write(west.join(format!("f{index:03}.yaml")), file(index, round)).expect("written");
    };
    (0..FILES).for_each(|index| put(index, 0));
    let gateway = Gateway::start_in(folder, &config(&["west"], ""), &[]);
    let generation = || gateway.metric("isthmus_config_generation", &[]);
    let (mut writes, mut longest) = (0, Duration::ZERO);
    let (before, end) = (generation(), Instant::now() + Duration::from_secs(60));
    while generation() < before + 8.0 {
        assert!(
            Instant::now() < end,
            "{writes} writes without pause led to {} worlds",
            generation() - before
        );
        for _ in 0..100 {
            writes += 1;
            let begun = Instant::now();
            put(writes % FILES, writes);
            longest = longest.max(begun.elapsed());
            // With 200 writes per second, no pause is long enough for a change to count as finished.
            thread::sleep(Duration::from_millis(5));
        }
    }
    becomes(&gateway, 0, "live");
    // Half a file is a fault if it stays for 2 s, which a write may take on a busy machine.
    if longest < Duration::from_secs(1) {
        assert!(
            gateway.log().iter().all(|line| !line.contains("\"ERROR\"")),
            "a write took {longest:?} at most"
        );
    }
}

#[test]
fn an_empty_file_is_a_mistake_only_if_it_stays_empty() {
    assert!((0..5).any(|_| is_empty_for_a_while()), "the machine stood still each time");
}

/// Returns `false` if the file was empty for so long that this is a mistake.
fn is_empty_for_a_while() -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let west = folder.path().join("west.yaml");
    let text = registry(&[service("a.mesh", &backend(""))]);
    std::fs::write(&west, &text).expect("written");
    let gateway = Gateway::start_in(folder, &config(&["west"], ""), &[]);
    // The writer is slow, as on a disk that stalls.
    let begun = Instant::now();
    std::fs::write(&west, "").expect("truncated");
    thread::sleep(Duration::from_millis(600));
    std::fs::write(&west, text.replace("a.mesh", "b.mesh")).expect("written");
    if begun.elapsed() > Duration::from_millis(1_500) {
        return false;
    }
    eventually("the new service", || {
        (gateway.json("/api/v1/explain?sni=b.mesh")["verdict"] == "admitted").then_some(())
    });
    assert!(gateway.log().iter().all(|line| !line.contains("\"ERROR\"")));
    std::fs::write(&west, "").expect("truncated");
    gateway.told("\"ERROR\"");
    true
}

#[test]
fn a_gateway_whose_registries_become_pipes_stops() {
    let folder = tempfile::tempdir().expect("a folder");
    let names = ["one", "two"];
    let registries: String = names
        .map(|name| format!("  - file: {{path: {name}.yaml, cluster: {name}, network: {name}}}\n"))
        .concat();
    for name in names {
        std::fs::write(folder.path().join(format!("{name}.yaml")), "services: []\n").expect("written");
    }
    let mut gateway =
        Gateway::start_in(folder, &format!("listen: \"127.0.0.1:0\"\nregistries:\n{registries}"), &[]);
    for name in names {
        let path = gateway.folder().join(format!("{name}.yaml"));
        std::fs::remove_file(&path).expect("removed");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
        gateway.told(&format!("{name}.yaml: cannot be read: it is a pipe"));
    }
    gateway.signal("TERM");
    assert!(gateway.ended().success());
}
