//! Decides when each engine rank's KV pages are audited, and keeps the newest results. Pure.
//!
//! An *audit* finds out who uses each page of a rank's KV pool: a session, the radix tree, the free
//! list, or none of them (the page is *leaked*). The rank's shim makes the audit between two steps
//! of the engine's scheduler.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use contract::load::PageAudit;
use kernels::report::FaultKind;

use crate::shim::AuditReply;

mod read;

pub use self::read::SessionPages;

/// Faults that make the KV of a session wrong. A finding of such a fault lists the sessions.
const CORRUPTING_KINDS: [FaultKind; 5] = [
    FaultKind::Aliased,
    FaultKind::FreeHeld,
    FaultKind::CachedUnprotected,
    FaultKind::BadRowEntry,
    FaultKind::SealedPageChanged,
];

/// Faults of the engine's bookkeeping, which only a restart of the engine repairs.
///
/// [`FaultKind::SealedPageChanged`] is not among them: the engine wrote to a page that it must not
/// rewrite. The agent closes the sessions that use the page, and the engine goes on.
const BOOKKEEPING_KINDS: [FaultKind; 9] = [
    FaultKind::Aliased,
    FaultKind::Leaked,
    FaultKind::DoubleFree,
    FaultKind::FreeHeld,
    FaultKind::FreeCached,
    FaultKind::CachedUnprotected,
    FaultKind::TreeTwice,
    FaultKind::BadFreeEntry,
    FaultKind::BadTreeEntry,
];

fn contains_name(kinds: &[FaultKind], name: &str) -> bool {
    kinds.iter().any(|kind| kind.name() == name)
}

/// The engine needs a restart if at least so many audits in a row find a fault. A fault that passes
/// by itself needs none.
const LASTING_AUDITS_MIN: u32 = 3;
/// The audits in a row must span at least this time.
const LASTING_TIME_MIN: Duration = Duration::from_secs(20);

/// The pause after an audit, as a multiple of the time that the audit took on the thread of the
/// engine's scheduler. An audit of a large radix tree takes long, and the engine waits meanwhile.
const PAUSE_FACTOR: u32 = 1000;

/// A step of the engine takes seconds at most, and the audit after the step takes milliseconds.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// When the agent received the audit, some milliseconds after it was made.
    pub arrived_at: Instant,
    /// With an `age_ms` of 0, which [`Self::pages_with_age`] sets.
    pub pages: PageAudit,
    /// Largest first.
    pub sessions: Vec<SessionPages>,
}

impl Audit {
    #[must_use]
    pub fn pages_with_age(&self, now: Instant) -> PageAudit {
        let age = now.saturating_duration_since(self.arrived_at).as_millis();
        PageAudit { age_ms: u32::try_from(age).unwrap_or(u32::MAX), ..self.pages.clone() }
    }

    /// The ids, inside the engine, of the sessions whose KV can't be trusted.
    pub fn corrupt_sessions(&self) -> impl Iterator<Item = &str> {
        let corrupting =
            self.pages.faults().filter(|finding| contains_name(&CORRUPTING_KINDS, &finding.kind));
        let named_faults = corrupting.flat_map(|finding| &finding.named);
        named_faults
            .flat_map(|fault| &fault.sessions)
            .map(String::as_str)
            .filter(|id| !id.is_empty())
    }

