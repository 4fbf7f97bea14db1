//! Messages of very many empty items, which would take many times their bytes in memory: they are refused before they are decoded.

use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::istiod;
use crate::memory_budget::Cgroup;
use crate::support::gateway::Gateway;
use crate::support::skip;
use crate::support::wds::{ADDRESS, AUTHORIZATION, Ask, Who, Ztunnel, field};
use crate::wds;

/// The number of items of a bomb.
const ITEMS: usize = 4 << 20;

/// Sets the peak of the gateway's memory to what it has at the moment.
fn reset_peak(gateway: &Gateway) {
    // proc_pid_clear_refs(5).
    fs::write(format!("/proc/{}/clear_refs", gateway.process()), "5").expect("our own process");
}

/// Sends each bomb on a stream of its own.
#[track_caller]
fn send(what: &str, gateway: &Gateway, open: impl Fn() -> Ztunnel) {
    let empty = |number: u8, count: usize| field(number, &[]).repeat(count);
    let nulls = field(1, &[8, 0]).repeat(ITEMS / 2);
    let list = field(1, &field(3, &field(1, &[field(1, b"k"), field(2, &field(6, &nulls))].concat())));
    for (bomb, message, text) in [
        ("names", empty(3, ITEMS), "a message with 4194304 items; at most 524288 are allowed"),
        ("versions", empty(5, ITEMS), "a message with 4194304 items; at most 524288 are allowed"),
        (
            "fewer names",
            empty(3, 500_000),
            "a message that would take 13000000 bytes of memory; at most 5048576",
        ),
        ("metadata", list, "a node with 2097153 values within values of metadata; at most 4096 are allowed"),
    ] {
        let before = gateway.metric("isthmus_xds_refused_total", &[]);
        let bytes = message.len();
        reset_peak(gateway);
        let peak = gateway.peak_memory();
        let mut client = open();
        client.send(&message);
        let (code, answer) = client.ended();
        assert!(code == 8 && answer.starts_with(text), "{what}, {bomb}: {code} {answer}");
        // The kernel raises the peak late, so that it may seem to fall.
        let risen = gateway.peak_memory().saturating_sub(peak);
        eprintln!("{what}, {bomb}: {bytes} bytes raise the peak by {risen}");
        assert!(risen < 4 * bytes, "{what}, {bomb}: {bytes} bytes raise the peak by {risen}");
        assert_eq!(gateway.metric("isthmus_xds_refused_total", &[]), before + 1.0, "{what}, {bomb}");
    }
    assert!(gateway.json("/api/v1/status").to_string().contains("at most"), "{what}: who was refused");
}

#[test]
fn requests_of_empty_items_cost_a_few_times_their_bytes() {
    let world = wds::World::start();
    send("WDS", &world.gateway, || world.open(&wds::who()));
    let xds: SocketAddr = world.gateway.listener("xds");
    let nobody = Who { token: String::new(), cluster: String::new(), metadata: Vec::new() };
    send("xDS", &world.gateway, || Ztunnel::open_plain(xds, &nobody));
}

/// Half of the clients send messages that are refused, and the others, on the connections that they keep, the largest that are not.
#[test]
fn clients_that_send_the_largest_messages_at_once_do_not_get_the_gateway_killed() {
    const TEST: &str = "bombs::clients_that_send_the_largest_messages_at_once_do_not_get_the_gateway_killed";
    const CLIENTS: usize = 24;
    const LIMIT: u64 = 512 << 20;
    const ROUNDS: usize = 4;
    let Some(cgroup) = Cgroup::new("bombs", LIMIT) else {
        return skip(&format!("{TEST}: no memory cgroup of version 1 can be made here"));
    };
    let mut world = wds::World::within("307MiB");
    cgroup.take(world.gateway.process());
    let bomb = field(3, &[]).repeat(ITEMS);
    let has: Vec<_> = (0..100_000).map(|number| (format!("{number:016}"), String::new())).collect();
    let is_over = AtomicBool::new(false);
    let (refused, slowest) = thread::scope(|scope| {
        let (bomb, has, world, is_over) = (&bomb, &has, &world, &is_over);
        let crowd: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn(move || {
                    let (mut refused, mut kept) = (0, Vec::new());
                    for _ in 0..ROUNDS {
                        let mut client = world.open(&wds::who());
                        if number % 2 == 0 {
                            client.send(bomb);
                            refused += usize::from(client.ended().0 == 8);
                        } else {
                            client.begin_on_demand(has);
                            kept.push(client);
                        }
                    }
                    refused
                })
            })
            .collect();
        let innocent = scope.spawn(move || {
            let mut slowest = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let answer = world.gateway.get("/readyz");
                assert_eq!(answer.0, 200);
                slowest = slowest.max(begun.elapsed());
            }
            slowest
        });
        let refused = crowd.into_iter().map(|client| client.join().expect("no panic")).sum::<usize>();
        is_over.store(true, Ordering::Relaxed);
        (refused, innocent.join().expect("served"))
    });
    assert!(world.gateway.is_running(), "killed");
    eprintln!("{} MiB at most; the slowest answer after {slowest:?}", cgroup.highest() >> 20);
    assert_eq!(refused, CLIENTS / 2 * ROUNDS);
    assert!(cgroup.highest() < LIMIT / 100 * 95, "{} bytes", cgroup.highest());
}

#[test]
fn a_ztunnel_may_name_100_000_resources_of_16_bytes() {
    let world = wds::World::start();
    let has: Vec<_> = (0..100_000).map(|number| (format!("{number:016}"), String::new())).collect();
    let mut client = world.open(&wds::who());
    client.begin_on_demand(&has);
    let (addresses, _) = client.first();
    assert_eq!(addresses.removed.len(), 100_000);
    let names: Vec<_> = has.iter().map(|(name, _)| name.as_str()).collect();
    let mut client = world.open(&wds::who());
    client.ask(ADDRESS, &Ask { subscribe: &names, ..Ask::default() });
    client.ask(AUTHORIZATION, &Ask::default());
    let (addresses, _) = client.first();
    assert_eq!(addresses.removed.len(), 100_000);
}

#[test]
fn a_response_of_empty_items_costs_a_few_times_its_bytes() {
    let Some(mut world) = istiod::World::start(&istiod::one_pod(), "", istiod::LOOPBACK) else { return };
    world.becomes("live");
    reset_peak(&world.gateway);
    let before = world.gateway.peak_memory();
    world.tell(&json!({"bomb": ITEMS}));
    world.complains("a message with 4194304 items; at most 2000000 are allowed");
    let risen = world.gateway.peak_memory().saturating_sub(before);
    eprintln!("istiod: {} bytes raise the peak by {risen}", 2 * ITEMS);
    assert!(risen < 4 * 2 * ITEMS, "{} bytes raise the peak by {risen}", 2 * ITEMS);
    // The registry keeps its items.
    assert_eq!(world.ports(), [7001]);
}
