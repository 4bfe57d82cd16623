//! Reads traces from disk: a folder of conversations, or a file of lines, compressed or not.
//!
//! The content decides the trace form, and the first bytes show compression. Names matter only for
//! `.json` files, which hold one record over several lines. In a folder, only files named as JSON
//! are read.

use crate::trace::{Conversation, Form, Trace};
use crate::{texts, wire};
use flate2::read::MultiGzDecoder;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bound of a record. The longest published conversations are below 64 MiB of JSON.
const RECORD_BYTES_MAX: u64 = 256 << 20;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Why a trace can't be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file can't be read.
    #[error("{}: cannot be read", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A record is invalid.
    #[error("{}:{line}: bad record", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong with the record.
        source: Box<wire::Error>,
    },
    /// A record is longer than the bound, and longer than any published one.
    #[error("{}:{line}: record is longer than {RECORD_BYTES_MAX} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// The trace has no conversation and no request.
    #[error("{}: contains no conversation and no request", path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// The trace mixes records of two forms.
    #[error("{}:{line}: record of another form than those before it", path.display())]
    Mixed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
}

/// Reads the trace at `path`. The call blocks, so it is for start-up only.
pub fn read_trace(path: &Path) -> Result<Trace, Error> {
    let mut reader = Records::default();
    let read_error = |source| Error::Read { path: path.to_owned(), source };
    if path.is_dir() {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(path).map_err(read_error)? {
            let file = entry.map_err(read_error)?.path();
            if is_json(&file) || has_lines(&file) {
                files.push(file);
            }
        }
        // Sorts by name, because the order of a folder's listing depends on the file system.
        files.sort();
        for file in files {
            reader.read_file(&file)?;
        }
    } else {
        reader.read_file(path)?;
    }
    let Records { form, mut conversations, prompts, duplicates, .. } = reader;
    conversations.extend(texts::group_conversations(prompts));
    match form {
        Some(form) => Ok(Trace { form, conversations, duplicates }),
        None => Err(Error::Empty { path: path.to_owned() }),
    }
}

#[derive(Default)]
struct Records {
    form: Option<Form>,
    conversations: Vec<Conversation>,
    /// The requests of text traces, which are joined to conversations at the end.
    prompts: Vec<texts::Prompt>,
    seen: HashSet<u64>,
    duplicates: u64,
    index: u64,
}

impl Records {
    fn read_file(&mut self, path: &Path) -> Result<(), Error> {
        if is_json(path) { self.read_whole(path) } else { self.read_lines(path) }
    }

    fn read_whole(&mut self, path: &Path) -> Result<(), Error> {
        let mut text = String::new();
        open(path)?
            .take(RECORD_BYTES_MAX)
            .read_to_string(&mut text)
            .map_err(|source| Error::Read { path: path.to_owned(), source })?;
        if text.len() as u64 == RECORD_BYTES_MAX {
            return Err(Error::TooLong { path: path.to_owned(), line: 1 });
        }
        self.read_record(path, 1, &text)
    }

    fn read_lines(&mut self, path: &Path) -> Result<(), Error> {
        let mut input = open(path)?;
        let mut text = String::new();
        for line in 1.. {
            text.clear();
            let read = input
                .by_ref()
                .take(RECORD_BYTES_MAX)
                .read_line(&mut text)
                .map_err(|source| Error::Read { path: path.to_owned(), source })?;
            if read == 0 {
                break;
            }
            if read as u64 == RECORD_BYTES_MAX {
                return Err(Error::TooLong { path: path.to_owned(), line });
            }
            if !text.trim().is_empty() {
                self.read_record(path, line, &text)?;
            }
        }
        Ok(())
    }

    fn read_record(&mut self, path: &Path, line: usize, text: &str) -> Result<(), Error> {
        let wrong = |source: wire::Error| {
            // The JSON error counts lines inside a record of several lines.
            let within = match &source {
                wire::Error::Json(json) => json.line().saturating_sub(1),
                _ => 0,
            };
            let (path, source) = (path.to_owned(), Box::new(source));
            Error::Record { path, line: line + within, source }
        };
        let form = match self.form {
            Some(form) => form,
            None => wire::detect_form(text).map_err(wrong)?,
        };
        let read = match form {
            Form::Conversations => wire::parse_conversation(text, self.index).map(Some),
            Form::Requests => wire::parse_request(text, self.index).map(Some),
            Form::Prompts => texts::parse_prompt(text).map(|prompt| {
                self.prompts.push(prompt);
                None
            }),
        };
        let conversation = match read {
            Ok(conversation) => conversation,
            Err(_) if wire::detect_form(text).is_ok_and(|other| other != form) => {
                return Err(Error::Mixed { path: path.to_owned(), line });
            }
            Err(source) => return Err(wrong(source)),
        };
        self.form = Some(form);
        self.index += 1;
        let Some(conversation) = conversation else { return Ok(()) };
        // Some conversations were published twice; a copy would repeat the original's sizes and
        // times.
        if form == Form::Conversations && !self.seen.insert(fingerprint(&conversation)) {
            self.duplicates += 1;
        } else {
            self.conversations.push(conversation);
        }
        Ok(())
    }
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}

