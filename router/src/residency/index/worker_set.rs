//! Records how much of a run each slot holds.
//!
//! A slot holds a prefix of the run; its prefix length is the number of blocks in that prefix. Most
//! runs have one to four holders, a shared system prompt is held by all. The representation depends
//! on the number of holders.

/// Number of holders stored in the run itself, without an allocation.
const FEW: usize = 4;

/// The prefix length of each slot. A slot with a prefix length of 0 is not a holder.
#[derive(Debug, Clone)]
pub(super) enum WorkerSet {
    /// At most `FEW` holders, in no particular order. Unused entries have a prefix length of 0.
    Few([SlotPrefix; FEW]),
    /// A list of holders in no particular order, without prefix lengths of 0.
    List(Vec<SlotPrefix>),
    /// An array indexed by slot. Slots beyond its end are not holders.
    BySlot(Vec<u16>),
}

/// A slot and its prefix length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SlotPrefix {
    pub(super) slot: u16,
    pub(super) prefix_len: u16,
}

impl Default for WorkerSet {
    fn default() -> Self {
        Self::Few([SlotPrefix::default(); FEW])
    }
}

impl WorkerSet {
    /// Returns the heap memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::List(list) => list.capacity() * size_of::<SlotPrefix>(),
            Self::BySlot(prefix_lens) => prefix_lens.capacity() * size_of::<u16>(),
        }
    }

    pub(super) fn get(&self, slot: u16) -> u16 {
        let find = |holds: &[SlotPrefix]| {
            let mut own = holds.iter().filter(|hold| hold.slot == slot && hold.prefix_len > 0);
            own.next().map_or(0, |hold| hold.prefix_len)
        };
        match self {
            Self::Few(few) => find(few),
            Self::List(list) => find(list),
            Self::BySlot(prefix_lens) => prefix_lens.get(usize::from(slot)).copied().unwrap_or(0),
        }
    }

    /// Iterates over all holders, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = SlotPrefix> {
        let (list, prefix_lens): (&[SlotPrefix], &[u16]) = match self {
            Self::Few(few) => (few, &[]),
            Self::List(list) => (list, &[]),
            Self::BySlot(prefix_lens) => (&[], prefix_lens),
        };
        let dense =
            (0..).zip(prefix_lens).map(|(slot, &prefix_len)| SlotPrefix { slot, prefix_len });
        list.iter().copied().chain(dense).filter(|hold| hold.prefix_len > 0)
    }

    /// Returns the longest prefix length.
    pub(super) fn longest(&self) -> u16 {
        let longest =
            |holds: &[SlotPrefix]| holds.iter().map(|hold| hold.prefix_len).max().unwrap_or(0);
        match self {
            Self::Few(few) => longest(few),
            Self::List(list) => longest(list),
            Self::BySlot(prefix_lens) => prefix_lens.iter().copied().max().unwrap_or(0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.longest() == 0
    }

    /// Sets a slot's prefix length. `slots` is the total number of slots.
    pub(super) fn set(&mut self, slot: u16, prefix_len: u16, slots: usize) {
        match self {
            Self::Few(few) => {
                let own = few.iter().position(|hold| hold.slot == slot && hold.prefix_len > 0);
                let place = own.or_else(|| few.iter().position(|hold| hold.prefix_len == 0));
                match place {
                    Some(at) => few[at] = SlotPrefix { slot, prefix_len },
                    None if prefix_len > 0 => {
                        let mut list = Vec::with_capacity(2 * FEW);
                        list.extend_from_slice(few);
                        list.push(SlotPrefix { slot, prefix_len });
                        *self = Self::List(list);
                        self.choose_representation(slots);
                    }
                    None => {}
                }
            }
            Self::List(list) => {
                match list.iter().position(|hold| hold.slot == slot) {
                    Some(at) if prefix_len > 0 => list[at].prefix_len = prefix_len,
                    Some(at) => drop(list.swap_remove(at)),
                    None if prefix_len > 0 => list.push(SlotPrefix { slot, prefix_len }),
                    None => {}
                }
                self.choose_representation(slots);
            }
            Self::BySlot(prefix_lens) => {
                let at = usize::from(slot);
                if at >= prefix_lens.len() && prefix_len > 0 {
                    prefix_lens.resize(slots.max(at + 1), 0);
                }
                if let Some(own) = prefix_lens.get_mut(at) {
                    *own = prefix_len;
                }
                if prefix_len == 0 {
                    self.choose_representation(slots);
                }
            }
        }
    }

    /// Lowers every prefix length to at most `at`, which must not be 0.
    pub(super) fn limit_prefix_lens(&mut self, at: u16) {
        let lower = |prefix_len: &mut u16| *prefix_len = at.min(*prefix_len);
        match self {
            Self::Few(few) => few.iter_mut().for_each(|hold| lower(&mut hold.prefix_len)),
            Self::List(list) => list.iter_mut().for_each(|hold| lower(&mut hold.prefix_len)),
            Self::BySlot(prefix_lens) => prefix_lens.iter_mut().for_each(lower),
        }
    }

    /// Changes to the representation that suits the number of holders. Going back to a smaller one
    /// takes half of the limit, so that a holder that comes and goes causes no change.
    fn choose_representation(&mut self, slots: usize) {
        // A pass over the array is vectorized and one over the list isn't: from an eighth of all
        // slots on, the array is faster.
        let many = (slots / 8).max(FEW);
        match self {
            Self::Few(_) => {}
            Self::List(list) if list.len() > many => {
                let mut prefix_lens = vec![0; slots];
                for hold in list.iter() {
                    prefix_lens[usize::from(hold.slot)] = hold.prefix_len;
                }
                *self = Self::BySlot(prefix_lens);
            }
            Self::List(list) if list.len() <= FEW / 2 => *self = self.iter().collect(),
            Self::List(_) => {}
            Self::BySlot(prefix_lens) => {
                let holders = prefix_lens.iter().filter(|&&prefix_len| prefix_len > 0).count();
                if holders <= many / 2 {
                    *self = self.iter().collect();
                }
            }
        }
    }

    /// Updates the depth of each slot whose leading blocks reach `start`: adds its part of the
    /// `matched` blocks of this run.
    pub(super) fn add_depths(&self, start: u32, matched: u16, depths: &mut [u32]) {
        let add = |depth: &mut u32, prefix_len: u16| {
            let reach = start + u32::from(prefix_len.min(matched));
            *depth = if *depth >= start { reach.max(*depth) } else { *depth };
        };
        let each = |holds: &[SlotPrefix], depths: &mut [u32]| {
            for hold in holds.iter().filter(|hold| hold.prefix_len > 0) {
                add(&mut depths[usize::from(hold.slot)], hold.prefix_len);
            }
        };
        match self {
            Self::Few(few) => each(few, depths),
            Self::List(list) => each(list, depths),
            Self::BySlot(prefix_lens) => depths
                .iter_mut()
                .zip(prefix_lens)
                .for_each(|(depth, &prefix_len)| add(depth, prefix_len)),
        }
    }
}

impl FromIterator<SlotPrefix> for WorkerSet {
    fn from_iter<I: IntoIterator<Item = SlotPrefix>>(holds: I) -> Self {
        let list: Vec<SlotPrefix> = holds.into_iter().collect();
        if list.len() > FEW {
            return Self::List(list);
        }
        let mut few = [SlotPrefix::default(); FEW];
        few[..list.len()].copy_from_slice(&list);
        Self::Few(few)
    }
}
