//! The forms of values: the text that a document may have, and the type that it is read into. A form is a type, so that a
//! [`Key`](super::key::Key) names it once for its check, its reader, the schema and the reference.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use isthmus_model::address::{self, Url};
use isthmus_model::endpoint;
use isthmus_model::limits::MemoryLimit;
use isthmus_model::time::rfc3339_seconds;
use isthmus_model::words::Words;
use isthmus_model::{identity, name, place};

use super::problem::InvalidValue;
use super::scalar;
use super::table::{self, Kind, Object};
use super::tree::Node;

/// The form of a value in a document: which values are legal, and how they are read.
pub trait Form: 'static {
    /// The Rust type of a value that was read.
    type Value;
    /// The kind of value that a document must have.
    const KIND: Kind;
    /// Reads a value; `None` if `check` refuses it.
    fn read(node: &Node) -> Option<Self::Value>;
}

/// The form of a value that is a text.
pub trait TextForm: Form {
    /// The form's name, its description in words and its pattern.
    const TEXT: &'static table::Text;
    /// Parses the text of a value. The error says why the text is refused.
    fn parse(text: &str) -> Result<Self::Value, InvalidValue>;
}

/// A form whose values can be written, so that a key of it can have a default.
pub trait Written: Form {
    /// Writes a value as a document does.
    fn write(value: &Self::Value) -> String;
}

/// The form of a map with known keys.
pub trait Keys: Form {
    /// The map's entry in the table: its name, its description and its keys.
    const OBJECT: &'static Object;
}

/// A form whose values may be maps with known keys.
pub trait MayBeKeys: Form {
    /// The form of the map.
    type Keys: Keys;
}

impl<K: Keys> MayBeKeys for K {
    type Keys = K;
}

/// The form of a list.
pub trait Items: Form {
    /// The form of an item.
    type Item: Form;
}

/// Defines forms of text: the type of a value, its parser, the name of the form, its pattern (ECMA-262, which may allow more
/// than the parser), the form in words that fit behind "expected", the function that writes a value if that is not `to_string`,
/// and the function that writes it for `/api/v1/config` if that is another one.
#[macro_export]
macro_rules! text_forms {
    (@write $value:ident) => { $value.to_string() };
    (@write $value:ident, $write:expr) => { $write($value) };
    (@show $value:ident) => { <Self as $crate::form::Written>::write($value) };
    (@show $value:ident, $show:expr) => { $show($value) };
    ($($(#[$doc:meta])* $visible:vis $form:ident: $value:ty = $parse:expr, $name:literal, $pattern:literal,
       $expects:literal $(, written by $write:expr)? $(, shown by $show:expr)?;)+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        $visible struct $form;

        impl $crate::form::TextForm for $form {
            const TEXT: &'static $crate::table::Text = &$crate::table::Text {
                name: $name,
                expects: $expects,
                pattern: $pattern,
                number: false,
                check: |text| Self::parse(text).map(drop),
                write: |text| {
                    let value = &Self::parse(text).ok()?;
                    Some($crate::form::text_forms!(@show value $(, $show)?))
                },
            };

            fn parse(text: &str) -> Result<$value, $crate::problem::InvalidValue> {
                $parse(text)
            }
        }

        impl $crate::form::Form for $form {
            type Value = $value;
            const KIND: $crate::table::Kind =
                $crate::table::Kind::Text(<Self as $crate::form::TextForm>::TEXT);

            fn read(node: &$crate::tree::Node) -> Option<$value> {
                <Self as $crate::form::TextForm>::parse(node.text()?).ok()
            }
        }

        impl $crate::form::Written for $form {
            fn write(value: &$value) -> String {
                $crate::form::text_forms!(@write value $(, $write)?)
            }
        }
    )+};
}
pub use text_forms;

