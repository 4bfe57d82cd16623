//! Renders a model's chat template as Hugging Face's `apply_chat_template` does.
//!
//! Hugging Face uses Jinja with trimmed blocks, loop controls, Python's methods and number formats,
//! the filter `tojson`, and the functions `raise_exception` and `strftime_now`.

use chrono::{
    DateTime,
    format::{Fixed, Item, Numeric, Pad, StrftimeItems},
};
use minijinja::{
    Environment, Error, ErrorKind, State, UndefinedBehavior, Value, syntax::SyntaxConfig,
    value::Kwargs,
};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{
    chat::{Chat, UNIX_S_VARIABLE},
    python,
};

/// A template might not end for some messages. A conversation of a thousand messages takes 100,000
/// steps.
const STEPS_MAX: u64 = 2_000_000;
const TEMPLATE_NAME: &str = "chat";

#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    special_tokens: Vec<(String, Value)>,
    takes_content_parts: bool,
}

impl Template {
    pub(super) fn new(source: &str, special_tokens: &[(&str, String)]) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(STEPS_MAX));
        environment.set_formatter(|out, _, value| match value.as_str() {
            Some(text) => out.write_str(text).map_err(Error::from),
            None => out.write_str(&python::format_str(value)).map_err(Error::from),
        });
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", |value: Value| python::format_str(&value));
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(TEMPLATE_NAME, without_generation_tags(source))?;
        Ok(Self {
            environment,
            special_tokens: special_tokens
                .iter()
                .map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str())))
                .collect(),
            takes_content_parts: takes_content_parts(source),
        })
    }

    /// Whether the template gets a message's parts as a list. Otherwise it gets their text as one
    /// string.
    pub(super) fn takes_content_parts(&self) -> bool {
        self.takes_content_parts
    }

    pub(super) fn render(&self, chat: &Chat, unix_s: u64) -> Result<String, Error> {
        let call_variables = [
            ("messages", chat.messages()),
            ("tools", chat.tools()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(true)),
            (UNIX_S_VARIABLE, Value::from(unix_s)),
        ];
        let call_variables =
            call_variables.into_iter().map(|(name, value)| (name.to_owned(), value));
        // Of equal names the last counts. So the request's variables take precedence, as in Python.
        let variables =
            self.special_tokens.iter().cloned().chain(call_variables).chain(chat.variables());
        let context = Value::from_pairs(variables);
        self.environment.get_template(TEMPLATE_NAME)?.render(context)
    }
}

/// Decided as SGLang decides it: the template's text names a medium, or has a loop over a message's
/// content.
fn takes_content_parts(source: &str) -> bool {
    const MEDIA: [&str; 4] = ["image", "audio", "video", "vision"];
    if MEDIA.iter().any(|word| source.contains(word)) {
        return true;
    }
    let looped_expressions = source.split("{%").skip(1).filter_map(|tag| {
        let tag =
            tag.split("%}").next()?.trim_matches(|character| matches!(character, '-' | '+' | ' '));
        let (_, expression) = tag.strip_prefix("for ")?.split_once(" in ")?;
        Some(expression.replace(['\'', '"', ' '], ""))
    });
    let names = ["message", "msg", "m"];
    looped_expressions.into_iter().any(|expression| {
        names.iter().any(|name| {
            [format!("{name}.content"), format!("{name}[content]")].iter().any(|content| {
                expression
                    .strip_prefix(content.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['|', '[', 'i']))
            })
        })
    })
}

/// `{% generation %}` marks the assistant's text for training and prints it unchanged. minijinja
/// doesn't know it, so `{% if true %}` takes its place.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut unread = source;
    while let Some(tag_start) = unread.find("{%") {
        let (before, tag) = unread.split_at(tag_start);
        out.push_str(before);
        let tag_bytes = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let tag_word = tag[..tag_bytes]
            .trim_matches(|character| matches!(character, '{' | '}' | '%' | '-' | ' '));
        match tag_word {
            "generation" => out.push_str(&tag[..tag_bytes].replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag[..tag_bytes].replace("endgeneration", "endif")),
            _ => out.push_str(&tag[..tag_bytes]),
        }
        unread = &tag[tag_bytes..];
    }
    out + unread
}

#[expect(clippy::needless_pass_by_value, reason = "minijinja passes options by value")]
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let is_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let unsupported = || Error::new(ErrorKind::InvalidOperation, "unsupported tojson argument");
    if is_ascii == Some(true) {
        return Err(unsupported());
    }
    python::format_json(value, indent).ok_or_else(unsupported)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, python::format_str(message)))
}

/// In UTC: what the engine prints if its clock is set to UTC.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let unsupported = || Error::new(ErrorKind::InvalidOperation, "unsupported date format");
    let unix_s = state.lookup(UNIX_S_VARIABLE).and_then(|now| i64::try_from(now).ok());
    let now = DateTime::from_timestamp(unix_s.unwrap_or_default(), 0).ok_or_else(unsupported)?;
    let items = StrftimeItems::new(format).parse().map_err(|_| unsupported())?;
    if !items.iter().all(is_same_in_python) {
        return Err(unsupported());
    }
    Ok(now.format_with_items(items.iter()).to_string())
}

/// How Python writes some other parts of a date depends on its locale, time zone or C library.
fn is_same_in_python(item: &Item<'_>) -> bool {
    use Numeric::{Day, Hour, Minute, Month, Second, Year};
    matches!(
        item,
        Item::Literal(_)
            | Item::Space(_)
            | Item::Numeric(Year | Month | Day | Hour | Minute | Second, Pad::Zero)
            | Item::Fixed(Fixed::ShortMonthName | Fixed::LongMonthName)
    )
}
