//! Reads MessagePack values one by one, of the kinds that the engine's KV events have.
//!
//! A message may announce a length that is larger than the message itself. So a caller that
//! allocates memory for an announced length must bound it by [`Reader::bytes_left`].

use rmp::{Marker, decode};
use serde::{Deserialize as _, de::IgnoredAny};

/// Also the error of a text that is not valid UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a value is cut, too deep or of another kind")]
pub struct Error;

/// Bounds values that are skipped. Events have four levels.
const DEPTH_MAX: usize = 8;

#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// An array can't have more elements than this.
    pub(super) fn bytes_left(&self) -> usize {
        self.0.len()
    }

    pub(super) fn take_nil(&mut self) -> Result<bool, Error> {
        let is_nil = self.peek()? == Marker::Null;
        if is_nil {
            self.0 = &self.0[1..];
        }
        Ok(is_nil)
    }

    pub(super) fn is_array(&self) -> Result<bool, Error> {
        Ok(matches!(self.peek()?, Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
    }

    pub(super) fn read_array_len(&mut self) -> Result<usize, Error> {
        decode::read_array_len(&mut self.0).map(|length| length as usize).map_err(|_| Error)
    }

    pub(super) fn read_map_len(&mut self) -> Result<usize, Error> {
        decode::read_map_len(&mut self.0).map(|length| length as usize).map_err(|_| Error)
    }

    pub(super) fn read_text(&mut self) -> Result<&'a str, Error> {
        let (text, unread) = decode::read_str_from_slice(self.0).map_err(|_| Error)?;
        self.0 = unread;
        Ok(text)
    }

    pub(super) fn read_int(&mut self) -> Result<i128, Error> {
        decode::read_int(&mut self.0).map_err(|_| Error)
    }

    pub(super) fn skip_value(&mut self) -> Result<(), Error> {
        let mut decoder = rmp_serde::Deserializer::new(&mut self.0);
        decoder.set_max_depth(DEPTH_MAX);
        IgnoredAny::deserialize(&mut decoder).map(drop).map_err(|_| Error)
    }

    fn peek(&self) -> Result<Marker, Error> {
        self.0.first().map(|&byte| Marker::from_u8(byte)).ok_or(Error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_every_width() {
        let int = |bytes: &[u8]| Reader::new(bytes).read_int();
        assert_eq!([int(&[0x7f]), int(&[0xff])], [Ok(127), Ok(-1)]);
        assert_eq!(int(&[0xcc, 0xff]), Ok(255));
        assert_eq!(int(&[0xd1, 0xff, 0x7f]), Ok(-129));
        assert_eq!(int(&[0xd2, 0x80, 0, 0, 0]), Ok(i128::from(i32::MIN)));
        let most = [0xff; 8];
        assert_eq!(int(&[&[0xcf], &most[..]].concat()), Ok(i128::from(u64::MAX)));
        assert_eq!(int(&[&[0xd3], &most[..]].concat()), Ok(-1));
        assert_eq!(int(&[0xcd, 1]), Err(Error));
        assert_eq!(int(&[0xc0]), Err(Error));
    }

    #[test]
    fn a_value_of_any_kind_is_passed_over() {
        let map =
            [0x82, 0xa1, b'a', 0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xc3, 0xa1, b'b', 0xc4, 1, 9];
        let mut reader = Reader::new(&map);
        reader.skip_value().unwrap();
        assert_eq!(reader.bytes_left(), 0);
        assert_eq!(Reader::new(&map[..5]).skip_value(), Err(Error));
        assert_eq!(Reader::new(&[0x91; 64]).skip_value(), Err(Error));
        assert_eq!(Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff]).skip_value(), Err(Error));
        // Binary data, and a text, that are announced with 4 GiB.
        for first in [0xc6, 0xdb] {
            assert_eq!(Reader::new(&[first, 0xff, 0xff, 0xff, 0xff]).skip_value(), Err(Error));
        }
    }
}
