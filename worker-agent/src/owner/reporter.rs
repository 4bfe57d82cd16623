//! Publishes the owner task's state to watchers, through which routers learn it.
//!
//! To the ledger's load reports, this module adds the GPUs' health, the page audits and the
//! staged-prefill queues.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    load::{Description, FunctionOff, LoadReport, Session},
};
use service::{
    clock::{WallClock, now},
    supervisor::Watchdog,
};
use tokio::sync::{broadcast, mpsc, watch};
use tracing::error;

use super::{
    AgentHandle, SessionChange, SessionWatch,
    engine_control::PublishedWeights,
    handle::{OwnerMessage, TurnEnd},
    published::{PublishedSession, SessionSnapshot},
    turn_gate::OpenGate,
};
use crate::{
    audit::Audits,
    config::announce::Advertised,
    engine::{EngineInfo, answer_signs::AnswerSigns, retentions::Offer},
    gpu::Gpus,
    ledger::{self, AgentHealth, Ledger},
    metrics::Metrics,
    session::{self, ShareFigures, Table},
    staged_prefill_queue::StagedPrefillQueues,
};

/// A slower watcher must subscribe again.
const SESSION_CHANGES_BEHIND_MAX: usize = 8192;
/// A burst of turns then produces one report.
const REPORT_INTERVAL_MIN: Duration = Duration::from_millis(20);

pub(super) struct ShimAbilities {
    /// `None` if the agent doesn't trim full histories.
    pub trim_sglang_version: Option<String>,
    /// Sorted.
    pub functions_off: Vec<FunctionOff>,
}

#[derive(Debug)]
pub struct ReporterSetup {
    pub agent_id: String,
    /// The process's start time, which differs between processes.
    pub epoch: u64,
    /// The addresses that routers see.
    pub advertised: Advertised,
    pub data_tls: bool,
    /// `None` if staged prefill is off.
    pub staged_prefill_queues: Option<Arc<StagedPrefillQueues>>,
    pub report_interval: Duration,
    /// Is fed with each load report: without reports the agent is of no use.
    pub watchdog: Watchdog,
}

pub(super) struct Reporter {
    setup: ReporterSetup,
    turns_queued_per_session_max: u32,
    gpus: Gpus,
    metrics: Metrics,
    pub(super) ledger: Ledger,
    reports: watch::Sender<Arc<LoadReport>>,
    descriptions: watch::Sender<Option<Arc<Description>>>,
    session_changes: broadcast::Sender<SessionChange>,
    sessions: SessionSnapshot,
    is_stale: bool,
    last_report_at: Instant,
    wall_clock: WallClock,
}

impl Reporter {
    /// The first load report has this `unhealthy_reason`.
    pub(super) fn new(
        setup: ReporterSetup,
        turns_queued_per_session_max: u32,
        gpus: Gpus,
        metrics: Metrics,
        ledger: Ledger,
        unhealthy_reason: Option<String>,
    ) -> Self {
        let first_report = LoadReport {
            interval: setup.report_interval,
            unhealthy: unhealthy_reason,
            // Until the engine is reached, no ranks are known.
            ..LoadReport::default()
        };
        Self {
            setup,
            turns_queued_per_session_max,
            gpus,
            metrics,
            ledger,
            reports: watch::Sender::new(Arc::new(first_report)),
            descriptions: watch::Sender::new(None),
            session_changes: broadcast::Sender::new(SESSION_CHANGES_BEHIND_MAX),
            sessions: SessionSnapshot::default(),
            is_stale: true,
            last_report_at: now(),
            wall_clock: WallClock::read(),
        }
    }

    pub(super) fn session_view(&self, key: &SessionKey, session: &session::Session) -> Session {
        session_view(key, session, now(), self.wall_clock)
    }

    pub(super) fn agent_id(&self) -> &str {
        &self.setup.agent_id
    }

    pub(super) fn agent_handle(
        &self,
        mailbox: mpsc::Sender<OwnerMessage>,
        turn_ends: mpsc::Sender<TurnEnd>,
        turn_gate: watch::Receiver<OpenGate>,
        weights: watch::Receiver<PublishedWeights>,
        answer_signs: AnswerSigns,
    ) -> AgentHandle {
        let (report, description) = (self.reports.subscribe(), self.descriptions.subscribe());
        AgentHandle { mailbox, turn_ends, turn_gate, report, description, weights, answer_signs }
    }

    pub(super) fn mark_stale(&mut self) {
        self.is_stale = true;
    }

