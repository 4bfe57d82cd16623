//! The engine's row table in shared memory: what an agent needs to audit from another process.
//!
//! The engine writes, once per step of its scheduler; the agent reads, and neither waits. A step
//! has a number, its *epoch*. Before the step's first change of `req_to_token` the word `begun`
//! becomes its epoch; after its last one its table of rows is written into a ring, and the word
//! `done` becomes its epoch. Where a GPU makes the changes, its stream writes the words, in the
//! order of its work. So whoever copies rows by the table of an epoch that is done, and then looks
//! at `begun`, knows what may have been changed under his hands: nothing if no other step has
//! begun, else the rows whose version is another in the table of a step as new as that, or a newer
//! one.
//!
//! Nothing here knows what a row's pages are; [`crate::ipc`] reads those.

mod layout;
mod reader;
mod writer;

pub use layout::{Export, Facts, ROWS_MAX, TableRow};
pub use reader::Reader;
pub use writer::{Stepped, Writer};

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}; the table lies in memory, say under /dev/shm")]
    File(std::path::PathBuf, std::io::Error),
    #[error("no row table of this version: the engine's side is of another")]
    Foreign,
    #[error("a table of {rows} rows in {tables} turns: up to {ROWS_MAX} rows, and 2 to 64 turns")]
    Size { rows: u32, tables: u32 },
    #[error("{rows} rows in a table for {rows_max}")]
    Rows { rows: usize, rows_max: u32 },
    #[error("the engine has taken its table back")]
    Closed,
}
