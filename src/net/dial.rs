//! Connections to servers: etcd, API servers, certificate authorities and gateways of peers. The last addresses of each name
//! are kept, and are dialled while a look-up of the name gives none, so that an outage of DNS does not prevent a connection.
//! The servers prove their identity by TLS, so an address that belongs to another server by then does no harm.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::lookup::{Cause, Lookup, by_system};
use isthmus_model::address::Host;
use isthmus_model::name::HostName;

/// The time limit of a look-up of a name whose last addresses are known. It leaves time to dial them within the callers' own
/// limits.
const LOOKUP: Duration = Duration::from_secs(2);
/// The largest number of names whose addresses are kept, far above the number of servers that a config names.
const NAMES_MAX: usize = 4_096;

/// The last addresses of the names that this process has dialled.
static KNOWN: Known = Known(Mutex::new(BTreeMap::new()));

/// The last addresses of names.
struct Known(Mutex<BTreeMap<HostName, Last>>);

struct Last {
    addresses: Arc<[IpAddr]>,
    /// True if the last look-up gave no addresses.
    is_stale: bool,
}

/// Connects to a server by TCP, without Nagle's delay, which suits small requests whose responses are awaited. A host name is
/// looked up at these name servers, or if there are none, as the system's files say.
pub async fn dial(host: &Host, port: u16, name_servers: &[SocketAddr]) -> io::Result<TcpStream> {
    let addresses = addresses(host, name_servers).await?;
    let addresses: Vec<SocketAddr> = addresses.iter().map(|ip| SocketAddr::new(*ip, port)).collect();
    let stream = TcpStream::connect(&*addresses).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns the addresses of a server, in the order in which they are dialled.
pub async fn addresses(host: &Host, name_servers: &[SocketAddr]) -> io::Result<Arc<[IpAddr]>> {
    match host {
        Host::Ip(ip) => Ok(Arc::from([*ip])),
        Host::Ips(ips) => Ok(ips.clone()),
        Host::Name(name) => KNOWN.addresses(name, look_up(name, name_servers)).await,
    }
}

/// Looks up a name, and returns its addresses in the order in which they are dialled.
async fn look_up(name: &HostName, name_servers: &[SocketAddr]) -> io::Result<Arc<[IpAddr]>> {
    if name_servers.is_empty() {
        return by_system(name).await.map(Arc::from);
    }
    let lookup = Lookup::at(name_servers).map_err(io::Error::other)?;
    let (answer, _) = lookup.addresses(name).await;
    let (addresses, doubt) = answer.settle(&Arc::default(), None, Duration::ZERO, Instant::now());
    match doubt.map(|doubt| doubt.cause) {
        Some(Cause::Failed(error)) => {
            Err(io::Error::other(format!("the DNS lookup of {name} failed: {error}")))
        }
        Some(Cause::Missing) | None => Ok(addresses),
    }
}

impl Known {
    /// Returns the addresses that a look-up gives, or the last ones if it gives none.
    async fn addresses(
        &self,
        name: &HostName,
        look_up: impl Future<Output = io::Result<Arc<[IpAddr]>>>,
    ) -> io::Result<Arc<[IpAddr]>> {
        let found = match self.knows(name) {
            true => timeout(LOOKUP, look_up).await.unwrap_or_else(|late| Err(late.into())),
            false => look_up.await,
        };
        let error = match found {
            Ok(addresses) if !addresses.is_empty() => {
                self.learn(name, &addresses);
                return Ok(addresses);
            }
            Ok(_) => io::Error::other(format!("{name} does not resolve")),
            Err(error) => error,
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = known.get_mut(name) else { return Err(error) };
        // A client that cannot connect tries again: the log reports it once.
        if !std::mem::replace(&mut last.is_stale, true) {
            tracing::warn!(%name, %error, "the DNS lookup of a server fails; its last known addresses are dialled");
        }
        Ok(last.addresses.clone())
    }

    fn knows(&self, name: &HostName) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(name)
    }

    fn learn(&self, name: &HostName, addresses: &Arc<[IpAddr]>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= NAMES_MAX && !known.contains_key(name) {
            known.pop_first();
        }
        known.insert(name.clone(), Last { addresses: addresses.clone(), is_stale: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> HostName {
        HostName::parse(text).expect("legal")
    }

    fn ips(last: u8) -> Arc<[IpAddr]> {
        [IpAddr::from([192, 0, 2, last])].into()
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_addresses_of_a_server_are_dialled_while_a_look_up_gives_none() {
        let known = Known(Mutex::default());
        let etcd = name("etcd.test");
        let failed = async || Err(io::Error::other("no server answers"));
        known.addresses(&etcd, failed()).await.expect_err("nothing is known yet");
        assert_eq!(known.addresses(&etcd, async { Ok(ips(1)) }).await.expect("found"), ips(1));
        assert_eq!(known.addresses(&etcd, failed()).await.expect("kept"), ips(1));
        assert_eq!(known.addresses(&etcd, async { Ok(Arc::default()) }).await.expect("kept"), ips(1));
        let begun = tokio::time::Instant::now();
        assert_eq!(known.addresses(&etcd, std::future::pending()).await.expect("kept"), ips(1), "silence");
        assert_eq!(begun.elapsed().as_secs(), 2);
        assert_eq!(known.addresses(&etcd, async { Ok(ips(2)) }).await.expect("found"), ips(2));
        known.addresses(&name("other.test"), failed()).await.expect_err("another name");
    }

    #[test]
    fn the_number_of_names_is_bounded() {
        let known = Known(Mutex::default());
        for index in 0..NAMES_MAX + 7 {
            known.learn(&name(&format!("n{index}.test")), &ips(1));
        }
        assert_eq!(known.0.lock().expect("not poisoned").len(), NAMES_MAX);
    }
}
