//! Makes numbers that nobody can guess.

use std::cell::RefCell;

/// The numbers that a thread asks the operating system for at once: a system call costs more than
/// the rest of a request's id.
const NUMBERS_AT_ONCE: usize = 32;
const NUMBER_BYTES: usize = size_of::<u128>();

thread_local! {
    static NUMBERS: RefCell<Vec<u128>> = const { RefCell::new(vec![]) };
}

/// Returns a number from the operating system's source, each one once.
#[must_use]
pub fn number() -> u128 {
    NUMBERS.with_borrow_mut(|numbers| {
        if numbers.is_empty() {
            let mut bytes = [0; NUMBERS_AT_ONCE * NUMBER_BYTES];
            getrandom::fill(&mut bytes).expect("the operating system has random numbers");
            let (chunks, _) = bytes.as_chunks::<NUMBER_BYTES>();
            numbers.extend(chunks.iter().copied().map(u128::from_ne_bytes));
        }
        numbers.pop().expect("it was filled")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_number_comes_twice() {
        let count = 3 * NUMBERS_AT_ONCE;
        let threads: Vec<_> = (0..4)
            .map(|_| std::thread::spawn(move || (0..count).map(|_| number()).collect::<Vec<_>>()))
            .collect();
        let numbers = threads.into_iter().flat_map(|thread| thread.join().unwrap());
        assert_eq!(numbers.collect::<HashSet<_>>().len(), 4 * count);
    }
}
