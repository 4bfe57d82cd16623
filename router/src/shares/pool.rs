//! Divides one kind of capacity among those who share it, so that nobody can take all of it. Pure.
//!
//! A *pool* has a fixed number of units, such as turns or bytes. A *sharer* takes units and gives
//! them back. Nothing is taken away from a sharer, so the rule has to leave room in time. A sharer
//! gets more units if one of these holds:
//!
//! - *small*: with them it holds at most a [`SMALL_DIVISOR`]th of the pool, and they are free.
//! - *in proportion*: with them it holds at most [`FREE_FACTOR`] times what is free in the main
//!   part. The main part is the pool without its last [`RESERVE_DIVISOR`]th, the reserve.
//!
//! What this means for `n` sharers that all want as much as they can get:
//!
//! - One alone gets 16/17 of the main part, which is 88 % of the pool.
//! - Each of `n` ends up with 16/(16n + 1) of the main part. The rule compares what each holds with
//!   the same figure, so the one that holds more is refused first.
//! - A sharer gets its small part at once, whatever up to seven others hold. Each of them can take
//!   a small part out of the reserve, and no more, and the reserve has eight.
//!
//! A lower priority class has a smaller pool: turns of the class `low` are refused once three
//! quarters of the pool are in use, whoever uses them. The class `high` has no reserve to spare for
//! others: it may use the whole pool in proportion.

use std::{collections::HashMap, sync::Arc};

use service::auth::keys::PriorityClass;

