//! The arms: ways in which agents keep their KV on an engine (a pure module).

use replay::SessionOpen;
use serde::Serialize;

/// How the agents of an arm reach the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Through Berth, without a session.
    Unnamed,
    /// Through Berth, without a session; each turn says how much its KV is worth.
    Prioritized,
    /// At the engine itself, in its streaming sessions.
    Bare,
    /// Through Berth, in sessions that agents open and close.
    Session(SessionOpen),
}

/// One way to keep KV.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Arm {
    /// The name, on the command line and in tables.
    pub name: &'static str,
    /// What the agents do, for people.
    pub what: &'static str,
    /// How they reach the engine.
    #[serde(skip)]
    pub access: Access,
    /// The engine's flags beside those of every arm.
    pub engine_flags: &'static [&'static str],
}

const fn host(name: &'static str, flags: &'static [&'static str]) -> Arm {
    Arm { name, what: "the same, with a host tier", access: AUTO, engine_flags: flags }
}

const AUTO: Access = Access::Session(SessionOpen::Auto);

/// The engine's flags in every arm.
pub const ENGINE_FLAGS: [&str; 3] =
    ["--enable-streaming-session", "--enable-session-radix-cache", "--enable-cache-report"];

/// All arms, in the order of the tables.
pub const ARMS: [Arm; 10] = [
    Arm {
        name: "none",
        what: "no session: the engine's cache alone",
        access: Access::Unnamed,
        engine_flags: &[],
    },
    Arm {
        name: "priority",
        what: "no session; the main agent's KV has a higher priority",
        access: Access::Prioritized,
        engine_flags: &["--enable-priority-scheduling", "--radix-eviction-policy=priority"],
    },
    Arm {
        name: "bare-streaming",
        what: "SGLang's streaming sessions, without Berth",
        access: Access::Bare,
        engine_flags: &[],
    },
    Arm {
        name: "tagged",
        what: "tagged sessions",
        access: Access::Session(SessionOpen::Tagged),
        engine_flags: &[],
    },
    Arm {
        name: "tagged-tlru",
        what: "tagged sessions; the engine evicts first what is short to compute again",
        access: Access::Session(SessionOpen::Tagged),
        engine_flags: &[
            "--radix-eviction-policy=tlru",
            r#"--radix-eviction-policy-config={"threshold":256,"next_prompt_estimate":64}"#,
        ],
    },
    Arm {
        name: "pinned",
        what: "pinned sessions within Berth's budget",
        access: Access::Session(SessionOpen::Pinned),
        engine_flags: &[],
    },
    Arm {
        name: "auto",
        what: "sessions as Berth keeps them by default",
        access: AUTO,
        engine_flags: &[],
    },
    host("auto-host-1", &["--enable-hierarchical-cache", "--hicache-ratio=1"]),
    host("auto-host-2", &["--enable-hierarchical-cache", "--hicache-ratio=2"]),
    host("auto-host-4", &["--enable-hierarchical-cache", "--hicache-ratio=4"]),
];

/// Returns the arm of this name.
#[must_use]
pub fn find(name: &str) -> Option<Arm> {
    ARMS.into_iter().find(|arm| arm.name == name)
}
