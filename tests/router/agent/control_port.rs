//! The control port of the minimal agent: sessions, the load stream, resident blocks, model files.

use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering},
};

use contract::{
    id::SessionKey,
    load::{ModelFiles, Retention, SessionState},
    model_files,
    v1::{self, load_event::Event, worker_agent_server::WorkerAgent},
};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::Status;

use super::AgentState;

/// The control port.
pub(super) struct Service(pub(super) Arc<AgentState>);

#[tonic::async_trait]
impl WorkerAgent for Service {
    type WatchLoadStream = Pin<Box<dyn Stream<Item = Result<v1::LoadEvent, Status>> + Send>>;
    type WatchKvStream = Pin<Box<dyn Stream<Item = Result<v1::KvEvent, Status>> + Send>>;
    type FetchModelFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::ModelFilePart, Status>> + Send>>;

    async fn describe(
        &self,
        _: tonic::Request<v1::DescribeRequest>,
    ) -> Result<tonic::Response<v1::Description>, Status> {
        Ok(tonic::Response::new(self.0.description()))
    }

    async fn open_session(
        &self,
        request: tonic::Request<v1::OpenSessionRequest>,
    ) -> Result<tonic::Response<v1::Session>, Status> {
        let request = request.into_inner();
        if self.0.full.load(Ordering::Relaxed) {
            return Err(Status::resource_exhausted("rows are short"));
        }
        let key = SessionKey::try_from(request.key.unwrap()).unwrap();
        let retention = Retention::from_wire(request.retention).ok();
        let (was_open, session) = {
            let mut sessions = self.0.sessions.lock();
            let was_open = sessions.contains_key(&key);
            let opened = || self.0.fresh(&key, retention, true);
            (was_open, sessions.entry(key.clone()).or_insert_with(opened).clone())
        };
        self.0.changed(session.clone());
        if self.0.loses_answers.load(Ordering::Relaxed) {
            return Err(Status::unavailable("the connection broke"));
        }
        if self.0.holds_answers.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        Ok(tonic::Response::new(v1::Session { was_open, ..session.into() }))
    }

    async fn close_session(
        &self,
        request: tonic::Request<v1::CloseSessionRequest>,
    ) -> Result<tonic::Response<v1::CloseSessionResponse>, Status> {
        let key = SessionKey::try_from(request.into_inner().key.unwrap()).unwrap();
        let mut sessions = self.0.sessions.lock();
        let Some(session) = sessions.get_mut(&key) else { return Err(Status::not_found("none")) };
        let deferred = session.turns_running > 0;
        if deferred {
            session.state = SessionState::Closing;
            let session = session.clone();
            drop(sessions);
            self.0.changed(session);
        } else {
            sessions.remove(&key);
            drop(sessions);
            self.0.removed(&key);
        }
        Ok(tonic::Response::new(v1::CloseSessionResponse { deferred }))
    }

    async fn demote_session(
        &self,
        _: tonic::Request<v1::DemoteSessionRequest>,
    ) -> Result<tonic::Response<v1::DemoteSessionResponse>, Status> {
        Err(Status::unimplemented("this agent has no such call"))
    }

    async fn prefetch_session(
        &self,
        _: tonic::Request<v1::PrefetchSessionRequest>,
    ) -> Result<tonic::Response<v1::PrefetchSessionResponse>, Status> {
        Err(Status::unimplemented("this agent has no such call"))
    }

    async fn claim_placement(
        &self,
        request: tonic::Request<v1::ClaimPlacementRequest>,
    ) -> Result<tonic::Response<v1::PlacementClaim>, Status> {
        let claim_request = request.into_inner().try_into().unwrap();
        let claim = self.0.claims.lock().claim(claim_request, service::clock::now()).unwrap();
        Ok(tonic::Response::new(claim.into()))
    }

    async fn audit(
        &self,
        _: tonic::Request<v1::AuditRequest>,
    ) -> Result<tonic::Response<v1::AuditResponse>, Status> {
        Err(Status::unimplemented("not used by the router"))
    }

    async fn list_sessions(
        &self,
        _: tonic::Request<v1::ListSessionsRequest>,
    ) -> Result<tonic::Response<v1::ListSessionsResponse>, Status> {
        Err(Status::unimplemented("not used by the router"))
    }

    async fn watch_load(
        &self,
        _: tonic::Request<v1::WatchLoadRequest>,
    ) -> Result<tonic::Response<Self::WatchLoadStream>, Status> {
        let (send, events) = mpsc::channel(1024);
        let mut watchers = self.0.watchers.lock();
        let sessions: Vec<v1::Session> =
            self.0.sessions.lock().values().cloned().map(Into::into).collect();
        let first = [
            Event::Description(self.0.description()),
            Event::Sessions(v1::SessionTable { sessions, last: true }),
            Event::Report(self.0.report()),
        ];
        for (sequence, event) in (0..).zip(first) {
            send.try_send(AgentState::event(sequence, event)).unwrap();
        }
        watchers.push((3, send));
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn watch_kv(
        &self,
        _: tonic::Request<v1::WatchKvRequest>,
    ) -> Result<tonic::Response<Self::WatchKvStream>, Status> {
        let mut kv = self.0.kv.lock();
        if kv.batches.is_empty() {
            return Err(Status::failed_precondition("the engine publishes no KV events"));
        }
        let (send, events) = mpsc::channel(1000);
        for at in 0..kv.batches.len() {
            send.try_send(Ok(kv.event(at))).unwrap();
        }
        kv.watchers.push(send);
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn drain(
        &self,
        _: tonic::Request<v1::DrainRequest>,
    ) -> Result<tonic::Response<v1::DrainState>, Status> {
        Err(Status::unimplemented("not used by the router"))
    }

    async fn prove(
        &self,
        _: tonic::Request<v1::ProveRequest>,
    ) -> Result<tonic::Response<v1::ProveResponse>, Status> {
        Err(Status::unimplemented("it has no token"))
    }

    async fn fetch_model_files(
        &self,
        request: tonic::Request<v1::FetchModelFilesRequest>,
    ) -> Result<tonic::Response<Self::FetchModelFilesStream>, Status> {
        assert_eq!(request.into_inner().hash, described_files().hash);
        if self.0.fetches.fetch_add(1, Ordering::Relaxed) == 0 {
            return Err(Status::resource_exhausted("others fetch"));
        }
        let (send, parts) = mpsc::channel(1000);
        for (name, data) in MODEL {
            for data in data.chunks(1000) {
                let part = v1::ModelFilePart { name: name.to_owned(), data: data.to_vec() };
                send.try_send(Ok(part)).unwrap();
            }
        }
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(parts))))
    }
}

/// The model's files, in the order of their names.
const MODEL: [(&str, &[u8]); 3] = [
    (model_files::CHAT_TEMPLATE, include_bytes!("../../data/model/chat_template.jinja")),
    (model_files::TOKENIZER, include_bytes!("../../data/model/tokenizer.json")),
    (model_files::TOKENIZER_CONFIG, include_bytes!("../../data/model/tokenizer_config.json")),
];

pub(super) fn described_files() -> ModelFiles {
    let mut hasher = model_files::FilesHasher::default();
    for (name, data) in MODEL {
        hasher.begin_file(name, data.len() as u64);
        hasher.update(data);
    }
    hasher.finish()
}
