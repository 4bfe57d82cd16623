//! Declares tables of settings by the macro [`settings!`](crate::settings!), with what it notes.
//!
//! The reference pages are written from `Config::TABLE` of each process.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

/// A type that a setting may have.
pub trait Setting {
    const VALUES: Values;
}

/// What a setting may be set to.
#[derive(Debug, Clone, Copy)]
pub enum Values {
    /// Any of a kind, in the words of the reference pages.
    Any(&'static str),
    List(&'static Values),
    /// One of these texts, each with its doc comment.
    OneOf(&'static [(&'static str, &'static str)]),
    Table(&'static Table),
}

#[derive(Debug)]
pub struct Table {
    /// The doc comment.
    pub doc: &'static str,
    pub keys: &'static [Key],
}

#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    /// The doc comment. Its first paragraph says what the key sets, the second why the default is
    /// as it is.
    pub doc: &'static str,
    pub values: Values,
}

macro_rules! kinds {
    ($($type:ty: $kind:literal;)*) => {
        $(impl Setting for $type {
            const VALUES: Values = Values::Any($kind);
        })*
    };
}

kinds! {
    bool: "`true`, `false`";
    f64: "number";
    u16: "number";
    u32: "number";
    u64: "number";
    usize: "number";
    String: "text";
    PathBuf: "path";
    SocketAddr: "`address:port`";
    BTreeMap<String, String>: "table of texts";
}

impl<T: Setting> Setting for Vec<T> {
    const VALUES: Values = Values::List(&T::VALUES);
}

/// Declares tables of a settings file, or types of settings that are one of a few texts.
///
/// A key has a doc comment, whose second paragraph is the reason for its default. A key without a
/// default has that of its type. All fields are public.
#[macro_export]
macro_rules! settings {
    ($($(#[doc = $doc:literal])* $vis:vis struct $table:ident {
        $($(#[doc = $key_doc:literal])* $key:ident: $type:ty $(= $default:expr)?;)*
    })+) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        $vis struct $table {
            $($(#[doc = $key_doc])* pub $key: $type,)*
        }

        impl Default for $table {
            fn default() -> Self {
                Self { $($key: $crate::settings!(@default $($default)?)),* }
            }
        }

        impl $table {
            $vis const TABLE: &'static $crate::settings::table::Table =
                &$crate::settings::table::Table {
                    doc: concat!($($doc, "\n"),*),
                    keys: &[$($crate::settings::table::Key {
                        name: stringify!($key),
                        doc: concat!($($key_doc, "\n"),*),
                        values: <$type as $crate::settings::table::Setting>::VALUES,
                    }),*],
                };
        }

        impl $crate::settings::table::Setting for $table {
            const VALUES: $crate::settings::table::Values =
                $crate::settings::table::Values::Table(Self::TABLE);
        }
    )+};
    ($($(#[doc = $doc:literal])* $vis:vis enum $name:ident {
        $($(#[doc = $value_doc:literal])* $value:ident = $text:literal,)*
    })+) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        $vis enum $name {
            $($(#[doc = $value_doc])* #[serde(rename = $text)] $value,)*
        }

        impl $crate::settings::table::Setting for $name {
            const VALUES: $crate::settings::table::Values = $crate::settings::table::Values::OneOf(
                &[$(($text, concat!($($value_doc, "\n"),*))),*],
            );
        }
    )+};
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::parse;

    crate::settings! {
        enum Kind {
            /// The first.
            One = "one",
            Other = "other",
        }
    }

    crate::settings! {
        /// What is kept.
        ///
        /// And where.
        struct Kept {
            /// Most turns;
            /// see [`Other`].
            ///
            /// It is enough.
            turns: u32 = 5;
            /// Names.
            names: Vec<String>;
            kind: Kind = Kind::Other;
        }

        struct File {
            kept: Kept;
        }
    }

    #[test]
    fn a_table_has_its_defaults_and_refuses_other_keys() {
        let expected = Kept { turns: 5, names: vec![], kind: Kind::Other };
        assert_eq!(File::default().kept, expected);
        let (file, problems) = parse::<File>("kept.kind = \"one\"");
        assert_eq!((file.kept.kind, file.kept.turns, problems.len()), (Kind::One, 5, 0));
        for wrong in ["kept.kind = \"One\"", "kept.turn = 1", "other = 1"] {
            assert_eq!(parse::<File>(wrong).1.len(), 1, "{wrong}");
        }
    }

    #[test]
    fn the_doc_comments_of_a_table_are_known() {
        let [key] = File::TABLE.keys else { panic!("one key") };
        let Values::Table(table) = key.values else { panic!("a table") };
        assert_eq!((key.name, key.doc, table.doc), ("kept", "", " What is kept.\n\n And where.\n"));
        let [turns, names, kind] = table.keys else { panic!("three keys") };
        assert_eq!(turns.doc, " Most turns;\n see [`Other`].\n\n It is enough.\n");
        assert!(matches!(names.values, Values::List(Values::Any("text"))), "{names:?}");
        let Values::OneOf(values) = kind.values else { panic!("a few texts") };
        assert_eq!(values, [("one", " The first.\n"), ("other", "")]);
    }
}
