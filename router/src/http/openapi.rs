//! Serves `GET /openapi.json`: the OpenAPI document of the router's own routes.
//!
//! The engine's routes are not in it: their form is the engine's.

mod schemas;

use std::sync::LazyLock;

use axum::response::{IntoResponse as _, Response};
use http::header;
use service::{refusal::Code, server::HEALTH_PATHS};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, HttpMethod, InfoBuilder, OpenApiBuilder, PathItem,
    PathsBuilder, Ref, Required, ResponseBuilder,
    path::{Operation, OperationBuilder, Parameter, ParameterBuilder, ParameterIn},
    request_body::{RequestBody, RequestBodyBuilder},
};

pub(super) const PATH: &str = "/openapi.json";

struct Route {
    method: HttpMethod,
    path: &'static str,
    summary: &'static str,
    request: Request,
    /// The status, and the name of the body's schema if there is a body.
    answers: &'static [(u16, Option<&'static str>)],
    /// The refusals besides [`COMMON_REFUSALS`].
    refusals: &'static [&'static [Code]],
}

enum Request {
    Plain,
    /// The name of the body's schema, and whether the body must be there.
    Body(&'static str, Required),
    SessionId,
    SessionDigest,
    FleetSessions,
    TurnId,
    Page,
    /// A page of a list that grows at its end.
    RecentPage,
    RecentTurns,
}

/// Every route but those of health has these.
const COMMON_REFUSALS: &[Code] = &[
    Code::Unauthorized,
    Code::ForeignPage,
    Code::RequestsPerMinute,
    Code::RequestsShare,
    Code::AuthUnavailable,
    Code::ConnectionsFull,
    Code::Internal,
];
const BODY: &[Code] = &[
    Code::InvalidJson,
    Code::InvalidField,
    Code::InvalidSessionId,
    Code::BodyTooLarge,
    Code::BodyIncomplete,
    Code::BodyLate,
    Code::BodyBytesShare,
    Code::BodyBytesInFlight,
];
const ID: &[Code] = &[Code::InvalidPath];
/// Refusals of a request that the agent of a session answers.
const AGENT: &[Code] = &[
    Code::SessionClosing,
    Code::WorkerFull,
    Code::NoWorker,
    Code::WorkerUnreachable,
    Code::WorkerFailed,
    Code::WorkerTimeout,
];
/// A session can expire before the answer to its open, if its idle time is that short.
const OPEN: &[Code] = &[
    Code::SessionUnknown,
    Code::RetentionUnavailable,
    Code::SessionOpenOtherwise,
    Code::SessionLost,
    Code::SessionsFull,
    Code::SessionsShare,
    Code::KeySessions,
    Code::OpenFailed,
];
const UNKNOWN: &[Code] = &[Code::SessionUnknown];
const DEMOTION: &[Code] = &[
    Code::SessionUnknown,
    Code::SessionBusy,
    Code::SessionNotPinned,
    Code::DemotionUnavailable,
    Code::SessionLost,
    Code::SessionReclaimed,
    Code::HistoryUnknown,
    Code::KvCorrupt,
    Code::WeightsChanged,
    Code::AdapterChanged,
    Code::QueuePlaces,
    Code::EngineDown,
    Code::Stopping,
];

const PREFETCH: &[Code] = &[
    Code::SessionUnknown,
    Code::PrefetchUnavailable,
    Code::PrefetchShare,
    Code::PrefetchNoRoom,
    Code::SessionLost,
    Code::SessionReclaimed,
    Code::HistoryUnknown,
    Code::KvCorrupt,
    Code::WeightsChanged,
    Code::AdapterChanged,
    Code::EngineDown,
    Code::Stopping,
];

/// All own routes but those of health.
const ROUTES: &[Route] = &[
    Route {
        method: HttpMethod::Get,
        path: "/v1/sessions",
        summary: "Lists the caller's sessions by id",
        request: Request::Page,
        answers: &[(200, Some("Sessions"))],
        refusals: &[&[Code::InvalidField]],
    },
    Route {
        method: HttpMethod::Post,
        path: "/v1/sessions",
        summary: "Opens a session; 200 if it was open",
        request: Request::Body("OpenSession", Required::False),
        answers: &[(200, Some("Session")), (201, Some("Session"))],
        refusals: &[BODY, AGENT, OPEN],
    },
    Route {
        method: HttpMethod::Get,
        path: "/v1/sessions/{id}",
        summary: "Shows a session",
        request: Request::SessionId,
        answers: &[(200, Some("Session"))],
        refusals: &[ID, &[Code::InvalidSessionId], UNKNOWN, AGENT],
    },
    Route {
        method: HttpMethod::Delete,
        path: "/v1/sessions/{id}",
        summary: "Closes a session",
        request: Request::SessionId,
        answers: &[(204, None)],
        refusals: &[ID, &[Code::InvalidSessionId], UNKNOWN, AGENT],
    },
    Route {
        method: HttpMethod::Post,
        path: "/v1/sessions/{id}/demote",
        summary: "Gives a pinned session's KV to the engine's cache; its history stays",
        request: Request::SessionId,
        answers: &[(204, None)],
        refusals: &[ID, &[Code::InvalidSessionId], AGENT, DEMOTION],
    },
    Route {
        method: HttpMethod::Post,
        path: "/v1/sessions/{id}/prefetch",
        summary: "Begins to load a session's KV from the host's memory to its device, for its next \
                  turn",
        request: Request::SessionId,
        answers: &[(200, Some("Prefetch"))],
        refusals: &[ID, &[Code::InvalidSessionId], AGENT, PREFETCH],
    },
    Route {
        method: HttpMethod::Post,
        path: "/open_session",
        summary: "Opens a session by SGLang's own request; `streaming` asks for a pinned session",
        request: Request::Body("SglangOpenSession", Required::False),
        answers: &[(200, Some("SessionId"))],
        refusals: &[BODY, AGENT, OPEN, &[Code::SessionExists]],
    },
    Route {
        method: HttpMethod::Post,
        path: "/close_session",
        summary: "Closes a session by SGLang's own request; 200 also if it is unknown",
        request: Request::Body("SglangCloseSession", Required::True),
        answers: &[(200, None)],
        refusals: &[BODY, AGENT],
    },
    Route {
        method: HttpMethod::Post,
        path: "/v1/agents",
        summary: "Announces an agent; for keys with the right `announce`",
        request: Request::Body("Announcement", Required::True),
        answers: &[(200, Some("AnnouncementHeld"))],
        refusals: &[BODY, &[Code::AnnounceForbidden]],
    },
    Route {
        method: HttpMethod::Get,
        path: "/v1/workers",
        summary: "Shows all workers and their figures; for admins",
        request: Request::Plain,
        answers: &[(200, Some("Workers"))],
        refusals: &[&[Code::AdminOnly]],
    },
    Route {
        method: HttpMethod::Get,
        path: "/v1/placements",
        summary: "Lists the last placements after a cursor, oldest first; for admins",
        request: Request::RecentPage,
        answers: &[(200, Some("RecentPlacements"))],
        refusals: &[&[Code::AdminOnly, Code::InvalidField]],
    },
    Route {
        method: HttpMethod::Get,
        path: "/v1/turns",
        summary: "Lists the last turns that have ended after a cursor, oldest first; for admins",
        request: Request::RecentTurns,
        answers: &[(200, Some("Turns"))],
        refusals: &[&[Code::AdminOnly, Code::InvalidField]],
    },
    Route {
        method: HttpMethod::Get,
        path: "/v1/fleet/sessions",
        summary: "Lists the sessions of all clients, the first by a figure; for admins",
        request: Request::FleetSessions,
        answers: &[(200, Some("FleetSessions"))],
        refusals: &[&[Code::AdminOnly, Code::InvalidField]],
    },
    Route {
        method: HttpMethod::Delete,
        path: "/v1/fleet/sessions/{digest}",
        summary: "Closes a session of any client; for admins",
        request: Request::SessionDigest,
        answers: &[(204, None)],
        refusals: &[ID, UNKNOWN, AGENT, &[Code::AdminOnly]],
    },
    Route {
        method: HttpMethod::Post,
        path: "/v1/fleet/sessions/{digest}/demote",
        summary: "Demotes a session of any client; for admins",
        request: Request::SessionDigest,
        answers: &[(204, None)],
        refusals: &[ID, AGENT, DEMOTION, &[Code::AdminOnly]],
    },
    Route {
        method: HttpMethod::Get,
        path: "/v1/placements/{turn}",
        summary: "Shows why a turn went to its worker; for admins",
        request: Request::TurnId,
        answers: &[(200, Some("Placements"))],
        refusals: &[ID, &[Code::AdminOnly, Code::PlacementUnknown]],
    },
    Route {
        method: HttpMethod::Get,
        path: PATH,
        summary: "Shows this document",
        request: Request::Plain,
        answers: &[(200, Some("Document"))],
        refusals: &[],
    },
];

pub(super) async fn show() -> Response {
    static DOCUMENT: LazyLock<String> = LazyLock::new(build_document);
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str()).into_response()
}

