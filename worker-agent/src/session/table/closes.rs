//! Keeps the closes that the engine has not confirmed, with what they hold, and repeats them.
//!
//! An incarnation is one life of a session in the engine. A pinned incarnation holds a request row
//! and KV until the engine has confirmed its close. A tag, which the engine gives to the KV of a
//! session in its radix tree, holds nothing: the KV under it is only evicted late. This module
//! decides nothing about sessions. The modules `closing` and `tags` start the closes.
//!
//! At most a few closes are with the engine at once. The others wait in a queue, because thousands
//! may come together: when an agent drains, or takes over from one that was killed. All figures are
//! counted as closes come and go, so that no message looks at all closes.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use super::{CloseRequest, CloseResult, Effect, Effects, Row, held::Held};

/// The shortest pause before an unconfirmed close is repeated. A shorter one would gain little, as
/// the engine handles the closes that it has deferred only once a second.
const CLOSE_PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest pause before the close of a pinned incarnation is repeated.
const CLOSE_PAUSE_MAX: Duration = Duration::from_secs(5);
/// The longest pause before the close of a tag is repeated. Nobody waits for a tag, and there may
/// be thousands, for all of which an engine may answer an error.
const TAG_PAUSE_MAX: Duration = Duration::from_secs(60);

/// The most closes of pinned incarnations that are with the engine at once. The engine's HTTP
/// server takes one after the other, each within some 2 ms.
const PINNED_SENT_MAX: usize = 32;
/// The most closes of tags that are with the engine at once. Each turn that comes meanwhile waits
/// behind them in the engine's HTTP server, so there are few. They still pass at more than 500 a
/// second.
const TAGS_SENT_MAX: usize = 4;

/// All closes that the engine has not confirmed.
#[derive(Debug)]
pub(super) struct Closes {
    /// By incarnation id. Ordered, so that the same events always produce the same effects.
    closes: BTreeMap<String, Close>,
    pinned_lane: Lane,
    tag_lane: Lane,
    /// When the closes are repeated whose answer did not confirm them.
    repeats: BTreeSet<(Instant, String)>,
    /// The closes that may get stuck, by the time of their first request.
    fresh: BTreeSet<(Instant, String)>,
    /// The pinned incarnations, by rank.
    pinned: BTreeSet<(u32, String)>,
    /// What the pinned incarnations hold, by rank.
    ranks: BTreeMap<u32, RankCloses>,
    /// The number of pinned incarnations that an earlier agent process opened.
    inherited_count: usize,
    /// The number of stuck closes of which the engine has reported that the session still exists.
    stuck_kept_count: usize,
    /// How long the engine may take before a close counts as stuck.
    stuck_after: Duration,
    page_tokens: u64,
}

/// A close that the engine has not confirmed.
#[derive(Debug, Clone)]
pub(super) struct Close {
    kind: Kind,
    /// When the close was first requested.
    begun_at: Instant,
    stage: Stage,
    /// Whether the engine was asked before.
    was_sent: bool,
    /// Whether the close is counted as stuck.
    is_stuck: bool,
    /// Whether the engine has reported that the session still exists.
    is_kept_by_engine: bool,
}

/// What is closed.
#[derive(Debug, Clone)]
enum Kind {
    /// A pinned incarnation. `row`: the row and the KV that it holds until then. `is_inherited`: an
    /// earlier agent process opened it.
    Pinned { dp_rank: u32, row: Option<Row>, is_inherited: bool },
    /// A tag.
    Tag,
}

/// What happens to a close next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It waits until fewer closes are with the engine.
    Queued,
    /// The engine's answer is awaited.
    Sent,
    /// It is repeated at this time.
    Repeats(Instant),
}

/// The closes of one kind on their way to the engine.
#[derive(Debug)]
struct Lane {
    sent_max: usize,
    /// The number of closes whose answer is awaited.
    sent_count: usize,
    /// The queued closes, first come, first sent. A close that was confirmed in the queue stays
    /// there until its place comes.
    queue: VecDeque<String>,
}

/// What the pinned incarnations on a rank hold that are being closed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RankCloses {
    held: Held,
    /// The part of `held` that an earlier agent process left open.
    inherited: Held,
    /// The part of `held` whose closes are stuck.
    stuck: Held,
}

/// What the engine's answer to a close means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answered {
    /// The time since the first request, if the engine has freed a row and KV.
    pub(super) freed_after: Option<Duration>,
    /// Whether the engine holds nothing of the incarnation any more.
    pub(super) is_done: bool,
}

impl Close {
    /// Returns the close of an incarnation that this agent process opened.
    pub(super) fn new(now: Instant, dp_rank: u32, row: Option<Row>) -> Self {
        Self::queued(now, Kind::Pinned { dp_rank, row, is_inherited: false })
    }

