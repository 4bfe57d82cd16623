//! The worker table: the figures of all workers that a placement compares, in one array. Pure.
//!
//! For one turn, a placement may compare a thousand workers. Following pointers from each worker to
//! its agent, report and counts would take longer than the arithmetic.
//!
//! An agent's rows are rewritten whenever a message from the agent arrives, all rows whenever the
//! reuse forecast is summed.

use std::{
    iter,
    num::{NonZeroU32, NonZeroU64},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::load::{EngineRole, Figure, RankLoad, Retention, StagedPrefill};

use super::{
    agent::Agent,
    lease::{InFlight, InFlightCounts},
    pairing::PairClass,
    prefill_rates::PrefillRates,
    reuse_forecast::ReuseDemand,
    worker::{WorkerRef, WorkerState},
};

/// Has one row for each worker ever heard, ordered by agent, then by rank.
#[derive(Debug, Clone)]
pub struct WorkerTable {
    rows: Vec<Row>,
    /// In the order of `rows`. A separate array, because a snapshot copies the rows but shares the
    /// counts.
    in_flight: Arc<Vec<Arc<InFlight>>>,
    /// Index of each agent's first row. The last element is the number of all rows.
    row_starts: Vec<usize>,
    pair_rows: usize,
}

/// What an agent reported about one worker, as far as placements need it. Three cache lines long.
/// A placement reads the rows of a thousand workers one after the other, so a row is flat.
///
/// A field that ends in `_at_report` is this router's own in-flight count when the load report
/// arrived. Subtracting it from the current count gives what this router has added since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    worker: WorkerRef,
    /// Without regard to how long the agent has been silent.
    state: WorkerState,
    role: EngineRole,
    retention_bits: u8,
    /// `None` if the worker can form no pair.
    pair_class: Option<PairClass>,
    heard_at: Option<Instant>,
    reported_at: Option<Instant>,
    prefill_tokens_per_s: Option<NonZeroU64>,
    /// Prompt tokens that are admitted and not yet computed, as reported.
    backlog_tokens: Option<Figure>,
    staged_prefill: Option<StagedPrefillOfOthers>,
    waiting_without_tokens: u64,
    turns: u32,
    turns_max: u32,
    sessions: u32,
    turns_at_report: u32,
    open_requests_at_report: u32,
    unanswered_tokens_at_report: u64,
    pool_tokens: Option<NonZeroU64>,
    host: Option<HostStats>,
    used_tokens: TokensIfKnown,
    available_tokens: TokensIfKnown,
    wanted_tokens: u64,
    /// `None` unless the engine is in prefill or decode mode and its agent reports them.
    kv_bytes_per_token: Option<NonZeroU32>,
    /// Those that pinned sessions hold, and all.
    request_rows: Option<(u64, NonZeroU64)>,
}

/// The host tier of a worker whose agent says how fast the engine loads from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostStats {
    /// At most 4 Gi, so that a row stays small.
    tokens: u32,
    load_tokens_per_s: NonZeroU32,
}

impl HostStats {
    fn new(load: &RankLoad) -> Option<Self> {
        let host = load.host?;
        let bounded = |figure: Figure| u32::try_from(figure.value).unwrap_or(u32::MAX);
        Some(Self {
            tokens: bounded(host.total_tokens?),
            load_tokens_per_s: NonZeroU32::new(bounded(host.load_tokens_per_s?))?,
        })
    }

    /// All that the tier has room for.
    #[must_use]
    pub fn tokens(self) -> u64 {
        self.tokens.into()
    }

    #[must_use]
    pub fn load_tokens_per_s(self) -> u64 {
        self.load_tokens_per_s.get().into()
    }
}

/// In eight bytes: one more than the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TokensIfKnown(Option<NonZeroU64>);

impl TokensIfKnown {
    fn get(self) -> Option<u64> {
        self.0.map(|more| more.get() - 1)
    }
}

impl From<Option<u64>> for TokensIfKnown {
    fn from(tokens: Option<u64>) -> Self {
        Self(tokens.and_then(|tokens| NonZeroU64::new(tokens.saturating_add(1))))
    }
}

