//! Converts figures and ratios between the domain types and the wire format.
//!
//! A ratio is only written: whoever reads has the figures from which it is computed.

use super::{Error, Source, check_figure};
use crate::{
    load::{Figure, Ratio},
    v1,
};

impl TryFrom<v1::Figure> for Figure {
    type Error = Error;

    fn try_from(wire: v1::Figure) -> Result<Self, Error> {
        let source = Source::from_wire(wire.source)?;
        check_figure("a figure", wire.value)?;
        Ok(Self { value: wire.value, source, age_ms: wire.age_ms })
    }
}

impl From<Figure> for v1::Figure {
    fn from(figure: Figure) -> Self {
        Self { value: figure.value, source: figure.source.to_wire(), age_ms: figure.age_ms }
    }
}

pub(super) fn read_figure(wire: Option<v1::Figure>) -> Result<Option<Figure>, Error> {
    wire.map(Figure::try_from).transpose()
}

impl From<Ratio> for v1::Ratio {
    fn from(ratio: Ratio) -> Self {
        Self { value: ratio.value, source: ratio.source.to_wire(), age_ms: ratio.age_ms }
    }
}
