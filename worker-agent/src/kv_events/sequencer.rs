//! Puts the engine's KV event messages in sequence, and detects lost messages.
//!
//! Pure: numbered messages go in; messages to apply, replay requests and losses come out. The
//! content of a message isn't looked at.
//!
//! The engine numbers its messages from 0. It loses some only when a queue is full. It keeps the
//! latest messages and sends them again on a separate socket when asked, while new ones continue to
//! come on the subscription.

use std::collections::BTreeMap;

/// The maximum number of messages held during a replay: those of a second or more of a busy engine.
/// Beyond it, the missing messages count as lost.
const HELD_MAX: usize = 256;

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<T> {
    /// Apply the message.
    Apply(T),
    /// Ask the publisher to send all messages again from this number on.
    Replay(u64),
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

/// State of one message sequence. A restart that the numbers don't show needs a new value of this
/// type.
#[derive(Debug)]
pub struct Order<T> {
    /// The number of the next message to apply.
    next: u64,
    /// The lowest number expected next on the subscription.
    live: u64,
    /// Messages that can't be applied yet, because an earlier one is missing.
    held: BTreeMap<u64, T>,
    /// The replay that was requested and has not ended.
    asked: Option<Asked>,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    from: u64,
    /// A later message was held at the time of the request. So the missing messages had been sent
    /// before the request, and the replay must contain them if they still exist.
    for_gap: bool,
    /// At least one message of the replay has come.
    begun: bool,
    /// The first number after a gap inside the replay. A publisher's socket that can't keep up
    /// drops messages; the publisher still has them, so they can be requested again.
    broken_at: Option<u64>,
}

impl<T> Default for Order<T> {
    fn default() -> Self {
        Self { next: 0, live: 0, held: BTreeMap::new(), asked: None }
    }
}

impl<T> Order<T> {
    /// Takes a message that came from the subscription.
    pub fn live(&mut self, number: u64, message: T) -> Vec<Step<T>> {
        let mut steps = vec![];
        if number < self.live {
            // A publisher's numbers only grow, so a lower number means that the engine counts from
            // 0 again.
            *self = Self::default();
            steps.push(Step::Restarted);
        }
        self.live = number.saturating_add(1);
        if number >= self.next {
            self.held.insert(number, message);
        }
        self.go_on(&mut steps);
        if self.held.len() > HELD_MAX {
            while let Some(number) = self.first_held() {
                self.lose(number, &mut steps);
            }
            self.asked = None;
        }
        if !self.held.is_empty() {
            self.ask(&mut steps);
        }
        steps
    }

    /// Requests a replay without evidence of a gap: at the start, and after a quiet period.
    pub fn look(&mut self) -> Vec<Step<T>> {
        let mut steps = vec![];
        self.ask(&mut steps);
        steps
    }

    /// Whether no message was ever applied or lost.
    pub fn is_new(&self) -> bool {
        self.next == 0
    }

    /// Whether a replay was requested and has not ended.
    pub fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether at least one message of the requested replay has come.
    pub fn is_answered(&self) -> bool {
        self.asked.is_some_and(|asked| asked.begun)
    }

    /// Takes a message that came as part of a replay. A replay is in order, so the publisher no
    /// longer has any message older than the first one.
    pub fn replayed(&mut self, number: u64, message: T) -> Vec<Step<T>> {
        let mut steps = vec![];
        let Some(asked) = &mut self.asked else { return steps };
        if asked.begun && number > self.next {
            asked.broken_at.get_or_insert(number);
            return steps;
        }
        asked.begun = true;
        while number > self.next {
            let to = self.first_held().map_or(number, |held| held.min(number));
            self.lose(to, &mut steps);
        }
        if number == self.next {
            self.held.insert(number, message);
            self.go_on(&mut steps);
        }
        steps
    }

    /// Handles the end of a replay, also where no replay socket exists.
    pub fn replay_ended(&mut self) -> Vec<Step<T>> {
        let mut steps = vec![];
        let Some(asked) = self.asked.take() else { return steps };
        if let Some(number) = asked.broken_at {
            if asked.from == self.next {
                // The repeated request brought nothing, so the missing messages are lost.
                self.lose(self.first_held().map_or(number, |held| held.min(number)), &mut steps);
            }
            self.ask(&mut steps);
            return steps;
        }
        if let Some(number) = self.first_held() {
            // Without `for_gap`, the missing message may have been sent after the request.
            if asked.for_gap && asked.from == self.next {
                self.lose(number, &mut steps);
            }
        }
        if !self.held.is_empty() {
            self.ask(&mut steps);
        }
        steps
    }

    /// Handles a replay that stopped without its end marker. Requests the rest, as long as each
    /// replay brings at least one message.
    pub fn replay_stopped(&mut self) -> Vec<Step<T>> {
        let mut steps = vec![];
        if self.asked.is_none_or(|asked| asked.from == self.next) {
            return self.replay_ended();
        }
        self.asked = None;
        self.ask(&mut steps);
        steps
    }

    fn first_held(&self) -> Option<u64> {
        self.held.first_key_value().map(|(number, _)| *number)
    }

    /// Gives up the messages from `next` up to `to`, and continues at `to`.
    fn lose(&mut self, to: u64, steps: &mut Vec<Step<T>>) {
        steps.push(Step::Lost { from: self.next, to });
        self.next = to;
        self.go_on(steps);
    }

    /// Applies the held messages up to the next gap.
    fn go_on(&mut self, steps: &mut Vec<Step<T>>) {
        while let Some(message) = self.held.remove(&self.next) {
            steps.push(Step::Apply(message));
            self.next += 1;
        }
    }

    fn ask(&mut self, steps: &mut Vec<Step<T>>) {
        if self.asked.is_none() {
            let for_gap = !self.held.is_empty();
            let from = self.next;
            self.asked = Some(Asked { from, for_gap, begun: false, broken_at: None });
            steps.push(Step::Replay(self.next));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_an_answer_lost_on_its_way_is_asked_for_again() {
        let mut order = Order::default();
        assert_eq!(order.look(), [Step::Replay(0)]);
        assert_eq!(applied(&order.replayed(0, 0)), [0]);
        // Messages 1 and 2 and the replay's end marker were dropped.
        assert!(order.replayed(3, 3).is_empty() && order.is_answered());
        assert_eq!(order.replay_ended(), [Step::Replay(1)]);
        assert_eq!(applied(&order.replayed(1, 1)), [1]);
        assert_eq!(applied(&order.replayed(2, 2)), [2]);
        assert_eq!(applied(&order.replayed(3, 3)), [3]);
        assert!(order.replay_ended().is_empty() && !order.is_asking());
    }

    #[test]
    fn an_answer_that_stops_in_the_middle_is_not_all_there_is() {
        let mut order = Order::default();
        order.look();
        assert_eq!(applied(&order.replayed(0, 0)), [0]);
        assert_eq!(order.replay_stopped(), [Step::Replay(1)]);
        assert_eq!(applied(&order.replayed(1, 1)), [1]);
        assert_eq!(order.replay_stopped(), [Step::Replay(2)]);
        // Neither a message nor an end marker came: the requests stop.
        assert!(order.replay_stopped().is_empty() && !order.is_asking());
    }

    #[test]
    fn what_never_comes_though_it_is_asked_for_is_lost() {
        let mut order = Order::default();
        order.look();
        order.replayed(0, 0);
        order.replayed(3, 3);
        assert_eq!(order.replay_ended(), [Step::Replay(1)]);
        // The first message of a replay shows that the older ones no longer exist.
        assert_eq!(order.replayed(3, 3), [Step::Lost { from: 1, to: 3 }, Step::Apply(3)]);
    }

    fn applied(steps: &[Step<u64>]) -> Vec<u64> {
        let apply = |step: &Step<u64>| if let Step::Apply(it) = step { Some(*it) } else { None };
        steps.iter().filter_map(apply).collect()
    }

    #[test]
    fn a_gap_is_filled_while_others_go_on_coming() {
        let mut order = Order::default();
        assert_eq!(order.live(0, 0), [Step::Apply(0)]);
        assert_eq!(order.live(2, 2), [Step::Replay(1)]);
        assert_eq!(order.live(4, 4), []);
        assert_eq!(order.replayed(1, 1), [Step::Apply(1), Step::Apply(2)]);
        assert_eq!(order.replayed(2, 2), []);
        assert_eq!(order.replayed(3, 3), [Step::Apply(3), Step::Apply(4)]);
        assert_eq!(order.replay_ended(), []);
        assert_eq!(order.live(5, 5), [Step::Apply(5)]);
    }

    #[test]
    fn what_nobody_has_any_more_is_lost() {
        let mut order = Order::default();
        assert_eq!(order.live(7, 7), [Step::Replay(0)]);
        assert_eq!(order.replayed(5, 5), [Step::Lost { from: 0, to: 5 }, Step::Apply(5)]);
        // Only a second replay shows that message 6 is lost.
        assert_eq!(order.replay_ended(), [Step::Replay(6)]);
        assert_eq!(order.replay_ended(), [Step::Lost { from: 6, to: 7 }, Step::Apply(7)]);
    }

    #[test]
    fn what_was_sent_after_a_question_is_asked_for_again() {
        let mut order = Order::default();
        assert_eq!(order.look(), [Step::Replay(0)]);
        assert_eq!(order.look(), []);
        assert_eq!(order.replayed(0, 0), [Step::Apply(0)]);
        // Message 1 was sent after the replay began and before the subscription was active.
        assert_eq!(order.live(2, 2), []);
        assert_eq!(order.replay_ended(), [Step::Replay(1)]);
        assert_eq!(order.replayed(1, 1), [Step::Apply(1), Step::Apply(2)]);
        assert_eq!(order.replay_ended(), []);
    }

    #[test]
    fn another_engine_counts_from_0_again() {
        let mut order = Order::default();
        order.live(0, 0);
        order.live(1, 1);
        assert_eq!(order.live(0, 0), [Step::Restarted, Step::Apply(0)]);
        order.live(1, 1);
        assert_eq!(order.live(1, 1), [Step::Restarted, Step::Replay(0)]);
    }

    #[test]
    fn a_replay_that_does_not_come_is_not_waited_for() {
        let mut order = Order::default();
        let mut steps = vec![];
        for number in 1..=HELD_MAX as u64 + 1 {
            steps.extend(order.live(number, number));
        }
        assert_eq!(steps[..2], [Step::Replay(0), Step::Lost { from: 0, to: 1 }]);
        assert_eq!(applied(&steps).len(), HELD_MAX + 1);
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
            let (mut order, mut steps) = (Order::default(), vec![]);
            let mut replay: Option<std::ops::Range<u64>> = None;
            let sent = missed.len() as u64;
            // The last message always arrives; otherwise its loss could not be detected.
            let quiet = (0..=sent).zip(missed.iter().copied().chain([false]));
            for ((number, missed), answers) in quiet.zip(answers) {
                let answers = if number == sent { usize::MAX } else { answers };
                if !missed {
                    steps.extend(order.live(number, number));
                }
                for _ in 0..answers {
                    if replay.is_none() {
                        let asked = steps.iter().rev().find_map(|step| match step {
                            Step::Replay(from) => Some(*from),
                            _ => None,
                        });
                        let Some(from) = asked.filter(|_| order.is_asking()) else { break };
                        replay = Some(from.max((number + 1).saturating_sub(buffer))..number + 1);
                    }
                    let range = replay.as_mut().unwrap();
                    if let Some(number) = range.next() {
                        steps.extend(order.replayed(number, number));
                    } else {
                        replay = None;
                        steps.extend(order.replay_ended());
                    }
                }
            }
            let mut next = 0;
            for step in &steps {
                match step {
                    Step::Apply(number) => prop_assert_eq!((*number, next), (next, *number)),
                    Step::Lost { from, to } => prop_assert!(*from == next && to > from),
                    Step::Replay(from) => prop_assert_eq!(*from, next),
                    Step::Restarted => prop_assert!(false, "nobody restarted"),
                }
                match step {
                    Step::Apply(_) => next += 1,
                    Step::Lost { to, .. } => next = *to,
                    Step::Replay(_) | Step::Restarted => {}
                }
            }
            prop_assert_eq!(next, sent + 1);
        }
    }
}
