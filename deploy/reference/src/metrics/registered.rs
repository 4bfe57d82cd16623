//! Finds the metrics that a source file registers or collects: name, help, type and labels.
//!
//! The reader follows what the code does by literals, `let`s and loops over arrays of tuples. A
//! call that it can't follow is an error, so that no metric is missed.

use std::collections::HashMap;

use anyhow::{Context as _, bail};
use syn::{
    Attribute, Expr, ExprCall, ExprForLoop, ExprMethodCall, ExprStruct, FnArg, GenericArgument,
    Item, Lit, Local, Member, Pat, PathArguments, Type,
    visit::{self, Visit},
};

/// As Prometheus sees it, without the prefix of the binary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Registered {
    pub(super) name: String,
    pub(super) help: String,
    /// `counter`, `gauge`, `histogram` or `info`.
    pub(super) kind: &'static str,
    /// `None`: the code makes them by a function.
    pub(super) labels: Option<Vec<String>>,
}

impl Registered {
    pub(super) fn is_of_devices(&self) -> bool {
        self.name.starts_with("gpu_")
    }
}

pub(super) fn read(text: &str) -> anyhow::Result<Vec<Registered>> {
    let mut file = syn::parse_file(text)?;
    file.items.retain(|item| !is_test(item));
    let mut reader = Reader::default();
    for item in &file.items {
        reader.add_types(item);
    }
    reader.visit_file(&file);
    match reader.errors.first() {
        Some(error) => bail!("{error}; write the metric as others are written"),
        None => Ok(reader.found),
    }
}

fn is_test(item: &Item) -> bool {
    let has_cfg_test = |attributes: &[Attribute]| {
        let is_cfg = |attribute: &&Attribute| attribute.path().is_ident("cfg");
        let is_test = |attribute: &Attribute| {
            attribute.parse_args::<syn::Ident>().is_ok_and(|argument| argument == "test")
        };
        attributes.iter().filter(is_cfg).any(is_test)
    };
    match item {
        Item::Mod(item) => has_cfg_test(&item.attrs),
        Item::Fn(item) => has_cfg_test(&item.attrs),
        _ => false,
    }
}

#[derive(Default)]
struct Reader {
    /// The label names of each struct of labels.
    label_structs: HashMap<String, Vec<String>>,
    /// The types that fields, arguments and aliases of a name have.
    types: HashMap<String, Vec<Type>>,
    /// What names stand for at the place being read.
    values: HashMap<String, Expr>,
    /// The metric in whose `encode` the place being read is.
    encoded: Option<Expr>,
    found: Vec<Registered>,
    errors: Vec<String>,
}

impl Reader {
    fn add_types(&mut self, item: &Item) {
        match item {
            Item::Struct(item) => {
                let names =
                    item.fields.iter().filter_map(|field| Some(field.ident.as_ref()?.to_string()));
                self.label_structs.insert(item.ident.to_string(), names.collect());
                for field in &item.fields {
                    if let Some(name) = &field.ident {
                        self.add_type(name.to_string(), &field.ty);
                    }
                }
            }
            Item::Type(item) => {
                self.add_type(item.ident.to_string(), &item.ty);
            }
            Item::Impl(item) => {
                let functions = item.items.iter().filter_map(|item| match item {
                    syn::ImplItem::Fn(function) => Some(function),
                    _ => None,
                });
                for argument in functions.flat_map(|function| &function.sig.inputs) {
                    let FnArg::Typed(argument) = argument else { continue };
                    if let Pat::Ident(name) = &*argument.pat {
                        self.add_type(name.ident.to_string(), &argument.ty);
                    }
                }
            }
            _ => {}
        }
    }

    fn add_type(&mut self, name: String, ty: &Type) {
        self.types.entry(name).or_default().push(ty.clone());
    }

