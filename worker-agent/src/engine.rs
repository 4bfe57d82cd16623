//! Gives the agent access to its engine, the SGLang server on the same host.
//!
//! [`Engine`] calls the engine's HTTP API, [`stall_detector`] finds out when the engine makes no
//! progress, and [`model_files`] finds the tokenizer files of the engine's model.

mod client;
pub mod model_files;
pub mod stall_detector;

pub use self::client::{Engine, Error, Info, RankSample, Sample, is_connection_refused};
