//! The agent's process: the session table, and what its owner task does around it.
//!
//! The simulated owner task does everything in the same order as the real task.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use worker_agent::session::{
    self, Effect, EngineLoad, Legacy, ShimReport, Table, TableSettings,
    handover::{Handover, Moment},
    journal::Record,
};

use super::{
    calls::Task,
    shim::{Shim, ShimRequest},
    turns::{Reply, Stage},
    world::{Event, World},
};

/// How often the agent's follower checks the engine; `RETRY` is the time while the engine is down.
const LOOK: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(500);
/// How long an agent waits for running turns before it hands over without them.
const HANDOVER_WAITS: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct AgentProcess {
    pub(super) epoch: u64,
    pub(super) table: Table,
    /// The engine process that the agent follows; None before the first and after a process has
    /// ended.
    pub(super) instance: Option<u64>,
    /// Whether the engine takes no turns, as far as the agent knows.
    pub(super) down: bool,
    pub(super) draining: bool,
    /// Until when the agent waits before it hands its sessions over; `None` if it doesn't end.
    pub(super) hands_over_by: Option<Duration>,
    /// The ids of turns and opens that wait for their admission.
    pub(super) waiters: BTreeSet<String>,
    wake: Option<Instant>,
}

impl AgentProcess {
    pub(super) fn follows(&self) -> bool {
        !self.down && self.instance.is_some()
    }
}

/// Returns the prefix of an agent process's incarnations. Every agent process has its own.
pub(super) fn prefix(epoch: u64) -> String {
    format!("berth-a-{epoch:04x}")
}

impl World {
    pub(super) fn agent_starts(&mut self) {
        self.epochs += 1;
        let epoch = self.epochs;
        let table_settings =
            TableSettings { incarnation_prefix: prefix(epoch), ..self.plan.table_settings.clone() };
        let nothing = session::EngineCapacity {
            ranks: vec![],
            page_tokens: 1,
            context_tokens: 0,
            retentions: vec![],
        };
        self.note(|| format!("agent {epoch} starts"));
        self.agent = Some(AgentProcess {
            epoch,
            table: Table::new(table_settings, nothing),
            instance: None,
            down: true,
            draining: false,
            hands_over_by: None,
            waiters: BTreeSet::new(),
            wake: None,
        });
        self.check_engine(epoch);
        if self.plan.shim {
            self.schedule(Duration::ZERO, Event::ShimReports(epoch));
        }
    }

    pub(super) fn is_epoch(&self, epoch: u64) -> bool {
        self.agent.as_ref().is_some_and(|agent| agent.epoch == epoch)
    }

    /// Calls the table through `call`, then carries out the table's effects.
    pub(super) fn call_table<T>(
        &mut self,
        call: impl FnOnce(&mut Table, Instant) -> T,
    ) -> Option<T> {
        let now = self.instant();
        let before = self.principal_views();
        let agent = self.agent.as_mut()?;
        let told = call(&mut agent.table, now);
        agent.table.run_deadlines(now);
        self.check_shares(&before);
        self.views_before = before;
        self.carry_out();
        Some(told)
    }

    fn carry_out(&mut self) {
        let Some(agent) = &mut self.agent else { return };
        for effect in agent.table.take_effects() {
            let killed = self.plan.faults.killed_at_effect;
            if self.odds(killed) {
                return self.kill_agent("between two effects");
            }
            match effect {
                Effect::Admitted { rid, turn } => self.admitted(&rid, turn),
                Effect::Refused { rid, error } => self.turn_refused(&rid, &error),
                Effect::Journal(record) => {
                    self.note(|| format!("journal {record:?}"));
                    self.journal.write(record);
                }
                Effect::Open { incarnation, .. } => {
                    self.note(|| format!("open {incarnation}"));
                    self.call(Task::Open { incarnation });
                }
                Effect::Close(close) => {
                    self.note(|| format!("close {close:?}"));
                    self.check_close(&close);
                    self.close_at_engine(close);
                }
                Effect::Inspect { dp_rank, number, incarnation, rid, is_repeat } => {
                    let request = ShimRequest { dp_rank, number, incarnation, is_demotion: false };
                    self.inspect(request, rid, is_repeat);
                }
                Effect::Demote { dp_rank, number, incarnation } => {
                    let request = ShimRequest { dp_rank, number, incarnation, is_demotion: true };
                    self.send_request(Duration::ZERO, request);
                }
                Effect::AnswerQuestion { question, incarnation, tokens_max } => {
                    self.answer_question(question, incarnation, tokens_max);
                }
                Effect::RunModeKnown { .. } => {}
                Effect::RefusedByShim { rid, error } => self.check_unfit(&rid, &error),
                Effect::Freed(_)
                | Effect::SessionEvent(..)
                | Effect::SessionChanged(_)
                | Effect::VolatilePrefix(..) => {}
            }
        }
        self.schedule_wake();
    }

