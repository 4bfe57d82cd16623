//! Tests of the volatile preamble: which bytes are cut out of a body, and which never are.

use fastrand::Rng;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const CLAUDE: &str =
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;";

/// Returns the body without its preamble, or None if nothing is cut.
fn cut(path: &str, body: &str) -> Option<String> {
    let found = find(path, &Object::parse(body.as_bytes()).unwrap())?;
    assert_eq!(found.client, "claude_code");
    let cut = found.apply(Bytes::copy_from_slice(body.as_bytes()));
    Some(String::from_utf8(cut.to_vec()).unwrap())
}

/// Calls [`cut`] for a body in which `PRE` stands for the preamble.
fn cut_claude(path: &str, body: &str) -> Option<String> {
    cut(path, &body.replace("PRE", CLAUDE))
}

fn cut_system(text: &str) -> Option<String> {
    let out = cut("/v1/messages", &json!({"system": text}).to_string())?;
    let out: Value = serde_json::from_str(&out).unwrap();
    Some(out["system"].as_str().unwrap().to_owned())
}

#[test]
fn a_block_that_holds_only_the_preamble_goes_with_its_comma() {
    let cases = [
        (
            r#"{"system":[ {"type":"text","text":"PRE"} , {"type":"text","text":"Be"}],"n":1.50}"#,
            r#"{"system":[  {"type":"text","text":"Be"}],"n":1.50}"#,
        ),
        (r#"{"system":[ {"text":"PRE\n","type":"text"} ]}"#, r#"{"system":[  ]}"#),
        (r#"{"system":"PRE"}"#, r#"{"system":""}"#),
        (
            r#"{"system":[{"type":"text","text":"PRE\nBe","cache_control":{}}]}"#,
            r#"{"system":[{"type":"text","text":"Be","cache_control":{}}]}"#,
        ),
    ];
    for (body, want) in cases {
        assert_eq!(cut_claude("/v1/messages", body).as_deref(), Some(want), "from {body}");
    }
}

#[test]
fn a_chat_message_that_holds_only_the_preamble_goes_unless_it_is_the_only_one() {
    let cases = [
        (
            r#"{"messages":[{"role":"system","content":"PRE"}, {"role":"user","content":"PRE"}]}"#,
            r#"{"messages":[ {"role":"user","content":"PRE"}]}"#,
        ),
        (
            r#"{"messages":[{"role":"developer","content":[{"type":"text","text":"PRE"}]},1]}"#,
            r#"{"messages":[1]}"#,
        ),
        (
            r#"{"messages":[{"role":"system","content":"PRE"}]}"#,
            r#"{"messages":[{"role":"system","content":""}]}"#,
        ),
        (
            r#"{"messages":[{"role":"system","content":[{"type":"text","text":"PRE"}]}]}"#,
            r#"{"messages":[{"role":"system","content":[{"type":"text","text":""}]}]}"#,
        ),
        (
            r#"{"messages":[{"role":"system","content":[{"type":"text","text":"PRE"},"x"]},1]}"#,
            r#"{"messages":[{"role":"system","content":["x"]},1]}"#,
        ),
        (
            r#"{"messages":[{"role":"system","content":"PRE\n\nBe brief."},{}]}"#,
            r#"{"messages":[{"role":"system","content":"Be brief."},{}]}"#,
        ),
    ];
    for (body, want) in cases {
        let want = want.replace("PRE", CLAUDE);
        assert_eq!(cut_claude("/v1/chat/completions", body), Some(want), "from {body}");
    }
    let body = r#"{"instructions":"PRE\n\nBe brief.","input":"PRE"}"#.replace("PRE", CLAUDE);
    let left = format!(r#"{{"instructions":"Be brief.","input":"{CLAUDE}"}}"#);
    assert_eq!(cut("/v1/responses", &body), Some(left));
}

#[test]
fn line_breaks_behind_a_preamble_go_up_to_an_empty_line() {
    for (after_preamble, left) in [
        ("", ""),
        ("\n", ""),
        ("\r\n", ""),
        ("You are", "You are"),
        (" You are", " You are"),
        ("\nYou are", "You are"),
        ("\r\n\r\nYou are", "You are"),
        ("\n\n\nYou are", "\nYou are"),
        ("\r\rYou are", "\r\rYou are"),
        (" you, a=b; or not", " you, a=b; or not"),
    ] {
        assert_eq!(
            cut_system(&format!("{CLAUDE}{after_preamble}")).as_deref(),
            Some(left),
            "{after_preamble:?}"
        );
    }
    // Pairs that a newer client adds are a part of the preamble.
    assert_eq!(cut_system(&format!("{CLAUDE} cc_workload=;\nBe")).as_deref(), Some("Be"));
    assert_eq!(cut_system("x-anthropic-billing-header: cc_version=1;\nBe").as_deref(), Some("Be"));
}

#[test]
fn what_is_not_complete_or_not_at_the_beginning_stays() {
    let name = "x-anthropic-billing-header:";
    let long = format!("{name} cc_version=1; {}", "a=b; ".repeat(900));
    let texts = [
        String::new(),
        format!(" {CLAUDE}"),
        format!("\n{CLAUDE}"),
        format!("Keep {CLAUDE}"),
        CLAUDE.to_uppercase(),
        CLAUDE.trim_end_matches(';').to_owned(),
        format!("{} \nBe", CLAUDE.trim_end_matches(';')),
        name.to_owned(),
        format!("{name} "),
        format!("{name} is what they send"),
        format!("{name}  cc_version=1;"),
        format!("{name}cc_version=1;"),
        format!("{name} cch=1; cc_version=1;"),
        format!("{name} cc_version=1 2;"),
        format!("{name} cc_version=1\n;"),
        format!("{name} cc_version=é;"),
        format!("{name} cc_version={};", "1".repeat(300)),
        format!("{name} cc_version=1; cch=2"),
        format!("{name} cc_version=1; cch="),
        long,
    ];
    for text in texts {
        assert_eq!(cut_system(&text), None, "{text:?}");
    }
    // Pairs of less than 4 KiB are cut, whatever the length of the text after them.
    let text = format!("{name} cc_version=1; {}", "a=b; ".repeat(700));
    let prompt = "B".repeat(20_000);
    let left = cut_system(&format!("{}\n{prompt}", text.trim_end()));
    assert_eq!(left, Some(prompt));
}

#[test]
fn what_a_user_wrote_and_every_other_place_stays() {
    let bodies = [
        ("/v1/messages", r#"{"messages":[{"role":"user","content":"PRE"}]}"#),
        ("/v1/messages", r#"{"messages":[{"role":"system","content":"PRE"}]}"#),
        ("/v1/messages", r#"{"System":"PRE","x":{"system":"PRE"},"instructions":"PRE"}"#),
        ("/v1/messages", r#"{"system":"PRE","system":"Be"}"#),
        ("/v1/messages", r#"{"system":"PRE","\u0073ystem":null}"#),
        ("/v1/messages", r#"{"system":[{"type":"image","text":"PRE"}]}"#),
        ("/v1/messages", r#"{"system":[{"text":"PRE"}]}"#),
        ("/v1/messages", r#"{"system":[{"type":"text","text":["PRE"]}]}"#),
        ("/v1/messages", r#"{"system":[{"type":"text","text":"PRE","text":"Be"}]}"#),
        ("/v1/messages", r#"{"system":["PRE"]}"#),
        ("/v1/messages", r#"{"system":[[{"type":"text","text":"PRE"}]]}"#),
        ("/v1/messages", r#"{"system":{"type":"text","text":"PRE"}}"#),
        (
            "/v1/messages",
            r#"{"system":[{"type":"text","text":"Be"},{"type":"text","text":"PRE"}]}"#,
        ),
        ("/v1/messages", r#"{"system":[]}"#),
        ("/v1/messages", "{}"),
        ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"PRE"}]}"#),
        ("/v1/chat/completions", r#"{"messages":[{"role":"assistant","content":"PRE"}]}"#),
        ("/v1/chat/completions", r#"{"messages":[{"content":"PRE"}],"system":"PRE"}"#),
        (
            "/v1/chat/completions",
            r#"{"messages":[{"role":"system","content":"Be"},{"role":"system","content":"PRE"}]}"#,
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":[{"role":"system","role":"user","content":"PRE"}]}"#,
        ),
        ("/v1/chat/completions", r#"{"messages":"PRE"}"#),
        ("/v1/responses", r#"{"input":[{"role":"system","content":"PRE"}],"system":"PRE"}"#),
        ("/v1/completions", r#"{"prompt":"PRE","system":"PRE"}"#),
        ("/generate", r#"{"text":"PRE","system":"PRE"}"#),
        ("/v1/embeddings", r#"{"input":"PRE","system":"PRE"}"#),
    ];
    for (path, body) in bodies {
        assert_eq!(cut_claude(path, body), None, "{path} {body}");
    }
}

#[test]
fn escapes_in_keys_and_text_hide_nothing() {
    let body = r#"{"system":1,"s\u0079stem":[{"t\u0079pe":"te\u0078t","\u0074ext":"PRE"}]}"#;
    let escaped = CLAUDE.replace('-', "\\u002D").replace('/', "\\/").replace('=', "\\u003d");
    let left = r#"{"system":1,"s\u0079stem":[]}"#;
    assert_eq!(cut("/v1/messages", &body.replace("PRE", &escaped)).as_deref(), Some(left));
    let body = r#"{"system":"PRE\u000a\r\u000A\u00e9\ud83d\ude00\"\\"}"#.replace("PRE", &escaped);
    let left = r#"{"system":"\u00e9\ud83d\ude00\"\\"}"#;
    assert_eq!(cut("/v1/messages", &body).as_deref(), Some(left));
    let half = r#"{"system":"x-anthropic-billing-header: cc_version=\ud83d;"}"#;
    assert_eq!(cut("/v1/messages", half), None);
}

/// Writes JSON with random spaces and escapes. Before some members it writes another member with
/// the same key, which the later member overrides.
struct Writer(Rng);

impl Writer {
    fn space(&mut self) -> &'static str {
        let spaces = ["", "", "", " ", "\n", "\t \r\n"];
        spaces[self.0.usize(..spaces.len())]
    }

    fn string(&mut self, text: &str) -> String {
        let escapes = self.0.bool();
        let mut out = String::from("\"");
        for char in text.chars() {
            if escapes && self.0.u8(..4) == 0 {
                let mut units = [0; 2];
                for unit in char.encode_utf16(&mut units) {
                    let unit = format!("\\u{unit:04x}");
                    out.push_str(&unit);
                }
            } else {
                let plain = Value::from(char.to_string()).to_string();
                out.push_str(&plain[1..plain.len() - 1]);
            }
        }
        out + "\""
    }

    fn overridden(&mut self) -> Value {
        let block = json!({"type": "text", "text": CLAUDE, "role": "system", "content": CLAUDE});
        let values = [json!(CLAUDE), json!([block]), json!(null), json!({"system": CLAUDE})];
        values[self.0.usize(..values.len())].clone()
    }

    fn value(&mut self, value: &Value, depth: usize) -> String {
        let text = match value {
            Value::String(text) => self.string(text),
            Value::Array(values) => {
                let values: Vec<_> =
                    values.iter().map(|value| self.value(value, depth + 1)).collect();
                let space = self.space();
                format!("[{space}{}]", values.join(","))
            }
            Value::Object(members) => {
                let mut written = vec![];
                for (key, value) in members {
                    if depth < 3 && self.0.u8(..6) == 0 {
                        let overridden = self.overridden();
                        written.push(self.member(key, &overridden, depth + 3));
                    }
                    written.push(self.member(key, value, depth));
                }
                let space = self.space();
                format!("{{{space}{}}}", written.join(","))
            }
            plain => plain.to_string(),
        };
        format!("{}{text}{}", self.space(), self.space())
    }

    fn member(&mut self, key: &str, value: &Value, depth: usize) -> String {
        let (before, key, after) = (self.space(), self.string(key), self.space());
        let value = self.value(value, depth + 1);
        format!("{before}{key}{after}:{value}")
    }
}

/// Generates members beside the system prompt, some of which look like a preamble.
fn others() -> impl Strategy<Value = Vec<(String, Value)>> {
    let key = proptest::sample::select(vec!["model", "tools", "metadata", "input", "text", "é\""]);
    let value = prop_oneof![
        any::<i64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        Just(json!(CLAUDE)),
        Just(json!({"system": CLAUDE, "messages": [{"role": "system", "content": CLAUDE}]})),
    ];
    prop::collection::vec((key.prop_map(str::to_owned), value), 0..4)
}

/// Generates a preamble, and whether it is complete.
fn preambles() -> impl Strategy<Value = (String, bool)> {
    let pairs = prop::collection::vec("[a-z][a-z0-9_]{0,8}=[!-:<-~]{0,12}", 0..4);
    let broken = proptest::sample::select(vec!["", "", "", "start", "end"]);
    (pairs, broken).prop_map(|(pairs, broken)| {
        let pairs: String = pairs.iter().map(|pair| format!(" {pair};")).collect();
        let text = format!("x-anthropic-billing-header: cc_version=2.1.9;{pairs}");
        let text = match broken {
            "start" => format!("The {text}"),
            "end" => text.trim_end_matches(';').to_owned(),
            _ => text,
        };
        (text, broken.is_empty())
    })
}

/// Generates a route, a body with a preamble (`PRE`) in its system prompt, and the same body
/// without the preamble.
fn places() -> impl Strategy<Value = (&'static str, Value, Value)> {
    let breaks = proptest::sample::select(vec!["", "\n", "\r\n", "\n\n", "\r\n\n"]);
    // No `;`, which would complete an incomplete preamble.
    let rest = prop_oneof![Just(String::new()), "[A-Z]\\n?[ -:<-~éß€😀]{0,12}"];
    let more = prop::collection::vec(Just(json!({"type": "text", "text": CLAUDE})), 0..3);
    let forms = (0..5_u8, breaks, rest, more);
    forms.prop_map(|(form, breaks, rest, more)| {
        let text = format!("PRE{breaks}{rest}");
        let block = |text: &str| json!({"type": "text", "text": text, "cache_control": null});
        let message = |content: Value| json!({"role": "system", "content": content});
        let with = |first: Vec<Value>, more: &[Value]| Value::from([&first, more].concat());
        let kept: Vec<Value> = (!rest.is_empty()).then(|| block(&rest)).into_iter().collect();
        let blocks = (with(vec![block(&text)], &more), with(kept, &more));
        // A message that is the only one stays, with the blocks that are left.
        let (user, none) = (json!({"role": "user", "content": CLAUDE}), rest.is_empty());
        match form {
            0 => ("/v1/messages", json!({"system": text}), json!({"system": rest})),
            1 => ("/v1/messages", json!({"system": blocks.0}), json!({"system": blocks.1})),
            2 => ("/v1/responses", json!({"instructions": text}), json!({"instructions": rest})),
            3 => {
                let users = vec![user; more.len()];
                let goes = none && !users.is_empty();
                let kept = if goes { vec![] } else { vec![message(json!(rest))] };
                let (before, after) =
                    (with(vec![message(json!(text))], &users), with(kept, &users));
                ("/v1/chat/completions", json!({"messages": before}), json!({"messages": after}))
            }
            _ => {
                let goes = none && more.is_empty();
                let kept = if goes { vec![] } else { vec![message(blocks.1)] };
                let (before, after) = (
                    with(vec![message(blocks.0)], std::slice::from_ref(&user)),
                    with(kept, std::slice::from_ref(&user)),
                );
                ("/v1/chat/completions", json!({"messages": before}), json!({"messages": after}))
            }
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_body_parses_to_itself_without_the_preamble_and_loses_one_stretch_of_bytes(
        (preamble, is_complete) in preambles(),
        (path, before, after) in places(),
        others in others(),
        seed in any::<u64>(),
    ) {
        let (mut before, mut after) = (before, after);
        fill(&mut before, &preamble);
        for (key, value) in others {
            before[&key] = value.clone();
            after[&key] = value;
        }
        let body = Writer(Rng::with_seed(seed)).value(&before, 0);
        let object = Object::parse(body.as_bytes()).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Value>(&body).unwrap(), &before);
        let Some(found) = find(path, &object) else {
            prop_assert!(!is_complete, "left in {}", body);
            return Ok(());
        };
        prop_assert!(is_complete, "cut {:?} of {}", found, body);
        let out = found.apply(Bytes::from(body.clone()));
        let kept = [&body[..found.range.start], &body[found.range.end..]].concat();
        prop_assert_eq!(std::str::from_utf8(&out).unwrap(), kept);
        prop_assert_eq!(serde_json::from_slice::<Value>(&out).unwrap(), after);
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,60}", raw in prop::collection::vec(any::<u8>(), 0..60)) {
        let name = "x-anthropic-billing-header: cc_version=";
        for text in [text.clone(), format!("{name}{text}"), format!("{name}1;{text}")] {
            drop(cut_system(&text));
        }
        for body in [raw.clone(), [br#"{"system":""#, &*raw, br#""}"#].concat()] {
            if let Ok(object) = Object::parse(&body) {
                drop(find("/v1/messages", &object));
            }
        }
    }
}

/// Replaces each `PRE` in the generated value with the preamble.
fn fill(value: &mut Value, preamble: &str) {
    match value {
        Value::String(text) => *text = text.replacen("PRE", preamble, 1),
        Value::Array(values) => values.iter_mut().for_each(|value| fill(value, preamble)),
        Value::Object(members) => members.values_mut().for_each(|value| fill(value, preamble)),
        _ => {}
    }
}
