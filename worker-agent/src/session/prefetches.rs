//! Counts the loads of KV from the host ahead of turns, and bounds them for each principal.
//!
//! A load takes room on the device that others could have, for a turn that may not come. So a
//! principal may have a few sessions that were loaded and have not returned. One that doesn't
//! return within [`RETURN_MAX`] was loaded in vain. A place is free only when the shim has
//! answered, so that not more is asked of it than there are places. This module is pure.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use contract::id::SessionKey;

use super::Error;

/// Sessions of one principal that may be loaded and not have returned: an agent and its helpers.
pub(super) const PREFETCHES_PER_PRINCIPAL_MAX: usize = 8;
/// Of all principals together: more than a device has room for at once.
pub(super) const PREFETCHES_MAX: usize = 256;
/// Nine in ten of a coding agent's turns follow the one before within this time.
pub(super) const RETURN_MAX: Duration = Duration::from_secs(60);
/// No load takes as long: half of a pool of 100 GB, at 20 GB/s, takes 2.5 s.
const LOAD_MAX: Duration = Duration::from_secs(3);

/// The loads at one worker agent whose sessions have not returned.
#[derive(Debug, Default)]
pub struct Prefetches {
    by_session: HashMap<SessionKey, Prefetch>,
    last_number: u64,
    counts: PrefetchCounts,
}

#[derive(Debug)]
struct Prefetch {
    began: Instant,
    /// What was loaded before the request that is not answered.
    tokens: u64,
    /// The request that the shim has not answered.
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Asked {
    number: u64,
    dp_rank: u32,
    /// What has become of the session meanwhile.
    fate: Fate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Awaited,
    Returned,
    Gone,
}

/// Tokens that were loaded ahead of a turn, since the agent started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefetchCounts {
    pub loaded_tokens: u64,
    /// Their session returned in time.
    pub used_tokens: u64,
    /// It did not, or was closed, or they were loaded again.
    pub wasted_tokens: u64,
}

impl Prefetches {
    /// Takes a place for a load. Returns the number by which [`Self::end`] knows it; `None` if the
    /// shim has not answered an earlier request for the session.
    ///
    /// # Errors
    /// [`Error::PrefetchShare`] if the principal has all the places that it may have, or all have.
    pub fn begin(
        &mut self,
        now: Instant,
        key: &SessionKey,
        dp_rank: u32,
    ) -> Result<Option<u64>, Error> {
        self.expire(now);
        let is_known = match self.by_session.get(key) {
            Some(Prefetch { asked: Some(_), .. }) => return Ok(None),
            known => known.is_some(),
        };
        let is_of_principal = |other: &&SessionKey| other.principal() == key.principal();
        let own = self.by_session.keys().filter(is_of_principal).count();
        let is_full =
            own >= PREFETCHES_PER_PRINCIPAL_MAX || self.by_session.len() >= PREFETCHES_MAX;
        if is_full && !is_known {
            return Err(Error::PrefetchShare { sessions: own });
        }
        self.last_number += 1;
        let asked = Some(Asked { number: self.last_number, dp_rank, fate: Fate::Awaited });
        let prefetch = Prefetch { began: now, tokens: 0, asked: None };
        let prefetch = self.by_session.entry(key.clone()).or_insert(prefetch);
        (prefetch.asked, prefetch.began) = (asked, now);
        self.check_invariants();
        Ok(Some(self.last_number))
    }

    /// Records the shim's answer: so many tokens are being loaded now. Returns whose they are, if
    /// no turn has come meanwhile.
    pub fn end(&mut self, number: u64, tokens: u64) -> Option<SessionKey> {
        let is_asked = |prefetch: &Prefetch| {
            prefetch.asked.as_ref().is_some_and(|asked| asked.number == number)
        };
        let found = self.by_session.iter_mut().find(|(_, prefetch)| is_asked(prefetch));
        // Of a rank whose shim was gone.
        let (key, prefetch) = found?;
        let fate = prefetch.asked.take().map_or(Fate::Awaited, |asked| asked.fate);
        self.counts.loaded_tokens += tokens;
        if tokens > 0 {
            // What was loaded before was evicted again.
            self.counts.wasted_tokens += prefetch.tokens;
            prefetch.tokens = tokens;
        }
        let (key, tokens) = (key.clone(), prefetch.tokens);
        match fate {
            Fate::Awaited if tokens > 0 => {}
            Fate::Awaited => drop(self.by_session.remove(&key)),
            Fate::Returned => self.end_awaiting(&key, |counts| &mut counts.used_tokens),
            Fate::Gone => self.end_awaiting(&key, |counts| &mut counts.wasted_tokens),
        }
        self.check_invariants();
        (fate == Fate::Awaited).then_some(key)
    }

