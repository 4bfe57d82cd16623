//! Gives the agent access to its engine, the SGLang server on the same host.
//!
//! The modules only read, send and report. [`crate::owner`] decides what to do.

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
    client::{ControlCall, EngineClient, Error, TurnAnswer, TurnAnswerBody, is_connection_refused},
    info::{BodyFacts, EngineInfo, PriorityOrder},
    load::{LoadSample, RankSample},
};
