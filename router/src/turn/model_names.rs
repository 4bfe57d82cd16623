//! Finds the model that a name means: an engine's own name, an alias, a pattern or the default.
//!
//! All later steps use the real name, so that a turn gets the workers, the tokenizer and the
//! adapter of the real name. The engine takes any name and answers with it. So the name in the body
//! stays, unless the engine would read an adapter from it, or lack one. Pure.

use contract::{
    body::{self, Object},
    load::EngineFacts,
};

use crate::config::tables::ModelsTable;

/// SGLang's own protocol has this default for a client that was given no name.
const UNNAMED_MODEL: &str = "default";

/// Longer names fit no alias: comparing takes time in proportion to the length, with each pattern.
/// Real names have dozens of bytes.
const NAME_BYTES_MAX: usize = 256;

#[derive(Debug)]
pub(crate) struct ModelNames {
    /// Each with the real name. Names come before patterns; of these, the one with most characters
    /// comes first.
    aliases: Vec<(String, String)>,
    default: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RealModel {
    pub(crate) name: String,
    /// Whether the body must get this name, because it or the client's name has an adapter.
    pub(super) is_sent: bool,
}

impl ModelNames {
    pub(crate) fn new(table: &ModelsTable) -> Self {
        let mut aliases: Vec<(String, String)> = table.aliases.clone().into_iter().collect();
        let literal_bytes = |name: &str| name.bytes().filter(|byte| *byte != b'*').count();
        aliases.sort_by_key(|(name, _)| (name.contains('*'), usize::MAX - literal_bytes(name)));
        Self { aliases, default: Some(table.default.clone()).filter(|name| !name.is_empty()) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.aliases.is_empty() && self.default.is_none()
    }

    pub(crate) fn listed(&self) -> impl Iterator<Item = (&str, &str)> {
        let names = self.aliases.iter().filter(|(name, _)| !name.contains('*'));
        names.map(|(name, model)| (name.as_str(), model.as_str()))
    }

    /// `None` if an engine serves the name itself, or if it stands for nothing.
    pub(crate) fn resolve<'a>(
        &self,
        name: &str,
        engines: &(impl Iterator<Item = &'a EngineFacts> + Clone),
    ) -> Option<RealModel> {
        let is_served = |name: &str| engines.clone().any(|engine| engine.serves(name));
        // `:adapter` means any model.
        if self.is_empty() || name.starts_with(':') || is_served(name) {
            return None;
        }
        let with_base = |(base, adapter): (&str, &str)| {
            if is_served(base) {
                // The model is real, and doesn't have the adapter: nothing else may answer.
                return Some(None);
            }
            self.alias(base).map(|model| Some(format!("{model}:{adapter}")))
        };
        let real = match self.alias(name) {
            Some(model) => Some(model.to_owned()),
            None => match name.split_once(':').and_then(with_base) {
                Some(with_adapter) => with_adapter,
                None => self.default.clone(),
            },
        };
        let is_model = |name: &String| engines.clone().any(|engine| engine.models.contains(name));
        real.map(|real| RealModel { is_sent: name.contains(':') || !is_model(&real), name: real })
    }

    fn alias(&self, name: &str) -> Option<&str> {
        let could_fit = name.len() <= NAME_BYTES_MAX;
        let mut aliases = self.aliases.iter().filter(|_| could_fit);
        let fitting = aliases.find(|(alias, _)| fits(alias.as_bytes(), name.as_bytes()));
        fitting.map(|(_, model)| model.as_str())
    }
}

impl RealModel {
    pub(super) fn put_into(&self, object: &Object<'_>) -> Vec<u8> {
        let name = serde_json::Value::from(self.name.as_str());
        body::assemble(object.bytes(), &object.rewrite(&["model"]), &format!("\"model\":{name}"))
    }
}

pub(super) fn model_member(object: &Object<'_>) -> Option<String> {
    // SGLang's clients send this name if they are given none.
    let is_name = |name: &String| !name.is_empty() && name != UNNAMED_MODEL;
    text_member(object, "model").filter(is_name)
}

pub(super) fn with_adapter(object: &Object<'_>, model: Option<String>) -> Option<String> {
    let adapter = text_member(object, "lora_path").filter(|name| !name.is_empty());
    match (model, adapter) {
        (model, None) => model,
        // In the engine, an adapter in the model's name comes before `lora_path`.
        (Some(model), Some(_)) if model.contains(':') => Some(model),
        (model, Some(adapter)) => Some(format!("{}:{adapter}", model.unwrap_or_default())),
    }
}

/// A value of another type counts as absent. The engine reports it.
fn text_member(object: &Object<'_>, key: &str) -> Option<String> {
    serde_json::from_str(object.get(key)?.get()).ok()
}

/// In a pattern, `*` stands for any characters but a colon.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut seen) = (0, 0);
    // What follows the last star in the pattern, and where the name goes on after what it stands
    // for. If the rest doesn't fit, the star takes one byte more. No earlier star need do that.
    let mut star: Option<(usize, usize)> = None;
    while seen < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, seen));
            }
            Some(byte) if *byte == name[seen] => (at, seen) = (at + 1, seen + 1),
            _ => match star {
                Some((rest, end)) if name[end] != b':' => {
                    (at, seen) = (rest, end + 1);
                    star = Some((rest, end + 1));
                }
                _ => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::description;

    fn engine(models: &[&str], adapters: &[&str]) -> EngineFacts {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let facts = description("a", 1, 1).engine;
        EngineFacts { models: owned(models), adapters: Some(owned(adapters)), ..facts }
    }

    fn names(aliases: &[(&str, &str)], default: &str) -> ModelNames {
        let aliases = aliases.iter().map(|(name, model)| ((*name).to_owned(), (*model).to_owned()));
        ModelNames::new(&ModelsTable { default: default.to_owned(), aliases: aliases.collect() })
    }

    #[test]
    fn a_name_stands_for_the_model_that_fits_it_best_and_a_real_one_for_itself() {
        let engines = [engine(&["qwen"], &["sql"]), engine(&["m:8b"], &[])];
        let aliases = [
            ("claude-*", "qwen"),
            ("claude-haiku-*", "m:8b"),
            ("claude-haiku-4-5", "qwen:sql"),
            ("*:20b", "qwen"),
            ("qwen", "m:8b"),
            ("gone", "nowhere"),
        ];
        let all = names(&aliases, "");
        for (name, real, is_sent) in [
            ("claude-opus-5-5", "qwen", false),
            ("claude-haiku-4-6", "m:8b", false),
            ("claude-haiku-4-5", "qwen:sql", true),
            ("claude-opus:sql", "qwen:sql", true),
            // It isn't loaded: the answer must not come from the model without it.
            ("claude-opus:go", "qwen:go", true),
            ("gpt-oss:20b", "qwen", true),
            ("gone", "nowhere", true),
        ] {
            let expected = RealModel { name: real.to_owned(), is_sent };
            assert_eq!(all.resolve(name, &engines.iter()), Some(expected), "{name}");
        }
        for real in ["qwen", "m:8b", "qwen:sql", "qwen:go", ":sql", ":go", "other", "xclaude-a"] {
            assert_eq!(all.resolve(real, &engines.iter()), None, "{real}");
        }
        let with_default = names(&aliases, "qwen");
        let default = |is_sent| Some(RealModel { name: "qwen".to_owned(), is_sent });
        assert_eq!(with_default.resolve("other", &engines.iter()), default(false));
        assert_eq!(with_default.resolve("other:free", &engines.iter()), default(true));
        let long = "x".repeat(1 << 20);
        assert_eq!(with_default.resolve(&long, &engines.iter()), default(false));
        assert_eq!(with_default.resolve("qwen:go", &engines.iter()), None, "a missing adapter");
        assert!(names(&[], "").is_empty() && !names(&[], "qwen").is_empty());
        let listed: Vec<_> = all.listed().map(|(name, _)| name).collect();
        assert_eq!(listed, ["claude-haiku-4-5", "gone", "qwen"]);
    }

    #[test]
    fn a_star_stands_for_any_characters_but_a_colon() {
        let fits = |pattern: &str, name: &str| fits(pattern.as_bytes(), name.as_bytes());
        for (pattern, name) in [
            ("*", ""),
            ("*", "a/b"),
            ("a*", "a"),
            ("*b*b", "abab"),
            ("a**c", "abc"),
            ("*:*", "a:b"),
        ] {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("", "a"), ("a", "ab"), ("a*", "ba"), ("*", "a:b"), ("a*c", "a:c"), ("*b*c", "ab")]
        {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn the_engine_gets_the_real_name_once() {
        let real = RealModel { name: "q\"n:sql".to_owned(), is_sent: true };
        let object = Object::parse(br#"{"model":"a","n":1,"model":"b"}"#).unwrap();
        let body = String::from_utf8(real.put_into(&object)).unwrap();
        assert_eq!(body, r#"{"n":1,"model":"q\"n:sql"}"#);
    }
}
