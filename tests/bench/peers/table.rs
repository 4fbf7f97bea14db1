//! The figures, and the page that shows them: medians, ratios within the rounds, and goals.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::Result;
use crate::median::median;
use crate::subjects::Subject;

/// A measured quantity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Measure {
    Connections,
    Handshakes,
    Up,
    Down,
    RoundTrips,
    Idle,
    Partial,
    Routes,
    StartProcessor,
    StartWall,
}

impl Measure {
    /// The quantities that are processor time per unit of work.
    pub(crate) const COSTS: [Self; 5] =
        [Self::Connections, Self::Handshakes, Self::RoundTrips, Self::Up, Self::Down];

    const ALL: [Self; 10] = [
        Self::Connections,
        Self::Handshakes,
        Self::RoundTrips,
        Self::Up,
        Self::Down,
        Self::Idle,
        Self::Partial,
        Self::Routes,
        Self::StartProcessor,
        Self::StartWall,
    ];

    /// Returns the name of a cost on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Handshakes => "handshakes",
            Self::RoundTrips => "round-trips",
            Self::Up => "up",
            Self::Down => "down",
            _ => "memory",
        }
    }

    /// Returns the title of the quantity's row.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Connections => "CPU µs per short connection",
            Self::Handshakes => "CPU µs per TLS handshake with a request",
            Self::RoundTrips => "CPU µs per round trip",
            Self::Up => "CPU ms per GiB, client to backend",
            Self::Down => "CPU ms per GiB, backend to client",
            Self::Idle => "bytes per idle connection",
            Self::Partial => "bytes per pending hello",
            Self::Routes => "bytes per route",
            Self::StartProcessor => "CPU s to start with all routes",
            Self::StartWall => "seconds to start with all routes",
        }
    }

    /// Converts a recorded value to the unit of the row. Costs are recorded in microseconds per unit of work.
    fn shown(self, value: f64) -> f64 {
        match self {
            Self::Up | Self::Down => value / 1e3,
            _ => value,
        }
    }
}

/// A goal: a cost is at most `GOAL` times that of another program.
pub(crate) struct Goal {
    pub(crate) measure: Measure,
    /// The name of the other program.
    pub(crate) other: &'static str,
    what: &'static str,
    others: &'static str,
}

const GOAL: f64 = 1.03;

pub(crate) const GOALS: [Goal; 4] = [
    Goal {
        measure: Measure::Connections,
        other: "tokio floor",
        what: "a short connection",
        others: "the tokio floor's",
    },
    Goal {
        measure: Measure::RoundTrips,
        other: "tokio floor",
        what: "a round trip",
        others: "the tokio floor's",
    },
    Goal {
        measure: Measure::Up,
        other: "HAProxy splice",
        what: "a byte to the backend",
        others: "HAProxy's with forced splice",
    },
    Goal {
        measure: Measure::Down,
        other: "HAProxy splice",
        what: "a byte to the client",
        others: "HAProxy's with forced splice",
    },
];

/// The measured values, and the ratios for the goals.
#[derive(Default)]
pub(crate) struct Figures {
    /// The values by quantity and program (column), one for each round.
    values: BTreeMap<(Measure, usize), Vec<f64>>,
    /// The ratios of this isthmus to the other program of a goal, one for each pair of measurements.
    pairs: BTreeMap<Measure, Vec<f64>>,
}

impl Figures {
    pub(crate) fn add(&mut self, measure: Measure, column: usize, value: f64) {
        self.values.entry((measure, column)).or_default().push(value);
    }

    pub(crate) fn add_pair(&mut self, measure: Measure, ratio: f64) {
        self.pairs.entry(measure).or_default().push(ratio);
    }

    fn median(&self, measure: Measure, column: usize) -> Option<f64> {
        median(self.values.get(&(measure, column))?.iter().copied())
    }