/// The part of a worker's queue of staged prefills that other routers put there: the reported queue
/// minus this router's share when the report arrived. Negative if the report doesn't show all of
/// this router's share yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StagedPrefillOfOthers {
    tokens: i64,
    prompts: i32,
    stage_tokens: NonZeroU32,
}

#[derive(Debug, Clone, Copy)]
pub struct WorkerStats<'a> {
    row: &'a Row,
    in_flight: &'a InFlight,
}

impl WorkerTable {
    pub(super) fn new(agent_count: usize) -> Self {
        Self {
            rows: vec![],
            in_flight: Arc::default(),
            row_starts: vec![0; agent_count + 1],
            pair_rows: 0,
        }
    }

    pub(super) fn add_agent(&mut self) {
        self.row_starts.push(self.rows.len());
    }

    /// `demands` is by rank. A rank without a forecast has no demand.
    pub(super) fn update(&mut self, agent: &Agent, demands: &[ReuseDemand], rates: &PrefillRates) {
        let slot = agent.key.slot();
        let rank_count = agent.facts.as_ref().map_or(0, |facts| facts.description.ranks.len());
        let agent_rows = self.rows_of_slot(slot);
        if rank_count != agent_rows.len() {
            let counts = agent.in_flight.iter().take(rank_count).cloned();
            drop(Arc::make_mut(&mut self.in_flight).splice(agent_rows.clone(), counts));
            for start in &mut self.row_starts[slot + 1..] {
                *start = *start + rank_count - agent_rows.len();
            }
        }
        let demands = demands.iter().chain(iter::repeat(&ReuseDemand::NOTHING));
        let rows = (0..).zip(demands).take(rank_count).map(|(dp_rank, demand)| {
            Row::new(WorkerRef { agent: agent.key, dp_rank }, agent, demand, rates)
        });
        let removed: Vec<Row> = self.rows.splice(agent_rows, rows).collect();
        let is_in_pair = |row: &&Row| row.pair_class.is_some();
        self.pair_rows -= removed.iter().filter(is_in_pair).count();
        self.pair_rows += self.rows[self.rows_of_slot(slot)].iter().filter(is_in_pair).count();
    }

    #[must_use]
    pub fn has_pairs(&self) -> bool {
        self.pair_rows > 0
    }

    pub fn workers(&self) -> impl ExactSizeIterator<Item = WorkerStats<'_>> {
        let all = self.rows.iter().zip(self.in_flight.iter());
        all.map(|(row, in_flight)| WorkerStats { row, in_flight })
    }

    #[must_use]
    pub fn get(&self, worker: WorkerRef) -> Option<WorkerStats<'_>> {
        let (slot, rank) = (worker.agent.slot(), worker.dp_rank as usize);
        // The slot may be newer than this table.
        let [start, end] = *self.row_starts.get(slot..slot + 2)? else { return None };
        let index = (start..end).nth(rank)?;
        let row = Some(&self.rows[index]).filter(|row| row.worker == worker)?;
        Some(WorkerStats { row, in_flight: &self.in_flight[index] })
    }

    fn rows_of_slot(&self, slot: usize) -> Range<usize> {
        self.row_starts[slot]..self.row_starts[slot + 1]
    }

    pub(super) fn check_invariants(
        &self,
        agents: &[Arc<Agent>],
        rates: &PrefillRates,
        demand: impl Fn(WorkerRef) -> ReuseDemand,
    ) {
        assert_eq!((self.row_starts.len(), self.row_starts[0]), (agents.len() + 1, 0));
        assert_eq!(self.row_starts[agents.len()], self.rows.len());
        assert_eq!(self.in_flight.len(), self.rows.len());
        let in_pairs = self.rows.iter().filter(|row| row.pair_class.is_some());
        assert_eq!(self.pair_rows, in_pairs.count());
        for (slot, agent) in agents.iter().enumerate() {
            let rank_count = agent.facts.as_ref().map_or(0, |facts| facts.description.ranks.len());
            assert_eq!(self.rows_of_slot(slot).len(), rank_count);
            for (dp_rank, row_index) in (0..).zip(self.rows_of_slot(slot)) {
                let worker = WorkerRef { agent: agent.key, dp_rank };
                assert_eq!(self.rows[row_index], Row::new(worker, agent, &demand(worker), rates));
                assert!(Arc::ptr_eq(
                    &self.in_flight[row_index],
                    &agent.in_flight[dp_rank as usize]
                ));
            }
        }
    }
}

