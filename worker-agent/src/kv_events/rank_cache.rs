//! Turns one DP rank's KV event messages into the changes of resident blocks for routers. Pure.
//!
//! If messages are lost for good, any known page may have been evicted. Then the rank forgets all
//! its pages, and the caller asks the shim to publish the engine's radix tree again.

use blocks::{block::Tier, kv::Change};

use super::{
    decode::{self, CacheEvent},
    hash_check::{Verdict, Verifier},
    pages::{Error, Pages, TierPages, medium_tier},
    sequencer::{self, Sequencer},
};

/// A multiple of the pages in the tier's pool.
const TRACKED_PAGES_PER_POOL_PAGE: usize = 2;
/// The engine's default, for a host's pool of unknown size.
const HOST_PAGES_PER_DEVICE_PAGE: usize = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankStep {
    /// Requests the messages from this number on.
    RequestReplay(u64),
    Send(Vec<Change>),
    /// Everything sent to the watchers before is void.
    SendSnapshot,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Counts rejected events too.
    pub(super) stored: u64,
    pub(super) removed: u64,
    pub(super) cleared: u64,
    /// Messages that could not be decoded.
    pub(super) malformed: u64,
    /// Gaps in the message numbers that no replay could fill.
    pub(super) gaps: u64,
    pub(super) lost_messages: u64,
    pub(super) replays: u64,
    /// Restarts of the engine that the message numbers showed.
    pub(super) restarts: u64,
    /// Store events whose parent page is unknown.
    pub(super) orphans: u64,
    /// Store events whose page hash does not match the page's tokens.
    pub(super) mismatches: u64,
    /// Store events that were rejected for another reason, at least in part.
    pub(super) refused: u64,
}

#[derive(Debug)]
pub(super) struct RankCache {
    page_tokens: u32,
    pool_pages: TierPages,
    sequencer: Sequencer<Vec<u8>>,
    verifier: Verifier,
    pages: Pages,
    /// The device first, then the host.
    resident_blocks: [u64; 2],
    /// True also if the first replay was given up. From then on, each message from before the
    /// connection is either applied or known to be lost.
    is_first_replay_over: bool,
    /// Messages were lost, so unknown pages may be resident. Becomes false when an event says that
    /// the cache was emptied (a republished radix tree begins so), when as many pages were stored
    /// since the loss as the pools hold, when the engine restarts, and with a new connection.
    has_unknown_pages: bool,
    pages_stored_since_loss: TierPages,
    counts: Counts,
    last_rejection: Option<String>,
}

impl RankCache {
    pub(super) fn new(
        page_tokens: u32,
        pool_pages: TierPages,
    ) -> Result<Self, blocks::block::Error> {
        Ok(Self {
            page_tokens,
            pool_pages,
            sequencer: Sequencer::default(),
            verifier: Verifier::default(),
            pages: Pages::new(page_tokens, tracked_pages_max(pool_pages))?,
            resident_blocks: [0; 2],
            is_first_replay_over: false,
            has_unknown_pages: false,
            pages_stored_since_loss: TierPages::default(),
            counts: Counts::default(),
            last_rejection: None,
        })
    }

    /// A new connection may lead to another engine process.
    pub(super) fn reset_for_connection(&mut self) -> Vec<RankStep> {
        self.sequencer = Sequencer::default();
        self.forget_pages();
        (self.is_first_replay_over, self.has_unknown_pages) = (false, false);
        let steps = self.sequencer.request_replay();
        self.handle_sequencer_steps(steps)
    }

    pub(super) fn take_live(&mut self, number: u64, message: Vec<u8>) -> Vec<RankStep> {
        let steps = self.sequencer.take_live(number, message);
        let mut steps = self.handle_sequencer_steps(steps);
        if !self.is_first_replay_over && !self.sequencer.is_replaying() {
            // The replay was given up, because too many new messages came in the meantime.
            self.is_first_replay_over = true;
            steps.push(RankStep::SendSnapshot);
        }
        steps
    }

