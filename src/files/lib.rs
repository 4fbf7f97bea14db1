//! Files: reading them on threads of their own, with a limit; watching them; and replacing them as a whole.

pub mod file;
pub mod line_file;
pub mod reading;
pub mod watch;
pub mod whole_file;
