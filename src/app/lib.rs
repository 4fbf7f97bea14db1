//! The composition root of `isthmus run`: creates every part, connects the parts, and executes orders from signals, changed
//! files and the admin API. Orders are executed concurrently with all other work.
//!
//! - `program`: the running program: start, events, reloads, end. `parts`: the parts that a config sets, and the steps by which a
//!   config takes effect in them. `fixed`: the values that only a restart changes. `handles`: what all parts share.
//! - `registries`: the aggregator, its registries, and the sources of Kubernetes clusters. `peers`: the links with peers.
//! - `listeners`, `servers`, `xds`, `wds`, `dns`: the sockets of the data plane, of HTTP, xDS, WDS and DNS.
//! - `orders`, `loading`: signals and commands, and the reads of the config file. `log`, `otlp`: the program log, and spans.
//! - `upgrade`: the hand-over to a new process. `beliefs`: what this process has learnt, for a new one and for the state folder.
//! - `upkeep`, `systemd`, `shutdown`, `threads`: periodic work, the service manager, the drain, the check of the thread limit.

mod beliefs;
mod dns;
mod fixed;
mod handles;
mod listeners;
mod loading;
pub mod log;
mod orders;
mod otlp;
mod parts;
mod peers;
mod program;
mod registries;
mod servers;
mod shutdown;
mod systemd;
mod threads;
mod upgrade;
mod upkeep;
mod wds;
mod xds;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tokio::sync::mpsc;

use isthmus_admin::Command;
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
use isthmus_net::budget::forbid_core_files;
use isthmus_net::inherited::Inherited;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::Telemetry;
use loading::{Loaded, Loader};
use orders::Supervisor;
use program::{Inputs, Program};
use systemd::ServiceManager;
use upgrade::giving;
use upgrade::sockets::Sockets;
use upgrade::taking::Taking;

/// The largest number of queued commands of the admin API.
const COMMANDS: usize = 16;
/// The number of threads of the control runtime, which runs admin, aggregator and look-ups.
const CONTROL_THREADS: usize = 2;
/// The largest number of threads beside those of the data plane: control, logs, file reads, builds and parsing, notices.
const THREADS: usize = CONTROL_THREADS + 15;
/// The time that tasks get to finish when the program ends.
const END_WITHIN: Duration = Duration::from_millis(200);
/// The exit code after an internal fault (EX_SOFTWARE of sysexits.h).
const EXIT_INTERNAL: u8 = 70;
/// The largest number of log files whose opening may hang at the same time.
const OPENINGS: usize = 4;

/// Runs the gateway until it is ordered to stop. Takes over from the gateway whose upgrade socket is `take_over`, if given.
pub fn run(path: &Path, take_over: Option<&Path>) -> ExitCode {
    // The path of the program file must be read before the file may be replaced.
    let file = giving::Program::of_this_process();
    // The sockets of the service manager must be taken before anything else opens a descriptor.
    let inherited = match Inherited::take() {
        Ok(inherited) => inherited,
        Err(problem) => {
            log::print_problem(&problem);
            return ExitCode::FAILURE;
        }
    };
    use_small_pages();
    if let Err(problem) = threads::can_be_made(THREADS) {
        log::print_problem(&problem);
        return ExitCode::FAILURE;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("isthmus-control")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            log::print_problem(&format!("cannot start the control threads: {error}"));
            return ExitCode::FAILURE;
        }
    };
    forbid_core_files();
    let result = runtime.block_on(run_until_stopped(path, inherited, take_over, file));
    runtime.shutdown_timeout(END_WITHIN);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed::Start) => ExitCode::FAILURE,
        Err(Failed::Internal) => ExitCode::from(EXIT_INTERNAL),
    }
}

/// An end of the program that nobody requested. Its cause has been reported.
enum Failed {
    /// The start failed.
    Start,
    /// An internal fault ended the program.
    Internal,
}

/// Reports a problem of the start on stderr, since the log is not started yet.
fn start_failed(problem: &str) -> Failed {
    log::print_problem(problem);
    Failed::Start
}

