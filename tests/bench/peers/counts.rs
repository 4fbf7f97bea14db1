//! Counts what a unit of work costs a program, in place of timing it, so that other load of the machine does not change the
//! figures: instructions, allocations and clock readings by callgrind, and system calls by strace.
//!
//! Only the thread that does most of the work is counted. The figure of several rounds is the smallest one, because other load
//! of the machine only adds: ticks of a clock, connections that see a tick, and calls that find little.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use crate::ends::{Ends, ROUND_TRIP_CONNECTIONS};
use crate::subjects::{Routes, Running, Subject};
use crate::table::Measure;
use crate::{Plan, Result, work};

/// The work that is counted. Valgrind runs a program about fifty times slower.
pub(crate) const PLAN: Plan = Plan {
    rounds: 3,
    memory_rounds: 0,
    connections: 1_920,
    handshakes: 480,
    bytes: 256 << 20,
    round_trips: 9_600,
    idle: 0,
    routes: 0,
};
/// The number of clients at the same time. With more of them, a connection lasts so long under a tool that many connections see a
/// tick of the gateway's clock. With one TLS handshake at a time, each message wakes the gateway.
pub(crate) const AT_ONCE: usize = 4;
/// The budget of the figures, by `tests/bench/floor --write`.
const BUDGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bench/floor.txt");
/// The part of a figure by which it may be above its budget.
const TOLERANCE: f64 = 0.03;
/// The functions that allocate, in the names of mimalloc and of libc.
const ALLOCATORS: [&str; 12] = [
    "mi_malloc",
    "mi_malloc_aligned",
    "mi_zalloc",
    "mi_zalloc_aligned",
    "mi_calloc",
    "mi_realloc",
    "mi_realloc_aligned",
    "malloc",
    "calloc",
    "realloc",
    "posix_memalign",
    "aligned_alloc",
];
/// The time limit for a tool to begin or to write its counts.
const TOOL: Duration = Duration::from_secs(60);

/// The figures of a unit of work, in the order of the table's columns.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    instructions: f64,
    allocations: f64,
    clock_readings: f64,
    calls: f64,
}

impl Counts {
    const TITLES: [&str; 4] = ["instructions", "allocations", "clock readings", "system calls"];

    fn values(self) -> [f64; 4] {
        [self.instructions, self.allocations, self.clock_readings, self.calls]
    }
}

/// Returns the reason why nothing can be counted here, if there is one.
pub(crate) fn cannot() -> Option<String> {
    let runs = |tool: &[&str]| {
        let tried =
            Command::new(tool[0]).args(&tool[1..]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    if !runs(&["valgrind", "--version"]) || !runs(&["vgdb", "--help"]) {
        return Some("instructions: valgrind is not installed".to_owned());
    }
    (!runs(&["strace", "-qq", "-o", "/dev/null", "true"]))
        .then(|| "system calls: there is no strace, or it may not trace".to_owned())
}

/// Returns the name of a measure's unit.
fn unit(measure: Measure) -> &'static str {
    match measure {
        Measure::Connections => "short connection",
        Measure::Handshakes => "TLS handshake with a request",
        Measure::RoundTrips => "round trip",
        Measure::Up => "MiB, client to backend",
        _ => "MiB, backend to client",
    }
}

/// Counts the work of each program in each round, and prints a table; checks the budget of the first one if it is an isthmus,
/// and returns true if no figure is above it.
pub(crate) async fn run(
    subjects: &[Subject],
    measures: &[Measure],
    (plan, ends): (&Plan, &Ends),
    write: bool,
) -> Result<bool> {
    println!("\n| | {} |\n|---|---:|---:|---:|---:|", Counts::TITLES.join(" | "));
    let (mut details, mut found) = (String::new(), BTreeMap::new());
    for (column, subject) in subjects.iter().enumerate() {
        let mut all: Vec<Vec<Counts>> = vec![Vec::new(); measures.len()];
        for _ in 0..plan.rounds {
            let counted = instructions(subject, measures, (plan, ends)).await?;
            let called = calls(subject, measures, (plan, ends)).await?;
            for ((all, mut counts), (calls, names)) in all.iter_mut().zip(counted).zip(called) {
                counts.calls = calls;
                all.push(counts);
                writeln!(details, "{}: {names}", subject.name)?;
            }
        }
        for (measure, all) in measures.iter().zip(all) {
            let cell = |index: usize| {
                let mut values: Vec<_> = all.iter().map(|counts| counts.values()[index]).collect();
                values.sort_by(f64::total_cmp);
                let (low, high) = (values[0], values[values.len() - 1]);
                let digits = if index == 0 { 0 } else { 2 };
                let text = match values.len() {
                    1 => format!("{low:.digits$}"),
                    _ => format!("{low:.digits$}–{high:.digits$}"),
                };
                (low, text)
            };
            let cells: [_; 4] = std::array::from_fn(cell);
            let texts: Vec<_> = cells.iter().map(|(_, text)| text.as_str()).collect();
            println!("| {}, {} | {} |", subject.name, unit(*measure), texts.join(" | "));
            // The cost of a MiB depends on how much has arrived at each turn, so it has no budget.
            if column == 0 && !matches!(measure, Measure::Up | Measure::Down) {
                found.insert(measure.name(), cells.map(|(value, _)| value));
            }
        }
    }
    println!("\n{details}");
    if write && subjects[0].is_isthmus() {
        return write_budget(&found).map(|()| true);
    }
    if !subjects[0].is_isthmus() {
        return Ok(true);
    }
    let budget = fs::read_to_string(BUDGET).map_err(|error| format!("{BUDGET}: {error}"))?;
    let above = above_budget(&budget, &found)?;
    above.iter().for_each(|text| println!("FAILED: {text}"));
    Ok(above.is_empty())
}

fn write_budget(found: &BTreeMap<&str, [f64; 4]>) -> Result<()> {
    let mut text = format!(
        "# The cost of a unit of work in the release build (tests/bench/README.md), written by tests/bench/floor --write.\n\
         # {}\n",
        Counts::TITLES.map(|title| title.replace(' ', "-")).join(" ")
    );
    for (name, [instructions, rest @ ..]) in found {
        let rest = rest.map(|value| format!("{value:.2}")).join(" ");
        writeln!(text, "{name} {instructions:.0} {rest}")?;
    }
    Ok(fs::write(BUDGET, text)?)
}

/// Returns a text for each figure that is above its budget.
fn above_budget(budget: &str, found: &BTreeMap<&str, [f64; 4]>) -> Result<Vec<String>> {
    let mut above = Vec::new();
    for line in budget.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default();
        let Some(values) = found.get(name) else { continue };
        for ((title, value), most) in Counts::TITLES.iter().zip(values).zip(words) {
            let most: f64 = most.parse()?;
            // A figure of a few calls is not exact to three percent of itself.
            if *value > most * (1.0 + TOLERANCE) + if *title == "instructions" { 0.0 } else { 0.05 } {
                let percent = (value / most - 1.0) * 100.0;
                above.push(format!("{name}: {value:.2} {title}, {percent:.1} % above the budget of {most}"));
            }
        }
    }
    Ok(above)
}

