//! Measures very many clients with many names each: the cost of one client, the cost when all leave at once, and whether a
//! gateway's new address delays the changes of services. If a process may have 20,000 descriptors, a quarter of them is for
//! xDS: at most 5,000 clients, including the probes.

use std::time::{Duration, Instant};

use super::process::{memory, processor_time};
use super::{Crew, Fleet, Gateway, Mesh, Result, now, quantile};

/// The number of clients, and of processes that run them.
const CROWD: (usize, usize) = (4_900, 4);
/// The number of names per client.
const NAMES: usize = 200;
/// The number of clients that subscribe to the changing service alone, and of those that also have as many names as the crowd.
const PROBES: usize = 20;
/// The number of changes of that service, and the time between two of them.
const CHANGES: (usize, Duration) = (300, Duration::from_millis(100));
/// The number of changes between two new addresses of a gateway.
const MOVES_EVERY: usize = 30;

pub(super) fn measure(mesh: &Mesh, gateway: &Gateway) -> Result<()> {
    let crew =
        |first, names| Crew { first, count: PROBES, stuck: 0, names, services: mesh.services, hot: true };
    let probes = [crew(100_000, 0), crew(200_000, NAMES)];
    let probes = [Fleet::start_with(gateway.xds, &probes[0])?, Fleet::start_with(gateway.xds, &probes[1])?];
    for fleet in &probes {
        fleet.acknowledged(PROBES)?;
    }
    let crowd = gather(mesh, gateway)?;
    let calm = changes(mesh, &probes, None)?;
    let processor = processor_time(&gateway.child)?;
    let moved = changes(mesh, &probes, Some(MOVES_EVERY))?;
    println!(
        "one endpoint of a service, file renamed → last acknowledgement of {PROBES} clients, while a gateway's address \
         changes {} times ({:.2} s of processor time):",
        CHANGES.0 / MOVES_EVERY,
        (processor_time(&gateway.child)? - processor).as_secs_f64()
    );
    for (who, calm, moved) in [("it alone", &calm[0], &moved[0]), ("others too", &calm[1], &moved[1])] {
        println!(
            "  clients that have {who}: calm p50 {:.1} ms, p99 {:.1}; then p50 {:.1}, p99 {:.1}: {:.1} times the calm p99",
            calm.0,
            calm.1,
            moved.0,
            moved.1,
            moved.1 / calm.1
        );
    }
    spread(mesh, gateway)?;
    leave(gateway, crowd)?;
    mesh.move_gateway(1)
}

/// Measures how long the new address of a gateway takes to all clients.
fn spread(mesh: &Mesh, gateway: &Gateway) -> Result<()> {
    let (processor, begun) = (processor_time(&gateway.child)?, Instant::now());
    let pushes = || gateway.metric("isthmus_xds_pushes_total{type=\"eds\"}");
    let before = pushes()?;
    mesh.move_gateway(100)?;
    let (mut sent, mut last) = (before, begun);
    while last.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(20));
        let now = pushes()?;
        if now > sent {
            (sent, last) = (now, Instant::now());
        }
    }
    println!(
        "another gateway address to all clients: {:.0} responses, the last after {:.2} s, {:.2} s of processor time",
        sent - before,
        (last - begun).as_secs_f64(),
        (processor_time(&gateway.child)? - processor).as_secs_f64()
    );
    Ok(())
}

/// Starts the crowd, and waits until each client has all of its names.
fn gather(mesh: &Mesh, gateway: &Gateway) -> Result<Vec<Fleet>> {
    let (before, begun) = (memory(&gateway.child, "VmRSS")?, Instant::now());
    let processor = processor_time(&gateway.child)?;
    let (count, processes) = CROWD;
    let each = count / processes;
    let start = |process: usize| {
        let crew = Crew {
            first: process * each,
            count: each,
            stuck: 0,
            names: NAMES,
            services: mesh.services,
            hot: false,
        };
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
    // Meanwhile the gateway frees the memory that only the beginning of a stream needs.
    std::thread::sleep(Duration::from_secs(5));
    let resident = memory(&gateway.child, "VmRSS")?.saturating_sub(before);
    println!("  {:.1} KiB per client, all renderings included", resident as f64 / 1024.0 / count as f64);
    Ok(crowd)
}

/// Returns the median and the 99th percentile of the time from a change to the last acknowledgement of each fleet, in ms. With
/// `moves_every`, a gateway gets a new address once per that number of changes.
fn changes(mesh: &Mesh, probes: &[Fleet; 2], moves_every: Option<usize>) -> Result<[(f64, f64); 2]> {
    let mut times = [Vec::new(), Vec::new()];
    for change in 0..CHANGES.0 {
        if let Some(every) = moves_every
            && change % every == 0
        {
            mesh.move_gateway(2 + change / every)?;
        }
        let begun = now();
        mesh.change_hot(99 - change % 2, 0)?;
        for (fleet, times) in probes.iter().zip(&mut times) {
            let acknowledged = fleet.acknowledged(PROBES)?;
            times.push((acknowledged.into_iter().fold(begun, f64::max) - begun) * 1e3);
        }
        std::thread::sleep(CHANGES.1);
    }
    mesh.change_hot(100, 0)?;
    for fleet in probes {
        fleet.acknowledged(PROBES)?;
    }
    Ok(times.map(|mut times| (quantile(&mut times, 0.5), quantile(&mut times, 0.99))))
}

/// Ends all clients of the crowd at once, and measures the cost.
fn leave(gateway: &Gateway, crowd: Vec<Fleet>) -> Result<()> {
    let (processor, begun) = (processor_time(&gateway.child)?, Instant::now());
    drop(crowd);
    while gateway.metric("isthmus_xds_clients")? > (2 * PROBES) as f64
        && begun.elapsed() < Duration::from_secs(60)
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
