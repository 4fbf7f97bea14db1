//! `isthmus demo`: two networks on loopback, each with a gateway (a process of this binary), TLS services and clients, and
//! steps that use them. Every step measures and checks; the demo installs nothing and leaves nothing behind.
//!
//! The module `stage` creates the two networks. `steps` (with `horizon`, `federation`, `kubernetes`, `tunnels`, `refusals` and
//! `changes`) runs the steps, and `report` prints the results; the other modules are the participants:
//! `gateway`, `endpoint`, `client`, `hbone`, `envoy`, `cluster`, with `certificates`, and their `calls`. `step` names the steps.

mod calls;
mod certificates;
mod changes;
mod client;
#[cfg(feature = "kubernetes")]
mod cluster;
mod endpoint;
mod envoy;
mod federation;
mod gateway;
mod hbone;
mod horizon;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod refusals;
mod report;
mod stage;
mod step;
mod steps;
mod tunnels;

use std::io::{self, Write};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use isthmus_console::client::ClientError;
use isthmus_console::failure::Failure;
use isthmus_console::output::Format;
use isthmus_tls::development::DevelopmentError;
use report::{Outcome, Report};
use stage::Stage;
use step::Step;

/// The time that the whole demo may take.
const LIMIT: Duration = Duration::from_secs(150);

#[expect(missing_docs, reason = "a comment would become a help text")]
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keep everything running until Ctrl-C, to try commands yourself
    #[arg(long)]
    keep: bool,
    /// Output format of the measurements
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// The reason why the demo could not be completed. Failed checks are part of the report instead.
#[derive(Debug, thiserror::Error)]
enum DemoError {
    #[error("cannot {what}: {error}")]
    Io { what: String, error: io::Error },
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] DevelopmentError),
    #[error("cannot set up TLS: {0}")]
    Tls(String),
    #[error("{gateway} {what}; the end of its log:\n{log}")]
    Gateway { gateway: &'static str, what: String, log: String },
    #[cfg(feature = "kubernetes")]
    #[error("the {part} of cluster {cluster} {what}; the end of its log:\n{log}")]
    Cluster { cluster: &'static str, part: String, what: String, log: String },
    #[error("Envoy {what}; the end of its log:\n{log}")]
    Envoy { what: String, log: String },
    #[error(transparent)]
    Admin(#[from] ClientError),
    #[error("cannot write the report: {0}")]
    Output(#[source] io::Error),
    #[error("the demo took longer than {} s", LIMIT.as_secs())]
    TimedOut,
    #[error("stopped by {0}; everything was cleaned up")]
    Stopped(&'static str),
}

impl From<DemoError> for Failure {
    fn from(error: DemoError) -> Self {
        match error {
            DemoError::Output(error) => Self::Output(error),
            other => Self::Wrong(other.to_string()),
        }
    }
}

/// Runs the demo; the command fails if a check fails.
pub fn run(args: &Args, out: &mut impl Write) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("isthmus-demo")
        .enable_all()
        .build()
        .map_err(|error| DemoError::Io { what: "start threads".to_owned(), error })?;
    let result = runtime.block_on(async {
        let mut stop = Stop::new()?;
        // The branch that does not finish is dropped together with the stage: processes, sockets and files.
        let played = tokio::select! {
            biased;
            signal = stop.asked() => Err(DemoError::Stopped(signal)),
            result = Box::pin(play(args, out)) => result,
        };
        let (stage, report) = played?;
        if args.keep {
            // Which signal it was does not matter, because the result has been reported.
            stop.asked().await;
        }
        drop(stage);
        Ok::<_, DemoError>(report.all_went_well())
    });
    // Tasks that still wait for a connection are dropped.
    runtime.shutdown_background();
    if result? { Ok(()) } else { Err(Failure::Reported) }
}

/// Runs all steps and prints the report; returns the stage with everything still running.
async fn play(args: &Args, out: &mut impl Write) -> Result<(Stage, Report), DemoError> {
    let mut report = Report::new(args.output);
    let limited = tokio::time::timeout(LIMIT, Box::pin(perform(args, &mut report, out)));
    let stage = limited.await.map_err(|_| DemoError::TimedOut)??;
    report.print(out).map_err(DemoError::Output)?;
    match (args.output, args.keep) {
        (Format::Table, true) => report::hints(&stage, out).map_err(DemoError::Output)?,
        (Format::Table, false) => report::next(out).map_err(DemoError::Output)?,
        (Format::Json | Format::Yaml, _) => {}
    }
    out.flush().map_err(DemoError::Output)?;
    Ok((stage, report))
}

/// Starts the networks of the demo and runs the steps.
async fn perform(args: &Args, report: &mut Report, out: &mut impl Write) -> Result<Stage, DemoError> {
    let mut stage = Stage::set().await?;
    report.introduce(&stage, out).map_err(DemoError::Output)?;
    // With `--keep` the last step is skipped, since it ends a gateway that the operator needs.
    let steps = Step::ALL.into_iter().filter(|step| !(args.keep && *step == Step::Drain));
    for step in steps {
        report.announce(step, out).map_err(DemoError::Output)?;
        // A step that returns an error has failed; later steps may still succeed.
        let outcome = Box::pin(steps::play(step, &mut stage))
            .await
            .unwrap_or_else(|error| Outcome::broken(step, &error));
        report.add(outcome, out).map_err(DemoError::Output)?;
    }
    Ok(stage)
}

/// The signals that end the demo.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Stop {
    fn new() -> Result<Self, DemoError> {
        let listen = |kind| {
            signal(kind).map_err(|error| DemoError::Io { what: "listen to signals".to_owned(), error })
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hang_up: listen(SignalKind::hangup())?,
        })
    }

    async fn asked(&mut self) -> &'static str {
        // The order of the branches does not matter, since all signals have the same effect.
        tokio::select! {
            _ = self.interrupt.recv() => "Ctrl-C",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hang_up.recv() => "SIGHUP",
        }
    }
}
