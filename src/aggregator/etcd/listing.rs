//! Reads all keys of a registry at one revision, in pages of bounded size.

use super::client::{EtcdClient, EtcdFault};
use isthmus_net::budget::registry_bytes;
use isthmus_proto::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader};
use isthmus_proto::mvccpb::KeyValue;

/// The wanted size of a page in bytes.
const PAGE_BYTES: usize = 2 << 20;
/// The number of keys of the first page.
const PAGE_FIRST: usize = 256;
/// The largest number of keys of a page.
const PAGE_MAX: usize = 4096;
/// The largest total size of the values of a listing, in bytes.
const BYTES_MAX: usize = 1 << 30;

/// A listing in progress.
#[derive(Debug)]
pub struct Listing {
    /// The first key that was not read yet; `None`: all keys were read.
    next: Option<Vec<u8>>,
    end: Vec<u8>,
    /// The revision of the first page, at which all other pages are read; 0 before the first page.
    revision: i64,
    cluster: u64,
    /// The number of keys to request.
    page: usize,
    bytes: usize,
}

/// Some keys of a listing, in order.
#[derive(Debug, PartialEq)]
pub enum Page {
    /// Keys with their values.
    Values(Vec<KeyValue>),
    /// A key whose value is larger than the largest message.
    Oversize(Vec<u8>),
}

impl Listing {
    /// Lists the keys from `begin` to just before `end`.
    pub fn new((begin, end): (Vec<u8>, Vec<u8>)) -> Self {
        Self { next: Some(begin), end, revision: 0, cluster: 0, page: PAGE_FIRST, bytes: 0 }
    }

    /// Returns the revision at which the keys are read.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Returns the id of the etcd cluster from which the keys are read.
    pub fn cluster(&self) -> u64 {
        self.cluster
    }

    /// Reads the next page; `None` at the end.
    pub async fn next(&mut self, client: &mut EtcdClient) -> Result<Option<Page>, EtcdFault> {
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
                Err(EtcdFault::TooLarge) if self.page > 1 => {
                    self.page = self.page.div_ceil(8).min(self.page - 1)
                }
                Err(EtcdFault::TooLarge) => {
                    let answer = client.range(RangeRequest { keys_only: true, ..request }).await?;
                    return self.take_key(answer).map(Some);
                }
                Err(fault) => return Err(fault),
            }
        }
    }

    fn take(&mut self, answer: RangeResponse) -> Result<Page, EtcdFault> {
        self.note(answer.header.as_ref())?;
        self.advance(&answer)?;
        let kvs = answer.kvs;
        let bytes: usize = kvs.iter().map(|pair| pair.key.len() + pair.value.len()).sum();
        self.bytes = self.bytes.saturating_add(bytes);
        let most = registry_bytes(BYTES_MAX);
        if self.bytes > most {
            return Err(EtcdFault::Exceeded(most));
        }
        // The number of keys that would have made a page of the wanted size.
        let fitting = kvs.len().saturating_mul(PAGE_BYTES) / bytes.max(1);
        self.page = fitting.clamp(1, (self.page * 2).min(PAGE_MAX));
        Ok(Page::Values(kvs))
    }

    fn take_key(&mut self, answer: RangeResponse) -> Result<Page, EtcdFault> {
        self.note(answer.header.as_ref())?;
        self.advance(&answer)?;
        match answer.kvs.into_iter().next() {
            Some(pair) => Ok(Page::Oversize(pair.key)),
            None => Ok(Page::Values(Vec::new())),
        }
    }

    fn note(&mut self, header: Option<&ResponseHeader>) -> Result<(), EtcdFault> {
        let header = header.filter(|header| header.revision > 0);
        let header = header.ok_or(EtcdFault::Answer("the listing has no revision"))?;
        if self.revision == 0 {
            (self.revision, self.cluster) = (header.revision, header.cluster_id);
        }
        Ok(())
    }

    /// Advances behind the last key of a page. Each page must have later keys than the one before, so that the listing ends.
    fn advance(&mut self, answer: &RangeResponse) -> Result<(), EtcdFault> {
        let from = self.next.take().unwrap_or_default();
        let Some(last) = answer.kvs.last() else {
            return if answer.more {
                Err(EtcdFault::Answer("a page of the listing is empty although more keys follow"))
            } else {
                Ok(())
            };
        };
        if last.key < from || last.key >= self.end {
            return Err(EtcdFault::Answer("a page of the listing has keys that were not requested"));
        }
        if answer.more {
            // The smallest key that is larger than the last key of the page.
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

    fn page(keys: &[&str], size: usize) -> RangeResponse {
        let pair =
            |key: &&str| KeyValue { key: key.as_bytes().into(), value: vec![0; size], mod_revision: 1 };
        let header = ResponseHeader { cluster_id: 7, revision: 42 };
        RangeResponse { header: Some(header), kvs: keys.iter().map(pair).collect(), more: true }
    }

    fn last(keys: &[&str], size: usize) -> RangeResponse {
        RangeResponse { more: false, ..page(keys, size) }
    }

    #[test]
    fn pages_follow_one_another_at_one_revision() {
        let mut listing = listing();
        let first = listing.take(page(&["/p/a", "/p/b"], 10)).expect("a page");
        assert!(matches!(first, Page::Values(values) if values.len() == 2));
        assert_eq!((listing.revision(), listing.cluster()), (42, 7));
        assert_eq!(listing.next.as_deref(), Some(&b"/p/b\0"[..]));
        let mut later = last(&["/p/c"], 10);
        later.header = Some(ResponseHeader { cluster_id: 7, revision: 50 });
        listing.take(later).expect("a page");
        assert_eq!((listing.revision(), listing.next), (42, None));
    }

    #[test]
    fn pages_have_as_many_keys_as_fit() {
        let mut listing = listing();
        listing.take(page(&["/p/a"], 10)).expect("a page");
        assert_eq!(listing.page, 512);
        (0..9).for_each(|_| drop(listing.take(page(&["/p/b"], 10))));
        assert_eq!(listing.page, PAGE_MAX);
        listing.take(page(&["/p/c", "/p/d"], PAGE_BYTES / 8)).expect("a page");
        assert_eq!(listing.page, 7);
        listing.take(page(&["/p/e"], 8 * PAGE_BYTES)).expect("a page");
        assert_eq!(listing.page, 1);
    }

    #[test]
    fn answers_that_would_never_end_are_faults() {
        for (wrong, wanted) in [
            (page(&[], 0), "a page of the listing is empty"),
            (page(&["/o/z"], 0), "keys that were not requested"),
            (page(&["/p0"], 0), "keys that were not requested"),
            (RangeResponse::default(), "no revision"),
        ] {
            let mut listing = listing();
            listing.take(page(&["/p/a"], 0)).expect("a page");
            // The revision in the header of a later page is not used.
            let fault = listing.take(wrong).expect_err("wrong");
            assert!(fault.to_string().contains(wanted), "{fault}");
        }
        let mut endless = listing();
        endless.bytes = BYTES_MAX;
        let fault = endless.take(page(&["/p/a"], 1)).expect_err("too much");
        assert_eq!(fault.to_string(), "the values exceed 1024 MiB together");
        let mut empty = listing();
        assert_eq!(empty.take(last(&[], 0)).expect("a page"), Page::Values(Vec::new()));
        assert_eq!(empty.next, None);
    }
}