    /// Gives back the places of a rank whose shim is gone.
    pub fn remove_rank(&mut self, dp_rank: u32) {
        let of_rank = |asked: &Asked| asked.dp_rank == dp_rank;
        let asked = self.by_session.values().filter_map(|prefetch| prefetch.asked.as_ref());
        let numbers: Vec<u64> =
            asked.filter(|asked| of_rank(asked)).map(|asked| asked.number).collect();
        for number in numbers {
            self.end(number, 0);
        }
    }

    /// Records that a turn of the session has come.
    pub fn record_return(&mut self, now: Instant, key: &SessionKey) {
        self.expire(now);
        self.decide(key, Fate::Returned, |counts| &mut counts.used_tokens);
    }

    /// Records that the session is gone.
    pub fn forget(&mut self, key: &SessionKey) {
        self.decide(key, Fate::Gone, |counts| &mut counts.wasted_tokens);
    }

    fn decide(
        &mut self,
        key: &SessionKey,
        fate: Fate,
        count: impl Fn(&mut PrefetchCounts) -> &mut u64,
    ) {
        match self.by_session.get_mut(key) {
            // The load may have begun already: the answer tells.
            Some(Prefetch { asked: Some(asked), .. }) => asked.fate = fate,
            Some(Prefetch { asked: None, .. }) => self.end_awaiting(key, count),
            None => {}
        }
        self.check_invariants();
    }

    fn end_awaiting(&mut self, key: &SessionKey, count: impl Fn(&mut PrefetchCounts) -> &mut u64) {
        if let Some(prefetch) = self.by_session.remove(key) {
            *count(&mut self.counts) += prefetch.tokens;
        }
    }

    /// Gives back the places of sessions that did not return in time.
    pub fn expire(&mut self, now: Instant) {
        let wasted = &mut self.counts.wasted_tokens;
        self.by_session.retain(|_, prefetch| {
            let is_kept = prefetch.asked.is_some() || prefetch.began + RETURN_MAX > now;
            *wasted += if is_kept { 0 } else { prefetch.tokens };
            is_kept
        });
        self.check_invariants();
    }

    /// Whether the engine may be loading KV for one. Then it isn't idle, though no turn runs.
    #[must_use]
    pub fn may_be_loading(&self, now: Instant) -> bool {
        let mut prefetches = self.by_session.values();
        prefetches.any(|prefetch| prefetch.asked.is_some() || prefetch.began + LOAD_MAX > now)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_session.is_empty()
    }

    #[must_use]
    pub fn counts(&self) -> PrefetchCounts {
        self.counts
    }

    /// # Panics
    /// If a token is counted twice, or a bound is exceeded.
    pub fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let PrefetchCounts { loaded_tokens, used_tokens, wasted_tokens } = self.counts;
        let awaited: u64 = self.by_session.values().map(|prefetch| prefetch.tokens).sum();
        assert_eq!(loaded_tokens, used_tokens + wasted_tokens + awaited, "tokens loaded ahead");
        assert!(self.by_session.len() <= PREFETCHES_MAX, "loads ahead");
        let mut places = self.by_session.values();
        assert!(places.all(|it| it.asked.is_some() || it.tokens > 0), "a place for nothing");
    }
}

#[cfg(test)]
mod tests {
    use service::clock::now;

    use super::*;

    fn key(principal: &str, number: usize) -> SessionKey {
        SessionKey::new(principal, format!("s{number}")).unwrap()
    }

