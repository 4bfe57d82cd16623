//! Serves the control port: the gRPC service through which routers watch and control an agent.
//!
//! The service only translates: requests go to the owner task, and block changes come from
//! [`crate::kv_events`]. Only the claims by which routers agree on a new session's worker are kept
//! here, because they concern no session that the agent has, and must be answered within a
//! millisecond. The service has its own thread and runtime, so large bodies and busy streams on the
//! data port don't delay a load report.

mod incoming;
mod load_watch;
mod router_check;
mod streams;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use contract::{
    claim,
    id::SessionKey,
    load::Retention,
    placement_claim::{CLAIMS_MAX, PlacementClaimRequest, PlacementClaimTable},
    v1::{
        self,
        worker_agent_server::{WorkerAgent, WorkerAgentServer},
    },
};
use http::{HeaderValue, StatusCode};
use parking_lot::Mutex;
use service::{clock::now, proof, server, tasks::Tasks, tls::Protocol};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

pub use self::streams::Metrics;
use self::{
    incoming::{ConnectionLimits, ControlConnectInfo},
    load_watch::LoadStream,
    router_check::RouterCheckLayer,
    streams::{PlacedStream, Places},
};
use crate::{
    audit,
    data_port::{self, PortAccess, RouterAuth},
    engine::model_files,
    kv_events::{self, KvHandle},
    owner::{self, AgentHandle, PageEnd, RankPageAudit},
    session::OpenRequest,
};

/// A page has about 300 KiB.
const SESSIONS_PER_PAGE_MAX: usize = 1000;
/// The queued parts of one router have at most one MiB.
const FILE_PARTS_QUEUED_MAX: usize = 4;
/// How long a transfer of files waits for a router that takes no part, before it ends.
const FILE_PART_WAIT_MAX: Duration = Duration::from_secs(20);
/// Each fetch occupies a thread of the agent.
const FILE_FETCHES_MAX: usize = 4;
/// The largest request has a session's key; `Prove` is read from anybody.
const REQUEST_BYTES_MAX: usize = 4 << 10;
/// The interval of the pings that detect a watcher's dead host, and the time limit for an answer.
const KEEPALIVE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
struct ControlService {
    agent: AgentHandle,
    kv_events: KvHandle,
    epoch: u64,
    /// The model's tokenizer files; `None` until they are found.
    found_files: watch::Receiver<Option<Arc<model_files::FoundFiles>>>,
    file_places: Places,
    load_places: Places,
    kv_places: Places,
    tasks: Tasks,
    claims: Arc<Mutex<PlacementClaimTable>>,
    router_auth: RouterAuth,
    metrics: Metrics,
}

#[derive(Debug)]
pub struct ControlListener {
    pub socket: std::net::TcpListener,
    pub access: PortAccess,
    pub connections_max: usize,
    pub port_metrics: server::Metrics,
    pub metrics: Metrics,
}

/// The thread ends when `token` is cancelled.
pub fn start(
    agent: AgentHandle,
    kv_events: KvHandle,
    epoch: u64,
    found_files: watch::Receiver<Option<Arc<model_files::FoundFiles>>>,
    listener: ControlListener,
    token: CancellationToken,
) -> std::io::Result<SocketAddr> {
    let ControlListener { socket, access, connections_max, port_metrics, metrics } = listener;
    socket.set_nonblocking(true)?;
    let addr = socket.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("control".into()).spawn(move || {
        runtime.block_on(async move {
            let listener =
                tokio::net::TcpListener::from_std(socket).expect("it was made nonblocking");
            let tasks = Tasks::default();
            let service = ControlService {
                agent,
                kv_events,
                epoch,
                found_files,
                file_places: Places::new("files", FILE_FETCHES_MAX, &metrics),
                load_places: Places::new("load", load_watch::WATCHERS_MAX, &metrics),
                kv_places: Places::new("kv", kv_events::WATCHERS_MAX, &metrics),
                tasks: tasks.clone(),
                claims: Arc::new(Mutex::new(PlacementClaimTable::new(CLAIMS_MAX, epoch))),
                router_auth: access.router_auth.clone(),
                metrics,
            };
            let tls = access.tls.map(|tls| tls.for_protocol(Protocol::Http2));
            let limits = ConnectionLimits { connections_max, metrics: port_metrics };
            let connections = incoming::accept(listener, limits, tls, &tasks);
            let check = RouterCheckLayer(access.router_auth);
            let serve_result = tonic::transport::Server::builder()
                .http2_keepalive_interval(Some(KEEPALIVE))
                .http2_keepalive_timeout(Some(KEEPALIVE))
                .layer(check)
                .add_service(
                    WorkerAgentServer::new(service).max_decoding_message_size(REQUEST_BYTES_MAX),
                )
                .serve_with_incoming_shutdown(connections, async {
                    token.cancelled().await;
                    // The streams of watchers don't end by themselves, and the server waits for
                    // them.
                    tasks.cancel();
                });
            if let Err(error) = serve_result.await {
                tracing::error!(%error, "control port failed");
            }
        });
    })?;
    Ok(addr)
}

