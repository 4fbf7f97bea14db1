//! `isthmus registry`: writes, deletes and lists the services of a registry in etcd.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};

use super::arguments::Admin;
use super::orders::accept_registry;
use isthmus_aggregator::etcd::client::{Connector, EtcdClient, EtcdFault, MemberFault};
use isthmus_aggregator::etcd::keys::{Keys, shown};
use isthmus_aggregator::etcd::listing::{Listing, Page};
use isthmus_aggregator::etcd::reading::{ParsedKey, VALUE_BYTES_MAX, read};
use isthmus_aggregator::spec::etcd::{EtcdSpec, Login, PREFIX};
use isthmus_console::failure::Failure;
use isthmus_console::output::{Format, structured, table};
use isthmus_document::problem::Problems;
use isthmus_document::scalar;
use isthmus_document::services::{KeptPositions, ServiceReader, read_items};
use isthmus_document::tree::{self, Node, ScalarType, Source};
use isthmus_files::file;
use isthmus_model::address::{Scheme, Url};
use isthmus_model::service::{Service, ServiceKey};
use isthmus_proto::etcdserverpb::request_op::Request;
use isthmus_proto::etcdserverpb::response_op::Response;
use isthmus_proto::etcdserverpb::{DeleteRangeRequest, PutRequest, RequestOp, ResponseOp, TxnRequest};
use isthmus_tasks::scope::Scope;
use isthmus_tls::client::{CertificateFiles, Files};

/// The largest document in bytes.
const DOCUMENT_BYTES_MAX: u64 = 256 << 20;
/// The number of keys per transaction: etcd's default limit, with which a request stays well below its size limit.
const BATCH_MAX: usize = 128;
const BATCH_BYTES_MAX: usize = 512 << 10;

const PUT_EXAMPLES: &str = "Examples:
  isthmus registry put services.yaml --etcd http://127.0.0.1:2379
  isthmus registry put - --etcd https://etcd-0.example:2379,https://etcd-1.example:2379 --tls-roots etcd-ca.pem < services.yaml

A document has a `services` list, as a registry file has. The whole document is checked first; if it has a mistake, nothing is written.";
const DELETE_EXAMPLES: &str = "Examples:
  isthmus registry delete shop/cart.shop.mesh --etcd http://127.0.0.1:2379
  isthmus registry delete -f services.yaml --etcd http://127.0.0.1:2379";
const LIST_EXAMPLES: &str = "Examples:
  isthmus registry list --etcd http://127.0.0.1:2379
  isthmus registry list --etcd http://127.0.0.1:2379 -o yaml > services.yaml

The YAML and JSON output is a document that `put` accepts. Keys with mistakes are listed on stderr, and the exit code is then 1.";

const ACCEPT_EXAMPLES: &str = "Examples:
  isthmus get registries              names the registries, with their state: `held`
  isthmus registry accept etcd-west";

/// The commands about registries.
#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// Write the services of a document, one key per service
    #[command(after_help = PUT_EXAMPLES)]
    Put {
        /// Document with a `services` list; `-` for the standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        server: Server,
    },
    /// Delete services
    #[command(after_help = DELETE_EXAMPLES)]
    Delete {
        /// Services, as NAMESPACE/HOSTNAME
        #[arg(value_name = "SERVICE", required_unless_present = "file")]
        services: Vec<String>,
        /// Delete all services of a document; `-` for the standard input
        #[arg(short, long, value_name = "FILE")]
        file: Option<PathBuf>,
        #[command(flatten)]
        server: Server,
    },
    /// List the services
    #[command(after_help = LIST_EXAMPLES)]
    List {
        #[command(flatten)]
        server: Server,
        /// Output format
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Apply an update of a registry of any kind that the running gateway holds back
    #[command(after_help = ACCEPT_EXAMPLES)]
    Accept {
        /// Name of the registry, as `isthmus get registries` shows it
        name: String,
        #[command(flatten)]
        admin: Admin,
    },
}

