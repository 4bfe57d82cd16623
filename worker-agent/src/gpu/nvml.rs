//! NVML itself, through its safe wrapper: which devices there are, one look at each, and their
//! XIDs. Any call may be missing, refused or fail; what it would have given is absent then. A call
//! that a board doesn't support isn't made again until NVML is loaded anew.
//!
//! What the wrapper's safe calls can't give, and so is absent: NVLink's byte counters (a field of a
//! scope; [`Gpm`] has the rates), events besides XIDs (a poisoned page, a changed recovery action:
//! the next reading shows them), the slice an XID is of, counters of a slice's own, protected
//! memory under confidential computing.

mod board;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{SyncSender, TrySendError},
    },
    time::Duration,
};

use nvml_wrapper::{
    Device, Nvml,
    bitmasks::event::EventTypes,
    enums::event::XidError,
    error::{NvmlError, NvmlErrorWithSource},
};
use tracing::{debug, warn};

use super::{
    reading::{Gpm, Identity, Reading, Trouble},
    select::PciAddress,
};

pub(super) use self::board::Board;

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

/// All devices: each GPU, and after it its MIG slices. One that can't be reached is who it was.
pub(super) fn boards<'n>(nvml: &'n Nvml, known: &[Identity], gpm: bool) -> Vec<Board<'n>> {
    let mut boards = vec![];
    let counted = nvml.device_count().inspect_err(|error| warn!(%error, "no GPU can be counted"));
    for index in 0..counted.unwrap_or(0) {
        match nvml.device_by_index(index) {
            Ok(device) => {
                let slices = slices(&device);
                let identity = identity(&device, index, !slices.is_empty());
                let parent = identity.clone();
                boards.push(Board::new(identity, Ok(device), gpm));
                boards.extend(slices.into_iter().map(|slice| {
                    let identity = slice_identity(&slice, &parent);
                    Board::new(identity, Ok(slice), false)
                }));
            }
            Err(error) => {
                warn!(index, %error, "a GPU can't be reached");
                let same = known.iter().find(|one| one.index == index && one.parent_uuid.is_none());
                let identity = same.cloned().unwrap_or_else(|| nameless(index));
                boards.push(Board::new(identity, Err(out_of_reach(&error)), gpm));
            }
        }
    }
    boards
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

fn nameless(index: u32) -> Identity {
    Identity { uuid: format!("index-{index}"), index, ..Identity::default() }
}

fn identity(device: &Device<'_>, index: u32, divided: bool) -> Identity {
    let pci_address = device.pci_info().ok().map(|pci| pci.bus_id);
    Identity {
        uuid: device.uuid().unwrap_or_else(|_| nameless(index).uuid),
        name: device.name().unwrap_or_default(),
        index,
        numa_node: device.numa_node_id().ok().or_else(|| numa_node(pci_address.as_deref()?)),
        pci_address,
        parent_uuid: None,
        divided,
    }
}

fn slice_identity(slice: &Device<'_>, parent: &Identity) -> Identity {
    Identity {
        uuid: slice.uuid().unwrap_or_else(|_| format!("MIG-of-{}", parent.uuid)),
        name: slice.name().unwrap_or_default(),
        parent_uuid: Some(parent.uuid.clone()),
        divided: false,
        ..parent.clone()
    }
}

/// Places of slices may be empty between others.
fn slices<'n>(device: &Device<'n>) -> Vec<Device<'n>> {
    if device.mig_mode().map_or(0, |mode| mode.current) == 0 {
        return vec![];
    }
    let places = 0..device.mig_device_count().unwrap_or(0);
    places.filter_map(|place| device.mig_device_by_index(place).ok()).collect()
}

/// What the kernel says where NVML doesn't; -1 there is no answer.
fn numa_node(pci_address: &str) -> Option<u32> {
    let address: PciAddress = pci_address.parse().ok()?;
    let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}/numa_node"));
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
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

/// Tells of a board's XIDs until told to stop. It runs on a thread of its own: a wait blocks, and
/// a lost board can't say afterwards which one the event was of.
pub(super) fn follow_events(
    nvml: &Nvml,
    identity: &Identity,
    stop: &AtomicBool,
    tell: &SyncSender<Event>,
) {
    let board = &identity.uuid;
    let set = match register(nvml, identity.index) {
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
        send(tell, Event::Xid { board: board.clone(), number }, stop);
    }
}

fn register(nvml: &Nvml, index: u32) -> Result<nvml_wrapper::EventSet<'_>, NvmlErrorWithSource> {
    let set = nvml.create_event_set()?;
    nvml.device_by_index(index)?.register_events(EventTypes::CRITICAL_XID_ERROR, set)
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