/// gRPC has few codes, so the refusal code in the metadata decides what a client is told.
fn to_status(error: &owner::Error) -> Status {
    let code = data_port::refusal(error).code;
    let text = error.to_string();
    let mut status = match code.status() {
        StatusCode::NOT_FOUND => Status::not_found(text),
        StatusCode::BAD_REQUEST => Status::invalid_argument(text),
        StatusCode::TOO_MANY_REQUESTS => Status::resource_exhausted(text),
        StatusCode::SERVICE_UNAVAILABLE => Status::unavailable(text),
        _ => Status::failed_precondition(text),
    };
    let code = HeaderValue::from_static(code.as_str());
    status.metadata_mut().as_mut().insert(claim::REFUSAL, code);
    status
}

fn parse_key(wire_key: Option<v1::SessionKey>) -> Result<SessionKey, Status> {
    let wire_key =
        wire_key.ok_or_else(|| Status::invalid_argument("the session key is missing"))?;
    wire_key
        .try_into()
        .map_err(|error: contract::id::Error| Status::invalid_argument(error.to_string()))
}

#[tonic::async_trait]
impl WorkerAgent for ControlService {
    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::Description>, Status> {
        let description = self.agent.description.borrow().clone();
        let not_ready = || Status::unavailable("the engine has not answered yet");
        let description = description.ok_or_else(not_ready)?;
        Ok(Response::new((*description).clone().into()))
    }

    async fn open_session(
        &self,
        request: Request<v1::OpenSessionRequest>,
    ) -> Result<Response<v1::Session>, Status> {
        let request = request.into_inner();
        let retention = match request.retention {
            0 => None,
            wire_retention => Some(
                Retention::from_wire(wire_retention)
                    .map_err(|error| Status::invalid_argument(error.to_string()))?,
            ),
        };
        let idle_max =
            (request.idle_ms_max > 0).then(|| Duration::from_millis(request.idle_ms_max));
        let request = OpenRequest {
            key: parse_key(request.key)?,
            retention,
            idle_max,
            requested_rank: request.dp_rank,
        };
        let opened = self.agent.open_session(request).await.map_err(|error| to_status(&error))?;
        let answer = v1::Session { was_open: opened.was_open, ..opened.session.into() };
        Ok(Response::new(answer))
    }

    async fn close_session(
        &self,
        request: Request<v1::CloseSessionRequest>,
    ) -> Result<Response<v1::CloseSessionResponse>, Status> {
        let v1::CloseSessionRequest { key, only_if_idle } = request.into_inner();
        let close_result = self.agent.close_session(parse_key(key)?, only_if_idle).await;
        let is_deferred = close_result.map_err(|error| to_status(&error))?;
        Ok(Response::new(v1::CloseSessionResponse { deferred: is_deferred }))
    }

    async fn demote_session(
        &self,
        request: Request<v1::DemoteSessionRequest>,
    ) -> Result<Response<v1::DemoteSessionResponse>, Status> {
        let demoted = self.agent.demote_session(parse_key(request.into_inner().key)?).await;
        demoted.map_err(|error| to_status(&error))?;
        Ok(Response::new(v1::DemoteSessionResponse {}))
    }

    async fn prefetch_session(
        &self,
        request: Request<v1::PrefetchSessionRequest>,
    ) -> Result<Response<v1::PrefetchSessionResponse>, Status> {
        let prefetched = self.agent.prefetch_session(parse_key(request.into_inner().key)?).await;
        let tokens = prefetched.map_err(|error| to_status(&error))?;
        Ok(Response::new(v1::PrefetchSessionResponse { tokens }))
    }

    async fn claim_placement(
        &self,
        request: Request<v1::ClaimPlacementRequest>,
    ) -> Result<Response<v1::PlacementClaim>, Status> {
        let claim_request = PlacementClaimRequest::try_from(request.into_inner())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let claim = self.claims.lock().claim(claim_request, now());
        self.metrics.count_claim(&claim);
        let claim = claim.map_err(|error| Status::resource_exhausted(error.to_string()))?;
        Ok(Response::new(claim.into()))
    }

    async fn list_sessions(
        &self,
        request: Request<v1::ListSessionsRequest>,
    ) -> Result<Response<v1::ListSessionsResponse>, Status> {
        let v1::ListSessionsRequest { page_size, page_token } = request.into_inner();
        let page_size = match usize::try_from(page_size) {
            Ok(0) | Err(_) => SESSIONS_PER_PAGE_MAX,
            Ok(page_size) => page_size.min(SESSIONS_PER_PAGE_MAX),
        };
        let after = match page_token.as_str() {
            "" => None,
            token => Some(u64::from_str_radix(token, 16).map(PageEnd).map_err(|_| {
                Status::invalid_argument("page_token is not the next_page_token of an answer")
            })?),
        };
        let watch = self.agent.watch_sessions().await.map_err(|error| to_status(&error))?;
        let (page, end) = watch.sessions.page(after, page_size);
        let now = now();
        Ok(Response::new(v1::ListSessionsResponse {
            sessions: page.iter().map(|session| session.at(now).into()).collect(),
            next_page_token: end
                .map(|PageEnd(digest)| format!("{digest:016x}"))
                .unwrap_or_default(),
        }))
    }

