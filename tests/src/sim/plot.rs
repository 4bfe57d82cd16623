//! Draws a table: each policy's mean time to first token as a bar, with the range over the seeds.

use std::fmt::Write as _;

use super::{policy::PolicyKind, report::PolicySummary};

const BAR_HEIGHT: usize = 18;
const ROW_HEIGHT: usize = 26;
const LABEL_WIDTH: usize = 150;
const BARS_WIDTH: usize = 520;
const FIGURE_WIDTH: usize = 130;
const TOP: usize = 40;

/// Returns an SVG document. The scale is logarithmic, because policies differ by factors.
#[must_use]
pub fn svg(title: &str, summaries: &[PolicySummary]) -> String {
    let mut sorted: Vec<&PolicySummary> = summaries.iter().collect();
    sorted.sort_by(|a, b| a.ttft_ms_mean.total_cmp(&b.ttft_ms_mean));
    let least = sorted.iter().map(|one| one.ttft_ms_mean_min).fold(f64::INFINITY, f64::min);
    let most = sorted.iter().map(|one| one.ttft_ms_mean_max).fold(1.0, f64::max);
    // The scale starts at half of the least value, so that the best policy still has a bar.
    let floor = (least / 2.0).max(0.1);
    let x = |ms: f64| {
        let share = (ms.max(floor) / floor).ln() / (most / floor).ln().max(f64::EPSILON);
        LABEL_WIDTH as f64 + share * BARS_WIDTH as f64
    };
    let (width, height) =
        (LABEL_WIDTH + BARS_WIDTH + FIGURE_WIDTH, TOP + ROW_HEIGHT * sorted.len() + 10);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"24\" font-size=\"15\">{title}</text>\n"
    );
    for (row, one) in sorted.iter().enumerate() {
        let top = TOP + row * ROW_HEIGHT;
        let (line, middle) = (top + 14, top + BAR_HEIGHT / 2);
        let colour = match one.name {
            PolicyKind::Berth => "#1f77b4",
            PolicyKind::Ideal => "#9ecae1",
            _ => "#bbbbbb",
        };
        let (start, end) = (x(floor), x(one.ttft_ms_mean));
        let (from, to) = (x(one.ttft_ms_mean_min), x(one.ttft_ms_mean_max));
        let _ = write!(
            text,
            "<text x=\"{}\" y=\"{line}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{start:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\" \
             fill=\"{colour}\"/>\n\
             <line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle}\" y2=\"{middle}\" \
             stroke=\"black\"/>\n\
             <text x=\"{:.1}\" y=\"{line}\">{:.0} ms, hit {:.3}</text>\n",
            LABEL_WIDTH - 8,
            one.name.name(),
            end - start,
            to + 6.0,
            one.ttft_ms_mean,
            one.token_hit_ratio,
        );
    }
    text.push_str("</svg>\n");
    text
}
