//! Audits across two processes: an engine rewrites rows while an agent copies them.
//!
//! Both use the fake driver. A row may be in a report only if its pages match its version. Agents
//! that check less than [`RemoteAuditor`] report such torn rows, which shows that the check works.
//! The engine is this program again, in a role. Run `cargo test -p kernels --test remote`.

#![expect(clippy::print_stdout, reason = "a test without the harness reports by itself")]

use cuda_fake::{ALL_STREAMS, Fake};
use fastrand::Rng;
use kernels::{
    account::{Accountant, Pool, RequestTable, Snapshot, SnapshotRow, Stream},
    cuda::{self, Device, DeviceBuffer, ExportedRange, ImportedRange},
    ipc::{Error, Publisher, RemoteAuditor, RemoteReport},
    table::{self, TableReader, TableRow},
};
use std::{
    collections::BTreeMap,
    env, hint,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};
use tempfile::TempDir;

const ROLE: &str = "BERTH_TEST_ENGINE";
const ROWS: u32 = 32;
const ROW_PAGES: u32 = 128;
const PAGES: u32 = 1 + 2 * ROWS * ROW_PAGES;
const TABLES: u32 = 8;
const AUDITS: usize = 400;

fn main() {
    if let Some(path) = env::var_os(ROLE) {
        return engine(Path::new(&path));
    }
    let checks: [(&str, fn()); 5] = [
        ("an_idle_engine_is_told_exactly", idle),
        ("a_row_rewritten_before_it_was_copied_is_left_out", rewritten),
        ("a_row_half_written_while_it_was_copied_is_left_out", half_written),
        ("no_torn_row_is_believed_while_the_engine_runs", running),
        ("memory_that_cannot_be_shared_is_refused", unshared),
    ];
    for (name, check) in checks {
        check();
        println!("test {name} ... ok");
    }
}

// A row's content is a function of row, version and place.

fn page(row: u32, version: u64, place: u32) -> u32 {
    let mut bits = (u64::from(row) << 48 ^ version).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ bits >> 29 ^ u64::from(place) << 7).wrapping_mul(0x94D0_49BB_1331_11EB);
    1 + 2 * (row * ROW_PAGES + place) + u32::from(bits >> 63 == 1)
}

fn tokens(row: u32, version: u64) -> u32 {
    ROW_PAGES - u32::try_from((version + u64::from(row)) % 5).expect("small")
}

/// Returns the page references and the runs of pages that an audit must report for the row.
fn account(row: u32, version: u64) -> (u64, u64) {
    let pages: Vec<u32> = (0..tokens(row, version)).map(|i| page(row, version, i)).collect();
    let runs = 1 + pages.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
    (pages.len() as u64, runs as u64)
}

/// Returns the number of rows in a report that don't match the version in their key.
fn torn(audited: &RemoteReport) -> usize {
    let torn = audited.report.sessions.iter().filter(|line| {
        let version = audited.keys[line.number as usize];
        (line.refs, line.runs) != account(line.number, version)
    });
    torn.count()
}

// The engine.

/// An engine's table on the device, the rows' versions, and the publisher.
struct Engine {
    entries: DeviceBuffer<i32>,
    versions: Vec<u64>,
    publisher: Publisher,
}

impl Engine {
    fn write(&mut self, row: u32, places: std::ops::Range<u32>) {
        let version = self.versions[row as usize];
        for place in places {
            let slot = page(row, version, place).cast_signed();
            let at = (row * ROW_PAGES + place) as usize;
            // SAFETY: this driver's device memory is host memory, and the entry is in the table.
            unsafe { (self.entries.address() as *mut i32).add(at).write_volatile(slot) };
        }
    }

    fn rows(&self) -> Vec<TableRow> {
        let row = |(row, &version): (u32, &u64)| TableRow {
            row,
            len: tokens(row, version),
            session: row,
            version,
            key: version,
        };
        (0..).zip(&self.versions).map(row).collect()
    }

    fn begin(&mut self) {
        // SAFETY: the default stream always exists.
        unsafe { self.publisher.begin_step(0).expect("the driver works") };
    }

    fn done(&mut self) {
        let rows = self.rows();
        // SAFETY: the default stream always exists.
        unsafe { self.publisher.end_step(&rows, 0).expect("the driver works") };
    }

    /// Runs a step that rewrites these rows.
    fn step(&mut self, rows: &[u32]) {
        self.begin();
        for &row in rows {
            self.versions[row as usize] += 1;
            self.write(row, 0..ROW_PAGES);
        }
        self.done();
    }
}

