//! Finds the parts of an answer's body in the bytes of its connection. Pure.
//!
//! A chunk's extensions, and trailers after the last chunk, say nothing to a proxy, and are
//! skipped.

use bytes::{Buf as _, Bytes};

use super::Broken;

/// The most bytes of all trailers, or of a chunk's extensions.
const SKIPPED_BYTES_MAX: usize = 16 * 1024;
/// 1 TiB, far more than any answer has.
const SIZE_DIGITS_MAX: u32 = 10;

#[derive(Debug)]
pub(super) struct AnswerReader(State);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// So many bytes come.
    Length(u64),
    Chunked(Chunk),
    UntilClose,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    /// What the digits say that came so far.
    Size {
        bytes: u64,
        digits: u32,
    },
    /// After the size, up to its line's end.
    Extensions {
        bytes: u64,
        skipped: usize,
    },
    SizeEnd {
        bytes: u64,
    },
    Data {
        bytes_left: u64,
    },
    DataEnd,
    DataLineEnd,
    /// At a line's begin, after the last chunk.
    Trailers {
        skipped: usize,
    },
    Trailer {
        skipped: usize,
    },
    End,
}

impl AnswerReader {
    pub(super) fn length(bytes: u64) -> Self {
        Self(if bytes == 0 { State::Ended } else { State::Length(bytes) })
    }

    pub(super) fn chunked() -> Self {
        Self(State::Chunked(Chunk::Size { bytes: 0, digits: 0 }))
    }

    pub(super) fn until_close() -> Self {
        Self(State::UntilClose)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.0 == State::Ended
    }

    pub(super) fn ends_with_connection(&self) -> bool {
        self.0 == State::UntilClose
    }

    /// `None` if it isn't known.
    pub(super) fn bytes_left(&self) -> Option<u64> {
        match self.0 {
            State::Length(bytes) => Some(bytes),
            State::Ended => Some(0),
            State::Chunked(_) | State::UntilClose => None,
        }
    }

    /// Takes the next part of the body out of `input`, and what comes before the part after it.
    /// `None` if no part is there.
    pub(super) fn take(&mut self, input: &mut Bytes) -> Result<Option<Bytes>, Broken> {
        self.skip_framing(input)?;
        let bytes_max = match self.0 {
            State::Ended => return Ok(None),
            State::UntilClose => u64::MAX,
            State::Length(bytes) | State::Chunked(Chunk::Data { bytes_left: bytes }) => bytes,
            State::Chunked(_) => return Ok(None),
        };
        if input.is_empty() {
            return Ok(None);
        }
        let bytes = usize::try_from(bytes_max).map_or(input.len(), |max| max.min(input.len()));
        let part = input.split_to(bytes);
        let bytes_left = bytes_max - bytes as u64;
        self.0 = match self.0 {
            State::Length(_) if bytes_left == 0 => State::Ended,
            State::Length(_) => State::Length(bytes_left),
            State::Chunked(_) if bytes_left == 0 => State::Chunked(Chunk::DataEnd),
            State::Chunked(_) => State::Chunked(Chunk::Data { bytes_left }),
            State::UntilClose | State::Ended => self.0,
        };
        // So that the end shows with the last part.
        self.skip_framing(input)?;
        Ok(Some(part))
    }

    /// The connection has ended.
    pub(super) fn close(&mut self) -> Result<(), Broken> {
        match self.0 {
            State::UntilClose | State::Ended => {
                self.0 = State::Ended;
                Ok(())
            }
            State::Length(_) | State::Chunked(_) => Err(Broken::Closed),
        }
    }

    fn skip_framing(&mut self, input: &mut Bytes) -> Result<(), Broken> {
        while let State::Chunked(chunk) = self.0 {
            if matches!(chunk, Chunk::Data { .. }) {
                break;
            }
            let Some(&byte) = input.first() else { break };
            input.advance(1);
            self.0 = match chunk.after(byte)? {
                Some(next) => State::Chunked(next),
                None => State::Ended,
            };
        }
        Ok(())
    }
}

