//! An engine that answers at once, so that it costs the contenders' figures nothing.
//!
//! It answers turns by itself, with as many chunks as they ask for. Turns of sessions, and all
//! other calls, are those of a simulated engine behind it: to Berth it is an engine like any other.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use engine_sim::{Config, EngineSim, loopback::own_addr};
use harness::web::Web;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use service::tasks::Tasks;
use tokio::{
    net::TcpListener,
    time::{Interval, MissedTickBehavior, interval},
};
use tokio_stream::Stream;

use super::{HELD_STREAMS, load};

/// The time between two chunks of a paced answer.
const PACE: Duration = Duration::from_millis(5);
/// How the prompts begin that ask for a paced answer, and for one without an end.
const PACED: &str = "paced";
const ENDLESS: &str = "endless";
/// Room for the longest prompt.
const TOKENS: usize = 1 << 21;
/// Longer bodies ask for nothing but a short answer.
const READ_BYTES_MAX: usize = 512;
const ANSWER: &str = concat!(
    r#"{"text":" yes","output_ids":[7],"meta_info":{"id":"r","#,
    r#""finish_reason":{"type":"length","length":1},"prompt_tokens":9,"completion_tokens":1,"#,
    r#""cached_tokens":0,"num_retractions":0,"e2e_latency":0.001}}"#,
);

/// Returns the body of a request.
pub(crate) fn request_body(request: load::Request) -> Vec<u8> {
    let begin = if request.is_paced { PACED } else { "small" };
    body(begin, request.prompt_bytes, request.chunks)
}

/// Returns the body of a request whose answer has no end.
pub(crate) fn endless_request_body() -> Vec<u8> {
    body(ENDLESS, 24, 2)
}

/// Returns the least size of the answer.
pub(crate) fn answer_bytes_min(request: load::Request) -> usize {
    if request.chunks == 0 { 16 } else { chunk(0, 2).len() * request.chunks as usize }
}

fn body(begin: &str, prompt_bytes: usize, chunks: u32) -> Vec<u8> {
    let text = format!("{begin} {}", "x ".repeat(prompt_bytes / 2));
    let sampling = json!({ "max_new_tokens": chunks.max(1), "ignore_eos": true });
    let body = json!({ "stream": chunks > 0, "sampling_params": sampling, "text": text });
    body.to_string().into_bytes()
}

/// The engine, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mock {
    pub(crate) addr: SocketAddr,
    tasks: Tasks,
    _behind: EngineSim,
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

impl Mock {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let mut config = Config { enable_metrics: true, ..Config::default() };
        config.core.session_radix_cache = true;
        config.core.prefill_tokens_per_s = 1e12;
        config.core.decode_ms_per_step = 0.0;
        (config.core.context_len, config.core.max_total_tokens) = (TOKENS, TOKENS);
        config.core.max_running_requests = 2 * HELD_STREAMS;
        let behind = EngineSim::start_local(config).await?;
        let listener = TcpListener::bind(own_addr()).await?;
        let addr = listener.local_addr()?;
        let (tasks, url) = (Tasks::default(), behind.url());
        tasks.spawn(serve(listener, url, tasks.clone()));
        Ok(Self { addr, tasks, _behind: behind })
    }
}

async fn serve(listener: TcpListener, behind: String, tasks: Tasks) {
    let web = Web::default();
    let token = tasks.token();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = token.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(PACE).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (web, behind, token) = (web.clone(), behind.clone(), token.clone());
        tasks.spawn(async move {
            let answer = service_fn(|request| answer(request, &web, &behind));
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
            tokio::select! {
                _ = connection => {}
                () = token.cancelled() => {}
            }
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    web: &Web,
    behind: &str,
) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Ok(Response::new(Body::empty())) };
    let body = body.to_bytes();
    let is_turn = head.method == Method::POST && head.uri.path() == "/generate";
    if is_turn && !is_of_session(&body) {
        return Ok(turn(&body));
    }
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let headers = [("content-type", "application/json")];
    let answered = web.send(head.method, &format!("{behind}{path}"), &headers, body).await;
    Ok(match answered {
        Ok(answered) => answered.map(Body::new),
        Err(error) => {
            let mut answer = Response::new(Body::from(error.to_string()));
            *answer.status_mut() = StatusCode::BAD_GATEWAY;
            answer
        }
    })
}

fn is_of_session(body: &[u8]) -> bool {
    contains(body, br#""session_"#)
}

fn contains(body: &[u8], part: &[u8]) -> bool {
    body.len() <= READ_BYTES_MAX && body.windows(part.len()).any(|window| window == part)
}

fn turn(body: &Bytes) -> Response<Body> {
    let is_stream = contains(body, br#""stream":true"#);
    let kind = if is_stream { "text/event-stream" } else { "application/json" };
    let answer = Response::builder().header("content-type", kind);
    let body =
        if is_stream { Body::from_stream(Chunks::asked_for_by(body)) } else { Body::from(ANSWER) };
    answer.body(body).expect("a valid answer")
}

fn chunk(number: u32, all: u32) -> String {
    let done = number + 1;
    let finish = if done == all {
        format!(r#"{{"type":"length","length":{all}}}"#)
    } else {
        "null".to_owned()
    };
    format!(
        "data: {{\"text\":\" yes\",\"output_ids\":[7],\"meta_info\":{{\"id\":\"r\",\
         \"finish_reason\":{finish},\"prompt_tokens\":9,\"completion_tokens\":{done},\
         \"cached_tokens\":0}}}}\n\n"
    )
}

/// The chunks of an answer. Each is written alone, as an engine writes its tokens.
struct Chunks {
    all: u32,
    next: u32,
    pace: Option<Interval>,
    is_endless: bool,
    has_waited: bool,
}

impl Chunks {
    fn asked_for_by(body: &Bytes) -> Self {
        let text = std::str::from_utf8(body).unwrap_or_default();
        let after = text.split_once(r#""max_new_tokens":"#).map_or("", |(_, after)| after);
        let digits = after.split(|it: char| !it.is_ascii_digit()).next().unwrap_or_default();
        let mut pace = interval(PACE);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            all: digits.parse().unwrap_or(1),
            next: 0,
            pace: contains(body, PACED.as_bytes()).then_some(pace),
            is_endless: contains(body, ENDLESS.as_bytes()),
            has_waited: false,
        }
    }
}

impl Stream for Chunks {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_endless && self.next > 0 {
            return Poll::Pending;
        }
        if let Some(pace) = &mut self.pace {
            std::task::ready!(pace.poll_tick(cx));
        } else if !self.has_waited {
            // What is there already is written meanwhile.
            self.has_waited = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.has_waited = false;
        let (number, all) = (self.next, self.all);
        self.next += 1;
        Poll::Ready(match number.cmp(&all) {
            std::cmp::Ordering::Less => Some(Ok(chunk(number, all).into())),
            std::cmp::Ordering::Equal => Some(Ok(Bytes::from_static(b"data: [DONE]\n\n"))),
            std::cmp::Ordering::Greater => None,
        })
    }
}