    fn bind(&mut self, pattern: &Pat, value: &Expr) {
        match (pattern, value) {
            (Pat::Ident(name), _) => {
                self.values.insert(name.ident.to_string(), value.clone());
            }
            (Pat::Type(typed), _) => self.bind(&typed.pat, value),
            (Pat::Tuple(names), Expr::Tuple(values)) => {
                for (name, value) in names.elems.iter().zip(&values.elems) {
                    self.bind(name, value);
                }
            }
            _ => {}
        }
    }

    /// Looks through references, clones and names.
    fn resolve(&self, value: &Expr) -> Expr {
        match value {
            Expr::Reference(inner) => self.resolve(&inner.expr),
            Expr::MethodCall(call)
                if ["clone", "as_ref", "to_owned"].contains(&&*call.method.to_string()) =>
            {
                self.resolve(&call.receiver)
            }
            Expr::Path(path) => match path.path.get_ident().map(ToString::to_string) {
                Some(name) => match self.values.get(&name) {
                    Some(Expr::Path(inner)) if inner.path.is_ident(&name) => value.clone(),
                    Some(bound) => self.resolve(bound),
                    None => value.clone(),
                },
                None => value.clone(),
            },
            _ => value.clone(),
        }
    }

    fn text(&self, value: &Expr) -> Option<String> {
        match self.resolve(value) {
            Expr::Lit(literal) => match literal.lit {
                Lit::Str(text) => {
                    Some(text.value().split_whitespace().collect::<Vec<_>>().join(" "))
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// From `Unit::Seconds`, `Some("tokens")` and the like.
    fn unit(&self, value: &Expr) -> Option<String> {
        match self.resolve(value) {
            Expr::Lit(_) => self.text(value),
            Expr::Path(path) => {
                let name = path.path.segments.last()?.ident.to_string();
                (name != "None").then(|| name.to_lowercase())
            }
            Expr::Call(call) => self.unit(call.args.first()?),
            _ => None,
        }
    }

    fn kind(&self, value: &Expr) -> Option<&'static str> {
        let Expr::Path(path) = self.resolve(value) else { return None };
        kind_of(&path.path.segments.last()?.ident.to_string())
    }

    fn metric(&self, value: &Expr) -> Option<(&'static str, Vec<String>)> {
        match self.resolve(value) {
            Expr::Field(field) => match &field.member {
                Member::Named(name) => self.metric_named(&name.to_string()),
                Member::Unnamed(_) => None,
            },
            Expr::Path(path) => self.metric_named(&path.path.get_ident()?.to_string()),
            // `Family::<Labels, Gauge>::default()`, `Counter::default()`.
            Expr::Call(call) => {
                let Expr::Path(function) = &*call.func else { return None };
                let mut path = function.path.clone();
                path.segments.pop();
                path.segments.pop_punct();
                let of_call = self.metric_of(&Type::Path(syn::TypePath { qself: None, path }));
                of_call.or_else(|| {
                    let Expr::Path(name) = value else { return None };
                    self.metric_named(&name.path.get_ident()?.to_string())
                })
            }
            _ => None,
        }
    }

    fn metric_named(&self, name: &str) -> Option<(&'static str, Vec<String>)> {
        self.types.get(name)?.iter().find_map(|ty| self.metric_of(ty))
    }

    fn metric_of(&self, ty: &Type) -> Option<(&'static str, Vec<String>)> {
        let path = match ty {
            Type::Path(path) => &path.path,
            Type::Reference(reference) => return self.metric_of(&reference.elem),
            _ => return None,
        };
        let last = path.segments.last()?;
        let name = last.ident.to_string();
        if let Some(kind) = kind_of(&name) {
            return Some((kind, vec![]));
        }
        if name != "Family" {
            return self.metric_named(&name);
        }
        let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
        let mut types = arguments.args.iter().filter_map(|argument| match argument {
            GenericArgument::Type(Type::Path(ty)) => Some(ty),
            _ => None,
        });
        let labels = types.next()?.path.segments.last()?.ident.to_string();
        let (kind, _) = self.metric_of(&Type::Path(types.next()?.clone()))?;
        // Structs of other files have one label, and are named after it.
        let own = self.label_structs.get(&labels).cloned();
        let by_name = || vec![labels.trim_end_matches("Label").to_lowercase()];
        Some((kind, own.unwrap_or_else(by_name)))
    }

    fn add(
        &mut self,
        name: &str,
        help: String,
        unit: Option<String>,
        kind: &'static str,
        labels: Option<Vec<String>>,
    ) {
        let unit = unit.map(|unit| format!("_{unit}")).unwrap_or_default();
        let end = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        self.found.push(Registered { name: format!("{name}{unit}{end}"), help, kind, labels });
    }

    /// Adds the metric of `register(name, help, metric)`, with a unit before the metric or without.
    fn add_registered(&mut self, call: &ExprMethodCall) -> anyhow::Result<()> {
        let arguments: Vec<&Expr> = call.args.iter().collect();
        let (name, help) =
            (self.text(arguments[0]).context("name")?, self.text(arguments[1]).context("help")?);
        let unit = if arguments.len() == 4 { self.unit(arguments[2]) } else { None };
        let metric = arguments[arguments.len() - 1];
        let (kind, labels) = self.metric(metric).with_context(|| format!("type of {name}"))?;
        self.add(&name, help, unit, kind, Some(labels));
        Ok(())
    }

    /// Adds the metric of `encode_descriptor(name, help, unit, type)`.
    fn add_collected(&mut self, call: &ExprMethodCall) -> anyhow::Result<()> {
        let arguments: Vec<&Expr> = call.args.iter().collect();
        let name = self.text(arguments[0]).context("name")?;
        let help = self.text(arguments[1]).context("help")?;
        let unit = self.unit(arguments[2]);
        let kind = self.kind(arguments[3]).with_context(|| format!("type of {name}"))?;
        let labels = self.encoded.clone().and_then(|metric| Some(self.metric(&metric)?.1));
        self.add(&name, help, unit, kind, Some(labels.unwrap_or_default()));
        Ok(())
    }

    /// Adds an entry of a table of metrics, if all of it is literal.
    fn add_listed(&mut self, name: &Expr, help: &Expr, unit: Option<&Expr>, kind: &'static str) {
        let (Some(name), Some(help)) = (self.text(name), self.text(help)) else { return };
        let unit = unit.and_then(|unit| self.unit(unit));
        self.add(&name, help, unit, kind, None);
    }

    fn note(&mut self, result: anyhow::Result<()>) {
        self.errors.extend(result.err().map(|error| format!("a metric without a plain {error:#}")));
    }
}

fn kind_of(name: &str) -> Option<&'static str> {
    match name {
        "Counter" | "ConstCounter" => Some("counter"),
        "Gauge" | "ConstGauge" => Some("gauge"),
        "Histogram" => Some("histogram"),
        "Info" => Some("info"),
        _ => None,
    }
}

/// Whether a name is that of a table's entry, whose metrics are added where they are listed.
fn is_listed(name: &Expr) -> bool {
    match name {
        Expr::Unary(unary) => is_listed(&unary.expr),
        Expr::Path(path) => path.path.is_ident("name"),
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&Item::Mod(item.clone())) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if let Some(init) = &local.init {
            self.bind(&local.pat, &init.expr);
        }
        visit::visit_local(self, local);
    }

    fn visit_expr_for_loop(&mut self, each: &'ast ExprForLoop) {
        let Expr::Array(list) = &*each.expr else { return visit::visit_expr_for_loop(self, each) };
        for value in &list.elems {
            self.bind(&each.pat, value);
            self.visit_block(&each.body);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        let method = call.method.to_string();
        let result = match (method.as_str(), call.args.len()) {
            ("register", 3) | ("register_with_unit", 4) | ("encode_descriptor", 4)
                if is_listed(&call.args[0]) && self.text(&call.args[0]).is_none() =>
            {
                Ok(())
            }
            ("register", 3) | ("register_with_unit", 4) => self.add_registered(call),
            ("encode_descriptor", 4) => self.add_collected(call),
            _ => Ok(()),
        };
        self.note(result);
        let before = self.encoded.take();
        if method == "encode" {
            self.encoded = Some((*call.receiver).clone());
        } else {
            self.encoded = before.clone();
        }
        visit::visit_expr_method_call(self, call);
        self.encoded = before;
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        if let Expr::Path(function) = &*call.func
            && let Some(function) = function.path.get_ident()
            && call.args.len() >= 3
        {
            let unit = call.args.get(2).filter(|_| call.args.len() == 4);
            let tokens = syn::parse_str::<Expr>("\"tokens\"").ok();
            match function.to_string().as_str() {
                "tokens" => self.add_listed(&call.args[0], &call.args[1], tokens.as_ref(), "gauge"),
                "gauge" | "count" => self.add_listed(&call.args[0], &call.args[1], unit, "gauge"),
                "counter" => self.add_listed(&call.args[0], &call.args[1], unit, "counter"),
                _ => {}
            }
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_struct(&mut self, literal: &'ast ExprStruct) {
        let field = |name: &str| {
            let mut fields = literal.fields.iter();
            let is_it = |member: &Member| matches!(member, Member::Named(it) if it == name);
            fields.find(|field| is_it(&field.member)).map(|field| &field.expr)
        };
        if let (Some(name), Some(help)) = (field("name"), field("help")) {
            let kind = field("metric_type").and_then(|kind| self.kind(kind)).unwrap_or("gauge");
            self.add_listed(name, help, field("unit"), kind);
        }
        visit::visit_expr_struct(self, literal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
        struct Labels { port: &'static str, reason: &'static str }
        struct Metrics { closed: Family<Labels, Counter>, wait: Histogram }
        impl Metrics {
            fn new(registry: &mut Registry) -> Self {
                let help = "Connections \
                            closed";
                registry.register("closed", help, self.closed.clone());
                let wait = self.wait.clone();
                registry.register_with_unit("wait", "Time", Unit::Seconds, wait);
                self
            }
            fn encode(&self, mut encoder: DescriptorEncoder<'_>) {
                for (name, help) in [("one", "First"), ("two", "Second")] {
                    let (unit, counter) = (Unit::Bytes, MetricType::Counter);
                    encoder.encode_descriptor(name, help, Some(&unit), counter)?;
                }
                let states = Family::<Labels, Gauge>::default();
                states.encode(encoder.encode_descriptor("states", "S", None, MetricType::Gauge)?)
            }
        }
        const TABLE: [Spec; 1] = [counter("gpu_energy", "Energy", Some("joules"), |device| 0)];
        #[cfg(test)]
        mod tests { fn a() { registry.register(odd(), "x", y); } }
    "#;

    #[test]
    fn metrics_are_found_however_they_are_registered() {
        let found = read(SOURCE).expect("all can be followed");
        let shown: Vec<String> = found
            .iter()
            .map(|metric| format!("{} {} {:?}", metric.name, metric.kind, metric.labels))
            .collect();
        let labels = r#"Some(["port", "reason"])"#;
        let expected = [
            format!("closed_total counter {labels}"),
            "wait_seconds histogram Some([])".to_owned(),
            "one_bytes_total counter Some([])".to_owned(),
            "two_bytes_total counter Some([])".to_owned(),
            format!("states gauge {labels}"),
            "gpu_energy_joules_total counter None".to_owned(),
        ];
        assert_eq!(shown, expected);
        assert_eq!(found[0].help, "Connections closed");
    }

    #[test]
    fn a_metric_that_cant_be_followed_is_an_error() {
        let source = "fn a() { registry.register(odd(), \"x\", y); }";
        assert!(read(source).expect_err("a name from a function").to_string().contains("name"));
    }
}
