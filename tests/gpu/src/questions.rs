//! Questions that only a machine with a GPU can answer, as far as a program can ask them.

use crate::{Options, answers::Answers, child::Child, device, nvml};
use nvml_wrapper::Nvml;
use serde_json::json;
use tokio::time::Instant;

const ABOUT: &str = "questions";
const MIB: u64 = 1 << 20;

/// Asks all questions.
pub(crate) fn ask(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let _first = device::open(options)?;
    load_time(options, answers)?;
    match Nvml::init() {
        Ok(nvml) => by_nvml(options, &nvml, answers)?,
        Err(error) => {
            let what = "another process's context, this process, performance counters";
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

fn by_nvml(options: &Options, nvml: &Nvml, answers: &mut Answers) -> anyhow::Result<()> {
    let (before, this) = nvml::memory(nvml, std::process::id())?;
    let text = this.map_or("is not among its processes".to_owned(), |used| format!("{used:?}"));
    answers.add_figure(ABOUT, "this process, as NVML has it", text.clone(), text);
    let mut other = Child::start(options)?;
    other.wait_open()?;
    let (with, of) = nvml::memory(nvml, other.pid())?;
    let mib = with.saturating_sub(before) / MIB;
    let text = format!("{mib} MiB more are in use; NVML ascribes {of:?} to it");
    answers.add_figure(ABOUT, "a context in another process", text, json!({ "mib": mib }));
    other.end()?;
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
