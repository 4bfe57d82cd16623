//! Reads a request's messages and tools into the form that SGLang passes to a template.
//!
//! That form has the members that SGLang knows, in its order, with what its reader adds. Requests
//! that SGLang would treat in a special way are refused here; then the chat isn't tokenized.

use minijinja::Value;
use serde::Deserialize;

/// Name of the template variable that holds the Unix time in seconds.
pub(super) const UNIX_S: &str = "berth_unix_s";
/// Names that the template call sets itself, so that a request must not set them.
const RESERVED: [&str; 9] = [
    UNIX_S,
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
];

/// The members of a body that make up its chat, as JSON.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Request<'a> {
    pub(super) messages: &'a str,
    pub(super) tools: Option<&'a str>,
    pub(super) tool_choice: Option<&'a str>,
    pub(super) values: Option<&'a str>,
    pub(super) reasoning_effort: Option<&'a str>,
}

/// The input of a template.
#[derive(Debug)]
pub(super) struct Chat {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    values: Vec<(String, Value)>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    phase: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    /// Messages with tools of their own are not supported here.
    #[serde(default)]
    tools: Option<Value>,
    #[serde(default)]
    prefix: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Deserialize)]
struct ToolCall {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    index: Option<i64>,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    function: CalledFunction,
}

#[derive(Deserialize)]
struct CalledFunction {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<Value>,
}

#[derive(Deserialize)]
struct Tool {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    function: Value,
}

impl Request<'_> {
    /// Reads the request. Returns `None` if SGLang would refuse it, or treats it in a way not
    /// supported here.
    pub(super) fn read(&self, takes_parts: bool) -> Option<Chat> {
        let messages: Vec<Message> = serde_json::from_str(self.messages).ok()?;
        let count = messages.len();
        let messages = messages.into_iter().enumerate();
        let messages = messages
            .map(|(at, message)| message.value(takes_parts, at + 1 == count))
            .collect::<Option<_>>()?;
        Some(Chat { messages, tools: self.tools()?, values: self.values()? })
    }

    /// Returns the tools that the template sees; `Some(None)` if it sees none.
    fn tools(&self) -> Option<Option<Vec<Value>>> {
        let Some(tools) = self.tools else { return Some(None) };
        let choice: Value = match self.tool_choice {
            None => Value::from("auto"),
            Some(choice) => serde_json::from_str(choice).ok()?,
        };
        let tools: Vec<Tool> = serde_json::from_str(tools).ok()?;
        let chosen = match choice.as_str() {
            Some("none") => return Some(None),
            Some(_) => None,
            None => Some(choice.get_attr("function").ok()?.get_attr("name").ok()?),
        };
        let named = |tool: &Tool| {
            let name = tool.function.get_attr("name").ok();
            chosen.as_ref().is_none_or(|chosen| name.as_ref() == Some(chosen))
        };
        let tools: Option<Vec<Value>> = tools.into_iter().filter(named).map(Tool::value).collect();
        tools.map(|tools| Some(tools).filter(|tools| !tools.is_empty()))
    }

    /// Returns the variables that the request adds to the template's.
    fn values(&self) -> Option<Vec<(String, Value)>> {
        let mut values = vec![];
        let effort: Option<Value> =
            self.reasoning_effort.map(serde_json::from_str).transpose().ok()?;
        let given: Option<Value> = self.values.map(serde_json::from_str).transpose().ok()?;
        if let Some(given) = given {
            for key in given.try_iter().ok()? {
                let name = key.as_str()?;
                if RESERVED.contains(&name) {
                    return None;
                }
                values.push((name.to_owned(), given.get_item(&key).ok()?));
            }
        }
        let effort = values
            .iter()
            .find(|(name, _)| name == "reasoning_effort")
            .map(|(_, value)| value.clone())
            .or(effort);
        if let Some(effort) = effort {
            let thinks = effort.as_str() != Some("none");
            // Only the request's own effort sets whether to think; explicit values take precedence.
            if self.reasoning_effort.is_some() {
                for name in ["thinking", "enable_thinking"] {
                    if !values.iter().any(|(known, _)| known == name) {
                        values.push((name.to_owned(), Value::from(thinks)));
                    }
                }
            }
            values.retain(|(name, _)| name != "reasoning_effort");
            values.push(("reasoning_effort".to_owned(), effort));
        }
        Some(values)
    }
}

impl Chat {
    pub(super) fn messages(&self) -> Value {
        self.messages.iter().cloned().collect()
    }

    pub(super) fn tools(&self) -> Value {
        self.tools.as_ref().map_or(Value::from(()), |tools| tools.iter().cloned().collect())
    }

