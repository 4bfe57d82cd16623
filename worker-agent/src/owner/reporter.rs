//! Publishes the owner task's state to watchers, through which routers learn it.
//!
//! Three things are published: load reports (how full the engine is), the description (facts about
//! the agent and its engine), and each session that has changed. Watchers are the control port,
//! staged prefill and the readiness check. The ledger computes the load reports; this module adds
//! the health, the page audits and the staged-prefill queues to them.

use std::{sync::Arc, time::Instant};

use proto::{
    id::SessionKey,
    load::{Description, Session},
};
use service::clock::now;
use tracing::error;

use super::{Owner, SessionChange};
use crate::{
    engine::EngineInfo,
    ledger::{self, AgentHealth},
    session,
};

impl Owner {
    /// Returns the description of the agent and of the engine `info`.
    pub(super) fn describe(&self, info: &EngineInfo) -> Description {
        Description {
            agent_id: self.setup.agent_id.clone(),
            epoch: self.setup.epoch,
            data_port: self.setup.data_port,
            engine: info.facts.clone(),
            ranks: self.ledger.describe_ranks(now(), &self.setup.gpus.snapshot()),
            retentions: info.retentions(),
            turns_queued_per_session_max: self.setup.table_settings.turns_queued_per_session_max,
            model_files: info.model_files,
            trim_sglang_versions: self.trimmer_version.iter().cloned().collect(),
        }
    }

    /// Sends the session's current state to the watchers.
    pub(super) fn publish_session(&self, key: &SessionKey) {
        if self.session_changes.receiver_count() == 0 {
            return;
        }
        let change = match self.table.get(key) {
            Some(session) => SessionChange::Upsert(Box::new(session_view(key, session, now()))),
            None => SessionChange::Removed(key.clone()),
        };
        let _ = self.session_changes.send(change);
    }

    /// Publishes a new load report, and the description if the ranks' GPUs became known.
    pub(super) fn publish_report(&mut self, now: Instant) {
        let gpus = self.setup.gpus.snapshot();
        let interval = self.setup.report_interval;
        let health = AgentHealth {
            // A failed GPU stops the engine too. So the GPU's reason comes first: it is the cause.
            unhealthy_reason: [&gpus.unhealthy_reason, &self.down_reason, &self.stuck_reason]
                .into_iter()
                .find_map(Clone::clone),
            is_draining: self.drain.is_some(),
            restart_reason: self
                .table
                .restart_required(now)
                .or_else(|| self.audits.restart_reason(now)),
        };
        let mut report = self.ledger.report(now, &self.table, &gpus, interval, health);
        for rank in &mut report.ranks {
            rank.pages =
                self.audits.newest_audit(rank.dp_rank).map(|audit| audit.load_report_pages(now));
            rank.staged_prefill =
                self.setup.staged_prefill_queues.as_ref().map(|queues| queues.load(rank));
        }
        let was_restart_required = self.report_sender.borrow().restart_required.is_some();
        if let (false, Some(reason)) = (was_restart_required, &report.restart_required) {
            error!(reason, "engine restart required");
        }
        self.report_sender.send_replace(Arc::new(report));
        self.last_report_at = now;
        self.is_report_stale = false;
        // The GPUs of the engine may become known after its description was published.
        let ranks = self.ledger.describe_ranks(now, &gpus);
        let published_description = self.description_sender.borrow();
        let is_description_current =
            published_description.as_ref().is_none_or(|description| description.ranks == ranks);
        drop(published_description);
        if !is_description_current {
            self.publish_description();
        }
    }

    /// Publishes the description again, if the engine was reached.
    pub(super) fn publish_description(&self) {
        if let Some(info) = &self.engine_info {
            self.description_sender.send_replace(Some(Arc::new(self.describe(info))));
        }
    }
}

/// Returns the public view of a session.
pub(super) fn session_view(key: &SessionKey, session: &session::Session, now: Instant) -> Session {
    Session {
        key: key.clone(),
        retention: session.retention,
        state: session.state(),
        dp_rank: session.dp_rank,
        turns: session.turns_finished,
        turns_running: session.turns_running,
        exclusive: session.is_exclusive,
        full_history: session.sends_full_histories(),
        volatile_prefix: session.volatile_prefix(),
        resident_tokens: ledger::resident_figure(session),
        idle: session.idle(now),
    }
}
