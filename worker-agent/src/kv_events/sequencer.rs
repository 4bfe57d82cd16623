//! Puts the KV event messages of one engine rank in sequence, and detects lost messages. Pure.
//!
//! [`Sequencer`] takes numbered messages, and returns [`SequencerStep`]s: messages to apply, replay
//! requests and losses. Its caller, `rank_cache`, carries out the steps. The sequencer neither
//! receives messages itself nor looks at their content.
//!
//! The engine numbers its messages from 0, and publishes them on a subscription socket. If a queue
//! on the way is full, messages are lost. The engine keeps its latest messages. When the agent asks
//! for a *replay*, the engine sends the kept messages again on a separate socket, from a given
//! number on. Meanwhile new messages continue to come on the subscription. A message from the
//! subscription is called *live* here.

use std::collections::BTreeMap;

/// The maximum number of messages held while an earlier message is missing. A busy engine takes at
/// least a second to send that many. If more are held, the missing messages count as lost.
const HELD_MESSAGES_MAX: usize = 256;

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SequencerStep<T> {
    /// Apply the message.
    Apply(T),
    /// Ask the publisher to send all messages again from this number on.
    RequestReplay(u64),
    /// The messages `from..to` are lost for good.
    Lost {
        /// The number of the first lost message.
        from: u64,
        /// The number of the first message after the lost ones.
        to: u64,
    },
    /// The engine has restarted: forget all that the previous process published.
    Restarted,
}

/// State of one message sequence.
///
/// A message number that is too low shows that the engine has restarted. If the caller learns of a
/// restart in another way, it must begin with a new sequencer.
#[derive(Debug)]
pub struct Sequencer<T> {
    /// The number of the next message to apply.
    next_to_apply: u64,
    /// The lowest number that the next live message can have.
    next_live_min: u64,
    /// Messages that can't be applied yet, because an earlier message is missing.
    held_messages: BTreeMap<u64, T>,
    /// The replay that was requested and has not ended.
    replay: Option<PendingReplay>,
}

#[derive(Debug, Clone, Copy)]
struct PendingReplay {
    /// The number from which the messages were requested.
    from: u64,
    /// Whether a message was known to be missing at the time of the request, because a later
    /// message was held. If so, the engine had sent the missing message before the request. Then
    /// the replay contains that message, unless the engine no longer has it.
    is_for_known_gap: bool,
    /// Whether at least one message of the replay has come.
    has_begun: bool,
    /// The number of the first message after a gap inside the replay; `None` if there is no gap. A
    /// publisher's socket that can't keep up drops messages of the replay. The publisher still has
    /// these messages, so they can be requested again.
    first_after_gap: Option<u64>,
}

impl<T> Default for Sequencer<T> {
    fn default() -> Self {
        Self { next_to_apply: 0, next_live_min: 0, held_messages: BTreeMap::new(), replay: None }
    }
}

