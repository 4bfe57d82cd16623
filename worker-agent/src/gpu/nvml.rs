//! NVML itself, through its safe wrapper: which devices there are, one look at each, and their
//! XIDs. Any call may be missing, refused or fail; what it would have given is absent then. A call
//! that a board doesn't support isn't made again until NVML is loaded anew.
//!
//! What the wrapper's safe calls can't give, and so is absent: NVLink's byte counters (a field of a
//! scope; [`Gpm`] has the rates), events besides XIDs (a poisoned page, a changed recovery action:
//! the next reading shows them), the slice an XID is of, counters of a slice's own, protected
//! memory under confidential computing.

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

/// A wait for events notices this soon that it is no longer wanted.
const EVENT_WAIT: Duration = Duration::from_millis(500);
/// The driver's own name for an XID that it has no number for.
const XID_UNKNOWN: u64 = 999;

/// Loads the library: the driver's, or the one at `path`.
///
/// # Errors
/// When there is none, or the driver doesn't run.
pub(super) fn load(path: &Path) -> Result<Nvml, NvmlError> {
    if path.as_os_str().is_empty() {
        // Its unversioned name comes with the developers' packages alone.
        return Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init();
    }
    Nvml::builder().lib_path(path.as_os_str()).init()
}

/// Could the library be there another time?
pub(super) fn may_come(error: &NvmlError) -> bool {
    !matches!(error, NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_))
}

/// What it says of a board that there is no handle of it. A user without the right to it, as in a
/// container that was given other GPUs, learns nothing of it.
fn out_of_reach(error: &NvmlError) -> Option<Trouble> {
    match error {
        NvmlError::NoPermission => None,
        error => trouble(error).or(Some(Trouble::Unreachable)),
    }
}

/// What an error says about the board, beyond the call.
fn trouble(error: &NvmlError) -> Option<Trouble> {
    match error {
        NvmlError::GpuLost => Some(Trouble::Lost),
        NvmlError::ResetRequired => Some(Trouble::ResetRequired),
        _ => None,
    }
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// An XID of a board.
    Xid {
        /// Its UUID.
        board: String,
        /// Of the XID.
        number: u64,
    },
    /// Something that the next reading will show.
    Look,
}

/// Tells of a board's XIDs until told to stop; `place` is its index while NVML stays loaded. It
/// runs on a thread of its own: a wait blocks, and a lost board can't say afterwards which one the
/// event was of.
pub(super) fn follow_events(
    nvml: &Nvml,
    board: &str,
    place: u32,
    stop: &AtomicBool,
    tell: &SyncSender<Event>,
) {
    let set = match register(nvml, place) {
        Ok(set) => set,
        Err(error) => return debug!(board, error = %error.error, "this GPU tells no XIDs"),
    };
    while !stop.load(Ordering::Relaxed) {
        let wait_ms = u32::try_from(EVENT_WAIT.as_millis()).expect("half a second in milliseconds");
        let number = match set.wait(wait_ms).map(|event| event.event_data) {
            Ok(Some(XidError::Value(number))) => number,
            Ok(Some(XidError::Unknown)) => XID_UNKNOWN,
            Ok(None) | Err(NvmlError::Timeout) => continue,
            Err(_) => {
                send(tell, Event::Look, stop);
                // It would answer the same at once again.
                rest(stop);
                continue;
            }
        };
        send(tell, Event::Xid { board: board.to_owned(), number }, stop);
    }
}

fn register(nvml: &Nvml, place: u32) -> Result<nvml_wrapper::EventSet<'_>, NvmlErrorWithSource> {
    let set = nvml.create_event_set()?;
    nvml.device_by_index(place)?.register_events(EventTypes::CRITICAL_XID_ERROR, set)
}

/// The reader empties its queue at least once a second; an XID isn't dropped for being one of many.
fn send(tell: &SyncSender<Event>, mut event: Event, stop: &AtomicBool) {
    while let Err(TrySendError::Full(back)) = tell.try_send(event) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        event = back;
        std::thread::sleep(EVENT_WAIT / 50);
    }
}

/// In pieces, so that nobody has to wait for its end.
fn rest(stop: &AtomicBool) {
    for _ in 0..10 {
        if !stop.load(Ordering::Relaxed) {
            std::thread::sleep(EVENT_WAIT / 5);
        }
    }
}

/// Calls of which the board has said that it doesn't know them.
type Off = BTreeSet<&'static str>;
