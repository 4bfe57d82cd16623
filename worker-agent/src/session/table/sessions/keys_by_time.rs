//! Keeps sessions in the order of a time that each of them has, such as its deadline. Pure.

use std::{collections::BTreeSet, time::Instant};

use contract::id::SessionKey;

/// The earliest comes first. Keys with the same time are in their own order, so that the same
/// events always lead to the same effects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct KeysByTime(BTreeSet<(Instant, SessionKey)>);

impl KeysByTime {
    /// `None` leaves the key out.
    pub(super) fn change(&mut self, key: &SessionKey, from: Option<Instant>, to: Option<Instant>) {
        if from == to {
            return;
        }
        if let Some(from) = from {
            self.0.remove(&(from, key.clone()));
        }
        if let Some(to) = to {
            self.0.insert((to, key.clone()));
        }
    }

    pub(super) fn first(&self) -> Option<&(Instant, SessionKey)> {
        self.0.first()
    }

    /// Includes keys whose time is `now`.
    pub(super) fn until(&self, now: Instant) -> Vec<SessionKey> {
        let due = self.0.iter().take_while(|(time, _)| *time <= now);
        due.map(|(_, key)| key.clone()).collect()
    }
}
