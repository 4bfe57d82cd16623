//! An HTTP server that behaves as SGLang 0.5.23 does to an outside caller.

pub mod core;
pub mod request;

mod pool;
mod radix;
mod session;
pub mod tokenizer;
