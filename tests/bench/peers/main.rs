//! The SNI path of Isthmus beside other proxies and beside two floors: `tests/bench/run` (`--short` for a run of less than
//! three minutes).
//!
//! Every program runs one worker on the first processor. Clients and backends are one thread on the second one: on loopback,
//! a program that sends bytes to a sleeping thread pays for waking it, and two threads would sleep more often. The measurements
//! alternate between the programs, in another order each round, so that other load of the machine affects all of them. A
//! figure is a median of the rounds; a ratio is the median of the ratios within the rounds. As some seconds lie between two
//! programs of a round, the goals are judged by further pairs of measurements: Isthmus and one other program, right after each
//! other. Costs are processor time of the program's threads as the scheduler counts it. Memory is measured in programs that have
//! done nothing else. The run fails if a connection fails or brings wrong bytes; it judges no figure.
//!
//! The run has its own network namespace, so that all ports are free and no other program is disturbed.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it prints what it measures")]

#[path = "../installed.rs"]
mod installed;
#[path = "../median.rs"]
mod median;
#[path = "../processor.rs"]
mod processor;

mod counts;
mod ends;
mod floors;
mod subjects;
mod table;

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use ends::{Addresses, Ends, ROUND_TRIP_CONNECTIONS};
use processor::{ENDS, pin};
use subjects::{Routes, Running, Subject};
use table::{Figures, GOALS, Measure};
use tokio::net::TcpStream;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The environment variable that says as which floor a process runs. It is not set in the measuring process.
const ROLE: &str = "ISTHMUS_BENCH_ROLE";
/// The environment variable that is set inside the network namespace.
const INSIDE: &str = "ISTHMUS_BENCH_NAMESPACE";
/// The name of the isthmus that is measured; other builds have other names.
const ISTHMUS: &str = "Isthmus";
/// The time limit of a single measurement.
const MEASURED: Duration = Duration::from_secs(120);

/// The number of pairs of measurements for each goal in proportion to the rounds.
const PAIRS_PER_ROUND: usize = 4;

/// The amount of each kind of work.
#[derive(Clone, Copy)]
struct Plan {
    rounds: usize,
    memory_rounds: usize,
    connections: usize,
    handshakes: usize,
    bytes: u64,
    round_trips: usize,
    idle: usize,
    routes: usize,
}

const WHOLE: Plan = Plan {
    rounds: 15,
    memory_rounds: 3,
    connections: 8_000,
    handshakes: 800,
    bytes: 1 << 30,
    round_trips: 60_000,
    idle: 4_000,
    routes: 100_000,
};

const SHORT: Plan = Plan {
    rounds: 3,
    memory_rounds: 1,
    connections: 4_000,
    handshakes: 320,
    bytes: 512 << 20,
    round_trips: 20_000,
    idle: 2_000,
    routes: 100_000,
};

const USAGE: &str = "usage: tests/bench/run [--short] [--rounds N] [--write] [--isthmus PATH] [--beside NAME=PATH]… [--only NAME,…] [--measure NAME,…] [--count]
  --short        a run below three minutes, with fewer rounds
  --rounds N     rounds of the costs; for each, there are four pairs for each goal
  --write        writes the tables into docs/performance.md
  --isthmus PATH the isthmus that is measured, in place of the one that cargo has built
  --beside NAME=PATH
                 another isthmus, which is measured in the same run
  --only NAME,…  only these of the programs
  --measure NAME,…
                 only these of connections, handshakes, round-trips, up, down, memory
  --count        counts instructions, allocations, clock readings and system calls in place of time, of Isthmus unless --only
                 names others, and fails if they are above their budget; with --write, writes the budget";

