//! A minimal worker agent that keeps to the contract.
//!
//! It has a control port with sessions and a load stream, and a data port with a gate per exclusive
//! session. It has a runtime of its own, so that killing it is as abrupt as the death of a host.

mod control_port;

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use blocks::kv::{self, RankChange};
use bytes::Bytes;
use contract::{
    claim::Claim,
    envelope::TurnEnvelope,
    id::SessionKey,
    load::{Retention, Session, SessionState},
    placement_claim::{CLAIMS_MAX, PlacementClaimTable},
    v1::{self, load_event::Event, session_change::Change, worker_agent_server::WorkerAgentServer},
};
use http::HeaderMap;
use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use service::{
    refusal::{Code, Refusal},
    tasks::Tasks,
};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::Status;

/// One request as the data port received it.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedTurn {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) envelope: TurnEnvelope,
}

type Watcher = mpsc::Sender<Result<v1::LoadEvent, Status>>;

/// All changes of resident blocks so far, and their watchers. A new watcher gets all of them.
#[derive(Debug, Default)]
struct KvEvents {
    batches: Vec<Vec<RankChange>>,
    watchers: Vec<mpsc::Sender<Result<v1::KvEvent, Status>>>,
}

impl KvEvents {
    fn event(&self, at: usize) -> v1::KvEvent {
        let changes = self.batches[at].iter().cloned().map(Into::into).collect();
        v1::KvEvent { epoch: 7, sequence: at as u64, changes }
    }
}

/// The state that a test can read and control.
#[derive(Debug)]
pub(crate) struct AgentState {
    pub(crate) name: String,
    pub(crate) data_port: u16,
    model: &'static str,
    sessions: Mutex<HashMap<SessionKey, Session>>,
    /// Each watcher, with the number of its next event.
    watchers: Mutex<Vec<(u64, Watcher)>>,
    kv: Mutex<KvEvents>,
    pub(crate) received: Mutex<Vec<ReceivedTurn>>,
    /// Turns with the header `x-test-wait` end when this has a permit.
    pub(crate) release: Semaphore,
    /// Number of answer bodies dropped before their end.
    pub(crate) aborted_answers: AtomicUsize,
    /// Whether to refuse every turn and open as full.
    pub(crate) full: AtomicBool,
    /// Whether to report that the agent ends.
    pub(crate) draining: AtomicBool,
    /// Whether to open sessions and then give no answer.
    pub(crate) loses_answers: AtomicBool,
    /// Whether to open sessions and never answer.
    pub(crate) holds_answers: AtomicBool,
    pub(crate) used_tokens: AtomicUsize,
    retentions: Vec<Retention>,
    /// Whether to describe a model's files. The first router that fetches them is refused.
    pub(crate) has_model: AtomicBool,
    /// Whether the engine cuts prompts that are longer than its context.
    pub(crate) shortens_prompts: AtomicBool,
    adapters: Mutex<Option<Vec<String>>>,
    claims: Mutex<PlacementClaimTable>,
    fetches: AtomicUsize,
    reports: AtomicBool,
    tasks: Tasks,
    stop_accepting: tokio_util::sync::CancellationToken,
}

