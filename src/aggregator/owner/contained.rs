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
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Where a test can ask for a panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// While a snapshot is built.
    Build,
    /// In the owner's own loop, where nothing contains it.
    Owner,
}

/// In debug builds, panics where `ISTHMUS_TEST_PANIC` is `build=HOSTNAME` or `owner=HOSTNAME` and that service is dirty.
pub(super) fn fault(place: Place, dirty: &Dirty) {
    if !cfg!(debug_assertions) {
        return;
    }
    let Ok(asked) = std::env::var("ISTHMUS_TEST_PANIC") else { return };
    let prefix = if place == Place::Build { "build=" } else { "owner=" };
    let Some(hostname) = asked.strip_prefix(prefix) else { return };
    if dirty.services.iter().any(|service| service.as_str() == hostname) {
        std::panic::panic_any(format!("a test asked for a panic at {hostname}"));
    }
}
