//! Reads the machine's GPUs through NVML, for the agent's load reports, metrics and health checks.
//!
//! A *board* is a whole GPU, a *slice* a part of a board that MIG has divided, a *device* either of
//! them. An *XID* is the driver's number for a GPU error.
//!
//! NVML's calls block, so a thread of its own reads the devices: once a second, and soon after an
//! event such as an XID. NVML or any single value may be missing: then it is absent, never zero.
//! This module doesn't use CUDA and changes nothing on a GPU.

pub mod health;
pub mod kv;
pub mod metrics;
mod nvml;
pub mod process;
pub mod reading;
pub mod select;
pub mod tracker;
pub mod xid;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use nvml_wrapper::Nvml;
use service::clock::now;
use tokio::sync::watch;
use tracing::{error, info, warn};

use self::{
    nvml::{DeviceReader, GpuEvent},
    process::{ProcessFinder, Scheduler},
    reading::Identity,
    select::Basis,
    tracker::{EngineProcesses, GpuTracker, Snapshot},
};
use crate::config::{self, Config, selector::Selector};

/// Shorter intervals bring little, because the driver averages the utilization over up to a second.
const READING_INTERVAL: Duration = Duration::from_secs(1);
/// A reload takes some tenths of a second.
const RELOAD_INTERVAL: Duration = Duration::from_secs(30);
/// The minimum holds however many events occur.
const READING_GAP_MIN: Duration = Duration::from_millis(20);
const LOAD_RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// A driver that was idle takes some seconds to answer.
const FIRST_READING_WAIT_MAX: Duration = Duration::from_secs(10);
/// The threads that report XIDs wait while the queue is full.
const QUEUED_EVENTS_MAX: usize = 64;

#[derive(Debug, Clone)]
pub struct Settings {
    /// If empty, the devices that the engine's processes run on count.
    pub devices: Vec<Selector>,
    pub library: Option<PathBuf>,
    /// NVML's performance counters are called GPM.
    pub reads_gpm: bool,
    /// Between two reloads of NVML while a device is missing: only a reload finds a device that
    /// appears later.
    pub reload_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { devices: vec![], library: None, reads_gpm: false, reload_interval: RELOAD_INTERVAL }
    }
}

/// The GPU thread ends when all handles are dropped.
#[derive(Debug, Clone)]
pub struct Gpus {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    /// One per DP rank, ordered by rank.
    schedulers: Arc<watch::Sender<Vec<Scheduler>>>,
    /// The GPU thread takes a reading after each event.
    event_sender: mpsc::SyncSender<GpuEvent>,
}

impl Gpus {
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    /// The shim reports its process when it connects.
    pub fn set_scheduler(&self, scheduler: Scheduler) {
        self.schedulers.send_if_modified(|schedulers| {
            let is_unchanged = schedulers.contains(&scheduler);
            schedulers.retain(|other| other.dp_rank != scheduler.dp_rank);
            schedulers.push(scheduler);
            schedulers.sort_unstable_by_key(|scheduler| scheduler.dp_rank);
            !is_unchanged
        });
        // The event may be dropped: if the queue is full, a reading is due anyway, and without NVML
        // no thread takes events.
        let _ = self.event_sender.try_send(GpuEvent::ReadNow);
    }
}

/// Waits for the first reading, at most ten seconds. Without NVML, the snapshot has no devices.
pub fn start(settings: Settings) -> std::io::Result<Gpus> {
    let (snapshot_sender, snapshot) = watch::channel(Arc::new(Snapshot::without_devices(now())));
    let (schedulers, scheduler_updates) = watch::channel(vec![]);
    let (event_sender, events) = mpsc::sync_channel(QUEUED_EVENTS_MAX);
    let (first_reading_sender, first_reading) = mpsc::sync_channel(1);
    let gpu_thread = GpuThread {
        tracker: GpuTracker::new(settings.devices.clone(), settings.reload_interval),
        settings,
        process_finder: ProcessFinder::new("/proc".into()),
        scheduler_updates,
        snapshot_sender,
        events,
        event_sender: event_sender.clone(),
        first_reading_sender: Some(first_reading_sender),
        logged_devices: None,
    };
    std::thread::Builder::new().name("gpu".into()).spawn(move || gpu_thread.run())?;
    // The wait ends when the thread drops its sender: after the first reading, or earlier if the
    // driver doesn't answer yet or there is no NVML.
    let _ = first_reading.recv_timeout(FIRST_READING_WAIT_MAX);
    Ok(Gpus { snapshot, schedulers: Arc::new(schedulers), event_sender })
}

struct GpuThread {
    settings: Settings,
    tracker: GpuTracker,
    process_finder: ProcessFinder,
    scheduler_updates: watch::Receiver<Vec<Scheduler>>,
    snapshot_sender: watch::Sender<Arc<Snapshot>>,
    events: mpsc::Receiver<GpuEvent>,
    event_sender: mpsc::SyncSender<GpuEvent>,
    /// Dropping it ends the wait in [`start`].
    first_reading_sender: Option<mpsc::SyncSender<()>>,
    logged_devices: Option<(Basis, Vec<String>)>,
}

