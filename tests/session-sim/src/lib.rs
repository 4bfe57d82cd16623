//! A simulation of the agent's session table with clients, faults and foreign users of the engine.
//!
//! Everything happens in virtual time, at random from a seed, and every promise is checked after
//! every event. The code under test is real: [`worker_agent::session::Table`], the guards, the
//! reading of answers, and the engine simulator's core. The simulation adds what surrounds them: a
//! shell that carries out effects as the agent's owner task does, a network that loses answers, and
//! clients that keep their own transcripts. The same seed gives the same events. Nothing here
//! sleeps or reads a clock.

mod answers;
mod calls;
mod chaos;
mod checker;
mod engine;
mod journal;
mod plan;
mod shares;
mod shell;
mod shim;
mod trace;
mod trimmer;
mod turns;
mod users;
mod weights;
mod world;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use worker_agent::guard::Guards;

use self::world::World;

/// The result of a run that kept every promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clean {
    /// The number of events in the run.
    pub steps: u64,
    /// The digest of the whole trace. Equal seeds give equal digests.
    pub trace: u64,
    /// How the run's turns and processes ended.
    pub turns: RunCounts,
}

/// Counts of what happened in a run, so that a test can check that the run was not trivial.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Turns that were answered correctly.
    pub answered: u64,
    /// Turns that the agent refused, by error code.
    pub refused: std::collections::BTreeMap<String, u64>,
    /// Turns whose clients left.
    pub left: u64,
    /// Turns that ended without an answer from the engine.
    pub lost: u64,
    /// Turns that the engine retracted: took out of the batch and queued again.
    pub retracted: u64,
    /// Retracted turns of pinned sessions.
    pub retracted_pinned: u64,
    /// Times the engine kept a session half closed and had to be restarted.
    pub restarted: u64,
    /// Turns with a full history that the shim trimmed and ran in a session.
    pub trimmed: u64,
    /// Sessions opened at the engine.
    pub opened: u64,
    /// Times an agent was killed.
    pub agents_killed: u64,
    /// Sessions that agents handed over to their successors.
    pub taken_up: u64,
    /// Times the engine was killed.
    pub engines_killed: u64,
    /// Times the engine's weights were changed.
    pub weights_changed: u64,
    /// Tokens that were loaded from the host ahead of turns.
    pub prefetched_tokens: u64,
}

/// A promise that was broken.
#[derive(Debug)]
pub struct Broken {
    /// The seed of the run.
    pub seed: u64,
    /// The number of the event that broke the promise.
    pub step: u64,
    /// A description of the broken promise.
    pub what: String,
    /// The last events before it, oldest first.
    pub trace: Vec<String>,
}

/// Plays the run of one seed. `base` is the start of virtual time; `echo` is called with every
/// event's text.
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
    // A broken promise panics, in the checks of the table and the engine as in the simulation's
    // own.
    match catch_unwind(AssertUnwindSafe(|| world.run())) {
        Ok(()) => Ok(Clean {
            steps: world.trace.steps(),
            trace: world.trace.digest(),
            turns: world.counts,
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
