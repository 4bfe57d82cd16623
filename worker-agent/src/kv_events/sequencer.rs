//! Puts the KV event messages of one engine rank in sequence, and detects lost messages. Pure.
//!
//! The engine publishes its messages, numbered from 0, on a subscription (*live*), and sends the
//! latest ones again on a separate socket when the agent asks for a *replay*, from a given number
//! on. If a queue on the way is full, messages are lost.

use std::collections::BTreeMap;

/// A busy engine takes at least a second to send that many. If more are held, the missing messages
/// count as lost.
const HELD_MESSAGES_MAX: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SequencerStep<T> {
    Apply(T),
    /// All messages from this number on are needed again.
    RequestReplay(u64),
    /// The messages `from..to` are lost for good.
    Lost {
        from: u64,
        /// Excluded.
        to: u64,
    },
    /// All that the previous process published must be forgotten.
    Restarted,
}

/// A number that is too low shows that the engine has restarted. A caller that learns of a restart
/// in another way must begin with a new sequencer.
#[derive(Debug)]
pub struct Sequencer<T> {
    next_to_apply: u64,
    /// The lowest number that the next live message can have.
    next_live_min: u64,
    /// These wait for an earlier message.
    held_messages: BTreeMap<u64, T>,
    replay: Option<PendingReplay>,
}

#[derive(Debug, Clone, Copy)]
struct PendingReplay {
    from: u64,
    /// A later message was held at the time of the request. So the engine had sent the missing
    /// message before, and the replay contains it, unless the engine no longer has it.
    is_for_known_gap: bool,
    has_begun: bool,
    /// A publisher's socket that can't keep up drops messages of the replay. The publisher still
    /// has them, so they can be requested again.
    first_after_gap: Option<u64>,
}

impl<T> Default for Sequencer<T> {
    fn default() -> Self {
        Self { next_to_apply: 0, next_live_min: 0, held_messages: BTreeMap::new(), replay: None }
    }
}

impl<T> Sequencer<T> {
    pub fn take_live(&mut self, number: u64, message: T) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        if number < self.next_live_min {
            // A publisher's numbers only grow, so the engine counts from 0 again.
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

    /// The caller does this at the start and after a quiet period.
    pub fn request_replay(&mut self) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        self.begin_replay(&mut steps);
        steps
    }

    pub fn is_new(&self) -> bool {
        self.next_to_apply == 0
    }

    pub fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    pub fn has_replay_begun(&self) -> bool {
        self.replay.is_some_and(|replay| replay.has_begun)
    }

    /// If a replay's first message has a higher number than requested, the publisher no longer has
    /// the messages before it.
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

    /// The caller calls this at once if there is no replay socket.
    pub fn end_replay(&mut self) -> Vec<SequencerStep<T>> {
        let mut steps = vec![];
        let Some(replay) = self.replay.take() else { return steps };
        if let Some(number) = replay.first_after_gap {
            if replay.from == self.next_to_apply {
                // This replay brought nothing that could be applied, so what it left out is lost.
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

    /// Requests the rest of the replay, or handles it as ended if it brought nothing that could be
    /// applied.
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

    /// `to` is the first message that isn't lost.
    fn skip_lost(&mut self, to: u64, steps: &mut Vec<SequencerStep<T>>) {
        steps.push(SequencerStep::Lost { from: self.next_to_apply, to });
        self.next_to_apply = to;
        self.apply_held(steps);
    }

    fn apply_held(&mut self, steps: &mut Vec<SequencerStep<T>>) {
        while let Some(message) = self.held_messages.remove(&self.next_to_apply) {
            steps.push(SequencerStep::Apply(message));
            self.next_to_apply += 1;
        }
    }

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
