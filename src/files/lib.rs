//! Files, read without blocking a task.
//!
//! - `file`: a file with a limit on its size. `reading`: reads on threads of their own, with a limit on those that hang.
//! - `watch`: notices that files have changed. `whole_file`: replaces a file as a whole. `line_file`: a file with a list, one item a line.

pub mod file;
pub mod line_file;
pub mod reading;
pub mod watch;
pub mod whole_file;
