//! The measurements: some work through a gateway, and its cost.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::Result;
use crate::attacks;
use crate::caller::{Caller, Identity, Stream, at_once};
use crate::gateways::{Side, authority};
use crate::median::median;

/// The message of a round trip.
static MESSAGE: [u8; 128] = [7; 128];
const MESSAGE_BYTES: Bytes = Bytes::from_static(&MESSAGE);
/// The number of bytes that a caller sends at once.
const PIECE: usize = 256 * 1024;
/// The number of connections over which CONNECTs are opened.
const CONNECTIONS: usize = 4;
/// The number of CONNECTs at the same time.
const CONNECTS_AT_ONCE: usize = 16;
/// The number of handshakes at the same time.
const HANDSHAKES_AT_ONCE: usize = 4;
/// The number of connections that share the idle streams.
const IDLE_CONNECTIONS: usize = 5;
/// The number of round trips begun per millisecond in the open loop.
const PER_MILLISECOND: usize = 5;

pub(crate) type Measured = Vec<(String, f64)>;

/// The names of measurements, and their values by gateway and round.
#[derive(Default)]
pub(crate) struct Figures {
    rows: Vec<(String, [Vec<f64>; 2])>,
}

impl Figures {
    pub(crate) fn add(&mut self, name: &str, column: usize, value: f64) {
        let at = self.rows.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            self.rows.push((name.to_owned(), Default::default()));
            self.rows.len() - 1
        });
        self.rows[at].1[column].push(value);
    }

    #[expect(clippy::print_stdout, reason = "what it is for")]
    pub(crate) fn print(&mut self, names: [&str; 2]) {
        println!("| median (range) | {} | {} | ratio |\n|---|---:|---:|---:|", names[0], names[1]);
        for (name, columns) in &mut self.rows {
            let [ours, theirs] = &*columns;
            // The ratio is taken within a round, because other load of the machine changes between rounds.
            let ratios = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs);
            let ratio = median(ratios.filter(|ratio| ratio.is_finite()))
                .map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
            let [our_text, their_text] = columns.each_mut().map(|values| {
                values.sort_by(f64::total_cmp);
                let Some(median) = median(values.iter().copied()) else { return "–".to_owned() };
                match values.as_slice() {
                    [least, .., most] => {
                        format!("{} ({}–{})", number(median), number(*least), number(*most))
                    }
                    _ => number(median),
                }
            });
            println!("| {name} | {our_text} | {their_text} | {ratio} |");
        }
    }
}

/// Returns a number with three significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn per_mille(times: &mut [f64], at: usize) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get((times.len().saturating_sub(1)) * at / 1000).copied().unwrap_or(f64::NAN)
}

/// Returns a gateway's processor time and the wall time, before some work.
fn begin(side: &Side) -> Result<(Duration, Instant)> {
    Ok((side.processor_time()?, Instant::now()))
}

/// Returns the processor time and the wall time of some work, in seconds.
fn spent(side: &Side, (processor, wall): (Duration, Instant)) -> Result<(f64, f64)> {
    Ok(((side.processor_time()? - processor).as_secs_f64(), wall.elapsed().as_secs_f64()))
}

async fn callers(side: &Side, identity: &Identity, count: usize) -> Result<Vec<Arc<Caller>>> {
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        all.push(Arc::new(identity.call(side.address).await?));
    }
    Ok(all)
}

/// Measures CONNECT, echo and end on existing connections.
pub(crate) async fn connects(side: &Side, identity: &Identity, count: usize) -> Result<Measured> {
    let callers = callers(side, identity, CONNECTIONS).await?;
    let echo = authority("echo");
    for caller in &callers {
        caller.open(&echo).await?.close().await?;
    }
    let before = begin(side)?;
    at_once(CONNECTS_AT_ONCE, |task| {
        let (caller, echo) = (callers[task % CONNECTIONS].clone(), echo.clone());
        async move {
            for _ in 0..count / CONNECTS_AT_ONCE {
                let mut stream = caller.open(&echo).await?;
                stream.echo(&MESSAGE_BYTES).await?;
                stream.close().await?;
            }
            Ok(())
        }
    })
    .await?;
    let (processor, wall) = spent(side, before)?;
    let done = (count / CONNECTS_AT_ONCE * CONNECTS_AT_ONCE) as f64;
    Ok(vec![
        ("CONNECTs per second, 16 at once".into(), done / wall),
        ("processor µs per CONNECT, 16 at once".into(), processor / done * 1e6),
    ])
}

