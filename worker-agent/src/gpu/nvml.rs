//! Calls NVML through its safe wrapper: lists the devices, reads them, and follows their XIDs.
//!
//! A call that is missing, refused or failing leaves its value absent from the reading. A call that
//! a device doesn't support isn't made again until NVML is reloaded.
//!
//! The wrapper has no safe calls for NVLink's byte counters ([`Gpm`] has bytes per second instead),
//! events other than XIDs (a changed recovery action appears in the next reading), the slice of an
//! XID, the counters of a single slice, and protected memory under confidential computing.

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

use super::reading::{BoardFault, Gpm, Identity, Reading};

pub(super) use self::{board::DeviceReader, listing::list_devices};

/// After each wait, the thread checks whether it should stop.
const EVENT_WAIT_MAX: Duration = Duration::from_millis(500);
/// NVML's number for an XID that it doesn't know.
const XID_UNKNOWN: u64 = 999;

/// Without `path`, loads the driver's library.
pub(super) fn load(path: Option<&Path>) -> Result<Nvml, NvmlError> {
    // The name without a version exists only if a development package is installed.
    let path = path.unwrap_or(Path::new("libnvidia-ml.so.1"));
    Nvml::builder().lib_path(path.as_os_str()).init()
}

/// The library may be there while the driver doesn't answer yet.
pub(super) fn may_load_later(error: &NvmlError) -> bool {
    !matches!(error, NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_))
}

/// `None` if the agent has no right to the board, as in a container that was given other GPUs.
fn fault_without_handle(error: &NvmlError) -> Option<BoardFault> {
    match error {
        NvmlError::NoPermission => None,
        error => board_fault(error).or(Some(BoardFault::Unreachable)),
    }
}

/// `None` if only the call has failed.
fn board_fault(error: &NvmlError) -> Option<BoardFault> {
    match error {
        NvmlError::GpuLost => Some(BoardFault::Lost),
        NvmlError::ResetRequired => Some(BoardFault::ResetRequired),
        _ => None,
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum GpuEvent {
    Xid {
        board_uuid: String,
        /// The XID's number.
        number: u64,
    },
    ReadNow,
}

/// `nvml_index` is valid while NVML stays loaded. Each board has a thread of its own, because a
/// wait blocks, and NVML can't name a lost board any more: its events could not be attributed.
pub(super) fn follow_events(
    nvml: &Nvml,
    board_uuid: &str,
    nvml_index: u32,
    stop: &AtomicBool,
    events: &SyncSender<GpuEvent>,
) {
    let event_set = match subscribe_to_xids(nvml, nvml_index) {
        Ok(event_set) => event_set,
        Err(error) => {
            return debug!(board = board_uuid, error = %error.error, "this GPU reports no XIDs");
        }
    };
    while !stop.load(Ordering::Relaxed) {
        let wait_ms =
            u32::try_from(EVENT_WAIT_MAX.as_millis()).expect("half a second in milliseconds");
        let number = match event_set.wait(wait_ms).map(|event| event.event_data) {
            Ok(Some(XidError::Value(number))) => number,
            Ok(Some(XidError::Unknown)) => XID_UNKNOWN,
            Ok(None) | Err(NvmlError::Timeout) => continue,
            Err(_) => {
                send(events, GpuEvent::ReadNow, stop);
                // The next wait would probably fail at once again.
                pause_for_a_second(stop);
                continue;
            }
        };
        send(events, GpuEvent::Xid { board_uuid: board_uuid.to_owned(), number }, stop);
    }
}

fn subscribe_to_xids(
    nvml: &Nvml,
    nvml_index: u32,
) -> Result<nvml_wrapper::EventSet<'_>, NvmlErrorWithSource> {
    let event_set = nvml.create_event_set()?;
    nvml.device_by_index(nvml_index)?.register_events(EventTypes::CRITICAL_XID_ERROR, event_set)
}

/// Waits while the queue is full, so that no XID is dropped.
fn send(events: &SyncSender<GpuEvent>, mut event: GpuEvent, stop: &AtomicBool) {
    while let Err(TrySendError::Full(unsent)) = events.try_send(event) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        event = unsent;
        std::thread::sleep(EVENT_WAIT_MAX / 50);
    }
}

fn pause_for_a_second(stop: &AtomicBool) {
    for _ in 0..10 {
        if !stop.load(Ordering::Relaxed) {
            std::thread::sleep(EVENT_WAIT_MAX / 5);
        }
    }
}

type UnsupportedCalls = BTreeSet<&'static str>;
