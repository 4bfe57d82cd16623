//! Real implementations of what surrounds Berth, for tests and measurements.
//!
//! The crate has an engine simulator, a trace replay, fleets in one process, a placement simulator,
//! and stand-ins for NVML and SGLang's scheduler.

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
