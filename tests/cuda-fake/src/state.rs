//! The driver's state in one process, and the entry check of every call.

use crate::{
    host::{Kernels, Launch},
    memory::Mapping,
    stream::{Event, Stream, Work},
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::{CString, c_int},
    sync::{Arc, LazyLock},
};

/// The driver's result codes that this driver returns.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NOT_INITIALIZED: u32 = 3;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const INVALID_DEVICE: u32 = 101;
    pub(crate) const INVALID_IMAGE: u32 = 200;
    pub(crate) const INVALID_CONTEXT: u32 = 201;
    pub(crate) const INVALID_HANDLE: u32 = 400;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: u32 = 713;
}

/// The result of a call: nothing, or an error code.
pub(crate) type Answer = Result<(), u32>;

/// Contexts start at this number, so that none looks like a stream or a pointer.
const CONTEXT_FIRST: u64 = 0x1000;
const MEMORY_DEFAULT_BYTES: u64 = 8 << 30;

pub(crate) struct State {
    pub(crate) initialized: bool,
    pub(crate) devices: c_int,
    /// Retain count of each device's primary context.
    pub(crate) contexts: BTreeMap<c_int, u64>,
    pub(crate) modules: BTreeMap<u64, Kernels>,
    /// Kernels that were looked up, by handle.
    pub(crate) functions: BTreeMap<u64, Function>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: BTreeMap<u64, Arc<Event>>,
    /// Device memory by base address.
    pub(crate) allocations: BTreeMap<u64, Mapping>,
    /// Page-locked host memory: base address and bytes.
    pub(crate) registered: BTreeMap<u64, usize>,
    pub(crate) memory_max: u64,
    last_handle: u64,
    // Set by the test.
    pub(crate) kernels: Kernels,
    pub(crate) faults: BTreeMap<String, u32>,
    pub(crate) launches: BTreeMap<String, u64>,
    pub(crate) all_held: bool,
}

/// A kernel of a module.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) kernels: Kernels,
    pub(crate) kernel: c_int,
    pub(crate) name: CString,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    Mutex::new(State {
        initialized: false,
        devices: variable("CUDA_FAKE_DEVICES").unwrap_or(1),
        contexts: BTreeMap::new(),
        modules: BTreeMap::new(),
        functions: BTreeMap::new(),
        streams: BTreeMap::from([(0, Stream::default())]),
        events: BTreeMap::new(),
        allocations: BTreeMap::new(),
        registered: BTreeMap::new(),
        memory_max: memory_default(),
        last_handle: 0x10_0000,
        kernels: Kernels::built_in(),
        faults: BTreeMap::new(),
        launches: BTreeMap::new(),
        all_held: false,
    })
});

/// Notified whenever a stream has made progress.
static PROGRESS: Condvar = Condvar::new();

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Returns the device memory, in bytes, unless a test sets another amount.
pub(crate) fn memory_default() -> u64 {
    variable("CUDA_FAKE_MEMORY").unwrap_or(MEMORY_DEFAULT_BYTES)
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock()
}

/// Runs a call that works without initialisation; returns its result, or the error that a test
/// planted.
pub(crate) fn call(symbol: &str, body: impl FnOnce(&mut State) -> Answer) -> u32 {
    let mut state = state();
    if let Some(&fault) = state.faults.get(symbol) {
        return fault;
    }
    body(&mut state).err().unwrap_or(0)
}

/// Runs a call that needs an initialised driver.
pub(crate) fn after_init(symbol: &str, body: impl FnOnce(&mut State) -> Answer) -> u32 {
    call(symbol, |state| if state.initialized { body(state) } else { Err(code::NOT_INITIALIZED) })
}

/// Runs a call that works in the thread's current context.
pub(crate) fn in_context(symbol: &str, body: impl FnOnce(&mut State) -> Answer) -> u32 {
    after_init(symbol, |state| {
        let known = state.is_context(CURRENT.get());
        if known { body(state) } else { Err(code::INVALID_CONTEXT) }
    })
}

/// Does the same as [`in_context`], then waits for the work of the returned streams.
pub(crate) fn drained(
    symbol: &str,
    streams: impl FnOnce(&mut State) -> Result<Vec<u64>, u32>,
) -> u32 {
    let mut waited = Vec::new();
    let answer = in_context(symbol, |state| streams(state).map(|found| waited = found));
    if answer == 0 {
        wait_for(&waited);
    }
    answer
}

/// Blocks until these streams have no work left. Another thread may have to release them.
pub(crate) fn wait_for(streams: &[u64]) {
    let mut state = state();
    loop {
        state.advance();
        let busy = |id| state.streams.get(id).is_some_and(|stream| !stream.work.is_empty());
        if !streams.iter().any(busy) {
            return;
        }
        PROGRESS.wait(&mut state);
    }
}

pub(crate) fn current() -> u64 {
    CURRENT.get()
}

pub(crate) fn set_current(context: u64) {
    CURRENT.set(context);
}

pub(crate) fn context_of(device: c_int) -> u64 {
    CONTEXT_FIRST + u64::from(device.cast_unsigned())
}

impl State {
    pub(crate) fn is_context(&self, context: u64) -> bool {
        self.contexts.iter().any(|(&device, &n)| n > 0 && context_of(device) == context)
    }

    pub(crate) fn check_device(&self, device: c_int) -> Answer {
        if (0..self.devices).contains(&device) { Ok(()) } else { Err(code::INVALID_DEVICE) }
    }

    pub(crate) fn new_handle(&mut self) -> u64 {
        self.last_handle += 16;
        self.last_handle
    }

    pub(crate) fn memory_used(&self) -> u64 {
        self.allocations.values().map(|mapping| mapping.bytes() as u64).sum()
    }

    /// Returns the block of device memory that contains an address.
    fn block_of(&self, address: u64) -> Option<&Mapping> {
        let (_, block) = self.allocations.range(..=address).next_back()?;
        (address - block.base() < block.bytes() as u64).then_some(block)
    }

    /// Checks that `bytes` at `address` may be accessed. An address outside device memory is a host
    /// address, for which the caller is responsible: a CPU engine's tensors are "device" memory
    /// too.
    pub(crate) fn check_range(&self, address: u64, bytes: usize) -> Answer {
        let inside =
            |block: &Mapping| address - block.base() + bytes as u64 <= block.bytes() as u64;
        let sound = self.block_of(address).is_none_or(inside) && (address != 0 || bytes == 0);
        if sound { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    pub(crate) fn is_registered(&self, address: u64, bytes: usize) -> bool {
        let before = self.registered.range(..=address).next_back();
        before.is_some_and(|(base, &length)| address - base + bytes as u64 <= length as u64)
    }

    /// Adds work to a stream, and executes what is possible.
    pub(crate) fn enqueue(&mut self, stream: u64, work: Work) -> Answer {
        self.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?.work.push_back(work);
        self.advance();
        Ok(())
    }

    pub(crate) fn launch(&mut self, stream: u64, name: String, launch: Launch) -> Answer {
        *self.launches.entry(name).or_default() += 1;
        self.enqueue(stream, Work::Launch(launch))
    }

    /// Executes all possible work of all streams; repeats, because one stream may wait for another.
    pub(crate) fn advance(&mut self) {
        let mut any = false;
        while self.streams.values_mut().map(Stream::advance).sum::<u64>() > 0 {
            any = true;
        }
        if any {
            PROGRESS.notify_all();
        }
    }
}