/// Does each kind of work once, and calls `begin` and `end` around it.
async fn each<T>(
    running: &Running,
    measures: &[Measure],
    (plan, ends): (&Plan, &Ends),
    mut begin: impl FnMut() -> Result<T>,
    mut end: impl FnMut(Measure, f64, T) -> Result<()>,
) -> Result<()> {
    let to = &running.addresses;
    for measure in measures {
        let mut streams = match measure {
            Measure::RoundTrips => ends.open_many(to, ROUND_TRIP_CONNECTIONS).await?,
            _ => Vec::new(),
        };
        // The first connections make what later ones use again, for each of the names.
        let warm = Plan { connections: 832, handshakes: 32, bytes: 16 << 20, round_trips: 640, ..*plan };
        work(*measure, &warm, ends, to, &mut streams).await?;
        quiet(running).await?;
        let begun = begin()?;
        let units = work(*measure, plan, ends, to, &mut streams).await?;
        // The cost of closing counts as well.
        quiet(running).await?;
        let units = if matches!(measure, Measure::Up | Measure::Down) { units * 1024.0 } else { units };
        end(*measure, units, begun)?;
    }
    Ok(())
}

/// Waits until the program has used less than 2 ms of a processor in 100 ms.
async fn quiet(running: &Running) -> Result<()> {
    let begun = Instant::now();
    loop {
        let before = running.processor_time()?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The time of a thread that has ended is missing.
        let spent = running.processor_time()?.saturating_sub(before);
        if spent < Duration::from_millis(2) || begun.elapsed() > TOOL {
            return Ok(());
        }
    }
}

/// Returns what callgrind counts of each kind of work.
async fn instructions(
    subject: &Subject,
    measures: &[Measure],
    (plan, ends): (&Plan, &Ends),
) -> Result<Vec<Counts>> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("out");
    let wrapper = [
        "valgrind".to_owned(),
        "-q".to_owned(),
        "--tool=callgrind".to_owned(),
        "--instr-atstart=no".to_owned(),
        "--separate-threads=yes".to_owned(),
        "--compress-strings=no".to_owned(),
        "--compress-pos=no".to_owned(),
        format!("--callgrind-out-file={}", out.display()),
    ];
    let mut running = subject.start_under(&wrapper, Routes::Few, ends)?;
    running.ready(ends, &crate::ends::name(0)).await?;
    let process = running.worker_process();
    control(process, "instrumentation on")?;
    let mut all = Vec::new();
    let (mut kept, keep) = (0, env::var_os("ISTHMUS_BENCH_KEEP"));
    each(
        &running,
        measures,
        (plan, ends),
        || control(process, "zero"),
        |measure, units, ()| {
            control(process, "dump")?;
            let (text, mut counts) = busiest(folder.path(), kept)?;
            kept += 1;
            if let Some(keep) = &keep {
                fs::write(Path::new(keep).join(format!("{}.{}", subject.name, measure.name())), text)?;
            }
            counts.instructions /= units;
            counts.allocations /= units;
            counts.clock_readings /= units;
            all.push(counts);
            Ok(())
        },
    )
    .await?;
    Ok(all)
}

