//! Gives the agent access to its engine, the SGLang server on the same host.
//!
//! Parts: [`EngineClient`] (in `client`) calls the engine's HTTP API, `info` reads its
//! description, [`control`] reads what a control call did, [`stall_detector`] finds out when the
//! engine makes no progress, [`silence`] when it says nothing, also by [`answer_signs`],
//! [`model_files`] finds the tokenizer files of the engine's model, [`missing`] the flags that the
//! engine lacks, and [`retentions`] lists in which ways the engine can't keep the KV of sessions.
//! The parts only read, send and report. [`crate::owner`] decides what to do, and `data_port` sends
//! turns through the client.

pub mod answer_signs;
mod client;
pub mod control;
mod info;
mod load;
pub mod missing;
pub mod model_files;
pub mod retentions;
pub mod silence;
pub mod stall_detector;

pub use self::{
    client::{ControlCall, EngineClient, Error, is_connection_refused},
    info::{EngineInfo, PriorityOrder},
    load::{LoadSample, RankSample},
};
