//! Makes the page of the HTTP routes that the router itself answers, from its OpenAPI document.

use anyhow::Context as _;
use serde_json::Value;

use crate::page::{Cell, Page, Table};

const COLUMNS: &[&str] = &["route", "does", "takes", "answers", "refusals"];

pub(crate) fn page() -> anyhow::Result<Page> {
    let document: Value = serde_json::from_str(&router::openapi_document())?;
    let mut page = Page::new(
        "HTTP API",
        "The router's own routes, as `GET /openapi.json` describes them to programs, with the \
         form of each request and answer. [Routes](routes.md) has those of SGLang, OpenAI and \
         Anthropic clients, which the router passes on; [refusals](sessions.md#refusals) explains \
         each code.",
    );
    page.add_text("## Routes");
    let paths = document["paths"].as_object().context("the document has no paths")?;
    let mut rows = vec![];
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            rows.push(row(path, method, operation));
        }
    }
    page.add_table(Table { columns: COLUMNS, rows });
    page.add_text("## Bodies\n\nMembers that an answer may lack have a `?`.");
    let schemas = &document["components"]["schemas"];
    let rows = schemas.as_object().into_iter().flatten().map(|(name, schema)| {
        let form = shown_schema(schemas, schema);
        let cells = [format!("`{name}`"), form, text(schema, "description")];
        cells.map(Cell::Made).to_vec()
    });
    page.add_table(Table { columns: &["name", "form", "means"], rows: rows.collect() });
    Ok(page)
}

fn row(path: &str, method: &str, operation: &Value) -> Vec<Cell> {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let mut takes: Vec<String> =
        parameters.map(|parameter| format!("`{}`", text(parameter, "name"))).collect();
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    takes.extend(reference(body).map(|name| format!("body `{name}`")));
    let (mut answers, mut refusals) = (vec![], vec![]);
    for (status, answer) in operation["responses"].as_object().into_iter().flatten() {
        let codes = text(answer, "description");
        let schema = &answer["content"]["application/json"]["schema"];
        if let Some(codes) = codes.strip_prefix("refused, with one of the codes ") {
            let codes: Vec<String> = codes.split(", ").map(|code| format!("`{code}`")).collect();
            refusals.push(format!("{status}: {}", codes.join(" ")));
        } else {
            let body = reference(schema).map(|name| format!(" `{name}`"));
            answers.push(format!("{status}{}", body.unwrap_or_default()));
        }
    }
    let cells = [
        format!("`{} {path}`", method.to_uppercase()),
        text(operation, "summary"),
        takes.join(", "),
        answers.join(", "),
        refusals.join("; "),
    ];
    cells.map(Cell::Made).to_vec()
}

fn shown_schema(schemas: &Value, schema: &Value) -> String {
    if let Some(parts) = schema["allOf"].as_array() {
        let parts = parts.iter().rev().map(|part| {
            let named = reference(part).map(|name| &schemas[name]);
            shown_schema(schemas, named.unwrap_or(part))
        });
        return parts.collect::<Vec<_>>().join(", ");
    }
    let Some(members) = schema["properties"].as_object() else { return shown_type(schema) };
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let member = |(name, schema): (&String, &Value)| {
        let mark = if required.contains(&name.as_str()) { "" } else { "?" };
        format!("`{name}{mark}` {}", shown_type(schema))
    };
    members.iter().map(member).collect::<Vec<_>>().join(", ")
}

fn shown_type(schema: &Value) -> String {
    if let Some(name) = reference(schema) {
        return format!("`{name}`");
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        return choices.iter().map(shown_type).collect::<Vec<_>>().join(" or ");
    }
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        return values.join(" ");
    }
    match &schema["type"] {
        Value::String(name) if name == "array" => format!("[{}]", shown_type(&schema["items"])),
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or ")
        }
        _ => "any".to_owned(),
    }
}

/// The name of the schema to which another refers.
fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.rsplit('/').next()
}

fn text(value: &Value, member: &str) -> String {
    value[member].as_str().unwrap_or_default().to_owned()
}
