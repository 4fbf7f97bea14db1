//! Attacks of other callers, made by a process with low priority.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::Result;
use crate::caller::{Identity, at_once};
use crate::gateways::{Side, again, authority};

const TARGET: &str = "ISTHMUS_BENCH_TARGET";
const FOLDER: &str = "ISTHMUS_BENCH_FOLDER";

/// The number of connections that shake hands at the same time.
const HANDSHAKES_AT_ONCE: usize = 8;
/// The number of connections that send PINGs.
const PINGERS: usize = 20;
/// The number of PINGs per connection and tenth of a second: below a gateway's limit of 100 per second.
const PINGS: usize = 9;
/// The number of one-byte frames sent at once.
const DRIPS: usize = 4096;
/// The number of downloads at the same time.
const DOWNLOADS: usize = 8;
/// The size of a download in bytes.
const DOWNLOAD: u64 = 128 * 1024;

pub(crate) const KINDS: [&str; 4] =
    ["handshakes", "PINGs", "1-byte frames on stalled streams", "aborted downloads"];

/// An attack that another process makes; killed when dropped.
pub(crate) struct Attack {
    child: Child,
}

impl Attack {
    pub(crate) fn start(kind: &str, on: &Side) -> Result<Self> {
        let child = again(kind)
            .env(TARGET, on.address.to_string())
            .env(FOLDER, on.folder())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut attack = Self { child };
        attack.line()?;
        Ok(attack)
    }

    /// Ends the attack; returns the number of its actions per second.
    pub(crate) fn end(mut self) -> Result<f64> {
        drop(self.child.stdin.take());
        Ok(self.line()?.trim().parse()?)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let stdout = self.child.stdout.as_mut().ok_or("no stdout")?;
        BufReader::with_capacity(1, stdout).read_line(&mut line)?;
        Ok(line)
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The attacking process, which [`Attack`] starts: it attacks until its standard input ends.
#[expect(clippy::print_stdout, reason = "it tells its parent")]
pub(crate) async fn run(kind: &str) -> Result<()> {
    // The gateway and the measuring process have priority over the attacker.
    rustix::process::nice(15)?;
    let identity = Identity::read(env::var(FOLDER)?.as_ref())?;
    let target: SocketAddr = env::var(TARGET)?.parse()?;
    let stop = tokio::task::spawn_blocking(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    });
    println!("begun");
    let (begun, count) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let many = match kind {
        "handshakes" => HANDSHAKES_AT_ONCE,
        "PINGs" => PINGERS,
        _ => 1,
    };
    let mut tasks = JoinSet::new();
    for _ in 0..many {
        let (identity, count, kind) = (identity.clone(), count.clone(), kind.to_owned());
        tasks.spawn(async move {
            let ended = match kind.as_str() {
                "handshakes" => handshakes(&identity, target, &count).await,
                "PINGs" => pings(&identity, target, &count).await,
                "aborted downloads" => aborts(&identity, target, u64::MAX, &count).await.map(drop),
                _ => drips(&identity, target, &count).await,
            };
            if let Err(error) = ended {
                eprintln!("{kind}: {error}");
            }
        });
    }
    stop.await?;
    println!("{}", count.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64());
    Ok(())
}

/// Makes whole handshakes: the gateway's first frame shows that it has verified the certificate.
async fn handshakes(identity: &Identity, target: SocketAddr, count: &AtomicU64) -> Result<()> {
    loop {
        let mut tls = identity.secure(target).await?;
        tls.write_all(PREFACE).await?;
        tls.read_u8().await?;
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The preface of HTTP/2, and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

async fn pings(identity: &Identity, target: SocketAddr, count: &AtomicU64) -> Result<()> {
    let mut tls = identity.secure(target).await?;
    tls.write_all(PREFACE).await?;
    let (mut reader, mut writer) = tokio::io::split(tls);
    let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    let answers = async {
        let mut bytes = [0; 4096];
        while reader.read(&mut bytes).await? > 0 {}
        Err("it has closed the connection".into())
    };
    let questions = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            writer.write_all(&ping.repeat(PINGS)).await?;
            writer.flush().await?;
            count.fetch_add(PINGS as u64, Ordering::Relaxed);
        }
    };
    tokio::select! { ended = answers => ended, ended = questions => ended }
}

/// Sends one-byte frames to an endpoint that reads nothing, as many as the window allows, and then goes on with a new stream.
async fn drips(identity: &Identity, target: SocketAddr, count: &AtomicU64) -> Result<()> {
    let caller = identity.call(target).await?;
    loop {
        let mut stream = caller.open(&authority("hole")).await?;
        loop {
            let room = tokio::time::timeout(Duration::from_millis(20), stream.room(DRIPS)).await;
            let Ok(room) = room else { break };
            let room = room?.min(DRIPS);
            for _ in 0..room {
                stream.send(Bytes::from_static(b"x"))?;
            }
            count.fetch_add(room as u64, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
        stream.give_up();
    }
}

/// Makes `most` downloads, and aborts each after its first bytes; returns how often the gateway has closed the connection
/// meanwhile.
pub(crate) async fn aborts(
    identity: &Identity,
    target: SocketAddr,
    most: u64,
    count: &Arc<AtomicU64>,
) -> Result<u64> {
    let mut ended = 0;
    while count.load(Ordering::Relaxed) < most {
        let caller = Arc::new(identity.call(target).await?);
        let each = |_| {
            let (caller, count) = (caller.clone(), count.clone());
            async move {
                while count.load(Ordering::Relaxed) < most {
                    let mut stream = caller.open(&authority("source")).await?;
                    stream.write(Bytes::copy_from_slice(&DOWNLOAD.to_be_bytes())).await?;
                    stream.read().await?.ok_or("no download")?;
                    stream.give_up();
                    count.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
        };
        if let Err(error) = at_once(DOWNLOADS, each).await {
            ended += 1;
            if ended == 1_000 {
                return Err(error);
            }
        }
        if let Ok(caller) = Arc::try_unwrap(caller) {
            caller.close().await;
        }
    }
    Ok(ended)
}
