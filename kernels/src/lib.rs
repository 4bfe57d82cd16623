//! Page accounting of a paged KV pool, by identity instead of by count.
//!
//! Counts cannot tell a page owned twice from a page owned by nobody; this crate can. The scalar
//! [`mod@reference`] is the meaning of every kernel and the oracle that device code is held to;
//! with feature `cuda`, `cuda` runs the kernels on a device. What is out of range is counted, never
//! followed. [`account`] audits a running engine's pool with them: a private copy, the findings in
//! it by [`audit`], digests of what must not change by [`digest`], all told as a [`report`]. Where
//! the auditor is another process, a [`table`] in shared memory tells it the rows, and `ipc` reads
//! what they name.

pub mod account;
#[forbid(unsafe_code)]
pub mod audit;
#[cfg(feature = "cuda")]
pub mod cuda;
#[forbid(unsafe_code)]
pub mod digest;
#[cfg(feature = "cuda")]
pub mod ipc;
#[forbid(unsafe_code)]
pub mod reference;
#[forbid(unsafe_code)]
pub mod report;
pub mod table;
