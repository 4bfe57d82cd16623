//! What a decision reads of every worker, side by side in memory: it compares a thousand of them,
//! and to go from each to its agent, its report and its counts takes longer than the arithmetic. An
//! agent's lines are laid out anew when something is heard of it, and all when demand was summed.
//! Pure.

use std::{
    iter,
    num::{NonZeroU32, NonZeroU64},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use proto::load::{Figure, Lane, RankLoad, Retention};

use super::{Agent, WorkerRef, WorkerState, demand::Wanted};
use crate::lease::{Counts, InFlight};

/// All workers that were ever heard, in order.
#[derive(Debug, Clone)]
pub struct Roster {
    lines: Vec<Line>,
    /// Of the same workers; apart, because a snapshot copies the lines, and counts are shared.
    in_flight: Arc<Vec<Arc<InFlight>>>,
    /// Where an agent's lines begin, and where the last one's end.
    starts: Vec<usize>,
}

/// What was heard of a worker, as far as every decision needs it: three cache lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Line {
    worker: WorkerRef,
    /// As long as its agent is heard in time.
    state: WorkerState,
    /// A bit for each that it offers.
    retentions: u8,
    heard: Option<Instant>,
    reported: Option<Instant>,
    prefill_tokens_per_s: Option<NonZeroU64>,
    backlog: Option<Figure>,
    lane: Option<LaneLine>,
    waiting: u64,
    turns: u32,
    turns_max: u32,
    sessions: u32,
    turns_at_report: u32,
    opens_at_report: u32,
    unanswered_tokens_at_report: u64,
    pool_tokens: Option<NonZeroU64>,
    used_tokens: Option<u64>,
    wanted_tokens: u64,
    rows: Option<(u64, NonZeroU64)>,
}

/// Its slow lane: what was reported less what this router had there then, so that with what it has
/// now it is what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LaneLine {
    tokens: i64,
    prompts: i32,
    piece_tokens: NonZeroU32,
}

/// One worker with what this router has on it now.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    line: &'a Line,
    in_flight: &'a InFlight,
}

impl Roster {
    /// Nobody was heard yet of so many agents.
    pub(super) fn new(agents: usize) -> Self {
        Self { lines: vec![], in_flight: Arc::default(), starts: vec![0; agents + 1] }
    }

    /// Lays out what is known of an agent now, with what is wanted on its ranks.
    pub(super) fn lay(&mut self, index: usize, agent: &Agent, wanted: &[Wanted]) {
        let ranks = agent.facts.as_ref().map_or(0, |facts| facts.description.ranks.len());
        let place = self.place(index);
        if ranks != place.len() {
            let counts = agent.in_flight.iter().take(ranks).cloned();
            drop(Arc::make_mut(&mut self.in_flight).splice(place.clone(), counts));
            for start in &mut self.starts[index + 1..] {
                *start = *start + ranks - place.len();
            }
        }
        let wanted = wanted.iter().chain(iter::repeat(&Wanted::NOTHING));
        let lines = (0..)
            .zip(wanted)
            .take(ranks)
            .map(|(dp_rank, wanted)| Line::new(WorkerRef { agent: index, dp_rank }, agent, wanted));
        drop(self.lines.splice(place, lines));
    }

    /// All of them.
    pub fn workers(&self) -> impl ExactSizeIterator<Item = Seen<'_>> {
        let all = self.lines.iter().zip(self.in_flight.iter());
        all.map(|(line, in_flight)| Seen { line, in_flight })
    }

    /// One of them; none if it was never heard.
    #[must_use]
    pub fn get(&self, worker: WorkerRef) -> Option<Seen<'_>> {
        let at = self.place(worker.agent).nth(worker.dp_rank as usize)?;
        Some(Seen { line: &self.lines[at], in_flight: &self.in_flight[at] })
    }

    fn place(&self, agent: usize) -> Range<usize> {
        self.starts[agent]..self.starts[agent + 1]
    }

    /// Panics where it says something else than the agents do.
    pub(super) fn check_invariants(
        &self,
        agents: &[Arc<Agent>],
        wanted: impl Fn(WorkerRef) -> Wanted,
    ) {
        assert_eq!((self.starts.len(), self.starts[0]), (agents.len() + 1, 0));
        assert_eq!(self.starts[agents.len()], self.lines.len());
        assert_eq!(self.in_flight.len(), self.lines.len());
        for (index, agent) in agents.iter().enumerate() {
            let ranks = agent.facts.as_ref().map_or(0, |facts| facts.description.ranks.len());
            assert_eq!(self.place(index).len(), ranks);
            for (dp_rank, at) in (0..).zip(self.place(index)) {
                let worker = WorkerRef { agent: index, dp_rank };
                assert_eq!(self.lines[at], Line::new(worker, agent, &wanted(worker)));
                assert!(Arc::ptr_eq(&self.in_flight[at], &agent.in_flight[dp_rank as usize]));
            }
        }
    }
}

