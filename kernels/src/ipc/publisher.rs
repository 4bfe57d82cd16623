//! The engine's side: a table for each step, and words that are written where the changes are made.

use super::Error;
use crate::{
    account::Pool,
    cuda::{Device, Registered},
    table::{Export, Facts, Stepped, TableRow, Writer},
};
use std::path::Path;

/// Bytes of an entry of `req_to_token`.
const ENTRY_BYTES: u64 = 4;

/// Publishes the rows of one engine.
#[derive(Debug)]
pub struct Publisher {
    // Dropped before the mapping that it is about.
    words: Words,
    writer: Writer,
    open: Option<Stepped>,
}

/// Who says how far a step has come: whoever makes its changes.
#[derive(Debug)]
enum Words {
    Host,
    Stream {
        /// Of the head's page, on the device.
        registered: Registered,
        device: Device,
        /// The last stream that was told to write there.
        last: Option<u64>,
    },
}

impl Publisher {
    /// For an engine in host memory. Nobody else can map that: its table tells rows, not pages.
    ///
    /// # Errors
    /// A file that can't be made, sizes out of bounds.
    pub fn host(pool: &Pool, path: &Path, tables: u32, rows_max: u32) -> Result<Self, Error> {
        let writer = Writer::create(path, &facts(pool, None), tables, rows_max)?;
        Ok(Self { words: Words::Host, writer, open: None })
    }

    /// For an engine on a device, whose stream writes `begun` and `done`. `path` has to be on a
    /// file system in memory.
    ///
    /// # Errors
    /// As [`Self::host`]; memory that can't be shared is [`Error::Unshared`].
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
        let writer = Writer::create(path, &facts(pool, Some(export)), tables, rows_max)?;
        // SAFETY: the page is the beginning of the writer's own mapping, which `Publisher` keeps
        // longer than the registration.
        let registered = unsafe { device.register(writer.head_page(), Writer::HEAD_BYTES)? };
        let words = Words::Stream { registered, device, last: None };
        Ok(Self { words, writer, open: None })
    }

    /// A step begins: nothing of what it changes in `req_to_token` has been enqueued on `stream`
    /// yet. A step that never ended is forgotten; what it changed counts to this one.
    ///
    /// # Errors
    /// A failing device.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context or 0, and is destroyed only after
    /// `self`. Of an engine in host memory it is ignored.
    pub unsafe fn begin(&mut self, stream: u64) -> Result<(), Error> {
        let step = self.writer.begin();
        match &mut self.words {
            Words::Host => self.writer.set_begun(step),
            // SAFETY: the caller's promise.
            words @ Words::Stream { .. } => unsafe {
                words.write(stream, Writer::BEGUN_BYTE, step)?;
            },
        }
        self.open = Some(step);
        Ok(())
    }

    /// The step's changes have all been enqueued on `stream`; `rows` are as they leave them.
    ///
    /// # Errors
    /// No step that began, more rows than a table has, or a failing device.
    ///
    /// # Safety
    /// As of [`Self::begin`].
    pub unsafe fn done(&mut self, rows: &[TableRow], stream: u64) -> Result<(), Error> {
        let step = self.open.ok_or(Error::NoBeginning)?;
        self.writer.publish(step, rows)?;
        match &mut self.words {
            Words::Host => self.writer.set_done(step),
            // SAFETY: the caller's promise.
            words @ Words::Stream { .. } => unsafe {
                words.write(stream, Writer::DONE_BYTE, step)?;
            },
        }
        self.open = None;
        Ok(())
    }
}

impl Words {
    /// # Safety
    /// `stream` is one of the device.
    unsafe fn write(&mut self, stream: u64, byte: usize, step: Stepped) -> Result<(), Error> {
        let Self::Stream { registered, device, last } = self else { return Ok(()) };
        let address = registered.device_address() + byte as u64;
        *last = Some(stream);
        // SAFETY: the caller's promise; the words stay registered until the stream has written
        // them.
        unsafe { device.write_value(stream, address, step.epoch)? };
        Ok(())
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if let Self::Stream { device, last: Some(stream), .. } = self {
            // SAFETY: the stream is there until we are gone. Letting the registration go waits for
            // the device's own stream, and so for this.
            let _ = unsafe { device.wait_for(*stream) };
        }
    }
}

fn facts(pool: &Pool, export: Option<Export>) -> Facts {
    let table = pool.table();
    Facts {
        page_tokens: pool.page_tokens(),
        pages: pool.pages(),
        r2t_rows: table.rows,
        r2t_stride: table.stride,
        export,
    }
}
