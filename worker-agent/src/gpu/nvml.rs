//! Calls NVML through its safe wrapper: lists the devices, reads them, and follows their XIDs.
//!
//! Any call may be missing, refused or fail; its value is absent then. A call that a board doesn't
//! support isn't made again until NVML is reloaded.
//!
//! The wrapper's safe calls can't provide the following, which is therefore absent: NVLink's byte
//! counters (a field with a scope; [`Gpm`] has the rates), events other than XIDs (a poisoned page
//! or a changed recovery action appears in the next reading), the slice that an XID belongs to, the
//! counters of a single slice, and protected memory under confidential computing.

mod board;
mod listing;

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{SyncSender, TrySendError},
    },
    time::Duration,
};

use nvml_wrapper::{
    Nvml,
    bitmasks::event::EventTypes,
    enums::event::XidError,
    error::{NvmlError, NvmlErrorWithSource},
};
use tracing::debug;

use super::reading::{Gpm, Identity, Reading, Trouble};

pub(super) use self::{board::Board, listing::boards};

/// The time limit of one wait for events, so that the thread soon notices when it should stop.
const EVENT_WAIT: Duration = Duration::from_millis(500);
/// The driver's number for an unknown XID.
const XID_UNKNOWN: u64 = 999;

/// Loads the driver's NVML library, or the one at `path`.
///
/// # Errors
/// When there is no library, or the driver isn't running.
pub(super) fn load(path: &Path) -> Result<Nvml, NvmlError> {
    if path.as_os_str().is_empty() {
        // The unversioned name comes only with development packages.
        return Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init();
    }
    Nvml::builder().lib_path(path.as_os_str()).init()
}

/// Whether loading may succeed later.
pub(super) fn may_load_later(error: &NvmlError) -> bool {
    !matches!(error, NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_))
}

/// Returns the trouble of a board for which NVML gives no handle. `None` without the right to use
/// the board, as in a container that was given other GPUs.
fn handle_trouble(error: &NvmlError) -> Option<Trouble> {
    match error {
        NvmlError::NoPermission => None,
        error => trouble(error).or(Some(Trouble::Unreachable)),
    }
}

/// Returns what an error says about the board, beyond the failed call.
fn trouble(error: &NvmlError) -> Option<Trouble> {
    match error {
        NvmlError::GpuLost => Some(Trouble::Lost),
        NvmlError::ResetRequired => Some(Trouble::ResetRequired),
        _ => None,
    }
}

/// An event for the GPU thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GpuEvent {
    /// An XID of a board.
    Xid {
        /// The board's UUID.
        board: String,
        /// The XID's number.
        number: u64,
    },
    /// Another event; the next reading shows its effect.
    ReadNow,
}

/// Reports a board's XIDs until `stop` is set. `place` is the board's index while NVML stays
/// loaded. Each board has a thread of its own, because a wait blocks, and because for a lost board
/// it can't be found out afterwards which board an event belongs to.
pub(super) fn follow_events(
    nvml: &Nvml,
    board: &str,
    place: u32,
    stop: &AtomicBool,
    events: &SyncSender<GpuEvent>,
) {
    let set = match register(nvml, place) {
        Ok(set) => set,
        Err(error) => return debug!(board, error = %error.error, "this GPU reports no XIDs"),
    };
    while !stop.load(Ordering::Relaxed) {
        let wait_ms = u32::try_from(EVENT_WAIT.as_millis()).expect("half a second in milliseconds");
        let number = match set.wait(wait_ms).map(|event| event.event_data) {
            Ok(Some(XidError::Value(number))) => number,
            Ok(Some(XidError::Unknown)) => XID_UNKNOWN,
            Ok(None) | Err(NvmlError::Timeout) => continue,
            Err(_) => {
                send(events, GpuEvent::ReadNow, stop);
                // The next wait would fail at once again.
                pause(stop);
                continue;
            }
        };
        send(events, GpuEvent::Xid { board: board.to_owned(), number }, stop);
    }
}

fn register(nvml: &Nvml, place: u32) -> Result<nvml_wrapper::EventSet<'_>, NvmlErrorWithSource> {
    let set = nvml.create_event_set()?;
    nvml.device_by_index(place)?.register_events(EventTypes::CRITICAL_XID_ERROR, set)
}

/// Sends an event, and waits while the queue is full so that no XID is dropped. The reader empties
/// the queue at least once a second.
fn send(events: &SyncSender<GpuEvent>, mut event: GpuEvent, stop: &AtomicBool) {
    while let Err(TrySendError::Full(back)) = events.try_send(event) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        event = back;
        std::thread::sleep(EVENT_WAIT / 50);
    }
}

/// Sleeps in short intervals, so that `stop` is noticed soon.
fn pause(stop: &AtomicBool) {
    for _ in 0..10 {
        if !stop.load(Ordering::Relaxed) {
            std::thread::sleep(EVENT_WAIT / 5);
        }
    }
}

/// The calls that a board doesn't support.
type Off = BTreeSet<&'static str>;
