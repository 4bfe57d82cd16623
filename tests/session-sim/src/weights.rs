//! Which KV turns continue: none of older weights, and none of another cache salt.
//!
//! The agent holds its turns back while the engine changes the weights, as its control routes do.
//! The engine changes them when nothing runs in it. It tells the agent before it runs a turn that
//! came meanwhile. An agent that dies takes its call with it.

use std::{collections::BTreeMap, time::Duration};

use worker_agent::session::{Error, KvChange, KvIdentity, WeightsReport};

use super::{
    engine::{Rank, TurnId},
    turns::Reply,
    world::{Event, World},
};
use engine_sim::request::Finish;

/// How long the engine waits between two looks whether anything runs in it.
const LOOK: Duration = Duration::from_millis(20);
/// How often it looks before it gives up.
const LOOKS_MAX: u32 = 200;

/// Which KV the engine has, by the weights that computed it.
#[derive(Debug, Default)]
pub(super) struct KvAges {
    /// How often the weights have changed.
    changes: u64,
    /// The oldest weights of any KV since the last flush.
    oldest: Option<u64>,
    /// The oldest weights of the KV in each incarnation.
    by_incarnation: BTreeMap<String, u64>,
}

/// The cache salt of a turn; 0 for none.
pub(super) type SaltNumber = u8;

/// Which KV a turn wants, and what it got.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TurnKv {
    pub(super) salt: SaltNumber,
    /// Whether the turn runs in a session whose KV is of older weights.
    continues_old: bool,
    /// Whether the turn runs in a session whose KV is of another salt.
    continues_other: bool,
}

impl TurnKv {
    /// Returns what the data port reads from the body.
    pub(super) fn identity(self) -> KvIdentity {
        let salt = self.salt.to_string();
        KvIdentity::new(None, Some(&*salt).filter(|_| self.salt > 0), None)
    }
}

impl KvAges {
    /// Forgets all KV, which the engine has freed.
    pub(super) fn clear(&mut self) {
        self.oldest = None;
        self.by_incarnation.clear();
    }

    fn is_any_outdated(&self) -> bool {
        self.oldest.is_some_and(|oldest| oldest < self.changes)
    }

    /// Notes that a turn enters the scheduler. Returns whether it continues KV of older weights.
    fn enter(&mut self, incarnation: Option<&str>) -> bool {
        let oldest = *self.oldest.get_or_insert(self.changes);
        let Some(incarnation) = incarnation else { return false };
        *self.by_incarnation.entry(incarnation.to_owned()).or_insert(oldest) < self.changes
    }
}

impl World {
    /// The agent is asked to change the weights, or to flush the cache.
    pub(super) fn control_engine(&mut self) {
        let Some(agent) = self.agent.as_ref().filter(|agent| agent.follows()) else { return };
        let is_same = self.engine.as_ref().map(|engine| engine.instance) == agent.instance;
        if agent.draining || !is_same || agent.table.queue().hold_reason().is_some() {
            return;
        }
        let (epoch, instance) = (agent.epoch, self.instances);
        let changes_weights = self.rng.bool();
        // Without a shim, an agent that was killed can't know whether the cache is outdated.
        let flushes = !changes_weights || !self.plan.shim || self.rng.bool();
        self.note(|| format!("control: weights {changes_weights}, flush {flushes}"));
        if changes_weights {
            let reason = Some("its weights are being changed".to_owned());
            self.call_table(|table, now| table.set_hold(now, reason));
        }
        let latency = self.between(0, 30);
        let control = Control { epoch, instance, changes_weights, flushes, looks: 0 };
        self.schedule(latency, Event::Controlled(control));
    }

