//! Checks the promises against what the engine really holds and what clients really received.
//!
//! No check relies on the table's own view alone.

use std::time::Duration;

use worker_agent::session::{self, CloseRequest, RankTotals, Usage};

use super::{
    engine::TurnId,
    shell::prefix,
    turns::{Reply, Stage, Turn},
    world::{Event, World},
};
use engine_sim::core::{PoolFacts, is_model_answer};

/// A rank that has work but makes no progress for this long is wedged.
const STUCK: Duration = Duration::from_secs(8);
/// The client of a turn receives something within this time, whatever happens.
const ANSWERED_WITHIN: Duration = Duration::from_secs(200);
/// A close is complete within this time, even if answers are lost.
const CLOSED_WITHIN: Duration = Duration::from_secs(25);
/// How often the engine may say that a turn runs in a session that is to close. The agent asks
/// every 250 ms.
const KEPT_MAX: u32 = 6;
/// The end of the run after the last client: longest idle time, repeats of lost calls, backstops.
const OVER_WITHIN: Duration = Duration::from_secs(400);
/// The most time by which a deadline may be missed.
const LATE: Duration = Duration::from_millis(50);

impl World {
    /// Checks the table and the account of pinned tokens. Called after every event.
    pub(super) fn check(&mut self) {
        let Some(agent) = &self.agent else { return };
        agent.table.check_invariants();
        self.check_session_shares();
        let Some(engine) = &self.engine else { return };
        if agent.instance != Some(engine.instance) {
            return;
        }
        for (rank, at) in (0..).zip(&engine.ranks) {
            self.check_account(rank, &at.core.facts());
        }
    }

    /// Checks a rank of the engine. Called after everything that the rank did.
    pub(super) fn check_rank(&self, rank: usize) {
        let Some(engine) = &self.engine else { return };
        let core = &engine.ranks[rank].core;
        if let Some(reason) = core.crashed() {
            panic!("a request killed the engine:{reason}");
        }
        core.check_invariants();
        let facts = core.facts();
        let ours = facts
            .sessions
            .iter()
            .filter(|session| session.id.starts_with("berth-") && !self.is_confirmed(&session.id));
        let rows = ours.filter(|session| session.row.is_some()).count();
        let free = facts.rows - rows;
        let reserve = self.plan.rows_reserve as usize;
        assert!(
            free >= reserve,
            "{rows} of {} rows are held, {reserve} must stay free",
            facts.rows
        );
        let rows_max = self.plan.pin_rows_max as usize;
        assert!(rows <= rows_max, "pinned sessions hold {rows} rows, {rows_max} are allowed");
    }

    /// Whether the engine has confirmed that this session is closed. With several ranks, the word
    /// of one rank confirms it: another rank may close the session a step later, or keep it half
    /// closed for good.
    fn is_confirmed(&self, id: &str) -> bool {
        self.plan.ranks > 1 && self.confirmed.contains(id)
    }

    /// Checks that the table accounts for what the engine really pins, within the budget.
    fn check_account(&self, rank: u32, facts: &PoolFacts) {
        let Some(agent) = &self.agent else { return };
        let totals = agent.table.totals(rank);
        let own = prefix(agent.epoch);
        let page = self.plan.core.page_size;
        // Sessions of an earlier agent and sessions with a meddler's turn hold an unknown amount.
        let counted = facts.sessions.iter().filter(|session| {
            let ours = !self.is_confirmed(&session.id)
                && (session.id.starts_with(&own)
                    || agent.table.sessions().key_of(&session.id).is_some())
                && !self.meddled.contains_key(&session.id);
            ours || self.strangers.contains(&session.id)
        });
        let held: usize = counted.map(|one| one.alloc_tokens.next_multiple_of(page)).sum();
        let account = totals.pinned_tokens;
        // Answers that may grow beyond what is reserved for them are counted when they have ended.
        // What must hold then is that nothing gets stuck.
        let grows_beyond = self.plan.grows_beyond_reservations();
        assert!(
            held as u64 <= account || grows_beyond,
            "{held} tokens are pinned, the account says {account}: {:?}",
            facts.sessions
        );
        let max = self.plan.pin_tokens_max;
        // A meddler's turn can grow a session beyond its reservation.
        let closing = self.closing.keys().any(|id| self.meddled.contains_key(id));
        let open = facts.sessions.iter().any(|one| self.meddled.contains_key(&one.id));
        let meddled = closing || open;
        let own = (self.plan.shim || totals.foreign_tokens == 0) && !meddled && !grows_beyond;
        assert!(account <= max || !own, "{account} tokens pinned, the budget is {max}");
        if self.plan.shim {
            let early =
                facts.sessions.iter().filter(|one| one.row.is_some() && self.is_confirmed(&one.id));
            let (held, rows) =
                (facts.held_rows - early.count(), facts.rows - self.plan.rows_reserve as usize);
            assert!(
                held <= rows,
                "{held} rows are held with the strangers' sessions, {rows} may be"
            );
        }
    }