    fn counts(loaded_tokens: u64, used_tokens: u64, wasted_tokens: u64) -> PrefetchCounts {
        PrefetchCounts { loaded_tokens, used_tokens, wasted_tokens }
    }

    #[test]
    fn a_load_whose_session_returns_was_of_use_and_one_whose_session_does_not_was_wasted() {
        let (mut prefetches, begin) = (Prefetches::default(), now());
        for (number, tokens) in [(1, 100), (2, 20), (3, 3)] {
            let begun = prefetches.begin(begin, &key("a", number), 0).unwrap();
            assert_eq!(begun, Some(number as u64));
            prefetches.end(number as u64, tokens);
        }
        prefetches.record_return(begin + RETURN_MAX / 2, &key("a", 1));
        prefetches.forget(&key("a", 3));
        prefetches.record_return(begin + RETURN_MAX, &key("a", 2));
        assert_eq!(prefetches.counts(), counts(123, 100, 23));
        assert!(prefetches.is_empty());
    }

    #[test]
    fn a_principal_has_its_share_of_places_and_takes_nobody_elses() {
        let (mut prefetches, begin) = (Prefetches::default(), now());
        for number in 0..PREFETCHES_PER_PRINCIPAL_MAX {
            prefetches.begin(begin, &key("a", number), 0).unwrap();
        }
        assert!(matches!(
            prefetches.begin(begin, &key("a", 100), 0),
            Err(Error::PrefetchShare { sessions: PREFETCHES_PER_PRINCIPAL_MAX })
        ));
        prefetches.begin(begin, &key("b", 0), 0).unwrap();
        // Nothing was loaded for the first.
        prefetches.end(1, 0);
        prefetches.begin(begin, &key("a", 100), 0).unwrap();
        // No time gives back a place whose request the shim still has.
        let later = begin + 2 * RETURN_MAX;
        let own = prefetches.by_session.len();
        for principal in own..PREFETCHES_MAX {
            prefetches.begin(later, &key(&format!("p{principal}"), 0), 0).unwrap();
        }
        let begun = prefetches.begin(later, &key("last", 0), 0);
        assert!(matches!(begun, Err(Error::PrefetchShare { sessions: 0 })));
        prefetches.remove_rank(1);
        assert_eq!(prefetches.by_session.len(), PREFETCHES_MAX, "of the other rank");
        prefetches.remove_rank(0);
        assert!(prefetches.is_empty());
    }

    #[test]
    fn a_turn_that_comes_before_the_answer_keeps_the_place_and_uses_the_load() {
        let (mut prefetches, begin) = (Prefetches::default(), now());
        let [first, second] =
            [0, 1].map(|number| prefetches.begin(begin, &key("a", number), 0).unwrap().unwrap());
        prefetches.record_return(begin, &key("a", 0));
        prefetches.forget(&key("a", 1));
        assert_eq!(prefetches.begin(begin, &key("a", 0), 0), Ok(None), "the shim was asked");
        prefetches.end(first, 50);
        prefetches.end(second, 7);
        assert_eq!(prefetches.counts(), counts(57, 50, 7));
        assert!(prefetches.is_empty());
    }

    #[test]
    fn what_was_evicted_again_is_loaded_again() {
        let (mut prefetches, begin) = (Prefetches::default(), now());
        for tokens in [50, 0, 30] {
            let number = prefetches.begin(begin, &key("a", 0), 0).unwrap().unwrap();
            prefetches.end(number, tokens);
        }
        prefetches.record_return(begin, &key("a", 0));
        assert_eq!(prefetches.counts(), counts(80, 30, 50));
    }

    #[test]
    fn the_engine_may_be_loading_until_the_longest_load_has_ended() {
        let (mut prefetches, begin) = (Prefetches::default(), now());
        assert!(!prefetches.may_be_loading(begin));
        let number = prefetches.begin(begin, &key("a", 0), 0).unwrap().unwrap();
        assert!(prefetches.may_be_loading(begin + RETURN_MAX), "the shim was asked");
        prefetches.end(number, 50);
        assert!(prefetches.may_be_loading(begin + LOAD_MAX / 2));
        assert!(!prefetches.may_be_loading(begin + LOAD_MAX));
    }
}
