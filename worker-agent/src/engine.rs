//! The engine beside the agent: its client, its health and its model files.
//!
//! [`Engine`] calls the engine's HTTP API, [`stall_detector`] finds an engine that makes no
//! progress, and [`model_files`] finds the tokenizer files.

mod client;
pub mod model_files;
pub mod stall_detector;

pub use self::client::{Engine, Error, Info, RankSample, Sample, is_connection_refused};
