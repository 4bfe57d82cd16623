//! Measures each kernel's time against a device copy of as many bytes as the kernel moves.

use crate::{
    Options,
    answers::Answers,
    device::{self, median},
    synthetic::{Held, Size, Synthetic},
};
use kernels::cuda::{Device, DeviceBuffer, DeviceSlice, DeviceTable, KvBuffer};
use serde_json::json;
use std::time::Duration;

const ABOUT: &str = "kernels";

/// One kernel's time, and the bytes that it must move according to kernels/README.md.
struct Timed {
    kernel: &'static str,
    bytes: u64,
    took: Duration,
}

/// Measures every kernel on both pool sizes, with pages in order and scattered.
pub(crate) fn measure(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let device = device::open(options)?;
    let times = if options.fake { 2 } else { 20 };
    for size in Size::all(options.fake) {
        let mut by_order = vec![];
        for scattered in [false, true] {
            let synthetic = Synthetic::new(&device, size, Held::ByAll, scattered)?;
            by_order.push(kernels(&device, &synthetic, times)?);
        }
        let [ordered, scattered] = <[Vec<Timed>; 2]>::try_from(by_order).unwrap_or_default();
        for (one, two) in ordered.into_iter().zip(scattered) {
            let copy = copy(&device, one.bytes, times)?;
            let ratio = |took: Duration| took.as_secs_f64() / copy.as_secs_f64().max(1e-9);
            let us = |took: Duration| took.as_secs_f64() * 1e6;
            let text = format!(
                "{:.1} us in order, {:.1} us scattered: {:.1} and {:.1} copies of {:.1} MiB",
                us(one.took),
                us(two.took),
                ratio(one.took),
                ratio(two.took),
                one.bytes as f64 / 1048576.0,
            );
            let value = json!({
                "bytes": one.bytes, "copy_us": us(copy),
                "ordered_us": us(one.took), "scattered_us": us(two.took),
                "ordered_copies": ratio(one.took), "scattered_copies": ratio(two.took),
            });
            answers.add_figure(ABOUT, format!("{}, {}", one.kernel, size), text, value);
        }
    }
    digests_of_parts(&device, options, times, answers)
}

/// Measures digests of pages of one token whose bytes are in many buffers, as in an engine: one for
/// each layer's keys, and one for its values.
fn digests_of_parts(
    device: &Device,
    options: &Options,
    times: usize,
    answers: &mut Answers,
) -> anyhow::Result<()> {
    const BUFFERS: u64 = 64;
    let pages: u32 = if options.fake { 64 } else { 1 << 16 };
    // The keys of one token in one layer: one head of 128 values in bfloat16, or eight of them.
    for page_bytes in [256, 2048] {
        let one = u64::from(pages) * page_bytes;
        let kv: DeviceBuffer<u8> = device.alloc(usize::try_from(one * BUFFERS)?)?;
        let buffers: Vec<KvBuffer> = (0..BUFFERS)
            .map(|number| KvBuffer { address: kv.address() + number * one, page_bytes })
            .collect();
        // SAFETY: `kv` has that many bytes for each buffer, and outlives the digests.
        let on_device = unsafe { device.kv_buffers(&buffers, pages)? };
        let mut numbers = device.alloc(pages as usize)?;
        device.upload(&mut numbers, &(0..pages).collect::<Vec<u32>>())?;
        let mut digests = device.alloc(pages as usize)?;
        let took = median(device, times, || {
            device.page_digest(&on_device, numbers.slice(), &mut digests)
        })?;
        let copy = copy(device, one * BUFFERS, times)?;
        let copies = took.as_secs_f64() / copy.as_secs_f64().max(1e-9);
        let us = took.as_secs_f64() * 1e6;
        let mib = (one * BUFFERS) as f64 / 1048576.0;
        let text = format!("{us:.1} us: {copies:.1} copies of {mib:.1} MiB");
        let what = format!("kv_digest_pages, {pages} pages in {BUFFERS} buffers of {page_bytes} B");
        answers.add_figure(ABOUT, what, text, json!({ "us": us, "copies": copies }));
    }
    Ok(())
}

/// Times a copy that moves `bytes`: half are read, half are written.
fn copy(device: &Device, bytes: u64, times: usize) -> anyhow::Result<Duration> {
    let half = usize::try_from(bytes / 2)?.max(16);
    let (from, mut to): (DeviceBuffer<u8>, DeviceBuffer<u8>) =
        (device.alloc(half)?, device.alloc(half)?);
    median(device, times, || device.copy(from.slice(), &mut to))
}

fn kernels(device: &Device, on: &Synthetic, times: usize) -> anyhow::Result<Vec<Timed>> {
    let pool = on.pool;
    let (refs, pages) = (on.refs() as u64, u64::from(pool.npages));
    let table = DeviceTable { entries: on.entries.slice(), stride: on.stride.into() };
    let mut live = device.live_rows(on.rows.len())?;
    device.set_live_rows(&mut live, &on.rows, pool)?;
    let mut staged = device.alloc(on.refs())?;
    let mut bad = device.alloc(1)?;
    let mut marks = device.marks(pool.npages)?;
    let (mut free, mut tree) = (device.page_set(pool)?, device.page_set(pool)?);
    let [mut claimed, mut referenced, mut shared] = [
        device.alloc(pool.bitmap_words())?,
        device.alloc(pool.bitmap_words())?,
        device.alloc(pool.bitmap_words())?,
    ];
    let mut sessions = device.alloc(live.session_numbers_end())?;
    let mut classified = device.alloc(1)?;
    let kv = on.kv_buffers(device)?;
    let mut digests = device.alloc(on.refs())?;
    let mut timed = vec![];
    let mut add = |kernel, bytes, took| timed.push(Timed { kernel, bytes, took });

    // Each entry costs a sector of memory, unless the next entry is in the same sector.
    let sector = if pool.page_shift < 3 { 4 << pool.page_shift } else { 32 };
    let took = median(device, times, || device.gather_pages(table, &live, &mut staged, &mut bad))?;
    add("kv_gather_pages", (sector + 4) * refs, took);
    let took = median(device, times, || device.mark(&live, &staged, &mut marks))?;
    add("kv_mark", 8 * pages + 4 * refs, took);
    let mut list = |ids: DeviceSlice<'_, i64>, shift| {
        median(device, times, || {
            device.clear_set(&mut free)?;
            device.list_to_set(ids, shift, pool, &mut free)
        })
    };
    add("kv_list_to_bitmap, free list", 8 * pages, list(on.free.slice(), 0)?);
    let slots = on.tree.len() as u64;
    add("kv_list_to_bitmap, tree", 8 * slots, list(on.tree.slice(), pool.page_shift)?);
    device.list_to_set(on.tree.slice(), pool.page_shift, pool, &mut tree)?;
    let took = median(device, times, || {
        device.session_pages(&live, &staged, &marks, &tree, &mut claimed, &mut sessions)
    })?;
    add("kv_session", 12 * refs, took);
    let took =
        median(device, times, || device.ref_bitmap(&marks, pool, &mut referenced, &mut shared))?;
    add("kv_ref_bitmap", 8 * pages + pages / 4, took);
    let took = median(device, times, || {
        device.classify(&free, &tree, &referenced, &shared, pool, &mut classified)
    })?;
    add("kv_classify", pages / 2, took);
    let took = median(device, times, || device.page_digest(&kv, staged.slice(), &mut digests))?;
    add("kv_digest_pages", refs * on.size.page_bytes, took);
    Ok(timed)
}
