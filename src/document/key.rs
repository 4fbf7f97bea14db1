//! The definition of a map's key in one constant: its name, the form of its values, its default, and its description for users.
//! The check, the reader, the schema and the reference all use this constant.

use std::marker::PhantomData;

use super::form::{Form, Written};
use super::table::{AnyKey, Kind, Presence};
use super::tree::Node;

/// A key without a default: it must be present, or its absence has a meaning of its own. An absent key is read as `None`.
#[derive(Debug)]
pub struct Key<F> {
    name: &'static str,
    /// The effect of an absent key, in words; `None`: the key must be present.
    absent: Option<&'static str>,
    doc: &'static str,
    form: PhantomData<fn() -> F>,
}

/// A key with a default. An absent key is read as the default.
pub struct Defaulted<F: Form> {
    name: &'static str,
    default: fn() -> F::Value,
    doc: &'static str,
}

/// A key that can be read.
pub trait ReadKey: AnyKey {
    /// The type of the value that is read.
    type Read;
    /// Reads the value of the key. A wrong value is read as absent; `check` reports it.
    fn read(&self, node: Option<&Node>) -> Self::Read;
}

impl<F: Form> Key<F> {
    /// Makes a key that must be present.
    pub const fn required(name: &'static str, doc: &'static str) -> Self {
        Self { name, absent: None, doc, form: PhantomData }
    }

    /// Makes a key that may be absent; `absent` describes the effect of an absent key.
    pub const fn optional(name: &'static str, absent: &'static str, doc: &'static str) -> Self {
        Self { name, absent: Some(absent), doc, form: PhantomData }
    }

    /// Returns the key as written.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl<F: Written> Defaulted<F> {
    /// Makes a key with a default.
    pub const fn new(name: &'static str, default: fn() -> F::Value, doc: &'static str) -> Self {
        Self { name, default, doc }
    }

    /// Returns the key as written.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl<F: Form> AnyKey for Key<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn kind(&self) -> &'static Kind {
        const { &F::KIND }
    }

    fn is_required(&self) -> bool {
        self.absent.is_none()
    }

    fn presence(&self) -> Presence {
        self.absent.map_or(Presence::Required, Presence::Absent)
    }

    fn doc(&self) -> &'static str {
        self.doc
    }
}

impl<F: Written> AnyKey for Defaulted<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn kind(&self) -> &'static Kind {
        const { &F::KIND }
    }

    fn is_required(&self) -> bool {
        false
    }

    fn presence(&self) -> Presence {
        Presence::Default(F::write(&(self.default)()))
    }

    fn doc(&self) -> &'static str {
        self.doc
    }
}

impl<F: Form> ReadKey for Key<F> {
    type Read = Option<F::Value>;

    fn read(&self, node: Option<&Node>) -> Option<F::Value> {
        F::read(node?)
    }
}

impl<F: Written> ReadKey for Defaulted<F> {
    type Read = F::Value;

    fn read(&self, node: Option<&Node>) -> F::Value {
        node.and_then(F::read).unwrap_or_else(self.default)
    }
}

/// Defines a map with known keys: a type with a constant for each key. The comments are the descriptions for users.
/// After its form, a key has `= default`, `=> "the effect of its absence"`, or `=> required`. Keys after `+` are shared
/// with other maps. Keys after `removed` have no effect; each has the end of the warning about it.
///
/// ```text
/// keys! {
///     /// Timing of a graceful stop.
///     pub Drain "drain" {
///         /// Time between failing `/readyz` and closing the listeners.
///         DELAY "delay": form::Period = Duration::ZERO;
///     }
/// }
/// ```
#[macro_export]
macro_rules! keys {
    (@type $form:ty) => { $crate::key::Key<$form> };
    (@type $form:ty, $default:expr) => { $crate::key::Defaulted<$form> };
    (@key $name:literal, $doc:expr, = $default:expr) => {
        $crate::key::Defaulted::new($name, || $default, $doc)
    };
    (@key $name:literal, $doc:expr, => required) => { $crate::key::Key::required($name, $doc) };
    (@key $name:literal, $doc:expr, => $absent:literal) => {
        $crate::key::Key::optional($name, $absent, $doc)
    };
    ($($(#[doc = $doc:literal])+ $visible:vis $object:ident $name:literal $(one of [$($one:ident),+])? {
        $($(#[doc = $key_doc:literal])+ $key:ident $text:literal: $form:ty $(= $default:expr)? $(=> $absent:tt)?;)*
    } $(+ $shared:ident)* $(removed { $($removed:literal $advice:literal;)+ })?)+) => {$(
        $(#[doc = $doc])+
        #[derive(Debug)]
        $visible struct $object;

        impl $object {
            $($(#[doc = $key_doc])+
            $visible const $key: $crate::key::keys!(@type $form $(, $default)?) =
                $crate::key::keys!(@key $text, concat!($($key_doc),+).trim_ascii_start(), $(= $default)? $(=> $absent)?);)*
        }

        impl $crate::form::Form for $object {
            type Value = ();
            const KIND: $crate::table::Kind =
                $crate::table::Kind::Object(<Self as $crate::form::Keys>::OBJECT);

            fn read(node: &$crate::tree::Node) -> Option<()> {
                node.is_map().then_some(())
            }
        }

        impl $crate::form::Keys for $object {
            const OBJECT: &'static $crate::table::Object = &$crate::table::Object {
                name: $name,
                doc: concat!($($doc),+).trim_ascii_start(),
                one_of: &[$($(Self::$one.name()),+)?],
                removed: &[$($(($removed, $advice)),+)?],
                keys: &[$(&Self::$key,)* $(&$shared,)*],
            };
        }
    )+};
}
pub use keys;