    /// Returns the close of an incarnation that an earlier agent process left open. `lost_rid`: a
    /// turn of it that may still be inside the engine.
    pub(super) fn inherited(now: Instant, dp_rank: u32, lost_rid: Option<String>) -> Self {
        let row = Some(Row { lost_rid, ..Row::default() });
        Self::queued(now, Kind::Pinned { dp_rank, row, is_inherited: true })
    }

    /// Returns the close of a tag.
    pub(super) fn tag(now: Instant) -> Self {
        Self::queued(now, Kind::Tag)
    }

    fn queued(now: Instant, kind: Kind) -> Self {
        let stage = Stage::Queued;
        Self {
            kind,
            begun_at: now,
            stage,
            was_sent: false,
            is_stuck: false,
            is_kept_by_engine: false,
        }
    }

    fn is_tag(&self) -> bool {
        matches!(self.kind, Kind::Tag)
    }

    fn request(&self, incarnation: String) -> Effect {
        let rid = match &self.kind {
            Kind::Pinned { row, .. } => row.as_ref().and_then(|row| row.lost_rid.clone()),
            Kind::Tag => None,
        };
        let (is_pinned, is_repeat) = (!self.is_tag(), self.was_sent);
        Effect::Close(CloseRequest { incarnation, rid, is_pinned, is_repeat })
    }

    /// Returns when the close is repeated. The longer a close takes, the less often it is repeated.
    fn repeats_at(&self, now: Instant) -> Instant {
        let pause_max = if self.is_tag() { TAG_PAUSE_MAX } else { CLOSE_PAUSE_MAX };
        let waited = now.saturating_duration_since(self.begun_at);
        now + (waited / 4).clamp(CLOSE_PAUSE_MIN, pause_max)
    }
}

impl Lane {
    fn new(sent_max: usize) -> Self {
        Self { sent_max, sent_count: 0, queue: VecDeque::new() }
    }

    fn has_room(&self) -> bool {
        self.sent_count < self.sent_max
    }
}

impl Closes {
    /// Returns no closes. A close is stuck once it has taken `stuck_after`.
    pub(super) fn new(stuck_after: Duration) -> Self {
        Self {
            closes: BTreeMap::new(),
            pinned_lane: Lane::new(PINNED_SENT_MAX),
            tag_lane: Lane::new(TAGS_SENT_MAX),
            repeats: BTreeSet::new(),
            fresh: BTreeSet::new(),
            pinned: BTreeSet::new(),
            ranks: BTreeMap::new(),
            inherited_count: 0,
            stuck_kept_count: 0,
            stuck_after,
            page_tokens: 1,
        }
    }

    /// Forgets all closes, because their engine is lost. `page_tokens`: the page size of the next.
    pub(super) fn reset(&mut self, page_tokens: u64) {
        *self = Self { page_tokens, ..Self::new(self.stuck_after) };
    }

    /// Begins the close of an incarnation, unless it is under way.
    pub(super) fn start(&mut self, effects: &mut Effects, incarnation: String, close: Close) {
        if !self.closes.contains_key(&incarnation) {
            self.queue(incarnation, close);
            self.send_queued(effects);
        }
    }