impl Line {
    fn new(worker: WorkerRef, agent: &Agent, wanted: &Wanted) -> Self {
        let load = agent.rank_load(worker.dp_rank);
        let told = |figure: fn(&RankLoad) -> Option<Figure>| Some(load.and_then(figure)?.value);
        let backlog = load.and_then(|load| load.prefill_backlog_tokens);
        let waiting = |load: &RankLoad| {
            let in_engine = load.requests_waiting.map_or(0, |figure| figure.value);
            in_engine.saturating_add(load.turns_queued.into())
        };
        let rows_total = told(|load| load.rows_total).and_then(NonZeroU64::new);
        let offered = agent.facts.iter().flat_map(|facts| &facts.description.retentions);
        let at_report = agent.in_flight_at_report.get(worker.dp_rank as usize);
        let at_report = at_report.copied().unwrap_or_default();
        Self {
            worker,
            state: agent.state_heard(),
            retentions: offered.fold(0, |bits, retention| bits | bit(*retention)),
            heard: agent.heard,
            reported: agent.report.as_ref().map(|(_, at)| *at),
            prefill_tokens_per_s: told(|load| load.prefill_tokens_per_s).and_then(NonZeroU64::new),
            backlog,
            lane: load.and_then(|load| LaneLine::new(load.lane?, at_report)),
            waiting: load.filter(|_| backlog.is_none()).map_or(0, waiting),
            turns: load.map_or(0, |load| load.turns_running),
            turns_max: load.map_or(0, |load| load.turns_running_max),
            sessions: load.map_or(0, |load| load.sessions),
            turns_at_report: at_report.turns,
            opens_at_report: at_report.opens,
            unanswered_tokens_at_report: at_report.unanswered_tokens,
            pool_tokens: told(|load| load.pool_total_tokens).and_then(NonZeroU64::new),
            used_tokens: told(|load| load.pool_used_tokens).max(told(|load| load.pinned_tokens)),
            wanted_tokens: wanted.tokens,
            rows: told(|load| load.rows_held).zip(rows_total),
        }
    }
}

impl LaneLine {
    fn new(reported: Lane, at_report: Counts) -> Option<Self> {
        let tokens = |tokens: u64| i64::try_from(tokens).unwrap_or(i64::MAX);
        let prompts = |prompts: u32| i32::try_from(prompts).unwrap_or(i32::MAX);
        Some(Self {
            tokens: tokens(reported.tokens).saturating_sub(tokens(at_report.lane_tokens)),
            prompts: prompts(reported.prompts).saturating_sub(prompts(at_report.lane_prompts)),
            piece_tokens: u32::try_from(reported.piece_tokens)
                .map_or(Some(NonZeroU32::MAX), NonZeroU32::new)?,
        })
    }
}

impl<'a> Seen<'a> {
    /// Which.
    #[must_use]
    pub fn worker(self) -> WorkerRef {
        self.line.worker
    }

    /// What it may be used for, if silence makes it stale after so long.
    #[must_use]
    pub fn state(self, now: Instant, report_age_max: Duration) -> WorkerState {
        self.line.state.aged(self.line.heard, now, report_age_max)
    }

    /// Whether it keeps sessions that way.
    #[must_use]
    pub fn offers(self, retention: Retention) -> bool {
        self.line.retentions & bit(retention) != 0
    }

    /// Prompt tokens that it computes in a second, if it was measured.
    #[must_use]
    pub fn prefill_tokens_per_s(self) -> Option<u64> {
        self.line.prefill_tokens_per_s.map(NonZeroU64::get)
    }

    /// Turns on it: those it reported, corrected by what this router has begun and ended since, and
    /// never fewer than this router has in flight there.
    #[must_use]
    pub fn turns(self) -> u32 {
        let now = self.in_flight.turns();
        let Line { turns, turns_at_report, .. } = self.line;
        turns.saturating_add(now).saturating_sub(*turns_at_report).max(now)
    }

    /// Turns it admits; 0 when not reported.
    #[must_use]
    pub fn turns_max(self) -> u32 {
        self.line.turns_max
    }

