//! Berth's kernels as host code: the built-in kernels, or those of another library.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

type Find = unsafe extern "C" fn(*const c_char) -> c_int;
type Bind = unsafe extern "C" fn(c_int, *mut *mut c_void) -> *mut c_void;
type Run = unsafe extern "C" fn(c_int, *mut c_void, c_uint, c_uint);

unsafe extern "C" {
    fn kv_host_find(name: *const c_char) -> c_int;
    fn kv_host_bind(kernel: c_int, params: *mut *mut c_void) -> *mut c_void;
    fn kv_host_run(kernel: c_int, bound: *mut c_void, grid: c_uint, threads: c_uint);
}

/// The three functions of `kernels/cuda/host/launch.cpp`.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    find: Find,
    bind: Bind,
    run: Run,
}

/// A launch with its arguments, to be run once.
pub(crate) struct Launch {
    run: Run,
    kernel: c_int,
    bound: *mut c_void,
    grid: c_uint,
    threads: c_uint,
}

// SAFETY: the arguments are a copy that only this value refers to.
unsafe impl Send for Launch {}

impl Kernels {
    pub(crate) fn built_in() -> Kernels {
        Kernels { find: kv_host_find, bind: kv_host_bind, run: kv_host_run }
    }

    /// Loads the kernels of a library built from `launch.cpp` with another source. It stays loaded.
    pub(crate) fn load(path: &str) -> Result<Kernels, libloading::Error> {
        // SAFETY: the functions are those of `launch.cpp`, so their names determine their types.
        unsafe {
            let library = Box::leak(Box::new(Library::new(path)?));
            let find = *library.get::<Find>(b"kv_host_find")?;
            let bind = *library.get::<Bind>(b"kv_host_bind")?;
            Ok(Kernels { find, bind, run: *library.get::<Run>(b"kv_host_run")? })
        }
    }

    /// Returns the number of the kernel with this name, if there is one.
    pub(crate) fn find(&self, name: &CStr) -> Option<c_int> {
        // SAFETY: the name is NUL-terminated.
        let kernel = unsafe { (self.find)(name.as_ptr()) };
        (kernel >= 0).then_some(kernel)
    }

    /// # Safety
    /// The kernel number must be from this library, and `params` must point to an argument for each
    /// of the kernel's parameters.
    pub(crate) unsafe fn bind(
        &self,
        kernel: c_int,
        params: *mut *mut c_void,
        grid: c_uint,
        threads: c_uint,
    ) -> Launch {
        // SAFETY: guaranteed by the caller.
        let bound = unsafe { (self.bind)(kernel, params) };
        Launch { run: self.run, kernel, bound, grid, threads }
    }
}

impl Launch {
    /// Runs the kernel. The caller must hold the driver's lock, so that one launch runs at a time.
    pub(crate) fn run(self) {
        // SAFETY: bound once and run once, by functions of the same library.
        unsafe { (self.run)(self.kernel, self.bound, self.grid, self.threads) };
    }
}
