//! A log of recent entries, bounded in bytes, for readers that read at different speeds. Pure.
//!
//! The log has no lock and wakes no reader.

use std::{collections::VecDeque, sync::Arc};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dropped;

#[derive(Debug)]
pub(super) struct BoundedLog<T> {
    entries: VecDeque<(usize, Arc<T>)>,
    oldest_number: u64,
    bytes: usize,
    bytes_max: usize,
}

impl<T> BoundedLog<T> {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { entries: VecDeque::new(), oldest_number: 0, bytes: 0, bytes_max }
    }

    pub(super) fn next_number(&self) -> u64 {
        self.oldest_number + self.entries.len() as u64
    }

    /// An entry above the bound is dropped at once.
    pub(super) fn push(&mut self, entry: T, bytes: usize) {
        self.entries.push_back((bytes, Arc::new(entry)));
        self.bytes += bytes;
        while self.bytes > self.bytes_max {
            let (bytes, _) = self.entries.pop_front().expect("bytes are counted per entry");
            self.bytes -= bytes;
            self.oldest_number += 1;
        }
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }

    /// `None` if the entry doesn't exist yet.
    pub(super) fn get(&self, number: u64) -> Result<Option<Arc<T>>, Dropped> {
        let index = number.checked_sub(self.oldest_number).ok_or(Dropped)?;
        let entry = usize::try_from(index).ok().and_then(|index| self.entries.get(index));
        Ok(entry.map(|(_, entry)| Arc::clone(entry)))
    }

    fn check_invariants(&self) {
        let bytes: usize = self.entries.iter().map(|(bytes, _)| bytes).sum();
        assert_eq!(self.bytes, bytes, "`bytes` is the sum over all entries");
        assert!(self.bytes <= self.bytes_max, "the bound holds");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_all_or_knows_that_it_missed_some() {
        let mut log = BoundedLog::new(100);
        assert_eq!((log.next_number(), log.get(0)), (0, Ok(None)));
        for entry in 0..10 {
            log.push(entry, 10);
        }
        assert_eq!(log.get(0), Ok(Some(Arc::new(0))));
        log.push(10, 25);
        assert_eq!(log.get(2), Err(Dropped));
        let all: Vec<i32> = (3..11).map(|number| *log.get(number).unwrap().unwrap()).collect();
        assert_eq!(all, (3..11).collect::<Vec<_>>());
        // The entry is larger than the whole bound, so no reader gets it.
        log.push(11, 101);
        assert_eq!((log.next_number(), log.get(11), log.get(12)), (12, Err(Dropped), Ok(None)));
    }
}
