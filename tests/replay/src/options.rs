//! The options of a replay, and the check for invalid combinations (a pure module).

use crate::shape::Shape;
use clap::{ArgAction, Args, FromArgMatches as _};
use std::{path::PathBuf, time::Duration};

/// The bound of a time, about 68 years.
const SECONDS_MAX: f64 = 2_147_483_648.0;

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
#[derive(Debug, Clone, Args)]
pub struct ReplayOptions {
    /// The server's URL: http://host:port[/path], or https:// with --ca
    #[arg(long)]
    pub url: String,
    /// The CA of the server's certificate (PEM)
    #[arg(long)]
    pub ca: Option<PathBuf>,
    /// The API of the requests
    #[arg(long, value_enum, default_value = "chat")]
    pub api: Api,
    /// The model's name (chat)
    #[arg(long, default_value = "default")]
    pub model: String,
    /// The scaling and limits of sizes.
    #[command(flatten)]
    pub shape: Shape,
    /// The vocabulary size; token ids are below this (generate)
    #[arg(long, default_value_t = 256)]
    pub vocab: u32,
    /// The bytes of text that stand for a token (chat): 1 for byte tokenizers, about 4 for others
    #[arg(long, default_value_t = 1)]
    pub bytes_per_token: usize,
    /// Keep the trace's answers in later prompts, instead of the engine's answers
    #[arg(long = "no-echo", action = ArgAction::SetFalse)]
    pub echo: bool,
    /// Let answers end before their length, at the model's end-of-sequence token
    #[arg(long)]
    pub stop_at_eos: bool,
    /// Request answers without streaming
    #[arg(long = "no-stream", action = ArgAction::SetFalse)]
    pub stream: bool,
    /// The session headers on turns
    #[arg(long, value_enum, default_value = "none")]
    pub sessions: SessionHeaders,
    /// Open and close each session explicitly
    #[arg(long, value_enum)]
    pub session_open: Option<SessionOpen>,
    /// The prefix of session ids, unique among the runs on one server [default: a random name]
    #[arg(long, default_value_t = random_run_id(), hide_default_value = true)]
    pub run_id: String,
    /// A bearer token for each request
    #[arg(long, env = "BERTH_REPLAY_BEARER", hide_env_values = true)]
    pub bearer: Option<String>,
    /// Closed loop: the number of concurrent conversations [default: 8]
    #[arg(long)]
    pub users: Option<usize>,
    /// Closed loop: the factor on think times [default: 1]
    #[arg(long)]
    pub time_scale: Option<f64>,
    /// Closed loop: the longest think time, in seconds [default: 60]
    #[arg(long)]
    pub think_cap_s: Option<f64>,
    /// Closed loop: the seconds over which the users' starts are spread [default: 0]
    #[arg(long)]
    pub ramp_s: Option<f64>,
    /// Open loop, at this many times the trace's speed
    #[arg(long)]
    pub rate: Option<f64>,
    /// Open loop: the seconds between conversations, if the trace has no times [default: 10]
    #[arg(long)]
    pub arrival_gap_s: Option<f64>,
    /// Open loop: the most requests in flight; requests beyond this are dropped [default: 256]
    #[arg(long)]
    pub outstanding_max: Option<usize>,
    /// The seed of the order and the contents of conversations
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Stop after this many seconds
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Stop after this many turns
    #[arg(long = "turns")]
    pub turns_max: Option<u64>,
    /// Start the trace again at its end, with other contents
    #[arg(long)]
    pub recycle: bool,
    /// The seconds that running turns may continue after a stop
    #[arg(long, default_value_t = 10.0)]
    pub grace_s: f64,
    /// The longest time of a request, in seconds
    #[arg(long, default_value_t = 600.0)]
    pub timeout_s: f64,
    /// The most retries of a turn after a 429 with Retry-After
    #[arg(long, default_value_t = 5)]
    pub retries_max: u32,
}

impl Default for ReplayOptions {
    /// Returns the defaults of the command line, without a URL.
    fn default() -> Self {
        let command = Self::augment_args(clap::Command::new("replay"));
        let matches = command.get_matches_from(["replay", "--url="]);
        Self::from_arg_matches(&matches).expect("all others have defaults")
    }
}

fn random_run_id() -> String {
    format!("replay-{:08x}", fastrand::u32(..))
}

