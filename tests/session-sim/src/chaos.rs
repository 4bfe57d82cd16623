//! The faults: killed processes, a slow engine, and foreign users of the engine.

use std::time::Duration;

use contract::id::SessionKey;

use super::{
    calls::CallAnswer,
    engine::{Command, Rank},
    shell::{AgentProcess, prefix},
    trimmer::Trimmer,
    world::{EngineProcess, Event, World},
};
use engine_sim::{
    core::PoolFacts,
    request::{Sampling, SessionParams, SessionRef, Submit},
};

impl World {
    pub(super) fn engine_starts(&mut self) {
        if self.engine.is_some() {
            return;
        }
        self.instances += 1;
        let instance = self.instances;
        let rank = |_| Rank::new(&self.plan.core, self.now);
        let ranks = (0..self.plan.ranks).map(rank).collect();
        self.engine = Some(EngineProcess { instance, ranks });
        self.trimmer = Trimmer::default();
        self.note(|| format!("engine {instance} starts"));
    }

    pub(super) fn kill_engine(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        self.counts.engines_killed += 1;
        self.note(|| format!("engine {} is killed", engine.instance));
        for call in engine.ranks.iter().flat_map(Rank::unanswered) {
            let latency = self.latency();
            self.schedule(latency, Event::CallAnswered(call, CallAnswer::Lost));
        }
        let turns: Vec<u64> = self.turns.keys().copied().collect();
        for turn in turns {
            self.turn_cut_off(turn);
        }
        self.strangers.clear();
        self.meddled.clear();
        self.closing.clear();
        self.kv_ages.clear();
        let down = self.between(1_500, 6_000);
        self.schedule(down, Event::EngineStarts);
    }

    pub(super) fn fault(&mut self) {
        if self.calm {
            return;
        }
        let pause = self.between(200, 1_500);
        self.schedule(pause, Event::Fault);
        let faults = self.plan.faults.clone();
        match self.rng.u32(..16) {
            0 if faults.agent_killed => self.kill_agent("by its host"),
            1 if faults.engine_killed && self.rng.bool() => self.kill_engine(),
            2 | 3 if faults.engine_slow => {
                let sleep = if self.rng.bool() { 0 } else { self.rng.u64(10..400) };
                self.slow_down(Duration::from_millis(sleep));
            }
            4..=6 if faults.strangers => self.stranger_comes(),
            7..=9 if faults.meddler => self.meddle(),
            10 | 11 if faults.controls => self.control_engine(),
            12..=15 if faults.agent_restarted => self.begin_handover(),
            _ => {}
        }
        if faults.demotions {
            self.operator_demotes();
        }
        if faults.prefetches {
            self.client_prefetches();
        }
    }

    /// A client has the KV of one of its sessions loaded. No turn and no session loses KV by it.
    fn client_prefetches(&mut self) {
        let Some((key, agent)) = self.random_session() else { return };
        let Ok(Some((rank, incarnation))) = agent.table.sessions().prefetch_target(&key) else {
            return;
        };
        let incarnation = incarnation.to_owned();
        let Some(engine) = &mut self.engine else { return };
        let core = &mut engine.ranks[rank as usize].core;
        let held = |facts: &PoolFacts| {
            (facts.running, facts.protected + facts.session_held + facts.uncached, facts.held_rows)
        };
        let (before, room) = (core.facts(), core.facts().total / 2);
        let loaded = core.prefetch(&incarnation, room);
        core.check_invariants();
        let after = core.facts();
        assert_eq!(held(&before), held(&after), "a load of {incarnation} took KV from others");
        self.counts.prefetched_tokens += loaded.unwrap_or(0) as u64;
        self.note(|| format!("a client prefetches {incarnation}: {loaded:?}"));
    }

    /// Returns a session of an agent that takes calls.
    fn random_session(&mut self) -> Option<(SessionKey, &AgentProcess)> {
        let agent = self.agent.as_ref().filter(|agent| !agent.down && !agent.draining)?;
        let keys: Vec<SessionKey> =
            agent.table.sessions().iter().map(|(key, _)| key.clone()).collect();
        Some((self.rng.choice(&keys).cloned()?, agent))
    }

    /// An operator demotes one of the agent's sessions, or tries to.
    fn operator_demotes(&mut self) {
        let Some((key, _)) = self.random_session() else { return };
        let result = self.call_table(|table, now| table.demote_session(now, &key));
        self.note(|| format!("an operator demotes {}: {result:?}", key.id()));
    }

    fn slow_down(&mut self, sleep: Duration) {
        self.note(|| format!("every pass takes {sleep:?} longer"));
        if let Some(engine) = &mut self.engine {
            engine.ranks.iter_mut().for_each(|rank| rank.core.slow_down(sleep));
        }
    }

    pub(super) fn becomes_calm(&mut self) {
        self.note(|| "clients stop".to_owned());
        self.calm = true;
        self.slow_down(Duration::ZERO);
        if self.plan.drains
            && let Some(agent) = &mut self.agent
        {
            agent.draining = true;
            self.call_table(|table, now| table.drain(now));
        }
    }

