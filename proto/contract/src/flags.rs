//! Reads true and false in a request's body as the engine reads them.
//!
//! Where Berth decides by a flag, it must read the same: else a turn runs in another way than Berth
//! counts on. SGLang's models of pydantic take more than `true` and `false`.

use serde_json::value::RawValue;

/// What pydantic's lax mode takes besides the constants, in lower case.
const TRUE: [&str; 6] = ["1", "on", "t", "true", "y", "yes"];
const FALSE: [&str; 6] = ["0", "off", "f", "false", "n", "no"];

/// The engine refuses such a value, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is neither true nor false")]
pub struct NotAFlag;

/// An absent member and `null` are false.
pub fn read_flag(value: Option<&RawValue>) -> Result<bool, NotAFlag> {
    let Some(text) = value.map(RawValue::get) else { return Ok(false) };
    match text {
        "true" => Ok(true),
        "false" | "null" => Ok(false),
        text if text.starts_with('"') => {
            let word = serde_json::from_str::<String>(text).map_err(|_| NotAFlag)?;
            let word = word.to_ascii_lowercase();
            let is_in = |words: &[&str]| words.contains(&word.as_str());
            if is_in(&TRUE) { Ok(true) } else { is_in(&FALSE).then_some(false).ok_or(NotAFlag) }
        }
        text => match text.parse::<f64>() {
            Ok(1.0) => Ok(true),
            Ok(0.0) => Ok(false),
            _ => Err(NotAFlag),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_read_as_pydantic_reads_it() {
        let read = |text: &str| read_flag(Some(&RawValue::from_string(text.to_owned()).unwrap()));
        for text in ["true", "1", "1.0", "1e0", r#""true""#, r#""On""#, r#""tru\u0065""#, r#""y""#]
        {
            assert_eq!(read(text), Ok(true), "{text}");
        }
        for text in ["false", "null", "0", "0.0", "-0", r#""F""#, r#""off""#, r#""NO""#] {
            assert_eq!(read(text), Ok(false), "{text}");
        }
        for text in ["2", "1.5", "[]", "{}", "[true]", r#""""#, r#"" true""#, r#""1.0""#, r#""ja""#]
        {
            assert_eq!(read(text), Err(NotAFlag), "{text}");
        }
        assert_eq!(read_flag(None), Ok(false));
    }
}
