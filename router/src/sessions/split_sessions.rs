//! Mends sessions that two agents have: keeps one of them, and closes the others.
//!
//! Routers that disagree for a moment about which agents live may claim a session at two of them.
//! All routers read both in the agents' tables, and choose the same one to keep. A session that
//! moves is also on two workers, until its first turn on the new one has begun to answer. So
//! nothing is closed while a turn of the session runs anywhere; the agent checks that again.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use contract::id::SessionKey;
use service::clock::now;
use tokio_util::sync::CancellationToken;

use super::{
    directory::SessionDirectory,
    lifecycle::Lifecycle,
    status::{self, Split},
};
use crate::fleet::{snapshot::Snapshot, worker::WorkerRef};

/// Tables lag by milliseconds, and the next turn of a chat comes after seconds.
const AT_REST_MIN: Duration = Duration::from_secs(1);
/// The time to the next look at what can't be mended yet.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// The wait for a session that two agents have. Any long time will do.
const LONG: Duration = Duration::from_secs(3600);

/// What was judged of each session, and since when.
type Judged = HashMap<SessionKey, (Split, Instant)>;

pub(crate) async fn run(
    directory: Arc<SessionDirectory>,
    sessions: Arc<Lifecycle>,
    token: CancellationToken,
) {
    let mut judged = Judged::new();
    let mend = async {
        loop {
            let has_splits = |view: &Snapshot| !view.sessions.splits().is_empty();
            let view = directory.wait_for(now() + LONG, has_splits).await;
            for (key, split) in judge(&mut judged, &view, now()) {
                mend(&directory, &sessions, &key, &split);
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = mend => {}
    }
}

/// Returns the sessions whose judgement is old enough.
fn judge(judged: &mut Judged, view: &Snapshot, now: Instant) -> Vec<(SessionKey, Split)> {
    let splits = view.sessions.splits();
    judged.retain(|key, _| splits.contains(key));
    let mut due = vec![];
    for key in splits {
        let Some(split) = status::judge_split(key, view, now) else {
            judged.remove(key);
            continue;
        };
        let (known, since) = judged.entry(key.clone()).or_insert_with(|| (split.clone(), now));
        if *known != split {
            (*known, *since) = (split, now);
        } else if now.saturating_duration_since(*since) >= AT_REST_MIN {
            // If a close fails, the session is judged again.
            *since = now;
            due.push((key.clone(), split));
        }
    }
    due
}

fn mend(directory: &SessionDirectory, sessions: &Lifecycle, key: &SessionKey, split: &Split) {
    let is_at_rest = directory.step(|bindings, now| match bindings.get(key, now) {
        Some(binding) if binding.turns > 0 => false,
        Some(binding) if binding.worker.agent != split.keeper.agent => {
            bindings.rebind(key, split.keeper);
            true
        }
        Some(_) | None => true,
    });
    if is_at_rest {
        split.others.iter().for_each(|&other: &WorkerRef| sessions.close_split(key.clone(), other));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{
        state::Update,
        testing::{fleet, start},
        worker::AgentKey,
    };
    use contract::load::{Retention, Session, SessionState};

    fn session(began_unix_ms: u64, turns_running: u32) -> Session {
        Session {
            key: SessionKey::new("p", "s").unwrap(),
            retention: Retention::Tagged,
            state: if turns_running > 0 { SessionState::Running } else { SessionState::Idle },
            dp_rank: 0,
            turns: 1,
            turns_running,
            exclusive: false,
            resident_tokens: None,
            idle: Duration::ZERO,
            full_history: true,
            volatile_prefix: None,
            began_unix_ms,
            parent: None,
        }
    }

    #[test]
    fn a_session_is_mended_once_it_has_been_at_rest_for_a_while() {
        let now = start();
        let mut state = fleet(&[(0, 0), (0, 0)], now);
        let mut judged = Judged::new();
        state.apply(AgentKey::first(0), Update::SessionChanged(session(20, 0)), now);
        assert!(judge(&mut judged, &state.snapshot(), now).is_empty());
        // A turn runs on one of them.
        state.apply(AgentKey::first(1), Update::SessionChanged(session(10, 1)), now);
        assert!(judge(&mut judged, &state.snapshot(), now).is_empty());
        let rested = now + 10 * AT_REST_MIN;
        assert!(judge(&mut judged, &state.snapshot(), rested).is_empty(), "a turn runs");
        state.apply(AgentKey::first(1), Update::SessionChanged(session(10, 0)), rested);
        assert!(judge(&mut judged, &state.snapshot(), rested).is_empty(), "it has just ended");
        let due = judge(&mut judged, &state.snapshot(), rested + AT_REST_MIN);
        let [(_, split)] = &due[..] else { panic!("{due:?}") };
        assert_eq!(
            (split.keeper.agent.slot(), split.others[0].agent.slot()),
            (1, 0),
            "the older one stays"
        );
        let key = session(0, 0).key;
        state.apply(AgentKey::first(0), Update::SessionRemoved(key), rested);
        assert!(judge(&mut judged, &state.snapshot(), rested + 9 * AT_REST_MIN).is_empty());
        assert!(judged.is_empty());
    }
}
