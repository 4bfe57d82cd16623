//! Calls one agent's control port: opens, closes and demotes sessions, and fetches model files.
//!
//! A call to open, close or demote a session has a time limit. A failed call isn't retried here.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use contract::{
    id::SessionKey,
    load::{ModelFiles, Retention, Session},
    model_files::{self, FilesHasher},
    placement_claim::{self, PlacementClaim, PlacementClaimRequest},
    v1,
};
use service::proof::router::AgentClient;
use tokio::sync::OnceCell;
use tonic::{Code, Response, Status};

use super::{
    dial::{AgentDialer, ConnectionEnded},
    tokenizer_files::TokenizerFiles,
    worker::AgentKey,
};

/// Longest time to open, close or demote a session. The engine opens a session in under 1 ms, but
/// reads its queue only between two steps, which a long prefill delays for seconds. An agent gives
/// a demotion up after 5 seconds.
const CALL_TIME_MAX: Duration = Duration::from_secs(10);

/// Connects at the first call, and again when the connection has ended or the agent no longer takes
/// this router's proofs.
#[derive(Debug, Clone)]
pub(crate) struct ControlClient {
    dialer: AgentDialer,
    /// The connection that calls use; empty until it is made.
    current: Arc<ArcSwap<OnceCell<AgentClient>>>,
}

#[derive(Debug)]
pub(crate) struct OpenedAtAgent {
    pub(crate) session: Session,
    /// Perhaps opened by another router.
    pub(crate) was_open: bool,
}

/// Of the agents that are followed.
#[derive(Debug, Default)]
pub(crate) struct ControlClients(ArcSwap<BTreeMap<AgentKey, ControlClient>>);

impl ControlClients {
    pub(crate) fn get(&self, agent: AgentKey) -> Result<ControlClient, Status> {
        let client = self.0.load().get(&agent).cloned();
        client.ok_or_else(|| Status::unavailable("the agent has left the fleet; try again"))
    }

    /// Only one task changes the clients.
    pub(crate) fn insert(&self, agent: AgentKey, client: ControlClient) {
        let mut clients = BTreeMap::clone(&self.0.load());
        clients.insert(agent, client);
        self.0.store(Arc::new(clients));
    }

    pub(crate) fn remove(&self, agent: AgentKey) {
        let mut clients = BTreeMap::clone(&self.0.load());
        clients.remove(&agent);
        self.0.store(Arc::new(clients));
    }
}

#[derive(Debug, Clone)]
pub(crate) struct OpenRequest {
    pub(crate) key: SessionKey,
    /// `None` leaves the choice to the agent.
    pub(crate) retention: Option<Retention>,
    /// `None` leaves the choice to the agent.
    pub(crate) idle_ms_max: Option<u64>,
}

impl ControlClient {
    pub(crate) fn new(dialer: &AgentDialer) -> Self {
        Self { dialer: dialer.clone(), current: Arc::default() }
    }

    /// Makes a call once more over a new connection if the agent has certainly not run it: the
    /// connection had ended, or the proof didn't count.
    async fn call<T, F>(&self, call: impl Fn(AgentClient) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let connection = self.current.load_full();
        let answer = call(self.connect(&connection).await?).await;
        let Err(status) = answer else { return answer.map(Response::into_inner) };
        if !is_not_run(&status) {
            return Err(status);
        }
        // Another call may have replaced it already.
        self.current.compare_and_swap(&connection, Arc::default());
        let client = self.connect(&self.current.load_full()).await?;
        call(client).await.map(Response::into_inner)
    }

    async fn connect(&self, connection: &OnceCell<AgentClient>) -> Result<AgentClient, Status> {
        let make = || async {
            let made = self.dialer.connect().await;
            made.map(|made| made.client).map_err(Status::unavailable)
        };
        connection.get_or_try_init(make).await.cloned()
    }

    /// If the session is already open, returns it.
    pub(crate) async fn open(
        &self,
        open_request: &OpenRequest,
        dp_rank: u32,
    ) -> Result<OpenedAtAgent, Status> {
        let request = v1::OpenSessionRequest {
            key: Some((&open_request.key).into()),
            retention: open_request.retention.map_or(0, Retention::to_wire),
            idle_ms_max: open_request.idle_ms_max.unwrap_or(0),
            dp_rank: Some(dp_rank),
        };
        let open = |mut client: AgentClient| {
            let request = request.clone();
            async move { client.open_session(request).await }
        };
        let answer = with_time_limit(self.call(open)).await?;
        let was_open = answer.was_open;
        let session = Session::try_from(answer).map_err(|error| invalid_answer(&error))?;
        Ok(OpenedAtAgent { session, was_open })
    }

    /// Returns whether a turn still runs, after which the session closes.
    pub(crate) async fn close(&self, key: &SessionKey) -> Result<bool, Status> {
        Ok(with_time_limit(self.send_close(key, false)).await?.deferred)
    }

    /// Returns whether the session was closed: not if a turn of it runs or waits.
    pub(crate) async fn close_if_idle(&self, key: &SessionKey) -> Result<bool, Status> {
        match with_time_limit(self.send_close(key, true)).await {
            Ok(_) => Ok(true),
            Err(status) if matches!(status.code(), Code::NotFound | Code::FailedPrecondition) => {
                Ok(false)
            }
            Err(status) => Err(status),
        }
    }

