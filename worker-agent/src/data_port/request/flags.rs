//! Reads the flags of a body by which the agent decides.
//!
//! Refuses members that reach into the engine, and those that an engine would ignore although they
//! change what the rest of the body means.

use contract::{
    answers::runs_in_background,
    body::Object,
    flags::{NotAFlag, read_flag},
    route::Kind,
};
use service::refusal::{Code, Refusal};

/// SGLang's processes speak to each other by these members of its own API; the other APIs don't
/// have them. No client may choose them.
const INTERNAL_KEYS: [&str; 5] =
    ["encoder_urls", "http_worker_ipc", "http_worker_ipcs", "kv_hints", "conversation_id"];

/// With these members, the body has only the new part of a conversation. No SGLang up to 0.5.23
/// knows them: it would answer to that part alone, with status 200.
const HISTORY_KEYS: [(Kind, &str); 3] =
    [(Kind::Messages, "thread"), (Kind::Responses, "conversation"), (Kind::Responses, "prompt")];

pub(super) fn read_wants_stream(kind: Kind, object: &Object<'_>) -> Result<bool, Refusal> {
    let is_internal =
        |key: &str| matches!(kind, Kind::Generate | Kind::Encode) && INTERNAL_KEYS.contains(&key);
    let mut members = object.members().iter();
    let internal = members.find(|it| is_internal(&it.key) && it.value.get() != "null");
    if let Some(member) = internal {
        let message = format!(
            "{} is for SGLang's own processes, and would reach into the engine; leave it out",
            member.key
        );
        return Err(Refusal::new(Code::InvalidField, message));
    }
    refuse_history_elsewhere(kind, object)?;
    let unreadable = |key: &'static str| {
        move |error: NotAFlag| {
            Refusal::new(Code::InvalidField, format!("{key}: {error}; send true or false"))
        }
    };
    if runs_in_background(kind, object).map_err(unreadable("background"))? {
        return Err(Refusal::new(
            Code::BackgroundUnsupported,
            "a turn in the background would run on after its answer, and its result be lost with \
             the engine: leave `background` out, and read the answer",
        ));
    }
    read_flag(object.get("stream")).map_err(unreadable("stream"))
}

fn refuse_history_elsewhere(kind: Kind, object: &Object<'_>) -> Result<(), Refusal> {
    for (_, key) in HISTORY_KEYS.iter().filter(|(of_kind, _)| *of_kind == kind) {
        let Some(value) = object.get(key).filter(|value| value.get() != "null") else { continue };
        if *key != "thread" {
            let message = format!(
                "the engine knows no `{key}`, and would answer to `input` alone: leave it out, and \
                 send all of the input"
            );
            return Err(Refusal::new(Code::ConversationUnsupported, message));
        }
        let thread = Object::parse(value.get().as_bytes()).ok();
        let action = thread.as_ref().and_then(|thread| thread.get("type"));
        let (code, message) = match action.map(serde_json::value::RawValue::get) {
            Some("\"continue\"") => (
                Code::ThreadNotFound,
                "there is no such thread: leave `thread` out, and send all messages",
            ),
            _ => (
                Code::ThreadUnsupported,
                "the engine knows no threads, and would answer to the new message alone: leave \
                 `thread` out, and send all messages",
            ),
        };
        return Err(Refusal::new(code, message));
    }
    Ok(())
}