    /// Prompt tokens to be computed before a turn that is sent now: those reported, less what was
    /// computed since at that rate, and those sent since. Without a report of them, this router's
    /// own that have no answer yet.
    #[must_use]
    pub fn backlog_tokens(self, tokens_per_s: u64, now: Instant) -> u64 {
        let own = self.in_flight.unanswered_tokens();
        let Line { backlog: Some(figure), reported: Some(at), .. } = self.line else {
            return own;
        };
        let age = now.saturating_duration_since(*at).as_millis() + u128::from(figure.age_ms);
        let age_ms = u64::try_from(age).unwrap_or(u64::MAX);
        let computed = tokens_per_s.saturating_mul(age_ms) / 1000;
        let left = figure.value.saturating_sub(computed);
        left.saturating_add(own.saturating_sub(self.line.unanswered_tokens_at_report))
    }

    /// Tokens of a piece, where long prompts are computed in pieces.
    #[must_use]
    pub fn piece_tokens(self) -> Option<u64> {
        self.line.lane.map(|lane| lane.piece_tokens.get().into())
    }

    /// Long prompts that are computed there in pieces: those reported, corrected by those this
    /// router has sent there and sent on since. None: the worker doesn't do that.
    #[must_use]
    pub fn lane(self) -> Option<Lane> {
        let LaneLine { tokens, prompts, piece_tokens } = self.line.lane?;
        let now = self.in_flight.counts();
        Some(Lane {
            tokens: now.lane_tokens.saturating_add_signed(tokens),
            prompts: now.lane_prompts.saturating_add_signed(prompts),
            piece_tokens: piece_tokens.get().into(),
        })
    }

    /// Requests that wait there with prompts of which nobody tells the tokens.
    #[must_use]
    pub fn waiting_untold(self) -> u64 {
        self.line.waiting
    }

    /// The pool, tokens.
    #[must_use]
    pub fn pool_tokens(self) -> Option<u64> {
        self.line.pool_tokens.map(NonZeroU64::get)
    }

    /// KV that eviction can't take, tokens.
    #[must_use]
    pub fn used_tokens(self) -> Option<u64> {
        self.line.used_tokens
    }

    /// KV of sessions that will be wanted again, tokens.
    #[must_use]
    pub fn wanted_tokens(self) -> u64 {
        self.line.wanted_tokens
    }

    /// Rows that pinned sessions hold, and all.
    #[must_use]
    pub fn rows(self) -> Option<(u64, u64)> {
        self.line.rows.map(|(held, total)| (held, total.get()))
    }

    /// Sessions open there, with those this router opened since the last report.
    #[must_use]
    pub fn sessions(self) -> u32 {
        self.line.sessions.saturating_add(self.opens_since_report())
    }

    /// KV of turns that this router has there and that no session table can know of yet.
    #[must_use]
    pub fn coming_tokens(self) -> u64 {
        self.in_flight.coming_tokens()
    }

    /// Sessions this router has opened there since the last report.
    #[must_use]
    pub fn opens_since_report(self) -> u32 {
        self.in_flight.opens().wrapping_sub(self.line.opens_at_report)
    }
}

fn bit(retention: Retention) -> u8 {
    1 << retention as u8
}

#[cfg(test)]
mod tests {
    use proto::load::Session;

    use super::*;
    use crate::{
        lease::Lease,
        testing::{description, fleet, report, start},
        view::Update,
    };

    /// A line's size is what a decision over a thousand workers costs.
    #[test]
    fn a_line_has_three_cache_lines() {
        assert!(size_of::<Line>() <= 192, "{}", size_of::<Line>());
    }

    #[test]
    fn workers_keep_their_places_when_an_agent_before_them_has_more_ranks_or_fewer() {
        let now = start();
        let mut state = fleet(&[(1, 0), (2, 0), (3, 0)], now);
        let last = WorkerRef { agent: 2, dp_rank: 0 };
        let _lease = Lease::acquire(&state.agent_at(2).in_flight[0], 70);
        for ranks in [3, 1, 2] {
            let sessions: Vec<Session> = vec![];
            let began = Update::Began { description: description("a0", 2, ranks), sessions };
            state.apply(0, began, now);
            let loads: Vec<_> = (10..).take(ranks as usize).map(|turns| (turns, 0)).collect();
            state.apply(0, Update::Report(report(&loads)), now);
            let view = state.snapshot();
            let turns: Vec<u32> = view.roster().workers().map(Seen::turns).collect();
            let expected: Vec<u32> = loads.iter().map(|load| load.0).chain([2, 4]).collect();
            assert_eq!(turns, expected);
            let seen = view.roster().get(last).expect("it was heard");
            assert_eq!((seen.worker(), seen.backlog_tokens(1, now)), (last, 70));
            assert!(view.roster().get(WorkerRef { agent: 0, dp_rank: ranks }).is_none());
        }
    }
}
