//! Lists NVML's devices for the readings, and determines the identity of each.
//!
//! A *device* is a GPU, or one of the *slices* into which MIG has divided a GPU. NVML is reloaded
//! while a device is missing. A device that was listed before the reload keeps its identity, even
//! if it can't be reached any more or isn't listed any more. [`DeviceReader`] reads all other
//! values.

use std::{collections::BTreeMap, path::PathBuf};

use nvml_wrapper::{Device, Nvml, error::NvmlError};
use tracing::warn;

use super::{
    Identity, Trouble,
    board::{DeviceReader, Failure, failure},
    handle_trouble, trouble,
};
use crate::config::selector::PciAddress;

/// Returns all devices: each GPU, followed by its slices. `known` are the devices listed
/// before the reload. Those that can't be reached any more are included. `reads_gpm` says whether
/// to read the performance counters of GPUs.
pub(in crate::gpu) fn list_devices<'n>(
    nvml: &'n Nvml,
    known: &[Identity],
    reads_gpm: bool,
) -> Vec<DeviceReader<'n>> {
    let mut devices = vec![];
    let mut unreachable = BTreeMap::new();
    let gpu_count = nvml.device_count().inspect_err(|error| warn!(%error, "can't count the GPUs"));
    for index in 0..gpu_count.unwrap_or(0) {
        match reach_gpu(nvml, index, known, reads_gpm) {
            Ok(reached) => devices.extend(reached),
            Err(error) => {
                warn!(index, %error, "can't reach a GPU");
                unreachable.insert(index, handle_trouble(&error));
            }
        }
    }
    let reached: Vec<&Identity> = devices.iter().map(|device| &device.identity).collect();
    let absent = absent_devices(known, &reached, &unreachable);
    if !absent.is_empty() {
        // NVML may have given the remaining GPUs new indices. They keep the old ones, which the
        // settings and operators mean.
        for DeviceReader { identity, .. } in &mut devices {
            let known_before = known.iter().find(|device| device.uuid == identity.board_uuid());
            identity.index = known_before.map_or(identity.index, |known_before| known_before.index);
        }
    }
    let absent = absent.into_iter();
    devices
        .extend(absent.map(|(identity, trouble)| DeviceReader::new(identity, Err(trouble), false)));
    devices.sort_by_key(|device| device.identity.index);
    devices
}

/// Returns the devices without a handle, each with its board's trouble. `known` are the devices
/// listed before the reload. `reached` are those that have a handle now. `unreachable` has the
/// trouble of each GPU that NVML counts but gives no handle for, by index.
fn absent_devices(
    known: &[Identity],
    reached: &[&Identity],
    unreachable: &BTreeMap<u32, Option<Trouble>>,
) -> Vec<(Identity, Option<Trouble>)> {
    let is_gpu_reached = |device: &Identity| {
        let had_no_uuid = device.board_uuid() == identity_without_uuid(device.index).uuid;
        let is_same_gpu = |other: &&Identity| {
            other.board_uuid() == device.board_uuid() || had_no_uuid && other.index == device.index
        };
        reached.iter().any(is_same_gpu)
    };
    let trouble_at = |index| unreachable.get(&index).copied().unwrap_or(Some(Trouble::Lost));
    let gone = known.iter().filter(|device| !is_gpu_reached(device));
    let mut absent: Vec<_> =
        gone.map(|device| (device.clone(), trouble_at(device.index))).collect();
    for (&index, &trouble) in unreachable {
        if !absent.iter().any(|(device, _)| device.index == index) {
            absent.push((identity_without_uuid(index), trouble));
        }
    }
    absent
}

/// Returns the identity of a GPU whose UUID was never read.
fn identity_without_uuid(index: u32) -> Identity {
    Identity { uuid: format!("index-{index}"), index, ..Identity::default() }
}

