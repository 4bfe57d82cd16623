//! Exports metrics of the process itself, under the names that all Prometheus clients use.
//!
//! A figure that can't be read from `/proc` has no line.

use std::{fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::DescriptorEncoder,
    metrics::{counter::ConstCounter, gauge::ConstGauge, info::Info},
    registry::Registry,
};
use rustix::{
    process::{Resource, getrlimit},
    time::{ClockId, clock_gettime},
};

use crate::{
    clock,
    metrics::{Registrar, encode, gauge},
};

const KIB: u64 = 1024;

/// Returns the registrar for the binary's own metrics, whose names begin with `prefix`.
pub fn register<'a>(
    root: &'a mut Registry,
    prefix: &'static str,
    version: &'static str,
) -> Registrar<'a> {
    let started_unix_ns = clock::unix_ns();
    root.register_collector(Box::new(ProcessCollector { started_unix_ns }));
    let registry = root.sub_registry_with_prefix(prefix);
    let help = "1; the version of the binary";
    registry.register("build", help, Info::new([("version", version)]));
    Registrar::new(registry)
}

#[derive(Debug)]
struct ProcessCollector {
    started_unix_ns: u64,
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let cpu_seconds = seconds(cpu.tv_sec, cpu.tv_nsec);
        let help = "CPU time of the process, of the user and the system together";
        let cpu_seconds = ConstCounter::new(cpu_seconds);
        encode(&mut encoder, "process_cpu", "seconds", help, &cpu_seconds)?;
        let started = ConstGauge::new(self.started_unix_ns as f64 / 1e9);
        let help = "Unix time at which the process started";
        encode(&mut encoder, "process_start_time", "seconds", help, &started)?;
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let help = "The most file descriptors that the process may open";
        for (name, unit, help, value) in [
            ("process_resident_memory", "bytes", "Resident memory", kibibytes(&status, "VmRSS")),
            ("process_virtual_memory", "bytes", "Virtual memory", kibibytes(&status, "VmSize")),
            ("process_threads", "", "Threads", status_field(&status, "Threads")),
            ("process_open_fds", "", "Open file descriptors", open_descriptors()),
            ("process_max_fds", "", help, getrlimit(Resource::Nofile).current),
        ] {
            let Some(value) = value else { continue };
            encode(&mut encoder, name, unit, help, &gauge(value))?;
        }
        Ok(())
    }
}

fn seconds(whole: i64, nanoseconds: i64) -> f64 {
    whole as f64 + nanoseconds as f64 / 1e9
}

fn status_field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn kibibytes(status: &str, name: &str) -> Option<u64> {
    Some(status_field(status, name)? * KIB)
}

/// Returns the number of open descriptors, without the one that reads them.
fn open_descriptors() -> Option<u64> {
    Some((fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the value of the line that begins with `name`.
    fn value(text: &str, name: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.rsplit(' ').next().unwrap().parse().expect("a number")
    }

    #[test]
    fn the_process_tells_its_version_and_what_it_uses() {
        let mut root = Registry::default();
        register(&mut root, "berth_test", "1.2.3");
        let read = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &root).unwrap();
            text
        };
        let before = read();
        assert!(before.contains("berth_test_build_info{version=\"1.2.3\"} 1"), "{before}");
        let held: Vec<fs::File> =
            (0..9).map(|_| fs::File::open("/proc/self/status").unwrap()).collect();
        let after = read();
        // Other tests of this process open and close descriptors meanwhile.
        assert!(value(&after, "process_open_fds ") >= 9.0, "{} held: {after}", held.len());
        assert!(value(&after, "process_max_fds ") >= value(&after, "process_open_fds "));
        let cpu = |text: &str| value(text, "process_cpu_seconds_total ");
        assert!(cpu(&before) > 0.0 && cpu(&after) >= cpu(&before), "{after}");
        assert!(value(&after, "process_resident_memory_bytes ") > 1e6, "{after}");
        let age = clock::unix_ns() as f64 / 1e9 - value(&after, "process_start_time_seconds ");
        assert!((0.0..600.0).contains(&age), "{age}");
    }
}
