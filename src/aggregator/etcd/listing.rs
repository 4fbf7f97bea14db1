//! All keys of a registry as they were at one revision, read in pages of a bounded size.

use super::client::{Client, Fault};
use crate::proto::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader};
use crate::proto::mvccpb::KeyValue;

/// The size of a page that is aimed at.
const PAGE_BYTES: usize = 2 << 20;
/// Keys of the first page, and of any.
const PAGE_FIRST: usize = 256;
const PAGE_MAX: usize = 4096;
/// All values of one listing together.
const BYTES_MAX: usize = 1 << 30;

/// A listing that is being read.
#[derive(Debug)]
pub struct Listing {
    /// The first key that was not read yet; `None`: all were.
    next: Option<Vec<u8>>,
    end: Vec<u8>,
    /// The revision of the first page, which the others are read at; 0 before it.
    revision: i64,
    cluster: u64,
    /// Keys to ask for.
    page: usize,
    bytes: usize,
}

/// Some keys of a listing, in their order.
#[derive(Debug, PartialEq)]
pub enum Page {
    Values(Vec<KeyValue>),
    /// One key, whose value does not fit into a message.
    Oversize(Vec<u8>),
}

impl Listing {
    /// The keys from `begin` to just before `end`.
    pub fn new((begin, end): (Vec<u8>, Vec<u8>)) -> Self {
        Self { next: Some(begin), end, revision: 0, cluster: 0, page: PAGE_FIRST, bytes: 0 }
    }

    /// The revision that the keys were read at.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The cluster that they were read from.
    pub fn cluster(&self) -> u64 {
        self.cluster
    }

    /// Reads the next page; `None` at the end.
    pub async fn next(&mut self, client: &mut Client) -> Result<Option<Page>, Fault> {
        loop {
            let Some(key) = self.next.clone() else { return Ok(None) };
            let request = RangeRequest {
                key: key.clone(),
                range_end: self.end.clone(),
                limit: i64::try_from(self.page).unwrap_or(i64::MAX),
                revision: self.revision,
                keys_only: false,
            };
            match client.range(request.clone()).await {
                Ok(answer) => return self.take(answer).map(Some),
                Err(Fault::TooLarge) if self.page > 1 => self.page = self.page.div_ceil(8).min(self.page - 1),
                Err(Fault::TooLarge) => {
                    let answer = client.range(RangeRequest { keys_only: true, ..request }).await?;
                    return self.take_key(answer).map(Some);
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    fn take(&mut self, answer: RangeResponse) -> Result<Page, Fault> {
        self.note(answer.header.as_ref())?;
        let RangeResponse { kvs, more, .. } = answer;
        self.advance(kvs.last(), more)?;
        let bytes: usize = kvs.iter().map(|pair| pair.key.len() + pair.value.len()).sum();
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > BYTES_MAX {
            return Err(Fault::Answer("the values of the registry exceed 1 GiB together"));
        }
        // As many keys as would have made a page of the size that is aimed at.
        let fitting = kvs.len().saturating_mul(PAGE_BYTES) / bytes.max(1);
        self.page = fitting.clamp(1, (self.page * 2).min(PAGE_MAX));
        Ok(Page::Values(kvs))
    }

    fn take_key(&mut self, answer: RangeResponse) -> Result<Page, Fault> {
        self.note(answer.header.as_ref())?;
        self.advance(answer.kvs.last(), answer.more)?;
        match answer.kvs.into_iter().next() {
            Some(pair) => Ok(Page::Oversize(pair.key)),
            None => Ok(Page::Values(Vec::new())),
        }
    }

    fn note(&mut self, header: Option<&ResponseHeader>) -> Result<(), Fault> {
        let header = header.filter(|header| header.revision > 0);
        let header = header.ok_or(Fault::Answer("the listing has no revision"))?;
        if self.revision == 0 {
            (self.revision, self.cluster) = (header.revision, header.cluster_id);
        }
        Ok(())
    }

    /// Goes on behind the last key of a page. Keys have to grow, so that the listing has an end.
    fn advance(&mut self, last: Option<&KeyValue>, more: bool) -> Result<(), Fault> {
        let from = self.next.take().unwrap_or_default();
        let Some(last) = last else {
            return if more {
                Err(Fault::Answer("a page of the listing is empty although more keys follow"))
            } else {
                Ok(())
            };
        };
        if last.key < from || last.key >= self.end {
            return Err(Fault::Answer("a page of the listing has keys that were not requested"));
        }
        if more {
            // The first possible key behind the last one.
            self.next = Some([&*last.key, &[0]].concat());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing() -> Listing {
        Listing::new((b"/p/".into(), b"/p0".into()))
    }

    fn answer(keys: &[&str], size: usize, more: bool) -> RangeResponse {
        let pair =
            |key: &&str| KeyValue { key: key.as_bytes().into(), value: vec![0; size], mod_revision: 1 };
        let header = ResponseHeader { cluster_id: 7, revision: 42 };
        RangeResponse { header: Some(header), kvs: keys.iter().map(pair).collect(), more }
    }

    #[test]
    fn pages_follow_one_another_at_one_revision() {
        let mut listing = listing();
        let page = listing.take(answer(&["/p/a", "/p/b"], 10, true)).expect("a page");
        assert!(matches!(page, Page::Values(values) if values.len() == 2));
        assert_eq!((listing.revision(), listing.cluster()), (42, 7));
        assert_eq!(listing.next.as_deref(), Some(&b"/p/b\0"[..]));
        let mut later = answer(&["/p/c"], 10, false);
        later.header = Some(ResponseHeader { cluster_id: 7, revision: 50 });
        listing.take(later).expect("a page");
        assert_eq!((listing.revision(), listing.next), (42, None));
    }

    #[test]
    fn pages_have_as_many_keys_as_fit() {
        let mut listing = listing();
        listing.take(answer(&["/p/a"], 10, true)).expect("a page");
        assert_eq!(listing.page, 512);
        (0..9).for_each(|_| drop(listing.take(answer(&["/p/b"], 10, true))));
        assert_eq!(listing.page, PAGE_MAX);
        listing.take(answer(&["/p/c", "/p/d"], PAGE_BYTES / 8, true)).expect("a page");
        assert_eq!(listing.page, 7);
        listing.take(answer(&["/p/e"], 8 * PAGE_BYTES, true)).expect("a page");
        assert_eq!(listing.page, 1);
    }

    #[test]
    fn answers_that_would_never_end_are_faults() {
        for (wrong, wanted) in [
            (answer(&[], 0, true), "a page of the listing is empty"),
            (answer(&["/o/z"], 0, true), "keys that were not requested"),
            (answer(&["/p0"], 0, true), "keys that were not requested"),
            (RangeResponse::default(), "no revision"),
        ] {
            let mut listing = listing();
            listing.take(answer(&["/p/a"], 0, true)).expect("a page");
            // Later pages give a revision of their own, which is not looked at.
            let fault = listing.take(wrong).expect_err("wrong");
            assert!(fault.to_string().contains(wanted), "{fault}");
        }
        let mut endless = listing();
        endless.bytes = BYTES_MAX;
        assert!(endless.take(answer(&["/p/a"], 1, true)).is_err());
        let mut empty = listing();
        assert_eq!(empty.take(answer(&[], 0, false)).expect("a page"), Page::Values(Vec::new()));
        assert_eq!(empty.next, None);
    }
}