/// With a larger factor, one alone gets more, and a second one finds less until the first gives
/// units back.
pub(crate) const FREE_FACTOR: u64 = 16;
/// Of 4,096 turns, the reserve is 256.
pub(crate) const RESERVE_DIVISOR: u64 = 16;
/// Of 4,096 turns, a small part is 32. One user's agents rarely have more turns at once.
pub(crate) const SMALL_DIVISOR: u64 = 128;
const LOW_QUARTERS: u64 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    Full,
    Share,
    /// The pool is too full for the sharer's class, whatever the sharer holds.
    Class,
    Key,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask {
    /// At least 1.
    pub(crate) units: u64,
    pub(crate) class: PriorityClass,
    /// The most that the sharer may hold by its own key's limit.
    pub(crate) key_max: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Pool {
    units: u64,
    used: u64,
    /// What each sharer holds, at least 1. So there are never more sharers than units.
    held: HashMap<Arc<str>, u64>,
}

impl Pool {
    pub(crate) fn new(units: u64) -> Self {
        Self { units, used: 0, held: HashMap::new() }
    }

    /// At an error, nothing is taken.
    pub(crate) fn take(&mut self, sharer: &Arc<str>, ask: Ask) -> Result<(), Refused> {
        let held = self.held(sharer);
        self.check(held, ask)?;
        self.used += ask.units;
        *self.held.entry(Arc::clone(sharer)).or_default() += ask.units;
        self.check_in_debug();
        Ok(())
    }

    pub(crate) fn give_back(&mut self, sharer: &Arc<str>, units: u64) {
        if units == 0 {
            return;
        }
        let held = self.held.get_mut(sharer).expect("the sharer holds the units");
        *held = held.checked_sub(units).expect("the sharer holds the units");
        if *held == 0 {
            self.held.remove(sharer);
        }
        self.used -= units;
        self.check_in_debug();
    }

    pub(crate) fn held(&self, sharer: &Arc<str>) -> u64 {
        self.held.get(sharer).copied().unwrap_or_default()
    }

    /// Assumes that nobody holds any units.
    pub(crate) fn most_of_one(&self, class: PriorityClass) -> u64 {
        let (mut most, mut above) = (0, self.units.saturating_add(1));
        while above - most > 1 {
            let units = most + (above - most) / 2;
            match check(self.units, 0, 0, Ask { units, class, key_max: None }) {
                Ok(()) => most = units,
                Err(_) => above = units,
            }
        }
        most
    }

    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn sharers(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn largest_held(&self) -> u64 {
        self.held.values().copied().max().unwrap_or_default()
    }

    fn check(&self, held: u64, ask: Ask) -> Result<(), Refused> {
        check(self.units, self.used, held, ask)
    }

    fn check_in_debug(&self) {
        // In a test, the pools are small. In a debug build with many sharers this would be slow.
        if cfg!(debug_assertions) && self.held.len() <= 64 {
            self.check_invariants();
        }
    }

    pub(crate) fn check_invariants(&self) {
        assert!(self.used <= self.units, "more units are in use than there are");
        assert_eq!(self.held.values().sum::<u64>(), self.used, "units nobody holds, or twice held");
        assert!(self.held.values().all(|held| *held > 0), "a sharer without units is kept");
    }
}

/// The rule, for a sharer that holds `held` of a pool of `units`, of which `used` are in use.
/// Tables that count their sharers' entries themselves use this.
pub(crate) fn check(units: u64, used: u64, held: u64, ask: Ask) -> Result<(), Refused> {
    let wanted = held.saturating_add(ask.units);
    if ask.key_max.is_some_and(|key_max| wanted > key_max) {
        return Err(Refused::Key);
    }
    let wanted_used = used.saturating_add(ask.units);
    if wanted_used > units {
        return Err(Refused::Full);
    }
    let reserve = units / RESERVE_DIVISOR;
    // The whole part that the class may use, and its main part.
    let (class_units, main_units) = match ask.class {
        PriorityClass::High => (units, units),
        PriorityClass::Normal => (units, units - reserve),
        PriorityClass::Low => {
            let class_units = units.saturating_mul(LOW_QUARTERS).div_ceil(4);
            (class_units, class_units.saturating_sub(reserve))
        }
    };
    if wanted_used > class_units {
        return Err(Refused::Class);
    }
    let is_small = wanted <= (units / SMALL_DIVISOR).max(1);
    // Before the last of the units: one that takes many at once gets no more than one by one.
    let free = main_units.saturating_sub(wanted_used.saturating_sub(1));
    let is_in_proportion = wanted_used <= main_units && wanted <= free.saturating_mul(FREE_FACTOR);
    if is_small || is_in_proportion { Ok(()) } else { Err(Refused::Share) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NORMAL: PriorityClass = PriorityClass::Normal;

    fn sharer(number: usize) -> Arc<str> {
        format!("s{number}").into()
    }

    fn ask(units: u64, class: PriorityClass) -> Ask {
        Ask { units, class, key_max: None }
    }

    /// Takes one unit after the other until the pool refuses. Returns how many were taken.
    fn take_all(pool: &mut Pool, sharer: &Arc<str>, class: PriorityClass) -> u64 {
        let before = pool.held(sharer);
        while pool.take(sharer, ask(1, class)).is_ok() {}
        pool.held(sharer) - before
    }

    #[test]
    fn one_alone_gets_nearly_all_and_a_newcomer_still_finds_room() {
        let mut pool = Pool::new(4096);
        let (hog, newcomer) = (sharer(0), sharer(1));
        assert_eq!(pool.most_of_one(NORMAL), 3615);
        assert_eq!(take_all(&mut pool, &hog, NORMAL), 3615, "88 % of 4,096");
        // 225 units of the main part and the reserve are free.
        assert_eq!(take_all(&mut pool, &newcomer, NORMAL), 212);
        assert_eq!(pool.take(&hog, ask(1, NORMAL)), Err(Refused::Share));
    }

    #[test]
    fn seven_that_take_all_they_can_leave_the_eighth_its_small_part() {
        let mut pool = Pool::new(4096);
        for number in 0..7 {
            take_all(&mut pool, &sharer(number), NORMAL);
        }
        assert!(take_all(&mut pool, &sharer(7), NORMAL) >= 4096 / SMALL_DIVISOR);
    }

    #[test]
    fn who_holds_more_is_refused_first_and_the_shares_become_equal() {
        let mut pool = Pool::new(1024);
        let (first, second) = (sharer(0), sharer(1));
        take_all(&mut pool, &first, NORMAL);
        // Each turn that ends is at once asked for again, by the first sharer before the second.
        for _ in 0..1024 {
            pool.give_back(&first, 1);
            while pool.take(&first, ask(1, NORMAL)).is_ok() {}
            while pool.take(&second, ask(1, NORMAL)).is_ok() {}
            if pool.held(&first) <= pool.held(&second) {
                break;
            }
        }
        let (first, second) = (pool.held(&first), pool.held(&second));
        assert!(first.abs_diff(second) <= 20, "{first} and {second}");
    }

    #[test]
    fn lower_classes_are_refused_first() {
        let mut pool = Pool::new(4096);
        for number in 0..3 {
            take_all(&mut pool, &sharer(number), NORMAL);
        }
        let newcomer = sharer(3);
        assert_eq!(pool.take(&newcomer, ask(1, PriorityClass::Low)), Err(Refused::Class));
        assert_eq!(pool.take(&newcomer, ask(64, NORMAL)), Err(Refused::Share));
        assert_eq!(pool.take(&newcomer, ask(64, PriorityClass::High)), Ok(()));
    }

    #[test]
    fn a_key_has_a_limit_of_its_own_and_a_small_pool_no_reserve() {
        let mut pool = Pool::new(2);
        let one = sharer(0);
        let of_key = Ask { key_max: Some(1), ..ask(1, NORMAL) };
        assert_eq!(pool.take(&one, of_key), Ok(()));
        assert_eq!(pool.take(&one, of_key), Err(Refused::Key));
        assert_eq!(pool.take(&one, ask(1, PriorityClass::Low)), Ok(()));
        assert_eq!(pool.take(&one, ask(1, PriorityClass::High)), Err(Refused::Full));
    }

    proptest! {
        /// Seven hostile sharers do what they like. An eighth always gets its small part.
        #[test]
        fn nobody_takes_all(
            units in 1024_u64..8192,
            steps in prop::collection::vec((0..7_usize, any::<bool>(), 1..2000_u64), 0..200),
            wanted in 1_u64..64,
        ) {
            let mut pool = Pool::new(units);
            for (number, takes, amount) in steps {
                let sharer = sharer(number);
                if takes {
                    let _ = pool.take(&sharer, ask(amount, NORMAL));
                } else {
                    let held = pool.held(&sharer);
                    pool.give_back(&sharer, amount.min(held));
                }
                pool.check_invariants();
            }
            for number in 0..7 {
                take_all(&mut pool, &sharer(number), NORMAL);
            }
            let small = units / SMALL_DIVISOR;
            prop_assert_eq!(pool.take(&sharer(7), ask(wanted.min(small), NORMAL)), Ok(()));
        }

        /// If somebody is refused, then so is everybody of the class who holds more.
        #[test]
        fn the_larger_is_refused_first(
            steps in prop::collection::vec((0..5_usize, 1..300_u64), 0..60),
            units in 1..300_u64,
        ) {
            let mut pool = Pool::new(2048);
            for (number, amount) in steps {
                let _ = pool.take(&sharer(number), ask(amount, NORMAL));
            }
            let mut sharers: Vec<u64> = (0..6).map(|number| pool.held(&sharer(number))).collect();
            sharers.sort_unstable();
            let answers: Vec<bool> =
                sharers.iter().map(|held| pool.check(*held, ask(units, NORMAL)).is_ok()).collect();
            prop_assert!(answers.windows(2).all(|pair| pair[0] >= pair[1]), "{answers:?}");
        }
    }
}
