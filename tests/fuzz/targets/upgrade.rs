//! The bytes on the upgrade socket: the messages are the same however the bytes are cut, a message that is sent again is received as
//! the same, and so is the record of a connection.

use std::cell::OnceCell;

use isthmus::upgrade::channel::Channel;
use isthmus::upgrade::message::Message;
use isthmus::upgrade::record::Record;
use tokio::net::UnixStream;

use super::random_of;

/// The messages with their tails, and the error that ends them.
type Received = (Vec<(Message, Vec<u8>)>, String);

pub(super) fn run(data: &[u8]) {
    thread_local!(static RUNTIME: OnceCell<tokio::runtime::Runtime> = const { OnceCell::new() });
    RUNTIME.with(|runtime| {
        let new = || tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
        runtime.get_or_init(new).block_on(check(data));
    });
}

async fn check(data: &[u8]) {
    let (messages, error) = received(data, &[data.len()]).await;
    let ends = random_of(data).cuts(data.len());
    assert_eq!(received(data, &ends).await, (messages.clone(), error), "cut at {ends:?}");
    for (message, tail) in messages {
        if let Message::Connections { records, .. } = message {
            // The numbers in what is no record of a connection may have more digits than are kept.
            for record in records.into_iter().filter_map(|record| Record::read(record).ok()) {
                assert_eq!(Record::read(record.write()).as_ref(), Ok(&record));
            }
            continue;
        }
        let (one, mut other) = pair();
        let (sent, again) = tokio::join!(one.send_with(&message, &tail, &[]), other.receive());
        sent.expect("sent");
        let again = again.expect("received");
        assert_eq!((again.message, again.tail), (message, tail));
    }
}

/// Sends the bytes in pieces that end here, and returns what is received.
async fn received(data: &[u8], ends: &[usize]) -> Received {
    let (sender, receiver) = UnixStream::pair().expect("a pair");
    let mut channel = Channel::new(receiver).expect("of this user");
    let sends = async move {
        let mut begin = 0;
        for end in ends {
            while begin < *end {
                sender.writable().await.expect("open");
                // After a message that cannot be read, the rest has no reader.
                let Ok(count) = sender.try_write(&data[begin..*end]) else { return };
                begin += count;
            }
            tokio::task::yield_now().await;
        }
    };
    let receives = async move {
        let mut messages = Vec::new();
        loop {
            match channel.receive().await {
                Ok(received) => messages.push((received.message, received.tail)),
                Err(error) => return (messages, error.to_string()),
            }
        }
    };
    tokio::join!(sends, receives).1
}

fn pair() -> (Channel, Channel) {
    let (one, other) = UnixStream::pair().expect("a pair");
    (Channel::new(one).expect("of this user"), Channel::new(other).expect("of this user"))
}