    /// Checks a turn that has entered a rank's scheduler.
    pub(super) fn check_entered(&self, rank: usize, id: TurnId) {
        let turn = &self.turns[&id];
        let Some(incarnation) = turn.incarnation() else { return };
        let Some(engine) = &self.engine else { return };
        let alone = turn.is_pinned() || turn.claim.as_ref().is_some_and(|(claim, _)| claim.open);
        // Lost turns of tagged sessions don't count: the agent can't wait for them, and they do no
        // harm. Turns that run concurrently with a pinned session's turn are not in the session.
        let counts = |other: &&Turn| other.is_pinned() || (other.connected && !turn.is_pinned());
        let same = |other: &TurnId| {
            let other = Some(&self.turns[other]).filter(counts);
            other.and_then(Turn::incarnation) == Some(incarnation)
        };
        let inside = engine.ranks.iter().flat_map(super::engine::Rank::inside).filter(same).count();
        assert!(!alone || inside <= 1, "{inside} turns of one session are inside the engine");
        if turn.is_pinned() {
            let facts = engine.ranks[rank].core.facts();
            let known = facts.session(incarnation);
            assert!(known.is_some(), "a turn names a session that the engine doesn't have");
            assert!(known.is_some_and(|one| !one.closing), "a turn came after its session's close");
        }
    }

    /// Checks that no turn of the session runs when the agent asks for a close.
    pub(super) fn check_close(&mut self, close: &CloseRequest) {
        let mut turns = self.turns.values();
        let runs = turns.any(|turn| {
            turn.stage == Stage::Sent
                && turn.incarnation() == Some(&close.incarnation)
                && turn.is_pinned()
        });
        assert!(!runs, "a session is closed while its turn runs");
        let since = (self.now, 0);
        self.closing.entry(close.incarnation.clone()).or_insert(since);
    }

    /// Checks a session that the engine keeps although it was told to close it. A turn in the
    /// session can't delay the close for long, because the agent aborted the turn first.
    pub(super) fn check_kept(&mut self, incarnation: &str) {
        let ranks = self.engine.iter().flat_map(|engine| &engine.ranks);
        let mut facts = ranks.map(|rank| rank.core.facts());
        let inflight =
            |facts: &PoolFacts| facts.session(incarnation).is_some_and(|one| one.inflight);
        let busy = facts.any(|facts| inflight(&facts));
        let Some((_, kept)) = self.closing.get_mut(incarnation).filter(|_| busy) else { return };
        *kept += 1;
        assert!(
            *kept <= KEPT_MAX,
            "the close of {incarnation} waits for a turn that the agent doesn't abort"
        );
    }

    /// Restarts the engine where an operator's supervisor would. Only a defect of the engine makes
    /// that necessary: a retraction can leave a session half closed.
    fn supervise(&mut self) {
        let now = self.instant();
        let required = self.agent.as_ref().and_then(|agent| agent.table.restart_required(now));
        let ranks = self.engine.iter().flat_map(|engine| &engine.ranks);
        let retracted: u64 = ranks.clone().map(|rank| rank.core.gauges().retracted).sum();
        // With several ranks, another rank's word can hide this from the agent; then an operator
        // finds it.
        let mut sessions = ranks.flat_map(|rank| rank.core.facts().sessions);
        let half = sessions.any(|one| one.closing && !one.inflight && self.is_confirmed(&one.id));
        let hidden = half && retracted > 0;
        let hidden = hidden.then(|| "a session is half closed".to_owned());
        let Some(why) = required.or(hidden) else { return };
        assert!(retracted > 0, "{why}");
        self.counts.restarted += 1;
        self.note(|| format!("the supervisor restarts the engine: {why}"));
        self.kill_engine();
    }

    /// Checks the client's reply: it is an answer, or the agent's own word on its session.
    pub(super) fn check_reply(&mut self, id: TurnId, reply: &Reply) {
        match reply {
            Reply::Refused(error) => {
                let code = worker_agent::data_port::refusal(&error.clone().into()).code;
                *self.counts.refused.entry(code.to_string()).or_default() += 1;
            }
            Reply::Engine(message) => {
                let turn = &self.turns[&id];
                let pinned = turn.is_pinned();
                let own = message.contains("session") || message.contains("Session");
                assert!(
                    !own || !pinned,
                    "the engine instead of the agent refused a turn:{message}"
                );
            }
            Reply::Answer | Reply::Broken | Reply::Unusable => {}
        }
    }

    /// Returns the error that the client of a turn refused by the shim receives: the agent's, or
    /// the engine's own error if the shim's plan was lost.
    pub(super) fn shim_refusal(&self, id: TurnId) -> session::Error {
        let turn = &self.turns[&id];
        let told = turn.unfit.clone();
        assert!(
            told.is_some() || turn.plan_lost,
            "the client of {} isn't told that the shim refused it",
            turn.rid
        );
        told.unwrap_or(session::Error::NotContinued { detail: "was refused".to_owned() })
    }