/// The members of etcd, and the user of the command.
#[derive(Debug, Args)]
pub(super) struct Server {
    /// Members of the cluster: https://host:port, or http://host:port on loopback
    #[arg(long = "etcd", value_name = "URL", value_delimiter = ',', required = true, value_parser = url)]
    members: Vec<Url>,
    /// Prefix of the keys
    #[arg(long, default_value = PREFIX, value_parser = prefix)]
    prefix: String,
    /// PEM file of the roots that verify etcd's certificates
    #[arg(long, value_name = "FILE")]
    tls_roots: Option<PathBuf>,
    /// PEM file of the client certificate
    #[arg(long, value_name = "FILE", requires = "tls_key", requires = "tls_roots")]
    tls_certificate: Option<PathBuf>,
    /// PEM file of the client certificate's key
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// etcd user to log in as
    #[arg(long, requires = "password_file")]
    user: Option<String>,
    /// File with the user's password
    #[arg(long, value_name = "FILE", requires = "user")]
    password_file: Option<PathBuf>,
}

fn url(text: &str) -> Result<Url, String> {
    scalar::etcd(text).map_err(|fault| with_hint(fault.message, fault.hint))
}

fn prefix(text: &str) -> Result<String, String> {
    scalar::etcd_prefix(text).map(str::to_owned).map_err(|fault| with_hint(fault.message, fault.hint))
}

fn with_hint(message: String, hint: Option<String>) -> String {
    match hint {
        Some(hint) => format!("{message} (did you mean {hint:?}?)"),
        None => message,
    }
}

pub(super) fn run(action: Action, out: &mut impl Write) -> Result<(), Failure> {
    match action {
        Action::Put { file, server } => {
            let keys = server.keys();
            let puts = puts(&document(&file)?, &keys)?;
            server.connected(async |client| put(client, &puts, out).await)
        }
        Action::Delete { services, file, server } => {
            let keys = server.keys();
            let mut gone = named(&services, &keys)?;
            if let Some(file) = file {
                let items = document(&file)?;
                gone.extend(items.into_iter().map(|(service, _)| service.key.clone()));
            }
            server.connected(async |client| delete(client, &keys, gone, out).await)
        }
        Action::List { server, output } => {
            let keys = server.keys();
            server.connected(async |client| list(client, &keys, output, out).await)
        }
        Action::Accept { name, admin } => accept_registry(&name, &admin, out),
    }
}

impl Server {
    fn keys(&self) -> Keys {
        Keys::new(self.prefix.as_str().into())
    }

    fn spec(&self) -> Result<EtcdSpec, Failure> {
        let secure = self.members.iter().any(|member| member.scheme == Scheme::Https);
        let tls = match &self.tls_roots {
            Some(roots) if secure => {
                let certificate = self.tls_certificate.clone().zip(self.tls_key.clone());
                let certificate = certificate.map(|(chain, key)| CertificateFiles { chain, key });
                Some(Files { roots: roots.clone(), certificate })
            }
            Some(_) => return Err(Failure::Wrong("--tls-roots requires members with https:// URLs".into())),
            None if secure => {
                return Err(Failure::Wrong(
                    "members with https:// URLs require --tls-roots, the roots that verify the certificate of etcd".into(),
                ));
            }
            None => None,
        };
        let login = self.user.clone().zip(self.password_file.clone());
        Ok(EtcdSpec {
            endpoints: self.members.clone(),
            prefix: self.prefix.as_str().into(),
            tls,
            login: login.map(|(user, password)| Login { user, password }),
        })
    }

    /// Calls `work` with a connection to the first member that accepts one.
    fn connected<T>(
        &self,
        work: impl AsyncFnOnce(&mut EtcdClient) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let spec = self.spec()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut connector = Connector::new(spec, Scope::default());
            let mut client = connector.connect().await.map_err(|faults| {
                let text = faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
                match faults.iter().any(|fault| !fault.fault.is_silence()) {
                    true => Failure::Wrong(text),
                    false => Failure::Unreachable(text),
                }
            })?;
            work(&mut client).await
        })
    }
}

