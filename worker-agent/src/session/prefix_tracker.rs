//! Finds a volatile prefix: a text early in a session's prompts that differs from turn to turn.
//!
//! The engine computes everything after such a text again in each turn. A block here is one content
//! block of a message or of the system prompt, or the whole list `tools`; it has nothing to do with
//! KV blocks. The tracker keeps hashes and places of a prompt's first blocks, never text. An
//! *aside* is a prompt of another conversation in the session, such as a request for a title.

use contract::load::{PromptPlace, PromptRole, VolatilePrefix};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The most blocks that are kept of a prompt, 16 bytes each. Coding agents begin with 1 to 4 system
/// blocks, which leaves about a dozen to messages. The reader of bodies also visits at most so many
/// messages, and so many content blocks of each.
pub const BLOCKS_MAX: usize = 16;
/// A difference in this many first bytes of a prompt's text (about 4,096 tokens) counts as early.
const EARLY_BYTES_MAX: usize = 16 * 1024;
/// Coding agents send 20 to 100 KiB.
const TOOLS_BYTES_MAX: usize = 64 * 1024;
/// The most bytes that are compared of a late block: one after the first [`EARLY_BYTES_MAX`] bytes,
/// which only shows whether two prompts belong to the same conversation.
const LATE_BYTES_MAX: usize = 4 * 1024;
/// One equal late message block is enough to recognize the conversation. The others are kept
/// because a client may edit its newest message.
const LATE_BLOCKS_MAX: usize = 3;
/// In a prompt without blocks, a difference within this many tokens counts as early.
const EARLY_TOKENS_MAX: u64 = 4096;
/// Token indices that differ by no more count as one place. Random texts at one place may begin
/// with the same few tokens, so the index of the first difference varies.
const SAME_PLACE_TOKENS_MAX: u64 = 16;
/// So many turns in a row must differ at one place before the agent reports the place.
const STREAK_TURNS_MIN: u64 = 3;

/// A [`PromptPlace`] in three bytes instead of twelve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    role: PromptRole,
    message: u8,
    block: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    hash: u64,
    place: Place,
    /// Whether the block begins in the first [`EARLY_BYTES_MAX`] of text, or is `tools`.
    is_early: bool,
}

const _: () = assert!(size_of::<Block>() == 16, "a session keeps up to 16 blocks");

/// The first blocks of a prompt, as hashes. Empty if the prompt is a single text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptStart {
    blocks: Vec<Block>,
    /// Bytes of text in the blocks, at most [`EARLY_BYTES_MAX`]. Excludes `tools`.
    early_bytes: usize,
    /// Whether the body holds only the end of the prompt, because the engine has the rest.
    is_continued: bool,
}

#[derive(Debug, Clone, Default)]
pub struct PrefixTracker {
    /// Of the latest prompt of the session's conversation.
    conversation_blocks: Vec<Block>,
    /// Of the longest prompt of another conversation since the session's own has grown.
    other_blocks: Vec<Block>,
    /// Of the newest prompt to those before.
    relation: Relation,
    streak: Option<Streak>,
    volatile_prefix: Option<VolatilePrefix>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Relation {
    /// Only the shim can compare the prompt.
    #[default]
    NoBlocks,
    /// The early blocks are equal.
    Same,
    /// Same conversation, but the early block at this place differs.
    Changed(Place),
    OtherConversation,
    /// The prompt continues another conversation, which is now the session's.
    Moved,
}

/// Turns in a row whose prompts differed at one place.
#[derive(Debug, Clone, Copy)]
struct Streak {
    /// `None` if the prompts have no blocks.
    place: Option<Place>,
    /// The lowest that differs, if the shim has reported one.
    token_index: Option<u64>,
    turns: u64,
}

impl Block {
    /// Not one of the instructions and tools that a client puts before the conversation.
    fn is_message(&self) -> bool {
        use PromptRole::{Developer, Instructions, System, Tools};
        !matches!(self.place.role, System | Developer | Instructions | Tools)
    }
}

impl PromptStart {
    /// Of a prompt whose body holds only its end: it shows no blocks, and belongs to its session.
    #[must_use]
    pub fn continued() -> Self {
        Self { is_continued: true, ..Self::default() }
    }

    /// Whether [`push`](Self::push) would keep no further block.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let late_blocks = self.blocks.iter().filter(|block| !block.is_early && block.is_message());
        self.blocks.len() == BLOCKS_MAX || late_blocks.count() == LATE_BLOCKS_MAX
    }

