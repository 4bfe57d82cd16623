//! The picture of `berth top`: what it shows, how keys change it, and how it is drawn. Pure.
//!
//! `commands::top` reads the keys and asks the router.
//!
//! - [`app`]: the state, changed by answers and keys. [`bar`]: the KV pool as one stacked bar.
//! - [`tree`]: puts sessions below the sessions that started them.
//! - [`view`]: draws the state for a terminal of any size.

pub mod app;
pub mod bar;
pub mod tree;
pub mod view;
