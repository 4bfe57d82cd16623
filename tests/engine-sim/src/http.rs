//! The HTTP shell: connections, the route table, and the engine's three error formats.
//!
//! The shell manages its own connections instead of leaving them to axum, so that a crash can drop
//! them at once. It records every request with its exact body before routing it.

use super::{
    Config,
    hand_off::HandOffs,
    owner::{EngineHandle, EngineTurn, Progress},
    request::Submit,
};
use axum::{
    Router,
    body::Body,
    extract::{DefaultBodyLimit, FromRequest, State},
    handler::Handler as _,
    http::{self, HeaderMap, Request, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{any, any_service, get, post},
};
use bytes::Bytes;
use contract::flags::read_flag;
use http_body_util::BodyExt as _;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt::Display,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinSet,
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

mod control;
mod generate;
mod info;
mod messages;
mod openai;
mod responses;
mod weights;

/// A bounded log of the latest requests: path, headers and body.
#[derive(Debug)]
pub(super) struct RequestLog {
    max: usize,
    seen: Mutex<VecDeque<(String, HeaderMap, Bytes)>>,
}

impl RequestLog {
    pub(super) fn new(max: usize) -> RequestLog {
        RequestLog { max, seen: Mutex::new(VecDeque::new()) }
    }

    pub(super) fn bodies(&self, path: &str) -> Vec<Bytes> {
        let seen = self.seen.lock();
        seen.iter().filter(|(seen, ..)| seen == path).map(|(.., body)| body.clone()).collect()
    }

    pub(super) fn headers(&self, path: &str) -> Vec<HeaderMap> {
        let seen = self.seen.lock();
        let of_path = seen.iter().filter(|(seen, ..)| seen == path);
        of_path.map(|(_, headers, _)| headers.clone()).collect()
    }

    fn push(&self, head: &http::request::Parts, body: &Bytes) {
        let mut log = self.seen.lock();
        if log.len() == self.max {
            log.pop_front();
        }
        if self.max > 0 {
            log.push_back((head.uri.path().to_owned(), head.headers.clone(), body.clone()));
        }
    }
}

/// The state shared by all routes.
#[derive(Debug)]
pub(super) struct App {
    pub(super) config: Config,
    pub(super) handle: EngineHandle,
    /// `None` if the engine runs whole requests.
    pub(super) hand_offs: Option<Arc<HandOffs>>,
    tasks: TaskTracker,
    rng: Mutex<fastrand::Rng>,
    tickets: AtomicU64,
    started_wall: f64,
    pub(super) weights: weights::Weights,
    /// Ends the server, as a crash does.
    killed: CancellationToken,
    responses: responses::ResponseStore,
    /// The names of the loaded LoRA adapters.
    adapters: Mutex<Vec<String>>,
    /// The role to which the engine was switched.
    role: Mutex<Option<&'static str>>,
    /// Whether the next requests to close a session fail.
    fails_closes: AtomicBool,
}

type AppState = axum::extract::State<Arc<App>>;

impl App {
    pub(super) fn new(
        config: Config,
        handle: EngineHandle,
        port: u16,
        hand_offs: Option<Arc<HandOffs>>,
        tasks: TaskTracker,
        killed: CancellationToken,
    ) -> App {
        // The port is part of the seed: engines with one seed on different ports make different
        // ids.
        let rng = Mutex::new(fastrand::Rng::with_seed(config.core.seed ^ (u64::from(port) << 32)));
        let started_wall = wall_seconds();
        let weights = weights::Weights::new(&config.model_path);
        let tickets = AtomicU64::new(1);
        let responses = responses::ResponseStore::default();
        let (adapters, role) = (Mutex::default(), Mutex::default());
        App {
            config,
            handle,
            hand_offs,
            tasks,
            rng,
            tickets,
            started_wall,
            weights,
            killed,
            responses,
            adapters,
            role,
            fails_closes: AtomicBool::new(false),
        }
    }

    pub(super) fn set_fails_closes(&self, fails: bool) {
        self.fails_closes.store(fails, Ordering::Relaxed);
    }

    pub(super) fn set_adapters(&self, names: Vec<String>) {
        *self.adapters.lock() = names;
    }

    pub(super) fn set_role(&self, role: &'static str) {
        *self.role.lock() = Some(role);
    }

    /// Returns 32 hex digits, like the `hex` of a Python uuid4.
    fn new_id(&self) -> String {
        format!("{:032x}", self.rng.lock().u128(..))
    }

    async fn submit(&self, rank: Option<usize>, stream: bool, submit: Submit) -> Live {
        let running = self.weights.enter().await;
        let rid = submit.rid.clone();
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let (received, received_wall) = (Instant::now(), wall_seconds());
        let turn = match &self.hand_offs {
            None => self.handle.turn(ticket, rank, stream, submit).await,
            Some(hand_offs) => hand_offs.submit(self.handle.clone(), ticket, rank, submit),
        };
        Live { rid, turn, received, received_wall, _running: running }
    }
}

/// A submitted request, with its time of arrival.
#[derive(Debug)]
struct Live {
    rid: String,
    turn: EngineTurn,
    received: Instant,
    received_wall: f64,
    /// Keeps updates of the weights out while the request runs.
    _running: tokio::sync::OwnedSemaphorePermit,
}

impl Live {
    /// Waits for the next progress and returns it; `None` if the engine dies first.
    async fn next(&mut self) -> Option<Progress> {
        self.turn.progress.changed().await.ok()?;
        Some(self.turn.progress.borrow_and_update().clone())
    }

    /// Waits for the request's end and returns the final progress. Never returns if the engine dies
    /// first.
    async fn end(&mut self) -> Progress {
        let ended = self.turn.progress.wait_for(|progress| progress.finish.is_some()).await;
        // Clones the progress, because the borrow must not live across the `await` below.
        let ended = ended.ok().map(|progress| progress.clone());
        match ended {
            Some(progress) => progress,
            None => std::future::pending().await,
        }
    }
}

/// Returns the route table.
pub(super) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/generate", any(generate::generate))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::retrieve))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(openai::embeddings))
        .route("/v1/models", get(info::models))
        .route("/tokenize", post(control::tokenize))
        .route("/v1/tokenize", post(control::tokenize))
        .route("/detokenize", post(control::detokenize))
        .route("/v1/detokenize", post(control::detokenize))
        .route("/open_session", any(control::open_session))
        .route("/close_session", any(control::close_session))
        .route("/abort_request", post(control::abort_request))
        .route("/flush_cache", any(control::flush_cache))
        .route("/slow_down", any(control::slow_down))
        .route("/health", get(control::health))
        .route("/health_generate", get(control::health))
        .route("/ready", get(control::ready))
        .route("/ping", get(control::ping))
        .route("/pause_generation", post(weights::pause_generation))
        .route("/continue_generation", post(weights::continue_generation))
        .route("/begin_weight_update", post(weights::begin_weight_update))
        .route("/end_weight_update", post(weights::end_weight_update))
        .route("/init_weights_update_group", post(weights::update_group))
        .route("/destroy_weights_update_group", post(weights::update_group))
        .route("/update_weights_from_disk", post(weights::update_from_disk))
        .route("/update_weights_from_distributed", post(weights::update_from_distributed))
        .route("/update_weights_from_tensor", post(weights::update_from_tensor))
        .route("/update_weights_from_ipc", post(weights::update_from_ipc))
        .route("/update_weight_version", post(weights::update_version))
        .route("/get_weights_by_name", any(weights::by_name))
        .route("/release_memory_occupation", any(weights::release_memory))
        .route("/resume_memory_occupation", any(weights::resume_memory))
        .route("/start_profile", any(weights::start_profile))
        .route("/stop_profile", any(weights::stop_profile))
        .route("/load_lora_adapter", post(weights::load_adapter))
        .route("/unload_lora_adapter", post(weights::unload_adapter))
        .route("/hang", post(control::hang))
        .route("/v1/loads", get(info::loads))
        .route("/server_info", get(info::server_info))
        .route("/get_server_info", get(info::server_info))
        .route("/model_info", get(info::model_info))
        .route("/get_model_info", get(info::model_info))
        .route("/metrics", get(info::metrics))
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(Arc::clone(&app), check_api_key))
        .with_state(app)
}

