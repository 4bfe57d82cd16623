//! Audits of random engines: planted faults are found and named, and there are no false findings.
//!
//! What an audit can't know must be absent from its report. Every test runs in host memory and on a
//! fake device.

#[path = "accountant/engine.rs"]
mod engine;

use cuda_fake::Fake;
use engine::Engine;
use fastrand::Rng;
use kernels::{
    account::{Accountant, Error, IdList, Snapshot, Stream},
    cuda::Device,
    report::{FaultKind, Finding, PagesByOwner, Report, Scope},
};
use std::collections::BTreeSet;

const SEEDS: u64 = 40;

#[derive(Clone, Copy, Debug)]
enum Place {
    Host,
    Device,
}

impl Place {
    fn open(self, engine: &Engine) -> Accountant {
        match self {
            Self::Host => Accountant::host(engine.pool()),
            Self::Device => {
                let device = Device::open(0, &cuda_fake::image()).expect("the driver has a device");
                Accountant::device(engine.pool(), device).expect("there is room on the device")
            }
        }
    }
}

/// Runs `test` with random engines on the host and on the device. The text it gets names seed and
/// place.
fn everywhere(test: impl Fn(&str, Place, &mut Engine, &mut Rng)) {
    let _fake = Fake::load().expect("cargo has built the driver");
    for seed in 0..SEEDS {
        for place in [Place::Host, Place::Device] {
            let mut random = Rng::with_seed(seed ^ 0xA0D1);
            let name = format!("seed {seed}, {place:?}");
            test(&name, place, &mut Engine::random(seed), &mut random);
        }
    }
}

fn finding(page_or_entry: impl Into<i64>, sessions: &[u32]) -> Finding {
    let mut sessions = sessions.to_vec();
    sessions.sort_unstable();
    let session_count = u32::try_from(sessions.len()).expect("small");
    Finding { page_or_entry: page_or_entry.into(), sessions, session_count }
}

/// Asserts that the report has exactly the findings `want` of one kind, and none of other kinds.
fn assert_only(name: &str, report: &Report, kind: FaultKind, want: &[Finding]) {
    let found = report.findings_of(kind).unwrap_or_else(|| panic!("{name}: {kind:?} is answered"));
    assert_eq!(
        (found.count, found.first_faults.as_slice()),
        (want.len() as u64, want),
        "{name}: {kind:?}"
    );
    assert_eq!(report.fault_count(), want.len() as u64, "{name}: {:?}", report.findings);
}

#[test]
fn a_sound_pool_is_told_exactly() {
    everywhere(|name, place, engine, _| {
        let report = engine.audit(&mut place.open(engine));
        assert_eq!((report.scope, report.rows_changed), (Scope::Complete, 0), "{name}");
        assert_eq!(report.rows as usize, engine.rows.len(), "{name}");
        assert_eq!(
            (report.fault_count(), report.findings.len()),
            (0, FaultKind::ALL.len()),
            "{name}"
        );
        let held: BTreeSet<u32> = engine.row_pages.iter().flatten().copied().collect();
        let used = engine.tree_pages.iter().filter(|page| held.contains(page)).count();
        let free = engine.free.iter().map(Vec::len).sum::<usize>();
        let want = PagesByOwner {
            free: free as u64,
            private: (held.len() - used) as u64,
            cached: (engine.tree_pages.len() - used) as u64,
            cached_in_use: used as u64,
            leaked: 0,
            corrupt: 0,
        };
        assert_eq!(
            (report.pages_by_owner, report.held_pages),
            (Some(want), held.len() as u64),
            "{name}"
        );
        assert_eq!(report.free.pages, free as u64, "{name}");
        for (at, line) in report.sessions.iter().enumerate() {
            let (row, pages) = (&engine.rows[at], &engine.row_pages[at]);
            let private = engine.private(at).len() as u64;
            assert_eq!((line.number, line.refs), (row.session, pages.len() as u64), "{name}");
            assert_eq!(line.freed_by_close, Some(private), "{name}");
            let alone = |page: &&u32| engine.row_pages.iter().filter(|p| p.contains(page)).count();
            let exclusive = pages.iter().filter(|page| alone(page) == 1).count() as u64;
            assert_eq!((line.exclusive_pages, line.shared()), (exclusive, line.refs - exclusive));
            let runs = 1 + pages.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
            let tail = (pages.len() << engine.shift) as u64 - u64::from(row.len);
            assert_eq!((line.runs, line.tail_tokens), (runs as u64, tail), "{name}");
        }
        let shares: u64 = report.sessions.iter().map(|line| line.share_q32).sum();
        let refs: u64 = report.sessions.iter().map(|line| line.refs).sum();
        let lost = (report.held_pages << 32) - shares;
        assert!(lost <= refs, "{name}: shares don't add up to the pages held");
    });
}