impl GpuThread {
    /// Ends at once if this machine has no NVML.
    fn run(mut self) {
        let mut known_devices = vec![];
        let mut is_waiting_for_driver = false;
        while !self.snapshot_sender.is_closed() {
            match nvml::load(self.settings.library.as_deref()) {
                Ok(nvml) => {
                    is_waiting_for_driver = false;
                    known_devices = self.read_until_reload(&nvml, &known_devices);
                }
                Err(error) if nvml::may_load_later(&error) => {
                    if !is_waiting_for_driver {
                        warn!(%error, "no GPU readings until the driver answers");
                    }
                    is_waiting_for_driver = true;
                    self.first_reading_sender = None;
                    self.wait_for_events(LOAD_RETRY_INTERVAL);
                }
                Err(error) => {
                    info!(%error, "no NVML on this machine, reporting without device readings");
                    return;
                }
            }
        }
    }

    /// Reads until all handles are dropped or NVML must be reloaded, and returns the present
    /// devices. `known_devices` were listed before the last reload.
    fn read_until_reload(&mut self, nvml: &Nvml, known_devices: &[Identity]) -> Vec<Identity> {
        let mut devices = nvml::list_devices(nvml, known_devices, self.settings.reads_gpm);
        let identities: Vec<Identity> =
            devices.iter().map(|device| device.identity.clone()).collect();
        let boards: Vec<(&str, u32)> = identities
            .iter()
            .zip(&devices)
            .filter_map(|(identity, device)| Some((identity.uuid.as_str(), device.nvml_index()?)))
            .collect();
        let (stop, event_sender) = (AtomicBool::new(false), self.event_sender.clone());
        std::thread::scope(|scope| {
            for (board_uuid, nvml_index) in boards {
                let (stop, event_sender) = (&stop, &event_sender);
                let follow_events =
                    move || nvml::follow_events(nvml, board_uuid, nvml_index, stop, event_sender);
                let thread = std::thread::Builder::new().name("gpu-events".into());
                if let Err(error) = thread.spawn_scoped(scope, follow_events) {
                    warn!(board = board_uuid, %error, "can't follow the XIDs of this GPU");
                }
            }
            while !self.snapshot_sender.is_closed() {
                let read_at = now();
                self.read_devices(read_at, &mut devices);
                if self.tracker.needs_reload(read_at) {
                    break;
                }
                self.wait_for_events(READING_INTERVAL);
            }
            stop.store(true, Ordering::Relaxed);
        });
        identities
    }

    fn read_devices(&mut self, read_at: Instant, devices: &mut [DeviceReader<'_>]) {
        let readings: Vec<_> =
            devices.iter_mut().map(|device| (device.identity.clone(), device.read())).collect();
        let pids: Vec<u32> = readings
            .iter()
            .flat_map(|(_, reading)| reading.processes.iter().flatten())
            .map(|process| process.pid)
            .collect();
        let are_pids_in_agent_namespace =
            self.process_finder.are_in_agent_namespace(pids.into_iter());
        let schedulers = self.scheduler_updates.borrow_and_update().clone();
        let (processes, has_new_schedulers) =
            self.process_finder.engine_processes(read_at, &schedulers);
        let engine = EngineProcesses {
            processes,
            schedulers: &schedulers,
            has_new_schedulers,
            are_pids_in_agent_namespace,
        };
        let snapshot = self.tracker.take_readings(read_at, readings, engine);
        self.log_changes(&snapshot);
        self.snapshot_sender.send_replace(Arc::new(snapshot));
        self.first_reading_sender = None;
    }

    fn wait_for_events(&mut self, wait_max: Duration) {
        let Ok(first_event) = self.events.recv_timeout(wait_max) else { return };
        // Other events of the same incident usually arrive during this pause.
        std::thread::sleep(READING_GAP_MIN);
        let later_events: Vec<GpuEvent> = self.events.try_iter().take(QUEUED_EVENTS_MAX).collect();
        for event in [first_event].into_iter().chain(later_events) {
            if let GpuEvent::Xid { board_uuid, number } = event {
                let what = xid::fatal_xid(number).map(|fatal| fatal.description);
                warn!(board = board_uuid, number, what, "the driver reports an XID");
                self.tracker.add_xid(&board_uuid, number);
            }
        }
    }

    fn log_changes(&mut self, snapshot: &Snapshot) {
        let reason_before = self.snapshot_sender.borrow().unhealthy_reason.clone();
        match (&reason_before, &snapshot.unhealthy_reason) {
            (Some(_), None) => info!("the engine's devices work again"),
            (before, Some(reason)) if before.as_ref() != Some(reason) => {
                error!(reason, "a device of the engine doesn't work or is missing");
            }
            _ => {}
        }
        let engine_devices = snapshot.devices.iter().filter(|device| device.is_engine_device);
        let uuids: Vec<String> =
            engine_devices.map(|device| device.identity.uuid.clone()).collect();
        let devices = Some((snapshot.basis, uuids));
        if self.logged_devices == devices {
            return;
        }
        self.logged_devices = devices;
        let Some((basis, devices)) = &self.logged_devices else { return };
        match basis {
            Basis::Unknown if devices.len() > 1 => {
                info!(
                    ?devices,
                    "the engine's GPUs are unknown: set `devices`, or install the shim"
                );
            }
            _ => info!(?devices, ?basis, "the engine's devices"),
        }
    }
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        let devices = config.gpu.devices.iter();
        Self {
            devices: devices.filter_map(|device| device.parse().ok()).collect(),
            library: config::path_if_set(&config.gpu.nvml_library),
            reads_gpm: config.gpu.gpm,
            ..Self::default()
        }
    }
}
