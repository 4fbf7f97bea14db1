//! The token of an invitation: all that the invited gateway needs to redeem the invitation, as text without spaces.

use std::fmt;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use prost::Message as _;
use twox_hash::XxHash3_64;

use super::enrolled::GatewayAddress;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_tls::pinned::Hash;

/// The beginning of each token; the number is the version.
const PREFIX: &str = "isthmus1.";
/// The longest token in bytes.
const BYTES_MAX: usize = 8 << 10;
/// The largest number of addresses in a token; a token with more is refused.
pub const ADDRESSES_MAX: usize = 16;
/// The largest length of the suggested name in bytes; a token with a longer name is refused.
const NAME_BYTES_MAX: usize = 253;

/// The contents of a token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The name that the inviting gateway suggests for itself.
    pub name: String,
    /// The addresses at which the inviting gateway accepts enrolments.
    pub addresses: Vec<GatewayAddress>,
    /// The pin of the inviting gateway's key.
    pub pin: Hash,
    /// The secret that redeems the invitation, once.
    pub secret: Hash,
}

/// The reason why a text is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text does not begin as tokens do.
    #[error("the text is not a token of `isthmus peer invite`, or a later version of isthmus made it")]
    Foreign,
    /// A part of the text is missing, or was changed.
    #[error("the token is damaged or incomplete; copy all of it")]
    Damaged,
}

impl Token {
    /// Reads a token.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let rest = text.trim().strip_prefix(PREFIX).ok_or(TokenError::Foreign)?;
        if rest.len() > BYTES_MAX {
            return Err(TokenError::Damaged);
        }
        Self::of_text(rest).ok_or(TokenError::Damaged)
    }

    fn of_text(text: &str) -> Option<Self> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let (sum, message) = bytes.split_first_chunk::<8>()?;
        if u64::from_be_bytes(*sum) != XxHash3_64::oneshot(message) {
            return None;
        }
        let token = proto::Token::decode(message).ok()?;
        if token.addresses.is_empty()
            || token.addresses.len() > ADDRESSES_MAX
            || token.name.len() > NAME_BYTES_MAX
        {
            return None;
        }
        let addresses = token.addresses.iter().map(|text| GatewayAddress::parse(text).ok());
        Some(Self {
            name: token.name,
            addresses: addresses.collect::<Option<_>>()?,
            pin: token.pin.try_into().ok()?,
            secret: token.secret.try_into().ok()?,
        })
    }

    /// Returns the text of the token.
    pub fn text(&self) -> String {
        let message = proto::Token {
            name: self.name.clone(),
            addresses: self.addresses.iter().map(ToString::to_string).collect(),
            pin: self.pin.to_vec(),
            secret: self.secret.to_vec(),
        };
        sealed(&message.encode_to_vec())
    }
}

/// Returns the text of an encoded `Token` message.
pub fn sealed(message: &[u8]) -> String {
    let sum = XxHash3_64::oneshot(message).to_be_bytes();
    format!("{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode([&sum, message].concat()))
}

impl fmt::Debug for Token {
    /// Formats the token without its secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Token");
        shown.field("name", &self.name).field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word_that_is_read_again_and_no_other_word_is() {
        let token = Token {
            name: "east".to_owned(),
            addresses: vec![GatewayAddress::parse("gw.east.example:15443").expect("legal")],
            pin: [1; 32],
            secret: [2; 32],
        };
        let text = token.text();
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)), "{text}");
        assert_eq!(Token::parse(&format!(" {text}\n")), Ok(token.clone()));
        for at in PREFIX.len()..text.len() {
            assert_eq!(Token::parse(&text[..at]), Err(TokenError::Damaged));
            let other = if text.as_bytes()[at] == b'A' { "B" } else { "A" };
            let changed = format!("{}{other}{}", &text[..at], &text[at + 1..]);
            assert_eq!(Token::parse(&changed), Err(TokenError::Damaged), "{at}");
        }
        assert_eq!(Token::parse("eyJhIjoxfQ"), Err(TokenError::Foreign));
        assert_eq!(Token::parse(&format!("{PREFIX}{}", "A".repeat(BYTES_MAX + 1))), Err(TokenError::Damaged));
        let address = &token.addresses[0];
        for count in [0, ADDRESSES_MAX + 1] {
            let other = Token { addresses: vec![address.clone(); count], ..token.clone() };
            assert_eq!(Token::parse(&other.text()), Err(TokenError::Damaged), "{count} addresses");
        }
        let shown = format!("{token:?}");
        assert!(
            !shown.contains("secret") && shown.contains("gw.east.example"),
            "the log does not get it: {shown}"
        );
    }
}
