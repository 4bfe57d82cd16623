//! What a turn's end does to its session.

use std::time::Instant;

use proto::{id::SessionKey, load::Retention};

use super::{Expected, Guard, Outcome, Phase, Stage, Table, Ticket, Usage};

impl Table {
    /// The turn's client has gone; the turn is aborted, and its end at the engine awaited.
    pub fn abandon(&mut self, now: Instant, rid: &str) {
        let Some(ticket) = self.tickets.get_mut(rid) else { return };
        if ticket.stage != Stage::Inside {
            return;
        }
        ticket.abandoned.get_or_insert(now);
        if !self.rules.guards.hold(Guard::EndAcknowledged) {
            self.end(now, rid, Outcome::Aborted);
        }
    }

    /// Ends a claimed turn, wherever it is, and closes its session if that was asked for. A turn
    /// that has ended already is nobody's.
    pub fn end(&mut self, now: Instant, rid: &str, outcome: Outcome) {
        let Some(ticket) = self.tickets.get(rid) else { return };
        if ticket.stage != Stage::Inside {
            self.forget(now, rid);
            self.pump(now);
            return self.debug_check();
        }
        let ticket = self.tickets.remove(rid).expect("just seen");
        self.book(ticket.dp_rank).left(ticket.pinned, ticket.large_tokens);
        if !matches!(outcome, Outcome::Finished(_)) {
            self.orphan_followers(&ticket);
        }
        if let Some(key) = &ticket.key
            && self.sessions.get(key).is_some_and(|session| session.born == ticket.born)
        {
            self.change(key, |session| {
                session.running -= 1;
                session.last_end = now;
            });
            self.watch(key);
            // One whose engine restarted under the turn has nothing left that could change.
            let mine = self.sessions[key].incarnation == ticket.incarnation;
            if mine && !matches!(self.sessions[key].phase, Phase::Gone(_)) {
                self.settle(now, key, rid, &ticket, outcome);
            }
            self.retire_corrupt(now, key);
            if self.sessions.contains_key(key) {
                self.watch(key);
            }
            self.close_if_due(now, key);
        }
        self.pump(now);
        self.debug_check();
    }

    /// Turns that hold only what comes after this one have nothing to be appended to.
    pub(super) fn orphan_followers(&mut self, ticket: &Ticket) {
        if ticket.key.is_none() {
            return;
        }
        for one in self.tickets.values_mut() {
            let delta = one.claim.as_ref().is_some_and(|claim| claim.delta && !claim.open);
            one.orphaned |= delta
                && one.born == ticket.born
                && one.order > ticket.order
                && one.stage != Stage::Inside;
        }
    }

    fn settle(
        &mut self,
        now: Instant,
        key: &SessionKey,
        rid: &str,
        ticket: &Ticket,
        outcome: Outcome,
    ) {
        if ticket.is_unfit() {
            return self.undo(key, ticket.from_nothing);
        }
        let outcome = self.measured(key, ticket, outcome);
        let pinned = self.sessions[key].retention == Retention::Pinned;
        if ticket.pinned && pinned {
            if !self.settle_marked(now, key, (rid, ticket), outcome) {
                self.settle_pinned(now, key, rid, ticket, outcome);
            }
            return;
        }
        let beside = pinned;
        if let Outcome::Finished(usage) | Outcome::Unheard(usage) = outcome {
            self.change(key, |session| {
                session.turns += 1;
                // What runs beside a pinned history doesn't change it.
                session.whole.behind |= beside;
                if let Some(usage) = usage.filter(|_| !beside) {
                    session.grown(usage);
                }
            });
        }
    }

    fn settle_pinned(
        &mut self,
        now: Instant,
        key: &SessionKey,
        rid: &str,
        ticket: &Ticket,
        outcome: Outcome,
    ) {
        let guards = self.rules.guards;
        let before = self.sessions[key].history_tokens;
        let open = self.sessions[key].phase == Phase::Open;
        match outcome {
            Outcome::Refused => self.undo(key, ticket.from_nothing),
            // The engine rolls the history back and gives the KV to its tree.
            Outcome::Aborted => self.change(key, |session| {
                session.row = false;
                session.reserved_tokens = 0;
                session.resident_tokens = 0;
                session.phase = if open { Phase::Demoted } else { session.phase };
            }),
            Outcome::Finished(usage) => {
                self.grow(key, usage);
                self.note_ends(key, ticket, usage);
                let retracted = usage.is_some_and(|usage| usage.retractions > 0);
                if !open {
                } else if usage.is_none_or(|usage| !ticket.follows(before, usage))
                    && guards.hold(Guard::HistoryChecked)
                {
                    // The shim has held the engine's own count to its plan. A route may tell less
                    // of it, as one does that takes its template's tokens off.
                    let planned = ticket.marked.as_ref().and_then(|one| one.prompt_tokens);
                    self.doubt(now, key, planned.map(Expected::AtLeast));
                } else if retracted && guards.hold(Guard::RetractionSuspect) {
                    // The engine commits a partial answer when it takes a turn out of the batch:
                    // only it knows what it has in the end.
                    let history_tokens = self.sessions[key].history_tokens;
                    self.doubt(now, key, Some(Expected::Exactly(history_tokens)));
                }
            }
            Outcome::Unheard(usage) => {
                self.grow(key, usage);
                if open && guards.hold(Guard::UnheardSuspect) {
                    self.doubt(now, key, None);
                }
            }
            Outcome::Partial if guards.hold(Guard::RetractionSuspect) => {
                // What it reserved stays counted until the engine's account or a close settles it.
                if open {
                    self.doubt(now, key, Some(Expected::Exactly(before)));
                }
            }
            Outcome::Partial => self.change(key, |session| session.reserved_tokens = 0),
            Outcome::Lost => {
                if guards.hold(Guard::AbortBeforeClose) {
                    self.change(key, |session| session.lost_rid = Some(rid.to_owned()));
                }
                if open && guards.hold(Guard::LostEndSuspect) {
                    // If the turn left no trace, the history is what the client knows.
                    self.doubt(now, key, Some(Expected::Exactly(before)));
                }
            }
        }
    }

    /// Notes where an answer begins whose end tokens its text may not show.
    fn note_ends(&mut self, key: &SessionKey, ticket: &Ticket, usage: Option<Usage>) {
        let endless = usage.filter(|_| ticket.need.endless);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        session.whole.hides_ends_from = endless.map(|usage| usage.prompt_tokens);
    }

    fn grow(&mut self, key: &SessionKey, usage: Option<Usage>) {
        self.change(key, |session| {
            session.turns += 1;
            session.reserved_tokens = 0;
            session.whole.behind = false;
            if let Some(usage) = usage {
                session.grown(usage);
            }
        });
    }
}

impl Ticket {
    /// Does its session close with it?
    pub(super) fn closes(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.close)
    }

    /// Is the prompt the engine ran the history before, and then what the turn sent?
    fn follows(&self, before: u64, usage: Usage) -> bool {
        if let Some(planned) = self.marked.as_ref().and_then(|marked| marked.prompt_tokens) {
            return usage.prompt_tokens == planned;
        }
        let Some(sent) = usage.prompt_tokens.checked_sub(before) else { return false };
        // The engine drops a leading BOS where there is history.
        let bos_dropped = before > 0 && sent + 1 == self.need.prompt_tokens;
        !self.need.exact || sent == self.need.prompt_tokens || bos_dropped
    }
}