text_forms! {
    /// A path, as written.
    pub Path: PathBuf = |text| scalar::path(text).map(Into::into), "path", "^.+$",
        "a path of a file, absolute or relative to this one", written by |path: &PathBuf| path.display().to_string();
    /// A duration, 0 included.
    pub Period: Duration = scalar::duration, "duration", "^[0-9]+(ms|s|m|h)$",
        "a whole number with its unit, such as 250ms, 10s, 5m, 1h or 0s", written by period, shown by seconds;
    /// A duration, in which 0 means no limit.
    pub TimeoutOrZero: Option<Duration> =
        |text| scalar::duration(text).map(|time| (!time.is_zero()).then_some(time)), "duration", "^[0-9]+(ms|s|m|h)$",
        "a whole number with its unit, such as 250ms, 10s, 5m, 1h or 0s",
        written by |time: &Option<Duration>| period(&time.unwrap_or_default()),
        shown by |time: &Option<Duration>| seconds(&time.unwrap_or_default());
    /// A duration above 0.
    pub Timeout: Duration = scalar::timeout, "timeout", "^0*[1-9][0-9]*(ms|s|m|h)$",
        "a whole number above 0 with its unit, such as 250ms, 10s, 5m or 1h", written by period, shown by seconds;
    /// An `https://` address without a path.
    pub Https: String = |text| scalar::https(text).map(str::to_owned), "https", "^https://[^/ ]+$",
        "an address such as https://istiod.istio-system.svc:15012";
    /// The URL of an etcd server.
    pub Etcd: Url = scalar::etcd, "etcd", "^https?://[^/ ]+:[0-9]+$",
        "a URL such as https://etcd-0.example:2379 (http:// is allowed only on loopback)";
    /// The prefix of all keys of a registry in etcd.
    pub EtcdPrefix: Arc<str> = |text| scalar::etcd_prefix(text).map(Arc::from), "etcdPrefix", "^.*/$",
        "a key prefix that ends in a slash, such as /isthmus/services/";
    /// The address of a collector of spans.
    pub Collector: String = |text| scalar::collector(text).map(str::to_owned), "collector", "^http://[^/ ]+:[0-9]+$",
        "the address of a collector that accepts OTLP over gRPC, such as http://collector:4317";
    /// The path of a unix socket.
    pub UnixSocket: PathBuf = |text| scalar::unix_socket(text).map(Into::into), "unixSocket", "^unix:.+$",
        "a socket such as unix:///run/spire/agent.sock",
        written by |path: &PathBuf| format!("unix://{}", path.display());
    /// A share in percent.
    pub Percent: u8 = scalar::percent, "percent", "^[0-9]+%$",
        "a whole number of percent from 0% to 100%", written by |percent| format!("{percent}%");
    /// A share of the memory in percent, or a size with its unit.
    pub Memory: MemoryLimit = scalar::memory, "memory", "^[0-9]+(%|KiB|MiB|GiB)$",
        "a whole number of percent from 1% to 100%, or a size from 32MiB, such as 60%, 614MiB or 2GiB", written by memory;
    /// A time, in seconds since 1970-01-01 UTC.
    pub Time: u64 = scalar::time, "time", "^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}",
        "a time of RFC 3339 with its zone, such as 2026-01-31T18:30:00Z", written by |time: &u64| rfc3339_seconds(*time);
    /// A host name that is not an IP address.
    pub HostName: name::HostName = scalar::host_name, "hostname", "^[A-Za-z0-9_.-]+$",
        "a host name: labels of letters, digits, '-' and '_' with '.' between them, at most 253 bytes";
    /// A host name, `*.suffix` or `*`.
    pub Pattern: name::NamePattern = scalar::pattern, "pattern", "^(\\*|(\\*\\.)?[A-Za-z0-9_.-]+)$",
        "a host name, \"*.suffix\", or \"*\"";
    /// An address block.
    pub Cidr: IpNet = scalar::cidr, "cidr", "^[0-9A-Fa-f.:]+/[0-9]+$",
        "a network such as 10.0.0.0/8 or fd00::/8";
    /// An IP address.
    pub Ip: IpAddr = scalar::ip, "ip", "^[0-9A-Fa-f.:]+$",
        "an IP address such as 10.0.0.1 or fd00::1";
    /// An IP address or a host name.
    pub Host: address::Host = scalar::host, "host", "^[^/ ]+$",
        "an IP address or a host name, without port";
    /// An IP address or a host name, with its port.
    pub Target: (address::Host, u16) = scalar::target, "target", "^.+:[0-9]+$",
        "an address with its port: \"10.0.0.1:443\", \"[fd00::1]:443\" or \"db.internal:443\"", written by target;
    /// An address to listen on, or a port on all addresses.
    pub Bind: address::Bind = scalar::bind, "bind", "^.*:[0-9]+$",
        "an address to listen on: \":15443\", \"10.0.0.1:15443\" or \"[::1]:15443\"";
    /// An IP address and port to listen on.
    pub BindAddress: SocketAddr = scalar::bind_address, "bindAddress", "^[0-9A-Fa-f.:\\[\\]]+:[0-9]+$",
        "an IP address and port to listen on: \"127.0.0.1:15000\" or \"[::1]:15000\"";
    /// An IP address and port to listen on, or the path of a unix socket.
    pub AdminBind: address::AdminBind = scalar::admin_bind, "adminBind",
        "^(unix:.+|[0-9A-Fa-f.:\\[\\]]+:[0-9]+)$",
        "an IP address and port to listen on (\"127.0.0.1:15000\" or \"[::1]:15000\"), or a unix socket such as \"unix:/run/isthmus/admin.sock\"";
    /// The address of a name server.
    pub NameServer: SocketAddr = scalar::name_server, "nameServer", "^[0-9A-Fa-f.:\\[\\]]+$",
        "an IP address, with a port if that is not 53: 10.0.0.53, \"10.0.0.53:5353\" or \"[fd00::53]:5353\"";
    /// A SPIFFE ID.
    pub Identity: identity::Identity = scalar::identity, "spiffeId", "^spiffe://[a-z0-9._-]+/[^*]+$",
        "a SPIFFE ID such as spiffe://cluster.local/ns/shop/sa/cart";
    /// A SPIFFE ID, or one that ends in `/*`.
    pub IdentityPattern: identity::IdentityPattern = scalar::identity_pattern, "spiffeIdPattern",
        "^spiffe://[a-z0-9._-]+/.+$",
        "a SPIFFE ID, or one that ends in \"/*\": spiffe://cluster.local/ns/shop/*";
    /// A trust domain.
    pub TrustDomain: identity::TrustDomain = scalar::trust_domain, "trustDomain", "^[a-z0-9._-]+$",
        "a trust domain such as cluster.local: lower-case letters, digits, '-', '_' and '.'";
    /// A region, zone and subzone.
    pub Locality: place::Locality = scalar::locality, "locality", "^[^/]+(/[^/]*){0,2}$",
        "region, region/zone or region/zone/subzone";
    /// The name of a subset.
    pub Subset: Arc<str> = |text| scalar::subset(text).map(Arc::from), "subset", "^[a-z0-9_-]{1,63}$",
        "1 to 63 lower-case letters, digits, '-' and '_', as it is part of an SNI name";
    /// An application protocol.
    pub Alpn: Box<[u8]> = scalar::alpn, "alpn", "^.+$",
        "a protocol's name in 1 to 255 bytes, such as h2", written by |name: &[u8]| String::from_utf8_lossy(name).into_owned();
}

