//! Defines the engine's flags that Berth profits from, with what is lost without each. Pure.
//!
//! `doctor` names a flag that an engine lacks, and `init` writes it beside the agent's settings.

/// A flag of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineFlag {
    /// The flag's name.
    pub name: &'static str,
    /// What it costs that the engine lacks the flag.
    pub why: &'static str,
}

/// Lets sessions be pinned.
pub const STREAMING_SESSION: EngineFlag = EngineFlag {
    name: "--enable-streaming-session",
    why: "no session can be pinned: each turn may compute its history again",
};
/// Lets sessions be tagged.
pub const SESSION_RADIX_CACHE: EngineFlag = EngineFlag {
    name: "--enable-session-radix-cache",
    why: "no session can be tagged: its KV is evicted like any other",
};
/// Adds the number of cached tokens to answers.
pub const CACHE_REPORT: EngineFlag = EngineFlag {
    name: "--enable-cache-report",
    why: "answers of the OpenAI routes don't say how many tokens were cached",
};
/// Publishes what the engine's cache holds.
pub const KV_EVENTS: EngineFlag = EngineFlag {
    name: "--kv-events-config",
    why: "routers guess which blocks are resident, from the prompts that they sent",
};
/// Sends KV events again; a part of `--kv-events-config`.
pub const KV_REPLAY: EngineFlag = EngineFlag {
    name: "--kv-events-config",
    why: "a missed KV event is lost: the engine must publish its whole radix tree again",
};

/// The port at which an engine publishes KV events, unless others on the host take it.
pub const KV_EVENTS_PORT: u16 = 5557;

/// What has to be done so that an engine has the shim.
pub const SHIM_FIX: &str = "install worker-agent/shim where the engine runs, for its user; set \
                            BERTH_SHIM_SOCKET to the agent's files.shim_socket";

/// Returns the whole flag with which an engine publishes KV events at these ports of loopback.
#[must_use]
pub fn kv_events_flag(port: u16, replay_port: u16) -> String {
    format!(
        "{} '{{\"publisher\": \"zmq\", \"endpoint\": \"tcp://127.0.0.1:{port}\", \"bind\": true, \
         \"replay_endpoint\": \"tcp://127.0.0.1:{replay_port}\"}}'",
        KV_EVENTS.name
    )
}
