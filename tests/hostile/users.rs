//! Sends other people's turns, one after the other for each user, and measures them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::bail;
use serde_json::json;
use service::clock::now;
use tests::web::Web;
use tokio::task::JoinSet;

use crate::fleet::credential;

/// The users of the routers: everyone but the attacker.
#[derive(Debug, Clone)]
pub(crate) struct Users {
    /// URLs of the routers' data ports. Users are spread over them.
    pub(crate) routers: Vec<String>,
    pub(crate) count: usize,
    /// Tokens of each answer.
    pub(crate) answer_tokens: u32,
}

/// What the users saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Seconds of each turn that was answered, in order of size.
    seconds: Vec<f64>,
    /// Answers other than 200, as `status code`, and broken connections.
    pub(crate) failures: Vec<String>,
    /// Seconds until the slowest of the failures was known.
    pub(crate) slowest_failure: f64,
}

impl Seen {
    pub(crate) fn turns(&self) -> usize {
        self.seconds.len()
    }

    /// Returns the seconds within which this share of the turns ended.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let last = self.seconds.len().saturating_sub(1);
        #[expect(clippy::cast_possible_truncation, reason = "an index into a list in memory")]
        #[expect(clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "far below 2^52")]
        let index = (last as f64 * share).round() as usize;
        self.seconds.get(index).copied().unwrap_or(f64::INFINITY)
    }

    fn add(&mut self, other: Self) {
        self.seconds.extend(other.seconds);
        self.failures.extend(other.failures);
        self.slowest_failure = self.slowest_failure.max(other.slowest_failure);
    }
}

impl Users {
    pub(crate) fn new(routers: Vec<String>) -> Self {
        Self { routers, count: 4, answer_tokens: 20 }
    }

    /// Lets the users work for `time`.
    pub(crate) async fn work(&self, time: Duration) -> anyhow::Result<Seen> {
        let stop = Arc::new(AtomicBool::new(false));
        let working = self.begin(&stop);
        tokio::time::sleep(time).await;
        stop.store(true, Ordering::Relaxed);
        working.end().await
    }

    /// Lets the users work until `stop` is set.
    pub(crate) fn begin(&self, stop: &Arc<AtomicBool>) -> Working {
        let mut tasks = JoinSet::new();
        for number in 0..self.count {
            let user = User {
                url: format!("{}/v1/completions", self.routers[number % self.routers.len()]),
                key: credential(if number % 2 == 0 { "alice" } else { "bob" }),
                session: (number % 4 < 2).then(|| format!("user-{number}")),
                answer_tokens: self.answer_tokens,
                number,
            };
            let stop = Arc::clone(stop);
            tasks.spawn(async move { user.work(&stop).await });
        }
        Working(tasks)
    }
}

/// Users at work.
#[derive(Debug)]
pub(crate) struct Working(JoinSet<Seen>);

impl Working {
    /// Waits for the users, whose flag to stop was set.
    pub(crate) async fn end(mut self) -> anyhow::Result<Seen> {
        let mut all = Seen::default();
        while let Some(seen) = self.0.join_next().await {
            all.add(seen?);
        }
        all.seconds.sort_by(f64::total_cmp);
        if all.turns() == 0 {
            bail!("no turn was answered: {:?}", all.failures.first());
        }
        Ok(all)
    }
}

struct User {
    url: String,
    key: String,
    session: Option<String>,
    answer_tokens: u32,
    number: usize,
}

impl User {
    async fn work(&self, stop: &AtomicBool) -> Seen {
        let (web, mut seen, mut turn) = (Web::default(), Seen::default(), 0);
        while !stop.load(Ordering::Relaxed) {
            turn += 1;
            let began = now();
            match self.turn(&web, turn).await {
                Ok(()) => seen.seconds.push(began.elapsed().as_secs_f64()),
                Err(error) => {
                    seen.failures.push(format!("{error:#}"));
                    let seconds = began.elapsed().as_secs_f64();
                    seen.slowest_failure = seen.slowest_failure.max(seconds);
                    // What a client's library does.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        seen
    }

    async fn turn(&self, web: &Web, turn: u64) -> anyhow::Result<()> {
        let prompt = format!("user {} turn {turn}: ", self.number).repeat(8);
        let body = json!({
            "model": "tiny", "prompt": prompt, "max_tokens": self.answer_tokens,
            "ignore_eos": true, "temperature": 0,
        });
        let mut headers = vec![("authorization", self.key.as_str())];
        if let Some(session) = &self.session {
            headers.push(("x-berth-session-id", session));
            headers.push(("x-berth-retention", "tagged"));
        }
        let answer = web.post(&self.url, &headers, &body).await?;
        if answer.status != 200 {
            let (status, code) = answer.refusal();
            bail!("{status} {code}");
        }
        Ok(())
    }
}
