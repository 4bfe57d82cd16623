//! The kernels must give the results of the scalar reference, bit for bit, on a fake driver.

mod pools;

use cuda_fake::Fake;
use kernels::{
    cuda::{Device, LaunchShape},
    reference::SessionPages,
};
use pools::Case;
use std::collections::BTreeMap;

fn device() -> Device {
    Device::open(0, &cuda_fake::image()).expect("the driver without a GPU has a device")
}

#[test]
fn random_pools_are_answered_as_by_the_reference() {
    let _fake = Fake::load().unwrap();
    let mut device = device();
    // The default shape, and shapes small enough to divide these pools into several blocks.
    let small = |threads| LaunchShape::new(threads, 1, 3).unwrap();
    let shapes = [LaunchShape::default(), small(32), small(64), small(96)];
    for (seed, &shape) in (0..1000).zip(shapes.iter().cycle()) {
        device.set_shape(shape);
        let case = Case::random(seed);
        let (answers, expected) = (case.answers(&device).unwrap(), case.expected());
        assert_eq!(answers, expected, "seed {seed}");
    }
}

/// The comparison is only worth something if its random pools contain every kind of content.
#[test]
fn the_pools_reach_what_they_are_for() {
    let mut reached: BTreeMap<String, u32> = BTreeMap::new();
    for seed in 0..1000 {
        let case = Case::random(seed);
        let answers = case.expected();
        let sum = |part: fn(&SessionPages) -> u64| answers.sessions.iter().map(part).sum::<u64>();
        let cases = [
            ("no rows", case.rows.is_empty()),
            ("rows that moved", case.kept.len() < case.rows.len()),
            ("words that aren't full", !case.pool.npages.is_multiple_of(32)),
            ("words that are all full", case.pool.npages.is_multiple_of(32)),
            ("an empty free list", case.free.is_empty()),
            ("an empty tree", case.tree.is_empty()),
            ("bad entries", answers.bad > 0),
            ("pages shared", answers.shared.iter().any(|&word| word > 0)),
            ("aliases", answers.classified.aliased_pages > 0),
            ("double frees", answers.free.fault_counts[0] > 0),
            ("ids outside", answers.free.fault_counts[1] > 0),
            ("pages twice in the tree", answers.tree.fault_counts[0] > 0),
            ("own pages in the tree", sum(|s| s.exclusive_pages) > sum(|s| s.freed_by_close)),
            ("pages named twice", sum(|s| s.refs) > sum(|s| s.exclusive_pages)),
            ("tails", sum(|s| s.tail_tokens) > 0),
            ("digests", answers.digests.iter().any(|&digest| digest != 0)),
            ("pages without a digest", answers.digests.contains(&0)),
        ];
        let shift = (format!("pages of {} tokens", 1 << case.pool.page_shift), true);
        let classes = (0..8).zip(answers.classified.classes);
        let classes = classes.map(|(class, pages)| (format!("class {class:03b}"), pages > 0));
        let named = cases.map(|(name, is)| (name.to_owned(), is));
        for (name, is) in named.into_iter().chain(classes).chain([shift]) {
            *reached.entry(name).or_default() += u32::from(is);
        }
    }
    assert_eq!(reached.len(), 17 + 8 + 7, "{reached:?}");
    assert!(reached.values().all(|&pools| pools >= 10), "{reached:#?}");
}

#[test]
fn no_answer_depends_on_the_shape_of_a_launch() {
    let _fake = Fake::load().unwrap();
    let mut device = device();
    for seed in 1000..1020 {
        let case = Case::random(seed);
        for (threads, entries, blocks_max) in [(32, 1, 1), (256, 2, 3), (1024, 8, 1024)] {
            device.set_shape(LaunchShape::new(threads, entries, blocks_max).unwrap());
            let answers = case.answers(&device).unwrap();
            assert_eq!(answers, case.expected(), "seed {seed}, {threads} threads");
        }
    }
}