/// Gives callgrind a command.
fn control(process: u32, command: &str) -> Result<()> {
    let mut words = vec![format!("--pid={process}")];
    words.extend(command.split(' ').map(str::to_owned));
    let done = Command::new("vgdb").args(&words).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    if done.status.success() { Ok(()) } else { Err(format!("vgdb {command}: {said}").into()) }
}

/// Returns the file and the counts of the thread that executed most, from the files of callgrind's dump of this index.
fn busiest(folder: &Path, dump: usize) -> Result<(String, Counts)> {
    let part = format!(".{}", dump + 1);
    let mut found: Option<(String, Counts)> = None;
    for file in fs::read_dir(folder)? {
        let file = file?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some((_, rest)) = name.split_once(&part).filter(|(before, _)| *before == "out") else { continue };
        if !rest.starts_with('-') {
            continue;
        }
        let text = fs::read_to_string(&file)?;
        let counts = counted(&text);
        if found.as_ref().is_none_or(|(_, other)| other.instructions < counts.instructions) {
            found = Some((text, counts));
        }
    }
    found.ok_or_else(|| "callgrind has written no counts".into())
}

/// Returns the counts of a file of callgrind.
fn counted(text: &str) -> Counts {
    let mut counts = Counts::default();
    let (mut caller, mut callee) = ("", "");
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            caller = name;
        } else if let Some(name) = line.strip_prefix("cfn=") {
            callee = name.split('@').next().unwrap_or(name);
        } else if let Some(calls) = line.strip_prefix("calls=") {
            let calls: f64 = calls.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0.0);
            // An allocator's function may call another one, and the dynamic linker may be between them.
            let is_inner = |name: &str| ALLOCATORS.contains(&name.split('@').next().unwrap_or(name));
            if ALLOCATORS.contains(&callee) && !is_inner(caller) {
                counts.allocations += calls;
            } else if callee == "clock_gettime" && caller != "clock_gettime" {
                counts.clock_readings += calls;
            }
        } else if let Some(total) = line.strip_prefix("totals: ") {
            counts.instructions = total.trim().parse().unwrap_or(0.0);
        }
    }
    counts
}

/// Returns the number of system calls of each kind of work, and a text with their names.
async fn calls(
    subject: &Subject,
    measures: &[Measure],
    (plan, ends): (&Plan, &Ends),
) -> Result<Vec<(f64, String)>> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("out");
    let mut running = subject.start(Routes::Few, ends)?;
    running.ready(ends, &crate::ends::name(0)).await?;
    ends.connections(&running.addresses, 640).await?;
    let thread = running.busiest_thread()?;
    let mut all = Vec::new();
    each(
        &running,
        measures,
        (plan, ends),
        || trace(thread, &out),
        |measure, units, mut strace: Child| {
            let process = i32::try_from(strace.id()).ok().and_then(rustix::process::Pid::from_raw);
            rustix::process::kill_process(process.ok_or("no process")?, rustix::process::Signal::INT)?;
            strace.wait()?;
            let (mut sum, mut names) = (0.0, String::new());
            for line in fs::read_to_string(&out)?.lines() {
                let words: Vec<_> = line.split_whitespace().collect();
                // The columns are: part of the time, seconds, microseconds of each call, calls, errors if any, name.
                let (Some(name), Some(Ok(calls))) =
                    (words.last(), words.get(3).map(|word| word.parse::<f64>()))
                else {
                    continue;
                };
                if *name != "total" {
                    sum += calls / units;
                    write!(names, "{name} {:.2}, ", calls / units)?;
                }
            }
            all.push((
                sum,
                format!("{sum:.2} system calls per {}: {}", unit(measure), names.trim_end_matches(", ")),
            ));
            Ok(())
        },
    )
    .await?;
    Ok(all)
}

/// Lets strace count the system calls of a thread, and returns once it does.
fn trace(thread: u32, out: &Path) -> Result<Child> {
    let strace = Command::new("strace")
        .args(["-c", "-qq", "-o"])
        .arg(out)
        .args(["-p", &thread.to_string()])
        .stderr(Stdio::null())
        .spawn()?;
    let begun = Instant::now();
    while begun.elapsed() < TOOL {
        let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
        if status.lines().any(|line| {
            line.strip_prefix("TracerPid:").is_some_and(|by| by.trim() == strace.id().to_string())
        }) {
            return Ok(strace);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err("strace does not begin".into())
}
