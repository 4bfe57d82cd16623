//! Which blocks of a prompt are resident on which worker.

pub(crate) mod block_locator;
pub mod index;
pub(crate) mod kv_index;
pub(crate) mod kv_stream;
pub mod learned;
