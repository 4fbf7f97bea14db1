//! Files in the state folder that contain a list, one item per line.
//!
//! ```text
//! isthmus virtual addresses 1
//! …
//! end 1 0123456789abcdef
//! ```
//!
//! The first line contains the name and the version of the list. The last line contains the number of lines between them
//! and the XXH3 hash of all bytes before it, so that a damaged or truncated file is detected.

use std::fmt::{Display, Write as _};
use std::fs::File;
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

use twox_hash::XxHash3_64;

use super::whole_file::write_whole;

/// A kind of file that contains a list: its name and its bounds.
#[derive(Clone, Copy, Debug)]
pub struct LineFile {
    /// The name in the first line.
    pub name: &'static str,
    /// The largest number of lines.
    pub lines_max: usize,
    /// The longest line in bytes.
    pub line_bytes_max: u64,
}

/// The reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LineFault {
    /// The operating system's error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The first line of the file does not identify this kind of list.
    #[error("the file is not a list of {0} written by this version of isthmus")]
    Head(&'static str),
    /// The line with this number, counted from 1, cannot be parsed.
    #[error("the file is damaged at line {0}")]
    Line(usize),
    /// The last line is missing.
    #[error("the file is damaged: its end is missing")]
    Truncated,
    /// The hash in the last line differs from that of the content.
    #[error("the file is damaged: the checksum does not match")]
    Checksum,
}

impl LineFile {
    /// Replaces a file by a list of lines. Blocks.
    pub fn store(&self, place: &Path, lines: impl Iterator<Item: Display>) -> io::Result<()> {
        write_whole(place, |file| {
            let mut file = BufWriter::new(file);
            self.write(lines, &mut file)?;
            file.into_inner().map_err(io::IntoInnerError::into_error)
        })
    }

    /// Reads a file; returns an empty list if there is no file. `parse` returns `None` for an invalid line. Blocks.
    pub fn load<T>(&self, place: &Path, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, LineFault> {
        match File::open(place) {
            Ok(file) => self.read(BufReader::new(file), parse),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a list in the form that [`Self::read`] accepts.
    pub fn write(&self, lines: impl Iterator<Item: Display>, to: &mut impl Write) -> io::Result<()> {
        let (mut hasher, mut count) = (XxHash3_64::new(), 0_usize);
        let mut line = self.head();
        for next in lines {
            hasher.write(line.as_bytes());
            to.write_all(line.as_bytes())?;
            line.clear();
            writeln!(line, "{next}").map_err(io::Error::other)?;
            count += 1;
        }
        hasher.write(line.as_bytes());
        to.write_all(line.as_bytes())?;
        writeln!(to, "end {count} {:016x}", hasher.finish())?;
        to.flush()
    }

    /// Reads a list that [`Self::write`] has written; `parse` returns `None` for an invalid line.
    pub fn read<T>(
        &self,
        mut from: impl BufRead,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, LineFault> {
        let mut hasher = XxHash3_64::new();
        let (mut list, mut line) = (Vec::new(), Vec::new());
        for number in 1.. {
            line.clear();
            (&mut from).take(self.line_bytes_max).read_until(b'\n', &mut line)?;
            if line.is_empty() {
                return Err(if number == 1 { LineFault::Head(self.name) } else { LineFault::Truncated });
            }
            let text = std::str::from_utf8(&line).ok();
            if number == 1 {
                text.filter(|text| *text == self.head()).ok_or(LineFault::Head(self.name))?;
            } else if let Some(end) = text.and_then(|text| text.strip_prefix("end ")) {
                if end != format!("{} {:016x}\n", list.len(), hasher.finish()) {
                    return Err(LineFault::Checksum);
                }
                return if from.read(&mut [0])? == 0 { Ok(list) } else { Err(LineFault::Line(number + 1)) };
            } else {
                let read = text.and_then(|text| text.strip_suffix('\n')).and_then(&parse);
                list.push(read.filter(|_| list.len() < self.lines_max).ok_or(LineFault::Line(number))?);
            }
            hasher.write(&line);
        }
        Err(LineFault::Truncated)
    }

    fn head(&self) -> String {
        format!("isthmus {} 1\n", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: LineFile = LineFile { name: "numbers", lines_max: 4, line_bytes_max: 64 };

    fn number(line: &str) -> Option<u32> {
        line.parse().ok()
    }

    #[test]
    fn what_is_stored_is_loaded_and_a_file_that_is_not_whole_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("below/numbers");
        assert!(LIST.load(&place, number).expect("nothing yet").is_empty());
        LIST.store(&place, [7, 8, 9].iter()).expect("stored");
        assert_eq!(LIST.load(&place, number).expect("whole"), [7, 8, 9]);
        let whole = std::fs::read(&place).expect("written");
        for at in 0..whole.len() {
            LIST.read(&whole[..at], number).expect_err("cut");
            let mut other = whole.clone();
            other[at] ^= 1;
            LIST.read(&*other, number).expect_err("one bit differs");
        }
        LIST.read(&*[&*whole, b"x"].concat(), number).expect_err("something follows the end");
        LIST.read(&*[LIST.head().as_bytes(), &[b'7'; 1 << 20]].concat(), number)
            .expect_err("a line without end");
        LIST.store(&place, [1; 5].iter()).expect("stored");
        assert!(matches!(LIST.load(&place, number), Err(LineFault::Line(6))), "more than the list may have");
    }
}
