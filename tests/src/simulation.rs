//! The agent's session table against the engine's mechanics, over virtual time: seeded clients,
//! faults and strangers, and every promise checked after every step.
//!
//! Real are [`worker_agent::session::Table`], the guards, the reading of answers, and the engine's
//! core. Made here is what surrounds them: a shell that carries out effects as the agent's owner
//! does, a network that loses answers, clients that keep their own transcripts. The same seed gives
//! the same events; nothing here sleeps or reads a clock.

mod answers;
mod calls;
mod chaos;
mod checker;
mod engine;
mod journal;
mod plan;
mod shell;
mod trace;
mod trimmer;
mod turns;
mod users;
mod world;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use worker_agent::guard::Guards;

use self::world::World;

/// A run that kept every promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clean {
    /// Events that happened.
    pub steps: u64,
    /// Digest of the whole trace: equal seeds give equal ones.
    pub trace: u64,
    /// Turns by what became of them.
    pub turns: Tally,
}

/// What happened in a run, so that a test can tell that its world is not an empty one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Answered, and right.
    pub answered: u64,
    /// Refused by the agent, by code.
    pub refused: std::collections::BTreeMap<String, u64>,
    /// Left by their clients.
    pub left: u64,
    /// Ended without the engine's word.
    pub lost: u64,
    /// Taken out of the batch and put back.
    pub retracted: u64,
    /// Turns of pinned sessions among those.
    pub retracted_pinned: u64,
    /// Times the engine kept a session half closed and had to be restarted.
    pub restarted: u64,
    /// Whole histories that ran in a session.
    pub trimmed: u64,
    /// Sessions opened at the engine.
    pub opened: u64,
    /// Times an agent was killed.
    pub agents_killed: u64,
    /// Times the engine was.
    pub engines_killed: u64,
}

/// A promise that was broken.
#[derive(Debug)]
pub struct Broken {
    /// The seed.
    pub seed: u64,
    /// The event it broke at.
    pub step: u64,
    /// Which promise.
    pub what: String,
    /// What happened before, oldest first.
    pub trace: Vec<String>,
}

/// Plays one seed. `base` is where virtual time begins; `echo` prints every event.
///
/// # Errors
/// The first promise that was broken.
pub fn play(
    seed: u64,
    guards: Guards,
    base: Instant,
    echo: Option<fn(&str)>,
) -> Result<Clean, Box<Broken>> {
    let mut world = World::new(seed, guards, base, echo);
    // A broken promise panics, in the table's and the engine's own checks as in those made here.
    match catch_unwind(AssertUnwindSafe(|| world.run())) {
        Ok(()) => Ok(Clean {
            steps: world.trace.steps(),
            trace: world.trace.digest(),
            turns: world.tally,
        }),
        Err(panic) => Err(Box::new(Broken {
            seed,
            step: world.trace.steps(),
            what: message(&*panic),
            trace: world.trace.last(),
        })),
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without words".to_owned())
}
