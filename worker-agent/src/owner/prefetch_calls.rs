//! Handles the calls to the owner task that load a session's KV from the host ahead of its turn.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use contract::id::SessionKey;
use service::clock::now;
use tokio::sync::oneshot;

use super::{Error, Owner};
use crate::{
    metrics::Metrics,
    session::{self, ExpectedReturns, PrefetchCounts, Prefetches, Presence, Table},
};

/// How long nothing is loaded after a control call: else clients that prefetch could keep an
/// operator off for ever. A call that had to wait comes again within seconds.
const CONTROL_PAUSE: Duration = Duration::from_secs(10);

type PrefetchReply = oneshot::Sender<Result<u64, Error>>;

/// The loads ahead of turns, and the callers that wait for the shim's answer: a place for each.
#[derive(Default)]
pub(super) struct PrefetchCalls {
    loads: Prefetches,
    expected: ExpectedReturns,
    /// By the load's number, with the rank whose shim answers.
    waiting: HashMap<u64, (u32, PrefetchReply)>,
    /// No load before this time.
    paused_until: Option<Instant>,
    /// What the metrics have of the loads.
    counted: PrefetchCounts,
}

impl PrefetchCalls {
    /// Handles the shim's answer, whose refusals are those of its `prefetch.py`.
    pub(super) fn finish(&mut self, number: u64, tokens: u64, refusal: Option<String>) {
        let key = self.loads.end(number, tokens);
        let Some((_, reply)) = self.waiting.remove(&number) else {
            let is_busy = matches!(refusal.as_deref(), Some("busy" | "no_room"));
            if let Some(key) = key.filter(|_| is_busy) {
                self.expected.look_again(now(), &key);
            }
            return;
        };
        let result = match refusal {
            None => Ok(tokens),
            Some(reason) => match reason.as_str() {
                "unknown" | "resident" => Ok(0),
                "busy" => Err(no_room("it has prompts or other loads to work on")),
                "no_room" => Err(no_room("the device has no room for it")),
                "too_long" => Err(unavailable("the session needs more than half of its pool")),
                _ => Err(session::Error::PrefetchUnavailable(reason)),
            },
        };
        let _ = reply.send(result.map_err(Error::from));
    }

    /// Answers the callers whose shim is gone.
    pub(super) fn remove_rank(&mut self, dp_rank: u32) {
        let of_rank = |_: &u64, waiting: &mut (u32, PrefetchReply)| waiting.0 == dp_rank;
        self.loads.remove_rank(dp_rank);
        for (_, (_, reply)) in self.waiting.extract_if(of_rank) {
            let _ = reply.send(Err(no_room("its shim has disconnected").into()));
        }
    }

    /// Looks after a session that has changed: a turn has come, or it is gone.
    pub(super) fn check(&mut self, table: &Table, key: &SessionKey) {
        if self.loads.is_empty() {
            return;
        }
        match table.sessions().get(key) {
            Some(session) if session.has_turns() => self.loads.record_return(now(), key),
            Some(session) if !session.is_gone() => {}
            Some(_) | None => self.loads.forget(key),
        }
    }

    /// Records that a turn begins, whether it says that the session's next one follows soon, and
    /// whether another one of the session has begun before.
    pub(super) fn begin_turn(
        &mut self,
        now: Instant,
        key: &SessionKey,
        returns_soon: bool,
        is_beside: bool,
    ) {
        self.expected.begin_turn(now, key, returns_soon, is_beside);
    }

    /// Returns the sessions that are about to return, and whose KV may be on the host.
    pub(super) fn due(&mut self, now: Instant, table: &Table) -> Vec<SessionKey> {
        self.expected.due(now, |key| match table.sessions().get(key) {
            Some(session) if session.has_turns() => Presence::Running,
            Some(session) if !session.is_gone() => Presence::Idle,
            Some(_) | None => Presence::Gone,
        })
    }

    /// Whether the engine may be loading KV, so that it isn't idle though no turn runs.
    pub(super) fn may_be_loading(&self, now: Instant) -> bool {
        self.loads.may_be_loading(now)
    }

    /// Begins no load for a while, so that the engine becomes idle.
    pub(super) fn pause(&mut self, now: Instant) {
        self.paused_until = Some(now + CONTROL_PAUSE);
    }

    /// Brings the metrics up to date.
    pub(super) fn count(&mut self, now: Instant, metrics: &Metrics) {
        self.loads.expire(now);
        let counts = self.loads.counts();
        metrics.count_prefetches("loaded", counts.loaded_tokens - self.counted.loaded_tokens);
        metrics.count_prefetches("used", counts.used_tokens - self.counted.used_tokens);
        metrics.count_prefetches("wasted", counts.wasted_tokens - self.counted.wasted_tokens);
        self.counted = counts;
    }
}

impl Owner {
    /// `reply` gets how many tokens begin to be loaded. Nobody waits for the load of a session that
    /// is only expected.
    pub(super) fn prefetch(&mut self, key: &SessionKey, reply: Option<PrefetchReply>) {
        let begun = self.check_usable().and_then(|()| Ok(self.begin_prefetch(key)?));
        let Some(reply) = reply else { return };
        match begun {
            Ok(Some((dp_rank, number))) => {
                self.prefetches.waiting.insert(number, (dp_rank, reply));
            }
            Ok(None) => drop(reply.send(Ok(0))),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Returns the rank and the number of the load; `None` if there is nothing to load.
    fn begin_prefetch(&mut self, key: &SessionKey) -> Result<Option<(u32, u64)>, session::Error> {
        let target = self.table.sessions().prefetch_target(key)?;
        let Some((dp_rank, incarnation)) = target else { return Ok(None) };
        // A paused engine doesn't see the end of a load, and then can't release its memory.
        let is_paused = self.prefetches.paused_until.is_some_and(|until| now() < until);
        if is_paused || self.control.hold_reason().is_some() {
            return Err(no_room("an operator holds it back"));
        }
        if !self.reporter.ledger.has_host_tier(dp_rank) {
            return Err(unavailable("it has no host memory for KV, or no shim that counts it"));
        }
        let begun = self.prefetches.loads.begin(now(), key, dp_rank)?;
        let Some(number) = begun else { return Ok(None) };
        let tokens_max = self.engine.info().map_or(0, |info| info.pool_tokens / 2);
        let asked = self.shims.handle().prefetch(dp_rank, number, incarnation.into(), tokens_max);
        if let Err(error) = asked {
            self.prefetches.loads.end(number, 0);
            return Err(no_room(&error.to_string()));
        }
        Ok(Some((dp_rank, number)))
    }
}

fn no_room(why: &str) -> session::Error {
    session::Error::PrefetchNoRoom(why.to_owned())
}

fn unavailable(why: &str) -> session::Error {
    session::Error::PrefetchUnavailable(why.to_owned())
}
