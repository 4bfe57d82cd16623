//! Assigns slots to workers. The tree stores slots, not workers.
//!
//! A worker that is lost or starts over gets a new slot at once. No look-up uses the old slot, and
//! the tree is swept of it step by step. A snapshot is written into a separate slot, which replaces
//! the current one when the snapshot is complete.

/// Marks a worker without a slot.
const NONE: u16 = u16::MAX;

/// The slots of all workers.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// By worker: the slot that look-ups read.
    current: Vec<u16>,
    /// By worker: the slot that a snapshot in progress is written to.
    next: Vec<u16>,
    /// By slot: whether it has ended. The tree may still contain it, but no worker uses it.
    ended: Vec<bool>,
    ended_count: usize,
    free: Vec<u16>,
}

impl Slots {
    /// Returns the number of slots, in use or not.
    pub(super) fn len(&self) -> usize {
        self.ended.len()
    }

    /// Returns the memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let slots = self.current.capacity() + self.next.capacity() + self.free.capacity();
        slots * size_of::<u16>() + self.ended.capacity()
    }

    /// Returns the slots that look-ups read, by worker.
    pub(super) fn current(&self) -> &[u16] {
        &self.current
    }

    /// Returns the slot that look-ups read for a worker.
    pub(super) fn read_slot(&self, worker: usize) -> Option<u16> {
        self.current.get(worker).copied().filter(|&slot| slot != NONE)
    }

    /// Returns the slot that a worker's changes are written to, if it has one.
    pub(super) fn write_slot(&self, worker: usize) -> Option<u16> {
        let next = self.next.get(worker).copied().filter(|&slot| slot != NONE);
        next.or_else(|| self.read_slot(worker))
    }

    /// Like [`Self::write_slot`], but assigns a slot to a new worker. Also returns whether the
    /// number of slots grew.
    pub(super) fn write_slot_or_new(&mut self, worker: usize) -> (u16, bool) {
        if let Some(slot) = self.write_slot(worker) {
            return (slot, false);
        }
        let (slot, more) = self.allocate();
        set(&mut self.current, worker, slot);
        (slot, more)
    }

    /// Begins a snapshot of a worker. Returns whether the number of slots grew.
    pub(super) fn begin_snapshot(&mut self, worker: usize) -> bool {
        self.end_next(worker);
        let (slot, more) = self.allocate();
        set(&mut self.next, worker, slot);
        more
    }

    /// Completes the worker's snapshot, if one was begun.
    pub(super) fn finish_snapshot(&mut self, worker: usize) {
        let Some(slot) = self.next.get(worker).copied().filter(|&slot| slot != NONE) else {
            return;
        };
        self.next[worker] = NONE;
        self.end_current(worker);
        set(&mut self.current, worker, slot);
    }

    /// Ends all slots of a worker.
    pub(super) fn end(&mut self, worker: usize) {
        self.end_next(worker);
        self.end_current(worker);
    }

    /// Whether the tree has to be swept of ended slots.
    pub(super) fn has_ended(&self) -> bool {
        self.ended_count > 0
    }

    pub(super) fn is_ended(&self, slot: u16) -> bool {
        self.ended[usize::from(slot)]
    }

    /// Frees the ended slots that the tree no longer contains.
    pub(super) fn free_ended(&mut self, is_empty: impl Fn(u16) -> bool) {
        for (slot, ended) in (0..NONE).zip(&mut self.ended) {
            if *ended && is_empty(slot) {
                *ended = false;
                self.ended_count -= 1;
                self.free.push(slot);
            }
        }
    }

    fn allocate(&mut self) -> (u16, bool) {
        if let Some(slot) = self.free.pop() {
            return (slot, false);
        }
        let slot = u16::try_from(self.ended.len()).ok().filter(|&slot| slot != NONE);
        self.ended.push(false);
        (slot.expect("three slots per worker are fewer than NONE"), true)
    }

    fn end_next(&mut self, worker: usize) {
        if let Some(slot) = self.next.get_mut(worker) {
            end(&mut self.ended, &mut self.ended_count, std::mem::replace(slot, NONE));
        }
    }

    fn end_current(&mut self, worker: usize) {
        if let Some(slot) = self.current.get_mut(worker) {
            end(&mut self.ended, &mut self.ended_count, std::mem::replace(slot, NONE));
        }
    }
}

fn end(ended: &mut [bool], count: &mut usize, slot: u16) {
    if slot != NONE {
        ended[usize::from(slot)] = true;
        *count += 1;
    }
}

fn set(slots: &mut Vec<u16>, worker: usize, slot: u16) {
    if slots.len() <= worker {
        slots.resize(worker + 1, NONE);
    }
    slots[worker] = slot;
}