    pub(super) fn take_replayed(&mut self, number: u64, message: Vec<u8>) -> Vec<RankStep> {
        let steps = self.sequencer.take_replayed(number, message);
        self.handle_sequencer_steps(steps)
    }

    pub(super) fn end_replay(&mut self) -> Vec<RankStep> {
        let steps = self.sequencer.end_replay();
        self.finish_replay(steps)
    }

    /// The replay stopped without its end marker.
    pub(super) fn handle_replay_timeout(&mut self) -> Vec<RankStep> {
        let steps = self.sequencer.handle_replay_timeout();
        self.finish_replay(steps)
    }

    fn finish_replay(&mut self, steps: Vec<sequencer::SequencerStep<Vec<u8>>>) -> Vec<RankStep> {
        let mut steps = self.handle_sequencer_steps(steps);
        if !self.is_first_replay_over && !self.sequencer.is_replaying() {
            self.is_first_replay_over = true;
            // An engine always publishes a message at its start. If none came at all, that one is
            // lost.
            self.has_unknown_pages |= self.sequencer.is_new();
            steps.push(RankStep::SendSnapshot);
        }
        steps
    }

    /// After a quiet period, the engine's latest messages may have been lost.
    pub(super) fn request_replay(&mut self) -> Vec<RankStep> {
        let steps = self.sequencer.request_replay();
        self.handle_sequencer_steps(steps)
    }

    pub(super) fn is_replaying(&self) -> bool {
        self.sequencer.is_replaying()
    }

    pub(super) fn has_replay_begun(&self) -> bool {
        self.sequencer.has_replay_begun()
    }

    pub(super) fn needs_republished_tree(&self) -> bool {
        self.is_first_replay_over && self.has_unknown_pages
    }

    /// `None` until the first replay has ended. After a loss, the snapshot has no
    /// [`Change::Complete`].
    pub(super) fn snapshot(&self) -> Option<Vec<Change>> {
        if !self.is_first_replay_over {
            return None;
        }
        let mut changes = vec![];
        if self.has_unknown_pages {
            changes.push(Change::Unknown { why: "KV events were missed".to_owned() });
        }
        changes.push(self.pages.reset_change());
        changes.extend(self.pages.snapshot());
        if !self.has_unknown_pages {
            changes.push(Change::Complete);
        }
        Some(changes)
    }