    /// Returns the ratio of one program's values to another's: the first quartile, the median and the third quartile of the
    /// rounds.
    fn ratio(&self, measure: Measure, of: usize, to: usize) -> Option<[f64; 3]> {
        let (of, to) = (self.values.get(&(measure, of))?, self.values.get(&(measure, to))?);
        quartiles(of.iter().zip(to).map(|(of, to)| of / to))
    }

    /// Returns the generated part of the page. The first program is this isthmus.
    pub(crate) fn markdown(
        &self,
        subjects: &[Subject],
        about: &About,
        routes: usize,
        skipped: &[String],
    ) -> String {
        let mut text = format!("{}\n\n", about.0.join("\n"));
        let names: Vec<_> = subjects.iter().map(|subject| subject.name.as_str()).collect();
        let _ = writeln!(text, "| per | {} |\n|---|{}", names.join(" | "), "---:|".repeat(names.len()));
        for measure in Measure::ALL {
            let Some(median) = self.median(measure, 0) else { continue };
            let others = (1..subjects.len()).map(|column| {
                let Some([low, middle, high]) = self.comparable(measure, column, &subjects[column]) else {
                    return "–".to_owned();
                };
                match low < high {
                    true => format!("{} ({}–{})", number(middle), number(low), number(high)),
                    false => number(middle),
                }
            });
            let cells: Vec<_> = std::iter::once(number(measure.shown(median))).chain(others).collect();
            let _ = writeln!(text, "| {} | {} |", measure.title(), cells.join(" | "));
        }
        let _ = writeln!(
            text,
            "\nThe first column is the median of Isthmus. The others are what a program needs where Isthmus needs 1: the median of \
             the ratios\nwithin the rounds, and the middle half of them. Above 1, Isthmus needs less. All routes are {}.",
            grouped(routes as f64)
        );
        for why in skipped {
            let _ = writeln!(text, "\nNot measured: {why}.");
        }
        text
    }

    /// Returns the goals with what was measured. The page does not have them.
    pub(crate) fn goals(&self) -> String {
        let (mut text, mut rows) = (String::new(), Vec::new());
        for Goal { measure, what, others, .. } in &GOALS {
            let pairs = self.pairs.get(measure);
            let Some([low, ratio, high]) = pairs.and_then(|pairs| quartiles(pairs.iter().copied())) else {
                continue;
            };
            let met = if ratio <= GOAL { "yes" } else { "no" };
            rows.push(format!(
                "| CPU for {what}: at most {GOAL} times {others} | {ratio:.3} times ({low:.2}–{high:.2}) | {met} |"
            ));
        }
        if let Some(bytes) = self.median(Measure::Idle, 0) {
            let met = if bytes <= 2_500.0 { "yes" } else { "no" };
            rows.push(format!(
                "| memory for an idle connection: at most 2,500 bytes | {bytes:.0} bytes | {met} |"
            ));
        }
        if !rows.is_empty() {
            if let Some(pairs) = self.pairs.values().map(Vec::len).max() {
                let _ = writeln!(
                    text,
                    "\nGoals of processor time are judged by the median of {pairs} pairs of measurements, one right after the other."
                );
            }
            let _ = writeln!(text, "\n| goal | measured | met |\n|---|---|---|\n{}", rows.join("\n"));
        }
        text
    }

    /// Returns the ratio to the first program. Returns `None` for a start with many routes if the program was measured with
    /// fewer routes.
    fn comparable(&self, measure: Measure, column: usize, subject: &Subject) -> Option<[f64; 3]> {
        let start = matches!(measure, Measure::StartProcessor | Measure::StartWall);
        self.ratio(measure, column, 0).filter(|_| !start || subject.routes_max() == usize::MAX)
    }
}

/// Returns the first quartile, the median and the third quartile.
fn quartiles(ratios: impl Iterator<Item = f64>) -> Option<[f64; 3]> {
    let mut ratios: Vec<f64> = ratios.filter(|ratio| ratio.is_finite()).collect();
    ratios.sort_by(f64::total_cmp);
    let last = ratios.len().checked_sub(1)?;
    Some([ratios[last / 4], median(ratios.iter().copied())?, ratios[(last * 3).div_ceil(4)]])
}

