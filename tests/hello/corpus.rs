//! Reads `tests/corpus/*.hello`; the README in that folder describes the format.

use std::fs;
use std::path::Path;

use crate::judge::Judged;

pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) stream: Vec<u8>,
    pub(crate) expected: Judged,
}

/// Returns all cases, sorted by name.
pub(crate) fn read() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let files = fs::read_dir(folder).expect("the corpus").map(|entry| entry.expect("an entry").path());
    let mut cases: Vec<Case> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "hello"))
        .map(|path| parse(&fs::read_to_string(&path).expect("a text")))
        .collect();
    cases.sort_by(|one, other| one.name.cmp(&other.name));
    cases
}

fn parse(text: &str) -> Case {
    let field = |key: &str| text.lines().find_map(|line| line.strip_prefix(&format!("# {key}: ")));
    let name = field("name").expect("a name").to_owned();
    let hex: String = text.lines().filter(|line| !line.starts_with('#')).collect();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
    let stream = (0..hex.len()).step_by(2).map(byte).collect();
    let length = field("length").map(|length| length.parse().expect("a number"));
    let expected = expectation(field("expect").expect("an expectation"), length);
    Case { name, stream, expected }
}

fn expectation(text: &str, length: Option<usize>) -> Judged {
    let words: Vec<&str> = text.split(' ').collect();
    match words[..] {
        ["admit", name] => admit(name, Vec::new(), length),
        ["admit", name, "alpn", list] => admit(name, list.split(',').map(unescape).collect(), length),
        ["hello_timeout"] => Judged::Incomplete,
        ["client_gone"] => Judged::Nothing,
        [word] => {
            let words =
                ["no_sni", "bad_hello", "sni_invalid", "hello_too_large", "hello_fragments", "not_tls"];
            let word = words.into_iter().find(|known| *known == word);
            Judged::Refuse { word: word.unwrap_or_else(|| panic!("unknown verdict: {text}")) }
        }
        _ => panic!("unknown verdict: {text}"),
    }
}

fn admit(name: &str, alpn: Vec<Vec<u8>>, length: Option<usize>) -> Judged {
    Judged::Admit { name: name.to_owned(), alpn, length: length.expect("a length") }
}

/// Returns the bytes of a text: `\xNN` is the byte NN, any other character is itself.
fn unescape(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(hex, 16).expect("hex"));
        bytes.extend_from_slice(rest.as_bytes());
    }
    bytes
}
