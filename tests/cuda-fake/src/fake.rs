//! The handle by which a Rust test loads and controls the driver.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use parking_lot::{Mutex, MutexGuard};
use std::{
    env,
    ffi::{CString, c_char},
    path::{Path, PathBuf},
    sync::OnceLock,
};

pub(crate) const FATBIN_MAGIC: u32 = 0xBA55_ED50;
/// Stands for every stream, including streams created later.
pub const ALL_STREAMS: u64 = u64::MAX;

/// Why the driver can't be loaded.
#[derive(Debug)]
pub enum Error {
    /// There is no `libcuda_fake.so` next to this program: depend on the package to have it built.
    NotBuilt(PathBuf),
    Load(libloading::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::NotBuilt(place) => write!(f, "no libcuda_fake.so around {}", place.display()),
            Error::Load(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

/// The driver's objects that callers must free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Live {
    pub allocations: u64,
    pub bytes: u64,
    pub registrations: u64,
    pub streams: u64,
    pub events: u64,
    pub modules: u64,
    /// Retain count of all primary contexts.
    pub contexts: u64,
}

/// Returns the path of the driver that Cargo built, next to the program's dependencies.
pub fn library() -> Result<PathBuf, Error> {
    let program = env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("."));
    let places = [folder.to_owned(), folder.join("deps")];
    let found = places.iter().map(|place| place.join("libcuda_fake.so")).find(|so| so.is_file());
    found.ok_or_else(|| Error::NotBuilt(folder.to_owned()))
}

/// Returns a fatbin that the driver accepts: only a header.
pub fn image() -> Vec<u8> {
    let mut image = FATBIN_MAGIC.to_le_bytes().to_vec();
    image.extend(1u16.to_le_bytes());
    image.extend(16u16.to_le_bytes());
    image.extend(0u64.to_le_bytes());
    image
}

/// The driver, for one test at a time. Dropping the handle undoes what the test has set.
#[derive(Debug)]
pub struct Fake {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Fake {
    /// Loads the driver, so that CUDA in this process means this driver. Waits while another test
    /// has it.
    pub fn load() -> Result<Fake, Error> {
        static ALONE: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let alone = ALONE.lock();
        if LIBRARY.get().is_none() {
            // SAFETY: the library has no constructors, and it stays loaded.
            let opened = unsafe { Library::open(Some(library()?), RTLD_NOW | RTLD_GLOBAL) };
            let _ = LIBRARY.set(opened.map_err(Error::Load)?);
        }
        let library = LIBRARY.get().expect("set above");
        Ok(Fake { library, _alone: alone })
    }

    /// Returns the number of launches of one kernel so far.
    pub fn launches(&self, kernel: &str) -> u64 {
        let kernel = zero_ended(kernel);
        // SAFETY: the symbol has this type, and the name is NUL-terminated.
        unsafe {
            let launches: Symbol<unsafe extern "C" fn(*const c_char) -> u64> =
                self.symbol(b"cuda_fake_launches");
            launches(kernel.as_ptr())
        }
    }

    /// Makes the driver's `symbol` return `code` without doing anything; 0 undoes that.
    pub fn fail(&self, symbol: &str, code: u32) {
        let symbol = zero_ended(symbol);
        // SAFETY: the symbol has this type, and the name is NUL-terminated.
        unsafe {
            let fail: Symbol<unsafe extern "C" fn(*const c_char, u32)> =
                self.symbol(b"cuda_fake_fail");
            fail(symbol.as_ptr(), code);
        }
    }

    /// Sets the amount of device memory, in bytes.
    pub fn set_memory_max(&self, bytes: u64) {
        self.tell(b"cuda_fake_memory_max", bytes);
    }

    /// Holds a stream: its work is not executed.
    pub fn hold(&self, stream: u64) {
        self.tell(b"cuda_fake_hold", stream);
    }

    /// Releases a held stream; its work is executed.
    pub fn release(&self, stream: u64) {
        self.tell(b"cuda_fake_release", stream);
    }

    /// Executes up to `pieces` pieces of a held stream's work.
    pub fn step(&self, stream: u64, pieces: u64) {
        // SAFETY: the symbol has this type.
        unsafe {
            let step: Symbol<unsafe extern "C" fn(u64, u64)> = self.symbol(b"cuda_fake_step");
            step(stream, pieces);
        }
    }

    /// Returns the number of pieces of work that a stream has left.
    pub fn pending(&self, stream: u64) -> u64 {
        // SAFETY: the symbol has this type.
        unsafe {
            let pending: Symbol<unsafe extern "C" fn(u64) -> u64> =
                self.symbol(b"cuda_fake_pending");
            pending(stream)
        }
    }

    pub fn live(&self) -> Live {
        let mut live = Live::default();
        // SAFETY: the symbol has this type, and the pointer refers to a local.
        unsafe {
            let ask: Symbol<unsafe extern "C" fn(*mut Live)> = self.symbol(b"cuda_fake_live");
            ask(&raw mut live);
        }
        live
    }

    /// Gives devices opened from now on the kernels of this library; returns whether it has
    /// kernels.
    pub fn use_kernels(&self, library: &Path) -> bool {
        let library = zero_ended(&library.to_string_lossy());
        // SAFETY: the symbol has this type, and the path is NUL-terminated.
        unsafe {
            let kernels: Symbol<unsafe extern "C" fn(*const c_char) -> u32> =
                self.symbol(b"cuda_fake_kernels");
            kernels(library.as_ptr()) != 0
        }
    }

    fn tell(&self, symbol: &[u8], value: u64) {
        // SAFETY: callers name a symbol that takes one `u64`; a return value is ignored.
        unsafe {
            let tell: Symbol<unsafe extern "C" fn(u64)> = self.symbol(symbol);
            tell(value);
        }
    }

    /// # Safety
    /// `T` must be the symbol's type.
    unsafe fn symbol<T>(&self, symbol: &[u8]) -> Symbol<T> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.library.get(symbol) }.expect("the library is this package's own")
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // SAFETY: the symbol has this type.
        unsafe {
            let reset: Symbol<unsafe extern "C" fn()> = self.symbol(b"cuda_fake_reset");
            reset();
        }
    }
}

fn zero_ended(text: &str) -> CString {
    CString::new(text).expect("no test passes a zero")
}