/// Returns a number with three significant digits, and its digits in groups.
fn number(value: f64) -> String {
    match value.abs() {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        100.0..1_000.0 => format!("{value:.0}"),
        _ => grouped(value),
    }
}

/// Returns a whole number with its digits in groups.
fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// The lines about a run: when, where, with which programs, and by which command.
pub(crate) struct About(Vec<String>);

impl About {
    pub(crate) fn of_this_machine(subjects: &[Subject]) -> Result<Self> {
        let date = Command::new("date").args(["-u", "+%-d %B %Y, %H:%M UTC"]).output()?.stdout;
        let processors = fs::read_to_string("/proc/cpuinfo")?;
        let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
        let count = processors.lines().filter(|line| line.starts_with("processor")).count();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
        let versions: Vec<_> = subjects
            .iter()
            .filter(|subject| subject.reads_hello())
            .map(|subject| format!("{} {}", subject.name, subject.version()))
            .collect();
        Ok(Self(vec![
            format!("- Date: {}", String::from_utf8(date)?.trim()),
            format!(
                "- Machine: {count} processors ({}), Linux {}",
                model.unwrap_or("unknown"),
                kernel.trim()
            ),
            format!("- Versions: {}", versions.join("; ")),
        ]))
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.0.push(format!("- Run: {text}"));
    }

    /// Adds the command that repeats the run.
    pub(crate) fn command(&mut self, short: bool, other_rounds: bool) {
        let mut command = "tests/bench/run".to_owned();
        let mut arguments =
            std::env::args().skip(1).filter(|argument| argument != "--bench" && argument != "--write");
        // Paths differ between machines, so they are left out.
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--isthmus" | "--beside" => {
                    arguments.next();
                }
                "--rounds" if other_rounds => {
                    command += &format!(" --rounds {}", arguments.next().unwrap_or_default())
                }
                "--rounds" => {
                    arguments.next();
                }
                "--short" if short => command += " --short",
                other => command += &format!(" {other}"),
            }
        }
        self.0.push(format!("- Command: `{command}`"));
    }
}

/// The kernel's counters of processor time. The share that the hypervisor took ("steal") makes the figures uncertain.
pub(crate) struct Stolen(Vec<u64>);

impl Stolen {
    fn read() -> Result<Vec<u64>> {
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().ok_or("no line")?;
        Ok(line.split_whitespace().skip(1).take(8).filter_map(|field| field.parse().ok()).collect())
    }

    pub(crate) fn begin() -> Result<Self> {
        Ok(Self(Self::read()?))
    }

    /// Returns a sentence about the share of processor time that the hypervisor took since [`Self::begin`].
    pub(crate) fn end(self) -> Result<String> {
        let spent: Vec<u64> =
            Self::read()?.iter().zip(&self.0).map(|(after, before)| after - before).collect();
        let all: u64 = spent.iter().sum();
        let stolen = spent.get(7).copied().unwrap_or_default() as f64 / all.max(1) as f64 * 100.0;
        Ok(format!("the hypervisor took {stolen:.1} % of the processors' time"))
    }
}

const BEGIN: &str = "<!-- begin: written by tests/bench/run --write -->\n";
const END: &str = "<!-- end -->\n";

/// Replaces the generated part of the page.
pub(crate) fn write(text: &str) -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/performance.md");
    let page = fs::read_to_string(&path)?;
    let (before, rest) = page.split_once(BEGIN).ok_or("docs/performance.md has no place for the tables")?;
    let (_, after) =
        rest.split_once(END).ok_or("the place for the tables in docs/performance.md has no end")?;
    fs::write(&path, format!("{before}{BEGIN}\n{}\n\n{END}{after}", text.trim()))?;
    println!("written: {}", path.display());
    Ok(())
}