fn engine(path: &Path) {
    let _fake = Fake::load().expect("cargo has built the driver");
    let open = || Device::open(0, &cuda_fake::image()).expect("the driver has a device");
    let device = open();
    let entries: DeviceBuffer<i32> =
        device.alloc((ROWS * ROW_PAGES) as usize).expect("there is room");
    device.synchronize().expect("the driver works");
    let pool = pool(entries.address());
    let publisher =
        Publisher::device(&pool, open(), path, TABLES, ROWS).expect("device memory can be shared");
    let mut engine = Engine { entries, versions: vec![1; ROWS as usize], publisher };
    engine.begin();
    (0..ROWS).for_each(|row| engine.write(row, 0..ROW_PAGES));
    engine.done();
    println!("ready");
    // Read line by line, so that standard input isn't locked while the engine runs.
    let next = || {
        let mut order = String::new();
        std::io::stdin().read_line(&mut order).expect("the agent writes lines");
        Some(order).filter(|order| !order.is_empty())
    };
    while let Some(order) = next() {
        match order.trim() {
            "rewrite" => engine.step(&[7]),
            "half" => {
                engine.begin();
                engine.versions[7] += 1;
                engine.write(7, 0..ROW_PAGES / 2);
            }
            "other half" => {
                engine.write(7, ROW_PAGES / 2..ROW_PAGES);
                engine.done();
            }
            "run" => return run(&mut engine),
            other => panic!("{other} is no order"),
        }
        println!("done");
    }
}

/// Rewrites rows until the agent closes the pipe.
fn run(engine: &mut Engine) {
    let hung_up = std::thread::spawn(|| std::io::stdin().lines().for_each(drop));
    let mut random = Rng::with_seed(1);
    println!("done");
    while !hung_up.is_finished() {
        let rows: Vec<u32> = (0..random.usize(0..3)).map(|_| random.u32(0..ROWS)).collect();
        engine.step(&rows);
        // Some steps change nothing for a while.
        (0..random.u32(0..3000)).for_each(|_| hint::spin_loop());
    }
}

fn pool(addr: u64) -> Pool {
    let table = RequestTable { addr, rows: ROWS, stride: ROW_PAGES };
    // SAFETY: the callers keep the entries longer than the pool.
    unsafe { Pool::new(1, PAGES, table, vec![]).expect("a sound pool") }
}

// The agent.

/// An engine process and the folder of its table.
struct Other {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    folder: TempDir,
}

impl Other {
    fn start() -> Self {
        let folder = TempDir::new_in("/dev/shm").expect("there is memory for files");
        let mut process = Command::new(env::current_exe().expect("a running test has a path"))
            .env(ROLE, folder.path().join("rows"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be run again");
        let orders = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("it was piped"));
        let mut other = Self { process, orders, answers, folder };
        other.answer("ready");
        other
    }

    fn answer(&mut self, want: &str) {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the engine answers");
        assert_eq!(line.trim(), want);
    }

    fn order(&mut self, order: &str) {
        let orders = self.orders.as_mut().expect("the agent hangs up last");
        writeln!(orders, "{order}").expect("the engine listens");
        self.answer("done");
    }

    fn remote(&self) -> RemoteAuditor {
        RemoteAuditor::open(&self.folder.path().join("rows"), device())
            .expect("the memory is shared")
    }

    fn lax(&self, look: Look) -> Lax {
        Lax::open(&self.folder.path().join("rows"), look)
    }

    /// Closes the pipe, and waits until the engine has exited.
    fn end(mut self) {
        drop(self.orders.take());
        assert!(self.process.wait().expect("it is our child").success());
    }
}

fn device() -> Device {
    Device::open(0, &cuda_fake::image()).expect("the driver has a device")
}

fn finish(remote: &mut RemoteAuditor) -> RemoteReport {
    loop {
        if let Some(audited) = remote.poll().expect("the driver works") {
            return audited;
        }
        std::thread::yield_now();
    }
}

/// The missing check of an agent that checks less than [`RemoteAuditor`].
#[derive(Clone, Copy)]
enum Look {
    /// The agent trusts its copy without looking at versions.
    Never,
    /// The agent compares versions with the newest step done, not with the newest step begun.
    AtDone,
}

/// An agent like [`RemoteAuditor`] with a weaker check.
struct Lax {
    look: Look,
    accountant: Accountant,
    _imported: ImportedRange,
    reader: TableReader,
    rows: Vec<TableRow>,
}

impl Lax {
    fn open(path: &Path, look: Look) -> Self {
        let reader = TableReader::open(path).expect("the engine has made it");
        let export = reader.facts().export.clone().expect("the memory is shared");
        let (handle, offset, bytes) = (export.handle, export.offset, export.bytes);
        let device = device();
        let imported =
            device.import(&ExportedRange { handle, offset, bytes }).expect("it is exported");
        // SAFETY: only the address is taken.
        let addr = unsafe { imported.slice::<i32>() }.expect("it is aligned").address();
        let accountant = Accountant::device(pool(addr), device).expect("there is room");
        Self { look, accountant, _imported: imported, reader, rows: vec![] }
    }

    fn begin(&mut self) {
        self.rows = self.reader.table(self.reader.done_epoch()).expect("the engine waits for us");
        let row = |row: &TableRow| SnapshotRow {
            row: row.row,
            len: row.len,
            session: row.session,
            sealed_tokens: 0,
            protected_tokens: None,
            version: row.version,
        };
        let rows: Vec<SnapshotRow> = self.rows.iter().map(row).collect();
        let keys: Vec<u64> = self.rows.iter().map(|row| row.key).collect();
        let snapshot = Snapshot {
            rows: &rows,
            keys: &keys,
            free: &[],
            tree: None,
            is_complete: false,
            digest_pages_max: 0,
        };
        self.accountant.begin(&snapshot, Stream::DEFAULT).expect("the driver works");
    }

