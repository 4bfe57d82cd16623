//! Defines the engine's flags that Berth profits from, with what is lost without each. Pure.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineFlag {
    pub name: &'static str,
    /// What the lack of the flag costs.
    pub why: &'static str,
}

pub const STREAMING_SESSION: EngineFlag = EngineFlag {
    name: "--enable-streaming-session",
    why: "no session can be pinned: each turn may compute its history again",
};
pub const SESSION_RADIX_CACHE: EngineFlag = EngineFlag {
    name: "--enable-session-radix-cache",
    why: "no session can be tagged: its KV is evicted like any other",
};
pub const CACHE_REPORT: EngineFlag = EngineFlag {
    name: "--enable-cache-report",
    why: "answers of the OpenAI routes don't say how many tokens were cached",
};
pub const KV_EVENTS: EngineFlag = EngineFlag {
    name: "--kv-events-config",
    why: "routers guess which blocks are resident, from the prompts that they sent",
};
/// With a part of this flag, the engine sends KV events again.
pub const KV_REPLAY: EngineFlag = EngineFlag {
    name: "--kv-events-config",
    why: "a missed KV event is lost: the engine must publish its whole radix tree again",
};

/// An engine takes another port if others on the host have this one.
pub const KV_EVENTS_PORT: u16 = 5557;

pub const SHIM_FIX: &str = "install worker-agent/shim where the engine runs, for its user; set \
                            BERTH_SHIM_SOCKET to the agent's files.shim_socket";

/// As a shell takes it.
#[must_use]
pub fn kv_events_flag(port: u16, replay_port: u16) -> String {
    format!("{} '{}'", KV_EVENTS.name, kv_events_config(port, replay_port))
}

/// The flag's value. Both are ports of loopback.
#[must_use]
pub fn kv_events_config(port: u16, replay_port: u16) -> String {
    format!(
        "{{\"publisher\": \"zmq\", \"endpoint\": \"tcp://127.0.0.1:{port}\", \"bind\": true, \
         \"replay_endpoint\": \"tcp://127.0.0.1:{replay_port}\"}}"
    )
}