impl Chunk {
    /// `None` at the end of the body.
    fn after(self, byte: u8) -> Result<Option<Self>, Broken> {
        let next = match (self, byte) {
            (Self::Size { bytes, digits }, _) if byte.is_ascii_hexdigit() => {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                if digits == SIZE_DIGITS_MAX {
                    return Err(Broken::NotHttp("a chunk is too large"));
                }
                Self::Size { bytes: bytes * 16 + u64::from(digit), digits: digits + 1 }
            }
            (Self::Size { bytes, digits: 1.. }, b'\r')
            | (Self::Extensions { bytes, .. }, b'\r') => Self::SizeEnd { bytes },
            (Self::Size { bytes, digits: 1.. }, b';' | b' ' | b'\t') => {
                Self::Extensions { bytes, skipped: 0 }
            }
            (Self::Extensions { bytes, skipped }, _) if byte != b'\n' => {
                Self::Extensions { bytes, skipped: count(skipped)? }
            }
            (Self::SizeEnd { bytes: 0 }, b'\n') => Self::Trailers { skipped: 0 },
            (Self::SizeEnd { bytes }, b'\n') => Self::Data { bytes_left: bytes },
            (Self::DataEnd, b'\r') => Self::DataLineEnd,
            (Self::DataLineEnd, b'\n') => Self::Size { bytes: 0, digits: 0 },
            (Self::Trailers { .. }, b'\r') => Self::End,
            (Self::Trailer { skipped }, b'\n') => Self::Trailers { skipped },
            (Self::Trailers { skipped } | Self::Trailer { skipped }, _) => {
                Self::Trailer { skipped: count(skipped)? }
            }
            (Self::End, b'\n') => return Ok(None),
            _ => return Err(Broken::NotHttp("a chunk is illegal")),
        };
        Ok(Some(next))
    }
}

fn count(skipped: usize) -> Result<usize, Broken> {
    if skipped < SKIPPED_BYTES_MAX {
        Ok(skipped + 1)
    } else {
        Err(Broken::NotHttp("too much comes beside a chunk"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads a body that arrives in parts, and returns it with the bytes after its end.
    fn read(
        mut reader: AnswerReader,
        text: &[u8],
        part_bytes: usize,
    ) -> Result<(Vec<u8>, Vec<u8>), Broken> {
        let (mut body, mut input) = (vec![], Bytes::new());
        for part in text.chunks(part_bytes) {
            input = [&*input, part].concat().into();
            while let Some(part) = reader.take(&mut input)? {
                assert!(!part.is_empty());
                body.extend_from_slice(&part);
            }
        }
        reader.close()?;
        Ok((body, input.to_vec()))
    }

    const CHUNKS: &[u8] =
        b"2\r\nok\r\n00A;x=\"y\"\r\n0123456789\r\n1 \r\n!\r\n0\r\nx-a: 1\r\nx-b: 2\r\n\r\nrest";

    proptest! {
        #[test]
        fn a_body_is_the_same_however_it_arrives(part_bytes in 1_usize..80) {
            let chunks = read(AnswerReader::chunked(), CHUNKS, part_bytes).unwrap();
            prop_assert_eq!(chunks, (b"ok0123456789!".to_vec(), b"rest".to_vec()));
            let length = read(AnswerReader::length(3), b"yesrest", part_bytes).unwrap();
            prop_assert_eq!(length, (b"yes".to_vec(), b"rest".to_vec()));
            let all = read(AnswerReader::until_close(), b"yesrest", part_bytes).unwrap();
            prop_assert_eq!(all, (b"yesrest".to_vec(), vec![]));
        }

        #[test]
        fn no_bytes_panic(
            text in prop::collection::vec(any::<u8>(), 1..60),
            part_bytes in 1_usize..9,
        ) {
            let _ = read(AnswerReader::chunked(), &text, part_bytes);
        }

        #[test]
        fn a_body_that_is_cut_off_is_an_error(cut in 1_usize..CHUNKS.len() - 4) {
            prop_assert!(read(AnswerReader::chunked(), &CHUNKS[..cut], cut).is_err());
        }
    }

    #[test]
    fn the_end_shows_with_the_last_part() {
        let (mut reader, mut input) = (AnswerReader::chunked(), Bytes::from_static(CHUNKS));
        for _ in 0..3 {
            assert!(!reader.has_ended());
            reader.take(&mut input).unwrap().unwrap();
        }
        assert!(reader.has_ended());
    }

    #[test]
    fn illegal_chunks_are_refused() {
        let long = [b"2;", "x".repeat(SKIPPED_BYTES_MAX + 1).as_bytes()].concat();
        let trailers = [b"0\r\n", "x: y\r\n".repeat(SKIPPED_BYTES_MAX).as_bytes()].concat();
        for text in [
            &b"\r\n"[..],
            b";x\r\n",
            b"-1\r\n",
            b"0x2\r\nok\r\n",
            b"2\nok",
            b"2;x\nok",
            b"2\r\nokk",
            b"2\r\nok\n",
            b"FFFFFFFFFFFFFFFFF\r\n",
            &long,
            &trailers,
        ] {
            let read = read(AnswerReader::chunked(), text, text.len());
            assert!(matches!(read, Err(Broken::NotHttp(_))), "{read:?}");
        }
    }
}
