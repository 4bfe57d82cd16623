//! Records how many leading blocks of a run each worker has, for the tree of resident blocks.
//!
//! A run is an unbranched part of the tree, and a slot a worker's number. A *holder* is a slot that
//! has leading blocks of the run, and its *prefix length* is how many.
//!
//! Most runs have one to four holders, but a shared system prompt can be on all workers. So the
//! representation depends on the number of holders.

const INLINE_HOLDERS_MAX: usize = 4;

/// A slot with a prefix length of 0 is not a holder.
#[derive(Debug, Clone)]
pub(super) enum WorkerSet {
    /// In no particular order. Unused entries have a prefix length of 0.
    Inline([Hold; INLINE_HOLDERS_MAX]),
    /// In no particular order, without prefix lengths of 0.
    List(Vec<Hold>),
    /// By slot. Slots beyond the vector's end are not holders.
    BySlot(Vec<u16>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Hold {
    pub(super) slot: u16,
    pub(super) prefix_len: u16,
}

impl Default for WorkerSet {
    fn default() -> Self {
        Self::Inline([Hold::default(); INLINE_HOLDERS_MAX])
    }
}

impl WorkerSet {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Inline(_) => 0,
            Self::List(list) => list.capacity() * size_of::<Hold>(),
            Self::BySlot(prefix_lens) => prefix_lens.capacity() * size_of::<u16>(),
        }
    }

