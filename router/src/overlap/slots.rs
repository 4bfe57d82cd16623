//! Which slot stands for which worker. A worker that is lost, or begins anew, gets another slot at
//! once; nothing leads to its old one any more, and the tree is swept of it bit by bit. A snapshot
//! is written into a slot of its own, which takes the old one's place when it is complete.

/// No slot.
const NONE: u16 = u16::MAX;

/// Slots by worker.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// What is read, by worker.
    current: Vec<u16>,
    /// What a snapshot in progress is written to, by worker.
    next: Vec<u16>,
    /// Whether nothing leads to a slot and the tree may still have it.
    ended: Vec<bool>,
    ended_count: usize,
    free: Vec<u16>,
}

impl Slots {
    /// Slots there are, in use or not.
    pub(super) fn len(&self) -> usize {
        self.ended.len()
    }

    /// Memory held.
    pub(super) fn bytes(&self) -> usize {
        let slots = self.current.capacity() + self.next.capacity() + self.free.capacity();
        slots * size_of::<u16>() + self.ended.capacity()
    }

    /// What look-ups read, by worker.
    pub(super) fn current(&self) -> &[u16] {
        &self.current
    }

    /// What look-ups read of a worker.
    pub(super) fn read(&self, worker: usize) -> Option<u16> {
        self.current.get(worker).copied().filter(|&slot| slot != NONE)
    }

    /// What a worker's deltas are written to, if there is one.
    pub(super) fn of(&self, worker: usize) -> Option<u16> {
        let next = self.next.get(worker).copied().filter(|&slot| slot != NONE);
        next.or_else(|| self.read(worker))
    }

    /// As [`Self::of`], with a slot made for a new worker; true when there is one more now.
    pub(super) fn of_or_new(&mut self, worker: usize) -> (u16, bool) {
        if let Some(slot) = self.of(worker) {
            return (slot, false);
        }
        let (slot, more) = self.take();
        set(&mut self.current, worker, slot);
        (slot, more)
    }

    /// Begins a snapshot; true when there is one slot more now.
    pub(super) fn begin(&mut self, worker: usize) -> bool {
        self.end_next(worker);
        let (slot, more) = self.take();
        set(&mut self.next, worker, slot);
        more
    }

    /// Completes a snapshot, if one was begun.
    pub(super) fn finish(&mut self, worker: usize) {
        let Some(slot) = self.next.get(worker).copied().filter(|&slot| slot != NONE) else {
            return;
        };
        self.next[worker] = NONE;
        self.end_current(worker);
        set(&mut self.current, worker, slot);
    }

    /// Nothing leads to a worker's slots any more.
    pub(super) fn end(&mut self, worker: usize) {
        self.end_next(worker);
        self.end_current(worker);
    }

    /// Whether the tree has to be swept of slots.
    pub(super) fn any_ended(&self) -> bool {
        self.ended_count > 0
    }

    pub(super) fn is_ended(&self, slot: u16) -> bool {
        self.ended[usize::from(slot)]
    }

    /// Ended slots that the tree has no more can be used again.
    pub(super) fn reuse(&mut self, is_empty: impl Fn(u16) -> bool) {
        for (slot, ended) in (0..NONE).zip(&mut self.ended) {
            if *ended && is_empty(slot) {
                *ended = false;
                self.ended_count -= 1;
                self.free.push(slot);
            }
        }
    }

    fn take(&mut self) -> (u16, bool) {
        if let Some(slot) = self.free.pop() {
            return (slot, false);
        }
        let slot = u16::try_from(self.ended.len()).ok().filter(|&slot| slot != NONE);
        self.ended.push(false);
        (slot.expect("workers and their snapshots are fewer"), true)
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
