//! Begins sessions: a turn claims its session, or a client opens a session for later turns.
//!
//! To claim a session is to take a place in the order of its turns; a claim creates a missing
//! session.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{claim::Claim, id::SessionKey, load::Retention};

use super::{
    Chooser, ClientHistory, Deltas, EngineHistory, Error, Guard, OpenResult, PrefixTracker,
    PromptStart, Record, RouteTurns, Session, Sharing, State, Table, Tree, TurnCounts, check_route,
    check_turn,
    closes::Close,
    tickets::{ClaimedSession, Stage, Ticket},
};

impl Table {
    /// Claims a turn's place before the body is read, so that a turn that its session can't take is
    /// refused at once. [`Self::admit`] or [`Self::end_turn`] must follow.
    ///
    /// `session_claim` is `None` for a turn without a session; otherwise the session is
    /// `principal`'s. `requested_rank` is the DP rank that the turn must run on, if any.
    pub fn claim(
        &mut self,
        now: Instant,
        rid: &str,
        principal: &str,
        session_claim: Option<(&Claim, &SessionKey)>,
        requested_rank: Option<u32>,
        route_turns: RouteTurns,
    ) -> Result<(), Error> {
        self.check_engine_speaks()?;
        let idle_cap = self.idle_cap();
        let dp_rank = match session_claim {
            None => self.choose_rank(requested_rank, None)?,
            Some((claim, key)) => {
                self.claim_session(now, claim, key, requested_rank, route_turns)?;
                self.sessions.update(key, |session| {
                    session.turns.waiting += 1;
                    let wanted = claim.idle_ms_max.map(Duration::from_millis);
                    session.idle_max = wanted.map_or(session.idle_max, |idle| idle.min(idle_cap));
                    session.dp_rank
                })
            }
        };
        let session =
            session_claim.map(|(claim, key)| self.claimed_session(claim, key, route_turns));
        let stage = Stage::Claimed(PromptStart::default());
        let principal = session_claim.map_or(principal, |(_, key)| key.principal()).into();
        self.tickets.insert(rid, Ticket { dp_rank, principal, session, since: now, stage });
        self.debug_check();
        Ok(())
    }

    fn claimed_session(
        &mut self,
        claim: &Claim,
        key: &SessionKey,
        route_turns: RouteTurns,
    ) -> ClaimedSession {
        ClaimedSession {
            key: key.clone(),
            generation: self.sessions[key].generation,
            claim: claim.clone(),
            route_turns,
            order: self.tickets.next_order(),
            abandoned_up_to: self.abandoned_turns(&self.sessions[key]).max().unwrap_or(0),
            is_orphaned: false,
        }
    }

    /// The orders of running turns that their clients have given up. Only where turns run one after
    /// the other does a next one count on them.
    fn abandoned_turns(&self, session: &Session) -> impl Iterator<Item = u64> {
        let may_have = session.turns.running > 0 && session.sharing != Sharing::Shared;
        may_have.then(|| self.tickets.abandoned_of(session.generation)).into_iter().flatten()
    }

