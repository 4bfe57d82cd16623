//! The GPUs beside the engine: read once a second on a thread of their own, because NVML's calls
//! block, and at once when something happens to one. Others take the newest [`Snapshot`].
//!
//! NVML may be missing, and any single reading may be: absent is absent, never zero. What readings
//! mean is decided by pure modules: [`health`], [`select`], [`fleet`], [`kv`]. No CUDA here.

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
use tokio::sync::watch;
use tracing::{error, info, warn};

use self::{
    fleet::{Engine, Fleet, Snapshot},
    nvml::{Board, Event},
    process::{Processes, Scheduler},
    reading::Identity,
    select::{Basis, Selector},
};

/// Devices are read this often. Utilisation is itself averaged over up to a second.
const INTERVAL: Duration = Duration::from_secs(1);
/// While a device is lacking, NVML is loaded anew this often, which takes it some tenths of a
/// second.
const RELOAD_INTERVAL: Duration = Duration::from_secs(30);
/// However much happens, between two looks there is this much time.
const GAP: Duration = Duration::from_millis(20);
/// A driver that doesn't run yet is asked again.
const LOAD_AGAIN: Duration = Duration::from_secs(5);
/// A machine whose driver sleeps takes some seconds to the first reading.
const FIRST_MAX: Duration = Duration::from_secs(10);
/// Events that wait to be taken. Their threads wait while it is full.
const EVENTS: usize = 64;

/// What to look at, and with which library.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The engine's devices; empty: those that its processes run on.
    pub devices: Vec<Selector>,
    /// NVML's library; empty: the driver's.
    pub library: PathBuf,
    /// Read performance counters too.
    pub gpm: bool,
    /// While a device is lacking, NVML is loaded anew this often: it doesn't find it otherwise.
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

/// How everyone else reaches the GPUs.
#[derive(Debug, Clone)]
pub struct Gpus {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    schedulers: Arc<watch::Sender<Vec<Scheduler>>>,
    wake: mpsc::SyncSender<Event>,
}

