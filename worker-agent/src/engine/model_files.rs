//! Finds the model files by which the engine tokenizes, and reads them for routers.
//!
//! With these files, a router computes the same token ids as the engine. The contents aren't kept
//! in memory: they are read when a router fetches them. If the engine builds prompts in a way that
//! no chat template describes, the template is left out, and routers can tokenize text, but not
//! messages.

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

use contract::{
    load::ModelFiles,
    model_files::{
        BYTES_MAX, CHAT_TEMPLATE, FilesHasher, PART_BYTES_MAX, TOKENIZER, TOKENIZER_CONFIG,
    },
    v1::ModelFilePart,
};
use serde_json::Value;

const TEMPLATE_BYTES_MAX: u64 = 4 << 20;

/// SGLang builds these models' prompts by its own code. A path matches that contains the first text
/// and, anywhere after it, the second one.
const BUILTIN_PROMPT_PATHS: [(&str, &str); 13] = [
    ("moss", "vl"),
    ("internvl", ""),
    ("janus", ""),
    ("vicuna", ""),
    ("llava", ""),
    ("deepseek", "vl2"),
    ("minicpm-v", ""),
    ("minicpm-o", ""),
    ("phi-4-multimodal", ""),
    ("deepseek-ocr", ""),
    ("unlimited", ""),
    ("paddleocr", ""),
    ("whisper", ""),
];
/// This must be a whole word of the path, because many paths contain `checkpoints`.
const BUILTIN_PROMPT_PATH_WORD: &str = "points";
/// SGLang builds these models' prompts by its own code, too.
const BUILTIN_PROMPT_MODEL_TYPES: [&str; 14] = [
    "internvl_chat",
    "deepseek_vl_v2",
    "multi_modality",
    "phi4mm",
    "minicpmv",
    "minicpmo",
    "moss_vl",
    "deepseek-ocr",
    "unlimited-ocr",
    "paddleocr_vl",
    "whisper",
    "deepseek_v4",
    "kimi_k3",
    "inkling",
];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the engine runs without a tokenizer")]
    NoTokenizer,
    #[error("there is no folder of the model {0:?} on this host")]
    NoFolder(String),
    #[error("{path} can't be read")]
    Read {
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    #[error("the model's files have more than {BYTES_MAX} bytes")]
    TooLarge,
    #[error("the model's files have changed; restart the engine to use them")]
    Changed,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerSource {
    /// The model's folder, or its name in the Hugging Face hub.
    pub model: String,
    tokenizer: String,
    /// The branch, tag or commit in the hub.
    revision: Option<String>,
    /// A file or a name.
    template_setting: Option<String>,
    runs_without_tokenizer: bool,
    /// Whether the engine passes default values of its own to the template.
    has_template_defaults: bool,
}

impl TokenizerSource {
    /// `None` if `/server_info` has no model path.
    #[must_use]
    pub fn from_info(info: &Value) -> Option<Self> {
        let text = |key: &str| info.get(key).and_then(Value::as_str).map(str::to_owned);
        let model = text("model_path")?;
        let defaults = info.get("default_chat_template_kwargs").and_then(Value::as_object);
        Some(Self {
            tokenizer: text("tokenizer_path").unwrap_or_else(|| model.clone()),
            model,
            revision: text("revision"),
            template_setting: text("chat_template").filter(|template| !template.is_empty()),
            runs_without_tokenizer: info.get("skip_tokenizer_init").and_then(Value::as_bool)
                == Some(true),
            has_template_defaults: defaults.is_some_and(|defaults| !defaults.is_empty()),
        })
    }

    #[must_use]
    pub fn model_folder(&self, hub_cache: Option<&Path>) -> Option<PathBuf> {
        find_folder(&self.model, self.revision.as_deref(), hub_cache)
    }
}

#[must_use]
pub fn hub_cache_folder() -> Option<PathBuf> {
    let path =
        |key: &str| std::env::var_os(key).filter(|value| !value.is_empty()).map(PathBuf::from);
    path("HF_HUB_CACHE")
        .or_else(|| Some(path("HF_HOME")?.join("hub")))
        .or_else(|| Some(path("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(path("HOME")?.join(".cache/huggingface/hub")))
}

fn find_folder(name: &str, revision: Option<&str>, hub_cache: Option<&Path>) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.is_dir() {
        return Some(path.to_owned());
    }
    let is_name_part =
        |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains('/');
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() > 2 || !parts.iter().all(|part| is_name_part(part)) {
        return None;
    }
    let model_folder = hub_cache?.join(format!("models--{}", parts.join("--")));
    let revision = revision.unwrap_or("main");
    // A branch or a tag has a file with its commit. A commit has none.
    let commit_text = std::fs::read_to_string(model_folder.join("refs").join(revision));
    let commit = commit_text.unwrap_or_else(|_| revision.to_owned());
    Some(model_folder.join("snapshots").join(commit.trim())).filter(|snapshot| snapshot.is_dir())
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFiles {
    /// The order is that of sending and hashing.
    files: Vec<(&'static str, FileContent)>,
    identity: ModelFiles,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum FileContent {
    File(PathBuf),
    /// The template can be a part of a file.
    Text(String),
}

#[derive(Debug, PartialEq, Eq)]
enum Template {
    Text(String),
    /// The reason is for an operator.
    Unsupported(&'static str),
}

impl FoundFiles {
    /// May block for long: reads all files for their hash.
    pub fn find(source: &TokenizerSource, hub_cache: Option<&Path>) -> Result<Self, Error> {
        if source.runs_without_tokenizer {
            return Err(Error::NoTokenizer);
        }
        let folder = find_folder(&source.tokenizer, source.revision.as_deref(), hub_cache)
            .ok_or_else(|| Error::NoFolder(source.tokenizer.clone()))?;
        let mut files = vec![];
        match find_template(source, &folder, hub_cache) {
            Template::Text(text) => files.push((CHAT_TEMPLATE, FileContent::Text(text))),
            Template::Unsupported(why) => {
                tracing::info!(why, "routers can't tokenize messages for this engine");
            }
        }
        files.push((TOKENIZER, FileContent::File(folder.join(TOKENIZER))));
        let config = folder.join(TOKENIZER_CONFIG);
        if config.is_file() {
            files.push((TOKENIZER_CONFIG, FileContent::File(config)));
        }
        let identity = read_files(&files, |_| true)?;
        Ok(Self { files, identity })
    }

    #[must_use]
    pub fn identity(&self) -> ModelFiles {
        self.identity
    }

    /// Stops when `take_part` returns false. Files that were read only in part count as changed.
    pub fn read(&self, take_part: impl FnMut(ModelFilePart) -> bool) -> Result<(), Error> {
        let identity = read_files(&self.files, take_part)?;
        if identity == self.identity { Ok(()) } else { Err(Error::Changed) }
    }
}

fn read_files(
    files: &[(&'static str, FileContent)],
    mut take_part: impl FnMut(ModelFilePart) -> bool,
) -> Result<ModelFiles, Error> {
    let (mut hasher, mut bytes_left) = (FilesHasher::default(), BYTES_MAX);
    for (name, content) in files {
        let (mut reader, bytes): (Box<dyn std::io::Read>, u64) = match content {
            FileContent::Text(text) => (Box::new(text.as_bytes()), text.len() as u64),
            FileContent::File(path) => {
                let file = File::open(path).map_err(read_error(path))?;
                let bytes = file.metadata().map_err(read_error(path))?.len();
                (Box::new(file.take(bytes)), bytes)
            }
        };
        bytes_left = bytes_left.checked_sub(bytes).ok_or(Error::TooLarge)?;
        hasher.begin_file(name, bytes);
        loop {
            let mut data = vec![];
            let read_result = reader.by_ref().take(PART_BYTES_MAX as u64).read_to_end(&mut data);
            read_result.map_err(read_error(Path::new(name)))?;
            if data.is_empty() {
                break;
            }
            hasher.update(&data);
            if !take_part(ModelFilePart { name: (*name).to_owned(), data }) {
                return Ok(hasher.finish());
            }
        }
    }
    Ok(hasher.finish())
}

fn read_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Read { path: path.to_owned(), source }
}

/// SGLang looks first in the engine's settings, then in the model's files.
fn find_template(
    source: &TokenizerSource,
    tokenizer_folder: &Path,
    hub_cache: Option<&Path>,
) -> Template {
    if source.has_template_defaults {
        return Template::Unsupported("the engine has default_chat_template_kwargs");
    }
    if let Some(setting) = &source.template_setting {
        let path = Path::new(setting);
        let is_jinja_file = path.extension().is_some_and(|extension| extension == "jinja");
        let text = read_small_file(path).filter(|_| is_jinja_file);
        // The engine turns the two characters `\n` in such a file into a line break.
        let text = text.map(|text| text.trim_matches('\n').replace("\\n", "\n"));
        return text.map_or(
            Template::Unsupported("--chat-template is not a local .jinja file"),
            Template::Text,
        );
    }
    let config =
        source.model_folder(hub_cache).and_then(|folder| read_json(&folder.join("config.json")));
    let model_type = config.as_ref().and_then(|config| config.get("model_type")?.as_str());
    if has_builtin_prompt(&source.model.to_lowercase())
        || model_type.is_some_and(|model_type| BUILTIN_PROMPT_MODEL_TYPES.contains(&model_type))
    {
        return Template::Unsupported("SGLang builds this model's prompts by its own rules");
    }
    let model_template = read_small_file(&tokenizer_folder.join(CHAT_TEMPLATE))
        .or_else(|| read_config_template(&read_json(&tokenizer_folder.join("chat_template.json"))?))
        .or_else(|| read_config_template(&read_json(&tokenizer_folder.join(TOKENIZER_CONFIG))?));
    model_template.map_or(Template::Unsupported("the model has no chat template"), Template::Text)
}

/// `path` is in lower case.
fn has_builtin_prompt(path: &str) -> bool {
    let mut words = path.split(|character: char| !character.is_alphanumeric() && character != '_');
    words.any(|word| word == BUILTIN_PROMPT_PATH_WORD)
        || BUILTIN_PROMPT_PATHS.iter().any(|(first, second)| {
            path.split_once(first).is_some_and(|(_, rest)| rest.contains(second))
        })
}

/// A config may have a list of templates, of which `default` counts.
fn read_config_template(config: &Value) -> Option<String> {
    let text_or_list = config.get("chat_template")?;
    let default_of_list = || {
        let templates = text_or_list.as_array()?.iter();
        let mut defaults =
            templates.filter(|template| template.get("name").is_some_and(|name| name == "default"));
        defaults.next()?.get("template")?.as_str()
    };
    text_or_list.as_str().or_else(default_of_list).map(str::to_owned)
}

fn read_json(path: &Path) -> Option<Value> {
    serde_json::from_str(&read_small_file(path)?).ok()
}

fn read_small_file(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    let mut text = String::new();
    file.take(TEMPLATE_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text).filter(|text| (text.len() as u64) < TEMPLATE_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn write(&self, name: &str, text: &str) -> &Self {
            let path = self.0.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn source(&self, rest: &Value) -> TokenizerSource {
            let mut info = json!({"model_path": self.0.path()});
            info.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            TokenizerSource::from_info(&info).unwrap()
        }

        /// The files' contents by name.
        fn files(&self, rest: &Value) -> Vec<(String, String)> {
            all(&FoundFiles::find(&self.source(rest), None).unwrap())
        }

        fn template(&self, rest: &Value) -> Option<String> {
            let files = self.files(rest);
            files.into_iter().find(|(name, _)| name == CHAT_TEMPLATE).map(|(_, text)| text)
        }
    }

    fn all(files: &FoundFiles) -> Vec<(String, String)> {
        let mut all: Vec<(String, Vec<u8>)> = vec![];
        let taken = files.read(|part| {
            assert!(part.data.len() <= PART_BYTES_MAX);
            match all.last_mut() {
                Some((name, data)) if *name == part.name => data.extend(part.data),
                _ => all.push((part.name, part.data)),
            }
            true
        });
        taken.unwrap();
        all.into_iter().map(|(name, data)| (name, String::from_utf8(data).unwrap())).collect()
    }

    #[test]
    fn files_come_in_parts_by_name_and_changed_ones_are_told() {
        let place = Place::new();
        let large = "x".repeat(2 * PART_BYTES_MAX + 7);
        let config = json!({"chat_template": "T"}).to_string();
        place.write(TOKENIZER, &large).write(TOKENIZER_CONFIG, &config);
        let files = FoundFiles::find(&place.source(&json!({})), None).unwrap();
        let pair = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        assert_eq!(
            all(&files),
            [pair(CHAT_TEMPLATE, "T"), pair(TOKENIZER, &large), pair(TOKENIZER_CONFIG, &config)]
        );
        assert_eq!(files.identity().bytes, (1 + large.len() + config.len()) as u64);
        assert_eq!(
            FoundFiles::find(&place.source(&json!({})), None).unwrap().identity(),
            files.identity()
        );
        place.write(TOKENIZER, "y");
        assert!(matches!(files.read(|_| true), Err(Error::Changed)));
    }

    #[test]
    fn the_template_is_the_one_that_the_engine_takes() {
        let place = Place::new();
        let given = place.0.path().join("given.jinja");
        place.write(TOKENIZER, "{}").write("given.jinja", "\na\\nb\n");
        assert_eq!(place.template(&json!({})), None);
        let several =
            json!([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]);
        place.write(TOKENIZER_CONFIG, &json!({"chat_template": several}).to_string());
        assert_eq!(place.template(&json!({})).as_deref(), Some("d"));
        place.write(CHAT_TEMPLATE, "own\n");
        assert_eq!(place.template(&json!({})).as_deref(), Some("own\n"));
        assert_eq!(place.template(&json!({"chat_template": given})).as_deref(), Some("a\nb"));
        for rest in [
            json!({"chat_template": "llama-2"}),
            json!({"default_chat_template_kwargs": {"enable_thinking": false}}),
        ] {
            assert_eq!(place.template(&rest), None, "{rest}");
            assert!(!place.files(&rest).is_empty(), "text needs no template");
        }
        for path in ["/points/a", "a/POINTS-1.5", "a/moss_2_vl", "llava"] {
            assert!(has_builtin_prompt(&path.to_lowercase()), "{path}");
        }
        assert!(!has_builtin_prompt("/checkpoints/moss-qwen3"));
        place.write("config.json", r#"{"model_type": "internvl_chat"}"#);
        assert_eq!(place.template(&json!({})), None);
    }

    #[test]
    fn a_name_in_the_hub_is_found_in_its_cache() {
        let place = Place::new();
        place
            .write("models--a--b/refs/main", "c0ffee")
            .write(&format!("models--a--b/snapshots/c0ffee/{TOKENIZER}"), "{}");
        let source = |info| TokenizerSource::from_info(&info).unwrap();
        let found =
            FoundFiles::find(&source(json!({"model_path": "a/b"})), Some(place.0.path())).unwrap();
        assert_eq!(all(&found).len(), 1);
        for name in ["a/c", "../b", "a/b/c", "", "nowhere"] {
            let found =
                FoundFiles::find(&source(json!({"model_path": name})), Some(place.0.path()));
            assert!(matches!(found, Err(Error::NoFolder(_))), "{name}");
        }
        let other = json!({"model_path": "a/b", "revision": "v2"});
        assert!(FoundFiles::find(&source(other), Some(place.0.path())).is_err());
        let skips = json!({"model_path": "a/b", "skip_tokenizer_init": true});
        assert!(matches!(
            FoundFiles::find(&source(skips), Some(place.0.path())),
            Err(Error::NoTokenizer)
        ));
    }
}