    fn schedule_wake(&mut self) {
        let now = self.instant();
        let Some(agent) = &mut self.agent else { return };
        let due = agent.table.next_deadline();
        if due != agent.wake {
            agent.wake = due;
            let epoch = agent.epoch;
            if let Some(due) = due {
                let after = due.saturating_duration_since(now).max(Duration::from_millis(1));
                self.schedule(after, Event::AgentWakes(epoch));
            }
        }
    }

    pub(super) fn agent_wakes(&mut self, epoch: u64) {
        if self.is_epoch(epoch) {
            if let Some(agent) = &mut self.agent {
                agent.wake = None;
            }
            self.call_table(|_, _| ());
        }
    }

    /// The agent's follower checks whether the engine is there, whether it is the same process, and
    /// how loaded it is.
    pub(super) fn check_engine(&mut self, epoch: u64) {
        if !self.is_epoch(epoch) {
            return;
        }
        let Some(engine) = &self.engine else {
            self.engine_down();
            return self.schedule(RETRY, Event::CheckEngine(epoch));
        };
        let instance = engine.instance;
        let loads = engine.ranks.iter().map(|rank| {
            let facts = rank.core.facts();
            (facts.waiting as u64, facts.used() as u64)
        });
        let loads = loads.collect();
        if self.agent.as_ref().is_some_and(|agent| agent.instance != Some(instance)) {
            self.engine_up(instance);
        } else if let Some(agent) = &mut self.agent {
            agent.down = false;
        }
        let latency = self.latency();
        self.schedule(latency, Event::Sampled { epoch, instance, loads });
        self.schedule(LOOK, Event::CheckEngine(epoch));
    }

    pub(super) fn sampled(&mut self, epoch: u64, instance: u64, loads: &[(u64, u64)]) {
        let knows = |agent: &AgentProcess| agent.instance == Some(instance);
        if !self.is_epoch(epoch) || !self.agent.as_ref().is_some_and(knows) {
            return;
        }
        for (rank, &(waiting, used_tokens)) in (0..).zip(loads) {
            self.call_table(|table, now| {
                table.handle_load(now, rank, EngineLoad { waiting_requests: waiting, used_tokens })
            });
        }
    }

    /// Handles the agent's finding that no engine process listens.
    pub(super) fn engine_down(&mut self) {
        let Some(agent) = &mut self.agent else { return };
        agent.down = true;
        if agent.instance.take().is_some() {
            self.note(|| "agent finds the engine gone".to_owned());
            let engine = self.plan.engine();
            self.closing.clear();
            self.shim = Shim::default();
            self.call_table(|table, now| {
                table.set_trimming(now, false);
                table.handle_engine_lost(now, engine);
            });
        }
    }