    /// Does nothing if the start [`is_full`](Self::is_full), or `message` or `block` is above 255.
    pub fn push(&mut self, role: PromptRole, message: usize, block: usize, parts: &[&[u8]]) {
        let (Ok(message), Ok(block)) = (u8::try_from(message), u8::try_from(block)) else { return };
        if self.is_full() {
            return;
        }
        let early_bytes_left = EARLY_BYTES_MAX - self.early_bytes;
        let bytes_max = match role {
            PromptRole::Tools => TOOLS_BYTES_MAX,
            _ if early_bytes_left > 0 => early_bytes_left,
            _ => LATE_BYTES_MAX,
        };
        let (hash, bytes) = hash_parts(parts, bytes_max);
        let is_tools = role == PromptRole::Tools;
        if !is_tools {
            self.early_bytes += bytes.min(early_bytes_left);
        }
        let place = Place { role, message, block };
        self.blocks.push(Block { hash, place, is_early: is_tools || early_bytes_left > 0 });
    }
}

/// Returns the hash of the first `bytes_max` bytes, and the number of bytes hashed.
fn hash_parts(parts: &[&[u8]], bytes_max: usize) -> (u64, usize) {
    if let [part] = parts {
        let bytes = part.len().min(bytes_max);
        return (xxh3_64(&part[..bytes]), bytes);
    }
    let mut state = Xxh3::new();
    let mut bytes_left = bytes_max;
    for part in parts {
        let bytes = part.len().min(bytes_left);
        state.update(&part[..bytes]);
        bytes_left -= bytes;
    }
    (state.digest(), bytes_max - bytes_left)
}

impl PrefixTracker {
    /// Whether the prompt belongs to another conversation; `None` if one of both has no blocks.
    #[must_use]
    pub fn is_aside(&self, start: &PromptStart) -> Option<bool> {
        if start.is_continued {
            return Some(false);
        }
        let can_tell = !start.blocks.is_empty() && !self.conversation_blocks.is_empty();
        can_tell.then(|| self.relate(start) == Relation::OtherConversation)
    }

    /// The prompt may ask for a title, be a subagent's, or begin what replaces the conversation.
    pub fn record_aside(&mut self, start: PromptStart) {
        // A shorter one in between, such as a title, doesn't end a longer one.
        if start.blocks.len() > self.other_blocks.len() {
            self.other_blocks = start.blocks;
        }
        self.debug_check();
    }

    /// Whether the newest prompt has made another conversation the session's.
    #[must_use]
    pub fn has_moved(&self) -> bool {
        self.relation == Relation::Moved
    }

    #[must_use]
    pub fn volatile_prefix(&self) -> Option<VolatilePrefix> {
        self.volatile_prefix
    }

    /// Records a full history that goes to the engine. Returns a volatile prefix once, when it is
    /// found.
    pub fn record_prompt_start(&mut self, start: PromptStart) -> Option<VolatilePrefix> {
        if start.blocks.is_empty() {
            self.relation = Relation::NoBlocks;
            return None;
        }
        self.relation = self.relate(&start);
        let newly_found = match self.relation {
            Relation::NoBlocks | Relation::Same | Relation::Moved => {
                self.streak = None;
                None
            }
            Relation::Changed(place) => self.extend_streak(Some(place), None),
            // In a session that a client has opened, or that has had asides alone, the next turn
            // may still continue `conversation_blocks`, so these stay once.
            Relation::OtherConversation if self.other_blocks.is_empty() => {
                self.record_aside(start);
                return None;
            }
            Relation::OtherConversation => {
                self.relation = Relation::Moved;
                self.streak = None;
                None
            }
        };
        // A repeated request for a title, which doesn't grow, shows nothing about the others.
        if self.has_moved() || has_grown(&self.conversation_blocks, &start) {
            self.other_blocks = vec![];
        }
        self.conversation_blocks = start.blocks;
        self.debug_check();
        newly_found
    }

    /// The client has left its conversation if a prompt continues another, longer than before.
    fn relate(&self, start: &PromptStart) -> Relation {
        let relation = compare(&self.conversation_blocks, &start.blocks);
        let continues_other = !self.other_blocks.is_empty()
            && compare(&self.other_blocks, &start.blocks) != Relation::OtherConversation;
        if relation == Relation::OtherConversation
            && continues_other
            && has_grown(&self.other_blocks, start)
        {
            return Relation::Moved;
        }
        relation
    }

