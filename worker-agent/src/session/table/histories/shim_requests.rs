//! Numbers the requests to the shims, and lets a limited number of them await an answer at once.
//!
//! An answer repeats the number of its request, so nothing that the shim reports of itself, and no
//! late answer, is taken for it. A shim carries out a few requests per step of its scheduler, and
//! has a bounded queue, so those beyond the limit wait in line here. Only a sent request has a
//! deadline, so a shim may take as long as it needs for all.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use contract::id::SessionKey;

use crate::session::table::{Effect, Guard, Guards, Sessions, ShimRequest, Step, TableSettings};

/// The shim answers within a few scheduler steps. Even a long prefill step is shorter than this.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ShimTask {
    Demote,
    /// Report the history, after an abort of the turn `rid`. `is_repeat`: the last answer came too
    /// early, so this request makes a pause first.
    Inspect {
        rid: Option<String>,
        is_repeat: bool,
    },
}

#[derive(Debug)]
pub(crate) struct ShimRequests {
    count: u64,
    /// With one shim at a time.
    sent_max: usize,
    ranks: Vec<RankRequests>,
    guards: Guards,
}

#[derive(Debug, Default)]
struct RankRequests {
    waiting: VecDeque<WaitingRequest>,
    /// By number: the requests that the shim has or will get, and until when each counts.
    sent: BTreeMap<u64, (Instant, SessionKey)>,
}

#[derive(Debug)]
struct WaitingRequest {
    number: u64,
    key: SessionKey,
    task: ShimTask,
}

impl ShimRequests {
    pub(super) fn new(settings: &TableSettings) -> Self {
        let (sent_max, guards) = (settings.shim_requests_max(), settings.guards);
        Self { count: 0, sent_max, ranks: vec![], guards }
    }

    pub(super) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.ranks.len());
        self.ranks.resize_with(rank_count, RankRequests::default);
    }

    /// The caller must put the request into the session's state, and then call [`Self::send`].
    pub(super) fn add(
        &mut self,
        sessions: &Sessions,
        key: &SessionKey,
        task: ShimTask,
    ) -> ShimRequest {
        self.count += 1;
        let request = WaitingRequest { number: self.count, key: key.clone(), task };
        self.ranks[sessions[key].dp_rank as usize].waiting.push_back(request);
        ShimRequest { number: Some(self.count), until: None }
    }

    pub(super) fn send(&mut self, step: &mut Step, sessions: &mut Sessions, dp_rank: u32) {
        while let Some(WaitingRequest { number, key, task }) = self.next(dp_rank) {
            let session = sessions.get(&key);
            let request = session.and_then(|session| session.state.shim_request());
            let Some(request) = request.filter(|request| request.number == Some(number)) else {
                // The session was closed while the request waited.
                continue;
            };
            let until = request.until.unwrap_or(step.now + ANSWER_TIME_MAX);
            let incarnation = sessions.update(&key, |session| {
                session.state.await_shim_until(until);
                session.incarnation.clone()
            });
            self.ranks[dp_rank as usize].sent.insert(number, (until, key));
            step.push(match task {
                ShimTask::Demote => Effect::Demote { dp_rank, number, incarnation },
                ShimTask::Inspect { rid, is_repeat } => {
                    Effect::Inspect { dp_rank, number, incarnation, rid, is_repeat }
                }
            });
        }
    }

    /// Sends the requests for which a place is free, because another got no answer in time.
    pub(crate) fn replace_unanswered(&mut self, step: &mut Step, sessions: &mut Sessions) {
        for dp_rank in self.ranks_with_line() {
            self.ranks[dp_rank as usize].sent.retain(|_, (until, _)| *until > step.now);
            self.send(step, sessions, dp_rank);
        }
    }

    /// Returns the session if it still awaits this answer.
    pub(crate) fn take_answer(
        &mut self,
        step: &mut Step,
        sessions: &mut Sessions,
        dp_rank: u32,
        number: u64,
    ) -> Option<SessionKey> {
        let (_, key) = self.ranks.get_mut(dp_rank as usize)?.sent.remove(&number)?;
        self.send(step, sessions, dp_rank);
        let request = sessions.get(&key)?.state.shim_request()?;
        let is_awaited = request.number == Some(number);
        (is_awaited || !self.guards.is_on(Guard::AnswerMatched)).then_some(key)
    }

    fn next(&mut self, dp_rank: u32) -> Option<WaitingRequest> {
        let rank = &mut self.ranks[dp_rank as usize];
        (rank.sent.len() < self.sent_max).then(|| rank.waiting.pop_front()).flatten()
    }

    pub(super) fn clear(&mut self, dp_rank: u32) {
        self.ranks[dp_rank as usize] = RankRequests::default();
    }

    fn ranks_with_line(&self) -> Vec<u32> {
        let with_line = (0..).zip(&self.ranks).filter(|(_, rank)| !rank.waiting.is_empty());
        with_line.map(|(dp_rank, _)| dp_rank).collect()
    }

    /// When a place gets free at the latest for which requests wait.
    pub(crate) fn next_place(&self) -> Option<Instant> {
        let with_line = self.ranks.iter().filter(|rank| !rank.waiting.is_empty());
        with_line.flat_map(|rank| rank.sent.values().map(|(until, _)| *until)).min()
    }

    pub(super) fn check_invariants(&self) {
        for rank in &self.ranks {
            assert!(rank.sent.len() <= self.sent_max, "a shim is asked too much at once");
            let numbers = rank.sent.keys().chain(rank.waiting.iter().map(|it| &it.number));
            assert!(numbers.max().is_none_or(|newest| *newest <= self.count), "a number is new");
        }
    }
}
