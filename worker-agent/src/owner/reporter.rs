//! Publishes the owner task's state to watchers, through which routers learn it.
//!
//! Three things are published: load reports (how full the engine is), the description (facts about
//! the agent and its engine), and each session that has changed. Watchers are the control port,
//! staged prefill and the readiness check. The ledger computes the load reports; this module adds
//! the GPUs' health, the page audits and the staged-prefill queues to them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{
    id::SessionKey,
    load::{Description, FunctionOff, LoadReport, Session, Weights},
};
use service::{
    clock::{WallClock, now},
    supervisor::Watchdog,
};
use tokio::sync::{broadcast, mpsc, watch};
use tracing::error;

use super::{
    AgentHandle, SessionChange, SessionWatch,
    handle::{OwnerMessage, TurnEnd},
    published::{PublishedSession, SessionSnapshot},
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

/// The maximum number of session changes that a watcher may lag behind. A slower watcher must
/// subscribe again.
const SESSION_CHANGES_BEHIND_MAX: usize = 8192;
/// The shortest time between two load reports. A burst of turns then produces one report.
const REPORT_INTERVAL_MIN: Duration = Duration::from_millis(20);

/// What the engine's shims can do, and what they can't.
pub(super) struct ShimAbilities {
    /// The SGLang version on which the agent trims full histories, if it does.
    pub trim_sglang_version: Option<String>,
    /// The functions that are off, in order, and why.
    pub functions_off: Vec<FunctionOff>,
}

/// What reports and descriptions say of the agent itself.
#[derive(Debug)]
pub struct ReporterSetup {
    /// The name of the agent.
    pub agent_id: String,
    /// The epoch of this agent process: the time at which it started. It differs between processes.
    pub epoch: u64,
    /// The addresses of the ports as routers see them.
    pub advertised: Advertised,
    /// Whether the data port speaks TLS.
    pub data_tls: bool,
    /// The queues of staged prefill, which computes long prompts ahead of their turns. `None` if
    /// staged prefill is off.
    pub staged_prefill_queues: Option<Arc<StagedPrefillQueues>>,
    /// The longest time between two load reports.
    pub report_interval: Duration,
    /// Is fed with each load report, as routers are: without reports the agent is of no use.
    pub watchdog: Watchdog,
}

/// The published state, and the figures from which it is made.
pub(super) struct Reporter {
    setup: ReporterSetup,
    /// The setting of the session table that the description shows.
    turns_queued_per_session_max: u32,
    gpus: Gpus,
    metrics: Metrics,
    /// The figures of the engine's KV pools.
    pub(super) ledger: Ledger,
    reports: watch::Sender<Arc<LoadReport>>,
    descriptions: watch::Sender<Option<Arc<Description>>>,
    /// Sends changed sessions to the watchers.
    session_changes: broadcast::Sender<SessionChange>,
    /// All sessions as they were last published.
    sessions: SessionSnapshot,
    /// Whether something may have changed since the last load report.
    is_stale: bool,
    last_report_at: Instant,
    /// Tells when sessions began.
    wall_clock: WallClock,
}

impl Reporter {
    /// Returns a reporter without a description. The first load report says that the engine is
    /// unhealthy for this reason.
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
            // Until the engine is reached, no ranks are known.
            ranks: vec![],
            unhealthy: unhealthy_reason,
            draining: false,
            restart_required: None,
            held: None,
            weights: Weights::default(),
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

    /// Returns the public view of a session.
    pub(super) fn session_view(&self, key: &SessionKey, session: &session::Session) -> Session {
        session_view(key, session, now(), self.wall_clock)
    }

    /// Returns the agent's id.
    pub(super) fn agent_id(&self) -> &str {
        &self.setup.agent_id
    }

    /// Returns the handle of the owner task, with receivers of what is published.
    pub(super) fn agent_handle(
        &self,
        mailbox: mpsc::Sender<OwnerMessage>,
        turn_ends: mpsc::Sender<TurnEnd>,
        weights: watch::Receiver<Weights>,
        answer_signs: AnswerSigns,
    ) -> AgentHandle {
        let (report, description) = (self.reports.subscribe(), self.descriptions.subscribe());
        AgentHandle { mailbox, turn_ends, report, description, weights, answer_signs }
    }

    /// Notes that something may have changed since the last load report.
    pub(super) fn mark_stale(&mut self) {
        self.is_stale = true;
    }

    /// Returns when the next load report is due.
    pub(super) fn next_due(&self) -> Instant {
        let interval = if self.is_stale { REPORT_INTERVAL_MIN } else { self.setup.report_interval };
        let due = self.last_report_at + interval;
        self.setup.watchdog.next_due().map_or(due, |watchdog_due| due.min(watchdog_due))
    }

    /// Publishes a new load report. `health` leaves out the health of the GPUs.
    pub(super) fn publish_report(
        &mut self,
        now: Instant,
        table: &Table,
        audits: &Audits,
        mut health: AgentHealth,
    ) {
        let gpus = self.gpus.snapshot();
        // A failed GPU stops the engine too. So the GPU's reason comes first: it is the cause.
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
        let ShareFigures { principals, sessions_max, pinned_rows_max } = table.share_figures();
        self.metrics.set_shares(principals, sessions_max, pinned_rows_max);
        self.last_report_at = now;
        self.setup.watchdog.feed(now);
        self.is_stale = false;
    }

    /// Whether the published description shows the ranks and the shims as they are. The GPUs of the
    /// engine may become known, and its shims may connect, after its description was published.
    pub(super) fn is_description_current(&self, now: Instant, shim: &ShimAbilities) -> bool {
        let ranks = self.ledger.describe_ranks(now, &self.gpus.snapshot());
        let published_description = self.descriptions.borrow();
        published_description.as_ref().is_none_or(|description| {
            description.ranks == ranks && description.shim_functions_off == shim.functions_off
        })
    }

    /// Publishes the description of the agent, of the engine `info` with what it offers, and of its
    /// shims.
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

    /// Publishes the session's current state, sends it to the watchers, and counts the change.
    pub(super) fn publish_session(&mut self, table: &Table, key: &SessionKey) {
        let now = now();
        let published = table.get(key).map(|session| {
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
        // Sending fails if there is no watcher.
        let _ = self.session_changes.send(change);
    }

    /// Returns the current sessions, and a receiver of their later changes.
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
