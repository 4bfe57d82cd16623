//! Encodes the report of an audit as bytes for another process, and decodes such bytes.
//!
//! In the engine's process, the C library (`capi`) calls [`Report::encode`]. In the agent's
//! process, `audit/read.rs` calls [`Report::decode`]. [`super`] explains the fields. The encoding
//! is little-endian and has a version. Each report has exactly one encoding:
//!
//! | part | bytes |
//! |---|---|
//! | magic, version | 4 (`BKVR`), u16 |
//! | scope; flags | u8 (0 complete, 1 rows changed, 2 partial); u8 (1 free, 2 by owner) |
//! | `audit_number` | u64 |
//! | `page_tokens`, pages, rows, `rows_changed` | u32 each |
//! | `held_pages` | u64 |
//! | free: pages, runs | u64 each, if flagged |
//! | by owner: free, private, cached, `cached_in_use`, leaked, corrupt | u64 each, if flagged |
//! | digests: compared, fresh, remembered | u64 each |
//! | sessions | u32 their number, then each session |
//! | kinds of fault | u8 their number, then each kind |
//!
//! | one session | bytes |
//! |---|---|
//! | number; flags | u32; u8 (1 if `freed_by_close` is known) |
//! | refs, `exclusive_pages`, `share_q32` | u64 each |
//! | `freed_by_close` (0 if unknown), runs, `tail_tokens` | u64 each |
//!
//! | one kind of fault | bytes |
//! |---|---|
//! | kind, count | u8, u64 |
//! | `first_faults` | u8 their number, then each fault |
//! | one fault: `page_or_entry`, `session_count` | i64, u32 |
//! | one fault: sessions | u8 their number, then u32 each |
//!
//! A field "if flagged" is there only if its flag is set. Sessions and kinds are in ascending
//! order, and nothing follows the last kind. The decoder rejects any other encoding.

use super::{
    DigestCounts, FAULTS_PER_KIND_MAX, FaultKind, Finding, FreePages, KindFindings, PagesByOwner,
    Report, SESSIONS_MAX, SESSIONS_PER_FAULT_MAX, Scope, Session,
};

/// The version of the encoding.
pub const VERSION: u16 = 1;
/// The first four bytes of every report.
const MAGIC: [u8; 4] = *b"BKVR";

/// Flag of a report that has [`Report::free`].
const FLAG_FREE_PAGES: u8 = 1;
/// Flag of a report that has [`Report::pages_by_owner`].
const FLAG_PAGES_BY_OWNER: u8 = 2;
/// Flag of a session that has [`Session::freed_by_close`].
const SESSION_FLAG_FREED: u8 = 1;

/// The number of bytes of one session's entry.
pub const SESSION_BYTES: usize = 4 + 1 + 6 * 8;
/// The maximum number of bytes of one fault.
const FINDING_BYTES_MAX: usize = 8 + 4 + 1 + 4 * SESSIONS_PER_FAULT_MAX;
/// The maximum number of bytes of one kind of fault, with its first faults.
const KIND_FINDINGS_BYTES_MAX: usize = 1 + 8 + 1 + FAULTS_PER_KIND_MAX * FINDING_BYTES_MAX;
/// The maximum number of bytes of a report without its sessions' entries: almost 8 KiB.
pub const REPORT_BYTES_WITHOUT_SESSIONS_MAX: usize =
    8 + 8 + 16 + 8 + 16 + 48 + 24 + 4 + 1 + FaultKind::ALL.len() * KIND_FINDINGS_BYTES_MAX;

/// Why bytes are not a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("not a report of page accounting")]
    Magic,
    #[error("report version {0}, but this build reads {VERSION}: update the older side")]
    Version(u16),
    #[error("the report ends early")]
    EndsEarly,
    #[error("{0} bytes follow the end of the report")]
    ExtraBytes(usize),
    #[error("the report has an invalid {0}")]
    Field(&'static str),
}

