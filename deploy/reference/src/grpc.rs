//! Makes the page of the gRPC schema between routers and agents, from its comments.

use std::collections::HashMap;

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    field_descriptor_proto::{Label, Type},
};

use crate::{
    page::{Cell, Page, Table},
    root,
};

/// The comments of a schema, by the path of what they are about.
type Comments = HashMap<Vec<i32>, String>;

/// The numbers of fields in a file's descriptor, of which paths consist.
const MESSAGES: i32 = 4;
const ENUMS: i32 = 5;
const SERVICES: i32 = 6;

pub(crate) fn page() -> anyhow::Result<Page> {
    let files = protox::compile(["agent/v1/agent.proto"], [root().join("proto/contract/schema")])?;
    let mut page = Page::new(
        "gRPC API",
        "What routers ask agents at the control port, and what agents answer. The schema is \
         `proto/contract/schema/agent/v1/agent.proto`. It only grows: a field is never renumbered, \
         and what is absent is unknown, never zero. Routers and agents of neighbouring versions \
         understand each other, see [compatibility](compatibility.md).",
    );
    for file in files.file.iter().filter(|file| file.package() == "berth.agent.v1") {
        add_file(&mut page, file);
    }
    Ok(page)
}

fn add_file(page: &mut Page, file: &FileDescriptorProto) {
    let locations = file.source_code_info.iter().flat_map(|info| &info.location);
    let comments: Comments = locations
        .map(|location| (location.path.clone(), one_line(location.leading_comments())))
        .collect();
    for (number, service) in (0..).zip(&file.service) {
        page.add_text(&format!("## Service {}", service.name()));
        let rows = (0..).zip(&service.method).map(|(method_number, method)| {
            let stream = if method.server_streaming() { "stream of " } else { "" };
            let cells = [
                format!("`{}`", method.name()),
                link(method.input_type()),
                format!("{stream}{}", link(method.output_type())),
                comment(&comments, &[SERVICES, number, 2, method_number]),
            ];
            cells.map(Cell::Made).to_vec()
        });
        let columns = &["method", "takes", "answers", "does"];
        page.add_table(Table { columns, rows: rows.collect() });
    }
    page.add_text("## Messages");
    for (number, message) in (0..).zip(&file.message_type) {
        add_message(page, message, &[MESSAGES, number], &comments);
    }
    page.add_text("## Enumerations");
    for (number, enumeration) in (0..).zip(&file.enum_type) {
        add_enum(page, enumeration, &[ENUMS, number], &comments);
    }
}

fn add_message(page: &mut Page, message: &DescriptorProto, path: &[i32], comments: &Comments) {
    let about = comment(comments, path);
    page.add_text(format!("### {}\n\n{about}", message.name()).trim_end());
    let rows = (0..).zip(&message.field).map(|(number, field)| {
        let about = comment(comments, &[path, &[2, number]].concat());
        let cells =
            [format!("`{}`", field.name()), field.number().to_string(), shown_type(field), about];
        cells.map(Cell::Made).to_vec()
    });
    let columns = &["field", "number", "type", "is"];
    page.add_table(Table { columns, rows: rows.collect() });
    for (number, inner) in (0..).zip(&message.nested_type) {
        add_message(page, inner, &[path, &[3, number]].concat(), comments);
    }
    for (number, inner) in (0..).zip(&message.enum_type) {
        add_enum(page, inner, &[path, &[4, number]].concat(), comments);
    }
}

fn add_enum(page: &mut Page, enumeration: &EnumDescriptorProto, path: &[i32], all: &Comments) {
    page.add_text(format!("### {}\n\n{}", enumeration.name(), comment(all, path)).trim_end());
    let rows = (0..).zip(&enumeration.value).map(|(number, value)| {
        let about = comment(all, &[path, &[2, number]].concat());
        let cells = [format!("`{}`", value.name()), value.number().to_string(), about];
        cells.map(Cell::Made).to_vec()
    });
    page.add_table(Table { columns: &["value", "number", "is"], rows: rows.collect() });
}

fn comment(comments: &Comments, path: &[i32]) -> String {
    comments.get(path).cloned().unwrap_or_default()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn shown_type(field: &FieldDescriptorProto) -> String {
    let name = match field.r#type() {
        Type::Message | Type::Enum => link(field.type_name()),
        plain => plain.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    match field.label() {
        Label::Repeated => format!("list of {name}"),
        _ if field.proto3_optional() => format!("optional {name}"),
        _ => name,
    }
}

fn link(type_name: &str) -> String {
    let name = type_name.rsplit('.').next().unwrap_or(type_name);
    format!("[{name}](#{})", name.to_lowercase())
}
