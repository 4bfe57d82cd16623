//! One rank's cache as the agent knows it: messages of its publisher go in, changes for watchers
//! and what is to be asked for come out. Pure.
//!
//! What it says is resident is resident: after messages that nobody has any more it forgets all it
//! knew, and wants the engine's tree published anew.

use proto::{
    block::{BlockTokens, Tier},
    kv::Change,
};

use super::{
    PAGES_PER_POOL_PAGE,
    frame::{self, Event},
    order::{self, Order},
    pages::{Delta, Error, Pages},
    verify::{Verdict, Verifier},
};

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask the publisher for all messages from this one on.
    Replay(u64),
    /// Tell watchers what changed.
    Tell(Vec<Change>),
    /// Tell watchers everything: what they know is void.
    TellAll,
}

/// What happened since it was last asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) stored: u64,
    pub(super) removed: u64,
    pub(super) cleared: u64,
    pub(super) malformed: u64,
    pub(super) gaps: u64,
    pub(super) lost_messages: u64,
    pub(super) replays: u64,
    pub(super) restarts: u64,
    pub(super) orphans: u64,
    pub(super) mismatches: u64,
    pub(super) refused: u64,
}

/// One rank.
#[derive(Debug)]
pub(super) struct Rank {
    page_tokens: u32,
    pages_max: usize,
    order: Order<Vec<u8>>,
    verifier: Verifier,
    pages: Pages,
    /// Blocks resident on the device and on the host.
    resident: [u64; 2],
    /// The publisher has said what it still has from before.
    is_read: bool,
    wants_tree: bool,
    /// Pages stored since some messages were lost.
    relearned: usize,
    counts: Counts,
    /// Why pages were not taken last, until somebody has asked.
    refusal: Option<String>,
}

impl Rank {
    /// Of an engine with pages of so many tokens, and at most so many of them.
    pub(super) fn new(page_tokens: u32, pages_max: usize) -> Result<Self, proto::block::Error> {
        Ok(Self {
            page_tokens,
            pages_max,
            order: Order::default(),
            verifier: Verifier::default(),
            pages: Pages::new(page_tokens, pages_max)?,
            resident: [0; 2],
            is_read: false,
            wants_tree: false,
            relearned: 0,
            counts: Counts::default(),
            refusal: None,
        })
    }

    /// A connection was made: the first of its engine, as far as anyone can know.
    pub(super) fn connected(&mut self) -> Vec<Step> {
        self.order = Order::default();
        self.forget();
        (self.is_read, self.wants_tree) = (false, false);
        let steps = self.order.look();
        self.take(steps)
    }

    /// A message came as it was sent.
    pub(super) fn live(&mut self, number: u64, message: Vec<u8>) -> Vec<Step> {
        let steps = self.order.live(number, message);
        let mut steps = self.take(steps);
        if !self.is_read && !self.order.is_asking() {
            // More came meanwhile than an answer could be waited for.
            self.is_read = true;
            steps.push(Step::TellAll);
        }
        steps
    }

    /// A message came that was asked for.
    pub(super) fn replayed(&mut self, number: u64, message: Vec<u8>) -> Vec<Step> {
        let steps = self.order.replayed(number, message);
        self.take(steps)
    }

    /// No more comes of what was asked for, or nobody can be asked.
    pub(super) fn replay_ended(&mut self) -> Vec<Step> {
        let steps = self.order.replay_ended();
        self.read(steps)
    }

    /// No more comes of what was asked for, though its end didn't either.
    pub(super) fn replay_stopped(&mut self) -> Vec<Step> {
        let steps = self.order.replay_stopped();
        self.read(steps)
    }

    fn read(&mut self, steps: Vec<order::Step<Vec<u8>>>) -> Vec<Step> {
        let mut steps = self.take(steps);
        if !self.is_read && !self.order.is_asking() {
            self.is_read = true;
            // Every engine says something when it starts: what it said is not to be had.
            self.wants_tree |= self.order.is_new();
            steps.push(Step::TellAll);
        }
        steps
    }

    /// Nothing came for a while: the last messages may be those that were missed.
    pub(super) fn look(&mut self) -> Vec<Step> {
        let steps = self.order.look();
        self.take(steps)
    }

    /// Whether an answer of the publisher's is awaited.
    pub(super) fn is_asking(&self) -> bool {
        self.order.is_asking()
    }

    /// Whether the answer that is awaited has begun to come.
    pub(super) fn is_answered(&self) -> bool {
        self.order.is_answered()
    }

    /// Whether more is resident than it knows: ask the engine to publish its tree anew.
    pub(super) fn wants_tree(&self) -> bool {
        self.is_read && self.wants_tree
    }

