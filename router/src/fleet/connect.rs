//! Follows the load stream of one agent, and sends what arrives to the view task.
//!
//! An agent runs beside each engine. Its *load stream* on its control port carries its description,
//! its sessions and its load reports. One task per configured agent connects, follows the stream to
//! its end, pauses, and connects again. The *view task* of `view` applies the updates of all
//! agents. `load_stream` checks the order of the events. Calls to an agent are in `control`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::v1::{LoadEvent, WatchLoadRequest, load_event::Event};
use service::{backoff::Backoff, log::describe_error};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{
    agent::Link,
    dial::{AgentDialer, ProvenConnection, describe_status},
    load_stream::LoadStreamChecker,
    state::Update,
    view::View,
};

/// Number of load reports after which the stream of a rejected agent is closed; about ten seconds.
/// An agent is rejected while an agent at another address has the same id. The stream isn't closed
/// at once, because each new stream begins with the whole session table.
const REJECTED_REPORTS_MAX: u32 = 20;

/// The task that follows one agent.
#[derive(Debug)]
pub(crate) struct LoadWatcher {
    /// Index of the agent in the configured list.
    pub(crate) agent_index: usize,
    /// The agent's control port.
    pub(crate) dialer: AgentDialer,
    /// Longest time to open a stream. Also the longest wait for the stream's first event. If the
    /// event comes later, the agent counts as lost until then.
    pub(crate) connect_max: Duration,
    /// Most sessions of the agent that the view keeps.
    pub(crate) sessions_max: usize,
    /// Mailbox of the view task: the agent's index, the update, and when it arrived.
    pub(crate) updates: mpsc::Sender<(usize, Update, Instant)>,
    /// The view, which says whether it rejects the agent.
    pub(crate) view: Arc<View>,
}

impl LoadWatcher {
    /// Follows the agent until it is cancelled.
    pub(crate) async fn run(self, token: CancellationToken) {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = self.run_forever() => {}
        }
    }

    async fn run_forever(self) {
        let mut backoff = Backoff::default();
        loop {
            let mut checker = LoadStreamChecker::new(self.sessions_max);
            let why = self.follow_once(&mut checker).await;
            debug!(agent = self.agent_index, why, "stream ended");
            let was_accepted = checker.is_live() && self.rejection().is_none();
            if self.send(Update::AgentLost(why)).await.is_err() {
                return;
            }
            if was_accepted {
                backoff.reset();
            }
            backoff.pause().await;
        }
    }

    /// Follows one stream to its end. Returns why it ended.
    async fn follow_once(&self, checker: &mut LoadStreamChecker) -> String {
        // The endpoint's own time limit doesn't include name resolution and the HTTP/2 handshake.
        // So the whole attempt has a limit too.
        let open_stream = async {
            let ProvenConnection { mut client, agent_id } = self.dialer.connect().await?;
            let stream = client.watch_load(WatchLoadRequest {}).await;
            stream.map(|stream| (stream, agent_id)).map_err(|status| describe_status(&status))
        };
        let opened = tokio::time::timeout(self.connect_max, open_stream).await;
        let (mut stream, proven_id) = match opened {
            Ok(Ok((response, proven_id))) => (response.into_inner(), proven_id),
            Ok(Err(why)) => return why,
            Err(_) => return format!("no answer within {} ms", self.connect_max.as_millis()),
        };
        let (mut was_heard, mut reports_while_rejected) = (false, 0);
        loop {
            let next_event = stream.message();
            let mut next_event = std::pin::pin!(next_event);
            let first_event = tokio::time::timeout(self.connect_max, &mut next_event);
            // Only the wait for the first event has a time limit.
            let message = match if was_heard { Err(()) } else { first_event.await.map_err(drop) } {
                Ok(message) => message,
                Err(()) => {
                    if !was_heard {
                        // The agent waits for its engine before it sends its first event. Until
                        // then it counts as lost, so that no turn waits for it.
                        let why = "the agent has not reached its engine yet".to_owned();
                        if self.send(Update::AgentLost(why)).await.is_err() {
                            return "the view ended".to_owned();
                        }
                    }
                    next_event.await
                }
            };
            was_heard = true;
            let event = match message {
                Ok(Some(event)) => event,
                Ok(None) => return "the agent ended the stream".to_owned(),
                Err(status) => return describe_status(&status),
            };
            if let Some(why) = says_another_id(&event, proven_id.as_deref()) {
                return why;
            }
            match checker.accept(event) {
                Ok(None) => {}
                Ok(Some(update)) => {
                    reports_while_rejected += u32::from(matches!(update, Update::Report(_)));
                    if self.send(update).await.is_err() {
                        return "the view ended".to_owned();
                    }
                }
                Err(error) => return describe_error(&error),
            }
            match self.rejection() {
                Some(why) if reports_while_rejected >= REJECTED_REPORTS_MAX => return why,
                Some(_) => {}
                None => reports_while_rejected = 0,
            }
        }
    }

    /// Returns the reason if the view rejects this agent.
    ///
    /// The view ignores the session table of a rejected agent. When the reason is gone, the stream
    /// of this agent must start again, so that the whole table is sent.
    fn rejection(&self) -> Option<String> {
        match &self.view.load().agents[self.agent_index].link {
            Link::Lost { why, is_rejected: true, .. } => Some(why.clone()),
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

    /// Sends an update to the view task. Returns an error if that task has ended.
    async fn send(&self, update: Update) -> Result<(), ()> {
        let now = service::clock::now();
        self.updates.send((self.agent_index, update, now)).await.map_err(drop)
    }
}

/// Returns the reason if an agent describes itself by another id than it has proven. What passes on
/// the proofs of another agent can so take no other place than that agent's.
fn says_another_id(event: &LoadEvent, proven_id: Option<&str>) -> Option<String> {
    let (Some(Event::Description(description)), Some(proven)) = (&event.event, proven_id) else {
        return None;
    };
    let described = &description.agent_id;
    (described != proven).then(|| {
        format!("the agent calls itself {described:?}, and has proven that it is {proven:?}")
    })
}

#[cfg(test)]
mod tests {
    use proto::v1::Description;

    use super::*;

    #[test]
    fn an_agent_that_passes_on_another_ones_proof_is_found_out() {
        let event = |agent_id: &str| LoadEvent {
            event: Some(Event::Description(Description {
                agent_id: agent_id.to_owned(),
                ..Default::default()
            })),
            ..Default::default()
        };
        assert_eq!(says_another_id(&event("a"), Some("a")), None);
        assert_eq!(says_another_id(&event("a"), None), None);
        assert!(says_another_id(&event("b"), Some("a")).is_some());
        assert_eq!(says_another_id(&LoadEvent::default(), Some("a")), None);
    }
}