/// Returns the GPU at `index` and its slices.
///
/// # Errors
/// If NVML gives no handle for the GPU, or its UUID can't be read.
fn reach_gpu<'n>(
    nvml: &'n Nvml,
    index: u32,
    known: &[Identity],
    reads_gpm: bool,
) -> Result<Vec<DeviceReader<'n>>, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let uuid = device.uuid()?;
    let known_before = known.iter().find(|gpu| gpu.uuid == uuid).cloned().unwrap_or_default();
    let pci_address = device.pci_info().ok().map(|pci| pci.bus_id).or(known_before.pci_address);
    let numa_node = device.numa_node_id().ok().or_else(|| numa_node(pci_address.as_deref()?));
    let mut identity = Identity {
        uuid,
        name: device.name().unwrap_or(known_before.name),
        index,
        numa_node: numa_node.or(known_before.numa_node),
        pci_address,
        parent_uuid: None,
        is_divided: false,
    };
    let slices: Vec<DeviceReader<'n>> = match list_slices(&device, &identity) {
        Ok(slices) => slices
            .into_iter()
            .map(|(identity, slice)| DeviceReader::new(identity, Ok(slice), false))
            .collect(),
        Err(error) => {
            warn!(index, %error, "can't list the slices of a GPU");
            let parent = Some(identity.uuid.as_str());
            let known_slices = known.iter().filter(|slice| slice.parent_uuid.as_deref() == parent);
            known_slices
                .map(|slice| Identity { index, ..slice.clone() })
                .map(|slice| DeviceReader::new(slice, Err(trouble(&error)), false))
                .collect()
        }
    };
    identity.is_divided = !slices.is_empty();
    Ok([DeviceReader::new(identity, Ok(device), reads_gpm)].into_iter().chain(slices).collect())
}

/// Lists the slices of a GPU. NVML's slice indices may have gaps.
fn list_slices<'n>(
    device: &Device<'n>,
    parent: &Identity,
) -> Result<Vec<(Identity, Device<'n>)>, NvmlError> {
    if value_if_supported(device.mig_mode())?.is_none_or(|mode| mode.current == 0) {
        return Ok(vec![]);
    }
    let slice_indices = 0..value_if_supported(device.mig_device_count())?.unwrap_or(0);
    let slices = slice_indices
        .map(|slice_index| value_if_supported(device.mig_device_by_index(slice_index)));
    let with_identity = |slice: Device<'n>| {
        let uuid = slice.uuid()?;
        let name = slice.name().unwrap_or_default();
        let parent_uuid = Some(parent.uuid.clone());
        Ok((Identity { uuid, name, parent_uuid, ..parent.clone() }, slice))
    };
    slices.filter_map(Result::transpose).map(|slice| with_identity(slice?)).collect()
}

/// Turns the errors for "not supported" and "no value" into `None`.
fn value_if_supported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Err(error) if failure(&error) != Failure::Failed => Ok(None),
        answer => answer.map(Some),
    }
}

/// Returns the NUMA node that the kernel reports for a PCI device. `None` if it is unknown, for
/// which the kernel reports -1.
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
        assert_eq!(absent_devices(&known, &[], &BTreeMap::new()), known.each_ref().map(lost));
        let silent = [(0, Some(Trouble::Unreachable))].into();
        let both = known[..2].iter().map(|one| (one.clone(), Some(Trouble::Unreachable)));
        assert_eq!(absent_devices(&known, &[&known[2]], &silent), both.collect::<Vec<_>>());
        // A slice that its reached GPU doesn't list was removed.
        assert_eq!(absent_devices(&known, &[&known[0], &known[2]], &BTreeMap::new()), []);
    }

    #[test]
    fn one_without_a_name_is_there_until_another_is_at_its_index() {
        let silent = [(1, Some(Trouble::Lost))].into();
        let found = absent_devices(&[], &[&gpu(0)], &silent);
        assert_eq!(found, [(identity_without_uuid(1), Some(Trouble::Lost))]);
        let known = [gpu(0), identity_without_uuid(1)];
        assert_eq!(absent_devices(&known, &[&gpu(0)], &silent), found);
        assert_eq!(
            absent_devices(&known, &[&gpu(0)], &BTreeMap::new()),
            found,
            "not listed any more"
        );
        assert_eq!(absent_devices(&known, &[&gpu(0), &gpu(1)], &BTreeMap::new()), []);
    }
}
