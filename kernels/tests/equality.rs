//! The kernels answer what the scalar reference answers, bit for bit, through the device layer and
//! a driver without a GPU.

mod pools;

use cuda_fake::Fake;
use kernels::cuda::{Device, Shape};
use pools::Case;

fn device() -> Device {
    Device::open(0, &cuda_fake::image()).expect("the driver without a GPU has a device")
}

#[test]
fn random_pools_are_answered_as_by_the_reference() {
    let _fake = Fake::load().unwrap();
    let mut device = device();
    // What is launched on a GPU, and shapes small enough to cut these pools in pieces.
    let small = |threads| Shape::new(threads, 1, 3).unwrap();
    let shapes = [Shape::default(), small(32), small(64), small(96)];
    for (seed, &shape) in (0..1000).zip(shapes.iter().cycle()) {
        device.set_shape(shape);
        let case = Case::random(seed);
        let answers = case.answers(&device).unwrap();
        assert_eq!(answers, case.expected(), "seed {seed}");
    }
}

#[test]
fn no_answer_depends_on_the_shape_of_a_launch() {
    let _fake = Fake::load().unwrap();
    let mut device = device();
    for seed in 1000..1020 {
        let case = Case::random(seed);
        for (threads, entries, blocks_max) in [(32, 1, 1), (256, 2, 3), (1024, 8, 1024)] {
            device.set_shape(Shape::new(threads, entries, blocks_max).unwrap());
            let answers = case.answers(&device).unwrap();
            assert_eq!(answers, case.expected(), "seed {seed}, {threads} threads");
        }
    }
}