    /// Records how many tokens the newest prompt shares with the session's history, as the shim
    /// found. `is_longer`: the prompt has more tokens than the history, as a continued one would.
    pub fn record_divergence(
        &mut self,
        shared_tokens: u64,
        is_longer: bool,
    ) -> Option<VolatilePrefix> {
        match self.relation {
            Relation::NoBlocks if is_longer && shared_tokens < EARLY_TOKENS_MAX => {
                self.extend_streak(None, Some(shared_tokens))
            }
            Relation::Changed(place) => {
                let streak = self.streak.as_mut().filter(|streak| streak.place == Some(place))?;
                streak.token_index = min_token_index(streak.token_index, Some(shared_tokens));
                let token_index = streak.token_index;
                // Refine the token index that was reported for this place.
                if let Some(prefix) = &mut self.volatile_prefix
                    && prefix.place == prompt_place(Some(place))
                {
                    prefix.token_index = min_token_index(prefix.token_index, token_index);
                }
                None
            }
            Relation::NoBlocks | Relation::Same | Relation::OtherConversation | Relation::Moved => {
                None
            }
        }
    }

    pub fn record_continuation(&mut self) {
        if self.relation == Relation::NoBlocks {
            self.streak = None;
        }
    }

    /// Counts a turn that differs at `place`, or at `token_index` if its prompt has no blocks.
    fn extend_streak(
        &mut self,
        place: Option<Place>,
        token_index: Option<u64>,
    ) -> Option<VolatilePrefix> {
        let is_same_place = |streak: &Streak| match (streak.token_index, token_index) {
            (Some(index_before), Some(index_now)) => {
                index_before.abs_diff(index_now) <= SAME_PLACE_TOKENS_MAX
            }
            _ => true,
        };
        let streak_before =
            self.streak.filter(|streak| streak.place == place && is_same_place(streak));
        let streak = Streak {
            place,
            token_index: min_token_index(
                streak_before.and_then(|streak| streak.token_index),
                token_index,
            ),
            turns: streak_before.map_or(1, |streak| streak.turns + 1),
        };
        self.streak = Some(streak);
        match &mut self.volatile_prefix {
            Some(reported) if reported.place == prompt_place(place) => {
                reported.turns += 1;
                reported.token_index = min_token_index(reported.token_index, streak.token_index);
                None
            }
            newly_found if streak.turns >= STREAK_TURNS_MIN => {
                let (place, token_index) = (prompt_place(place), streak.token_index);
                *newly_found = Some(VolatilePrefix { token_index, place, turns: streak.turns });
                *newly_found
            }
            _ => None,
        }
    }

    fn debug_check(&self) {
        if cfg!(debug_assertions) {
            let blocks = self.conversation_blocks.len().max(self.other_blocks.len());
            assert!(blocks <= BLOCKS_MAX, "more blocks are kept than the bound allows");
            let turns = self.volatile_prefix.map_or(STREAK_TURNS_MIN, |prefix| prefix.turns);
            assert!(turns >= STREAK_TURNS_MIN, "a place was reported too early");
        }
    }
}

/// Prompts that differ early belong to the same conversation if a later message of the new one is
/// also in the old one, at the same place.
fn compare(old_blocks: &[Block], new_blocks: &[Block]) -> Relation {
    let mut block_pairs = old_blocks.iter().zip(new_blocks);
    let Some(index) =
        block_pairs.position(|(old, new)| (old.place, old.hash) != (new.place, new.hash))
    else {
        return Relation::Same;
    };
    if !new_blocks[index].is_early {
        return Relation::Same;
    }
    let mut later_messages = new_blocks[index + 1..].iter().filter(|block| block.is_message());
    let is_same_conversation = later_messages
        .any(|new| old_blocks.iter().any(|old| (old.place, old.hash) == (new.place, new.hash)));
    if is_same_conversation {
        Relation::Changed(new_blocks[index].place)
    } else {
        Relation::OtherConversation
    }
}

/// A prompt of which further blocks aren't kept counts as grown.
fn has_grown(old_blocks: &[Block], start: &PromptStart) -> bool {
    start.is_full() || start.blocks.len() > old_blocks.len()
}

fn min_token_index(first: Option<u64>, second: Option<u64>) -> Option<u64> {
    first.into_iter().chain(second).min()
}

