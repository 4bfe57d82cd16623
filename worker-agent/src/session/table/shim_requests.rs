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

use super::{Effect, Guard, ShimRequest, Table};

/// The shim answers within a few scheduler steps. Even a long prefill step is shorter than this.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ShimTask {
    Demote,
    /// Report the history, after an abort of the turn `rid`. `is_repeat`: the last answer came too
    /// early, so this request makes a pause first.
    Inspect {
        rid: Option<String>,
        is_repeat: bool,
    },
}

#[derive(Debug)]
pub(super) struct ShimRequests {
    count: u64,
    /// With one shim at a time.
    sent_max: usize,
    ranks: Vec<RankRequests>,
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
    pub(super) fn new(sent_max: usize) -> Self {
        Self { count: 0, sent_max, ranks: vec![] }
    }

    pub(super) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.ranks.len());
        self.ranks.resize_with(rank_count, RankRequests::default);
    }

    fn add(&mut self, dp_rank: u32, key: SessionKey, task: ShimTask) -> u64 {
        self.count += 1;
        let request = WaitingRequest { number: self.count, key, task };
        self.ranks[dp_rank as usize].waiting.push_back(request);
        self.count
    }

    fn next(&mut self, dp_rank: u32) -> Option<WaitingRequest> {
        let rank = &mut self.ranks[dp_rank as usize];
        (rank.sent.len() < self.sent_max).then(|| rank.waiting.pop_front()).flatten()
    }

    fn answer(&mut self, dp_rank: u32, number: u64) -> Option<SessionKey> {
        self.ranks.get_mut(dp_rank as usize)?.sent.remove(&number).map(|(_, key)| key)
    }

    pub(super) fn clear(&mut self, dp_rank: u32) {
        self.ranks[dp_rank as usize] = RankRequests::default();
    }

    /// Gives the places of requests back whose time has passed.
    fn expire(&mut self, dp_rank: u32, now: Instant) {
        self.ranks[dp_rank as usize].sent.retain(|_, (until, _)| *until > now);
    }

    fn ranks_with_line(&self) -> Vec<u32> {
        let with_line = (0..).zip(&self.ranks).filter(|(_, rank)| !rank.waiting.is_empty());
        with_line.map(|(dp_rank, _)| dp_rank).collect()
    }

    /// When a place gets free at the latest for which requests wait.
    pub(super) fn next_place(&self) -> Option<Instant> {
        let with_line = self.ranks.iter().filter(|rank| !rank.waiting.is_empty());
        with_line.flat_map(|rank| rank.sent.values().map(|(until, _)| *until)).min()
    }
}

impl Table {
    /// The caller must put the request into the session's state, and then call
    /// [`Self::send_shim_requests`].
    pub(super) fn request_of_shim(&mut self, key: &SessionKey, task: ShimTask) -> ShimRequest {
        let dp_rank = self.sessions[key].dp_rank;
        let number = self.shim_requests.add(dp_rank, key.clone(), task);
        ShimRequest { number: Some(number), until: None }
    }

    pub(super) fn send_shim_requests(&mut self, now: Instant, dp_rank: u32) {
        while let Some(WaitingRequest { number, key, task }) = self.shim_requests.next(dp_rank) {
            let session = self.sessions.get(&key);
            let request = session.and_then(|session| session.state.shim_request());
            let Some(request) = request.filter(|request| request.number == Some(number)) else {
                // The session was closed while the request waited.
                continue;
            };
            let until = request.until.unwrap_or(now + ANSWER_TIME_MAX);
            let incarnation = self.sessions.update(&key, |session| {
                session.state.await_shim_until(until);
                session.incarnation.clone()
            });
            self.shim_requests.ranks[dp_rank as usize].sent.insert(number, (until, key));
            self.effects.push(match task {
                ShimTask::Demote => Effect::Demote { dp_rank, number, incarnation },
                ShimTask::Inspect { rid, is_repeat } => {
                    Effect::Inspect { dp_rank, number, incarnation, rid, is_repeat }
                }
            });
        }
    }

    /// Sends the requests for which a place is free, because another got no answer in time.
    pub(super) fn replace_unanswered_requests(&mut self, now: Instant) {
        for dp_rank in self.shim_requests.ranks_with_line() {
            self.shim_requests.expire(dp_rank, now);
            self.send_shim_requests(now, dp_rank);
        }
    }

    /// Returns the session if it still awaits this answer.
    pub(super) fn take_shim_answer(
        &mut self,
        now: Instant,
        dp_rank: u32,
        number: u64,
    ) -> Option<SessionKey> {
        let key = self.shim_requests.answer(dp_rank, number)?;
        self.send_shim_requests(now, dp_rank);
        let request = self.sessions.get(&key)?.state.shim_request()?;
        let is_awaited = request.number == Some(number);
        (is_awaited || !self.settings.guards.is_on(Guard::AnswerMatched)).then_some(key)
    }
}
