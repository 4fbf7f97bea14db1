//! gRPC messages on a stream: each behind its head.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

/// Puts a message behind its head: not compressed, and its length.
pub(crate) fn frame(message: &impl Message) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX));
    bytes.extend_from_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Takes the next whole message out, without its head.
pub(crate) fn take_frame(buffer: &mut BytesMut) -> Option<Bytes> {
    let length = buffer.get(1..5)?.get_u32() as usize;
    if buffer.len() < 5 + length {
        return None;
    }
    buffer.advance(5);
    Some(buffer.split_to(length).freeze())
}
