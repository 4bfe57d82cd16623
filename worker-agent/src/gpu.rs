//! Reads the GPUs beside the engine through NVML.
//!
//! A thread of its own reads them once a second, because NVML's calls block, and immediately when
//! an event occurs. Everything else uses the newest [`Snapshot`]. NVML may be missing, and so may
//! any single reading: an absent value is never reported as zero. Pure modules interpret the
//! readings: [`health`], [`select`], [`fleet`], [`kv`]. CUDA is not used here.

pub mod fleet;
pub mod health;
pub mod kv;
pub mod metrics;
mod nvml;
pub mod process;
pub mod reading;
pub mod select;
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
    fleet::{EngineProcesses, Fleet, Snapshot},
    nvml::{Board, GpuEvent},
    process::{Processes, Scheduler},
    reading::Identity,
    select::Basis,
};
use crate::config::{Config, selector::Selector};

/// The time between two readings. Utilization is itself averaged over up to a second.
const INTERVAL: Duration = Duration::from_secs(1);
/// The time between two reloads of NVML while a device is missing. A reload takes some tenths of a
/// second.
const RELOAD_INTERVAL: Duration = Duration::from_secs(30);
/// The minimum time between two readings, however many events occur.
const READING_GAP_MIN: Duration = Duration::from_millis(20);
/// The pause before NVML is loaded again if the driver isn't running yet.
const LOAD_RETRY: Duration = Duration::from_secs(5);
/// The time limit for the first reading. A sleeping driver takes some seconds.
const FIRST_MAX: Duration = Duration::from_secs(10);
/// The maximum number of queued events. The threads that report events block while the queue is
/// full.
const EVENTS: usize = 64;

/// Which devices to read, and how.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The engine's devices. If empty, those that its processes run on.
    pub devices: Vec<Selector>,
    /// The path of the NVML library. If empty, the driver's library is used.
    pub library: PathBuf,
    /// Whether to read performance counters too.
    pub gpm: bool,
    /// The time between two reloads of NVML while a device is missing: NVML doesn't find a device
    /// that appears after it was loaded.
    pub reload_interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: vec![],
            library: PathBuf::new(),
            gpm: false,
            reload_interval: RELOAD_INTERVAL,
        }
    }
}

/// Handle to the GPU thread.
#[derive(Debug, Clone)]
pub struct Gpus {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    schedulers: Arc<watch::Sender<Vec<Scheduler>>>,
    wake: mpsc::SyncSender<GpuEvent>,
}

impl Gpus {
    /// Returns the newest snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    /// Returns a receiver of the newest snapshot.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    /// Sets the scheduler process of a rank, as its shim reports it.
    pub fn set_scheduler(&self, scheduler: Scheduler) {
        self.schedulers.send_if_modified(|all| {
            let same = all.contains(&scheduler);
            all.retain(|one| one.dp_rank != scheduler.dp_rank);
            all.push(scheduler);
            all.sort_unstable_by_key(|one| one.dp_rank);
            !same
        });
        // If the queue is full, a reading is due anyway. Without NVML no thread takes events.
        let _ = self.wake.try_send(GpuEvent::ReadNow);
    }
}

/// Starts the GPU thread and waits for its first reading. Without NVML there are no devices, which
/// is logged once.
///
/// # Errors
/// When the thread can't be created.
pub fn watch(settings: Settings) -> std::io::Result<Gpus> {
    let (publish, snapshot) = watch::channel(Arc::new(Snapshot::none(now())));
    let (schedulers, schedulers_seen) = watch::channel(vec![]);
    let (wake, events) = mpsc::sync_channel(EVENTS);
    let (began, first) = mpsc::sync_channel(1);
    let thread = GpuThread {
        fleet: Fleet::new(settings.devices.clone(), settings.reload_interval),
        settings,
        processes: Processes::new("/proc".into()),
        schedulers_seen,
        publish,
        events,
        wake: wake.clone(),
        began: Some(began),
        logged_devices: None,
    };
    std::thread::Builder::new().name("gpu".into()).spawn(move || thread.run())?;
    // The channel also ends if the thread ends because there is no NVML.
    let _ = first.recv_timeout(FIRST_MAX);
    Ok(Gpus { snapshot, schedulers: Arc::new(schedulers), wake })
}

/// The state of the GPU thread.
struct GpuThread {
    settings: Settings,
    fleet: Fleet,
    processes: Processes,
    schedulers_seen: watch::Receiver<Vec<Scheduler>>,
    publish: watch::Sender<Arc<Snapshot>>,
    events: mpsc::Receiver<GpuEvent>,
    wake: mpsc::SyncSender<GpuEvent>,
    /// Dropped after the first reading.
    began: Option<mpsc::SyncSender<()>>,
    /// The engine's devices as last logged.
    logged_devices: Option<(Basis, Vec<String>)>,
}