/// Writes an address with its port.
fn target((host, port): &(address::Host, u16)) -> String {
    match host {
        address::Host::Ip(ip) => SocketAddr::new(*ip, *port).to_string(),
        address::Host::Ips(_) | address::Host::Name(_) => format!("{host}:{port}"),
    }
}

/// Writes a duration in seconds, or in milliseconds if it is not a multiple of a second.
pub fn seconds(time: &Duration) -> String {
    let milliseconds = time.as_millis();
    if milliseconds.is_multiple_of(1000) {
        format!("{}s", milliseconds / 1000)
    } else {
        format!("{milliseconds}ms")
    }
}

/// Writes a duration in the largest unit of which it is a multiple.
fn period(time: &Duration) -> String {
    let milliseconds = time.as_millis();
    let units = [(3_600_000, "h"), (60_000, "m"), (1000, "s")];
    match units.into_iter().find(|(length, _)| milliseconds > 0 && milliseconds.is_multiple_of(*length)) {
        Some((length, unit)) => format!("{}{unit}", milliseconds / length),
        None if milliseconds == 0 => "0s".to_owned(),
        None => format!("{milliseconds}ms"),
    }
}

/// Defines forms of text without a rule of their own. A large document has many such texts, so their check does not allocate.
macro_rules! free_texts {
    ($($(#[$doc:meta])* $form:ident: $value:ty = $parse:expr, $make:expr, $text:expr;)+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $form;

        impl TextForm for $form {
            const TEXT: &'static table::Text = $text;

            fn parse(text: &str) -> Result<$value, InvalidValue> {
                $parse(text).map($make)
            }
        }

        impl Form for $form {
            type Value = $value;
            const KIND: Kind = Kind::Text(Self::TEXT);

            fn read(node: &Node) -> Option<$value> {
                Self::parse(node.text()?).ok()
            }
        }
    )+};
}

free_texts! {
    /// A text that is not empty and has no control characters.
    Text: Arc<str> = scalar::text, Arc::from, &TEXT;
    /// The name of a cluster.
    ClusterName: place::ClusterId = scalar::text, place::ClusterId::new, &TEXT;
    /// The name of a network.
    NetworkName: place::Network = scalar::text, place::Network::new, &TEXT;
    /// The namespace of a service.
    Namespace: Arc<str> = scalar::namespace, Arc::from, &table::Text {
        name: "namespace",
        expects: "a text of 1 to 253 bytes without '/' and control characters (in quotes if it looks like a number)",
        pattern: "^[^/]+$",
        number: false,
        check: |text| scalar::namespace(text).map(drop),
        write: |text| Some(text.to_owned()),
    };
    /// The value of a label, which may be empty.
    LabelValue: Arc<str> = scalar::label_value, Arc::from, &table::Text {
        name: "label",
        expects: "a text of up to 253 bytes without control characters (in quotes if it looks like a number)",
        pattern: "",
        number: false,
        check: |text| scalar::label_value(text).map(drop),
        write: |text| Some(text.to_owned()),
    };
}

const TEXT: table::Text = table::Text {
    name: "text",
    expects: "a text of 1 to 253 bytes without control characters (in quotes if it looks like a number)",
    pattern: "^.+$",
    number: false,
    check: |text| scalar::text(text).map(drop),
    write: |text| Some(text.to_owned()),
};

impl Written for Text {
    fn write(value: &Arc<str>) -> String {
        value.to_string()
    }
}

/// Defines forms of sizes in bytes, each with a minimum and a maximum.
macro_rules! sizes {
    ($($(#[$doc:meta])* $form:ident: $value:ty = $min:expr, $max:expr, $name:literal, $expects:literal;)+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $form;

        impl TextForm for $form {
            const TEXT: &'static table::Text = &table::Text {
                name: $name,
                expects: $expects,
                pattern: "^[0-9]+(KiB|MiB|GiB)?$",
                number: true,
                check: |text| Self::parse(text).map(drop),
                write: |text| Self::parse(text).ok().map(|bytes| bytes.to_string()),
            };

            fn parse(text: &str) -> Result<$value, InvalidValue> {
                let bytes = scalar::size_within(text, $min, $max)?;
                <$value>::try_from(bytes).map_err(|_| "it is too large".into())
            }
        }

        impl Form for $form {
            type Value = $value;
            const KIND: Kind = Kind::Text(Self::TEXT);

            fn read(node: &Node) -> Option<$value> {
                Self::parse(node.text()?).ok()
            }
        }

        impl Written for $form {
            fn write(bytes: &$value) -> String {
                let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
                let unit = units.into_iter().find(|(unit, _)| bytes % unit == 0);
                unit.map_or_else(|| bytes.to_string(), |(size, unit)| format!("{}{unit}", bytes / size))
            }
        }
    )+};
}

fn memory(limit: &MemoryLimit) -> String {
    match limit {
        MemoryLimit::Percent(percent) => Percent::write(percent),
        MemoryLimit::Bytes(bytes) => Bandwidth::write(bytes),
    }
}

sizes! {
    /// The size of a hello.
    HelloSize: usize = 256, 1 << 20, "helloSize", "a size from 256 bytes to 1MiB, such as 4096, 16KiB or 1MiB";
    /// The size of a receive window.
    Window: u32 = 16 << 10, 1 << 30, "window", "a size from 16KiB to 1GiB, such as 65536, 256KiB or 16MiB";
    /// The number of bytes that are held for several streams.
    HeldSize: usize = 16 << 10, 1 << 30, "window", "a size from 16KiB to 1GiB, such as 65536, 256KiB or 16MiB";
    /// A number of bytes per second.
    Bandwidth: u64 = 1 << 10, 128 << 30, "bandwidth", "bytes per second, from 1KiB to 128GiB, such as 500000, 256KiB or 20MiB";
}

/// `true`, `false`, `on` or `off`.
#[derive(Debug)]
pub struct Boolean;

impl Form for Boolean {
    type Value = bool;
    const KIND: Kind = Kind::Boolean;

    fn read(node: &Node) -> Option<bool> {
        node.switch()
    }
}

impl Written for Boolean {
    fn write(value: &bool) -> String {
        value.to_string()
    }
}

/// A number from 0 to 1.
#[derive(Debug)]
pub struct Share;

impl Form for Share {
    type Value = f64;
    const KIND: Kind = Kind::Share;

    fn read(node: &Node) -> Option<f64> {
        scalar::share(node.text()?).ok()
    }
}

impl Written for Share {
    fn write(value: &f64) -> String {
        value.to_string()
    }
}

/// A whole number.
#[derive(Debug)]
pub struct Integer<T, const MIN: u64, const MAX: u64>(PhantomData<T>);

/// A TCP port.
pub type Port = Integer<u16, 1, 65_535>;

impl<T: TryFrom<u64> + 'static, const MIN: u64, const MAX: u64> Form for Integer<T, MIN, MAX> {
    type Value = T;
    const KIND: Kind = Kind::Integer { min: MIN, max: MAX };

    fn read(node: &Node) -> Option<T> {
        let number = node.text()?.parse().ok().filter(|number| (MIN..=MAX).contains(number))?;
        T::try_from(number).ok()
    }
}