    fn claim_session(
        &mut self,
        now: Instant,
        claim: &Claim,
        key: &SessionKey,
        requested_rank: Option<u32>,
        route_turns: RouteTurns,
    ) -> Result<(), Error> {
        // A delta relies on the session's history, so it must not replace a session that can't
        // continue by an empty one.
        self.remove_if_unusable(key, claim.open && !claim.delta);
        if !self.sessions.has(key) {
            if claim.delta && !claim.open {
                return Err(Error::UnknownSession);
            }
            // A client that opens with a delta will send only new tokens, so the session must be
            // pinned.
            let requested = claim.retention.or(claim.delta.then_some(Retention::Pinned));
            let retention = self.choose_retention(requested)?;
            match retention {
                Retention::Pinned => {
                    check_route(claim.delta, false, route_turns, self.shims.trims())?
                }
                Retention::Tagged | Retention::None if claim.delta => {
                    return Err(Error::DeltaNeedsPinned(retention));
                }
                _ => {}
            }
            let dp_rank = self.choose_rank(requested_rank, Some(retention))?;
            self.insert_session(now, key, requested, retention, dp_rank, claim)?;
            self.sessions.update(key, |session| session.turns.is_unused = true);
        }
        let (guards, shim_trims) = (self.settings.guards, self.shims.trims());
        let session = &self.sessions[key];
        check_turn(session, claim, route_turns, shim_trims, guards)?;
        let turns_before = session.turns.in_progress();
        // One turn of a sequential session runs, and this many may wait behind it. A turn that its
        // client has given up ends soon, so the client's next one waits for that.
        let turns_max = 1 + self.settings.turns_queued_per_session_max;
        let is_full = turns_before >= turns_max
            && turns_before as usize - self.abandoned_turns(session).count() >= turns_max as usize;
        if session.sharing != Sharing::Shared && is_full && guards.is_on(Guard::OneTurn) {
            return Err(Error::Busy);
        }
        self.sessions.update(key, |session| {
            session.client.sends_full =
                !claim.delta && (shim_trims || session.has_auto_retention());
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
    fn remove_if_unusable(&mut self, key: &SessionKey, is_opened_again: bool) {
        let rank_count = self.engine.ranks.len();
        let Some(session) = self.sessions.get(key) else { return };
        let is_at_rest = session.turns.in_progress() == 0;
        let has_lost_rank = session.dp_rank as usize >= rank_count;
        let is_gone = session.state.is_gone();
        if is_at_rest && (has_lost_rank || (is_opened_again && is_gone)) {
            self.sessions.remove(&mut self.effects, key);
        }
    }

    /// Opens a session without a turn. [`super::Effect::Admitted`] or [`super::Effect::Refused`]
    /// with the id `rid` follows. A session that is already open keeps its history. One that can't
    /// continue is replaced.
    pub fn open_session(
        &mut self,
        now: Instant,
        rid: &str,
        key: &SessionKey,
        requested: Option<Retention>,
        idle_max: Option<Duration>,
        requested_rank: Option<u32>,
    ) -> Result<(), Error> {
        self.check_engine_speaks()?;
        if self.tickets.queue().len() >= self.settings.turns_queued_max {
            self.make_queue_place(now, key.principal())?;
        }
        let idle_cap = self.idle_cap();
        self.remove_if_unusable(key, true);
        let idle_ms_max = idle_max.map(|idle| u64::try_from(idle.as_millis()).unwrap_or(u64::MAX));
        let claim = Claim { open: true, idle_ms_max, ..Claim::for_session(key) };
        match self.sessions.get(key) {
            Some(session) if session.state.is_closing() => return Err(Error::Closing),
            Some(session) if session.state.is_gone() => return Err(Error::Busy),
            Some(session) => {
                let has_no_turns = session.turns.in_progress() == 0;
                if let Some(wanted) =
                    requested.filter(|_| session.has_auto_retention() && has_no_turns)
                {
                    // The client's choice replaces the agent's.
                    self.apply_requested_retention(now, key, wanted);
                }
                let session = &self.sessions[key];
                let retention = session.retention();
                let is_pinned_by_agent = session.is_pinned_by_agent();
                if requested.is_some_and(|wanted| wanted != retention || is_pinned_by_agent) {
                    return Err(Error::OpenWithOtherRetention(retention));
                }
                self.sessions.update(key, |session| {
                    session.turns.is_unused = false;
                    session.open_for_deltas();
                    session.sharing.update(true, session.turns.in_progress() <= 1);
                    session.idle_max = idle_max.map_or(session.idle_max, |idle| idle.min(idle_cap));
                });
            }
            None => {
                let retention = self.choose_retention(requested)?;
                let dp_rank = self.choose_rank(requested_rank, Some(retention))?;
                self.insert_session(now, key, requested, retention, dp_rank, &claim)?;
            }
        }
        let dp_rank = self.sessions[key].dp_rank;
        let session = Some(self.claimed_session(&claim, key, RouteTurns::Nothing));
        let (principal, stage) = (Arc::from(key.principal()), Stage::AwaitsOpen);
        self.tickets.insert(rid, Ticket { dp_rank, principal, session, since: now, stage });
        self.process_queue(now);
        self.debug_check();
        Ok(())
    }

    pub fn handle_open_result(&mut self, now: Instant, incarnation: &str, result: &OpenResult) {
        let key = self.sessions.key_of(incarnation).cloned().filter(|key| {
            matches!(self.sessions[key].state, State::Opening(_) | State::Closing(_))
        });
        match (result, key) {
            (OpenResult::Opened, Some(key)) => {
                self.change_session(&key, |session| session.state.move_row(State::Open));
                self.close_if_due(now, &key);
                self.close_unused(now, &key);
                self.finish_reopen(now, &key, true);
            }
            (OpenResult::Opened, None) => self.forget_open(now, incarnation, true),
            (OpenResult::NotOpened(reason), key) => {
                let error = Error::OpenFailed(reason.clone());
                self.handle_failed_open(now, incarnation, key.as_ref(), false, &error);
            }
            (OpenResult::NotJournaled(reason), key) => {
                let error = Error::JournalFailed(reason.clone());
                self.handle_failed_open(now, incarnation, key.as_ref(), false, &error);
            }
            (OpenResult::Unknown(reason), key) => {
                let error = Error::OpenFailed(reason.clone());
                self.handle_failed_open(now, incarnation, key.as_ref(), true, &error);
            }
        }
        self.process_queue(now);
        self.debug_check();
    }

    /// The open failed, or the session was closed meanwhile.
    fn forget_open(&mut self, now: Instant, incarnation: &str, may_be_open: bool) {
        if may_be_open && self.settings.guards.is_on(Guard::UnknownOpenClosed) {
            let close = Close::new(now, 0, None);
            self.closes.start(&mut self.effects, incarnation.to_owned(), close);
        } else {
            self.effects.write_journal(Record::Closed { incarnation: incarnation.to_owned() });
        }
    }

    /// `key`: the session that still waits for the open.
    fn handle_failed_open(
        &mut self,
        now: Instant,
        incarnation: &str,
        key: Option<&SessionKey>,
        may_be_open: bool,
        error: &Error,
    ) {
        self.forget_open(now, incarnation, may_be_open);
        let Some(key) = key else { return };
        if self.finish_reopen(now, key, false) {
            return;
        }
        let session = &self.sessions[key];
        if session.has_auto_retention() && matches!(session.state, State::Opening(_)) {
            // The agent pinned this session on its own, so its turns continue without the pin.
            self.unpin_without_close(now, key);
        } else {
            self.drop_session(now, key, error);
        }
    }

    /// Closes another session if the table is full, or if the principal has as many as it may.
    fn insert_session(
        &mut self,
        now: Instant,
        key: &SessionKey,
        requested: Option<Retention>,
        retention: Retention,
        dp_rank: u32,
        claim: &Claim,
    ) -> Result<(), Error> {
        self.make_session_place(now, key.principal())?;
        let is_pinned = retention == Retention::Pinned;
        let is_tagged = retention == Retention::Tagged;
        let state = if is_pinned {
            State::Planned
        } else {
            State::InTree(Tree { is_tagged, ..Tree::default() })
        };
        let wanted_idle = claim.idle_ms_max.map(Duration::from_millis);
        let idle_max = wanted_idle.map_or(self.settings.idle_max, |idle| idle.min(self.idle_cap()));
        self.sessions.insert(&mut self.effects, key, |incarnation, generation| Session {
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

    /// If none is wanted, returns the best retention without a pin.
    pub(super) fn choose_retention(&self, wanted: Option<Retention>) -> Result<Retention, Error> {
        let offered = &self.engine.retentions;
        let Some(wanted) = wanted else {
            let offers_tagged = offered.contains(&Retention::Tagged);
            return Ok(if offers_tagged { Retention::Tagged } else { Retention::None });
        };
        if wanted == Retention::None || offered.contains(&wanted) {
            return Ok(wanted);
        }
        let offered_names: Vec<&str> = offered.iter().map(|retention| retention.as_str()).collect();
        let off = self.retentions_off.iter().find(|off| off.retention == wanted);
        let reason = off.map_or_else(String::new, |off| off.reason.clone());
        Err(Error::RetentionUnavailable { wanted, offered: offered_names.join(", "), reason })
    }

    /// If none is requested, returns the least loaded rank: by held rows (for a pinned session
    /// only), then by turns, then by tokens.
    fn choose_rank(
        &self,
        requested_rank: Option<u32>,
        retention: Option<Retention>,
    ) -> Result<u32, Error> {
        let rank_count = u32::try_from(self.engine.ranks.len()).expect("few ranks");
        if let Some(requested_rank) = requested_rank {
            return if requested_rank < rank_count {
                Ok(requested_rank)
            } else {
                Err(Error::NoRank(requested_rank))
            };
        }
        let load = |dp_rank: &u32| {
            let totals = self.totals(*dp_rank);
            let rows_held = if retention == Some(Retention::Pinned) { totals.rows_held } else { 0 };
            let turns_claimed = self.tickets.load(*dp_rank).claimed;
            let turns = totals.turns_running + totals.turns_queued + turns_claimed;
            (rows_held, turns, totals.pinned_tokens + totals.tree_tokens_estimate)
        };
        (0..rank_count).min_by_key(load).ok_or(Error::NoRank(0))
    }
}