impl Report {
    /// Encodes the report. The length is at most [`REPORT_BYTES_WITHOUT_SESSIONS_MAX`] bytes plus
    /// [`SESSION_BYTES`] per session.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ByteWriter(Vec::with_capacity(256 + self.sessions.len() * SESSION_BYTES));
        out.0.extend(MAGIC);
        out.0.extend(VERSION.to_le_bytes());
        out.u8(match self.scope {
            Scope::Complete => 0,
            Scope::RowsChanged => 1,
            Scope::Partial => 2,
        });
        let free_flag = if self.free.is_some() { FLAG_FREE_PAGES } else { 0 };
        let owner_flag = if self.pages_by_owner.is_some() { FLAG_PAGES_BY_OWNER } else { 0 };
        out.u8(free_flag | owner_flag);
        out.u64(self.audit_number);
        for size in [self.page_tokens, self.pages, self.rows, self.rows_changed] {
            out.u32(size);
        }
        out.u64(self.held_pages);
        if let Some(free) = self.free {
            out.u64s([free.pages, free.runs]);
        }
        if let Some(pages) = self.pages_by_owner {
            let PagesByOwner { free, private, cached, cached_in_use, leaked, corrupt } = pages;
            out.u64s([free, private, cached, cached_in_use, leaked, corrupt]);
        }
        out.u64s([self.digests.compared, self.digests.fresh, self.digests.remembered]);
        out.u32(count_as_u32(self.sessions.len()));
        for session in &self.sessions {
            out.session(session);
        }
        out.u8(count_as_u8(self.findings.len()));
        for findings in &self.findings {
            out.kind_findings(findings);
        }
        out.0
    }

    /// Decodes a report.
    ///
    /// # Errors
    /// When the bytes have another version, or [`Report::encode`] never returns these bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let mut from = ByteReader(bytes);
        if from.take::<4>()? != MAGIC {
            return Err(Error::Magic);
        }
        let version = u16::from_le_bytes(from.take()?);
        if version != VERSION {
            return Err(Error::Version(version));
        }
        let scope = match from.u8()? {
            0 => Scope::Complete,
            1 => Scope::RowsChanged,
            2 => Scope::Partial,
            _ => return Err(Error::Field("scope")),
        };
        let flags = from.u8()?;
        if flags & !(FLAG_FREE_PAGES | FLAG_PAGES_BY_OWNER) != 0 {
            return Err(Error::Field("flag"));
        }
        let audit_number = from.u64()?;
        let [page_tokens, pages, rows, rows_changed] =
            [from.u32()?, from.u32()?, from.u32()?, from.u32()?];
        let held_pages = from.u64()?;
        let free = if flags & FLAG_FREE_PAGES != 0 {
            let [pages, runs] = from.u64s()?;
            Some(FreePages { pages, runs })
        } else {
            None
        };
        let pages_by_owner = if flags & FLAG_PAGES_BY_OWNER != 0 {
            let [free, private, cached, cached_in_use, leaked, corrupt] = from.u64s()?;
            Some(PagesByOwner { free, private, cached, cached_in_use, leaked, corrupt })
        } else {
            None
        };
        let [compared, fresh, remembered] = from.u64s()?;
        let digests = DigestCounts { compared, fresh, remembered };
        let sessions = from.sessions()?;
        let findings = from.findings()?;
        if !from.0.is_empty() {
            return Err(Error::ExtraBytes(from.0.len()));
        }
        Ok(Self {
            audit_number,
            scope,
            page_tokens,
            pages,
            rows,
            rows_changed,
            held_pages,
            free,
            pages_by_owner,
            sessions,
            digests,
            findings,
        })
    }
}

fn count_as_u32(n: usize) -> u32 {
    u32::try_from(n).expect("a report has at most SESSIONS_MAX sessions")
}

fn count_as_u8(n: usize) -> u8 {
    u8::try_from(n).expect("kinds, findings and their sessions are few")
}

/// Appends values to the encoding.
struct ByteWriter(Vec<u8>);

impl ByteWriter {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64s<const N: usize>(&mut self, values: [u64; N]) {
        for value in values {
            self.u64(value);
        }
    }

    fn session(&mut self, session: &Session) {
        let &Session { number, refs, exclusive_pages, share_q32, runs, tail_tokens, .. } = session;
        self.u32(number);
        self.u8(if session.freed_by_close.is_some() { SESSION_FLAG_FREED } else { 0 });
        let freed_by_close = session.freed_by_close.unwrap_or(0);
        self.u64s([refs, exclusive_pages, share_q32, freed_by_close, runs, tail_tokens]);
    }

