//! Encodes the report of an audit as bytes for another process, and decodes such bytes.
//!
//! `BKVR`, a little-endian `u16` version, and the [`Report`] in MessagePack: each structure is an
//! array of its fields, and each variant is its name. Each report has exactly one encoding.

use super::{FAULTS_PER_KIND_MAX, Report, SESSIONS_MAX, SESSIONS_PER_FAULT_MAX};

pub const VERSION: u16 = 2;
const MAGIC: [u8; 4] = *b"BKVR";

/// The maximum number of bytes of one session's entry: its array's header, a `u32`, six `u64`.
pub const SESSION_BYTES_MAX: usize = 1 + 5 + 6 * 9;
/// Eleven kinds of fault with 16 faults, each with eight sessions, take 10 KiB of it.
pub const REPORT_BYTES_WITHOUT_SESSIONS_MAX: usize = 11 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("not a report of page accounting")]
    Magic,
    #[error("report version {0}, but this build reads {VERSION}: update the older side")]
    Version(u16),
    #[error("the report's encoding is invalid")]
    Encoding,
    #[error("the report has an invalid {0}")]
    Field(&'static str),
}

impl Report {
    /// At most [`REPORT_BYTES_WITHOUT_SESSIONS_MAX`] bytes plus [`SESSION_BYTES_MAX`] per session.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
        rmp_serde::encode::write(&mut bytes, self).expect("a report has only numbers and names");
        bytes
    }

    /// Refuses bytes that [`Report::encode`] never returns.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let versioned = bytes.strip_prefix(&MAGIC).ok_or(Error::Magic)?;
        let (version, message) = versioned.split_first_chunk().ok_or(Error::Encoding)?;
        let version = u16::from_le_bytes(*version);
        if version != VERSION {
            return Err(Error::Version(version));
        }
        let report: Self = rmp_serde::from_slice(message).map_err(|_| Error::Encoding)?;
        report.validate()?;
        // MessagePack allows other encodings of the same values, and bytes after them.
        if report.encode() == bytes { Ok(report) } else { Err(Error::Encoding) }
    }

    fn validate(&self) -> Result<(), Error> {
        let require =
            |is_valid: bool, field| if is_valid { Ok(()) } else { Err(Error::Field(field)) };
        require(self.sessions.len() <= SESSIONS_MAX, "number of sessions")?;
        require(self.sessions.is_sorted_by(|a, b| a.number < b.number), "order of sessions")?;
        require(self.findings.is_sorted_by(|a, b| a.kind < b.kind), "order of kinds")?;
        for findings in &self.findings {
            let n = findings.first_faults.len();
            let is_valid = n <= FAULTS_PER_KIND_MAX && n as u64 <= findings.count;
            require(is_valid, "number of findings")?;
            for finding in &findings.first_faults {
                let n = finding.sessions.len();
                let is_valid =
                    n <= SESSIONS_PER_FAULT_MAX && n as u64 <= finding.session_count.into();
                require(is_valid, "number of sessions in a finding")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            DigestCounts, FaultKind, Finding, FreePages, KindFindings, PagesByOwner, Scope, Session,
        },
        *,
    };
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
        let scope = prop_oneof![Just(Scope::Complete), Just(Scope::RowsChanged)];
        let lists = (any::<[u64; 2]>(), option::of(any::<[u64; 6]>()));
        let head = (scope, any::<[u32; 4]>(), any::<[u64; 5]>(), lists);
        (head, sessions(), findings()).prop_map(
            |((scope, small, large, lists), sessions, findings)| {
                let [page_tokens, pages, rows, rows_changed] = small;
                let [free_pages, runs] = lists.0;
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
                    free: FreePages { pages: free_pages, runs },
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
            let sessions_bytes = report.sessions.len() * SESSION_BYTES_MAX;
            let bytes_max = REPORT_BYTES_WITHOUT_SESSIONS_MAX + sessions_bytes;
            prop_assert!(bytes.len() <= bytes_max);
            prop_assert_eq!(Report::decode(&bytes), Ok(report));
        }

        #[test]
        fn every_part_of_a_report_is_too_short(report in report(), cut in any::<prop::sample::Index>()) {
            let bytes = report.encode();
            let part = &bytes[..cut.index(bytes.len())];
            let error = if part.starts_with(&MAGIC) { Error::Encoding } else { Error::Magic };
            prop_assert_eq!(Report::decode(part), Err(error));
            let mut longer = bytes;
            longer.push(0);
            prop_assert_eq!(Report::decode(&longer), Err(Error::Encoding));
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
            let mut bytes = if marked { vec![b'B', b'K', b'V', b'R', 2, 0] } else { vec![] };
            bytes.extend(garbage);
            if let Ok(report) = Report::decode(&bytes) {
                prop_assert_eq!(report.encode(), bytes);
            }
        }
    }

    /// A report of a pool of 2^32 - 1 pages in which all lists are as long as they may be.
    fn largest_report() -> Report {
        let finding = Finding {
            page_or_entry: i64::MIN,
            sessions: vec![u32::MAX; SESSIONS_PER_FAULT_MAX],
            session_count: u32::MAX,
        };
        let findings = |kind| KindFindings {
            kind,
            count: u64::MAX,
            first_faults: vec![finding.clone(); FAULTS_PER_KIND_MAX],
        };
        let session = |index| Session {
            number: u32::MAX - index,
            refs: u64::MAX,
            exclusive_pages: u64::MAX,
            share_q32: u64::MAX,
            freed_by_close: Some(u64::MAX),
            runs: u64::MAX,
            tail_tokens: u64::MAX,
        };
        let [free, private, cached, cached_in_use, leaked, corrupt] = [u64::MAX; 6];
        let [compared, fresh, remembered] = [u64::MAX; 3];
        Report {
            audit_number: u64::MAX,
            scope: Scope::RowsChanged,
            page_tokens: u32::MAX,
            pages: u32::MAX,
            rows: u32::MAX,
            rows_changed: u32::MAX,
            held_pages: u64::MAX,
            free: FreePages { pages: u64::MAX, runs: u64::MAX },
            pages_by_owner: Some(PagesByOwner {
                free,
                private,
                cached,
                cached_in_use,
                leaked,
                corrupt,
            }),
            sessions: (0..u32::try_from(SESSIONS_MAX).unwrap()).rev().map(session).collect(),
            digests: DigestCounts { compared, fresh, remembered },
            findings: FaultKind::ALL.map(findings).into(),
        }
    }

    #[test]
    fn the_largest_report_is_within_its_bound() {
        let mut report = largest_report();
        let bytes = report.encode();
        let sessions_bytes = SESSIONS_MAX * SESSION_BYTES_MAX;
        let bytes_max = REPORT_BYTES_WITHOUT_SESSIONS_MAX + sessions_bytes;
        assert!((bytes_max - 1024..=bytes_max).contains(&bytes.len()), "{} bytes", bytes.len());
        assert_eq!(Report::decode(&bytes).as_ref(), Ok(&report));
        report.sessions.clear();
        assert!(report.encode().len() <= REPORT_BYTES_WITHOUT_SESSIONS_MAX);
    }

    #[test]
    fn lists_out_of_bounds_or_order_are_refused() {
        let spoil = |change: fn(&mut Report), field| {
            let mut report = largest_report();
            change(&mut report);
            assert_eq!(Report::decode(&report.encode()), Err(Error::Field(field)));
        };
        spoil(|report| report.sessions.swap(0, 1), "order of sessions");
        spoil(|report| report.sessions[1] = report.sessions[0], "order of sessions");
        spoil(|report| report.sessions.push(report.sessions[0]), "number of sessions");
        spoil(|report| report.findings.swap(0, 1), "order of kinds");
        spoil(|report| report.findings[1].kind = FaultKind::ALL[0], "order of kinds");
        spoil(|report| report.findings[0].count = 15, "number of findings");
        spoil(
            |report| {
                let faults = &mut report.findings[0].first_faults;
                faults.push(faults[0].clone());
            },
            "number of findings",
        );
        let in_finding = "number of sessions in a finding";
        spoil(|report| report.findings[0].first_faults[0].session_count = 7, in_finding);
        spoil(|report| report.findings[0].first_faults[0].sessions.push(0), in_finding);
    }

    #[test]
    fn another_version_says_so() {
        assert_eq!(Report::decode(b"BKVR\x01\x00"), Err(Error::Version(1)));
        assert_eq!(Report::decode(b"RIFF\x02\x00"), Err(Error::Magic));
        assert_eq!(Report::decode(b""), Err(Error::Magic));
    }
}