/// Measures whole connections: TCP, TLS, HTTP/2, and one CONNECT with an echo.
pub(crate) async fn handshakes(side: &Side, identity: &Identity, count: usize) -> Result<Measured> {
    let (address, echo) = (side.address, authority("echo"));
    let before = begin(side)?;
    at_once(HANDSHAKES_AT_ONCE, |_| {
        let (identity, echo) = (identity.clone(), echo.clone());
        async move {
            for _ in 0..count / HANDSHAKES_AT_ONCE {
                let caller = identity.call(address).await?;
                let mut stream = caller.open(&echo).await?;
                stream.echo(&MESSAGE_BYTES).await?;
                stream.close().await?;
                caller.close().await;
            }
            Ok(())
        }
    })
    .await?;
    let (processor, _) = spent(side, before)?;
    Ok(vec![("processor µs per connection with one CONNECT".into(), processor / count as f64 * 1e6)])
}

fn throughput(what: &str, streams: usize, bytes: usize, (processor, wall): (f64, f64)) -> Measured {
    let gibibytes = bytes as f64 / f64::from(1 << 30);
    let streams = if streams == 1 { "1 stream".to_owned() } else { format!("{streams} streams") };
    vec![
        (format!("processor s per GiB {what}, {streams}"), processor / gibibytes),
        (format!("  Gbit/s {what}, {streams}"), bytes as f64 * 8e-9 / wall),
    ]
}

/// Measures `streams` concurrent streams; `share` moves the part of the bytes that belongs to one stream.
async fn bulk<F: Future<Output = Result<()>> + Send + 'static>(
    what: &str,
    (side, caller): (&Side, Caller),
    bytes: usize,
    streams: usize,
    share: impl Fn(Arc<Caller>, usize) -> F,
) -> Result<Measured> {
    let caller = Arc::new(caller);
    let before = begin(side)?;
    at_once(streams, |_| share(caller.clone(), bytes / streams)).await?;
    Ok(throughput(what, streams, bytes, spent(side, before)?))
}

pub(crate) async fn upload(by: (&Side, Caller), bytes: usize, streams: usize) -> Result<Measured> {
    static BYTES: [u8; PIECE] = [7; PIECE];
    bulk("up", by, bytes, streams, async |caller, each| {
        let mut stream = caller.open(&authority("sink")).await?;
        let mut left = each;
        while left > 0 {
            let piece = left.min(PIECE);
            stream.write(Bytes::from_static(&BYTES[..piece])).await?;
            left -= piece;
        }
        stream.end()?;
        let told = stream.read().await?.ok_or("no answer")?;
        if told.as_ref() != (each as u64).to_be_bytes() {
            return Err("not all has arrived".into());
        }
        stream.drain().await.map(drop)
    })
    .await
}

/// Returns the rate of an upload on one stream, in MiB per second.
pub(crate) async fn upload_rate(by: (&Side, Caller), bytes: usize) -> Result<f64> {
    let begun = Instant::now();
    upload(by, bytes, 1).await?;
    Ok(bytes as f64 / f64::from(1 << 20) / begun.elapsed().as_secs_f64())
}

pub(crate) async fn download(
    what: &str,
    by: (&Side, Caller),
    bytes: usize,
    streams: usize,
) -> Result<Measured> {
    bulk(what, by, bytes, streams, async |caller, each| {
        let mut stream = caller.open(&authority("source")).await?;
        stream.write(Bytes::copy_from_slice(&(each as u64).to_be_bytes())).await?;
        stream.take(each).await?;
        stream.close().await
    })
    .await
}

