//! The KV cache of one DP rank as the agent knows it. Pure.
//!
//! The publisher's messages go in. Changes for watchers and replay requests come out.
//!
//! Everything reported as resident is resident: when messages are lost for good, the rank forgets
//! all its pages and asks for the engine's radix tree to be published again.

use proto::{
    block::{BlockTokens, Tier},
    kv::Change,
};

use super::{
    PAGES_PER_POOL_PAGE,
    decode::{self, Event},
    hash_check::{Verdict, Verifier},
    pages::{Delta, Error, Pages},
    sequencer::{self, Order},
};

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask the publisher to send all messages again from this number on.
    Replay(u64),
    /// Send these changes to all watchers.
    Tell(Vec<Change>),
    /// Send a full snapshot to all watchers: everything sent to them before is void.
    TellAll,
}

/// The number of events of each kind since the last [`Rank::take_counts`].
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

/// The cache of one DP rank and the state of its event stream.
#[derive(Debug)]
pub(super) struct Rank {
    page_tokens: u32,
    pages_max: usize,
    order: Order<Vec<u8>>,
    verifier: Verifier,
    pages: Pages,
    /// The number of resident blocks on the device and on the host, in this order.
    resident: [u64; 2],
    /// Whether the first replay has ended or was given up, so that the messages sent before the
    /// agent connected are applied or known to be lost.
    is_read: bool,
    /// Whether messages were lost, and the radix tree was not published again since.
    wants_tree: bool,
    /// The number of pages stored since messages were lost.
    relearned: usize,
    counts: Counts,
    /// The latest reason why pages were rejected, until [`Rank::take_refusal`].
    refusal: Option<String>,
}

impl Rank {
    /// Creates an empty rank with pages of `page_tokens` tokens, at most `pages_max` of them.
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

    /// Resets everything for a new connection: it may lead to another engine process.
    pub(super) fn connected(&mut self) -> Vec<Step> {
        self.order = Order::default();
        self.forget();
        (self.is_read, self.wants_tree) = (false, false);
        let steps = self.order.look();
        self.take(steps)
    }

    /// Takes a message that came from the subscription.
    pub(super) fn live(&mut self, number: u64, message: Vec<u8>) -> Vec<Step> {
        let steps = self.order.live(number, message);
        let mut steps = self.take(steps);
        if !self.is_read && !self.order.is_asking() {
            // The replay was given up, because too many new messages came in the meantime.
            self.is_read = true;
            steps.push(Step::TellAll);
        }
        steps
    }

    /// Takes a message that came as part of a replay.
    pub(super) fn replayed(&mut self, number: u64, message: Vec<u8>) -> Vec<Step> {
        let steps = self.order.replayed(number, message);
        self.take(steps)
    }

    /// Handles the end of a replay, also where no replay socket exists.
    pub(super) fn replay_ended(&mut self) -> Vec<Step> {
        let steps = self.order.replay_ended();
        self.read(steps)
    }

    /// Handles a replay that stopped without its end marker.
    pub(super) fn replay_stopped(&mut self) -> Vec<Step> {
        let steps = self.order.replay_stopped();
        self.read(steps)
    }

    fn read(&mut self, steps: Vec<sequencer::Step<Vec<u8>>>) -> Vec<Step> {
        let mut steps = self.take(steps);
        if !self.is_read && !self.order.is_asking() {
            self.is_read = true;
            // An engine always publishes something at its start. If no message was seen, those
            // first messages are lost.
            self.wants_tree |= self.order.is_new();
            steps.push(Step::TellAll);
        }
        steps
    }

    /// Asks for a replay after a quiet period, because the last messages may have been missed.
    pub(super) fn look(&mut self) -> Vec<Step> {
        let steps = self.order.look();
        self.take(steps)
    }

    /// Whether a replay was requested and has not ended.
    pub(super) fn is_asking(&self) -> bool {
        self.order.is_asking()
    }

    /// Whether at least one message of the requested replay has come.
    pub(super) fn is_answered(&self) -> bool {
        self.order.is_answered()
    }

    /// Whether pages may be resident that the rank doesn't know, so that the engine should publish
    /// its tree again.
    pub(super) fn wants_tree(&self) -> bool {
        self.is_read && self.wants_tree
    }

    /// Returns everything that is known to be resident, or `None` until the first replay has ended.
    /// After a loss the snapshot is incomplete, and has no [`Change::Complete`].
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

    /// Returns the number of resident blocks by tier.
    pub(super) fn resident(&self) -> [(Tier, u64); 2] {
        [(Tier::Device, self.resident[0]), (Tier::Host, self.resident[1])]
    }

    /// Returns the bytes of memory held for pages.
    pub(super) fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// Returns the counts since the last call, and resets them.
    pub(super) fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Returns why pages were rejected since the last call, if any were.
    pub(super) fn take_refusal(&mut self) -> Option<String> {
        self.refusal.take()
    }

    fn take(&mut self, steps: Vec<sequencer::Step<Vec<u8>>>) -> Vec<Step> {
        let mut taken = vec![];
        for step in steps {
            match step {
                sequencer::Step::Apply(message) => self.message(&message, &mut taken),
                sequencer::Step::Replay(from) => {
                    self.counts.replays += 1;
                    taken.push(Step::Replay(from));
                }
                sequencer::Step::Lost { from, to } => {
                    self.counts.gaps += 1;
                    self.counts.lost_messages += to - from;
                    self.lose(&mut taken);
                }
                sequencer::Step::Restarted => {
                    self.counts.restarts += 1;
                    self.forget();
                    self.wants_tree = false;
                    self.tell_all(&mut taken);
                }
            }
        }
        taken
    }

    /// Handles lost messages: forgets all pages, because any of them may have been removed since.
    fn lose(&mut self, steps: &mut Vec<Step>) {
        self.forget();
        (self.wants_tree, self.relearned) = (true, 0);
        self.tell_all(steps);
    }

    fn forget(&mut self) {
        let new = Pages::new(self.page_tokens, self.pages_max);
        self.pages = new.expect("`new` accepted this page size");
        self.resident = [0; 2];
    }

    fn tell_all(&self, steps: &mut Vec<Step>) {
        if self.is_read {
            steps.push(Step::TellAll);
        }
    }

    fn message(&mut self, message: &[u8], steps: &mut Vec<Step>) {
        let batch = match decode::decode(message) {
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
            // Since the loss, as many pages were stored as the pool holds: all older pages have
            // been evicted.
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
                    self.refusal = Some("a page's hash does not match its tokens".to_owned());
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
        let block_tokens = BlockTokens::for_page(self.page_tokens).expect("checked in `new`");
        Change::Reset { block_tokens }
    }
}

fn change(delta: Delta) -> Change {
    match delta {
        Delta::Stored { tier, parent, blocks } => Change::Stored { tier, parent, blocks },
        Delta::Removed { tier, blocks } => Change::Removed { tier, blocks },
        Delta::Cleared => unreachable!("absent in snapshots, and handled in `message`"),
    }
}

#[cfg(test)]
mod tests;
