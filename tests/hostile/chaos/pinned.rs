//! Users who keep pinned sessions, and check that each turn continues what was said.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::anyhow;
use axum::body::Body;
use harness::{
    fleet::{Origin, Processes, credential},
    web::Answer,
};
use http::Method;
use serde_json::json;
use service::clock::now;

use crate::users::{Failure, Why, succeed};

/// Turns of a session, and tokens of each answer.
const TURNS: u64 = 40;
const ANSWER_TOKENS: u64 = 8;
/// How often a turn is sent again, and the pause before it, while its refusals allow that.
const REPEATS_MAX: usize = 20;
const REPEAT_PAUSE: Duration = Duration::from_millis(500);

/// Someone who keeps pinned sessions, one after the other.
#[derive(Debug)]
pub(crate) struct PinnedUser {
    number: usize,
    /// URLs of the routers' data ports.
    routers: Vec<String>,
    origin: Origin,
}

/// What a user did.
#[derive(Debug, Default)]
pub(crate) struct Worked {
    pub(crate) lives: Vec<Life>,
    pub(crate) failures: Vec<Failure>,
}

/// The answered turns of one session.
#[derive(Debug, Default)]
pub(crate) struct Life {
    pub(crate) turns: Vec<Turn>,
}

/// A turn that was answered.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The worker that ran it.
    pub(crate) worker: String,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

impl Turn {
    pub(crate) fn seconds(&self) -> f64 {
        self.ended.duration_since(self.began).as_secs_f64()
    }
}

impl PinnedUser {
    pub(crate) fn new(fleet: &Processes, number: usize) -> Self {
        Self { number, routers: fleet.router_urls(), origin: fleet.origin.clone() }
    }

    /// Works until `stop` is set.
    ///
    /// # Errors
    /// If a turn ran on another context than its session's.
    pub(crate) async fn work(&self, stop: &AtomicBool) -> anyhow::Result<Worked> {
        let mut worked = Worked::default();
        for life in 0usize.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let router = (self.number + life) % self.routers.len();
            let mut session = Session {
                id: format!("pinned-{}-{life}", self.number),
                url: &self.routers[router],
                router,
                user: self,
                web: self.origin.web(),
                life: Life::default(),
            };
            let result = session.live(stop, &mut worked.failures).await;
            if result.is_err() {
                // A client that gives up its session frees what it holds, if it can.
                drop(session.close().await);
            }
            worked.lives.push(session.life);
            match result {
                Ok(()) => {}
                Err(End::Wrong(error)) => return Err(error),
                Err(End::Failed(failure)) => worked.failures.push(failure),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(worked)
    }
}

/// A session from its opening to its end.
struct Session<'a> {
    id: String,
    url: &'a str,
    router: usize,
    user: &'a PinnedUser,
    web: harness::web::Web,
    life: Life,
}

/// Why a session ended early.
enum End {
    /// A turn ran on another context than the session's.
    Wrong(anyhow::Error),
    /// A request failed, and it can't be sent again as it was.
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Session<'_> {
    /// Opens the session and continues it. Adds the failures after which a turn was sent again.
    async fn live(&mut self, stop: &AtomicBool, failures: &mut Vec<Failure>) -> Result<(), End> {
        let key = credential("bob");
        let headers = [("authorization", key.as_str())];
        let (url, began) = (format!("{}/v1/sessions", self.url), now());
        let open = json!({ "session_id": self.id, "retention": "pinned" });
        succeed(self.web.post(&url, &headers, &open).await, self.router, began)?;
        let mut history = 0;
        for turn in 0..TURNS {
            // Of another length for each user, so that the count of tokens tells sessions apart.
            let text = format!("turn {turn} of {}{} ", self.id, ".".repeat(self.user.number));
            let answer = self.turn(&text, failures).await?;
            // The toy tokenizer makes a token of each character.
            let expected = history + text.len() as u64;
            if answer.meta("prompt_tokens") != Some(expected) {
                let (found, id) = (answer.meta("prompt_tokens"), &self.id);
                let error =
                    anyhow!("{id} turn {turn}: {expected} tokens expected, {found:?} found");
                return Err(End::Wrong(error));
            }
            history = expected + ANSWER_TOKENS;
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        let began = now();
        succeed(self.close().await, self.router, began)?;
        Ok(())
    }

    async fn close(&self) -> anyhow::Result<Answer> {
        let (url, key) = (format!("{}/v1/sessions/{}", self.url, self.id), credential("bob"));
        let headers = [("authorization", key.as_str())];
        self.web.request(Method::DELETE, &url, &headers, Body::empty()).await
    }

    /// Runs a turn. Sends it again while a refusal says that nothing has run.
    async fn turn(&mut self, text: &str, failures: &mut Vec<Failure>) -> Result<Answer, End> {
        let (url, key) = (format!("{}/generate", self.url), credential("bob"));
        let headers = [
            ("authorization", key.as_str()),
            ("x-berth-session-id", self.id.as_str()),
            ("x-berth-delta", "1"),
        ];
        let sampling = json!({
            "max_new_tokens": ANSWER_TOKENS, "ignore_eos": true, "temperature": 0,
        });
        let body = json!({ "text": text, "sampling_params": sampling });
        for repeats in 0.. {
            let began = now();
            match succeed(self.web.post(&url, &headers, &body).await, self.router, began) {
                Ok(answer) => {
                    let worker = answer.header("x-berth-worker").to_owned();
                    self.life.turns.push(Turn { worker, began, ended: now() });
                    return Ok(answer);
                }
                Err(failure) => {
                    let may_repeat = matches!(failure.why, Why::Refused { may_repeat: true, .. });
                    if !may_repeat || repeats == REPEATS_MAX {
                        return Err(failure.into());
                    }
                    failures.push(failure);
                }
            }
            tokio::time::sleep(REPEAT_PAUSE).await;
        }
        unreachable!("the last repeat returns");
    }
}