    /// A load report contains no session names.
    #[must_use]
    pub fn load_report_pages(&self, now: Instant) -> PageAudit {
        let mut pages = self.pages_with_age(now);
        pages.findings.iter_mut().for_each(|finding| finding.named.clear());
        pages
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The engine has no such rank, or the rank's shim is not connected.
    #[error("no shim of rank {0} is connected; put worker-agent/shim on the engine's PYTHONPATH")]
    NoShim(u32),
    #[error("the engine's pages can't be audited: {0}")]
    Refused(String),
    #[error("the shim's audit can't be read ({0}); install the same version of agent and shim")]
    Unreadable(String),
    #[error("too many requests wait for an audit; try again")]
    Busy,
    #[error("the engine didn't answer within {} s; check its step time", ANSWER_TIME_MAX.as_secs())]
    Late,
}

#[derive(Debug)]
pub struct Audits {
    /// `None` if audits are made only on demand.
    interval: Option<Duration>,
    /// By DP rank; has only ranks whose shim is connected.
    ranks: BTreeMap<u32, RankState>,
    /// Of the newest request, counted over all ranks.
    newest_number: u64,
}

#[derive(Debug)]
struct RankState {
    /// Why the rank can't be audited; `None` if it can.
    refusal: Option<String>,
    /// `None` if audits are made only on demand.
    next_audit: Option<Instant>,
    /// Unanswered, oldest first.
    requests: Vec<Request>,
    newest_audit: Option<Audit>,
    /// Why the latest audit failed. `None` after an audit that succeeded.
    failure: Option<Error>,
    /// By the name of the fault's kind. An audit that could not check for a kind leaves the kind's
    /// entry as it is.
    fault_streaks: BTreeMap<String, FaultStreak>,
}

#[derive(Debug)]
struct Request {
    number: u64,
    deadline: Instant,
}

/// Audits in a row that have found the same kind of fault.
#[derive(Debug)]
struct FaultStreak {
    audits: u32,
    first_arrived_at: Instant,
}

impl Audits {
    #[must_use]
    pub fn new(interval: Option<Duration>) -> Self {
        Self { interval, ranks: BTreeMap::new(), newest_number: 0 }
    }

    /// `refusal` is why the rank's shim can't audit. If it is `None`, the first periodic audit is
    /// due at once.
    pub fn add_rank(&mut self, now: Instant, dp_rank: u32, refusal: Option<String>) {
        let next_audit = self.interval.filter(|_| refusal.is_none()).map(|_| now);
        let (requests, fault_streaks) = (vec![], BTreeMap::new());
        let (newest_audit, failure) = (None, None);
        let rank =
            RankState { refusal, next_audit, requests, newest_audit, failure, fault_streaks };
        self.ranks.insert(dp_rank, rank);
    }

    /// The rank's requests stay unanswered.
    pub fn remove_rank(&mut self, dp_rank: u32) {
        self.ranks.remove(&dp_rank);
    }

    /// In ascending order.
    pub fn ranks(&self) -> impl Iterator<Item = u32> {
        self.ranks.keys().copied()
    }

    /// Returns whether the reason differs from that of the rank's previous failure, so that the
    /// caller doesn't log the same reason at every interval.
    pub fn note_failure(&mut self, dp_rank: u32, error: &Error) -> bool {
        let Some(rank) = self.ranks.get_mut(&dp_rank) else { return true };
        rank.failure.replace(error.clone()).as_ref() != Some(error)
    }

    #[must_use]
    pub fn newest_audit(&self, dp_rank: u32) -> Option<&Audit> {
        self.ranks.get(&dp_rank)?.newest_audit.as_ref()
    }

    /// Returns the request's number. An answer with this number or a later one answers the request.
    pub fn request(&mut self, now: Instant, dp_rank: u32) -> Result<u64, Error> {
        let rank = self.ranks.get_mut(&dp_rank).ok_or(Error::NoShim(dp_rank))?;
        if let Some(reason) = &rank.refusal {
            return Err(Error::Refused(reason.clone()));
        }
        self.newest_number += 1;
        let deadline = now + ANSWER_TIME_MAX;
        rank.requests.push(Request { number: self.newest_number, deadline });
        rank.next_audit = self.interval.map(|interval| now + interval);
        Ok(self.newest_number)
    }

    /// Returns the ranks with the requests' numbers. Leaves out ranks with an unanswered request.
    pub fn request_due(&mut self, now: Instant) -> Vec<(u32, u64)> {
        let is_due = |rank: &RankState| {
            rank.requests.is_empty() && rank.next_audit.is_some_and(|next_audit| next_audit <= now)
        };
        let due = self.ranks.iter().filter(|(_, rank)| is_due(rank));
        let due_ranks: Vec<u32> = due.map(|(&dp_rank, _)| dp_rank).collect();
        due_ranks
            .into_iter()
            .filter_map(|dp_rank| self.request(now, dp_rank).ok().map(|number| (dp_rank, number)))
            .collect()
    }