#[must_use]
pub fn build_document() -> String {
    let mut paths = PathsBuilder::new();
    for route in ROUTES {
        // A path that is there already gets the method in addition.
        paths = paths.path(route.path, PathItem::new(route.method.clone(), describe(route)));
    }
    for path in HEALTH_PATHS {
        paths = paths.path(path, PathItem::new(HttpMethod::Get, describe_health()));
    }
    let components = ComponentsBuilder::new().schemas_from_iter(schemas::all());
    let info = InfoBuilder::new()
        .title("Berth's router")
        .description(Some("The router's own routes. The engine's routes are SGLang's."))
        .version(env!("CARGO_PKG_VERSION"));
    let document = OpenApiBuilder::new()
        .info(info.build())
        .paths(paths.build())
        .components(Some(components.build()))
        .build();
    document.to_json().expect("plain fields always serialise")
}

fn describe(route: &Route) -> Operation {
    let mut operation = OperationBuilder::new().summary(Some(route.summary));
    for (status, schema) in route.answers {
        let mut answer = ResponseBuilder::new().description("success");
        if let Some(name) = schema {
            answer = answer.content("application/json", json_of(name));
        }
        operation = operation.response(status.to_string(), answer.build());
    }
    let codes = route.refusals.iter().copied().chain([COMMON_REFUSALS]).flatten();
    operation = add_refusals(operation, codes.copied());
    operation = operation.request_body(body_of(&route.request));
    for parameter in parameters_of(&route.request) {
        operation = operation.parameter(parameter);
    }
    operation.build()
}

