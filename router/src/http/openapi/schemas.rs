//! The forms of the router's own requests and answers, as JSON schemas.

use contract::{api, load};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::{
    ToSchema,
    openapi::{RefOr, Schema},
};

use crate::{
    http::{
        fleet_sessions::SessionOrder,
        page::ENTRIES_MAX,
        sessions::{OpenBody, SessionId, SglangCloseBody, SglangOpenBody},
    },
    sessions::lifecycle::SESSIONS_LISTED_MAX,
};

pub(super) fn all() -> Vec<(String, RefOr<Schema>)> {
    let mut schemas = vec![];
    add::<SessionId>(&mut schemas);
    add::<OpenBody>(&mut schemas);
    add::<SglangOpenBody>(&mut schemas);
    add::<SglangCloseBody>(&mut schemas);
    add::<api::Announcement>(&mut schemas);
    add::<api::AnnouncementHeld>(&mut schemas);
    add::<api::Sessions>(&mut schemas);
    add::<api::Prefetch>(&mut schemas);
    add::<SessionOrder>(&mut schemas);
    add::<api::FleetSessions>(&mut schemas);
    add::<api::Workers>(&mut schemas);
    add::<api::RecentPlacements>(&mut schemas);
    add::<api::Placements>(&mut schemas);
    add::<api::Turns>(&mut schemas);
    require_what_is_always_sent(&mut schemas);
    schemas.extend(others().map(|(name, schema)| (name.to_owned(), parse(schema))));
    schemas
}

fn add<T: ToSchema>(schemas: &mut Vec<(String, RefOr<Schema>)>) {
    let mut added = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut added);
    for (_, schema) in &mut added {
        let mut value = serde_json::to_value(&*schema).expect("a schema is JSON");
        remove_assumptions(&mut value);
        *schema = parse(value);
    }
    schemas.extend(added);
}

/// What a reader takes absent members for is no part of an answer. And whole numbers without a sign
/// have none of the formats that OpenAPI names.
fn remove_assumptions(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            members.remove("default");
            members.remove("format");
            members.values_mut().for_each(remove_assumptions);
        }
        Value::Array(parts) => parts.iter_mut().for_each(remove_assumptions),
        _ => {}
    }
}

/// Our own readers take absent members for unknown, so the derived schemas require none. Other
/// programs need not: what an empty answer has is in each one.
fn require_what_is_always_sent(schemas: &mut [(String, RefOr<Schema>)]) {
    let always_sent = [
        members::<api::FleetSession>(),
        members::<api::Figures>(),
        members::<api::Kv>(),
        members::<api::Placement>(),
        members::<api::PrefillPlacement>(),
        members::<api::RecentPlacement>(),
        members::<api::Turn>(),
        members::<api::UnheardAgent>(),
        members::<api::Worker>(),
        members::<load::EngineFacts>(),
        members::<load::Figure>(),
        members::<load::FunctionOff>(),
        members::<load::KvTransfer>(),
        members::<load::NamedFinding>(),
        members::<load::PageAudit>(),
        members::<load::PageClasses>(),
        members::<load::PageFinding>(),
        members::<load::Rank>(),
        members::<load::RankLoad>(),
        members::<load::StagedPrefill>(),
    ];
    for (name, schema) in schemas {
        let sent = always_sent.iter().find(|(answer, _)| answer == name);
        if let (Some((_, members)), RefOr::T(Schema::Object(schema))) = (sent, schema) {
            schema.required.clone_from(members);
        }
    }
}

/// Returns the name of the schema of `T`, and the members that each one has.
fn members<T: ToSchema + Serialize + Default>() -> (String, Vec<String>) {
    let empty = serde_json::to_value(T::default()).expect("plain members always serialise");
    let names = empty.as_object().into_iter().flatten().map(|(name, _)| name.clone());
    (T::name().into_owned(), names.collect())
}

fn parse(schema: Value) -> RefOr<Schema> {
    serde_json::from_value(schema).expect("each schema is a valid one")
}

/// What is no struct of ours.
fn others() -> [(&'static str, Value); 9] {
    let digest = "^[0-9a-f]{16}$";
    let whole = |means: String| {
        let max = u32::MAX;
        json!({ "type": "integer", "minimum": 0, "maximum": max, "description": means })
    };
    let text = |means: &str| json!({ "type": "string", "description": means });
    let turn_id = "The id in the header `x-berth-turn` of the turn's answer";
    let error = json!({
        "type": "object",
        "properties": {
            "message": { "type": "string" },
            "type": { "type": "string" },
            "param": { "type": "null" },
            "code": { "type": "string" },
        },
        "required": ["message", "type", "param", "code"],
    });
    [
        ("TurnId", json!({ "type": "string", "pattern": digest, "description": turn_id })),
        ("PageStart", text("The id before the first")),
        ("PageLimit", whole(format!("Taken as 1 to {SESSIONS_LISTED_MAX}, the default"))),
        ("RecentLimit", whole(format!("Taken as 1 to {ENTRIES_MAX}; 100 by default"))),
        ("SessionDigest", json!({ "type": "string", "pattern": digest })),
        ("SessionName", text("A session's digest, or its id")),
        (
            "SessionFilter",
            text(
                "A part of the id, principal, worker, state or retention, in any letter case; or \
                 the whole digest",
            ),
        ),
        ("Document", json!({ "type": "object", "required": ["openapi", "paths"] })),
        (
            "Refusal",
            json!({ "type": "object", "properties": { "error": error }, "required": ["error"] }),
        ),
    ]
}
