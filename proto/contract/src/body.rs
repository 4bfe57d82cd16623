//! Reads the top level of a JSON request body, and replaces the members that Berth owns.
//!
//! A rewrite keeps every other byte: no number is reformatted, no key reordered, no whitespace
//! lost. JSON parsers take the *last* of duplicate keys and decode escapes in keys. So a rewrite
//! removes every occurrence of an owned key from the top level, also one that is written with
//! escapes. Nested members belong to the client.

use std::{fmt, ops::Range};

use serde::{
    Deserialize as _, Deserializer as _,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

/// Real requests have fewer than 60. Without this bound, a body of tiny members would need a
/// multiple of its size in memory.
pub const MEMBERS_MAX: usize = 4096;

/// A client's values of these top-level keys are never forwarded.
pub const OWNED_KEYS: [&str; 11] = [
    "session_params",
    "session_id",
    "rid",
    "routed_dp_rank",
    // The engine's deprecated alias of routed_dp_rank.
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "decode_tp_size",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The body is not one JSON object, or the object has more than [`MEMBERS_MAX`] members.
    #[error("the body is not a JSON object: {0}")]
    NotAnObject(Fault),
}

/// Has at most 120 bytes of the text itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at line {line}, column {column} (byte {byte})")]
pub struct Fault {
    pub reason: String,
    /// The first line is 1.
    pub line: usize,
    /// Counts bytes within the line, from 1.
    pub column: usize,
    /// An offset in the text, from 0.
    pub byte: usize,
}

/// A reason may quote a value as long as the whole text.
const REASON_BYTES_MAX: usize = 120;

impl Fault {
    #[must_use]
    pub fn new(error: &serde_json::Error, text: &[u8]) -> Self {
        let (line, column) = (error.line(), error.column());
        let described = error.to_string();
        let position = format!(" at line {line} column {column}");
        let reason = described.strip_suffix(&position).unwrap_or(&described);
        let line_start = memchr::memchr_iter(b'\n', text)
            .nth(line.saturating_sub(2))
            .filter(|_| line > 1)
            .map_or(0, |newline| newline + 1);
        // After a newline, the parser counts column 0 of the next line.
        let byte = (line_start + column).saturating_sub(1);
        let reason_end = reason.floor_char_boundary(REASON_BYTES_MAX);
        Self {
            reason: reason[..reason_end].to_owned(),
            line: line.max(1),
            column: column.max(1),
            byte,
        }
    }
}

#[derive(Debug)]
pub struct Member<'a> {
    /// Escapes in it are decoded.
    pub key: String,
    pub value: &'a RawValue,
    /// An offset into the body.
    end: usize,
}

impl Member<'_> {
    /// Has offsets into the body.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.end - self.value.get().len()..self.end
    }
}

/// The whole text is valid JSON.
#[derive(Debug)]
pub struct Object<'a> {
    bytes: &'a [u8],
    /// The offset just after the opening brace.
    members_start: usize,
    members: Vec<Member<'a>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A range of the original body.
    Kept(Range<usize>),
    /// The place of the members that Berth adds, after all kept members. Each body has one.
    Added {
        /// Whether a comma must stand before the added members, because kept members precede them.
        needs_comma: bool,
    },
}

impl<'a> Object<'a> {
    /// Checks the whole text, so that malformed JSON is refused here and not by the engine.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let members_start =
            bytes.iter().position(|&byte| byte == b'{').map_or(0, |brace| brace + 1);
        let mut parser = serde_json::Deserializer::from_slice(bytes);
        let fault = |error| Error::NotAnObject(Fault::new(&error, bytes));
        let keys_and_values = parser.deserialize_map(MembersVisitor).map_err(fault)?;
        parser.end().map_err(fault)?;
        let body_address = bytes.as_ptr() as usize;
        let members = keys_and_values
            .into_iter()
            .map(|(key, value)| {
                let text = value.get();
                // The value borrows from `bytes`, so its address gives its offset.
                let end = text.as_ptr() as usize - body_address + text.len();
                Member { key, value, end }
            })
            .collect();
        Ok(Self { bytes, members_start, members })
    }

    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The last of duplicate keys counts, as for other parsers.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&'a RawValue> {
        self.members.iter().rev().find(|member| member.key == key).map(|member| member.value)
    }

    /// Returns offsets in [`Self::bytes`]. `part` must be a slice of that text, at any depth.
    #[must_use]
    pub fn range_of(&self, part: &str) -> Range<usize> {
        let start = (part.as_ptr() as usize).checked_sub(self.bytes.as_ptr() as usize);
        let start = start.expect("the part is a slice of the object's text");
        let range = start..start + part.len();
        assert!(range.end <= self.bytes.len(), "the part is a slice of the object's text");
        range
    }

    /// In the order in which they were written, duplicates included.
    #[must_use]
    pub fn members(&self) -> &[Member<'a>] {
        &self.members
    }

    /// Returns the body without `removed_keys`, and with a place for other members at its end.
    #[must_use]
    pub fn rewrite(&self, removed_keys: &[&str]) -> Vec<Part> {
        let mut parts = vec![Part::Kept(0..self.members_start)];
        let mut member_start = self.members_start;
        let mut kept_members = 0_usize;
        for member in &self.members {
            // A member's text begins where the member before it ends, with the comma between them.
            let member_text = member_start..member.end;
            member_start = member.end;
            if removed_keys.contains(&member.key.as_str()) {
                continue;
            }
            // The comma before the first kept member is left out.
            let comma_bytes =
                if kept_members == 0 { self.leading_comma_bytes(&member_text) } else { 0 };
            push_kept(&mut parts, member_text.start + comma_bytes..member_text.end);
            kept_members += 1;
        }
        parts.push(Part::Added { needs_comma: kept_members > 0 });
        push_kept(&mut parts, member_start..self.bytes.len());
        parts
    }

    /// Counts the whitespace and the comma at the beginning of a range; 0 without a comma.
    fn leading_comma_bytes(&self, range: &Range<usize>) -> usize {
        let bytes = &self.bytes[range.clone()];
        let comma_index = bytes.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(0);
        if bytes.get(comma_index) == Some(&b',') { comma_index + 1 } else { 0 }
    }
}