    /// 0 if the slot is not a holder.
    pub(super) fn get(&self, slot: u16) -> u16 {
        let find = |holds: &[Hold]| {
            let hold = holds.iter().find(|hold| hold.slot == slot && hold.prefix_len > 0);
            hold.map_or(0, |hold| hold.prefix_len)
        };
        match self {
            Self::Inline(inline) => find(inline),
            Self::List(list) => find(list),
            Self::BySlot(prefix_lens) => prefix_lens.get(usize::from(slot)).copied().unwrap_or(0),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Hold> {
        let (list, prefix_lens): (&[Hold], &[u16]) = match self {
            Self::Inline(inline) => (inline, &[]),
            Self::List(list) => (list, &[]),
            Self::BySlot(prefix_lens) => (&[], prefix_lens),
        };
        let by_slot = (0..).zip(prefix_lens).map(|(slot, &prefix_len)| Hold { slot, prefix_len });
        list.iter().copied().chain(by_slot).filter(|hold| hold.prefix_len > 0)
    }

    pub(super) fn longest_prefix_len(&self) -> u16 {
        let longest = |holds: &[Hold]| holds.iter().map(|hold| hold.prefix_len).max().unwrap_or(0);
        match self {
            Self::Inline(inline) => longest(inline),
            Self::List(list) => longest(list),
            Self::BySlot(prefix_lens) => prefix_lens.iter().copied().max().unwrap_or(0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.longest_prefix_len() == 0
    }

    /// `slot_count` is the number of all slots in the tree.
    pub(super) fn set(&mut self, slot: u16, prefix_len: u16, slot_count: usize) {
        match self {
            Self::Inline(inline) => {
                let held_index =
                    inline.iter().position(|hold| hold.slot == slot && hold.prefix_len > 0);
                let index =
                    held_index.or_else(|| inline.iter().position(|hold| hold.prefix_len == 0));
                match index {
                    Some(index) => inline[index] = Hold { slot, prefix_len },
                    None if prefix_len > 0 => {
                        let mut list = Vec::with_capacity(2 * INLINE_HOLDERS_MAX);
                        list.extend_from_slice(inline);
                        list.push(Hold { slot, prefix_len });
                        *self = Self::List(list);
                        self.choose_representation(slot_count);
                    }
                    None => {}
                }
            }
            Self::List(list) => {
                match list.iter().position(|hold| hold.slot == slot) {
                    Some(index) if prefix_len > 0 => list[index].prefix_len = prefix_len,
                    Some(index) => drop(list.swap_remove(index)),
                    None if prefix_len > 0 => list.push(Hold { slot, prefix_len }),
                    None => {}
                }
                self.choose_representation(slot_count);
            }
            Self::BySlot(prefix_lens) => {
                let index = usize::from(slot);
                if index >= prefix_lens.len() && prefix_len > 0 {
                    prefix_lens.resize(slot_count.max(index + 1), 0);
                }
                if let Some(old_prefix_len) = prefix_lens.get_mut(index) {
                    *old_prefix_len = prefix_len;
                }
                if prefix_len == 0 {
                    self.choose_representation(slot_count);
                }
            }
        }
    }

    /// `len_max` must not be 0.
    pub(super) fn limit_prefix_lens(&mut self, len_max: u16) {
        let limit = |prefix_len: &mut u16| *prefix_len = len_max.min(*prefix_len);
        match self {
            Self::Inline(inline) => inline.iter_mut().for_each(|hold| limit(&mut hold.prefix_len)),
            Self::List(list) => list.iter_mut().for_each(|hold| limit(&mut hold.prefix_len)),
            Self::BySlot(prefix_lens) => prefix_lens.iter_mut().for_each(limit),
        }
    }

    /// The representation grows when the number of holders exceeds a limit, and shrinks when it is
    /// at most half of that. So one holder that comes and goes doesn't change the representation.
    fn choose_representation(&mut self, slot_count: usize) {
        // A pass over the array of `BySlot` is vectorized, and a pass over `List` is not. With more
        // holders than an eighth of all slots, the array is faster.
        let list_len_max = (slot_count / 8).max(INLINE_HOLDERS_MAX);
        match self {
            Self::Inline(_) => {}
            Self::List(list) if list.len() > list_len_max => {
                let mut prefix_lens = vec![0; slot_count];
                for hold in list.iter() {
                    prefix_lens[usize::from(hold.slot)] = hold.prefix_len;
                }
                *self = Self::BySlot(prefix_lens);
            }
            Self::List(list) if list.len() <= INLINE_HOLDERS_MAX / 2 => {
                *self = self.iter().collect();
            }
            Self::List(_) => {}
            Self::BySlot(prefix_lens) => {
                let holder_count = prefix_lens.iter().filter(|&&prefix_len| prefix_len > 0).count();
                if holder_count <= list_len_max / 2 {
                    *self = self.iter().collect();
                }
            }
        }
    }

    /// One step of a prompt's look-up. `depths[slot]` is how many leading blocks of the prompt the
    /// slot has, as found so far. The run begins after `run_depth` blocks of the prompt, and its
    /// first `matched_len` blocks are in the prompt.
    pub(super) fn add_depths(&self, run_depth: u32, matched_len: u16, depths: &mut [u32]) {
        let extend = |depth: &mut u32, prefix_len: u16| {
            let new_depth = run_depth + u32::from(prefix_len.min(matched_len));
            // A slot with a depth below `run_depth` lacks a block before the run, so it gains
            // nothing.
            *depth = if *depth >= run_depth { new_depth.max(*depth) } else { *depth };
        };
        let extend_each = |holds: &[Hold], depths: &mut [u32]| {
            for hold in holds.iter().filter(|hold| hold.prefix_len > 0) {
                extend(&mut depths[usize::from(hold.slot)], hold.prefix_len);
            }
        };
        match self {
            Self::Inline(inline) => extend_each(inline, depths),
            Self::List(list) => extend_each(list, depths),
            Self::BySlot(prefix_lens) => depths
                .iter_mut()
                .zip(prefix_lens)
                .for_each(|(depth, &prefix_len)| extend(depth, prefix_len)),
        }
    }
}

impl FromIterator<Hold> for WorkerSet {
    fn from_iter<I: IntoIterator<Item = Hold>>(holds: I) -> Self {
        let list: Vec<Hold> = holds.into_iter().collect();
        if list.len() > INLINE_HOLDERS_MAX {
            return Self::List(list);
        }
        let mut inline = [Hold::default(); INLINE_HOLDERS_MAX];
        inline[..list.len()].copy_from_slice(&list);
        Self::Inline(inline)
    }
}
