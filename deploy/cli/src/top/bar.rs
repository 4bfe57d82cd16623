//! Divides a KV pool's bar among the parts of the pool. Pure.

use crate::pool_parts::PoolParts;

/// The parts in their order. The character shows the part without colours too.
pub const PARTS: [(&str, char); 5] =
    [("pinned", '█'), ("locked", '▓'), ("running", '▒'), ("evictable", '░'), ("free", '·')];

/// Cells of each part, in the order of [`PARTS`]; together `width`. A part that isn't empty has a
/// cell as long as there are enough.
#[must_use]
pub fn cells(parts: &PoolParts, width: usize) -> [usize; 5] {
    let tokens = [parts.pinned, parts.locked, parts.running, parts.evictable, parts.free];
    let total = tokens.iter().map(|tokens| u128::from(*tokens)).sum::<u128>();
    if total == 0 {
        return [0, 0, 0, 0, width];
    }
    let share = |tokens: u64| u128::from(tokens) * width as u128;
    let whole = |tokens: u64| usize::try_from(share(tokens) / total).unwrap_or(width);
    let mut cells = tokens.map(|tokens| if tokens == 0 { 0 } else { whole(tokens).max(1) });
    // Too many cells, because small parts were made visible: the largest part gives.
    while cells.iter().sum::<usize>() > width {
        let largest = (0..5).max_by_key(|part| cells[*part]).unwrap_or(0);
        cells[largest] -= 1;
    }
    // Too few, because shares were rounded down: the part with the largest remainder takes.
    while cells.iter().sum::<usize>() < width {
        let remainder =
            |part: &usize| share(tokens[*part]).saturating_sub(cells[*part] as u128 * total);
        let next = (0..5).max_by_key(remainder).unwrap_or(4);
        cells[next] += 1;
    }
    cells
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_small_part_is_visible_and_an_unknown_pool_is_free() {
        let parts = PoolParts { pinned: 1, free: 999_999, ..PoolParts::default() };
        assert_eq!(cells(&parts, 10), [1, 0, 0, 0, 9]);
        assert_eq!(cells(&PoolParts::default(), 10), [0, 0, 0, 0, 10]);
        let half = PoolParts { pinned: 50, evictable: 50, ..PoolParts::default() };
        assert_eq!(cells(&half, 10), [5, 0, 0, 5, 0]);
    }

    proptest! {
        #[test]
        fn the_bar_is_always_as_wide_as_its_room(
            pinned: u64, locked: u64, running: u64, evictable: u64, free: u64,
            width in 0_usize..300,
        ) {
            let parts = PoolParts { pinned, locked, running, evictable, free };
            prop_assert_eq!(cells(&parts, width).iter().sum::<usize>(), width);
        }
    }
}
