//! Guarantees of the device layer besides the kernels' results.
//!
//! Order between streams, memory that is freed, and errors that name their reason.

mod pools;

use cuda_fake::Fake;
use cudarc::driver::sys;
use kernels::{
    cuda::{Device, DeviceSlice, DeviceTable, Error, KvBuffer, LaunchShape, PoolSize},
    reference::{self, LiveRow},
};
use pools::{Case, digests, filled};
use std::ptr;

fn device() -> Device {
    Device::open(0, &cuda_fake::image()).expect("the driver without a GPU has a device")
}

const POOL: PoolSize = PoolSize { page_shift: 4, npages: 100 };
const LD: usize = 64;

fn one_row(device: &Device) -> (kernels::cuda::LiveRows, LiveRow) {
    let row = LiveRow { row: 0, len: 40, session: 0, list_start: 0 };
    let mut live = device.live_rows(1).expect("there is room");
    device.set_live_rows(&mut live, &[row], POOL).expect("the row is sound");
    (live, row)
}

/// Returns a table of one row whose first page is `first`.
fn table(first: i32) -> Vec<i32> {
    let mut r2t = vec![0; LD];
    (r2t[0], r2t[16], r2t[32]) = (first * 16, 48, 64);
    r2t
}

#[test]
fn a_snapshot_waits_for_the_scheduler_and_the_caller_for_nobody() {
    let fake = Fake::load().unwrap();
    let (engine, device) = (device(), device());
    let (live, _) = one_row(&device);
    let mut r2t = filled(&engine, &table(7)).unwrap();
    let (mut staged, mut bad) = (device.alloc(3).unwrap(), device.alloc(1).unwrap());
    let mut next = engine.pinned::<i32>(LD).unwrap();
    next.get_mut().unwrap().unwrap().copy_from_slice(&table(9));
    device.synchronize().unwrap();

    fake.hold(engine.stream());
    engine.send(&mut next, LD, &mut r2t).unwrap();
    // SAFETY: the engine's stream lives as long as the engine.
    unsafe { device.wait_for(engine.stream()).unwrap() };
    let entries = DeviceTable { entries: r2t.slice(), stride: LD as u64 };
    device.gather_pages(entries, &live, &mut staged, &mut bad).unwrap();
    let mark = device.record().unwrap();
    assert!(!mark.is_done().unwrap(), "the engine hasn't come to it");
    assert!(next.get_mut().unwrap().is_none(), "nothing is changed while it is copied");
    let busy = engine.send(&mut next, LD, &mut r2t);
    assert!(matches!(busy, Err(Error::CopyInFlight)), "{busy:?}");
    assert!(fake.pending(device.stream()) > 0);

    fake.step(engine.stream(), 1);
    assert!(!mark.is_done().unwrap(), "it has written, and not said so");
    fake.release(engine.stream());
    assert!(mark.is_done().unwrap());
    let answer = device.download(staged.slice()).unwrap();
    assert_eq!(answer, [9, 3, 4], "what the engine wrote last");
}

#[test]
fn without_waiting_a_snapshot_is_of_before() {
    let fake = Fake::load().unwrap();
    let (engine, device) = (device(), device());
    let (live, _) = one_row(&device);
    let mut r2t = filled(&engine, &table(7)).unwrap();
    let mut next = engine.pinned::<i32>(LD).unwrap();
    next.get_mut().unwrap().unwrap().copy_from_slice(&table(9));
    fake.hold(engine.stream());
    engine.send(&mut next, LD, &mut r2t).unwrap();
    let (mut staged, mut bad) = (device.alloc(3).unwrap(), device.alloc(1).unwrap());
    let entries = DeviceTable { entries: r2t.slice(), stride: LD as u64 };
    device.gather_pages(entries, &live, &mut staged, &mut bad).unwrap();
    assert_eq!(device.download(staged.slice()).unwrap(), [7, 3, 4]);
    fake.release(engine.stream());
}

