//! Publishes an engine's live rows and their table `req_to_token` for audits by the agent.
//!
//! [`Publisher`] runs in the engine's process, called by the C library (`capi`). It exports
//! `req_to_token` once by CUDA IPC. For each step of the scheduler, it writes a table of the live
//! rows into a shared file. Two words in the file, `begun` and `done`, say which step has begun and
//! which is done. [`crate::table`] explains the file, the words and a step's epoch (its number).
//! The agent reads the file with [`super::RemoteAuditor`]. This file makes no audit.

use super::Error;
use crate::{
    account::Pool,
    cuda::{Device, RegisteredMemory},
    table::{Export, PoolFacts, Step, TableRow, TableWriter},
};
use std::path::Path;

/// Bytes per entry of `req_to_token`.
const ENTRY_BYTES: u64 = 4;

/// Publishes one engine's rows.
#[derive(Debug)]
pub struct Publisher {
    // Fields are dropped in this order. `words` must be dropped before `writer`, which has the
    // mapping that `words` has registered.
    words: StepWords,
    writer: TableWriter,
    /// The step that has begun and not ended.
    open_step: Option<Step>,
}

/// How the words `begun` and `done` are written. If a CUDA stream changes `req_to_token`, then the
/// stream must also write the words, so that they are in order with the changes.
#[derive(Debug)]
enum StepWords {
    /// This process writes the words.
    Host,
    /// A CUDA stream writes the words, in the order of its work.
    Stream {
        /// The memory page with the words, registered with the device.
        registered: RegisteredMemory,
        device: Device,
        /// The newest stream that was told to write a word.
        newest_stream: Option<u64>,
    },
}

impl Publisher {
    /// Makes a publisher for an engine in host memory. No other process can map that memory, so
    /// readers see the live rows but not their pages. The file at `path` has a ring of `tables`
    /// tables of up to `rows_max` rows.
    ///
    /// # Errors
    /// When the file can't be created, or a size is out of bounds.
    pub fn host(pool: &Pool, path: &Path, tables: u32, rows_max: u32) -> Result<Self, Error> {
        let writer = TableWriter::create(path, &pool_facts(pool, None), tables, rows_max)?;
        Ok(Self { words: StepWords::Host, writer, open_step: None })
    }

    /// Makes a publisher for an engine on a device. The engine's stream writes `begun` and `done`.
    /// `path` must be on a file system in memory.
    ///
    /// # Errors
    /// The same as for [`Self::host`]; also [`Error::Unshared`] if other processes can't map
    /// `req_to_token`.
    pub fn device(
        pool: &Pool,
        device: Device,
        path: &Path,
        tables: u32,
        rows_max: u32,
    ) -> Result<Self, Error> {
        let table = pool.table();
        let bytes = u64::from(table.rows) * u64::from(table.stride) * ENTRY_BYTES;
        let exported = device.export(table.addr, bytes).map_err(|e| Error::Unshared(Some(e)))?;
        let export = Export {
            handle: exported.handle,
            offset: exported.offset,
            bytes: exported.bytes,
            uuid: device.uuid()?,
        };
        let writer = TableWriter::create(path, &pool_facts(pool, Some(export)), tables, rows_max)?;
        // SAFETY: the page is the beginning of the writer's own mapping, and `Publisher` keeps the
        // writer longer than the registration.
        let registered =
            unsafe { device.register(writer.first_page(), TableWriter::FIRST_PAGE_BYTES)? };
        let words = StepWords::Stream { registered, device, newest_stream: None };
        Ok(Self { words, writer, open_step: None })
    }

    /// Begins a step. None of the step's changes to `req_to_token` may be enqueued on `stream` yet.
    /// If the previous step has not ended, its changes count as changes of the new step.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// `stream` must be 0 or a stream of the device's primary context that is destroyed only after
    /// `self`. It is ignored for an engine in host memory.
    pub unsafe fn begin_step(&mut self, stream: u64) -> Result<(), Error> {
        let step = self.writer.begin_step();
        match &mut self.words {
            StepWords::Host => self.writer.set_begun(step),
            // SAFETY: guaranteed by the caller.
            words @ StepWords::Stream { .. } => unsafe {
                words.write(stream, TableWriter::BEGUN_BYTE, step)?;
            },
        }
        self.open_step = Some(step);
        Ok(())
    }

    /// Ends a step. All of the step's changes must be enqueued on `stream`. `rows` are the live
    /// rows after these changes.
    ///
    /// # Errors
    /// When no step has begun, there are more rows than a table holds, or the device fails.
    ///
    /// # Safety
    /// The same as for [`Self::begin_step`].
    pub unsafe fn end_step(&mut self, rows: &[TableRow], stream: u64) -> Result<(), Error> {
        let step = self.open_step.ok_or(Error::StepNotBegun)?;
        self.writer.publish(step, rows)?;
        match &mut self.words {
            StepWords::Host => self.writer.set_done(step),
            // SAFETY: guaranteed by the caller.
            words @ StepWords::Stream { .. } => unsafe {
                words.write(stream, TableWriter::DONE_BYTE, step)?;
            },
        }
        self.open_step = None;
        Ok(())
    }
}

impl StepWords {
    /// Makes `stream` write the step's epoch to a word. `byte` is the word's offset in the page.
    ///
    /// # Safety
    /// `stream` must be a stream of the device, or 0.
    unsafe fn write(&mut self, stream: u64, byte: usize, step: Step) -> Result<(), Error> {
        let Self::Stream { registered, device, newest_stream } = self else { return Ok(()) };
        let address = registered.device_address() + byte as u64;
        *newest_stream = Some(stream);
        // SAFETY: the caller guarantees the stream. The page stays registered until the stream has
        // written the word; see `drop`.
        unsafe { device.write_value(stream, address, step.epoch)? };
        Ok(())
    }
}

impl Drop for StepWords {
    fn drop(&mut self) {
        if let Self::Stream { device, newest_stream: Some(stream), .. } = self {
            // SAFETY: the stream exists until `self` is gone. Unregistering the page waits for the
            // stream of `device`, and that stream now waits for the newest write.
            let _ = unsafe { device.wait_for(*stream) };
        }
    }
}

/// Returns the facts about the pool that readers need.
fn pool_facts(pool: &Pool, export: Option<Export>) -> PoolFacts {
    let table = pool.table();
    PoolFacts {
        page_tokens: pool.page_tokens(),
        pages: pool.pages(),
        r2t_rows: table.rows,
        r2t_stride: table.stride,
        export,
    }
}
