//! Keeps what is known of the last turns that have ended, so that the API can show them. Pure.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use contract::{id::SessionKey, load::Retention, route::Kind};

use super::usage::TurnUsage;
use crate::{metrics::TurnOutcome, placement::Reason};

/// A record has about 400 bytes, so they take 1.6 MiB. At 40 turns a second they cover 100 s.
pub(crate) const RECORDS_MAX: usize = 4_096;

#[derive(Debug, Clone)]
pub(crate) struct TurnRecord {
    pub(crate) turn: u64,
    pub(crate) session: Option<SessionKey>,
    /// The session that started this one, as a sub-agent.
    pub(crate) parent: Option<SessionKey>,
    pub(crate) kind: Kind,
    /// Of a pair, the decode worker.
    pub(crate) worker: String,
    /// The worker that computed the prompt, if it was another one.
    pub(crate) prefill_worker: Option<String>,
    pub(crate) reason: Reason,
    pub(crate) is_retried: bool,
    /// As the turn ended. `None` if no agent has reported the session.
    pub(crate) retention: Option<Retention>,
    /// `None` if no answer began.
    pub(crate) status: Option<u16>,
    pub(crate) arrived_at: Instant,
    /// From the request's arrival to the first byte of a successful answer's body.
    pub(crate) ttft: Option<Duration>,
    /// From the request's arrival.
    pub(crate) duration: Duration,
    /// What placement expected the worker to compute, if it could count it.
    pub(crate) uncached_tokens_expected: Option<u64>,
    pub(crate) usage: TurnUsage,
    pub(crate) outcome: TurnOutcome,
}

#[derive(Debug)]
pub(crate) struct RecentTurns {
    records: VecDeque<TurnRecord>,
    /// Place of the first record in the order of all records.
    first_place: u64,
    records_max: usize,
}

impl RecentTurns {
    #[must_use]
    pub(crate) fn new(records_max: usize) -> Self {
        Self { records: VecDeque::new(), first_place: 1, records_max }
    }

    pub(crate) fn add(&mut self, record: TurnRecord) {
        self.records.push_back(record);
        while self.records.len() > self.records_max {
            self.records.pop_front();
            self.first_place += 1;
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
    }

    /// Returns wanted records, oldest first. Without `after`, these are the last `limit`. Also
    /// returns the place up to which the records were looked at.
    #[must_use]
    pub(crate) fn page(
        &self,
        after: Option<u64>,
        limit: usize,
        is_wanted: impl Fn(&TurnRecord) -> bool,
    ) -> (Vec<&TurnRecord>, u64) {
        let last_place = self.first_place + self.records.len() as u64 - 1;
        let places = (self.first_place..).zip(&self.records);
        let wanted = places.filter(|(_, record)| is_wanted(record));
        let Some(after) = after else {
            let mut newest: Vec<&TurnRecord> = wanted.map(|(_, record)| record).collect();
            newest.drain(..newest.len().saturating_sub(limit));
            return (newest, last_place);
        };
        let mut rest = wanted.skip_while(|(place, _)| *place <= after);
        let page: Vec<(u64, &TurnRecord)> = rest.by_ref().take(limit).collect();
        let looked_at = match page.last() {
            Some((place, _)) if rest.next().is_some() => *place,
            _ => last_place.max(after),
        };
        (page.into_iter().map(|(_, record)| record).collect(), looked_at)
    }

    #[cfg(any(test, debug_assertions))]
    fn check_invariants(&self) {
        assert!(self.records.len() <= self.records_max);
        assert!(self.first_place >= 1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fleet::testing::start;

    fn record(turn: u64) -> TurnRecord {
        TurnRecord {
            turn,
            session: None,
            parent: None,
            kind: Kind::Chat,
            worker: "a/0".to_owned(),
            prefill_worker: None,
            reason: Reason::Sticky,
            is_retried: false,
            retention: None,
            status: Some(200),
            arrived_at: start(),
            ttft: None,
            duration: Duration::ZERO,
            uncached_tokens_expected: None,
            usage: TurnUsage::default(),
            outcome: TurnOutcome::Ok,
        }
    }

    proptest! {
        /// A reader who follows the pages sees each kept turn that it wants once, in order.
        #[test]
        fn a_reader_sees_each_turn_once(
            added in prop::collection::vec(0_u64..6, 0..12),
            limit in 1_usize..4,
            modulus in 1_u64..3,
        ) {
            let mut recent = RecentTurns::new(8);
            let (mut seen, mut cursor, mut turn) = (vec![], 0, 0);
            let mut wanted = vec![];
            for count in added {
                for _ in 0..count {
                    recent.add(record(turn));
                    wanted.extend((turn % modulus == 0).then_some(turn));
                    turn += 1;
                }
                loop {
                    let (page, next) =
                        recent.page(Some(cursor), limit, |record| record.turn % modulus == 0);
                    prop_assert!(page.len() <= limit && next >= cursor);
                    seen.extend(page.iter().map(|record| record.turn));
                    if page.is_empty() {
                        break;
                    }
                    cursor = next;
                }
            }
            // At most 5 turns come between two looks, and 8 are kept.
            prop_assert_eq!(&seen, &wanted);
            let (last, next) = recent.page(None, limit, |record| record.turn % modulus == 0);
            let kept = wanted.iter().filter(|kept| **kept + 8 >= turn).count();
            let expected = &wanted[wanted.len() - kept.min(limit)..];
            prop_assert_eq!(last.iter().map(|record| record.turn).collect::<Vec<_>>(), expected);
            prop_assert_eq!(next, turn);
        }
    }
}