impl Row {
    fn new(worker: WorkerRef, agent: &Agent, demand: &ReuseDemand, rates: &PrefillRates) -> Self {
        let load = agent.rank_load(worker.dp_rank);
        let reported_value =
            |figure: fn(&RankLoad) -> Option<Figure>| Some(load.and_then(figure)?.value);
        let backlog_tokens = load.and_then(|load| load.prefill_backlog_tokens);
        let count_waiting = |load: &RankLoad| {
            let waiting_in_engine = load.requests_waiting.map_or(0, |figure| figure.value);
            waiting_in_engine.saturating_add(load.turns_queued.into())
        };
        let rows_total = reported_value(|load| load.rows_total).and_then(NonZeroU64::new);
        let offered_retentions = agent.facts.iter().flat_map(|facts| &facts.description.retentions);
        let counts_at_report = agent.in_flight_at_report.get(worker.dp_rank as usize);
        let counts_at_report = counts_at_report.copied().unwrap_or_default();
        Self {
            worker,
            state: agent.state_ignoring_silence(),
            role: agent.role(),
            pair_class: agent.pair_class(),
            kv_bytes_per_token: agent.kv_bytes_per_token(),
            retention_bits: offered_retentions
                .fold(0, |bits, retention| bits | retention_bit(*retention)),
            heard_at: agent.heard_at,
            reported_at: agent.report.as_ref().map(|(_, at)| *at),
            prefill_tokens_per_s: rates.expected(
                agent,
                worker.dp_rank,
                load.and_then(|load| load.prefill_tokens_per_s),
            ),
            backlog_tokens,
            staged_prefill: load.and_then(|load| {
                StagedPrefillOfOthers::new(load.staged_prefill?, counts_at_report)
            }),
            waiting_without_tokens: load
                .filter(|_| backlog_tokens.is_none())
                .map_or(0, count_waiting),
            turns: load.map_or(0, |load| load.turns_running),
            turns_max: load.map_or(0, |load| load.turns_running_max),
            sessions: load.map_or(0, |load| load.sessions),
            turns_at_report: counts_at_report.turns,
            open_requests_at_report: counts_at_report.open_requests,
            unanswered_tokens_at_report: counts_at_report.unanswered_tokens,
            pool_tokens: reported_value(|load| load.pool_total_tokens).and_then(NonZeroU64::new),
            host: load.and_then(HostStats::new),
            available_tokens: reported_value(|load| load.pool_available_tokens).into(),
            used_tokens: reported_value(|load| load.pool_used_tokens)
                .max(reported_value(|load| load.pinned_tokens))
                .into(),
            wanted_tokens: demand.wanted_tokens,
            request_rows: reported_value(|load| load.rows_held).zip(rows_total),
        }
    }
}

impl StagedPrefillOfOthers {
    fn new(reported: StagedPrefill, counts_at_report: InFlightCounts) -> Option<Self> {
        let signed_tokens = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        let signed_prompts = |prompts: u32| i32::try_from(prompts).unwrap_or(i32::MAX);
        Some(Self {
            tokens: signed_tokens(reported.tokens)
                .saturating_sub(signed_tokens(counts_at_report.staged_prefill_tokens)),
            prompts: signed_prompts(reported.prompts)
                .saturating_sub(signed_prompts(counts_at_report.staged_prefill_prompts)),
            stage_tokens: u32::try_from(reported.stage_tokens)
                .map_or(Some(NonZeroU32::MAX), NonZeroU32::new)?,
        })
    }
}

impl<'a> WorkerStats<'a> {
    #[must_use]
    pub fn worker(self) -> WorkerRef {
        self.row.worker
    }

