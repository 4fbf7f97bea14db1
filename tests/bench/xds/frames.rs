//! gRPC messages on a stream, each with its header.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

/// Returns a message with its header: a flag for no compression, and the length.
pub(crate) fn frame(message: &impl Message) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX));
    bytes.extend_from_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Removes the next whole message from the buffer; returns it without its header.
pub(crate) fn take_frame(buffer: &mut BytesMut) -> Option<Bytes> {
    let length = buffer.get(1..5)?.get_u32() as usize;
    if buffer.len() < 5 + length {
        return None;
    }
    buffer.advance(5);
    Some(buffer.split_to(length).freeze())
}
