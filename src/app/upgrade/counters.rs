//! The metrics of the old process go on in the new one: their increases are sent and added.

use std::io;

use isthmus_telemetry::recorder::{Known, Recorder, labels_of};
use isthmus_upgrade::channel::Channel;
use isthmus_upgrade::message::{COUNTERS_MAX, Counted, Measured, Message};

/// Sends the increases of all metrics since the last call.
pub(super) async fn send(channel: &Channel, recorder: &Recorder, known: &mut Known) -> io::Result<()> {
    let increases = recorder.increases(known);
    let counters: Vec<Counted> = increases
        .counters
        .iter()
        .map(|(key, by)| Counted { name: key.name().to_owned(), labels: labels_of(key), by: *by })
        .collect();
    for some in counters.chunks(COUNTERS_MAX) {
        channel.send(&Message::Counters { counters: some.to_vec(), histograms: Vec::new() }).await?;
    }
    let histograms = increases.histograms.into_iter().map(|(key, counts, nanoseconds)| Measured {
        name: key.name().to_owned(),
        labels: labels_of(&key),
        counts,
        nanoseconds,
    });
    let histograms: Vec<Measured> = histograms.collect();
    for some in histograms.chunks(COUNTERS_MAX) {
        channel.send(&Message::Counters { counters: Vec::new(), histograms: some.to_vec() }).await?;
    }
    Ok(())
}

/// Adds the increases of another process.
pub(super) fn add(recorder: &Recorder, counters: &[Counted], histograms: &[Measured]) {
    for Counted { name, labels, by } in counters {
        recorder.add(name, labels, *by);
    }
    for Measured { name, labels, counts, nanoseconds } in histograms {
        recorder.add_histogram(name, labels, counts, *nanoseconds);
    }
}