    fn kind_findings(&mut self, findings: &KindFindings) {
        self.u8(findings.kind as u8);
        self.u64(findings.count);
        self.u8(count_as_u8(findings.first_faults.len()));
        for finding in &findings.first_faults {
            self.0.extend(finding.page_or_entry.to_le_bytes());
            self.u32(finding.session_count);
            self.u8(count_as_u8(finding.sessions.len()));
            for &session in &finding.sessions {
                self.u32(session);
            }
        }
    }
}

/// Reads values from the encoding. Holds the bytes that are not yet read.
struct ByteReader<'a>(&'a [u8]);

impl ByteReader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Error::EndsEarly)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, Error> {
        Ok(u8::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn u64s<const N: usize>(&mut self) -> Result<[u64; N], Error> {
        let mut values = [0; N];
        for value in &mut values {
            *value = self.u64()?;
        }
        Ok(values)
    }

    fn sessions(&mut self) -> Result<Vec<Session>, Error> {
        let n = self.u32()? as usize;
        if n > SESSIONS_MAX {
            return Err(Error::Field("number of sessions"));
        }
        if self.0.len() < n * SESSION_BYTES {
            return Err(Error::EndsEarly);
        }
        let mut sessions: Vec<Session> = Vec::with_capacity(n);
        for _ in 0..n {
            let number = self.u32()?;
            let flags = self.u8()?;
            let [refs, exclusive_pages, share_q32, freed, runs, tail_tokens] = self.u64s()?;
            let freed_by_close = match (flags, freed) {
                (SESSION_FLAG_FREED, freed) => Some(freed),
                (0, 0) => None,
                _ => return Err(Error::Field("session's flag")),
            };
            if sessions.last().is_some_and(|previous| previous.number >= number) {
                return Err(Error::Field("order of sessions"));
            }
            sessions.push(Session {
                number,
                refs,
                exclusive_pages,
                share_q32,
                freed_by_close,
                runs,
                tail_tokens,
            });
        }
        Ok(sessions)
    }

    fn findings(&mut self) -> Result<Vec<KindFindings>, Error> {
        let mut findings: Vec<KindFindings> = Vec::new();
        for _ in 0..self.u8()? {
            let kind_number = self.u8()?;
            let kind = FaultKind::ALL.into_iter().find(|kind| *kind as u8 == kind_number);
            let kind = kind.ok_or(Error::Field("kind"))?;
            if findings.last().is_some_and(|previous| previous.kind >= kind) {
                return Err(Error::Field("order of kinds"));
            }
            let count = self.u64()?;
            let n = usize::from(self.u8()?);
            if n > FAULTS_PER_KIND_MAX || n as u64 > count {
                return Err(Error::Field("number of findings"));
            }
            let first_faults = (0..n).map(|_| self.finding()).collect::<Result<_, _>>()?;
            findings.push(KindFindings { kind, count, first_faults });
        }
        Ok(findings)
    }

    fn finding(&mut self) -> Result<Finding, Error> {
        let page_or_entry = i64::from_le_bytes(self.take()?);
        let session_count = self.u32()?;
        let n = self.u8()?;
        if usize::from(n) > SESSIONS_PER_FAULT_MAX || u32::from(n) > session_count {
            return Err(Error::Field("number of sessions in a finding"));
        }
        let sessions = (0..n).map(|_| self.u32()).collect::<Result<_, _>>()?;
        Ok(Finding { page_or_entry, sessions, session_count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, option, prelude::*, sample::subsequence};

    fn finding() -> impl Strategy<Value = Finding> {
        let sessions = vec(any::<u32>(), 0..=SESSIONS_PER_FAULT_MAX);
        (any::<i64>(), sessions, 0..u32::MAX - 8).prop_map(|(page_or_entry, sessions, more)| {
            Finding {
                page_or_entry,
                session_count: u32::try_from(sessions.len()).unwrap() + more,
                sessions,
            }
        })
    }

    fn findings() -> impl Strategy<Value = Vec<KindFindings>> {
        let kinds = subsequence(FaultKind::ALL.to_vec(), 0..=FaultKind::ALL.len());
        kinds.prop_flat_map(|kinds| {
            let one = |kind| {
                let parts = (vec(finding(), 0..=FAULTS_PER_KIND_MAX), 0..u64::MAX / 2);
                parts.prop_map(move |(first_faults, more)| KindFindings {
                    kind,
                    count: first_faults.len() as u64 + more,
                    first_faults,
                })
            };
            kinds.into_iter().map(one).collect::<Vec<_>>()
        })
    }

    fn sessions() -> impl Strategy<Value = Vec<Session>> {
        let line = (any::<u32>(), any::<[u64; 5]>(), option::of(any::<u64>()));
        vec(line, 0..40).prop_map(|mut lines| {
            lines.sort_by_key(|line| line.0);
            lines.dedup_by_key(|line| line.0);
            let line = |(number, counts, freed_by_close)| {
                let [refs, exclusive_pages, share_q32, runs, tail_tokens] = counts;
                Session {
                    number,
                    refs,
                    exclusive_pages,
                    share_q32,
                    freed_by_close,
                    runs,
                    tail_tokens,
                }
            };
            lines.into_iter().map(line).collect()
        })
    }

    fn report() -> impl Strategy<Value = Report> {
        let scope =
            prop_oneof![Just(Scope::Complete), Just(Scope::RowsChanged), Just(Scope::Partial)];
        let lists = (option::of(any::<[u64; 2]>()), option::of(any::<[u64; 6]>()));
        let head = (scope, any::<[u32; 4]>(), any::<[u64; 5]>(), lists);
        (head, sessions(), findings()).prop_map(
            |((scope, small, large, lists), sessions, findings)| {
                let [page_tokens, pages, rows, rows_changed] = small;
                let [audit_number, held_pages, compared, fresh, remembered] = large;
                let by_owner = |counts: [u64; 6]| {
                    let [free, private, cached, cached_in_use, leaked, corrupt] = counts;
                    PagesByOwner { free, private, cached, cached_in_use, leaked, corrupt }
                };
                Report {
                    audit_number,
                    scope,
                    page_tokens,
                    pages,
                    rows,
                    rows_changed,
                    held_pages,
                    free: lists.0.map(|[pages, runs]| FreePages { pages, runs }),
                    pages_by_owner: lists.1.map(by_owner),
                    sessions,
                    digests: DigestCounts { compared, fresh, remembered },
                    findings,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(report in report()) {
            let bytes = report.encode();
            let sessions_bytes = report.sessions.len() * SESSION_BYTES;
            let bytes_max = REPORT_BYTES_WITHOUT_SESSIONS_MAX + sessions_bytes;
            prop_assert!(bytes.len() <= bytes_max);
            prop_assert_eq!(Report::decode(&bytes), Ok(report));
        }

        #[test]
        fn every_part_of_a_report_is_too_short(report in report(), cut in any::<prop::sample::Index>()) {
            let bytes = report.encode();
            let part = &bytes[..cut.index(bytes.len())];
            prop_assert_eq!(Report::decode(part), Err(Error::EndsEarly));
            let mut longer = bytes;
            longer.push(0);
            prop_assert_eq!(Report::decode(&longer), Err(Error::ExtraBytes(1)));
        }

        #[test]
        fn whatever_decodes_is_written_the_same_way(
            report in report(),
            flips in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut bytes = report.encode();
            for (at, with) in flips {
                let at = at.index(bytes.len());
                bytes[at] ^= with;
            }
            if let Ok(report) = Report::decode(&bytes) {
                prop_assert_eq!(report.encode(), bytes);
            }
        }

        #[test]
        fn garbage_does_no_harm(garbage in vec(any::<u8>(), 0..300), marked in any::<bool>()) {
            let mut bytes = if marked { vec![b'B', b'K', b'V', b'R', 1, 0] } else { vec![] };
            bytes.extend(garbage);
            if let Ok(report) = Report::decode(&bytes) {
                prop_assert_eq!(report.encode(), bytes);
            }
        }
    }

    #[test]
    fn another_version_says_so() {
        assert_eq!(Report::decode(b"BKVR\x02\x00"), Err(Error::Version(2)));
        assert_eq!(Report::decode(b"RIFF\x02\x00"), Err(Error::Magic));
        assert_eq!(Report::decode(b""), Err(Error::EndsEarly));
    }
}