impl Gpus {
    /// The newest snapshot.
    #[must_use]
    pub fn now(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    /// A receiver of the newest snapshot.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    /// A rank's scheduler has said who it is.
    pub fn runs(&self, scheduler: Scheduler) {
        self.schedulers.send_if_modified(|all| {
            let same = all.contains(&scheduler);
            all.retain(|one| one.dp_rank != scheduler.dp_rank);
            all.push(scheduler);
            all.sort_unstable_by_key(|one| one.dp_rank);
            !same
        });
        // Full, there is a look ahead anyway; without NVML nobody takes it.
        let _ = self.wake.try_send(Event::Look);
    }
}

/// Starts the thread and waits for its first reading. Without NVML there are no devices, which is
/// said once.
///
/// # Errors
/// When the thread can't be made.
pub fn watch(settings: Settings) -> std::io::Result<Gpus> {
    let (publish, snapshot) = watch::channel(Arc::new(Snapshot::none(now())));
    let (schedulers, told) = watch::channel(vec![]);
    let (wake, events) = mpsc::sync_channel(EVENTS);
    let (began, first) = mpsc::sync_channel(1);
    let shell = Shell {
        fleet: Fleet::new(settings.devices.clone(), settings.reload_interval),
        settings,
        processes: Processes::new("/proc".into()),
        told,
        publish,
        events,
        wake: wake.clone(),
        began: Some(began),
        said: None,
    };
    std::thread::Builder::new().name("gpu".into()).spawn(move || shell.run())?;
    // Its end without NVML answers as well.
    let _ = first.recv_timeout(FIRST_MAX);
    Ok(Gpus { snapshot, schedulers: Arc::new(schedulers), wake })
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The thread's own.
struct Shell {
    settings: Settings,
    fleet: Fleet,
    processes: Processes,
    told: watch::Receiver<Vec<Scheduler>>,
    publish: watch::Sender<Arc<Snapshot>>,
    events: mpsc::Receiver<Event>,
    wake: mpsc::SyncSender<Event>,
    /// Dropped with the first reading.
    began: Option<mpsc::SyncSender<()>>,
    /// What was last logged of where the engine runs.
    said: Option<(Basis, Vec<String>)>,
}

impl Shell {
    /// Until nobody listens.
    fn run(mut self) {
        let mut known = vec![];
        let mut waiting = false;
        while !self.publish.is_closed() {
            match nvml::load(&self.settings.library) {
                Ok(nvml) => {
                    waiting = false;
                    known = self.follow(&nvml, &known);
                }
                Err(error) if nvml::may_come(&error) => {
                    if !waiting {
                        warn!(%error, "no GPU readings until the driver answers");
                    }
                    waiting = true;
                    self.began = None;
                    self.rest(LOAD_AGAIN);
                }
                Err(error) => {
                    info!(%error, "no NVML on this machine, reporting without device readings");
                    return;
                }
            }
        }
    }

    /// Reads until nobody listens or NVML has to be loaded anew; answers with who was there.
    fn follow(&mut self, nvml: &Nvml, known: &[Identity]) -> Vec<Identity> {
        let mut boards = nvml::boards(nvml, known, self.settings.gpm);
        let who: Vec<Identity> = boards.iter().map(|board| board.identity.clone()).collect();
        let followed = who.iter().zip(&boards);
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
                    warn!(board, %error, "the XIDs of this GPU aren't followed");
                }
            }
            while !self.publish.is_closed() {
                let at = now();
                self.read(at, &mut boards);
                if self.fleet.wants_reload(at) {
                    break;
                }
                self.rest(INTERVAL);
            }
            stop.store(true, Ordering::Relaxed);
        });
        who
    }

    fn read(&mut self, at: Instant, boards: &mut [Board<'_>]) {
        let readings: Vec<_> =
            boards.iter_mut().map(|board| (board.identity.clone(), board.read())).collect();
        let pids: Vec<u32> = readings
            .iter()
            .flat_map(|(_, reading)| reading.processes.iter().flatten())
            .map(|process| process.pid)
            .collect();
        let pids_agree = self.processes.are_ours(pids.into_iter());
        let schedulers = self.told.borrow_and_update().clone();
        let (members, is_new) = self.processes.members(at, &schedulers);
        let engine = Engine { members, is_new, pids_agree };
        let snapshot = self.fleet.read(at, readings, engine);
        self.say(&snapshot);
        self.publish.send_replace(Arc::new(snapshot));
        self.began = None;
    }

    /// Waits until the time is over or something has happened, and takes all that has.
    fn rest(&mut self, limit: Duration) {
        let Ok(first) = self.events.recv_timeout(limit) else { return };
        // What comes along with it belongs to it.
        std::thread::sleep(GAP);
        let more: Vec<Event> = self.events.try_iter().take(EVENTS).collect();
        for event in [first].into_iter().chain(more) {
            if let Event::Xid { board, number } = event {
                let what = xid::fatal(number).map(|fatal| fatal.what);
                warn!(board, number, what, "the driver reports an XID");
                self.fleet.xid(&board, number);
            }
        }
    }

    /// Where the engine runs, and what is wrong with it, whenever that changes.
    fn say(&mut self, snapshot: &Snapshot) {
        let before = self.publish.borrow().unhealthy.clone();
        match (&before, &snapshot.unhealthy) {
            (Some(_), None) => info!("the engine's devices work again"),
            (before, Some(reason)) if before.as_ref() != Some(reason) => {
                error!(reason, "a device of the engine doesn't work, or isn't there");
            }
            _ => {}
        }
        let ours = snapshot.devices.iter().filter(|device| device.ours);
        let ours: Vec<String> = ours.map(|device| device.identity.uuid.clone()).collect();
        let now = Some((snapshot.basis, ours));
        if self.said == now {
            return;
        }
        self.said = now;
        let Some((basis, devices)) = &self.said else { return };
        match basis {
            Basis::Unknown if devices.len() > 1 => {
                info!(
                    ?devices,
                    "which GPUs are the engine's isn't known: set `devices`, or the shim"
                );
            }
            _ => info!(?devices, ?basis, "the engine's devices"),
        }
    }
}

impl From<&crate::config::Config> for Settings {
    fn from(config: &crate::config::Config) -> Self {
        let devices = config.devices.iter();
        Self {
            devices: devices.filter_map(|device| device.parse().ok()).collect(),
            library: config.nvml_library.clone(),
            gpm: config.gpm,
            ..Self::default()
        }
    }
}
