//! What neighbours do meanwhile, from a process of its own that gives way to all others.

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

/// Connections that shake hands at once.
const HANDSHAKES_AT_ONCE: usize = 8;
/// Connections that send PINGs, and how many each of them sends in a tenth of a second: below a gateway's budget of 100
/// per second.
const PINGERS: usize = 20;
const PINGS: usize = 9;
/// Frames of one byte sent in one go.
const DRIPS: usize = 4096;
/// Downloads at once, and their size in bytes.
const DOWNLOADS: usize = 8;
const DOWNLOAD: u64 = 128 * 1024;

pub(crate) const KINDS: [&str; 4] =
    ["handshakes", "PINGs", "1-byte frames on stalled streams", "aborted downloads"];

/// An attack under way; killed when dropped.
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

    /// Ends it; how many there were in a second.
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

/// The other side of [`Attack`]: goes on until its standard input ends.
#[expect(clippy::print_stdout, reason = "it tells its parent")]
pub(crate) async fn run(kind: &str) -> Result<()> {
    // Whoever is attacked has the processor first, and so has whoever measures it.
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

/// Whole ones: the gateway's first frame says that it has seen the certificate.
async fn handshakes(identity: &Identity, target: SocketAddr, count: &AtomicU64) -> Result<()> {
    loop {
        let mut tls = identity.secure(target).await?;
        tls.write_all(PREFACE).await?;
        tls.read_u8().await?;
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The preface of HTTP/2, with SETTINGS that set nothing.
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

/// To an endpoint that takes nothing: as many as the window lets through, and then on a new stream.
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

/// So many downloads, each given up when its first bytes are here; how often the gateway has ended the connection
/// instead.
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