    /// Everything that is resident; none while it isn't known. After a loss it isn't complete: what
    /// is not in it may be resident too.
    pub(super) fn snapshot(&self) -> Option<Vec<Change>> {
        if !self.is_read {
            return None;
        }
        let mut all = vec![];
        if self.wants_tree {
            all.push(Change::Unknown { why: "KV events were missed".to_owned() });
        }
        all.push(self.reset());
        all.extend(self.pages.snapshot().map(change));
        if !self.wants_tree {
            all.push(Change::Complete);
        }
        Some(all)
    }

    /// Blocks resident, by tier.
    pub(super) fn resident(&self) -> [(Tier, u64); 2] {
        [(Tier::Device, self.resident[0]), (Tier::Host, self.resident[1])]
    }

    /// Memory held for pages.
    pub(super) fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// What happened since the last call.
    pub(super) fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Why pages were not taken, where some weren't since the last call.
    pub(super) fn take_refusal(&mut self) -> Option<String> {
        self.refusal.take()
    }

    fn take(&mut self, steps: Vec<order::Step<Vec<u8>>>) -> Vec<Step> {
        let mut taken = vec![];
        for step in steps {
            match step {
                order::Step::Apply(message) => self.message(&message, &mut taken),
                order::Step::Replay(from) => {
                    self.counts.replays += 1;
                    taken.push(Step::Replay(from));
                }
                order::Step::Lost { from, to } => {
                    self.counts.gaps += 1;
                    self.counts.lost_messages += to - from;
                    self.lose(&mut taken);
                }
                order::Step::Restarted => {
                    self.counts.restarts += 1;
                    self.forget();
                    self.wants_tree = false;
                    self.tell_all(&mut taken);
                }
            }
        }
        taken
    }

    /// What it knew may not be so any more.
    fn lose(&mut self, steps: &mut Vec<Step>) {
        self.forget();
        (self.wants_tree, self.relearned) = (true, 0);
        self.tell_all(steps);
    }

    fn forget(&mut self) {
        let new = Pages::new(self.page_tokens, self.pages_max);
        self.pages = new.expect("there were some of this size");
        self.resident = [0; 2];
    }

    fn tell_all(&self, steps: &mut Vec<Step>) {
        if self.is_read {
            steps.push(Step::TellAll);
        }
    }

    fn message(&mut self, message: &[u8], steps: &mut Vec<Step>) {
        let batch = match frame::decode(message) {
            Ok(batch) => batch,
            Err(error) => {
                self.counts.malformed += 1;
                self.refusal = Some(error.to_string());
                return self.lose(steps);
            }
        };
        let mut deltas = vec![];
        for event in &batch.events {
            self.event(event, &mut deltas);
        }
        self.count(&deltas);
        let pool_pages = self.pages_max / PAGES_PER_POOL_PAGE;
        let is_relearned = self.wants_tree && self.relearned >= pool_pages;
        if is_relearned {
            // As much as the pool holds was stored since: what was there before has made room.
            self.wants_tree = false;
        }
        if self.is_read && !deltas.is_empty() {
            let changes = deltas.into_iter().flat_map(|delta| match delta {
                Delta::Cleared => vec![self.reset(), Change::Complete],
                delta => vec![change(delta)],
            });
            steps.push(Step::Tell(changes.collect()));
        }
        if is_relearned {
            self.tell_all(steps);
        }
    }

    fn event(&mut self, event: &Event, deltas: &mut Vec<Delta>) {
        match event {
            Event::Stored(stored) => {
                self.counts.stored += 1;
                self.relearned += stored.pages.len();
                if self.verifier.check(stored) == Verdict::Wrong {
                    self.counts.mismatches += 1;
                    self.refusal = Some("a page's hash is not that of its tokens".to_owned());
                    return;
                }
            }
            Event::Removed { .. } => self.counts.removed += 1,
            Event::Cleared => {
                self.counts.cleared += 1;
                self.wants_tree = false;
            }
        }
        if let Err(error) = self.pages.apply(event, deltas) {
            if error == Error::Orphan {
                self.counts.orphans += 1;
            } else {
                self.counts.refused += 1;
                self.refusal = Some(error.to_string());
            }
        }
    }

    fn count(&mut self, deltas: &[Delta]) {
        let of = |tier: &Tier| usize::from(*tier == Tier::Host);
        for delta in deltas {
            match delta {
                Delta::Stored { tier, blocks, .. } => {
                    self.resident[of(tier)] += blocks.len() as u64;
                }
                Delta::Removed { tier, blocks } => self.resident[of(tier)] -= blocks.len() as u64,
                Delta::Cleared => self.resident = [0; 2],
            }
        }
    }

    fn reset(&self) -> Change {
        let block_tokens = BlockTokens::for_page(self.page_tokens).expect("there were some");
        Change::Reset { block_tokens }
    }
}

fn change(delta: Delta) -> Change {
    match delta {
        Delta::Stored { tier, parent, blocks } => Change::Stored { tier, parent, blocks },
        Delta::Removed { tier, blocks } => Change::Removed { tier, blocks },
        Delta::Cleared => unreachable!("a snapshot has none, and messages are looked at before"),
    }
}

#[cfg(test)]
mod tests;
