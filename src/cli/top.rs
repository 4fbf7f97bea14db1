//! `isthmus top`: the overview of the running gateway, live in a terminal. One thread asks the admin API, and another one reads
//! keys and draws, so that a gateway that does not answer never delays a key.

mod screen;
mod view;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use super::arguments::Admin;
use isthmus_api::overview::Overview;
use isthmus_console::client;
use isthmus_console::failure::Failure;
use screen::Screen;
use view::{Action, Top};

/// The interval at which the overview is requested from the gateway.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// The longest time until a key, an answer or a signal is handled.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The state that the requesting thread and the drawing thread share.
struct Shared {
    admin: String,
    /// The path of the next request.
    path: Mutex<String>,
    /// Wakes the requesting thread when the path changes.
    changed: Notify,
    /// True once the program must end.
    stopped: AtomicBool,
}

/// The overview of the gateway, or the reason why it could not be requested.
type Answer = Result<Box<Overview>, String>;

/// Runs `isthmus top` until the user quits.
pub(super) fn run(admin: &Admin) -> Result<(), Failure> {
    let mut screen = Screen::open().map_err(|error| {
        Failure::Wrong(format!("isthmus top needs a terminal ({error}); use `isthmus status`"))
    })?;
    let mut top = Top::new(admin.url());
    let shared = Arc::new(Shared {
        admin: admin.url(),
        path: Mutex::new(top.path()),
        changed: Notify::new(),
        stopped: AtomicBool::new(false),
    });
    let (send, answers) = sync_channel(1);
    let asking = shared.clone();
    std::thread::spawn(move || ask(&asking, &send));
    show(&mut screen, &mut top, &shared, &answers)
}

fn show(
    screen: &mut Screen,
    top: &mut Top,
    shared: &Shared,
    answers: &Receiver<Answer>,
) -> Result<(), Failure> {
    let mut drawn = None;
    loop {
        for answer in answers.try_iter() {
            top.received(answer, Instant::now());
        }
        let size = screen.size();
        let now = (size, top.lines(size));
        if drawn.as_ref() != Some(&now) {
            screen.draw(&now.1)?;
            drawn = Some(now);
        }
        for key in screen.keys(LOOK_EVERY)? {
            match top.pressed(key) {
                Action::Quit => return Ok(()),
                Action::Ask => {
                    *shared.path.lock().unwrap_or_else(PoisonError::into_inner) = top.path();
                    shared.changed.notify_one();
                }
                Action::None => {}
            }
        }
        if shared.stopped.load(Ordering::Acquire) {
            return Ok(());
        }
    }
}

/// Requests the overview again and again until the program ends; also receives the signals that end it.
fn ask(shared: &Shared, send: &SyncSender<Answer>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return drop(send.send(Err(format!("cannot start: {error}")))),
    };
    runtime.block_on(async {
        let ended = async {
            let kinds = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()];
            let mut signals = kinds.map(signal);
            let [Ok(terminate), Ok(hangup), Ok(interrupt)] = &mut signals else {
                return std::future::pending().await;
            };
            tokio::select! {
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        tokio::select! {
            biased;
            () = ended => shared.stopped.store(true, Ordering::Release),
            () = ask_again_and_again(shared, send) => {}
        }
    });
}

async fn ask_again_and_again(shared: &Shared, send: &SyncSender<Answer>) {
    loop {
        let path = shared.path.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // No timeout is needed here: if the gateway disappears without closing the connection, the client's own deadline
        // applies.
        let answer = client::ask(&shared.admin, "GET", &path).await;
        let answer = answer
            .and_then(client::ApiResponse::json)
            .and_then(client::typed::<Overview>)
            .map(Box::new)
            .map_err(|error| error.to_string());
        match send.try_send(answer) {
            // If the drawing thread has not read the previous overview yet, this one is dropped, since a newer one follows
            // soon.
            Ok(()) | Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => return,
        }
        tokio::select! {
            () = shared.changed.notified() => {}
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
    }
}
