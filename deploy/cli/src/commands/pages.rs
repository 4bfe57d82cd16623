//! Reads lists that the router answers in pages.

use serde_json::Value;

use crate::{
    connect::router::{RouterClient, encode},
    error::Error,
};

/// The router may send fewer.
const PAGE_ENTRIES: usize = 1000;
/// Bounds one reading, so that a list which grows all the time ends.
const PAGES_MAX: usize = 1000;

#[derive(Debug)]
pub struct PagedList<'a> {
    pub router: &'a RouterClient,
    pub path: &'static str,
    /// A further part of the query, such as `&session=x`, or empty.
    pub filter: String,
    /// The list's name in the answer.
    pub member: &'static str,
    after: Option<String>,
    /// Entries after `after` that were read already, in a page without a `next`.
    read_after: usize,
}

impl<'a> PagedList<'a> {
    #[must_use]
    pub fn new(router: &'a RouterClient, path: &'static str, member: &'static str) -> Self {
        Self { router, path, filter: String::new(), member, after: None, read_after: 0 }
    }

    /// Reads all entries that were not read yet, and returns the last `limit` of them.
    pub async fn read_newest(&mut self, limit: usize) -> Result<Vec<Value>, Error> {
        let mut entries = vec![];
        for _ in 0..PAGES_MAX {
            let (page, is_last) = self.read_page().await?;
            entries.extend(page);
            let excess = entries.len().saturating_sub(limit);
            entries.drain(..excess);
            if is_last {
                break;
            }
        }
        Ok(entries)
    }

    pub async fn read_first(&mut self, limit: usize) -> Result<Vec<Value>, Error> {
        (self.after, self.read_after) = (None, 0);
        let mut entries = vec![];
        for _ in 0..PAGES_MAX {
            let (page, is_last) = self.read_page().await?;
            entries.extend(page);
            if is_last || entries.len() >= limit {
                break;
            }
        }
        entries.truncate(limit);
        Ok(entries)
    }

    /// Returns what was not read yet of the next page, and whether the list ends there.
    async fn read_page(&mut self) -> Result<(Vec<Value>, bool), Error> {
        let after = self.after.as_deref().map(|after| format!("&after={}", encode(after)));
        let (path, filter) = (self.path, &self.filter);
        let query = format!("{path}?limit={PAGE_ENTRIES}{}{filter}", after.unwrap_or_default());
        let mut page = self.router.get(&query).await?;
        let Value::Array(mut entries) = page[self.member].take() else {
            let why = format!("it has no list {:?}", self.member);
            return Err(self.router.answer_error(path, why));
        };
        let entries_after = entries.len();
        entries.drain(..self.read_after.min(entries_after));
        let next = page["next"].as_str().map(str::to_owned);
        let is_last = entries_after == 0 || next.is_none() || next == self.after;
        match next {
            Some(next) => (self.after, self.read_after) = (Some(next), 0),
            None => self.read_after = entries_after,
        }
        Ok((entries, is_last))
    }
}
