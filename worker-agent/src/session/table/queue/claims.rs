//! Begins sessions: a turn claims its session, or a client opens a session for later turns.
//!
//! To claim a session is to take a place in the order of its turns; a claim creates a missing
//! session. The engine's answer to an open is handled here too.

use std::{sync::Arc, time::Duration};

use contract::{claim::Claim, id::SessionKey, load::Retention};

use crate::session::table::{
    Chooser, ClaimRequest, ClientHistory, Deltas, EngineHistory, Error, Guard, OpenRequest,
    OpenResult, Pins, PrefixTracker, PromptStart, Queue, RouteTurns, Session, Sharing, State, Step,
    Tree, TurnCounts, check_route, check_turn,
    queue::{
        shares::totals,
        ticket::{ClaimedSession, Stage, Ticket},
    },
};

/// A session that isn't in the table yet.
#[derive(Debug, Clone, Copy)]
struct NewSession<'a> {
    claim: &'a Claim,
    requested: Option<Retention>,
    retention: Retention,
    dp_rank: u32,
}

impl Queue {
    pub(crate) fn claim(
        &mut self,
        step: &mut Step,
        rid: &str,
        request: &ClaimRequest,
    ) -> Result<(), Error> {
        self.check_engine_speaks()?;
        let (dp_rank, session) = match &request.claim {
            None => (choose_rank(self, request.requested_rank, None)?, None),
            Some(claim) => {
                claim_session(self, step, claim, request)?;
                let idle_cap = self.sessions().idle_cap();
                let dp_rank = self.sessions_mut().update(&claim.key, |session| {
                    session.turns.waiting += 1;
                    let wanted = claim.idle_ms_max.map(Duration::from_millis);
                    session.idle_max = wanted.map_or(session.idle_max, |idle| idle.min(idle_cap));
                    session.dp_rank
                });
                (dp_rank, Some(order_claim(self, claim, request.route_turns)))
            }
        };
        let (principal, since) = (Arc::clone(&request.principal), step.now);
        let stage = Stage::Claimed(PromptStart::default());
        self.tickets.insert(rid, Ticket { dp_rank, principal, session, since, stage });
        Ok(())
    }

    pub(crate) fn open_session(
        &mut self,
        step: &mut Step,
        rid: &str,
        request: &OpenRequest,
    ) -> Result<(), Error> {
        let &OpenRequest { ref key, retention: requested, idle_max, requested_rank } = request;
        self.check_engine_speaks()?;
        if self.tickets.queue().len() >= self.settings.turns_queued_max {
            self.make_queue_place(step, key.principal())?;
        }
        let idle_cap = self.sessions().idle_cap();
        remove_if_unusable(&mut self.histories.pins, step, key, true);
        let idle_ms_max = idle_max.map(|idle| u64::try_from(idle.as_millis()).unwrap_or(u64::MAX));
        let claim = Claim { open: true, idle_ms_max, ..Claim::for_session(key) };
        match self.sessions().get(key) {
            Some(session) if session.state.is_closing() => return Err(Error::Closing),
            Some(session) if session.state.is_gone() => return Err(Error::Busy),
            Some(session) => {
                let has_no_turns = session.turns.in_progress() == 0;
                let may_change = session.has_auto_retention() && has_no_turns;
                if let Some(wanted) = requested.filter(|_| may_change) {
                    // The client's choice replaces the agent's.
                    self.histories.apply_requested_retention(step, key, wanted);
                }
                let session = &self.sessions()[key];
                let retention = session.retention();
                let is_pinned_by_agent = session.is_pinned_by_agent();
                if requested.is_some_and(|wanted| wanted != retention || is_pinned_by_agent) {
                    return Err(Error::OpenWithOtherRetention(retention));
                }
                self.sessions_mut().update(key, |session| {
                    session.turns.is_unused = false;
                    session.open_for_deltas();
                    session.sharing.update(true, session.turns.in_progress() <= 1);
                    session.idle_max = idle_max.map_or(session.idle_max, |idle| idle.min(idle_cap));
                });
            }
            None => {
                let retention = self.histories.retentions.choose(requested)?;
                let dp_rank = choose_rank(self, requested_rank, Some(retention))?;
                let new = NewSession { claim: &claim, requested, retention, dp_rank };
                insert_session(self, step, new)?;
            }
        }
        let dp_rank = self.sessions()[key].dp_rank;
        let session = Some(order_claim(self, &claim, RouteTurns::Nothing));
        let (principal, since) = (Arc::from(key.principal()), step.now);
        let ticket = Ticket { dp_rank, principal, session, since, stage: Stage::AwaitsOpen };
        self.tickets.insert(rid, ticket);
        self.admit_waiting(step);
        Ok(())
    }
}