    pub(super) fn resident_blocks(&self) -> [(Tier, u64); 2] {
        [(Tier::Device, self.resident_blocks[0]), (Tier::Host, self.resident_blocks[1])]
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    pub(super) fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    pub(super) fn take_rejection(&mut self) -> Option<String> {
        self.last_rejection.take()
    }

    fn handle_sequencer_steps(
        &mut self,
        steps: Vec<sequencer::SequencerStep<Vec<u8>>>,
    ) -> Vec<RankStep> {
        let mut rank_steps = vec![];
        for step in steps {
            match step {
                sequencer::SequencerStep::Apply(message) => {
                    self.apply_message(&message, &mut rank_steps)
                }
                sequencer::SequencerStep::RequestReplay(from) => {
                    self.counts.replays += 1;
                    rank_steps.push(RankStep::RequestReplay(from));
                }
                sequencer::SequencerStep::Lost { from, to } => {
                    self.counts.gaps += 1;
                    let lost_messages = self.counts.lost_messages.saturating_add(to - from);
                    self.counts.lost_messages = lost_messages;
                    self.handle_loss(&mut rank_steps);
                }
                sequencer::SequencerStep::Restarted => {
                    self.counts.restarts += 1;
                    self.forget_pages();
                    self.has_unknown_pages = false;
                    self.push_snapshot_step(&mut rank_steps);
                }
            }
        }
        rank_steps
    }

    /// A lost message may have removed any page.
    fn handle_loss(&mut self, steps: &mut Vec<RankStep>) {
        self.forget_pages();
        (self.has_unknown_pages, self.pages_stored_since_loss) = (true, TierPages::default());
        self.push_snapshot_step(steps);
    }

    fn forget_pages(&mut self) {
        let empty = Pages::new(self.page_tokens, tracked_pages_max(self.pool_pages));
        self.pages = empty.expect("`new` accepted this page size");
        self.resident_blocks = [0; 2];
    }

    fn push_snapshot_step(&self, steps: &mut Vec<RankStep>) {
        if self.is_first_replay_over {
            steps.push(RankStep::SendSnapshot);
        }
    }

    fn apply_message(&mut self, message: &[u8], steps: &mut Vec<RankStep>) {
        let batch = match decode::decode(message) {
            Ok(batch) => batch,
            Err(error) => {
                self.counts.malformed += 1;
                self.last_rejection = Some(error.to_string());
                return self.handle_loss(steps);
            }
        };
        let mut changes = vec![];
        for event in &batch.events {
            self.apply_event(event, &mut changes);
        }
        self.count_resident(&changes);
        let (pools, stored) = (self.pool_pages, self.pages_stored_since_loss);
        let is_replaced = stored.device >= pools.device && stored.host >= pools.host;
        let has_relearned = self.has_unknown_pages && is_replaced;
        if has_relearned {
            // As many pages were stored since the loss as the pools hold, so every page from before
            // it has been evicted.
            self.has_unknown_pages = false;
        }
        if self.is_first_replay_over && !changes.is_empty() {
            steps.push(RankStep::Send(changes));
        }
        if has_relearned {
            self.push_snapshot_step(steps);
        }
    }

    fn apply_event(&mut self, event: &CacheEvent, changes: &mut Vec<Change>) {
        match event {
            CacheEvent::Stored(stored) => {
                self.counts.stored += 1;
                if let Some(tier) = medium_tier(stored.medium) {
                    *self.pages_stored_since_loss.in_tier_mut(tier) += stored.pages.len();
                }
                if self.verifier.check(stored) == Verdict::Wrong {
                    self.counts.mismatches += 1;
                    self.last_rejection =
                        Some("a page's hash does not match its tokens".to_owned());
                    return;
                }
            }
            CacheEvent::Removed { .. } => self.counts.removed += 1,
            CacheEvent::Cleared => {
                self.counts.cleared += 1;
                self.has_unknown_pages = false;
            }
        }
        if let Err(error) = self.pages.apply(event, changes) {
            if error == Error::UnknownParent {
                self.counts.orphans += 1;
            } else {
                self.counts.refused += 1;
                self.last_rejection = Some(error.to_string());
            }
        }
    }

    fn count_resident(&mut self, changes: &[Change]) {
        let tier_index = |tier: &Tier| usize::from(*tier == Tier::Host);
        for change in changes {
            match change {
                Change::Stored { tier, blocks, .. } => {
                    self.resident_blocks[tier_index(tier)] += blocks.len() as u64;
                }
                Change::Removed { tier, blocks } => {
                    self.resident_blocks[tier_index(tier)] -= blocks.len() as u64
                }
                Change::Reset { .. } => self.resident_blocks = [0; 2],
                Change::Complete | Change::Unknown { .. } => {}
            }
        }
    }
}

/// The bound is above the pools' sizes, because the events of an eviction and of what follows it
/// come in any order.
fn tracked_pages_max(pool_pages: TierPages) -> TierPages {
    let TierPages { device, host } = pool_pages;
    // The host's pool isn't known of every engine whose events name it.
    let host = if host == 0 { device.saturating_mul(HOST_PAGES_PER_DEVICE_PAGE) } else { host };
    TierPages {
        device: device.saturating_mul(TRACKED_PAGES_PER_POOL_PAGE),
        host: host.saturating_mul(TRACKED_PAGES_PER_POOL_PAGE),
    }
}

#[cfg(test)]
mod tests;
