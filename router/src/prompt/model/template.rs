//! A chat template, rendered as Hugging Face's `apply_chat_template` renders it.
//!
//! That is Jinja with trimmed blocks, loop controls, Python's methods and number formats, and three
//! helper functions. The template comes with the model, but with some messages it might not end, so
//! its steps are bounded.

use minijinja::{
    Environment, Error, ErrorKind, State, UndefinedBehavior, Value, syntax::SyntaxConfig,
    value::Kwargs,
};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{
    chat::{Chat, UNIX_S},
    python,
};

/// Maximum number of steps in one rendering. A conversation of a thousand messages takes 100,000.
const STEPS_MAX: u64 = 2_000_000;
const NAME: &str = "chat";
/// The end of the year 9999, in Unix seconds.
const NOW_MAX: u64 = 253_402_300_799;
const SECONDS_PER_DAY: u64 = 86_400;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The chat template of one model.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    roles: Vec<(String, Value)>,
    takes_parts: bool,
}

impl Template {
    pub(super) fn new(source: &str, roles: &[(&str, String)]) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(STEPS_MAX));
        environment.set_formatter(|out, _, value| match value.as_str() {
            Some(text) => out.write_str(text).map_err(Error::from),
            None => out.write_str(&python::text(value)).map_err(Error::from),
        });
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", |value: Value| python::text(&value));
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, without_generation(source))?;
        Ok(Self {
            environment,
            roles: roles
                .iter()
                .map(|(role, text)| ((*role).to_owned(), Value::from(text.as_str())))
                .collect(),
            takes_parts: takes_parts(source),
        })
    }

    /// Whether the template gets a message's parts as a list. If not, it gets their text as one
    /// string.
    pub(super) fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    pub(super) fn render(&self, chat: &Chat, unix_s: u64) -> Result<String, Error> {
        let given = [
            ("messages", chat.messages()),
            ("tools", chat.tools()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(true)),
            (UNIX_S, Value::from(unix_s)),
        ];
        let given = given.into_iter().map(|(name, value)| (name.to_owned(), value));
        // The request's values come last and take precedence, as in Python's call.
        let all = self.roles.iter().cloned().chain(given).chain(chat.values());
        let context = Value::from_pairs(all);
        self.environment.get_template(NAME)?.render(context)
    }
}

/// Whether the template takes parts. SGLang decides that by its text: it does if it loops over a
/// message's content.
fn takes_parts(source: &str) -> bool {
    const MEDIA: [&str; 4] = ["image", "audio", "video", "vision"];
    if MEDIA.iter().any(|word| source.contains(word)) {
        return true;
    }
    let loops = source.split("{%").skip(1).filter_map(|tag| {
        let tag =
            tag.split("%}").next()?.trim_matches(|character| matches!(character, '-' | '+' | ' '));
        let (_, over) = tag.strip_prefix("for ")?.split_once(" in ")?;
        Some(over.replace(['\'', '"', ' '], ""))
    });
    let names = ["message", "msg", "m"];
    loops.into_iter().any(|over| {
        names.iter().any(|name| {
            [format!("{name}.content"), format!("{name}[content]")].iter().any(|content| {
                over.strip_prefix(content.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['|', '[', 'i']))
            })
        })
    })
}

/// Replaces `{% generation %}` blocks, which mark the assistant's text for training and print their
/// content unchanged.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let word =
            tag[..end].trim_matches(|character| matches!(character, '{' | '}' | '%' | '-' | ' '));
        match word {
            "generation" => out.push_str(&tag[..end].replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag[..end].replace("endgeneration", "endif")),
            _ => out.push_str(&tag[..end]),
        }
        rest = &tag[end..];
    }
    out + rest
}

#[expect(clippy::needless_pass_by_value, reason = "minijinja passes options by value")]
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let unsupported = || Error::new(ErrorKind::InvalidOperation, "unsupported tojson argument");
    if ascii == Some(true) {
        return Err(unsupported());
    }
    python::json(value, indent).ok_or_else(unsupported)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, python::text(message)))
}

/// Returns the date. It is the engine's date if both clocks are set to UTC.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let now = state.lookup(UNIX_S).and_then(|now| u64::try_from(now).ok()).unwrap_or_default();
    // The template may have changed the time; the bound limits the loop over the years.
    let now = now.min(NOW_MAX);
    let (days, seconds) = (now / SECONDS_PER_DAY, now % SECONDS_PER_DAY);
    let (year, month, day) = date(days);
    let name = MONTHS[month];
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        out.push_str(&match characters.next() {
            Some('Y') => year.to_string(),
            Some('m') => format!("{:02}", month + 1),
            Some('d') => format!("{day:02}"),
            Some('B') => name.to_owned(),
            Some('b') => name[..3].to_owned(),
            Some('H') => format!("{:02}", seconds / 3600),
            Some('M') => format!("{:02}", seconds / 60 % 60),
            Some('S') => format!("{:02}", seconds % 60),
            Some('%') => "%".to_owned(),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "unsupported date format")),
        });
    }
    Ok(out)
}

/// Returns the year, the month from 0, and the day from 1, of a number of days since 1970.
fn date(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    loop {
        let length = 365 + u64::from(leap(year));
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month, days + 1)
}
