//! Decides which sessions the agent pins on its own, pins and unpins them, and opens them.

use std::time::{Duration, Instant};

use contract::{id::SessionKey, load::Retention};

use crate::session::table::{
    Chooser, Deltas, Effect, Error, Guard, Histories, Need, Pins, Record, Row, Session, Sharing,
    State, Step, Tree,
    pins::reclaim::{Requester, Shortage},
};

/// After a longer divergence streak, the agent pins no session on its own: the client seems to edit
/// what it sends, or its prompts can't be trimmed, so pinned turns cost more than those on the
/// radix tree.
pub(super) const DIVERGENCE_STREAK_MAX: u32 = 2;
/// The agent pins a session again only so long after it lost its pin or found no room. Each pin
/// costs the engine an open and a close.
const PIN_PAUSE: Duration = Duration::from_secs(30);

/// The agent pins only while pinned sessions hold fewer rows than all rows divided by this. A
/// pinned session holds its row while it is idle too: with more of them, running turns would lack
/// rows while the pool has room.
const AUTO_PIN_ROWS_DIVISOR: u32 = 2;

impl Session {
    fn is_pin_useless(&self, shim_trims: bool) -> bool {
        // Turns of the conversation that run at the same time find KV only in the radix tree.
        !shim_trims
            || self.client.divergence_streak > DIVERGENCE_STREAK_MAX
            || self.turns.has_forked
    }
}

impl Histories {
    /// Nothing of the session may be open at the engine, unless its close has begun.
    pub(crate) fn unpin_without_close(&mut self, step: &mut Step, key: &SessionKey) {
        self.pins.sessions.reincarnate(key);
        let is_tagged = self.retentions.unpinned(&self.pins.sessions[key]) == Retention::Tagged;
        let no_pin_before = Some(step.now + PIN_PAUSE);
        self.pins.sessions.change(step, key, |session| {
            session.turns.has_forked = false;
            let tree = Tree { is_tagged, no_pin_before, ..Tree::default() };
            session.begin_anew(State::InTree(tree));
        });
    }

    /// Applies the retention that a client asks for, where the agent chose it so far. Does nothing
    /// if that would pin the session, or if it is pinned and not at rest.
    pub(crate) fn apply_requested_retention(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        wanted: Retention,
    ) {
        let session = &self.pins.sessions[key];
        let is_pinned = session.is_pinned();
        let is_at_rest = matches!(session.state, State::Open(_) | State::Demoted);
        if is_pinned && wanted != Retention::Pinned && is_at_rest {
            unpin(self, step, key);
        } else if is_pinned != (wanted == Retention::Pinned) {
            return;
        }
        self.pins.sessions.change(step, key, |session| {
            session.chooser = Chooser::Client;
            if session.is_pinned() {
                session.sharing = Sharing::Exclusive;
            }
        });
    }

    /// Takes the pin from a session that the agent pinned on its own. Returns true if its KV goes
    /// to the radix tree first, so that the turn must wait.
    pub(crate) fn yield_pin(&mut self, step: &mut Step, key: &SessionKey) -> bool {
        let session = &self.pins.sessions[key];
        let can_demote = self.pins.sessions.can_demote(session);
        if session.state.row().is_some() && session.history.tokens > 0 && can_demote {
            self.release_kv(step, key);
            return true;
        }
        unpin(self, step, key);
        false
    }

    /// Pins a session without running turns, or takes its pin, if that makes its turns cheaper.
    /// Returns true if the turn must wait until the session's KV has gone to the radix tree.
    pub(crate) fn prepare_for_full_history(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        need: Need,
    ) -> bool {
        let session = &self.pins.sessions[key];
        match session.state {
            State::Gone { .. } => start_over(self, step, key),
            State::Planned | State::Open(_) | State::Demoted
                if session.has_auto_retention() && session.is_pin_useless(self.shims.trims()) =>
            {
                return self.yield_pin(step, key);
            }
            _ => {}
        }
        if matches!(self.pins.sessions[key].state, State::InTree(_))
            && should_pin(self, step.now, key, need)
        {
            pin(&mut self.pins, step, key);
        }
        false
    }

    /// Opens the session at the engine, or waits for room that can be freed.
    pub(crate) fn open_planned(&mut self, step: &mut Step, key: &SessionKey) -> Result<(), Error> {
        self.check_tree_is_current()?;
        let dp_rank = self.pins.sessions[key].dp_rank;
        if self.pins.closes.has_inherited() {
            // What the engine holds is unknown until the previous agent's sessions are closed.
            return Ok(());
        }
        if let Some(shortage) = self.pins.row_shortage(dp_rank)? {
            return reclaim_for(self, step, key, shortage);
        }
        let (pinned_tokens, budget) = self.pins.pinned_and_budget(dp_rank)?;
        if pinned_tokens >= budget && self.settings.guards.is_on(Guard::PinBudget) {
            let missing = pinned_tokens - budget + 1;
            let shortage = Shortage::Tokens { missing, held: pinned_tokens, max: budget };
            return reclaim_for(self, step, key, shortage);
        }
        self.begin_open(step, key, 0);
        Ok(())
    }