/// Returns two sessions' rows, each with the index of one of its private pages.
fn two_private(engine: &Engine, random: &mut Rng) -> [(usize, usize); 2] {
    let mut rows: Vec<usize> = (0..engine.rows.len()).collect();
    random.shuffle(&mut rows);
    [rows[0], rows[1]].map(|row| {
        let protected = engine.row_pages[row].len() - engine.private(row).len();
        (row, random.usize(protected..engine.row_pages[row].len()))
    })
}

#[test]
fn a_page_of_two_sessions_outside_the_tree_is_named() {
    everywhere(|name, place, engine, random| {
        let [(one, i), (two, k)] = two_private(engine, random);
        let page = engine.row_pages[one][i];
        let lost = std::mem::replace(&mut engine.row_pages[two][k], page);
        engine.free[0].push(lost.into());
        engine.write_rows();
        let report = engine.audit(&mut place.open(engine));
        let sessions = [engine.rows[one].session, engine.rows[two].session];
        assert_only(name, &report, FaultKind::Aliased, &[finding(page, &sessions)]);
    });
}

#[test]
fn a_page_of_nobody_is_named() {
    everywhere(|name, place, engine, random| {
        let list = usize::from(engine.free[0].is_empty());
        let at = random.usize(0..engine.free[list].len());
        let page = engine.free[list].swap_remove(at);
        let report = engine.audit(&mut place.open(engine));
        assert_only(name, &report, FaultKind::Leaked, &[finding(page, &[])]);
        assert_eq!(report.pages_by_owner.map(|pages| pages.leaked), Some(1), "{name}");
    });
}

#[test]
fn a_double_free_is_named_also_across_lists() {
    everywhere(|name, place, engine, random| {
        let list = usize::from(engine.free[0].is_empty());
        let page = engine.free[list][random.usize(0..engine.free[list].len())];
        engine.free[random.usize(0..2)].push(page);
        let report = engine.audit(&mut place.open(engine));
        assert_only(name, &report, FaultKind::DoubleFree, &[finding(page, &[])]);
    });
}

#[test]
fn a_page_freed_while_held_is_named_with_its_sessions() {
    everywhere(|name, place, engine, random| {
        let [(row, at), _] = two_private(engine, random);
        let page = engine.row_pages[row][at];
        engine.free[1].push(page.into());
        let report = engine.audit(&mut place.open(engine));
        let session = engine.rows[row].session;
        assert_only(name, &report, FaultKind::FreeHeld, &[finding(page, &[session])]);
        assert_eq!(report.pages_by_owner.map(|pages| pages.corrupt), Some(1), "{name}");
    });
}