impl<T> Sequencer<T> {
    /// Takes a message that came from the subscription.
    pub fn take_live(&mut self, number: u64, message: T) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        if number < self.next_live_min {
            // A publisher's numbers only grow, so a lower number means that the engine counts from
            // 0 again.
            *self = Self::default();
            steps.push(SequencerStep::Restarted);
        }
        self.next_live_min = number.saturating_add(1);
        if number >= self.next_to_apply {
            self.held_messages.insert(number, message);
        }
        self.apply_held(&mut steps);
        if self.held_messages.len() > HELD_MESSAGES_MAX {
            while let Some(number) = self.first_held_number() {
                self.skip_lost(number, &mut steps);
            }
            self.replay = None;
        }
        if !self.held_messages.is_empty() {
            self.begin_replay(&mut steps);
        }
        steps
    }

    /// Requests a replay although no message is known to be missing. The caller does this at the
    /// start and after a quiet period.
    pub fn request_replay(&mut self) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        self.begin_replay(&mut steps);
        steps
    }

    /// Whether no message was ever applied or lost.
    pub fn is_new(&self) -> bool {
        self.next_to_apply == 0
    }

    /// Whether a replay was requested and has not ended.
    pub fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// Whether at least one message of the requested replay has come.
    pub fn has_replay_begun(&self) -> bool {
        self.replay.is_some_and(|replay| replay.has_begun)
    }

    /// Takes a message that came as part of a replay. A replay is in order. So if its first message
    /// has a higher number than requested, the publisher no longer has the messages before it.
    pub fn take_replayed(&mut self, number: u64, message: T) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        let Some(replay) = &mut self.replay else { return steps };
        if replay.has_begun && number > self.next_to_apply {
            replay.first_after_gap.get_or_insert(number);
            return steps;
        }
        replay.has_begun = true;
        while number > self.next_to_apply {
            let lost_to = self.first_held_number().map_or(number, |held| held.min(number));
            self.skip_lost(lost_to, &mut steps);
        }
        if number == self.next_to_apply {
            self.held_messages.insert(number, message);
            self.apply_held(&mut steps);
        }
        steps
    }

    /// Handles the end of a replay. If no replay socket exists, the caller calls this at once.
    pub fn end_replay(&mut self) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        let Some(replay) = self.replay.take() else { return steps };
        if let Some(number) = replay.first_after_gap {
            if replay.from == self.next_to_apply {
                // This replay brought no message that could be applied, so the messages that it
                // left out are lost.
                let lost_to = self.first_held_number().map_or(number, |held| held.min(number));
                self.skip_lost(lost_to, &mut steps);
            }
            self.begin_replay(&mut steps);
            return steps;
        }
        if let Some(number) = self.first_held_number() {
            // If the replay was not for a gap, the engine may have sent the missing message after
            // the request, so a further replay can still bring it.
            if replay.is_for_known_gap && replay.from == self.next_to_apply {
                self.skip_lost(number, &mut steps);
            }
        }
        if !self.held_messages.is_empty() {
            self.begin_replay(&mut steps);
        }
        steps
    }

    /// Handles a replay that stopped without its end marker. Requests the rest of it. If the replay
    /// brought no message that could be applied, handles it as if the end marker had come.
    pub fn handle_replay_timeout(&mut self) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        if self.replay.is_none_or(|replay| replay.from == self.next_to_apply) {
            return self.end_replay();
        }
        self.replay = None;
        self.begin_replay(&mut steps);
        steps
    }

    fn first_held_number(&self) -> Option<u64> {
        self.held_messages.first_key_value().map(|(number, _)| *number)
    }

    /// Reports the messages from the next one to apply up to `to` (excluded) as lost, and continues
    /// with message `to`.
    fn skip_lost(&mut self, to: u64, steps: &mut Vec<SequencerStep<T>>) {
        steps.push(SequencerStep::Lost { from: self.next_to_apply, to });
        self.next_to_apply = to;
        self.apply_held(steps);
    }

    /// Applies the held messages up to the next gap.
    fn apply_held(&mut self, steps: &mut Vec<SequencerStep<T>>) {
        while let Some(message) = self.held_messages.remove(&self.next_to_apply) {
            steps.push(SequencerStep::Apply(message));
            self.next_to_apply += 1;
        }
    }

    /// Requests a replay from the next message to apply, unless a replay is in progress.
    fn begin_replay(&mut self, steps: &mut Vec<SequencerStep<T>>) {
        if self.replay.is_none() {
            let is_for_known_gap = !self.held_messages.is_empty();
            let from = self.next_to_apply;
            self.replay = Some(PendingReplay {
                from,
                is_for_known_gap,
                has_begun: false,
                first_after_gap: None,
            });
            steps.push(SequencerStep::RequestReplay(self.next_to_apply));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_an_answer_lost_on_its_way_is_asked_for_again() {
        let mut sequencer = Sequencer::default();
        assert_eq!(sequencer.request_replay(), [SequencerStep::RequestReplay(0)]);
        assert_eq!(applied(&sequencer.take_replayed(0, 0)), [0]);
        // Messages 1 and 2 and the replay's end marker were dropped.
        assert!(sequencer.take_replayed(3, 3).is_empty() && sequencer.has_replay_begun());
        assert_eq!(sequencer.end_replay(), [SequencerStep::RequestReplay(1)]);
        assert_eq!(applied(&sequencer.take_replayed(1, 1)), [1]);
        assert_eq!(applied(&sequencer.take_replayed(2, 2)), [2]);
        assert_eq!(applied(&sequencer.take_replayed(3, 3)), [3]);
        assert!(sequencer.end_replay().is_empty() && !sequencer.is_replaying());
    }

    #[test]
    fn an_answer_that_stops_in_the_middle_is_not_all_there_is() {
        let mut sequencer = Sequencer::default();
        sequencer.request_replay();
        assert_eq!(applied(&sequencer.take_replayed(0, 0)), [0]);
        assert_eq!(sequencer.handle_replay_timeout(), [SequencerStep::RequestReplay(1)]);
        assert_eq!(applied(&sequencer.take_replayed(1, 1)), [1]);
        assert_eq!(sequencer.handle_replay_timeout(), [SequencerStep::RequestReplay(2)]);
        // Neither a message nor an end marker came: the requests stop.
        assert!(sequencer.handle_replay_timeout().is_empty() && !sequencer.is_replaying());
    }

    #[test]
    fn what_never_comes_though_it_is_asked_for_is_lost() {
        let mut sequencer = Sequencer::default();
        sequencer.request_replay();
        sequencer.take_replayed(0, 0);
        sequencer.take_replayed(3, 3);
        assert_eq!(sequencer.end_replay(), [SequencerStep::RequestReplay(1)]);
        // The first message of a replay shows that the older ones no longer exist.
        assert_eq!(
            sequencer.take_replayed(3, 3),
            [SequencerStep::Lost { from: 1, to: 3 }, SequencerStep::Apply(3)]
        );
    }

    fn applied(steps: &[SequencerStep<u64>]) -> Vec<u64> {
        let apply = |step: &SequencerStep<u64>| {
            if let SequencerStep::Apply(it) = step { Some(*it) } else { None }
        };
        steps.iter().filter_map(apply).collect()
    }

    #[test]
    fn a_gap_is_filled_while_others_go_on_coming() {
        let mut sequencer = Sequencer::default();
        assert_eq!(sequencer.take_live(0, 0), [SequencerStep::Apply(0)]);
        assert_eq!(sequencer.take_live(2, 2), [SequencerStep::RequestReplay(1)]);
        assert_eq!(sequencer.take_live(4, 4), []);
        assert_eq!(
            sequencer.take_replayed(1, 1),
            [SequencerStep::Apply(1), SequencerStep::Apply(2)]
        );
        assert_eq!(sequencer.take_replayed(2, 2), []);
        assert_eq!(
            sequencer.take_replayed(3, 3),
            [SequencerStep::Apply(3), SequencerStep::Apply(4)]
        );
        assert_eq!(sequencer.end_replay(), []);
        assert_eq!(sequencer.take_live(5, 5), [SequencerStep::Apply(5)]);
    }

    #[test]
    fn what_nobody_has_any_more_is_lost() {
        let mut sequencer = Sequencer::default();
        assert_eq!(sequencer.take_live(7, 7), [SequencerStep::RequestReplay(0)]);
        assert_eq!(
            sequencer.take_replayed(5, 5),
            [SequencerStep::Lost { from: 0, to: 5 }, SequencerStep::Apply(5)]
        );
        // Only a second replay shows that message 6 is lost.
        assert_eq!(sequencer.end_replay(), [SequencerStep::RequestReplay(6)]);
        assert_eq!(
            sequencer.end_replay(),
            [SequencerStep::Lost { from: 6, to: 7 }, SequencerStep::Apply(7)]
        );
    }

    #[test]
    fn what_was_sent_after_a_question_is_asked_for_again() {
        let mut sequencer = Sequencer::default();
        assert_eq!(sequencer.request_replay(), [SequencerStep::RequestReplay(0)]);
        assert_eq!(sequencer.request_replay(), []);
        assert_eq!(sequencer.take_replayed(0, 0), [SequencerStep::Apply(0)]);
        // Message 1 was sent after the replay began and before the subscription was active.
        assert_eq!(sequencer.take_live(2, 2), []);
        assert_eq!(sequencer.end_replay(), [SequencerStep::RequestReplay(1)]);
        assert_eq!(
            sequencer.take_replayed(1, 1),
            [SequencerStep::Apply(1), SequencerStep::Apply(2)]
        );
        assert_eq!(sequencer.end_replay(), []);
    }

    #[test]
    fn another_engine_counts_from_0_again() {
        let mut sequencer = Sequencer::default();
        sequencer.take_live(0, 0);
        sequencer.take_live(1, 1);
        assert_eq!(sequencer.take_live(0, 0), [SequencerStep::Restarted, SequencerStep::Apply(0)]);
        sequencer.take_live(1, 1);
        assert_eq!(
            sequencer.take_live(1, 1),
            [SequencerStep::Restarted, SequencerStep::RequestReplay(0)]
        );
    }

    #[test]
    fn a_replay_that_does_not_come_is_not_waited_for() {
        let mut sequencer = Sequencer::default();
        let mut steps = vec![];
        for number in 1..=HELD_MESSAGES_MAX as u64 + 1 {
            steps.extend(sequencer.take_live(number, number));
        }
        assert_eq!(
            steps[..2],
            [SequencerStep::RequestReplay(0), SequencerStep::Lost { from: 0, to: 1 }]
        );
        assert_eq!(applied(&steps).len(), HELD_MESSAGES_MAX + 1);
    }

    proptest! {
        /// A publisher with a bounded buffer, a subscriber that misses messages, and replays at any
        /// time.
        #[test]
        fn each_message_is_applied_once_in_order_or_known_to_be_lost(
            missed in prop::collection::vec(prop::bool::weighted(0.2), 1..200),
            answers in prop::collection::vec(0..12_usize, 200),
            buffer in 1..40_u64,
        ) {
            let (mut sequencer, mut steps) = (Sequencer::default(), vec![]);
            let mut replay: Option<std::ops::Range<u64>> = None;
            let sent = missed.len() as u64;
            // The last message always arrives; otherwise its loss could not be detected.
            let quiet = (0..=sent).zip(missed.iter().copied().chain([false]));
            for ((number, missed), answers) in quiet.zip(answers) {
                let answers = if number == sent { usize::MAX } else { answers };
                if !missed {
                    steps.extend(sequencer.take_live(number, number));
                }
                for _ in 0..answers {
                    if replay.is_none() {
                        let asked = steps.iter().rev().find_map(|step| match step {
                            SequencerStep::RequestReplay(from) => Some(*from),
                            _ => None,
                        });
                        let Some(from) = asked.filter(|_| sequencer.is_replaying()) else { break };
                        replay = Some(from.max((number + 1).saturating_sub(buffer))..number + 1);
                    }
                    let range = replay.as_mut().unwrap();
                    if let Some(number) = range.next() {
                        steps.extend(sequencer.take_replayed(number, number));
                    } else {
                        replay = None;
                        steps.extend(sequencer.end_replay());
                    }
                }
            }
            let mut next = 0;
            for step in &steps {
                match step {
                    SequencerStep::Apply(number) => prop_assert_eq!(*number, next),
                    SequencerStep::Lost { from, to } => prop_assert!(*from == next && to > from),
                    SequencerStep::RequestReplay(from) => prop_assert_eq!(*from, next),
                    SequencerStep::Restarted => prop_assert!(false, "nobody restarted"),
                }
                match step {
                    SequencerStep::Apply(_) => next += 1,
                    SequencerStep::Lost { to, .. } => next = *to,
                    SequencerStep::RequestReplay(_) | SequencerStep::Restarted => {}
                }
            }
            prop_assert_eq!(next, sent + 1);
        }
    }
}
