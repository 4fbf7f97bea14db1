//! The terminal in raw mode with the alternate screen. Its former state is restored when [`Screen`] is dropped, also by a
//! panic.

use std::io::{self, IsTerminal, Read, Write};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};

use super::view::{Key, Line, Style};
use isthmus_console::output::has_colours;

/// Switches to the alternate screen, hides the cursor, and disables wrapping of long lines.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J";
/// Reverts [`ENTER`].
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// A terminal that this program uses alone.
pub(super) struct Screen {
    saved: Termios,
    colours: bool,
    /// The beginning of a key sequence whose rest has not arrived yet.
    begun: Vec<u8>,
}

impl Screen {
    /// Takes over the terminal of the standard input and output.
    pub(super) fn open() -> io::Result<Self> {
        let stdin = io::stdin();
        if !stdin.is_terminal() || !io::stdout().is_terminal() {
            return Err(io::Error::other("the standard input or output is not a terminal"));
        }
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
        if is_dumb {
            return Err(io::Error::other("TERM is not set, or is dumb"));
        }
        let saved = tcgetattr(&stdin)?;
        let mut raw = saved.clone();
        // Keys arrive at once and without echo. Ctrl-C arrives as a key, so that it restores the terminal as `q` does.
        raw.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
        raw.special_codes[SpecialCodeIndex::VMIN] = 0;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        let screen = Self { saved, colours: has_colours(), begun: Vec::new() };
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        write(ENTER)?;
        Ok(screen)
    }

    /// Returns the width and height of the terminal in characters, or 80 × 24 if they are unknown.
    pub(super) fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
            Ok(_) | Err(_) => (80, 24),
        }
    }

    /// Redraws the terminal with these lines.
    pub(super) fn draw(&self, lines: &[Line]) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (index, line) in lines.iter().enumerate() {
            if index > 0 {
                text.push_str("\r\n");
            }
            for (style, part) in line {
                // Without colours, the chosen part must still be distinguishable.
                match style.code().filter(|_| self.colours || *style == Style::Chosen) {
                    Some(code) => text.push_str(&format!("\x1b[{code}m{part}\x1b[0m")),
                    None => text.push_str(part),
                }
            }
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        write(&text)
    }

    /// Returns the keys that are pressed within this time.
    pub(super) fn keys(&mut self, within: Duration) -> io::Result<Vec<Key>> {
        let stdin = io::stdin();
        let timeout = Timespec { tv_sec: 0, tv_nsec: within.subsec_nanos().into() };
        let mut descriptors = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(0) => {
                // An escape character that nothing follows is the Escape key.
                let alone = !self.begun.is_empty();
                self.begun.clear();
                return Ok(if alone { vec![Key::Escape] } else { Vec::new() });
            }
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        if descriptors[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            // The terminal has been closed.
            return Ok(vec![Key::Quit]);
        }
        let mut bytes = [0; 256];
        let count = stdin.lock().read(&mut bytes)?;
        if count == 0 {
            return Ok(vec![Key::Quit]);
        }
        self.begun.extend_from_slice(&bytes[..count]);
        Ok(Key::take(&mut self.begun))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal has been closed, there is nothing to restore.
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.saved);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
