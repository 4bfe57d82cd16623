//! Tests of the agent's GPU readings on fake NVML machines, and of the fake with NVIDIA's binding.
//!
//! They cover each reading, absent readings, failing calls, and which devices belong to the engine.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]
#![expect(clippy::print_stderr, reason = "a test that is skipped says so")]

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use engine_sim::{Config, EngineSim};
use harness::{
    cluster::{Cluster, PATIENCE, Router, eventually, router_config},
    nvml::{Machine, NvmlControl},
    scheduler::{PoolTokens, Scheduler},
    web::Web,
};
use serde_json::{Value, json};
use worker_agent::gpu::{self, Gpus, Settings, reading, select::Basis, tracker::Snapshot};

const GIB: u64 = 1 << 30;

/// A GPU divided by MIG with a value for every reading, and a GPU that has fallen off the bus.
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

/// Returns a Python with NVIDIA's binding: the integration suite's, or the one on the path.
fn python_with_nvml() -> Option<PathBuf> {
    let home = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = home("XDG_CACHE_HOME").or_else(|| Some(home("HOME")?.join(".cache")));
    let installed = cache.map(|cache| cache.join("berth/sglang-0.5.23"));
    let suite = home("BERTH_SGLANG_HOME").or(installed).map(|home| home.join("venv/bin/python"));
    let imports = |python: &PathBuf| {
        let tried = Command::new(python).args(["-c", "import pynvml"]).output();
        tried.is_ok_and(|output| output.status.success())
    };
    suite.into_iter().chain([PathBuf::from("python3")]).find(imports)
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

/// A GPU with a value for every reading. It is the engine's because it is the only GPU.
fn busy() -> Value {
    let mut gpu = busy_and_lost()["gpus"]["0"].clone();
    gpu["mig"] = false.into();
    gpu["slices"] = json!({});
    gpu["numa_node"] = 1.into();
    gpu["mps_processes"] = json!([{"pid": 9, "bytes": GIB}]);
    gpu["throttle_reasons"] = (1 | 4 | 0x40).into();
    gpu["fields"] = json!({"82": 66, "142": 3, "143": 1, "144": 1, "145": 0, "197": 1000,
        "198": 2000, "230": 0, "38": 4, "52": 5, "59": 6});
    gpu["gpm"] = json!({"2": 12.5, "3": 25.0, "5": 50.0, "10": 75.0, "60": 2.0, "61": 1.0});
    gpu
}

fn settings(machine: &Machine) -> Settings {
    Settings { library: Some(machine.library()), ..Settings::default() }
}

/// Settings with which NVML is reloaded at each attempt while a device is missing.
fn reloading(machine: &Machine, devices: &[&str]) -> Settings {
    Settings {
        devices: devices.iter().map(|device| device.parse().unwrap()).collect(),
        reload_interval: Duration::from_millis(1),
        ..settings(machine)
    }
}

/// Returns a snapshot read through an NVML that was loaded after this call.
async fn reloaded(gpus: &Gpus, control: &mut NvmlControl) -> Arc<Snapshot> {
    let before = control.calls("nvmlInit_v2").unwrap();
    eventually("NVML to be loaded again", || {
        let loaded = control.calls("nvmlInit_v2").unwrap() > before;
        async move { loaded.then_some(()) }
    })
    .await;
    let mut watch = gpus.subscribe();
    watch.mark_unchanged();
    tokio::time::timeout(PATIENCE, watch.changed()).await.unwrap().unwrap();
    gpus.snapshot()
}

fn uuids(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.devices.iter().map(|device| device.identity.uuid.as_str()).collect()
}

/// Returns the first snapshot that satisfies `fits`.
async fn snapshot(gpus: &Gpus, what: &str, fits: impl Fn(&Snapshot) -> bool) -> Arc<Snapshot> {
    let mut watch = gpus.subscribe();
    let found = watch.wait_for(|snapshot| fits(snapshot));
    let Ok(found) = tokio::time::timeout(PATIENCE, found).await else {
        panic!("waited in vain for {what}; there is {:?}", gpus.snapshot());
    };
    Arc::clone(&found.unwrap())
}

#[tokio::test]
async fn every_reading_arrives() {
    let machine = Machine::new(&json!({ "0": busy() })).unwrap();
    let gpus = gpu::start(Settings { reads_gpm: true, ..settings(&machine) }).unwrap();
    let second = |snapshot: &Snapshot| snapshot.devices[0].reading.gpm.is_some();
    let seen = snapshot(&gpus, "two samples of the counters", second).await;
    let device = &seen.devices[0];
    let expected = reading::Identity {
        uuid: "GPU-a".into(),
        name: "NVIDIA H200".into(),
        index: 0,
        pci_address: Some("00000000:1B:00.0".into()),
        parent_uuid: None,
        numa_node: Some(1),
        is_divided: false,
    };
    assert_eq!(device.identity, expected);
    assert_eq!(
        (seen.basis, device.is_engine_device, &device.unhealthy_reason),
        (Basis::Only, true, &None)
    );
    let process = |pid, bytes| reading::Process { pid, bytes };
    let expected = reading::Reading {
        memory: Some(reading::Memory {
            total: 140 * GIB,
            used: 9 * GIB,
            reserved: GIB,
            free: 130 * GIB,
        }),
        processes: Some(vec![process(7, Some(8 * GIB)), process(8, None), process(9, Some(GIB))]),
        utilization_percent: Some(30),
        memory_utilization_percent: Some(40),
        power_milliwatts: Some(512_000),
        energy_millijoules: Some(6_000_000_000),
        temperature_celsius: Some(71),
        memory_temperature_celsius: Some(66),
        sm_clock_mhz: Some(1980),
        memory_clock_mhz: Some(3201),
        throttle_reasons: Some(vec!["power_cap", "hardware_thermal"]),
        pcie_sent_bytes: Some(1000),
        pcie_received_bytes: Some(2000),
        pcie_replays: Some(0),
        nvlink_errors: reading::NvlinkErrors { crc: Some(4), replay: Some(5), recovery: Some(6) },
        ecc_corrected: Some(5),
        ecc_uncorrected: Some(1),
        remapped_rows: reading::RemappedRows {
            corrected: Some(3),
            uncorrected: Some(1),
            has_pending: Some(true),
            has_failed: Some(false),
        },
        recovery_action: Some(reading::RecoveryAction::None),
        reset_needed: None,
        gpm: Some(reading::Gpm {
            sm_ratio: Some(0.125),
            sm_occupancy_ratio: Some(0.25),
            tensor_ratio: Some(0.5),
            memory_bandwidth_ratio: Some(0.75),
            nvlink_sent_bytes_per_second: Some(1_048_576.0),
            nvlink_received_bytes_per_second: Some(2_097_152.0),
        }),
        board_fault: None,
        failed_calls: vec![],
    };
    assert_eq!(device.reading, expected);
}

#[tokio::test]
async fn a_driver_that_lacks_calls_takes_only_their_readings_away() {
    let lacks = [
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNumaNodeId",
        "nvmlEventSetCreate",
        "nvmlGpmQueryDeviceSupport",
    ];
    let machine = Machine::without(&lacks, &json!({ "gpus": { "0": busy() } })).unwrap();
    let gpus = gpu::start(Settings { reads_gpm: true, ..settings(&machine) }).unwrap();
    let device = &gpus.snapshot().devices[0];
    let reading = &device.reading;
    assert_eq!(reading.power_milliwatts, None);
    assert_eq!((reading.remapped_rows, reading.recovery_action, reading.gpm), Default::default());
    assert_eq!(reading.memory.map(|memory| memory.used), Some(9 * GIB));
    assert_eq!(reading.processes.as_ref().map(Vec::len), Some(2), "those without MPS");
    assert_eq!((reading.temperature_celsius, reading.ecc_corrected), (Some(71), Some(5)));
    assert_eq!(
        (&reading.failed_calls, &device.unhealthy_reason),
        (&vec![], &None),
        "lacking is not failing"
    );
}

#[tokio::test]
async fn unsupported_readings_are_queried_once_and_failures_are_counted() {
    let mut gpu = busy();
    gpu["power_milliwatts"] = Value::Null;
    gpu["fail"] = json!({"nvmlDeviceGetTemperature": 999});
    let machine = Machine::new(&json!({ "0": gpu })).unwrap();
    let gpus = gpu::start(settings(&machine)).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    let failed = |snapshot: &Snapshot| snapshot.devices[0].failure_counts["temperature"];
    let seen = snapshot(&gpus, "three failed readings", |snapshot| failed(snapshot) >= 3).await;
    assert_eq!(seen.devices[0].reading.temperature_celsius, None);
    assert_eq!(seen.devices[0].failure_counts.len(), 1, "{:?}", seen.devices[0].failure_counts);
    assert_eq!(control.calls("nvmlDeviceGetPowerUsage").unwrap(), 1);
    assert!(control.calls("nvmlDeviceGetTemperature").unwrap() >= 3);
    control.gpu(0, &json!({"fail": {"nvmlDeviceGetTemperature": 0}})).unwrap();
    let works = |snapshot: &Snapshot| snapshot.devices[0].reading.temperature_celsius == Some(71);
    snapshot(&gpus, "a temperature", works).await;
}

fn reason(snapshot: &Snapshot) -> &str {
    snapshot.unhealthy_reason.as_deref().unwrap_or_default()
}

#[tokio::test]
async fn an_xid_that_needs_a_reset_is_reported_at_once_and_others_are_counted() {
    let machine = Machine::new(&json!({ "0": {}, "1": {} })).unwrap();
    let devices = vec!["1".parse().unwrap()];
    let gpus = gpu::start(Settings { devices, ..settings(&machine) }).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    // An event before the GPU is watched is lost.
    eventually("the GPUs to be watched", || {
        let watched = control.calls("nvmlEventSetWait_v2").unwrap() >= 2;
        async move { watched.then_some(()) }
    })
    .await;
    control.xid(1, 31).unwrap();
    control.xid(1, 31).unwrap();
    let twice = |snapshot: &Snapshot| snapshot.devices[1].xid_counts.get(&31) == Some(&2);
    assert_eq!(
        snapshot(&gpus, "two XIDs", twice).await.unhealthy_reason,
        None,
        "an application's fault"
    );
    control.xid(0, 62).unwrap();
    let told = |snapshot: &Snapshot| snapshot.devices[0].xid_counts.contains_key(&62);
    assert_eq!(
        snapshot(&gpus, "another's XID", told).await.unhealthy_reason,
        None,
        "not the engine's"
    );
    control.xid(1, 62).unwrap();
    let unhealthy =
        snapshot(&gpus, "the engine's GPU", |snapshot| snapshot.unhealthy_reason.is_some()).await;
    assert!(
        reason(&unhealthy).starts_with("GPU 1 (GPU-") && reason(&unhealthy).contains("reset"),
        "{unhealthy:?}"
    );
    // The driver asks for a reset, then stops asking because the GPU was reset.
    control.gpu(1, &json!({"fields": {"230": 1}})).unwrap();
    let asked = |snapshot: &Snapshot| {
        snapshot.devices[1].reading.recovery_action == Some(reading::RecoveryAction::Reset)
    };
    snapshot(&gpus, "the driver's request for a reset", asked).await;
    control.gpu(1, &json!({"fields": {"230": 0}})).unwrap();
    snapshot(&gpus, "the GPU to be healthy again", |snapshot| snapshot.unhealthy_reason.is_none())
        .await;
}

#[tokio::test]
async fn slices_are_separate_devices_with_the_health_of_their_gpu() {
    let slice = |number: u64, pid: u32| {
        json!({"uuid": format!("MIG-{number}"), "name": "NVIDIA H200 MIG 1g.18gb",
            "memory_total": 16 * GIB, "memory_used": 2 * GIB, "processes": [{"pid": pid, "bytes": GIB}]})
    };
    let own = std::process::id();
    let gpu =
        json!({"uuid": "GPU-a", "mig": true, "slices": {"0": slice(0, 1), "2": slice(2, own)}});
    let machine = Machine::new(&json!({ "0": gpu })).unwrap();
    let gpus = gpu::start(settings(&machine)).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    let unknown = gpus.snapshot();
    let ours = |snapshot: &Snapshot| -> Vec<String> {
        let ours = snapshot.devices.iter().filter(|device| device.is_engine_device);
        ours.map(|device| device.identity.uuid.clone()).collect()
    };
    assert_eq!(
        (unknown.basis, ours(&unknown)),
        (Basis::Unknown, vec!["MIG-0".into(), "MIG-2".into()])
    );
    let scheduler = |pid, device: &str| gpu::process::Scheduler {
        dp_rank: 0,
        pid,
        pid_in_own_namespace: own,
        device: device.to_owned(),
    };
    // The pid of an engine in another container can't be found. The shim still names its slice.
    gpus.set_scheduler(scheduler(None, "2"));
    let named = |snapshot: &Snapshot| snapshot.basis == Basis::Shim;
    let named = snapshot(&gpus, "the named slice", named).await;
    assert_eq!(ours(&named), ["MIG-2"]);
    gpus.set_scheduler(scheduler(Some(own), "2"));
    let found = |snapshot: &Snapshot| snapshot.basis == Basis::Processes;
    let found = snapshot(&gpus, "the engine's slice", found).await;
    assert_eq!(ours(&found), ["MIG-2"]);
    let device = &found.devices(service::clock::now(), 0)[0];
    assert_eq!((device.parent_uuid.as_deref(), device.index), (Some("GPU-a"), Some(0)));
    assert_eq!(device.engine_bytes.map(|figure| figure.value), Some(GIB));
    assert_eq!((device.memory_total_bytes, device.power_milliwatts), (Some(16 * GIB), None));
    control.gpu(0, &json!({"lost": true})).unwrap();
    let lost = snapshot(&gpus, "the loss", |snapshot| snapshot.unhealthy_reason.is_some()).await;
    assert!(reason(&lost).contains("MIG-2") && reason(&lost).contains("fell off"), "{lost:?}");
}

#[tokio::test]
async fn a_gpu_lost_before_the_agent_started_is_reported() {
    let machine = Machine::new(&json!({ "0": {"lost": true} })).unwrap();
    let gpus = gpu::start(settings(&machine)).unwrap();
    let snapshot = gpus.snapshot();
    assert_eq!(snapshot.devices[0].identity.uuid, "index-0", "it can't say its name");
    assert!(reason(&snapshot).contains("fell off the bus"), "{snapshot:?}");
}

/// Makes every call about the GPU fail with a code that gives no reason.
fn failing_calls() -> Value {
    json!({"lost": false, "fail": {"*": 999}})
}

#[tokio::test]
async fn a_lost_gpu_stays_unhealthy_when_its_calls_fail_with_another_error() {
    let machine = Machine::new(&json!({ "0": {} })).unwrap();
    let gpus = gpu::start(settings(&machine)).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    control.gpu(0, &json!({"lost": true})).unwrap();
    snapshot(&gpus, "the loss", |snapshot| snapshot.unhealthy_reason.is_some()).await;
    control.gpu(0, &failing_calls()).unwrap();
    let failing =
        |snapshot: &Snapshot| snapshot.devices[0].failure_counts.get("memory") >= Some(&2);
    let failing = snapshot(&gpus, "two failed readings", failing).await;
    assert!(reason(&failing).contains("fell off the bus"), "{failing:?}");
    control.gpu(0, &json!({"fail": {"*": 0}})).unwrap();
    snapshot(&gpus, "the GPU's return", |snapshot| snapshot.unhealthy_reason.is_none()).await;
}

#[tokio::test]
async fn a_lost_gpu_and_its_slices_stay_unhealthy_however_nvml_fails_to_find_them_again() {
    let slice = |number: u64| json!({"uuid": format!("MIG-{number}"), "memory_total": GIB});
    let gpu = json!({"uuid": "GPU-a", "mig": true, "slices": {"0": slice(0), "2": slice(2)}});
    let machine = Machine::new(&json!({ "0": gpu })).unwrap();
    let gpus = gpu::start(reloading(&machine, &["MIG-2"])).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    control.gpu(0, &json!({"lost": true})).unwrap();
    snapshot(&gpus, "the loss", |snapshot| snapshot.unhealthy_reason.is_some()).await;
    let uncounted = |code: u32| json!({"fail": {"nvmlDeviceGetCount_v2": code}});
    let of_it = |patch: Value| json!({"gpus": {"0": patch}});
    for failure in [
        json!({}),
        of_it(failing_calls()),
        of_it(json!({"fail": {"nvmlDeviceGetHandleByIndex_v2": 0}})),
        of_it(json!({"fail": {"nvmlDeviceGetUUID": 0}})),
        uncounted(999),
        uncounted(0),
        of_it(json!({"hidden": true})),
    ] {
        control.set(&failure).unwrap();
        let seen = reloaded(&gpus, &mut control).await;
        assert_eq!(uuids(&seen), ["GPU-a", "MIG-0", "MIG-2"], "{failure}");
        let told = reason(&seen).contains("MIG-2") && reason(&seen).contains("fell off the bus");
        assert!(told, "{failure}: {seen:?}");
    }
    control.gpu(0, &json!({"hidden": false, "fail": {"*": 0}})).unwrap();
    let back =
        snapshot(&gpus, "the GPU's return", |snapshot| snapshot.unhealthy_reason.is_none()).await;
    assert_eq!(uuids(&back), ["GPU-a", "MIG-0", "MIG-2"]);
}

#[tokio::test]
async fn a_gpu_keeps_its_identity_when_the_other_gpu_is_no_longer_listed() {
    let machine = Machine::new(&json!({ "0": {"uuid": "GPU-a"}, "1": {"uuid": "GPU-b"} })).unwrap();
    // Between two reloads there must be time to wait for an event.
    let reload_interval = Duration::from_millis(100);
    let gpus = gpu::start(Settings { reload_interval, ..reloading(&machine, &[]) }).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    control.gpu(0, &json!({"lost": true})).unwrap();
    let lost = |snapshot: &Snapshot| snapshot.devices[0].unhealthy_reason.is_some();
    snapshot(&gpus, "the loss", lost).await;
    control.gpu(0, &json!({"hidden": true})).unwrap();
    let seen = reloaded(&gpus, &mut control).await;
    assert_eq!((uuids(&seen), seen.basis), (vec!["GPU-a", "GPU-b"], Basis::Unknown));
    assert!(lost(&seen) && seen.devices[1].unhealthy_reason.is_none(), "{seen:?}");
    assert_eq!(seen.devices[1].identity.index, 1, "and not the first, as NVML has it now");
    eventually("its XID", || {
        // While NVML is being reloaded, events are lost.
        control.xid(1, 31).unwrap();
        let counted = |at: usize| gpus.snapshot().devices[at].xid_counts.contains_key(&31);
        assert!(!counted(0), "it was the other's");
        let counted = counted(1);
        async move { counted.then_some(()) }
    })
    .await;
    control.gpu(0, &json!({"hidden": false, "lost": false})).unwrap();
    snapshot(&gpus, "the GPU's return", |snapshot| !lost(snapshot)).await;
}

#[tokio::test]
async fn a_gpu_lost_before_the_agent_started_is_matched_by_its_uuid_when_it_returns() {
    let machine = Machine::new(&json!({ "0": {"uuid": "GPU-a", "lost": true} })).unwrap();
    let gpus = gpu::start(reloading(&machine, &["GPU-a"])).unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();
    assert!(reason(&gpus.snapshot()).contains("no GPU here is GPU-a"), "{:?}", gpus.snapshot());
    control.gpu(0, &json!({"lost": false})).unwrap();
    let back =
        snapshot(&gpus, "the GPU's return", |snapshot| snapshot.unhealthy_reason.is_none()).await;
    assert_eq!((uuids(&back), back.devices[0].is_engine_device), (vec!["GPU-a"], true));
}

#[tokio::test]
async fn a_gpu_that_answers_no_call_makes_its_worker_unhealthy_until_it_does() {
    let machine = Machine::new(&json!({ "0": {} })).unwrap();
    let gpus = gpu::start(settings(&machine)).unwrap();
    assert_eq!(gpus.snapshot().unhealthy_reason, None);
    let mut control = machine.wait_until_loaded().await.unwrap();
    control.gpu(0, &failing_calls()).unwrap();
    let unhealthy =
        snapshot(&gpus, "the failures", |snapshot| snapshot.unhealthy_reason.is_some()).await;
    assert!(reason(&unhealthy).contains("can't reach it"), "{unhealthy:?}");
    control.gpu(0, &json!({"fail": {"*": 0}})).unwrap();
    snapshot(&gpus, "the GPU's return", |snapshot| snapshot.unhealthy_reason.is_none()).await;
}

#[tokio::test]
async fn a_driver_that_loads_after_the_agent_started_is_found() {
    let not_loaded = json!({ "gpus": { "0": {} }, "fail": { "nvmlInit_v2": 9 } });
    let machine = Machine::without(&[], &not_loaded).unwrap();
    let gpus = gpu::start(settings(&machine)).unwrap();
    assert!(gpus.snapshot().devices.is_empty());
    let mut control = machine.wait_until_loaded().await.unwrap();
    control.set(&json!({ "fail": { "nvmlInit_v2": 0 } })).unwrap();
    snapshot(&gpus, "the GPU", |snapshot| !snapshot.devices.is_empty()).await;
}

/// Starts a router, an agent and an engine on a machine with GPUs.
async fn start(change: impl FnOnce(&mut worker_agent::config::Config)) -> Cluster {
    let started = Cluster::start(1, |settings| {
        // 1 GiB: the tiny model's KV has 512 bytes per token.
        settings.engine.core.max_total_tokens = 1 << 21;
        change(&mut settings.agent);
    });
    started.await.unwrap()
}

#[tokio::test]
async fn without_nvml_the_worker_has_the_device_that_its_engine_names() {
    let cluster = start(|_| {}).await;
    let worker = cluster.wait_for_worker(0, "a report", |worker| !worker["load"].is_null()).await;
    assert_eq!(worker["load"]["devices"], json!([{"uuid": "cpu", "name": ""}]), "{worker}");
    assert_eq!(worker["state"], "fresh", "{worker}");
    assert!(!cluster.agent_metrics().await.contains("berth_agent_gpu"));
}

#[tokio::test]
async fn a_setting_that_names_no_gpu_here_makes_the_worker_unhealthy_and_says_which() {
    let machine = Machine::new(&json!({ "0": {}, "1": {} })).unwrap();
    let devices = ["0", "GPU-elsewhere"].map(|device| device.parse().unwrap()).into();
    let gpus = gpu::start(Settings { devices, ..settings(&machine) }).unwrap();
    let seen = gpus.snapshot();
    assert!(reason(&seen).contains("no GPU here is GPU-elsewhere"), "{seen:?}");
    let ours: Vec<bool> = seen.devices.iter().map(|device| device.is_engine_device).collect();
    assert_eq!(ours, [true, false], "those that are there");
}

/// Token counts of a pool of 1 GiB: half is free, an eighth is held by sessions.
const POOL: PoolTokens =
    PoolTokens { total: 1 << 21, available: 1 << 20, evictable: 3 << 18, protected: 0 };

fn start_scheduler(wrapper: &[&str], cluster: &Cluster, dp_rank: u32) -> Option<Scheduler> {
    Scheduler::start(wrapper, &cluster.agent().shim_socket, dp_rank, POOL)
        .inspect_err(|error| eprintln!("skipped: {error}"))
        .ok()
}

#[tokio::test]
async fn an_engine_on_two_gpus_is_known_by_its_processes_and_its_pool_by_both() {
    let machine = Machine::new(&json!({ "0": {}, "1": {}, "2": {} })).unwrap();
    let cluster = start(|config| config.gpu.nvml_library = machine.library()).await;
    let mut control = machine.wait_until_loaded().await.unwrap();
    let Some(first) = start_scheduler(&[], &cluster, 0) else { return };
    let second = Scheduler::start_silent("sglang::scheduler_TP1").unwrap();
    let on = |pid: u32, bytes: u64| json!([{"pid": pid, "bytes": bytes}, {"pid": 1, "bytes": GIB}]);
    let uses = |pid, bytes: u64| json!({"processes": on(pid, bytes), "memory_used": bytes + GIB});
    control.gpu(1, &uses(first.pid, 8 * GIB)).unwrap();
    control.gpu(2, &uses(second.pid, GIB / 2)).unwrap();
    let count = |devices: &Value| devices.as_array().map(Vec::len);
    let both = |worker: &Value| {
        let described = count(&worker["rank"]["devices"]) == Some(2);
        // The shim's figures may come later than NVML's.
        let has = |name: &str| worker["load"]["devices"][1][name].is_object();
        described && has("engine_bytes") && has("kv_reclaimable_bytes")
    };
    let worker = cluster.wait_for_worker(0, "both GPUs", both).await;
    let devices = &worker["load"]["devices"];
    assert_eq!(count(devices), Some(2), "{devices}");
    let index = |at: usize| devices[at]["index"].as_u64();
    assert_eq!((index(0), index(1)), (Some(1), Some(2)), "{devices}");
    for (at, engine_bytes) in [(0, 8 * GIB), (1, GIB / 2)] {
        let bytes = |name: &str| {
            let figure = &devices[at][name];
            (figure["value"].as_u64().unwrap(), figure["source"].as_str().unwrap().to_owned())
        };
        assert_eq!(bytes("engine_bytes"), (engine_bytes, "nvml".into()));
        assert_eq!(bytes("kv_pool_bytes"), (GIB, "server_info".into()), "its share of each token");
        assert_eq!(bytes("kv_used_bytes"), (GIB / 2, "shim".into()));
        assert_eq!(bytes("kv_pinned_bytes"), (GIB / 8, "shim".into()));
        assert_eq!(bytes("kv_reclaimable_bytes"), (3 * GIB / 8, "shim".into()));
        let usage = &devices[at]["kv_physical_usage"];
        assert_eq!((usage["value"].as_f64(), usage["source"].as_str()), (Some(0.5), Some("shim")));
        assert!(usage["age_ms"].is_u64(), "{usage}");
    }
    assert_eq!(worker["load"]["kv_physical_usage"]["value"], 0.5, "of the rank");
    let metrics = cluster.agent_metrics().await;
    for line in [
        r#"berth_agent_gpu_kv_bytes{gpu_uuid="GPU-00000000-0000-0000-0000-000000000001",dp_rank="0",state="pinned"} 134217728.0"#,
        r#"berth_agent_kv_physical_usage_ratio{dp_rank="0"} 0.5"#,
        r#"berth_agent_gpu_kv_physical_usage_ratio{gpu_uuid="GPU-00000000-0000-0000-0000-000000000001",dp_rank="0"} 0.5"#,
        r#"berth_agent_gpu_kv_excess_bytes{gpu_uuid="GPU-00000000-0000-0000-0000-000000000001",dp_rank="0"} 0.0"#,
        r#"berth_agent_gpu_kv_excess_bytes{gpu_uuid="GPU-00000000-0000-0000-0000-000000000002",dp_rank="0"} 536870912.0"#,
        r#"berth_agent_gpu_memory_bytes{gpu_uuid="GPU-00000000-0000-0000-0000-000000000002",kind="engine"} 536870912.0"#,
    ] {
        assert!(metrics.contains(line), "no line {line} in\n{metrics}");
    }
    assert!(!metrics.contains("0000-000000000000\""), "a GPU that isn't the engine's\n{metrics}");
    drop(first);
    let kept = cluster.wait_for_worker(0, "its end", |worker| {
        worker["load"]["devices"][0]["kv_used_bytes"].is_null()
    });
    let load = kept.await["load"].clone();
    assert_eq!(count(&load["devices"]), Some(2), "where it was");
    assert_eq!(load["kv_physical_usage"], Value::Null, "nobody knows it without the shim");
}

#[tokio::test]
async fn an_engine_in_a_pid_namespace_of_its_own_is_found() {
    let machine = Machine::new(&json!({ "0": {}, "1": {} })).unwrap();
    let cluster = start(|config| config.gpu.nvml_library = machine.library()).await;
    let mut control = machine.wait_until_loaded().await.unwrap();
    let Some(engine) = start_scheduler(&["unshare", "--pid", "--fork"], &cluster, 0) else {
        return;
    };
    assert_eq!(engine.own_pid, 1, "the first of its namespace");
    assert_ne!(engine.pid, 1);
    control.gpu(1, &json!({"processes": [{"pid": engine.pid, "bytes": GIB}]})).unwrap();
    let found = |worker: &Value| worker["load"]["devices"][0]["engine_bytes"]["value"] == GIB;
    let worker = cluster.wait_for_worker(0, "the engine's GPU", found).await;
    assert_eq!(worker["load"]["devices"][0]["index"], 1, "{worker}");
}

#[tokio::test]
async fn pids_of_another_namespace_match_no_engine() {
    let machine = Machine::new(&json!({ "0": {} })).unwrap();
    let cluster = start(|config| config.gpu.nvml_library = machine.library()).await;
    let mut control = machine.wait_until_loaded().await.unwrap();
    let Some(engine) = start_scheduler(&[], &cluster, 0) else { return };
    // The driver names a pid that doesn't exist here, so all its pids may be of another namespace.
    let elsewhere =
        json!([{"pid": engine.pid, "bytes": GIB}, {"pid": 4_000_000_000_u32, "bytes": GIB}]);
    if std::fs::read_link("/proc/self/ns/pid").unwrap().as_os_str() == "pid:[4026531836]" {
        eprintln!("skipped: in the first pid namespace every pid is of here");
        return;
    }
    control.gpu(0, &json!({"processes": elsewhere, "memory_used": 3 * GIB})).unwrap();
    let read = |worker: &Value| worker["load"]["devices"][0]["memory_used_bytes"] == 3 * GIB;
    let worker = cluster.wait_for_worker(0, "the reading", read).await;
    assert_eq!(worker["load"]["devices"][0]["engine_bytes"], Value::Null, "{worker}");
}

/// Returns the device metrics that a text names; for a page of metrics, those with figures.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let is_name = |letter: char| letter.is_ascii_lowercase() || letter == '_';
    let lines = text.lines().filter(|line| !line.starts_with("# "));
    let words = lines.flat_map(|line| line.split(|letter: char| !is_name(letter)));
    words.filter(|word| word.starts_with("berth_agent_gpu_")).map(str::to_owned).collect()
}

