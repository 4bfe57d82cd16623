//! Defines the agent's Prometheus metrics and the functions that update them.
//!
//! The metrics are about turns (one request and its answer), sessions (chains of turns), audits of
//! KV pages, and the figures of the load report. All have base units, and labels with few values.
//! The owner task, the data port and staged prefill call the functions; the admin port serves the
//! values. Metrics of GPUs and of KV events are in `gpu::metrics` and `kv_events::metrics`. The
//! child `load` has those of the load report, which `readiness` follows.

mod load;
pub(crate) mod readiness;

use std::{sync::atomic::AtomicU64, time::Duration};

use kernels::report::FaultKind;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use proto::load::{LoadReport, PageAudit, PageClasses, Session};
use service::{histogram, refusal::Code};

use self::load::LoadGauges;

/// Creates a histogram with buckets from 1 ms to 65 s, each twice the previous. The times of
/// prefills lie in that range.
fn seconds_histogram() -> Histogram {
    histogram::create((0..17).map(|step| 0.001 * f64::from(1 << step)))
}

/// Clones share the same values.
#[derive(Debug, Clone)]
pub struct Metrics {
    turns_ended: Family<OutcomeLabel, Counter>,
    refusals: Family<CodeLabel, Counter>,
    first_byte_seconds: Histogram,
    close_seconds: Histogram,
    turn_seconds: Histogram,
    queue_seconds: Histogram,
    load: LoadGauges,
    kv_physical_usage: Family<RankLabel, Gauge<f64, AtomicU64>>,
    pin_budget_tokens: Family<RankLabel, Gauge>,
    sessions: Family<SessionLabel, Gauge>,
    sessions_begun: Family<RetentionLabel, Counter>,
    sessions_ended: Family<RetentionLabel, Counter>,
    engine_up: Gauge,
    restart_required: Gauge,
    session_events: Family<EventLabel, Counter>,
    pool_pages: Family<StateLabel, Gauge>,
    page_faults: Family<FaultLabel, Gauge>,
    audits: Family<OutcomeLabel, Counter>,
    audit_seconds: Histogram,
    trim_turns: Family<PlanLabel, Counter>,
    /// Leading tokens that a diverged full history shares with its session.
    divergence_tokens: Histogram,
    /// Tokens of full histories that the engine didn't compute, as their sessions held them.
    spared_tokens: Counter,
    session_turns: Family<KindLabel, Counter>,
    sessions_left_out: Family<CodeLabel, Counter>,
    staged_prefill_stages: Family<OutcomeLabel, Counter>,
    staged_prefill_tokens: Counter,
    volatile_prefixes: Family<RoleLabel, Counter>,
    journal_failures: Counter,
    journal_behind: Gauge,
    principals: Gauge,
    principal_sessions_max: Gauge,
    principal_pinned_rows_max: Gauge,
}