/// Takes the sockets of the gateway to take over from, if there is one, and runs this one. The other gateway learns why this one
/// cannot start.
async fn run_until_stopped(
    path: &Path,
    mut inherited: Inherited,
    take_over: Option<&Path>,
    file: Result<giving::Program, String>,
) -> Result<(), Failed> {
    // Before anything that takes time, because a signal without a handler ends the process.
    let (command, commands) = mpsc::channel(COMMANDS);
    let supervisor = Supervisor::new(commands);
    let mut supervisor =
        supervisor.map_err(|error| start_failed(&format!("cannot receive signals: {error}")))?;
    let sockets = Sockets::default();
    let mut taking = None;
    if let Some(socket) = take_over {
        let connecting = Taking::connect(socket, &sockets, &mut inherited);
        let Ok(connected) = supervisor.during(connecting).await else { return Ok(()) };
        taking = Some(connected.map_err(|problem| start_failed(&problem))?);
    }
    let start = Start { path, inherited, file, sockets, supervisor, command };
    match Box::pin(start_and_serve(start, &mut taking)).await {
        Ok(()) => Ok(()),
        Err(NotServed { problem, failed }) => {
            if let Some(taking) = taking {
                taking.fail(&problem).await;
            }
            Err(failed)
        }
    }
}

/// The inputs of the start.
struct Start<'p> {
    path: &'p Path,
    inherited: Inherited,
    file: Result<giving::Program, String>,
    sockets: Sockets,
    supervisor: Supervisor,
    command: mpsc::Sender<Command>,
}

/// A failure of the program, and its text.
struct NotServed {
    problem: String,
    failed: Failed,
}

/// Reports a problem of the start on stderr, since the log is not started yet.
fn not_served(problem: String) -> NotServed {
    NotServed { failed: start_failed(&problem), problem }
}

/// Reads the config, opens the logs, and runs the gateway. Orders are executed from the first moment.
async fn start_and_serve(start: Start<'_>, taking: &mut Option<Taking>) -> Result<(), NotServed> {
    let Start { path, inherited, file, sockets, mut supervisor, command } = start;
    let loader = Loader::new(path);
    let Ok(Loaded { config, files, .. }) = supervisor.during(loader.first()).await else { return Ok(()) };
    let config = config.map_err(|problems| not_served(problems.join("\n")))?;
    // `files` has the states of the files before the read, so files that change during a long start are read again.
    let watch = FileWatch::since(files.unwrap_or_default()).waiting_for_writers();
    let openings = Readings::new(OPENINGS);
    let opening = supervisor.during(orders::open(&openings, config.access_log.clone())).await;
    let Ok(access_log) = opening else { return Ok(()) };
    let access_log = access_log.map_err(not_served)?;
    let telemetry = Telemetry::start(access_log)
        .map_err(|error| not_served(format!("cannot start the threads of the logs: {error}")))?;
    let scope = Scope::default();
    let manager = ServiceManager::from_environment(&scope);
    manager.notify("STATUS=reading the registries");
    let log = log::start(&config.log, &telemetry.writer);
    let level = config.log.level;
    supervisor.take_logs(log, level, &config.access_log, &telemetry.writer, &openings, &scope);
    let inputs = Inputs {
        path,
        config,
        inherited,
        manager,
        watch,
        telemetry: telemetry.clone(),
        scope,
        openings,
        command,
        file,
        taking: taking.as_mut(),
        sockets,
    };
    let result = match supervisor.during(Box::pin(Program::start(inputs))).await {
        Ok(Ok(program)) => {
            if let Some(taking) = taking.take() {
                program.follow(taking);
            }
            let served = Box::pin(program.serve(supervisor, loader)).await;
            served.map_err(|failed| NotServed { problem: String::new(), failed })
        }
        Ok(Err(problem)) => {
            tracing::error!("{problem}");
            Err(NotServed { problem, failed: Failed::Start })
        }
        Err(why) => {
            tracing::info!(why, "the gateway stops before its start is complete");
            Ok(())
        }
    };
    telemetry.writer.flush();
    result
}

/// Disables huge pages, which cost more here than they save, because snapshots are built and dropped piece by piece. With huge
/// pages, a million endpoints take a sixth more memory, and reading a million routes takes a third more processor time, all of
/// it in the kernel.
fn use_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        log::print_problem(&format!("cannot disable huge pages: {error}"));
    }
}
