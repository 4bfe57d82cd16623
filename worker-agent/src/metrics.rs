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

use contract::load::{LoadReport, PageAudit, PageClasses, Session};
use kernels::report::FaultKind;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
};
use service::{
    histogram,
    metrics::{By, to_i64},
    refusal::Code,
};

use self::load::LoadGauges;

/// Creates a histogram with buckets from 1 ms to 65 s, each twice the previous. The times of
/// prefills lie in that range.
fn seconds_histogram() -> Histogram {
    histogram::create((0..17).map(|step| 0.001 * f64::from(1 << step)))
}

/// Creates a histogram with buckets from 0.5 ms to 5.6 s, each 1.5 times the previous. Most closes
/// take a few milliseconds.
fn close_histogram() -> Histogram {
    histogram::create((0..24).map(|step| 0.000_5 * 1.5_f64.powi(step)))
}

/// Creates a histogram with buckets from 50 us to 0.2 s, each twice the previous. An audit delays
/// all requests of the engine, so times below a millisecond matter.
fn audit_histogram() -> Histogram {
    histogram::create((0..13).map(|step| 0.000_05 * f64::from(1 << step)))
}

/// Creates a histogram of token counts from 64 to 1 M, each bucket four times the previous.
fn tokens_histogram() -> Histogram {
    histogram::create((0..8).map(|step| 64.0 * 4_f64.powi(step)))
}

