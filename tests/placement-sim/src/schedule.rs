//! The schedule of played sessions: which turn is due when (pure; knows no worker or engine).
//!
//! A turn is due its think time after the previous answer, and after the end of the children that
//! it waits for. A user whose session has ended starts the next session of the shuffled list.

use std::{sync::Arc, time::Duration};

use super::{corpus::Corpus, engine::Time, options::SimOptions};

/// The delay between a turn and the children that it starts.
const CHILD_DELAY: Duration = Duration::from_millis(500);
/// The delay between a user's sessions.
const NEXT_DELAY: Duration = Duration::from_secs(1);

/// An event of the schedule, and its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// A user starts a session.
    User {
        /// When the user starts.
        at: Time,
    },
    /// The play's next turn.
    Turn {
        /// The play.
        play: usize,
        /// When the turn is due.
        at: Time,
    },
}

/// One play of a session.
#[derive(Debug)]
pub struct Play {
    /// The session's index in `Corpus::scripts`.
    pub script: usize,
    /// How often the list of sessions was completed before.
    pub pass: u32,
    /// The play that started this one.
    pub parent: Option<usize>,
    /// The next turn.
    pub turn: usize,
    awaited_by_parent: bool,
    awaited_children: u32,
    /// When the next turn is due, apart from awaited children; `None` while a turn runs.
    due: Option<Time>,
    /// Whether all turns have ended.
    finished: bool,
}

/// All plays of a run.
#[derive(Debug)]
pub struct Schedule {
    corpus: Arc<Corpus>,
    think_max: Duration,
    order: Vec<usize>,
    next: usize,
    plays: Vec<Play>,
}

impl Schedule {
    /// Creates the schedule, in the order of `seed` or of the trace's times.
    #[must_use]
    pub fn new(corpus: &Arc<Corpus>, options: &SimOptions, seed: u64) -> Self {
        let mut order = corpus.roots.clone();
        if !corpus.timed {
            fastrand::Rng::with_seed(seed).shuffle(&mut order);
        }
        Self {
            corpus: Arc::clone(corpus),
            think_max: options.think_max,
            order,
            next: 0,
            plays: Vec::new(),
        }
    }

    /// Returns the initial events: users, spread over the ramp, or the requests of a timed trace.
    pub fn start(&mut self, options: &SimOptions) -> Vec<Due> {
        if self.corpus.timed {
            let due = |play: usize| {
                let at = self.corpus.scripts[play].turns[0].at.div_f64(options.rate);
                Due::Turn { play, at }
            };
            let all = (0..self.order.len()).map(due).collect();
            self.plays = self.order.iter().map(|&script| Play::new(script, 0, None)).collect();
            return all;
        }
        let users = u32::try_from(options.users).unwrap_or(u32::MAX);
        (0..users).map(|user| Due::User { at: options.ramp * user / users }).collect()
    }

    /// Returns the play with this number.
    #[must_use]
    pub fn get(&self, play: usize) -> &Play {
        &self.plays[play]
    }

    /// Starts a user's next session; returns its first turn.
    pub fn begin_session(&mut self, now: Time) -> Due {
        let pass = u32::try_from(self.next / self.order.len()).unwrap_or(u32::MAX);
        let script = self.order[self.next % self.order.len()];
        self.next += 1;
        self.plays.push(Play::new(script, pass, None));
        Due::Turn { play: self.plays.len() - 1, at: now }
    }

    /// Whether the turn that is due or running is the session's last.
    #[must_use]
    pub fn is_last(&self, play: usize) -> bool {
        let Play { script, turn, .. } = self.plays[play];
        turn + 1 == self.corpus.scripts[script].turns.len()
    }

    /// Records the end of the play's turn; returns the events that follow.
    pub fn end_turn(&mut self, play: usize, now: Time) -> Vec<Due> {
        let mut dues = Vec::new();
        let Play { script, turn, pass, .. } = self.plays[play];
        let corpus = Arc::clone(&self.corpus);
        for child in &corpus.scripts[script].children {
            if child.after_turn == turn {
                let mut started = Play::new(child.script, pass, Some(play));
                started.awaited_by_parent = child.awaited;
                self.plays[play].awaited_children += u32::from(child.awaited);
                self.plays.push(started);
                dues.push(Due::Turn { play: self.plays.len() - 1, at: now + CHILD_DELAY });
            }
        }
        let entry = &mut self.plays[play];
        entry.turn += 1;
        match corpus.scripts[script].turns.get(entry.turn) {
            Some(next) => entry.due = Some(now + next.think.min(self.think_max)),
            None => entry.finished = true,
        }
        self.resume(play, now, &mut dues);
        dues
    }

    /// Continues a play that waits for no children: adds its next turn, or ends it and continues
    /// its parent.
    fn resume(&mut self, play: usize, now: Time, dues: &mut Vec<Due>) {
        let entry = &mut self.plays[play];
        if entry.awaited_children > 0 {
            return;
        }
        if let Some(due) = entry.due.take() {
            dues.push(Due::Turn { play, at: due.max(now) });
        } else if entry.finished {
            match entry.parent {
                Some(parent) if entry.awaited_by_parent => {
                    self.plays[parent].awaited_children -= 1;
                    self.resume(parent, now, dues);
                }
                Some(_) => {}
                None if self.corpus.timed => {}
                None => dues.push(Due::User { at: now + NEXT_DELAY }),
            }
        }
    }
}

impl Play {
    fn new(script: usize, pass: u32, parent: Option<usize>) -> Self {
        Self {
            script,
            pass,
            parent,
            turn: 0,
            awaited_by_parent: false,
            awaited_children: 0,
            due: None,
            finished: false,
        }
    }
}
