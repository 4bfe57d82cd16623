//! Counts the events of a stream as it passes, and finds the one that closes it. Pure.
//!
//! A stream closes with `[DONE]` or, on the Messages and Responses APIs, with an event of a certain
//! name. Clients leave then, and don't wait for the body's end. This reader looks at no more than
//! an event's start, in which no text of the model stands.

use std::sync::LazyLock;

use memchr::memmem::Finder;

/// As SGLang writes it.
const BORDER: &[u8] = b"\n\n";
/// A finder made for each part would take as long as the search of a short part.
static BORDERS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(BORDER));
const CLOSING: [&[u8]; 5] = [
    b"data: [DONE]",
    b"event: message_stop\n",
    b"event: response.completed\n",
    b"event: response.failed\n",
    b"event: response.incomplete\n",
];
/// The longest start in [`CLOSING`] has 27.
const START_BYTES: usize = 32;

/// The parts of a stream may be cut anywhere.
#[derive(Debug, Default)]
pub(super) struct EventReader {
    /// The number of whole events.
    count: u64,
    /// The start of the event that has begun.
    start: [u8; START_BYTES],
    start_bytes: usize,
    /// Whether the last byte is a line end in an event, which another one would end.
    is_at_line_end: bool,
    is_closed: bool,
}

impl EventReader {
    pub(super) fn feed(&mut self, mut part: &[u8]) {
        if self.is_at_line_end && part.first() == Some(&b'\n') {
            self.end_event(&[]);
            part = &part[1..];
        }
        let mut from = 0;
        for border in BORDERS.find_iter(part) {
            self.end_event(&part[from..border]);
            from = border + BORDER.len();
        }
        self.keep_start(&part[from..]);
        if let Some(last) = part[from..].last() {
            self.is_at_line_end = *last == b'\n';
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    fn keep_start(&mut self, text: &[u8]) {
        let bytes = text.len().min(START_BYTES - self.start_bytes);
        self.start[self.start_bytes..][..bytes].copy_from_slice(&text[..bytes]);
        self.start_bytes += bytes;
    }

    fn end_event(&mut self, text: &[u8]) {
        self.count += 1;
        self.is_closed |= if self.start_bytes == 0 {
            is_closing(text)
        } else {
            self.keep_start(text);
            is_closing(&self.start[..self.start_bytes])
        };
        (self.start_bytes, self.is_at_line_end) = (0, false);
    }
}

fn is_closing(event: &[u8]) -> bool {
    // Of the events of a long stream, almost all have JSON and no name.
    !event.starts_with(b"data: {") && CLOSING.iter().any(|closing| event.starts_with(closing))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the number of events, and after which byte the stream is closed.
    fn read(stream: &str, part_bytes: usize) -> (u64, Option<usize>) {
        let (mut events, mut read_bytes, mut closed_at) = (EventReader::default(), 0, None);
        for part in stream.as_bytes().chunks(part_bytes) {
            events.feed(part);
            read_bytes += part.len();
            closed_at = closed_at.or(events.is_closed().then_some(read_bytes));
        }
        (events.count(), closed_at)
    }

    /// Streams of each API, and streams that are not at their end whatever their texts say.
    const STREAMS: [(&str, u64, bool); 8] = [
        ("data: {\"text\":\"[DONE]\"}\n\ndata: [DONE]\n\n", 2, true),
        ("event: message_delta\ndata: {}\n\nevent: message_stop\ndata: {\"type\":1}\n\n", 2, true),
        ("event: message_start\ndata: {}\n\nevent: error\ndata: {\"error\":{}}\n\n", 2, false),
        ("data: {}\n\nevent: response.completed\ndata: {\"response\":{\"output\":1}}\n\n", 2, true),
        ("event: response.incomplete\ndata: {}\n\n", 1, true),
        ("data: {\"text\":\"data: [DONE]\\n\\n\"}\n\nevent: response.failed", 1, false),
        ("event: response.completed\ndata: {\"response\":\n", 0, false),
        ("data: {\"finish_reason\":\"stop\"}\n\ndata: [DONE]", 1, false),
    ];

    proptest! {
        #[test]
        fn a_stream_closes_with_its_whole_last_event_however_it_is_cut(part_bytes in 1_usize..200) {
            for (stream, count, closes) in STREAMS {
                let (counted, closed_at) = read(stream, part_bytes);
                prop_assert_eq!(counted, count, "{}", stream);
                prop_assert_eq!(closed_at, closes.then_some(stream.len()), "{}", stream);
            }
        }
    }
}
