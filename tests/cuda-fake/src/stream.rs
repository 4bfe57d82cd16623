//! Streams and events: work in order, executed at once unless a test holds the stream.

use crate::host::Launch;
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// One piece of a stream's work. Its addresses were checked when it was enqueued.
pub(crate) enum Work {
    Launch(Launch),
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// A write from memory that the caller may reuse, so the bytes were copied when it was
    /// enqueued.
    Write {
        to: u64,
        bytes: Vec<u8>,
    },
    Record {
        event: Arc<Event>,
        turn: u64,
    },
    Wait {
        event: Arc<Event>,
        turn: u64,
    },
}

/// An event: how often it was recorded, and the latest record that was reached.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub(crate) recorded: AtomicU64,
    pub(crate) reached: AtomicU64,
    pub(crate) at: parking_lot::Mutex<Option<Instant>>,
}

impl Event {
    pub(crate) fn is_done(&self) -> bool {
        self.reached.load(Ordering::Relaxed) >= self.recorded.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
pub(crate) struct Stream {
    pub(crate) work: VecDeque<Work>,
    pub(crate) held: bool,
    /// Pieces that may be executed while the stream is held.
    pub(crate) allowance: u64,
}

impl Stream {
    /// Executes the work that is possible now; returns the number of pieces.
    pub(crate) fn advance(&mut self) -> u64 {
        let mut done = 0;
        while !self.held || self.allowance > 0 {
            let Some(work) = self.work.pop_front() else { break };
            if let Work::Wait { event, turn } = &work
                && event.reached.load(Ordering::Relaxed) < *turn
            {
                self.work.push_front(work);
                break;
            }
            work.run();
            self.allowance = self.allowance.saturating_sub(1);
            done += 1;
        }
        done
    }
}

impl Work {
    fn run(self) {
        match self {
            Work::Launch(launch) => launch.run(),
            Work::Copy { to, from, bytes } => {
                // SAFETY: the caller that enqueued the work guaranteed, as to any driver, that both
                // ends stay.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            }
            Work::Write { to, bytes } => {
                // SAFETY: as above.
                unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
            }
            Work::Record { event, turn } => {
                event.reached.fetch_max(turn, Ordering::Relaxed);
                *event.at.lock() = Some(now());
            }
            Work::Wait { .. } => {}
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a driver's events have the time of its own clock")]
fn now() -> Instant {
    Instant::now()
}
