//! Measures the effect of audits on a loop that reads device memory like a decoding engine.
//!
//! The loop reads step after step, as decoding reads weights and KV, alone and with audits running.
//! Its stream has the lowest priority, like the audits' stream. An engine's stream has a higher
//! priority, so an engine would feel less than is measured here.

use crate::{
    Options,
    answers::Answers,
    device,
    synthetic::{Held, Size, Synthetic},
};
use kernels::{
    account::{Accountant, Snapshot, Stream},
    cuda::{Device, DeviceBuffer, KvBuffers, StreamPoint},
};
use serde_json::json;
use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};
use tokio::time::Instant;

const ABOUT: &str = "audits beside a decoding loop";
/// Reads of the KV per step, 1 GiB each: about 5 ms in total on an H200.
const READS: usize = 20;
/// Steps enqueued ahead, as an engine with overlap scheduling does.
const AHEAD: usize = 2;
/// Largest allowed slowdown of the loop by one audit per second.
const EFFECT_MAX: f64 = 0.01;
const DIGEST_PAGES: u32 = 4096;

/// The decoding loop.
struct Load<'a> {
    device: &'a Device,
    on: &'a Synthetic,
    kv: KvBuffers,
    pages: DeviceBuffer<u32>,
    digests: DeviceBuffer<u64>,
    reads: usize,
}

/// The durations of steps.
struct Steps(Vec<Duration>);

impl Steps {
    fn mean_us(&self) -> f64 {
        let sum: Duration = self.0.iter().sum();
        sum.as_secs_f64() * 1e6 / self.0.len().max(1) as f64
    }

    fn p99_us(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * 99 / 100).min(sorted.len().saturating_sub(1));
        sorted.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e6)
    }
}

/// Runs the loop alone and with one and ten audits a second, by turns.
pub(crate) fn measure(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let device = device::open(options)?;
    let [_, size] = Size::all(options.fake);
    let on = Synthetic::new(&device, size, Held::ByOne, true)?;
    let pages: Vec<u32> = (1..size.pages).collect();
    let mut load = Load {
        kv: on.kv_buffers(&device)?,
        pages: device.alloc(pages.len())?,
        digests: device.alloc(pages.len())?,
        reads: if options.fake { 1 } else { READS },
        device: &device,
        on: &on,
    };
    device.upload(&mut load.pages, &pages)?;
    for rate in [1.0, 10.0] {
        let alone = load.steps(options.load_time())?;
        let (steps, audits) = load.steps_with_audits(options, rate)?;
        let again = load.steps(options.load_time())?;
        let bare = alone.mean_us().midpoint(again.mean_us());
        let effect = steps.mean_us() / bare - 1.0;
        let text = format!(
            "step {:.0} us (p99 {:.0}), alone {:.0} (p99 {:.0}): {:+.2} %, {audits} audits",
            steps.mean_us(),
            steps.p99_us(),
            bare,
            alone.p99_us(),
            effect * 100.0,
        );
        let what = format!("inside the engine, {rate} a second");
        if rate == 1.0 && !options.fake {
            answers.check(ABOUT, format!("{what}: at most 1 %"), text, effect <= EFFECT_MAX);
        } else {
            let value = json!({
                "step_us": steps.mean_us(), "p99_us": steps.p99_us(), "alone_us": bare,
                "effect": effect, "audits": audits,
            });
            answers.add_figure(ABOUT, what, text, value);
        }
    }
    Ok(())
}

impl Load<'_> {
    /// Runs steps for the time in the options, with `rate` audits a second in this process; returns
    /// the steps and the number of audits.
    fn steps_with_audits(&mut self, options: &Options, rate: f64) -> anyhow::Result<(Steps, u64)> {
        let stop = AtomicBool::new(false);
        let accountant = Accountant::device(self.on.account_pool()?, device::open(options)?)?;
        // SAFETY: the stream is the loop's, which outlives the audits.
        let (on, stream) = (self.on, unsafe { Stream::new(self.device.stream()) });
        thread::scope(|scope| {
            let audits = scope.spawn(|| audit_inside(accountant, on, stream, rate, &stop));
            let steps = self.steps(options.load_time());
            stop.store(true, Ordering::Relaxed);
            let audits = audits.join().expect("the auditor doesn't panic");
            Ok((steps?, audits?))
        })
    }

    /// Runs steps for a time.
    fn steps(&mut self, time: Duration) -> anyhow::Result<Steps> {
        let end = Instant::now() + time;
        let mut marks = VecDeque::from([self.device.record_timed()?]);
        let mut steps = vec![];
        while Instant::now() < end || steps.is_empty() {
            for _ in 0..self.reads {
                self.device.page_digest(&self.kv, self.pages.slice(), &mut self.digests)?;
            }
            marks.push_back(self.device.record_timed()?);
            while marks.len() > AHEAD + 1 {
                steps.push(step(&mut marks)?);
            }
        }
        Ok(Steps(steps))
    }
}

/// Returns the time between the two oldest marks, once the younger of them is done.
fn step(marks: &mut VecDeque<StreamPoint>) -> anyhow::Result<Duration> {
    let before = marks.pop_front().expect("the caller saw some");
    let after = marks.front().expect("the caller saw some");
    while !after.is_done()? {
        thread::yield_now();
    }
    Ok(after.since(&before)?)
}

/// Makes audits as the shim makes them, until `stop` is set.
fn audit_inside(
    mut accountant: Accountant,
    on: &Synthetic,
    stream: Stream,
    rate: f64,
    stop: &AtomicBool,
) -> anyhow::Result<u64> {
    let rows = on.snapshot_rows();
    let keys: Vec<u64> = rows.iter().map(|row| row.session.into()).collect();
    let now: Vec<(u32, u64)> = rows.iter().map(|row| (row.row, row.version)).collect();
    let [free, tree] = on.lists();
    let snapshot =
        Snapshot { rows: &rows, keys: &keys, free: &[free], tree, digest_pages_max: DIGEST_PAGES };
    let mut audits = 0;
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        accountant.begin(&snapshot, stream)?;
        while !accountant.is_ready()? {
            thread::sleep(Duration::from_millis(1));
        }
        let report = accountant.finish(&now)?;
        anyhow::ensure!(report.fault_count() == 0, "the pool is sound: {:?}", report.findings);
        audits += 1;
        next += Duration::from_secs_f64(1.0 / rate);
        while !stop.load(Ordering::Relaxed) && Instant::now() < next {
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(audits)
}
