//! Page audits: decides when to request one from a rank's shim, and keeps the newest result. Pure.
//!
//! Requests come out as numbers, and answers go in. The audit itself is made inside the engine's
//! process, at one moment between two steps, by `kernels`' library. Every rank is asked at an
//! interval, and on demand; an answer serves all earlier requests too.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kernels::report::Kind;
use proto::load::PageAudit;

use crate::shim::AuditReply;

mod read;
pub mod remote;

pub use self::read::SessionPages;

/// Faults after which the KV of the sessions they name can't be trusted.
const CORRUPTING: [Kind; 5] =
    [Kind::Aliased, Kind::FreeHeld, Kind::CachedPrivate, Kind::RowEntry, Kind::Changed];

/// Faults of the engine's bookkeeping, which only a restart repairs. A changed page is not one of
/// them: its sessions are closed.
const LASTING: [Kind; 9] = [
    Kind::Aliased,
    Kind::Leaked,
    Kind::DoubleFree,
    Kind::FreeHeld,
    Kind::FreeCached,
    Kind::CachedPrivate,
    Kind::TreeTwice,
    Kind::FreeEntry,
    Kind::TreeEntry,
];

fn contains_name(kinds: &[Kind], name: &str) -> bool {
    kinds.iter().any(|kind| kind.name() == name)
}

/// The number of audits in a row, and the time span, in which a fault must be found before the
/// worker drains: a fault that passes by itself needs no restart.
const LASTING_AUDITS: u32 = 3;
const LASTING_FOR: Duration = Duration::from_secs(20);

/// An audit is not repeated within this many times the time it took on the scheduler's thread,
/// because walking a large radix tree takes long.
const REST_FACTOR: u32 = 1000;

/// The time limit for an answer. An engine's step takes seconds at most, and the audit after it
/// milliseconds.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The state of one rank's pool at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// When the agent received the audit, some milliseconds after it was made.
    pub at: Instant,
    /// The totals and the findings, with session names. Their age is 0.
    pub pages: PageAudit,
    /// The sessions that hold pages, largest first.
    pub sessions: Vec<SessionPages>,
}

impl Audit {
    /// Returns the totals with their age at `now`.
    #[must_use]
    pub fn pages(&self, now: Instant) -> PageAudit {
        let age = now.saturating_duration_since(self.at).as_millis();
        PageAudit { age_ms: u32::try_from(age).unwrap_or(u32::MAX), ..self.pages.clone() }
    }

    /// Returns the sessions whose KV can't be trusted: they share a page that must not be shared,
    /// or one of their pages was overwritten.
    pub fn corrupt_sessions(&self) -> impl Iterator<Item = &str> {
        let harming =
            self.pages.faults().filter(|finding| contains_name(&CORRUPTING, &finding.kind));
        let named = harming.flat_map(|finding| &finding.named);
        named.flat_map(|one| &one.sessions).map(String::as_str).filter(|id| !id.is_empty())
    }

    /// Returns the totals for a load report, which has no session names.
    #[must_use]
    pub fn reported(&self, now: Instant) -> PageAudit {
        let mut pages = self.pages(now);
        pages.findings.iter_mut().for_each(|finding| finding.named.clear());
        pages
    }
}

/// Why an audit is not available.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The engine has no such rank, or no working shim is connected.
    #[error("no shim of rank {0} is connected; put worker-agent/shim on the engine's PYTHONPATH")]
    NoShim(u32),
    /// The shim refused, for this reason.
    #[error("the engine's pages can't be audited: {0}")]
    Refused(String),
    /// The shim's answer can't be decoded.
    #[error("the shim's audit can't be read ({0}); install the same version of agent and shim")]
    Unreadable(String),
    /// Too many requests are waiting for an audit.
    #[error("too many requests wait for an audit; try again")]
    Busy,
    /// No answer came in time.
    #[error("the engine didn't answer within {} s; check its step time", ANSWER_MAX.as_secs())]
    Late,
}

/// The audits of all ranks.
#[derive(Debug)]
pub struct Audits {
    /// The interval between audits; `None` if they are made only on demand.
    interval: Option<Duration>,
    ranks: BTreeMap<u32, Rank>,
    /// The number of the last request, counted over all ranks.
    number: u64,
}

#[derive(Debug)]
struct Rank {
    /// Why the rank can't be reply.
    refusal: Option<String>,
    next: Option<Instant>,
    /// The unanswered requests, oldest first: number and time limit.
    requests: Vec<(u64, Instant)>,
    last: Option<Audit>,
    /// Why the last request had no result; `None` if it had one.
    failed: Option<Error>,
    /// For each kind of fault: how many audits in a row have found it, and when the first one did.
    /// Audits that could not check for the kind don't count.
    streaks: BTreeMap<String, (u32, Instant)>,
}

impl Audits {
    /// Creates the state. Every rank is asked at `interval`, if there is one.
    #[must_use]
    pub fn new(interval: Option<Duration>) -> Self {
        Self { interval, ranks: BTreeMap::new(), number: 0 }
    }

