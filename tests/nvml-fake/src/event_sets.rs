//! The machine's event sets and the events that wait in them.

use std::collections::{BTreeMap, VecDeque};

/// The event sets that were created and not freed.
#[derive(Debug, Default)]
pub(crate) struct EventSets {
    /// The sets, by handle.
    pub(crate) sets: BTreeMap<usize, EventSet>,
    /// The number of sets created so far; also the handle of the newest.
    pub(crate) made: usize,
}

/// One event set.
#[derive(Debug, Default)]
pub(crate) struct EventSet {
    /// Registered event types, by GPU.
    pub(crate) registered: BTreeMap<u32, u64>,
    /// The events that no wait has returned yet: GPU, type and data.
    pub(crate) waiting: VecDeque<(u32, u64, u64)>,
}

impl EventSets {
    /// Queues an event in the sets that registered it. An event that no set registered is lost, as
    /// with NVML.
    pub(crate) fn queue_event(&mut self, gpu: u32, kind: u64, data: u64) {
        for set in self.sets.values_mut() {
            if set.registered.get(&gpu).is_some_and(|types| types & kind != 0) {
                set.waiting.push_back((gpu, kind, data));
            }
        }
    }
}