    /// The session's KV goes to the engine's radix tree, and its history stays. Returns when that
    /// is done.
    pub(crate) async fn demote(&self, key: &SessionKey) -> Result<(), Status> {
        let demote = |mut client: AgentClient| {
            let request = v1::DemoteSessionRequest { key: Some(key.into()) };
            async move { client.demote_session(request).await }
        };
        with_time_limit(self.call(demote)).await.map(drop)
    }

    /// Returns how many tokens of the session's KV begin to be loaded from the host's memory.
    pub(crate) async fn prefetch(&self, key: &SessionKey) -> Result<u64, Status> {
        let prefetch = |mut client: AgentClient| {
            let request = v1::PrefetchSessionRequest { key: Some(key.into()) };
            async move { client.prefetch_session(request).await }
        };
        Ok(with_time_limit(self.call(prefetch)).await?.tokens)
    }

    async fn send_close(
        &self,
        key: &SessionKey,
        only_if_idle: bool,
    ) -> Result<v1::CloseSessionResponse, Status> {
        let close = |mut client: AgentClient| {
            let request = v1::CloseSessionRequest { key: Some(key.into()), only_if_idle };
            async move { client.close_session(request).await }
        };
        self.call(close).await
    }

    /// Has no time limit: the caller has a deadline.
    pub(crate) async fn claim(
        &self,
        request: PlacementClaimRequest,
    ) -> Result<PlacementClaim, Status> {
        let request = v1::ClaimPlacementRequest::from(request);
        let claim = |mut client: AgentClient| {
            let request = request.clone();
            async move { client.claim_placement(request).await }
        };
        let answer = self.call(claim).await?;
        answer.try_into().map_err(|error: placement_claim::Error| invalid_answer(&error))
    }

    /// Files with another total size or hash than `described_files` are an error.
    pub(crate) async fn model_files(
        &self,
        described_files: ModelFiles,
    ) -> Result<TokenizerFiles, Status> {
        let mismatch = || Status::internal("the files are not those that the agent described");
        if described_files.bytes > model_files::BYTES_MAX {
            return Err(Status::out_of_range("the files are larger than the router's limit"));
        }
        let fetch = |mut client: AgentClient| {
            let request = v1::FetchModelFilesRequest { hash: described_files.hash.to_vec() };
            async move { client.fetch_model_files(request).await }
        };
        let mut parts = self.call(fetch).await?;
        let (mut files, mut bytes_left) =
            (BTreeMap::<String, Vec<u8>>::new(), described_files.bytes);
        while let Some(part) = parts.message().await? {
            if ![model_files::TOKENIZER, model_files::TOKENIZER_CONFIG, model_files::CHAT_TEMPLATE]
                .contains(&&*part.name)
            {
                return Err(mismatch());
            }
            bytes_left = bytes_left.checked_sub(part.data.len() as u64).ok_or_else(mismatch)?;
            files.entry(part.name).or_default().extend(part.data);
        }
        let mut hasher = FilesHasher::default();
        for (name, data) in &files {
            hasher.begin_file(name, data.len() as u64);
            hasher.update(data);
        }
        if hasher.finish() != described_files {
            return Err(mismatch());
        }
        let template = files.remove(model_files::CHAT_TEMPLATE).map(String::from_utf8).transpose();
        Ok(TokenizerFiles {
            tokenizer: files.remove(model_files::TOKENIZER).unwrap_or_default(),
            config: files.remove(model_files::TOKENIZER_CONFIG).unwrap_or_default(),
            template: template.map_err(|_| mismatch())?,
        })
    }
}

fn is_not_run(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<ConnectionEnded>() {
            return true;
        }
        source = error.source();
    }
    status.code() == Code::Unauthenticated
}

fn invalid_answer(error: &dyn std::error::Error) -> Status {
    Status::internal(format!("the agent's answer is invalid: {error}"))
}

async fn with_time_limit<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(CALL_TIME_MAX, call).await {
        // The agent didn't send this status: its connection broke, or could not be made. The gRPC
        // library gives that different codes, by what it was doing.
        Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
            Err(Status::unavailable(status.message()))
        }
        Ok(answer) => answer,
        Err(_) => Err(Status::deadline_exceeded("the agent did not answer in time")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::dial::AgentCredentials;

    #[tokio::test]
    async fn calls_for_an_agent_that_has_left_do_not_reach_the_next_one_in_its_slot() {
        let (clients, old) = (ControlClients::default(), AgentKey::first(0));
        let dialer = |url| AgentDialer::new(url, &AgentCredentials::default(), CALL_TIME_MAX);
        let client = |url| ControlClient::new(&dialer(url).expect("it is a URL"));
        clients.insert(old, client("http://old:1"));
        clients.remove(old);
        clients.insert(old.next(), client("http://new:1"));
        let refused = clients.get(old).expect_err("it has left");
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(clients.get(old.next()).is_ok());
        // The end of the old one may come late.
        clients.remove(old);
        assert!(clients.get(old.next()).is_ok());
    }
}