    /// Adds a rank whose shim has connected. `refusal` is the reason why it can't audit. The rank's
    /// first audit is due at once.
    pub fn add_rank(&mut self, now: Instant, dp_rank: u32, refusal: Option<String>) {
        let next = self.interval.filter(|_| refusal.is_none()).map(|_| now);
        let (requests, streaks) = (vec![], BTreeMap::new());
        let rank = Rank { refusal, next, requests, last: None, failed: None, streaks };
        self.ranks.insert(dp_rank, rank);
    }

    /// Removes a rank whose shim has disconnected. Its requests stay unanswered.
    pub fn remove_rank(&mut self, dp_rank: u32) {
        self.ranks.remove(&dp_rank);
    }

    /// Returns the ranks with a connected shim, in order.
    pub fn ranks(&self) -> impl Iterator<Item = u32> {
        self.ranks.keys().copied()
    }

    /// Notes that a rank's request failed. Returns true if the reason is new, so that the same
    /// reason is not logged at every interval.
    pub fn note_failure(&mut self, dp_rank: u32, error: &Error) -> bool {
        let Some(rank) = self.ranks.get_mut(&dp_rank) else { return true };
        rank.failed.replace(error.clone()).as_ref() != Some(error)
    }

    /// Returns the newest audit of a rank.
    #[must_use]
    pub fn last_audit(&self, dp_rank: u32) -> Option<&Audit> {
        self.ranks.get(&dp_rank)?.last.as_ref()
    }

    /// Registers a request for an audit now, and returns its number. The answer to this or any
    /// later number answers it.
    ///
    /// # Errors
    /// When the rank can't be reply.
    pub fn request(&mut self, now: Instant, dp_rank: u32) -> Result<u64, Error> {
        let rank = self.ranks.get_mut(&dp_rank).ok_or(Error::NoShim(dp_rank))?;
        if let Some(reason) = &rank.refusal {
            return Err(Error::Refused(reason.clone()));
        }
        self.number += 1;
        rank.requests.push((self.number, now + ANSWER_MAX));
        rank.next = self.interval.map(|interval| now + interval);
        Ok(self.number)
    }

    /// Registers a request for every rank whose interval has passed, and returns the ranks with the
    /// numbers. A rank with an unanswered request is left out.
    pub fn request_due(&mut self, now: Instant) -> Vec<(u32, u64)> {
        let due = |rank: &Rank| rank.requests.is_empty() && rank.next.is_some_and(|at| at <= now);
        let ranks: Vec<u32> =
            self.ranks.iter().filter(|(_, rank)| due(rank)).map(|(&dp_rank, _)| dp_rank).collect();
        ranks
            .into_iter()
            .filter_map(|dp_rank| self.request(now, dp_rank).ok().map(|number| (dp_rank, number)))
            .collect()
    }

