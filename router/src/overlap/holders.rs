//! Who holds how much of a run: for each slot the number of its first blocks that are resident,
//! its cut. Most runs have one to four holders, a shared system prompt has all of them; the form
//! follows the number.

/// Holders that fit beside the run itself.
const FEW: usize = 4;

/// Cuts by slot. A cut of 0 is no holder.
#[derive(Debug, Clone)]
pub(super) enum Holders {
    /// In no order.
    Few([Hold; FEW]),
    /// In no order, without zeros.
    List(Vec<Hold>),
    /// By slot; slots behind the end have none.
    All(Vec<u16>),
}

/// One slot's cut.
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
    /// Memory held outside of the value.
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

    /// All holders, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = Hold> {
        let (list, cuts): (&[Hold], &[u16]) = match self {
            Self::Few(few) => (few, &[]),
            Self::List(list) => (list, &[]),
            Self::All(cuts) => (&[], cuts),
        };
        let dense = (0..).zip(cuts).map(|(slot, &cut)| Hold { slot, cut });
        list.iter().copied().chain(dense).filter(|hold| hold.cut > 0)
    }

    /// The longest cut.
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

    /// Sets a slot's cut; `slots` is how many slots there are.
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

    /// Lowers every cut to `at`, which is not 0.
    pub(super) fn shorten(&mut self, at: u16) {
        let lower = |cut: &mut u16| *cut = at.min(*cut);
        match self {
            Self::Few(few) => few.iter_mut().for_each(|hold| lower(&mut hold.cut)),
            Self::List(list) => list.iter_mut().for_each(|hold| lower(&mut hold.cut)),
            Self::All(cuts) => cuts.iter_mut().for_each(lower),
        }
    }

    /// Takes the form that suits the number of holders. Going back asks for half of it, so that one
    /// holder that comes and goes costs nothing.
    fn fit(&mut self, slots: usize) {
        // A pass over all cuts is vector code, one over a list is not: even at an eighth of them.
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

    /// Gives every slot whose leading blocks reach `start` what it holds of the `matched` blocks
    /// from there on.
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