fn describe_health() -> Operation {
    let operation = OperationBuilder::new()
        .summary(Some(
            "Whether the router can serve turns; /, /live and /liveness: whether it runs",
        ))
        .response("200", ResponseBuilder::new().description("yes").build());
    add_refusals(operation, [Code::NoWorker].into_iter()).build()
}

fn add_refusals(
    operation: OperationBuilder,
    codes: impl Iterator<Item = Code>,
) -> OperationBuilder {
    let mut by_status = std::collections::BTreeMap::<u16, Vec<&str>>::new();
    for code in codes {
        by_status.entry(code.status().as_u16()).or_default().push(code.as_str());
    }
    by_status.into_iter().fold(operation, |operation, (status, codes)| {
        let refusal = ResponseBuilder::new()
            .description(format!("refused, with one of the codes {}", codes.join(", ")))
            .content("application/json", json_of("Refusal"));
        operation.response(status.to_string(), refusal.build())
    })
}

fn body_of(request: &Request) -> Option<RequestBody> {
    let Request::Body(name, required) = request else { return None };
    let body = RequestBodyBuilder::new().content("application/json", json_of(name));
    Some(body.required(Some(required.clone())).build())
}

fn parameters_of(request: &Request) -> Vec<Parameter> {
    let parameter = |name, place, required, schema| {
        ParameterBuilder::new()
            .name(name)
            .parameter_in(place)
            .required(required)
            .schema(Some(Ref::from_schema_name(schema)))
            .build()
    };
    let in_path = |name, schema| parameter(name, ParameterIn::Path, Required::True, schema);
    let in_query = |name, schema| parameter(name, ParameterIn::Query, Required::False, schema);
    match request {
        Request::Plain | Request::Body(..) => vec![],
        Request::SessionId => vec![in_path("id", "SessionId")],
        Request::SessionDigest => vec![in_path("digest", "SessionDigest")],
        Request::FleetSessions => vec![
            in_query("sort", "SessionOrder"),
            in_query("find", "SessionFilter"),
            in_query("limit", "RecentLimit"),
        ],
        Request::TurnId => vec![in_path("turn", "TurnId")],
        Request::RecentPage => {
            vec![in_query("after", "Cursor"), in_query("limit", "RecentLimit")]
        }
        Request::RecentTurns => vec![
            in_query("after", "Cursor"),
            in_query("limit", "RecentLimit"),
            in_query("session", "SessionName"),
        ],
        Request::Page => vec![in_query("limit", "PageLimit"), in_query("after", "PageStart")],
    }
}

