//! Calls about GPM: samples, and the metrics computed from two samples.

#![expect(non_snake_case, reason = "the names are NVML's")]

use std::{collections::BTreeMap, ffi::c_uint, ptr};

use nvml_wrapper_sys::bindings as sys;

use crate::{
    abi::{INVALID_ARGUMENT, NOT_SUPPORTED, Out, VERSION_MISMATCH},
    export::export,
    machine::{Machine, works},
};

export! {
    nvmlGpmQueryDeviceSupport(device: usize, support: Out<sys::nvmlGpmSupport_t>) |machine| {
        let gpu = machine.device(device)?;
        works("nvmlGpmQueryDeviceSupport", &gpu)?;
        let version = support.get()?.version;
        if version != sys::NVML_GPM_SUPPORT_VERSION {
            return Err(VERSION_MISMATCH);
        }
        let isSupportedDevice = u32::from(gpu.gpm.is_some());
        support.put(sys::nvmlGpmSupport_t { version, isSupportedDevice })
    };
    nvmlGpmSampleAlloc(sample: Out<usize>) |machine| {
        let samples = &mut machine.samples;
        samples.made += 1;
        samples.samples.insert(samples.made, None);
        sample.put(samples.made)
    };
    nvmlGpmSampleFree(sample: usize) |machine| {
        machine.samples.samples.remove(&sample).map(drop).ok_or(INVALID_ARGUMENT)
    };
    nvmlGpmSampleGet(device: usize, sample: usize) |machine| {
        let gpu = machine.device(device)?;
        works("nvmlGpmSampleGet", &gpu)?;
        if gpu.gpm.is_none() {
            return Err(NOT_SUPPORTED);
        }
        let samples = &mut machine.samples;
        samples.taken += 1;
        let place = samples.samples.get_mut(&sample).ok_or(INVALID_ARGUMENT)?;
        *place = Some((device, samples.taken));
        Ok(())
    };
    nvmlGpmMetricsGet(place: Out<sys::nvmlGpmMetricsGet_t>) |machine| {
        let mut request = place.get()?;
        if request.version != sys::NVML_GPM_METRICS_GET_VERSION {
            return Err(VERSION_MISMATCH);
        }
        let metrics = metrics(machine, &request)?;
        let asked = request.metrics.get_mut(..request.numMetrics as usize);
        for metric in asked.ok_or(INVALID_ARGUMENT)? {
            answer(&metrics, metric);
        }
        place.put(request)
    };
}

/// Returns the metrics of the device of both samples, of which the older must be the first.
fn metrics(
    machine: &Machine,
    request: &sys::nvmlGpmMetricsGet_t,
) -> Result<BTreeMap<c_uint, f64>, u32> {
    let sample = |handle: sys::nvmlGpmSample_t| {
        machine.samples.samples.get(&handle.addr()).copied().flatten().ok_or(INVALID_ARGUMENT)
    };
    let ((device, first), (other, second)) = (sample(request.sample1)?, sample(request.sample2)?);
    if device != other || first >= second {
        return Err(INVALID_ARGUMENT);
    }
    machine.device(device)?.gpm.ok_or(NOT_SUPPORTED)
}

fn answer(metrics: &BTreeMap<c_uint, f64>, asked: &mut sys::nvmlGpmMetric_t) {
    let value = metrics.get(&asked.metricId);
    asked.nvmlReturn = if value.is_some() { 0 } else { NOT_SUPPORTED };
    asked.value = value.copied().unwrap_or_default();
    asked.metricInfo = sys::nvmlGpmMetric_t__bindgen_ty_1 {
        shortName: ptr::null_mut(),
        longName: ptr::null_mut(),
        unit: ptr::null_mut(),
    };
}
