//! The agent's GPU readings against a machine whose GPUs are what the test says, and that machine
//! against NVIDIA's own binding.

#![expect(clippy::print_stderr, reason = "a test that is skipped says so")]

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use tests::nvml::Machine;

const GIB: u64 = 1 << 30;

/// A divided GPU with something in every reading, and one that has fallen off the bus.
fn busy_and_lost() -> Value {
    json!({
        "driver_version": "575.57.08",
        "gpus": {
            "0": {
                "uuid": "GPU-a", "pci_address": "00000000:1B:00.0",
                "memory_total": 140 * GIB, "memory_reserved": GIB, "memory_used": 9 * GIB,
                "processes": [{"pid": 7, "bytes": 8 * GIB}, {"pid": 8, "bytes": null}],
                "utilization": [30, 40], "power_milliwatts": 512_000,
                "energy_millijoules": 6_000_000_000_u64, "temperature_celsius": 71,
                "clocks_mhz": [1980, 1980, 3201, 1545], "ecc_errors": [5, 1],
                "fields": {"142": 3, "82": -3, "197": 1_u64 << 40},
                "mig": true, "slices": {"0": {"uuid": "MIG-a"}, "3": {"uuid": "MIG-b"}},
                "gpm": {"2": 12.5, "10": 50.25}, "lost": false,
            },
            "1": {"lost": true},
        },
    })
}

/// A Python with NVIDIA's binding: the real-engine lane's, or the one on the path.
fn python_with_nvml() -> Option<PathBuf> {
    let home = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = home("XDG_CACHE_HOME").or_else(|| Some(home("HOME")?.join(".cache")));
    let installed = cache.map(|cache| cache.join("berth/sglang-0.5.23"));
    let lane = home("BERTH_SGLANG_HOME").or(installed).map(|home| home.join("venv/bin/python"));
    let imports = |python: &PathBuf| {
        let tried = Command::new(python).args(["-c", "import pynvml"]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    lane.into_iter().chain([PathBuf::from("python3")]).find(imports)
}

#[test]
fn nvidia_s_own_binding_reads_the_same_machine() {
    let Some(python) = python_with_nvml() else {
        eprintln!("skipped: no Python with nvidia-ml-py; tests/sglang/install brings one");
        return;
    };
    let machine = Machine::without(&[], &busy_and_lost()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("nvml-fake/conformance.py");
    let output = Command::new(python)
        .arg(script)
        .arg(machine.folder())
        .env("LD_LIBRARY_PATH", machine.folder())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}