    /// Changes the weights, or flushes, as soon as nothing runs in the engine.
    pub(super) fn controlled(&mut self, control: Control) {
        let Control { epoch, instance, changes_weights, flushes, looks } = control;
        if !self.is_epoch(epoch) {
            return;
        }
        let engine = self.engine.as_mut().filter(|engine| engine.instance == instance);
        let is_quiet = engine.as_ref().is_some_and(|e| e.ranks.iter().all(Rank::is_quiet));
        match engine {
            Some(engine) if is_quiet => {
                let ranks = engine.ranks.iter_mut();
                let freed = ranks.filter(|_| flushes).map(|rank| rank.core.flush());
                let freed = flushes & freed.fold(true, |all, done| all & done);
                if freed {
                    self.kv_ages.clear();
                }
                self.kv_ages.changes += u64::from(changes_weights);
                self.counts.weights_changed += u64::from(changes_weights);
                self.note(|| format!("engine: weights {changes_weights}, flushed {freed}"));
                self.call_table(|table, now| match changes_weights {
                    true => table.handle_kv_change(
                        now,
                        KvChange::Weights { is_counted: true, was_flushed: freed },
                    ),
                    false if freed => table.handle_kv_change(now, KvChange::Flushed),
                    false => {}
                });
            }
            Some(_) if looks < LOOKS_MAX => {
                let control = Control { looks: looks + 1, ..control };
                return self.schedule(LOOK, Event::Controlled(control));
            }
            Some(_) | None => {}
        }
        self.held_until = self.now;
        self.call_table(|table, now| table.set_hold(now, None));
    }

    /// The shim tells a new agent what it knows of the weights.
    pub(super) fn report_weights(&mut self) {
        let KvAges { changes, .. } = self.kv_ages;
        let report = WeightsReport { changes, has_old_kv: self.kv_ages.is_any_outdated() };
        self.call_table(|table, now| {
            table.handle_kv_change(now, KvChange::WeightsCounted { report, is_changing: false })
        });
    }

    /// Chooses the salt of a client's turn: usually its own.
    pub(super) fn choose_kv(&mut self, user: usize) -> TurnKv {
        let is_own = self.rng.u32(..16) > 0;
        let salt = u8::from(user.is_multiple_of(2) != is_own);
        TurnKv { salt, ..TurnKv::default() }
    }

    /// Notes which KV a turn that enters the scheduler continues.
    pub(super) fn record_kv_age(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        let incarnation = turn.incarnation().filter(|_| turn.is_pinned()).map(str::to_owned);
        let salt = turn.kv.salt;
        let continues_other =
            incarnation.as_ref().is_some_and(|own| self.trimmer.is_other(own, salt));
        let continues_old = self.kv_ages.enter(incarnation.as_deref());
        self.turn(id).kv = TurnKv { salt, continues_old, continues_other };
    }

    /// Returns the agent's refusal of a turn during which the weights have changed.
    pub(super) fn weights_refusal(&self, id: TurnId) -> Option<Error> {
        let turn = &self.turns[&id];
        let admitted_at = turn.admitted.as_ref()?.weights_epoch;
        let now_at = self.agent.as_ref()?.table.weights_epoch();
        (turn.is_pinned() && admitted_at != now_at).then_some(Error::WeightsChanged)
    }

    /// Returns what the client of an answered turn hears. An answer must not continue KV of older
    /// weights.
    pub(super) fn reply_to(
        &self,
        id: TurnId,
        finish: Option<Finish>,
        refusal: Option<Error>,
    ) -> Reply {
        match (refusal, finish) {
            (Some(error), _) => Reply::Refused(error),
            (None, Some(Finish::Abort { message, .. })) => Reply::Engine(message),
            (None, _) => {
                let turn = &self.turns[&id];
                assert!(!turn.kv.continues_old, "{} continues KV of older weights", turn.rid);
                assert!(!turn.kv.continues_other, "{} continues KV of another salt", turn.rid);
                Reply::Answer
            }
        }
    }
}

/// A call that changes the engine's weights or flushes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Control {
    epoch: u64,
    instance: u64,
    changes_weights: bool,
    flushes: bool,
    looks: u32,
}