#[tokio::test]
async fn every_metric_is_documented_and_alerts_and_dashboard_ask_for_no_other() {
    let machine = Machine::new(&json!({ "0": busy() })).unwrap();
    let cluster = start(|config| {
        config.gpu.nvml_library = machine.library();
        config.gpu.gpm = true;
    })
    .await;
    let mut control = machine.wait_until_loaded().await.unwrap();
    let Some(engine) = start_scheduler(&[], &cluster, 0) else { return };
    let fail = json!({"nvmlDeviceGetPcieReplayCounter": 999});
    let processes = json!([{"pid": engine.pid, "bytes": GIB}]);
    eventually("the XID", || {
        // The first event may come before the agent listens.
        control.xid(0, 31).unwrap();
        let metrics = cluster.agent_metrics();
        async move { metrics.await.contains("gpu_xids_total").then_some(()) }
    })
    .await;
    let mut all = metrics_in(&cluster.agent_metrics().await);
    control.gpu(0, &json!({"processes": processes, "mps_processes": [], "fail": fail})).unwrap();
    let told = |metrics: &str| {
        ["kind=\"engine\"", "kv_excess", "reading_failures", "counters_ratio"]
            .iter()
            .all(|part| metrics.contains(part))
    };
    let metrics = eventually("all figures", || async {
        Some(cluster.agent_metrics().await).filter(|metrics| told(metrics))
    });
    all.extend(metrics_in(&metrics.await));

    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let read = |file: &str| std::fs::read_to_string(deploy.join(file)).unwrap();
    assert_eq!(metrics_in(&read("docs/metrics.md")), all, "documented, and given by the agent");
    for file in ["prometheus/devices.yaml", "grafana/devices.json"] {
        let asked = metrics_in(&read(file));
        assert!(!asked.is_empty() && asked.is_subset(&all), "{file}: {asked:?}");
    }
    let dashboard: Value = serde_json::from_str(&read("grafana/devices.json")).unwrap();
    assert!(dashboard["panels"].as_array().unwrap().len() > 10);
}