/// Answers a request without the API key as the engine does. Health and metrics need no key.
async fn check_api_key(State(app): AppState, request: Request<Body>, next: Next) -> Response {
    let Some(key) = &app.config.api_key else { return next.run(request).await };
    let is_open =
        ["/health", "/ready", "/metrics"].iter().any(|path| request.uri().path().starts_with(path));
    let credential = request.headers().get(header::AUTHORIZATION);
    if is_open || credential.is_some_and(|credential| credential == &format!("Bearer {key}")) {
        return next.run(request).await;
    }
    json_response(StatusCode::UNAUTHORIZED, &json!({ "error": "Unauthorized" }))
}

/// Accepts connections until the engine has ended, and then drops them all.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    seen: Arc<RequestLog>,
    killed: CancellationToken,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = killed.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            Ok((stream, _)) = listener.accept() => {
                connections.spawn(connection(stream, router.clone(), Arc::clone(&seen)));
            }
        }
    }
    drop(listener);
    // An aborted connection lives on until its task is polled.
    connections.shutdown().await;
}

async fn connection(stream: TcpStream, router: Router, seen: Arc<RequestLog>) {
    // Sends small chunks at once, as the real server does.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request| {
        let (router, seen) = (router.clone(), Arc::clone(&seen));
        async move { Ok::<_, Infallible>(record_and_route(request, router, &seen).await) }
    });
    let served = hyper::server::conn::http1::Builder::new();
    // An error here means that the client disconnected.
    let _ = served.serve_connection(TokioIo::new(stream), service).await;
}

