//! Waits for a socket to become readable, in a task that waits for several sockets.
//!
//! Whenever one of the sockets wakes the task, the task asks about all of them. The poller still knows that the task waits for
//! the others, so [`Readable`] does not register the task again, which would take a lock and a comparison of wakers.

use std::task::Context;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::task::coop;

/// One task's wait for one socket.
#[derive(Debug, Default)]
pub struct Readable {
    /// True if the poller will wake the task once the socket is readable.
    is_registered: bool,
}

impl Readable {
    /// Returns true if a read would find bytes, the end of the stream or an error, as far as the poller knows. Otherwise the
    /// task is woken once that is so.
    ///
    /// All calls must be about the same socket, from the same task.
    pub fn poll(&mut self, socket: &TcpStream, context: &mut Context<'_>) -> bool {
        let is_ready = if self.is_registered {
            socket.try_io(Interest::READABLE, || Ok(())).is_ok()
        } else {
            socket.poll_read_ready(context).is_ready()
        };
        // A task that has used up its budget is not registered, but woken on the next turn of the runtime.
        self.is_registered = !is_ready && (self.is_registered || coop::has_budget_remaining());
        is_ready
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;
    use std::time::Duration;

    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;
    use crate::net::socket::receive;

    async fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
        let (near, _) = listener.accept().await.expect("a connection");
        // The runtime takes an accepted socket for readable until a read finds nothing.
        receive(&near, &mut [0]).expect_err("nothing was sent");
        (client, near)
    }

    /// Waits until the socket is readable, and reads what has arrived.
    async fn read(readable: &mut Readable, socket: &TcpStream) -> usize {
        let wait =
            poll_fn(|context| if readable.poll(socket, context) { Poll::Ready(()) } else { Poll::Pending });
        tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the task is woken");
        receive(socket, &mut [0; 64]).expect("read")
    }

    #[tokio::test]
    async fn a_socket_wakes_the_task_again_and_again_and_at_its_end() {
        let (mut far, near) = connection().await;
        let mut readable = Readable::default();
        for round in 0..20 {
            let is_ready = poll_fn(|context| Poll::Ready(readable.poll(&near, context))).await;
            assert!(!is_ready && readable.is_registered, "round {round}");
            let (count, written) = tokio::join!(read(&mut readable, &near), async {
                tokio::task::yield_now().await;
                far.write_all(b"hello").await
            });
            written.expect("written");
            assert_eq!((count, readable.is_registered), (5, false), "round {round}");
        }
        drop(far);
        assert_eq!(read(&mut readable, &near).await, 0);
    }

    #[tokio::test]
    async fn a_task_without_budget_is_registered_later() {
        let (mut far, near) = connection().await;
        let mut readable = Readable::default();
        let is_ready = poll_fn(|context| {
            while coop::has_budget_remaining() {
                assert!(std::pin::pin!(coop::consume_budget()).poll(context).is_ready(), "it had budget");
            }
            Poll::Ready(readable.poll(&near, context))
        });
        assert!(!is_ready.await && !readable.is_registered);
        let (count, written) = tokio::join!(read(&mut readable, &near), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            far.write_all(b"hello").await
        });
        written.expect("written");
        assert_eq!(count, 5);
    }
}
