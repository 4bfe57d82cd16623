//! NVML: the agent's readings compared with `nvidia-smi`, this process, the cost of counters.

use crate::{Options, answers::Answers};
use nvml_wrapper::{Nvml, enums::device::UsedGpuMemory, enums::gpm::GpmMetricId, gpm};
use std::{process::Command, time::Duration};
use tokio::time::Instant;
use worker_agent::gpu::{self, Settings};

const ABOUT: &str = "readings of the agent";
const MIB: u64 = 1 << 20;
/// Allowed differences, because the two readings are taken at different moments.
const USED_MIB_APART_MAX: u64 = 512;
const DEGREES_APART_MAX: u64 = 5;

/// Compares memory and temperature of every GPU with the output of `nvidia-smi`.
pub(crate) fn compare(_: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let query = "--query-gpu=uuid,memory.total,memory.used,temperature.gpu";
    let smi = Command::new("nvidia-smi").args([query, "--format=csv,noheader,nounits"]).output();
    let Ok(smi) = smi else {
        answers.skip(ABOUT, "against nvidia-smi", "there is no nvidia-smi");
        return Ok(());
    };
    let snapshot = match gpu::start(Settings::default()) {
        Ok(gpus) => gpus.snapshot(),
        Err(error) => {
            answers.skip(ABOUT, "against nvidia-smi", error);
            return Ok(());
        }
    };
    for line in String::from_utf8_lossy(&smi.stdout).lines() {
        let mut words = line.split(", ");
        let uuid = words.next().unwrap_or_default();
        let theirs: Vec<u64> = words.filter_map(|word| word.trim().parse().ok()).collect();
        let seen = snapshot.devices.iter().find(|device| device.identity.uuid == uuid);
        let ours = seen.and_then(|seen| {
            let memory = seen.reading.memory?;
            let degrees = seen.reading.temperature_celsius?;
            Some([memory.total / MIB, memory.used / MIB, degrees.into()])
        });
        let near = |ours: &[u64; 3]| {
            theirs.len() == 3
                && ours[0] == theirs[0]
                && ours[1].abs_diff(theirs[1]) <= USED_MIB_APART_MAX
                && ours[2].abs_diff(theirs[2]) <= DEGREES_APART_MAX
        };
        let text = format!("{ours:?}, nvidia-smi {theirs:?} (MiB total, MiB used, degrees)");
        answers.check(ABOUT, uuid, text, ours.as_ref().is_some_and(near));
    }
    Ok(())
}

/// Returns the device memory in use, and the part that NVML attributes to a process, in bytes.
pub(crate) fn memory(nvml: &Nvml, pid: u32) -> anyhow::Result<(u64, Option<UsedGpuMemory>)> {
    let device = nvml.device_by_index(0)?;
    let processes = device.running_compute_processes()?;
    let of = processes.into_iter().find(|process| process.pid == pid);
    Ok((device.memory_info()?.used, of.map(|process| process.used_gpu_memory)))
}

/// Returns the duration of one reading of performance counters.
pub(crate) fn counters(nvml: &Nvml) -> anyhow::Result<Option<Duration>> {
    let device = nvml.device_by_index(0)?;
    if !device.gpm_support()? {
        return Ok(None);
    }
    let before = device.gpm_sample()?;
    let begin = Instant::now();
    let after = device.gpm_sample()?;
    let metrics = [GpmMetricId::SmUtil, GpmMetricId::DramBwUtil];
    gpm::gpm_metrics_get(device.nvml(), &before, &after, &metrics)?;
    Ok(Some(begin.elapsed()))
}
