//! Checks of the GPUs. Pure.

use super::super::{Check, Place, Severity, facts::Facts};
use crate::{
    api::{Device, Worker},
    text::bytes,
};

/// Contexts of monitors, and what drivers round, do no harm.
const FOREIGN_BYTES_MAX: u64 = 2 << 30;
/// Readings are made each second. The driver is taken for stuck when they are this old.
const READING_AGE_MS_MAX: u64 = 30_000;

pub const CHECKS: &[Check] = &[
    Check {
        id: "nvml-missing",
        severity: Severity::Warning,
        why: "a GPU that fails isn't noticed, and its memory isn't known",
        find: find_missing_nvml,
    },
    Check {
        id: "gpu-unhealthy",
        severity: Severity::Fault,
        why: "work on it fails or can't be trusted",
        find: find_unhealthy,
    },
    Check {
        id: "gpu-foreign-process",
        severity: Severity::Warning,
        why: "the engine may run out of memory, and turns take longer",
        find: find_foreign_memory,
    },
    Check {
        id: "gpu-mig",
        severity: Severity::Warning,
        why: "power, temperature and errors are those of the whole board, with its other slices",
        find: find_slices,
    },
    Check {
        id: "gpu-shared",
        severity: Severity::Fault,
        why: "two engines take each other's memory and time",
        find: find_shared,
    },
    Check {
        id: "gpu-readings-old",
        severity: Severity::Warning,
        why: "the driver doesn't answer: a fault is seen late",
        find: find_old_readings,
    },
];

fn devices(facts: &Facts) -> impl Iterator<Item = (&Worker, &Device)> {
    let loads = facts.workers().filter_map(|worker| Some((worker, worker.load.as_ref()?)));
    loads.flat_map(|(worker, load)| load.devices.iter().map(move |device| (worker, device)))
}

fn find_missing_nvml(facts: &Facts) -> Vec<Place> {
    let without = devices(facts).filter(|(_, it)| it.index.is_none() && it.uuid == "cuda");
    without
        .map(|(worker, _)| {
            let fix = "agent.toml: gpu.nvml_library = \"/PATH/libnvidia-ml.so.1\"; in a container \
                       NVIDIA_DRIVER_CAPABILITIES=utility";
            Place::new(&worker.worker, "its agent finds no NVML", fix)
        })
        .collect()
}

fn find_unhealthy(facts: &Facts) -> Vec<Place> {
    devices(facts)
        .filter_map(|(worker, device)| {
            let why = device.unhealthy.as_ref()?;
            let about = format!("{} {}", worker.worker, device.uuid);
            Some(Place::new(about, why, "drain the worker, then reset or replace the GPU"))
        })
        .collect()
}

fn find_foreign_memory(facts: &Facts) -> Vec<Place> {
    devices(facts)
        .filter_map(|(worker, device)| {
            let engine = device.engine_bytes.as_ref().filter(|bytes| bytes.source == "nvml")?;
            // A slice's used memory is its own, its engine's too.
            let foreign = device.memory_used_bytes?.checked_sub(engine.value)?;
            let what = format!("processes beside the engine hold {}", bytes(foreign));
            let fix = "end them (nvidia-smi names them), or agent.toml: gpu.devices = [\"UUID\"] \
                       of the engine's own GPUs";
            let about = format!("{} {}", worker.worker, device.uuid);
            (foreign > FOREIGN_BYTES_MAX).then(|| Place::new(about, what, fix))
        })
        .collect()
}

fn find_slices(facts: &Facts) -> Vec<Place> {
    devices(facts)
        .filter_map(|(worker, device)| {
            let parent = device.parent_uuid.as_ref()?;
            let about = format!("{} {}", worker.worker, device.uuid);
            let fix = "if the slice is meant, nothing; else switch MIG off: nvidia-smi -mig 0";
            Some(Place::new(about, format!("it is a MIG slice of {parent}"), fix))
        })
        .collect()
}

fn find_shared(facts: &Facts) -> Vec<Place> {
    let mut places = vec![];
    for (worker, device) in devices(facts).filter(|(_, device)| device.index.is_some()) {
        let other = devices(facts).find(|(other, it)| {
            it.uuid == device.uuid && other.agent != worker.agent && other.worker < worker.worker
        });
        if let Some((other, _)) = other {
            let what = format!("{} and {} both run on it", other.worker, worker.worker);
            let fix =
                "start each engine with GPUs of its own (CUDA_VISIBLE_DEVICES, --base-gpu-id)";
            places.push(Place::new(&device.uuid, what, fix));
        }
    }
    places
}

fn find_old_readings(facts: &Facts) -> Vec<Place> {
    devices(facts)
        .filter_map(|(worker, device)| {
            let age_ms = device.age_ms.filter(|age_ms| *age_ms > READING_AGE_MS_MAX)?;
            let about = format!("{} {}", worker.worker, device.uuid);
            let what = format!("its readings are {} s old", age_ms / 1000);
            Some(Place::new(about, what, "see the driver's log (dmesg); reload the driver"))
        })
        .collect()
}