#[test]
fn pages_of_the_tree_that_it_should_not_have_are_named() {
    everywhere(|name, place, engine, random| {
        let cached = *engine.tree_pages.last().expect("the tree holds pages");
        engine.free[0].push(cached.into());
        let report = engine.audit(&mut place.open(engine));
        let held = engine.row_pages.iter().any(|pages| pages.contains(&cached));
        assert!(!held, "{name}: prefixes are shorter than the tree");
        assert_only(name, &report, FaultKind::FreeCached, &[finding(cached, &[])]);
        engine.free[0].pop();

        engine.tree.extend(engine.slots(cached).collect::<Vec<_>>());
        let report = engine.audit(&mut place.open(engine));
        assert_only(name, &report, FaultKind::TreeTwice, &[finding(cached, &[])]);
        let slots = engine.tree.len() - (1 << engine.shift);
        engine.tree.truncate(slots);

        let [(row, at), _] = two_private(engine, random);
        let page = engine.row_pages[row][at];
        engine.tree.extend(engine.slots(page).collect::<Vec<_>>());
        let report = engine.audit(&mut place.open(engine));
        let session = engine.rows[row].session;
        assert_only(name, &report, FaultKind::CachedUnprotected, &[finding(page, &[session])]);
    });
}

#[test]
fn entries_that_are_no_page_are_named() {
    everywhere(|name, place, engine, random| {
        let outside = i64::from(engine.pages) + random.i64(0..9);
        engine.free[0].extend([0, -7, outside]);
        let report = engine.audit(&mut place.open(engine));
        let want = [-7, 0, outside].map(|at| finding(at, &[]));
        assert_only(name, &report, FaultKind::BadFreeEntry, &want);
        let free = engine.free.iter().map(Vec::len).sum::<usize>() - 3;
        assert_eq!(report.free.pages, free as u64, "{name}");
        engine.free[0].truncate(engine.free[0].len() - 3);

        let slot = outside << engine.shift;
        engine.tree.push(slot);
        let report = engine.audit(&mut place.open(engine));
        assert_only(name, &report, FaultKind::BadTreeEntry, &[finding(slot, &[])]);
        engine.tree.pop();

        let [(row, at), _] = two_private(engine, random);
        let page = engine.row_pages[row][at];
        *engine.entry(row, at) = -5;
        engine.free[0].push(page.into());
        let report = engine.audit(&mut place.open(engine));
        let want = finding(i64::try_from(at).expect("small"), &[engine.rows[row].session]);
        assert_only(name, &report, FaultKind::BadRowEntry, &[want]);
    });
}

#[test]
fn all_are_counted_and_the_first_are_named() {
    everywhere(|name, place, engine, random| {
        let [(row, _), _] = two_private(engine, random);
        let free: Vec<i64> = engine.free.concat();
        engine.free[1].extend(free.iter().take(30));
        let private = engine.private(row).to_vec();
        engine.free[1].extend(private.iter().map(|&page| i64::from(page)));
        let report = engine.audit(&mut place.open(engine));
        let counted =
            |kind| report.findings_of(kind).map(|found| (found.count, found.first_faults.len()));
        let doubled = free.len().min(30);
        let held = private.len();
        assert_eq!(
            counted(FaultKind::DoubleFree),
            Some((doubled as u64, doubled.min(16))),
            "{name}"
        );
        assert_eq!(counted(FaultKind::FreeHeld), Some((held as u64, held.min(16))), "{name}");
    });
}

#[test]
fn a_sealed_page_that_changed_is_named_until_its_session_is_gone() {
    everywhere(|name, place, engine, random| {
        let mut accountant = place.open(engine);
        engine.digest_pages_max = 1000;
        let first = engine.audit(&mut accountant);
        let sealed: Vec<(u32, u32)> = (0..engine.rows.len())
            .flat_map(|row| engine.sealed(row).iter().map(move |&page| (page, row)))
            .map(|(page, row)| (page, engine.rows[row].session))
            .collect();
        let pairs = sealed.len() as u64;
        assert_eq!((first.digests.fresh, first.digests.compared), (pairs, 0), "{name}");
        let Some(&(page, _)) = sealed.get(random.usize(0..sealed.len().max(1))) else { return };
        engine.flip(random, page);
        let second = engine.audit(&mut accountant);
        assert_eq!((second.digests.fresh, second.digests.compared), (0, pairs), "{name}");
        let holders = sealed.iter().filter(|&&(p, _)| p == page);
        let mut want: Vec<Finding> = holders.map(|&(p, s)| finding(p, &[s])).collect();
        want.sort();
        assert_only(name, &second, FaultKind::SealedPageChanged, &want);
        assert_only(name, &engine.audit(&mut accountant), FaultKind::SealedPageChanged, &want);
        engine.keys.iter_mut().for_each(|key| *key = key.wrapping_add(1));
        assert_eq!(engine.audit(&mut accountant).fault_count(), 0, "{name}: it was made anew");
    });
}