fn json_of(schema: &str) -> utoipa::openapi::Content {
    ContentBuilder::new().schema(Some(Ref::from_schema_name(schema))).build()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use serde_json::Value;

    use super::*;

    fn document() -> Value {
        serde_json::from_str(&build_document()).unwrap()
    }

    /// Returns the methods of each path in the document.
    fn documented() -> BTreeMap<String, BTreeSet<String>> {
        let document = document();
        let paths = document["paths"].as_object().unwrap();
        let methods = |item: &Value| item.as_object().unwrap().keys().cloned().collect();
        paths.iter().map(|(path, item)| (path.clone(), methods(item))).collect()
    }

    /// Returns the methods of each path that a source file of `http` routes by a literal.
    fn routed(source: &str) -> Vec<(String, BTreeSet<String>)> {
        let mut found = vec![];
        for line in source.lines().filter_map(|line| line.trim().strip_prefix(".route(\"")) {
            let (path, handlers) = line.split_once('"').unwrap();
            let methods = ["get", "post", "put", "patch", "delete"];
            let is_routed = |method: &&str| handlers.contains(&format!("{method}("));
            let methods = methods.into_iter().filter(is_routed).map(str::to_owned).collect();
            found.push((path.to_owned(), methods));
        }
        found
    }

    /// The beginnings of the engine's paths that the router answers itself. The engine's own
    /// document describes them.
    const ENGINE_PATHS: [&str; 6] =
        ["/abort_request", "/get_", "/model_info", "/server_info", "/v1/loads", "/v1/models"];

    #[test]
    fn every_own_route_is_in_the_document_with_its_methods() {
        let documented = documented();
        let mut own = routed(include_str!("../http.rs"));
        own.retain(|(path, _)| !ENGINE_PATHS.iter().any(|beginning| path.starts_with(beginning)));
        assert!(own.len() >= 6, "{own:?}");
        for (path, methods) in own {
            assert_eq!(documented.get(&path), Some(&methods), "{path}: add it to ROUTES");
        }
        for path in HEALTH_PATHS {
            assert!(documented.contains_key(path), "{path}");
        }
    }

    #[test]
    fn every_schema_that_is_named_exists() {
        let text = build_document();
        let document = document();
        let mut names = 0;
        for name in text.split("\"#/components/schemas/").skip(1) {
            let name = name.split('"').next().unwrap();
            assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
            names += 1;
        }
        assert!(names > 20);
    }
}
