//! Places turns without a session, by the conversation that a prompt continues.

use std::sync::Arc;

use parking_lot::Mutex;
use service::clock::now;

use super::{Chosen, Placer, decide::TurnFacts};
use crate::{
    fleet::{
        conversations::{Begun, ConversationId, Conversations},
        snapshot::Snapshot,
        worker::WorkerRef,
    },
    sessions::check::Error,
};

impl Placer {
    /// A turn whose prompt was read is recorded as one of a conversation, in one step with its
    /// placement. So of turns that come at once, each sees where the one before it went.
    pub(super) fn decide_unnamed(&self, facts: &TurnFacts<'_>) -> Result<Option<Chosen>, Error> {
        let TurnFacts { turn, turn_id, view, .. } = *facts;
        let Some(blocks) = facts.blocks() else {
            let placed_at = now();
            let placement = facts.pick_worker(&facts.placement_request(placed_at), placed_at)?;
            let carry_out = |placement| self.carry_out(turn, turn_id, view, placement, None, true);
            return Ok(placement.map(carry_out));
        };
        let mut conversations = self.conversations.lock();
        let placed_at = now();
        let facts = TurnFacts { conversations: Some(&conversations), ..*facts };
        let choice = facts.pick_worker(&facts.placement_request(placed_at), placed_at)?;
        let Some(placement) = choice else { return Ok(None) };
        let (worker, prompt_tokens) = (placement.worker, blocks.prompt_overlap().tokens);
        let begun = Begun {
            chain: blocks.chain(),
            prompt_tokens,
            uncached_tokens: placement.uncached_tokens.unwrap_or(prompt_tokens).min(prompt_tokens),
            worker,
        };
        let id = conversations.begin_turn(&begun, placed_at);
        drop(conversations);
        let conversation = id.map(|id| ConversationHold {
            conversations: Arc::clone(&self.conversations),
            id,
            is_answered: false,
        });
        let chosen = self.carry_out(turn, turn_id, view, placement, None, true);
        Ok(Some(Chosen { conversation, ..chosen }))
    }
}

#[derive(Debug)]
pub(crate) struct ConversationHold {
    conversations: Arc<Mutex<Conversations>>,
    id: ConversationId,
    /// Otherwise the worker has none of the turn's KV.
    is_answered: bool,
}

impl ConversationHold {
    pub(in crate::turn) fn record_answer(&mut self, worker: WorkerRef, view: &Snapshot) {
        self.is_answered = true;
        let kept_tokens_max =
            view.worker_table().get(worker).and_then(|stats| stats.kept_tokens_max());
        let load = view.agent(worker).rank_load(worker.dp_rank);
        let pinned_tokens = load.and_then(|load| load.pinned_tokens).map_or(0, |it| it.value);
        let room_tokens = kept_tokens_max.unwrap_or(u64::MAX).saturating_sub(pinned_tokens);
        self.conversations.lock().record_answer(self.id, room_tokens);
    }

    pub(in crate::turn) fn rebind(&self, worker: WorkerRef) {
        self.conversations.lock().rebind(self.id, worker);
    }
}

impl Drop for ConversationHold {
    fn drop(&mut self) {
        let mut conversations = self.conversations.lock();
        if self.is_answered {
            conversations.end_turn(self.id, now());
        } else {
            conversations.discard(self.id);
        }
    }
}
