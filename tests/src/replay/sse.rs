//! Splits a byte stream into the data of its server-sent events (a pure module).
//!
//! The reader supports only what the two APIs use: `data:` lines that end in LF or CRLF, even if
//! the CRLF is split over two chunks. Several data lines of one event are joined by LF. Memory is
//! bounded.

use bytes::{Buf, BytesMut};

/// The longest event. SGLang repeats all output ids in each event; 16 MiB are about two million
/// ids.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// The error for an event that is longer than the reader accepts.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("an event is longer than {EVENT_BYTES_MAX} bytes")]
pub struct TooLong;

/// Reads events from chunks, wherever the chunks are split.
#[derive(Debug, Default)]
pub struct Reader {
    buffer: BytesMut,
    /// The number of leading bytes in the buffer that are known to hold no line end.
    scanned: usize,
    data: Vec<u8>,
    has_data: bool,
}

impl Reader {
    /// Adds the next bytes of the stream.
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), TooLong> {
        if self.buffer.len() + self.data.len() + chunk.len() > EVENT_BYTES_MAX {
            return Err(TooLong);
        }
        self.buffer.extend_from_slice(chunk);
        Ok(())
    }

    /// Returns the data of the next complete event. Call this after each chunk until it returns
    /// `None`.
    pub fn next_event(&mut self) -> Option<Vec<u8>> {
        while let Some(line) = self.next_line() {
            if line.is_empty() {
                if std::mem::take(&mut self.has_data) {
                    return Some(std::mem::take(&mut self.data));
                }
            } else if let Some(value) = line.strip_prefix(b"data:") {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            }
        }
        None
    }

    fn next_line(&mut self) -> Option<BytesMut> {
        let Some(found) = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n') else {
            self.scanned = self.buffer.len();
            return None;
        };
        let mut line = self.buffer.split_to(self.scanned + found);
        self.buffer.advance(1);
        self.scanned = 0;
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &[u8] =
        b"data: one\r\n\r\n: comment\nevent: x\ndata:two\ndata: more\n\n\ndata: \n\n\
                            data: cut off";

    fn events(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut reader = Reader::default();
        let mut events = Vec::new();
        for chunk in chunks {
            reader.push(chunk).unwrap();
            events.extend(std::iter::from_fn(|| reader.next_event()));
        }
        events
    }

    #[test]
    fn reads_data_and_leaves_an_unfinished_event() {
        let expected: Vec<Vec<u8>> = vec![b"one".to_vec(), b"two\nmore".to_vec(), Vec::new()];
        assert_eq!(events(&[STREAM]), expected);
    }

    #[test]
    fn an_endless_event_is_refused() {
        let mut reader = Reader::default();
        let chunk = vec![b'a'; 1 << 20];
        let pushed = (0..64).take_while(|_| reader.push(&chunk).is_ok()).count();
        assert_eq!(pushed, 16);
    }

    proptest! {
        #[test]
        fn chunk_borders_do_not_matter(mut cuts in prop::collection::vec(0..STREAM.len(), 0..9)) {
            cuts.sort_unstable();
            let mut chunks = Vec::new();
            let mut start = 0;
            for cut in cuts {
                chunks.push(&STREAM[start..cut]);
                start = cut;
            }
            chunks.push(&STREAM[start..]);
            prop_assert_eq!(events(&chunks), events(&[STREAM]));
        }
    }
}
