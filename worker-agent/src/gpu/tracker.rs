//! Keeps the state of the machine's GPUs and makes snapshots for reports and metrics. Pure.
//!
//! This module calls no NVML. `health` judges boards, and `select` picks the engine's devices.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use contract::load::{Device, Figure, Source};

use super::{
    health::BoardHealth,
    process::{EngineProcess, Scheduler},
    reading::{Identity, Reading},
    select::{self, Basis, Selection},
};
use crate::config::selector::Selector;

/// About 170 different XIDs exist.
const XIDS_MAX: usize = 256;

#[derive(Debug, Clone)]
pub struct Snapshot {
    pub read_at: Instant,
    /// Each GPU, followed by its MIG slices.
    pub devices: Vec<DeviceState>,
    pub basis: Basis,
    /// `None` if all of the engine's devices work.
    pub unhealthy_reason: Option<String>,
}

#[derive(Debug, Clone)]
pub struct DeviceState {
    pub identity: Identity,
    pub reading: Reading,
    /// With an unknown basis: whether the device may be the engine's.
    pub is_engine_device: bool,
    /// An empty list means unknown: any rank may run on the device.
    pub dp_ranks: Vec<u32>,
    pub engine_bytes: Option<u64>,
    pub unhealthy_reason: Option<String>,
    /// The XIDs of the device's board since the agent started.
    pub xid_counts: BTreeMap<u64, u64>,
    /// Failed NVML calls since the agent started, by name.
    pub failure_counts: BTreeMap<&'static str, u64>,
}

/// Kept between readings and across reloads of NVML.
#[derive(Debug, Default)]
struct Board {
    health: BoardHealth,
    xid_counts: BTreeMap<u64, u64>,
}

#[derive(Debug, Clone, Copy)]
pub struct EngineProcesses<'a> {
    /// Empty if unknown.
    pub processes: &'a [EngineProcess],
    pub schedulers: &'a [Scheduler],
    pub has_new_schedulers: bool,
    /// About the pids that NVML reports.
    pub are_pids_in_agent_namespace: bool,
}

#[derive(Debug)]
pub struct GpuTracker {
    configured: Vec<Selector>,
    reload_interval: Duration,
    /// The keys are UUIDs.
    boards: BTreeMap<String, Board>,
    /// The keys are UUID and call.
    failure_counts: BTreeMap<String, BTreeMap<&'static str, u64>>,
    selection: Selection,
    /// The keys are UUIDs of devices.
    dp_ranks_by_device: BTreeMap<String, Vec<u32>>,
    unmatched_selectors: Vec<Selector>,
    /// `None` if no board is lost and each entry of the setting `devices` matches a device.
    reload_wait_since: Option<Instant>,
}

impl GpuTracker {
    #[must_use]
    pub fn new(configured: Vec<Selector>, reload_interval: Duration) -> Self {
        Self {
            configured,
            reload_interval,
            boards: BTreeMap::new(),
            failure_counts: BTreeMap::new(),
            selection: Selection::default(),
            dp_ranks_by_device: BTreeMap::new(),
            unmatched_selectors: vec![],
            reload_wait_since: None,
        }
    }

    /// A board that isn't tracked is ignored.
    pub fn add_xid(&mut self, board_uuid: &str, number: u64) {
        let Some(board) = self.boards.get_mut(board_uuid) else { return };
        board.health.add_xid(number);
        if board.xid_counts.len() < XIDS_MAX || board.xid_counts.contains_key(&number) {
            *board.xid_counts.entry(number).or_default() += 1;
        }
    }