    #[must_use]
    pub fn state(self, now: Instant, report_age_max: Duration) -> WorkerState {
        self.row.state.stale_if_silent(self.row.heard_at, now, report_age_max)
    }

    #[must_use]
    pub fn role(self) -> EngineRole {
        self.row.role
    }

    #[must_use]
    pub fn pair_class(self) -> Option<PairClass> {
        self.row.pair_class
    }

    #[must_use]
    pub fn kv_bytes_per_token(self) -> Option<u64> {
        self.row.kv_bytes_per_token.map(|bytes| bytes.get().into())
    }

    #[must_use]
    pub fn offers(self, retention: Retention) -> bool {
        self.row.retention_bits & retention_bit(retention) != 0
    }

    /// Measured, on this worker or on others like it. `None` if no worker was measured.
    #[must_use]
    pub fn prefill_tokens_per_s(self) -> Option<u64> {
        self.row.prefill_tokens_per_s.map(NonZeroU64::get)
    }

    /// The reported number, corrected by the turns that this router has begun and ended since.
    /// Never less than the turns that this router has in flight there.
    #[must_use]
    pub fn turns(self) -> u32 {
        let in_flight = self.in_flight.turns();
        let Row { turns, turns_at_report, .. } = self.row;
        turns.saturating_add(in_flight).saturating_sub(*turns_at_report).max(in_flight)
    }

    #[must_use]
    pub fn was_sampled_before(self, figure: Figure, at: Instant) -> bool {
        let age = Duration::from_millis(figure.age_ms.into());
        self.row.reported_at.is_some_and(|reported_at| at + age > reported_at)
    }

    /// The part of `tokens`, which turns held at the report, that is still held by turns that have
    /// not ended since. If no turn was reported, somebody else holds the tokens.
    #[must_use]
    pub fn part_of_turns_not_ended(self, tokens: u64) -> u64 {
        let reported = u64::from(self.row.turns);
        let left = reported.min(self.turns().into());
        tokens.saturating_mul(left).checked_div(reported).unwrap_or(tokens)
    }

    /// 0 if not reported.
    #[must_use]
    pub fn turns_max(self) -> u32 {
        self.row.turns_max
    }

    /// Prompt tokens that are computed before a turn sent now: the reported backlog, minus what the
    /// engine has computed since, plus what this router has sent since. If the agent reports no
    /// backlog: those of this router's turns whose answer has not begun.
    #[must_use]
    pub fn backlog_tokens(self, tokens_per_s: u64, now: Instant) -> u64 {
        let unanswered_tokens = self.in_flight.unanswered_tokens();
        let Row { backlog_tokens: Some(figure), reported_at: Some(reported_at), .. } = self.row
        else {
            return unanswered_tokens;
        };
        let age =
            now.saturating_duration_since(*reported_at).as_millis() + u128::from(figure.age_ms);
        let age_ms = u64::try_from(age).unwrap_or(u64::MAX);
        let computed_tokens = tokens_per_s.saturating_mul(age_ms) / 1000;
        let tokens_left = figure.value.saturating_sub(computed_tokens);
        tokens_left
            .saturating_add(unanswered_tokens.saturating_sub(self.row.unanswered_tokens_at_report))
    }

    /// `None` if the worker doesn't stage prefills.
    #[must_use]
    pub fn stage_tokens(self) -> Option<u64> {
        self.row.staged_prefill.map(|staged_prefill| staged_prefill.stage_tokens.get().into())
    }

    /// The reported queue, corrected by the prompts that this router has added and removed since.
    /// `None` if the worker doesn't stage prefills.
    #[must_use]
    pub fn staged_prefill(self) -> Option<StagedPrefill> {
        let StagedPrefillOfOthers { tokens, prompts, stage_tokens } = self.row.staged_prefill?;
        let in_flight = self.in_flight.counts();
        Some(StagedPrefill {
            tokens: in_flight.staged_prefill_tokens.saturating_add_signed(tokens),
            prompts: in_flight.staged_prefill_prompts.saturating_add_signed(prompts),
            stage_tokens: stage_tokens.get().into(),
        })
    }

