//! Page accounting of a paged KV pool, by identity instead of by count.
//!
//! Counts cannot tell a page owned twice from a page owned by nobody; this crate can. The scalar
//! [`mod@reference`] is the meaning of every kernel and the oracle that device code is held to.
//! It reads no device, keeps no state and trusts no input: what is out of range is counted.

pub mod reference;
