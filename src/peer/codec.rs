//! The codec of a link's messages. A message is decoded only if the peer has not sent too many within a second, and if it has not
//! too many items.

use std::sync::Arc;
use std::time::Duration;

use prost::bytes::Buf;
use tokio::time::Instant;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use super::outline::ITEMS_MAX;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_wire::outline;

/// The largest number of messages within a second. A peer waits for the answers to its heartbeats and items, so it sends few.
const MESSAGES_MAX: u32 = 1_000;
const SECOND: Duration = Duration::from_secs(1);

/// The source of the status that ends a link because of its peer's messages. The text of the status is the reason.
#[derive(Debug, thiserror::Error)]
#[error("the peer broke a limit on messages")]
pub(super) struct Excess;

/// The codec of a link.
#[derive(Default)]
pub(super) struct LinkCodec;

/// The decoder of a link's messages.
pub(super) struct LinkDecoder {
    /// The begin of the second in which `messages` are counted.
    second: Instant,
    messages: u32,
}

impl Codec for LinkCodec {
    type Encode = proto::Message;
    type Decode = proto::Message;
    type Encoder = ProstEncoder<proto::Message>;
    type Decoder = LinkDecoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> LinkDecoder {
        LinkDecoder { second: Instant::now(), messages: 0 }
    }
}

impl LinkDecoder {
    fn count(&mut self) -> Result<(), Status> {
        if self.second.elapsed() >= SECOND {
            (self.second, self.messages) = (Instant::now(), 0);
        }
        self.messages += 1;
        if self.messages > MESSAGES_MAX {
            return Err(excess(format!("more than {MESSAGES_MAX} messages within a second")));
        }
        Ok(())
    }
}

impl Decoder for LinkDecoder {
    type Item = proto::Message;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<proto::Message>, Status> {
        let bytes = source.copy_to_bytes(source.remaining());
        self.count()?;
        outline::decode(bytes, ITEMS_MAX).map(Some).map_err(|refusal| excess(refusal.to_string()))
    }
}

fn excess(text: String) -> Status {
    let mut status = Status::resource_exhausted(text);
    status.set_source(Arc::new(Excess));
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_may_send_a_thousand_messages_each_second() {
        let mut decoder = LinkCodec.decoder();
        let mut refused = async |after: Duration, count: u32| {
            tokio::time::advance(after).await;
            (0..count).filter(|_| decoder.count().is_err()).count()
        };
        assert_eq!(refused(Duration::ZERO, 1_001).await, 1);
        assert_eq!(refused(Duration::from_millis(999), 1).await, 1);
        assert_eq!(refused(Duration::from_millis(1), 1_000).await, 0);
    }
}