impl GpuThread {
    /// Runs until all handles are dropped.
    fn run(mut self) {
        let mut known = vec![];
        let mut waiting = false;
        while !self.publish.is_closed() {
            match nvml::load(&self.settings.library) {
                Ok(nvml) => {
                    waiting = false;
                    known = self.read_until_reload(&nvml, &known);
                }
                Err(error) if nvml::may_load_later(&error) => {
                    if !waiting {
                        warn!(%error, "no GPU readings until the driver answers");
                    }
                    waiting = true;
                    self.began = None;
                    self.wait_for_events(LOAD_RETRY);
                }
                Err(error) => {
                    info!(%error, "no NVML on this machine, reporting without device readings");
                    return;
                }
            }
        }
    }

    /// Reads devices until all handles are dropped or NVML must be reloaded. Returns the devices'
    /// identities.
    fn read_until_reload(&mut self, nvml: &Nvml, known: &[Identity]) -> Vec<Identity> {
        let mut boards = nvml::boards(nvml, known, self.settings.gpm);
        let identities: Vec<Identity> = boards.iter().map(|board| board.identity.clone()).collect();
        let followed = identities.iter().zip(&boards);
        let followed: Vec<(&str, u32)> = followed
            .filter_map(|(identity, board)| Some((identity.uuid.as_str(), board.place()?)))
            .collect();
        let (stop, wake) = (AtomicBool::new(false), self.wake.clone());
        std::thread::scope(|scope| {
            for (board, place) in followed {
                let (stop, wake) = (&stop, &wake);
                let events = move || nvml::follow_events(nvml, board, place, stop, wake);
                let thread = std::thread::Builder::new().name("gpu-events".into());
                if let Err(error) = thread.spawn_scoped(scope, events) {
                    warn!(board, %error, "can't follow the XIDs of this GPU");
                }
            }
            while !self.publish.is_closed() {
                let at = now();
                self.read_boards(at, &mut boards);
                if self.fleet.needs_reload(at) {
                    break;
                }
                self.wait_for_events(INTERVAL);
            }
            stop.store(true, Ordering::Relaxed);
        });
        identities
    }

    fn read_boards(&mut self, at: Instant, boards: &mut [Board<'_>]) {
        let readings: Vec<_> =
            boards.iter_mut().map(|board| (board.identity.clone(), board.read())).collect();
        let pids: Vec<u32> = readings
            .iter()
            .flat_map(|(_, reading)| reading.processes.iter().flatten())
            .map(|process| process.pid)
            .collect();
        let pids_agree = self.processes.are_in_our_namespace(pids.into_iter());
        let schedulers = self.schedulers_seen.borrow_and_update().clone();
        let (members, is_new) = self.processes.members(at, &schedulers);
        let engine = EngineProcesses { members, is_new, pids_agree };
        let snapshot = self.fleet.take_readings(at, readings, engine);
        self.log_changes(&snapshot);
        self.publish.send_replace(Arc::new(snapshot));
        self.began = None;
    }

    /// Waits for an event, at most `limit`, and handles all queued events.
    fn wait_for_events(&mut self, limit: Duration) {
        let Ok(first) = self.events.recv_timeout(limit) else { return };
        // Further events of the same incident arrive within this time.
        std::thread::sleep(READING_GAP_MIN);
        let more: Vec<GpuEvent> = self.events.try_iter().take(EVENTS).collect();
        for event in [first].into_iter().chain(more) {
            if let GpuEvent::Xid { board, number } = event {
                let what = xid::fatal(number).map(|fatal| fatal.what);
                warn!(board, number, what, "the driver reports an XID");
                self.fleet.add_xid(&board, number);
            }
        }
    }

    /// Logs the engine's devices and their health whenever one of these changes.
    fn log_changes(&mut self, snapshot: &Snapshot) {
        let before = self.publish.borrow().unhealthy.clone();
        match (&before, &snapshot.unhealthy) {
            (Some(_), None) => info!("the engine's devices work again"),
            (before, Some(reason)) if before.as_ref() != Some(reason) => {
                error!(reason, "a device of the engine doesn't work or is missing");
            }
            _ => {}
        }
        let ours = snapshot.devices.iter().filter(|device| device.ours);
        let ours: Vec<String> = ours.map(|device| device.identity.uuid.clone()).collect();
        let now = Some((snapshot.basis, ours));
        if self.logged_devices == now {
            return;
        }
        self.logged_devices = now;
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
        let devices = config.devices.iter();
        Self {
            devices: devices.filter_map(|device| device.parse().ok()).collect(),
            library: config.nvml_library.clone(),
            gpm: config.gpm,
            ..Self::default()
        }
    }
}
