//! A CUDA driver without a GPU, for tests.
//!
//! As `libcuda_fake.so`, it replaces libcuda: it has the calls that Berth makes, with host memory
//! as device memory. The kernels are Berth's own, built for the host from the same source. As a
//! Rust library, it is [`Fake`]: the handle by which a test loads the driver and plants errors.
//!
//! The default stream is a stream like any other. There are no graphs, and no other kernels.

mod control;
mod driver;
mod fake;
mod host;
mod memory;
mod state;
mod stream;

pub use fake::{ALL_STREAMS, Error, Fake, Live, image, library};