fn order_claim(queue: &mut Queue, claim: &Claim, route_turns: RouteTurns) -> ClaimedSession {
    let key = &claim.key;
    ClaimedSession {
        key: key.clone(),
        generation: queue.sessions()[key].generation,
        claim: claim.clone(),
        route_turns,
        order: queue.tickets.next_order(),
        abandoned_up_to: abandoned_turns(queue, &queue.sessions()[key]).max().unwrap_or(0),
        is_orphaned: false,
    }
}

/// The orders of running turns that their clients have given up. Only where turns run one after
/// the other does a next one count on them.
fn abandoned_turns(queue: &Queue, session: &Session) -> impl Iterator<Item = u64> {
    let may_have = session.turns.running > 0 && session.sharing != Sharing::Shared;
    may_have.then(|| queue.tickets.abandoned_of(session.generation)).into_iter().flatten()
}

fn claim_session(
    queue: &mut Queue,
    step: &mut Step,
    claim: &Claim,
    request: &ClaimRequest,
) -> Result<(), Error> {
    let &ClaimRequest { requested_rank, route_turns, .. } = request;
    let (key, shim_trims) = (&claim.key, queue.histories.shims.trims());
    // A delta relies on the session's history, so it must not replace a session that can't
    // continue by an empty one.
    remove_if_unusable(&mut queue.histories.pins, step, key, claim.open && !claim.delta);
    if !queue.sessions().has(key) {
        if claim.delta && !claim.open {
            return Err(Error::UnknownSession);
        }
        // A client that opens with a delta will send only new tokens, so the session must be
        // pinned.
        let requested = claim.retention.or(claim.delta.then_some(Retention::Pinned));
        let retention = queue.histories.retentions.choose(requested)?;
        match retention {
            Retention::Pinned => check_route(claim.delta, false, route_turns, shim_trims)?,
            Retention::Tagged | Retention::None if claim.delta => {
                return Err(Error::DeltaNeedsPinned(retention));
            }
            _ => {}
        }
        let dp_rank = choose_rank(queue, requested_rank, Some(retention))?;
        insert_session(queue, step, NewSession { claim, requested, retention, dp_rank })?;
        queue.sessions_mut().update(key, |session| session.turns.is_unused = true);
    }
    let (session, guards) = (&queue.sessions()[key], queue.settings.guards);
    check_turn(session, claim, route_turns, shim_trims, guards)?;
    let turns_before = session.turns.in_progress();
    // One turn of a sequential session runs, and this many may wait behind it. A turn that its
    // client has given up ends soon, so the client's next one waits for that.
    let turns_max = 1 + queue.settings.turns_queued_per_session_max;
    let is_full = turns_before >= turns_max
        && turns_before as usize - abandoned_turns(queue, session).count() >= turns_max as usize;
    if session.sharing != Sharing::Shared && is_full && guards.is_on(Guard::OneTurn) {
        return Err(Error::Busy);
    }
    queue.sessions_mut().update(key, |session| {
        session.client.sends_full = !claim.delta && (shim_trims || session.has_auto_retention());
        session.state.continue_in_tree();
        session.parent = claim.parent.or(session.parent);
        if claim.open {
            session.open_for_deltas();
        }
        // If a client opens a session whose turns run at the same time, these continue. The
        // first that is claimed while no other runs or waits makes the session exclusive.
        session.sharing.update(claim.open, turns_before == 0);
    });
    Ok(())
}

/// Unusable: its rank no longer exists, or it can't continue and a client opens it again.
fn remove_if_unusable(pins: &mut Pins, step: &mut Step, key: &SessionKey, is_opened_again: bool) {
    let Some(session) = pins.sessions.get(key) else { return };
    let is_at_rest = session.turns.in_progress() == 0;
    let has_lost_rank = !pins.ranks().contains(&session.dp_rank);
    let is_gone = session.state.is_gone();
    if is_at_rest && (has_lost_rank || (is_opened_again && is_gone)) {
        pins.sessions.remove(step, key);
    }
}

