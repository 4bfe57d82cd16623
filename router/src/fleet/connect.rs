//! Follows the load stream of one agent, and sends what arrives to the view task.
//!
//! One task per agent connects, follows the stream to its end, pauses, and connects again.

use std::{sync::Arc, time::Duration};

use contract::v1::{LoadEvent, WatchLoadRequest, load_event::Event};
use service::{backoff::Backoff, log::describe_error};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{
    agent::Link,
    dial::{AgentDialer, ProvenConnection, describe_status},
    load_stream::LoadStreamChecker,
    state::Update,
    view::{UpdateSender, View},
    worker::AgentKey,
};

/// Number of load reports after which the stream of a rejected agent is closed; about ten seconds.
/// Not at once, because each new stream begins with the whole session table.
const REJECTED_REPORTS_MAX: u32 = 20;

#[derive(Debug)]
pub(crate) struct LoadWatcher {
    pub(crate) agent: AgentKey,
    pub(crate) dialer: AgentDialer,
    /// Longest time to open a stream, and longest wait for its first event. If the event comes
    /// later, the agent counts as lost until then.
    pub(crate) connect_max: Duration,
    pub(crate) sessions_max: usize,
    pub(crate) updates: UpdateSender,
    /// Says whether it rejects the agent.
    pub(crate) view: Arc<View>,
}

impl LoadWatcher {
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
            debug!(agent = self.agent.slot(), why, "stream ended");
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

    /// Returns why the stream ended.
    async fn follow_once(&self, checker: &mut LoadStreamChecker) -> String {
        // The endpoint's own time limit doesn't include name resolution and the HTTP/2 handshake.
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

    /// The reason if the view rejects this agent. The view ignores its session table. When the
    /// reason is gone, the stream must start again, so that the whole table is sent.
    fn rejection(&self) -> Option<String> {
        match &self.view.load().agent_with(self.agent).link {
            Link::Lost { why, is_rejected: true, .. } => Some(why.clone()),
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

    /// Fails if the view task has ended.
    async fn send(&self, update: Update) -> Result<(), ()> {
        let now = service::clock::now();
        self.updates.send((self.agent, update, now)).await.map_err(drop)
    }
}

/// The reason if an agent describes itself by another id than it has proven. What passes on the
/// proofs of another agent can so take no other place than that agent's.
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
    use contract::v1::Description;

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
