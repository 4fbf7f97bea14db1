//! A timer of the kernel, whose expiry is an event like those of sockets.
//!
//! While a task sleeps by `tokio::time`, each wait of its runtime for events has a time limit: the kernel sets and cancels a
//! timer each time the thread sleeps. A timer that is nearly always set is cheaper as a descriptor of its own.

use std::io;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::net::unix::pipe::Receiver;

/// A timer of the kernel. Tokio polls and reads it like a pipe, which is its only type for any readable descriptor.
#[derive(Debug)]
pub struct Timer(Receiver);

impl Timer {
    /// Creates a timer that is not set. Must be called within the runtime whose tasks wait for the timer. Fails if the process
    /// has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Receiver::from_owned_fd_unchecked(timer).map(Self)
    }

    /// Sets the timer to expire once, after this time of at least a nanosecond.
    pub fn set(&self, after: Duration) -> io::Result<()> {
        let it_value = Timespec::try_from(after).map_err(|_| io::ErrorKind::InvalidInput)?;
        let it_interval = Timespec::default();
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value })?;
        Ok(())
    }

    /// Waits until the timer has expired.
    pub async fn expired(&self) -> io::Result<()> {
        // The kernel returns the number of expiries since the last call, in eight bytes.
        while let Err(error) = self.0.try_read(&mut [0; 8]) {
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error);
            }
            self.0.readable().await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_timer_expires_once_each_time_it_is_set_and_not_before_its_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let timer = Timer::new().expect("a timer");
            for _ in 0..3 {
                let began = Instant::now();
                timer.set(Duration::from_millis(20)).expect("set");
                timer.expired().await.expect("expired");
                assert!(began.elapsed() >= Duration::from_millis(20));
            }
            let again = tokio::time::timeout(Duration::from_millis(60), timer.expired()).await;
            assert!(again.is_err(), "it was not set again");
            let too_long = timer.set(Duration::MAX).expect_err("no such time");
            assert_eq!(too_long.kind(), io::ErrorKind::InvalidInput);
        });
    }
}
