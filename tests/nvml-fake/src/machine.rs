//! The machine behind one loaded copy of the library, and the entry check of every call.
//!
//! The machine has a state, the number of initialisations, and the number of calls by symbol.

use std::{collections::BTreeMap, path::PathBuf, sync::OnceLock, time::Duration};

use parking_lot::{Condvar, Mutex};

use crate::{
    abi::{Answer, GPU_IS_LOST, INVALID_ARGUMENT, TIMEOUT, UNINITIALIZED},
    control::{self, Reply, Request},
    event_sets::EventSets,
    gpm_samples::GpmSamples,
    state::{Gpu, State},
};

const SUCCESS: u32 = 0;
/// Handle of GPU 0; each further GPU adds [`PER_GPU`], and a GPU's slices follow its own handle.
const FIRST_HANDLE: usize = 0x1000;
const PER_GPU: usize = 0x100;

/// The whole machine, under one lock.
#[derive(Debug, Default)]
pub(crate) struct Machine {
    pub(crate) state: State,
    pub(crate) sets: EventSets,
    pub(crate) samples: GpmSamples,
    initialised: u32,
    calls: BTreeMap<&'static str, u64>,
}

#[derive(Debug)]
struct Shared {
    machine: Mutex<Machine>,
    changed: Condvar,
}

/// The GPU, and possibly the slice, that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) gpu: u32,
    pub(crate) slice: Option<u32>,
}

impl Place {
    pub(crate) fn handle(self) -> usize {
        let slice = self.slice.map_or(0, |slice| slice as usize + 1);
        FIRST_HANDLE + self.gpu as usize * PER_GPU + slice
    }

    pub(crate) fn from_handle(handle: usize) -> Result<Self, u32> {
        let number = handle.checked_sub(FIRST_HANDLE).ok_or(INVALID_ARGUMENT)?;
        let small = |number: usize| u32::try_from(number).map_err(|_| INVALID_ARGUMENT);
        let slice = (number % PER_GPU).checked_sub(1).map(small).transpose()?;
        Ok(Self { gpu: small(number / PER_GPU)?, slice })
    }
}

impl Machine {
    /// Returns the current readings of the device with this handle.
    pub(crate) fn device(&self, handle: usize) -> Result<Gpu, u32> {
        let place = Place::from_handle(handle)?;
        let gpu = self.state.gpus.get(&place.gpu).ok_or(INVALID_ARGUMENT)?;
        match place.slice {
            None => Ok(gpu.clone()),
            Some(slice) if gpu.mig == Some(true) => {
                gpu.slices.get(&slice).map(|slice| slice.device(gpu)).ok_or(INVALID_ARGUMENT)
            }
            Some(_) => Err(INVALID_ARGUMENT),
        }
    }

    /// Returns how often a symbol was called.
    pub(crate) fn calls(&self, symbol: &str) -> u64 {
        self.calls.get(symbol).copied().unwrap_or(0)
    }

    /// Counts an initialisation; NVML is shut down when as many shutdowns have followed.
    pub(crate) fn initialise(&mut self) {
        self.initialised += 1;
    }

    pub(crate) fn shut_down(&mut self) {
        self.initialised -= 1;
    }

    fn enter(&mut self, call: &'static str) -> Answer {
        *self.calls.entry(call).or_default() += 1;
        let before_init = ["nvmlInit_v2", "nvmlInitWithFlags"].contains(&call);
        if !before_init && self.initialised == 0 {
            return Err(UNINITIALIZED);
        }
        injected(&self.state.fail, call)
    }
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let folder = own_folder();
        let initial = folder.as_ref().and_then(|at| std::fs::read(at.join("state.json")).ok());
        let state = match initial {
            Some(text) => {
                let patch = serde_json::from_slice(&text).expect("state.json is JSON");
                State::default().patched(patch).expect("state.json is a state")
            }
            None => State::with_gpus(gpus_by_environment()),
        };
        if let Some(folder) = folder {
            control::connect(&folder.join("control.sock"), |request| {
                change(|machine| carry_out(machine, request))
            });
        }
        let machine = Machine { state, ..Machine::default() };
        Shared { machine: Mutex::new(machine), changed: Condvar::new() }
    })
}

/// Does what the test requests.
fn carry_out(machine: &mut Machine, request: Request) -> Reply {
    match request {
        Request::Set(patch) => match machine.state.patched(patch) {
            Ok(state) => {
                machine.state = state;
                Reply::Done
            }
            Err(why) => Reply::Refused(why),
        },
        Request::Event { gpu, kind, data } => {
            machine.sets.queue_event(gpu, kind, data);
            Reply::Done
        }
        Request::Calls(symbol) => Reply::Calls(machine.calls(&symbol)),
    }
}

fn gpus_by_environment() -> u32 {
    std::env::var("NVML_FAKE_GPUS").ok().and_then(|count| count.parse().ok()).unwrap_or(2)
}

/// Returns the folder from which this copy of the library was loaded.
fn own_folder() -> Option<PathBuf> {
    let own = own_folder as *const () as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().find_map(|line| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        let inside = (number(from)?..number(to)?).contains(&own);
        inside.then(|| line.find('/').map(|at| PathBuf::from(&line[at..])))?
    })?;
    path.parent().map(PathBuf::from)
}

fn code(answer: Answer) -> u32 {
    answer.err().unwrap_or(SUCCESS)
}

/// Runs a call about the system.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&mut Machine) -> Answer) -> u32 {
    let machine = &mut *shared().machine.lock();
    code(machine.enter(name).and_then(|()| body(machine)))
}

/// Runs a call about one device.
pub(crate) fn device_call(
    name: &'static str,
    device: usize,
    body: impl FnOnce(&Gpu) -> Answer,
) -> u32 {
    call(name, |machine| {
        let gpu = machine.device(device)?;
        works(name, &gpu)?;
        body(&gpu)
    })
}

/// Returns an error if the device or this call on it fails.
pub(crate) fn works(call: &str, gpu: &Gpu) -> Answer {
    if gpu.lost {
        return Err(GPU_IS_LOST);
    }
    injected(&gpu.fail, call)
}

/// Returns the error that the test wants for this call, if any.
fn injected(fail: &BTreeMap<String, u32>, call: &str) -> Answer {
    fail.get(call)
        .or_else(|| fail.get("*"))
        .filter(|&&code| code != SUCCESS)
        .map_or(Ok(()), |&code| Err(code))
}

/// Waits until the body has an answer, or the time limit has passed.
pub(crate) fn wait(
    name: &'static str,
    limit: Duration,
    mut body: impl FnMut(&mut Machine) -> Option<Answer>,
) -> u32 {
    let Shared { machine, changed } = shared();
    let mut machine = machine.lock();
    if let Err(error) = machine.enter(name) {
        return error;
    }
    let mut answer = None;
    changed.wait_while_for(
        &mut machine,
        |machine| {
            answer = body(machine);
            answer.is_none()
        },
        limit,
    );
    code(answer.unwrap_or(Err(TIMEOUT)))
}

/// Changes the machine from outside, and wakes the waiting calls.
fn change<T>(body: impl FnOnce(&mut Machine) -> T) -> T {
    let Shared { machine, changed } = shared();
    let answer = body(&mut machine.lock());
    changed.notify_all();
    answer
}
