//! The identity of KV blocks, and what is resident of them. Pure.

pub mod block;
pub mod index;
pub mod kv;
pub mod table;
