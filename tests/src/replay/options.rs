//! The options of a replay, and the check for invalid combinations (a pure module).

use crate::replay::dialog::RequestStyle;
use crate::replay::shape::Shape;
use std::time::Duration;

/// The HTTP API of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Api {
    /// SGLang's `/generate` with token ids.
    Generate,
    /// OpenAI's `/v1/chat/completions`.
    Chat,
}

/// The session headers of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SessionHeaders {
    /// No session header.
    None,
    /// The session's id on each turn.
    Header,
    /// The session's id, and a mark on the last turn.
    Final,
}

/// The retention of sessions that are opened and closed explicitly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SessionOpen {
    /// Private, pinned KV.
    Pinned,
    /// Tagged KV.
    Tagged,
    /// Whatever the server chooses.
    Auto,
}

impl SessionOpen {
    /// Returns the name used on the wire.
    pub fn retention(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Tagged => "tagged",
            Self::Auto => "auto",
        }
    }
}

/// What determines when requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// Each of `users` sends its next turn a think time after the answer.
    Closed {
        /// The number of conversations that run concurrently.
        users: usize,
        /// The factor on think times.
        time_scale: f64,
        /// The longest think time, after scaling.
        think_max: Duration,
        /// The period over which the users' starts are spread evenly.
        ramp: Duration,
    },
    /// Requests are sent at the times in the trace, accelerated by `rate`.
    Open {
        /// The factor on the trace's speed.
        rate: f64,
        /// The time between the starts of conversations, if the trace has no start times.
        arrival_gap: Duration,
        /// The most requests in flight; requests beyond this are dropped and counted.
        outstanding_max: usize,
    },
}

/// All options of a replay except its workload.
#[derive(Debug, Clone)]
pub struct ReplayOptions {
    /// The server: `http://host:port`, with an optional path before the API's path.
    pub url: String,
    /// The HTTP API of the requests.
    pub api: Api,
    /// The model's name, for the chat API.
    pub model: String,
    /// The scaling and limits of sizes.
    pub shape: Shape,
    /// The vocabulary size; token ids are below this.
    pub vocab: u32,
    /// The bytes of text that stand for one token.
    pub bytes_per_token: usize,
    /// Whether the engine's real answers go into later prompts.
    pub echo: bool,
    /// Whether an answer may end before its length, at the model's end-of-sequence token.
    pub stop_at_eos: bool,
    /// Whether answers are streamed.
    pub stream: bool,
    /// The session headers of a turn.
    pub sessions: SessionHeaders,
    /// Opens and closes sessions explicitly, with this retention.
    pub session_open: Option<SessionOpen>,
    /// The prefix of session ids; must be unique among the runs on one server.
    pub run_id: String,
    /// The token of an `Authorization: Bearer` header on each request.
    pub bearer: Option<String>,
    /// What determines when requests are sent.
    pub pace: Pace,
    /// The seed of the order of conversations and of the contents of prompts.
    pub seed: u64,
    /// The time after which the replay ends.
    pub duration_max: Option<Duration>,
    /// The number of turns after which the replay ends.
    pub turns_max: Option<u64>,
    /// Starts the trace again at its end.
    pub recycle: bool,
    /// How long running turns may continue after a stop.
    pub grace: Duration,
    /// The longest time of one request.
    pub timeout: Duration,
    /// The most retries of a turn after a 429 with `Retry-After`.
    pub retries_max: u32,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            api: Api::Chat,
            model: "default".to_owned(),
            shape: Shape::default(),
            vocab: 256,
            bytes_per_token: 1,
            echo: true,
            stop_at_eos: false,
            stream: true,
            sessions: SessionHeaders::None,
            session_open: None,
            run_id: format!("replay-{:08x}", fastrand::u32(..)),
            bearer: None,
            pace: Pace::Closed {
                users: 8,
                time_scale: 1.0,
                think_max: Duration::from_secs(60),
                ramp: Duration::ZERO,
            },
            seed: 0,
            duration_max: None,
            turns_max: None,
            recycle: false,
            grace: Duration::from_secs(10),
            timeout: Duration::from_secs(600),
            retries_max: 5,
        }
    }
}

impl ReplayOptions {
    /// Returns all problems of the options; empty if the options are valid.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut must = |good: bool, problem: &str| {
            if !good {
                problems.push(problem.to_owned());
            }
        };
        let uri = self.url.parse::<http::Uri>();
        let plain = uri.is_ok_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some());
        must(plain, "--url must be http://host[:port][/path]");
        let scale = self.shape.scale;
        must(scale > 0.0 && scale <= 1e3, "--scale-tokens must be above 0 and at most 1000");
        must(self.shape.context_tokens_max != Some(0), "--max-context must be at least 1");
        must(self.shape.output_tokens_max != Some(0), "--max-output must be at least 1");
        must(self.vocab > 0, "--vocab must be at least 1");
        must((1..=64).contains(&self.bytes_per_token), "--bytes-per-token must be 1 to 64");
        must(!self.timeout.is_zero(), "--timeout-s must be above 0");
        must(self.turns_max != Some(0), "--turns must be at least 1");
        must(self.duration_max != Some(Duration::ZERO), "--seconds must be above 0");
        let named = self.sessions != SessionHeaders::None;
        must(self.session_open.is_none() || named, "--session-open needs --sessions header|final");
        let id = !self.run_id.is_empty() && self.run_id.len() <= 128;
        let visible = self.run_id.bytes().all(|byte| byte.is_ascii_graphic());
        must(id && visible, "--run-id must be 1 to 128 visible ASCII bytes");
        let bearer = self.bearer.iter().flat_map(|bearer| bearer.bytes());
        must(bearer.into_iter().all(|b| b.is_ascii_graphic()), "--bearer must be visible ASCII");
        match self.pace {
            Pace::Closed { users, time_scale, .. } => {
                must((1..=100_000).contains(&users), "--users must be 1 to 100000");
                must((0.0..=1e6).contains(&time_scale), "--time-scale must be 0 to 1000000");
            }
            Pace::Open { rate, outstanding_max, .. } => {
                must(rate > 0.0 && rate <= 1e6, "--rate must be above 0 and at most 1000000");
                must(
                    (1..=100_000).contains(&outstanding_max),
                    "--outstanding-max must be 1 to 100000",
                );
            }
        }
        let bounded = self.duration_max.is_some() || self.turns_max.is_some();
        must(!self.recycle || bounded, "--recycle needs --seconds or --turns");
        problems
    }

    /// Whether turns carry only tokens that the session doesn't have yet.
    pub fn delta(&self) -> bool {
        self.api == Api::Generate && self.session_open == Some(SessionOpen::Pinned)
    }

    /// Returns the format of request bodies.
    pub fn style(&self) -> RequestStyle {
        RequestStyle {
            api: self.api,
            shape: self.shape,
            vocab: self.vocab,
            bytes_per_token: self.bytes_per_token,
            echo: self.echo,
            stop_at_eos: self.stop_at_eos,
            stream: self.stream,
            model: self.model.clone(),
            delta: self.delta(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_reported_together() {
        let good =
            ReplayOptions { url: "http://localhost:1".to_owned(), ..ReplayOptions::default() };
        assert_eq!(good.problems(), Vec::<String>::new());
        let bad = ReplayOptions {
            url: "https://localhost".to_owned(),
            vocab: 0,
            session_open: Some(SessionOpen::Auto),
            recycle: true,
            ..ReplayOptions::default()
        };
        assert_eq!(bad.problems().len(), 4);
    }
}
