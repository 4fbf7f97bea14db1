//! The upgrade socket between two processes: messages with descriptors, in order. Both processes must run as the same user.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};
use rustix::process::geteuid;
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::frame::{HEAD_BYTES, Head};
use super::message::Message;

/// The number of bytes that one read takes at most.
const READ_BYTES: usize = 256 << 10;
/// The room for the descriptors of one read: those of one message, as the kernel never merges two.
const ROOM: usize = rustix::cmsg_space!(ScmRights(253));

/// One end of the socket.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    /// The bytes of the message that has arrived in part.
    buffer: Vec<u8>,
    /// The descriptors that have arrived, in their order.
    descriptors: VecDeque<OwnedFd>,
    peer: u32,
    /// True if a part of a message was sent, and not the rest.
    is_cut: AtomicBool,
}

/// A message that was received.
#[derive(Debug)]
pub struct Received {
    /// The message.
    pub message: Message,
    /// The bytes that connections hold.
    pub tail: Vec<u8>,
    /// The descriptors. Those of connections may be too few, if this process has reached its limit.
    pub descriptors: Vec<OwnedFd>,
}

impl Channel {
    /// Connects to the socket at this path.
    pub async fn connect(path: &Path) -> io::Result<Self> {
        Self::new(UnixStream::connect(path).await?)
    }

    /// Takes a connected socket. Returns an error if the other process runs as another user.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        let peer = socket_peercred(&stream)?;
        if peer.uid != geteuid() {
            let why =
                format!("process {} runs as another user, {}", peer.pid.as_raw_pid(), peer.uid.as_raw());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let peer = u32::try_from(peer.pid.as_raw_pid()).unwrap_or_default();
        let is_cut = AtomicBool::new(false);
        Ok(Self { stream, buffer: Vec::new(), descriptors: VecDeque::new(), peer, is_cut })
    }

    /// Returns the id of the other process.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// Returns true if further messages can be sent: the last one was sent whole, or not at all.
    pub fn is_intact(&self) -> bool {
        !self.is_cut.load(Ordering::Relaxed)
    }

    /// Sends a message. If the future is dropped before its end, the channel cannot be used any more.
    pub async fn send(&self, message: &Message) -> io::Result<()> {
        self.send_with(message, &[], &[]).await
    }