    fn engine_up(&mut self, instance: u64) {
        self.engine_down();
        self.closing.clear();
        self.note(|| format!("agent finds engine {instance}"));
        let (engine, name) = (self.plan.engine(), instance.to_string());
        let demotes = self.plan.demotes;
        let (shim, trims) = (self.plan.shim, self.plan.trims);
        let mut legacy = Legacy {
            open_incarnations: self.journal.left(&name),
            tags: self.journal.tags(&name),
            is_same_engine: self.journal.is_about(&name),
            ..Legacy::default()
        };
        if let Some(Handover { at, sessions }) = self.journal.take_handover() {
            let handed_at = Duration::from_millis(at.unix_ms);
            (legacy.age, legacy.sessions) = (self.now.saturating_sub(handed_at), sessions);
        }
        self.counts.taken_up += legacy.sessions.len() as u64;
        self.journal.write(Record::Engine { instance: name });
        if let Some(agent) = &mut self.agent {
            agent.instance = Some(instance);
            agent.down = false;
        }
        if shim {
            self.shim_connects();
        }
        self.call_table(|table, now| {
            let ranks = engine.ranks.len();
            table.handle_engine_lost(now, engine);
            table.take_over(now, legacy);
            for rank in (0..).take(if shim { ranks } else { 0 }) {
                table.handle_shim_report(now, rank, ShimReport::Up { can_demote: demotes });
            }
            table.set_trimming(now, trims);
        });
        if shim {
            self.report_at_once(true);
            self.report_weights();
        }
    }

    /// Begins a planned restart of the agent: it takes nothing new, and waits until nothing runs.
    pub(super) fn begin_handover(&mut self) {
        let by = self.now + HANDOVER_WAITS;
        let Some(agent) = self.agent.as_mut().filter(|agent| agent.hands_over_by.is_none()) else {
            return;
        };
        (agent.hands_over_by, agent.draining) = (Some(by), true);
        let epoch = agent.epoch;
        self.note(|| format!("agent {epoch} is to hand over"));
        self.call_table(|table, now| table.begin_handover(now));
        self.schedule(Duration::ZERO, Event::HandsOver(epoch));
    }

    /// Hands over if nothing is unsettled, and ends the agent's process.
    pub(super) fn hands_over(&mut self, epoch: u64) {
        if !self.is_epoch(epoch) {
            return;
        }
        let now = self.instant();
        let Some(agent) = &self.agent else { return };
        let waits = agent.table.unfinished().changes > 0;
        if waits && agent.hands_over_by.is_some_and(|by| self.now < by) {
            return self.schedule(Duration::from_millis(20), Event::HandsOver(epoch));
        }
        if !waits {
            let unix_ms = u64::try_from(self.now.as_millis()).expect("a short run");
            let at = Moment { unix_ms, boot: None };
            let handover = Handover { at, sessions: agent.table.hand_over(now) };
            self.note(|| format!("handed over: {handover:?}"));
            self.journal.hand_over(&handover);
        }
        self.agent_ends("hands over");
        if !self.calm && (self.plan.faults.meddler || self.rng.bool()) {
            self.meddle();
        }
    }

    /// Ends the agent's process at once, as kill -9 does.
    pub(super) fn kill_agent(&mut self, why: &str) {
        self.counts.agents_killed += u64::from(self.agent.is_some());
        self.agent_ends(why);
    }

    fn agent_ends(&mut self, why: &str) {
        let Some(agent) = self.agent.take() else { return };
        self.note(|| format!("agent {} ends {why}", agent.epoch));
        self.closing.clear();
        let turns: Vec<u64> = self.turns.keys().copied().collect();
        for turn in turns {
            self.turn_orphaned(turn);
        }
        self.users.iter_mut().for_each(|user| user.opening = None);
        let pause = self.between(50, 3_000);
        self.schedule(pause, Event::AgentStarts);
    }

    /// Removes the waiter of a turn or open that is admitted or refused. Returns false if there is
    /// none.
    pub(super) fn waited(&mut self, rid: &str) -> bool {
        self.agent.as_mut().is_some_and(|agent| agent.waiters.remove(rid))
    }

    fn turn_refused(&mut self, rid: &str, error: &session::Error) {
        self.note(|| format!("{rid} refused: {error}"));
        self.check_share_refusal(rid, error);
        if !self.waited(rid) {
            return;
        }
        let found = self.turns.iter().find(|(_, turn)| turn.rid == rid).map(|(id, _)| *id);
        match found {
            Some(turn) => {
                self.turn(turn).stage = Stage::Over;
                self.reply(turn, Reply::Refused(error.clone()));
            }
            None => self.open_refused(rid),
        }
    }
}
