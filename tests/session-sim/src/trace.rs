//! The trace of a run: the last events for a reader, a digest of all events for comparison.

use std::{collections::VecDeque, time::Duration};

/// How many events are shown with a broken promise.
const SHOWN: usize = 30;

#[derive(Debug)]
pub(super) struct RunTrace {
    steps: u64,
    digest: u64,
    last: VecDeque<String>,
    echo: Option<fn(&str)>,
}

impl RunTrace {
    pub(super) fn new(echo: Option<fn(&str)>) -> RunTrace {
        RunTrace { steps: 0, digest: 0xcbf2_9ce4_8422_2325, last: VecDeque::new(), echo }
    }

    pub(super) fn add(&mut self, now: Duration, text: &str) {
        self.steps += 1;
        let line = format!("{:>6} {:>9.4} {text}", self.steps, now.as_secs_f64());
        for byte in line.bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if let Some(echo) = self.echo {
            echo(&line);
        }
        if self.last.len() == SHOWN {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    pub(super) fn last(&self) -> Vec<String> {
        self.last.iter().cloned().collect()
    }
}