#[test]
fn everything_comes_back_whatever_call_fails() {
    let fake = Fake::load().unwrap();
    let before = fake.live();
    let case = Case::random(3);
    let symbols = [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuEventCreate",
        "cuEventRecord",
        "cuMemAlloc_v2",
        "cuMemsetD8Async",
        "cuMemHostRegister_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuLaunchKernelEx",
    ];
    for symbol in symbols {
        fake.fail(symbol, 1);
        let result = Device::open(0, &cuda_fake::image()).and_then(|device| {
            drop(device.record()?);
            case.answers(&device)
        });
        fake.fail(symbol, 0);
        let error = result.unwrap_err().to_string();
        assert_eq!(error, format!("{symbol} failed with CUDA_ERROR_INVALID_VALUE (1)"));
        assert_eq!(fake.live(), before, "after {symbol} failed");
    }
    let launches = fake.launches("kv_session");
    assert_eq!(case.answers(&device()).unwrap(), case.expected());
    assert_eq!(fake.launches("kv_session"), launches + 1);
    assert_eq!(fake.live(), before);
}

#[test]
fn a_device_without_room_says_so() {
    let fake = Fake::load().unwrap();
    let device = device();
    let before = fake.live();
    let case = Case::random(5);
    let mut refused = 0;
    for bytes in (0..40).map(|n: u32| 64 << (n / 2) | (n % 2) << (5 + n / 2)) {
        fake.set_memory_max(bytes.into());
        if let Err(error) = case.answers(&device) {
            let error = error.to_string();
            assert_eq!(error, "cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2)");
            refused += 1;
        }
        assert_eq!(fake.live(), before, "with {bytes} bytes");
    }
    assert!((2..40).contains(&refused), "some of it had room, all of it once: {refused}");
}

#[test]
fn an_image_that_is_none_is_refused() {
    let fake = Fake::load().unwrap();
    let mut longer = cuda_fake::image();
    longer[8] = 1;
    for image in [&[][..], b"not a fatbin", &cuda_fake::image()[..12], &longer] {
        let error = Device::open(0, image).unwrap_err();
        assert!(matches!(error, Error::IncompleteImage), "{error}");
    }
    fake.fail("cuModuleGetFunction", 500);
    let error = Device::open(0, &cuda_fake::image()).unwrap_err().to_string();
    assert!(error.starts_with("the kernel image lacks kv_gather_pages"), "{error}");
    let error = Device::open(7, &cuda_fake::image()).unwrap_err().to_string();
    assert_eq!(error, "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE (101)");
}

#[test]
fn what_a_kernel_would_trip_over_is_refused() {
    let _fake = Fake::load().unwrap();
    let device = device();
    let (mut live, row) = one_row(&device);
    let overlapping = [row, LiveRow { list_start: 2, ..row }];
    let mut two = device.live_rows(2).unwrap();
    let layout = device.set_live_rows(&mut two, &overlapping, POOL);
    assert!(matches!(layout, Err(Error::OverlappingRows)), "{layout:?}");
    let owner = LiveRow { session: reference::OWNER_SHARED, ..row };
    assert!(device.set_live_rows(&mut live, &[owner], POOL).is_err(), "no session has this number");
    assert!(device.set_live_rows(&mut live, &[row, row], POOL).is_err(), "room for one row");

    let (mut short, mut bad) = (device.alloc(2).unwrap(), device.alloc(1).unwrap());
    let r2t = filled(&device, &table(1)).unwrap();
    let entries = DeviceTable { entries: r2t.slice(), stride: LD as u64 };
    let error = device.gather_pages(entries, &live, &mut short, &mut bad).unwrap_err().to_string();
    assert_eq!(error, "gathered pages: 3 given, 2 is the limit");
    let mut marks = device.marks(POOL.npages - 1).unwrap();
    let staged = device.alloc(3).unwrap();
    assert!(device.mark(&live, &staged, &mut marks).is_err(), "a page has no place");
    // SAFETY: neither memory is read.
    unsafe {
        assert!(DeviceSlice::<i64>::foreign(12, 1).is_err(), "not aligned");
        assert!(DeviceSlice::<i64>::foreign(0, 1).is_err(), "nothing is at null");
        let odd = KvBuffer { address: r2t.address(), page_bytes: 24 };
        assert!(device.kv_buffers(&[odd], 1).is_err(), "not whole vectors");
    }
    assert!(LaunchShape::new(48, 1, 1).is_err() && LaunchShape::new(2048, 1, 1).is_err());
}