struct Options {
    plan: Plan,
    short: bool,
    write: bool,
    count: bool,
    only: Option<Vec<String>>,
    measures: Option<Vec<String>>,
    isthmus: Vec<Subject>,
}

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let mut options = Options {
        plan: WHOLE,
        short: false,
        write: false,
        count: false,
        only: None,
        measures: None,
        isthmus: Vec::new(),
    };
    let mut own = PathBuf::from(env!("CARGO_BIN_EXE_isthmus"));
    let (mut beside, mut rounds) = (Vec::new(), None);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value\n{USAGE}"));
        match argument.as_str() {
            "--help" | "-h" => return Err(USAGE.into()),
            "--short" => (options.plan, options.short) = (SHORT, true),
            "--rounds" => rounds = Some(value()?.parse::<usize>()?.max(1)),
            "--write" => options.write = true,
            "--count" => (options.plan, options.count) = (counts::PLAN, true),
            "--isthmus" => own = value()?.into(),
            "--only" => {
                options.only = Some(value()?.split(',').map(|name| name.trim().to_lowercase()).collect())
            }
            "--measure" => options.measures = Some(value()?.split(',').map(str::to_owned).collect()),
            "--beside" => {
                let value = value()?;
                let (name, path) =
                    value.split_once('=').ok_or_else(|| format!("--beside NAME=PATH\n{USAGE}"))?;
                beside.push(Subject::isthmus(name, &std::path::absolute(path)?));
            }
            // `cargo bench` passes this argument to every benchmark.
            "--bench" => {}
            _ => return Err(format!("{argument} is not known\n{USAGE}").into()),
        }
    }
    options.plan.rounds = rounds.unwrap_or(options.plan.rounds);
    options.isthmus.push(Subject::isthmus(ISTHMUS, &std::path::absolute(own)?));
    options.isthmus.extend(beside);
    if options.count && options.only.is_none() {
        options.only = Some(options.isthmus.iter().map(|subject| subject.name.to_lowercase()).collect());
    }
    Ok(options)
}

