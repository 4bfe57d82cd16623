//! `berth-replay` as a library: drives any OpenAI- or SGLang-compatible URL with a trace.
//!
//! Pure parts: `trace` (the model), `wire` (JSON to model), `generate`, `shape` (scaling and
//! limits), `synth` (block ids to tokens and text), `dialog` (turn to request body), `sse`,
//! `answer`, `pace`. The shell: `load` reads files, `client` speaks HTTP, `user` runs one
//! conversation, `drive` runs them all. Deliberately absent: anything about Berth's inside; what
//! is sent is what any client could send, so peers are measured by the same hand.

pub mod answer;
pub mod client;
pub mod dialog;
mod drive;
pub mod generate;
pub mod load;
pub mod options;
pub mod pace;
pub mod report;
pub mod shape;
pub mod sse;
pub mod synth;
pub mod texts;
pub mod trace;
mod user;
pub mod wire;
pub mod workload;

pub use drive::{Control, Error, drive};
pub use options::{Api, Options, SessionHeaders, SessionOpen};
pub use report::{Live, Report};
pub use workload::Workload;
