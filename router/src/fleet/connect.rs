//! One task per configured agent, which follows the agent's load stream and updates the view.
//!
//! It connects to the agent's control port. Between streams it keeps only the backoff.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::v1::{WatchLoadRequest, worker_agent_client::WorkerAgentClient};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tracing::debug;

use super::{agent::Link, load_stream::LoadStream, state::Update, view::View};
use crate::backoff::Backoff;

/// Number of load reports, about ten seconds of them, for which the stream of a duplicate agent id
/// is kept open. The other agent may be about to leave, and reconnecting transfers the whole
/// session table.
const REJECTED_REPORTS_MAX: u32 = 20;

/// A host that dies silently is noticed after the sum of these two: about when its silence makes
/// its workers stale.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The task that follows one agent.
#[derive(Debug)]
pub(crate) struct LoadWatcher {
    pub(crate) agent: usize,
    pub(crate) endpoint: Endpoint,
    pub(crate) connect_max: Duration,
    pub(crate) sessions_max: usize,
    pub(crate) updates: mpsc::Sender<(usize, Update, Instant)>,
    pub(crate) view: Arc<View>,
}

/// Returns the endpoint of a control port, with keepalive so that a dead host is noticed.
///
/// # Errors
/// If the address is invalid; the settings are checked for that.
pub(crate) fn endpoint(
    control: &str,
    connect_max: Duration,
) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(control.to_owned())?
        .connect_timeout(connect_max)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .tcp_nodelay(true))
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
            let mut checker = LoadStream::new(self.sessions_max);
            let why = self.follow_once(&mut checker).await;
            debug!(agent = self.agent, why, "stream ended");
            let was_accepted = checker.is_live() && self.rejection().is_none();
            if self.send(Update::Lost(why)).await.is_err() {
                return;
            }
            if was_accepted {
                backoff.reset();
            }
            backoff.pause().await;
        }
    }

    /// Follows one stream to its end. Returns why it ended.
    async fn follow_once(&self, checker: &mut LoadStream) -> String {
        // The limit includes name resolution and the HTTP/2 handshake; the connector's own doesn't.
        let open_stream = async {
            let channel = self.endpoint.connect().await.map_err(|error| describe_error(&error))?;
            let mut client = WorkerAgentClient::new(channel);
            let stream = client.watch_load(WatchLoadRequest {}).await;
            stream.map_err(|status| format!("{:?}: {}", status.code(), status.message()))
        };
        let mut stream = match tokio::time::timeout(self.connect_max, open_stream).await {
            Ok(Ok(response)) => response.into_inner(),
            Ok(Err(why)) => return why,
            Err(_) => return format!("no answer within {} ms", self.connect_max.as_millis()),
        };
        let (mut heard, mut reports_while_rejected) = (false, 0);
        loop {
            let next = stream.message();
            let mut next = std::pin::pin!(next);
            let first = tokio::time::timeout(self.connect_max, &mut next);
            let message = match if heard { Err(()) } else { first.await.map_err(drop) } {
                Ok(message) => message,
                Err(()) => {
                    if !heard {
                        // The agent waits for its engine. Until then it counts as lost, so that no
                        // turn waits for it.
                        let why = "the agent has not reached its engine yet".to_owned();
                        if self.send(Update::Lost(why)).await.is_err() {
                            return "the view ended".to_owned();
                        }
                    }
                    next.await
                }
            };
            heard = true;
            let event = match message {
                Ok(Some(event)) => event,
                Ok(None) => return "the agent ended the stream".to_owned(),
                Err(status) => return format!("{:?}: {}", status.code(), status.message()),
            };
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

    /// Returns the reason if the view rejects this agent as a duplicate agent id. Once the other
    /// agent is gone, this one is needed with its whole session table, so its stream must start
    /// again.
    fn rejection(&self) -> Option<String> {
        match &self.view.load().agents[self.agent].link {
            Link::Lost { why, duplicate_id: true, .. } => Some(why.clone()),
            Link::Lost { .. } | Link::Dialing | Link::Up => None,
        }
    }

    async fn send(&self, update: Update) -> Result<(), ()> {
        let now = service::clock::now();
        self.updates.send((self.agent, update, now)).await.map_err(drop)
    }
}

/// Formats an error and its sources on one line.
pub(crate) fn describe_error(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
