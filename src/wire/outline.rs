//! Walks an encoded protobuf message before it is decoded. A decoded message may take a hundred times as much memory as its
//! bytes, so its items are counted and their memory is estimated first.
//!
//! ```text
//!  bytes ──Shape──▶ items, memory ──limits──▶ decode, or Refusal
//! ```
//!
//! Each door has its own limits on the bytes and the items of a message; the other limits are the same at all doors. A client of
//! ours, of Envoy or of gRPC stays below them: its names have 10 bytes and more, and take three times their bytes in memory.

use prost::bytes::Buf;
use prost::{DecodeError, Message};

/// The memory that any message may take, in bytes.
const MEMORY_FREE: usize = 1 << 20;
/// The memory that a message may take in addition, in bytes per byte of the message.
const MEMORY_PER_BYTE: usize = 4;
/// The deepest nesting of messages within a message.
const NESTING_MAX: usize = 64;
/// The largest number of values in the metadata of a node: at the top, and in all levels together.
const METADATA_MAX: (usize, usize) = (256, 4_096);

/// A message whose shape is known.
pub trait Outlined: Message + Default {
    /// Returns the shape of the message.
    fn shape() -> &'static Shape;
}

/// The fields of a message type that may occur again or contain messages. The other ones are within the memory of the message.
#[derive(Debug)]
pub struct Shape(pub &'static [Field]);

/// A field of a shape.
#[derive(Debug)]
pub struct Field {
    /// The number of the field.
    pub number: u64,
    /// The bytes that each item takes in memory, beside its texts and its own items; `None`: the field occurs once.
    pub item: Option<usize>,
    /// The content of the field.
    pub content: Content,
}

/// The content of a field.
#[derive(Debug)]
pub enum Content {
    /// A text, or bytes.
    Bytes,
    /// Numbers, each in a field of its own or many in one field.
    Numbers,
    /// A message of this shape.
    Message(&'static Shape),
    /// A `google.protobuf.Struct` that a node sends.
    Metadata(&'static Shape),
}

/// The reason why a message is not decoded. The numbers are what the message has, and the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The bytes are not a protobuf message.
    #[error("the message is malformed")]
    Malformed,
    /// The bytes are a protobuf message of another type.
    #[error("the message is malformed: {0}")]
    Undecodable(#[from] DecodeError),
    /// The message has too many items.
    #[error("a message with {0} items; at most {1} are allowed")]
    Items(usize, usize),
    /// The items would take too much memory.
    #[error("a message that would take {0} bytes of memory; at most {1} are allowed for its size")]
    Memory(usize, usize),
    /// The metadata of the node has too many values at the top.
    #[error("a node with {0} values of metadata; at most {1} are allowed")]
    Metadata(usize, usize),
    /// The metadata of the node has too many values within values.
    #[error("a node with {0} values within values of metadata; at most {1} are allowed")]
    NestedMetadata(usize, usize),
    /// Messages within the message are nested too deep.
    #[error("a message with more than {NESTING_MAX} levels")]
    Nesting,
}

/// Decodes a message of at most `items_max` items, if its outline is within the limits. Bytes in it are copied once from
/// [`Bytes`](prost::bytes::Bytes), and twice from a slice.
pub fn decode<M: Outlined>(message: impl Buf + AsRef<[u8]>, items_max: usize) -> Result<M, Refusal> {
    Outline::of(M::shape(), message.as_ref())?.check(items_max)?;
    Ok(M::decode(message)?)
}

/// The sums over a message and the messages in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Outline {
    bytes: usize,
    /// The entries of lists and maps.
    items: usize,
    /// The estimated memory of the decoded message in bytes.
    memory: usize,
    /// The values of metadata: at the top, and in all levels together.
    metadata: (usize, usize),
}

impl Outline {
    fn of(shape: &Shape, message: &[u8]) -> Result<Self, Refusal> {
        let bytes = message.len();
        let mut outline = Self { bytes, items: 0, memory: bytes, metadata: (0, 0) };
        outline.walk(shape, message, NESTING_MAX)?;
        Ok(outline)
    }

    fn check(&self, items_max: usize) -> Result<(), Refusal> {
        let (top, all) = self.metadata;
        if top > METADATA_MAX.0 {
            return Err(Refusal::Metadata(top, METADATA_MAX.0));
        }
        if all > METADATA_MAX.1 {
            return Err(Refusal::NestedMetadata(all, METADATA_MAX.1));
        }
        if self.items > items_max {
            return Err(Refusal::Items(self.items, items_max));
        }
        let memory_max = MEMORY_FREE + self.bytes.saturating_mul(MEMORY_PER_BYTE);
        if self.memory > memory_max {
            return Err(Refusal::Memory(self.memory, memory_max));
        }
        Ok(())
    }

    /// Adds the items of a message. `levels` is the number of levels that may be below it.
    fn walk(&mut self, Shape(fields): &Shape, message: &[u8], levels: usize) -> Result<(), Refusal> {
        let mut reader = Reader(message);
        while !reader.0.is_empty() {
            let (number, value) = reader.field().ok_or(Refusal::Malformed)?;
            let Some(field) = fields.iter().find(|field| field.number == number) else { continue };
            let size = field.item.unwrap_or(0);
            let content = match (value, &field.content) {
                // The shortest number takes a byte.
                (Value::Bytes(packed), Content::Numbers) => {
                    self.add(packed.len(), size);
                    continue;
                }
                (Value::Bytes(content), _) => content,
                (Value::Number, Content::Numbers) => &[],
                // Decoding refuses a field of another kind.
                (Value::Number, _) => continue,
            };
            self.add(usize::from(field.item.is_some()), size);
            match &field.content {
                Content::Bytes | Content::Numbers => {}
                Content::Message(shape) => self.nested(shape, content, levels)?,
                Content::Metadata(shape) => {
                    let before = self.items;
                    self.metadata.0 += fields_of(content).filter(Result::is_ok).count();
                    self.nested(shape, content, levels)?;
                    self.metadata.1 += self.items - before;
                }
            }
        }
        Ok(())
    }

    fn nested(&mut self, shape: &Shape, message: &[u8], levels: usize) -> Result<(), Refusal> {
        self.walk(shape, message, levels.checked_sub(1).ok_or(Refusal::Nesting)?)
    }

    fn add(&mut self, items: usize, size: usize) {
        self.items += items;
        self.memory = self.memory.saturating_add(items.saturating_mul(size));
    }
}

/// Iterates over the fields that have a length (texts, bytes and messages): the number of each field, and its content.
pub fn fields_of(message: &[u8]) -> impl Iterator<Item = Result<(u64, &[u8]), Refusal>> {
    let mut reader = Reader(message);
    std::iter::from_fn(move || {
        while !reader.0.is_empty() {
            match reader.field() {
                Some((number, Value::Bytes(content))) => return Some(Ok((number, content))),
                Some((_, Value::Number)) => {}
                None => {
                    reader.0 = &[];
                    return Some(Err(Refusal::Malformed));
                }
            }
        }
        None
    })
}

/// The value of a field.
enum Value<'a> {
    Bytes(&'a [u8]),
    /// A number, or a group, which is obsolete and which decoding skips.
    Number,
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads a field; `None` if it is malformed.
    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Value::Bytes(self.take(length)?)
            }
            3 => {
                self.skip_group()?;
                Value::Number
            }
            kind => {
                self.skip_number(kind)?;
                Value::Number
            }
        };
        Some((key >> 3, value))
    }

    fn skip_number(&mut self, kind: u64) -> Option<()> {
        match kind {
            0 => self.varint().map(drop),
            1 => self.take(8).map(drop),
            5 => self.take(4).map(drop),
            _ => None,
        }
    }

    /// Skips the rest of a group, and the groups in it.
    fn skip_group(&mut self) -> Option<()> {
        let mut open = 1_usize;
        while open > 0 {
            match self.varint()? & 7 {
                2 => {
                    let length = usize::try_from(self.varint()?).ok()?;
                    self.take(length)?;
                }
                3 => open += 1,
                4 => open -= 1,
                kind => self.skip_number(kind)?,
            }
        }
        Some(())
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static INNER: Shape = Shape(&[
        Field { number: 1, item: Some(100), content: Content::Message(&INNER) },
        Field { number: 2, item: Some(8), content: Content::Numbers },
    ]);
    static OUTER: Shape = Shape(&[
        Field { number: 1, item: Some(24), content: Content::Bytes },
        Field { number: 2, item: None, content: Content::Message(&INNER) },
        Field { number: 3, item: None, content: Content::Metadata(&INNER) },
    ]);

    fn outline(message: &[u8]) -> Result<Outline, Refusal> {
        Outline::of(&OUTER, message)
    }

    fn sums(message: &[u8]) -> (usize, usize) {
        let outline = outline(message).expect("well formed");
        (outline.items, outline.memory - message.len())
    }

    #[test]
    fn items_are_counted_in_all_levels() {
        assert_eq!(sums(&[]), (0, 0));
        assert_eq!(sums(&[0x0a, 0, 0x0a, 1, b'a']), (2, 48));
        // Two messages in one another, a number alone, and three in one field.
        assert_eq!(sums(&[0x12, 11, 0x0a, 2, 0x0a, 0, 0x10, 7, 0x12, 3, 1, 2, 3]), (6, 2 * 100 + 4 * 8));
        // A field that occurs once, though it comes twice, is no item.
        assert_eq!(sums(&[0x12, 2, 0x0a, 0, 0x12, 2, 0x0a, 0]), (2, 200));
        let metadata = outline(&[0x1a, 6, 0x0a, 2, 0x0a, 0, 0x0a, 0]).expect("well formed").metadata;
        assert_eq!(metadata, (2, 3));
    }

    #[test]
    fn fields_that_decoding_skips_cost_nothing() {
        // The shape has no field 15. Its values are a number, eight bytes, four bytes, bytes, and a group with a number, bytes and a
        // group in it.
        let skipped = [
            &[0x78, 0xff, 0x01][..],
            &[0x79, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0x7d, 1, 2, 3, 4],
            &[0x7a, 2, 0x0a, 0],
            &[0x7b, 0x08, 1, 0x0a, 1, 0, 0x0b, 0x0c, 0x7c],
        ];
        assert_eq!(sums(&skipped.concat()), (0, 0));
        let fields: Vec<_> = fields_of(&skipped.concat()).map(|field| field.expect("legal").0).collect();
        assert_eq!(fields, [15]);
    }

    #[test]
    fn malformed_bytes_are_refused() {
        // A field longer than the message, a number without end, an end without a group, groups without end, and an unknown kind.
        for malformed in [
            &[0x2a, 9, 1][..],
            &[0x08, 0xff],
            &[0xff; 12],
            &[0x0c],
            &[0x0b],
            &[0x0b, 0x0b, 0x0c],
            &[0x0e],
            &[0x12, 1, 0x0a],
        ] {
            assert_eq!(outline(malformed), Err(Refusal::Malformed), "{malformed:?}");
        }
        assert_eq!(
            fields_of(&[0x0a, 0, 0x0a]).collect::<Vec<_>>(),
            [Ok((1, &[][..])), Err(Refusal::Malformed)]
        );
    }

    #[test]
    fn each_limit_names_the_number_and_itself() {
        let with = |items, memory, metadata| Outline { bytes: 1 << 20, items, memory, metadata }.check(10);
        let memory_max = MEMORY_FREE + (MEMORY_PER_BYTE << 20);
        assert_eq!(with(10, memory_max, METADATA_MAX), Ok(()));
        for (outline, text) in [
            (with(11, 0, (0, 0)), "a message with 11 items; at most 10 are allowed"),
            (
                with(0, memory_max + 1, (0, 0)),
                "a message that would take 5242881 bytes of memory; at most 5242880 are allowed for its size",
            ),
            (with(0, 0, (257, 257)), "a node with 257 values of metadata; at most 256 are allowed"),
            (
                with(0, 0, (256, 4_097)),
                "a node with 4097 values within values of metadata; at most 4096 are allowed",
            ),
        ] {
            assert_eq!(outline.map_err(|refusal| refusal.to_string()), Err(text.to_owned()));
        }
        let within = |key: u8, content: Vec<u8>| {
            let length = u8::try_from(content.len()).expect("short");
            // A length of two bytes has the upper bit in the second one.
            let head = if length < 0x80 { vec![key, length] } else { vec![key, length, 1] };
            [head, content].concat()
        };
        let deep = |levels: usize| {
            let inner = (1..levels).fold(Vec::new(), |content, _| within(0x0a, content));
            outline(&within(0x12, inner)).map(drop)
        };
        assert_eq!(deep(NESTING_MAX), Ok(()));
        assert_eq!(deep(NESTING_MAX + 1), Err(Refusal::Nesting));
    }
}
