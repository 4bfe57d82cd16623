//! Recognizes conversations whose clients name no session, by their prompts. Pure.
//!
//! Most agent programs send no session name. But each prompt of a conversation begins with the
//! previous one: it *continues* that prompt. The hash of a prompt's last block stands for the whole
//! prompt up to it, so one look-up per block finds the conversation. A prompt of no more blocks
//! continues none: many prompts have one beginning, and a few words of their own after it.
//!
//! An engine evicts the KV that was unused for longest. So the conversations used last are assumed
//! to be resident on their worker, as many as fit into its pool. Of a pair, the decode worker
//! stands for both. This is only a reason to prefer a worker; other routers don't know it.

use std::{
    collections::{BTreeSet, HashMap},
    time::Instant,
};

use blocks::block::BlockHash;

use super::{
    reuse_forecast::{self, IDLE_CLASSES, IdleClass, ReturnEstimator, ReuseDemand},
    worker::{AgentKey, WorkerRef},
};

/// If at least one of so many prompts that begin something new is continued, the next such prompt
/// is placed as the first of a conversation.
const BEGUN_PER_CONTINUED_MAX: u64 = 5;
/// Begun and continued conversations that are assumed to have been seen at the start.
const SEEN_ASSUMED: [u64; 2] = [20, 10];
/// Conversations begun beyond which the counts are halved, so that new ones weigh more.
const BEGUN_MAX: u64 = 20_000;

/// The most conversations whose eviction by one prompt is valued.
const EVICTED_AT_ONCE_MAX: usize = 32;

/// Never used twice.
pub type ConversationId = u64;

/// When, and a number that is never used twice.
type UseOrder = (Instant, u64);

#[derive(Debug)]
pub struct Conversations {
    conversations_max: usize,
    conversations: HashMap<ConversationId, Conversation>,
    /// By the hash of a prompt's last block.
    by_end: HashMap<BlockHash, ConversationId>,
    /// Those without a running turn, unused for longest first.
    idle: BTreeSet<(UseOrder, ConversationId)>,
    workers: HashMap<WorkerRef, WorkerConversations>,
    /// Of conversations that had one turn, and that had more.
    returns: [ReturnEstimator; 2],
    begun: u64,
    /// Those of `begun` that a prompt has continued.
    continued: u64,
    last_id: ConversationId,
    last_use: u64,
}

#[derive(Debug, Default)]
struct WorkerConversations {
    /// Those without a running turn, unused for longest first.
    idle: BTreeSet<(UseOrder, ConversationId)>,
    idle_tokens: u64,
    /// Those with a running turn included.
    tokens: u64,
}

#[derive(Debug, Clone)]
struct Conversation {
    /// Ran the last turn.
    worker: WorkerRef,
    /// Hash of the last block of the last prompt.
    end: BlockHash,
    blocks: usize,
    prompt_tokens: u64,
    /// KV that only this conversation has on the worker: without what it shares.
    own_tokens: u64,
    is_resident: bool,
    /// The end of the last turn. `None` while a turn runs.
    idle_since: Option<UseOrder>,
    moved_at: Option<Instant>,
    /// Whether a prompt has continued an earlier one.
    has_grown: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continued {
    pub id: ConversationId,
    pub worker: WorkerRef,
    pub idle_since: Instant,
    pub moved_at: Option<Instant>,
    pub own_tokens: u64,
}

#[derive(Debug, Clone, Copy)]
pub struct Begun<'a> {
    pub chain: &'a [BlockHash],
    pub prompt_tokens: u64,
    pub uncached_tokens: u64,
    pub worker: WorkerRef,
}

impl Conversations {
    #[must_use]
    pub fn new(conversations_max: usize) -> Self {
        Self {
            conversations_max: conversations_max.max(1),
            conversations: HashMap::new(),
            by_end: HashMap::new(),
            idle: BTreeSet::new(),
            workers: HashMap::new(),
            returns: Default::default(),
            begun: SEEN_ASSUMED[0],
            continued: SEEN_ASSUMED[1],
            last_id: 0,
            last_use: 0,
        }
    }

