//! Reads MessagePack values, of the kinds that the engine's KV events have.
//!
//! [`Reader`] reads a message value by value, for the decoder of the events. It knows no event
//! fields, and allocates nothing. A message may announce a length that is larger than the message
//! itself. So a caller that allocates memory for an announced length must bound it by
//! [`Reader::bytes_left`].

/// Why a message could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The message ends inside a value.
    #[error("the message ends in the middle of a value")]
    Short,
    /// A value has another kind than expected.
    #[error("expected {wanted}, found byte 0x{found:02x}")]
    Kind {
        /// The kind that was expected.
        wanted: &'static str,
        /// The first byte of the value found.
        found: u8,
    },
    /// A string is not valid UTF-8.
    #[error("a string is not UTF-8")]
    Text,
    /// Values are nested too deeply.
    #[error("values are nested deeper than {DEPTH_MAX}")]
    Depth,
}

/// The maximum nesting depth. Events have four levels.
const DEPTH_MAX: usize = 8;

/// The unread rest of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Returns the number of unread bytes. An array can't have more elements than this.
    pub(super) fn bytes_left(&self) -> usize {
        self.0.len()
    }

    /// Consumes the next value if it is nil. Returns whether it was nil.
    pub(super) fn take_nil(&mut self) -> Result<bool, Error> {
        let is_nil = self.peek()? == 0xc0;
        if is_nil {
            self.take(1)?;
        }
        Ok(is_nil)
    }

    /// Whether an array comes next.
    pub(super) fn is_array(&self) -> Result<bool, Error> {
        Ok(matches!(self.peek()?, 0x90..=0x9f | 0xdc | 0xdd))
    }

    /// Reads an array's header and returns its number of elements.
    pub(super) fn read_array_len(&mut self) -> Result<usize, Error> {
        match self.read_byte()? {
            short @ 0x90..=0x9f => Ok(usize::from(short & 0x0f)),
            0xdc => self.read_length(2),
            0xdd => self.read_length(4),
            found => Err(Error::Kind { wanted: "array", found }),
        }
    }

    /// Reads a map's header and returns its number of pairs.
    pub(super) fn read_map_len(&mut self) -> Result<usize, Error> {
        match self.read_byte()? {
            short @ 0x80..=0x8f => Ok(usize::from(short & 0x0f)),
            0xde => self.read_length(2),
            0xdf => self.read_length(4),
            found => Err(Error::Kind { wanted: "map", found }),
        }
    }

    pub(super) fn read_text(&mut self) -> Result<&'a str, Error> {
        let length = match self.read_byte()? {
            short @ 0xa0..=0xbf => usize::from(short & 0x1f),
            0xd9 => self.read_length(1)?,
            0xda => self.read_length(2)?,
            0xdb => self.read_length(4)?,
            found => return Err(Error::Kind { wanted: "string", found }),
        };
        std::str::from_utf8(self.take(length)?).map_err(|_| Error::Text)
    }

    /// Reads an integer of any width.
    pub(super) fn read_int(&mut self) -> Result<i128, Error> {
        let (width, is_signed) = match self.read_byte()? {
            small @ 0x00..=0x7f => return Ok(i128::from(small)),
            small @ 0xe0..=0xff => return Ok(i128::from(small.cast_signed())),
            width @ 0xcc..=0xcf => (1 << (width - 0xcc), false),
            width @ 0xd0..=0xd3 => (1 << (width - 0xd0), true),
            found => return Err(Error::Kind { wanted: "integer", found }),
        };
        let bytes = self.take(width)?;
        let is_negative = is_signed && bytes[0] >= 0x80;
        let mut wide_bytes = [if is_negative { 0xff } else { 0 }; 16];
        wide_bytes[16 - width..].copy_from_slice(bytes);
        Ok(i128::from_be_bytes(wide_bytes))
    }

    /// Skips one value of any kind.
    pub(super) fn skip_value(&mut self) -> Result<(), Error> {
        self.skip_nested(DEPTH_MAX)
    }

    /// Skips one value that has at most `depth_max` levels.
    fn skip_nested(&mut self, depth_max: usize) -> Result<(), Error> {
        let inner_depth_max = depth_max.checked_sub(1).ok_or(Error::Depth)?;
        let inner_values = match self.peek()? {
            0x90..=0x9f | 0xdc | 0xdd => self.read_array_len()?,
            0x80..=0x8f | 0xde | 0xdf => 2 * self.read_map_len()?,
            0xa0..=0xbf | 0xd9..=0xdb => return self.read_text().map(drop),
            0x00..=0x7f | 0xe0..=0xff | 0xcc..=0xd3 => return self.read_int().map(drop),
            0xc0 | 0xc2 | 0xc3 => return self.take(1).map(drop),
            0xca => return self.take(1 + 4).map(drop),
            0xcb => return self.take(1 + 8).map(drop),
            width @ 0xc4..=0xc6 => {
                self.take(1)?;
                let length = self.read_length(1 << (width - 0xc4))?;
                return self.take(length).map(drop);
            }
            found => return Err(Error::Kind { wanted: "value of an event", found }),
        };
        (0..inner_values).try_for_each(|_| self.skip_nested(inner_depth_max))
    }

    /// Reads a big-endian length of `width` bytes.
    fn read_length(&mut self, width: usize) -> Result<usize, Error> {
        let bytes = self.take(width)?;
        Ok(bytes.iter().fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    fn peek(&self) -> Result<u8, Error> {
        self.0.first().copied().ok_or(Error::Short)
    }

    fn read_byte(&mut self) -> Result<u8, Error> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let (taken, unread) = self.0.split_at_checked(length).ok_or(Error::Short)?;
        self.0 = unread;
        Ok(taken)
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
        assert_eq!(int(&[0xcd, 1]), Err(Error::Short));
        assert_eq!(int(&[0xc0]), Err(Error::Kind { wanted: "integer", found: 0xc0 }));
    }

    #[test]
    fn a_value_of_any_kind_is_passed_over() {
        let map =
            [0x82, 0xa1, b'a', 0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xc3, 0xa1, b'b', 0xc4, 1, 9];
        let mut reader = Reader::new(&map);
        reader.skip_value().unwrap();
        assert_eq!(reader.bytes_left(), 0);
        assert_eq!(Reader::new(&map[..5]).skip_value(), Err(Error::Short));
        assert_eq!(Reader::new(&[0x91; 64]).skip_value(), Err(Error::Depth));
        assert_eq!(Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff]).skip_value(), Err(Error::Short));
    }
}
