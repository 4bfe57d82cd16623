//! Compares the kernels with the scalar reference, on the random pools of the kernels' own tests.

#[path = "../../../kernels/tests/pools.rs"]
mod pools;

use crate::{Options, answers::Answers, device};
use pools::Case;

const ABOUT: &str = "kernels and reference";

/// Compares every output of every kernel with the reference, bit for bit.
pub(crate) fn hold(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let device = device::open(options)?;
    let mut differ = vec![];
    for seed in 0..options.pools {
        let case = Case::random(seed);
        if case.answers(&device)? != case.expected() {
            differ.push(seed);
        }
    }
    let what = format!("{} random pools", options.pools);
    let text = if differ.is_empty() {
        "equal in every bit".to_owned()
    } else {
        format!("these seeds differ: {differ:?}")
    };
    answers.check(ABOUT, what, text, differ.is_empty());
    Ok(())
}
