//! The sessions whose clients said that they come back soon.
//!
//! If the KV of one has fallen to the host by then, it is loaded shortly before the session is
//! expected: after three quarters of its last rest. The engine takes a look for a use of the KV and
//! keeps it longer, so there is one look, and a few more only while the engine is busy. This module
//! is pure.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use contract::id::SessionKey;

use super::prefetches::{PREFETCHES_MAX, PREFETCHES_PER_PRINCIPAL_MAX, RETURN_MAX};

/// When a session is looked at whose last rest isn't known. Most tools take longer.
const FIRST_LOOK: Duration = Duration::from_secs(1);
/// Looks in one rest, if the engine is busy at the first.
const LOOKS_MAX: u8 = 3;
/// The time between two of them.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What an expected session does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Running,
    Idle,
    Gone,
}

#[derive(Debug, Default)]
pub struct ExpectedReturns {
    by_session: HashMap<SessionKey, Expected>,
}

#[derive(Debug, Default)]
struct Expected {
    last_rest: Option<Duration>,
    rest: Option<Rest>,
}

/// The time since a session has no turn.
#[derive(Debug)]
struct Rest {
    began: Instant,
    next_look: Option<Instant>,
    looks: u8,
}

impl ExpectedReturns {
    /// Records that a turn begins, and whether it says that another one follows soon. What a turn
    /// says beside another one (`is_beside`) ends no expectation: a program's side questions say
    /// nothing of its main work.
    pub fn begin_turn(&mut self, now: Instant, key: &SessionKey, says: bool, is_beside: bool) {
        if let Some(expected) = self.by_session.get_mut(key) {
            let rest = expected.rest.take();
            expected.last_rest = rest.map(|rest| now - rest.began).or(expected.last_rest);
            if !says && !is_beside {
                self.by_session.remove(key);
            }
        } else if says && self.make_room(key) {
            self.by_session.insert(key.clone(), Expected::default());
        }
    }

    /// Whether there is a place for one more of the principal. The one of its own that rests
    /// longest gives way.
    fn make_room(&mut self, key: &SessionKey) -> bool {
        let is_of_principal = |other: &&SessionKey| other.principal() == key.principal();
        let own = self.by_session.keys().filter(is_of_principal).count();
        if own >= PREFETCHES_PER_PRINCIPAL_MAX {
            let resting = self.by_session.iter().filter(|(other, _)| is_of_principal(other));
            let resting = resting.filter_map(|(other, it)| Some((it.rest.as_ref()?.began, other)));
            let longest = resting.min_by_key(|(began, _)| *began).map(|(_, other)| other.clone());
            longest.and_then(|other| self.by_session.remove(&other));
        }
        let own = self.by_session.keys().filter(is_of_principal).count();
        own < PREFETCHES_PER_PRINCIPAL_MAX && self.by_session.len() < PREFETCHES_MAX
    }

    /// Returns the sessions whose KV may have to be loaded now.
    pub fn due(
        &mut self,
        now: Instant,
        presence: impl Fn(&SessionKey) -> Presence,
    ) -> Vec<SessionKey> {
        let mut due = vec![];
        self.by_session.retain(|key, expected| {
            match presence(key) {
                Presence::Gone => return false,
                Presence::Running => expected.rest = None,
                Presence::Idle => {
                    let wait = expected.last_rest.map_or(FIRST_LOOK, |rest| rest * 3 / 4);
                    let rest = expected.rest.get_or_insert(Rest {
                        began: now,
                        next_look: Some(now + wait),
                        looks: 0,
                    });
                    if rest.began + RETURN_MAX <= now {
                        return false;
                    }
                    if rest.next_look.is_some_and(|look| look <= now) {
                        (rest.next_look, rest.looks) = (None, rest.looks + 1);
                        due.push(key.clone());
                    }
                }
            }
            true
        });
        due
    }

    /// Records that a session's KV could not be loaded now, but perhaps can a moment later.
    pub fn look_again(&mut self, now: Instant, key: &SessionKey) {
        let rest = self.by_session.get_mut(key).and_then(|expected| expected.rest.as_mut());
        if let Some(rest) = rest.filter(|rest| rest.looks < LOOKS_MAX) {
            rest.next_look = Some(now + LOOK_AGAIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use service::clock::now;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(principal: &str, number: usize) -> SessionKey {
        SessionKey::new(principal, format!("s{number}")).unwrap()
    }

    fn looks(returns: &mut ExpectedReturns, now: Instant) -> usize {
        returns.due(now, |_| Presence::Idle).len()
    }

    #[test]
    fn a_session_is_looked_at_once_shortly_before_it_is_expected() {
        let (mut returns, begin, s) = (ExpectedReturns::default(), now(), key("a", 0));
        returns.begin_turn(begin, &s, true, false);
        assert!(returns.due(begin + 90 * SECOND, |_| Presence::Running).is_empty());
        let end = begin + 100 * SECOND;
        let at = |seconds| end + seconds * SECOND;
        assert_eq!([0, 1, 2, 7].map(|s| looks(&mut returns, at(s))), [0, 1, 0, 0]);
        // It returns after eight seconds, and so is expected after eight the next time.
        returns.begin_turn(at(8), &s, true, false);
        assert_eq!([10, 15, 16, 20].map(|s| looks(&mut returns, at(s))), [0, 0, 1, 0]);
        assert_eq!(looks(&mut returns, at(70)), 0);
        assert!(returns.by_session.is_empty(), "it is late");
    }

    #[test]
    fn a_busy_engine_is_asked_a_few_times() {
        let (mut returns, begin, s) = (ExpectedReturns::default(), now(), key("a", 0));
        returns.begin_turn(begin, &s, true, false);
        let mut asked = 0;
        for second in 0..20 {
            let looks = looks(&mut returns, begin + second * SECOND);
            asked += looks;
            if looks > 0 {
                returns.look_again(begin + second * SECOND, &s);
            }
        }
        assert_eq!(asked, usize::from(LOOKS_MAX));
    }

    #[test]
    fn a_turn_that_says_nothing_ends_the_expectation_unless_it_is_beside_another() {
        let (mut returns, begin, s) = (ExpectedReturns::default(), now(), key("a", 0));
        returns.begin_turn(begin, &s, true, false);
        returns.begin_turn(begin, &s, false, true);
        assert!(!returns.by_session.is_empty());
        returns.begin_turn(begin, &s, false, false);
        assert!(returns.by_session.is_empty());
        returns.begin_turn(begin, &s, true, false);
        assert!(returns.due(begin, |_| Presence::Gone).is_empty());
        assert!(returns.by_session.is_empty());
    }

    #[test]
    fn of_a_principal_s_sessions_the_one_that_rests_longest_gives_way() {
        let (mut returns, begin) = (ExpectedReturns::default(), now());
        for number in 0..PREFETCHES_PER_PRINCIPAL_MAX {
            returns.begin_turn(begin, &key("a", number), true, false);
        }
        returns.begin_turn(begin, &key("b", 0), true, false);
        returns.begin_turn(begin, &key("a", 100), true, false);
        assert!(!returns.by_session.contains_key(&key("a", 100)), "all others run");
        let rests = |of: SessionKey| {
            move |key: &SessionKey| if *key == of { Presence::Idle } else { Presence::Running }
        };
        returns.due(begin, rests(key("a", 3)));
        returns.begin_turn(begin, &key("a", 100), true, false);
        assert!(returns.by_session.contains_key(&key("a", 100)));
        assert!(!returns.by_session.contains_key(&key("a", 3)));
        assert!(returns.by_session.contains_key(&key("b", 0)), "another's stays");
    }
}