/// Converts a number of seconds that was checked with the options.
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
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
        let is_legal = uri.is_ok_and(|uri| match uri.scheme_str() {
            Some("http") => uri.host().is_some(),
            Some("https") => uri.host().is_some() && self.ca.is_some(),
            _ => false,
        });
        must(is_legal, "--url must be http://host[:port][/path], or https:// with --ca");
        let scale = self.shape.scale;
        must(scale > 0.0 && scale <= 1e3, "--scale-tokens must be above 0 and at most 1000");
        must(self.shape.context_tokens_max != Some(0), "--max-context must be at least 1");
        must(self.shape.output_tokens_max != Some(0), "--max-output must be at least 1");
        must(self.vocab > 0, "--vocab must be at least 1");
        must((1..=64).contains(&self.bytes_per_token), "--bytes-per-token must be 1 to 64");
        must(self.timeout_s > 0.0, "--timeout-s must be above 0");
        must(self.turns_max != Some(0), "--turns must be at least 1");
        must(self.seconds.is_none_or(|time| time > 0.0), "--seconds must be above 0");
        let named = self.sessions != SessionHeaders::None;
        must(self.session_open.is_none() || named, "--session-open needs --sessions header|final");
        let id = !self.run_id.is_empty() && self.run_id.len() <= 128;
        let visible = self.run_id.bytes().all(|byte| byte.is_ascii_graphic());
        must(id && visible, "--run-id must be 1 to 128 visible ASCII bytes");
        let bearer = self.bearer.iter().flat_map(|bearer| bearer.bytes());
        must(bearer.into_iter().all(|b| b.is_ascii_graphic()), "--bearer must be visible ASCII");
        match self.pace() {
            Pace::Closed { users, time_scale, .. } => {
                must((1..=100_000).contains(&users), "--users must be 1 to 100000");
                must((0.0..=1e6).contains(&time_scale), "--time-scale must be 0 to 1000000");
            }
            Pace::Open { rate, outstanding_max, .. } => {
                must(rate > 0.0 && rate <= 1e6, "--rate must be above 0 and at most 1000000");
                let most = (1..=100_000).contains(&outstanding_max);
                must(most, "--outstanding-max must be 1 to 100000");
            }
        }
        let bounded = self.seconds.is_some() || self.turns_max.is_some();
        must(!self.recycle || bounded, "--recycle needs --seconds or --turns");
        let times = [
            ("think-cap-s", self.think_cap_s),
            ("ramp-s", self.ramp_s),
            ("arrival-gap-s", self.arrival_gap_s),
            ("seconds", self.seconds),
            ("grace-s", Some(self.grace_s)),
            ("timeout-s", Some(self.timeout_s)),
        ];
        for (name, value) in times {
            if let Some(value) = value.filter(|value| !(0.0..SECONDS_MAX).contains(value)) {
                problems.push(format!("--{name} must be a time in seconds, not {value}"));
            }
        }
        problems.extend(self.contradictions());
        problems
    }

    /// Whether turns carry only tokens that the session doesn't have yet.
    pub fn delta(&self) -> bool {
        self.api == Api::Generate && self.session_open == Some(SessionOpen::Pinned)
    }

    /// Returns what determines when requests are sent.
    pub fn pace(&self) -> Pace {
        match self.rate {
            Some(rate) => Pace::Open {
                rate,
                arrival_gap: seconds(self.arrival_gap_s.unwrap_or(10.0)),
                outstanding_max: self.outstanding_max.unwrap_or(256),
            },
            None => Pace::Closed {
                users: self.users.unwrap_or(8),
                time_scale: self.time_scale.unwrap_or(1.0),
                think_max: seconds(self.think_cap_s.unwrap_or(60.0)),
                ramp: seconds(self.ramp_s.unwrap_or(0.0)),
            },
        }
    }

    /// Returns problems for options of the loop that isn't selected.
    fn contradictions(&self) -> impl Iterator<Item = String> {
        let closed_only = [
            ("users", self.users.is_some()),
            ("time-scale", self.time_scale.is_some()),
            ("think-cap-s", self.think_cap_s.is_some()),
            ("ramp-s", self.ramp_s.is_some()),
        ];
        let open_only = [
            ("arrival-gap-s", self.arrival_gap_s.is_some()),
            ("outstanding-max", self.outstanding_max.is_some()),
        ];
        let (wrong, why) = if self.rate.is_some() {
            (closed_only.to_vec(), "is for the closed loop, without --rate")
        } else {
            (open_only.to_vec(), "is for the open loop: it needs --rate")
        };
        let given = wrong.into_iter().filter(|(_, given)| *given);
        given.map(move |(name, _)| format!("--{name} {why}"))
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