    pub(super) fn next_due(&self) -> Instant {
        let interval = if self.is_stale { REPORT_INTERVAL_MIN } else { self.setup.report_interval };
        let due = self.last_report_at + interval;
        self.setup.watchdog.next_due().map_or(due, |watchdog_due| due.min(watchdog_due))
    }

    /// `health` leaves out the health of the GPUs.
    pub(super) fn publish_report(
        &mut self,
        now: Instant,
        table: &Table,
        audits: &Audits,
        mut health: AgentHealth,
    ) {
        let gpus = self.gpus.snapshot();
        // A failed GPU stops the engine too, so the GPU is the cause.
        health.unhealthy_reason = gpus.unhealthy_reason.clone().or(health.unhealthy_reason);
        let queues = self.setup.staged_prefill_queues.as_ref().filter(|_| health.runs_whole_turns);
        let mut report = self.ledger.report(now, table, &gpus, self.setup.report_interval, health);
        for rank in &mut report.ranks {
            rank.pages =
                audits.newest_audit(rank.dp_rank).map(|audit| audit.load_report_pages(now));
            rank.staged_prefill = queues.map(|queues| queues.load(rank));
        }
        let was_restart_required = self.reports.borrow().restart_required.is_some();
        if let (false, Some(reason)) = (was_restart_required, &report.restart_required) {
            error!(reason, "engine restart required");
        }
        self.reports.send_replace(Arc::new(report));
        let ShareFigures { principals, sessions_max, pinned_rows_max } =
            table.sessions().share_figures();
        self.metrics.set_shares(principals, sessions_max, pinned_rows_max);
        self.last_report_at = now;
        self.setup.watchdog.feed(now);
        self.is_stale = false;
    }

    /// GPUs may become known, and shims may connect, after the description was published.
    pub(super) fn is_description_current(&self, now: Instant, shim: &ShimAbilities) -> bool {
        let ranks = self.ledger.describe_ranks(now, &self.gpus.snapshot());
        let published_description = self.descriptions.borrow();
        published_description.as_ref().is_none_or(|description| {
            description.ranks == ranks && description.shim_functions_off == shim.functions_off
        })
    }

    pub(super) fn publish_description(&self, info: &EngineInfo, offer: Offer, shim: ShimAbilities) {
        let description = Description {
            agent_id: self.setup.agent_id.clone(),
            epoch: self.setup.epoch,
            data_port: self.setup.advertised.data_port,
            data_address: self.setup.advertised.data_address.clone(),
            control_url: self.setup.advertised.control_url.clone(),
            data_tls: self.setup.data_tls,
            engine: info.facts.clone(),
            ranks: self.ledger.describe_ranks(now(), &self.gpus.snapshot()),
            retentions: offer.offered,
            retentions_off: offer.refused,
            turns_queued_per_session_max: self.turns_queued_per_session_max,
            model_files: info.model_files,
            trim_sglang_versions: shim.trim_sglang_version.into_iter().collect(),
            shim_functions_off: shim.functions_off,
        };
        self.descriptions.send_replace(Some(Arc::new(description)));
    }

    pub(super) fn publish_session(&mut self, table: &Table, key: &SessionKey) {
        let now = now();
        let published = table.sessions().get(key).map(|session| {
            let session = session_view(key, session, now, self.wall_clock);
            Arc::new(PublishedSession::new(session, now))
        });
        let (before, change) = match &published {
            Some(session) => {
                (self.sessions.insert(Arc::clone(session)), SessionChange::Upsert(session.clone()))
            }
            None => (self.sessions.remove(key), SessionChange::Removed(key.clone())),
        };
        let before = before.as_deref().map(PublishedSession::session);
        let after = published.as_deref().map(PublishedSession::session);
        self.metrics.record_session_change(before, after);
        // Fails if there is no watcher.
        let _ = self.session_changes.send(change);
    }

    pub(super) fn watch_sessions(&self) -> SessionWatch {
        let sessions = self.sessions.clone();
        SessionWatch { sessions, changes: self.session_changes.subscribe() }
    }
}

fn session_view(
    key: &SessionKey,
    session: &session::Session,
    now: Instant,
    wall_clock: WallClock,
) -> Session {
    Session {
        key: key.clone(),
        retention: session.retention(),
        state: session.state(),
        dp_rank: session.dp_rank,
        turns: session.turns_finished(),
        turns_running: session.turns_running(),
        exclusive: session.is_exclusive(),
        full_history: session.sends_full_histories(),
        volatile_prefix: session.volatile_prefix(),
        resident_tokens: ledger::resident_figure(session),
        idle: session.idle(now),
        began_unix_ms: wall_clock.unix_ms(session.began()),
        parent: session.parent(),
    }
}