    /// Returns when [`Self::request_due`] or [`Self::take_late`] must be called next.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let due_at = |rank: &RankState| {
            let oldest = rank.requests.first();
            oldest.map(|request| request.deadline).or(rank.next_audit)
        };
        self.ranks.values().filter_map(due_at).min()
    }

    /// An answer also answers all earlier requests of the rank. After an error, the rank keeps its
    /// previous audit.
    pub fn take_answer(
        &mut self,
        now: Instant,
        dp_rank: u32,
        reply: &AuditReply,
    ) -> Result<&Audit, Error> {
        let rank = self.ranks.get_mut(&dp_rank).ok_or(Error::NoShim(dp_rank))?;
        if reply.number > self.newest_number {
            return Err(Error::Unreadable("its number was never requested".into()));
        }
        rank.requests.retain(|request| request.number > reply.number);
        let pause_end = now + reply.spent.saturating_mul(PAUSE_FACTOR);
        rank.next_audit = rank.next_audit.map(|next_audit| next_audit.max(pause_end));
        if let Some(reason) = &reply.refusal {
            return Err(Error::Refused(reason.clone()));
        }
        let audit = read::decode_audit(reply, now).map_err(Error::Unreadable)?;
        for finding in &audit.pages.findings {
            if finding.count > 0 {
                let streak = rank.fault_streaks.entry(finding.kind.clone());
                streak.or_insert(FaultStreak { audits: 0, first_arrived_at: now }).audits += 1;
            } else {
                rank.fault_streaks.remove(&finding.kind);
            }
        }
        rank.failure = None;
        Ok(rank.newest_audit.insert(audit))
    }

    /// `Some` if audits of a rank keep finding the same fault of the engine's bookkeeping.
    #[must_use]
    pub fn restart_reason(&self, now: Instant) -> Option<String> {
        self.ranks.iter().find_map(|(dp_rank, rank)| {
            let is_lasting = |streak: &FaultStreak| {
                streak.audits >= LASTING_AUDITS_MIN
                    && now.saturating_duration_since(streak.first_arrived_at) >= LASTING_TIME_MIN
            };
            let lasting = rank.fault_streaks.iter().filter(|(_, streak)| is_lasting(streak));
            let mut kinds = lasting.map(|(kind, _)| kind);
            let kind = kinds.find(|kind| contains_name(&BOOKKEEPING_KINDS, kind))?;
            Some(format!("the page audit of rank {dp_rank} keeps finding pages {kind} in the pool"))
        })
    }

    /// Removes and returns the ranks and numbers of requests that were not answered in time.
    pub fn take_late(&mut self, now: Instant) -> Vec<(u32, u64)> {
        let mut late = vec![];
        for (&dp_rank, rank) in &mut self.ranks {
            rank.requests.retain(|request| {
                let is_late = request.deadline <= now;
                if is_late {
                    late.push((dp_rank, request.number));
                }
                !is_late
            });
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use kernels::report::{
        DigestCounts, Finding, FreePages, KindFindings, PagesByOwner, Report, Scope, Session,
    };

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    fn start() -> Instant {
        service::clock::now()
    }

    /// A report of a pool of 100 pages, of which two sessions hold ten, with these findings.
    fn report(findings: &[(FaultKind, i64, &[u32])]) -> Report {
        let session = |number, refs| Session {
            number,
            refs,
            exclusive_pages: refs,
            share_q32: refs << 32,
            freed_by_close: Some(refs - 1),
            runs: 1,
            tail_tokens: 3,
        };
        let found = |&(kind, at, sessions): &(FaultKind, i64, &[u32])| {
            let session_count = u32::try_from(sessions.len()).unwrap();
            let fault = Finding { page_or_entry: at, sessions: sessions.to_vec(), session_count };
            KindFindings { kind, count: 1, first_faults: vec![fault] }
        };
        Report {
            audit_number: 0,
            scope: Scope::Complete,
            page_tokens: 16,
            pages: 101,
            rows: 2,
            rows_changed: 0,
            held_pages: 10,
            free: FreePages { pages: 90, runs: 2 },
            pages_by_owner: Some(PagesByOwner { free: 90, private: 10, ..PagesByOwner::default() }),
            sessions: vec![session(0, 4), session(1, 6)],
            digests: DigestCounts { compared: 5, ..DigestCounts::default() },
            findings: findings.iter().map(found).collect(),
        }
    }

    fn answer(number: u64, report: &Report) -> AuditReply {
        let names = vec!["berth-a-1".to_owned()];
        let (spent, report) = (Duration::ZERO, report.encode());
        AuditReply { number, spent, refusal: None, names, report }
    }

    /// Requests an audit and answers it with this report.
    fn run_audit<'a>(audits: &'a mut Audits, now: Instant, report: &Report) -> &'a Audit {
        let number = audits.request(now, 0).unwrap();
        audits.take_answer(now, 0, &answer(number, report)).unwrap()
    }

    fn audits(now: Instant) -> Audits {
        let mut audits = Audits::new(Some(INTERVAL));
        audits.add_rank(now, 0, None);
        audits
    }

    #[test]
    fn a_rank_is_asked_at_once_and_then_every_interval() {
        let mut now = start();
        let mut audits = audits(now);
        assert_eq!(audits.request_due(now), [(0, 1)]);
        assert_eq!(
            audits.request_due(now + INTERVAL),
            [],
            "one that owes an answer isn't asked again"
        );
        audits.take_answer(now, 0, &answer(1, &report(&[]))).unwrap();
        now += INTERVAL;
        assert_eq!(audits.next_due(), Some(now));
        assert_eq!(audits.request_due(now), [(0, 2)]);
        audits.remove_rank(0);
        assert_eq!((audits.next_due(), audits.newest_audit(0)), (None, None));
    }

    #[test]
    fn an_audit_that_takes_long_of_the_scheduler_is_made_seldom() {
        let now = start();
        let mut audits = audits(now);
        audits.request_due(now);
        let spent = Duration::from_millis(100);
        let slow = AuditReply { spent, ..answer(1, &report(&[])) };
        audits.take_answer(now, 0, &slow).unwrap();
        assert_eq!(audits.next_due(), Some(now + Duration::from_secs(100)));
        assert!(audits.request(now, 0).is_ok(), "who wants to know now is told now");
    }

    #[test]
    fn a_late_answer_is_given_up_and_asked_for_again() {
        let now = start();
        let mut audits = audits(now);
        audits.request_due(now);
        assert_eq!(audits.take_late(now + ANSWER_TIME_MAX - INTERVAL), []);
        assert_eq!(audits.take_late(now + ANSWER_TIME_MAX), [(0, 1)]);
        assert_eq!(audits.request_due(now + ANSWER_TIME_MAX), [(0, 2)]);
    }

    #[test]
    fn a_rank_that_cant_be_asked_says_why() {
        let now = start();
        let mut audits = Audits::new(Some(INTERVAL));
        audits.add_rank(now, 0, Some("no library".into()));
        assert_eq!(audits.request_due(now), []);
        assert_eq!(audits.request(now, 0), Err(Error::Refused("no library".into())));
        assert_eq!(audits.request(now, 1), Err(Error::NoShim(1)));
    }

    #[test]
    fn sessions_have_names_and_the_largest_comes_first() {
        let now = start();
        let mut audits = audits(now);
        let audit = run_audit(&mut audits, now, &report(&[]));
        let shown: Vec<(Option<&str>, u64, Option<u64>)> = audit
            .sessions
            .iter()
            .map(|one| (one.incarnation.as_deref(), one.pages, one.freed_by_close_pages))
            .collect();
        let want = [(None, 6, Some(5)), (Some("berth-a-1"), 4, Some(3))];
        assert_eq!(shown, want, "a turn has no name");
        assert_eq!(audit.sessions[1].share_milli, 4000);
        let later = now + Duration::from_millis(250);
        assert_eq!(
            (audit.pages_with_age(later).pages, audit.pages_with_age(later).age_ms),
            (100, 250)
        );
    }

    #[test]
    fn a_fault_names_its_sessions_and_only_some_of_them_are_worthless() {
        let now = start();
        let mut audits = audits(now);
        let found =
            report(&[(FaultKind::Leaked, 9, &[]), (FaultKind::SealedPageChanged, 17, &[0, 1])]);
        let audit = run_audit(&mut audits, now, &found);
        assert_eq!(audit.corrupt_sessions().collect::<Vec<_>>(), ["berth-a-1"]);
        let reported = audit.load_report_pages(now).findings;
        let kinds: Vec<&str> = reported.iter().map(|finding| finding.kind.as_str()).collect();
        assert_eq!(kinds, ["leaked", "changed"]);
        assert!(reported.iter().all(|finding| finding.named.is_empty()), "{reported:?}");
        let leaked = report(&[(FaultKind::Leaked, 9, &[0])]);
        let audit = run_audit(&mut audits, now, &leaked);
        assert_eq!(audit.corrupt_sessions().count(), 0);
    }

    #[test]
    fn a_restart_is_asked_for_when_a_fault_stays() {
        let mut now = start();
        let mut audits = audits(now);
        let leaked = report(&[(FaultKind::Leaked, 9, &[])]);
        let mut sound = report(&[(FaultKind::Leaked, 9, &[])]);
        sound.findings[0] =
            KindFindings { kind: FaultKind::Leaked, count: 0, first_faults: vec![] };
        // As if rows had moved during the audit, so that the fault could not be checked.
        let unknown = report(&[]);
        for (found, wanted) in [
            (&leaked, false),
            (&leaked, false),
            (&sound, false),
            (&leaked, false),
            (&unknown, false),
            (&leaked, false),
            (&leaked, true),
            (&unknown, true),
            (&sound, false),
        ] {
            now += INTERVAL;
            run_audit(&mut audits, now, found);
            assert_eq!(audits.restart_reason(now).is_some(), wanted);
        }
        let changed = report(&[(FaultKind::SealedPageChanged, 9, &[0])]);
        for found in [&leaked, &leaked, &leaked, &changed, &changed, &changed] {
            run_audit(&mut audits, now, found);
            assert_eq!(audits.restart_reason(now), None, "three in a moment prove nothing");
        }
        let later = now + LASTING_TIME_MIN;
        run_audit(&mut audits, later, &leaked);
        let reason = audits.restart_reason(later).expect("it leaks still");
        assert!(reason.contains("leaked"), "a changed page's sessions are closed: {reason}");
    }

    #[test]
    fn nonsense_and_refusals_leave_what_was_known() {
        let now = start();
        let mut audits = audits(now);
        let good = run_audit(&mut audits, now, &report(&[])).clone();
        audits.request(now, 0).unwrap();
        audits.request(now, 0).unwrap();
        let mut truncated = answer(2, &report(&[]));
        truncated.report.pop();
        assert!(matches!(audits.take_answer(now, 0, &truncated), Err(Error::Unreadable(_))));
        let refused = AuditReply { refusal: Some("busy".into()), ..answer(3, &report(&[])) };
        assert_eq!(audits.take_answer(now, 0, &refused), Err(Error::Refused("busy".into())));
        let foreign = answer(4, &report(&[(FaultKind::Leaked, 9, &[])]));
        assert!(matches!(audits.take_answer(now, 0, &foreign), Err(Error::Unreadable(_))));
        assert_eq!(audits.newest_audit(0), Some(&good));
    }

    #[test]
    fn a_reason_is_new_once_and_again_after_an_audit() {
        let now = start();
        let mut audits = audits(now);
        let busy = Error::Refused("busy".into());
        assert_eq!([audits.note_failure(0, &busy), audits.note_failure(0, &busy)], [true, false]);
        assert_eq!(
            [audits.note_failure(0, &Error::Late), audits.note_failure(0, &busy)],
            [true, true]
        );
        run_audit(&mut audits, now, &report(&[]));
        assert!(audits.note_failure(0, &busy));
    }
}
