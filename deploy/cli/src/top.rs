//! The picture of `berth top`: what it shows, how keys change it, and how it is drawn. Pure.

pub mod app;
pub mod bar;
pub mod tree;
pub mod view;
