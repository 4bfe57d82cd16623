//! Keeps the closes that the engine has not confirmed, with what they hold, and repeats them.
//!
//! An incarnation is one life of a session in the engine. A pinned incarnation holds a request row
//! and KV until the engine has confirmed its close. This module decides nothing about sessions. The
//! module `closing` starts the closes.

use std::{
    collections::btree_map::{BTreeMap, Entry},
    time::{Duration, Instant},
};

use super::{CloseRequest, CloseResult, Effect, Effects, Row, held::Held};

/// The shortest pause before an unconfirmed close is repeated. A shorter one would gain little, as
/// the engine handles the closes that it has deferred only once a second.
const CLOSE_PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest pause before an unconfirmed close is repeated.
const CLOSE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// All closes that the engine has not confirmed, by incarnation id.
#[derive(Debug, Default)]
pub(super) struct Closes(BTreeMap<String, Close>);

/// A close that the engine has not confirmed.
#[derive(Debug)]
pub(super) struct Close {
    dp_rank: u32,
    /// The row and the KV that the incarnation holds until then.
    row: Option<Row>,
    /// Whether an earlier agent process opened the session.
    is_inherited: bool,
    /// When the close was first requested.
    begun_at: Instant,
    /// When to repeat the close. `None` while the engine's answer to it is awaited.
    repeat_at: Option<Instant>,
    /// Whether the engine has reported that the session still exists.
    is_kept_by_engine: bool,
}

impl Close {
    /// Returns the close of an incarnation that this agent process opened.
    pub(super) fn new(now: Instant, dp_rank: u32, row: Option<Row>) -> Self {
        Self {
            dp_rank,
            row,
            is_inherited: false,
            begun_at: now,
            repeat_at: None,
            is_kept_by_engine: false,
        }
    }

    /// Returns the close of an incarnation that an earlier agent process left open. `lost_rid`: a
    /// turn of it that may still be inside the engine.
    pub(super) fn inherited(now: Instant, dp_rank: u32, lost_rid: Option<String>) -> Self {
        let row = Row { lost_rid, ..Row::default() };
        Self { is_inherited: true, ..Self::new(now, dp_rank, Some(row)) }
    }

    fn request(&self, incarnation: String, is_repeat: bool) -> Effect {
        let rid = self.row.as_ref().and_then(|row| row.lost_rid.clone());
        Effect::Close(CloseRequest { incarnation, rid, is_pinned: true, is_repeat })
    }
}

impl Closes {
    /// Requests the close of a pinned incarnation, unless it is under way.
    pub(super) fn start(&mut self, effects: &mut Effects, incarnation: String, close: Close) {
        if let Entry::Vacant(place) = self.0.entry(incarnation) {
            effects.push(close.request(place.key().clone(), false));
            place.insert(close);
        }
    }

    /// Handles the engine's answer to a close, which is repeated later if it is not confirmed and
    /// `repeats_unconfirmed`. Returns the time since the first request if the close is done.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        incarnation: &str,
        result: CloseResult,
        repeats_unconfirmed: bool,
    ) -> Option<Duration> {
        let close = self.0.get_mut(incarnation)?;
        close.is_kept_by_engine |= result == CloseResult::Kept;
        let waited = now.saturating_duration_since(close.begun_at);
        if result != CloseResult::Confirmed && repeats_unconfirmed {
            // The longer a close takes, the less often it is repeated.
            close.repeat_at = Some(now + (waited / 4).clamp(CLOSE_PAUSE_MIN, CLOSE_PAUSE_MAX));
            return None;
        }
        self.0.remove(incarnation).map(|_| waited)
    }

    /// Repeats the closes whose pause has passed.
    pub(super) fn repeat_due(&mut self, now: Instant, effects: &mut Effects) {
        for (incarnation, close) in &mut self.0 {
            if close.repeat_at.take_if(|due| *due <= now).is_some() {
                effects.push(close.request(incarnation.clone(), true));
            }
        }
    }

    /// Returns when a close must be repeated next.
    pub(super) fn next_repeat(&self) -> Option<Instant> {
        self.0.values().filter_map(|close| close.repeat_at).min()
    }

    /// Forgets all closes.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn contains(&self, incarnation: &str) -> bool {
        self.0.contains_key(incarnation)
    }

    /// Whether an incarnation on this rank is being closed.
    pub(super) fn is_on_rank(&self, incarnation: &str, dp_rank: u32) -> bool {
        self.0.get(incarnation).is_some_and(|close| close.dp_rank == dp_rank)
    }

    /// Returns the ids of the incarnations on a rank that are being closed.
    pub(super) fn on_rank(&self, dp_rank: u32) -> impl Iterator<Item = &String> {
        self.of_rank(dp_rank).map(|(incarnation, _)| incarnation)
    }

    /// Whether an incarnation of an earlier agent process is not closed yet.
    pub(super) fn has_inherited(&self) -> bool {
        self.0.values().any(|close| close.is_inherited)
    }

    /// Returns what the incarnations on a rank hold.
    pub(super) fn held(&self, dp_rank: u32, page_tokens: u64) -> Held {
        self.held_by(dp_rank, page_tokens, |_| true)
    }

    /// Returns what those incarnations hold that an earlier agent process left open.
    pub(super) fn inherited(&self, dp_rank: u32, page_tokens: u64) -> Held {
        self.held_by(dp_rank, page_tokens, |close| close.is_inherited)
    }

    /// Returns what the incarnations on a rank hold whose close is not stuck. A close that is stuck
    /// may never free anything.
    pub(super) fn being_freed(
        &self,
        now: Instant,
        dp_rank: u32,
        page_tokens: u64,
        stuck_after: Duration,
    ) -> Held {
        self.held_by(dp_rank, page_tokens, |close| now < close.begun_at + stuck_after)
    }

    fn held_by(&self, dp_rank: u32, page_tokens: u64, counts: impl Fn(&Close) -> bool) -> Held {
        let counted = self.of_rank(dp_rank).filter(|(_, close)| counts(close));
        counted.fold(Held::default(), |sum, (_, close)| {
            sum + Held::from_row(close.row.as_ref(), page_tokens)
        })
    }

    /// Returns how many closes are stuck. A close counts only if the engine has said that the
    /// session still exists. If the engine can't be asked, it isn't at fault.
    pub(super) fn stuck_count(&self, now: Instant, stuck_after: Duration) -> usize {
        let is_stuck =
            |close: &&Close| close.is_kept_by_engine && close.begun_at + stuck_after <= now;
        self.0.values().filter(is_stuck).count()
    }

    fn of_rank(&self, dp_rank: u32) -> impl Iterator<Item = (&String, &Close)> {
        self.0.iter().filter(move |(_, close)| close.dp_rank == dp_rank)
    }
}