    /// Requests that wait in the engine or the agent, if the agent doesn't report the tokens of
    /// their prompts; else 0.
    #[must_use]
    pub fn waiting_without_tokens(self) -> u64 {
        self.row.waiting_without_tokens
    }

    #[must_use]
    pub fn pool_tokens(self) -> Option<u64> {
        self.row.pool_tokens.map(NonZeroU64::get)
    }

    /// `None` if the worker has no host tier, or if its figures are unknown.
    #[must_use]
    pub fn host(self) -> Option<HostStats> {
        self.row.host
    }

    /// Tokens whose KV the worker keeps on the device or the host. `None` if unknown.
    #[must_use]
    pub fn kept_tokens_max(self) -> Option<u64> {
        let host_tokens = self.row.host.map_or(0, HostStats::tokens);
        self.pool_tokens().map(|pool_tokens| pool_tokens.max(host_tokens))
    }

    /// KV that eviction can't take.
    #[must_use]
    pub fn used_tokens(self) -> Option<u64> {
        self.row.used_tokens.get()
    }

    /// `None` if the agent doesn't report it.
    #[must_use]
    pub fn available_tokens(self) -> Option<u64> {
        self.row.available_tokens.get()
    }

    #[must_use]
    pub fn wanted_tokens(self) -> u64 {
        self.row.wanted_tokens
    }

    /// Those that pinned sessions hold, and all. A pinned session's KV is private and can't be
    /// evicted.
    #[must_use]
    pub fn request_rows(self) -> Option<(u64, u64)> {
        self.row.request_rows.map(|(held, total)| (held, total.get()))
    }

    /// Includes those that this router opened since the last report.
    #[must_use]
    pub fn sessions(self) -> u32 {
        self.row.sessions.saturating_add(self.open_requests_since_report())
    }

    /// KV that this router's turns in flight will add. No session table shows it before the turns
    /// end.
    #[must_use]
    pub fn incoming_tokens(self) -> u64 {
        self.in_flight.incoming_tokens()
    }

    #[must_use]
    pub fn open_requests_since_report(self) -> u32 {
        self.in_flight.open_requests().wrapping_sub(self.row.open_requests_at_report)
    }
}

fn retention_bit(retention: Retention) -> u8 {
    1 << retention as u8
}

#[cfg(test)]
mod tests {
    use contract::load::Session;

    use super::*;
    use crate::fleet::{
        lease::LoadLease,
        state::Update,
        testing::{description, fleet, report, start},
        worker::AgentKey,
    };

    /// A decision over a thousand workers costs as much as reading their rows.
    #[test]
    fn a_row_has_three_cache_lines() {
        assert!(size_of::<Row>() <= 192, "{}", size_of::<Row>());
    }

    #[test]
    fn workers_keep_their_places_when_an_agent_before_them_has_more_ranks_or_fewer() {
        let now = start();
        let mut state = fleet(&[(1, 0), (2, 0), (3, 0)], now);
        let last = WorkerRef { agent: AgentKey::first(2), dp_rank: 0 };
        let _lease = LoadLease::acquire(&state.agent_with(AgentKey::first(2)).in_flight[0], 70);
        for ranks in [3, 1, 2] {
            let sessions: Vec<Session> = vec![];
            let began = Update::StreamBegan { description: description("a0", 2, ranks), sessions };
            state.apply(AgentKey::first(0), began, now);
            let loads: Vec<_> = (10..).take(ranks as usize).map(|turns| (turns, 0)).collect();
            state.apply(AgentKey::first(0), Update::Report(report(&loads)), now);
            let view = state.snapshot();
            let turns: Vec<u32> = view.worker_table().workers().map(WorkerStats::turns).collect();
            let expected: Vec<u32> = loads.iter().map(|load| load.0).chain([2, 4]).collect();
            assert_eq!(turns, expected);
            let stats = view.worker_table().get(last).expect("the worker was heard");
            assert_eq!((stats.worker(), stats.backlog_tokens(1, now)), (last, 70));
            assert!(
                view.worker_table()
                    .get(WorkerRef { agent: AgentKey::first(0), dp_rank: ranks })
                    .is_none()
            );
        }
    }
}