    /// The caller has checked that a row is free.
    pub(super) fn begin_open(&mut self, step: &mut Step, key: &SessionKey, reserved_tokens: u64) {
        let (incarnation, idle_max, dp_rank) = self.pins.sessions.change(step, key, |session| {
            session.state = State::Opening(Row { reserved_tokens, ..Row::default() });
            (session.incarnation.clone(), session.idle_max, session.dp_rank)
        });
        let record = Record::Opening { incarnation: incarnation.clone(), dp_rank };
        let open = Effect::Open { incarnation, idle_max };
        step.push_journaled(self.settings.guards, Some(record), open);
    }

    /// Returns whether the turn's growth fits into the pin budget and the pool now, or false if
    /// room for it is being freed.
    pub(crate) fn make_pinned_room(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        need: Need,
        is_delta: bool,
    ) -> Result<bool, Error> {
        self.check_tree_is_current()?;
        let (pins, guards) = (&self.pins, self.settings.guards);
        let session = &pins.sessions[key];
        let dp_rank = session.dp_rank;
        let holds_row = session.state.row().is_some();
        let session_tokens_now =
            if holds_row { pins.round_to_pages(session.resident_tokens()) } else { 0 };
        let is_trimmed = !is_delta && self.shims.trims();
        let target_tokens = pins.round_to_pages(pins.kv_target_tokens(key, need, is_trimmed));
        if !holds_row && let Some(shortage) = pins.row_shortage(dp_rank)? {
            return reclaim_for(self, step, key, shortage).map(|()| false);
        }
        let (pinned_tokens, budget) = pins.pinned_and_budget(dp_rank)?;
        if target_tokens > budget && guards.is_on(Guard::PinBudget) {
            return Err(Error::TooLarge { tokens_needed: target_tokens, tokens_max: budget });
        }
        let pinned_tokens_after = pinned_tokens - session_tokens_now + target_tokens;
        let pool_room = pins.pinnable_tokens(dp_rank, pins.capacity(dp_rank)?.pool_tokens);
        let max = if guards.is_on(Guard::PinBudget) { budget.min(pool_room) } else { u64::MAX };
        if pinned_tokens_after > max {
            let missing = pinned_tokens_after - max;
            let shortage = Shortage::Tokens { missing, held: pinned_tokens, max };
            return reclaim_for(self, step, key, shortage).map(|()| false);
        }
        Ok(true)
    }
}

/// The session must have come back soon, and fit without taking room from others.
fn should_pin(histories: &Histories, now: Instant, key: &SessionKey, need: Need) -> bool {
    let (pins, settings) = (&histories.pins, &histories.settings);
    let session = &pins.sessions[key];
    let State::InTree(tree) = &session.state else { return false };
    let may_pin = settings.auto_pin
        && histories.shims.trims()
        && session.has_auto_retention()
        && session.client.sends_full
        && session.client.divergence_streak <= DIVERGENCE_STREAK_MAX
        && tree.no_pin_before.is_none_or(|earliest| earliest <= now)
        && pins.sessions.can_demote(session)
        && histories.retentions.offer(Retention::Pinned);
    let came_back_soon = session.turns.finished > 0 && session.idle(now) <= settings.demote_idle;
    let is_only_turn = session.turns.running == 0 && session.turns.waiting == 1;
    let is_blocked = pins.closes.has_inherited() || histories.check_tree_is_current().is_err();
    if !(may_pin && came_back_soon && is_only_turn) || is_blocked {
        return false;
    }
    let has_free_row = matches!(pins.row_shortage(session.dp_rank), Ok(None));
    let rows = pins.capacity(session.dp_rank).map_or(0, |capacity| capacity.rows);
    let leaves_rows = pins.held_on(session.dp_rank).rows < rows / AUTO_PIN_ROWS_DIVISOR;
    has_free_row && leaves_rows && pins.fits_pinned(key, pins.full_history_target_tokens(key, need))
}

/// The session's next turn opens it at the engine.
fn pin(pins: &mut Pins, step: &mut Step, key: &SessionKey) {
    pins.close_at_engine(step, key);
    pins.sessions.reincarnate(key);
    pins.sessions.change(step, key, |session| session.begin_anew(State::Planned));
}

/// Only for a session that the agent pinned on its own.
fn unpin(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    if histories.pins.sessions[key].state != State::Planned {
        histories.pins.close_at_engine(step, key);
    }
    histories.unpin_without_close(step, key);
}

/// The engine must hold nothing of the session any more.
fn start_over(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    let session = &histories.pins.sessions[key];
    // An engine that has restarted may offer less than the one before.
    let offers_pins = histories.retentions.offer(Retention::Pinned);
    if session.has_auto_retention() || !session.is_pinned() || !offers_pins {
        return histories.unpin_without_close(step, key);
    }
    histories.pins.sessions.reincarnate(key);
    histories.pins.sessions.change(step, key, |session| {
        let has_run = session.turns.finished > 0;
        session.state = State::Planned;
        session.client.deltas = if has_run { Deltas::RefusedAnew } else { Deltas::Refused };
        session.client.may_be_ahead |= has_run;
    });
}

/// Begins to free the room that the session lacks. Fails if too little can be freed.
fn reclaim_for(
    histories: &mut Histories,
    step: &mut Step,
    key: &SessionKey,
    shortage: Shortage,
) -> Result<(), Error> {
    let session = &histories.pins.sessions[key];
    let requester = if session.has_auto_retention() {
        Requester::AutoPin
    } else {
        Requester::Pinned(key.principal())
    };
    let is_freed = histories.reclaim(step, session.dp_rank, &shortage, requester);
    if is_freed { Ok(()) } else { Err(shortage.into()) }
}