    fn finish(&mut self) -> RemoteReport {
        while !self.accountant.is_ready().expect("the driver works") {}
        let now = match self.look {
            Look::Never => self.rows.clone(),
            Look::AtDone => {
                self.reader.table(self.reader.done_epoch()).expect("the engine waits for us")
            }
        };
        let now: Vec<(u32, u64)> = now.iter().map(|row| (row.row, row.version)).collect();
        let report = self.accountant.finish(&now).expect("the driver works");
        RemoteReport { report, keys: self.rows.iter().map(|row| row.key).collect(), epoch: 0 }
    }
}

// The checks.

fn idle() {
    let _fake = Fake::load().expect("cargo has built the driver");
    let other = Other::start();
    let mut remote = other.remote();
    for _ in 0..3 {
        remote.begin().expect("a step is done");
        let audited = finish(&mut remote);
        assert_eq!((audited.epoch, audited.report.rows, audited.report.rows_changed), (1, ROWS, 0));
        assert_eq!((torn(&audited), audited.report.fault_count()), (0, 0));
        let held: u64 = (0..ROWS).map(|row| account(row, 1).0).sum();
        assert_eq!(audited.report.held_pages, held);
    }
    other.end();
    assert!(matches!(remote.begin(), Err(Error::Table(table::Error::Closed))));
}

fn rewritten() {
    let fake = Fake::load().expect("cargo has built the driver");
    let mut other = Other::start();
    let (mut remote, mut naive) = (other.remote(), other.lax(Look::Never));
    fake.hold(ALL_STREAMS);
    remote.begin().expect("a step is done");
    naive.begin();
    assert_eq!(remote.poll().expect("the driver works"), None, "nothing was copied");
    other.order("rewrite");
    fake.release(ALL_STREAMS);
    let audited = finish(&mut remote);
    assert_eq!((audited.report.rows, audited.report.rows_changed), (ROWS - 1, 1));
    assert_eq!(torn(&audited), 0);
    assert_eq!(torn(&naive.finish()), 1, "the check sees who doesn't look");
    other.end();
}

fn half_written() {
    let _fake = Fake::load().expect("cargo has built the driver");
    let mut other = Other::start();
    let (mut remote, mut hasty) = (other.remote(), other.lax(Look::AtDone));
    other.order("half");
    remote.begin().expect("a step is done");
    hasty.begin();
    assert_eq!(remote.poll().expect("the driver works"), None, "the step's table isn't there");
    assert_eq!(torn(&hasty.finish()), 1, "the check sees who looks at what is done");
    other.order("other half");
    let audited = finish(&mut remote);
    assert_eq!((audited.report.rows, audited.report.rows_changed), (ROWS - 1, 1));
    assert_eq!(torn(&audited), 0);
    other.end();
}

fn running() {
    let _fake = Fake::load().expect("cargo has built the driver");
    let mut other = Other::start();
    let mut remote = other.remote();
    other.order("run");
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for audit in 0..AUDITS {
        loop {
            match remote.begin() {
                Ok(()) => break,
                // The engine overwrote the ring during the read: try again.
                Err(Error::Overrun) => *sums.entry("overruns").or_default() += 1,
                Err(error) => panic!("{error}"),
            }
        }
        let audited = finish(&mut remote);
        assert_eq!(torn(&audited), 0, "audit {audit} of epoch {}", audited.epoch);
        let report = &audited.report;
        assert_eq!(report.rows + report.rows_changed, ROWS, "audit {audit}");
        *sums.entry("rows kept").or_default() += u64::from(report.rows);
        *sums.entry("rows moved").or_default() += u64::from(report.rows_changed);
        *sums.entry("exact").or_default() += u64::from(report.rows_changed == 0);
    }
    println!("{AUDITS} audits while the engine ran: {sums:?}");
    other.end();
}

fn unshared() {
    let fake = Fake::load().expect("cargo has built the driver");
    let folder = TempDir::new_in("/dev/shm").expect("there is memory for files");
    let path = folder.path().join("rows");
    let entries: DeviceBuffer<i32> =
        device().alloc((ROWS * ROW_PAGES) as usize).expect("there is room");
    let pool = pool(entries.address());
    fake.mark_vmm(entries.address());
    let refused = Publisher::device(&pool, device(), &path, TABLES, ROWS);
    let vmm = |error: &cuda::Error| matches!(error, cuda::Error::VmmBacked(_));
    assert!(matches!(refused, Err(Error::Unshared(Some(ref error))) if vmm(error)));
    let host = Publisher::host(&pool, &path, TABLES, ROWS).expect("the folder is ours");
    assert!(matches!(RemoteAuditor::open(&path, device()), Err(Error::Unshared(None))));
    drop(host);
}
