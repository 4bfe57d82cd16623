//! What the tests need of the outside, as real implementations of it.

pub mod cluster;
pub mod engine_sim;
pub mod web;
