//! Bounds what an agent may say of itself.
//!
//! So one that lies takes no memory of a router, and its figures can be added.

use super::Error;

/// No engine has nearly as many.
pub const RANKS_MAX: usize = 1024;
/// An agent that doesn't know which are its rank's names all of its host, MIG slices too.
pub(super) const DEVICES_MAX: usize = 256;
/// Bounds models, adapters, versions or functions in one description.
pub(super) const NAMES_MAX: usize = 16 * 1024;
/// Bounds tokens and bytes: 16 TiB.
const FIGURE_MAX: u64 = 1 << 44;
/// Bounds turns, sessions and rows.
const TURNS_MAX: u32 = 1 << 24;

pub(super) fn impossible(field: &'static str, value: impl Into<u64>) -> Error {
    Error::Impossible { field, value: value.into() }
}

/// With this bound, sums of some figures don't overflow.
pub(super) fn check_figure(field: &'static str, value: u64) -> Result<(), Error> {
    if value > FIGURE_MAX { Err(impossible(field, value)) } else { Ok(()) }
}

pub(super) fn check_turns(field: &'static str, value: u32) -> Result<(), Error> {
    if value > TURNS_MAX { Err(impossible(field, value)) } else { Ok(()) }
}

pub(super) fn check_length(
    field: &'static str,
    length: usize,
    length_max: usize,
) -> Result<(), Error> {
    if length > length_max { Err(impossible(field, length as u64)) } else { Ok(()) }
}

/// There must be a rank, and ranks must be numbered 0, 1, 2 and so on: code that reads a report
/// uses a rank's number as its index.
pub(super) fn check_rank_order(ranks: impl Iterator<Item = u32>) -> Result<(), Error> {
    let mut count = 0_u32;
    for rank in ranks {
        if rank != count || rank as usize >= RANKS_MAX {
            return Err(impossible("dp_rank", rank));
        }
        count += 1;
    }
    if count == 0 { Err(Error::Missing("ranks")) } else { Ok(()) }
}