    /// Returns a rank where nothing runs or waits at this moment.
    fn quiet_rank(&mut self) -> Option<usize> {
        let rank = self.rng.usize(..self.plan.ranks as usize);
        let engine = self.engine.as_ref()?;
        engine.ranks[rank].is_quiet().then_some(rank)
    }

    /// Whether the rank has no sessions of an earlier agent. The amount that they hold is unknown.
    fn knows_all(&self, rank: usize) -> bool {
        let own = self.agent.as_ref().map(|agent| prefix(agent.epoch));
        let (Some(own), Some(engine)) = (own, &self.engine) else { return false };
        let facts = engine.ranks[rank].core.facts();
        let table = self.agent.iter().map(|agent| &agent.table);
        let taken_up = |id: &str| table.clone().any(|table| table.sessions().key_of(id).is_some());
        let known = |id: &str| id.starts_with(&own) || !id.starts_with("berth-") || taken_up(id);
        facts.sessions.iter().all(|session| known(&session.id))
    }

    /// Opens a foreign session ("stranger") in the engine, if the capacity that is left allows it.
    fn stranger_comes(&mut self) {
        let Some(rank) = self.quiet_rank() else { return };
        let number = u32::try_from(rank).expect("few ranks");
        let (agent, engine) = (self.agent.as_ref(), self.engine.as_ref());
        let (Some(agent), Some(engine)) = (agent, engine) else { return };
        if !self.plan.shim || agent.instance != Some(engine.instance) || !self.knows_all(rank) {
            return;
        }
        let totals = agent.table.totals(number);
        let capacity = self.plan.engine().ranks[rank];
        let tokens = self.rng.usize(1..80);
        let held = tokens.next_multiple_of(self.plan.core.page_size) as u64;
        let rows = totals.rows_held + 1 + self.plan.rows_reserve <= capacity.rows;
        if !rows || totals.pinned_tokens + held > capacity.pin_tokens_max {
            return;
        }
        let id = format!("stranger-{}", self.number());
        self.note(|| format!("{id} comes with {tokens} tokens"));
        let now = self.now;
        let ids = (0..tokens).map(|_| 7).collect();
        let Some(engine) = &mut self.engine else { return };
        let instance = engine.instance;
        for rank in &mut engine.ranks {
            rank.core.open(now, &id, true, None);
        }
        self.run_at_once(rank, &id, ids);
        self.strangers.insert(id.clone());
        let stays = self.between(500, 6_000);
        self.schedule(stays, Event::StrangerLeaves { instance, id });
        self.report_at_once(false);
    }

    pub(super) fn stranger_leaves(&mut self, instance: u64, id: &str) {
        if !self.is_instance(instance) {
            return;
        }
        self.note(|| format!("{id} leaves"));
        self.push_all(|_| Command::Close(id.to_owned()));
        self.strangers.remove(id);
    }

    /// Runs a foreign turn ("meddler") in one of the agent's sessions.
    pub(super) fn meddle(&mut self) {
        let Some(rank) = self.quiet_rank() else { return };
        let Some(engine) = &self.engine else { return };
        let facts = engine.ranks[rank].core.facts();
        let ours = facts.sessions.iter().filter(|session| {
            session.id.starts_with("berth-") && session.row.is_some() && !session.closing
        });
        let ids: Vec<String> = ours.map(|session| session.id.clone()).collect();
        let busy = |id: &String| {
            let mut turns = self.turns.values().filter(|turn| !turn.is_over());
            turns.any(|turn| turn.incarnation() == Some(id))
        };
        let ids: Vec<String> = ids.into_iter().filter(|id| !busy(id)).collect();
        let room = facts.available > 32 && facts.free_rows > 0;
        let Some(id) = self.rng.choice(&ids).cloned().filter(|_| room) else { return };
        self.note(|| format!("a meddler runs a turn in {id}"));
        self.run_at_once(rank, &id, vec![3, 4, 5]);
        self.trimmer.lose(&id);
        // An agent that finds the engine after this has to notice before it sends a turn.
        let instance = self.engine.as_ref().map(|engine| engine.instance);
        let is_watched = self.agent.as_ref().is_some_and(|agent| agent.instance == instance);
        self.meddled.insert(id, u32::from(!is_watched));
    }

    /// Runs a turn of one token in a session, on a rank where nothing else runs.
    fn run_at_once(&mut self, rank: usize, id: &str, input_ids: Vec<u32>) {
        let params = SessionParams { id: id.to_owned(), ..SessionParams::default() };
        let rid = format!("x{:08}", self.number());
        let submit = Submit {
            rid: rid.clone(),
            input_ids,
            sampling: Sampling { max_new_tokens: Some(1), ..Sampling::default() },
            session: SessionRef::Controller(params),
            ..Submit::default()
        };
        let now = self.now;
        let Some(engine) = &mut self.engine else { return };
        let core = &mut engine.ranks[rank].core;
        core.submit(now, submit);
        while core.step(now).is_some() {}
        // A turn that didn't fit is removed without a trace.
        core.abort(&rid, false);
    }
}
