//! Reads which part of a list of recent events a request asks for.
//!
//! A cursor names a place in such a list, which grows while a client reads it. A cursor of another
//! process, as after a restart, names no place. Then the list begins with the oldest entry that is
//! kept, so that a reader misses nothing that this process still has.

use axum::extract::Query;
use contract::api::Cursor;
use http::Uri;
use serde::Deserialize;
use service::refusal::{Code, Refusal};

use super::errors;

const ENTRIES_DEFAULT: usize = 100;
pub(super) const ENTRIES_MAX: usize = 1000;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PageQuery {
    after: Option<String>,
    limit: Option<u32>,
    session: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct PageRange {
    /// `None`: the last entries.
    pub(super) after: Option<u64>,
    /// 1 to [`ENTRIES_MAX`].
    pub(super) limit: usize,
    /// The digest or the id of the session whose entries are wanted.
    pub(super) session: Option<String>,
}

impl PageRange {
    /// Refuses a query that names a session.
    pub(super) fn read(uri: &Uri, process_id: u32) -> Result<Self, Refusal> {
        let range = Self::read_of_session(uri, process_id)?;
        match range.session {
            None => Ok(range),
            Some(_) => Err(Refusal::new(Code::InvalidField, "this list can't be had by session")),
        }
    }

    /// Like [`Self::read`], for a list of which a query may ask for one session's entries.
    pub(super) fn read_of_session(uri: &Uri, process_id: u32) -> Result<Self, Refusal> {
        let Query(PageQuery { after, limit, session }) =
            Query::try_from_uri(uri).map_err(|error| errors::query_refusal(&error))?;
        let after = after.map(|cursor| parse_cursor(&cursor, process_id)).transpose()?;
        let limit = limit.map_or(ENTRIES_DEFAULT, |limit| limit as usize);
        Ok(Self { after, limit: limit.clamp(1, ENTRIES_MAX), session })
    }
}

pub(super) fn cursor(place: u64, process_id: u32) -> Cursor {
    Cursor(format!("{process_id:08x}.{place}"))
}

fn parse_cursor(text: &str, process_id: u32) -> Result<u64, Refusal> {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    // As the API's document says. `parse` alone takes signs, too.
    let is_cursor = |(process, place): &(&str, &str)| {
        process.len() == 8
            && process.bytes().all(is_hex)
            && (1..=18).contains(&place.len())
            && place.bytes().all(|byte| byte.is_ascii_digit())
    };
    let parts = text.split_once('.').filter(is_cursor).and_then(|(process, place)| {
        Some((u32::from_str_radix(process, 16).ok()?, place.parse::<u64>().ok()?))
    });
    match parts {
        Some((process, place)) if process == process_id => Ok(place),
        Some(_) => Ok(0),
        None => Err(Refusal::new(
            Code::InvalidField,
            "after is not a cursor; send the last answer's next, or leave it out",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_of_another_process_begins_with_the_oldest_entry() {
        let read = |query: &str| {
            let uri = format!("/v1/turns?{query}").parse().unwrap();
            PageRange::read(&uri, 7).map(|range| (range.after, range.limit))
        };
        assert_eq!(read("").unwrap(), (None, 100));
        assert_eq!(read(&format!("after={}&limit=5", cursor(42, 7).0)).unwrap(), (Some(42), 5));
        assert_eq!(read(&format!("after={}&limit=0", cursor(42, 8).0)).unwrap(), (Some(0), 1));
        assert_eq!(read("limit=4000000000").unwrap(), (None, 1000));
        for wrong in [
            "after=",
            "after=42",
            "after=x.1",
            "after=0.5",
            "after=00000007.%2B1",
            "limit=-1",
            "session=s",
            "other=1",
        ] {
            assert_eq!(read(wrong).unwrap_err().code, Code::InvalidField, "{wrong}");
        }
    }
}
