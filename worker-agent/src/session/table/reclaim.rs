//! Takes KV and rows from idle pinned sessions when another session or a turn needs the room.
//!
//! A pinned session keeps its KV and a request row to itself, also between its turns. The session
//! whose KV is least worth keeping gives way first. If the shim (Berth's part in the engine's
//! process) can demote the session, its KV goes to the radix tree, and its history stays. Otherwise
//! the session is closed. Sessions with a running turn are never touched.
//!
//! `admission` and `trim` ask for the room that they lack. They wait until it is free: this module
//! only starts to free it. The module `closing` closes sessions at the engine.

use std::time::{Duration, Instant};

use proto::id::SessionKey;

use super::{
    Effect, Error, GoneReason, Guard, Session, SessionEvent, State, Table, sessions::Held,
};

/// The resource that a turn or session lacks, with the figures for its error message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shortage {
    /// One row is missing. Pinned sessions hold `held` of the `max` rows that they may hold.
    Rows { held: u32, max: u32 },
    /// `missing` tokens are missing. Pinned sessions hold `held` of the `max` tokens that they may
    /// hold.
    Tokens { missing: u64, held: u64, max: u64 },
}

/// For whose sake room is freed. This decides which sessions may lose their KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Requester {
    /// A plain turn (one that runs on the radix tree), or a turn of a session whose client asked to
    /// pin it.
    Client,
    /// A turn of a session that the agent pinned on its own.
    AutoPin,
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Self {
        let (resource, detail) = match shortage {
            Shortage::Rows { held, max } => {
                ("rows", format!("pinned sessions hold {held} of {max}; close some"))
            }
            Shortage::Tokens { missing, held, max } => {
                let detail = format!("pinned sessions hold {held} of {max}, {missing} are missing");
                ("pin_tokens", format!("{detail}; close some"))
            }
        };
        Self::OutOfRoom { resource, detail }
    }
}

/// How long a coding agent pauses between the turns of a session. Each pair holds a number of
/// seconds, and the share of pauses that are longer, in thousandths. The figures are from 1,300
/// recorded conversations.
const LONGER_PAUSE_SHARES: [(u64, u64); 8] =
    [(0, 1000), (10, 500), (30, 270), (60, 200), (120, 130), (300, 70), (600, 40), (3600, 5)];
/// The longest time after which a session's next turn comes "soon". For a session that resumes
/// later, keeping its KV doesn't pay.
const RESUMES_SOON_MAX: Duration = Duration::from_secs(120);

/// The longest time that a demotion may take. The shim demotes within two scheduler steps, and even
/// a long prefill step is shorter than this.
const DEMOTION_TIME_MAX: Duration = Duration::from_secs(5);

/// Returns the chance, in thousandths, that a session idle for `idle` resumes within
/// [`RESUMES_SOON_MAX`].
pub(super) fn resume_chance_milli(idle: Duration) -> u64 {
    let still_idle_ppm = longer_pauses_ppm(idle);
    if still_idle_ppm == 0 {
        return 0;
    }
    1000 - longer_pauses_ppm(idle + RESUMES_SOON_MAX).saturating_mul(1000) / still_idle_ppm
}

/// Returns the share of pauses longer than `idle`, in millionths. Interpolates linearly between the
/// points of `LONGER_PAUSE_SHARES`.
fn longer_pauses_ppm(idle: Duration) -> u64 {
    let idle_ms = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
    for segment in LONGER_PAUSE_SHARES.windows(2) {
        let ((from_s, share_from), (to_s, share_to)) = (segment[0], segment[1]);
        if idle_ms < to_s * 1000 {
            return share_from * 1000
                - (share_from - share_to) * 1000 * (idle_ms - from_s * 1000)
                    / ((to_s - from_s) * 1000);
        }
    }
    let (longest_s, longest_share) = LONGER_PAUSE_SHARES[LONGER_PAUSE_SHARES.len() - 1];
    // After the last point, the share halves each time the duration doubles.
    longest_share * 1000 * longest_s * 1000 / idle_ms.max(1)
}

impl Table {
    /// Starts to free room for a shortage, if idle sessions hold enough of it. Returns false if
    /// they don't.
    pub(super) fn reclaim(
        &mut self,
        now: Instant,
        dp_rank: u32,
        shortage: &Shortage,
        requester: Requester,
    ) -> bool {
        let (mut rows_missing, mut tokens_missing) = match *shortage {
            Shortage::Rows { held, max } => (u64::from(held - max.min(held)) + 1, 0),
            Shortage::Tokens { missing, .. } => (0, missing),
        };
        // Room that is already being freed counts first.
        let being_freed = self.room_being_freed(now, dp_rank);
        rows_missing = rows_missing.saturating_sub(u64::from(being_freed.rows));
        tokens_missing = tokens_missing.saturating_sub(being_freed.tokens);
        // Sort key (least worth keeping first), session key and tokens of each session. Sessions
        // that the agent pinned on its own come before those that clients pinned.
        let mut idle_sessions: Vec<((bool, u64), SessionKey, u64)> = self
            .sessions
            .iter()
            .filter(|(_, session)| {
                session.dp_rank == dp_rank && self.is_reclaimable(now, session, requester)
            })
            .map(|(key, session)| {
                let held_tokens = self.round_to_pages(session.resident_tokens());
                (
                    (!session.has_auto_retention(), value_of_kept_kv(session, now, shortage)),
                    key.clone(),
                    held_tokens,
                )
            })
            .collect();
        let hold_enough = idle_sessions.len() as u64 >= rows_missing
            && idle_sessions.iter().map(|(_, _, held_tokens)| held_tokens).sum::<u64>()
                >= tokens_missing;
        if !hold_enough {
            return false;
        }
        idle_sessions.sort_unstable();
        for (_, key, held_tokens) in idle_sessions {
            if rows_missing == 0 && tokens_missing == 0 {
                break;
            }
            rows_missing = rows_missing.saturating_sub(1);
            tokens_missing = tokens_missing.saturating_sub(held_tokens);
            self.release_kv(now, &key);
        }
        true
    }