    /// `None` also if the conversation's KV is presumably evicted, or if a turn of it runs: prompts
    /// that are sent side by side are not one conversation.
    #[must_use]
    pub fn find(&self, chain: &[BlockHash]) -> Option<Continued> {
        let id = self.find_id(chain)?;
        let conversation = &self.conversations[&id];
        let (idle_since, _) = conversation.idle_since?;
        let has_grown = chain.len() > conversation.blocks;
        (conversation.is_resident && has_grown).then_some(Continued {
            id,
            worker: conversation.worker,
            idle_since,
            moved_at: conversation.moved_at,
            own_tokens: conversation.own_tokens,
        })
    }

    fn find_id(&self, chain: &[BlockHash]) -> Option<ConversationId> {
        let id = chain.iter().rev().find_map(|hash| self.by_end.get(hash))?;
        self.conversations[id].idle_since.is_some().then_some(*id)
    }

    /// Whether a prompt without a name probably begins a conversation.
    #[must_use]
    pub fn expects_more_turns(&self) -> bool {
        self.begun <= self.continued * BEGUN_PER_CONTINUED_MAX
    }

    #[must_use]
    pub fn tokens_on(&self, worker: WorkerRef) -> u64 {
        self.workers.get(&worker).map_or(0, |on_worker| on_worker.tokens)
    }

    /// When the conversation was last used that the worker evicts first.
    #[must_use]
    pub fn oldest_use_on(&self, worker: WorkerRef) -> Option<Instant> {
        self.workers.get(&worker)?.idle.first().map(|((at, _), _)| *at)
    }

    /// The KV of the idle conversations on the worker by class of idle time, and its sum. The
    /// classes have only what is evicted first: about `tokens_max` tokens.
    #[must_use]
    pub fn evicted_first(
        &self,
        worker: WorkerRef,
        tokens_max: u64,
        now: Instant,
    ) -> ([IdleClass; IDLE_CLASSES], u64) {
        let mut classes = [IdleClass::default(); IDLE_CLASSES];
        let Some(on_worker) = self.workers.get(&worker) else { return (classes, 0) };
        let mut tokens = 0_u64;
        for ((at, _), id) in on_worker.idle.iter().take(EVICTED_AT_ONCE_MAX) {
            if tokens >= tokens_max {
                break;
            }
            let Conversation { own_tokens, has_grown, .. } = self.conversations[id];
            let idle_time = now.saturating_duration_since(*at);
            let chance_milli = self.returns[usize::from(has_grown)].chance_milli(idle_time);
            classes[reuse_forecast::idle_class_of(idle_time)].add_unnamed(own_tokens, chance_milli);
            tokens = tokens.saturating_add(own_tokens);
        }
        (classes, on_worker.idle_tokens)
    }

    /// `None` if the prompt is too short to have a block.
    pub fn begin_turn(&mut self, begun: &Begun<'_>, now: Instant) -> Option<ConversationId> {
        let end = *begun.chain.last()?;
        let id = match self.find_id(begun.chain) {
            Some(id) => {
                self.continue_conversation(id, begun, now);
                id
            }
            None => self.insert(begun, end),
        };
        self.set_end(id, end, begun.chain.len());
        self.bound(now);
        Some(id)
    }

    fn insert(&mut self, begun: &Begun<'_>, end: BlockHash) -> ConversationId {
        self.last_id += 1;
        self.begun += 1;
        if self.begun > BEGUN_MAX {
            (self.begun, self.continued) = (self.begun / 2, self.continued / 2);
        }
        let conversation = Conversation {
            worker: begun.worker,
            end,
            blocks: begun.chain.len(),
            prompt_tokens: begun.prompt_tokens,
            own_tokens: begun.uncached_tokens,
            is_resident: true,
            idle_since: None,
            moved_at: None,
            has_grown: false,
        };
        self.workers.entry(begun.worker).or_default().tokens += conversation.own_tokens;
        self.conversations.insert(self.last_id, conversation);
        self.last_id
    }

