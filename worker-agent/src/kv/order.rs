//! The order of the engine's messages: which comes next, what is missing, what to ask for again.
//! Pure: numbered messages go in, what to do comes out. It doesn't look into messages.
//!
//! The engine numbers them from 0 and loses some only where a queue is full. It keeps the last ones
//! and sends them again on a socket of their own, while new ones go on coming.

use std::collections::BTreeMap;

/// Messages kept while older ones are sent again: a busy engine's of a second or more.
const HELD_MAX: usize = 256;

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<T> {
    /// Apply the message.
    Apply(T),
    /// Ask for all messages from this one on.
    Replay(u64),
    /// Messages from one to before another will not come any more.
    Lost {
        /// The first.
        from: u64,
        /// The first that was not lost.
        to: u64,
    },
    /// The engine is another: forget what the one before said.
    Restarted,
}

/// What is known of the order. A restart that the numbers don't show begins a new one.
#[derive(Debug)]
pub struct Order<T> {
    /// What to apply next.
    next: u64,
    /// What to expect next of those that come as they are sent.
    live: u64,
    /// Messages behind a gap.
    held: BTreeMap<u64, T>,
    /// What was asked for and hasn't ended.
    asked: Option<Asked>,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    from: u64,
    /// A later message was there: what is missing before it was sent before the question.
    for_gap: bool,
    /// A message of the answer has come.
    begun: bool,
    /// The first message of the answer that came after a gap in it: a publisher's socket that can't
    /// keep up drops some, which are still there to be asked for.
    broken_at: Option<u64>,
}

impl<T> Default for Order<T> {
    fn default() -> Self {
        Self { next: 0, live: 0, held: BTreeMap::new(), asked: None }
    }
}

impl<T> Order<T> {
    /// A message came as it was sent.
    pub fn live(&mut self, number: u64, message: T) -> Vec<Step<T>> {
        let mut steps = vec![];
        if number < self.live {
            // They come in order: this one counts from 0 again.
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

    /// Asks for what may have been missed and nothing newer shows: at first, and when nothing came
    /// for a while.
    pub fn look(&mut self) -> Vec<Step<T>> {
        let mut steps = vec![];
        self.ask(&mut steps);
        steps
    }

    /// Whether not one message was seen.
    pub fn is_new(&self) -> bool {
        self.next == 0
    }

    /// Whether an answer is awaited.
    pub fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether the answer that is awaited has begun to come.
    pub fn is_answered(&self) -> bool {
        self.asked.is_some_and(|asked| asked.begun)
    }

    /// A message came that was asked for. They come in order: what is older than the first is not
    /// there any more.
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

    /// No more comes of what was asked for, or nobody can be asked.
    pub fn replay_ended(&mut self) -> Vec<Step<T>> {
        let mut steps = vec![];
        let Some(asked) = self.asked.take() else { return steps };
        if let Some(number) = asked.broken_at {
            if asked.from == self.next {
                // The same again: it isn't there.
                self.lose(self.first_held().map_or(number, |held| held.min(number)), &mut steps);
            }
            self.ask(&mut steps);
            return steps;
        }
        if let Some(number) = self.first_held() {
            // Else it may have been sent after the question.
            if asked.for_gap && asked.from == self.next {
                self.lose(number, &mut steps);
            }
        }
        if !self.held.is_empty() {
            self.ask(&mut steps);
        }
        steps
    }

    /// No more comes of what was asked for, though its end didn't either: the rest is asked for, as
    /// long as each answer brings something.
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

    /// Takes a gap up to some message for what it is.
    fn lose(&mut self, to: u64, steps: &mut Vec<Step<T>>) {
        steps.push(Step::Lost { from: self.next, to });
        self.next = to;
        self.go_on(steps);
    }

    /// Applies what is held, up to the next gap.
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
        // 1 and 2 were dropped, and the end of the answer with them.
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
        // Nothing more, and no end: nobody can be asked for ever.
        assert!(order.replay_stopped().is_empty() && !order.is_asking());
    }

    #[test]
    fn what_never_comes_though_it_is_asked_for_is_lost() {
        let mut order = Order::default();
        order.look();
        order.replayed(0, 0);
        order.replayed(3, 3);
        assert_eq!(order.replay_ended(), [Step::Replay(1)]);
        // The first of an answer tells what is not there any more.
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
        // Only who asks again knows.
        assert_eq!(order.replay_ended(), [Step::Replay(6)]);
        assert_eq!(order.replay_ended(), [Step::Lost { from: 6, to: 7 }, Step::Apply(7)]);
    }

    #[test]
    fn what_was_sent_after_a_question_is_asked_for_again() {
        let mut order = Order::default();
        assert_eq!(order.look(), [Step::Replay(0)]);
        assert_eq!(order.look(), []);
        assert_eq!(order.replayed(0, 0), [Step::Apply(0)]);
        // 1 was sent after the answer was begun, and before the subscription held.
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
        /// An engine with a buffer, a subscriber that misses messages, replays at any time.
        #[test]
        fn each_message_is_applied_once_in_order_or_known_to_be_lost(
            missed in prop::collection::vec(prop::bool::weighted(0.2), 1..200),
            answers in prop::collection::vec(0..12_usize, 200),
            buffer in 1..40_u64,
        ) {
            let (mut order, mut steps) = (Order::default(), vec![]);
            let mut replay: Option<std::ops::Range<u64>> = None;
            let sent = missed.len() as u64;
            // The last one comes, else nobody can know.
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
