//! Questions that only a machine with a GPU can answer, as far as a program can ask them.

mod graph;

use crate::{
    Options,
    answers::Answers,
    child::{self, Child, Role},
    device, nvml,
};
use kernels::cuda::{Device, DeviceBuffer};
use nvml_wrapper::Nvml;
use serde_json::json;
use std::{process::Command, time::Duration};
use tokio::time::Instant;

const ABOUT: &str = "questions";
const MIB: u64 = 1 << 20;

/// Asks all questions.
pub(crate) fn ask(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let device = device::open(options)?;
    load_time(options, answers)?;
    exporter_dies(options, &device, answers)?;
    torch_tensor(options, &device, answers)?;
    let what = "words written around and inside graph replay";
    if options.fake {
        answers.skip(ABOUT, what, "the driver without a GPU has no graphs");
    } else {
        let (text, passed) = graph::words_around(&device)?;
        answers.check(ABOUT, what, text, passed);
    }
    match Nvml::init() {
        Ok(nvml) => by_nvml(options, &nvml, answers)?,
        Err(error) => {
            let what = "an agent's context, this process, performance counters";
            answers.skip(ABOUT, what, error);
        }
    }
    Ok(())
}

/// Opens the device a second time: the context exists already, so this only loads the kernels.
fn load_time(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let begin = Instant::now();
    let _second = device::open(options)?;
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    answers.add_figure(ABOUT, "loading the fatbin", format!("{ms:.1} ms"), json!({ "ms": ms }));
    Ok(())
}

/// Checks that the device still works after an exporter was killed, whether its mapped memory stays
/// readable or a read fails.
fn exporter_dies(options: &Options, device: &Device, answers: &mut Answers) -> anyhow::Result<()> {
    let mut exporter = Child::start(options, Role::Exporter, None, 1.0)?;
    let imported = device.import(&child::read(&exporter.line()?)?)?;
    // SAFETY: only this process uses the memory; the exporter has finished writing.
    let mapped = unsafe { imported.slice::<u8>()? };
    let is_unchanged = |bytes: &[u8]| bytes.iter().all(|&byte| byte == child::CONTENT);
    let before = is_unchanged(&device.download(mapped)?);
    answers.check(ABOUT, "memory of another process", "reads as written", before);
    exporter.kill()?;
    let after = match device.download(mapped) {
        Ok(bytes) if is_unchanged(&bytes) => "still reads as written".to_owned(),
        Ok(_) => "reads as something else".to_owned(),
        Err(error) => format!("is an error: {error}"),
    };
    drop(imported);
    let mut other: DeviceBuffer<u8> = device.alloc(1 << 20)?;
    let goes_on = device.fill(&mut other, 1).and_then(|()| device.synchronize()).is_ok();
    let text = format!("{after}; the device goes on: {goes_on}");
    answers.check(ABOUT, "the same when its exporter was killed", text, goes_on);
    Ok(())
}

/// Compares torch's handle of a shared tensor with the driver's handle of the same memory.
fn torch_tensor(options: &Options, device: &Device, answers: &mut Answers) -> anyhow::Result<()> {
    let what = "a tensor of torch, mapped";
    let Some(python) = &options.python else {
        answers.skip(ABOUT, what, "no --python with torch was named");
        return Ok(());
    };
    let script = include_str!("../torch_tensor.py");
    let mut tensor = Child::spawn(Command::new(python).args(["-c", script]))?;
    let torch = tensor.line()?;
    let imported = device.import(&child::read(&tensor.line()?)?)?;
    // SAFETY: the script has finished writing.
    let entries = device.download(unsafe { imported.slice::<i32>()? })?;
    let is_unchanged = entries.iter().zip(0..).all(|(&entry, i)| entry == i);
    answers.check(ABOUT, what, torch, is_unchanged);
    drop(imported);
    tensor.end()?;
    Ok(())
}

fn by_nvml(options: &Options, nvml: &Nvml, answers: &mut Answers) -> anyhow::Result<()> {
    let (before, this) = nvml::memory(nvml, std::process::id())?;
    let text = this.map_or("is not among its processes".to_owned(), |used| format!("{used:?}"));
    answers.add_figure(ABOUT, "this process, as NVML has it", text.clone(), text);
    let mut agent = Child::start(options, Role::Context, None, 1.0)?;
    agent.line()?;
    let (with, of) = nvml::memory(nvml, agent.pid())?;
    let mib = with.saturating_sub(before) / MIB;
    let text = format!("{mib} MiB more are in use; NVML ascribes {of:?} to it");
    answers.add_figure(ABOUT, "a context in the agent", text, json!({ "mib": mib }));
    agent.end()?;
    match nvml::counters(nvml) {
        Ok(Some(took)) => {
            let us = took.as_secs_f64() * 1e6;
            let text = format!("{us:.0} us a reading");
            answers.add_figure(ABOUT, "performance counters", text, json!({ "us": us }));
        }
        Ok(None) => answers.skip(ABOUT, "performance counters", "this GPU has none"),
        Err(error) => answers.skip(ABOUT, "performance counters", error),
    }
    Ok(())
}

/// Returns microseconds, for times by the host's clock.
fn us(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}
