//! Closes on their way: an incarnation whose close was asked for stays counted until the engine has
//! confirmed it, and is asked again until then. One that doesn't end is the engine's fault, and
//! only its restart helps.

use std::time::{Duration, Instant};

use proto::{id::SessionKey, load::Retention};

use super::{
    Close, Closed, Effect, Error, Event, Expected, Guard, Phase, Record, Session, Table, Why,
};

/// An unconfirmed close is asked for again after this long: the engine itself looks at deferred
/// closes once a second.
const CLOSE_AGAIN: Duration = Duration::from_millis(250);
/// The longest pause between two.
const CLOSE_AGAIN_MAX: Duration = Duration::from_secs(5);
/// The shim tells of a turn's end within a scheduler step; a long prefill step is over by then.
const VERIFIED_WITHIN: Duration = Duration::from_secs(5);

/// A close that is not confirmed yet.
#[derive(Debug)]
pub(super) struct Closing {
    pub(super) dp_rank: u32,
    pub(super) row: bool,
    /// In whole pages.
    pub(super) tokens: u64,
    /// A turn of it that may still be inside.
    pub(super) rid: Option<String>,
    /// An earlier agent's session.
    pub(super) inherited: bool,
    pub(super) since: Instant,
    /// When it is to be asked for again; none while an answer is awaited.
    pub(super) due: Option<Instant>,
    /// The engine has said that it is still there.
    pub(super) kept: bool,
}

impl Closing {
    /// Of an incarnation that holds nothing, if it is open at all.
    pub(super) fn empty(now: Instant) -> Self {
        Self {
            dp_rank: 0,
            row: false,
            tokens: 0,
            rid: None,
            inherited: false,
            since: now,
            due: None,
            kept: false,
        }
    }
}

impl Table {
    /// Takes over what an earlier agent left open: to be closed, and counted until then.
    pub fn inherit(
        &mut self,
        now: Instant,
        incarnation: String,
        dp_rank: u32,
        rid: Option<String>,
    ) {
        if !self.rules.guards.hold(Guard::TakeoverCloses) {
            return;
        }
        let dp_rank = if (dp_rank as usize) < self.engine.ranks.len() { dp_rank } else { 0 };
        let row = Closing { dp_rank, row: true, rid, inherited: true, ..Closing::empty(now) };
        self.start_close(incarnation, row);
        self.debug_check();
    }

    /// Is something of an earlier agent still open?
    pub(super) fn takes_over(&self) -> bool {
        self.closing.values().any(|one| one.inherited)
    }

    /// The engine's answer to an [`Effect::Close`], or what the shim saw.
    pub fn closed(&mut self, now: Instant, incarnation: &str, closed: Closed) {
        let Some(closing) = self.closing.get_mut(incarnation) else { return };
        closing.kept |= closed == Closed::Kept;
        if closed != Closed::Confirmed && self.rules.guards.hold(Guard::CloseRepeated) {
            // One that takes long is asked for less and less often.
            let waited = now.saturating_duration_since(closing.since);
            closing.due = Some(now + (waited / 4).clamp(CLOSE_AGAIN, CLOSE_AGAIN_MAX));
            return;
        }
        let closing = self.closing.remove(incarnation).expect("just seen");
        self.uncount(&closing);
        self.effects.push(Effect::Freed(now.saturating_duration_since(closing.since)));
        self.journal(Record::Closed { incarnation: incarnation.to_owned() });
        self.pump(now);
        self.debug_check();
    }

    /// Takes a closing session out when nothing of it is inside the engine any more.
    pub(super) fn close_if_due(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        if session.phase != Phase::Closing || session.running > 0 {
            return;
        }
        self.close_at_engine(now, key);
        self.drop_session(now, key, &Error::Unknown);
    }

    /// Closes a session whose only turns were refused or given up: their clients don't know that it
    /// was opened for them, and a router that hasn't heard of it can't close it.
    pub(super) fn close_unused(&mut self, now: Instant, key: &SessionKey) {
        let left = self.sessions.get(key).is_some_and(Session::is_left_unused);
        if left && self.rules.guards.hold(Guard::UnusedClosed) {
            let _ = self.begin_close(now, key);
        }
    }

    /// Ends a pinned session's life at the engine; its client hears why at its next turn.
    pub(super) fn retire(&mut self, now: Instant, key: &SessionKey, why: Why) {
        let event = match why {
            Why::Reclaimed => Event::Reclaimed,
            Why::HistoryUnknown => Event::Doubted,
            Why::KvCorrupt => Event::Corrupt,
            Why::EngineRestarted => Event::EngineLost,
        };
        self.effects.push(Effect::Happened(key.clone(), event));
        self.runs_as_it_came(key);
        self.close_at_engine(now, key);
        self.reincarnate(key);
        self.change(key, |session| {
            session.phase = Phase::Gone(why);
            session.emptied();
        });
        let session = &self.sessions[key];
        self.watch_until(session.last_end + session.idle_max);
    }

