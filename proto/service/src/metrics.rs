//! Declares the metrics of both processes, and registers them.
//!
//! A registry leaves out a metric that has labels and no figure yet. For the page of metrics, a
//! [`Registrar`] gives each of those a figure, so that the registry tells what there can be.

use std::{fmt, hash::Hash, ops::Deref};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{
        MetricType, TypedMetric,
        counter::Counter,
        family::{Family, MetricConstructor},
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::{Metric, Registry, Unit},
};

/// Declares a struct of metrics. Its clones share the same values, and its `new` registers them.
///
/// The comment above a metric is its help. In Prometheus, the unit ends the metric's name. What
/// makes the metric, if not its default, is after the comma. Parts come last: types with such a
/// `new`.
#[macro_export]
macro_rules! metrics {
    (@make) => { Default::default() };
    (@make $make:expr) => { $make };
    (
        $(#[$attribute:meta])*
        $visible:vis struct $Metrics:ident {
            $(
                $(#[doc = $help:literal])+
                $shown:vis $metric:ident: $Metric:ty
                    = $name:literal $(in $unit:literal)? $(, $make:expr)?;
            )*
            $(..$part_shown:vis $part:ident: $Part:ty;)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone)]
        $visible struct $Metrics {
            $($(#[doc = $help])+ $shown $metric: $Metric,)*
            $($part_shown $part: $Part,)*
        }

        impl $Metrics {
            $visible fn new(registry: &mut $crate::metrics::Registrar<'_>) -> Self {
                Self {
                    $($metric: registry.add(
                        $name,
                        concat!($($unit)?),
                        concat!($($help),+).trim_start(),
                        $crate::metrics!(@make $($make)?),
                    ),)*
                    $($part: <$Part>::new(registry),)*
                }
            }
        }

        /// These metrics are not registered.
        impl Default for $Metrics {
            fn default() -> Self {
                $crate::metrics::create_unregistered(Self::new)
            }
        }
    };
}

/// Registers metrics under the names that `metrics!` and collectors give them.
#[derive(Debug)]
pub struct Registrar<'a> {
    registry: &'a mut Registry,
    shows_empty: bool,
}

impl<'a> Registrar<'a> {
    pub fn new(registry: &'a mut Registry) -> Self {
        Self { registry, shows_empty: false }
    }

    /// Makes metrics visible that have no figure yet.
    #[must_use]
    pub fn show_empty(self) -> Self {
        Self { shows_empty: true, ..self }
    }

    #[must_use]
    pub fn shows_empty(&self) -> bool {
        self.shows_empty
    }

    /// An empty `unit` is none. Returns the metric.
    pub fn add<M: Series>(&mut self, name: &str, unit: &str, help: &str, metric: M) -> M {
        if self.shows_empty {
            metric.show_labels();
        }
        match to_unit(unit) {
            Some(unit) => self.registry.register_with_unit(name, help, unit, metric.clone()),
            None => self.registry.register(name, help, metric.clone()),
        }
        metric
    }

    /// Adds what makes its metrics at each scrape.
    pub fn add_collector(&mut self, collector: impl Collector) {
        self.registry.register_collector(Box::new(collector));
    }
}

/// Creates metrics that no registry shows.
pub fn create_unregistered<T>(create: impl FnOnce(&mut Registrar<'_>) -> T) -> T {
    create(&mut Registrar::new(&mut Registry::default()))
}

/// What can be registered: one figure, or one for each set of labels.
pub trait Series: Metric + Clone {
    /// Adds a figure with empty labels, if there are labels.
    fn show_labels(&self) {}
}

impl Series for Counter {}
impl Series for Histogram {}
impl<N, A> Series for Gauge<N, A> where Self: Metric {}

impl<L, M, C> Series for Family<L, M, C>
where
    Self: Metric + Clone,
    L: Clone + Default + Eq + Hash,
    C: MetricConstructor<M>,
{
    fn show_labels(&self) {
        drop(self.get_or_create(&L::default()));
    }
}

/// A metric with one label, whose values are a small fixed set.
#[derive(Debug, Clone)]
pub struct By<M> {
    label: &'static str,
    family: Family<[(&'static str, &'static str); 1], M>,
}

impl<M: Default> By<M> {
    #[must_use]
    pub fn label(label: &'static str) -> Self {
        Self::new(label, M::default)
    }
}

impl<M> By<M> {
    pub fn new(label: &'static str, create: fn() -> M) -> Self {
        Self { label, family: Family::new_with_constructor(create) }
    }

    /// Returns the metric for this value of the label. It is locked meanwhile.
    pub fn get(&self, value: &'static str) -> impl Deref<Target = M> {
        self.family.get_or_create(&[(self.label, value)])
    }
}

impl<M: EncodeMetric + TypedMetric> EncodeMetric for By<M> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> fmt::Result {
        self.family.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        self.family.metric_type()
    }

    fn is_empty(&self) -> bool {
        self.family.is_empty()
    }
}

impl<M> Series for By<M>
where
    Self: Metric + Clone,
{
    fn show_labels(&self) {
        drop(self.get(""));
    }
}

/// Writes a metric of a collector. An empty `unit` is none.
pub fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    unit: &str,
    help: &str,
    metric: &impl EncodeMetric,
) -> fmt::Result {
    let unit = to_unit(unit);
    metric.encode(encoder.encode_descriptor(name, help, unit.as_ref(), metric.metric_type())?)
}

fn to_unit(unit: &str) -> Option<Unit> {
    (!unit.is_empty()).then(|| Unit::Other(unit.to_owned()))
}

#[must_use]
pub fn gauge(value: u64) -> ConstGauge<i64> {
    ConstGauge::new(to_i64(value))
}

/// A count that is larger than a gauge can show is shown as its maximum.
#[must_use]
pub fn to_i64(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::{EncodeLabelSet, text};

    use super::*;

    #[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Labels {
        dp_rank: u32,
        state: &'static str,
    }

    crate::metrics! {
        struct Part {
            /// Time of a part
            part: Histogram = "part" in "seconds", crate::histogram::create([1.0]);
        }
    }

    crate::metrics! {
        struct Whole {
            /// Turns that have ended, each
            /// by its outcome
            turns: By<Counter> = "turns", By::label("outcome");
            /// Pages by state
            pages: Family<Labels, Gauge> = "pages";
            /// Bytes of requests
            bytes: Counter = "request" in "bytes";
            ..part: Part;
        }
    }

    fn shown(shows_empty: bool, use_metrics: fn(&Whole)) -> String {
        let (mut root, mut exposition) = (Registry::default(), String::new());
        let registrar = Registrar::new(&mut root);
        let mut registrar = if shows_empty { registrar.show_empty() } else { registrar };
        use_metrics(&Whole::new(&mut registrar));
        text::encode(&mut exposition, &root).unwrap();
        exposition
    }

    #[test]
    fn metrics_have_the_names_helps_units_and_labels_of_their_table() {
        let exposition = shown(false, |metrics| {
            metrics.turns.get("ok").inc();
            metrics.pages.get_or_create(&Labels { dp_rank: 1, state: "free" }).set(2);
            metrics.bytes.inc_by(3);
            metrics.part.part.observe(0.5);
        });
        for line in [
            "# HELP turns Turns that have ended, each by its outcome.",
            "turns_total{outcome=\"ok\"} 1",
            "pages{dp_rank=\"1\",state=\"free\"} 2",
            "# UNIT request_bytes bytes",
            "request_bytes_total 3",
            "# TYPE part_seconds histogram",
            "part_seconds_bucket{le=\"1.0\"} 1",
        ] {
            assert!(exposition.lines().any(|shown| shown == line), "{line}: {exposition}");
        }
    }

    #[test]
    fn a_metric_without_a_figure_is_shown_with_its_labels_only_if_asked_for() {
        let exposition = shown(false, |_| {});
        assert!(!exposition.contains("turns") && !exposition.contains("pages"), "{exposition}");
        let exposition = shown(true, |_| {});
        for line in ["turns_total{outcome=\"\"} 0", "pages{dp_rank=\"0\",state=\"\"} 0"] {
            assert!(exposition.lines().any(|shown| shown == line), "{line}: {exposition}");
        }
    }
}