/// The first element of a JSON array.
#[derive(Debug)]
pub struct Element<'a> {
    pub value: &'a RawValue,
    /// The element and, if a comma follows, the text up to and with that comma. Without this text,
    /// the array is valid and lacks the element.
    pub with_comma: &'a str,
    pub is_only: bool,
}

/// Doesn't read the elements after the first. `None` for an empty array and for any other value.
#[must_use]
pub fn first_element(array: &RawValue) -> Option<Element<'_>> {
    let inside = array.get().strip_prefix('[')?;
    let mut parser = serde_json::Deserializer::from_str(inside);
    let value = <&RawValue>::deserialize(&mut parser).ok()?;
    let text = value.get();
    // The value borrows from `inside`, so its address gives its offset.
    let start = text.as_ptr() as usize - inside.as_ptr() as usize;
    let end = start + text.len();
    let after_element = inside[end..].trim_start_matches([' ', '\t', '\n', '\r']);
    let is_only = !after_element.starts_with(',');
    let comma_end = inside.len() - after_element.len() + 1;
    let with_comma = if is_only { text } else { &inside[start..comma_end] };
    Some(Element { value, with_comma, is_only })
}

/// Adds a part, or extends the last one if the range begins where it ends.
fn push_kept(parts: &mut Vec<Part>, range: Range<usize>) {
    match parts.last_mut() {
        Some(Part::Kept(last)) if last.end == range.start => last.end = range.end,
        _ => parts.push(Part::Kept(range)),
    }
}

/// Doesn't parse the values.
struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry::<String, &'de RawValue>()? {
            if members.len() == MEMBERS_MAX {
                return Err(serde::de::Error::custom(format_args!(
                    "more than {MEMBERS_MAX} members"
                )));
            }
            members.push(member);
        }
        Ok(members)
    }
}

