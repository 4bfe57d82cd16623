//! The devices beside the engine. NVML may be missing, and any single reading may be: absent is
//! absent, never zero. Readings block, so they have a thread of their own.

use std::time::Duration;

use nvml_wrapper::{Nvml, error::NvmlError};
use proto::load::Device;
use tokio::sync::watch;

/// NVML is read this often. Utilisation is itself averaged over up to a second.
const INTERVAL: Duration = Duration::from_secs(1);

/// A source of device readings.
pub trait Gpu: Send + 'static {
    /// The devices as they are now; empty where there are none.
    fn read(&mut self) -> Vec<Device>;
}

/// A machine without NVML.
#[derive(Debug, Clone, Copy)]
pub struct NoGpu;

impl Gpu for NoGpu {
    fn read(&mut self) -> Vec<Device> {
        vec![]
    }
}

/// NVIDIA's management library, loaded at run time.
#[derive(Debug)]
pub struct NvmlGpu {
    nvml: Nvml,
    /// UUIDs of the engine's devices; empty: all that NVML lists.
    uuids: Vec<String>,
}

impl NvmlGpu {
    /// Loads the library. `uuids` limits the devices to the engine's.
    ///
    /// # Errors
    /// When there is no NVML, which is an ordinary state of a machine.
    pub fn load(uuids: Vec<String>) -> Result<Self, NvmlError> {
        Ok(Self { nvml: Nvml::init()?, uuids })
    }

    fn device(&self, index: u32) -> Option<Device> {
        let device = self.nvml.device_by_index(index).ok()?;
        let uuid = device.uuid().ok()?;
        if !self.uuids.is_empty() && !self.uuids.contains(&uuid) {
            return None;
        }
        let memory = device.memory_info().ok();
        Some(Device {
            uuid,
            name: device.name().unwrap_or_default(),
            index: Some(index),
            memory_total_bytes: memory.as_ref().map(|memory| memory.total),
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu.min(100)),
            ..Device::default()
        })
    }
}

impl Gpu for NvmlGpu {
    fn read(&mut self) -> Vec<Device> {
        let count = self.nvml.device_count().unwrap_or(0);
        (0..count).filter_map(|index| self.device(index)).collect()
    }
}

/// Reads on a thread of its own until nobody listens; the receiver holds the newest reading.
///
/// # Errors
/// When the thread can't be made.
pub fn watch(mut gpu: impl Gpu) -> std::io::Result<watch::Receiver<Vec<Device>>> {
    let (sender, receiver) = watch::channel(gpu.read());
    std::thread::Builder::new().name("gpu".into()).spawn(move || {
        while !sender.is_closed() {
            std::thread::sleep(INTERVAL);
            sender.send_if_modified(|devices| {
                let read = gpu.read();
                let changed = *devices != read;
                *devices = read;
                changed
            });
        }
    })?;
    Ok(receiver)
}

/// NVML where the machine has it, else none, said in one line.
#[must_use]
pub fn detect(uuids: &[String]) -> Box<dyn Gpu> {
    match NvmlGpu::load(uuids.to_vec()) {
        Ok(nvml) => Box::new(nvml),
        Err(error) => {
            tracing::info!(%error, "no NVML on this machine, reporting without device readings");
            Box::new(NoGpu)
        }
    }
}

impl Gpu for Box<dyn Gpu> {
    fn read(&mut self) -> Vec<Device> {
        (**self).read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counting(u64);

    impl Gpu for Counting {
        fn read(&mut self) -> Vec<Device> {
            self.0 += 1;
            vec![Device {
                uuid: "GPU-test".into(),
                name: "test".into(),
                index: Some(0),
                memory_total_bytes: Some(100),
                memory_used_bytes: Some(self.0),
                ..Device::default()
            }]
        }
    }

    #[tokio::test]
    async fn the_newest_reading_reaches_who_watches() {
        let mut readings = watch(Counting(0)).unwrap();
        let newer = |devices: &Vec<Device>| devices[0].memory_used_bytes > Some(1);
        let waited = tokio::time::timeout(Duration::from_secs(10), readings.wait_for(newer));
        assert_eq!(waited.await.unwrap().unwrap()[0].utilization_percent, None);
    }
}
