//! What the tests need of the outside, as real implementations of it: an engine simulator, a trace
//! replay, a fleet in one process.

pub mod cluster;
pub mod demo;
pub mod engine_sim;
pub mod nvml;
pub mod replay;
pub mod saturation;
pub mod scheduler;
pub mod sim;
pub mod simulation;
pub mod web;