    pub fn take_readings(
        &mut self,
        now: Instant,
        readings: Vec<(Identity, Reading)>,
        engine: EngineProcesses<'_>,
    ) -> Snapshot {
        // A board whose UUID could not be read at first may have one now: its old entry goes.
        self.boards.retain(|uuid, _| readings.iter().any(|(identity, _)| identity.uuid == *uuid));
        for (identity, reading) in &readings {
            // A slice has the health of its board.
            if identity.parent_uuid.is_none() {
                self.boards.entry(identity.uuid.clone()).or_default().health.take_reading(reading);
            }
            let failure_counts = self.failure_counts.entry(identity.uuid.clone()).or_default();
            for call in &reading.failed_calls {
                *failure_counts.entry(call).or_default() += 1;
            }
        }
        if engine.has_new_schedulers {
            self.selection.forget();
            self.dp_ranks_by_device.clear();
        }
        let identities: Vec<Identity> =
            readings.iter().map(|(identity, _)| identity.clone()).collect();
        let unmatched = select::unmatched_selectors(&self.configured, &identities);
        self.unmatched_selectors = unmatched.into_iter().cloned().collect();
        let usages: Vec<EngineUsage> =
            readings.iter().map(|(_, reading)| engine_usage(reading, engine)).collect();
        let runs_on = |index: usize| {
            let (_, reading) = &readings[index];
            reading.processes.as_ref().map(|_| !usages[index].is_empty())
        };
        let is_named = |index: usize| !named_ranks(&identities[index], engine).is_empty();
        let (basis, picked) = self.selection.pick(&self.configured, &identities, runs_on, is_named);
        if basis == Basis::Shim {
            for identity in picked.iter().map(|&index| &identities[index]) {
                let ranks = named_ranks(identity, engine);
                self.dp_ranks_by_device.insert(identity.uuid.clone(), ranks);
            }
        }
        let used_devices = readings.iter().zip(&usages).filter(|(_, usage)| !usage.is_empty());
        for ((identity, _), usage) in used_devices {
            self.dp_ranks_by_device.insert(identity.uuid.clone(), usage.dp_ranks.clone());
        }
        let devices = readings.into_iter().zip(usages).enumerate();
        let devices: Vec<DeviceState> = devices
            .map(|(index, ((identity, reading), usage))| {
                self.device_state(identity, reading, usage.memory_bytes, picked.contains(&index))
            })
            .collect();
        self.reload_wait_since =
            self.is_device_missing().then(|| self.reload_wait_since.unwrap_or(now));
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
        Snapshot {
            read_at: now,
            unhealthy_reason: unhealthy_reason(basis, &devices, &self.unmatched_selectors),
            devices,
            basis,
        }
    }

    fn device_state(
        &self,
        identity: Identity,
        reading: Reading,
        engine_bytes: Option<u64>,
        is_engine_device: bool,
    ) -> DeviceState {
        let board = self.boards.get(identity.board_uuid());
        let total_bytes = reading.memory.map(|memory| memory.total);
        // A figure above the device's total memory is wrong.
        let engine_bytes =
            engine_bytes.filter(|&bytes| total_bytes.is_none_or(|total| bytes <= total));
        DeviceState {
            is_engine_device,
            dp_ranks: self.dp_ranks_by_device.get(&identity.uuid).cloned().unwrap_or_default(),
            engine_bytes,
            unhealthy_reason: board.and_then(|board| board.health.reason()),
            xid_counts: board.map(|board| board.xid_counts.clone()).unwrap_or_default(),
            failure_counts: self.failure_counts.get(&identity.uuid).cloned().unwrap_or_default(),
            identity,
            reading,
        }
    }

    pub fn needs_reload(&mut self, now: Instant) -> bool {
        let is_due =
            self.reload_wait_since.is_some_and(|since| now >= since + self.reload_interval);
        if is_due {
            self.reload_wait_since = Some(now);
        }
        is_due
    }

    fn is_device_missing(&self) -> bool {
        !self.unmatched_selectors.is_empty()
            || self.boards.values().any(|board| board.health.is_lost())
    }

    pub fn check_invariants(&self) {
        assert_eq!(
            self.is_device_missing(),
            self.reload_wait_since.is_some(),
            "a reload is scheduled while a device is missing"
        );
        for board in self.boards.values() {
            board.health.check_invariants();
            assert!(board.xid_counts.len() <= XIDS_MAX, "{} XIDs", board.xid_counts.len());
        }
    }
}

