//! Keeps the beginnings of strings in a response, as much as known strings have.

use memchr::memchr2;

/// All known keys and strings are shorter.
const KNOWN_TEXT_BYTES_MAX: usize = 24;

#[derive(Debug, Default)]
pub(super) struct StringStart {
    bytes: [u8; KNOWN_TEXT_BYTES_MAX],
    /// The length of the whole string, which may be more than [`KNOWN_TEXT_BYTES_MAX`].
    len: usize,
}

impl StringStart {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let free = &mut self.bytes[self.len.min(KNOWN_TEXT_BYTES_MAX)..];
        let stored_bytes = bytes.len().min(free.len());
        free[..stored_bytes].copy_from_slice(&bytes[..stored_bytes]);
        self.len = self.len.saturating_add(bytes.len());
    }

    /// Returns an empty text if the string is too long to be known.
    pub(super) fn known_text(&self) -> &[u8] {
        if self.len <= KNOWN_TEXT_BYTES_MAX { &self.bytes[..self.len] } else { b"" }
    }
}

/// Reads up to a backslash or the string's end. Returns how many bytes were read, and whether the
/// string ended.
pub(super) fn scan_string(
    bytes: &[u8],
    is_escaped: &mut bool,
    text: &mut StringStart,
) -> (usize, bool) {
    if *is_escaped {
        *is_escaped = false;
        // No known key or word has an escape: the backslash makes this text equal none of them.
        text.push(b"\\");
        return (1, false);
    }
    let content_end = memchr2(b'"', b'\\', bytes);
    let content = &bytes[..content_end.unwrap_or(bytes.len())];
    text.push(content);
    match content_end {
        None => (bytes.len(), false),
        Some(index) => {
            *is_escaped = bytes[index] == b'\\';
            (index + 1, bytes[index] == b'"')
        }
    }
}
