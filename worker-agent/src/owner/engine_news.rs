//! Handles what the engine monitor and the turns find out about the engine.

use std::time::Instant;

use service::clock::now;
use tracing::{info, warn};

use super::{EngineNews, Owner};
use crate::{
    engine::{EngineInfo, LoadSample, missing::MissingFlag},
    session::{EngineLoad, KvChange},
};

impl Owner {
    /// The table refuses what is not inside a silent engine.
    pub(super) fn check_silence(&mut self, now: Instant) {
        let Self { engine, reporter, table, .. } = self;
        let step_time = |dp_rank, began_at| reporter.ledger.step_time(dp_rank, began_at, table);
        if engine.check_silence(now, step_time) {
            self.reporter.mark_stale();
        }
        if self.table.queue().silent_reason() != self.engine.silent_reason() {
            self.table.set_engine_silent(now, self.engine.silent_reason().cloned());
        }
    }

    pub(super) fn handle_engine_news(&mut self, news: EngineNews) {
        match news {
            EngineNews::Up(info) => self.handle_engine_up(info),
            EngineNews::Sample(sample) => self.handle_engine_sample(sample),
            EngineNews::Adapters(adapters) => {
                if self.engine.set_adapters(adapters) {
                    self.check_adapters();
                    self.publish_description();
                }
            }
            EngineNews::Bootstrap(result) => {
                self.engine.set_bootstrap(result);
                self.reporter.mark_stale();
            }
            EngineNews::Weights { label, asked_at } => self.handle_weights_label(label, asked_at),
            EngineNews::RefusesConnections { process } => {
                if self.engine.is_present(process) {
                    self.set_engine_down("the engine accepts no connections".to_owned(), true);
                }
            }
            EngineNews::Down { reason, has_process_ended } => {
                self.set_engine_down(reason, has_process_ended);
            }
        }
    }

    pub(super) fn set_engine_down(&mut self, reason: String, has_process_ended: bool) {
        self.engine.set_down(reason, has_process_ended);
        if has_process_ended {
            self.handle_engine_gone();
        }
    }

    fn handle_engine_up(&mut self, info: Box<EngineInfo>) {
        if self.engine.is_new_process(&info) {
            self.handle_engine_gone();
            self.shims.begin_process();
            self.set_engine_capacity(&info);
            self.engine_calls.take_over(&mut self.table, &info.facts.instance);
            self.shims.register_again(&mut self.table);
            info!(version = info.facts.version, ranks = info.rows.len(), "engine up");
            for MissingFlag { flag, without } in &info.missing_flags {
                warn!(flag, without, "the engine lacks a flag");
            }
            // A watcher that learns of the new ranks must find them in the newest report.
            self.publish_report(now());
            let abilities = self.shims.abilities(&self.trimmer);
            self.reporter.publish_description(&info, self.offer(&info), abilities);
        }
        let had_adapters = self.engine.info().map(|known| known.facts.adapters.clone());
        let has_changed = had_adapters.as_ref().is_some_and(|had| *had != info.facts.adapters);
        self.engine.set_up(info);
        // The sessions that the last agent process handed over may have KV of any adapter.
        if has_changed || had_adapters.is_none() {
            self.check_adapters();
        }
        if has_changed {
            self.publish_description();
        }
        self.refresh_retentions();
    }

    fn check_adapters(&mut self) {
        let adapters = self.engine.info().and_then(|info| info.facts.adapters.as_deref());
        if let Some(adapters) = adapters {
            self.table.handle_kv_change(now(), KvChange::Adapters(adapters));
        }
    }

    fn handle_engine_sample(&mut self, mut sample: LoadSample) {
        self.control.set_seen_paused(sample.is_paused);
        self.apply_hold();
        // An engine that runs nothing by its operator's wish is neither silent nor stuck.
        sample.is_paused |= self.control.hold_reason().is_some();
        self.engine.check_sample(&sample);
        for rank in &sample.ranks {
            let load = EngineLoad {
                waiting_requests: rank.num_waiting_reqs,
                used_tokens: rank.num_used_tokens,
            };
            self.table.handle_load(sample.at, rank.dp_rank, load);
        }
        self.reporter.ledger.record_sample(sample);
    }

    /// Does nothing if no engine was up.
    pub(super) fn handle_engine_gone(&mut self) {
        let Some(info) = self.engine.remove_process() else { return };
        let sessions = self.table.sessions().iter().count();
        warn!(sessions, "the engine's process has ended; its sessions are lost");
        self.set_engine_capacity(&info);
        self.control.reset();
        self.apply_hold();
    }

    /// Any earlier engine process has ended.
    fn set_engine_capacity(&mut self, info: &EngineInfo) {
        let capacity = self.reporter.ledger.set_engine(info, self.offer(info).offered);
        self.metrics.set_pin_budgets(capacity.ranks.iter().map(|rank| rank.pin_tokens_max));
        self.table.handle_engine_lost(now(), capacity);
    }
}
