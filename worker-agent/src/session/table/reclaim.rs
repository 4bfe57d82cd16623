//! Reclaiming: idle pinned sessions lose their KV when another session or turn needs the room.
//!
//! The session whose KV is least worth keeping goes first. If the shim can demote, the KV goes to
//! the radix tree and the history stays; otherwise the session is closed. Sessions with a running
//! turn are never touched.

use std::time::{Duration, Instant};

use proto::{id::SessionKey, load::Retention};

use super::{Effect, Error, GoneReason, Guard, Phase, Session, SessionEvent, Table};

/// The resource that a turn or session lacks, with the figures for its error message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shortage {
    /// One row is missing: pinned sessions hold `held` of the `max` rows that they may hold.
    Rows { held: u32, max: u32 },
    /// `short` tokens are missing: pinned sessions hold `held` of the `max` tokens that they may
    /// hold.
    Tokens { short: u64, held: u64, max: u64 },
}

/// The kind of turn that needs the room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Requester {
    /// A turn of a session that its client asked to pin, or a plain turn.
    Anyone,
    /// A turn of a session that the agent pinned on its own.
    Unasked,
}

impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Self {
        let (resource, detail) = match shortage {
            Shortage::Rows { held, max } => {
                ("rows", format!("pinned sessions hold {held} of {max}; close some"))
            }
            Shortage::Tokens { short, held, max } => {
                let detail = format!("pinned sessions hold {held} of {max}, {short} are missing");
                ("pin_tokens", format!("{detail}; close some"))
            }
        };
        Self::OutOfRoom { resource, detail }
    }
}

/// How long the pauses between a coding agent's turns are: pairs of seconds, and the share of
/// pauses that are longer, in thousandths. From 1,300 recorded conversations; see the design notes
/// on idle time.
const PAUSES: [(u64, u64); 8] =
    [(0, 1000), (10, 500), (30, 270), (60, 200), (120, 130), (300, 70), (600, 40), (3600, 5)];
/// What counts as "soon": a session that resumes later than this would have been worth demoting.
const SOON: Duration = Duration::from_secs(120);

/// How long a demotion may take. The shim demotes within a scheduler step or two, a long prefill
/// step included.
const DEMOTED_WITHIN: Duration = Duration::from_secs(5);

/// Returns the chance, in thousandths, that a session idle for `idle` resumes within `SOON`.
pub(super) fn resume_chance(idle: Duration) -> u64 {
    let longer = share_of_longer_pauses(idle);
    if longer == 0 {
        return 0;
    }
    1000 - share_of_longer_pauses(idle + SOON).saturating_mul(1000) / longer
}

/// Returns the share of pauses longer than `idle`, in millionths, interpolated linearly between the
/// points of `PAUSES`.
fn share_of_longer_pauses(idle: Duration) -> u64 {
    let at = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
    for pair in PAUSES.windows(2) {
        let ((from, high), (to, low)) = (pair[0], pair[1]);
        if at < to * 1000 {
            return high * 1000 - (high - low) * 1000 * (at - from * 1000) / ((to - from) * 1000);
        }
    }
    let (last, share) = PAUSES[PAUSES.len() - 1];
    // Beyond the last point the share halves each time the duration doubles.
    share * 1000 * last * 1000 / at.max(1)
}

impl Table {
    /// Frees room for a shortage if idle sessions hold enough of it. Returns false if that can't
    /// help.
    pub(super) fn reclaim(
        &mut self,
        now: Instant,
        dp_rank: u32,
        shortage: &Shortage,
        requester: Requester,
    ) -> bool {
        let (mut rows, mut tokens) = match *shortage {
            Shortage::Rows { held, max } => (u64::from(held - max.min(held)) + 1, 0),
            Shortage::Tokens { short, .. } => (0, short),
        };
        // Room that is already being freed counts first.
        let (rows_due, tokens_due) = self.room_being_freed(now, dp_rank);
        rows = rows.saturating_sub(rows_due);
        tokens = tokens.saturating_sub(tokens_due);
        let mut idle: Vec<((bool, u64), SessionKey, u64)> = self
            .sessions
            .iter()
            .filter(|(_, session)| {
                session.dp_rank == dp_rank && self.is_reclaimable(now, session, requester)
            })
            .map(|(key, session)| {
                let held = self.round_to_pages(session.resident_tokens);
                (
                    (!session.has_auto_retention(), keep_value(session, now, shortage)),
                    key.clone(),
                    held,
                )
            })
            .collect();
        let enough = idle.len() as u64 >= rows
            && idle.iter().map(|(_, _, held)| held).sum::<u64>() >= tokens;
        if !enough {
            return false;
        }
        idle.sort_unstable();
        for (_, key, held) in idle {
            if rows == 0 && tokens == 0 {
                break;
            }
            rows = rows.saturating_sub(1);
            tokens = tokens.saturating_sub(held);
            self.release_kv(now, &key);
        }
        true
    }

