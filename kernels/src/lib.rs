//! Page accounting of a paged KV pool, by identity instead of by count.
//!
//! Counts cannot tell a page owned twice from a page owned by nobody; this crate can. The scalar
//! [`mod@reference`] is the meaning of every kernel and the oracle that device code is held to; with
//! feature `cuda`, `cuda` runs the kernels on a device. What is out of range is counted, never
//! followed. When a snapshot of an engine's tables is consistent is not decided here.

#[cfg(feature = "cuda")]
pub mod cuda;
#[forbid(unsafe_code)]
pub mod reference;