    fn continue_conversation(&mut self, id: ConversationId, begun: &Begun<'_>, now: Instant) {
        self.take_from_worker(id);
        let conversation = self.conversations.get_mut(&id).expect("it was just found");
        if let Some(order) = conversation.idle_since.take() {
            self.idle.remove(&(order, id));
            let idle_time = now.saturating_duration_since(order.0);
            self.returns[usize::from(conversation.has_grown)].record_return(idle_time);
        }
        let stays = conversation.is_resident && conversation.worker == begun.worker;
        let kept_tokens = if stays { conversation.own_tokens } else { 0 };
        // The answer was added to the KV, and is no part of what is computed now.
        let grown_tokens = begun.prompt_tokens.saturating_sub(conversation.prompt_tokens);
        let added_tokens =
            if stays { begun.uncached_tokens.max(grown_tokens) } else { begun.uncached_tokens };
        conversation.own_tokens = (kept_tokens + added_tokens).min(begun.prompt_tokens);
        let grows = begun.chain.len() > conversation.blocks;
        if conversation.worker != begun.worker {
            conversation.worker = begun.worker;
            conversation.moved_at = Some(now).filter(|_| grows).or(conversation.moved_at);
        }
        conversation.prompt_tokens = begun.prompt_tokens;
        self.continued += u64::from(grows && !conversation.has_grown);
        conversation.is_resident = true;
        conversation.has_grown |= grows;
        self.workers.entry(begun.worker).or_default().tokens += conversation.own_tokens;
    }

    /// A worker that has begun to answer has the turn's KV. `room_tokens` is its room for KV that
    /// can be evicted.
    pub fn record_answer(&mut self, id: ConversationId, room_tokens: u64) {
        if let Some(worker) = self.conversations.get(&id).map(|conversation| conversation.worker) {
            self.evict(worker, room_tokens);
        }
    }

    /// For a turn that no worker has answered.
    pub fn discard(&mut self, id: ConversationId) {
        self.remove(id);
    }

    pub fn end_turn(&mut self, id: ConversationId, now: Instant) {
        let Some(conversation) = self.conversations.get_mut(&id) else { return };
        if conversation.idle_since.is_some() {
            return;
        }
        self.last_use += 1;
        let order = (now, self.last_use);
        conversation.idle_since = Some(order);
        self.idle.insert((order, id));
        if conversation.is_resident {
            let on_worker = self.workers.entry(conversation.worker).or_default();
            on_worker.idle.insert((order, id));
            on_worker.idle_tokens += conversation.own_tokens;
        }
        self.bound(now);
    }

    /// Records that another worker runs the turn than the one that was chosen first.
    pub fn rebind(&mut self, id: ConversationId, worker: WorkerRef) {
        if self.conversations.get(&id).is_none_or(|conversation| conversation.worker == worker) {
            return;
        }
        self.take_from_worker(id);
        let conversation = self.conversations.get_mut(&id).expect("it was just found");
        (conversation.worker, conversation.is_resident) = (worker, true);
        conversation.own_tokens = conversation.prompt_tokens;
        let on_worker = self.workers.entry(worker).or_default();
        on_worker.tokens += conversation.own_tokens;
        if let Some(order) = conversation.idle_since {
            on_worker.idle.insert((order, id));
            on_worker.idle_tokens += conversation.own_tokens;
        }
    }

    pub fn forget_agent(&mut self, agent: AgentKey) {
        let of_agent = |(id, conversation): (&ConversationId, &Conversation)| {
            (conversation.worker.agent == agent).then_some(*id)
        };
        let ids: Vec<ConversationId> = self.conversations.iter().filter_map(of_agent).collect();
        for id in ids {
            self.remove(id);
        }
    }

    /// Adds the KV of conversations that is presumably used again. `demands` is by slot, then by
    /// rank; `is_known` says which agents have a place there.
    pub(super) fn add_demand(
        &mut self,
        demands: &mut [Vec<ReuseDemand>],
        is_known: impl Fn(AgentKey) -> bool,
        now: Instant,
    ) {
        for has_grown in [false, true] {
            let of_kind = self.conversations.values().filter(|it| it.has_grown == has_grown);
            let idle_times = of_kind.filter_map(|it| Some(it.idle_since?.0));
            let idle_times = idle_times.map(|at| now.saturating_duration_since(at));
            self.returns[usize::from(has_grown)].update_estimate(idle_times, now);
        }
        for conversation in self.conversations.values().filter(|it| it.is_resident) {
            if !is_known(conversation.worker.agent) {
                continue;
            }
            let demand = reuse_forecast::demand_on(demands, conversation.worker);
            match conversation.idle_since {
                Some((at, _)) => {
                    let returns = &self.returns[usize::from(conversation.has_grown)];
                    let idle_time = now.saturating_duration_since(at);
                    demand.add_unnamed_idle(conversation.own_tokens, idle_time, returns);
                }
                // The turn's lease also counts what the turn adds, until its end. Left out here, it
                // would count nowhere from then until the next forecast.
                None => demand.add_running(conversation.own_tokens),
            }
        }
    }

