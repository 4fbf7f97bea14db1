//! A regular file that hangs when a process opens it, like a file on a mount that hangs. A helper process holds a lease on the
//! file (fcntl(2)); the kernel blocks every other process that opens it until the lease is given up, at most for
//! `/proc/sys/fs/lease-break-time` (45 s).

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use super::skip;

/// The script of the helper process: it retries while another process has the file open, then holds the lease until its
/// standard input ends. It appends to the file each line that it reads from its standard input.
const HOLDER: &str = "
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR | os.O_APPEND)
for attempt in range(500):
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        break
    except BlockingIOError:
        time.sleep(0.01)
else:
    sys.exit('somebody has it open')
print('held', flush=True)
for line in sys.stdin:
    os.write(file, line.encode())
";

/// The helper process with its lease on the file; the file hangs until this value is dropped.
pub struct Hang {
    holder: Child,
    input: Option<ChildStdin>,
}

impl Hang {
    /// Takes the lease. Returns `None`, after reporting a skip, if the file system has no leases.
    pub fn of(path: &Path) -> Option<Self> {
        let mut command = Command::new("python3");
        command.args(["-c", HOLDER]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().expect("python3");
        let input = holder.stdin.take();
        let mut answer = String::new();
        BufReader::new(holder.stdout.take().expect("piped")).read_line(&mut answer).expect("an answer");
        let hang = Self { holder, input };
        if answer.trim() != "held" {
            skip("no lease can be had on files here, so none hangs");
            return None;
        }
        Some(hang)
    }

    /// Appends a line to the file.
    pub fn append(&mut self, line: &str) {
        let input = self.input.as_mut().expect("it lives");
        input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush()).expect("written");
    }
}

impl Drop for Hang {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.holder.wait();
    }
}