/// Measures round trips one after another on one stream.
pub(crate) async fn ping_pong(side: &Side, identity: &Identity, count: usize) -> Result<Measured> {
    let caller = identity.call(side.address).await?;
    let mut stream = caller.open(&authority("echo")).await?;
    stream.echo(&MESSAGE_BYTES).await?;
    let mut times = Vec::with_capacity(count);
    let before = begin(side)?;
    for _ in 0..count {
        let begun = Instant::now();
        stream.echo(&MESSAGE_BYTES).await?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let (processor, _) = spent(side, before)?;
    Ok(latency("1 stream, ping-pong", processor, times))
}

fn latency(what: &str, processor: f64, mut times: Vec<f64>) -> Measured {
    vec![
        (format!("round trip p50 µs, {what}"), per_mille(&mut times, 500)),
        (format!("round trip p99 µs, {what}"), per_mille(&mut times, 990)),
        (format!("processor µs per round trip, {what}"), processor / times.len() as f64 * 1e6),
    ]
}

/// Begins some round trips every millisecond, whether or not earlier ones have come back, on the streams in turn.
pub(crate) async fn open_loop(
    side: &Side,
    identity: &Identity,
    streams: usize,
    seconds: f64,
) -> Result<Measured> {
    let caller = identity.call(side.address).await?;
    let times = Arc::new(Mutex::new(Vec::new()));
    let (mut orders, mut tasks) = (Vec::new(), tokio::task::JoinSet::new());
    for _ in 0..streams {
        let mut stream = caller.open(&authority("echo")).await?;
        stream.echo(&MESSAGE_BYTES).await?;
        let (order, mut ordered) = mpsc::channel::<Instant>(64);
        orders.push(order);
        let times = times.clone();
        tasks.spawn(async move {
            while let Some(begun) = ordered.recv().await {
                stream.echo(&MESSAGE_BYTES).await?;
                times.lock().expect("not poisoned").push(begun.elapsed().as_secs_f64() * 1e6);
            }
            stream.close().await
        });
    }
    let before = begin(side)?;
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut next = orders.iter().cycle();
    while before.1.elapsed().as_secs_f64() < seconds {
        ticks.tick().await;
        let begun = Instant::now();
        for order in next.by_ref().take(PER_MILLISECOND) {
            order.try_send(begun).map_err(|_| "a stream stands still")?;
        }
    }
    drop(orders);
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let (processor, _) = spent(side, before)?;
    let times = std::mem::take(&mut *times.lock().expect("not poisoned"));
    Ok(latency(&format!("{streams} streams, {PER_MILLISECOND} every ms"), processor, times))
}

/// Measures the round trips of a caller that makes one now and then.
pub(crate) async fn innocent(side: &Side, identity: &Identity, seconds: f64, when: &str) -> Result<Measured> {
    let caller = identity.call(side.address).await?;
    let mut stream = caller.open(&authority("echo")).await?;
    let (mut times, begun) = (Vec::new(), Instant::now());
    while begun.elapsed().as_secs_f64() < seconds {
        let sent = Instant::now();
        stream.echo(&MESSAGE_BYTES).await?;
        times.push(sent.elapsed().as_secs_f64() * 1e6);
        // A blocking sleep is fine, because the thread has no other task; the runtime's timer is too coarse.
        std::thread::sleep(Duration::from_micros(200));
    }
    stream.close().await?;
    Ok(vec![
        (format!("innocent p50 {when}, µs"), per_mille(&mut times, 500)),
        (format!("innocent p99 {when}, µs"), per_mille(&mut times, 990)),
    ])
}

/// Returns the resident bytes per connection without streams.
pub(crate) async fn idle_connections(side: &Side, identity: &Identity, count: usize) -> Result<f64> {
    idle_stream(&callers(side, identity, 1).await?[0]).await?.close().await?;
    let before = side.memory()?;
    let all = callers(side, identity, count).await?;
    // A stream on the last connection shows that the gateway serves all of them.
    drop(idle_stream(&all[count - 1]).await?);
    Ok((side.memory()? - before) / count as f64)
}

/// Returns the resident bytes per stream after one round trip.
pub(crate) async fn idle_streams(side: &Side, identity: &Identity, each: usize) -> Result<f64> {
    let callers = callers(side, identity, IDLE_CONNECTIONS).await?;
    for caller in &callers {
        idle_stream(caller).await?.close().await?;
    }
    let before = side.memory()?;
    let mut all = Vec::new();
    for _ in 0..each {
        for caller in &callers {
            all.push(idle_stream(caller).await?);
        }
    }
    Ok((side.memory()? - before) / all.len() as f64)
}

async fn idle_stream(caller: &Caller) -> Result<Stream> {
    let mut stream = caller.open(&authority("echo")).await?;
    stream.echo(&MESSAGE_BYTES).await?;
    Ok(stream)
}

/// Measures many aborted downloads, and the memory and streams that remain afterwards.
pub(crate) async fn aborts(side: &Side, identity: &Identity, count: u64) -> Result<Measured> {
    let before = (side.memory()?, begin(side)?);
    let ended = attacks::aborts(identity, side.address, count, &Arc::default()).await?;
    let (processor, wall) = spent(side, before.1)?;
    let deadline = Instant::now() + Duration::from_secs(5);
    while side.live() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let what = "aborted downloads";
    Ok(vec![
        (what.to_owned(), count as f64),
        (format!("{what}: processor µs each"), processor / count as f64 * 1e6),
        (format!("{what}: per second"), count as f64 / wall),
        (format!("{what}: connections that the gateway ended"), ended as f64),
        (format!("{what}: MiB resident before"), before.0 / f64::from(1 << 20)),
        (format!("{what}: MiB resident after"), side.memory()? / f64::from(1 << 20)),
        (format!("{what}: connections and streams left"), side.live() as f64),
    ])
}