/// `added` is JSON text: members separated by commas, without braces. It may be empty.
#[must_use]
pub fn assemble(bytes: &[u8], parts: &[Part], added: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + 128);
    for part in parts {
        match part {
            Part::Kept(range) => out.extend_from_slice(&bytes[range.clone()]),
            Part::Added { .. } if added.is_empty() => {}
            Part::Added { needs_comma } => {
                out.extend_from_slice(if *needs_comma { b"," } else { b"" });
                out.extend_from_slice(added.as_bytes());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn rewritten(body: &str, added: &str) -> String {
        let object = Object::parse(body.as_bytes()).unwrap();
        let bytes = assemble(body.as_bytes(), &object.rewrite(&OWNED_KEYS), added);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn every_way_to_write_an_owned_key_is_removed() {
        let cases = [
            (r#"{"rid":"x"}"#, r#"{"rid":"B"}"#),
            (r#"{"rid":"x","a":1}"#, r#"{"a":1,"rid":"B"}"#),
            (r#"{"a":1,"rid":"x"}"#, r#"{"a":1,"rid":"B"}"#),
            (
                r#"{"rid":1,"a":1,"rid":[2],"b":{"rid":3},"rid":{}}"#,
                r#"{"a":1,"b":{"rid":3},"rid":"B"}"#,
            ),
            (r#"{"\u0072id":"x", "a":1}"#, r#"{ "a":1,"rid":"B"}"#),
            ("{ \"rid\" : 1 ,\n \"a\" : 1.0e0 }\n", "{\n \"a\" : 1.0e0,\"rid\":\"B\" }\n"),
            (r#"{"session_id":"s","session_params":{"id":"s"}}"#, r#"{"rid":"B"}"#),
            ("{}", r#"{"rid":"B"}"#),
            ("  { }", r#"  {"rid":"B" }"#),
            (r#"{"Rid":1}"#, r#"{"Rid":1,"rid":"B"}"#),
        ];
        for (body, want) in cases {
            assert_eq!(rewritten(body, r#""rid":"B""#), want, "from {body}");
        }
    }

    #[test]
    fn a_body_without_owned_keys_keeps_every_byte() {
        let body = "{\"z\": 1.50, \"a\":\"\\u00e9\\/\" ,\t\"z\":[ ]}";
        assert_eq!(rewritten(body, ""), body);
    }

    #[test]
    fn the_last_of_duplicate_keys_counts() {
        let object = Object::parse(br#"{"a":1,"\u0061":2}"#).unwrap();
        assert_eq!(object.get("a").unwrap().get(), "2");
        assert!(object.get("b").is_none());
    }

    #[test]
    fn a_member_says_where_its_value_lies() {
        let body = "{ \"a\" : [1, 2] ,\"b\":\"é\" }";
        let object = Object::parse(body.as_bytes()).unwrap();
        let values: Vec<&str> =
            object.members().iter().map(|member| &body[member.range()]).collect();
        assert_eq!(values, ["[1, 2]", "\"é\""]);
    }

    #[test]
    fn the_first_element_of_an_array_goes_with_its_comma() {
        let cases = [
            (r#"{"a":[1 , 2]}"#, "1", r#"{"a":[ 2]}"#),
            (r#"{"a":[ {"x":[1,2]},"é"] }"#, r#"{"x":[1,2]}"#, r#"{"a":[ "é"] }"#),
            (r#"{"a":[ "," ]}"#, r#"",""#, r#"{"a":[  ]}"#),
        ];
        for (body, value, left) in cases {
            let object = Object::parse(body.as_bytes()).unwrap();
            let first = first_element(object.get("a").unwrap()).unwrap();
            assert_eq!(first.value.get(), value);
            let range = object.range_of(first.with_comma);
            assert_eq!(format!("{}{}", &body[..range.start], &body[range.end..]), left);
            assert_eq!(first.is_only, !left.contains(['2', 'é']), "{body}");
        }
        for body in [r#"{"a":[]}"#, r#"{"a":{"b":[1]}}"#, r#"{"a":"[1]"}"#] {
            let object = Object::parse(body.as_bytes()).unwrap();
            assert!(first_element(object.get("a").unwrap()).is_none(), "{body}");
        }
    }

    #[test]
    fn text_that_is_not_one_object_is_refused() {
        for body in ["", "[]", "null", "{", "{\"a\":}", "{} x", "{\"a\":1,}", "{\"a\":\"\u{1}\"}"] {
            assert!(Object::parse(body.as_bytes()).is_err(), "{body:?} was taken");
        }
        assert!(Object::parse(b"{\"a\":\"\xff\"}").is_err(), "not UTF-8");
        let many = vec!["\"a\":0"; MEMBERS_MAX + 1].join(",");
        assert!(Object::parse(format!("{{{many}}}").as_bytes()).is_err());
    }

    #[test]
    fn a_malformed_body_says_where_and_why() {
        let fault = |body: &str| {
            let Error::NotAnObject(fault) = Object::parse(body.as_bytes()).unwrap_err();
            (fault.reason, fault.line, fault.column, fault.byte)
        };
        assert_eq!(fault(r#"{"a":}"#), ("expected value".into(), 1, 6, 5));
        assert_eq!(fault("{\n \"a\": 1\n \"b\": 2\n}"), ("expected `,` or `}`".into(), 3, 2, 11));
        assert_eq!(fault("{} x").0, "trailing characters");
        assert_eq!(fault(r#"{"a":"#).0, "EOF while parsing a value");
        assert_eq!(fault("").3, 0);
        // A value of another type is not quoted as a whole.
        let text = format!("\"{}\"", "é".repeat(100_000));
        let Error::NotAnObject(fault) = Object::parse(text.as_bytes()).unwrap_err();
        assert!(fault.reason.starts_with("invalid type: string"), "{fault}");
        assert!(fault.to_string().len() < 200, "{fault}");
    }

    /// Generates JSON objects in which some keys are owned keys.
    fn objects() -> impl Strategy<Value = Vec<(String, Value)>> {
        let key = prop_oneof![
            3 => "[a-z\"\\\\é ]{0,6}",
            2 => proptest::sample::select(OWNED_KEYS.to_vec()).prop_map(str::to_owned),
        ];
        let value = prop_oneof![
            any::<i64>().prop_map(Value::from),
            "\\PC{0,8}".prop_map(Value::from),
            Just(serde_json::json!({"rid": [1, {"session_id": null}]})),
        ];
        prop::collection::vec((key, value), 0..8)
    }

    proptest! {
        #[test]
        fn a_parser_reads_the_same_members_except_owned_keys(members in objects(), pad in "[ \n\t]{0,3}") {
            let text: Vec<String> = members
                .iter()
                .map(|(key, value)| format!("{pad}{}{pad}:{pad}{value}{pad}", Value::from(key.as_str())))
                .collect();
            let body = format!("{pad}{{{pad}{}{pad}}}{pad}", text.join(","));
            let out = rewritten(&body, r#""rid":"B","session_id":"E""#);
            let mut want: serde_json::Map<String, Value> = members.into_iter().collect();
            want.retain(|key, _| !OWNED_KEYS.contains(&key.as_str()));
            want.insert("rid".into(), "B".into());
            want.insert("session_id".into(), "E".into());
            prop_assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), Value::Object(want));
        }
    }
}
