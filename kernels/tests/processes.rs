//! Tests that need processes of their own; each check runs this program again, in a role.
//!
//! They test a driver that is missing or broken, and kernels with planted mistakes, each of which
//! the comparison with the reference must catch. Run `cargo test -p kernels --test processes`.

#![expect(clippy::print_stdout, reason = "a test without the harness reports by itself")]

mod pools;

use cuda_fake::Fake;
use kernels::cuda::{Device, LaunchShape, missing};
use pools::Case;
use std::{
    env, fs,
    os::unix::{fs::symlink, process::ExitStatusExt},
    panic,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Output},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};
use tempfile::TempDir;

const ROLE: &str = "BERTH_TEST_ROLE";
const KERNELS: &str = "BERTH_TEST_KERNELS";
/// Enough pools to catch every planted mistake; `equality.rs` runs 1,000 pools on the real kernels.
const POOLS: u64 = 60;

/// A mistake: its name, a text that occurs once in the source, and its replacement.
type Mistake = (&'static str, &'static str, &'static str);

const MISTAKES: &[Mistake] = &[
    (
        "the page behind the pool",
        "page < npages && page << shift",
        "page <= npages && page << shift",
    ),
    ("slot 0 is a page", "slot > 0 &&", "slot >= 0 &&"),
    ("slots needn't be aligned", " && page << shift == u32(slot)", ""),
    ("the entry behind a row", "column < stride;", "column <= stride;"),
    ("rows needn't be in the table", "row.row < table_rows && ", ""),
    (
        "owners never become shared",
        "before != OWNER_SHARED) atomic",
        "before == OWNER_SHARED) atomic",
    ),
    ("a page counts for every reference", "& bit) continue;", "& bit & 0) continue;"),
    ("a close frees what the tree has", "!(tree[word] & bit)", "true"),
    ("a block begins a run", "runs += i == 0 ||", "runs += i == span.begin ||"),
    ("a share is cut short", "(1ull << 32) / (sharers", "0xFFFFFFFFull / (sharers"),
    ("every block has the tail", "if (span.begin == 0)", "if (threadIdx.x == 0)"),
    ("negative ids are pages", "if (id < 0 || page", "if (page"),
    ("every slot names its page", "} else if (page << shift == id) {", "} else {"),
    ("a second row shares", "owner[page] == OWNER_SHARED);", "refcnt[page] > 1);"),
    ("pages behind the last", "left < WARP ? (1u << left) - 1 : FULL_WARP", "FULL_WARP"),
    ("a word begins a run", "(word > 0 ? free[word - 1] >> 31 : 0)", "0"),
    ("aliases in the tree", "__popc(shared[word] & ~t)", "__popc(shared[word])"),
    ("a lane is left out of a sum", "lanes > 0;", "lanes > 1;"),
    ("nobody waits for the zero", "= 0;\n  __syncthreads();", "= 0;"),
    ("buffers can be swapped", "(buffer + 1) << 32 | place", "place"),
    ("halves can be swapped", "b, 2 * v + 1)", "b, 2 * v)"),
    ("threads without a team read", " < teams ? threadIdx.x / team : nbuf", ""),
    ("teams read the same buffers", "b += teams", "b++"),
];

fn main() -> ExitCode {
    match env::var(ROLE).as_deref() {
        Err(_) => checks(),
        Ok("missing") => say_missing(),
        Ok("refused") => say_refused(),
        Ok("pools") => compare_pools(),
        Ok(other) => panic!("no role is called {other}"),
    }
}

fn checks() -> ExitCode {
    let all: &[(&str, fn())] = &[
        ("without a driver it is said, and nothing panics", no_driver),
        ("a driver that lacks a call is told by its name", lacking_driver),
        ("a driver that doesn't start is told by its reason", refusing_driver),
        ("the kernels have no undefined behaviour on the host", undefined_behaviour),
        ("a barrier that not all reach ends the process", divergent_barrier),
        ("every planted mistake is caught", mistakes),
    ];
    let failed = all.iter().filter(|(name, check)| {
        let passed = panic::catch_unwind(check).is_ok();
        println!("{name} ... {}", if passed { "ok" } else { "FAILED" });
        !passed
    });
    if failed.count() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns a command that runs this program in a role.
fn in_role(role: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program has a path"));
    command.env(ROLE, role).env_remove("LD_LIBRARY_PATH");
    command
}

/// Returns standard output and standard error of a program, which must succeed.
fn output_of(command: &mut Command) -> (String, String) {
    let output = command.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    (out, err)
}

// ---- A driver that is missing or broken ---------------------------------------------------------

fn say_missing() -> ExitCode {
    let reason = missing().map_or("nothing".to_owned(), |missing| missing.to_string());
    println!("{reason}");
    if let Err(error) = Device::open(0, &cuda_fake::image()) {
        assert_eq!(error.to_string(), reason, "opening tells the same");
    }
    ExitCode::SUCCESS
}

fn no_driver() {
    let (out, err) = output_of(&mut in_role("missing"));
    assert_eq!(err, "", "nothing panicked");
    if Path::new("/proc/driver/nvidia/version").exists() {
        assert_eq!(out.lines().count(), 1, "{out}");
    } else {
        assert_eq!(out, "no CUDA driver: there is no libcuda on the library path\n");
    }
}

fn lacking_driver() {
    let folder = TempDir::new().expect("a folder can be made");
    let source = folder.path().join("old.c");
    fs::write(&source, "int cuInit(unsigned f) { return 0; }\n").expect("it can be written");
    let library = folder.path().join("libcuda.so");
    let cc = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    output_of(Command::new(cc).args(["-shared", "-fPIC", "-o"]).args([&library, &source]));
    let (out, err) = output_of(in_role("missing").env("LD_LIBRARY_PATH", folder.path()));
    assert_eq!(err, "", "nothing panicked");
    assert_eq!(out, "the CUDA driver lacks cuGetErrorName: a newer driver is needed\n");
}

fn say_refused() -> ExitCode {
    let fake = Fake::load().expect("the driver without a GPU is built");
    let code = env::args().nth(1).expect("a code").parse().expect("a number");
    fake.fail("cuInit", code);
    say_missing()
}

fn refusing_driver() {
    let said = |code: &str| output_of(in_role("refused").arg(code)).0;
    assert!(said("34").starts_with("libcuda is the toolkit's stub"));
    assert!(said("100").starts_with("the CUDA driver shows no device"));
    let other = "the CUDA driver does not start: cuInit failed with an unknown error (999)\n";
    assert_eq!(said("999"), other);

    let folder = TempDir::new().expect("a folder can be made");
    let fake = cuda_fake::library().expect("the driver without a GPU is built");
    symlink(fake, folder.path().join("libcuda.so")).expect("it can be linked");
    let found = |devices: &str| {
        let mut role = in_role("missing");
        role.env("LD_LIBRARY_PATH", folder.path()).env("CUDA_FAKE_DEVICES", devices);
        output_of(&mut role).0
    };
    assert_eq!(found("1"), "nothing\n", "the driver is found by its name, too");
    assert!(found("0").starts_with("the CUDA driver shows no device"));
}

// ---- Kernels with planted mistakes --------------------------------------------------------------

/// Compares pools in several launch shapes, with the kernels of the library that `KERNELS` names.
fn compare_pools() -> ExitCode {
    let fake = Fake::load().expect("the driver without a GPU is built");
    let kernels = env::var(KERNELS).expect("a library of kernels");
    assert!(fake.use_kernels(Path::new(&kernels)), "{kernels} has no kernels");
    let mut device = Device::open(0, &cuda_fake::image()).expect("there is a device");
    for seed in 0..POOLS {
        let (threads, entries) =
            [(32, 1), (64, 1), (96, 1), (128, 8)][usize::try_from(seed % 4).expect("small")];
        device.set_shape(LaunchShape::new(threads, entries, 3).expect("it is a shape"));
        let case = Case::random(seed);
        let answers = case.answers(&device).expect("it runs");
        if answers != case.expected() {
            println!("seed {seed} differs");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn cuda_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")
}

fn source() -> String {
    fs::read_to_string(cuda_folder().join("kv_account.cu")).expect("the kernels are there")
}

/// Compiles kernels for the host, with additional flags, and compares pools with them.
fn compare_with(source: &str, flags: &[&str]) -> Output {
    let folder = TempDir::new().expect("a folder can be made");
    let (cu, so) = (folder.path().join("kernels.cu"), folder.path().join("kernels.so"));
    fs::write(&cu, source).expect("it can be written");
    let cxx = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut compile = Command::new(cxx);
    compile.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]).args(flags);
    compile.arg(format!("-DKV_SOURCE=\"{}\"", cu.display())).arg("-o").arg(&so);
    output_of(compile.arg(cuda_folder().join("host/launch.cpp")));
    in_role("pools").env(KERNELS, &so).output().expect("this program starts")
}

/// Checks for undefined behaviour; also shows that the pools are equal if no mistake is planted.
fn undefined_behaviour() {
    let output =
        compare_with(&source(), &["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]);
    assert!(output.status.success(), "{output:?}");
}

fn divergent_barrier() {
    let half = source().replacen("__syncthreads();", "if (threadIdx.x < 16) __syncthreads();", 1);
    let output = compare_with(&half, &[]);
    assert!(output.status.signal().is_some(), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("waits for the rest, which doesn't come"), "{told}");
}

fn mistakes() {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut missed = Vec::new();
        while let Some(&(name, right, wrong)) = MISTAKES.get(next.fetch_add(1, Ordering::Relaxed)) {
            let source = source();
            assert_eq!(source.matches(right).count(), 1, "{name}: `{right}` stands there once");
            let output = compare_with(&source.replacen(right, wrong, 1), &[]);
            if output.status.success() {
                missed.push(name);
            }
        }
        missed
    };
    let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let missed: Vec<&str> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("it compiles")).collect()
    });
    assert!(missed.is_empty(), "not caught: {missed:?}");
    println!("{} mistakes", MISTAKES.len());
}