    type WatchLoadStream = LoadStream;

    async fn watch_load(
        &self,
        request: Request<v1::WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let place = self.load_places.take()?;
        let connection = request.extensions().get::<ControlConnectInfo>().cloned();
        let (stream, sending) = load_watch::new_stream(place, self.epoch, connection);
        let (agent, token) = (self.agent.clone(), self.tasks.token());
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = sending.run(agent) => {}
            }
        });
        Ok(Response::new(stream))
    }

    async fn audit(
        &self,
        request: Request<v1::AuditRequest>,
    ) -> Result<Response<v1::AuditResponse>, Status> {
        let rank_count = self.agent.report.borrow().ranks.len();
        let dp_ranks: Vec<u32> = match request.into_inner().dp_rank {
            Some(dp_rank) => vec![dp_rank],
            None => (0..).take(rank_count).collect(),
        };
        let mut ranks = vec![];
        for dp_rank in dp_ranks {
            let audit = self.agent.audit(dp_rank).await.map_err(|error| to_status(&error))?;
            ranks.push(rank_audit(dp_rank, audit));
        }
        Ok(Response::new(v1::AuditResponse { ranks }))
    }

    type WatchKvStream = PlacedStream<v1::KvEvent>;

    async fn watch_kv(
        &self,
        request: Request<v1::WatchKvRequest>,
    ) -> Result<Response<Self::WatchKvStream>, Status> {
        let place = self.kv_places.take()?;
        let connection = request.extensions().get::<ControlConnectInfo>();
        let close_order = connection.map(ControlConnectInfo::close_order).unwrap_or_default();
        // Another thread makes the messages. This runtime only encodes them, when the watcher has
        // room. A message has at most 256 KiB, which takes a tenth of a millisecond.
        Ok(Response::new(PlacedStream::new(self.kv_events.watch(close_order)?, place)))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainState>, Status> {
        let state = self.agent.set_drained(!request.into_inner().undo).await;
        let state = state.map_err(|error| to_status(&error))?;
        Ok(Response::new(v1::DrainState {
            draining: state.is_draining,
            turns_running: state.turns_running,
            turns_queued: state.turns_queued,
            sessions: state.sessions,
        }))
    }

    async fn prove(
        &self,
        request: Request<v1::ProveRequest>,
    ) -> Result<Response<v1::ProveResponse>, Status> {
        self.router_auth.prove(&request.into_inner()).map(Response::new).map_err(|error| {
            let text = data_port::router_auth::stranger_text(&error);
            match error {
                proof::Error::Malformed => Status::invalid_argument(text),
                _ => Status::unauthenticated(text),
            }
        })
    }

    type FetchModelFilesStream = ReceiverStream<Result<v1::ModelFilePart, Status>>;

    async fn fetch_model_files(
        &self,
        request: Request<v1::FetchModelFilesRequest>,
    ) -> Result<Response<Self::FetchModelFilesStream>, Status> {
        let files = self.found_files.borrow().clone();
        let files = files.ok_or_else(|| Status::not_found("this agent has no tokenizer files"))?;
        if files.identity().hash[..] != request.into_inner().hash {
            return Err(Status::failed_precondition("the files have changed; call Describe again"));
        }
        let place = self.file_places.take()?;
        let (sender, receiver) = mpsc::channel(FILE_PARTS_QUEUED_MAX);
        // Reading waits for the disk and for the router, so it runs on a blocking thread.
        tokio::task::spawn_blocking(move || {
            let _place = place;
            let runtime = tokio::runtime::Handle::current();
            let send_part = |part| {
                // The time limit frees the thread and the permit if the router takes nothing.
                let sent = tokio::time::timeout(FILE_PART_WAIT_MAX, sender.send(Ok(part)));
                matches!(runtime.block_on(sent), Ok(Ok(())))
            };
            if let Err(error) = files.read(send_part) {
                tracing::warn!(%error, "can't send the model's files to a router");
                let _ = sender.blocking_send(Err(Status::failed_precondition(error.to_string())));
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn rank_audit(dp_rank: u32, audit: Result<RankPageAudit, audit::Error>) -> v1::RankAudit {
    let audit = match audit {
        Ok(audit) => audit,
        Err(error) => {
            return v1::RankAudit { dp_rank, refusal: error.to_string(), ..Default::default() };
        }
    };
    let sessions = audit.sessions.into_iter().map(|(key, session)| v1::SessionPages {
        key: key.as_ref().map(Into::into),
        incarnation: session.incarnation.unwrap_or_default(),
        pages: session.pages,
        exclusive_pages: session.exclusive_pages,
        freed_by_close_pages: session.freed_by_close_pages,
        share_milli: session.share_milli,
        runs: session.runs,
        tail_tokens: session.tail_tokens,
    });
    let sessions = sessions.collect();
    v1::RankAudit { dp_rank, pages: Some(audit.pages.into()), sessions, ..Default::default() }
}
