//! Lists NVML's devices and determines the identity of each.
//!
//! A device that was known before keeps its identity, even if it can't be reached or is no longer
//! listed. [`Board`] reads everything else.

use std::{collections::BTreeMap, path::PathBuf};

use nvml_wrapper::{Device, Nvml, error::NvmlError};
use tracing::warn;

use super::{
    Identity, Trouble,
    board::{Board, Failure, failure},
    handle_trouble, trouble,
};
use crate::config::selector::PciAddress;

/// Returns all devices: each GPU, followed by its MIG slices. Includes devices of `known` that
/// can't be reached any more.
pub(in crate::gpu) fn boards<'n>(nvml: &'n Nvml, known: &[Identity], gpm: bool) -> Vec<Board<'n>> {
    let mut boards = vec![];
    let mut silent = BTreeMap::new();
    let counted = nvml.device_count().inspect_err(|error| warn!(%error, "can't count the GPUs"));
    for index in 0..counted.unwrap_or(0) {
        match reach(nvml, index, known, gpm) {
            Ok(reached) => boards.extend(reached),
            Err(error) => {
                warn!(index, %error, "can't reach a GPU");
                silent.insert(index, handle_trouble(&error));
            }
        }
    }
    let reached: Vec<&Identity> = boards.iter().map(|board| &board.identity).collect();
    let absent = absent(known, &reached, &silent);
    if !absent.is_empty() {
        // NVML may have renumbered the GPUs; the settings and operators mean the old indices.
        for Board { identity, .. } in &mut boards {
            let before = known.iter().find(|one| one.uuid == identity.board());
            identity.index = before.map_or(identity.index, |before| before.index);
        }
    }
    let absent = absent.into_iter();
    boards.extend(absent.map(|(identity, why)| Board::new(identity, Err(why), false)));
    boards.sort_by_key(|board| board.identity.index);
    boards
}

/// Returns the devices without a handle, each with the reason. `silent` has the indices that NVML
/// lists without giving a handle.
fn absent(
    known: &[Identity],
    reached: &[&Identity],
    silent: &BTreeMap<u32, Option<Trouble>>,
) -> Vec<(Identity, Option<Trouble>)> {
    let is_here = |one: &Identity| {
        let named_now = one.board() == nameless(one.index).uuid;
        let same = |other: &&Identity| {
            other.board() == one.board() || named_now && other.index == one.index
        };
        reached.iter().any(same)
    };
    let why = |index| silent.get(&index).copied().unwrap_or(Some(Trouble::Lost));
    let gone = known.iter().filter(|one| !is_here(one));
    let mut absent: Vec<_> = gone.map(|one| (one.clone(), why(one.index))).collect();
    for (&index, &why) in silent {
        if !absent.iter().any(|(one, _)| one.index == index) {
            absent.push((nameless(index), why));
        }
    }
    absent
}

fn nameless(index: u32) -> Identity {
    Identity { uuid: format!("index-{index}"), index, ..Identity::default() }
}

/// Returns a GPU and its slices. A GPU without a readable UUID counts as not reached.
fn reach<'n>(
    nvml: &'n Nvml,
    index: u32,
    known: &[Identity],
    gpm: bool,
) -> Result<Vec<Board<'n>>, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let uuid = device.uuid()?;
    let before = known.iter().find(|one| one.uuid == uuid).cloned().unwrap_or_default();
    let pci_address = device.pci_info().ok().map(|pci| pci.bus_id).or(before.pci_address);
    let numa_node = device.numa_node_id().ok().or_else(|| numa_node(pci_address.as_deref()?));
    let mut identity = Identity {
        uuid,
        name: device.name().unwrap_or(before.name),
        index,
        numa_node: numa_node.or(before.numa_node),
        pci_address,
        parent_uuid: None,
        divided: false,
    };
    let slices: Vec<Board<'n>> = match slices(&device, &identity) {
        Ok(slices) => slices
            .into_iter()
            .map(|(identity, slice)| Board::new(identity, Ok(slice), false))
            .collect(),
        Err(error) => {
            warn!(index, %error, "can't list the slices of a GPU");
            let parent = Some(identity.uuid.as_str());
            let same = known.iter().filter(|one| one.parent_uuid.as_deref() == parent);
            let same = same.map(|one| Identity { index, ..one.clone() });
            same.map(|one| Board::new(one, Err(trouble(&error)), false)).collect()
        }
    };
    identity.divided = !slices.is_empty();
    Ok([Board::new(identity, Ok(device), gpm)].into_iter().chain(slices).collect())
}