/// A process that is killed on drop.
struct Spawned(std::process::Child);

impl Drop for Spawned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_gpu_that_falls_off_the_bus_makes_the_worker_unhealthy_at_once_and_says_why() {
    let machine = Machine::new(&json!({ "0": {}, "1": {} })).unwrap();
    let engine = EngineSim::start_local(Config::default()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    // One minute between reports, so that an earlier report is one sent for a change.
    let settings = format!(
        "worker_id = \"w0\"\nreports.interval_ms = 60000\ngpu.devices = [\"0\"]\nfiles.state_dir = {:?}\n",
        folder.path().join("state"),
    );
    std::fs::write(folder.path().join("agent.toml"), settings).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_agent-process"));
    command.arg("--config").arg(folder.path().join("agent.toml"));
    command.args(["--engine", &engine.url()]);
    for port in ["--data-addr", "--control-addr", "--admin-addr"] {
        command.args([port, "127.0.0.1:0"]);
    }
    // Makes the fake NVML the one on the library path, like an installed driver.
    command.env("LD_LIBRARY_PATH", machine.folder()).stderr(Stdio::piped());
    let mut agent = Spawned(command.spawn().unwrap());
    let log = agent.0.stderr.take().unwrap();
    let starting = tokio::task::spawn_blocking(|| log_line(log, "agent starting")).await.unwrap();
    let mut control = machine.wait_until_loaded().await.unwrap();

    let mut config = router_config(&[]);
    config.workers = vec![format!("http://{}", starting["control"].as_str().unwrap())];
    let routers = vec![Router::start(config).await.unwrap()];
    let web = Web::default();
    let cluster = Cluster { engines: vec![engine], agents: vec![], routers, web };
    let fresh = |shown: &Value| shown["state"] == "fresh";
    let shown = cluster.wait_for_worker(0, "the worker", fresh).await;
    assert_eq!(shown["load"]["devices"][0]["index"], 0, "{shown}");
    assert!(shown["load"]["devices"][0].get("unhealthy").is_none(), "{shown}");

    control.gpu(0, &json!({"lost": true})).unwrap();
    let shown = cluster.wait_for_worker(0, "the loss", |shown| shown["state"] == "unhealthy").await;
    let words = ["GPU 0", "fell off the bus", "restart the machine"];
    let reason = shown["reason"].as_str().unwrap();
    assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
    let told = shown["load"]["devices"][0]["unhealthy"].as_str().unwrap();
    assert!(told.contains("fell off the bus"), "{shown}");

    control.gpu(0, &json!({"lost": false})).unwrap();
    cluster.wait_for_worker(0, "the GPU's return", fresh).await;
}

/// Returns the line of a JSON log with this message; later lines are read and dropped.
fn log_line(log: std::process::ChildStderr, message: &str) -> Value {
    use std::io::{BufRead as _, BufReader};
    let mut lines = BufReader::new(log).lines();
    let line = lines.by_ref().map_while(Result::ok).find_map(|line| {
        let line: Value = serde_json::from_str(&line).ok()?;
        (line["message"] == message).then_some(line)
    });
    std::thread::spawn(move || lines.for_each(drop));
    line.expect("the agent says it")
}