#[test]
fn what_was_made_anew_may_have_other_content() {
    everywhere(|name, place, engine, random| {
        let mut accountant = place.open(engine);
        engine.digest_pages_max = 1000;
        engine.audit(&mut accountant);
        for (row, key) in engine.rows.iter().zip(&mut engine.keys) {
            assert_eq!(row.session as usize, usize::try_from(row.row).expect("small") - 1);
            *key = key.wrapping_add(1);
        }
        for page in 1..engine.pages {
            engine.flip(random, page);
        }
        let report = engine.audit(&mut accountant);
        assert_eq!((report.fault_count(), report.digests.compared), (0, 0), "{name}");
    });
}

#[test]
fn moved_rows_are_left_out_and_what_they_hide_is_absent() {
    everywhere(|name, place, engine, random| {
        let mut accountant = place.open(engine);
        let [(moved, at), (kept, _)] = two_private(engine, random);
        engine.digest_pages_max = 1000;
        engine.audit(&mut accountant);
        // Pages of a row that changed show nothing; pages of unchanged rows still show faults.
        engine.free[0].push(engine.row_pages[moved][at].into());
        let page = engine.private(kept)[0];
        engine.free[0].push(page.into());
        let (private, mut rewritten) = (engine.private(moved), engine.sealed(moved).to_vec());
        rewritten.retain(|page| private.contains(page));
        for page in rewritten {
            engine.flip(random, page);
        }
        engine.begin(&mut accountant);
        while !accountant.is_ready().expect("the device works") {}
        let mut now = engine.now();
        if random.bool() {
            now[moved].1 = now[moved].1.wrapping_add(1);
        } else {
            now.remove(moved);
        }
        let report = accountant.finish(&now).expect("the device works");
        assert_eq!((report.scope, report.rows_changed), (Scope::RowsChanged, 1), "{name}");
        assert_eq!(
            (report.pages_by_owner, report.findings_of(FaultKind::Leaked)),
            (None, None),
            "{name}"
        );
        let session = engine.rows[kept].session;
        assert_only(name, &report, FaultKind::FreeHeld, &[finding(page, &[session])]);
        let gone = engine.rows[moved].session;
        assert!(
            report.sessions.iter().all(|line| line.number != gone && line.freed_by_close.is_none())
        );
        assert_eq!(report.sessions.len(), engine.rows.len() - 1, "{name}");
    });
}

#[test]
fn both_places_say_the_same_of_nonsense() {
    let _fake = Fake::load().expect("cargo has built the driver");
    for seed in 0..4 * SEEDS {
        let engine = Engine::chaotic(seed);
        let mut random = Rng::with_seed(seed);
        let [mut host, mut device] = [Place::Host, Place::Device].map(|place| place.open(&engine));
        for audit in 0..2 {
            let mut now = engine.now();
            now.retain(|_| random.u8(..) > 30);
            let [on_host, on_device] = [&mut host, &mut device].map(|accountant| {
                engine.begin(accountant);
                while !accountant.is_ready().expect("the device works") {}
                accountant.finish(&now).expect("the device works")
            });
            assert_eq!(on_host, on_device, "seed {seed}, audit {audit}");
            let again = Report::decode(&on_host.encode());
            assert_eq!(again.as_ref(), Ok(&on_host), "seed {seed}, audit {audit}");
        }
    }
}

