//! Tests `berth_kv.h` and the library with a compiled C program, whose reports are decoded here.
//!
//! The program's pool is in host memory first, then on a device.

use kernels::report::{FaultKind, Finding, Report, Scope};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};
use tempfile::TempDir;

/// Returns the folder in which cargo built the library, next to this test.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a path");
    let deps = test.parent().expect("a file lies in a folder");
    assert!(deps.join("libberth_kv.so").is_file(), "no libberth_kv.so in {}", deps.display());
    deps.to_owned()
}

/// Compiles the program once, with every warning an error.
fn engine() -> &'static Path {
    static ENGINE: OnceLock<PathBuf> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi-engine");
        let library = library_folder();
        let made = Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"])
            .arg("-I")
            .arg(here)
            .arg(here.join("tests/engine.c"))
            .arg("-o")
            .arg(&out)
            .arg("-L")
            .arg(&library)
            .arg("-lberth_kv")
            .arg("-ldl")
            .arg(format!("-Wl,-rpath,{}", library.display()))
            .status()
            .expect("a C compiler is there");
        assert!(made.success(), "berth_kv.h and engine.c don't compile");
        out
    })
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Host,
    Device,
}

const PLACES: [Place; 2] = [Place::Host, Place::Device];

fn run(case: &str, place: Place) -> Output {
    let folder = TempDir::new().expect("there is room for temporary files");
    let mut engine = Command::new(engine());
    engine.arg(case);
    if let Place::Device = place {
        let fatbin = folder.path().join("fatbin");
        fs::write(&fatbin, cuda_fake::image()).expect("there is room for temporary files");
        engine.arg(cuda_fake::library().expect("cargo has built the driver")).arg(fatbin);
    }
    let output = engine.output().expect("the program was compiled");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "case {case:?}, {place:?}: {}: {said}", output.status);
    output
}

/// Returns the two reports that the program writes for a case.
fn reports(case: &str, place: Place) -> [Report; 2] {
    let out = run(case, place).stdout;
    let mut rest = out.as_slice();
    let mut next = || {
        let (length, after) = rest.split_first_chunk().expect("a report has a length");
        let length = usize::try_from(u64::from_le_bytes(*length)).expect("a report is small");
        let (bytes, after) = after.split_at(length);
        rest = after;
        Report::decode(bytes).expect("the library's bytes are a report")
    };
    let both = [next(), next()];
    assert!(rest.is_empty(), "case {case:?} wrote more than two reports");
    both
}

fn named(report: &Report, kind: FaultKind) -> (u64, &[Finding]) {
    let found = report.findings_of(kind).unwrap_or_else(|| panic!("{kind:?} can be answered"));
    (found.count, &found.first_faults)
}

fn finding(page_or_entry: i64, sessions: &[u32]) -> Finding {
    let session_count = u32::try_from(sessions.len()).expect("a few sessions");
    Finding { page_or_entry, sessions: sessions.to_vec(), session_count }
}

#[test]
fn a_sound_pool_is_told_exactly() {
    let [first, second] = reports("", Place::Host);
    assert_eq!([&first, &second], reports("", Place::Device).each_ref());
    assert_eq!((first.scope, first.fault_count(), second.fault_count()), (Scope::Complete, 0, 0));
    let c = first.pages_by_owner.expect("the snapshot was complete");
    assert_eq!((c.free, c.private, c.cached, c.cached_in_use, c.leaked), (7, 5, 1, 2, 0));
    assert_eq!((first.held_pages, first.rows, first.rows_changed), (7, 2, 0));
    let lines: Vec<_> =
        first.sessions.iter().map(|s| (s.refs, s.exclusive_pages, s.freed_by_close)).collect();
    assert_eq!(lines, [(5, 3, Some(3)), (4, 2, Some(2))]);
    assert_eq!((first.sessions[0].tail_tokens, first.sessions[1].runs), (2, 2));
    let shares: u64 = first.sessions.iter().map(|s| s.share_q32).sum();
    assert_eq!(shares, 7 << 32);
    assert_eq!((first.digests.fresh, first.digests.compared), (7, 0));
    assert_eq!((second.digests.fresh, second.digests.compared), (0, 7));
    assert_eq!((first.audit_number, second.audit_number), (0, 1));
}

#[test]
fn what_is_planted_is_named() {
    let cases: [(&str, FaultKind, Finding); 5] = [
        ("aliased", FaultKind::Aliased, finding(5, &[0, 1])),
        ("leaked", FaultKind::Leaked, finding(15, &[])),
        ("double_free", FaultKind::DoubleFree, finding(9, &[])),
        ("free_held", FaultKind::FreeHeld, finding(4, &[0])),
        ("free_entry", FaultKind::BadFreeEntry, finding(-3, &[])),
    ];
    for (case, kind, want) in cases {
        for report in PLACES.iter().flat_map(|&place| reports(case, place)) {
            assert_eq!(named(&report, kind), (1, [want.clone()].as_slice()), "{case}");
            assert_eq!(report.fault_count(), 1, "{case}: {:?}", report.findings);
        }
    }
}

#[test]
fn a_page_that_changed_though_nothing_rewrote_it_is_named() {
    for place in PLACES {
        let [first, second] = reports("changed", place);
        assert_eq!(first.fault_count(), 0);
        assert_eq!(
            named(&second, FaultKind::SealedPageChanged),
            (1, [finding(6, &[1])].as_slice())
        );
    }
}

#[test]
fn a_row_that_moved_is_left_out_and_counted() {
    let [first, second] = reports("moved", Place::Device);
    assert_eq!([&first, &second], reports("moved", Place::Host).each_ref());
    assert_eq!((first.scope, first.rows, first.rows_changed), (Scope::RowsChanged, 1, 1));
    assert_eq!((first.pages_by_owner, first.findings_of(FaultKind::Leaked)), (None, None));
    let numbers: Vec<u32> = first.sessions.iter().map(|s| s.number).collect();
    assert_eq!((numbers, first.sessions[0].freed_by_close), (vec![0], None));
    assert_eq!((second.scope, second.rows, second.rows_changed), (Scope::Complete, 2, 0));
}

#[test]
fn misuse_is_answered_by_errors() {
    for place in PLACES {
        assert!(run("misuse", place).stdout.is_empty());
    }
}
