//! Says when an agent's tasks start and stop, and when its slot may go to another agent. Pure.
//!
//! The slot of an agent that has ended is *unreferenced* when two things are true:
//!
//! 1. No snapshot, decision or turn knows a worker of the agent. Each of them shares the agent's
//!    counts of turns in flight, so the counts are gone once the last of them is.
//! 2. Then, no table of this router names a worker of the agent. The owner of the tables removes
//!    the entries, and says whether running turns still hold some of them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use super::{lease::InFlight, membership::Phase, snapshot::Snapshot};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Start {
        slot: usize,
        control_url: String,
    },
    /// Stop the tasks of the agent. Then the fleet's state must hear of it.
    Stop {
        slot: usize,
    },
    /// Remove the slot from all tables. If nothing is left there, call [`SlotKeeper::release`].
    RemoveReferences {
        slot: usize,
    },
}

#[derive(Debug)]
enum Occupancy {
    Running,
    /// The agent shares the counts with all that know its workers.
    Ended {
        counts: Vec<Weak<InFlight>>,
    },
}

#[derive(Debug, Default)]
pub struct SlotKeeper {
    occupancies: BTreeMap<usize, Occupancy>,
}

impl SlotKeeper {
    /// The caller drops the snapshot before it calls again, because the snapshot counts as a
    /// reference.
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

    /// Nothing announces the end of the last reference, so the caller looks again after a while.
    #[must_use]
    pub fn has_ended_slots(&self) -> bool {
        self.occupancies.values().any(|state| matches!(state, Occupancy::Ended { .. }))
    }

    pub fn release(&mut self, slot: usize) {
        self.occupancies.remove(&slot);
    }
}