/// Lists the slices of a GPU. Indices of slices may have gaps.
fn slices<'n>(
    device: &Device<'n>,
    parent: &Identity,
) -> Result<Vec<(Identity, Device<'n>)>, NvmlError> {
    if value_if_supported(device.mig_mode())?.is_none_or(|mode| mode.current == 0) {
        return Ok(vec![]);
    }
    let places = 0..value_if_supported(device.mig_device_count())?.unwrap_or(0);
    let slices = places.map(|place| value_if_supported(device.mig_device_by_index(place)));
    let named = |slice: Device<'n>| {
        let uuid = slice.uuid()?;
        let name = slice.name().unwrap_or_default();
        let parent_uuid = Some(parent.uuid.clone());
        Ok((Identity { uuid, name, parent_uuid, ..parent.clone() }, slice))
    };
    slices.filter_map(Result::transpose).map(|slice| named(slice?)).collect()
}

/// Turns the errors for "not supported" and "no value" into `None`.
fn value_if_supported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Err(error) if failure(&error) != Failure::Failed => Ok(None),
        answer => answer.map(Some),
    }
}

/// Returns the NUMA node from the kernel, if NVML doesn't report it. The kernel's -1 means unknown.
fn numa_node(pci_address: &str) -> Option<u32> {
    let address: PciAddress = pci_address.parse().ok()?;
    let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}/numa_node"));
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32) -> Identity {
        Identity { uuid: format!("GPU-{index}"), index, ..Identity::default() }
    }

    fn slice_of(parent: &Identity) -> Identity {
        let parent_uuid = Some(parent.uuid.clone());
        Identity { uuid: "MIG-0".into(), parent_uuid, ..parent.clone() }
    }

    #[test]
    fn who_is_not_reached_stays_who_it_was_and_is_lost_unless_nvml_says_why() {
        let known = [gpu(0), slice_of(&gpu(0)), gpu(1)];
        let lost = |one: &Identity| (one.clone(), Some(Trouble::Lost));
        assert_eq!(absent(&known, &[], &BTreeMap::new()), known.each_ref().map(lost));
        let silent = [(0, Some(Trouble::Unreachable))].into();
        let both = known[..2].iter().map(|one| (one.clone(), Some(Trouble::Unreachable)));
        assert_eq!(absent(&known, &[&known[2]], &silent), both.collect::<Vec<_>>());
        // A slice that its reached GPU doesn't list was removed.
        assert_eq!(absent(&known, &[&known[0], &known[2]], &BTreeMap::new()), []);
    }

    #[test]
    fn one_without_a_name_is_there_until_another_is_at_its_index() {
        let silent = [(1, Some(Trouble::Lost))].into();
        let found = absent(&[], &[&gpu(0)], &silent);
        assert_eq!(found, [(nameless(1), Some(Trouble::Lost))]);
        let known = [gpu(0), nameless(1)];
        assert_eq!(absent(&known, &[&gpu(0)], &silent), found);
        assert_eq!(absent(&known, &[&gpu(0)], &BTreeMap::new()), found, "not listed any more");
        assert_eq!(absent(&known, &[&gpu(0), &gpu(1)], &BTreeMap::new()), []);
    }
}
