//! Sends other people's turns, one after the other for each user, and measures them.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::bail;
use harness::{
    fleet::{Origin, Processes, credential},
    web::{Answer, Web},
};
use serde_json::json;
use service::clock::now;
use tokio::task::JoinSet;

/// Tokens of each answer.
const ANSWER_TOKENS: u32 = 20;

/// The users of the routers: everyone but the attacker.
#[derive(Debug, Clone)]
pub(crate) struct Users {
    /// URLs of the routers' data ports. Users are spread over them.
    routers: Vec<String>,
    /// The address of the users. `None`: that of the attackers, as behind a load balancer.
    origin: Option<Origin>,
    count: usize,
}

/// What the users saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Seconds of each turn that was answered, in order of size.
    seconds: Vec<f64>,
    pub(crate) failures: Vec<Failure>,
}

/// A request that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The router that it was sent to.
    pub(crate) router: usize,
    pub(crate) began: Instant,
    /// When the client knew that it had failed.
    pub(crate) ended: Instant,
    pub(crate) why: Why,
}

/// Why a request failed, as its client sees it.
#[derive(Debug)]
pub(crate) enum Why {
    /// It was refused.
    Refused {
        status: u16,
        /// The refusal's code. Empty if the answer is none of Berth's.
        code: String,
        /// Whether the refusal has a `Retry-After`: then nothing has run, and the same request may
        /// be sent again.
        may_repeat: bool,
    },
    /// There was no connection, or it ended before the answer did.
    Broken(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            Why::Refused { status, code, .. } => write!(f, "{status} {code}")?,
            Why::Broken(error) => write!(f, "{error}")?,
        }
        write!(f, " of router {} after {:.1} s", self.router, self.seconds())
    }
}

impl Failure {
    /// Returns the seconds from the request to the moment when its failure was known.
    pub(crate) fn seconds(&self) -> f64 {
        self.ended.duration_since(self.began).as_secs_f64()
    }
}

/// Returns a successful answer to a request that was sent to a router at `began`.
pub(crate) fn succeed(
    answer: anyhow::Result<Answer>,
    router: usize,
    began: Instant,
) -> Result<Answer, Failure> {
    let why = match answer {
        Ok(answer) if answer.status.is_success() => return Ok(answer),
        Ok(answer) => {
            let (status, code) = answer.refusal();
            Why::Refused { status, code, may_repeat: !answer.header("retry-after").is_empty() }
        }
        Err(error) => Why::Broken(format!("{error:#}")),
    };
    Err(Failure { router, began, ended: now(), why })
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
    }
}

impl Users {
    /// Returns `count` users, spread over the routers of a fleet.
    pub(crate) fn new(fleet: &Processes, count: usize) -> Self {
        Self { routers: fleet.router_urls(), origin: Some(fleet.origin.clone()), count }
    }

    /// Returns these users, with the address of the attackers.
    pub(crate) fn behind_a_balancer(self) -> Self {
        Self { origin: None, ..self }
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
            let router = number % self.routers.len();
            let user = User {
                router,
                url: format!("{}/v1/completions", self.routers[router]),
                web: self.origin.as_ref().map_or_else(Web::default, Origin::web),
                key: credential(if number % 2 == 0 { "alice" } else { "bob" }),
                session: (number % 4 < 2).then(|| format!("user-{number}")),
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
            let first = all.failures.first().map(ToString::to_string);
            bail!("no turn was answered: {}", first.unwrap_or_default());
        }
        Ok(all)
    }
}

struct User {
    router: usize,
    url: String,
    web: Web,
    key: String,
    session: Option<String>,
    number: usize,
}

impl User {
    async fn work(&self, stop: &AtomicBool) -> Seen {
        let (mut seen, mut turn) = (Seen::default(), 0);
        while !stop.load(Ordering::Relaxed) {
            turn += 1;
            let began = now();
            match succeed(self.turn(turn).await, self.router, began) {
                Ok(_) => seen.seconds.push(began.elapsed().as_secs_f64()),
                Err(failure) => {
                    seen.failures.push(failure);
                    // What a client's library does.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        seen
    }

    async fn turn(&self, turn: u64) -> anyhow::Result<Answer> {
        let prompt = format!("user {} turn {turn}: ", self.number).repeat(8);
        let body = json!({
            "model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS,
            "ignore_eos": true, "temperature": 0,
        });
        let mut headers = vec![("authorization", self.key.as_str())];
        if let Some(session) = &self.session {
            headers.push(("x-berth-session-id", session));
            headers.push(("x-berth-retention", "tagged"));
        }
        self.web.post(&self.url, &headers, &body).await
    }
}