/// A running agent.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) control: SocketAddr,
    pub(crate) inner: Arc<AgentState>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Agent {
    pub(crate) fn start(name: &str) -> Self {
        Self::start_with(name, vec![Retention::Pinned, Retention::Tagged, Retention::None])
    }

    /// Starts an agent whose engine serves a model of this name.
    pub(crate) fn serving(name: &str, model: &'static str) -> Self {
        Self::start_as(name, vec![Retention::None], model)
    }

    pub(crate) fn start_with(name: &str, retentions: Vec<Retention>) -> Self {
        Self::start_as(name, retentions, "m")
    }

    fn start_as(name: &str, retentions: Vec<Retention>, model: &'static str) -> Self {
        // Each agent has its own address, so that nothing else gets its ports when it is killed.
        let own = engine_sim::loopback::own_addr();
        let bind = || std::net::TcpListener::bind(own).unwrap();
        let (control, data) = (bind(), bind());
        let inner = Arc::new(AgentState {
            name: name.to_owned(),
            data_port: data.local_addr().unwrap().port(),
            model,
            sessions: Mutex::default(),
            watchers: Mutex::default(),
            kv: Mutex::default(),
            received: Mutex::default(),
            release: Semaphore::new(0),
            aborted_answers: AtomicUsize::new(0),
            full: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            loses_answers: AtomicBool::new(false),
            holds_answers: AtomicBool::new(false),
            used_tokens: AtomicUsize::new(100),
            retentions,
            has_model: AtomicBool::new(false),
            shortens_prompts: AtomicBool::new(false),
            adapters: Mutex::default(),
            claims: Mutex::new(PlacementClaimTable::new(CLAIMS_MAX, 7)),
            fetches: AtomicUsize::new(0),
            reports: AtomicBool::new(true),
            tasks: Tasks::default(),
            stop_accepting: tokio_util::sync::CancellationToken::new(),
        });
        let control_addr = control.local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let guard = runtime.enter();
        for listener in [&control, &data] {
            listener.set_nonblocking(true).unwrap();
        }
        let control = tokio::net::TcpListener::from_std(control).unwrap();
        let data = tokio::net::TcpListener::from_std(data).unwrap();
        let service =
            WorkerAgentServer::from_arc(Arc::new(control_port::Service(Arc::clone(&inner))));
        inner.tasks.spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            drop(server.serve_with_incoming(TcpListenerStream::new(control)).await);
        });
        let app = axum::Router::new().fallback(turn).with_state(Arc::clone(&inner));
        let stop_accepting = inner.stop_accepting.clone().cancelled_owned();
        inner.tasks.spawn(async move {
            drop(axum::serve(data, app).with_graceful_shutdown(stop_accepting).await);
        });
        let reporter = Arc::clone(&inner);
        inner.tasks.spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(50)).await;
                if reporter.reports.load(Ordering::Relaxed) {
                    reporter.broadcast(&Event::Report(reporter.report()));
                }
            }
        });
        drop(guard);
        Self { control: control_addr, inner, runtime: Some(runtime) }
    }

    /// Stops taking connections on the data port; open ones stay.
    pub(crate) fn close_data_port(&self) {
        self.inner.stop_accepting.cancel();
    }

    /// Ends everything at once, including connections.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Returns the turns taken so far.
    pub(crate) fn turns(&self) -> Vec<ReceivedTurn> {
        self.inner.received.lock().clone()
    }

    /// Stops sending reports, but stays connected.
    pub(crate) fn fall_silent(&self) {
        self.inner.reports.store(false, Ordering::Relaxed);
    }

    /// Restarts the engine: every session is lost.
    pub(crate) fn lose_sessions(&self) {
        let lost: Vec<Session> = {
            let mut sessions = self.inner.sessions.lock();
            for session in sessions.values_mut() {
                session.state = SessionState::Lost;
            }
            sessions.values().cloned().collect()
        };
        for session in lost {
            self.inner.changed(session);
        }
    }

    /// Skips an event number in every load stream.
    pub(crate) fn skip_sequence(&self) {
        for (next, _) in self.inner.watchers.lock().iter_mut() {
            *next += 1;
        }
    }

    /// Reports changes of the resident blocks.
    pub(crate) fn report_kv(&self, changes: impl IntoIterator<Item = kv::Change>) {
        let change = |change| RankChange { dp_rank: 0, change };
        let mut kv = self.inner.kv.lock();
        kv.batches.push(changes.into_iter().map(change).collect());
        let event = kv.event(kv.batches.len() - 1);
        kv.watchers.retain(|watcher| watcher.try_send(Ok(event.clone())).is_ok());
    }

    /// Ends every stream of resident blocks. New streams are refused until blocks are reported
    /// again.
    pub(crate) fn end_kv(&self) {
        *self.inner.kv.lock() = KvEvents::default();
    }

    pub(crate) fn session_count(&self) -> usize {
        self.inner.sessions.lock().len()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

impl AgentState {
    /// Sets which LoRA adapters the engine has, and describes it anew.
    pub(crate) fn set_adapters(&self, names: &[&str]) {
        *self.adapters.lock() = Some(names.iter().map(|name| (*name).to_owned()).collect());
        self.broadcast(&Event::Description(self.description()));
    }

    fn description(&self) -> v1::Description {
        v1::Description {
            agent_id: self.name.clone(),
            epoch: 7,
            data_port: u32::from(self.data_port),
            data_tls: false,
            data_address: String::new(),
            control_url: String::new(),
            engine: Some(v1::EngineFacts {
                version: "0".into(),
                models: vec![self.model.into()],
                page_tokens: 1,
                context_tokens: 1000,
                streaming_sessions: true,
                radix_sessions: true,
                instance: "i".into(),
                disaggregation: "null".into(),
                shortens_prompts: self.shortens_prompts.load(Ordering::Relaxed),
                adapters: self.adapters.lock().clone().map(|names| v1::Adapters { names }),
                ..Default::default()
            }),
            ranks: vec![v1::Rank { dp_rank: 0, pool_tokens: 10_000, rows: 64, devices: vec![] }],
            retentions: self.retentions.iter().map(|retention| retention.to_wire()).collect(),
            turns_queued_per_session_max: 0,
            model_files: self
                .has_model
                .load(Ordering::Relaxed)
                .then(|| control_port::described_files().into()),
            trims: vec![],
            shim_functions_off: vec![],
            retentions_off: vec![],
        }
    }

    pub(crate) fn turns_running(&self) -> u32 {
        self.sessions.lock().values().map(|session| session.turns_running).sum()
    }

    fn report(&self) -> v1::LoadReport {
        let figure =
            |value: u64| Some(v1::Figure { value, source: v1::Source::Loads.into(), age_ms: 1 });
        v1::LoadReport {
            interval_ms: 50,
            draining: self.draining.load(Ordering::Relaxed),
            ranks: vec![v1::RankLoad {
                dp_rank: 0,
                turns_running: self.turns_running(),
                turns_running_max: 64,
                requests_waiting: figure(0),
                pool_used_tokens: figure(self.used_tokens.load(Ordering::Relaxed) as u64),
                pool_total_tokens: figure(10_000),
                sessions: u32::try_from(self.sessions.lock().len()).unwrap(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    fn event(sequence: u64, event: Event) -> Result<v1::LoadEvent, Status> {
        Ok(v1::LoadEvent { epoch: 7, sequence, event: Some(event) })
    }

    fn broadcast(&self, event: &Event) {
        self.watchers.lock().retain_mut(|(next, watcher)| {
            let sent = watcher.try_send(Self::event(*next, event.clone())).is_ok();
            *next += 1;
            sent
        });
    }

    fn changed(&self, session: Session) {
        let change = Some(Change::Upsert(session.into()));
        self.broadcast(&Event::Change(v1::SessionChange { change }));
    }

    fn removed(&self, key: &SessionKey) {
        let change = Some(Change::Removed(key.into()));
        self.broadcast(&Event::Change(v1::SessionChange { change }));
    }

    fn fresh(&self, key: &SessionKey, retention: Option<Retention>, exclusive: bool) -> Session {
        let retention = retention.unwrap_or(Retention::Tagged);
        Session {
            key: key.clone(),
            retention,
            state: SessionState::Idle,
            dp_rank: 0,
            turns: 0,
            turns_running: 0,
            exclusive: exclusive || retention == Retention::Pinned,
            resident_tokens: None,
            idle: Duration::ZERO,
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    fn begin(&self, claim: &Claim) -> Result<(), Refusal> {
        let key = &claim.key;
        let mut sessions = self.sessions.lock();
        let session = sessions
            .entry(key.clone())
            .or_insert_with(|| self.fresh(key, claim.retention, claim.open));
        session.parent = claim.parent.or(session.parent);
        if session.exclusive && session.turns_running > 0 {
            return Err(Refusal::new(Code::SessionBusy, "busy"));
        }
        session.turns_running += 1;
        session.state = SessionState::Running;
        let session = session.clone();
        drop(sessions);
        self.changed(session);
        Ok(())
    }

    fn end(&self, claim: &Claim) {
        let key = &claim.key;
        let mut sessions = self.sessions.lock();
        let Some(session) = sessions.get_mut(key) else { return };
        session.turns_running -= 1;
        session.turns += 1;
        if session.turns_running == 0 && (claim.close || session.state == SessionState::Closing) {
            sessions.remove(key);
            drop(sessions);
            self.removed(key);
            return;
        }
        if session.turns_running == 0 {
            session.state = SessionState::Idle;
        }
        let session = session.clone();
        drop(sessions);
        self.changed(session);
    }
}

/// Ends the turn when the answer's body is dropped.
struct Gate {
    agent: Arc<AgentState>,
    claim: Option<Claim>,
    /// Whether the answer was sent to its end.
    is_complete: bool,
}

impl Drop for Gate {
    fn drop(&mut self) {
        if !self.is_complete {
            self.agent.aborted_answers.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(claim) = &self.claim {
            self.agent.end(claim);
        }
    }
}

/// Answers with the request's own body, in two parts. `x-test-wait` holds back the second part, or
/// with the value `head` the whole answer, until the test releases it. With the value `end`, the
/// closing event of a stream follows, and only the end of the body is held back.
async fn turn(State(inner): State<Arc<AgentState>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let envelope = TurnEnvelope::read(&parts.headers).unwrap();
    if inner.full.load(Ordering::Relaxed) {
        let refusal = Refusal::new(Code::QueuePlaces, "full");
        return refusal.retry_after(Duration::from_secs(1)).into_response();
    }
    if let Some(claim) = &envelope.session
        && let Err(refusal) = inner.begin(claim)
    {
        return refusal.into_response();
    }
    let mut gate =
        Gate { agent: Arc::clone(&inner), claim: envelope.session.clone(), is_complete: false };
    let body = body.collect().await.unwrap().to_bytes();
    inner.received.lock().push(ReceivedTurn {
        path: parts.uri.to_string(),
        headers: parts.headers.clone(),
        body: body.clone(),
        envelope,
    });
    let wait = parts.headers.get("x-test-wait").map(|value| value.as_bytes().to_vec());
    if wait.as_deref() == Some(b"head") {
        inner.release.acquire().await.unwrap().forget();
    }
    let (send, answer) = mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let middle = body.len() / 2;
    let (first, second) = (body.slice(..middle), body.slice(middle..));
    inner.clone().tasks.spawn(async move {
        if !first.is_empty() && send.send(Ok(first)).await.is_err() {
            return;
        }
        if wait.as_deref() == Some(b"tail") {
            tokio::select! {
                () = send.closed() => return,
                permit = inner.release.acquire() => permit.unwrap().forget(),
            }
        }
        // Opens the gate before the last byte is sent, as the agent does once the engine is done.
        gate.is_complete = true;
        drop(gate);
        drop(send.send(Ok(second)).await);
        if wait.as_deref() == Some(b"end") {
            drop(send.send(Ok(Bytes::from_static(b"\n\ndata: [DONE]\n\n"))).await);
            tokio::select! {
                () = send.closed() => {}
                permit = inner.release.acquire() => permit.unwrap().forget(),
            }
        }
    });
    Response::builder()
        .status(if parts.uri.path() == "/generate" { 418 } else { 200 })
        .header("content-type", "text/event-stream")
        .header("x-engine", "yes")
        .header("connection", "x-secret")
        .header("x-secret", "hop")
        .body(Body::from_stream(ReceiverStream::new(answer)))
        .unwrap()
}
