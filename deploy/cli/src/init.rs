//! Plans what `berth init` writes: from the engines of a host to settings and files. Pure.
//!
//! - [`engine`]: what an engine says of itself. [`host`]: the host and its GPUs.

pub mod engine;
pub mod host;
