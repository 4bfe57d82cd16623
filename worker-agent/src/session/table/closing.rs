//! Closes incarnations at the engine, and repeats each close until the engine has confirmed it.
//!
//! An incarnation is one life of a session in the engine. A pinned one holds a request row and KV,
//! which stay counted until the engine has confirmed the close. If the engine keeps a session for
//! too long after the close was requested, only a restart of the engine helps.
//!
//! The other modules of the table call this one. Each close leaves as an [`Effect::Close`], which
//! `owner` sends. This module also makes sessions suspect: their history is uncertain until the
//! shim, Berth's part in the engine's process, confirms it (see the module `engine`).

use std::time::{Duration, Instant};

use proto::id::SessionKey;

use super::{
    CloseRequest, CloseResult, Doubt, Effect, Error, ExpectedHistory, GoneReason, Guard, Record,
    Row, Session, SessionEvent, State, Table, Tree,
};

/// The shortest pause before an unconfirmed close is repeated. A shorter one would gain little, as
/// the engine handles the closes that it has deferred only once a second.
const CLOSE_PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest pause before an unconfirmed close is repeated.
const CLOSE_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long a suspect session (one whose history is uncertain) waits for the shim's session table.
/// The shim, Berth's part in the engine's process, reports a turn's end within a scheduler step.
/// Even a long prefill step is shorter than this.
const VERIFY_TIME_MAX: Duration = Duration::from_secs(5);

/// A close that the engine has not confirmed.
#[derive(Debug)]
pub(super) struct PendingClose {
    pub(super) dp_rank: u32,
    /// The row and the KV that the incarnation holds until then.
    pub(super) row: Option<Row>,
    /// Whether an earlier agent process opened the session.
    pub(super) is_inherited: bool,
    /// When the close was first requested.
    pub(super) begun_at: Instant,
    /// When to repeat the close. `None` while the engine's answer to it is awaited.
    pub(super) repeat_at: Option<Instant>,
    /// Whether the engine has reported that the session still exists.
    pub(super) is_kept_by_engine: bool,
}

impl PendingClose {
    /// Returns the close of an incarnation that this agent process opened.
    pub(super) fn new(now: Instant, dp_rank: u32, row: Option<Row>) -> Self {
        Self {
            dp_rank,
            row,
            is_inherited: false,
            begun_at: now,
            repeat_at: None,
            is_kept_by_engine: false,
        }
    }

    /// Returns the rows and the KV tokens, in whole pages, that the incarnation holds.
    pub(super) fn held(&self, page_tokens: u64) -> (u32, u64) {
        self.row.as_ref().map_or((0, 0), |row| (1, row.tokens_max().next_multiple_of(page_tokens)))
    }

    fn request(&self, incarnation: String, is_repeat: bool) -> Effect {
        let rid = self.row.as_ref().and_then(|row| row.lost_rid.clone());
        Effect::Close(CloseRequest { incarnation, rid, is_pinned: true, is_repeat })
    }
}

impl Table {
    /// Takes over an incarnation that an earlier agent process left open: closes it, and counts its
    /// row until the close is confirmed.
    pub fn inherit_incarnation(
        &mut self,
        now: Instant,
        incarnation: String,
        dp_rank: u32,
        rid: Option<String>,
    ) {
        if !self.settings.guards.is_on(Guard::TakeoverCloses) {
            return;
        }
        let dp_rank = if (dp_rank as usize) < self.engine.ranks.len() { dp_rank } else { 0 };
        let row = Row { lost_rid: rid, ..Row::default() };
        let pending =
            PendingClose { is_inherited: true, ..PendingClose::new(now, dp_rank, Some(row)) };
        self.start_close(incarnation, pending);
        self.debug_check();
    }

    /// Whether an incarnation of an earlier agent process is not closed yet.
    pub(super) fn is_taking_over(&self) -> bool {
        self.pending_closes.values().any(|closing| closing.is_inherited)
    }

