//! Panics of pure work are contained: they end the work, not the program.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::snapshot::change::Dirty;

/// Does the work, or says with which words it has panicked. What the work changes in place is for the caller to put
/// back.
pub(super) fn contained<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| words(&*panic))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without words".to_owned())
}

/// In debug builds, where `ISTHMUS_TEST_PANIC` is the host name of a service: panics while that service is built.
pub(super) fn build_fault(dirty: &Dirty) {
    if cfg!(debug_assertions)
        && let Some(hostname) = injected()
        && dirty.services.iter().any(|service| service.as_str() == hostname)
    {
        std::panic::panic_any(format!("the test asked for a panic at {hostname}"));
    }
}

/// In debug builds, where `ISTHMUS_TEST_PANIC` is `owner`: panics in the owner's own loop.
pub(super) fn owner_fault() {
    if cfg!(debug_assertions) && injected().is_some_and(|fault| fault == "owner") {
        std::panic::panic_any("the test asked for a panic of the owner");
    }
}

fn injected() -> Option<String> {
    std::env::var("ISTHMUS_TEST_PANIC").ok()
}