/// The result of one stage of staged prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageOutcome {
    /// The engine computed the stage.
    Computed,
    /// The engine computed the stage, but earlier stages of the prompt had been evicted by then.
    Evicted,
    /// The engine refused the stage or didn't answer.
    Failed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    dp_rank: u32,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabel {
    dp_rank: u32,
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabel {
    event: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlanLabel {
    plan: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabel {
    role: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RankLabel {
    dp_rank: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SessionLabel {
    dp_rank: u32,
    retention: &'static str,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RetentionLabel {
    retention: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

impl From<&Session> for SessionLabel {
    fn from(session: &Session) -> Self {
        Self {
            dp_rank: session.dp_rank,
            retention: session.retention.as_str(),
            state: session.state.as_str(),
        }
    }
}

impl Metrics {
    /// Creates all metrics and registers them in `registry`.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            turns_ended: Family::default(),
            refusals: Family::default(),
            first_byte_seconds: seconds_histogram(),
            // From 0.5 ms to 5.6 s, each bucket 1.5 times the previous. Most closes take a few
            // milliseconds.
            close_seconds: histogram::create((0..24).map(|step| 0.000_5 * 1.5_f64.powi(step))),
            turn_seconds: seconds_histogram(),
            queue_seconds: seconds_histogram(),
            load: LoadGauges::default(),
            kv_physical_usage: Family::default(),
            pin_budget_tokens: Family::default(),
            sessions: Family::default(),
            sessions_begun: Family::default(),
            sessions_ended: Family::default(),
            engine_up: Gauge::default(),
            restart_required: Gauge::default(),
            session_events: Family::default(),
            pool_pages: Family::default(),
            page_faults: Family::default(),
            audits: Family::default(),
            // From 50 us to 0.2 s, each bucket twice the previous. An audit delays all requests of
            // the engine, so times below a millisecond matter.
            audit_seconds: histogram::create((0..13).map(|step| 0.000_05 * f64::from(1 << step))),
            trim_turns: Family::default(),
            // Token counts from 64 to 1 M, each bucket four times the previous.
            divergence_tokens: histogram::create((0..8).map(|step| 64.0 * 4_f64.powi(step))),
            spared_tokens: Counter::default(),
            session_turns: Family::default(),
            sessions_left_out: Family::default(),
            staged_prefill_stages: Family::default(),
            staged_prefill_tokens: Counter::default(),
            volatile_prefixes: Family::default(),
            journal_failures: Counter::default(),
            journal_behind: Gauge::default(),
            principals: Gauge::default(),
            principal_sessions_max: Gauge::default(),
            principal_pinned_rows_max: Gauge::default(),
        };
        metrics.register(registry);
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        registry.register("turns", "Turns that have ended, by outcome", self.turns_ended.clone());
        registry.register(
            "refusals",
            "Turns that the agent refused, by refusal code",
            self.refusals.clone(),
        );
        let help = "Time from sending a turn to the engine until the head of its answer";
        let first_byte_seconds = self.first_byte_seconds.clone();
        registry.register_with_unit("time_to_first_byte", help, Unit::Seconds, first_byte_seconds);
        let help =
            "Time from the request to close a session until the engine has freed what it held";
        registry.register_with_unit("close", help, Unit::Seconds, self.close_seconds.clone());
        let help = "Time from sending a turn to the engine until the engine has ended it";
        registry.register_with_unit("turn", help, Unit::Seconds, self.turn_seconds.clone());
        let help = "Time that a turn waited in the agent for the engine's room, after its body was \
                    read; 0 without a wait";
        registry.register_with_unit("queue", help, Unit::Seconds, self.queue_seconds.clone());
        self.load.register(registry);
        let help = "The part of the KV pool that is not free, cached KV included";
        let unit = Unit::Other("ratio".to_owned());
        registry.register_with_unit(
            "kv_physical_usage",
            help,
            unit,
            self.kv_physical_usage.clone(),
        );
        self.register_sessions(registry);
        let help = "1 while the engine answers and makes progress, and its devices work; else 0";
        registry.register("engine_up", help, self.engine_up.clone());
        let help =
            "1 while only a restart of the engine frees the rows or pages that it holds; else 0";
        registry.register("engine_restart_required", help, self.restart_required.clone());
        let help = "Changes of sessions that their clients did not ask for, by event";
        registry.register("session_events", help, self.session_events.clone());
        let help = "Pages of the KV pool in the newest audit, by state";
        registry.register("pool_pages", help, self.pool_pages.clone());
        let help =
            "Faults that the newest audit found in the pool's pages, by kind; 0 without a fault";
        registry.register("pool_page_faults", help, self.page_faults.clone());
        let help = "Page audits, by outcome";
        registry.register("audits", help, self.audits.clone());
        let help = "Time that a page audit took on the engine's scheduler thread";
        let audit_seconds = self.audit_seconds.clone();
        registry.register_with_unit("audit_scheduler", help, Unit::Seconds, audit_seconds);
        let help = "Turns with full histories on pinned sessions, each counted once, by outcome; \
                    gone: unknown, because the session was closed or lost meanwhile";
        registry.register("trim_turns", help, self.trim_turns.clone());
        let help = "Leading tokens that a diverged full history shared with its session";
        registry.register("trim_diverged_at_tokens", help, self.divergence_tokens.clone());
        let help = "Tokens of full histories that pinned sessions already held";
        registry.register("trim_spared_tokens", help, self.spared_tokens.clone());
        let help = "Turns of sessions, by run mode";
        registry.register("session_turns", help, self.session_turns.clone());
        let help = "Turns run without the session at which their client hinted, by code";
        registry.register("sessions_left_out", help, self.sessions_left_out.clone());
        let help = "Stages of long prompts computed before their turns, by outcome";
        registry.register("staged_prefill_stages", help, self.staged_prefill_stages.clone());
        let help = "Tokens computed in stages of long prompts";
        registry.register("staged_prefill_tokens", help, self.staged_prefill_tokens.clone());
        let help = "Sessions with a volatile prefix: an early text in their prompts that differs \
                    from turn to turn. Counted once per session and place, by the text's role";
        registry.register("volatile_prefixes", help, self.volatile_prefixes.clone());
        let help = "Attempts to write the journal of open sessions that failed";
        registry.register("journal_failures", help, self.journal_failures.clone());
        let help = "1 while the journal lacks a record and no session is pinned for that; else 0";
        registry.register("journal_behind", help, self.journal_behind.clone());
    }

    fn register_sessions(&self, registry: &mut Registry) {
        let help = "KV of a rank that pinned sessions may hold together";
        let unit = Unit::Other("tokens".to_owned());
        registry.register_with_unit("pin_budget", help, unit, self.pin_budget_tokens.clone());
        let help = "Sessions in the agent's table, by retention and state";
        registry.register("sessions", help, self.sessions.clone());
        let help = "Sessions that began here, by their first retention";
        registry.register("sessions_begun", help, self.sessions_begun.clone());
        let help = "Sessions that ended here for whatever reason, by their last retention";
        registry.register("sessions_ended", help, self.sessions_ended.clone());
        let help = "Principals that have sessions";
        registry.register("principals", help, self.principals.clone());
        let help = "Sessions of the principal that has the most";
        registry.register("principal_sessions_max", help, self.principal_sessions_max.clone());
        let help = "Rows of one rank that one principal's pinned sessions hold at most";
        let rows = self.principal_pinned_rows_max.clone();
        registry.register("principal_pinned_rows_max", help, rows);
    }

    /// Counts a turn that the agent refused.
    pub fn count_refusal(&self, code: Code) {
        self.refusals.get_or_create(&CodeLabel { code: code.as_str() }).inc();
    }

    /// Counts a failed attempt to write the journal.
    pub fn count_journal_failure(&self) {
        self.journal_failures.inc();
    }

    /// Sets whether the journal lacks a record.
    pub fn set_journal_behind(&self, is_behind: bool) {
        self.journal_behind.set(i64::from(is_behind));
    }

    /// Sets the gauges of how evenly principals share the agent: the number of principals that have
    /// sessions, the sessions of the one that has the most, and the most pinned rows of one.
    pub fn set_shares(&self, principals: usize, sessions_max: usize, pinned_rows_max: u32) {
        set_count(&self.principals, principals as u64);
        set_count(&self.principal_sessions_max, sessions_max as u64);
        set_count(&self.principal_pinned_rows_max, pinned_rows_max.into());
    }

    /// Sets the tokens that pinned sessions may hold on each rank of the engine.
    pub fn set_pin_budgets(&self, tokens_by_rank: impl Iterator<Item = u64>) {
        self.pin_budget_tokens.clear();
        for (dp_rank, tokens) in (0..).zip(tokens_by_rank) {
            set_gauge(&self.pin_budget_tokens, &RankLabel { dp_rank }, Some(tokens));
        }
    }

    /// Counts a change of a session, from what was published of it before to what is published now.
    /// `None`: the session was not, or is no more, in the table.
    pub fn record_session_change(&self, before: Option<&Session>, after: Option<&Session>) {
        let retention =
            |session: &Session| RetentionLabel { retention: session.retention.as_str() };
        match (before, after) {
            (None, Some(begun)) => drop(self.sessions_begun.get_or_create(&retention(begun)).inc()),
            (Some(ended), None) => drop(self.sessions_ended.get_or_create(&retention(ended)).inc()),
            _ => {}
        }
        if let Some(before) = before {
            self.sessions.get_or_create(&before.into()).dec();
        }
        if let Some(after) = after {
            self.sessions.get_or_create(&after.into()).inc();
        }
    }

    /// Counts an event of a session.
    pub fn count_session_event(&self, event: &'static str) {
        self.session_events.get_or_create(&EventLabel { event }).inc();
    }

    /// Records how long the engine took to free what a closed session held.
    pub fn record_close(&self, duration: Duration) {
        self.close_seconds.observe(duration.as_secs_f64());
    }

    /// Records how long an admitted turn waited for room.
    pub fn record_queue_wait(&self, waited: Duration) {
        self.queue_seconds.observe(waited.as_secs_f64());
    }

    /// Records the time from sending a turn to the head of its answer.
    pub fn record_first_byte(&self, duration: Duration) {
        self.first_byte_seconds.observe(duration.as_secs_f64());
    }

    /// Counts the end of a turn, and records how long the turn took.
    pub fn record_turn_end(&self, outcome: &'static str, duration: Duration) {
        self.turns_ended.get_or_create(&OutcomeLabel { outcome }).inc();
        self.turn_seconds.observe(duration.as_secs_f64());
    }

    /// Counts a turn whose full history was compared with its session's. `spared_tokens` are the
    /// history's tokens that the session already held, so the engine didn't compute them.
    pub fn count_trimmed_turn(&self, plan: &'static str, spared_tokens: u64) {
        self.trim_turns.get_or_create(&PlanLabel { plan }).inc();
        self.spared_tokens.inc_by(spared_tokens);
    }

    /// Records how many leading tokens a diverged full history shares with its session.
    pub fn record_divergence(&self, shared_tokens: u64) {
        self.divergence_tokens.observe(shared_tokens as f64);
    }

    /// Counts a session's turn by its run mode: in its session, tagged or untagged, for example.
    pub fn count_run_mode(&self, run_mode: &'static str) {
        self.session_turns.get_or_create(&KindLabel { kind: run_mode }).inc();
    }

    /// Counts a turn that runs without the session at which its client only hinted. `code` is the
    /// code with which the session would have refused the turn.
    pub fn count_session_left_out(&self, code: &'static str) {
        self.sessions_left_out.get_or_create(&CodeLabel { code }).inc();
    }

    /// Counts a session whose prompts have a volatile prefix: an early text that differs from turn
    /// to turn. `role` names the part of the prompt that the text is in.
    pub fn count_volatile_prefix(&self, role: &'static str) {
        self.volatile_prefixes.get_or_create(&RoleLabel { role }).inc();
    }

    /// Counts a stage of staged prefill (long prompts computed in stages before their turns) that
    /// has ended, and the tokens computed in it.
    pub fn count_stage(&self, outcome: StageOutcome, tokens: u64) {
        let outcome = match outcome {
            StageOutcome::Computed => "computed",
            StageOutcome::Evicted => "evicted",
            StageOutcome::Failed => "failed",
        };
        self.staged_prefill_stages.get_or_create(&OutcomeLabel { outcome }).inc();
        self.staged_prefill_tokens.inc_by(tokens);
    }

    /// Counts an audit by its outcome.
    pub fn count_audit(&self, outcome: &'static str) {
        self.audits.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Records how much time of the engine's scheduler thread an audit took.
    pub fn record_audit_time(&self, scheduler_time: Duration) {
        self.audit_seconds.observe(scheduler_time.as_secs_f64());
    }

    /// Sets the gauges of a rank's newest audit; `None` removes them. A kind of fault that the
    /// audit could not check has no gauge.
    pub fn set_pages(&self, dp_rank: u32, audit: Option<&PageAudit>) {
        let page_counts = audit.and_then(|audit| audit.classes);
        let page_count =
            |count_of_class: fn(&PageClasses) -> u64| page_counts.as_ref().map(count_of_class);
        for (state, pages) in [
            ("held", audit.map(|audit| audit.held_pages)),
            ("free", page_count(|counts| counts.free)),
            ("private", page_count(|counts| counts.private)),
            ("cached", page_count(|counts| counts.cached)),
            ("cached_in_use", page_count(|counts| counts.cached_in_use)),
            ("leaked", page_count(|counts| counts.leaked)),
            ("corrupt", page_count(|counts| counts.corrupt)),
        ] {
            set_gauge(&self.pool_pages, &StateLabel { dp_rank, state }, pages);
        }
        for kind in FaultKind::ALL.map(FaultKind::name) {
            let mut findings = audit.iter().flat_map(|audit| &audit.findings);
            let count = findings.find(|finding| finding.kind == kind).map(|finding| finding.count);
            set_gauge(&self.page_faults, &FaultLabel { dp_rank, kind }, count);
        }
    }

    /// Sets the gauges of the published load report.
    pub fn set_load(&self, report: &LoadReport) {
        self.engine_up.set(i64::from(report.unhealthy.is_none()));
        self.restart_required.set(i64::from(report.restart_required.is_some()));
        self.load.set(&report.ranks);
        for rank in &report.ranks {
            let label = RankLabel { dp_rank: rank.dp_rank };
            match rank.kv_physical_usage() {
                Some(usage) => {
                    self.kv_physical_usage.get_or_create(&label).set(usage.value);
                }
                None => drop(self.kv_physical_usage.remove(&label)),
            }
        }
    }
}

/// Sets a gauge to a count.
fn set_count(gauge: &Gauge, count: u64) {
    gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
}

/// Sets the gauge with this label. `None` removes the gauge, so that a missing value isn't read as
/// zero.
fn set_gauge<L>(family: &Family<L, Gauge>, label: &L, value: Option<u64>)
where
    L: Clone + std::hash::Hash + Eq,
{
    match value {
        Some(value) => {
            set_count(&family.get_or_create(label), value);
        }
        None => drop(family.remove(label)),
    }
}
