//! Tells systemd, if it started the process, when the process serves, lives and stops.
//!
//! Only where systemd names a socket in the environment of its service (`Type=notify`).

use std::{
    io,
    sync::mpsc::{self, SyncSender},
    time::{Duration, Instant},
};

use sd_notify::NotifyState;

use crate::clock::now;

/// To call once the ports are open and the tasks run.
pub fn tell_ready() {
    tell(&NotifyState::Ready);
}

pub fn tell_stopping() {
    tell(&NotifyState::Stopping);
}

/// Is fed by the loop without which the process is of no use: if that loop hangs, systemd restarts
/// the process after `WatchdogSec`. A thread of its own sends, so that the loop never waits.
#[derive(Debug)]
pub struct Watchdog {
    /// `None` if systemd wants no signs of life.
    fed: Option<Fed>,
}

#[derive(Debug)]
struct Fed {
    interval: Duration,
    next_due: Instant,
    /// Holds at most one sign of life: two that wait say no more than one.
    signs: SyncSender<()>,
}

impl Watchdog {
    pub fn start() -> io::Result<Self> {
        match sd_notify::watchdog_enabled() {
            Some(limit) => Self::with(limit, || tell(&NotifyState::Watchdog)),
            None => Ok(Self { fed: None }),
        }
    }

    /// Calls `send` twice within `limit` if the loop runs.
    fn with(limit: Duration, send: impl Fn() + Send + 'static) -> io::Result<Self> {
        let (signs, received) = mpsc::sync_channel(1);
        std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            for () in received {
                send();
            }
        })?;
        Ok(Self { fed: Some(Fed { interval: limit / 2, next_due: now(), signs }) })
    }

    /// Returns when the loop must call [`Self::feed`] next, or `None` if nobody waits for that.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.fed.as_ref().map(|fed| fed.next_due)
    }

    /// The loop calls this each time it has done its work.
    pub fn feed(&mut self, now: Instant) {
        if let Some(fed) = &mut self.fed
            && now >= fed.next_due
        {
            fed.next_due = now + fed.interval;
            // If the last sign still waits for systemd, it serves for this one too.
            let _ = fed.signs.try_send(());
        }
    }
}

fn tell(state: &NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(state)) {
        tracing::warn!(%error, state = %state, "can't notify systemd; see NOTIFY_SOCKET");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);
    const WAIT_MAX: Duration = Duration::from_secs(10);

    #[test]
    fn a_loop_that_runs_gives_a_sign_twice_within_the_limit() {
        let (sent, received) = mpsc::channel();
        let mut watchdog = Watchdog::with(LIMIT, move || sent.send(()).unwrap()).unwrap();
        let start = watchdog.next_due().unwrap();
        watchdog.feed(start);
        received.recv_timeout(WAIT_MAX).unwrap();
        assert_eq!(watchdog.next_due(), Some(start + LIMIT / 2));
        watchdog.feed(start + LIMIT / 2);
        received.recv_timeout(WAIT_MAX).unwrap();
    }

    #[test]
    fn signs_are_no_more_than_systemd_needs_and_a_hung_loop_gives_none() {
        let (sent, received) = mpsc::channel();
        let mut watchdog = Watchdog::with(LIMIT, move || sent.send(()).unwrap()).unwrap();
        let start = watchdog.next_due().unwrap();
        for passed in 0..10 {
            watchdog.feed(start + Duration::from_secs(passed));
        }
        // Its thread ends, after it has sent all.
        drop(watchdog);
        assert_eq!(received.iter().count(), 1);
    }

    #[test]
    fn a_loop_never_waits_for_systemd() {
        let (let_go, held) = mpsc::channel::<()>();
        let mut watchdog = Watchdog::with(LIMIT, move || {
            let _ = held.recv();
        })
        .unwrap();
        let start = watchdog.next_due().unwrap();
        for sign in 0..8 {
            watchdog.feed(start + LIMIT * sign);
        }
        drop(let_go);
    }

    #[test]
    fn without_systemd_nothing_is_due() {
        let mut watchdog = Watchdog { fed: None };
        assert_eq!(watchdog.next_due(), None);
        watchdog.feed(now());
    }
}
