//! The sessions as this router knows them, and what it does about them beside their turns.

pub mod bindings;
pub(crate) mod check;
pub(crate) mod claims;
pub(crate) mod directory;
pub mod intent;
pub(crate) mod lifecycle;
pub(crate) mod open;
pub(crate) mod renewal;
pub(crate) mod split_sessions;
pub mod status;