#[test]
fn the_threads_context_is_as_it_was() {
    let _fake = Fake::load().unwrap();
    let device = device();
    let now = || {
        let mut context = ptr::null_mut();
        // SAFETY: the driver is loaded, and the pointer refers to a local.
        assert_eq!(unsafe { sys::cuCtxGetCurrent(&raw mut context) } as u32, 0);
        context
    };
    assert!(now().is_null(), "this thread had none");
    let memory = filled(&device, &[1u32, 2, 3]).unwrap();
    assert_eq!(device.download(memory.slice()).unwrap(), [1, 2, 3]);
    assert!(device.record().unwrap().is_done().unwrap());
    drop((memory, device));
    assert!(now().is_null(), "and has none now");
}

#[test]
fn a_digest_tells_a_flipped_bit_and_swapped_layers() {
    let _fake = Fake::load().unwrap();
    let device = device();
    let page_bytes = 48;
    let bytes = |layer: u8| (0..480).map(|i| (i % 251) as u8 ^ layer).collect::<Vec<u8>>();
    let digest = |layers: [Vec<u8>; 2]| {
        let buffers = layers.map(|layer| (filled(&device, &layer).unwrap(), page_bytes));
        digests(&device, &buffers, 10, &[4, 4, 10]).unwrap()
    };
    let sound = digest([bytes(1), bytes(2)]);
    assert_eq!(sound[0], sound[1], "the same page twice");
    assert_eq!(sound[2], 0, "a page outside");
    assert_ne!(sound, digest([bytes(2), bytes(1)]), "layers are swapped");
    for bit in [0, 7, 100, 383] {
        let mut flipped = bytes(1);
        flipped[4 * page_bytes + bit / 8] ^= 1 << (bit % 8);
        assert_ne!(sound[0], digest([flipped, bytes(2)])[0], "bit {bit}");
    }
    let mut elsewhere = bytes(1);
    elsewhere[5 * page_bytes] ^= 1;
    assert_eq!(sound, digest([elsewhere, bytes(2)]), "another page is its own affair");
}

/// The same calls can audit an engine on a CPU. Only the fake driver allows this.
#[test]
fn host_memory_is_device_memory_where_there_is_no_gpu() {
    let _fake = Fake::load().unwrap();
    let device = device();
    let (live, _) = one_row(&device);
    let r2t = table(7);
    let (mut staged, mut bad) = (device.alloc(3).unwrap(), device.alloc(1).unwrap());
    // SAFETY: the table is in host memory, where this device works, and outlives the wait below.
    let entries = unsafe { DeviceSlice::foreign(r2t.as_ptr() as u64, r2t.len()).unwrap() };
    let table = DeviceTable { entries, stride: LD as u64 };
    device.gather_pages(table, &live, &mut staged, &mut bad).unwrap();
    assert_eq!(device.download(staged.slice()).unwrap(), [7, 3, 4]);
}

#[test]
fn a_timed_mark_measures() {
    let _fake = Fake::load().unwrap();
    let device = device();
    let begin = device.record_timed().unwrap();
    let from = filled(&device, &[7u64; 1000]).unwrap();
    let mut to = device.alloc(1000).unwrap();
    device.copy(from.slice(), &mut to).unwrap();
    let end = device.record_timed().unwrap();
    device.synchronize().unwrap();
    assert!(end.since(&begin).unwrap() > std::time::Duration::ZERO);
    assert_eq!(device.download(to.slice()).unwrap(), [7; 1000]);
}