    fn set_end(&mut self, id: ConversationId, end: BlockHash, blocks: usize) {
        self.forget_end(id);
        let conversation = self.conversations.get_mut(&id).expect("the caller has its id");
        (conversation.end, conversation.blocks) = (end, blocks);
        // Of two with the same end, the later one is continued.
        self.by_end.insert(end, id);
    }

    fn forget_end(&mut self, id: ConversationId) {
        let end = self.conversations.get(&id).map(|conversation| conversation.end);
        if let Some(end) = end.filter(|end| self.by_end.get(end) == Some(&id)) {
            self.by_end.remove(&end);
        }
    }

    fn take_from_worker(&mut self, id: ConversationId) {
        let Some(conversation) = self.conversations.get(&id).filter(|it| it.is_resident) else {
            return;
        };
        let Some(on_worker) = self.workers.get_mut(&conversation.worker) else { return };
        on_worker.tokens -= conversation.own_tokens;
        if let Some(order) = conversation.idle_since {
            on_worker.idle.remove(&(order, id));
            on_worker.idle_tokens -= conversation.own_tokens;
        }
        if on_worker.tokens == 0 && on_worker.idle.is_empty() {
            self.workers.remove(&conversation.worker);
        }
    }

    /// Assumes that an engine has evicted what it has no room for, unused for longest first.
    fn evict(&mut self, worker: WorkerRef, room_tokens: u64) {
        while let Some(on_worker) = self.workers.get(&worker)
            && on_worker.tokens > room_tokens
            && let Some((_, id)) = on_worker.idle.first().copied()
        {
            self.take_from_worker(id);
            self.conversations.get_mut(&id).expect("it is idle").is_resident = false;
        }
    }

    fn bound(&mut self, now: Instant) {
        while self.conversations.len() > self.conversations_max
            && let Some((_, id)) = self.idle.first().copied()
        {
            if let Some((at, _)) = self.conversations[&id].idle_since {
                let returns = &mut self.returns[usize::from(self.conversations[&id].has_grown)];
                returns.record_end(now.saturating_duration_since(at));
            }
            self.remove(id);
        }
    }

    fn remove(&mut self, id: ConversationId) {
        self.forget_end(id);
        self.take_from_worker(id);
        if let Some(conversation) = self.conversations.remove(&id)
            && let Some(order) = conversation.idle_since
        {
            self.idle.remove(&(order, id));
        }
    }

