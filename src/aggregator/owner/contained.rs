//! Catches panics of pure work, so that they end the work and not the program.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use isthmus_registry::change::Dirty;

/// Calls `work`; if it panics, returns the text of the panic as the error. Then the caller must restore the state that `work`
/// has changed in place.
pub(super) fn contained<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| words(&*panic))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}

/// A place where a test can cause a panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PanicSite {
    /// The build of a snapshot, where panics are caught.
    Build,
    /// The owner's own loop, where panics are not caught.
    Owner,
}

/// In debug builds, panics if `ISTHMUS_TEST_PANIC` is `build=HOSTNAME` or `owner=HOSTNAME` and that service
/// is dirty.
pub(super) fn panic_if_asked(place: PanicSite, dirty: &Dirty) {
    if !cfg!(debug_assertions) {
        return;
    }
    let Ok(asked) = std::env::var("ISTHMUS_TEST_PANIC") else { return };
    let prefix = if place == PanicSite::Build { "build=" } else { "owner=" };
    let Some(hostname) = asked.strip_prefix(prefix) else { return };
    if dirty.services.iter().any(|service| service.as_str() == hostname) {
        std::panic::panic_any(format!("a test asked for a panic at {hostname}"));
    }
}