    /// Handles the engine's answer to an [`Effect::Close`], or the shim's report of a closed
    /// session.
    pub fn handle_close_result(&mut self, now: Instant, incarnation: &str, result: CloseResult) {
        let Some(closing) = self.pending_closes.get_mut(incarnation) else { return };
        closing.is_kept_by_engine |= result == CloseResult::Kept;
        if result != CloseResult::Confirmed && self.settings.guards.is_on(Guard::CloseRepeated) {
            // The longer a close takes, the less often it is repeated.
            let waited = now.saturating_duration_since(closing.begun_at);
            closing.repeat_at = Some(now + (waited / 4).clamp(CLOSE_PAUSE_MIN, CLOSE_PAUSE_MAX));
            return;
        }
        let closing = self.pending_closes.remove(incarnation).expect("just seen");
        self.uncount_close(&closing);
        self.effects.push(Effect::Freed(now.saturating_duration_since(closing.begun_at)));
        self.write_journal(Record::Closed { incarnation: incarnation.to_owned() });
        self.process_queue(now);
        self.debug_check();
    }

    /// Closes and removes a closing session when no turn of it is inside the engine any more.
    pub(super) fn close_if_due(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        if !session.state.is_closing() || session.turns.running > 0 {
            return;
        }
        self.close_at_engine(now, key);
        self.drop_session(now, key, &Error::UnknownSession);
    }

    /// Closes a session whose only turns were refused or given up. Without this the session would
    /// stay open: its clients don't know that it was opened for them, and a router that doesn't
    /// know the session can't close it.
    pub(super) fn close_unused(&mut self, now: Instant, key: &SessionKey) {
        let is_open_for_nothing = self.sessions.get(key).is_some_and(Session::is_open_for_nothing);
        if is_open_for_nothing && self.settings.guards.is_on(Guard::UnusedClosed) {
            let _ = self.begin_close(now, key);
        }
    }

    /// Closes a pinned session at the engine, but keeps it in the table as gone, so that the
    /// client's next turn is told why.
    pub(super) fn close_as_gone(&mut self, now: Instant, key: &SessionKey, reason: GoneReason) {
        let event = match reason {
            GoneReason::Reclaimed => SessionEvent::Reclaimed,
            GoneReason::HistoryUnknown => SessionEvent::Doubted,
            GoneReason::KvCorrupt => SessionEvent::Corrupt,
            GoneReason::EngineRestarted => SessionEvent::EngineLost,
        };
        self.effects.push(Effect::SessionEvent(key.clone(), event));
        self.answer_run_outside(key);
        self.close_at_engine(now, key);
        self.reincarnate(key);
        self.change_session(key, |session| session.lose(reason));
        let session = &self.sessions[key];
        self.schedule_deadline_at(session.expires_at());
    }

    /// Closes a session at the engine whose shim did not answer the agent's request to demote the
    /// session or to report its history.
    pub(super) fn close_without_answer(&mut self, now: Instant, key: &SessionKey) {
        let is_demoting = matches!(self.sessions[key].state, State::Demoting { .. });
        let reason = if is_demoting { GoneReason::Reclaimed } else { GoneReason::HistoryUnknown };
        self.close_as_gone(now, key, reason);
    }

    /// Makes a session suspect, because a turn's end left its history uncertain. The shim's session
    /// table must then report the `expected` history. Without a shim or an expected history, closes
    /// the session at the engine.
    pub(super) fn make_suspect(
        &mut self,
        now: Instant,
        key: &SessionKey,
        expected: Option<ExpectedHistory>,
    ) {
        let can_verify = self.accounts[self.sessions[key].dp_rank as usize].can_verify();
        let (true, Some(expected)) = (can_verify, expected) else {
            return self.close_as_gone(now, key, GoneReason::HistoryUnknown);
        };
        let until = now + VERIFY_TIME_MAX;
        let doubt = Doubt { expected, until, is_table_requested: false };
        let (dp_rank, rid) = self.change_session(key, |session| {
            session.move_row(|row| State::Suspect { row, doubt });
            (session.dp_rank, session.lost_rid())
        });
        self.effects.push(Effect::RequestShimTable { dp_rank, rid });
        self.schedule_deadline_at(until);
    }

    /// Handles an audit's finding that pages of a session's KV also belong to other sessions, or
    /// that other sessions wrote to them. No further turn runs on these pages. A running turn ends
    /// first.
    pub fn handle_corruption(&mut self, now: Instant, incarnation: &str) {
        let Some(key) = self.keys_by_incarnation.get(incarnation).cloned() else { return };
        // Corrupt pages are lost with their engine.
        self.change_session(&key, |session| {
            session.history.is_corrupt = !session.state.is_gone();
        });
        self.close_corrupt(now, &key);
        self.process_queue(now);
        self.debug_check();
    }

