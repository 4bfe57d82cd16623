//! Calls to one agent's control port: opening and closing sessions, and fetching model files.
//!
//! It translates requests and bounds the wait; callers decide when to call.

use std::{collections::BTreeMap, time::Duration};

use proto::{
    id::SessionKey,
    load::{ModelFiles, Retention, Session},
    model_files::{self, FilesHasher},
    v1::{self, worker_agent_client::WorkerAgentClient},
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use super::tokenizer_files::TokenizerFiles;

/// Longest time for a call. An engine opens a session in under 1 ms once it reads its queue, but a
/// long prefill keeps it from reading for seconds.
const CALL_MAX: Duration = Duration::from_secs(10);

/// The client of one agent. Connects at the first call, and again after a failure.
#[derive(Debug, Clone)]
pub(crate) struct Control(WorkerAgentClient<Channel>);

/// A request to open a session.
#[derive(Debug, Clone)]
pub(crate) struct OpenRequest {
    pub(crate) key: SessionKey,
    pub(crate) retention: Option<Retention>,
    pub(crate) idle_ms_max: Option<u64>,
}

impl Control {
    pub(crate) fn new(endpoint: &Endpoint) -> Self {
        Self(WorkerAgentClient::new(endpoint.connect_lazy()))
    }

    /// Opens the session on the rank, or returns the one that is already open.
    pub(crate) async fn open(
        &self,
        open_request: &OpenRequest,
        dp_rank: u32,
    ) -> Result<Session, Status> {
        let request = v1::OpenSessionRequest {
            key: Some((&open_request.key).into()),
            retention: open_request.retention.map_or(0, Retention::to_wire),
            idle_ms_max: open_request.idle_ms_max.unwrap_or(0),
            dp_rank: Some(dp_rank),
        };
        let mut client = self.0.clone();
        let answer = bounded(client.open_session(request)).await?.into_inner();
        Session::try_from(answer)
            .map_err(|error| Status::internal(format!("the agent's answer is invalid: {error}")))
    }

    /// Closes the session. Returns whether it closes only after a running turn.
    pub(crate) async fn close(&self, key: &SessionKey) -> Result<bool, Status> {
        let request = v1::CloseSessionRequest { key: Some(key.into()) };
        let mut client = self.0.clone();
        Ok(bounded(client.close_session(request)).await?.into_inner().deferred)
    }

    /// Fetches the files of the agent's model, and checks their hash.
    pub(crate) async fn model_files(&self, named: ModelFiles) -> Result<TokenizerFiles, Status> {
        let other = || Status::internal("the files are not those that the agent described");
        if named.bytes > model_files::BYTES_MAX {
            return Err(Status::out_of_range("the files are larger than the router's limit"));
        }
        let request = v1::FetchModelFilesRequest { hash: named.hash.to_vec() };
        let mut client = self.0.clone();
        let mut parts = client.fetch_model_files(request).await?.into_inner();
        let (mut files, mut left) = (BTreeMap::<String, Vec<u8>>::new(), named.bytes);
        while let Some(part) = parts.message().await? {
            if ![model_files::TOKENIZER, model_files::CONFIG, model_files::TEMPLATE]
                .contains(&&*part.name)
            {
                return Err(other());
            }
            left = left.checked_sub(part.data.len() as u64).ok_or_else(other)?;
            files.entry(part.name).or_default().extend(part.data);
        }
        let mut hasher = FilesHasher::default();
        for (name, data) in &files {
            hasher.begin_file(name, data.len() as u64);
            hasher.update(data);
        }
        if hasher.finish() != named {
            return Err(other());
        }
        let template = files.remove(model_files::TEMPLATE).map(String::from_utf8).transpose();
        Ok(TokenizerFiles {
            tokenizer: files.remove(model_files::TOKENIZER).unwrap_or_default(),
            config: files.remove(model_files::CONFIG).unwrap_or_default(),
            template: template.map_err(|_| other())?,
        })
    }
}

async fn bounded<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    match tokio::time::timeout(CALL_MAX, call).await {
        Ok(answer) => answer,
        Err(_) => Err(Status::deadline_exceeded("the agent did not answer in time")),
    }
}
