//! One end of an upgrade socket, written from the description in `src/upgrade` and with none of its code: frames of JSON, with
//! descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde_json::Value;

/// A scripted process at an upgrade socket.
pub struct Handover {
    pub stream: UnixStream,
    descriptors: VecDeque<OwnedFd>,
}

/// A message with the bytes that connections hold, and descriptors.
pub struct Message {
    pub json: Value,
    pub tail: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

impl Handover {
    pub fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        Self { stream, descriptors: VecDeque::new() }
    }

    #[track_caller]
    pub fn send(&self, json: &Value, tail: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let json = json.to_string().into_bytes();
        let count = u16::try_from(descriptors.len()).expect("few");
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("short").to_le_bytes();
        let bytes = [&length(&json)[..], &length(tail), &count.to_le_bytes(), &json, tail].concat();
        self.send_raw(&bytes, descriptors).expect("sent");
    }

    pub fn send_raw(&self, mut bytes: &[u8], mut descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "room");
            }
            let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
            (bytes, descriptors) = (&bytes[sent..], &[]);
        }
        Ok(())
    }

    fn read(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while filled < length {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let into = &mut [IoSliceMut::new(&mut bytes[filled..])];
            let read = recvmsg(&self.stream, into, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    self.descriptors.extend(rights);
                }
            }
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            filled += read;
        }
        Ok(bytes)
    }

    pub fn try_receive(&mut self) -> io::Result<Message> {
        let head = self.read(10)?;
        let length = |at: usize| {
            u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes")).try_into().expect("a length")
        };
        let (json, tail) = (self.read(length(0))?, self.read(length(4))?);
        let count = u16::from_le_bytes([head[8], head[9]]);
        let descriptors = self.descriptors.drain(..usize::from(count)).collect();
        Ok(Message { json: serde_json::from_slice(&json).expect("JSON"), tail, descriptors })
    }

    /// Receives messages until one of this type, and returns it.
    #[track_caller]
    pub fn until(&mut self, kind: &str) -> Message {
        loop {
            let message = self.try_receive().unwrap_or_else(|error| panic!("no {kind}: {error}"));
            if message.json["type"] == kind {
                return message;
            }
            assert_ne!(message.json["type"], "abort", "{}", message.json);
        }
    }
}