    /// Closes a corrupt session at the engine once no turn of it runs.
    pub(super) fn close_corrupt(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        let is_closed_anyway = session.state.is_closing() || session.state.is_gone();
        if session.history.is_corrupt && session.turns.running == 0 && !is_closed_anyway {
            self.close_as_gone(now, key, GoneReason::KvCorrupt);
        }
    }

    /// Returns the key of the session that has this incarnation.
    #[must_use]
    pub fn session_key(&self, incarnation: &str) -> Option<&SessionKey> {
        self.keys_by_incarnation.get(incarnation)
    }

    /// Requests the close of a session's incarnation. Without retention, an incarnation is
    /// not open at the engine and needs no close.
    pub(super) fn close_at_engine(&mut self, now: Instant, key: &SessionKey) {
        let session = &self.sessions[key];
        let incarnation = session.incarnation.clone();
        match session.state.tree() {
            None => {
                let row = session.state.row().cloned();
                let closing = PendingClose::new(now, session.dp_rank, row);
                self.start_close(incarnation, closing);
            }
            Some(Tree { is_tagged: true, .. }) => {
                let close =
                    CloseRequest { incarnation, rid: None, is_pinned: false, is_repeat: false };
                self.effects.push(Effect::Close(close));
            }
            Some(_) => {}
        }
    }

    /// Requests the close of a pinned incarnation, and counts what it holds until the engine has
    /// confirmed the close.
    pub(super) fn start_close(&mut self, incarnation: String, closing: PendingClose) {
        if self.pending_closes.contains_key(&incarnation) {
            return;
        }
        if self.settings.guards.is_on(Guard::CountedUntilClosed) {
            let (rows, tokens) = closing.held(self.engine.page_tokens);
            let account = self.account(closing.dp_rank);
            account.totals.rows_held += rows;
            account.totals.pinned_tokens += tokens;
        }
        self.effects.push(closing.request(incarnation.clone(), false));
        self.pending_closes.insert(incarnation, closing);
    }

    fn uncount_close(&mut self, closing: &PendingClose) {
        if self.settings.guards.is_on(Guard::CountedUntilClosed) {
            let (rows, tokens) = closing.held(self.engine.page_tokens);
            let account = self.account(closing.dp_rank);
            account.totals.rows_held -= rows;
            account.totals.pinned_tokens -= tokens;
        }
    }

    /// Repeats the closes whose pause has passed.
    pub(super) fn repeat_closes(&mut self, now: Instant) {
        for (incarnation, closing) in &mut self.pending_closes {
            if closing.repeat_at.take_if(|due| *due <= now).is_some() {
                self.effects.push(closing.request(incarnation.clone(), true));
            }
        }
    }

    /// Forgets all unconfirmed closes, because the engine process seems to have ended. In case the
    /// same process answers again, the journal keeps them until it names another engine process.
    pub(super) fn forget_closes(&mut self) {
        for closing in std::mem::take(&mut self.pending_closes).into_values() {
            self.uncount_close(&closing);
        }
    }

    /// Returns why the engine must be restarted: it keeps a session half closed, or doesn't end an
    /// aborted turn. `None` if no restart is needed.
    #[must_use]
    pub fn restart_required(&self, now: Instant) -> Option<String> {
        let is_overdue = |since: Instant| since + self.settings.stuck_after <= now;
        // A close counts only if the engine has said that the session still exists. If the engine
        // can't be asked, it isn't at fault.
        let is_stuck =
            |closing: &&PendingClose| closing.is_kept_by_engine && is_overdue(closing.begun_at);
        let stuck_closes = self.pending_closes.values().filter(is_stuck).count();
        if stuck_closes > 0 {
            return Some(format!(
                "the engine keeps {stuck_closes} sessions half closed; their rows and KV come back \
                 only when it restarts"
            ));
        }
        let abandoned = self.tickets.inside().filter_map(|(_, _, inside)| inside.abandoned_since);
        let stuck_turns = abandoned.filter(|since| is_overdue(*since)).count();
        (stuck_turns > 0).then(|| {
            format!(
                "the engine doesn't end {stuck_turns} aborted turns; restart it to free their rows"
            )
        })
    }
}