    pub fn check_invariants(&self) {
        let mut tokens: HashMap<WorkerRef, (u64, u64, usize)> = HashMap::new();
        for (id, conversation) in &self.conversations {
            assert!(conversation.own_tokens <= conversation.prompt_tokens);
            let order = conversation.idle_since;
            assert!(order.is_none_or(|order| self.idle.contains(&(order, *id))));
            if conversation.is_resident {
                let (sum, idle_sum, idle_count) = tokens.entry(conversation.worker).or_default();
                *sum += conversation.own_tokens;
                if let Some(order) = order {
                    *idle_count += 1;
                    *idle_sum += conversation.own_tokens;
                    assert!(self.workers[&conversation.worker].idle.contains(&(order, *id)));
                }
            }
        }
        for (end, id) in &self.by_end {
            assert_eq!(self.conversations[id].end, *end);
        }
        let is_idle = |conversation: &&Conversation| conversation.idle_since.is_some();
        assert_eq!(self.idle.len(), self.conversations.values().filter(is_idle).count());
        for (worker, on_worker) in &self.workers {
            let sums = (on_worker.tokens, on_worker.idle_tokens, on_worker.idle.len());
            assert_eq!(sums, tokens.remove(worker).unwrap_or_default());
        }
        assert!(tokens.values().all(|sums| *sums == (0, 0, 0)), "{tokens:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::fleet::testing::start;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(agent: usize) -> WorkerRef {
        WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
    }

    /// Returns the hashes of a prompt's first `blocks` blocks.
    fn chain(prompt: u64, blocks: u64) -> Vec<BlockHash> {
        (1..=blocks).map(|block| BlockHash(prompt * 1000 + block)).collect()
    }

    /// Runs a turn whose prompt has blocks of 100 tokens.
    fn run_turn(
        table: &mut Conversations,
        chain: &[BlockHash],
        worker: WorkerRef,
        now: Instant,
    ) -> Option<ConversationId> {
        let id = begin(table, chain, worker, now);
        id.inspect(|id| {
            table.record_answer(*id, 1000);
            table.end_turn(*id, now);
            table.check_invariants();
        })
    }

    fn begin(
        table: &mut Conversations,
        chain: &[BlockHash],
        worker: WorkerRef,
        now: Instant,
    ) -> Option<ConversationId> {
        let prompt_tokens = chain.len() as u64 * 100;
        let uncached_tokens = prompt_tokens;
        let begun = Begun { chain, prompt_tokens, uncached_tokens, worker };
        let id = table.begin_turn(&begun, now);
        table.check_invariants();
        id
    }

    #[test]
    fn a_prompt_that_begins_with_an_earlier_one_continues_it() {
        let (mut table, now) = (Conversations::new(10), start());
        let id = run_turn(&mut table, &chain(1, 4), at(2), now).unwrap();
        let found = table.find(&chain(1, 6)).expect("it continues the first prompt");
        assert_eq!((found.id, found.worker, found.idle_since), (id, at(2), now));
        assert_eq!(table.find(&chain(1, 4)), None, "it has not grown");
        assert_eq!(table.find(&chain(1, 3)), None, "it is shorter");
        assert_eq!(table.find(&chain(2, 6)), None, "another prompt");
        assert_eq!(run_turn(&mut table, &chain(1, 6), at(2), now + SECOND), Some(id));
        assert_eq!(table.find(&chain(1, 7)).map(|found| found.id), Some(id));
        assert_eq!(table.find(&chain(1, 5)), None, "what came before has grown");
        assert_eq!(run_turn(&mut table, &[], at(2), now), None, "too short to have a block");
    }

    #[test]
    fn prompts_side_by_side_are_several_conversations() {
        let (mut table, now) = (Conversations::new(10), start());
        let one = begin(&mut table, &chain(1, 4), at(0), now).unwrap();
        assert_eq!(table.find(&chain(1, 5)), None);
        let other = begin(&mut table, &chain(1, 4), at(1), now).unwrap();
        assert_ne!(one, other);
        table.end_turn(one, now);
        table.end_turn(other, now);
        table.check_invariants();
        assert_eq!(table.find(&chain(1, 5)).map(|found| found.id), Some(other));
    }

    #[test]
    fn prompts_with_one_beginning_and_a_short_end_are_no_conversation() {
        let (mut table, now) = (Conversations::new(10), start());
        // What differs is less than a block.
        for agent in 0..3 {
            assert_eq!(table.find(&chain(1, 4)), None);
            run_turn(&mut table, &chain(1, 4), at(agent), now);
        }
        assert_eq!([0, 1, 2].map(|agent| table.tokens_on(at(agent))), [0, 0, 400]);
        // What differs has a block of its own.
        let tail = |end| [chain(1, 4), chain(end, 1)].concat();
        run_turn(&mut table, &tail(2), at(0), now);
        assert_eq!(table.find(&tail(3)), None);
    }

    #[test]
    fn what_no_worker_answered_is_forgotten() {
        let (mut table, now) = (Conversations::new(10), start());
        run_turn(&mut table, &chain(1, 8), at(0), now);
        let refused = begin(&mut table, &chain(2, 8), at(0), now).unwrap();
        table.discard(refused);
        table.check_invariants();
        table.end_turn(refused, now);
        table.check_invariants();
        assert!(table.find(&chain(1, 9)).is_some(), "nothing was evicted");
        assert_eq!((table.find(&chain(2, 9)), table.tokens_on(at(0))), (None, 800));
    }

    #[test]
    fn a_worker_keeps_what_was_used_last_and_fits_its_pool() {
        let (mut table, now) = (Conversations::new(10), start());
        for (second, prompt) in (0..).zip([1, 2, 1, 3]) {
            run_turn(&mut table, &chain(prompt, 4), at(0), now + second * SECOND);
        }
        assert_eq!(table.tokens_on(at(0)), 800);
        assert_eq!(table.find(&chain(2, 5)), None, "the engine has evicted it");
        assert_eq!(table.oldest_use_on(at(0)), Some(now + 2 * SECOND));
        assert!([1, 3].iter().all(|&prompt| table.find(&chain(prompt, 5)).is_some()));
        // It comes again, on another worker.
        run_turn(&mut table, &chain(2, 4), at(1), now + 9 * SECOND);
        assert_eq!((table.tokens_on(at(0)), table.tokens_on(at(1))), (800, 400));
    }

    #[test]
    fn a_move_takes_the_tokens_along_and_is_remembered() {
        let (mut table, now) = (Conversations::new(10), start());
        run_turn(&mut table, &chain(1, 4), at(0), now);
        run_turn(&mut table, &chain(1, 6), at(1), now + SECOND);
        let found = table.find(&chain(1, 7)).unwrap();
        assert_eq!((found.worker, found.moved_at), (at(1), Some(now + SECOND)));
        assert_eq!((table.tokens_on(at(0)), table.tokens_on(at(1))), (0, 600));
        table.rebind(found.id, at(2));
        table.check_invariants();
        assert_eq!((table.tokens_on(at(1)), table.tokens_on(at(2))), (0, 600));
        table.forget_agent(AgentKey::first(2));
        table.check_invariants();
        assert_eq!((table.find(&chain(1, 7)), table.tokens_on(at(2))), (None, 0));
    }

    #[test]
    fn what_has_grown_is_wanted_more_than_what_came_once() {
        let (mut table, now) = (Conversations::new(1000), start());
        assert!(table.expects_more_turns(), "until it is known better");
        for prompt in 0..300 {
            run_turn(&mut table, &chain(prompt, 1), at(0), now);
        }
        for turn in 1..20 {
            run_turn(&mut table, &chain(7777, turn), at(1), now);
        }
        let hours = 20_000 * SECOND;
        table.add_demand(&mut [vec![], vec![]], |_| true, now + hours);
        assert!(!table.expects_more_turns(), "most came once");
        let [once, grown] = [0, 1].map(|kind| table.returns[kind].chance_milli(Duration::ZERO));
        assert!(once + 100 < grown, "{once} and {grown} thousandths");
    }

    #[test]
    fn the_next_agent_of_a_slot_has_none_of_the_conversations() {
        let (mut table, now) = (Conversations::new(10), start());
        let (old, new) = (at(0), WorkerRef { agent: at(0).agent.next(), dp_rank: 0 });
        run_turn(&mut table, &chain(1, 4), old, now);
        table.forget_agent(new.agent);
        assert_eq!((table.tokens_on(old), table.tokens_on(new)), (400, 0));
        assert_eq!((table.oldest_use_on(old), table.oldest_use_on(new)), (Some(now), None));
        let mut demands = [vec![]];
        table.add_demand(&mut demands, |agent| agent == new.agent, now);
        assert!(demands[0].is_empty(), "{demands:?}");
        run_turn(&mut table, &chain(2, 2), new, now);
        table.forget_agent(old.agent);
        table.check_invariants();
        assert_eq!((table.tokens_on(old), table.tokens_on(new)), (0, 200));
        assert!(table.find(&chain(1, 5)).is_none() && table.find(&chain(2, 3)).is_some());
    }

    proptest! {
        /// Whatever turns run where, the sums agree, and no worker has more than its pool unless
        /// turns run.
        #[test]
        fn the_table_is_sound(
            turns in prop::collection::vec((0..6_u64, 1..8_u64, 0..3_usize, 0..4_u8), 1..80),
        ) {
            let (mut table, start) = (Conversations::new(5), start());
            let mut running = vec![];
            for (second, (prompt, blocks, agent, action)) in (0..).zip(turns) {
                let now = start + second * SECOND;
                match action {
                    0 => {
                        let chain = chain(prompt, blocks);
                        running.extend(begin(&mut table, &chain, at(agent), now));
                    }
                    1 if !running.is_empty() => table.end_turn(running.remove(0), now),
                    2 if !running.is_empty() => table.rebind(running[0], at(agent)),
                    _ => {
                        run_turn(&mut table, &chain(prompt, blocks), at(agent), now);
                    }
                }
                table.check_invariants();
                prop_assert!(table.conversations.len() <= 5 + running.len());
                if running.is_empty() && action == 3 {
                    prop_assert!(table.tokens_on(at(agent)) <= 1000);
                }
            }
        }
    }
}
