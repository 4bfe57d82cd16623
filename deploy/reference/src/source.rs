//! Reads what Rust sources say of settings: doc comments, and the reasons beside defaults.

use std::{collections::HashMap, fs, path::Path};

use anyhow::Context as _;
use syn::{Attribute, Expr, ImplItem, Item, Meta, Stmt, Type, spanned::Spanned as _};

#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub(crate) name: String,
    /// The last name of the type's path, and that of its first argument.
    pub(crate) type_name: String,
    pub(crate) element: String,
    pub(crate) doc: String,
}

#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) structs: HashMap<String, Vec<Field>>,
    /// Each variant of an enum without fields, and its doc comment.
    pub(crate) enums: HashMap<String, Vec<(String, String)>>,
    /// Why a field of a struct has its default, by struct and field.
    reasons: HashMap<(String, String), String>,
    /// The doc comments of constants.
    constants: HashMap<String, String>,
    /// The constants that are defaults, by struct and field.
    named_defaults: HashMap<(String, String), String>,
}

impl Settings {
    pub(crate) fn read(root: &Path, paths: &[&str]) -> anyhow::Result<Self> {
        let mut settings = Self::default();
        for path in paths {
            let text = fs::read_to_string(root.join(path)).with_context(|| (*path).to_owned())?;
            settings.add(&text).with_context(|| (*path).to_owned())?;
        }
        Ok(settings)
    }

    fn add(&mut self, text: &str) -> syn::Result<()> {
        let lines: Vec<&str> = text.lines().collect();
        for item in syn::parse_file(text)?.items {
            match item {
                Item::Struct(item) => {
                    let fields = item.fields.iter().filter_map(|field| {
                        let (type_name, element) = type_names(&field.ty);
                        let name = field.ident.as_ref()?.to_string();
                        Some(Field { name, type_name, element, doc: doc_of(&field.attrs) })
                    });
                    self.structs.insert(item.ident.to_string(), fields.collect());
                }
                Item::Enum(item) => {
                    let variant = |variant: &syn::Variant| {
                        (variant.ident.to_string(), doc_of(&variant.attrs))
                    };
                    let variants = item.variants.iter().map(variant).collect();
                    self.enums.insert(item.ident.to_string(), variants);
                }
                Item::Const(item) => {
                    self.constants.insert(item.ident.to_string(), doc_of(&item.attrs));
                }
                Item::Impl(item) => self.add_defaults(&item, &lines),
                _ => {}
            }
        }
        Ok(())
    }

    /// The reasons are the comments above each field.
    fn add_defaults(&mut self, item: &syn::ItemImpl, lines: &[&str]) {
        let is_default = |path: &syn::Path| path.is_ident("Default");
        if !item.trait_.as_ref().is_some_and(|(_, path, _)| is_default(path)) {
            return;
        }
        let (type_name, _) = type_names(&item.self_ty);
        for function in &item.items {
            let ImplItem::Fn(function) = function else { continue };
            let Some(Stmt::Expr(Expr::Struct(literal), _)) = function.block.stmts.last() else {
                continue;
            };
            for field in &literal.fields {
                let syn::Member::Named(name) = &field.member else { continue };
                let key = (type_name.clone(), name.to_string());
                let reason = comment_above(lines, field.span().start().line);
                if let Expr::Path(path) = &field.expr
                    && let Some(constant) = path.path.segments.last()
                {
                    self.named_defaults.insert(key.clone(), constant.ident.to_string());
                }
                self.reasons.insert(key, reason);
            }
        }
    }

    /// The comment at the default, or that of the constant.
    pub(crate) fn reason(&self, type_name: &str, field: &str) -> String {
        let key = (type_name.to_owned(), field.to_owned());
        let comment = self.reasons.get(&key).cloned().unwrap_or_default();
        if !comment.is_empty() {
            return comment;
        }
        let constant = self.named_defaults.get(&key).and_then(|name| self.constants.get(name));
        constant.cloned().unwrap_or_default()
    }
}

/// The names of a type and of its first argument, such as `Vec` and `String`.
fn type_names(ty: &Type) -> (String, String) {
    let Type::Path(path) = ty else { return Default::default() };
    let Some(last) = path.path.segments.last() else { return Default::default() };
    let element = match &last.arguments {
        syn::PathArguments::AngleBracketed(arguments) => match arguments.args.first() {
            Some(syn::GenericArgument::Type(element)) => type_names(element).0,
            _ => String::new(),
        },
        _ => String::new(),
    };
    (last.ident.to_string(), element)
}

/// The doc comments on one line, without links into the code.
pub(crate) fn doc_of(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| {
        let Meta::NameValue(doc) = &attribute.meta else { return None };
        let Expr::Lit(literal) = &doc.value else { return None };
        let syn::Lit::Str(text) = &literal.lit else { return None };
        doc.path.is_ident("doc").then(|| text.value().trim().to_owned())
    };
    let lines: Vec<String> = attributes.iter().filter_map(line).collect();
    lines.join(" ").replace("[`", "`").replace("`]", "`").trim().to_owned()
}

/// The text of the `//` comment that ends above a line. The first line is 1.
fn comment_above(lines: &[&str], line: usize) -> String {
    let above = lines.iter().take(line.saturating_sub(1)).rev();
    let comment = above.map_while(|line| line.trim_start().strip_prefix("//"));
    let mut words: Vec<&str> = comment.map(str::trim).collect();
    words.reverse();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_has_the_reason_beside_it_or_that_of_its_constant() {
        let mut settings = Settings::default();
        let text = "
            /// The default. It is enough.
            const TURNS: u32 = 5;
            struct Table {
                /// Most turns;
                /// see [`Other`].
                turns: u32,
                names: Vec<String>,
            }
            impl Default for Table {
                fn default() -> Self {
                    Self {
                        turns: TURNS,
                        // Nobody
                        // has a name.
                        names: vec![],
                    }
                }
            }
            enum Kind {
                /// The first.
                One,
            }";
        settings.add(text).expect("the text is Rust");
        assert_eq!(settings.reason("Table", "turns"), "The default. It is enough.");
        assert_eq!(settings.reason("Table", "names"), "Nobody has a name.");
        let fields = &settings.structs["Table"];
        assert_eq!(fields[0].doc, "Most turns; see `Other`.");
        assert_eq!((&*fields[1].type_name, &*fields[1].element), ("Vec", "String"));
        assert_eq!(settings.enums["Kind"], [("One".to_owned(), "The first.".to_owned())]);
    }
}