/// Converts a fault of an etcd request to a failure of the command.
fn failed(client: &EtcdClient, fault: EtcdFault) -> Failure {
    let silence = fault.is_silence();
    let text = MemberFault { member: client.member().clone(), fault }.to_string();
    if silence { Failure::Unreachable(text) } else { Failure::Wrong(text) }
}

/// Reads the services of a document; returns an error if it has problems.
fn document(path: &Path) -> Result<Vec<(Arc<Service>, Node)>, Failure> {
    let is_input = path == Path::new("-");
    let path = if is_input { Path::new("/dev/stdin") } else { path };
    let wrong = |fault: &dyn std::fmt::Display| Failure::Wrong(format!("{}: {fault}", path.display()));
    let bytes = file::read_any(path, DOCUMENT_BYTES_MAX).map_err(|fault| wrong(&fault))?;
    let text = String::from_utf8(bytes).map_err(|_| wrong(&"cannot be read: it is not UTF-8"))?;
    read_items(path, &text).map_err(|problems| {
        Failure::Wrong(problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    })
}

/// Returns the writes for the services of a document. Each value is checked by the parser of the gateway.
fn puts(items: &[(Arc<Service>, Node)], keys: &Keys) -> Result<Vec<PutRequest>, Failure> {
    let put = |(service, node): &(Arc<Service>, Node)| {
        let (key, value) = (keys.key(&service.key).into_bytes(), value(node)?);
        let mut reader = ServiceReader::new(KeptPositions::Services);
        match read(keys, &mut reader, &key, &value) {
            ParsedKey::Service(read) if read == **service => Ok(PutRequest { key, value }),
            ParsedKey::Service(_) | ParsedKey::Drain(_) => Err(format!(
                "{}: internal error: the service cannot be written as YAML that reads back the same",
                service.key
            )),
            ParsedKey::Flawed { .. } if value.len() > VALUE_BYTES_MAX => {
                Err(format!("{}: the service is larger than {} MiB", service.key, VALUE_BYTES_MAX >> 20))
            }
            ParsedKey::Flawed { problems, .. } => Err(problems.join("\n")),
        }
    };
    let (mut good, mut bad) = (Vec::with_capacity(items.len()), Vec::new());
    for item in items {
        match put(item) {
            Ok(put) => good.push(put),
            Err(problem) => bad.push(problem),
        }
    }
    if bad.is_empty() { Ok(good) } else { Err(Failure::Wrong(bad.join("\n"))) }
}

/// Returns an item as YAML.
fn value(node: &Node) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    structured(&mut text, &plain(node), Format::Yaml).map_err(|error| error.to_string())?;
    Ok(text)
}

