//! The state of a worker for tests, and connections whose peers are in the test's hands. The clock of timers is paused: it jumps to
//! the next timer when nothing else is left to do. The clock of ticks stands still until the test calls [`tick`].

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, oneshot};

use crate::connect::Connected;
use crate::core::Core;
use crate::entry::Entry;
use crate::handle::{Dataplane, DescriptorUses, EffectiveLimits};
use crate::relay::{Direction, End, Parked, resume};
use crate::tick::tick;
use isthmus_model::endpoint::Encapsulation;
use isthmus_model::identity::TrustDomain;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord};
use isthmus_net::own::OwnAddresses;
use isthmus_snapshot::candidates::EndpointKey;
use isthmus_snapshot::testing::Mesh;
use isthmus_tasks::latest::LatestWriter;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::access_log::AccessLog;
use isthmus_tls::certificate::Certificate;
use isthmus_tls::context::NodeContext;
use isthmus_tls::development::Authority;
use isthmus_tls::roots::RootStore;
use isthmus_tls::server::provider;
use isthmus_world::Publisher;

/// The state of a worker, whose loop does not run.
pub(crate) struct Rig {
    pub(crate) core: Rc<Core>,
    /// Gives the worker the state that all workers share.
    _dataplane: Dataplane,
    _publisher: Publisher,
    _telemetry: Telemetry,
}

/// A relayed connection.
pub(crate) struct Relayed {
    pub(crate) entry: Rc<Entry>,
    pub(crate) client: TcpStream,
    pub(crate) endpoint: TcpStream,
    /// Receives the reason with which the relay has ended.
    pub(crate) ended: oneshot::Receiver<Reason>,
}

/// Runs a test on a paused clock.
pub(crate) fn on_paused_clock<F: Future<Output = ()>>(test: impl FnOnce(Rig) -> F) {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    let runtime = builder.build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async { test(Rig::new()).await });
}

impl Rig {
    fn new() -> Self {
        let mesh = Mesh::new(Vec::new(), Vec::new());
        let (publisher, reader) = Publisher::new(mesh.snapshot());
        let telemetry = Telemetry::start(AccessLog::Off.open().expect("no file")).expect("threads");
        let context =
            NodeContext { certificate: certificate().reader(), trust: RootStore::default().reader() };
        let limits = EffectiveLimits::new(&mesh.policy.limits, 1_024, DescriptorUses::default());
        let (links, _) = mpsc::channel(1);
        let own = Arc::new(OwnAddresses::default());
        let dataplane =
            Dataplane::start(1, limits, &reader, &telemetry, context, own, links).expect("a data plane");
        let core = Core::new(0, dataplane.shared().clone(), reader);
        Self { core, _dataplane: dataplane, _publisher: publisher, _telemetry: telemetry }
    }

    /// Returns the entry of a connection that is accepted now.
    pub(crate) fn entry(&self, protocol: ConnectionProtocol) -> Rc<Entry> {
        let (id, name) = (self.core.next_id(), Arc::<str>::from("default"));
        let source = ([127, 0, 0, 1], 1).into();
        let record = ConnectionRecord {
            protocol,
            ..ConnectionRecord::new(id, SystemTime::now(), name.clone(), source)
        };
        Rc::new(Entry::new(self.core.local.listener(&name), record, self.core.clock.now()))
    }

    /// Relays a connection.
    pub(crate) async fn relay(&self, protocol: ConnectionProtocol) -> Relayed {
        let (client, accepted) = pair().await;
        let (dialled, endpoint) = pair().await;
        let entry = self.entry(protocol);
        let (core, registration) = (self.core.clone(), self.core.register(entry.clone()));
        let address = dialled.peer_addr().expect("connected");
        let upstreams = &core.shared.upstreams;
        let upstream = upstreams.upstream_at(&EndpointKey { group: "web.test".into(), address });
        let connected = Connected {
            socket: dialled,
            in_flight: upstreams.begin(upstream),
            encapsulation: Encapsulation::None,
        };
        let (up, down) = (Direction::default(), Direction::default());
        let parked = Parked { up, down, taken: false, asked: None, failure: None };
        let (ends, ended) = oneshot::channel();
        self.core.scope.spawn(async move {
            let end = resume(&core, &registration.entry, &accepted, &connected, parked).await;
            let End::Closed(reason) = end else { panic!("{end:?}") };
            let _ = ends.send(reason);
        });
        Relayed { entry, client, endpoint, ended }
    }

    /// Advances the clock of ticks, and lets the tasks of connections run.
    pub(crate) async fn tick(&self) {
        tick(&self.core).await;
        tokio::task::yield_now().await;
    }
}

impl Relayed {
    /// Sends a byte from the client to the endpoint.
    pub(crate) async fn ask(&mut self) {
        pass(&mut self.client, &mut self.endpoint).await;
    }

    /// Sends a byte from the endpoint to the client.
    pub(crate) async fn answer(&mut self) {
        pass(&mut self.endpoint, &mut self.client).await;
    }
}

async fn pass(from: &mut TcpStream, to: &mut TcpStream) {
    from.write_all(b"x").await.expect("sent");
    assert_eq!(to.read(&mut [0; 2]).await.expect("relayed"), 1);
    // Else the kernel would acknowledge the byte a while later.
    rustix::net::sockopt::set_tcp_quickack(to, true).expect("set");
}

/// Returns a development certificate.
fn certificate() -> LatestWriter<Certificate> {
    let authority = Authority::new(TrustDomain::parse("td").expect("legal")).expect("a CA");
    let identity = authority.identity("a", "b").expect("legal");
    let issued = authority.issue(&identity, &[], 1).expect("issued");
    let (chain, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
    let certificate = LatestWriter::default();
    certificate.set(Arc::new(Certificate::from_pem(chain, key, &provider()).expect("usable")));
    certificate
}

/// Returns both ends of a connection.
pub(crate) async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
    (client, listener.accept().await.expect("accepted").0)
}