    pub(super) fn values(&self) -> impl Iterator<Item = (String, Value)> {
        self.values.iter().cloned()
    }

    /// Returns the chat with each tool's function in place of the tool.
    pub(super) fn with_bare_tools(&self) -> Self {
        let bare = |tool: &Value| tool.get_attr("function").unwrap_or_default();
        Self {
            messages: self.messages.clone(),
            tools: self.tools.as_ref().map(|tools| tools.iter().map(bare).collect()),
            values: self.values.clone(),
        }
    }
}

impl Message {
    fn value(self, takes_parts: bool, is_last: bool) -> Option<Value> {
        if self.tools.is_some() || self.prefix == Some(true) {
            return None;
        }
        let user = self.role == "user";
        let role = if user { self.role } else { self.role.to_lowercase() };
        let parts = matches!(self.content, Some(Content::Parts(_)));
        let content = match self.content {
            None if user => return None,
            None => Value::from(""),
            Some(Content::Text(text)) => Value::from(text),
            Some(Content::Parts(parts)) => {
                let texts: Option<Vec<String>> = parts.into_iter().map(Part::text).collect();
                // The parts of a tool's message are joined to one text for every template.
                if takes_parts && role != "tool" {
                    texts?.into_iter().map(text_part).collect()
                } else {
                    Value::from(texts?.join(" "))
                }
            }
        };
        if is_last && role == "assistant" && !parts {
            // SGLang presents an assistant message at the end as the user's.
            return Some(map([("role", Value::from("user")), ("content", content)]));
        }
        let mut members = vec![("role", Value::from(role))];
        let content_last = parts && takes_parts;
        if !content_last {
            members.push(("content", content.clone()));
        }
        if !user {
            let texts = [
                ("tool_call_id", self.tool_call_id),
                ("name", self.name),
                ("phase", self.phase),
                ("reasoning_content", self.reasoning_content),
            ];
            members.extend(
                texts.into_iter().filter_map(|(key, text)| Some((key, Value::from(text?)))),
            );
            let assistant = members[0].1.as_str() == Some("assistant");
            if let Some(calls) = self.tool_calls {
                let calls: Option<Vec<Value>> =
                    calls.into_iter().map(|call| call.value(assistant)).collect();
                members.push(("tool_calls", calls?.into_iter().collect()));
            }
        }
        if content_last {
            members.push(("content", content));
        }
        Some(map(members))
    }
}

impl Part {
    /// Returns the part's text; `None` for an image or anything else that isn't text.
    fn text(self) -> Option<String> {
        if self.kind == "text" { self.text } else { None }
    }
}

fn text_part(text: String) -> Value {
    map([("type", Value::from("text")), ("text", Value::from(text))])
}

impl ToolCall {
    fn value(self, of_assistant: bool) -> Option<Value> {
        let arguments = match self.function.arguments {
            // SGLang parses the arguments of an assistant's call, so that templates see an object.
            Some(text) if of_assistant && text.as_str().is_some() => {
                let read: Value = serde_json::from_str(text.as_str()?).ok()?;
                (read.kind() == minijinja::value::ValueKind::Map).then_some(read)?
            }
            arguments => arguments.unwrap_or(Value::from(())),
        };
        let function = map([("name", Value::from(self.function.name)), ("arguments", arguments)]);
        Some(map([
            ("id", Value::from(self.id)),
            ("index", Value::from(self.index)),
            ("type", Value::from(self.kind.unwrap_or_else(|| "function".to_owned()))),
            ("function", function),
        ]))
    }
}

impl Tool {
    /// Returns the tool with the members that SGLang's reader adds.
    fn value(self) -> Option<Value> {
        let known = ["description", "name", "parameters", "strict", "defer_loading"];
        let always = ["description", "name", "parameters"];
        let function = &self.function;
        let mut members: Vec<(String, Value)> = vec![];
        for key in function.try_iter().ok()? {
            let (name, value) = (key.as_str()?, function.get_item(&key).ok()?);
            if known.contains(&name) && (always.contains(&name) || !value.is_none()) {
                members.push((name.to_owned(), value));
            }
        }
        for name in always {
            if !members.iter().any(|(known, _)| known == name) {
                members.push((name.to_owned(), Value::from(())));
            }
        }
        Some(map([
            ("type", Value::from(self.kind.unwrap_or_else(|| "function".to_owned()))),
            ("function", Value::from_pairs(members)),
            ("defer_loading", Value::from(())),
        ]))
    }
}

fn map<'a>(members: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    Value::from_pairs(members)
}
