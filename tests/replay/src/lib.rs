//! The library behind `berth-replay`: replays a trace against an OpenAI- or SGLang-compatible URL.
//!
//! Pure modules: `trace` (the model), `wire` (JSON to model), `generate`, `shape` (scaling and
//! limits), `synth` (block ids to tokens and text), `dialog` (turn to request body),
//! `answer`, `pace`. Shell: `load` reads files, `client` speaks HTTP, `user` runs one conversation,
//! `drive` runs them all. The replay uses nothing of Berth's internals and sends only requests that
//! any client could send, so it measures Berth and its peers in the same way.

pub mod answer;
pub mod client;
pub mod dialog;
mod drive;
pub mod generate;
pub mod load;
pub mod options;
pub mod pace;
pub mod program;
pub mod report;
pub mod shape;
pub mod synth;
pub mod texts;
pub mod trace;
mod user;
pub mod wire;
pub mod workload;

pub use drive::{Error, ReplayControl, drive};
pub use options::{Api, ReplayOptions, SessionHeaders, SessionOpen};
pub use report::{LiveCounters, Report};
pub use workload::Workload;