    /// Whether `requester` may have a session's KV. The session must be pinned and at rest.
    ///
    /// `Requester::Client` may take KV from a session that the agent pinned on its own at any time,
    /// and from a session that its client pinned after `demote_idle` without a turn.
    /// `Requester::AutoPin` may take KV only from a session that the agent pinned on its own, after
    /// `demote_idle` without a turn.
    fn is_reclaimable(&self, now: Instant, session: &Session, requester: Requester) -> bool {
        let pinned = session.retention == Retention::Pinned && session.phase == Phase::Open;
        if !self.rules.guards.hold(Guard::ReclaimIdleOnly) {
            return pinned;
        }
        let idle = session.idle(now) >= self.rules.demote_idle;
        let takes = match requester {
            Requester::Client => idle || session.has_auto_retention(),
            Requester::AutoPin => idle && session.has_auto_retention(),
        };
        pinned && session.can_expire() && takes
    }

    /// Gives a session's KV to the radix tree, or closes the session if the shim can't do that.
    pub(super) fn release_kv(&mut self, now: Instant, key: &SessionKey) {
        let session = &self.sessions[key];
        let dp_rank = session.dp_rank;
        if !self.accounts[dp_rank as usize].can_demote() {
            return self.retire(now, key, GoneReason::Reclaimed);
        }
        let incarnation = session.incarnation.clone();
        let until = now + DEMOTED_WITHIN;
        self.change_session(key, |session| session.phase = Phase::Demoting { until });
        self.effects.push(Effect::Demote { dp_rank, incarnation });
        self.schedule_deadline_at(until);
    }

    /// Demotes sessions that the agent pinned on its own and that did not come back soon. In the
    /// radix tree, the engine evicts what is used least.
    pub(super) fn demote_idle(&mut self, now: Instant) {
        let due = |session: &Session| session.last_turn_end + self.rules.demote_idle <= now;
        let idle = self.sessions.iter().filter(|(_, one)| self.is_idle_auto_pin(one) && due(one));
        let keys: Vec<SessionKey> = idle.map(|(key, _)| key.clone()).collect();
        keys.iter().for_each(|key| self.release_kv(now, key));
    }

    /// Handles the shim's answer to an [`Effect::Demote`].
    pub fn handle_demote_result(&mut self, now: Instant, incarnation: &str, done: bool) {
        let Some(key) = self.by_incarnation.get(incarnation).cloned() else { return };
        if !matches!(self.sessions[&key].phase, Phase::Demoting { .. }) {
            return;
        }
        if self.continue_reopen(now, &key, done) {
            // The demotion was part of a reopening, which continues now.
        } else if done {
            self.effects.push(Effect::SessionEvent(key.clone(), SessionEvent::Demoted));
            self.change_session(&key, |session| {
                session.phase = Phase::Demoted;
                session.holds_row = false;
                session.resident_tokens = 0;
            });
        } else {
            self.retire(now, &key, GoneReason::Reclaimed);
        }
        self.pump(now);
        self.debug_check();
    }

    /// Returns the rows and tokens that demotions and closes under way will free.
    fn room_being_freed(&self, now: Instant, dp_rank: u32) -> (u64, u64) {
        let demoting = self.sessions.values().filter(|session| {
            session.dp_rank == dp_rank && matches!(session.phase, Phase::Demoting { .. })
        });
        let demoting = demoting.map(|session| (1, self.round_to_pages(session.resident_tokens)));
        // A close that is stuck may never free anything.
        let closing = self
            .closing
            .values()
            .filter(|one| one.dp_rank == dp_rank && now < one.begun_at + self.rules.stuck_after);
        let closing = closing.map(|one| (u64::from(one.holds_row), one.tokens));
        demoting.chain(closing).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }
}

/// Returns how much keeping an idle session's KV is worth: history tokens times the chance that the
/// session resumes soon. If tokens are short, this is divided by the tokens that the session holds.
fn keep_value(session: &Session, now: Instant, shortage: &Shortage) -> u64 {
    let saved = resume_chance(session.idle(now)) * session.history_tokens;
    match shortage {
        Shortage::Rows { .. } => saved,
        Shortage::Tokens { .. } => saved * 1000 / session.resident_tokens.max(1),
    }
}