#[derive(Debug, Default)]
struct EngineUsage {
    process_count: usize,
    /// `None` if it is unknown for one of the processes.
    memory_bytes: Option<u64>,
    /// Empty if the rank of one process is unknown.
    dp_ranks: Vec<u32>,
}

impl EngineUsage {
    fn is_empty(&self) -> bool {
        self.process_count == 0
    }
}

fn engine_usage(reading: &Reading, engine: EngineProcesses<'_>) -> EngineUsage {
    // NVML lists the clients of MPS apart. A process in both lists counts once.
    let mut bytes_by_pid = BTreeMap::<u32, Option<u64>>::new();
    for process in reading.processes.iter().flatten().filter(|_| engine.are_pids_in_agent_namespace)
    {
        let process_bytes = bytes_by_pid.entry(process.pid).or_default();
        *process_bytes = (*process_bytes).max(process.bytes);
    }
    let on_device: Vec<(&EngineProcess, Option<u64>)> = engine
        .processes
        .iter()
        .filter_map(|process| Some((process, *bytes_by_pid.get(&process.pid)?)))
        .collect();
    let mut dp_ranks: Option<Vec<u32>> =
        on_device.iter().map(|(process, _)| process.dp_rank).collect();
    if let Some(ranks) = &mut dp_ranks {
        ranks.sort_unstable();
        ranks.dedup();
    }
    let memory_bytes =
        on_device.iter().try_fold(0_u64, |sum, (_, bytes)| Some(sum.saturating_add((*bytes)?)));
    EngineUsage {
        process_count: on_device.len(),
        memory_bytes: memory_bytes.filter(|_| !on_device.is_empty()),
        dp_ranks: dp_ranks.unwrap_or_default(),
    }
}

fn named_ranks(identity: &Identity, engine: EngineProcesses<'_>) -> Vec<u32> {
    // NVML puts the kind of the device before the number, as `GPU-` or `MIG-`.
    let Some((_, number)) = identity.uuid.split_once('-') else { return vec![] };
    let named = engine.schedulers.iter().filter(|scheduler| scheduler.device == number);
    named.map(|scheduler| scheduler.dp_rank).collect()
}

/// An entry of the setting `devices` that matches no device counts as a missing device, because the
/// device may have disappeared before the agent started. If the basis is unknown, the devices may
/// be another engine's, so their health doesn't count.
fn unhealthy_reason(
    basis: Basis,
    devices: &[DeviceState],
    unmatched_selectors: &[Selector],
) -> Option<String> {
    let engine_devices =
        devices.iter().filter(|device| device.is_engine_device && basis != Basis::Unknown);
    let unhealthy_devices = engine_devices.filter_map(|device| {
        let reason = device.unhealthy_reason.as_deref()?;
        let Identity { index, uuid, .. } = &device.identity;
        Some(format!("GPU {index} ({uuid}): {reason}"))
    });
    let missing_devices = unmatched_selectors.iter().map(|entry| {
        format!(
            "no GPU here is {entry}, which `devices` names: correct it, or see why it is missing"
        )
    });
    let mut reasons = unhealthy_devices.chain(missing_devices);
    let first_reason = reasons.next()?;
    match reasons.count() {
        0 => Some(first_reason),
        other_count => Some(format!("{first_reason}; and {other_count} more of its devices")),
    }
}

impl Snapshot {
    #[must_use]
    pub fn without_devices(now: Instant) -> Self {
        Self { read_at: now, devices: vec![], basis: Basis::Unknown, unhealthy_reason: None }
    }

    /// The figures of the KV pool are missing here.
    #[must_use]
    pub fn devices(&self, now: Instant, dp_rank: u32) -> Vec<Device> {
        let age = now.saturating_duration_since(self.read_at);
        let age_ms = u32::try_from(age.as_millis()).unwrap_or(u32::MAX);
        self.devices_of_rank(dp_rank).map(|device| device.to_load_report(age_ms)).collect()
    }