async fn record_and_route(
    request: Request<hyper::body::Incoming>,
    router: Router,
    seen: &RequestLog,
) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = body.collect().await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let body = body.to_bytes();
    seen.push(&parts, &body);
    let request = Request::from_parts(parts, Body::from(body));
    any_service(router).call(request, ()).await
}

/// Streams a live request's progress as server-sent events until the request ends. `render` formats
/// one progress as event text. When the client disconnects, dropping the `Live` ends the request.
fn sse(
    app: &App,
    mut live: Live,
    mut render: impl FnMut(&Live, &Progress) -> String + Send + 'static,
) -> Response {
    let (sender, receiver) = mpsc::channel::<Result<Bytes, Infallible>>(1);
    app.tasks.spawn(async move {
        loop {
            let progress = tokio::select! {
                biased;
                () = sender.closed() => return,
                progress = live.next() => progress,
            };
            // A dead engine leaves the stream open; the connection is dropped when the process
            // ends.
            let Some(progress) = progress else { return sender.closed().await };
            let text = render(&live, &progress);
            if !text.is_empty() && sender.send(Ok(Bytes::from(text))).await.is_err() {
                return;
            }
            if progress.finish.is_some() {
                return;
            }
        }
    });
    event_stream(Body::from_stream(ReceiverStream::new(receiver)))
}

fn event_stream(body: Body) -> Response {
    ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response()
}

/// Returns a 400 answer `{"error":{"message":..}}`, the format of `/generate` and the session
/// routes.
fn plain_error(message: &str) -> Response {
    json_response(StatusCode::BAD_REQUEST, &json!({ "error": { "message": message } }))
}

/// Formats a JSON object with its keys in the given order, because some clients compare bytes.
fn object(fields: &[(&str, &dyn Display)]) -> String {
    let fields: Vec<String> =
        fields.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", fields.join(","))
}

/// Returns an error `{"object":"error",..}`, the format of validation errors and OpenAI routes.
fn object_error(status: StatusCode, kind: &str, message: &str) -> Response {
    let body = object(&[
        ("object", &json!("error")),
        ("message", &json!(message)),
        ("type", &json!(kind)),
        ("param", &Value::Null),
        ("code", &status.as_u16()),
    ]);
    json_response(status, &body)
}

fn validation_error(problems: &[String]) -> Response {
    let count = problems.len();
    let noun = if count == 1 { "error" } else { "errors" };
    let message = format!("{count} validation {noun}:\n{}", problems.join("\n"));
    object_error(StatusCode::BAD_REQUEST, "Bad Request", &message)
}

fn internal_error() -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error").into_response()
}

fn json_response(status: StatusCode, body: &impl Display) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// A body that is a JSON object; any other body is answered with a validation error.
struct JsonObject(serde_json::Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for JsonObject {
    type Rejection = Response;

    async fn from_request(request: Request<Body>, state: &S) -> Result<Self, Response> {
        let body =
            Bytes::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        let problem = match serde_json::from_slice(&body) {
            Ok(Value::Object(mut map)) => match coerce_flags(&mut map) {
                Ok(()) => return Ok(Self(map)),
                Err(problem) => return Err(validation_error(&[problem])),
            },
            Ok(_) => "expected an object".to_owned(),
            Err(error) => format!("JSON decode error {error}"),
        };
        Err(validation_error(&[format!("  body: {problem}")]))
    }
}

/// Makes constants of the flags that come in another form, as the models of SGLang's routes do.
/// Fails with what the engine says of a flag that is none.
fn coerce_flags(body: &mut serde_json::Map<String, Value>) -> Result<(), String> {
    for name in ["stream", "background"] {
        let Some(value) = body.get_mut(name) else { continue };
        let written = serde_json::value::to_raw_value(value).expect("a value can be written");
        let flag = read_flag(Some(&written));
        *value = flag.map_err(|_| format!("  {name}: Input should be a valid boolean"))?.into();
    }
    Ok(())
}

/// Returns the whole seconds of a wall-clock time.
fn whole_seconds(seconds: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(seconds).map_or(0, |since| since.as_secs())
}

/// Returns the wall-clock time in seconds since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "the protocol's bodies carry wall-clock times")]
pub(super) fn wall_seconds() -> f64 {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