    /// Whether `requester` may take a session's KV. The session must be pinned and at rest.
    ///
    /// A [`Requester::Client`] may take the KV of a session that the agent pinned on its own at any
    /// time. The KV of a session that a client pinned may be taken only after `demote_idle` without
    /// a turn. A [`Requester::AutoPin`] may take only the KV of a session that the agent pinned on
    /// its own, and only after `demote_idle` without a turn.
    fn is_reclaimable(&self, now: Instant, session: &Session, requester: Requester) -> bool {
        if !self.settings.guards.is_on(Guard::ReclaimIdleOnly) {
            return session.state.is_open();
        }
        let is_idle = session.idle(now) >= self.settings.demote_idle;
        let may_take = match requester {
            Requester::Client => is_idle || session.has_auto_retention(),
            Requester::AutoPin => is_idle && session.has_auto_retention(),
        };
        session.state.is_open() && session.can_expire() && may_take
    }

    /// Asks the shim to give a session's KV to the radix tree. Closes the session if the shim can't
    /// do that.
    pub(super) fn release_kv(&mut self, now: Instant, key: &SessionKey) {
        let session = &self.sessions[key];
        let dp_rank = session.dp_rank;
        if !self.shims.can_demote(dp_rank) {
            return self.close_as_gone(now, key, GoneReason::Reclaimed);
        }
        let incarnation = session.incarnation.clone();
        let until = now + DEMOTION_TIME_MAX;
        self.change_session(key, |session| {
            session.state.move_row(|row| State::Demoting { row, until });
        });
        self.effects.push(Effect::Demote { dp_rank, incarnation });
        self.sessions.schedule(until);
    }

    /// Demotes sessions that the agent pinned on its own and that did not come back within
    /// `demote_idle`. From then on, the engine may evict their KV when it is used least.
    pub(super) fn demote_idle_sessions(&mut self, now: Instant) {
        let keys = self.sessions.keys(|session| {
            self.is_idle_auto_pin(session)
                && session.turns.last_end + self.settings.demote_idle <= now
        });
        keys.iter().for_each(|key| self.release_kv(now, key));
    }

    /// Handles the shim's answer to an [`Effect::Demote`]. `is_demoted`: the session's KV is in the
    /// radix tree now.
    pub fn handle_demote_result(&mut self, now: Instant, incarnation: &str, is_demoted: bool) {
        let Some(key) = self.sessions.key_of(incarnation).cloned() else { return };
        if !matches!(self.sessions[&key].state, State::Demoting { .. }) {
            return;
        }
        if self.continue_reopen(now, &key, is_demoted) {
            // The demotion was the first step of replacing the incarnation, which has continued.
        } else if is_demoted {
            self.effects.report_event(&key, SessionEvent::Demoted);
            self.change_session(&key, |session| session.state.drop_row());
        } else {
            self.close_as_gone(now, &key, GoneReason::Reclaimed);
        }
        self.process_queue(now);
        self.debug_check();
    }

    /// Returns what the demotions and closes in progress will free.
    fn room_being_freed(&self, now: Instant, dp_rank: u32) -> Held {
        let page_tokens = self.engine.page_tokens;
        let demoting = self.sessions.iter().filter_map(|(_, session)| match session.state {
            State::Demoting { .. } if session.dp_rank == dp_rank => {
                Some(Held { rows: 1, tokens: self.round_to_pages(session.resident_tokens()) })
            }
            _ => None,
        });
        let closing = self.closes.being_freed(now, dp_rank, page_tokens, self.settings.stuck_after);
        demoting.fold(closing, |sum, held| sum + held)
    }
}

/// Returns how much keeping an idle session's KV is worth: its history tokens times the chance that
/// the session resumes soon. If tokens are short, divides this by the tokens that the session
/// holds.
fn value_of_kept_kv(session: &Session, now: Instant, shortage: &Shortage) -> u64 {
    let saved_tokens = resume_chance_milli(session.idle(now)) * session.history.tokens;
    match shortage {
        Shortage::Rows { .. } => saved_tokens,
        Shortage::Tokens { .. } => saved_tokens * 1000 / session.resident_tokens().max(1),
    }
}
