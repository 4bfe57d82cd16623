//! What a replay is told, and which tellings make no sense. Pure.

use crate::replay::dialog::Style;
use crate::replay::shape::Shape;
use std::time::Duration;

/// Which HTTP API is driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Api {
    /// SGLang's `/generate` with token ids.
    Generate,
    /// OpenAI's `/v1/chat/completions`.
    Chat,
}

/// Which session headers go with a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SessionHeaders {
    /// None.
    None,
    /// The session's id on each turn.
    Header,
    /// Also the mark of the last turn.
    Final,
}

/// How sessions are opened and closed explicitly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SessionOpen {
    /// With private, pinned KV.
    Pinned,
    /// With tagged KV.
    Tagged,
    /// As the server thinks best.
    Auto,
}

impl SessionOpen {
    /// Its name on the wire.
    pub fn retention(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Tagged => "tagged",
            Self::Auto => "auto",
        }
    }
}

/// What paces the requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// Each of `users` sends its next turn a think time after the answer.
    Closed {
        /// How many conversations run side by side.
        users: usize,
        /// Factor on think times.
        time_scale: f64,
        /// Longest think time, after scaling.
        think_max: Duration,
        /// The users' starts are spread evenly over this.
        ramp: Duration,
    },
    /// Requests come when the trace says, faster by `rate`.
    Open {
        /// Factor on the trace's speed.
        rate: f64,
        /// Between the starts of conversations, where the trace doesn't tell them.
        arrival_gap: Duration,
        /// Most requests in flight; what exceeds them is dropped and counted.
        outstanding_max: usize,
    },
}

/// All that a replay is told beside its workload.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to: `http://host:port`, with an optional path in front of the API's.
    pub url: String,
    /// What requests look like.
    pub api: Api,
    /// The model's name, for the chat API.
    pub model: String,
    /// Sizes.
    pub shape: Shape,
    /// Token ids lie below it.
    pub vocab: u32,
    /// Bytes of text that stand for a token.
    pub bytes_per_token: usize,
    /// Whether real answers go into later prompts.
    pub echo: bool,
    /// Whether answers end before their length if the model wants to.
    pub stop_at_eos: bool,
    /// Whether answers are streamed.
    pub stream: bool,
    /// Session headers.
    pub sessions: SessionHeaders,
    /// Explicit opening and closing.
    pub session_open: Option<SessionOpen>,
    /// What session ids start with; unique to a run on one server.
    pub run_id: String,
    /// An `Authorization: Bearer` for each request.
    pub bearer: Option<String>,
    /// Pace.
    pub pace: Pace,
    /// Order of conversations and contents of prompts follow from it.
    pub seed: u64,
    /// Ends after this time.
    pub duration_max: Option<Duration>,
    /// Ends after this many turns.
    pub turns_max: Option<u64>,
    /// Begins the trace again at its end.
    pub recycle: bool,
    /// How long running turns may go on after a stop.
    pub grace: Duration,
    /// Longest time of one request.
    pub timeout: Duration,
    /// How often a turn is tried again after 429 with `Retry-After`.
    pub retries_max: u32,
}

impl Default for Options {
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

impl Options {
    /// Everything that makes no sense, all together; empty when the options are good.
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
        must(scale > 0.0 && scale <= 1e3, "--scale-tokens must lie above 0 and at most at 1000");
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
                must(rate > 0.0 && rate <= 1e6, "--rate must lie above 0 and at most at 1000000");
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

    /// Whether turns carry only what the session does not have yet.
    pub fn delta(&self) -> bool {
        self.api == Api::Generate && self.session_open == Some(SessionOpen::Pinned)
    }

    /// How request bodies look.
    pub fn style(&self) -> Style {
        Style {
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
    fn all_problems_are_said_together() {
        let good = Options { url: "http://localhost:1".to_owned(), ..Options::default() };
        assert_eq!(good.problems(), Vec::<String>::new());
        let bad = Options {
            url: "https://localhost".to_owned(),
            vocab: 0,
            session_open: Some(SessionOpen::Auto),
            recycle: true,
            ..Options::default()
        };
        assert_eq!(bad.problems().len(), 4);
    }
}
