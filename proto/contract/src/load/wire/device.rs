//! Converts a device and its readings between the domain type and the wire format.
//!
//! Reading rejects a device without a UUID, a part that is larger than its whole, and a percentage
//! above 100. An absent text is an empty string on the wire.

use super::{Device, Error, check_at_most, figure::read_figure, impossible};
use crate::v1;

impl TryFrom<v1::Device> for Device {
    type Error = Error;

    fn try_from(wire: v1::Device) -> Result<Self, Error> {
        if wire.uuid.is_empty() {
            return Err(Error::Missing("device uuid"));
        }
        let non_empty = |text: String| (!text.is_empty()).then_some(text);
        let device = Self {
            uuid: wire.uuid,
            name: wire.name,
            index: wire.index,
            pci_address: non_empty(wire.pci_address),
            parent_uuid: non_empty(wire.parent_uuid),
            numa_node: wire.numa_node,
            memory_total_bytes: wire.memory_total_bytes,
            memory_used_bytes: wire.memory_used_bytes,
            memory_reserved_bytes: wire.memory_reserved_bytes,
            utilization_percent: wire.utilization_percent,
            memory_utilization_percent: wire.memory_utilization_percent,
            temperature_celsius: wire.temperature_celsius,
            power_milliwatts: wire.power_milliwatts,
            engine_bytes: read_figure(wire.engine_bytes)?,
            kv_pool_bytes: read_figure(wire.kv_pool_bytes)?,
            kv_used_bytes: read_figure(wire.kv_used_bytes)?,
            kv_pinned_bytes: read_figure(wire.kv_pinned_bytes)?,
            kv_reclaimable_bytes: read_figure(wire.kv_reclaimable_bytes)?,
            unhealthy: non_empty(wire.unhealthy),
            age_ms: wire.age_ms,
        };
        check_parts(&device)?;
        Ok(device)
    }
}

fn check_parts(device: &Device) -> Result<(), Error> {
    let engine_bytes = device.engine_bytes.map(|figure| figure.value);
    for (field, part) in [
        ("memory_used_bytes", device.memory_used_bytes),
        ("memory_reserved_bytes", device.memory_reserved_bytes),
        ("engine_bytes", engine_bytes),
    ] {
        if let (Some(part), Some(total)) = (part, device.memory_total_bytes)
            && part > total
        {
            return Err(impossible(field, part));
        }
    }
    for (field, percent) in [
        ("utilization_percent", device.utilization_percent),
        ("memory_utilization_percent", device.memory_utilization_percent),
    ] {
        if let Some(percent) = percent.filter(|&percent| percent > 100) {
            return Err(impossible(field, percent));
        }
    }
    check_at_most("kv_used_bytes", device.kv_used_bytes, device.kv_pool_bytes)?;
    check_at_most("kv_pinned_bytes", device.kv_pinned_bytes, device.kv_pool_bytes)?;
    check_at_most("kv_reclaimable_bytes", device.kv_reclaimable_bytes, device.kv_pool_bytes)
}

impl From<Device> for v1::Device {
    fn from(device: Device) -> Self {
        Self {
            kv_physical_usage: device.kv_physical_usage().map(Into::into),
            uuid: device.uuid,
            name: device.name,
            index: device.index,
            memory_total_bytes: device.memory_total_bytes,
            memory_used_bytes: device.memory_used_bytes,
            utilization_percent: device.utilization_percent,
            memory_reserved_bytes: device.memory_reserved_bytes,
            pci_address: device.pci_address.unwrap_or_default(),
            parent_uuid: device.parent_uuid.unwrap_or_default(),
            numa_node: device.numa_node,
            memory_utilization_percent: device.memory_utilization_percent,
            temperature_celsius: device.temperature_celsius,
            power_milliwatts: device.power_milliwatts,
            engine_bytes: device.engine_bytes.map(Into::into),
            kv_pool_bytes: device.kv_pool_bytes.map(Into::into),
            kv_used_bytes: device.kv_used_bytes.map(Into::into),
            kv_pinned_bytes: device.kv_pinned_bytes.map(Into::into),
            kv_reclaimable_bytes: device.kv_reclaimable_bytes.map(Into::into),
            unhealthy: device.unhealthy.unwrap_or_default(),
            age_ms: device.age_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Figure, Source};

    fn bytes(value: u64, source: Source) -> Option<Figure> {
        Some(Figure { value, source, age_ms: 4 })
    }

    fn slice() -> Device {
        Device {
            uuid: "MIG-1".into(),
            name: "NVIDIA H200 MIG 1g.18gb".into(),
            index: Some(3),
            pci_address: Some("00000000:1B:00.0".into()),
            parent_uuid: Some("GPU-1".into()),
            numa_node: Some(1),
            memory_total_bytes: Some(1000),
            memory_used_bytes: Some(900),
            memory_reserved_bytes: Some(50),
            utilization_percent: Some(100),
            memory_utilization_percent: Some(7),
            temperature_celsius: Some(61),
            power_milliwatts: Some(412_000),
            engine_bytes: bytes(880, Source::Nvml),
            kv_pool_bytes: bytes(600, Source::ServerInfo),
            kv_used_bytes: bytes(500, Source::Shim),
            kv_pinned_bytes: bytes(300, Source::Shim),
            kv_reclaimable_bytes: bytes(200, Source::Shim),
            unhealthy: Some("it fell off the bus".into()),
            age_ms: Some(12),
        }
    }

    #[test]
    fn a_device_survives_the_wire_and_absent_stays_absent() {
        let bare = Device { uuid: "cpu".into(), ..Device::default() };
        for device in [slice(), bare] {
            assert_eq!(Device::try_from(v1::Device::from(device.clone())).unwrap(), device);
        }
    }

    /// Changes one thing in a valid device so that it becomes impossible.
    type Lie = fn(&mut Device);

    #[test]
    fn parts_larger_than_their_whole_are_rejected() {
        let lies: [(&str, Lie); 7] = [
            ("more used than there is", |d| d.memory_used_bytes = Some(1001)),
            ("more reserved than there is", |d| d.memory_reserved_bytes = Some(1001)),
            ("an engine larger than the device", |d| d.engine_bytes = bytes(1001, Source::Nvml)),
            ("busier than always", |d| d.memory_utilization_percent = Some(101)),
            ("more KV than the pool", |d| d.kv_used_bytes = bytes(601, Source::Shim)),
            ("more pinned than the pool", |d| d.kv_pinned_bytes = bytes(601, Source::Shim)),
            ("more to take than there is", |d| d.kv_reclaimable_bytes = bytes(601, Source::Shim)),
        ];
        for (what, lie) in lies {
            let mut device = slice();
            lie(&mut device);
            assert!(Device::try_from(v1::Device::from(device)).is_err(), "{what} was taken");
        }
    }
}
