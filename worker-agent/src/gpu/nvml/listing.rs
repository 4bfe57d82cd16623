//! Lists NVML's devices for the GPU thread's readings, and determines the identity of each.
//!
//! Devices that were listed before a reload of NVML keep their identities, also a GPU that can't be
//! reached any more or that NVML no longer lists, and its slices. They get readers without a
//! handle, which report the board's fault, or none if the cause is unknown. A slice that is gone
//! from a GPU that can be reached is forgotten.

use std::{collections::BTreeMap, path::PathBuf};

use nvml_wrapper::{Device, Nvml, error::NvmlError};
use tracing::warn;

use super::{
    BoardFault, Identity,
    board::{DeviceReader, FailureKind, failure_kind},
    board_fault, fault_without_handle,
};
use crate::config::selector::PciAddress;

/// Each GPU is followed by its slices. `known_devices` were listed before NVML was reloaded; those
/// that can't be reached any more are included.
pub(in crate::gpu) fn list_devices<'n>(
    nvml: &'n Nvml,
    known_devices: &[Identity],
    reads_gpm: bool,
) -> Vec<DeviceReader<'n>> {
    let mut devices = vec![];
    let mut unreachable = BTreeMap::new();
    let gpu_count = nvml.device_count().inspect_err(|error| warn!(%error, "can't count the GPUs"));
    for index in 0..gpu_count.unwrap_or(0) {
        match reach_gpu(nvml, index, known_devices, reads_gpm) {
            Ok(gpu_and_slices) => devices.extend(gpu_and_slices),
            Err(error) => {
                warn!(index, %error, "can't reach a GPU");
                unreachable.insert(index, fault_without_handle(&error));
            }
        }
    }
    let reached: Vec<&Identity> = devices.iter().map(|device| &device.identity).collect();
    let absent = absent_devices(known_devices, &reached, &unreachable);
    if !absent.is_empty() {
        // NVML may have given the remaining GPUs new indices. The settings and operators refer to
        // the old ones.
        for DeviceReader { identity, .. } in &mut devices {
            let earlier_gpu =
                known_devices.iter().find(|device| device.uuid == identity.board_uuid());
            identity.index = earlier_gpu.map_or(identity.index, |earlier_gpu| earlier_gpu.index);
        }
    }
    let absent = absent.into_iter();
    devices.extend(
        absent.map(|(identity, board_fault)| DeviceReader::new(identity, Err(board_fault), false)),
    );
    devices.sort_by_key(|device| device.identity.index);
    devices
}

/// `unreachable` has the fault of each GPU that NVML counts but gives no handle for, by index.
fn absent_devices(
    known_devices: &[Identity],
    reached: &[&Identity],
    unreachable: &BTreeMap<u32, Option<BoardFault>>,
) -> Vec<(Identity, Option<BoardFault>)> {
    let is_gpu_reached = |device: &Identity| {
        let had_no_uuid = device.board_uuid() == identity_without_uuid(device.index).uuid;
        let is_same_gpu = |other: &&Identity| {
            other.board_uuid() == device.board_uuid() || had_no_uuid && other.index == device.index
        };
        reached.iter().any(is_same_gpu)
    };
    let fault_at = |index| unreachable.get(&index).copied().unwrap_or(Some(BoardFault::Lost));
    let unreached = known_devices.iter().filter(|device| !is_gpu_reached(device));
    let mut absent: Vec<_> =
        unreached.map(|device| (device.clone(), fault_at(device.index))).collect();
    for (&index, &board_fault) in unreachable {
        if !absent.iter().any(|(device, _)| device.index == index) {
            absent.push((identity_without_uuid(index), board_fault));
        }
    }
    absent
}

fn identity_without_uuid(index: u32) -> Identity {
    Identity { uuid: format!("index-{index}"), index, ..Identity::default() }
}

fn reach_gpu<'n>(
    nvml: &'n Nvml,
    index: u32,
    known_devices: &[Identity],
    reads_gpm: bool,
) -> Result<Vec<DeviceReader<'n>>, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let uuid = device.uuid()?;
    let earlier_gpu =
        known_devices.iter().find(|gpu| gpu.uuid == uuid).cloned().unwrap_or_default();
    let pci_address = device.pci_info().ok().map(|pci| pci.bus_id).or(earlier_gpu.pci_address);
    let numa_node = device.numa_node_id().ok().or_else(|| numa_node(pci_address.as_deref()?));
    let mut identity = Identity {
        uuid,
        name: device.name().unwrap_or(earlier_gpu.name),
        index,
        numa_node: numa_node.or(earlier_gpu.numa_node),
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
            let known_slices =
                known_devices.iter().filter(|slice| slice.parent_uuid.as_deref() == parent);
            known_slices
                .map(|slice| Identity { index, ..slice.clone() })
                .map(|slice| DeviceReader::new(slice, Err(board_fault(&error)), false))
                .collect()
        }
    };
    identity.is_divided = !slices.is_empty();
    Ok([DeviceReader::new(identity, Ok(device), reads_gpm)].into_iter().chain(slices).collect())
}

/// NVML's slice indices may have gaps.
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
    let identify = |slice: Device<'n>| {
        let uuid = slice.uuid()?;
        let name = slice.name().unwrap_or_default();
        let parent_uuid = Some(parent.uuid.clone());
        Ok((Identity { uuid, name, parent_uuid, ..parent.clone() }, slice))
    };
    slices.filter_map(Result::transpose).map(|slice| identify(slice?)).collect()
}

fn value_if_supported<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match result {
        Err(error) if failure_kind(&error) != FailureKind::Unexpected => Ok(None),
        result => result.map(Some),
    }
}

/// The kernel reports -1 for an unknown node.
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
        let known_devices = [gpu(0), slice_of(&gpu(0)), gpu(1)];
        let lost = |one: &Identity| (one.clone(), Some(BoardFault::Lost));
        assert_eq!(
            absent_devices(&known_devices, &[], &BTreeMap::new()),
            known_devices.each_ref().map(lost)
        );
        let silent = [(0, Some(BoardFault::Unreachable))].into();
        let both =
            known_devices[..2].iter().map(|one| (one.clone(), Some(BoardFault::Unreachable)));
        assert_eq!(
            absent_devices(&known_devices, &[&known_devices[2]], &silent),
            both.collect::<Vec<_>>()
        );
        // A slice that its reached GPU doesn't list was removed.
        assert_eq!(
            absent_devices(
                &known_devices,
                &[&known_devices[0], &known_devices[2]],
                &BTreeMap::new()
            ),
            []
        );
    }

    #[test]
    fn one_without_a_name_is_there_until_another_is_at_its_index() {
        let silent = [(1, Some(BoardFault::Lost))].into();
        let found = absent_devices(&[], &[&gpu(0)], &silent);
        assert_eq!(found, [(identity_without_uuid(1), Some(BoardFault::Lost))]);
        let known_devices = [gpu(0), identity_without_uuid(1)];
        assert_eq!(absent_devices(&known_devices, &[&gpu(0)], &silent), found);
        assert_eq!(
            absent_devices(&known_devices, &[&gpu(0)], &BTreeMap::new()),
            found,
            "not listed any more"
        );
        assert_eq!(absent_devices(&known_devices, &[&gpu(0), &gpu(1)], &BTreeMap::new()), []);
    }
}
