//! Counts the bytes of a JSON body that can be text of a prompt, as the body arrives. Pure.
//!
//! An image, a video or a sound has many bytes and few tokens. It is a `data:` URI, or stands under
//! a key such as `image_data`; all else is text. So an image lifts the limit for itself alone.

use memchr::{memchr2, memmem};

/// Keys with such a part have values that are no text.
const MEDIA_KEY_MARKS: [&[u8]; 4] = [b"image", b"video", b"audio", b"file"];
/// Keys of several APIs whose values are no text.
const MEDIA_KEYS: [&[u8]; 2] = [b"data", b"b64_json"];
/// How a URI begins under any key. A comma or a semicolon follows, before any space.
const DATA_URI: &[u8] = b"data:";
/// Enough of a string to know it as a key or a URI.
const BEGINNING_BYTES_MAX: usize = 128;

#[derive(Debug, Default)]
pub(super) struct TextMeter {
    read_bytes: usize,
    /// Bytes that are no text, of what is complete.
    media_bytes: usize,
    place: Place,
    /// The beginning of the last string, which is a key if a colon follows.
    beginning: Vec<u8>,
    /// The number of open objects and arrays.
    depth: usize,
    /// The depth of the key whose value is no text, while that lasts.
    media_depth: Option<usize>,
}

/// Where the next byte stands; in a string, with the number of its bytes that were read.
#[derive(Debug, Clone, Copy, Default)]
enum Place {
    #[default]
    Outside,
    String(usize),
    /// After a backslash in a string.
    Escape(usize),
}

impl TextMeter {
    /// `body` is all of the body that has arrived.
    pub(super) fn read(&mut self, body: &[u8]) {
        let mut rest = body.get(self.read_bytes..).unwrap_or_default();
        while !rest.is_empty() {
            let step = match self.place {
                Place::Outside => self.read_outside(rest),
                Place::String(bytes) => self.read_string(rest, bytes),
                Place::Escape(bytes) => {
                    self.place = Place::String(bytes + 1);
                    1
                }
            };
            rest = &rest[step..];
        }
        self.read_bytes = self.read_bytes.max(body.len());
    }

    pub(super) fn text_bytes(&self) -> usize {
        let in_string = match self.place {
            Place::String(bytes) | Place::Escape(bytes) if self.is_media() => bytes,
            Place::String(_) | Place::Escape(_) | Place::Outside => 0,
        };
        self.read_bytes.saturating_sub(self.media_bytes + in_string)
    }

    /// Returns the number of bytes to the next string.
    fn read_outside(&mut self, rest: &[u8]) -> usize {
        for (index, byte) in rest.iter().enumerate() {
            self.media_bytes += usize::from(self.media_depth.is_some());
            match byte {
                b'"' => {
                    self.beginning.clear();
                    self.place = Place::String(0);
                    return index + 1;
                }
                b':' if self.media_depth.is_none() && is_media_key(&self.beginning) => {
                    self.media_depth = Some(self.depth);
                }
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.end_media(self.depth < self.media_depth.unwrap_or(0));
                }
                b',' => self.end_media(Some(self.depth) == self.media_depth),
                _ => {}
            }
        }
        rest.len()
    }

    fn end_media(&mut self, has_ended: bool) {
        if has_ended {
            self.media_depth = None;
        }
    }

    /// Returns the number of bytes to the string's end, or to an escape in it.
    fn read_string(&mut self, rest: &[u8], bytes: usize) -> usize {
        let end = memchr2(b'"', b'\\', rest);
        let inside = &rest[..end.unwrap_or(rest.len())];
        let missing = BEGINNING_BYTES_MAX - self.beginning.len();
        self.beginning.extend_from_slice(&inside[..inside.len().min(missing)]);
        let bytes = bytes + inside.len();
        match end {
            None => self.place = Place::String(bytes),
            Some(end) if rest[end] == b'\\' => self.place = Place::Escape(bytes + 1),
            Some(_) => {
                if self.is_media() {
                    self.media_bytes += bytes;
                }
                self.place = Place::Outside;
            }
        }
        inside.len() + usize::from(end.is_some())
    }

    fn is_media(&self) -> bool {
        let is_uri = || {
            let uri = self.beginning.strip_prefix(DATA_URI);
            let end = uri.and_then(|uri| uri.iter().find(|byte| b";, ".contains(byte)));
            end.is_some_and(|end| *end != b' ')
        };
        self.media_depth.is_some() || is_uri()
    }
}

fn is_media_key(key: &[u8]) -> bool {
    MEDIA_KEYS.contains(&key)
        || MEDIA_KEY_MARKS.iter().any(|mark| memmem::find(key, mark).is_some())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the text of a body that arrives in pieces.
    fn text_bytes(body: &str, piece: usize) -> usize {
        let mut meter = TextMeter::default();
        for end in (0..=body.len()).step_by(piece).chain([body.len()]) {
            meter.read(&body.as_bytes()[..end]);
        }
        meter.text_bytes()
    }

    #[test]
    fn an_image_is_no_text_and_all_beside_it_is() {
        let long = "A".repeat(1000);
        let cases = [
            format!(r#"{{"image_url":{{"url":"data:image/png;base64,{long}"}}}}"#),
            format!(r#"{{"url": "data:,{long}"}}"#),
            format!(r#"{{"image_url":{{"detail":"low","url":"{long}"}}}}"#),
            format!(r#"{{"image_data":[[{}0]],"n":1}}"#, "0,".repeat(500)),
            format!(r#"{{"image_data":["x","{long}"]}}"#),
            format!(r#"{{"input_audio":{{"format":"wav","data":"{long}"}}}}"#),
            format!(r#"{{"source":{{"type":"base64","data" : "{long}\/"}}}}"#),
        ];
        for body in cases {
            assert!(text_bytes(&body, body.len()) < 100, "{body}");
            let beside = format!(r#"[{body},{{"text":"{long}"}}]"#);
            let text = text_bytes(&beside, beside.len());
            assert!((1000..1150).contains(&text), "{text} in {beside}");
        }
        for body in [
            format!(r#"{{"text":"say data: {long}"}}"#),
            format!(r#"{{"text":"data: {long}"}}"#),
            format!(r#"{{"text":"data:{long}"}}"#),
            format!(r#"{{"image":{{"a":1}},"text":"{long}"}}"#),
            format!(r#"{{"a":[{{"image":"x"}}],"b":"{long}"}}"#),
            format!(r#"{{"text":"say \"data:{long}"}}"#),
            format!(r#"{{"image_data":"x","text":"{long}"}}"#),
            format!(r#"{{"x":"data:","nvext":[{}0]}}"#, "0,".repeat(500)),
        ] {
            assert!(text_bytes(&body, body.len()) > 1000, "{body}");
        }
    }

    proptest! {
        #[test]
        fn it_is_the_same_in_any_pieces(body in "[\"\\\\:a-d ,{}]{0,80}", piece in 1..9_usize) {
            let body = body.replace("ab", "data:").replace("cd", "\"image\":");
            prop_assert_eq!(text_bytes(&body, piece), text_bytes(&body, body.len().max(1)));
            prop_assert!(text_bytes(&body, piece) <= body.len());
        }
    }
}
