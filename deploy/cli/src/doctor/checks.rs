//! The checks, by what they look at. Pure.

pub mod engine;
pub mod fleet;
pub mod gpu;
pub mod ports;
pub mod settings;
