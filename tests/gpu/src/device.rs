//! Opens the device and times work on it.

use crate::Options;
use anyhow::Context;
use kernels::cuda::{self, Device};
use std::time::Duration;

/// Opens the measured device, the first one in `CUDA_VISIBLE_DEVICES`.
pub(crate) fn open(options: &Options) -> anyhow::Result<Device> {
    let image = std::fs::read(&options.fatbin).with_context(|| {
        format!("{}: build it with kernels/cuda/build", options.fatbin.display())
    })?;
    Ok(Device::open(0, &image)?)
}

/// Returns the median of the device's time for `call` over `times` calls.
pub(crate) fn median(
    device: &Device,
    times: usize,
    mut call: impl FnMut() -> Result<(), cuda::Error>,
) -> anyhow::Result<Duration> {
    // The first call pays one-time costs and is not measured.
    call()?;
    let mut all = Vec::with_capacity(times);
    for _ in 0..times {
        let before = device.record_timed()?;
        call()?;
        let after = device.record_timed()?;
        device.synchronize()?;
        all.push(after.since(&before)?);
    }
    all.sort_unstable();
    Ok(all[times / 2])
}