/// Closes another session if the table is full, or if the principal has as many as it may.
fn insert_session(queue: &mut Queue, step: &mut Step, new: NewSession<'_>) -> Result<(), Error> {
    let NewSession { claim, requested, retention, dp_rank } = new;
    let (key, now) = (&claim.key, step.now);
    make_session_place(queue, step, key.principal())?;
    let is_pinned = retention == Retention::Pinned;
    let is_tagged = retention == Retention::Tagged;
    let state = if is_pinned {
        State::Planned
    } else {
        State::InTree(Tree { is_tagged, ..Tree::default() })
    };
    let wanted_idle = claim.idle_ms_max.map(Duration::from_millis);
    let idle_max =
        wanted_idle.map_or(queue.settings.idle_max, |idle| idle.min(queue.sessions().idle_cap()));
    queue.sessions_mut().insert(step, key, |incarnation, generation| Session {
        dp_rank,
        incarnation,
        generation,
        state,
        kv_epoch: 0,
        chooser: if requested.is_some() { Chooser::Client } else { Chooser::Agent },
        sharing: if is_pinned || claim.open { Sharing::Exclusive } else { Sharing::Shared },
        turns: TurnCounts::new(now),
        history: EngineHistory::default(),
        client: ClientHistory::new(if claim.open { Deltas::Allowed } else { Deltas::Refused }),
        prefix_tracker: PrefixTracker::default(),
        idle_max,
        parent: None,
    });
    Ok(())
}

fn make_session_place(queue: &mut Queue, step: &mut Step, principal: &str) -> Result<(), Error> {
    if let Some(key) = queue.sessions().beyond_share(principal)? {
        queue.close_session(step, &key)?;
    }
    if let Some(key) = queue.sessions().beyond_limit(step.now, principal)? {
        queue.close_session(step, &key)?;
    }
    Ok(())
}

/// If none is requested, returns the least loaded rank: by held rows (for a pinned session
/// only), then by turns, then by tokens.
fn choose_rank(
    queue: &Queue,
    requested_rank: Option<u32>,
    retention: Option<Retention>,
) -> Result<u32, Error> {
    if let Some(requested) = requested_rank {
        let is_there = queue.pins().ranks().contains(&requested);
        return if is_there { Ok(requested) } else { Err(Error::NoRank(requested)) };
    }
    let load = |dp_rank: &u32| {
        let totals = totals(queue, *dp_rank);
        let rows_held = if retention == Some(Retention::Pinned) { totals.rows_held } else { 0 };
        let turns_claimed = queue.tickets.load(*dp_rank).claimed;
        let turns = totals.turns_running + totals.turns_queued + turns_claimed;
        (rows_held, turns, totals.pinned_tokens + totals.tree_tokens_estimate)
    };
    queue.pins().ranks().min_by_key(load).ok_or(Error::NoRank(0))
}

impl Queue {
    pub(crate) fn handle_open_result(
        &mut self,
        step: &mut Step,
        incarnation: &str,
        result: &OpenResult,
    ) {
        let sessions = self.sessions();
        let is_awaited =
            |key: &SessionKey| matches!(sessions[key].state, State::Opening(_) | State::Closing(_));
        let key = sessions.key_of(incarnation).cloned().filter(is_awaited);
        let key = key.as_ref();
        match result {
            OpenResult::Opened => finish_open(self, step, incarnation, key),
            OpenResult::NotOpened(reason) => {
                self.histories.pins.forget_open(step, incarnation, false);
                fail_open(self, step, key, &Error::OpenFailed(reason.clone()));
            }
            OpenResult::NotJournaled(reason) => {
                self.histories.pins.forget_open(step, incarnation, false);
                fail_open(self, step, key, &Error::JournalFailed(reason.clone()));
            }
            OpenResult::Unknown(reason) => {
                self.histories.pins.forget_open(step, incarnation, true);
                fail_open(self, step, key, &Error::OpenFailed(reason.clone()));
            }
        }
        self.admit_waiting(step);
    }
}

/// `key`: the session that still waits for the open.
fn finish_open(queue: &mut Queue, step: &mut Step, incarnation: &str, key: Option<&SessionKey>) {
    let Some(key) = key else {
        return queue.histories.pins.forget_open(step, incarnation, true);
    };
    queue.sessions_mut().change(step, key, |session| {
        session.state.move_row(State::Open);
        if session.turns.running == 0 {
            // The turn for which the room was reserved has ended meanwhile.
            session.state.release_reserved();
        }
    });
    queue.close_if_due(step, key);
    queue.close_unused(step, key);
    queue.histories.finish_reopen(step, key, true);
}

/// `key`: the session that still waits for the open.
fn fail_open(queue: &mut Queue, step: &mut Step, key: Option<&SessionKey>, error: &Error) {
    let Some(key) = key else { return };
    if queue.histories.finish_reopen(step, key, false) {
        return;
    }
    let session = &queue.sessions()[key];
    if session.has_auto_retention() && matches!(session.state, State::Opening(_)) {
        // The agent pinned this session on its own, so its turns continue without the pin.
        queue.histories.unpin_without_close(step, key);
    } else {
        queue.drop_session(step, key, error);
    }
}