    /// Checks that a finished answer is right for its client.
    pub(super) fn check_answer(&mut self, id: TurnId, tokens: &[u32], usage: Option<Usage>) {
        let turn = &self.turns[&id];
        let right = is_model_answer(&turn.context, tokens, self.plan.core.eos_per_mille);
        let meddled = turn.incarnation().and_then(|id| self.meddled.get_mut(id));
        if let Some(since) = meddled {
            *since += 1;
            // The first answer after a meddler's turn can't be saved: the agent couldn't know of
            // the turn.
            assert!(
                *since == 1 || right,
                "a session continued on a history that isn't the client's"
            );
            return;
        }
        assert!(right, "an answer from a wrong context:{}", turn.rid);
        if let Some(usage) = usage.filter(|_| turn.delta()) {
            let (told, own) = (usage.prompt_tokens, turn.context.len());
            assert_eq!(
                told, own as u64,
                "{} is answered with the token count of another prompt",
                turn.rid
            );
        }
        self.counts.answered += 1;
    }

    /// Checks the promises about time. Called once a second.
    pub(super) fn tick(&mut self) {
        self.schedule(Duration::from_secs(1), Event::Tick);
        let now = self.now;
        for rank in self.engine.iter().flat_map(|engine| &engine.ranks) {
            let facts = rank.core.facts();
            let waits = facts.waiting > 0 && facts.running == 0;
            // A session that a retraction left half closed keeps its KV until the supervisor
            // restarts the engine. An agent that took over from another doesn't know how much KV
            // that is.
            let half = facts.sessions.iter().any(|one| one.closing && !one.inflight);
            let half = half && rank.core.gauges().retracted > 0;
            let until_restart = self.plan.table_settings.stuck_after * u32::from(half);
            let moved = rank.moved + STUCK + until_restart > now;
            assert!(!waits || moved, "the engine is wedged: {facts:?}");
        }
        for turn in self.turns.values().filter(|turn| turn.client) {
            let waited = self.waited_for(turn);
            assert!(waited < ANSWERED_WITHIN, "the client of {} gets no answer", turn.rid);
            let queue_max = self.plan.table_settings.queue_wait_max + LATE;
            let late = turn.stage == Stage::Queued && turn.queued + queue_max < now;
            assert!(!late, "{} waits in the queue for longer than the limit", turn.rid);
        }
        self.check_plain_turns_get_rows();
        self.supervise();
        for (incarnation, (since, _)) in &self.closing {
            let late = self.agent.is_some() && *since + CLOSED_WITHIN < now;
            assert!(!late, "the close of {incarnation} is overdue");
        }
        let over_at = self.plan.acts_for + OVER_WITHIN;
        if now > over_at {
            let kept = self.agent.iter().flat_map(|agent| agent.table.sessions().iter());
            let kept: Vec<&str> = kept.map(|(key, _)| key.id()).collect();
            let ranks = self.engine.iter().flat_map(|engine| &engine.ranks);
            let open: Vec<_> = ranks.flat_map(|rank| rank.core.facts().sessions).collect();
            let open: Vec<&str> = open.iter().map(|session| session.id.as_str()).collect();
            panic!("all clients are done, but the agent keeps {kept:?} and the engine {open:?}");
        }
        if let Some(agent) = &self.agent {
            let queued = (0..self.plan.ranks).filter(|_| agent.instance.is_some());
            let queued: u32 = queued.map(|rank| agent.table.totals(rank).turns_queued).sum();
            let max = self.plan.table_settings.turns_queued_max;
            assert!(queued as usize <= max, "{queued} turns wait, the limit is {max}");
        }
    }

    /// Checks the end of the run: nothing is held or counted, and every client has received
    /// something.
    pub(super) fn check_end(&mut self) {
        let agent = self.agent.as_ref().expect("it ends with an agent");
        assert_eq!(agent.table.queue().rids_inside().count(), 0, "a turn is inside for ever");
        for rank in 0..self.plan.ranks {
            let totals = agent.table.totals(rank);
            assert_eq!(totals, RankTotals::default(), "the totals don't return to zero");
        }
        for rank in self.engine.iter().flat_map(|engine| &engine.ranks) {
            let facts = rank.core.facts();
            let mut open = facts.open_sessions();
            open.retain(|id| !self.is_confirmed(id));
            assert_eq!(open, Vec::<&str>::new(), "the engine keeps sessions");
            let tags: Vec<&str> = rank.core.open_tags().collect();
            assert_eq!(tags, Vec::<&str>::new(), "the engine keeps tags");
            let kept = facts.sessions.iter().map(|session| session.alloc_tokens).sum::<usize>();
            let none = kept == 0 && (facts.held_rows, facts.used()) != (0, 0);
            assert!(!none, "the engine keeps KV that belongs to no session: {facts:?}");
        }
    }
}
