//! The requests that go into the core and the outputs that come out of it.

use std::time::Duration;

/// Identifies a request inside one core.
pub type ReqKey = u64;

/// How an answer is sampled and where it ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The most output tokens; `None` generates until the context is full.
    pub max_new_tokens: Option<usize>,
    pub ignore_eos: bool,
    /// Temperature 0: the answer depends on the context alone, not on the seed.
    pub greedy: bool,
    /// Token sequences that end the answer.
    pub stop: Vec<Vec<u32>>,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { max_new_tokens: Some(128), ignore_eos: false, greedy: true, stop: Vec::new() }
    }
}

/// The `session_params` of `/generate`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionParams {
    pub id: String,
    pub rid: Option<String>,
    pub offset: i64,
    pub replace: bool,
    pub drop_previous_output: bool,
}

/// The session that a request names, if any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SessionRef {
    #[default]
    None,
    /// `session_params`: a session opened by `/open_session`.
    Controller(SessionParams),
    /// A top-level `session_id`: the radix cache tags the KV if `session_radix_cache` is set.
    Tagged(String),
}

/// The cache namespace: keeps equal prefixes of different namespaces apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Space {
    pub extra_key: Option<String>,
    pub cache_salt: Option<String>,
}

/// A request as the scheduler receives it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Submit {
    pub rid: String,
    pub input_ids: Vec<u32>,
    pub sampling: Sampling,
    pub session: SessionRef,
    pub space: Space,
    /// How much its KV is worth, for the eviction policy `priority`.
    pub priority: i64,
    /// How the engine finds the other engine of its pair.
    pub bootstrap: Option<Bootstrap>,
    /// The prompt's KV comes from another engine, which had this many tokens of it cached.
    pub given: Option<usize>,
}

/// The body's members about the other engine of a pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bootstrap {
    pub host: String,
    pub port: u16,
    pub room: Option<u64>,
    pub prefill_rank: Option<usize>,
}

impl Bootstrap {
    /// Reads the members. They have the same names on all routes.
    pub fn read(body: &serde_json::Map<String, serde_json::Value>) -> Self {
        let number = |key: &str| body.get(key)?.as_u64();
        let host = body.get("bootstrap_host").and_then(|host| host.as_str());
        let rank = number("disagg_prefill_dp_rank");
        Self {
            host: host.unwrap_or_default().to_owned(),
            port: u16::try_from(number("bootstrap_port").unwrap_or(8998)).unwrap_or(0),
            room: number("bootstrap_room"),
            prefill_rank: rank.and_then(|rank| usize::try_from(rank).ok()),
        }
    }
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    Length(usize),
    StopToken(u32),
    /// The answer ends with this stop sequence.
    StopText(Vec<u32>),
    Abort {
        message: String,
        status: Option<u16>,
        /// Aborted before it ran: the answer has no status keys.
        queued: bool,
    },
}

impl Finish {
    pub(super) fn bad_request(message: impl Into<String>) -> Finish {
        Finish::Abort { message: message.into(), status: Some(400), queued: false }
    }
}

/// One request's progress in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub key: ReqKey,
    pub token: Option<u32>,
    pub finish: Option<Finish>,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    /// The part of `cached_tokens` that was loaded from the host.
    pub host_tokens: usize,
    pub retractions: u32,
}

/// The result of one scheduler iteration, which becomes visible after `busy`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStep {
    pub outputs: Vec<Output>,
    pub busy: Duration,
}

/// How the caches treat a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    Plain,
    Normal {
        session: String,
    },
    Streaming {
        session: String,
    },
    /// `life` is the tag's life at the time of submission.
    Tagged {
        session: String,
        life: u64,
    },
}

/// A request in the queue or in a batch.
#[derive(Clone, Debug)]
pub(super) struct Req {
    pub(super) rid: String,
    pub(super) prompt: Vec<u32>,
    pub(super) output: Vec<u32>,
    pub(super) sampling: Sampling,
    /// `max_new_tokens`, clamped to the context.
    pub(super) max_new: usize,
    pub(super) kind: RequestKind,
    pub(super) space: Space,
    pub(super) priority: i64,
    /// The top-level `session_id`, even if it doesn't tag the KV.
    pub(super) session_id: Option<String>,
    pub(super) row: Option<usize>,
    /// The number of tokens whose KV this request has computed or borrowed.
    pub(super) seq: usize,
    pub(super) cached: usize,
    pub(super) from_host: usize,
    /// Whether the prompt is shared through the tree: true for a first turn; later turns are
    /// private.
    pub(super) publishes: bool,
    /// The refusal, if the request was rejected before it ran; a one-token dummy runs in its place.
    pub(super) refused: Option<Finish>,
    /// See [`Submit::given`].
    pub(super) given: Option<usize>,
    pub(super) to_abort: bool,
    pub(super) retractions: u32,
}

impl Req {
    /// Returns the number of tokens that need KV before the next output token.
    pub(super) fn fill_len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    pub(super) fn fill_token(&self, at: usize) -> u32 {
        self.prompt.get(at).copied().unwrap_or_else(|| self.output[at - self.prompt.len()])
    }

    pub(super) fn fill(&self, len: usize) -> Vec<u32> {
        (0..len).map(|at| self.fill_token(at)).collect()
    }

    /// Returns the session that must learn of this request's end.
    pub(super) fn controller_session(&self) -> Option<&str> {
        match &self.kind {
            RequestKind::Normal { session } | RequestKind::Streaming { session } => Some(session),
            RequestKind::Plain | RequestKind::Tagged { .. } => None,
        }
    }
}
