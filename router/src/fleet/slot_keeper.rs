//! Says when an agent's tasks start and stop, and when its slot may go to another agent. Pure.
//!
//! An agent that joins the fleet gets a slot, and tasks that follow it. When it ends, its tasks are
//! stopped, and the fleet's state forgets it. Its slot is *unreferenced* when two things are true:
//!
//! 1. No snapshot, decision or turn knows a worker of the agent. Each of them shares the agent's
//!    counts of turns in flight, so the counts are gone once the last of them is.
//! 2. Then, no table of this router names a worker of the agent. The owner of the tables removes
//!    the entries, and says whether running turns still hold some of them.
//!
//! A [`SlotKeeper`] looks at each snapshot and returns the steps that are due. The tasks of the
//! agents carry them out.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use super::{lease::InFlight, membership::Phase, snapshot::Snapshot};

/// What is to be done for a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Start the tasks that follow the agent with this control port.
    Start {
        /// The agent's slot.
        slot: usize,
        /// The URL of its control port.
        control_url: String,
    },
    /// Stop the tasks of the agent. Then the fleet's state must hear of it.
    Stop {
        /// The agent's slot.
        slot: usize,
    },
    /// Remove the slot from all tables. If nothing is left there, call [`SlotKeeper::release`].
    RemoveReferences {
        /// The slot of the agent that was forgotten.
        slot: usize,
    },
}

/// What the keeper knows of a slot that isn't free.
#[derive(Debug)]
enum Occupancy {
    /// The agent's tasks run.
    Running,
    /// The agent has ended. These are its counts, which it shares with all that know its workers.
    Ended { counts: Vec<Weak<InFlight>> },
}

/// Follows the slots of the fleet.
#[derive(Debug, Default)]
pub struct SlotKeeper {
    occupancies: BTreeMap<usize, Occupancy>,
}

impl SlotKeeper {
    /// Returns the steps that are due. The caller drops the snapshot before it calls again, because
    /// the snapshot counts as a reference.
    pub fn next_steps(&mut self, view: &Snapshot) -> Vec<Step> {
        let mut steps = vec![];
        for (slot, agent) in view.agents.iter().enumerate() {
            match (self.occupancies.get(&slot), agent.phase) {
                (None, Phase::Member | Phase::Leaving { .. }) => {
                    self.occupancies.insert(slot, Occupancy::Running);
                    steps.push(Step::Start { slot, control_url: agent.control_url.clone() });
                }
                (None | Some(Occupancy::Running), Phase::Ending) => {
                    // The state creates no more counts for an agent that has ended.
                    let counts = agent.in_flight.iter().map(Arc::downgrade).collect();
                    self.occupancies.insert(slot, Occupancy::Ended { counts });
                    steps.push(Step::Stop { slot });
                }
                (Some(Occupancy::Ended { counts }), Phase::Vacated)
                    if counts.iter().all(|count| count.strong_count() == 0) =>
                {
                    steps.push(Step::RemoveReferences { slot });
                }
                _ => {}
            }
        }
        steps
    }

    /// Whether a slot waits for the end of the last reference to it. Nothing announces that end, so
    /// the caller looks again after a while.
    #[must_use]
    pub fn has_ended_slots(&self) -> bool {
        self.occupancies.values().any(|state| matches!(state, Occupancy::Ended { .. }))
    }

    /// Lets a slot go to another agent, after all references to it were removed.
    pub fn release(&mut self, slot: usize) {
        self.occupancies.remove(&slot);
    }
}
