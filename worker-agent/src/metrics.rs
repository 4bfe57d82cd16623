//! Defines the agent's Prometheus metrics and the functions that update them.
//!
//! The metrics are about turns (one request and its answer), sessions (chains of turns), audits of
//! KV pages, and the figures of the load report. All have base units, and labels with few values.
//! The owner task, the data port and staged prefill call the functions; the admin port serves the
//! values. Metrics of GPUs and of KV events are in `gpu::metrics` and `kv_events::metrics`.

use std::time::Duration;

use kernels::report::FaultKind;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use proto::load::{Figure, LoadReport, PageAudit, PageClasses};
use service::refusal::Code;

/// Creates a histogram with buckets from 1 ms to 65 s, each twice the previous. The times of
/// prefills lie in that range.
fn seconds_histogram() -> Histogram {
    Histogram::new((0..17).map(|step| 0.001 * f64::from(1 << step)))
}

/// All metrics of the agent. Clones share the same values. Its many fields: one for each metric.
#[derive(Debug, Clone)]
pub struct Metrics {
    turns_ended: Family<OutcomeLabel, Counter>,
    refusals: Family<CodeLabel, Counter>,
    first_byte_seconds: Histogram,
    close_seconds: Histogram,
    turn_seconds: Histogram,
    rank_load: Family<FigureLabel, Gauge>,
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
    shares: Family<ShareLabel, Gauge>,
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
struct ShareLabel {
    figure: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FigureLabel {
    dp_rank: u32,
    figure: &'static str,
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
            close_seconds: Histogram::new((0..24).map(|step| 0.000_5 * 1.5_f64.powi(step))),
            turn_seconds: seconds_histogram(),
            rank_load: Family::default(),
            engine_up: Gauge::default(),
            restart_required: Gauge::default(),
            session_events: Family::default(),
            pool_pages: Family::default(),
            page_faults: Family::default(),
            audits: Family::default(),
            // From 50 us to 0.2 s, each bucket twice the previous. An audit delays all requests of
            // the engine, so times below a millisecond matter.
            audit_seconds: Histogram::new((0..13).map(|step| 0.000_05 * f64::from(1 << step))),
            trim_turns: Family::default(),
            // Token counts from 64 to 1 M, each bucket four times the previous.
            divergence_tokens: Histogram::new((0..8).map(|step| 64.0 * 4_f64.powi(step))),
            spared_tokens: Counter::default(),
            session_turns: Family::default(),
            sessions_left_out: Family::default(),
            staged_prefill_stages: Family::default(),
            staged_prefill_tokens: Counter::default(),
            volatile_prefixes: Family::default(),
            journal_failures: Counter::default(),
            journal_behind: Gauge::default(),
            shares: Family::default(),
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
        let help = "Figures of the load report: tokens, rows, turns, sessions";
        registry.register("rank_load", help, self.rank_load.clone());
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
        let help = "How evenly principals share the agent: their number, and the sessions and the \
                    pinned rows of the principal that has the most";
        registry.register("shares", help, self.shares.clone());
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

    /// Sets the gauges of how evenly principals share the agent: each figure's name and value.
    pub fn set_shares(&self, figures: [(&'static str, usize); 3]) {
        for (figure, value) in figures {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            self.shares.get_or_create(&ShareLabel { figure }).set(value);
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
        for rank in &report.ranks {
            let figures = [
                ("pool_used_tokens", rank.pool_used_tokens),
                ("pool_total_tokens", rank.pool_total_tokens),
                ("pinned_tokens", rank.pinned_tokens),
                ("resident_tokens_estimate", rank.resident_tokens_estimate),
                ("rows_held", rank.rows_held),
                ("rows_total", rank.rows_total),
                ("requests_running", rank.requests_running),
                ("requests_waiting", rank.requests_waiting),
                ("pool_available_tokens", rank.pool_available_tokens),
                ("pool_evictable_tokens", rank.pool_evictable_tokens),
                ("foreign_tokens", rank.foreign_tokens),
                ("prefill_tokens_per_s", rank.prefill_tokens_per_s),
                ("prefill_backlog_tokens", rank.prefill_backlog_tokens),
            ];
            for (figure, value) in figures {
                self.set_figure(rank.dp_rank, figure, value);
            }
            let to_gauge_value = |count: u32| Some(u64::from(count));
            self.set_value(rank.dp_rank, "sessions", to_gauge_value(rank.sessions));
            self.set_value(rank.dp_rank, "turns_running", to_gauge_value(rank.turns_running));
            self.set_value(rank.dp_rank, "turns_queued", to_gauge_value(rank.turns_queued));
            let staged_prefill = rank.staged_prefill;
            let tokens = staged_prefill.map(|load| load.tokens);
            self.set_value(rank.dp_rank, "staged_prefill_tokens", tokens);
            let prompts = staged_prefill.map(|load| load.prompts.into());
            self.set_value(rank.dp_rank, "staged_prefill_prompts", prompts);
            let stage_tokens = staged_prefill.map(|load| load.stage_tokens);
            self.set_value(rank.dp_rank, "staged_prefill_stage_tokens", stage_tokens);
        }
    }

    fn set_figure(&self, dp_rank: u32, figure: &'static str, value: Option<Figure>) {
        self.set_value(dp_rank, figure, value.map(|figure| figure.value));
    }

    fn set_value(&self, dp_rank: u32, figure: &'static str, value: Option<u64>) {
        set_gauge(&self.rank_load, &FigureLabel { dp_rank, figure }, value);
    }
}

/// Sets the gauge with this label. `None` removes the gauge, so that a missing value isn't read as
/// zero.
fn set_gauge<L>(family: &Family<L, Gauge>, label: &L, value: Option<u64>)
where
    L: Clone + std::hash::Hash + Eq,
{
    match value {
        Some(value) => {
            family.get_or_create(label).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        None => drop(family.remove(label)),
    }
}
