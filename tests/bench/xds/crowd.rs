//! Very many clients of many names each: what one costs, what it costs when all leave at once, and whether a gateway's new
//! address holds up the changes of services. Where a process may have 20,000 descriptors, a quarter of them is for xDS: not
//! more than 5,000 clients with those that look on.

use std::time::{Duration, Instant};

use super::process::{memory, processor_time};
use super::{Crew, Fleet, Gateway, Mesh, Result, now, quantile};

/// Clients, in so many processes.
const CROWD: (usize, usize) = (4_900, 4);
/// Names of each.
const NAMES: usize = 200;
/// Clients of the service that changes.
const PROBES: usize = 20;
/// Changes of that service, and the time between two.
const CHANGES: (usize, Duration) = (150, Duration::from_millis(100));
/// Changes from one new gateway address to the next.
const MOVES_EVERY: usize = 30;

pub(super) fn measure(mesh: &Mesh, gateway: &Gateway) -> Result<()> {
    let crew = Crew { first: 100_000, count: PROBES, stuck: 0, names: 0, services: 0 };
    let probes = Fleet::start_with(gateway.xds, &crew)?;
    probes.acknowledged(PROBES)?;
    let crowd = gather(mesh, gateway)?;
    let calm = changes(mesh, &probes, None)?;
    let processor = processor_time(&gateway.child)?;
    let moved = changes(mesh, &probes, Some(MOVES_EVERY))?;
    println!(
        "one endpoint of a service of {PROBES} clients, file renamed → last acknowledgement: calm p50 {:.1} ms, p99 {:.1}; \
         while a gateway's address changes {} times p50 {:.1}, p99 {:.1}: {:.1} times the calm p99 ({:.2} s of processor \
         time)",
        calm.0,
        calm.1,
        CHANGES.0 / MOVES_EVERY,
        moved.0,
        moved.1,
        moved.1 / calm.1,
        (processor_time(&gateway.child)? - processor).as_secs_f64()
    );
    leave(gateway, crowd)?;
    mesh.move_gateway(1)
}

/// Starts the crowd, and waits until each of them has all of its names.
fn gather(mesh: &Mesh, gateway: &Gateway) -> Result<Vec<Fleet>> {
    let (before, begun) = (memory(&gateway.child, "VmRSS")?, Instant::now());
    let processor = processor_time(&gateway.child)?;
    let (count, processes) = CROWD;
    let each = count / processes;
    let start = |process: usize| {
        let crew =
            Crew { first: process * each, count: each, stuck: 0, names: NAMES, services: mesh.services };
        Fleet::start_with(gateway.xds, &crew)
    };
    let crowd: Vec<Fleet> = (0..processes).map(start).collect::<Result<_>>()?;
    for fleet in &crowd {
        fleet.acknowledged(each)?;
    }
    println!(
        "{count} clients of {NAMES} names each into sync: {:.1} s, {:.2} s of processor time",
        begun.elapsed().as_secs_f64(),
        (processor_time(&gateway.child)? - processor).as_secs_f64()
    );
    // What is only needed for the beginning of a stream is given back meanwhile.
    std::thread::sleep(Duration::from_secs(5));
    let resident = memory(&gateway.child, "VmRSS")?.saturating_sub(before);
    println!("  {:.1} KiB per client, all renderings included", resident as f64 / 1024.0 / count as f64);
    Ok(crowd)
}

/// Median and 99th percentile of the time from a change to its last acknowledgement, in ms, with a new gateway address each
/// so many changes.
fn changes(mesh: &Mesh, probes: &Fleet, moves_every: Option<usize>) -> Result<(f64, f64)> {
    let mut times = Vec::new();
    for change in 0..CHANGES.0 {
        if let Some(every) = moves_every
            && change % every == 0
        {
            mesh.move_gateway(2 + change / every)?;
        }
        let begun = now();
        mesh.change_hot(99 - change % 2, 0)?;
        let acknowledged = probes.acknowledged(PROBES)?;
        times.push((acknowledged.into_iter().fold(begun, f64::max) - begun) * 1e3);
        std::thread::sleep(CHANGES.1);
    }
    mesh.change_hot(100, 0)?;
    probes.acknowledged(PROBES)?;
    Ok((quantile(&mut times, 0.5), quantile(&mut times, 0.99)))
}

/// Ends all of the crowd at once.
fn leave(gateway: &Gateway, crowd: Vec<Fleet>) -> Result<()> {
    let (processor, begun) = (processor_time(&gateway.child)?, Instant::now());
    drop(crowd);
    while gateway.metric("isthmus_xds_clients")? > PROBES as f64 && begun.elapsed() < Duration::from_secs(60)
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    println!(
        "all of the crowd disconnect at once: gone after {:.2} s, {:.2} s of processor time",
        begun.elapsed().as_secs_f64(),
        (processor_time(&gateway.child)? - processor).as_secs_f64()
    );
    Ok(())
}