fn main() -> ExitCode {
    let done = match env::var(ROLE) {
        Ok(role) => floor(&role).map(|()| true),
        Err(_) if env::var_os(INSIDE).is_none() => in_namespace(),
        Err(_) => measure(),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn floor(role: &str) -> Result<()> {
    let addresses =
        env::args().skip(1).map(|text| text.parse()).collect::<std::result::Result<Vec<SocketAddr>, _>>()?;
    let pairs: Vec<_> = addresses.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    match role {
        "epoll" => floors::on_epoll(&pairs),
        "tokio" => floors::on_tokio(&pairs),
        _ => Err(format!("there is no floor {role}").into()),
    }
}

/// Runs this program again in a new network namespace; returns true if it succeeded.
fn in_namespace() -> Result<bool> {
    // Reports wrong arguments before the namespace is made.
    options(env::args().skip(1))?;
    // Tries without a user namespace first. Inside a user namespace, files seem to belong to another user, which disturbs
    // `cargo`.
    let kinds: [&[&str]; 2] = [&["--net"], &["--net", "--user", "--map-root-user"]];
    let can = |kind: &&&[&str]| {
        let made = Command::new("unshare").args(**kind).args(["ip", "link", "set", "lo", "up"]).output();
        made.is_ok_and(|made| made.status.success())
    };
    let kind = kinds
        .iter()
        .find(can)
        .ok_or("no network namespace can be made here (unshare --net, ip): run as root")?;
    let settings = "ip link set lo up; cd /proc/sys/net/ipv4 && echo 1 >tcp_tw_reuse && echo 10240 65535 >ip_local_port_range; \
                    cd \"$OLDPWD\" && exec \"$0\" \"$@\"";
    let run = Command::new("unshare")
        .args(*kind)
        .args(["sh", "-c", settings])
        .arg(env::current_exe()?)
        .args(env::args().skip(1))
        .env(INSIDE, "1")
        .status()?;
    Ok(run.success())
}

/// Runs all measurements; returns true if no work has failed.
fn measure() -> Result<bool> {
    let begun = Instant::now();
    let options = options(env::args().skip(1))?;
    raise_descriptors()?;
    let (others, mut skipped) = Subject::others()?;
    let mut subjects = options.isthmus;
    subjects.extend(others);
    if let Some(only) = &options.only {
        subjects.retain(|subject| only.contains(&subject.name.to_lowercase()));
        skipped.retain(|why| only.iter().any(|name| why.to_lowercase().starts_with(&format!("{name}:"))));
    }
    if subjects.is_empty() {
        return Err(format!("--only names no program that is here\n{USAGE}").into());
    }
    for subject in &subjects {
        println!("{}: {}", subject.name, subject.version());
    }
    pin(ENDS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let at_once = if options.count { counts::AT_ONCE } else { ends::AT_ONCE };
    let ends = Ends::start(&runtime, at_once)?;
    let measures = options.measures;
    let is_wanted =
        |name: &str| measures.as_ref().is_none_or(|names| names.iter().any(|wanted| wanted == name));
    let costs: Vec<_> = Measure::COSTS.into_iter().filter(|measure| is_wanted(measure.name())).collect();
    if options.count {
        if let Some(why) = counts::cannot() {
            println!("SKIPPED: {why}");
            return Ok(true);
        }
        return runtime.block_on(counts::run(&subjects, &costs, (&options.plan, &ends), options.write));
    }
    let mut run = Run { plan: options.plan, costs, figures: Figures::default(), failures: Vec::new() };
    let stolen = table::Stolen::begin()?;
    runtime.block_on(async {
        run.measure_costs(&subjects, &ends).await;
        if is_wanted("memory") {
            run.memory(&subjects, &ends).await;
        }
    });
    let mut about = table::About::of_this_machine(&subjects)?;
    about.note(&format!(
        "{} rounds of the costs, {} of the memory; {:.0} s; {}",
        run.plan.rounds,
        run.plan.memory_rounds,
        begun.elapsed().as_secs_f64(),
        stolen.end()?
    ));
    about.command(options.short, run.plan.rounds != if options.short { SHORT.rounds } else { WHOLE.rounds });
    let text = run.figures.markdown(&subjects, &about, run.plan.routes, &skipped);
    println!("\n{text}{}", run.figures.goals());
    for why in &skipped {
        println!("SKIPPED: {why}");
    }
    for why in &run.failures {
        println!("FAILED: {why}");
    }
    println!("{} measured, {} failed, {} skipped", subjects.len(), run.failures.len(), skipped.len());
    if options.write && run.failures.is_empty() && measures.is_none() {
        table::write(&text)?;
    }
    Ok(run.failures.is_empty())
}

/// Raises the limit of descriptors as far as allowed; the programs inherit it.
fn raise_descriptors() -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}

/// Does work through a proxy, and returns its number of units; the unit of bulk is a GiB. Round trips use the open connections
/// `streams`.
async fn work(
    measure: Measure,
    plan: &Plan,
    ends: &Ends,
    to: &Addresses,
    streams: &mut [TcpStream],
) -> Result<f64> {
    match measure {
        Measure::Connections => ends.connections(to, plan.connections).await,
        Measure::Handshakes => ends.handshakes(to, plan.handshakes).await,
        Measure::Up => ends.up(to, plan.bytes).await,
        Measure::Down => ends.down(to, plan.bytes).await,
        _ => ends.round_trips(streams, plan.round_trips).await,
    }
}

struct Run {
    plan: Plan,
    /// The costs to measure.
    costs: Vec<Measure>,
    figures: Figures,
    failures: Vec<String>,
}

impl Run {
    /// Measures the processor time of work, in programs that run all the time.
    async fn measure_costs(&mut self, subjects: &[Subject], ends: &Ends) {
        let mut running = Vec::new();
        for (column, subject) in subjects.iter().enumerate() {
            let started = async {
                let mut running = subject.start(Routes::Few, ends)?;
                running.ready(ends, &ends::name(0)).await?;
                Ok::<_, Box<dyn Error + Send + Sync>>(running)
            };
            match started.await {
                Ok(started) => running.push((column, started)),
                Err(error) => self.failures.push(format!("{}: {error}", subject.name)),
            }
        }
        // Round 0 warms up, and does not count.
        for round in 0..=self.plan.rounds {
            eprintln!("round {round} of {}", self.plan.rounds);
            for measure in self.costs.clone() {
                let count = running.len().max(1);
                for place in 0..running.len() {
                    let (column, running) = &running[(place + round) % count];
                    let cost = self.cost(measure, &subjects[*column].name, running, ends).await;
                    if let Some(cost) = cost.filter(|_| round > 0) {
                        self.figures.add(measure, *column, cost);
                    }
                }
            }
        }
        for goal in GOALS.iter().filter(|goal| self.costs.contains(&goal.measure)).collect::<Vec<_>>() {
            let named = |name: &str| running.iter().find(|(column, _)| subjects[*column].name == name);
            let (Some(ours), Some(other)) = (named(ISTHMUS), named(goal.other)) else { continue };
            eprintln!("pairs with {}: {}", goal.other, goal.measure.name());
            for pair in 0..self.plan.rounds * PAIRS_PER_ROUND {
                let mut costs = [None; 2];
                for place in [pair % 2, 1 - pair % 2] {
                    let (column, running) = [ours, other][place];
                    costs[place] = self.cost(goal.measure, &subjects[*column].name, running, ends).await;
                }
                if let [Some(ours), Some(other)] = costs {
                    self.figures.add_pair(goal.measure, ours / other);
                }
            }
        }
    }

    /// Measures a cost; records the failure if that fails.
    async fn cost(&mut self, measure: Measure, name: &str, running: &Running, ends: &Ends) -> Option<f64> {
        let work = tokio::time::timeout(MEASURED, self.try_cost(measure, running, ends)).await;
        let cost = work.unwrap_or_else(|_| Err("it takes too long".into()));
        cost.inspect_err(|error| self.fail(name, measure, &**error)).ok()
    }

    fn fail(&mut self, name: &str, measure: Measure, error: &dyn Error) {
        let text = format!("{name}: {}: {error}", measure.title());
        eprintln!("FAILED: {text}");
        self.failures.push(text);
    }

    /// Returns the processor time in microseconds per unit of work; the unit of bulk is a GiB.
    async fn try_cost(&self, measure: Measure, running: &Running, ends: &Ends) -> Result<f64> {
        let to = &running.addresses;
        let mut streams = match measure {
            Measure::RoundTrips => ends.open_many(to, ROUND_TRIP_CONNECTIONS).await?,
            _ => Vec::new(),
        };
        let before = running.processor_time()?;
        let units = work(measure, &self.plan, ends, to, &mut streams).await?;
        // Waits for the connections to close, because the cost of closing counts as well.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let spent = running.processor_time()? - before;
        Ok(spent.as_secs_f64() / units * 1e6)
    }

    /// Measures memory and starts, each in a program that has done nothing else.
    async fn memory(&mut self, subjects: &[Subject], ends: &Ends) {
        for round in 0..self.plan.memory_rounds {
            eprintln!("memory, round {} of {}", round + 1, self.plan.memory_rounds);
            for (column, subject) in subjects.iter().enumerate() {
                for measure in [Measure::Idle, Measure::Partial, Measure::Routes] {
                    if measure != Measure::Idle && !subject.reads_hello() {
                        continue;
                    }
                    let work = async {
                        match measure {
                            Measure::Routes => self.routes(subject, ends).await,
                            _ => Ok(vec![(measure, self.open(measure, subject, ends).await?)]),
                        }
                    };
                    match tokio::time::timeout(MEASURED, work)
                        .await
                        .unwrap_or_else(|_| Err("it takes too long".into()))
                    {
                        Ok(found) => {
                            found
                                .into_iter()
                                .for_each(|(measure, value)| self.figures.add(measure, column, value));
                        }
                        Err(error) => self.fail(&subject.name, measure, &*error),
                    }
                }
            }
        }
    }

    /// Returns the memory per open connection in bytes. `measure` selects idle connections or connections with an incomplete
    /// hello.
    async fn open(&self, measure: Measure, subject: &Subject, ends: &Ends) -> Result<f64> {
        let mut running = subject.start(Routes::Few, ends)?;
        running.ready(ends, &ends::name(0)).await?;
        let open = async |count| match measure {
            Measure::Idle => ends.open_many(&running.addresses, count).await,
            _ => ends.open_partly(&running.addresses, count).await,
        };
        let settle = || tokio::time::sleep(Duration::from_millis(300));
        let few = open(64).await?;
        settle().await;
        let before = running.memory()?;
        let mut many = open(self.plan.idle).await?;
        settle().await;
        let grown = running.memory()? - before;
        // A proxy that had closed some of the connections would seem to need less memory.
        for stream in &mut many {
            let mut byte = [0];
            match stream.try_read(&mut byte) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => return Err("a connection was closed before its time".into()),
            }
        }
        drop(few);
        Ok(grown / self.plan.idle as f64)
    }

    /// Measures the memory per route, and the processor and wall time until the last of many routes is served.
    async fn routes(&self, subject: &Subject, ends: &Ends) -> Result<Vec<(Measure, f64)>> {
        let count = self.plan.routes.min(subject.routes_max());
        let (mut few, mut many) = (subject.start(Routes::Many(ends::NAMES), ends)?, None::<Running>);
        few.ready(ends, &ends::name(ends::NAMES - 1)).await?;
        let many = many.insert(subject.start(Routes::Many(count), ends)?);
        let took = many.ready(ends, &ends::name(count - 1)).await?;
        let grown = many.memory()? - few.memory()?;
        let processor = many.processor_time()?.as_secs_f64();
        Ok(vec![
            (Measure::Routes, grown / (count - ends::NAMES) as f64),
            (Measure::StartProcessor, processor),
            (Measure::StartWall, took.as_secs_f64()),
        ])
    }
}