    /// After a turn's end left doubt: the engine's own account decides, where there is one and it
    /// can; else the session's life at the engine ends.
    pub(super) fn doubt(&mut self, now: Instant, key: &SessionKey, expected: Option<Expected>) {
        let verifies = self.books[self.sessions[key].dp_rank as usize].verifies();
        let (true, Some(expected)) = (verifies, expected) else {
            return self.retire(now, key, Why::HistoryUnknown);
        };
        let until = now + VERIFIED_WITHIN;
        let (dp_rank, rid) = self.change(key, |session| {
            session.phase = Phase::Suspect { expected, until, asked: false };
            (session.dp_rank, session.lost_rid.clone())
        });
        self.effects.push(Effect::Look { dp_rank, rid });
        self.watch_until(until);
    }

    /// An audit found that pages of this session are others' too, or were written by others: no
    /// turn is run on them any more. A turn that runs now ends first.
    pub fn corrupt(&mut self, now: Instant, incarnation: &str) {
        let Some(key) = self.by_incarnation.get(incarnation).cloned() else { return };
        self.change(&key, |session| session.corrupt = true);
        self.retire_corrupt(now, &key);
        self.pump(now);
        self.debug_check();
    }

    /// Retires a session that was found corrupt, once no turn of it runs.
    pub(super) fn retire_corrupt(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        let over = matches!(session.phase, Phase::Closing | Phase::Gone(_));
        if session.corrupt && session.running == 0 && !over {
            self.retire(now, key, Why::KvCorrupt);
        }
    }

    /// Whose an engine-side id is.
    #[must_use]
    pub fn key_of(&self, incarnation: &str) -> Option<&SessionKey> {
        self.by_incarnation.get(incarnation)
    }

    pub(super) fn close_at_engine(&mut self, now: Instant, key: &SessionKey) {
        let session = &self.sessions[key];
        let incarnation = session.incarnation.clone();
        match session.retention {
            Retention::Pinned => {
                let held = session.resident_tokens.max(session.reserved_tokens);
                let row = session.row;
                let tokens = if row { self.pages_of(held) } else { 0 };
                let (dp_rank, rid) = (session.dp_rank, session.lost_rid.clone());
                let closing = Closing { dp_rank, row, tokens, rid, ..Closing::empty(now) };
                self.start_close(incarnation, closing);
            }
            Retention::Tagged => {
                let close = Close { incarnation, rid: None, pinned: false, again: false };
                self.effects.push(Effect::Close(close));
            }
            Retention::None => {}
        }
    }

    pub(super) fn start_close(&mut self, incarnation: String, closing: Closing) {
        if self.closing.contains_key(&incarnation) {
            return;
        }
        if self.rules.guards.hold(Guard::CountedUntilClosed) {
            let book = self.book(closing.dp_rank);
            book.totals.rows_held += u32::from(closing.row);
            book.totals.pinned_tokens += closing.tokens;
        }
        let rid = closing.rid.clone();
        let close = Close { incarnation: incarnation.clone(), rid, pinned: true, again: false };
        self.effects.push(Effect::Close(close));
        self.closing.insert(incarnation, closing);
    }

    fn uncount(&mut self, closing: &Closing) {
        if self.rules.guards.hold(Guard::CountedUntilClosed) {
            let book = self.book(closing.dp_rank);
            book.totals.rows_held -= u32::from(closing.row);
            book.totals.pinned_tokens -= closing.tokens;
        }
    }

    pub(super) fn repeat_closes(&mut self, now: Instant) {
        for (incarnation, closing) in &mut self.closing {
            if closing.due.take_if(|due| *due <= now).is_some() {
                let (incarnation, rid) = (incarnation.clone(), closing.rid.clone());
                let close = Close { incarnation, rid, pinned: true, again: true };
                self.effects.push(Effect::Close(close));
            }
        }
    }

    /// Forgets what is on its way: the engine's process has ended, it seems. The journal keeps it
    /// until another process is there, in case it is the same one that comes back.
    pub(super) fn forget_closes(&mut self) {
        for closing in std::mem::take(&mut self.closing).into_values() {
            self.uncount(&closing);
        }
    }

    /// Why only a restart of the engine helps, if that is so: it keeps a session half closed, or
    /// doesn't end a turn.
    #[must_use]
    pub fn restart_required(&self, now: Instant) -> Option<String> {
        let late = |since: Instant| since + self.rules.stuck_after <= now;
        // What can't be asked for isn't the engine's fault.
        let stays = |one: &&Closing| one.kept && late(one.since);
        let closes = self.closing.values().filter(stays).count();
        if closes > 0 {
            return Some(format!(
                "the engine keeps {closes} sessions half closed; their rows and KV come back only \
                 when it restarts"
            ));
        }
        let abandoned = self.tickets.values().filter_map(|ticket| ticket.abandoned);
        let turns = abandoned.filter(|since| late(*since)).count();
        (turns > 0).then(|| {
            format!("the engine doesn't end {turns} aborted turns; restart it to free their rows")
        })
    }
}
