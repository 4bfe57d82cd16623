//! The engine's side: publishes a table per step, and marks each step's beginning and end.

use super::Error;
use crate::{
    account::Pool,
    cuda::{Device, Registered},
    table::{Export, PoolFacts, Step, TableRow, Writer},
};
use std::path::Path;

/// Bytes per entry of `req_to_token`.
const ENTRY_BYTES: u64 = 4;

/// Publishes the row table of one engine.
#[derive(Debug)]
pub struct Publisher {
    // The field order matters: `words` must be dropped before the mapping in `writer`.
    words: StepWords,
    writer: Writer,
    step: Option<Step>,
}

/// Which side writes `begun` and `done`: the side that changes `req_to_token`.
#[derive(Debug)]
enum StepWords {
    Host,
    Stream {
        /// The page with the words `begun` and `done`, registered with the device.
        registered: Registered,
        device: Device,
        /// The last stream that was told to write these words.
        last: Option<u64>,
    },
}

impl Publisher {
    /// Makes a publisher for an engine in host memory. No other process can map that memory, so the
    /// table tells rows but gives no access to pages.
    ///
    /// # Errors
    /// When the file can't be created, or a size is out of bounds.
    pub fn host(pool: &Pool, path: &Path, tables: u32, rows_max: u32) -> Result<Self, Error> {
        let writer = Writer::create(path, &pool_facts(pool, None), tables, rows_max)?;
        Ok(Self { words: StepWords::Host, writer, step: None })
    }

    /// Makes a publisher for an engine on a device, whose stream writes `begun` and `done`. `path`
    /// must be on a file system in memory.
    ///
    /// # Errors
    /// As [`Self::host`]; also [`Error::Unshared`] if the memory can't be shared.
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
        let writer = Writer::create(path, &pool_facts(pool, Some(export)), tables, rows_max)?;
        // SAFETY: the page is the beginning of the writer's own mapping, and `Publisher` keeps the
        // writer longer than the registration.
        let registered = unsafe { device.register(writer.head_page(), Writer::HEAD_BYTES)? };
        let words = StepWords::Stream { registered, device, last: None };
        Ok(Self { words, writer, step: None })
    }

    /// Begins a step. None of the step's changes to `req_to_token` may be enqueued on `stream` yet.
    /// A previous step without an end is forgotten; its changes count as this step's.
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
                words.write(stream, Writer::BEGUN_BYTE, step)?;
            },
        }
        self.step = Some(step);
        Ok(())
    }

    /// Ends a step: all its changes have been enqueued on `stream`, and `rows` is the table after
    /// them.
    ///
    /// # Errors
    /// When no step has begun, there are more rows than a table holds, or the device fails.
    ///
    /// # Safety
    /// The same as for [`Self::begin_step`].
    pub unsafe fn end_step(&mut self, rows: &[TableRow], stream: u64) -> Result<(), Error> {
        let step = self.step.ok_or(Error::NoBeginning)?;
        self.writer.publish(step, rows)?;
        match &mut self.words {
            StepWords::Host => self.writer.set_done(step),
            // SAFETY: guaranteed by the caller.
            words @ StepWords::Stream { .. } => unsafe {
                words.write(stream, Writer::DONE_BYTE, step)?;
            },
        }
        self.step = None;
        Ok(())
    }
}

impl StepWords {
    /// # Safety
    /// `stream` must be a stream of the device, or 0.
    unsafe fn write(&mut self, stream: u64, byte: usize, step: Step) -> Result<(), Error> {
        let Self::Stream { registered, device, last } = self else { return Ok(()) };
        let address = registered.device_address() + byte as u64;
        *last = Some(stream);
        // SAFETY: guaranteed by the caller; the words stay registered until the stream has written
        // them.
        unsafe { device.write_value(stream, address, step.epoch)? };
        Ok(())
    }
}

impl Drop for StepWords {
    fn drop(&mut self) {
        if let Self::Stream { device, last: Some(stream), .. } = self {
            // SAFETY: the stream exists until `self` is gone. Unregistering waits for the device's
            // own stream, and so for this write.
            let _ = unsafe { device.wait_for(*stream) };
        }
    }
}

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
