//! Sends comments to a client of a stream while its turn waits for a worker's answer.
//!
//! While only comments were sent, the turn may still go to another worker. Between the head of a
//! worker's answer and its first event, `turn::answer` sends the comments.

use std::{
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use http::{HeaderValue, header, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt as _, Limited};
use service::refusal::{Api, Code, Refusal};
use tokio::time::Sleep;
use tracing::debug;

use crate::turn::{agent_body::is_event_stream, answer::WAITING_COMMENT, arrival::TurnFlags};

/// Limits an answer that is no stream: an engine's error of a few hundred bytes, or one JSON value,
/// of an engine that doesn't stream on this route. Of 4,096 turns that wait at once, 4 GiB.
const ANSWER_BYTES_MAX: usize = 1 << 20;

type AnswerFuture = Pin<Box<dyn Future<Output = Result<Response, Refusal>> + Send>>;

#[derive(Debug)]
pub(super) struct ErrorForm {
    api: Api,
    request_id: String,
}

impl ErrorForm {
    pub(super) fn new(request: &Parts) -> Self {
        // The server has given each request an id.
        let id = request.headers.get("x-request-id").and_then(|id| id.to_str().ok());
        let request_id = id.unwrap_or_default().to_owned();
        Self { api: Api::for_request(request.uri.path(), &request.headers), request_id }
    }
}

/// Returns the turn's own answer if that comes within `interval`, or if the client wants no stream;
/// otherwise the head of a stream, whose body goes on to wait.
pub(super) async fn answer(
    mut turn: AnswerFuture,
    flags: &TurnFlags,
    interval: Duration,
    form: ErrorForm,
) -> Response {
    loop {
        match tokio::time::timeout(interval, &mut turn).await {
            Ok(answer) => return answer.unwrap_or_else(Refusal::into_response),
            Err(_) if flags.wants_stream() => break,
            // The request's body may still arrive, and ask for a stream.
            Err(_) => {}
        }
    }
    let body = WaitingBody {
        stage: Stage::Waiting(Box::pin(await_answer(turn, form))),
        // The first comment makes the head visible.
        has_comment: true,
        interval,
        next_comment: Box::pin(tokio::time::sleep(interval)),
    };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

enum Rest {
    Stream(Body),
    Events(Bytes),
}

async fn await_answer(turn: AnswerFuture, form: ErrorForm) -> Rest {
    let ErrorForm { api, request_id } = form;
    let response = match turn.await {
        Ok(response) => response,
        Err(refusal) => {
            debug!(request_id, code = refusal.code.as_str(), "stream refused");
            let body = api.body(&refusal, &request_id);
            return Rest::Events(api.error_events(refusal.code.status(), &body));
        }
    };
    let (parts, body) = response.into_parts();
    if parts.status.is_success() && is_event_stream(&parts.headers) {
        return Rest::Stream(body);
    }
    let Ok(body) = Limited::new(body, ANSWER_BYTES_MAX).collect().await else {
        let why = "the engine's answer, which is no stream, broke off or exceeds 1 MiB; send it \
                   again without `stream`";
        let refusal = Refusal::new(Code::WorkerBrokeOff, why);
        let body = api.body(&refusal, &request_id);
        return Rest::Events(api.error_events(refusal.code.status(), &body));
    };
    let body = body.to_bytes();
    Rest::Events(if parts.status.is_success() {
        one_event(&body)
    } else {
        api.error_events(parts.status, &body)
    })
}

/// The client asked for a stream, but the answer is one JSON value.
fn one_event(body: &[u8]) -> Bytes {
    // JSON has line ends only between its tokens, and an event's data has none.
    let text = String::from_utf8_lossy(body).replace(['\r', '\n'], " ");
    format!("data: {text}\n\ndata: [DONE]\n\n").into()
}

enum Stage {
    Waiting(Pin<Box<dyn Future<Output = Rest> + Send>>),
    Streaming(Body),
    Ended,
}

struct WaitingBody {
    stage: Stage,
    /// Whether a comment is due now.
    has_comment: bool,
    interval: Duration,
    next_comment: Pin<Box<Sleep>>,
}

impl http_body::Body for WaitingBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        loop {
            match &mut this.stage {
                Stage::Ended => return Poll::Ready(None),
                Stage::Streaming(body) => return Pin::new(body).poll_frame(context),
                Stage::Waiting(rest) => match rest.as_mut().poll(context) {
                    Poll::Ready(Rest::Stream(body)) => this.stage = Stage::Streaming(body),
                    Poll::Ready(Rest::Events(events)) => {
                        this.stage = Stage::Ended;
                        return Poll::Ready(Some(Ok(Frame::data(events))));
                    }
                    Poll::Pending => {
                        if !std::mem::take(&mut this.has_comment) {
                            ready!(this.next_comment.as_mut().poll(context));
                            let next_at = tokio::time::Instant::now() + this.interval;
                            this.next_comment.as_mut().reset(next_at);
                        }
                        return Poll::Ready(Some(Ok(Frame::data(WAITING_COMMENT))));
                    }
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.stage {
            Stage::Waiting(_) => false,
            Stage::Streaming(body) => body.is_end_stream(),
            Stage::Ended => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use tokio::sync::oneshot;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    /// A turn whose answer the test gives, and a client that asked for a stream.
    fn turn(path: &str) -> (oneshot::Sender<Result<Response, Refusal>>, AnswerFuture, ErrorForm) {
        let (give, answer) = oneshot::channel();
        let mut parts = http::Request::new(()).into_parts().0;
        parts.uri = path.parse().unwrap();
        parts.headers.insert("x-request-id", HeaderValue::from_static("r-1"));
        let form = ErrorForm::new(&parts);
        (give, Box::pin(async move { answer.await.expect("the test gives one") }), form)
    }

    fn stream_flag() -> TurnFlags {
        let flag = TurnFlags::default();
        flag.set(true, false);
        flag
    }

    async fn next_data(body: &mut Body) -> Option<String> {
        let frame = body.frame().await?.unwrap();
        Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_waits_gets_its_head_then_comments_then_its_worker_s_bytes() {
        let (give, turn, form) = turn("/v1/chat/completions");
        let started = tokio::time::Instant::now();
        let response = answer(turn, &stream_flag(), INTERVAL, form).await;
        assert_eq!((response.status(), started.elapsed()), (StatusCode::OK, INTERVAL));
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        let mut body = response.into_body();
        for comments in 0..3 {
            assert_eq!(next_data(&mut body).await.unwrap(), ": waiting\n");
            assert_eq!(started.elapsed(), INTERVAL * (comments + 1), "the first comes at once");
        }
        let events = Response::builder().header("content-type", "text/event-stream; charset=utf-8");
        give.send(Ok(events.body(Body::from("data: 1\n\n")).unwrap())).unwrap();
        assert_eq!(next_data(&mut body).await.unwrap(), "data: 1\n\n");
        assert_eq!(next_data(&mut body).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_after_the_head_is_an_error_event_of_the_client_s_api() {
        for (path, begins) in [
            ("/v1/chat/completions", "data: {\"error\":{\"code\":\"queue_time\""),
            ("/v1/messages", "event: error\ndata: {\"error\":{"),
        ] {
            let (give, turn, form) = turn(path);
            let mut body = answer(turn, &stream_flag(), INTERVAL, form).await.into_body();
            next_data(&mut body).await.unwrap();
            give.send(Err(Refusal::new(Code::QueueTime, "waited"))).unwrap();
            let events = next_data(&mut body).await.unwrap();
            assert!(events.starts_with(begins), "{events}");
            assert_eq!(events.ends_with("data: [DONE]\n\n"), path != "/v1/messages", "{events}");
            assert_eq!(next_data(&mut body).await, None, "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_s_error_after_the_head_is_an_event_too() {
        let (give, turn, form) = turn("/v1/completions");
        let mut body = answer(turn, &stream_flag(), INTERVAL, form).await.into_body();
        next_data(&mut body).await.unwrap();
        let error = Body::from(r#"{"object":"error","message":"no"}"#);
        give.send(Ok(Response::builder().status(400).body(error).unwrap())).unwrap();
        let events = next_data(&mut body).await.unwrap();
        assert!(events.starts_with("data: {\"error\":{\"message\":\"no\""), "{events}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_answer_that_is_no_stream_comes_whole_or_as_an_error() {
        for (bytes, begins) in
            [(1 << 19, "data: \"xxx"), (1 << 21, "data: {\"error\":{\"code\":\"worker_broke_off\"")]
        {
            let (give, turn, form) = turn("/v1/chat/completions");
            let mut body = answer(turn, &stream_flag(), INTERVAL, form).await.into_body();
            next_data(&mut body).await.unwrap();
            let value = format!("\"{}\"", "x".repeat(bytes));
            give.send(Ok(Response::new(Body::from(value)))).unwrap();
            let events = next_data(&mut body).await.unwrap();
            assert!(events.starts_with(begins), "{}", &events[..80]);
            assert_eq!(events.len() > bytes, bytes == 1 << 19);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_no_stream_waits_without_a_head() {
        let (give, turn, form) = turn("/v1/chat/completions");
        let flag = TurnFlags::default();
        let answer = answer(turn, &flag, INTERVAL, form);
        tokio::pin!(answer);
        assert!(tokio::time::timeout(INTERVAL * 5, &mut answer).await.is_err());
        give.send(Err(Refusal::new(Code::QueueTime, "waited"))).unwrap();
        assert_eq!(answer.await.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}