impl<T: TryFrom<u64> + ToString + 'static, const MIN: u64, const MAX: u64> Written for Integer<T, MIN, MAX> {
    fn write(value: &T) -> String {
        value.to_string()
    }
}

/// A weight: a whole number from 1.
#[derive(Debug)]
pub struct Weight;

impl Form for Weight {
    type Value = endpoint::Weight;
    const KIND: Kind = Kind::Integer { min: 1, max: u32::MAX as u64 };

    fn read(node: &Node) -> Option<endpoint::Weight> {
        endpoint::Weight::new(node.text()?.parse().ok()?)
    }
}

impl Written for Weight {
    fn write(value: &endpoint::Weight) -> String {
        value.value().to_string()
    }
}

/// A value that a document writes as one of a fixed set of words.
#[derive(Debug)]
pub struct Choice<W>(PhantomData<W>);

impl<W: Words> Form for Choice<W> {
    type Value = W;
    const KIND: Kind = Kind::Choice(W::WORDS);

    fn read(node: &Node) -> Option<W> {
        let word = node.text()?;
        let at = W::WORDS.iter().position(|known| *known == word)?;
        W::ALL.get(at).copied()
    }
}

impl<W: Words> Written for Choice<W> {
    fn write(value: &W) -> String {
        value.word().to_owned()
    }
}

