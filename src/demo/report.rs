//! The measurements, reported after each step and then as a table, or all together as JSON or YAML.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::{Value, json};

use super::DemoError;
use super::client::{CallError, CallResult};
use super::stage::{CHECKOUT, Network, Stage, VAULT};
use super::step::Step;
use isthmus_console::output::{Format, structured, table};

/// The measurements and failed checks of one step.
pub(super) struct Outcome {
    step: Step,
    pub(super) calls: u64,
    pub(super) ok: u64,
    pub(super) refused: u64,
    times: Vec<Duration>,
    pub(super) bytes: u64,
    /// The events of the step, one sentence each.
    notes: Vec<String>,
    /// Evidence that does not come from the callers: counters, log lines, alerts.
    proofs: Vec<String>,
    failures: Vec<String>,
    left_out: LeftOut,
}

/// The extent to which a step was left out, because a program or an address that it needs is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeftOut {
    Nothing,
    Part,
    All,
}

impl Outcome {
    pub(super) fn new(step: Step) -> Self {
        Self {
            step,
            calls: 0,
            ok: 0,
            refused: 0,
            times: Vec::new(),
            bytes: 0,
            notes: Vec::new(),
            proofs: Vec::new(),
            failures: Vec::new(),
            left_out: LeftOut::Nothing,
        }
    }

    /// Returns the outcome of a step that could not be completed.
    pub(super) fn broken(step: Step, error: &DemoError) -> Self {
        let mut outcome = Self::new(step);
        outcome.failures.push(error.to_string());
        outcome
    }

    /// Counts an answered call.
    pub(super) fn answered(&mut self, answer: &CallResult) {
        self.answered_in(answer.took, answer.bytes);
    }

    /// Counts an answered call whose certificates are not checked.
    pub(super) fn answered_in(&mut self, took: Duration, bytes: u64) {
        self.calls += 1;
        self.ok += 1;
        self.bytes += bytes;
        self.times.push(took);
    }

    /// Counts a call that was refused as expected.
    pub(super) fn refused(&mut self) {
        self.calls += 1;
        self.refused += 1;
    }

    /// Counts a call that failed although it should have been answered.
    pub(super) fn lost(&mut self, error: &CallError) {
        self.calls += 1;
        self.failures.push(format!("a call failed: {error}"));
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    pub(super) fn proof(&mut self, text: impl Into<String>) {
        self.proofs.push(text.into());
    }

    /// Notes why the whole step is left out.
    pub(super) fn left_out(&mut self, why: impl Into<String>) {
        self.left_out = LeftOut::All;
        self.notes.push(why.into());
    }

    /// Notes why a part of the step is left out.
    pub(super) fn partly_left_out(&mut self, why: impl Into<String>) {
        self.left_out = LeftOut::Part;
        self.notes.push(why.into());
    }

    /// Adds a failure unless `holds` is true, like an assertion.
    pub(super) fn check(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(otherwise());
        }
    }

    /// Returns the time in which this share (in percent) of the calls was answered.
    fn percentile(&self, percent: usize) -> Option<f64> {
        let mut times = self.times.clone();
        times.sort_unstable();
        let rank = (times.len() * percent).div_ceil(100).checked_sub(1)?;
        times.get(rank).map(|time| (time.as_secs_f64() * 1e4).round() / 10.0)
    }

    fn row(&self) -> Vec<String> {
        let time =
            |percent| self.percentile(percent).map_or_else(|| "-".to_owned(), |time| format!("{time:.1}"));
        let verdict = match (self.failures.is_empty(), self.left_out) {
            (false, _) => "FAILED",
            (true, LeftOut::Nothing) => "ok",
            (true, LeftOut::Part) => "ok, in part",
            (true, LeftOut::All) => "left out",
        };
        vec![
            self.step.title().to_owned(),
            self.calls.to_string(),
            self.ok.to_string(),
            self.refused.to_string(),
            time(50),
            time(99),
            self.bytes.to_string(),
            verdict.to_owned(),
            self.proofs.join("; "),
        ]
    }

    fn to_json(&self) -> Value {
        json!({
            "step": self.step.title(),
            "as_it_should": self.failures.is_empty(),
            "left_out": self.left_out == LeftOut::All,
            "left_out_in_part": self.left_out == LeftOut::Part,
            "calls": self.calls,
            "ok": self.ok,
            "refused": self.refused,
            "p50_ms": self.percentile(50),
            "p99_ms": self.percentile(99),
            "bytes": self.bytes,
            "notes": self.notes,
            "proofs": self.proofs,
            "failures": self.failures,
        })
    }
}

/// The output format, and the outcomes of the steps so far.
pub(super) struct Report {
    format: Format,
    outcomes: Vec<Outcome>,
}

impl Report {
    pub(super) fn new(format: Format) -> Self {
        Self { format, outcomes: Vec::new() }
    }

    pub(super) fn all_went_well(&self) -> bool {
        self.outcomes.iter().all(|outcome| outcome.failures.is_empty())
    }

    fn for_people(&self) -> bool {
        self.format == Format::Table
    }

