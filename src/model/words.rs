//! Types whose values are fixed words in the config: each type lists its words with [`words!`](crate::words!) beside its definition.

use crate::endpoint::{Encapsulation, Health, ProxyVersion, TlsMode};
use crate::service::PortProtocol;

/// A type whose values the config and documents write as fixed words.
pub trait Words: Copy + 'static {
    /// All values of the type.
    const ALL: &'static [Self];
    /// The words of the values, in the same order.
    const WORDS: &'static [&'static str];
    /// Returns the word of this value.
    fn word(self) -> &'static str;
}

/// Implements [`Words`] for types with `ALL` and `text`.
#[macro_export]
macro_rules! words {
    ($($type:ty),+ $(,)?) => {$(
        impl $crate::words::Words for $type {
            const ALL: &'static [Self] = &<$type>::ALL;
            const WORDS: &'static [&'static str] = &{
                let mut words = [""; <$type>::ALL.len()];
                let mut at = 0;
                while at < words.len() {
                    words[at] = <$type>::ALL[at].text();
                    at += 1;
                }
                words
            };

            fn word(self) -> &'static str {
                self.text()
            }
        }
    )+};
}

words!(PortProtocol, TlsMode, Encapsulation, Health, ProxyVersion);
