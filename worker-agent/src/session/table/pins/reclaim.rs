//! Chooses the idle pinned sessions that give up KV and rows when others need the room.
//!
//! The session whose KV is least worth keeping gives way first. Sessions with a running turn are
//! never touched.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use contract::{gaps, id::SessionKey};
use service::refusal::Code;

use crate::session::table::{Error, Guard, Pins, Session, room::Room};

/// The figures are for the error message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// One row is missing. Pinned sessions hold `held` of the `max` rows that they may hold.
    Rows { held: u32, max: u32 },
    /// Pinned sessions hold `held` of the `max` tokens that they may hold.
    Tokens { missing: u64, held: u64, max: u64 },
}

/// For whose sake room is freed. This decides which sessions may lose their KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requester<'a> {
    Plain,
    /// A session that a client of this principal pins.
    Pinned(&'a str),
    /// A turn of a session that the agent pinned on its own.
    AutoPin,
}

struct Candidate {
    /// Whether the session gives way only because its principal holds more than the requester's.
    is_by_share: bool,
    /// Whether a client pinned the session. Sessions that the agent pinned come first.
    is_pinned_by_client: bool,
    value: u64,
    key: SessionKey,
    held_tokens: u64,
}

impl Shortage {
    /// For others than pinned sessions, which hold `held` tokens.
    pub(crate) fn for_plain(missing: u64, held: u64) -> Self {
        Self::Tokens { missing, held, max: held.saturating_sub(missing) }
    }
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Self {
        let (resource, detail) = match shortage {
            Shortage::Rows { held, max } => {
                (Code::Rows, format!("pinned sessions hold {held} of {max}; close some"))
            }
            Shortage::Tokens { missing, held, max } => {
                let detail = format!("pinned sessions hold {held} of {max}, {missing} are missing");
                (Code::PinTokens, format!("{detail}; close some"))
            }
        };
        Self::OutOfRoom { resource, detail, wait: None }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Missing {
    rows: u64,
    tokens: u64,
}

/// For a session that resumes later, keeping its KV doesn't pay.
const RESUMES_SOON_MAX: Duration = Duration::from_secs(120);

impl Pins {
    /// Returns the sessions that give way; `None` if those that may don't hold enough.
    pub(crate) fn choose_to_reclaim(
        &self,
        now: Instant,
        dp_rank: u32,
        shortage: &Shortage,
        requester: Requester<'_>,
    ) -> Option<Vec<SessionKey>> {
        let missing = match *shortage {
            Shortage::Rows { held, max } => {
                Missing { rows: u64::from(held - max.min(held)) + 1, tokens: 0 }
            }
            Shortage::Tokens { missing, .. } => Missing { rows: 0, tokens: missing },
        };
        // Room that is already being freed counts first.
        let being_freed = self.room_being_freed(now, dp_rank);
        let missing = Missing {
            rows: missing.rows.saturating_sub(u64::from(being_freed.rows)),
            tokens: missing.tokens.saturating_sub(being_freed.tokens),
        };
        let candidates = self.reclaim_candidates(now, dp_rank, shortage, requester);
        self.choose_candidates(dp_rank, candidates, shortage, missing, requester)
    }

    /// Returns the sessions that free rows for the plain sequences beyond `free_rows`. Fewer if
    /// fewer may give way.
    pub(crate) fn choose_for_plain_turns(
        &self,
        now: Instant,
        dp_rank: u32,
        sequences: u64,
        free_rows: u64,
    ) -> Vec<SessionKey> {
        let lacking = sequences.saturating_sub(free_rows);
        let has_holders = self.sessions.principals().row_holders(dp_rank).next().is_some();
        if lacking == 0 || !has_holders || !self.settings.guards.is_on(Guard::PlainTakesRows) {
            return vec![];
        }
        let being_freed = u64::from(self.room_being_freed(now, dp_rank).rows);
        let shortage = Shortage::Rows { held: 0, max: 0 };
        let candidates = self.reclaim_candidates(now, dp_rank, &shortage, Requester::Plain);
        let wanted = usize::try_from(lacking.saturating_sub(being_freed)).unwrap_or(usize::MAX);
        candidates.into_iter().take(wanted).map(|candidate| candidate.key).collect()
    }

    /// The session that is least worth keeping comes first.
    fn reclaim_candidates(
        &self,
        now: Instant,
        dp_rank: u32,
        shortage: &Shortage,
        requester: Requester<'_>,
    ) -> Vec<Candidate> {
        let holders = self.sessions.principals().row_holders(dp_rank);
        let candidate = |key: &SessionKey| {
            let session = &self.sessions[key];
            let may_take = self.is_reclaimable(now, session, requester);
            let is_by_share = !may_take && self.yields_to_share(key, session, shortage, requester);
            (may_take || is_by_share).then(|| Candidate {
                is_by_share,
                is_pinned_by_client: !session.has_auto_retention(),
                value: value_of_kept_kv(session, now, shortage),
                key: key.clone(),
                held_tokens: self.round_to_pages(session.resident_tokens()),
            })
        };
        let mut candidates: Vec<Candidate> = holders.filter_map(candidate).collect();
        candidates.sort_unstable_by(|one, other| {
            let order = |candidate: &Candidate| {
                (candidate.is_by_share, candidate.is_pinned_by_client, candidate.value)
            };
            order(one).cmp(&order(other)).then_with(|| one.key.cmp(&other.key))
        });
        candidates
    }

    /// Returns `None` if the candidates don't hold enough. One that gives way by its principal's
    /// share does so only while that principal still holds more than the requester's.
    fn choose_candidates(
        &self,
        dp_rank: u32,
        candidates: Vec<Candidate>,
        shortage: &Shortage,
        mut missing: Missing,
        requester: Requester<'_>,
    ) -> Option<Vec<SessionKey>> {
        let principals = self.sessions.principals();
        let own = match requester {
            Requester::Pinned(principal) => principals.held(principal, dp_rank),
            Requester::Plain | Requester::AutoPin => Room::default(),
        };
        let mut taken: BTreeMap<String, Room> = BTreeMap::new();
        let mut keys = vec![];
        for Candidate { is_by_share, key, held_tokens, .. } in candidates {
            if missing == Missing::default() {
                break;
            }
            let taken = taken.entry(key.principal().to_owned()).or_default();
            let held = principals.held(key.principal(), dp_rank);
            let has_more = match shortage {
                Shortage::Rows { .. } => held.rows > own.rows + taken.rows + 1,
                Shortage::Tokens { .. } => held.tokens > own.tokens + taken.tokens + held_tokens,
            };
            if is_by_share && !has_more {
                continue;
            }
            *taken = *taken + Room { rows: 1, tokens: held_tokens };
            missing.rows = missing.rows.saturating_sub(1);
            missing.tokens = missing.tokens.saturating_sub(held_tokens);
            keys.push(key);
        }
        (missing == Missing::default()).then_some(keys)
    }

    fn is_reclaimable(&self, now: Instant, session: &Session, requester: Requester<'_>) -> bool {
        if !self.settings.guards.is_on(Guard::ReclaimIdleOnly) {
            return session.state.is_open();
        }
        let is_idle = session.idle(now) >= self.settings.demote_idle;
        let may_take = match requester {
            // The agent's own pins yield to clients at once, those of a client when they are idle.
            Requester::Plain | Requester::Pinned(_) => is_idle || session.has_auto_retention(),
            Requester::AutoPin => is_idle && session.has_auto_retention(),
        };
        session.state.is_open() && session.can_expire() && may_take
    }

    /// Whether the session is at rest, of a principal that holds more than the requester's.
    fn yields_to_share(
        &self,
        key: &SessionKey,
        session: &Session,
        shortage: &Shortage,
        requester: Requester<'_>,
    ) -> bool {
        let Requester::Pinned(principal) = requester else { return false };
        let is_at_rest = session.state.is_open() && session.can_expire();
        if !is_at_rest || !self.settings.guards.is_on(Guard::PinShare) {
            return false;
        }
        let principals = self.sessions.principals();
        let own = principals.held(principal, session.dp_rank);
        let held = principals.held(key.principal(), session.dp_rank);
        match shortage {
            Shortage::Rows { .. } => held.rows > own.rows + 1,
            Shortage::Tokens { .. } => {
                held.tokens > own.tokens + self.round_to_pages(session.resident_tokens())
            }
        }
    }

    fn room_being_freed(&self, now: Instant, dp_rank: u32) -> Room {
        let being_closed = self.closes.being_freed(now, dp_rank);
        self.sessions.rank(dp_rank).being_demoted + being_closed
    }
}

/// History tokens times the chance to resume soon; if tokens are short, per token held.
fn value_of_kept_kv(session: &Session, now: Instant, shortage: &Shortage) -> u64 {
    let saved_tokens =
        gaps::chance_within_milli(session.idle(now), RESUMES_SOON_MAX) * session.history.tokens;
    match shortage {
        Shortage::Rows { .. } => saved_tokens,
        Shortage::Tokens { .. } => saved_tokens * 1000 / session.resident_tokens().max(1),
    }
}
