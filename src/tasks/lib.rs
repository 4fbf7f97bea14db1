//! Tasks, and what they share.
//!
//! - `scope`: tasks that a stop waits for. `stop`: the order to end to tasks that serve clients. `background`: threads for long computations, at a low priority.
//! - `latest`: a value that is set later and may change; readers wait for it. `shared`: work whose result callers share.
//! - `backoff`, `throttle`, `timer`: when to try again, how often to say something, and a timer of the kernel.

pub mod background;
pub mod backoff;
pub mod latest;
pub mod scope;
pub mod shared;
pub mod stop;
pub mod throttle;
pub mod timer;
