//! Random pools, sound and corrupt, and their results by the reference and by a device.

use fastrand::Rng;
use kernels::{
    cuda::{
        ClassifyResult, Device, DeviceBuffer, DevicePageSet, DeviceTable, DeviceValue, Error,
        KvBuffer, PoolSize,
    },
    reference::{self, KvBytes, LiveRow, OWNER_SHARED, SessionPages},
};

/// Room for pages in a row of the table.
const ROW_PAGES: u32 = 64;

/// The tables of one engine at one moment.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) pool: PoolSize,
    pub(crate) ld: usize,
    pub(crate) r2t: Vec<i32>,
    pub(crate) rows: Vec<LiveRow>,
    /// The rows that did not change; only these are counted.
    pub(crate) kept: Vec<LiveRow>,
    pub(crate) sessions: usize,
    /// The free list, as page ids.
    pub(crate) free: Vec<i64>,
    /// The radix tree's list, as token slots.
    pub(crate) tree: Vec<i64>,
    pub(crate) kv: Vec<Kv>,
    pub(crate) sealed: Vec<u32>,
}

/// The content of a KV buffer.
#[derive(Debug)]
pub(crate) struct Kv {
    pub(crate) page_bytes: usize,
    pub(crate) bytes: Vec<u8>,
}

/// All results of the accounting functions.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answers {
    pub(crate) staged: Vec<u32>,
    pub(crate) bad: u64,
    pub(crate) refcnt: Vec<u32>,
    pub(crate) owner: Vec<u32>,
    pub(crate) sessions: Vec<SessionPages>,
    pub(crate) free: Set,
    pub(crate) tree: Set,
    pub(crate) referenced: Vec<u32>,
    pub(crate) shared: Vec<u32>,
    pub(crate) classified: ClassifyResult,
    pub(crate) digests: Vec<u64>,
}

/// A bitmap of pages, and the number of faults in its list.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Set {
    pub(crate) words: Vec<u32>,
    pub(crate) fault_counts: [u64; 2],
}

impl Case {
    pub(crate) fn random(seed: u64) -> Case {
        let mut rng = Rng::with_seed(seed);
        let page_shift = rng.u32(0..=6);
        let npages = if rng.u32(0..4) == 0 { rng.u32(1..70) } else { rng.u32(70..4000) };
        let pool = PoolSize { page_shift, npages };
        let sessions = rng.u32(1..=8);
        let ld = (rng.u32(1..=ROW_PAGES) as usize) << page_shift;
        let mut lists: Vec<Vec<u32>> = Vec::new();
        for _ in 0..rng.u32(0..=24) {
            let list = page_list(&mut rng, npages, &lists, narrow(ld >> page_shift));
            lists.push(list);
        }
        let mut r2t = vec![0; ld * (lists.len() + 2)];
        let mut rows: Vec<LiveRow> = lists
            .iter()
            .zip(0..)
            .map(|(list, row)| {
                for (i, &page) in list.iter().enumerate() {
                    let slot = (page << page_shift).cast_signed();
                    r2t[row as usize * ld + (i << page_shift)] = slot;
                }
                let slack = rng.u32(0..1 << page_shift);
                let len = (narrow(list.len()) << page_shift).saturating_sub(slack);
                LiveRow { row, len, session: rng.u32(0..sessions), list_start: 0 }
            })
            .collect();
        corrupt(&mut rng, &mut r2t, &mut rows, ld, pool);
        reference::lay_out(&mut rows, page_shift);
        let kept = rows.iter().copied().filter(|_| rng.u32(0..8) > 0).collect();
        let (free, tree) = (free_list(&mut rng, pool), tree_list(&mut rng, pool, &lists));
        let kv = (0..rng.u32(0..4)).map(|_| Kv::random(&mut rng, npages.min(40))).collect();
        let sealed = (0..rng.u32(0..6)).map(|_| rng.u32(0..48)).collect();
        let sessions = sessions as usize;
        Case { pool, ld, r2t, rows, kept, sessions, free, tree, kv, sealed }
    }

    /// Returns the results of the scalar reference.
    pub(crate) fn expected(&self) -> Answers {
        let PoolSize { page_shift, npages } = self.pool;
        let (staged, bad) =
            reference::gather_pages(&self.r2t, self.ld, &self.rows, page_shift, npages);
        let marks = reference::mark(&self.kept, &staged, page_shift, npages);
        let free = reference::slots_to_set(self.free.iter().copied(), 0, npages);
        let tree = reference::slots_to_set(self.tree.iter().copied(), page_shift, npages);
        let by = reference::session_pages(&self.kept, &staged, &marks, &tree, page_shift);
        let sessions = (0..narrow(self.sessions)).map(|s| by.get(&s).copied().unwrap_or_default());
        let kv: Vec<KvBytes<'_>> = self
            .kv
            .iter()
            .map(|kv| KvBytes { bytes: &kv.bytes, page_bytes: kv.page_bytes })
            .collect();
        Answers {
            bad,
            sessions: sessions.collect(),
            referenced: words(marks.refcnt.iter().map(|&n| n > 0)),
            shared: words(marks.owner.iter().map(|&owner| owner == OWNER_SHARED)),
            classified: ClassifyResult {
                classes: reference::class_counts(&free, &marks, &tree),
                free_runs: free.runs(),
                aliased_pages: marks.aliased_pages(&tree),
            },
            free: Set::from_reference(&free),
            tree: Set::from_reference(&tree),
            refcnt: marks.refcnt,
            owner: marks.owner,
            digests: reference::page_digest(&kv, &self.sealed),
            staged,
        }
    }