/// `off` or `false`, or a value of another form; `off` is read as `None`.
#[derive(Debug)]
pub struct OrOff<F>(PhantomData<F>);

impl<F: Form> Form for OrOff<F> {
    type Value = Option<F::Value>;
    const KIND: Kind = Kind::OrOff(&F::KIND);

    fn read(node: &Node) -> Option<Option<F::Value>> {
        if node.is_off() { Some(None) } else { F::read(node).map(Some) }
    }
}

impl<F: Written> Written for OrOff<F> {
    fn write(value: &Option<F::Value>) -> String {
        value.as_ref().map_or_else(|| "off".to_owned(), F::write)
    }
}

/// A list of any length. Items that are wrong are left out.
#[derive(Debug)]
pub struct List<F>(PhantomData<F>);

impl<F: Form> Form for List<F> {
    type Value = Vec<F::Value>;
    const KIND: Kind = Kind::List { of: &F::KIND, min: 0 };

    fn read(node: &Node) -> Option<Vec<F::Value>> {
        Some(node.items().iter().filter_map(F::read).collect())
    }
}

impl<F: Form> Items for List<F> {
    type Item = F;
}

/// A list with one item or more: an empty list would mean "all" although its author may have meant "none".
#[derive(Debug)]
pub struct NonEmpty<F>(PhantomData<F>);

impl<F: Form> Form for NonEmpty<F> {
    type Value = Vec<F::Value>;
    const KIND: Kind = Kind::List { of: &F::KIND, min: 1 };

    fn read(node: &Node) -> Option<Vec<F::Value>> {
        List::<F>::read(node)
    }
}

impl<F: Form> Items for NonEmpty<F> {
    type Item = F;
}

/// A map whose keys the operator chooses. Entries that are wrong are left out.
#[derive(Debug)]
pub struct MapOf<K, F>(PhantomData<(K, F)>);

/// Labels, in which a value may be empty.
pub type Labels = MapOf<Text, LabelValue>;

impl<K: TextForm<Value: Ord>, F: Form> Form for MapOf<K, F> {
    type Value = BTreeMap<K::Value, F::Value>;
    const KIND: Kind = Kind::Map { key: K::TEXT, of: &F::KIND };

    fn read(node: &Node) -> Option<Self::Value> {
        let pairs = node.entries().iter();
        Some(pairs.filter_map(|(key, value)| Some((K::parse(&key.text).ok()?, F::read(value)?))).collect())
    }
}

impl<K: Keys> MayBeKeys for OrOff<K> {
    type Keys = K;
}
