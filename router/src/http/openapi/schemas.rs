//! The forms of the router's own requests and answers, as JSON schemas.

use proto::id::SESSION_ID_BYTES_MAX;
use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};

use crate::{
    http::{fleet_sessions::SessionOrder, page::ENTRIES_MAX},
    turn::sessions::SESSIONS_LISTED_MAX,
};

pub(super) fn all() -> impl Iterator<Item = (&'static str, RefOr<Schema>)> {
    let answers = session_answers().into_iter().chain(announcement()).chain(other_answers());
    let answers = answers.chain(recent_events()).chain(fleet_sessions());
    requests().into_iter().chain(answers).map(|(name, schema)| {
        let schema = serde_json::from_value(schema).expect("each schema is a valid one");
        (name, RefOr::T(schema))
    })
}

fn requests() -> [(&'static str, Value); 7] {
    let name = json!({ "$ref": "#/components/schemas/SessionId" });
    let maybe_name = json!({ "oneOf": [name, { "type": "null" }] });
    let timeout = json!({
        "type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 315_360_000,
        "description": "The idle time in seconds after which the session closes",
    });
    let retentions = [json!("auto"), json!("pinned"), json!("tagged"), json!("none"), Value::Null];
    [
        (
            "SessionId",
            json!({
                "type": "string", "minLength": 1, "maxLength": SESSION_ID_BYTES_MAX,
                "description": format!("At most {SESSION_ID_BYTES_MAX} bytes"),
            }),
        ),
        (
            "TurnId",
            json!({
                "type": "string", "pattern": "^[0-9a-f]{16}$",
                "description": "The id in the header `x-berth-turn` of the turn's answer",
            }),
        ),
        ("PageStart", json!({ "type": "string", "description": "The id before the first" })),
        (
            "PageLimit",
            json!({
                "type": "integer", "minimum": 0, "maximum": u32::MAX,
                "description": format!("Taken as 1 to {SESSIONS_LISTED_MAX}, the default"),
            }),
        ),
        (
            "OpenSession",
            json!({
                "type": "object",
                "properties": {
                    "session_id": maybe_name, "timeout": timeout,
                    "retention": { "type": ["string", "null"], "enum": retentions },
                },
                "additionalProperties": false,
            }),
        ),
        (
            "SglangOpenSession",
            json!({
                "type": "object",
                "properties": {
                    "session_id": maybe_name, "timeout": timeout,
                "streaming": { "type": ["boolean", "null"] },
                },
            }),
        ),
        (
            "SglangCloseSession",
            json!({
                "type": "object",
                "properties": { "session_id": name },
                "required": ["session_id"],
            }),
        ),
    ]
}

fn session_answers() -> [(&'static str, Value); 2] {
    let states = ["bound", "opening", "idle", "running", "closing", "lost", "demoted"];
    [
        (
            "Session",
            json!({
                "type": "object",
                "properties": {
                    "session_id": { "type": "string" },
                    "worker": { "type": "string" },
                    "state": { "type": "string", "enum": states },
                    "retention": { "type": "string", "enum": ["pinned", "tagged", "none"] },
                    "turns": { "type": "integer" },
                    "turns_running": { "type": "integer" },
                    "exclusive": { "type": "boolean" },
                    "whole_history": { "type": "boolean" },
                    "resident_tokens": { "type": ["integer", "null"] },
                    "resident_tokens_source": { "type": ["string", "null"] },
                    "idle_ms": { "type": "integer" },
                    "idle_ms_at_report": { "type": "integer" },
                },
                "required": ["session_id", "worker", "state"],
            }),
        ),
        (
            "Sessions",
            json!({
                "type": "object",
                "properties": {
                    "sessions": {
                        "type": "array", "items": { "$ref": "#/components/schemas/Session" },
                    },
                    "more": { "type": "boolean" },
                    "next": { "type": "string", "description": "The `after` of the next page" },
                },
                "required": ["sessions", "more"],
            }),
        ),
    ]
}

fn announcement() -> [(&'static str, Value); 2] {
    [
        (
            "Announcement",
            json!({
                "type": "object",
                "properties": {
                    "agent_id": { "type": "string" },
                    "control": { "type": "string", "description": "http://host:port" },
                    "ttl_ms": { "type": "integer", "minimum": 0 },
                    "leaving": { "type": "boolean" },
                },
                "required": ["agent_id", "control", "ttl_ms"],
            }),
        ),
        (
            "AnnouncementHeld",
            json!({
                "type": "object",
                "properties": { "ttl_ms": { "type": "integer" } },
                "required": ["ttl_ms"],
            }),
        ),
    ]
}

fn fleet_sessions() -> [(&'static str, Value); 4] {
    let orders: Vec<Value> = SessionOrder::ALL.map(|order| json!(order)).into();
    [
        (
            "FleetSessions",
            json!({
                "type": "object",
                "properties": {
                    "sessions": { "type": "array", "items": { "type": "object" } },
                    "parents": {
                        "type": "array", "items": { "type": "object" },
                        "description": "Sessions not in the list that started some in it",
                    },
                    "total": { "type": "integer", "description": "Those that the filter finds" },
                },
                "required": ["sessions", "parents", "total"],
            }),
        ),
        ("SessionDigest", json!({ "type": "string", "pattern": "^[0-9a-f]{16}$" })),
        ("SessionOrder", json!({ "type": "string", "enum": orders })),
        (
            "SessionFilter",
            json!({
                "type": "string",
                "description": "A part of the id, principal, worker, state or retention, in any \
                                letter case; or the whole digest",
            }),
        ),
    ]
}

fn recent_events() -> [(&'static str, Value); 5] {
    let list = |name: &str| {
        json!({
            "type": "object",
            "properties": {
                name: { "type": "array", "items": { "type": "object" } },
                "next": { "$ref": "#/components/schemas/Cursor" },
            },
            "required": [name, "next"],
        })
    };
    [
        ("RecentPlacements", list("placements")),
        ("Turns", list("turns")),
        (
            "Cursor",
            json!({
                "type": "string", "pattern": r"^[0-9a-f]{8}\.[0-9]{1,18}$",
                "description": "The `next` of the last answer. Without it: the last entries",
            }),
        ),
        (
            "RecentLimit",
            json!({
                "type": "integer", "minimum": 0, "maximum": u32::MAX,
                "description": format!("Taken as 1 to {ENTRIES_MAX}; 100 by default"),
            }),
        ),
        (
            "SessionName",
            json!({ "type": "string", "description": "A session's digest, or its id" }),
        ),
    ]
}

fn other_answers() -> [(&'static str, Value); 4] {
    [
        (
            "Workers",
            json!({
                "type": "object",
                "properties": {
                    "workers": { "type": "array", "items": { "type": "object" } },
                    "unheard": { "type": "array", "items": { "type": "object" } },
                },
                "required": ["workers", "unheard"],
            }),
        ),
        (
            "Placements",
            json!({
                "type": "object",
                "properties": {
                    "turn": { "type": "string" },
                    "placements": { "type": "array", "items": { "type": "object" } },
                },
                "required": ["turn", "placements"],
            }),
        ),
        ("Document", json!({ "type": "object", "required": ["openapi", "paths"] })),
        (
            "Refusal",
            json!({
                "type": "object",
                "properties": {
                    "error": {
                        "type": "object",
                        "properties": {
                            "message": { "type": "string" },
                            "type": { "type": "string" },
                            "param": { "type": "null" },
                            "code": { "type": "string" },
                        },
                        "required": ["message", "type", "param", "code"],
                    },
                },
                "required": ["error"],
            }),
        ),
    ]
}
