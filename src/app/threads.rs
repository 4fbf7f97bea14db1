//! Checks before the start that the program can create its threads, because the runtimes panic if a thread cannot be created.

use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

/// Returns an error if this many threads cannot exist at the same time.
pub(super) fn can_be_made(count: usize) -> Result<(), String> {
    let (hold, held) = channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let make = |_| {
        let held = held.clone();
        // Each thread waits until all of them have been created.
        Builder::new().spawn(move || held.lock().unwrap_or_else(PoisonError::into_inner).recv().is_ok())
    };
    let made: Vec<_> = (0..count).map(make).collect();
    drop(hold);
    let mut failed: Option<io::Error> = None;
    for thread in made {
        match thread {
            Ok(thread) => drop(thread.join()),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(()), |error| {
        Err(format!(
            "cannot start {count} threads: {error}; check the limits on processes (ulimit -u, pids.max) and \
             memory (ulimit -v)"
        ))
    })
}
