//! Reads a request's messages and tools into the form that SGLang passes to a chat template.
//!
//! SGLang keeps only the members that it knows, brings them into its own order and adds defaults. A
//! template may print all of them, so this module does the same. The result is `None` for a request
//! that SGLang refuses, or treats in a way that isn't copied here.

use minijinja::Value;
use serde::Deserialize;

pub(super) const UNIX_S_VARIABLE: &str = "berth_unix_s";
/// A request must not set these, because the call of the template does.
const RESERVED_VARIABLES: [&str; 9] = [
    UNIX_S_VARIABLE,
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
];

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ChatMembers<'a> {
    pub(super) messages: &'a str,
    pub(super) tools: Option<&'a str>,
    pub(super) tool_choice: Option<&'a str>,
    /// The member `chat_template_kwargs`: variables for the template.
    pub(super) variables: Option<&'a str>,
    pub(super) reasoning_effort: Option<&'a str>,
}

#[derive(Debug)]
pub(super) struct Chat {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    variables: Vec<(String, Value)>,
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
    /// A message with its own tools isn't supported here.
    #[serde(default)]
    tools: Option<Value>,
    /// A message in which this is true isn't supported here.
    #[serde(default)]
    prefix: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Deserialize)]
struct ContentPart {
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

impl ChatMembers<'_> {
    /// `takes_content_parts`: whether the template gets the parts of a message as a list;
    /// otherwise, it gets their text as one string.
    pub(super) fn read(&self, takes_content_parts: bool) -> Option<Chat> {
        let messages: Vec<Message> = serde_json::from_str(self.messages).ok()?;
        let message_count = messages.len();
        let messages = messages.into_iter().enumerate();
        let messages = messages
            .map(|(index, message)| {
                message.into_template_value(takes_content_parts, index + 1 == message_count)
            })
            .collect::<Option<_>>()?;
        Some(Chat { messages, tools: self.tools()?, variables: self.variables()? })
    }

    /// `None` as for [`Self::read`]; `Some(None)` if the template sees no tools.
    fn tools(&self) -> Option<Option<Vec<Value>>> {
        let Some(tools) = self.tools else { return Some(None) };
        let choice: Value = match self.tool_choice {
            None => Value::from("auto"),
            Some(choice) => serde_json::from_str(choice).ok()?,
        };
        let tools: Vec<Tool> = serde_json::from_str(tools).ok()?;
        let chosen_name = match choice.as_str() {
            Some("none") => return Some(None),
            Some(_) => None,
            None => Some(choice.get_attr("function").ok()?.get_attr("name").ok()?),
        };
        let is_chosen = |tool: &Tool| {
            let name = tool.function.get_attr("name").ok();
            chosen_name.as_ref().is_none_or(|chosen| name.as_ref() == Some(chosen))
        };
        let tools: Option<Vec<Value>> =
            tools.into_iter().filter(is_chosen).map(Tool::into_template_value).collect();
        tools.map(|tools| Some(tools).filter(|tools| !tools.is_empty()))
    }

    /// `None` as for [`Self::read`].
    fn variables(&self) -> Option<Vec<(String, Value)>> {
        let mut variables = vec![];
        let request_effort: Option<Value> =
            self.reasoning_effort.map(serde_json::from_str).transpose().ok()?;
        let kwargs: Option<Value> = self.variables.map(serde_json::from_str).transpose().ok()?;
        if let Some(kwargs) = kwargs {
            for key in kwargs.try_iter().ok()? {
                let name = key.as_str()?;
                if RESERVED_VARIABLES.contains(&name) {
                    return None;
                }
                variables.push((name.to_owned(), kwargs.get_item(&key).ok()?));
            }
        }
        let effort = variables
            .iter()
            .find(|(name, _)| name == "reasoning_effort")
            .map(|(_, value)| value.clone())
            .or(request_effort);
        if let Some(effort) = effort {
            let has_thinking = effort.as_str() != Some("none");
            // A request with the member `reasoning_effort` also sets these two variables, unless it
            // gives them itself.
            if self.reasoning_effort.is_some() {
                for name in ["thinking", "enable_thinking"] {
                    if !variables.iter().any(|(other_name, _)| other_name == name) {
                        variables.push((name.to_owned(), Value::from(has_thinking)));
                    }
                }
            }
            variables.retain(|(name, _)| name != "reasoning_effort");
            variables.push(("reasoning_effort".to_owned(), effort));
        }
        Some(variables)
    }
}

impl Chat {
    pub(super) fn messages(&self) -> Value {
        self.messages.iter().cloned().collect()
    }

    pub(super) fn tools(&self) -> Value {
        self.tools.as_ref().map_or(Value::from(()), |tools| tools.iter().cloned().collect())
    }

