//! Audits the KV pages of an SGLang engine: tells which session owns each page, and finds faults.
//!
//! An engine that only counts its pages doesn't see a fault if the sum is right, for example if one
//! page has two owners and another page has none. This crate looks at each page.
//!
//! The inputs are the rows of the engine's table `req_to_token` (which pages a request or session
//! uses), its lists of free pages, and the pages of its radix tree.
//!
//! Values from the engine that are out of range are counted, and never used as an index or address.

pub mod account;
#[forbid(unsafe_code)]
pub mod audit;
#[cfg(feature = "cuda")]
pub mod cuda;
#[forbid(unsafe_code)]
pub mod digest;
#[forbid(unsafe_code)]
pub mod reference;
#[forbid(unsafe_code)]
pub mod report;