    /// Prints a description of the demo's networks and gateways.
    pub(super) fn introduce(&self, stage: &Stage, out: &mut impl Write) -> io::Result<()> {
        if !self.for_people() {
            return Ok(());
        }
        writeln!(
            out,
            "Two networks on loopback. Each has TLS services, clients, and a gateway, which is a separate"
        )?;
        writeln!(
            out,
            "process. A client calls a service of the other network through that network's gateway, which routes by"
        )?;
        writeln!(
            out,
            "the server name in the TLS hello and passes the bytes through: it has no key to decrypt them.\n"
        )?;
        let row = |network: &Network| -> Vec<String> {
            let listener =
                |name| network.gateway.listener(name).map_or_else(|_| "-".to_owned(), |it| it.to_string());
            let services: Vec<&str> = network.endpoints.iter().map(|endpoint| endpoint.name).collect();
            vec![
                network.name.to_owned(),
                network.cidr.to_owned(),
                listener("mesh"),
                listener("plain"),
                services.join(", "),
            ]
        };
        let heading = ["NETWORK", "ADDRESSES", "GATEWAY, FOR THE MESH", "FOR ANY TLS", "ENDPOINTS"];
        table(out, &heading, &[row(&stage.east), row(&stage.west)])?;
        out.flush()
    }

    /// Prints the number and description of the step that begins.
    pub(super) fn announce(&self, step: Step, out: &mut impl Write) -> io::Result<()> {
        if !self.for_people() {
            return Ok(());
        }
        writeln!(out, "\n{}. {}", self.outcomes.len() + 1, step.description())?;
        out.flush()
    }

    /// Adds an outcome and prints its result.
    pub(super) fn add(&mut self, outcome: Outcome, out: &mut impl Write) -> io::Result<()> {
        if self.for_people() {
            for note in &outcome.notes {
                writeln!(out, "   {note}")?;
            }
            for failure in &outcome.failures {
                writeln!(out, "   FAILED: {failure}")?;
            }
            out.flush()?;
        }
        self.outcomes.push(outcome);
        Ok(())
    }

    /// Prints the table of measurements, and every failed check.
    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        if !self.for_people() {
            let steps: Vec<Value> = self.outcomes.iter().map(Outcome::to_json).collect();
            return structured(
                out,
                &json!({ "as_it_should": self.all_went_well(), "steps": steps }),
                self.format,
            );
        }
        writeln!(out)?;
        let heading = ["STEP", "CALLS", "OK", "REFUSED", "P50 MS", "P99 MS", "BYTES", "VERDICT", "SHOWN BY"];
        let rows: Vec<Vec<String>> = self.outcomes.iter().map(Outcome::row).collect();
        table(out, &heading, &rows)?;
        writeln!(out)?;
        for outcome in &self.outcomes {
            for failure in &outcome.failures {
                writeln!(out, "failed: {}: {failure}", outcome.step.title())?;
            }
        }
        let count = |holds: &dyn Fn(&Outcome) -> bool| self.outcomes.iter().filter(|one| holds(one)).count();
        let failed = count(&|outcome| !outcome.failures.is_empty());
        let (part, all) = (
            count(&|outcome| outcome.left_out == LeftOut::Part),
            count(&|outcome| outcome.left_out == LeftOut::All),
        );
        let steps = self.outcomes.len();
        match (failed, all) {
            (0, 0) => write!(out, "All {steps} steps succeeded")?,
            (0, _) => write!(out, "{} of {steps} steps succeeded, {all} left out", steps - all)?,
            _ => write!(out, "{failed} of {steps} steps failed")?,
        }
        match part {
            0 => writeln!(out, "."),
            _ => writeln!(out, "; {part} done in part, as a program is missing: see above."),
        }
    }
}

/// Prints what an operator can do after the demo.
pub(super) fn next(out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "\nNext: `isthmus demo --keep` leaves the gateways running, with commands to try; the README has the four lines of a"
    )?;
    writeln!(out, "config of your own.")
}

/// Prints commands that an operator can try while the demo keeps running.
pub(super) fn hints(stage: &Stage, out: &mut impl Write) -> io::Result<()> {
    let west = &stage.west.gateway;
    let address = west.listener("plain").map_or_else(|_| "-".to_owned(), |address| address.to_string());
    let folder = stage.folder.root().display();
    let admin = &west.admin;
    writeln!(out, "\nEverything keeps running until Ctrl-C. Try these commands in another terminal:\n")?;
    writeln!(out, "  curl --cacert {folder}/ca.pem --connect-to ::{address} https://{CHECKOUT}/")?;
    writeln!(out, "  isthmus explain {CHECKOUT} --listener plain --admin {admin}")?;
    writeln!(
        out,
        "  isthmus explain {VAULT}:80 --authority --identity spiffe://cluster.local/ns/shop/sa/web --admin {admin}"
    )?;
    writeln!(out, "  open {admin}/    (the gateway's page in a browser)")?;
    for command in ["top", "status", "exposed", "failures"] {
        writeln!(out, "  isthmus {command} --admin {admin}")?;
    }
    writeln!(out, "  $EDITOR {folder}/west.yaml    (the gateway reloads the file when you save it)")
}