    /// Sends a message with the bytes that connections hold, and descriptors.
    pub async fn send_with(
        &self,
        message: &Message,
        tail: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let json = serde_json::to_vec(message).map_err(io::Error::other)?;
        let head = Head::new(json.len(), tail.len(), descriptors.len()).map_err(io::Error::other)?.bytes();
        let mut pieces = [IoSlice::new(&head), IoSlice::new(&json), IoSlice::new(tail)];
        let mut left = &mut pieces[..];
        let mut descriptors = descriptors;
        while !left.is_empty() {
            self.stream.writable().await?;
            let sent = self.stream.try_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); ROOM];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
                    return Err(io::Error::other("too many descriptors"));
                }
                Ok(sendmsg(&self.stream, left, &mut control, SendFlags::NOSIGNAL)?)
            });
            match sent {
                Ok(sent) => {
                    descriptors = &[];
                    self.is_cut.store(true, Ordering::Relaxed);
                    IoSlice::advance_slices(&mut left, sent);
                }
                Err(error) if is_again(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.is_cut.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Waits for the next message. Cancel safe. The error is `UnexpectedEof` if the other process has closed the socket.
    pub async fn receive(&mut self) -> io::Result<Received> {
        loop {
            let wanted = match self.buffer.first_chunk::<HEAD_BYTES>() {
                None => HEAD_BYTES,
                Some(head) => {
                    let head = Head::read(*head).map_err(io::Error::other)?;
                    if self.buffer.len() == head.whole() {
                        return self.take(head);
                    }
                    head.whole()
                }
            };
            self.stream.readable().await?;
            match self.read(wanted - self.buffer.len()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if is_again(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Reads at most this many bytes, which end at the end of a message: the descriptors that come with them are its own.
    fn read(&mut self, most: usize) -> io::Result<usize> {
        let Self { stream, buffer, descriptors, .. } = self;
        let before = buffer.len();
        buffer.resize(before + most.min(READ_BYTES), 0);
        let read = stream.try_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); ROOM];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let into = &mut buffer[before..];
            let read =
                recvmsg(&*stream, &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            Ok(read.bytes)
        });
        buffer.truncate(before + read.as_ref().copied().unwrap_or(0));
        read
    }

    fn take(&mut self, head: Head) -> io::Result<Received> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let found = self.descriptors.len();
        let mut bytes = std::mem::take(&mut self.buffer);
        let tail = bytes.split_off(HEAD_BYTES + head.json);
        let message = serde_json::from_slice(&bytes[HEAD_BYTES..])
            .map_err(|error| invalid(format!("a message cannot be read: {error}")))?;
        // The kernel drops descriptors above the limit of this process. A group of connections then stays where it is.
        let may_lack = matches!(message, Message::Connections { .. });
        if found > head.descriptors || (found < head.descriptors && !may_lack) {
            return Err(invalid(format!(
                "a message has {found} descriptors in place of {}; the limit of descriptors may be reached",
                head.descriptors
            )));
        }
        Ok(Received { message, tail, descriptors: self.descriptors.drain(..).collect() })
    }

    /// Ends the direction in which messages are received: from now on the other process gets an error when it sends. Messages
    /// that it has sent before can still be received.
    pub fn stop_receiving(&self) {
        // Fails only if the socket is not connected any more.
        let _ = shutdown(&self.stream, Shutdown::Read);
    }
}

fn is_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().expect("a pair");
        (Channel::new(one).expect("ours"), Channel::new(other).expect("ours"))
    }

    fn failed(why: &str) -> Message {
        Message::Failed { why: why.to_owned() }
    }

    #[tokio::test]
    async fn messages_keep_their_order_and_their_descriptors() {
        let (one, mut other) = pair();
        let files = [tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file")];
        let descriptors: Vec<BorrowedFd<'_>> = files.iter().cycle().take(252).map(AsFd::as_fd).collect();
        let tail = vec![7; 3 << 20];
        let sends = async {
            one.send(&failed("a")).await.expect("sent");
            one.send_with(&failed("b"), &tail, &descriptors).await.expect("sent");
            one.send_with(&failed("c"), &[1], &descriptors[..1]).await.expect("sent");
        };
        let receives = async {
            for (why, length, count) in [("a", 0, 0), ("b", tail.len(), 252), ("c", 1, 1)] {
                let received = other.receive().await.expect("a message");
                assert_eq!(received.message, failed(why));
                assert_eq!((received.tail.len(), received.descriptors.len()), (length, count));
            }
        };
        tokio::join!(sends, receives);
        drop(one);
        let end = other.receive().await.expect_err("the end");
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn lies_about_lengths_and_descriptors_are_refused() {
        for lie in [
            [0xff; HEAD_BYTES],
            Head { json: 2, tail: 0, descriptors: 1 }.bytes(),
            Head { json: 2, tail: 0, descriptors: 0 }.bytes(),
        ] {
            let (one, mut other) = pair();
            one.stream.try_write(&[&lie[..], b"[]"].concat()).expect("written");
            assert!(other.receive().await.is_err(), "{lie:?}");
        }
    }

    #[tokio::test]
    async fn a_group_of_connections_that_lacks_descriptors_ends_nothing() {
        let (one, mut other) = pair();
        let records = br#"{"type": "connections", "records": [null], "held": [[0, 0]]}"#;
        let head = Head { json: records.len(), tail: 0, descriptors: 2 }.bytes();
        one.stream.try_write(&[&head[..], records].concat()).expect("written");
        one.send(&failed("later")).await.expect("sent");
        let group = other.receive().await.expect("a group");
        assert!(matches!(group.message, Message::Connections { .. }) && group.descriptors.is_empty());
        assert_eq!(other.receive().await.expect("the next message").message, failed("later"));
    }

    #[tokio::test]
    async fn a_message_that_is_refused_before_it_is_sent_leaves_the_channel_intact() {
        let (one, mut other) = pair();
        let tail = vec![0; super::super::frame::TAIL_BYTES_MAX + 1];
        assert!(one.send_with(&failed("too large"), &tail, &[]).await.is_err());
        assert!(one.is_intact());
        one.send(&failed("b")).await.expect("sent");
        assert_eq!(other.receive().await.expect("a message").message, failed("b"));
    }

    #[tokio::test]
    async fn an_answer_is_either_received_or_refused_once_receiving_has_stopped() {
        let (one, mut other) = pair();
        one.send(&failed("in time")).await.expect("sent");
        other.stop_receiving();
        assert!(one.send(&failed("too late")).await.is_err());
        assert_eq!(other.receive().await.expect("in time").message, failed("in time"));
        assert!(other.receive().await.is_err());
    }
}
