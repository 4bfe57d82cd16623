//! Records how much of a run each slot holds.
//!
//! A slot holds a prefix of the run; its *cut* is the number of blocks in that prefix. Most runs
//! have one to four holders, a shared system prompt is held by all. The representation depends on
//! the number of holders.

/// Number of holders stored in the run itself, without an allocation.
const FEW: usize = 4;

/// The cut of each slot. A slot with a cut of 0 is not a holder.
#[derive(Debug, Clone)]
pub(super) enum Holders {
    /// At most `FEW` holders, in no particular order. Unused entries have a cut of 0.
    Few([Hold; FEW]),
    /// A list of holders in no particular order, without cuts of 0.
    List(Vec<Hold>),
    /// An array indexed by slot. Slots beyond its end are not holders.
    All(Vec<u16>),
}

/// A slot and its cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Hold {
    pub(super) slot: u16,
    pub(super) cut: u16,
}

impl Default for Holders {
    fn default() -> Self {
        Self::Few([Hold::default(); FEW])
    }
}

impl Holders {
    /// Returns the heap memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::List(list) => list.capacity() * size_of::<Hold>(),
            Self::All(cuts) => cuts.capacity() * size_of::<u16>(),
        }
    }

    pub(super) fn get(&self, slot: u16) -> u16 {
        let of = |holds: &[Hold]| {
            let mut own = holds.iter().filter(|hold| hold.slot == slot && hold.cut > 0);
            own.next().map_or(0, |hold| hold.cut)
        };
        match self {
            Self::Few(few) => of(few),
            Self::List(list) => of(list),
            Self::All(cuts) => cuts.get(usize::from(slot)).copied().unwrap_or(0),
        }
    }

    /// Iterates over all holders, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Hold> {
        let (list, cuts): (&[Hold], &[u16]) = match self {
            Self::Few(few) => (few, &[]),
            Self::List(list) => (list, &[]),
            Self::All(cuts) => (&[], cuts),
        };
        let dense = (0..).zip(cuts).map(|(slot, &cut)| Hold { slot, cut });
        list.iter().copied().chain(dense).filter(|hold| hold.cut > 0)
    }

    /// Returns the longest cut.
    pub(super) fn max(&self) -> u16 {
        let of = |holds: &[Hold]| holds.iter().map(|hold| hold.cut).max().unwrap_or(0);
        match self {
            Self::Few(few) => of(few),
            Self::List(list) => of(list),
            Self::All(cuts) => cuts.iter().copied().max().unwrap_or(0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.max() == 0
    }

    /// Sets a slot's cut. `slots` is the total number of slots.
    pub(super) fn set(&mut self, slot: u16, cut: u16, slots: usize) {
        match self {
            Self::Few(few) => {
                let own = few.iter().position(|hold| hold.slot == slot && hold.cut > 0);
                let place = own.or_else(|| few.iter().position(|hold| hold.cut == 0));
                match place {
                    Some(at) => few[at] = Hold { slot, cut },
                    None if cut > 0 => {
                        let mut list = Vec::with_capacity(2 * FEW);
                        list.extend_from_slice(few);
                        list.push(Hold { slot, cut });
                        *self = Self::List(list);
                        self.fit(slots);
                    }
                    None => {}
                }
            }
            Self::List(list) => {
                match list.iter().position(|hold| hold.slot == slot) {
                    Some(at) if cut > 0 => list[at].cut = cut,
                    Some(at) => drop(list.swap_remove(at)),
                    None if cut > 0 => list.push(Hold { slot, cut }),
                    None => {}
                }
                self.fit(slots);
            }
            Self::All(cuts) => {
                let at = usize::from(slot);
                if at >= cuts.len() && cut > 0 {
                    cuts.resize(slots.max(at + 1), 0);
                }
                if let Some(own) = cuts.get_mut(at) {
                    *own = cut;
                }
                if cut == 0 {
                    self.fit(slots);
                }
            }
        }
    }

    /// Lowers every cut to at most `at`, which must not be 0.
    pub(super) fn shorten(&mut self, at: u16) {
        let lower = |cut: &mut u16| *cut = at.min(*cut);
        match self {
            Self::Few(few) => few.iter_mut().for_each(|hold| lower(&mut hold.cut)),
            Self::List(list) => list.iter_mut().for_each(|hold| lower(&mut hold.cut)),
            Self::All(cuts) => cuts.iter_mut().for_each(lower),
        }
    }

    /// Changes to the representation that suits the number of holders. Going back to a smaller one
    /// takes half of the limit, so that a holder that comes and goes causes no change.
    fn fit(&mut self, slots: usize) {
        // A pass over the array is vectorized and one over the list isn't: from an eighth of all
        // slots on, the array is faster.
        let many = (slots / 8).max(FEW);
        match self {
            Self::Few(_) => {}
            Self::List(list) if list.len() > many => {
                let mut cuts = vec![0; slots];
                for hold in list.iter() {
                    cuts[usize::from(hold.slot)] = hold.cut;
                }
                *self = Self::All(cuts);
            }
            Self::List(list) if list.len() <= FEW / 2 => *self = self.iter().collect(),
            Self::List(_) => {}
            Self::All(cuts) => {
                let holders = cuts.iter().filter(|&&cut| cut > 0).count();
                if holders <= many / 2 {
                    *self = self.iter().collect();
                }
            }
        }
    }

    /// Updates the depth of each slot whose leading blocks reach `start`: adds its part of the
    /// `matched` blocks of this run.
    pub(super) fn credit(&self, start: u32, matched: u16, depths: &mut [u32]) {
        let one = |depth: &mut u32, cut: u16| {
            let reach = start + u32::from(cut.min(matched));
            *depth = if *depth >= start { reach.max(*depth) } else { *depth };
        };
        let each = |holds: &[Hold], depths: &mut [u32]| {
            for hold in holds.iter().filter(|hold| hold.cut > 0) {
                one(&mut depths[usize::from(hold.slot)], hold.cut);
            }
        };
        match self {
            Self::Few(few) => each(few, depths),
            Self::List(list) => each(list, depths),
            Self::All(cuts) => {
                depths.iter_mut().zip(cuts).for_each(|(depth, &cut)| one(depth, cut))
            }
        }
    }
}

impl FromIterator<Hold> for Holders {
    fn from_iter<I: IntoIterator<Item = Hold>>(holds: I) -> Self {
        let list: Vec<Hold> = holds.into_iter().collect();
        if list.len() > FEW {
            return Self::List(list);
        }
        let mut few = [Hold::default(); FEW];
        few[..list.len()].copy_from_slice(&list);
        Self::Few(few)
    }
}
