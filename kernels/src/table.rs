//! The engine's row table in shared memory, for audits from another process.
//!
//! The engine writes the table once per scheduler step and the agent reads it; neither waits for
//! the other. A step has a number, its *epoch*. Before the step's first change of `req_to_token`,
//! the word `begun` is set to its epoch. After the last change, the step's table of rows is written
//! into a ring, and the word `done` is set to its epoch. If a GPU makes the changes, its stream
//! writes the two words, in the order of its work.
//!
//! A reader copies rows by the table of an epoch that is done, and then reads `begun`. If no other
//! step has begun, the copy is unchanged. Otherwise, rows may have changed if their version differs
//! in the table of the step that has begun, or in a newer table.
//!
//! This module doesn't know a row's pages; [`crate::ipc`] reads those.

mod layout;
mod reader;
mod writer;

pub use layout::{Export, PoolFacts, ROWS_MAX, TableRow};
pub use reader::Reader;
pub use writer::{Step, Writer};

/// Why a table can't be made, opened, written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}; use a path on a file system in memory, such as /dev/shm")]
    File(std::path::PathBuf, std::io::Error),
    #[error("not a row table of this version: use one release of engine side and agent")]
    Foreign,
    #[error("{tables} tables of {rows} rows: use 2 to 64 tables of 1 to {ROWS_MAX} rows")]
    Size { rows: u32, tables: u32 },
    #[error("{rows} rows, but the table has room for {rows_max}")]
    Rows { rows: usize, rows_max: u32 },
    #[error("the engine has closed its table")]
    Closed,
}