#[test]
fn the_order_of_calls_is_kept() {
    everywhere(|name, place, engine, _| {
        let mut accountant = place.open(engine);
        assert!(matches!(accountant.is_ready(), Err(Error::Idle)), "{name}");
        assert!(matches!(accountant.finish(&[]), Err(Error::Idle)), "{name}");
        engine.begin(&mut accountant);
        assert!(matches!(accountant.finish(&[]), Err(Error::NotReady)), "{name}");
        let empty = Snapshot {
            rows: &[],
            keys: &[],
            free: &[],
            tree: IdList::default(),
            digest_pages_max: 0,
        };
        assert!(matches!(accountant.begin(&empty, Stream::default()), Err(Error::Busy)), "{name}");
        accountant.abandon().expect("the device works");
        assert!(matches!(accountant.is_ready(), Err(Error::Idle)), "{name}");
        accountant.begin(&empty, Stream::default()).expect("an empty snapshot is one");
        while !accountant.is_ready().expect("the device works") {}
        let report = accountant.finish(&[]).expect("the device works");
        assert_eq!((report.held_pages, report.free.pages), (0, 0), "{name}");
        let unprotected = report.findings_of(FaultKind::CachedUnprotected);
        assert_eq!(unprotected, None, "{name}: there was no row");
    });
}

#[test]
fn a_row_that_moves_while_a_device_copies_is_never_believed() {
    let fake = Fake::load().expect("cargo has built the driver");
    for seed in 0..SEEDS {
        let mut engine = Engine::random(seed);
        let mut random = Rng::with_seed(seed);
        let mut accountant = Place::Device.open(&engine);
        let [(moved, at), _] = two_private(&engine, &mut random);
        fake.hold(cuda_fake::ALL_STREAMS);
        engine.begin(&mut accountant);
        assert!(
            !accountant.is_ready().expect("the device works"),
            "seed {seed}: nothing was copied"
        );
        // The scheduler runs on: it rewrites the row, which now points at a page that is free.
        let free = engine.free.concat()[0];
        *engine.entry(moved, at) = i32::try_from(free << engine.shift).expect("small");
        let mut now = engine.now();
        now[moved].1 = now[moved].1.wrapping_add(1);
        fake.release(cuda_fake::ALL_STREAMS);
        assert!(accountant.is_ready().expect("the device works"), "seed {seed}");
        let report = accountant.finish(&now).expect("the device works");
        assert_eq!((report.rows_changed, report.fault_count()), (1, 0), "seed {seed}");
        // Without the version check, the changed row causes a finding.
        engine.begin(&mut accountant);
        while !accountant.is_ready().expect("the device works") {}
        let naive = accountant.finish(&engine.now()).expect("the device works");
        assert!(naive.fault_count() > 0, "seed {seed}");
    }
}

#[test]
fn nothing_is_left_on_the_device() {
    let fake = Fake::load().expect("cargo has built the driver");
    let before = fake.live();
    let engine = Engine::random(7);
    let mut accountant = Place::Device.open(&engine);
    let with_one = fake.live();
    for _ in 0..5 {
        engine.audit(&mut accountant);
        engine.begin(&mut accountant);
        accountant.abandon().expect("the device works");
    }
    assert_eq!(fake.live().allocations, with_one.allocations, "audits allocate nothing");
    drop(accountant);
    assert_eq!(fake.live(), before);
}

#[test]
fn a_device_that_fails_ends_the_audit_with_its_reason() {
    let fake = Fake::load().expect("cargo has built the driver");
    let engine = Engine::random(3);
    let mut accountant = Place::Device.open(&engine);
    engine.begin(&mut accountant);
    assert!(accountant.is_ready().expect("the device works"));
    fake.fail("cuLaunchKernelEx", 700);
    let error = accountant.finish(&engine.now()).expect_err("no kernel can be launched");
    assert!(error.to_string().contains("cuLaunchKernelEx"), "{error}");
    fake.fail("cuLaunchKernelEx", 0);
    assert_eq!(engine.audit(&mut accountant).fault_count(), 0, "the next audit is as good as any");
}
