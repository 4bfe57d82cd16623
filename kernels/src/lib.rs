//! Page accounting of a paged KV pool: which pages are owned by whom, not only how many.
//!
//! Counts can't tell a page with two owners from a page without an owner; this crate can. The
//! scalar [`mod@reference`] defines what every kernel computes, and device code is tested against
//! it. With feature `cuda`, the module `cuda` runs the kernels on a device. Out-of-range values are
//! counted and never used as an index or address.
//!
//! [`account`] audits the pool of a running engine: it takes a private copy, [`audit`] names the
//! faults in the copy, [`digest`] compares digests of pages that must not change, and a [`report`]
//! holds the result. If the auditor is another process, a [`table`] in shared memory tells it the
//! rows, and `ipc` reads the pages that those rows name.

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