    /// Returns the results of the kernels.
    pub(crate) fn answers(&self, device: &Device) -> Result<Answers, Error> {
        let pool = self.pool;
        let r2t = filled(device, &self.r2t)?;
        let table = DeviceTable { entries: r2t.slice(), stride: self.ld as u64 };
        let mut live = device.live_rows(self.rows.len())?;
        device.set_live_rows(&mut live, &self.rows, pool)?;
        let mut staged = device.alloc(live.page_list_len())?;
        let mut bad = device.alloc(1)?;
        device.gather_pages(table, &live, &mut staged, &mut bad)?;
        let mut kept = device.live_rows(self.kept.len())?;
        device.set_live_rows(&mut kept, &self.kept, pool)?;
        let mut marks = device.marks(pool.npages)?;
        device.mark(&kept, &staged, &mut marks)?;
        let free = self.set(device, &self.free, 0)?;
        let tree = self.set(device, &self.tree, pool.page_shift)?;
        let (mut claimed, mut sessions) =
            (device.alloc(pool.bitmap_words())?, device.alloc(self.sessions)?);
        device.session_pages(&kept, &staged, &marks, &tree, &mut claimed, &mut sessions)?;
        let (mut referenced, mut shared) =
            (device.alloc(pool.bitmap_words())?, device.alloc(pool.bitmap_words())?);
        device.ref_bitmap(&marks, pool, &mut referenced, &mut shared)?;
        let mut classified = device.alloc(1)?;
        device.classify(&free, &tree, &referenced, &shared, pool, &mut classified)?;
        Ok(Answers {
            staged: device.download(staged.slice())?,
            bad: device.download(bad.slice())?[0],
            refcnt: device.download(marks.refcnt.slice())?,
            owner: device.download(marks.owner.slice())?,
            sessions: device.download(sessions.slice())?,
            free: Set::from_device(device, &free)?,
            tree: Set::from_device(device, &tree)?,
            referenced: device.download(referenced.slice())?,
            shared: device.download(shared.slice())?,
            classified: device.download(classified.slice())?[0],
            digests: self.digests(device)?,
        })
    }

    fn set(&self, device: &Device, ids: &[i64], shift: u32) -> Result<DevicePageSet, Error> {
        let mut set = device.page_set(self.pool)?;
        // Adds the list in two halves, because a set accumulates lists.
        let ids = filled(device, ids)?;
        let half = ids.len() / 2;
        for part in [ids.slice().part(0, half)?, ids.slice().part(half, ids.len() - half)?] {
            device.list_to_set(part, shift, self.pool, &mut set)?;
        }
        Ok(set)
    }

    fn digests(&self, device: &Device) -> Result<Vec<u64>, Error> {
        let contents: Vec<(DeviceBuffer<u8>, usize)> = self
            .kv
            .iter()
            .map(|kv| Ok((filled(device, &kv.bytes)?, kv.page_bytes)))
            .collect::<Result<_, Error>>()?;
        digests(device, &contents, self.kv_pages(), &self.sealed)
    }

    /// Returns the number of pages that fit in every KV buffer.
    fn kv_pages(&self) -> u32 {
        self.kv.iter().map(|kv| narrow(kv.bytes.len() / kv.page_bytes)).min().unwrap_or(u32::MAX)
    }
}

impl Kv {
    fn random(rng: &mut Rng, pages: u32) -> Kv {
        let page_bytes = 16 * rng.usize(1..40);
        let bytes = (0..page_bytes * pages as usize).map(|_| rng.u8(..)).collect();
        Kv { page_bytes, bytes }
    }
}

impl Set {
    fn from_reference(set: &reference::PageSet) -> Set {
        let words = words(set.has.iter().copied());
        Set { words, fault_counts: [set.duplicates, set.outside_pool] }
    }

    fn from_device(device: &Device, set: &DevicePageSet) -> Result<Set, Error> {
        let counters = device.download(set.fault_counts.slice())?;
        let fault_counts = counters.try_into().expect("a set has two counters");
        Ok(Set { words: device.download(set.bitmap.slice())?, fault_counts })
    }
}

