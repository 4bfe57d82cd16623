//! Assigns slots to workers, so that a worker's blocks can be replaced or removed at once.
//!
//! When a worker loses all its blocks, its slot ends: no look-up uses it any longer, and the index
//! sweeps it from the tree step by step. A snapshot gets a slot of its own, which replaces the
//! worker's current slot when it is complete.

const NO_SLOT: u16 = u16::MAX;

#[derive(Debug, Default)]
pub(super) struct Slots {
    /// By worker: the slot that look-ups read.
    current_slots: Vec<u16>,
    /// By worker: the slot that a snapshot in progress is written to.
    snapshot_slots: Vec<u16>,
    /// By slot. No worker uses an ended slot, but the tree may contain it.
    ended_flags: Vec<bool>,
    ended_count: usize,
    /// Slots that no worker uses and the tree doesn't contain.
    free_slots: Vec<u16>,
}

impl Slots {
    pub(super) fn slot_count(&self) -> usize {
        self.ended_flags.len()
    }

    pub(super) fn bytes(&self) -> usize {
        let stored_slots = self.current_slots.capacity()
            + self.snapshot_slots.capacity()
            + self.free_slots.capacity();
        stored_slots * size_of::<u16>() + self.ended_flags.capacity()
    }

    /// By worker. A worker without a slot has `u16::MAX`.
    pub(super) fn current_slots(&self) -> &[u16] {
        &self.current_slots
    }

    pub(super) fn read_slot(&self, worker: usize) -> Option<u16> {
        self.current_slots.get(worker).copied().filter(|&slot| slot != NO_SLOT)
    }

    pub(super) fn write_slot(&self, worker: usize) -> Option<u16> {
        let snapshot = self.snapshot_slots.get(worker).copied().filter(|&slot| slot != NO_SLOT);
        snapshot.or_else(|| self.read_slot(worker))
    }

    /// Assigns a slot to a worker that has none. Also returns whether the number of slots grew.
    pub(super) fn write_slot_or_new(&mut self, worker: usize) -> (u16, bool) {
        if let Some(slot) = self.write_slot(worker) {
            return (slot, false);
        }
        let (slot, is_added) = self.allocate_slot();
        set_slot(&mut self.current_slots, worker, slot);
        (slot, is_added)
    }

    /// Returns whether the number of slots grew.
    pub(super) fn begin_snapshot(&mut self, worker: usize) -> bool {
        let discarded_slot = take_slot(&mut self.snapshot_slots, worker);
        self.end_slot(discarded_slot);
        let (slot, is_added) = self.allocate_slot();
        set_slot(&mut self.snapshot_slots, worker, slot);
        is_added
    }

    pub(super) fn finish_snapshot(&mut self, worker: usize) {
        let Some(slot) = take_slot(&mut self.snapshot_slots, worker) else { return };
        let replaced_slot = take_slot(&mut self.current_slots, worker);
        self.end_slot(replaced_slot);
        set_slot(&mut self.current_slots, worker, slot);
    }

    pub(super) fn end_slots(&mut self, worker: usize) {
        let snapshot_slot = take_slot(&mut self.snapshot_slots, worker);
        let current_slot = take_slot(&mut self.current_slots, worker);
        self.end_slot(snapshot_slot);
        self.end_slot(current_slot);
    }

    pub(super) fn has_ended_slots(&self) -> bool {
        self.ended_count > 0
    }

    pub(super) fn is_ended(&self, slot: u16) -> bool {
        self.ended_flags[usize::from(slot)]
    }

    /// `is_empty` says whether the tree no longer contains a slot.
    pub(super) fn free_ended(&mut self, is_empty: impl Fn(u16) -> bool) {
        for (slot, is_ended) in (0..NO_SLOT).zip(&mut self.ended_flags) {
            if *is_ended && is_empty(slot) {
                *is_ended = false;
                self.ended_count -= 1;
                self.free_slots.push(slot);
            }
        }
    }

    /// If no slot is left, some have ended: all workers together use fewer.
    pub(super) fn has_free(&self) -> bool {
        !self.free_slots.is_empty() || self.next_slot().is_some()
    }

    /// Also returns whether the slot is new.
    fn allocate_slot(&mut self) -> (u16, bool) {
        if let Some(slot) = self.free_slots.pop() {
            return (slot, false);
        }
        let slot = self.next_slot().expect("the index sweeps until a slot is free");
        self.ended_flags.push(false);
        (slot, true)
    }

    fn next_slot(&self) -> Option<u16> {
        u16::try_from(self.ended_flags.len()).ok().filter(|&slot| slot != NO_SLOT)
    }

    fn end_slot(&mut self, slot: Option<u16>) {
        if let Some(slot) = slot {
            self.ended_flags[usize::from(slot)] = true;
            self.ended_count += 1;
        }
    }
}

fn take_slot(slots_by_worker: &mut [u16], worker: usize) -> Option<u16> {
    let slot = std::mem::replace(slots_by_worker.get_mut(worker)?, NO_SLOT);
    (slot != NO_SLOT).then_some(slot)
}

fn set_slot(slots_by_worker: &mut Vec<u16>, worker: usize, slot: u16) {
    if slots_by_worker.len() <= worker {
        slots_by_worker.resize(worker + 1, NO_SLOT);
    }
    slots_by_worker[worker] = slot;
}