    /// Returns when [`Self::request_due`] or [`Self::take_late`] must be called next.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let due_at = |rank: &Rank| rank.requests.first().map(|&(_, until)| until).or(rank.next);
        self.ranks.values().filter_map(due_at).min()
    }

    /// Takes an answer, which also answers all earlier requests of the rank.
    ///
    /// # Errors
    /// When the shim refused or its report is invalid. The previous audit is kept then.
    pub fn take_answer(
        &mut self,
        now: Instant,
        dp_rank: u32,
        reply: &AuditReply,
    ) -> Result<&Audit, Error> {
        let rank = self.ranks.get_mut(&dp_rank).ok_or(Error::NoShim(dp_rank))?;
        if reply.number > self.number {
            return Err(Error::Unreadable("its number was never requested".into()));
        }
        rank.requests.retain(|&(number, _)| number > reply.number);
        let rested = now + reply.spent.saturating_mul(REST_FACTOR);
        rank.next = rank.next.map(|next| next.max(rested));
        if let Some(reason) = &reply.refusal {
            return Err(Error::Refused(reason.clone()));
        }
        let audit = read::audit(reply, now).map_err(Error::Unreadable)?;
        for finding in &audit.pages.findings {
            if finding.count > 0 {
                rank.streaks.entry(finding.kind.clone()).or_insert((0, now)).0 += 1;
            } else {
                rank.streaks.remove(&finding.kind);
            }
        }
        rank.failed = None;
        Ok(rank.last.insert(audit))
    }

    /// Returns why the engine needs a restart: a fault that its last audits all found.
    #[must_use]
    pub fn restart_required(&self, now: Instant) -> Option<String> {
        self.ranks.iter().find_map(|(dp_rank, rank)| {
            let lasts = |(audits, since): (u32, Instant)| {
                audits >= LASTING_AUDITS && now.saturating_duration_since(since) >= LASTING_FOR
            };
            let long = rank.streaks.iter().filter(|(_, streak)| lasts(**streak));
            let kind = long.map(|(kind, _)| kind).find(|kind| contains_name(&LASTING, kind))?;
            Some(format!("the page audit of rank {dp_rank} keeps finding pages {kind} in the pool"))
        })
    }

    /// Removes the requests that were not answered in time. Returns their ranks and numbers.
    pub fn take_late(&mut self, now: Instant) -> Vec<(u32, u64)> {
        let mut late = vec![];
        for (&dp_rank, rank) in &mut self.ranks {
            rank.requests.retain(|&(number, until)| {
                if until <= now {
                    late.push((dp_rank, number));
                }
                until > now
            });
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use kernels::report::{Classes, Digests, Finding, Found, FreePages, Report, Scope, Session};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    fn start() -> Instant {
        service::clock::now()
    }

    /// A report of a pool of 100 pages, of which two sessions hold ten, with these findings.
    fn report(findings: &[(Kind, i64, &[u32])]) -> Report {
        let session = |number, refs| Session {
            number,
            refs,
            exclusive: refs,
            share_q32: refs << 32,
            freed: Some(refs - 1),
            runs: 1,
            tail_tokens: 3,
        };
        let found = |&(kind, at, sessions): &(Kind, i64, &[u32])| {
            let sessions_count = u32::try_from(sessions.len()).unwrap();
            let named = vec![Finding { at, sessions: sessions.to_vec(), sessions_count }];
            Found { kind, count: 1, named }
        };
        Report {
            number: 0,
            scope: Scope::Complete,
            page_tokens: 16,
            pages: 101,
            rows: 2,
            rows_moved: 0,
            held_pages: 10,
            free: Some(FreePages { pages: 90, runs: 2 }),
            classes: Some(Classes { free: 90, private: 10, ..Classes::default() }),
            sessions: vec![session(0, 4), session(1, 6)],
            digests: Digests { compared: 5, ..Digests::default() },
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
        assert_eq!((audits.next_due(), audits.last_audit(0)), (None, None));
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
        assert_eq!(audits.take_late(now + ANSWER_MAX - INTERVAL), []);
        assert_eq!(audits.take_late(now + ANSWER_MAX), [(0, 1)]);
        assert_eq!(audits.request_due(now + ANSWER_MAX), [(0, 2)]);
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
        let shown: Vec<(&str, u64, Option<u64>)> = audit
            .sessions
            .iter()
            .map(|one| (one.incarnation.as_str(), one.pages, one.freed_by_close_pages))
            .collect();
        assert_eq!(shown, [("", 6, Some(5)), ("berth-a-1", 4, Some(3))], "a turn has no name");
        assert_eq!(audit.sessions[1].share_milli, 4000);
        let later = now + Duration::from_millis(250);
        assert_eq!((audit.pages(later).pages, audit.pages(later).age_ms), (100, 250));
    }

    #[test]
    fn a_fault_names_its_sessions_and_only_some_of_them_are_worthless() {
        let now = start();
        let mut audits = audits(now);
        let found = report(&[(Kind::Leaked, 9, &[]), (Kind::Changed, 17, &[0, 1])]);
        let audit = run_audit(&mut audits, now, &found);
        assert_eq!(audit.corrupt_sessions().collect::<Vec<_>>(), ["berth-a-1"]);
        let reported = audit.reported(now).findings;
        let kinds: Vec<&str> = reported.iter().map(|finding| finding.kind.as_str()).collect();
        assert_eq!(kinds, ["leaked", "changed"]);
        assert!(reported.iter().all(|finding| finding.named.is_empty()), "{reported:?}");
        let leaked = report(&[(Kind::Leaked, 9, &[0])]);
        let audit = run_audit(&mut audits, now, &leaked);
        assert_eq!(audit.corrupt_sessions().count(), 0);
    }

    #[test]
    fn a_restart_is_asked_for_when_a_fault_stays() {
        let mut now = start();
        let mut audits = audits(now);
        let leaked = report(&[(Kind::Leaked, 9, &[])]);
        let mut sound = report(&[(Kind::Leaked, 9, &[])]);
        sound.findings[0] = Found { kind: Kind::Leaked, count: 0, named: vec![] };
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
            assert_eq!(audits.restart_required(now).is_some(), wanted);
        }
        let changed = report(&[(Kind::Changed, 9, &[0])]);
        for found in [&leaked, &leaked, &leaked, &changed, &changed, &changed] {
            run_audit(&mut audits, now, found);
            assert_eq!(audits.restart_required(now), None, "three in a moment prove nothing");
        }
        let later = now + LASTING_FOR;
        run_audit(&mut audits, later, &leaked);
        let reason = audits.restart_required(later).expect("it leaks still");
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
        let foreign = answer(4, &report(&[(Kind::Leaked, 9, &[])]));
        assert!(matches!(audits.take_answer(now, 0, &foreign), Err(Error::Unreadable(_))));
        assert_eq!(audits.last_audit(0), Some(&good));
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
