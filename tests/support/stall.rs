//! A stopwatch that stands still while the machine does: a virtual machine may get no processor for a second, and a disk may block a
//! plain write for longer. What a gateway does within a time says nothing about the gateway in such moments.
//!
//! Bounds of time belong into unit tests on a paused clock. These tests measure what no such clock governs:
//!
//! - `bandwidth`: the kernel paces the bytes in real time.
//! - `dashboard`, `distance`: a request beside real work of the same process, which takes processor time and not timers.
//! - `gateway_stops`, `lifecycle`, `retirement`: the clients must make no pause of their own, in which the gateway may close.

use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The pause between two measurements, and the delay from which on the machine counts as standing still.
const NAP: Duration = Duration::from_millis(20);
const NOTICED: Duration = Duration::from_millis(50);

/// The stalls that a thread of this process has measured.
struct Meter {
    /// The time of the last measurement.
    last: Instant,
    /// The end and the length of each moment in which the machine stood still.
    stalls: Vec<(Instant, Duration)>,
}

impl Meter {
    /// Records by how much a measurement is later than expected.
    fn measure(&mut self) {
        let now = Instant::now();
        let late = now.duration_since(self.last).saturating_sub(NAP);
        if late >= NOTICED {
            self.stalls.push((now, late));
        }
        self.last = now;
    }
}

static METER: LazyLock<Mutex<Meter>> = LazyLock::new(|| {
    thread::spawn(|| {
        let file = tempfile::tempfile().expect("a file");
        loop {
            thread::sleep(NAP);
            file.set_len(0).and_then(|()| file.write_all_at(b"x", 0)).expect("written");
            METER.lock().expect("no panic").measure();
        }
    });
    Mutex::new(Meter { last: Instant::now(), stalls: Vec::new() })
});

/// Measures a time without the moments in which the machine stood still.
pub struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Self {
        LazyLock::force(&METER);
        Self(Instant::now())
    }

    /// Returns each moment in which the machine stood still, also one that may not be over.
    fn stalls(&self) -> Vec<Duration> {
        let mut meter = METER.lock().expect("no panic");
        meter.measure();
        let since = meter.stalls.iter().filter(|(end, _)| *end > self.0);
        since.map(|(end, late)| (*late).min(*end - self.0)).collect()
    }

    /// Returns the longest moment in which the machine stood still.
    pub fn longest_stall(&self) -> Duration {
        self.stalls().into_iter().max().unwrap_or_default()
    }

    /// Returns the time for which the machine ran.
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed().saturating_sub(self.stalls().iter().sum())
    }
}
