//! Checks of the GPUs. Pure.

use contract::load::Source;

use super::super::{
    Check,
    Find::{Devices, Fleet},
    Found,
    facts::Facts,
    fault, warning,
};
use crate::text::bytes;

/// Contexts of monitors, and what drivers round, do no harm.
const FOREIGN_BYTES_MAX: u64 = 2 << 30;
/// Readings are made each second. The driver is taken for stuck when they are this old.
const READING_AGE_MS_MAX: u32 = 30_000;

pub const CHECKS: &[Check] = &[
    warning(
        "nvml-missing",
        "a GPU that fails isn't noticed, and its memory isn't known",
        Fleet(find_missing_nvml),
    ),
    fault(
        "gpu-unhealthy",
        "work on it fails or can't be trusted",
        Devices("drain the worker, then reset or replace the GPU", |it| it.unhealthy.clone()),
    ),
    warning(
        "gpu-foreign-process",
        "the engine may run out of memory, and turns take longer",
        Devices(
            "end them (nvidia-smi names them), or agent.toml: gpu.devices = [\"UUID\"] of the \
             engine's own GPUs",
            |it| {
                let engine = it.engine_bytes.filter(|bytes| bytes.source == Source::Nvml)?;
                // A slice's used memory is its own, its engine's too.
                let foreign = it.memory_used_bytes?.checked_sub(engine.value)?;
                let what = format!("processes beside the engine hold {}", bytes(foreign));
                (foreign > FOREIGN_BYTES_MAX).then_some(what)
            },
        ),
    ),
    warning(
        "gpu-mig",
        "power, temperature and errors are those of the whole board, with its other slices",
        Devices("if the slice is meant, nothing; else switch MIG off: nvidia-smi -mig 0", |it| {
            Some(format!("it is a MIG slice of {}", it.parent_uuid.as_ref()?))
        }),
    ),
    fault("gpu-shared", "two engines take each other's memory and time", Fleet(find_shared)),
    warning(
        "gpu-readings-old",
        "the driver doesn't answer: a fault is seen late",
        Devices("see the driver's log (dmesg); reload the driver", |it| {
            let age_ms = it.age_ms.filter(|age_ms| *age_ms > READING_AGE_MS_MAX)?;
            Some(format!("its readings are {} s old", age_ms / 1000))
        }),
    ),
];

fn find_missing_nvml(facts: &Facts, found: &mut Found) {
    let fix = "agent.toml: gpu.nvml_library = \"/PATH/libnvidia-ml.so.1\"; in a container \
               NVIDIA_DRIVER_CAPABILITIES=utility";
    for (worker, _) in facts.devices().filter(|(_, it)| it.index.is_none() && it.uuid == "cuda") {
        found.add(&worker.worker, "its agent finds no NVML", fix);
    }
}

fn find_shared(facts: &Facts, found: &mut Found) {
    let fix = "start each engine with GPUs of its own (CUDA_VISIBLE_DEVICES, --base-gpu-id)";
    for (worker, device) in facts.devices().filter(|(_, device)| device.index.is_some()) {
        let other = facts.devices().find(|(other, it)| {
            it.uuid == device.uuid && other.agent != worker.agent && other.worker < worker.worker
        });
        if let Some((other, _)) = other {
            let what = format!("{} and {} both run on it", other.worker, worker.worker);
            found.add(&device.uuid, what, fix);
        }
    }
}