    /// Handles the engine's answer to a close, which is repeated later if it is not confirmed and
    /// `repeats_unconfirmed`. `is_tagged_again`: a turn inside the engine may put the incarnation's
    /// tag there after this close. Then the tag is closed again. Returns `None` if no such close is
    /// under way.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        effects: &mut Effects,
        incarnation: &str,
        result: CloseResult,
        repeats_unconfirmed: bool,
        is_tagged_again: bool,
    ) -> Option<Answered> {
        let mut close = self.take(incarnation)?;
        close.is_kept_by_engine |= result == CloseResult::Kept;
        let is_confirmed = result == CloseResult::Confirmed || !repeats_unconfirmed;
        let waited = now.saturating_duration_since(close.begun_at);
        let freed_after = (is_confirmed && !close.is_tag()).then_some(waited);
        let is_done = is_confirmed && !(is_tagged_again && repeats_unconfirmed);
        if !is_done {
            if is_confirmed {
                close = Close { kind: Kind::Tag, was_sent: true, ..close };
                close.is_kept_by_engine = false;
            }
            close.stage = Stage::Repeats(close.repeats_at(now));
            self.put(incarnation.to_owned(), close);
        }
        self.send_queued(effects);
        Some(Answered { freed_after, is_done })
    }

    /// Repeats the closes whose pause has passed, and notes which closes are stuck.
    pub(super) fn repeat_due(&mut self, now: Instant, effects: &mut Effects) {
        while self.next_repeat().is_some_and(|due| due <= now) {
            let (_, incarnation) = self.repeats.pop_first().expect("it was just seen");
            let close = self.take(&incarnation).expect("each repeat has a close");
            self.queue(incarnation, close);
        }
        while self.fresh.first().is_some_and(|(begun_at, _)| self.is_stuck(now, *begun_at)) {
            let (_, incarnation) = self.fresh.pop_first().expect("it was just seen");
            let close = self.take(&incarnation).expect("each fresh close exists");
            self.put(incarnation, Close { is_stuck: true, ..close });
        }
        self.send_queued(effects);
    }

    /// Returns when a close must be repeated next.
    pub(super) fn next_repeat(&self) -> Option<Instant> {
        self.repeats.first().map(|(due, _)| *due)
    }

    pub(super) fn len(&self) -> usize {
        self.closes.len()
    }

    /// Returns the number of tags that are being closed.
    pub(super) fn tag_count(&self) -> usize {
        self.closes.len() - self.pinned.len()
    }

    pub(super) fn contains(&self, incarnation: &str) -> bool {
        self.closes.contains_key(incarnation)
    }

    /// Returns the ids of the pinned incarnations on a rank that are being closed.
    pub(super) fn on_rank(&self, dp_rank: u32) -> impl Iterator<Item = &String> {
        let of_rank = self.pinned.range((dp_rank, String::new())..);
        of_rank.take_while(move |(rank, _)| *rank == dp_rank).map(|(_, incarnation)| incarnation)
    }

    /// Whether a pinned incarnation on a rank is being closed.
    pub(super) fn is_on_rank(&self, dp_rank: u32, incarnation: &str) -> bool {
        let kind = self.closes.get(incarnation).map(|close| &close.kind);
        matches!(kind, Some(Kind::Pinned { dp_rank: rank, .. }) if *rank == dp_rank)
    }

    /// Whether a pinned incarnation of an earlier agent process is not closed yet.
    pub(super) fn has_inherited(&self) -> bool {
        self.inherited_count > 0
    }

    /// Returns what the incarnations on a rank hold.
    pub(super) fn held(&self, dp_rank: u32) -> Held {
        self.rank(dp_rank).held
    }

    /// Returns what those incarnations hold that an earlier agent process left open.
    pub(super) fn inherited(&self, dp_rank: u32) -> Held {
        self.rank(dp_rank).inherited
    }

    /// Returns what the incarnations on a rank hold whose close is not stuck. A close that is stuck
    /// may never free anything.
    pub(super) fn being_freed(&self, now: Instant, dp_rank: u32) -> Held {
        let RankCloses { held, stuck, .. } = self.rank(dp_rank);
        let newly_stuck = self.newly_stuck(now).filter_map(|close| match &close.kind {
            Kind::Pinned { dp_rank: rank, row, .. } if *rank == dp_rank => {
                Some(Held::from_row(row.as_ref(), self.page_tokens))
            }
            Kind::Pinned { .. } | Kind::Tag => None,
        });
        newly_stuck.fold(held - stuck, |left, stuck| left - stuck)
    }

    /// Returns how many closes are stuck. A close counts only if the engine has said that the
    /// session still exists. If the engine can't be asked, it isn't at fault.
    pub(super) fn stuck_count(&self, now: Instant) -> usize {
        let newly_stuck = self.newly_stuck(now).filter(|close| close.is_kept_by_engine);
        self.stuck_kept_count + newly_stuck.count()
    }

    /// Checks that all figures match a fresh count, and that no close waits needlessly.
    pub(super) fn check_invariants(&self) {
        let mut counted = Self { page_tokens: self.page_tokens, ..Self::new(self.stuck_after) };
        for (incarnation, close) in &self.closes {
            counted.put(incarnation.clone(), close.clone());
        }
        assert_eq!(counted.repeats, self.repeats, "a close is repeated at another time");
        assert_eq!(counted.fresh, self.fresh, "the closes that may get stuck are others");
        assert_eq!(counted.pinned, self.pinned, "the pinned incarnations are others");
        assert_eq!(counted.ranks, self.ranks, "what closes hold differs from a fresh count");
        let counts = |closes: &Self| {
            let sent = (closes.pinned_lane.sent_count, closes.tag_lane.sent_count);
            (sent, closes.inherited_count, closes.stuck_kept_count)
        };
        assert_eq!(counts(&counted), counts(self), "closes are counted wrongly");
        for lane in [&self.pinned_lane, &self.tag_lane] {
            assert!(lane.sent_count <= lane.sent_max, "too many closes are with the engine");
            assert!(lane.queue.is_empty() || !lane.has_room(), "a close waits for nothing");
        }
        let queued: BTreeSet<&String> =
            self.pinned_lane.queue.iter().chain(&self.tag_lane.queue).collect();
        for (incarnation, close) in &self.closes {
            let is_lost = close.stage == Stage::Queued && !queued.contains(incarnation);
            assert!(!is_lost, "a close waits in no queue");
        }
    }

    fn is_stuck(&self, now: Instant, begun_at: Instant) -> bool {
        begun_at + self.stuck_after <= now
    }

    /// Returns the closes that got stuck since [`Self::repeat_due`] was called.
    fn newly_stuck(&self, now: Instant) -> impl Iterator<Item = &Close> {
        let due = self.fresh.iter().take_while(move |(begun_at, _)| self.is_stuck(now, *begun_at));
        due.map(|(_, incarnation)| &self.closes[incarnation])
    }

    fn rank(&self, dp_rank: u32) -> RankCloses {
        self.ranks.get(&dp_rank).copied().unwrap_or_default()
    }

    fn lane_mut(&mut self, is_tag: bool) -> &mut Lane {
        if is_tag { &mut self.tag_lane } else { &mut self.pinned_lane }
    }

    fn queue(&mut self, incarnation: String, close: Close) {
        self.lane_mut(close.is_tag()).queue.push_back(incarnation.clone());
        self.put(incarnation, Close { stage: Stage::Queued, ..close });
    }

    /// Sends as many queued closes as may be with the engine.
    fn send_queued(&mut self, effects: &mut Effects) {
        for is_tag in [false, true] {
            while self.lane_mut(is_tag).has_room() {
                let Some(incarnation) = self.lane_mut(is_tag).queue.pop_front() else { break };
                let is_queued =
                    |close: &Close| close.stage == Stage::Queued && close.is_tag() == is_tag;
                // The engine may have confirmed the close meanwhile.
                if !self.closes.get(&incarnation).is_some_and(is_queued) {
                    continue;
                }
                let close = self.take(&incarnation).expect("it was just seen");
                effects.push(close.request(incarnation.clone()));
                self.put(incarnation, Close { stage: Stage::Sent, was_sent: true, ..close });
            }
        }
    }

    /// Adds a close to all figures.
    fn put(&mut self, incarnation: String, close: Close) {
        match close.stage {
            Stage::Queued => {}
            Stage::Sent => self.lane_mut(close.is_tag()).sent_count += 1,
            Stage::Repeats(due) => {
                self.repeats.insert((due, incarnation.clone()));
            }
        }
        if !close.is_stuck {
            self.fresh.insert((close.begun_at, incarnation.clone()));
        }
        self.stuck_kept_count += usize::from(close.is_stuck && close.is_kept_by_engine);
        self.change_rank(&close, |sum, part| sum + part);
        if let Kind::Pinned { dp_rank, is_inherited, .. } = close.kind {
            self.inherited_count += usize::from(is_inherited);
            self.pinned.insert((dp_rank, incarnation.clone()));
        }
        self.closes.insert(incarnation, close);
    }

    /// Removes a close from all figures. A place in a queue stays.
    fn take(&mut self, incarnation: &str) -> Option<Close> {
        let (incarnation, close) = self.closes.remove_entry(incarnation)?;
        self.stuck_kept_count -= usize::from(close.is_stuck && close.is_kept_by_engine);
        if let Stage::Sent = close.stage {
            self.lane_mut(close.is_tag()).sent_count -= 1;
        }
        let mut place = (close.begun_at, incarnation);
        if !close.is_stuck {
            self.fresh.remove(&place);
        }
        if let Stage::Repeats(due) = close.stage {
            place.0 = due;
            self.repeats.remove(&place);
        }
        self.change_rank(&close, |sum, part| sum - part);
        if let Kind::Pinned { dp_rank, is_inherited, .. } = close.kind {
            self.inherited_count -= usize::from(is_inherited);
            self.pinned.remove(&(dp_rank, place.1));
            if self.on_rank(dp_rank).next().is_none() {
                self.ranks.remove(&dp_rank);
            }
        }
        Some(close)
    }

    /// Adds what a pinned incarnation holds to its rank's figures, or subtracts it.
    fn change_rank(&mut self, close: &Close, change: impl Fn(Held, Held) -> Held) {
        let Kind::Pinned { dp_rank, row, is_inherited } = &close.kind else { return };
        let held = Held::from_row(row.as_ref(), self.page_tokens);
        let part = |is_counted| if is_counted { held } else { Held::default() };
        let rank = self.ranks.entry(*dp_rank).or_default();
        rank.held = change(rank.held, held);
        rank.inherited = change(rank.inherited, part(*is_inherited));
        rank.stuck = change(rank.stuck, part(close.is_stuck));
    }
}