/// Converts a tree to plain values that a parser reads as the same scalars.
fn plain(node: &Node) -> Value {
    match &node.value {
        tree::Value::Null => Value::Null,
        tree::Value::Sequence(items) => items.iter().map(plain).collect(),
        tree::Value::Mapping(entries) => {
            let entries = entries.iter().map(|(key, value)| (key.text.to_string(), plain(value)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
        tree::Value::Scalar(scalar) => match scalar.scalar_type() {
            // Services contain whole numbers only; any other text that looks like a number becomes a quoted string.
            ScalarType::Number => match scalar.text.parse::<u64>() {
                Ok(number) => number.into(),
                Err(_) => json!(&*scalar.text),
            },
            ScalarType::Boolean | ScalarType::Text | ScalarType::Open => json!(&*scalar.text),
        },
    }
}

async fn put(client: &mut EtcdClient, puts: &[PutRequest], out: &mut impl Write) -> Result<(), Failure> {
    let mut rest = puts;
    while !rest.is_empty() {
        let (batch, later) = rest.split_at(batch_len(rest));
        let ops = batch.iter().map(|put| RequestOp { request: Some(Request::RequestPut(put.clone())) });
        if let Err(failure) = write(client, ops.collect()).await {
            let written = puts.len() - rest.len();
            let first = String::from_utf8_lossy(&batch[0].key).into_owned();
            return Err(stopped(failure, "written", written, puts.len(), &first));
        }
        for put in batch {
            writeln!(out, "put {}", String::from_utf8_lossy(&put.key))?;
        }
        rest = later;
    }
    Ok(())
}

/// Returns the number of writes in the next transaction, which is at least one.
fn batch_len(puts: &[PutRequest]) -> usize {
    let mut bytes = 0;
    let fits = |put: &&PutRequest| {
        bytes += put.key.len() + put.value.len();
        bytes <= BATCH_BYTES_MAX
    };
    puts.iter().take(BATCH_MAX).take_while(fits).count().max(1)
}

async fn write(client: &mut EtcdClient, success: Vec<RequestOp>) -> Result<Vec<ResponseOp>, Failure> {
    match client.transaction(TxnRequest { success }).await {
        Ok(answer) => Ok(answer.responses),
        Err(fault) => Err(failed(client, fault)),
    }
}

/// Adds the progress to a failure that interrupted the work.
fn stopped(failure: Failure, done: &str, count: usize, all: usize, first: &str) -> Failure {
    let text = format!("{failure}; {count} of {all} keys were {done}, and all keys from {first} on were not");
    match failure {
        Failure::Unreachable(_) => Failure::Unreachable(text),
        _ => Failure::Wrong(text),
    }
}

/// Parses names of services.
fn named(services: &[String], keys: &Keys) -> Result<Vec<ServiceKey>, Failure> {
    let key = |text: &String| {
        let key = format!("{}{text}", keys.prefix());
        keys.service(key.as_bytes()).map_err(|_| {
            Failure::Wrong(format!(
                "{text:?} is not a service; expected NAMESPACE/HOSTNAME in lower-case letters"
            ))
        })
    };
    services.iter().map(key).collect()
}

async fn delete(
    client: &mut EtcdClient,
    keys: &Keys,
    mut gone: Vec<ServiceKey>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    // etcd refuses a transaction with the same key twice.
    gone.sort();
    gone.dedup();
    let mut absent = false;
    for (at, batch) in gone.chunks(BATCH_MAX).enumerate() {
        let delete = |key: &ServiceKey| {
            let request = DeleteRangeRequest { key: keys.key(key).into_bytes() };
            RequestOp { request: Some(Request::RequestDeleteRange(request)) }
        };
        let responses = match write(client, batch.iter().map(delete).collect()).await {
            Ok(responses) => responses,
            Err(failure) => {
                let first = keys.key(&batch[0]);
                return Err(stopped(failure, "deleted", at * BATCH_MAX, gone.len(), &first));
            }
        };
        for (key, response) in batch.iter().zip(responses) {
            let deleted = matches!(
                response.response,
                Some(Response::ResponseDeleteRange(ref answer)) if answer.deleted > 0
            );
            absent |= !deleted;
            match deleted {
                true => writeln!(out, "deleted {}", keys.key(key))?,
                false => writeln!(out, "{} does not exist", keys.key(key))?,
            }
        }
    }
    if absent { Err(Failure::Reported) } else { Ok(()) }
}

async fn list(
    client: &mut EtcdClient,
    keys: &Keys,
    format: Format,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let mut listing = Listing::new(keys.range());
    let (mut rows, mut items, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    let mut reader = ServiceReader::new(KeptPositions::Services);
    loop {
        let page = match listing.next(client).await {
            Ok(Some(page)) => page,
            Ok(None) => break,
            Err(fault) => return Err(failed(client, fault)),
        };
        let pairs = match page {
            Page::Values(pairs) => pairs,
            Page::Oversize(key) => {
                let limit = VALUE_BYTES_MAX >> 20;
                problems.push(format!("{}: the value is larger than {limit} MiB", shown(&key)));
                continue;
            }
        };
        for pair in pairs {
            match (read(keys, &mut reader, &pair.key, &pair.value), format) {
                (ParsedKey::Flawed { problems: found, .. }, _) => problems.extend(found),
                (ParsedKey::Drain(_), _) => {}
                (ParsedKey::Service(service), Format::Table) => rows.push(row(&service, pair.mod_revision)),
                (ParsedKey::Service(_), Format::Json | Format::Yaml) => items.push(item(&pair.value)),
            }
        }
    }
    match format {
        Format::Table => table(out, &["NAMESPACE", "HOSTNAME", "PORTS", "ENDPOINTS", "REVISION"], &rows)?,
        Format::Json | Format::Yaml => structured(out, &json!({ "services": items }), format)?,
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::Wrong(problems.join("\n"))) }
}

fn row(service: &Service, revision: i64) -> Vec<String> {
    let ports: Vec<String> =
        service.ports.iter().map(|port| format!("{}:{}", port.name, port.port)).collect();
    vec![
        service.key.namespace.to_string(),
        service.key.hostname.to_string(),
        ports.join(", "),
        service.endpoints.len().to_string(),
        revision.to_string(),
    ]
}

/// Converts a value that was parsed without problems to plain values.
fn item(value: &[u8]) -> Value {
    let text = String::from_utf8_lossy(value);
    let mut problems = Problems::new();
    let file = problems.add_file(Path::new(""));
    let node = file
        .and_then(|file| tree::parse(Source { file, text: &text, environment: None }, None, &mut problems));
    node.map_or(Value::Null, |node| plain(&node))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new(PREFIX.into())
    }

    const DOCUMENT: &str = "services:\n- &first\n  hostname: a.test\n  namespace: '007'\n  ports: &p [{name: https, port: 443, protocol: TLS}]\n  \
        endpoints:\n  - {address: 10.0.0.1, labels: {version: '1.10', \"no\": \"yes\", empty: '', quoted: '3'}, weight: 7}\n\
        - {hostname: b.test, namespace: shop, ports: *p}\n";

    #[test]
    fn what_is_written_reads_as_it_was() {
        let items = read_items(Path::new("x"), DOCUMENT).expect("good");
        let puts = puts(&items, &keys()).map_err(|failure| failure.to_string()).expect("good");
        let text = |at: usize| String::from_utf8(puts[at].value.clone()).expect("text");
        assert_eq!(puts[1].key, b"/isthmus/services/shop/b.test");
        assert_eq!(
            text(1),
            "hostname: \"b.test\"\nnamespace: \"shop\"\nports:\n  - name: \"https\"\n    port: 443\n    protocol: \"TLS\"\n"
        );
        assert!(text(0).contains("version: \"1.10\"") && text(0).contains("weight: 7"), "{}", text(0));
        // The listed services are a valid document.
        let listed = json!({ "services": [item(&puts[0].value), item(&puts[1].value)] });
        for format in [Format::Yaml, Format::Json] {
            let mut text = Vec::new();
            structured(&mut text, &listed, format).expect("memory takes it");
            let again = read_items(Path::new("x"), std::str::from_utf8(&text).expect("text")).expect("good");
            let services = |items: &[(Arc<Service>, Node)]| -> Vec<Arc<Service>> {
                items.iter().map(|(service, _)| service.clone()).collect()
            };
            assert_eq!(services(&again), services(&items));
        }
    }

    #[test]
    fn transactions_are_bounded_by_keys_and_bytes() {
        let put = |size: usize| PutRequest { key: vec![b'k'], value: vec![0; size] };
        assert_eq!(batch_len(&vec![put(1); 500]), BATCH_MAX);
        assert_eq!(
            batch_len(&[put(BATCH_BYTES_MAX / 2), put(BATCH_BYTES_MAX / 4), put(BATCH_BYTES_MAX / 2)]),
            2
        );
        assert_eq!(batch_len(&[put(2 * BATCH_BYTES_MAX), put(1)]), 1);
    }

    #[test]
    fn services_are_named_as_they_are_shown() {
        let key = named(&["shop/a.test".to_owned()], &keys()).map_err(|failure| failure.to_string());
        assert_eq!(key.expect("legal")[0].to_string(), "shop/a.test");
        for wrong in ["a.test", "/a.test", "shop/A.test", "shop/"] {
            let failure = named(&[wrong.to_owned()], &keys()).err().map(|failure| failure.to_string());
            assert!(failure.is_some_and(|text| text.contains("expected NAMESPACE/HOSTNAME")), "{wrong}");
        }
    }
}