    pub(super) fn variables(&self) -> impl Iterator<Item = (String, Value)> {
        self.variables.iter().cloned()
    }

    /// Some templates expect each tool's member `function` in the place of the tool.
    pub(super) fn with_bare_tools(&self) -> Self {
        let bare_function = |tool: &Value| tool.get_attr("function").unwrap_or_default();
        Self {
            messages: self.messages.clone(),
            tools: self.tools.as_ref().map(|tools| tools.iter().map(bare_function).collect()),
            variables: self.variables.clone(),
        }
    }
}

impl Message {
    fn into_template_value(self, takes_content_parts: bool, is_last: bool) -> Option<Value> {
        if self.tools.is_some() || self.prefix == Some(true) {
            return None;
        }
        let is_user = self.role == "user";
        let role = if is_user { self.role } else { self.role.to_lowercase() };
        let has_parts = matches!(self.content, Some(Content::Parts(_)));
        let content = match self.content {
            None if is_user => return None,
            None => Value::from(""),
            Some(Content::Text(text)) => Value::from(text),
            Some(Content::Parts(parts)) => {
                let texts: Option<Vec<String>> = parts.into_iter().map(ContentPart::text).collect();
                // SGLang joins the parts of a tool's message to one text for every template.
                if takes_content_parts && role != "tool" {
                    texts?.into_iter().map(text_part).collect()
                } else {
                    Value::from(texts?.join(" "))
                }
            }
        };
        if is_last && role == "assistant" && !has_parts {
            // SGLang gives the template an assistant message at the end as a user's message.
            return Some(object([("role", Value::from("user")), ("content", content)]));
        }
        let mut members = vec![("role", Value::from(role))];
        // In SGLang's own form, a list of parts follows the other members.
        let content_comes_last = has_parts && takes_content_parts;
        if !content_comes_last {
            members.push(("content", content.clone()));
        }
        if !is_user {
            let text_members = [
                ("tool_call_id", self.tool_call_id),
                ("name", self.name),
                ("phase", self.phase),
                ("reasoning_content", self.reasoning_content),
            ];
            members.extend(
                text_members.into_iter().filter_map(|(key, text)| Some((key, Value::from(text?)))),
            );
            let is_assistant = members[0].1.as_str() == Some("assistant");
            if let Some(calls) = self.tool_calls {
                let calls: Option<Vec<Value>> =
                    calls.into_iter().map(|call| call.into_template_value(is_assistant)).collect();
                members.push(("tool_calls", calls?.into_iter().collect()));
            }
        }
        if content_comes_last {
            members.push(("content", content));
        }
        Some(object(members))
    }
}

impl ContentPart {
    fn text(self) -> Option<String> {
        if self.kind == "text" { self.text } else { None }
    }
}

fn text_part(text: String) -> Value {
    object([("type", Value::from("text")), ("text", Value::from(text))])
}

impl ToolCall {
    fn into_template_value(self, is_assistant: bool) -> Option<Value> {
        let arguments = match self.function.arguments {
            // SGLang parses the arguments of an assistant's call, so that templates see an object.
            Some(text) if is_assistant && text.as_str().is_some() => {
                let parsed: Value = serde_json::from_str(text.as_str()?).ok()?;
                (parsed.kind() == minijinja::value::ValueKind::Map).then_some(parsed)?
            }
            arguments => arguments.unwrap_or(Value::from(())),
        };
        let function =
            object([("name", Value::from(self.function.name)), ("arguments", arguments)]);
        Some(object([
            ("id", Value::from(self.id)),
            ("index", Value::from(self.index)),
            ("type", Value::from(self.kind.unwrap_or_else(|| "function".to_owned()))),
            ("function", function),
        ]))
    }
}

impl Tool {
    /// With the members that SGLang's reader adds.
    fn into_template_value(self) -> Option<Value> {
        let known_members = ["description", "name", "parameters", "strict", "defer_loading"];
        let always_present = ["description", "name", "parameters"];
        let function = &self.function;
        let mut members: Vec<(String, Value)> = vec![];
        for key in function.try_iter().ok()? {
            let (name, value) = (key.as_str()?, function.get_item(&key).ok()?);
            if known_members.contains(&name) && (always_present.contains(&name) || !value.is_none())
            {
                members.push((name.to_owned(), value));
            }
        }
        for name in always_present {
            if !members.iter().any(|(other_name, _)| other_name == name) {
                members.push((name.to_owned(), Value::from(())));
            }
        }
        Some(object([
            ("type", Value::from(self.kind.unwrap_or_else(|| "function".to_owned()))),
            ("function", Value::from_pairs(members)),
            ("defer_loading", Value::from(())),
        ]))
    }
}

fn object<'a>(members: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    Value::from_pairs(members)
}