    /// Only if each device of the rank surely holds this rank's KV pool and no other rank's can the
    /// pool's figures be reported for each of the devices.
    #[must_use]
    pub fn holds_pool(&self, dp_rank: u32, rank_count: usize) -> bool {
        let is_certain = |device: &DeviceState| match device.dp_ranks[..] {
            [] => rank_count == 1,
            ref dp_ranks => dp_ranks == [dp_rank],
        };
        self.basis != Basis::Unknown && self.devices_of_rank(dp_rank).all(is_certain)
    }

    fn devices_of_rank(&self, dp_rank: u32) -> impl Iterator<Item = &DeviceState> {
        let may_run_on = move |device: &&DeviceState| {
            device.dp_ranks.is_empty() || device.dp_ranks.contains(&dp_rank)
        };
        self.devices.iter().filter(|device| device.is_engine_device).filter(may_run_on)
    }
}

impl DeviceState {
    /// The module `kv` sets the figures of the KV pool.
    fn to_load_report(&self, age_ms: u32) -> Device {
        let Self { identity, reading, .. } = self;
        let memory = reading.memory;
        let engine_bytes =
            self.engine_bytes.map(|value| Figure { value, source: Source::Nvml, age_ms });
        Device {
            uuid: identity.uuid.clone(),
            name: identity.name.clone(),
            index: Some(identity.index),
            pci_address: identity.pci_address.clone(),
            parent_uuid: identity.parent_uuid.clone(),
            numa_node: identity.numa_node,
            memory_total_bytes: memory.map(|memory| memory.total),
            memory_used_bytes: memory.map(|memory| memory.used.min(memory.total)),
            memory_reserved_bytes: memory.map(|memory| memory.reserved.min(memory.total)),
            utilization_percent: reading.utilization_percent,
            memory_utilization_percent: reading.memory_utilization_percent,
            temperature_celsius: reading.temperature_celsius,
            power_milliwatts: reading.power_milliwatts,
            engine_bytes,
            unhealthy: self.unhealthy_reason.clone(),
            age_ms: Some(age_ms),
            ..Device::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use service::clock::now;

    use super::{
        super::reading::{BoardFault, Memory, Process},
        *,
    };

    const GIB: u64 = 1 << 30;

    fn gpu(index: u32) -> Identity {
        Identity { uuid: format!("GPU-{index}"), index, ..Identity::default() }
    }

    fn runs(processes: &[(u32, Option<u64>)]) -> Reading {
        let processes = processes.iter().map(|&(pid, bytes)| Process { pid, bytes });
        let memory = Memory { total: 100 * GIB, used: 50 * GIB, reserved: 0, free: 50 * GIB };
        Reading { memory: Some(memory), processes: Some(processes.collect()), ..Reading::default() }
    }

    const RELOAD_INTERVAL: Duration = Duration::from_secs(30);

    fn naming(configured: Vec<Selector>) -> GpuTracker {
        GpuTracker::new(configured, RELOAD_INTERVAL)
    }

    fn lost() -> Reading {
        Reading { board_fault: Some(BoardFault::Lost), ..Reading::default() }
    }

    fn process(pid: u32, dp_rank: Option<u32>) -> EngineProcess {
        EngineProcess { pid, dp_rank, start_ticks: 1 }
    }

    fn take_reading(
        tracker: &mut GpuTracker,
        processes: &[EngineProcess],
        readings: Vec<Reading>,
    ) -> Snapshot {
        let readings = (0..).map(gpu).zip(readings).collect();
        tracker.take_readings(
            now(),
            readings,
            EngineProcesses {
                processes,
                schedulers: &[],
                has_new_schedulers: false,
                are_pids_in_agent_namespace: true,
            },
        )
    }

    fn engine_bytes(processes: &[(u32, Option<u64>)]) -> Option<u64> {
        let of_engine = [process(7, Some(0)), process(8, Some(0))];
        let readings = vec![runs(processes)];
        take_reading(&mut naming(vec![]), &of_engine, readings).devices[0].engine_bytes
    }

    #[test]
    fn an_engine_s_bytes_are_those_of_all_its_processes_or_unknown() {
        let own = [(7, Some(3 * GIB)), (8, Some(2 * GIB)), (99, Some(GIB))];
        assert_eq!(engine_bytes(&own), Some(5 * GIB));
        assert_eq!(engine_bytes(&[(7, Some(GIB)), (7, Some(GIB))]), Some(GIB), "in both lists");
        assert_eq!(engine_bytes(&[(7, Some(GIB)), (8, None)]), None, "one isn't told");
        assert_eq!(engine_bytes(&[(99, Some(GIB))]), None, "somebody else's");
        assert_eq!(engine_bytes(&[(7, Some(101 * GIB))]), None, "more than there is");
    }

    #[test]
    fn each_rank_has_the_devices_that_it_runs_on_and_its_pool_is_there_if_no_other_s_is() {
        let processes = [process(7, Some(0)), process(8, Some(1)), process(9, Some(1))];
        let readings = || vec![runs(&[(7, None)]), runs(&[(8, None)]), runs(&[(9, None)])];
        let mut tracker = naming(vec![]);
        let snapshot = take_reading(&mut tracker, &processes, readings());
        let indices = |snapshot: &Snapshot, rank| -> Vec<u32> {
            let devices = snapshot.devices(now(), rank);
            devices.iter().filter_map(|device| device.index).collect()
        };
        assert_eq!((indices(&snapshot, 0), indices(&snapshot, 1)), (vec![0], vec![1, 2]));
        assert!(snapshot.holds_pool(0, 2) && snapshot.holds_pool(1, 2));
        // A lost board reports no processes; the last known ones count.
        let mut broken = readings();
        broken[2] = lost();
        let snapshot = take_reading(&mut tracker, &processes, broken);
        assert_eq!(indices(&snapshot, 1), [1, 2]);
        assert!(
            snapshot.unhealthy_reason.unwrap().starts_with("GPU 2 (GPU-2): it fell off the bus")
        );
        let shared = [process(7, Some(0)), process(8, Some(1))];
        let both = vec![runs(&[(7, None), (8, None)])];
        let snapshot = take_reading(&mut naming(vec![]), &shared, both);
        assert!(!snapshot.holds_pool(0, 2), "two ranks' pools on one device");
    }

    #[test]
    fn a_device_that_may_be_another_engine_s_says_nothing_of_this_worker() {
        let two = || vec![lost(), lost()];
        let snapshot = take_reading(&mut naming(vec![]), &[], two());
        assert_eq!((snapshot.basis, &snapshot.unhealthy_reason), (Basis::Unknown, &None));
        assert!(snapshot.devices.iter().all(|device| device.unhealthy_reason.is_some()));
        assert!(!snapshot.holds_pool(0, 1));
        let named = vec![Selector::Index(0), Selector::Index(1)];
        let reason = take_reading(&mut naming(named), &[], two()).unhealthy_reason.unwrap();
        assert!(reason.starts_with("GPU 0 (GPU-0)") && reason.ends_with("1 more of its devices"));
    }

    #[test]
    fn a_fault_of_the_gpu_that_the_shim_names_is_the_worker_s() {
        let scheduler = |dp_rank, device: &str| Scheduler {
            dp_rank,
            pid: None,
            pid_in_own_namespace: 7,
            device: device.to_owned(),
        };
        // The pids of another container can't be seen, so the shims alone tell the devices.
        let schedulers = [scheduler(0, "1"), scheduler(1, "2")];
        let engine = EngineProcesses {
            processes: &[],
            schedulers: &schedulers,
            has_new_schedulers: false,
            are_pids_in_agent_namespace: true,
        };
        let readings = || (0..).map(gpu).zip((0..3).map(|_| runs(&[(99, None)]))).collect();
        let mut tracker = naming(vec![]);
        let snapshot = tracker.take_readings(now(), readings(), engine);
        assert_eq!(snapshot.basis, Basis::Shim);
        assert!(snapshot.holds_pool(0, 2) && snapshot.holds_pool(1, 2));
        let index = |rank| snapshot.devices(now(), rank)[0].index;
        assert_eq!((index(0), index(1)), (Some(1), Some(2)));
        tracker.add_xid("GPU-0", 79);
        let snapshot = tracker.take_readings(now(), readings(), engine);
        assert_eq!(snapshot.unhealthy_reason, None, "another engine's GPU");
        tracker.add_xid("GPU-2", 79);
        let reason = tracker.take_readings(now(), readings(), engine).unhealthy_reason.unwrap();
        assert!(reason.starts_with("GPU 2 (GPU-2): XID 79"), "{reason}");
    }

    #[test]
    fn nvml_is_loaded_anew_while_a_board_is_lost_and_not_more_often_than_it_helps() {
        let mut tracker = naming(vec![]);
        take_reading(&mut tracker, &[], vec![lost(), Reading::default()]);
        let start = now();
        assert!(!tracker.needs_reload(start));
        assert!(tracker.needs_reload(start + RELOAD_INTERVAL));
        assert!(!tracker.needs_reload(start + RELOAD_INTERVAL + Duration::from_secs(1)));
        assert!(tracker.needs_reload(start + RELOAD_INTERVAL * 2));
        take_reading(&mut tracker, &[], vec![runs(&[]), Reading::default()]);
        assert!(!tracker.needs_reload(start + RELOAD_INTERVAL * 9));
    }

    #[test]
    fn a_device_that_the_settings_name_and_nobody_finds_is_looked_for_until_it_is_there() {
        let mut tracker = naming(vec![Selector::Index(0), Selector::Uuid("GPU-1".into())]);
        let missing = take_reading(&mut tracker, &[], vec![runs(&[])]).unhealthy_reason.unwrap();
        assert!(missing.contains("no GPU here is GPU-1"), "{missing}");
        assert!(tracker.needs_reload(now() + RELOAD_INTERVAL));
        assert_eq!(
            take_reading(&mut tracker, &[], vec![runs(&[]), runs(&[])]).unhealthy_reason,
            None
        );
        assert!(!tracker.needs_reload(now() + RELOAD_INTERVAL * 9));
    }

    #[test]
    fn a_board_that_has_a_name_now_is_not_looked_for_under_its_index() {
        let mut tracker = naming(vec![]);
        let engine = EngineProcesses {
            processes: &[],
            schedulers: &[],
            has_new_schedulers: false,
            are_pids_in_agent_namespace: true,
        };
        let nameless = Identity { uuid: "index-0".into(), ..Identity::default() };
        tracker.take_readings(now(), vec![(nameless, lost())], engine);
        take_reading(&mut tracker, &[], vec![runs(&[])]);
        assert!(!tracker.needs_reload(now() + RELOAD_INTERVAL * 9));
    }

    #[test]
    fn xids_and_failed_calls_are_counted_and_bounded() {
        let mut tracker = naming(vec![]);
        let failing = || Reading { failed_calls: vec!["power", "fields"], ..Reading::default() };
        take_reading(&mut tracker, &[], vec![failing()]);
        (0..1000).for_each(|number| tracker.add_xid("GPU-0", 1000 + number % 500));
        tracker.add_xid("GPU-9", 79);
        let device = &take_reading(&mut tracker, &[], vec![failing()]).devices[0];
        assert_eq!((device.xid_counts.len(), device.xid_counts[&1000]), (XIDS_MAX, 2));
        assert_eq!(device.failure_counts, [("fields", 2), ("power", 2)].into());
    }
}
