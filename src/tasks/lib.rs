//! Tasks and the values between them: scopes that a stop waits for, threads for long computations, the newest value of a
//! kind, backoff, throttles and timers.

pub mod background;
pub mod backoff;
pub mod latest;
pub mod scope;
pub mod throttle;
pub mod timer;