/// Allocates device memory with these values.
pub(crate) fn filled<T: DeviceValue>(
    device: &Device,
    values: &[T],
) -> Result<DeviceBuffer<T>, Error> {
    let mut buffer = device.alloc(values.len())?;
    device.upload(&mut buffer, values)?;
    Ok(buffer)
}

/// Returns the digests of the pages `sealed` over buffers, each given with its bytes per page.
pub(crate) fn digests(
    device: &Device,
    contents: &[(DeviceBuffer<u8>, usize)],
    npages: u32,
    sealed: &[u32],
) -> Result<Vec<u64>, Error> {
    let buffers: Vec<KvBuffer> = contents
        .iter()
        .map(|(bytes, page)| KvBuffer { address: bytes.address(), page_bytes: *page as u64 })
        .collect();
    // SAFETY: the buffers are as long as their pages, and outlive the download below.
    let kv = unsafe { device.kv_buffers(&buffers, npages)? };
    let pages = filled(device, sealed)?;
    let mut out = device.alloc(sealed.len())?;
    device.page_digest(&kv, pages.slice(), &mut out)?;
    device.download(out.slice())
}

fn narrow(small: usize) -> u32 {
    u32::try_from(small).expect("pools are small here")
}

/// Returns bits as the words of a bitmap.
fn words(bits: impl Iterator<Item = bool>) -> Vec<u32> {
    let bits: Vec<bool> = bits.collect();
    let word = |bits: &[bool]| bits.iter().rev().fold(0, |word, &bit| word << 1 | u32::from(bit));
    bits.chunks(32).map(word).collect()
}

/// Returns a row's pages: runs and single pages, some repeated, some shared with an earlier row.
fn page_list(rng: &mut Rng, npages: u32, others: &[Vec<u32>], pages_max: u32) -> Vec<u32> {
    let length = rng.u32(0..=pages_max) as usize;
    let mut list: Vec<u32> = Vec::new();
    if !others.is_empty() && rng.u32(0..3) == 0 {
        let other = &others[rng.usize(0..others.len())];
        list.extend(&other[..rng.usize(0..=other.len().min(length))]);
    }
    while list.len() < length {
        let next = match (list.last(), rng.u32(0..12)) {
            (Some(_), 0) => list[rng.usize(0..list.len())],
            (Some(&last), 1..=7) => last + 1,
            _ => rng.u32(0..npages),
        };
        list.push(next.clamp(1, npages.max(2) - 1));
    }
    list
}

/// Sometimes plants an entry, a length or a row number that no sound engine has.
fn corrupt(rng: &mut Rng, r2t: &mut [i32], rows: &mut [LiveRow], ld: usize, pool: PoolSize) {
    if r2t.is_empty() || rng.bool() {
        return;
    }
    for _ in 0..rng.u32(1..4) {
        let entry = rng.usize(0..r2t.len()) >> pool.page_shift << pool.page_shift;
        let outside = (pool.npages << pool.page_shift).cast_signed();
        let odd = r2t[entry].wrapping_add(1);
        let values = [0, -5, i32::MIN, i32::MAX, outside, outside - 1, odd, 1];
        r2t[entry] = values[rng.usize(0..values.len())];
    }
    if !rows.is_empty() {
        let row = &mut rows[rng.usize(0..rows.len())];
        match rng.u32(0..4) {
            0 => row.row += 1000,
            1 => row.len = narrow(ld) + rng.u32(0..200),
            _ => {}
        }
    }
}

fn free_list(rng: &mut Rng, pool: PoolSize) -> Vec<i64> {
    let mut list: Vec<i64> = Vec::new();
    let npages = i64::from(pool.npages);
    let parts = if rng.u32(0..16) == 0 { 0 } else { rng.u32(1..60) };
    for _ in 0..parts {
        let start = rng.i64(0..npages);
        list.extend((start..npages).take(rng.usize(0..40)));
        match rng.u32(0..20) {
            0 => list.push(-rng.i64(1..100)),
            1 => list.push(npages + rng.i64(0..100)),
            2 => list.push(rng.i64(..)),
            _ => {}
        }
    }
    rng.shuffle(&mut list);
    list
}

/// Returns the token slots of whole pages, of some rows and of none; rarely with a stray slot.
fn tree_list(rng: &mut Rng, pool: PoolSize, lists: &[Vec<u32>]) -> Vec<i64> {
    if rng.u32(0..16) == 0 {
        return vec![];
    }
    let mut pages: Vec<u32> =
        lists.iter().flatten().copied().filter(|_| rng.u32(0..3) == 0).collect();
    pages.extend((0..rng.u32(0..20)).map(|_| rng.u32(0..pool.npages + 2)));
    let size = 1i64 << pool.page_shift;
    let slots =
        pages.iter().flat_map(|&page| i64::from(page) * size..i64::from(page) * size + size);
    let mut list: Vec<i64> = slots.filter(|_| rng.u32(0..100) > 0).collect();
    list.extend((0..rng.u32(0..3)).map(|_| rng.i64(-3..5000)));
    list
}
