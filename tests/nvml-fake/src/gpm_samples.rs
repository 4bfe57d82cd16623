//! The machine's GPM samples.

use std::collections::BTreeMap;

/// Samples that were allocated and not freed, each with its device and its number in order of
/// taking.
#[derive(Debug, Default)]
pub(crate) struct GpmSamples {
    /// The samples, by handle; `None` until a call takes one.
    pub(crate) samples: BTreeMap<usize, Option<(usize, u64)>>,
    /// The number of samples allocated so far; also the handle of the newest.
    pub(crate) made: usize,
    /// The number of samples taken so far.
    pub(crate) taken: u64,
}