service::metrics! {
    pub struct Metrics {
        /// Turns that have ended, by outcome
        turns_ended: By<Counter> = "turns", By::label("outcome");
        /// Turns that the agent refused, by refusal code
        refusals: By<Counter> = "refusals", By::label("code");
        /// Time from sending a turn to the engine until the head of its answer
        first_byte_seconds: Histogram = "time_to_first_byte" in "seconds", seconds_histogram();
        /// Time from the request to close a session until the engine has freed what it held
        close_seconds: Histogram = "close" in "seconds", close_histogram();
        /// Time from sending a turn to the engine until the engine has ended it
        turn_seconds: Histogram = "turn" in "seconds", seconds_histogram();
        /// Time that a turn waited in the agent for the engine's room, after its body was read; 0
        /// without a wait
        queue_seconds: Histogram = "queue" in "seconds", seconds_histogram();
        /// The part of the KV pool that is not free, cached KV included
        kv_physical_usage: Family<RankLabel, Gauge<f64, AtomicU64>>
            = "kv_physical_usage" in "ratio";
        /// KV of a rank that pinned sessions may hold together
        pin_budget_tokens: Family<RankLabel, Gauge> = "pin_budget" in "tokens";
        /// Sessions in the agent's table, by retention and state
        sessions: Family<SessionLabel, Gauge> = "sessions";
        /// Sessions that began here, by their first retention
        sessions_begun: By<Counter> = "sessions_begun", By::label("retention");
        /// Sessions that ended here for whatever reason, by their last retention
        sessions_ended: By<Counter> = "sessions_ended", By::label("retention");
        /// Principals that have sessions
        principals: Gauge = "principals";
        /// Sessions of the principal that has the most
        principal_sessions_max: Gauge = "principal_sessions_max";
        /// Rows of one rank that one principal's pinned sessions hold at most
        principal_pinned_rows_max: Gauge = "principal_pinned_rows_max";
        /// 1 while the engine answers and makes progress, and its devices work; else 0
        engine_up: Gauge = "engine_up";
        /// 1 while only a restart of the engine frees the rows or pages that it holds; else 0
        restart_required: Gauge = "engine_restart_required";
        /// Changes of sessions that their clients did not ask for, by event
        session_events: By<Counter> = "session_events", By::label("event");
        /// KV loaded from the host ahead of turns, by use; used: the turn came in time
        prefetched: By<Counter> = "prefetched" in "tokens", By::label("use");
        /// Pages of the KV pool in the newest audit, by state
        pool_pages: Family<StateLabel, Gauge> = "pool_pages";
        /// Faults that the newest audit found in the pool's pages, by kind; 0 without a fault
        page_faults: Family<RankKindLabel, Gauge> = "pool_page_faults";
        /// Page audits, by outcome
        audits: By<Counter> = "audits", By::label("outcome");
        /// Time that a page audit took on the engine's scheduler thread
        audit_seconds: Histogram = "audit_scheduler" in "seconds", audit_histogram();
        /// Turns with full histories on pinned sessions, each counted once, by outcome; gone:
        /// unknown, because the session was closed or lost meanwhile
        trim_turns: By<Counter> = "trim_turns", By::label("plan");
        /// Leading tokens that a diverged full history shared with its session
        divergence_tokens: Histogram = "trim_diverged_at_tokens", tokens_histogram();
        /// Tokens of full histories that pinned sessions already held
        spared_tokens: Counter = "trim_spared_tokens";
        /// Turns of sessions, by run mode
        session_turns: By<Counter> = "session_turns", By::label("kind");
        /// Turns run without the session at which their client hinted, by code
        sessions_left_out: By<Counter> = "sessions_left_out", By::label("code");
        /// Stages of long prompts computed before their turns, by outcome
        staged_prefill_stages: By<Counter> = "staged_prefill_stages", By::label("outcome");
        /// Tokens computed in stages of long prompts
        staged_prefill_tokens: Counter = "staged_prefill_tokens";
        /// Sessions with a volatile prefix: an early text in their prompts that differs from turn
        /// to turn. Counted once per session and place, by the text's role
        volatile_prefixes: By<Counter> = "volatile_prefixes", By::label("role");
        /// Attempts to write the journal of open sessions that failed
        journal_failures: Counter = "journal_failures";
        /// 1 while the journal lacks a record and no session is pinned for that; else 0
        journal_behind: Gauge = "journal_behind";
        ..load: LoadGauges;
    }
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

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    dp_rank: u32,
    state: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RankKindLabel {
    pub(crate) dp_rank: u32,
    pub(crate) kind: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RankLabel {
    pub(crate) dp_rank: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SessionLabel {
    dp_rank: u32,
    retention: &'static str,
    state: &'static str,
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
    /// Counts a turn that the agent refused.
    pub fn count_refusal(&self, code: Code) {
        self.refusals.get(code.as_str()).inc();
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
        match (before, after) {
            (None, Some(begun)) => drop(self.sessions_begun.get(begun.retention.as_str()).inc()),
            (Some(ended), None) => drop(self.sessions_ended.get(ended.retention.as_str()).inc()),
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
        self.session_events.get(event).inc();
    }

    /// Counts tokens that were loaded ahead of a turn: `loaded`, `used` or `wasted`.
    pub fn count_prefetches(&self, fate: &'static str, tokens: u64) {
        self.prefetched.get(fate).inc_by(tokens);
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
        self.turns_ended.get(outcome).inc();
        self.turn_seconds.observe(duration.as_secs_f64());
    }

    /// Counts a turn whose full history was compared with its session's. `spared_tokens` are the
    /// history's tokens that the session already held, so the engine didn't compute them.
    pub fn count_trimmed_turn(&self, plan: &'static str, spared_tokens: u64) {
        self.trim_turns.get(plan).inc();
        self.spared_tokens.inc_by(spared_tokens);
    }

    /// Records how many leading tokens a diverged full history shares with its session.
    pub fn record_divergence(&self, shared_tokens: u64) {
        self.divergence_tokens.observe(shared_tokens as f64);
    }

    /// Counts a session's turn by its run mode: in its session, tagged or untagged, for example.
    pub fn count_run_mode(&self, run_mode: &'static str) {
        self.session_turns.get(run_mode).inc();
    }

    /// Counts a turn that runs without the session at which its client only hinted. `code` is the
    /// code with which the session would have refused the turn.
    pub fn count_session_left_out(&self, code: &'static str) {
        self.sessions_left_out.get(code).inc();
    }

    /// Counts a session whose prompts have a volatile prefix: an early text that differs from turn
    /// to turn. `role` names the part of the prompt that the text is in.
    pub fn count_volatile_prefix(&self, role: &'static str) {
        self.volatile_prefixes.get(role).inc();
    }

    /// Counts a stage of staged prefill (long prompts computed in stages before their turns) that
    /// has ended, and the tokens computed in it.
    pub fn count_stage(&self, outcome: StageOutcome, tokens: u64) {
        let outcome = match outcome {
            StageOutcome::Computed => "computed",
            StageOutcome::Evicted => "evicted",
            StageOutcome::Failed => "failed",
        };
        self.staged_prefill_stages.get(outcome).inc();
        self.staged_prefill_tokens.inc_by(tokens);
    }

    /// Counts an audit by its outcome.
    pub fn count_audit(&self, outcome: &'static str) {
        self.audits.get(outcome).inc();
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
            set_gauge(&self.page_faults, &RankKindLabel { dp_rank, kind }, count);
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
    gauge.set(to_i64(count));
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
