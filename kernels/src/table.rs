//! Shares the engine's list of live rows with the agent's process, through a file in memory.
//!
//! An agent that audits an engine from outside must know which rows of `req_to_token` are live, and
//! whether a row changed while the agent copied it. The engine writes a *table* of its live rows
//! after each step of its scheduler, and the agent reads it. Neither process waits for the other.
//!
//! A step has a number, its *epoch*. The file has a ring of the newest tables, and two words:
//! - Before the first change of `req_to_token` in a step, the word `begun` is set to the step's
//!   epoch.
//! - After the last change, the step's table is written into the ring, and then the word `done` is
//!   set to the step's epoch.
//!
//! If a GPU makes the changes, the GPU's stream writes the two words, in the order of its work.
//!
//! A reader takes the table of a step that is done, and copies the rows that this table lists. Then
//! it reads `begun`. If no later step has begun, no row changed during the copy. Otherwise the
//! reader waits for the table of the step that has begun, or for a newer table. A row whose version
//! differs there may have changed, and all other rows did not.
//!
//! `layout` defines the file's bytes, `writer` writes the file and `reader` reads it. The table has
//! no page ids. `crate::ipc` uses the table, and reads the page ids from `req_to_token`.

mod layout;
mod reader;
mod writer;

pub use layout::{Export, PoolFacts, ROWS_MAX, TableRow};
pub use reader::TableReader;
pub use writer::{Step, TableWriter};

/// Why the file of tables can't be made, opened, written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: {1}; use a path on a file system in memory, such as /dev/shm")]
    File(std::path::PathBuf, std::io::Error),
    #[error("not a row table of this version: use one release of engine side and agent")]
    UnknownFormat,
    #[error("{tables} tables of {rows} rows: use 2 to 64 tables of 1 to {ROWS_MAX} rows")]
    RingSize { rows: u32, tables: u32 },
    #[error("{rows} rows, but the table has room for {rows_max}")]
    TooManyRows { rows: usize, rows_max: u32 },
    #[error("the engine has closed its table")]
    Closed,
}
