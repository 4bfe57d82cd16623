//! Keeps the closes that the engine has not confirmed, with what they hold, and repeats them.
//!
//! A pinned incarnation holds a row and KV until the engine has confirmed its close. A tag holds
//! nothing. Few closes are with the engine at once, as thousands may come when an agent drains or
//! takes over. All figures are counted as closes come and go, so no message looks at all.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use crate::session::table::{CloseRequest, CloseResult, Effect, Row, Step, room::Room};

/// A shorter pause would gain little: the engine handles deferred closes only once a second.
const CLOSE_PAUSE_MIN: Duration = Duration::from_millis(250);
const CLOSE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Nobody waits for a tag, and there may be thousands, for all of which an engine may answer an
/// error.
const TAG_PAUSE_MAX: Duration = Duration::from_secs(60);

/// The most that are with the engine at once. Its HTTP server takes one after the other, each
/// within some 2 ms.
const PINNED_SENT_MAX: usize = 32;
/// Each turn that comes meanwhile waits behind these in the engine's HTTP server, so there are few.
/// They still pass at more than 500 a second.
const TAGS_SENT_MAX: usize = 4;

#[derive(Debug)]
pub(crate) struct Closes {
    /// By incarnation id. Ordered, so that the same events always produce the same effects.
    closes: BTreeMap<String, Close>,
    pinned_lane: Lane,
    tag_lane: Lane,
    /// When the closes are repeated whose answer did not confirm them.
    repeats: BTreeSet<(Instant, String)>,
    /// The closes that may get stuck, by the time of their first request.
    fresh: BTreeSet<(Instant, String)>,
    pinned: BTreeSet<(u32, String)>,
    ranks: BTreeMap<u32, RankCloses>,
    /// Pinned incarnations that an earlier agent process opened.
    inherited_count: usize,
    /// Stuck closes of which the engine has reported that the session still exists.
    stuck_kept_count: usize,
    stuck_after: Duration,
    page_tokens: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Close {
    kind: Kind,
    begun_at: Instant,
    stage: Stage,
    was_sent: bool,
    is_stuck: bool,
    is_kept_by_engine: bool,
}

/// `row`: what the incarnation holds until it is closed. `is_inherited`: an earlier agent process
/// opened it.
#[derive(Debug, Clone)]
enum Kind {
    Pinned { dp_rank: u32, row: Option<Row>, is_inherited: bool },
    Tag,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Queued,
    Sent,
    Repeats(Instant),
}

#[derive(Debug)]
struct Lane {
    sent_max: usize,
    /// Closes whose answer is awaited.
    sent_count: usize,
    /// First come, first sent. A close that was confirmed in the queue stays until its place comes.
    queue: VecDeque<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RankCloses {
    held: Room,
    inherited: Room,
    stuck: Room,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answered {
    /// The time since the first request, if the engine has freed a row and KV.
    pub(crate) freed_after: Option<Duration>,
    /// Whether the engine holds nothing of the incarnation any more.
    pub(crate) is_done: bool,
}

impl Close {
    pub(crate) fn new(now: Instant, dp_rank: u32, row: Option<Row>) -> Self {
        Self::queued(now, Kind::Pinned { dp_rank, row, is_inherited: false })
    }

    /// `lost_rid`: a turn of an earlier agent process that may still be inside the engine.
    pub(crate) fn inherited(now: Instant, dp_rank: u32, lost_rid: Option<String>) -> Self {
        let row = Some(Row { lost_rid, ..Row::default() });
        Self::queued(now, Kind::Pinned { dp_rank, row, is_inherited: true })
    }

    pub(crate) fn tag(now: Instant) -> Self {
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

    /// The longer a close takes, the less often it is repeated.
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
    pub(crate) fn new(stuck_after: Duration) -> Self {
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

    /// `page_tokens`: of the next engine.
    pub(crate) fn reset(&mut self, page_tokens: u64) {
        *self = Self { page_tokens, ..Self::new(self.stuck_after) };
    }

    /// Does nothing if the close is under way.
    pub(crate) fn start(&mut self, step: &mut Step, incarnation: String, close: Close) {
        if !self.closes.contains_key(&incarnation) {
            self.queue(incarnation, close);
            self.send_queued(step);
        }
    }

    /// `is_tagged_again`: a turn inside may put the tag there after this close, so it is closed
    /// again. Returns `None` for an unknown close.
    pub(crate) fn answer(
        &mut self,
        step: &mut Step,
        incarnation: &str,
        result: CloseResult,
        repeats_unconfirmed: bool,
        is_tagged_again: bool,
    ) -> Option<Answered> {
        let mut close = self.take(incarnation)?;
        close.is_kept_by_engine |= result == CloseResult::Kept;
        let is_confirmed = result == CloseResult::Confirmed || !repeats_unconfirmed;
        let waited = step.now.saturating_duration_since(close.begun_at);
        let freed_after = (is_confirmed && !close.is_tag()).then_some(waited);
        let is_done = is_confirmed && !(is_tagged_again && repeats_unconfirmed);
        if !is_done {
            if is_confirmed {
                close = Close { kind: Kind::Tag, was_sent: true, ..close };
                close.is_kept_by_engine = false;
            }
            close.stage = Stage::Repeats(close.repeats_at(step.now));
            self.put(incarnation.to_owned(), close);
        }
        self.send_queued(step);
        Some(Answered { freed_after, is_done })
    }

    pub(crate) fn repeat_due(&mut self, step: &mut Step) {
        let now = step.now;
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
        self.send_queued(step);
    }

    pub(crate) fn next_repeat(&self) -> Option<Instant> {
        self.repeats.first().map(|(due, _)| *due)
    }

    pub(crate) fn len(&self) -> usize {
        self.closes.len()
    }

    pub(crate) fn tag_count(&self) -> usize {
        self.closes.len() - self.pinned.len()
    }

    pub(crate) fn contains(&self, incarnation: &str) -> bool {
        self.closes.contains_key(incarnation)
    }

    /// Pinned incarnations only.
    pub(crate) fn on_rank(&self, dp_rank: u32) -> impl Iterator<Item = &String> {
        let of_rank = self.pinned.range((dp_rank, String::new())..);
        of_rank.take_while(move |(rank, _)| *rank == dp_rank).map(|(_, incarnation)| incarnation)
    }

    pub(crate) fn is_on_rank(&self, dp_rank: u32, incarnation: &str) -> bool {
        let kind = self.closes.get(incarnation).map(|close| &close.kind);
        matches!(kind, Some(Kind::Pinned { dp_rank: rank, .. }) if *rank == dp_rank)
    }

    pub(crate) fn has_inherited(&self) -> bool {
        self.inherited_count > 0
    }

    pub(crate) fn held(&self, dp_rank: u32) -> Room {
        self.rank(dp_rank).held
    }

    pub(crate) fn inherited(&self, dp_rank: u32) -> Room {
        self.rank(dp_rank).inherited
    }

    /// What closes are about to free. A stuck one may never free anything.
    pub(crate) fn being_freed(&self, now: Instant, dp_rank: u32) -> Room {
        let RankCloses { held, stuck, .. } = self.rank(dp_rank);
        let newly_stuck = self.newly_stuck(now).filter_map(|close| match &close.kind {
            Kind::Pinned { dp_rank: rank, row, .. } if *rank == dp_rank => {
                Some(Room::from_row(row.as_ref(), self.page_tokens))
            }
            Kind::Pinned { .. } | Kind::Tag => None,
        });
        newly_stuck.fold(held - stuck, |left, stuck| left - stuck)
    }

    /// Counts only sessions that the engine says it has: if it can't be asked, it isn't at fault.
    pub(crate) fn stuck_count(&self, now: Instant) -> usize {
        let newly_stuck = self.newly_stuck(now).filter(|close| close.is_kept_by_engine);
        self.stuck_kept_count + newly_stuck.count()
    }

    /// Also checks that no close waits needlessly.
    pub(crate) fn check_invariants(&self) {
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

    /// Those that got stuck since [`Self::repeat_due`] was called.
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

    fn send_queued(&mut self, step: &mut Step) {
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
                step.push(close.request(incarnation.clone()));
                self.put(incarnation, Close { stage: Stage::Sent, was_sent: true, ..close });
            }
        }
    }

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

    /// A place in a queue stays.
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

    fn change_rank(&mut self, close: &Close, change: impl Fn(Room, Room) -> Room) {
        let Kind::Pinned { dp_rank, row, is_inherited } = &close.kind else { return };
        let held = Room::from_row(row.as_ref(), self.page_tokens);
        let part = |is_counted| if is_counted { held } else { Room::default() };
        let rank = self.ranks.entry(*dp_rank).or_default();
        rank.held = change(rank.held, held);
        rank.inherited = change(rank.inherited, part(*is_inherited));
        rank.stuck = change(rank.stuck, part(close.is_stuck));
    }
}
