//! A CUDA driver without a GPU, for tests.
//!
//! As `libcuda_fake.so` it is what a program finds instead of libcuda: the calls that Berth makes,
//! over memory of the host. Device memory is shared memory, so CUDA IPC works between processes;
//! kernels are Berth's own, built for the host from the same source. As a Rust library it is
//! [`Fake`]: the handle by which a test loads that, and decides what goes wrong.
//!
//! Its default stream is a stream like any other. It has no graphs, and no kernels but ours.

mod control;
mod driver;
mod fake;
mod host;
mod memory;
mod state;
mod stream;

pub use fake::{ALL_STREAMS, Error, Fake, Live, image, library};