fn has_lines(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    name.trim_end_matches(".gz").ends_with(".jsonl")
}

fn open(path: &Path) -> Result<Box<dyn BufRead>, Error> {
    let opened = || -> std::io::Result<Box<dyn BufRead>> {
        let mut file = BufReader::new(std::fs::File::open(path)?);
        let packed = file.fill_buf()?.starts_with(&GZIP_MAGIC);
        Ok(if packed {
            Box::new(BufReader::new(MultiGzDecoder::new(file)))
        } else {
            Box::new(file)
        })
    };
    opened().map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// Returns a hash that is equal for conversations that differ only in their names.
fn fingerprint(conversation: &Conversation) -> u64 {
    let mut hasher = DefaultHasher::new();
    for turn in &conversation.turns {
        (turn.at, turn.prompt_tokens, turn.output_tokens, turn.blocks.runs()).hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write as _;

    const CONVERSATION: &str = r#"{"id":"a","requests":[{"t":0,"in":64,"out":1,"hash_ids":[1]}]}"#;
    const REQUEST: &str =
        r#"{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[0,4]}"#;

    fn file(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        (folder, path)
    }

    #[test]
    fn folders_lines_and_packed_lines_read_alike() {
        let other = CONVERSATION.replace("64", "65");
        let lines = format!("{CONVERSATION}\n\n{other}\n{CONVERSATION}\n");
        let (_keep, plain) = file("a.jsonl", lines.as_bytes());
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(lines.as_bytes()).unwrap();
        let (_keep2, packed) = file("a.jsonl.gz", &encoder.finish().unwrap());
        let (folder, _) = file("1.json", CONVERSATION.as_bytes());
        std::fs::write(folder.path().join("2.json"), &other).unwrap();
        std::fs::write(folder.path().join("3.json"), CONVERSATION).unwrap();
        std::fs::write(folder.path().join("README"), "not a record").unwrap();
        let read = read_trace(&plain).unwrap();
        assert_eq!((read.conversations.len(), read.duplicates), (2, 1));
        assert_eq!(read, read_trace(&packed).unwrap());
        assert_eq!(read, read_trace(folder.path()).unwrap());
    }

    #[test]
    fn requests_in_words_become_conversations_across_files() {
        let line = |session: &str, at: u32, input: &str| {
            format!(
                r#"{{"timestamp":{at},"input":"{input}","output":"o","session_id":"{session}"}}"#
            )
        };
        let (folder, _) = file("b.jsonl", line("b", 1, "one").as_bytes());
        let lines = format!("{}\n{}\n", line("a", 2, "one\\n\\ntwo"), line("a", 1, "one"));
        std::fs::write(folder.path().join("a.jsonl"), lines).unwrap();
        std::fs::write(folder.path().join("LICENSE"), "not a record").unwrap();
        let read = read_trace(folder.path()).unwrap();
        assert_eq!((read.form, read.turns(), read.edits()), (Form::Prompts, 3, 0));
        let ids: Vec<_> = read.conversations.iter().map(|one| one.id.as_str()).collect();
        assert_eq!(ids, ["a", "b"]);
        assert_eq!(read.conversations[0].words[1].text, "two");
    }

    #[test]
    fn errors_name_file_and_line() {
        let text = |lines: &str| {
            let (_keep, path) = file("t.jsonl", lines.as_bytes());
            let error = format!("{:#}", anyhow::Error::from(read_trace(&path).unwrap_err()));
            error.replace(&path.display().to_string(), "t.jsonl")
        };
        let bad = REQUEST.replace("600", "0");
        assert_eq!(
            text(&format!("{REQUEST}\n{bad}\n")),
            "t.jsonl:2: bad record: request: a prompt of 0 tokens"
        );
        let mixed = text(&format!("{REQUEST}\n{CONVERSATION}\n"));
        assert_eq!(mixed, "t.jsonl:2: record of another form than those before it");
        assert!(
            text("{\"requests\": oops}")
                .starts_with("t.jsonl:1: bad record: not a record of this form: expected")
        );
        assert_eq!(text("\n"), "t.jsonl: contains no conversation and no request");
        let missing = read_trace(Path::new("/nowhere/at/all")).unwrap_err();
        assert_eq!(missing.to_string(), "/nowhere/at/all: cannot be read");
    }
}