fn prompt_place(place: Option<Place>) -> Option<PromptPlace> {
    place.map(|Place { role, message, block }| PromptPlace {
        role,
        message: message.into(),
        block: block.into(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a prompt with a system prompt in two blocks and the first messages of a
    /// conversation.
    fn prompt(system: [&str; 2], messages: &[&str]) -> PromptStart {
        let mut start = PromptStart::default();
        for (number, text) in system.iter().enumerate() {
            start.push(PromptRole::System, 0, number, &[text.as_bytes()]);
        }
        for (number, text) in messages.iter().enumerate() {
            let role = if number % 2 == 0 { PromptRole::User } else { PromptRole::Assistant };
            start.push(role, number, 0, &[text.as_bytes()]);
        }
        start
    }

    /// Returns the turns of one conversation. `system` gives each turn's system blocks by its
    /// number.
    fn turns(system: impl Fn(usize) -> [String; 2], count: usize) -> Vec<PromptStart> {
        let messages: Vec<String> = (0..2 * count).map(|number| format!("m{number}")).collect();
        let messages: Vec<&str> = messages.iter().map(String::as_str).collect();
        let turn = |number: usize| {
            let [first, second] = system(number);
            prompt([&first, &second], &messages[..2 * number + 1])
        };
        (0..count).map(turn).collect()
    }

    fn changing(number: usize) -> [String; 2] {
        [format!("nonce {number}"), "You help.".to_owned()]
    }

    fn constant(_: usize) -> [String; 2] {
        ["You".to_owned(), "help.".to_owned()]
    }

    fn place(role: PromptRole, message: u32, block: u32) -> Option<PromptPlace> {
        Some(PromptPlace { role, message, block })
    }

    #[test]
    fn a_changing_first_block_is_found_with_the_third_difference_and_told_once() {
        let mut tracker = PrefixTracker::default();
        let told: Vec<_> =
            turns(changing, 6).into_iter().map(|one| tracker.record_prompt_start(one)).collect();
        let found =
            VolatilePrefix { token_index: None, place: place(PromptRole::System, 0, 0), turns: 3 };
        assert_eq!(told, [None, None, None, Some(found), None, None]);
        assert_eq!(tracker.volatile_prefix(), Some(VolatilePrefix { turns: 5, ..found }));
    }

    #[test]
    fn one_prompt_of_another_conversation_does_not_move_a_session() {
        let mut tracker = PrefixTracker::default();
        let main = ["do it", "done", "go on"];
        tracker.record_prompt_start(prompt(["You", "help."], &main));
        let title = || prompt(["You write titles.", "Be brief."], &["a title, please"]);
        assert_eq!(tracker.is_aside(&title()), Some(true));
        tracker.record_prompt_start(title());
        assert!(!tracker.has_moved(), "it may be a title, in a session that takes no asides");
        assert_eq!(tracker.is_aside(&prompt(["You", "help."], &main)), Some(false));
        tracker.record_prompt_start(title());
        assert!(tracker.has_moved());
    }

    #[test]
    fn the_shim_tells_at_which_token() {
        let mut tracker = PrefixTracker::default();
        let mut all = turns(changing, 6).into_iter();
        for at in [35, 34] {
            let one = all.next().unwrap();
            assert_eq!(tracker.record_prompt_start(one), None);
            assert_eq!(tracker.record_divergence(at, true), None, "the block is what counts");
        }
        assert_eq!(tracker.record_prompt_start(all.next().unwrap()), None);
        assert_eq!(tracker.record_prompt_start(all.next().unwrap()).unwrap().token_index, Some(34));
        assert_eq!(tracker.record_prompt_start(all.next().unwrap()), None);
        tracker.record_divergence(33, true);
        assert_eq!(tracker.volatile_prefix().unwrap().token_index, Some(33));
    }

    #[test]
    fn a_turn_that_begins_as_the_one_before_ends_the_count() {
        let mut tracker = PrefixTracker::default();
        let mut all = turns(changing, 4);
        all.insert(2, all[1].clone());
        assert!(all.into_iter().all(|one| tracker.record_prompt_start(one).is_none()));
        assert_eq!(tracker.volatile_prefix(), None);
    }

    #[test]
    fn a_title_or_a_subagent_in_between_neither_counts_nor_hides_a_difference() {
        let aside = |number: usize| {
            let text = format!("a title for {number}, please");
            prompt(["You write titles.", "Be brief."], &[&text])
        };
        for (system, is_found) in [(constant as fn(usize) -> [String; 2], false), (changing, true)]
        {
            let mut tracker = PrefixTracker::default();
            for (number, one) in turns(system, 6).into_iter().enumerate() {
                tracker.record_prompt_start(one);
                tracker.record_prompt_start(aside(number));
            }
            assert_eq!(tracker.volatile_prefix().is_some(), is_found);
        }
    }

    #[test]
    fn other_conversations_in_one_session_are_no_volatile_prefix() {
        let mut tracker = PrefixTracker::default();
        for number in 0..9 {
            let text = format!("task {number}");
            let answer = format!("answer {number}");
            tracker.record_prompt_start(prompt(
                ["You", "help."],
                &[&text, &answer, "go on"][..1 + number % 2],
            ));
            let text = format!("other task {number}");
            tracker.record_prompt_start(prompt(["You", &text], &[&text]));
        }
        assert_eq!(tracker.volatile_prefix(), None);
    }

    #[test]
    fn a_difference_late_in_the_prompt_is_none() {
        let long = "x".repeat(EARLY_BYTES_MAX);
        let mut tracker = PrefixTracker::default();
        for number in 0..6 {
            let tail = format!("{long} {number}");
            let late = format!("late {number}");
            tracker.record_prompt_start(prompt(["You help.", &tail], &["u0", &late, "u1"]));
        }
        assert_eq!(tracker.volatile_prefix(), None);
    }

    #[test]
    fn tools_that_change_are_found_and_take_no_room_of_the_text() {
        let turn = |number: usize| {
            let mut start = PromptStart::default();
            let tools = format!("{}{number}", "t".repeat(2 * EARLY_BYTES_MAX));
            start.push(PromptRole::Tools, 0, 0, &[tools.as_bytes()]);
            start.push(PromptRole::User, 0, 0, &[b"hello"]);
            start
        };
        let mut tracker = PrefixTracker::default();
        for number in 0..4 {
            tracker.record_prompt_start(turn(number));
        }
        assert_eq!(tracker.volatile_prefix().unwrap().place, place(PromptRole::Tools, 0, 0));
    }

    #[test]
    fn a_prompt_of_one_text_is_judged_by_the_shims_token_index() {
        let found = |ats: &[(u64, bool)]| {
            let mut tracker = PrefixTracker::default();
            let told = ats.iter().filter_map(|(at, grew)| {
                tracker.record_prompt_start(PromptStart::default());
                tracker.record_divergence(*at, *grew)
            });
            told.last()
        };
        let volatile = VolatilePrefix { token_index: Some(33), place: None, turns: 3 };
        assert_eq!(found(&[(34, true), (33, true), (35, true)]), Some(volatile));
        assert_eq!(found(&[(34, true), (33, true)]), None, "twice");
        assert_eq!(found(&[(34, true), (90, true), (35, true)]), None, "elsewhere");
        assert_eq!(found(&[(5000, true); 4]), None, "late");
        assert_eq!(found(&[(34, false); 4]), None, "short prompts that share a beginning");
        let mut tracker = PrefixTracker::default();
        for _ in 0..4 {
            tracker.record_prompt_start(PromptStart::default());
            tracker.record_divergence(34, true);
            tracker.record_continuation();
        }
        assert_eq!(tracker.volatile_prefix(), None, "it went on in between");
    }

    proptest! {
        /// A history that only grows is never reported, whatever its answers and last messages are.
        #[test]
        fn a_growing_history_is_never_reported(
            texts in prop::collection::vec("[a-d]{0,3}", 1..40),
            steps in prop::collection::vec(0_usize..3, 1..20),
            late in prop::collection::vec("[a-d]{0,3}", 20),
        ) {
            let mut tracker = PrefixTracker::default();
            let mut length = 1;
            for (step, late) in steps.iter().zip(&late) {
                length = (length + step).min(texts.len());
                // The last message may still be edited, as when a user interrupts an answer.
                let mut messages: Vec<&str> = texts[..length].iter().map(String::as_str).collect();
                messages.push(late);
                let start = prompt(["You", "help."], &messages);
                prop_assert_eq!(tracker.record_prompt_start(start), None);
            }
        }

        /// A text that changes at one place before a growing history is reported with that place.
        #[test]
        fn a_volatile_text_is_reported_where_it_is(
            at in 0_usize..4,
            stable in 0_usize..4,
            changed in 3_usize..9,
        ) {
            let mut tracker = PrefixTracker::default();
            let total = stable + changed + 1;
            for turn in 0..total {
                let nonce = turn.saturating_sub(stable);
                let mut texts = ["s0".to_owned(), "s1".into(), "u0".into(), "a1".into()];
                texts[at].push_str(&format!(" {nonce}"));
                let grown = (0..=turn).map(|number| format!("m{number}"));
                let texts: Vec<String> = texts.into_iter().chain(grown).collect();
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                tracker.record_prompt_start(prompt([texts[0], texts[1]], &texts[2..]));
            }
            let found = tracker.volatile_prefix().expect("it changed three times in a row");
            let wanted = match at {
                0 | 1 => place(PromptRole::System, 0, u32::try_from(at).unwrap()),
                2 => place(PromptRole::User, 0, 0),
                _ => place(PromptRole::Assistant, 1, 0),
            };
            prop_assert_eq!((found.place, found.turns), (wanted, changed as u64));
        }
    }
}
